"""Pages that the runs write: chapter header, ledger, status, speed, front page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mhabook_lib.book.checks import show, stable
from mhabook_lib.book.claims import COLOURS
from mhabook_lib.book.results import Result, claim_places

LEDGER_WIDTHS = "9 28 13 17 17 16"
WIDE = "---\nhtml_theme.sidebar_secondary.remove: true\n---\n\n"


def table(head: list[str], rows: list[list[str]], name: str, widths: str = "auto") -> str:
    """A list-table: cells are Markdown, formulas included."""
    lines = ["```{list-table}", ":header-rows: 1", f":class: {name}", f":widths: {widths}"]
    for row in [head, *rows]:
        cells = [re.sub(r"[ \t\n]+", " ", str(cell)).strip() for cell in row]
        lines += [f"* - {cells[0]}".rstrip(), *(f"  - {cell}".rstrip() for cell in cells[1:])]
    return "\n".join([*lines, "```"])


def badge(verdict: str, count: int | None = None) -> str:
    words = verdict if count is None else f"{count} {plural(verdict, count)}"
    return f"{{bdg-{COLOURS[verdict]}}}`{words}`"


def plural(verdict: str, count: int) -> str:
    return verdict if count == 1 else verdict.replace("holds", "hold")


def badges(result: Result) -> str:
    return " ".join(badge(verdict, count) for verdict, count in result.verdict_counts())


def counted(result: Result) -> str:
    words = [f"{count} {plural(v, count)}" for v, count in result.verdict_counts()]
    return ", ".join(words)


def run_time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def facts_of_run(result: Result) -> str:
    run = result.run
    where = "a GPU" if run["device"] == "cuda" else "the CPU"
    text = f"{run_time(run['seconds'])} on {where}, {memory(run)} of memory"
    return f"{text} (profile `{run['profile']}`)"


def memory(run: dict[str, Any]) -> str:
    return f"{run['peak_memory_mb'] / 1024:.1f} GiB"


def paper_lines(result: Result, cited: str) -> list[tuple[str, str]]:
    """What the header box says, as pairs of a word and its text."""
    about = result.chapter.about
    paper = ", ".join(filter(None, [cited, f"*{about['paper_title']}*"])) if cited else ""
    if about.get("arxiv"):
        link = f"[arXiv:{about['arxiv']}](https://arxiv.org/abs/{about['arxiv']})"
        paper = f"{paper}, {link}" if paper else link
    return [
        ("Paper", paper),
        ("Covers", about.get("covers", "")),
        ("You need", about.get("prerequisites", "")),
        ("This run", facts_of_run(result)),
    ]


def header(result: Result, downloads: dict[str, str], launches: dict[str, str]) -> str:
    """The box below a chapter's title, in the book's Markdown."""
    about = result.chapter.about
    cited = f"{{cite:t}}`{about['paper']}`" if about.get("paper") else ""
    pairs = [*paper_lines(result, cited), ("Verdicts", badges(result))]
    files = [f"{{download}}`{name} <../downloads/{file}>`" for name, file in downloads.items()]
    pairs.append(("Take it along", " · ".join(files)))
    pairs.append(("Run it", " · ".join(f"[{name}]({url})" for name, url in launches.items())))
    body = [f"{word}\n: {text}\n" for word, text in pairs if text]
    opening = [":::{admonition} About this chapter", ":class: chapter-facts", ""]
    return "\n".join([*opening, *body, ":::"])


def plain_header(result: Result, cited: str) -> str:
    """The same box for readers outside the book."""
    pairs = [*paper_lines(result, cited), ("Verdicts", counted(result))]
    return "\n>\n".join(f"> **{word}.** {text}" for word, text in pairs if text)


def link(result: Result, identifier: str, place: str) -> str:
    """A link to where the chapter makes the claim."""
    return f'<a href="../notebooks/{result.slug}.html#{place}">{identifier}</a>'


def value(number: Any) -> str:
    return "" if number is None else f"`{stable(number, 4)}`"


def claim_row(result: Result, record: dict[str, Any], place: str) -> list[str]:
    """Claim, statement, verdict, measured against wanted, tolerance, control."""
    verdict = badge(record["verdict"])
    if record["condition"] and record["verdict"] != "not reproduced":
        verdict += f" {record['condition']}"
    control = record["control"]
    return [
        f"{link(result, record['id'], place)} *{record['kind']}*",
        f"{record['statement']} ({record['provenance']})",
        verdict,
        measured(record),
        tolerance(record),
        f"{control['description']}: `{show(control['measured'])}`, rejected",
    ]


def main_check(record: dict[str, Any]) -> dict[str, Any]:
    """The check that bears the claim."""
    checks = record.get("checks", [])
    return next((c for c in checks if c["name"] == record.get("check")), {})


def measured(record: dict[str, Any]) -> str:
    """`name: value ± uncertainty (wanted ...)`."""
    text = f"{record.get('check') or 'measured'}: {value(record['measured'])}"
    if record.get("uncertainty") is not None:
        text += f" ± {value(record['uncertainty'])}"
    wanted = sign(main_check(record).get("sign", "="))
    return f"{text}, wanted {wanted} {value(record['reference'])}"


def tolerance(record: dict[str, Any]) -> str:
    bound = main_check(record).get("sign") in ("<=", ">=")
    exact = "as a bound" if bound else "exact"
    allowed = f"± {value(record['tolerance'])}" if record["tolerance"] else exact
    return f"{allowed}: {record['why_tolerance']}"


def sign(symbol: str) -> str:
    return {"<=": "≤", ">=": "≥"}.get(symbol, symbol)


def ledger_page(results: list[Result]) -> str:
    rows, total = [], 0
    for result in results:
        places = claim_places(result)
        rows += [claim_row(result, r, places[r["id"]]) for r in result.claims]
        total += len(result.claims)
    held = sum(r.verdicts["reproduced"] for r in results)
    checks = sum(len(record.get("checks", [])) for r in results for record in r.claims)
    intro = (
        f"The chapters make {total} claims and test them with {checks} checks; {held} claims are "
        "reproduced as stated. Every row shows the check that bears its claim, what was measured "
        "against what, and the control: the same check on a deliberately wrong object, which must "
        "be rejected. The name of a claim leads to its place in the chapter."
    )
    head = ["Claim", "Statement", "Verdict", "Measured", "Tolerance", "Control"]
    return f"{WIDE}# Claims ledger\n\n{intro}\n\n{table(head, rows, 'ledger', LEDGER_WIDTHS)}\n"


def status_page(results: list[Result]) -> str:
    rows = [status_row(result) for result in results]
    head = ["Chapter", "Last run", "Profile", "Device", "Run time", "Memory"]
    head += ["Claims", "Checks passed", "Compared"]
    intro = (
        "Each chapter of this book was executed as follows; cells marked for comparison were run "
        "again and held against outputs accepted earlier."
    )
    seen = sorted({json.dumps(r.run["versions"], sort_keys=True) for r in results})
    packages = [[name, v] for text in seen for name, v in json.loads(text).items()]
    return "\n\n".join(
        [
            f"{WIDE}# Status",
            intro,
            table(head, rows, "status"),
            "The numbers were computed with these versions.",
            table(["Package", "Version"], packages, "versions"),
            *warnings_of(results),
        ]
    )


def status_row(result: Result) -> list[str]:
    run, check = result.run, result.check
    checks = [check for record in result.claims for check in record.get("checks", [])]
    good = check.get("passed") and check.get("run_key") == run["key"]
    cells = f"{check['compared']} cells equal" if good else "not yet"
    return [
        f"[{result.chapter.about['title']}](../notebooks/{result.slug}.ipynb)",
        run["finished"].replace("T", " ").replace("+00:00", " UTC"),
        run["profile"],
        run["device"],
        f"{run['seconds']:.0f}\N{NO-BREAK SPACE}s",
        memory(run),
        counted(result),
        f"{sum(check['passed'] for check in checks)} of {len(checks)}",
        cells,
    ]


def warnings_of(results: list[Result]) -> list[str]:
    loud = [f"{r.slug} ({len(r.run['warnings'])})" for r in results if r.run["warnings"]]
    text = "Chapters that wrote messages on their error stream, which the pages do not show: "
    return [f"{text}{', '.join(loud)}."] if loud else []


def speed_page(path: Path) -> str:
    title = f"{WIDE}# Speed"
    if not path.is_file():
        text = "No benchmark has been run for this copy of the book: `make bench`, then"
        return f"{title}\n\n{text} `make book`, fills this page.\n"
    rows = [speed_row(row) for row in json.loads(path.read_text())]
    intro = (
        "Each line sets the way this book computes against another way to the same number, side "
        "by side in one process; the ratio is the median over repeats, with its spread."
    )
    head = ["Chapter", "Task", "Size", "Here", "Other way", "Its time", "Ratio", "Errors"]
    return f"{title}\n\n{intro}\n\n{table(head, rows, 'speed')}\n"


def speed_row(row: dict[str, Any]) -> list[str]:
    errors = [row.get(name) for name in ("ours_error", "other_error")]
    errors = [f"`{stable(e, 2)}`" for e in errors if e is not None]
    spread = f" ±\N{NO-BREAK SPACE}{row['spread']:.0%}" if row.get("spread") is not None else ""
    return [
        row["chapter"],
        row["task"],
        str(row["size"]),
        duration(row["ours_s"]),
        row["other"],
        duration(row["other_s"]),
        f"{ratio(row['ratio'])}×{spread}",
        " against ".join(errors),
    ]


def ratio(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else stable(number, 2)


def duration(seconds: float) -> str:
    units = ((1, "s"), (1e3, "ms"), (1e6, "µs"))
    factor, unit = next(((f, u) for f, u in units if seconds * f >= 1), units[-1])
    return f"{stable(seconds * factor, 3)}\N{NO-BREAK SPACE}{unit}"


def cards(results: list[Result]) -> str:
    """One card a chapter for the front page."""
    lines = ["::::{grid} 1 1 2 2", ":gutter: 3", ""]
    for result in results:
        about = result.chapter.about
        lines += [f":::{{grid-item-card}} {about['title']}"]
        lines += [f":link: ../notebooks/{result.slug}", ":link-type: doc", ""]
        lines += [about.get("short", ""), "", badges(result), ":::", ""]
    return "\n".join([*lines, "::::"])


def totals(results: list[Result]) -> str:
    """One sentence with the state of the whole book."""
    claims = [record for result in results for record in result.claims]
    counts = [sum(c["verdict"] == v for c in claims) for v in COLOURS]
    pairs = zip(COLOURS, counts, strict=True)
    words = ", ".join(f"{n} {plural(v, n)}" for v, n in pairs if n)
    chapters = "one chapter" if len(results) == 1 else f"{len(results)} chapters"
    return f"In this copy {chapters} made {len(claims)} claims: {words}.\n"


def cover(result: Result) -> str:
    """Label of the front page's figure: the claims file's `cover`, or else the first one kept."""
    kept = [name for name in result.figures() if figure_file(result, name).is_file()]
    wanted = result.chapter.about.get("cover")
    return wanted if wanted in kept else next(iter(kept), "")


def figure_file(result: Result, label: str) -> Path:
    return result.folder / "figures" / f"{label}.svg"


def cover_figure(result: Result, label: str) -> str:
    figure = result.figures()[label]
    return "\n".join(
        [
            f"```{{figure}} /book/generated/{result.slug}-{label}.svg",
            f":alt: {' '.join(figure['alt'].split())}",
            ":width: 80%",
            "",
            figure.get("caption", ""),
            "```",
        ]
    )
