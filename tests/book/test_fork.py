"""A fork is a chapter of its own at once: it runs, is compared, and stands in the book."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import Book

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "_build/quick"


def test_fork_runs_is_accepted_and_appears_in_the_book(copy):
    said = copy("new", "my-experiment", "--from", "tiny", "--title", "My experiment")
    assert "notebooks/my-experiment.md" in said
    copy.edit("size = 5", "size = 6", "notebooks/my-experiment.md")
    assert "my-experiment: 2 claims" in copy("run")
    claims = json.loads((copy.root / "_build/quick/my-experiment/claims.json").read_text())
    assert [c["id"] for c in claims] == ["my-experiment.T1", "my-experiment.F1"]
    assert claims[0]["measured"] == 91
    copy("accept", "my-experiment")
    assert "my-experiment: 1 marked cells as accepted" in copy("check", "my-experiment")
    copy("build")
    page = (copy.root / "_build/html/notebooks/my-experiment.html").read_text()
    assert "My experiment" in page and 'id="my-experiment-T1"' in page
    assert "my-experiment.T1" in (copy.root / "_build/html/book/ledger.html").read_text()
    intro = (copy.root / "_build/html/book/intro.html").read_text()
    assert "My experiment" in intro and "2 chapters made 4 claims" in intro


def test_fork_shares_no_label_with_its_source(copy):
    copy("new", "other", "--from", "tiny")
    text = (copy.root / "notebooks/other.md").read_text()
    for label in ("tiny-T1", "tiny-F1", "tiny-sum", "tiny-setting", 'Ledger("tiny"'):
        assert label not in text
    assert "from mhabook_lib.tiny import squares" in text
    lines = (copy.root / "_toc.yml").read_text().splitlines()
    place = lines.index("      - file: notebooks/tiny")
    assert lines[place + 1] == "      - file: notebooks/other"


def test_new_chapter_from_the_template_runs(copy):
    copy("new", "from-nothing")
    assert "from-nothing: 2 claims" in copy("run", "from-nothing")
    copy("accept", "from-nothing")
    copy("check", "from-nothing")
    copy("build")
    assert (copy.root / "_build/html/notebooks/from-nothing.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny", "--from", "tiny"], "exists already"),
        (["My Experiment", "--from", "tiny"], "cannot name a chapter"),
        (["../up", "--from", "tiny"], "cannot name a chapter"),
        (["fine", "--from", "tinny"], "Did you mean 'tiny'"),
    ],
)
def test_refused_names_leave_nothing_behind(copy, arguments, message):
    before = sorted(copy.root.glob("[!_]*/**/*")), (copy.root / "_toc.yml").read_text()
    assert message in copy("new", *arguments, code=1)
    assert before == (sorted(copy.root.glob("[!_]*/**/*")), (copy.root / "_toc.yml").read_text())


def test_half_a_fork_is_taken_back(copy, monkeypatch):
    from mhabook_lib.book import fork
    from mhabook_lib.book.chapters import Project

    (copy.root / "_toc.yml").chmod(0o444)
    original = fork.Path.write_text

    def failing(path, *args, **kwargs):
        if path.name == "_toc.yml":
            raise OSError("disk full")
        return original(path, *args, **kwargs)

    monkeypatch.setattr(fork.Path, "write_text", failing)
    with pytest.raises(OSError):
        fork.new_chapter(Project(copy.root), "half", "tiny", None)
    assert not (copy.root / "notebooks/half.md").exists()
    assert not (copy.root / "mhabook_lib/chapters/half.toml").exists()


@pytest.mark.skipif(not (RESULTS / "clustering/run.json").is_file(), reason="run it: make book")
def test_fork_of_a_real_chapter_with_a_changed_parameter(tmp_path):
    """The chapter that others copy: a fork with another seed runs, is compared, is in the book."""
    skipped = shutil.ignore_patterns(".*", "_build", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, tmp_path / "book", ignore=skipped)
    book = Book(tmp_path / "book")
    shutil.copytree(RESULTS, book.root / "_build/quick")
    book("new", "my-experiment", "--from", "clustering")
    book.edit("\nseed = 0\n", "\nseed = 1\n", "notebooks/my-experiment.md")
    book("run", "my-experiment")
    claims = json.loads((book.root / "_build/quick/my-experiment/claims.json").read_text())
    assert len(claims) == 24 and {record["seed"] for record in claims} == {1}
    assert all(record["id"].startswith("my-experiment.") for record in claims)
    book("accept", "my-experiment")
    book("check", "my-experiment")
    book("build")
    page = (book.root / "_build/html/notebooks/my-experiment.html").read_text()
    assert 'id="my-experiment-T1"' in page and 'id="my-experiment-f1"' in page
    assert "my-experiment.T1" in (book.root / "_build/html/book/ledger.html").read_text()
