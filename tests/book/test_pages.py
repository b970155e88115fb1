"""What generated pages say, and where their links lead."""

import json

import pytest
from bs4 import BeautifulSoup


def page(book, name):
    return BeautifulSoup((book.root / "_build/html" / name).read_text(), "html.parser")


def test_header_box(built):
    box = page(built, "notebooks/tiny.html").select_one(".chapter-facts")
    words = box.get_text(" ", strip=True)
    assert "Noether" in words and "2 reproduced" in words and "on the CPU" in words
    names = [a["href"].rsplit("/", 1)[-1] for a in box.select("a.download")]
    assert names == ["tiny.ipynb", "tiny.py", "tiny.md", "tiny-figures.zip"]


def test_no_address_no_launch_buttons(built):
    text = str(page(built, "notebooks/tiny.html"))
    assert "colab" not in text.lower() and "binder" not in text.lower()
    assert "github.com" not in text


def test_ledger_rows_lead_to_their_places(built):
    ledger = page(built, "book/ledger.html")
    anchors = {tag["id"] for tag in page(built, "notebooks/tiny.html").find_all(id=True)}
    links = ledger.select("table.ledger td:first-child a")
    assert [a.get_text() for a in links] == ["tiny.T1", "tiny.F1"]
    for a in links:
        address, _, place = a["href"].partition("#")
        assert address == "../notebooks/tiny.html" and place in anchors
    row = ledger.select("table.ledger tbody tr")[0].get_text(" ", strip=True)
    assert "wanted = 55" in row and "one more: 56 , rejected" in row and "integers" in row


def test_status(built):
    words = page(built, "book/status.html").article.get_text(" ", strip=True)
    run = json.loads((built.result / "run.json").read_text())
    assert run["versions"]["torch"] in words and run["finished"][:10] in words
    assert "quick cpu" in words.replace("\n", " ") and "2 of 2 1 cells equal" in words


def test_front_page_shows_the_runs_numbers_and_figure(built):
    article = page(built, "book/intro.html").article
    words = article.get_text(" ", strip=True)
    assert "one chapter made 2 claims: 2 reproduced" in words
    assert article.img["alt"] == "Points on a parabola."
    assert article.select_one("a.sd-stretched-link")["href"] == "../notebooks/tiny.html"


def test_speed_page_without_and_with_benchmarks(built, tmp_path):
    from mhabook_lib.book.pages import speed_page

    assert "make bench" in page(built, "book/speed.html").article.get_text()
    row = {
        "chapter": "tiny", "task": "curve", "size": "50 points", "ours_s": 0.00012,
        "other": "loop", "other_s": 2.5, "ratio": 20833.3, "spread": 0.1,
        "ours_error": 1e-12, "other_error": None,
    }
    path = tmp_path / "benchmarks.json"
    path.write_text(json.dumps([row]))
    text = speed_page(path)
    for words in ("120\u00a0µs", "2.5\u00a0s", "20,833× ±\u00a010%", "`1e-12`"):
        assert words in text


@pytest.mark.parametrize(("seconds", "text"), [(61.2, "61 s"), (600, "10 min")])
def test_run_times_read_well(seconds, text):
    from mhabook_lib.book.pages import run_time

    assert run_time(seconds) == text


def test_no_traces_of_this_machine(built):
    """Pages and data name no folder of the machine that built them."""
    site = built.root / "_build/html"
    for path in [*site.rglob("*.html"), *site.rglob("*.ipynb"), *site.rglob("*.py")]:
        assert str(built.root.parent) not in path.read_text(errors="replace"), path
