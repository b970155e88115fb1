"""Chapters as files that stand alone: a plain notebook, a script, the figures with their data."""

from __future__ import annotations

import copy
import re
import zipfile
from pathlib import Path

import jupytext
import nbformat
from pybtex.database import Entry, parse_file

from mhabook_lib.book.chapters import BookError, Chapter, Project, tags
from mhabook_lib.book.myst import Context, defined_labels, plain, short_label

PICTURES = ("image/png", "image/jpeg", "image/svg+xml")


def figure_of(cell) -> dict[str, str]:
    """Caption, name and alt text of a figure cell; empty for other cells."""
    facts = cell.metadata.get("mystnb", {})
    figure = facts.get("figure") or {}
    return {**figure, "alt": (facts.get("image") or {}).get("alt", "")} if figure else {}


def notebook_labels(notebook) -> dict[str, str]:
    """All labels a chapter defines with the words that refer to them."""
    found = {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            found |= defined_labels(cell.source)
        elif name := figure_of(cell).get("name"):
            found[name] = f"Figure {short_label(name)}"
    return found


def references(path: Path) -> dict[str, Entry]:
    return dict(parse_file(str(path)).entries.items()) if path.is_file() else {}


def unbrace(text: str) -> str:
    return re.sub(r"[{}]", "", text).replace("--", "–")


def authors(entry: Entry) -> str:
    """Surnames as a text citation shows them."""
    if "author" not in entry.persons:
        raise BookError(f"book/references.bib: {entry.key} has no author, and a citation needs one")
    names = [unbrace(" ".join(p.prelast_names + p.last_names)) for p in entry.persons["author"]]
    return f"{names[0]} et al." if len(names) > 2 else " and ".join(names)


def address(entry: Entry) -> str:
    fields = entry.fields
    if "url" in fields:
        return fields["url"]
    if "doi" in fields:
        return f"https://doi.org/{fields['doi']}"
    return f"https://arxiv.org/abs/{fields['eprint']}" if "eprint" in fields else ""


def citation(entry: Entry) -> str:
    """One reference in full, as plain Markdown."""
    people = ", ".join(unbrace(str(p)) for p in entry.persons.get("author", []))
    title, year = unbrace(entry.fields.get("title", "")), entry.fields.get("year", "")
    where = unbrace(entry.fields.get("journal") or entry.fields.get("booktitle") or "")
    text = f"{people}. *{title}*. {where + ', ' if where else ''}{year}."
    return f"{text} <{address(entry)}>" if address(entry) else text


class Exporter:
    """Rewrites one chapter; remembers which references it cites."""

    def __init__(self, chapter: Chapter, notebook, *, install_from: str = "", labels=None):
        self.chapter = chapter
        self.notebook = notebook
        self.install_from = install_from
        self.cited: dict[str, None] = {}
        self.entries = references(chapter.project.root / "book" / "references.bib")
        known = labels_of_book(chapter.project) if labels is None else labels
        pages = titles(chapter.project)
        self.context = Context(known | notebook_labels(notebook), self.cite, pages)

    def cite(self, role: str, keys: str) -> str:
        textual, shown = role.endswith(":t"), []
        for key in (k.strip() for k in keys.split(",")):
            entry = self.entries.get(key)
            if entry is None:
                shown.append(key)
                continue
            self.cited[key] = None
            year, link = entry.fields.get("year", "n.d."), address(entry)
            words = f"{authors(entry)} ({year})" if textual else f"{authors(entry)}, {year}"
            shown.append(f"[{words}]({link})" if link else words)
        return " and ".join(shown) if textual else f"({'; '.join(shown)})"

    def plain_notebook(self, header: str = ""):
        """The chapter as Markdown and code that any Jupyter shows well, outputs included."""
        cells = [new for cell in self.notebook.cells for new in self._cells(cell)]
        if header:
            cells = insert_header(cells, header)
        cells += self._references()
        if self.install_from:
            cells.insert(0, install_cell(self.install_from))
        for number, cell in enumerate(cells):
            cell["id"] = f"{self.chapter.slug}-{number}"
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})

    def _cells(self, cell) -> list:
        if cell.cell_type == "markdown":
            text = plain(cell.source, self.context)
            return [nbformat.v4.new_markdown_cell(text)] if text else []
        if cell.cell_type != "code":
            return []
        new = nbformat.v4.new_code_cell(
            cell.source,
            execution_count=cell.execution_count,
            outputs=[copy.deepcopy(o) for o in cell.outputs if o.get("name") != "stderr"],
        )
        if "parameters" in tags(cell):
            new.metadata["tags"] = ["parameters"]
        figure = figure_of(cell)
        if not figure:
            return [new]
        name = self.context.labels.get(figure.get("name", ""), "Figure")
        caption = plain(f"**{name}.** {figure.get('caption', '')}", self.context)
        return [new, nbformat.v4.new_markdown_cell(caption)]

    def _references(self) -> list:
        if not self.cited:
            return []
        lines = [f"- {citation(self.entries[key])}" for key in sorted(self.cited)]
        return [nbformat.v4.new_markdown_cell("\n".join(["## References cited here", "", *lines]))]


def install_cell(url: str):
    """Installs the library where it is missing by nature: on Colab, and nowhere else."""
    code = f'import sys\n\nif "google.colab" in sys.modules:\n    %pip install -q "git+{url}"'
    return nbformat.v4.new_code_cell(code, metadata={"tags": ["remove-cell"]})


def insert_header(cells: list, header: str) -> list:
    """Put a box right below the first heading of the notebook."""
    for place, cell in enumerate(cells):
        if cell.cell_type != "markdown":
            continue
        lines = cell.source.split("\n")
        for i, line in enumerate(lines):
            if re.match(r"^#\s+\S", line):
                text = "\n".join([*lines[: i + 1], "", header, "", *lines[i + 1 :]]).strip("\n")
                new = nbformat.v4.new_markdown_cell(text, metadata=cell.metadata)
                return [*cells[:place], new, *cells[place + 1 :]]
    return [nbformat.v4.new_markdown_cell(header), *cells]


def labels_of_book(project: Project) -> dict[str, str]:
    """Labels of all chapters and prose pages, for references from one page to another."""
    found = {}
    for path in sorted((project.root / "book").glob("*.md")):
        found |= defined_labels(path.read_text(encoding="utf-8"))
    for chapter in project.chapters():
        found |= notebook_labels(chapter.notebook())
    return found


def titles(project: Project) -> dict[str, str]:
    """Titles of pages by file name, as {doc} shows them."""
    paths = [*(project.root / "book").glob("*.md"), *project.notebooks.glob("*.md")]
    found = {}
    for path in paths:
        heading = re.search(r"(?m)^#\s+(.+)$", path.read_text(encoding="utf-8"))
        found[path.stem] = heading[1].strip() if heading else path.stem
    return found


def script(notebook) -> str:
    """The chapter as one Python script, prose as comments."""
    return jupytext.writes(notebook, fmt="py:percent")


def figures_zip(result: Path, target: Path) -> bool:
    """All figures with the arrays behind them and the claims data; False without any figure."""
    files = sorted(p for p in (result / "figures").glob("*") if p.is_file())
    if not files:
        return False
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in [*files, result / "claims.json"]:
            info = zipfile.ZipInfo(path.name, date_time=(1980, 1, 1, 0, 0, 0))
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, path.read_bytes())
    return True
