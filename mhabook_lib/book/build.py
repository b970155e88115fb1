"""The whole book: stage, Sphinx with warnings as errors, crawl, and only then the new site."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from mhabook_lib.book.chapters import BookError, Project
from mhabook_lib.book.crawl import crawl
from mhabook_lib.book.keys import digest
from mhabook_lib.book.results import load_all
from mhabook_lib.book.run import replace_folder, workplace
from mhabook_lib.book.stage import Repository, Stage

BUILDERS = (
    "jupyter-book sphinx sphinx-book-theme sphinx-proof sphinx-design myst-nb "
    "sphinxcontrib-bibtex sphinx-mathjax-offline pydata-sphinx-theme"
).split()
JUPYTER_BOOK = "from jupyter_book.cli.main import main; main()"
COMPLAINT = re.compile(r"WARNING|ERROR|CRITICAL|Exception occurred|error:")
MOST_SHOWN = 20


def stage_key(folder: Path) -> str:
    """Changes when any staged file, any builder's version or the crawl changes."""
    files = {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    rules = Path(__file__).with_name("crawl.py").read_text(encoding="utf-8")
    return digest(files, {name: metadata.version(name) for name in BUILDERS}, rules)


def build(
    project: Project, profile: str = "quick", *, force: bool = False, say: Callable = print
) -> Path:
    """Build from what has been run; the site in _build/html is replaced only by a sound one."""
    repository = Repository.from_environment()
    stage = Stage(project, load_all(project, profile), repository)
    folder, site = stage.write(), project.build / "html"
    key = stage_key(folder)
    if not force and built_key(site) == key:
        say(f"the book is up to date: {site / 'index.html'}")
        return site
    say("building the pages (about half a minute) ...")
    with workplace(project, "site") as work:
        pages = run_sphinx(project, folder, work)
        share_plain_notebooks(folder, pages)
        problems = crawl(pages, launch=stage.launch, branch=repository.branch)
        if problems:
            raise BookError(listing(f"the built pages have {len(problems)} faults", problems))
        (pages / "build.json").write_text(json.dumps({"key": key}))
        replace_folder(pages, site)
    say(f"the book is built: {site / 'index.html'}")
    return site


def built_key(site: Path) -> str:
    path = site / "build.json"
    return json.loads(path.read_text()).get("key", "") if path.is_file() else ""


def run_sphinx(project: Project, source: Path, work: Path, builder: str = "html") -> Path:
    """Jupyter Book on the staged folder; BookError with its complaints when there are any."""
    command = [sys.executable, "-c", JUPYTER_BOOK, "build", str(source)]
    command += ["--path-output", str(work), "-n", "-W", "--keep-going", "--all"]
    command += ["--builder", builder]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=work
    )
    project.logs.mkdir(parents=True, exist_ok=True)
    log = project.logs / "sphinx.log"
    log.write_text(done.stdout, encoding="utf-8")
    pages = work / "_build" / builder
    if done.returncode or not (pages / "index.html").is_file():
        text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout).replace(f"{source}/", "")
        found = [place(line) for line in text.splitlines() if COMPLAINT.search(line)]
        found = found or text.splitlines()[-5:]
        raise BookError(listing("Jupyter Book found faults", found) + f"\n  log: {log}")
    return pages


def place(line: str) -> str:
    """Cell and line in words: notebooks count ten thousand lines a cell."""

    def words(match: re.Match) -> str:
        cell, number = divmod(int(match[2]), 10_000)
        return f"{match[1]}.md, cell {cell}, line {number}:"

    return re.sub(r"(notebooks/[\w-]+)\.ipynb:(\d{5,}):", words, line)


def share_plain_notebooks(stage: Path, pages: Path) -> None:
    """The page's own download button gives the notebook that reads well outside the book."""
    for path in (stage / "downloads").glob("*.ipynb"):
        target = pages / "_sources" / "notebooks" / path.name
        if target.is_file():
            shutil.copy(path, target)


def listing(head: str, items: list[str]) -> str:
    unique = list(dict.fromkeys(items))
    shown = [f"  {item}" for item in unique[:MOST_SHOWN]]
    more = len(unique) - len(shown)
    return "\n".join([f"{head}:", *shown, *([f"  and {more} more"] if more > 0 else [])])
