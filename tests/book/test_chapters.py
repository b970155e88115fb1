"""Every chapter of the real book keeps the forms that the pipeline needs."""

import subprocess
import sys

import jupytext
import nbformat
import pytest

from mhabook_lib.book.chapters import (
    BookError,
    Project,
    check_kernel,
    find_project,
    parse_overrides,
)
from mhabook_lib.book.check import MARK, marked
from mhabook_lib.book.export import figure_of, notebook_labels
from mhabook_lib.book.keys import code_cells, imported_modules, python_of, reached_files

PROJECT = find_project()
CHAPTERS = {chapter.slug: chapter for chapter in PROJECT.chapters()}


@pytest.fixture(params=CHAPTERS)
def chapter(request):
    return CHAPTERS[request.param]


def test_contents_list_every_chapter_and_every_listed_page_has_a_source():
    listed = PROJECT.toc_files()
    chapters = {name for name in listed if name.startswith("notebooks/")}
    assert chapters == {f"notebooks/{slug}" for slug in CHAPTERS}
    generated = {"book/ledger", "book/status", "book/speed"}
    prose = set(listed) - chapters - generated
    assert prose == {f"book/{path.stem}" for path in (PROJECT.root / "book").glob("*.md")}


def test_source_survives_the_round_trip(chapter):
    """Text to notebook and back changes nothing that counts."""
    notebook = chapter.notebook()
    again = jupytext.reads(jupytext.writes(notebook, fmt="md:myst"), fmt="md:myst")

    def kept(nb):
        return [(c.cell_type, c.source, dict(c.metadata)) for c in nb.cells]

    assert kept(again) == kept(notebook)


def test_header_parameters_and_marked_cell(chapter):
    notebook = chapter.notebook()
    check_kernel(notebook, chapter.slug)
    assert {"profile", "device", "seed"} <= set(chapter.parameters())
    assert chapter.parameters()["profile"] == "quick"
    assert marked(code_cells(notebook)), f"no cell is tagged {MARK}"


def test_code_lines_fit_the_page(chapter):
    long = [
        line
        for cell in code_cells(chapter.notebook())
        for line in cell.source.splitlines()
        if len(line) > 88
    ]
    assert long == []


def test_every_claim_has_words_and_a_place(chapter):
    labels = notebook_labels(chapter.notebook())
    for identifier in chapter.claim_ids:
        assert identifier.replace(".", "-", 1) in labels
    for claim in chapter.words["claims"].values():
        assert {"kind", "statement", "provenance", "why_tolerance", "control"} <= set(claim)


def test_figures_have_alternative_text_and_caption(chapter):
    figures = [figure for c in code_cells(chapter.notebook()) if (figure := figure_of(c))]
    assert figures
    for figure in figures:
        assert len(figure["alt"]) > 20 and figure["caption"] and figure["name"]


def test_no_magic_or_install_in_a_chapter(chapter):
    for cell in code_cells(chapter.notebook()):
        assert not any(line.lstrip().startswith(("%", "!")) for line in cell.source.splitlines())


def test_labels_are_unique_in_the_book():
    seen = [label for c in CHAPTERS.values() for label in notebook_labels(c.notebook())]
    assert len(seen) == len(set(seen))


def test_importing_the_ledger_needs_none_of_the_pipeline():
    code = (
        "import sys, mhabook_lib.book; "
        "print(*{'papermill', 'sphinx', 'typer', 'jupytext', 'bs4', 'yaml'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize(
    ("code", "modules"),
    [
        ("import numpy\nfrom mhabook_lib import a", {"mhabook_lib", "mhabook_lib.a"}),
        ("def f():\n    import mhabook_lib.b", {"mhabook_lib.b"}),
        ("import mhabook_lib_other", set()),
    ],
)
def test_imports_are_seen_wherever_they_stand(code, modules):
    assert imported_modules(code) == modules


def test_magic_lines_do_not_hide_imports():
    cell = nbformat.v4.new_code_cell("if True:\n    %time 1\n!ls\nfrom mhabook_lib.a import f")
    code = python_of(nbformat.v4.new_notebook(cells=[cell]))
    assert imported_modules(code) == {"mhabook_lib.a", "mhabook_lib.a.f"}


def test_relative_imports_are_followed(tmp_path):
    package = tmp_path / "mhabook_lib"
    (package / "deep").mkdir(parents=True)
    files = {
        "__init__.py": "",
        "top.py": "from .deep import inner",
        "deep/__init__.py": "",
        "deep/inner.py": "from ..base import x",
        "base.py": "x = 1",
        "other.py": "",
    }
    for name, text in files.items():
        (package / name).write_text(text)
    found = {p.name for p in reached_files(tmp_path, "from mhabook_lib.top import f")}
    assert found == {"__init__.py", "top.py", "inner.py", "base.py"}


def test_parameter_values_keep_the_kind_of_their_default():
    defaults = {"seed": 0, "beta": 1.5, "name": "x", "flag": True, "sizes": [1]}
    pairs = ["seed=3", "beta=2", "name=4", "flag=False", "sizes=[2, 3]"]
    values = parse_overrides(pairs, defaults, "c")
    assert values == {"seed": 3, "beta": 2, "name": "4", "flag": False, "sizes": [2, 3]}
    with pytest.raises(BookError, match="True or False"):
        parse_overrides(["flag=1"], defaults, "c")


def test_no_book_here(tmp_path, monkeypatch):
    monkeypatch.setenv("MHABOOK_ROOT", str(tmp_path))
    with pytest.raises(BookError, match="no book found in MHABOOK_ROOT"):
        find_project()
    assert Project(PROJECT.root) == PROJECT
