"""Where the book's chapters are: sources, claim words, contents, parameters, results."""

from __future__ import annotations

import ast
import difflib
import os
import re
import tomllib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

PROFILES = ("quick", "paper")
DEVICES = ("auto", "cpu", "cuda")
RUN_PARAMETERS = ("profile", "device")
SLUG = re.compile(r"[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*")


class BookError(Exception):
    """Something the person at the keyboard can put right; the text says how."""


class UnknownChapter(BookError):
    """A chapter name that the book does not have."""


@dataclass(frozen=True)
class Project:
    """A checkout of the book: its root folder and the places inside."""

    root: Path

    @property
    def notebooks(self) -> Path:
        return self.root / "notebooks"

    @property
    def words(self) -> Path:
        return self.root / "mhabook_lib" / "chapters"

    @property
    def references(self) -> Path:
        return self.root / "tests" / "reference"

    @property
    def build(self) -> Path:
        return self.root / "_build"

    @property
    def logs(self) -> Path:
        return self.build / "logs"

    @cached_property
    def toc(self) -> dict[str, Any]:
        return yaml.safe_load((self.root / "_toc.yml").read_text(encoding="utf-8"))

    def toc_files(self) -> list[str]:
        """Every page of the contents, in reading order."""

        def walk(entry: Any) -> list[str]:
            if isinstance(entry, list):
                return [name for item in entry for name in walk(item)]
            if not isinstance(entry, dict):
                return []
            own = [entry[key] for key in ("root", "file") if key in entry]
            below = [entry[key] for key in ("parts", "chapters", "sections") if key in entry]
            return own + walk(below)

        return walk(self.toc)

    def chapters(self) -> list[Chapter]:
        """All chapters: those of the contents in their order, then the unlisted ones."""
        order = {name: place for place, name in enumerate(self.toc_files())}
        sources = sorted(self.notebooks.glob("*.md"))
        last = len(order)
        sources.sort(key=lambda path: order.get(f"notebooks/{path.stem}", last))
        return [Chapter(self, path.stem) for path in sources]

    def chapter(self, slug: str) -> Chapter:
        known = [chapter.slug for chapter in self.chapters()]
        if slug in known:
            return Chapter(self, slug)
        near = difflib.get_close_matches(slug, known, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise UnknownChapter(
            f"there is no chapter '{slug}'.{hint} Chapters: {', '.join(known) or 'none yet'}."
        )

    def select(self, slugs: list[str] | None) -> list[Chapter]:
        """The named chapters, or all of them."""
        if slugs:
            return [self.chapter(slug) for slug in dict.fromkeys(slugs)]
        return self.chapters()


def find_project(start: Path | None = None) -> Project:
    """The checkout around `start` (the current folder), or the one MHABOOK_ROOT names."""
    named = os.environ.get("MHABOOK_ROOT")
    here = Path(named) if named else (start or Path.cwd())
    here = here.resolve()
    for folder in [here] if named else [here, *here.parents]:
        if (folder / "_config.yml").is_file() and (folder / "notebooks").is_dir():
            return Project(folder)
    where = f"MHABOOK_ROOT={named}" if named else f"{here} or a folder above it"
    raise BookError(
        f"no book found in {where}: it needs _config.yml and notebooks/. "
        "Change into your copy of the book, or set MHABOOK_ROOT to it."
    )


@dataclass(frozen=True)
class Chapter:
    """One chapter: a text notebook and the words of its claims."""

    project: Project = field(repr=False)
    slug: str

    @property
    def source(self) -> Path:
        return self.project.notebooks / f"{self.slug}.md"

    @property
    def words_file(self) -> Path:
        return self.project.words / f"{self.slug}.toml"

    @property
    def reference(self) -> Path:
        return self.project.references / f"{self.slug}.json"

    def result(self, profile: str) -> Path:
        """The folder of the published run: executed notebook, claims data, figures."""
        return self.project.build / profile / self.slug

    @cached_property
    def words(self) -> dict[str, Any]:
        if not self.words_file.is_file():
            raise BookError(
                f"chapter '{self.slug}' has no claims file: write "
                f"{self.words_file.relative_to(self.project.root)} with a [chapter] table "
                "and one [claims.LABEL] table a claim."
            )
        try:
            words = tomllib.loads(self.words_file.read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as error:
            raise BookError(f"{self.words_file.name} is not valid TOML: {error}") from error
        if "title" not in words.get("chapter", {}):
            raise BookError(f"{self.words_file.name} needs a [chapter] table with a title.")
        return words

    @property
    def about(self) -> dict[str, Any]:
        return self.words["chapter"]

    @property
    def claim_ids(self) -> list[str]:
        return [f"{self.slug}.{label}" for label in self.words.get("claims", {})]

    def notebook(self):
        """The source as a notebook without outputs."""
        import jupytext

        try:
            return jupytext.read(self.source, fmt="md:myst")
        except Exception as error:
            text = str(error).strip().splitlines()[0]
            raise BookError(f"{self.source.name} is not a MyST notebook: {text}") from error

    def parameters(self) -> dict[str, Any]:
        """Names and defaults from the one cell tagged `parameters`."""
        cell = parameters_cell(self.notebook(), self.slug)
        return literal_assignments(cell.source, self.slug)


def tags(cell) -> list[str]:
    return cell.metadata.get("tags", [])


def parameters_cell(notebook, slug: str):
    """The one code cell tagged `parameters`; BookError when there is none or a second one."""
    cells = [c for c in notebook.cells if c.cell_type == "code" and "parameters" in tags(c)]
    if len(cells) == 1:
        return cells[0]
    found = "no cell" if not cells else f"{len(cells)} cells"
    raise BookError(
        f"chapter '{slug}' has {found} tagged 'parameters'; it needs exactly one, "
        "with `:tags: [parameters]`."
    )


def literal_assignments(code: str, slug: str) -> dict[str, Any]:
    """`name = literal` lines of the parameters cell, in order."""
    found = {}
    for node in ast.parse(code).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=value) if value:
                pass
            case _:
                continue
        try:
            found[name] = ast.literal_eval(value)
        except ValueError:
            raise BookError(
                f"chapter '{slug}': parameter '{name}' has no plain default; derived values "
                "belong in the cell after the parameters."
            ) from None
    return found


def check_kernel(notebook, slug: str) -> None:
    """Every chapter runs on the kernel that everybody has."""
    name = notebook.metadata.get("kernelspec", {}).get("name")
    if name != "python3":
        said = f"asks for the kernel '{name}'" if name else "names no kernel"
        raise BookError(
            f"chapter '{slug}' {said}; its header must say `kernelspec: name: python3`, "
            "the one kernel every reader has."
        )


def parse_overrides(pairs: list[str], defaults: dict[str, Any], slug: str) -> dict[str, Any]:
    """`name=value` strings of the command line as values that fit the chapter's defaults."""
    values = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise BookError(f"'-p {pair}' is not of the form name=value.")
        if name in RUN_PARAMETERS:
            raise BookError(f"use --{name} {text} instead of -p {pair}.")
        if name not in defaults:
            known = ", ".join(key for key in defaults if key not in RUN_PARAMETERS)
            near = difflib.get_close_matches(name, defaults, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            raise BookError(
                f"chapter '{slug}' has no parameter '{name}'.{hint} Parameters: {known}."
            )
        values[name] = _value(name, text, defaults[name])
    return values


def _value(name: str, text: str, default: Any) -> Any:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    if isinstance(default, str):
        return text
    same = isinstance(value, bool) == isinstance(default, bool)
    number = isinstance(value, int) or (isinstance(default, float) and isinstance(value, float))
    if isinstance(default, (bool, int, float)) and not (same and number):
        kind = {bool: "True or False", int: "a whole number"}.get(type(default), "a number")
        raise BookError(f"parameter '{name}' must be {kind} (default {default}), got '{text}'.")
    return value
