"""The claims ledger: what a chapter asserts, what it measured, and the control that must fail.

The words of a claim (statement, provenance, reason of the tolerance, what the control is) stand in
`mhabook_lib/chapters/<slug>.toml`; the chapter adds the numbers.

    ledger = Ledger("clustering", profile="quick", device="cpu", seed=0)
    ledger.claim("P1").below("gradient error", error, 1e-10, control=error_of_wrong_object)
    ledger.close()
"""

from __future__ import annotations

import html
import json
import os
import platform
import time
import tomllib
from collections import Counter
from dataclasses import asdict
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import numpy as np

from mhabook_lib.book import checks
from mhabook_lib.book.checks import Check, Rule, as_array, stable

REPRODUCED = "reproduced"
CONDITIONAL = "holds under a condition"
NOT_REPRODUCED = "not reproduced"
VERDICTS = (REPRODUCED, CONDITIONAL, NOT_REPRODUCED)
KINDS = ("theorem", "proposition", "figure", "extension")
COLOURS = {REPRODUCED: "success", CONDITIONAL: "warning", NOT_REPRODUCED: "danger"}
VERSIONED = ("torch", "numpy", "scipy", "matplotlib", "mpmath")


class ClaimError(ValueError):
    """The claims of a chapter are incomplete or their controls do not control."""


def chapter_words(slug: str) -> dict[str, Any]:
    """The chapter's TOML file. Raises ClaimError when there is none for this slug."""
    folder = resources.files("mhabook_lib.chapters")
    path = folder / f"{slug}.toml"
    if not path.is_file():
        names = (entry.name for entry in folder.iterdir())
        known = ", ".join(sorted(n.removesuffix(".toml") for n in names if n.endswith(".toml")))
        raise ClaimError(f"no claims file for chapter {slug!r}; known chapters: {known}")
    return tomllib.loads(path.read_text(encoding="utf-8"))


class Claim:
    """One claim; each method adds a check and returns the claim, so that checks chain.

    `control` is the same quantity measured on a deliberately wrong object, or a dictionary of
    several: the check must reject them. A claim needs at least one control. As a notebook output a
    claim is its badge.
    """

    def __init__(self, identifier: str, words: dict[str, Any]):
        self.id = identifier
        self.words = words
        self.checks: list[Check] = []

    def agrees(self, name, measured, reference, *, rtol=0.0, atol=0.0, control=None) -> Claim:
        """|measured - reference| <= atol + rtol |reference|."""
        return self._add(name, checks.agreement(reference, rtol, atol), measured, control)

    def equals(self, name, measured, reference, *, control=None) -> Claim:
        """Exactly equal: integers, booleans, words."""
        return self._add(name, checks.equality(reference), measured, control)

    def below(self, name, measured, bound, *, control=None) -> Claim:
        """measured <= bound, in every entry."""
        return self._add(name, checks.upper_bound(bound), measured, control)

    def above(self, name, measured, bound, *, control=None) -> Claim:
        """measured >= bound, in every entry."""
        return self._add(name, checks.lower_bound(bound), measured, control)

    def between(self, name, measured, low, high, *, control=None, uncertainty=None) -> Claim:
        """low <= measured <= high, in every entry."""
        return self._add(name, checks.interval(low, high), measured, control, uncertainty)

    def consistent(self, name, measured, reference, stderr, *, sigmas=4.0, control=None) -> Claim:
        """|measured - reference| <= `sigmas` standard errors."""
        rule = checks.statistical(reference, stderr, sigmas)
        return self._add(name, rule, measured, control, stderr)

    def _add(self, name: str, rule: Rule, measured, control, uncertainty=None) -> Claim:
        self.checks.append(checks.perform(name, rule, measured, control, uncertainty))
        return self

    @property
    def controls(self) -> list[Check]:
        return [check for check in self.checks if check.control_failed is not None]

    @property
    def verdict(self) -> str:
        if not self.checks or not all(check.passed for check in self.checks):
            return NOT_REPRODUCED
        return CONDITIONAL if self.words.get("condition") else REPRODUCED

    def record(self) -> dict[str, Any]:
        """The claim as it stands in claims.json, without the facts of the run."""
        failing = [check for check in self.checks if not check.passed]
        main = (failing or self.controls or self.checks or [None])[0]
        control = self.controls[0] if self.controls else None
        return {
            "id": self.id,
            "kind": self.words["kind"],
            "statement": self.words["statement"],
            "provenance": self.words["provenance"],
            "verdict": self.verdict,
            "condition": self.words.get("condition", ""),
            "check": main and main.name,
            "measured": main and main.measured,
            "uncertainty": main and main.uncertainty,
            "reference": main and main.reference,
            "tolerance": main and main.tolerance,
            "why_tolerance": self.words["why_tolerance"],
            "control": {
                "description": self.words["control"],
                "measured": control and control.control,
                "failed": bool(control) and all(check.control_failed for check in self.controls),
            },
            "checks": [asdict(check) for check in self.checks],
        }

    def __repr__(self) -> str:
        condition = f" ({self.words['condition']})" if self.verdict == CONDITIONAL else ""
        lines = [f"{self.id}: {self.verdict}{condition}"]
        return "\n".join(lines + [f"  {check.line()}" for check in self.checks])

    def _repr_html_(self) -> str:
        colour = COLOURS[self.verdict]
        badge = f'<span class="sd-badge sd-bg-{colour} sd-bg-text-{colour}">{self.verdict}</span>'
        condition = f" if {self.words['condition']}" if self.verdict == CONDITIONAL else ""
        head = f"{badge} <code>{self.id}</code>{html.escape(condition)}"
        shown = sorted(self.checks, key=lambda c: (c.passed, c.control_failed is None))
        first, *rest = [f"<li>{html.escape(check.line())}</li>" for check in shown] or [""]
        body = f"<ul>{first}</ul>"
        if rest:
            more = f"{len(rest)} more check{'s' if len(rest) > 1 else ''}"
            body += f"<details><summary>{more}</summary><ul>{''.join(rest)}</ul></details>"
        return f'<div class="mhabook-claim">{head}{body}</div>'


class Ledger:
    """All claims of one chapter run; `close` checks that none is missing and writes them.

    Files go to the folder named by the environment variable MHABOOK_OUTPUT, or else to
    `mhabook_output/<slug>` under the current folder.
    """

    def __init__(self, slug: str, *, profile: str, device: Any, seed: int):
        self.slug = slug
        self.words = chapter_words(slug)
        self.run = {"profile": profile, "device": str(device), "seed": int(seed)}
        self.folder = Path(os.environ.get("MHABOOK_OUTPUT") or Path("mhabook_output") / slug)
        self._claims: dict[str, list[Claim]] = {}
        self._started = time.perf_counter()

    @property
    def expected_ids(self) -> list[str]:
        return [f"{self.slug}.{label}" for label in self.words["claims"]]

    @property
    def claims(self) -> list[Claim]:
        """The latest version of each claim, in the order of the chapter's claims file."""
        return [self._claims[label][-1] for label in self.words["claims"] if label in self._claims]

    def claim(self, label: str) -> Claim:
        """Start the claim `label`. Raises ClaimError for a label the claims file does not list."""
        if label not in self.words["claims"]:
            known = ", ".join(self.words["claims"])
            raise ClaimError(f"chapter {self.slug!r} has no claim {label!r}; it claims {known}")
        claim = Claim(f"{self.slug}.{label}", self.words["claims"][label])
        self._claims.setdefault(label, []).append(claim)
        return claim

    def figure(self, label: str, figure, **arrays):
        """Store a figure as SVG and PNG, the plotted arrays as NPZ, and return the figure."""
        import matplotlib.pyplot as plt

        data = {name: as_array(value) for name, value in arrays.items()}
        for name, value in data.items():
            checks.finite(f"{self.slug}.{label}", f"plotted array {name!r}", value)
        folder = self.folder / "figures"
        folder.mkdir(parents=True, exist_ok=True)
        with plt.rc_context({"svg.hashsalt": f"{self.slug}.{label}"}):
            figure.savefig(folder / f"{label}.svg", metadata={"Date": None})
        figure.savefig(folder / f"{label}.png", dpi=200)
        np.savez_compressed(folder / f"{label}.npz", **data)
        plt.close(figure)
        return figure

    def records(self) -> list[dict[str, Any]]:
        """All claims with the facts of this run."""
        versions = {name: metadata.version(name) for name in VERSIONED}
        seconds = round(time.perf_counter() - self._started, 3)
        run = {**self.run, "seconds": seconds, "versions": {"python": platform.python_version()}}
        run["versions"].update(versions)
        return [{**claim.record(), **run} for claim in self.claims]

    def close(self) -> Path:
        """Write claims.json and return its path; ClaimError when the ledger is not in order."""
        records = self.records()
        problems = validate_claims(records, self.expected_ids) + self._twice()
        if problems:
            listing = "\n".join(problems)
            raise ClaimError(f"the ledger of {self.slug!r} is not in order:\n{listing}")
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "claims.json"
        path.write_text(json.dumps(records, indent=1, allow_nan=False), encoding="utf-8")
        return path

    def _twice(self) -> list[str]:
        """Labels under which two different claims were made (a cell run again is no second one)."""
        return [
            f"{self.slug}.{label}: two different claims under one ID"
            for label, versions in self._claims.items()
            if len({tuple(check.name for check in claim.checks) for claim in versions}) > 1
        ]

    def verdicts(self) -> None:
        """Print what must be the same on every machine: IDs, verdicts, numbers of checks."""
        for claim in self.claims:
            counts = f"{len(claim.checks)} checks, {len(claim.controls)} controls"
            print(f"{claim.id:<18} {claim.verdict:<24} {counts}")
        counts = Counter(claim.verdict for claim in self.claims)
        print("; ".join(f"{verdict}: {counts[verdict]}" for verdict in VERDICTS))

    def table(self) -> LedgerTable:
        """All checks with their measured values, as a table."""
        return LedgerTable(self.claims)


class LedgerTable:
    """Every check of every claim: measured value, what was wanted, the control."""

    HEAD = ("claim", "check", "measured", "wanted", "tolerance", "control")

    def __init__(self, claims: list[Claim]):
        self.rows = [
            (
                claim.id.split(".", 1)[1],
                check.name,
                stable(check.measured, 4),
                f"{check.sign} {stable(check.reference, 4)}",
                f"{check.tolerance:.2g}" if check.tolerance else "",
                "" if check.control_failed is None else checks.show(check.control),
            )
            for claim in claims
            for check in claim.checks
        ]

    def __repr__(self) -> str:
        return "\n".join(" | ".join(row) for row in (self.HEAD, *self.rows))

    def _repr_html_(self) -> str:
        def line(cells, tag):
            return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

        body = "".join(line(row, "td") for row in self.rows)
        return (
            '<div class="mhabook-table"><table>'
            f"<thead>{line(self.HEAD, 'th')}</thead><tbody>{body}</tbody></table></div>"
        )


def validate_claims(records: list[dict[str, Any]], expected_ids: list[str]) -> list[str]:
    """What is wrong with a chapter's claims data; an empty list when it is in order."""
    counts = Counter(record.get("id", "?") for record in records)
    problems = [f"{i}: missing from the claims data" for i in expected_ids if i not in counts]
    problems += [f"{i}: not a claim of this chapter" for i in counts if i not in expected_ids]
    problems += [f"{i}: appears {k} times" for i, k in counts.items() if k > 1]
    for record in records:
        problems += [f"{record.get('id', '?')}: {text}" for text in _faults(record)]
    return problems


def _faults(record: dict[str, Any]) -> list[str]:
    control = record.get("control") or {}
    faults = []
    if record.get("verdict") not in VERDICTS:
        faults.append(f"verdict {record.get('verdict')!r} is not one of {', '.join(VERDICTS)}")
    if record.get("kind") not in KINDS:
        faults.append(f"kind {record.get('kind')!r} is not one of {', '.join(KINDS)}")
    if record.get("verdict") == CONDITIONAL and not record.get("condition"):
        faults.append("holds under a condition that is not named")
    for field in ("statement", "provenance", "why_tolerance"):
        if not record.get(field):
            faults.append(f"has no {field}")
    if control.get("measured") is None:
        faults.append("has no control: add `control=` to one of its checks")
    elif not control.get("failed"):
        faults.append(f"its control was not rejected (measured {control['measured']})")
    return faults
