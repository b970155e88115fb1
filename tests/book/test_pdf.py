"""The whole book as one PDF."""

import re

import pytest

from mhabook_lib.book.browser import find_browser

pypdf = pytest.importorskip("pypdf")
pytest.importorskip("playwright.sync_api")


def bookmarks(outline):
    for mark in outline:
        yield from bookmarks(mark) if isinstance(mark, list) else [mark]


@pytest.mark.skipif(find_browser() is None, reason="no Chromium on this machine")
def test_the_book_is_printed_with_bookmarks_that_lead_to_their_headings(copy):
    said = copy("pdf")
    assert "_build/mhabook.pdf" in said
    reader = pypdf.PdfReader(copy.root / "_build" / "mhabook.pdf")
    places = {m.title: reader.get_destination_page_number(m) for m in bookmarks(reader.outline)}
    assert next(iter(places)) == "A tiny book" == reader.metadata.title
    for title in ("1. A tiny chapter", "1.1. Setting", "References"):
        words = re.sub(r"\s+", " ", reader.pages[places[title]].extract_text())
        assert title in words
    text = " ".join(page.extract_text() for page in reader.pages)
    assert "By induction" in text, "a folded proof is not printed"
    assert "axis.plot" not in text, "folded code is printed"
    links = [a.get_object() for page in reader.pages for a in page.get("/Annots", [])]
    assert any("/Dest" in link or link.get("/A", {}).get("/S") == "/GoTo" for link in links)


def test_without_a_browser_it_says_so_and_keeps_the_earlier_file(ran, monkeypatch):
    old = ran.root / "_build" / "mhabook.pdf"
    old.write_bytes(b"earlier")
    monkeypatch.setenv("PATH", "")
    assert "no browser to print with" in ran("pdf", code=1)
    assert old.read_bytes() == b"earlier"
    old.unlink()
