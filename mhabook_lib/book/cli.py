"""The command line: mhabook list | run | check | accept | build | pdf | claims | new | doctor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from mhabook_lib.book.chapters import DEVICES, PROFILES, BookError, Chapter, find_project
from mhabook_lib.book.checks import show, stable
from mhabook_lib.book.claims import COLOURS, ClaimError

RICH_COLOURS = {"success": "green", "warning": "yellow", "danger": "red"}


class Commands(TyperGroup):
    """Turns what the reader can put right into one clear line, without a traceback."""

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except (BookError, ClaimError) as error:
            typer.echo(f"mhabook: {error}", err=True)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            typer.echo("mhabook: interrupted; earlier results are as they were", err=True)
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Run, check and build the book on multi-head attention. Start with: mhabook doctor",
)

Slugs = Annotated[
    list[str] | None,
    typer.Argument(metavar="[CHAPTER]...", help="Chapters by name; all of them when left out."),
]
Force = Annotated[bool, typer.Option("--force", help="Do it even if nothing changed.")]
Jobs = Annotated[int, typer.Option(help="Chapters side by side.", min=1)]
Limit = Annotated[int, typer.Option(help="Seconds that one cell may take.", min=1)]


def one_of(*choices: str):
    def check(value: str) -> str:
        if value not in choices:
            raise typer.BadParameter(f"'{value}' is not one of {', '.join(choices)}.")
        return value

    return check


Profile = Annotated[
    str,
    typer.Option(
        help="quick: about a minute a chapter; paper: the paper's own sizes.",
        callback=one_of(*PROFILES),
    ),
]


def warn(text: str) -> None:
    typer.echo(text, err=True)


@app.command("list")
def list_chapters() -> None:
    """Show the chapters, their claims and what has been run."""
    from mhabook_lib.book.run import published_key, read_run

    table = Table("chapter", "title", "claims", "last run", box=None, header_style="bold")
    for chapter in find_project().chapters():
        facts = read_run(chapter.result("quick"))
        state = "not run yet"
        if facts:
            fresh = published_key(chapter, "quick", facts["device"]) == facts["key"]
            state = f"{facts['finished'][:10]}, {facts['seconds']:.0f} s"
            state += "" if fresh else " (out of date)"
        title = chapter.about["title"]
        table.add_row(chapter.slug, title, str(len(chapter.claim_ids)), state)
    Console().print(table)


@app.command()
def run(
    chapters: Slugs = None,
    profile: Profile = "quick",
    device: Annotated[
        str,
        typer.Option(help="auto takes CUDA where it is.", callback=one_of(*DEVICES)),
    ] = "auto",
    parameter: Annotated[
        list[str] | None,
        typer.Option(
            "-p",
            "--parameter",
            metavar="NAME=VALUE",
            help="Change a parameter of the chapter; the result goes to _build/custom.",
        ),
    ] = None,
    jobs: Jobs = 1,
    threads: Annotated[
        int | None, typer.Option(help="Threads a chapter may use; all when left out.", min=1)
    ] = None,
    time_limit: Limit = 600,
    force: Force = False,
) -> None:
    """Execute chapters. One that is up to date is not executed again."""
    from mhabook_lib.book.run import Runner, prepare, resolve_device

    selected = find_project().select(chapters)
    resolve_device(device)
    work, faults = [], []
    for chapter in selected:
        try:
            work.append(prepare(chapter, profile, device, parameter or []))
        except BookError as error:
            faults.append(str(error))
            warn(f"mhabook: {error}")
    runner = Runner(jobs=jobs, threads=threads, time_limit=time_limit, say=warn)
    outcomes = runner.run(work, force=force)
    for outcome in outcomes:
        if not outcome.failed:
            typer.echo(short(outcome.job.folder / f"{outcome.job.chapter.slug}.ipynb"))
    failed = faults + [o.message for o in outcomes if o.failed]
    if failed:
        raise BookError(f"{len(failed)} of {len(selected)} chapters failed")


def short(path: Path) -> str:
    """Relative to the current folder where that is shorter."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


@app.command()
def check(
    chapters: Slugs = None, jobs: Jobs = 1, time_limit: Limit = 600, force: Force = False
) -> None:
    """Compare the marked cells with the outputs that were accepted earlier."""
    from concurrent.futures import ThreadPoolExecutor

    from mhabook_lib.book.check import check as compare

    def as_accepted(chapter: Chapter) -> bool:
        try:
            return compare(chapter, force=force, time_limit=time_limit, say=warn)
        except BookError as error:
            warn(f"mhabook: {error}")
            return False

    selected = find_project().select(chapters)
    with ThreadPoolExecutor(jobs) as pool:
        answers = list(pool.map(as_accepted, selected))
    bad = [chapter.slug for chapter, good in zip(selected, answers, strict=True) if not good]
    if bad:
        raise BookError(f"not as accepted: {', '.join(bad)}")


@app.command()
def accept(chapters: Slugs = None) -> None:
    """Take the marked outputs of the last run as the ones to compare with from now on."""
    from mhabook_lib.book.check import accept as take

    project = find_project()
    for chapter in project.select(chapters):
        count = take(chapter)
        typer.echo(f"{short(chapter.reference)}: {count} cells accepted")


@app.command()
def build(profile: Profile = "quick", force: Force = False) -> None:
    """Build the whole book from what has been run; an unsound book replaces nothing."""
    from mhabook_lib.book.build import build as make

    site = make(find_project(), profile, force=force, say=warn)
    typer.echo(
        f"Read it:  {short(site / 'index.html')}\nServe it: python -m http.server -d {short(site)}"
    )


@app.command()
def pdf(profile: Profile = "quick") -> None:
    """Print the whole book as one PDF, with Chromium; the pages on the web do not need it."""
    from mhabook_lib.book.pdf import make_pdf

    typer.echo(short(make_pdf(find_project(), profile, say=warn)))


@app.command()
def claims(
    chapter: Annotated[str | None, typer.Argument(help="One chapter; all when left out.")] = None,
    profile: Profile = "quick",
    as_json: Annotated[bool, typer.Option("--json", help="The data instead of a table.")] = False,
) -> None:
    """Show the claims ledger: what was asserted, measured, and how the control was rejected."""
    records = [
        record
        for item in find_project().select([chapter] if chapter else None)
        for record in records_of(item, profile, bool(chapter))
    ]
    if as_json:
        typer.echo(json.dumps(records, indent=1))
        return
    table = Table("claim", "verdict", "check", "measured", "wanted", "control", box=None)
    for record in records:
        colour = RICH_COLOURS[COLOURS[record["verdict"]]]
        table.add_row(
            record["id"],
            f"[{colour}]{record['verdict']}[/]",
            record.get("check") or "",
            number(record["measured"]),
            number(record["reference"]),
            f"{show(record['control']['measured'])} rejected",
        )
    Console().print(table)


def records_of(chapter: Chapter, profile: str, required: bool) -> list[dict]:
    path = chapter.result(profile) / "claims.json"
    if path.is_file():
        return json.loads(path.read_text())
    if required:
        raise BookError(f"chapter '{chapter.slug}' has not been run: mhabook run {chapter.slug}")
    warn(f"{chapter.slug}: not run yet")
    return []


def number(value) -> str:
    return "" if value is None else stable(value, 4)


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Name of the new chapter, as in my-experiment.")],
    source: Annotated[
        str | None, typer.Option("--from", metavar="CHAPTER", help="Chapter to fork.")
    ] = None,
    title: Annotated[
        str | None, typer.Option(help="Title; made from the name when left out.")
    ] = None,
) -> None:
    """Start a chapter: a fork of an existing one, or a small template that runs at once."""
    from mhabook_lib.book.fork import new_chapter

    chapter = new_chapter(find_project(), name, source, title)
    typer.echo(
        f"{short(chapter.source)}\n{short(chapter.words_file)}\n"
        f"Next: mhabook run {name}, mhabook accept {name}, mhabook build"
    )


@app.command()
def doctor() -> None:
    """Is this machine ready for the book, and what to do where it is not."""
    from mhabook_lib.book.doctor import examine

    missing = 0
    for finding in examine():
        mark = "ok   " if finding.good else ("WRONG" if finding.essential else "note ")
        missing += not finding.good and finding.essential
        advice = f" - {finding.advice}" if finding.advice and not finding.good else ""
        typer.echo(f"{mark} {finding.name}: {finding.seen}{advice}")
    if missing:
        raise BookError(f"{missing} essential thing{'s' if missing > 1 else ''} missing")


if __name__ == "__main__":
    app()
