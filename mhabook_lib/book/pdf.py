"""The whole book as one PDF: one long page from Sphinx, printed by Chromium, with bookmarks."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

from bs4 import BeautifulSoup

from mhabook_lib.book.browser import ARGUMENTS, BROWSERS, find_browser
from mhabook_lib.book.build import run_sphinx
from mhabook_lib.book.chapters import BookError, Project
from mhabook_lib.book.results import load_all
from mhabook_lib.book.run import workplace
from mhabook_lib.book.stage import Repository, Stage

MINUTES = 10
HEADINGS = ":is(h1, h2, h3, h4, h5, h6, [role=heading])"
ON_PAPER = """
@page { size: A4; margin: 17mm 16mm 19mm; }
html { font-size: 11px !important; }
.bd-main .bd-content .bd-article-container { max-width: none !important; }
article h1 { break-before: page; }
h1, h2, h3, h4, .admonition-title, .mhabook-claim { break-after: avoid; }
figure, div.proof, .mhabook-claim, .sd-card { break-inside: avoid; }
.copybtn, .ledger-filters, .sd-summary-icon, .sd-summary-state-marker { display: none !important; }
"""
PAGE_NUMBER = (
    '<div style="font-size: 8px; width: 100%; text-align: center"><span class="pageNumber"></div>'
)


def make_pdf(project: Project, profile: str = "quick", say: Callable = print) -> Path:
    """Print what has been run as _build/mhabook.pdf; replaced only when it is whole."""
    browser, writer = find_browser(), pdf_library()
    if browser is None:
        raise BookError(f"no browser to print with: install one of {', '.join(BROWSERS)}")
    stage = Stage(project, load_all(project, profile), Repository.from_environment())
    folder, target = stage.write(), project.build / "mhabook.pdf"
    say("setting the book as one page ...")
    with workplace(project, "pdf") as work:
        page, titles = one_page(run_sphinx(project, folder, work, "singlehtml"), project)
        say("printing (about ten seconds a chapter) ...")
        printed = work / "printed.pdf"
        print_page(browser, page, printed)
        bookmarked(writer, printed, titles, work / "book.pdf")
        os.replace(work / "book.pdf", target)
    return target


def pdf_library():
    """The module pypdf; BookError when it or Playwright is missing."""
    try:
        import playwright.sync_api  # noqa: F401
        import pypdf
    except ImportError as error:
        raise BookError(f"{error.name} is missing: pip install 'mhabook[test]'") from None
    return pypdf


def one_page(site: Path, project: Project) -> tuple[Path, list[str]]:
    """The single page at the root of its site, made ready for print, and its headings.

    Sphinx writes it where the book's root page lies, with addresses that start at the site's root.
    In print the theme shows title and contents of its own in place of the first heading.
    """
    root = f"{project.toc['root']}.html"
    soup = BeautifulSoup((site / root).read_text(encoding="utf-8"), "html.parser")
    for link in soup.select("a[href]"):
        link["href"] = link["href"].removeprefix(root) or "#"
    for gone in soup.select("a.headerlink, details.hide, .mhabook-claim details"):
        gone.decompose()
    for folded in soup.select("details"):
        folded["open"] = ""
    soup.head.append(style := soup.new_tag("style"))
    style.string = ON_PAPER
    page = site / "index.html"
    page.write_text(str(soup), encoding="utf-8")
    shown = [
        *soup.select(f"#jb-print-docs-body {HEADINGS}"),
        *soup.select(f"article {HEADINGS}:not(.toctree-wrapper > p)")[1:],
    ]
    return page, [plain(heading.get_text()) for heading in shown]


def plain(heading: str) -> str:
    r"""A heading without marks of mathematics and line ends.

    >>> plain("The limit \\(d_k\\to\\infty\\)\n again")
    'The limit d_k→∞ again'
    """
    for command, sign in ((r"\to", "→"), (r"\infty", "∞"), (r"\(", ""), (r"\)", "")):
        heading = heading.replace(command, sign)
    return re.sub(r"\s+", " ", heading).strip()


def print_page(browser: str, page: Path, target: Path) -> None:
    """Print a page, after its formulas are set, with an outline and page numbers."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        chrome = driver.chromium.launch(executable_path=browser, args=ARGUMENTS)
        context = chrome.new_context(offline=True, color_scheme="light")
        context.set_default_timeout(MINUTES * 60_000)
        tab = context.new_page()
        tab.goto(page.as_uri())
        tab.wait_for_function(
            "!document.querySelector('.math') || window.MathJax?.startup?.promise"
        )
        tab.evaluate("window.MathJax?.startup?.promise.then(() => null)")
        tab.pdf(
            path=target,
            outline=True,
            tagged=True,
            prefer_css_page_size=True,
            print_background=True,
            display_header_footer=True,
            header_template="<span></span>",
            footer_template=PAGE_NUMBER,
        )
        chrome.close()


def bookmarked(pypdf, printed: Path, titles: list[str], target: Path) -> None:
    """Give the bookmarks their headings: Chromium repeats words where a heading is broken."""
    logging.getLogger("pypdf").setLevel(logging.ERROR)
    writer = pypdf.PdfWriter(clone_from=printed)
    marks = list(in_order(writer.get_outline_root()))
    if len(marks) != len(titles):
        raise BookError(f"the PDF has {len(marks)} bookmarks for {len(titles)} headings")
    for mark, title in zip(marks, titles, strict=True):
        mark[pypdf.generic.NameObject("/Title")] = pypdf.generic.TextStringObject(title)
    writer.add_metadata({"/Title": titles[0], "/Author": "mhabook contributors"})
    writer.write(target)


def in_order(item):
    """All bookmarks below one, parents before children."""
    child = item.get("/First")
    while child is not None:
        child = child.get_object()
        yield child
        yield from in_order(child)
        child = child.get("/Next")
