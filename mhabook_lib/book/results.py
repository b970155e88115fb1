"""What has been run: each chapter's current prose with the outputs of its last good run."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat

from mhabook_lib.book.chapters import BookError, Chapter, Project, tags
from mhabook_lib.book.claims import VERDICTS
from mhabook_lib.book.export import figure_of, notebook_labels
from mhabook_lib.book.keys import own_code_cells
from mhabook_lib.book.myst import STATEMENTS
from mhabook_lib.book.run import published_key, read_run, restore


@dataclass(frozen=True)
class Result:
    """One chapter as the book shows it."""

    chapter: Chapter
    folder: Path = field(repr=False)
    run: dict[str, Any] = field(repr=False)
    claims: list[dict[str, Any]] = field(repr=False)
    check: dict[str, Any] = field(repr=False)
    notebook: Any = field(repr=False)

    @property
    def slug(self) -> str:
        return self.chapter.slug

    @property
    def verdicts(self) -> Counter:
        return Counter(record["verdict"] for record in self.claims)

    def verdict_counts(self) -> list[tuple[str, int]]:
        """Number of claims per verdict, in fixed order, without the empty ones."""
        return [(verdict, self.verdicts[verdict]) for verdict in VERDICTS if self.verdicts[verdict]]

    def figures(self) -> dict[str, dict[str, str]]:
        """Figure cells by label (`F1`), each with caption and alt text."""
        cells = [c for c in self.notebook.cells if c.cell_type == "code"]
        named = [figure_of(cell) for cell in cells]
        return {f["name"].rsplit("-", 1)[-1]: f for f in named if f.get("name")}


def refreshed(source, executed, slug: str):
    """The source with the outputs of its run; prose may be newer than the run, code may not.

    Values that the run was given (another profile, say) stay visible as a cell of their own.
    """
    fresh, done = copy.deepcopy(source), own_code_cells(executed)
    cells = own_code_cells(fresh)
    if [c.source for c in cells] != [c.source for c in done]:
        raise BookError(f"chapter '{slug}' was run before its code changed: mhabook run {slug}")
    for new, old in zip(cells, done, strict=True):
        new.outputs, new.execution_count = old.outputs, old.execution_count
    injected = [c for c in executed.cells if "injected-parameters" in tags(c)]
    shown = next((i for i, c in enumerate(fresh.cells) if "parameters" in tags(c)), None)
    if injected and shown is not None:
        cell = copy.deepcopy(injected[0])
        cell.metadata = nbformat.from_dict({"tags": ["injected-parameters"]})
        fresh.cells.insert(shown + 1, cell)
    return fresh


def read_check(chapter: Chapter) -> dict[str, Any]:
    path = chapter.project.build / "checks" / f"{chapter.slug}.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def executed_notebook(chapter: Chapter, profile: str):
    """The notebook of the last good run; BookError when there is none."""
    folder = chapter.result(profile)
    restore(folder)
    path = folder / f"{chapter.slug}.ipynb"
    if not path.is_file():
        raise BookError(f"chapter '{chapter.slug}' has not been run: mhabook run {chapter.slug}")
    return nbformat.read(path, as_version=4)


def load(chapter: Chapter, profile: str) -> Result:
    """The chapter's result; BookError when it is missing or out of date."""
    executed = executed_notebook(chapter, profile)
    folder, facts = chapter.result(profile), read_run(chapter.result(profile))
    notebook = refreshed(chapter.notebook(), executed, chapter.slug)
    if published_key(chapter, profile, facts["device"]) != facts["key"]:
        raise BookError(
            f"chapter '{chapter.slug}' was run before the library, its claims file or a version "
            f"changed: mhabook run {chapter.slug}"
        )
    claims = json.loads((folder / "claims.json").read_text())
    check = read_check(chapter)
    return Result(chapter, folder, facts, claims, check, notebook)


def load_all(project: Project, profile: str) -> list[Result]:
    """All chapters of the contents; one BookError that names everything still to be run."""
    listed = set(project.toc_files())
    found, faults = [], []
    for chapter in project.chapters():
        if f"notebooks/{chapter.slug}" not in listed:
            faults.append(f"notebooks/{chapter.slug}.md is not in _toc.yml")
            continue
        try:
            found.append(load(chapter, profile))
        except BookError as error:
            faults.append(str(error))
    if faults:
        raise BookError("\n".join(faults))
    return found


def claim_places(result: Result) -> dict[str, str]:
    """Anchors in the chapter's page by claim ID; BookError for a claim that has no place."""
    labels = notebook_labels(result.notebook)
    return {record["id"]: anchor(record["id"], labels) for record in result.claims}


def anchor(identifier: str, labels: dict[str, str]) -> str:
    """Statements keep their label as it is; Sphinx writes those of figures in lower case."""
    label = identifier.replace(".", "-", 1)
    if label not in labels:
        raise BookError(
            f"claim {identifier} has no place in its chapter: give its statement or figure "
            f"the label {label}"
        )
    is_statement = labels[label].split()[0].lower() in STATEMENTS
    return label if is_statement else re.sub(r"[._]", "-", label.lower())
