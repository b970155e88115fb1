"""The folder that Sphinx builds from: prose, executed chapters, generated pages, downloads."""

from __future__ import annotations

import copy
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import yaml

from mhabook_lib.book import pages
from mhabook_lib.book.chapters import BookError, Project
from mhabook_lib.book.export import (
    Exporter,
    figures_zip,
    insert_header,
    labels_of_book,
    script,
)
from mhabook_lib.book.results import Result

LAUNCH_BRANCH = "launch"
GITHUB = re.compile(r"^https://[\w.-]+/(?P<owner>[\w.-]+)/(?P<name>[\w.-]+?)(?:\.git)?/?$")
REPOSITORY_KEYS = ("use_repository_button", "use_issues_button", "use_edit_page_button")


@dataclass(frozen=True)
class Repository:
    """Where the book is published from; without a URL it offers downloads and no more."""

    url: str = ""
    branch: str = LAUNCH_BRANCH

    @classmethod
    def from_environment(cls) -> Repository:
        url = os.environ.get("MHABOOK_REPOSITORY_URL", "").rstrip("/")
        if url and not GITHUB.match(url):
            raise BookError(
                f"MHABOOK_REPOSITORY_URL is '{url}'; it must look like https://host/owner/name."
            )
        return cls(url, os.environ.get("MHABOOK_BRANCH") or LAUNCH_BRANCH)

    def launches(self, slug: str, buttons: dict[str, Any]) -> dict[str, str]:
        """Addresses that open a chapter to run it, by the service's name."""
        if not self.url:
            return {}
        place = GITHUB.match(self.url)
        repo = f"{place['owner']}/{place['name']}"
        path = f"notebooks/{slug}.ipynb"
        colab, binder = buttons.get("colab_url"), buttons.get("binderhub_url")
        found = {}
        if colab:
            found["Colab"] = f"{colab}/github/{repo}/blob/{self.branch}/{path}"
        if binder:
            found["Binder"] = f"{binder}/v2/gh/{repo}/{self.branch}?urlpath=lab/tree/{path}"
        return found


class Stage:
    """Writes the folder; the same inputs give the same files."""

    def __init__(self, project: Project, results: list[Result], repository: Repository):
        self.project = project
        self.results = results
        self.repository = repository
        self.folder = project.build / "stage"
        self.launch = project.build / "launch"
        config = (project.root / "_config.yml").read_text(encoding="utf-8")
        self.config = yaml.safe_load(config)
        self.buttons = self.config.get("launch_buttons") or {}
        self.labels = labels_of_book(project)

    def write(self) -> Path:
        for folder in (self.folder, self.launch):
            shutil.rmtree(folder, ignore_errors=True)
        ignored = shutil.ignore_patterns("__pycache__", ".*")
        shutil.copytree(self.project.root / "book", self.folder / "book", ignore=ignored)
        for page in sorted((self.folder / "book").rglob("*.md")):
            write(page, self.executed_links(page.read_text(encoding="utf-8")))
        self._settings()
        (self.folder / "notebooks").mkdir()
        (self.folder / "downloads").mkdir()
        for result in self.results:
            self._chapter(result)
        self._generated()
        return self.folder

    def executed_links(self, text: str) -> str:
        """Links to a chapter's source lead to its executed page."""
        slugs = "|".join(re.escape(result.slug) for result in self.results) or "-"
        return re.sub(rf"(\]\((?:\.\./notebooks/)?(?:{slugs}))\.md(?=[)#])", r"\1.ipynb", text)

    def _settings(self) -> None:
        shutil.copy(self.project.root / "_toc.yml", self.folder / "_toc.yml")
        settings = dict(self.config)
        html = dict(settings.get("html") or {})
        if self.repository.url:
            settings["repository"] = {
                "url": self.repository.url,
                "branch": self.repository.branch,
                "path_to_book": "",
            }
        else:
            settings.pop("launch_buttons", None)
            settings.pop("repository", None)
            html |= dict.fromkeys(REPOSITORY_KEYS, False)
        settings["html"] = html
        text = yaml.safe_dump(settings, allow_unicode=True, sort_keys=False)
        (self.folder / "_config.yml").write_text(text, encoding="utf-8")

    def _chapter(self, result: Result) -> None:
        files = self._downloads(result)
        launches = self.repository.launches(result.slug, self.buttons)
        notebook = copy.deepcopy(result.notebook)
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = self.executed_links(cell.source)
        notebook.cells = insert_header(notebook.cells, pages.header(result, files, launches))
        notebook.cells = [numbered(c, result.slug, i) for i, c in enumerate(notebook.cells)]
        nbformat.write(notebook, self.folder / "notebooks" / f"{result.slug}.ipynb")

    def _downloads(self, result: Result) -> dict[str, str]:
        """Write the chapter's files; their names by what they are called on the page."""
        source = f"git+{self.repository.url}" if self.repository.url else ""
        slug, folder = result.slug, self.folder / "downloads"
        exporter = Exporter(
            result.chapter, result.notebook, install_from=source[4:], labels=self.labels
        )
        paper = result.chapter.about.get("paper")
        cited = exporter.cite("cite:t", paper) if paper else ""
        plain = exporter.plain_notebook(pages.plain_header(result, cited))
        nbformat.write(plain, folder / f"{slug}.ipynb")
        if self.repository.url:
            (self.launch / "notebooks").mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / f"{slug}.ipynb", self.launch / "notebooks")
        (folder / f"{slug}.py").write_text(script(plain), encoding="utf-8")
        shutil.copy(result.chapter.source, folder / f"{slug}.md")
        files = {"notebook": f"{slug}.ipynb", "script": f"{slug}.py", "source": f"{slug}.md"}
        if figures_zip(result.folder, folder / f"{slug}-figures.zip"):
            files["figures and data"] = f"{slug}-figures.zip"
        return files

    def _generated(self) -> None:
        book, parts = self.folder / "book", self.folder / "book" / "generated"
        parts.mkdir(exist_ok=True)
        write(book / "ledger.md", pages.ledger_page(self.results))
        write(book / "status.md", pages.status_page(self.results))
        write(book / "speed.md", pages.speed_page(self.project.build / "benchmarks.json"))
        write(parts / "chapters.md", pages.cards(self.results))
        write(parts / "totals.md", pages.totals(self.results))
        write(parts / "figure.md", self._cover(parts))

    def _cover(self, parts: Path) -> str:
        for result in self.results:
            if label := pages.cover(result):
                picture = pages.figure_file(result, label)
                shutil.copy(picture, parts / f"{result.slug}-{label}.svg")
                return pages.cover_figure(result, label)
        return ""


def write(path: Path, text: str) -> None:
    path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")


def numbered(cell, slug: str, number: int):
    """Steady cell names, so that equal books are equal files."""
    cell["id"] = f"{slug}-{number}"
    return cell
