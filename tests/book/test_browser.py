"""The built book as a reader meets it: opened from its folder, without a network."""

import shutil
from pathlib import Path

import pytest

from mhabook_lib.book.browser import ARGUMENTS, find_browser

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "_build/html"
CHROMIUM = find_browser()
READERS = {
    "light": {"color_scheme": "light", "viewport": {"width": 1300, "height": 900}},
    "dark": {"color_scheme": "dark", "viewport": {"width": 1300, "height": 900}},
    "phone": {"color_scheme": "light", "viewport": {"width": 390, "height": 844}},
}
LOCAL = ("file:", "data:", "blob:", "about:")

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
    pytest.mark.skipif(not SITE.is_dir(), reason="the book is not built: make book"),
]


def pages(site):
    paths = [*site.glob("book/*.html"), *site.glob("notebooks/*.html")]
    return sorted(path.relative_to(site).as_posix() for path in paths)


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


def visit(browser, path, reader):
    """Open a page without network; the page and everything that is wrong with it."""
    context = browser.new_context(offline=True, **READERS[reader])
    page, faults = context.new_page(), []
    page.on("console", lambda m: faults.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda e: faults.append(str(e)))
    page.on("request", lambda r: None if r.url.startswith(LOCAL) else faults.append(r.url))
    page.goto(path.as_uri())
    page.wait_for_function("!document.querySelector('.math') || window.MathJax?.startup?.promise")
    page.evaluate("window.MathJax?.startup?.promise")
    return page, faults


def faults_of(page):
    """Faults that only the rendered page shows."""
    facts = page.evaluate(
        """() => ({
            sideways: document.documentElement.scrollWidth - innerWidth,
            formulas: document.querySelectorAll('.math').length,
            rendered: document.querySelectorAll('mjx-container').length,
            broken: document.querySelectorAll('mjx-merror, [data-mjx-error]').length,
            pictures: [...document.images].filter(i => i.complete && !i.naturalWidth).length,
            text: document.querySelector('article').innerText,
        })"""
    )
    tests = {
        "the page scrolls sideways": facts["sideways"] > 0,
        "a formula is not rendered": facts["rendered"] < facts["formulas"],
        "a formula is wrong": facts["broken"] > 0,
        "raw formula in the text": "\\(" in facts["text"] or "$$" in facts["text"],
        "a picture is missing": facts["pictures"] > 0,
    }
    return [name for name, found in tests.items() if found]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", pages(SITE) if SITE.is_dir() else [])
def test_page_opens_from_its_folder_without_network(browser, name, reader):
    page, faults = visit(browser, SITE / name, reader)
    assert faults + faults_of(page) == []
    wanted = "dark" if reader == "dark" else "light"
    assert page.evaluate("document.documentElement.dataset.theme") == wanted
    page.context.close()


def test_ledger_filters(browser):
    page, _ = visit(browser, SITE / "book/ledger.html", "light")
    rows = page.locator("table.ledger tbody tr")
    total = rows.count()
    page.locator(".ledger-filters select").nth(1).select_option("figure")
    shown = rows.locator("visible=true").count()
    assert 0 < shown < total
    assert page.locator(".ledger-filters output").inner_text() == f"{shown} of {total} claims"
    page.context.close()


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        ("<script>nobody()</script>", "nobody is not defined"),
        ('<img alt="x" src="https://example.org/x.png">', "https://example.org/x.png"),
        ('<div style="width: 3000px">wide</div>', "the page scrolls sideways"),
        ('<span class="math notranslate nohighlight">\\(x_{\\)</span>', "a formula is"),
        ("<p class='mathjax_ignore'>$$x$$</p>", "raw formula in the text"),
        ('<img alt="x" src="missing.png">', "a picture is missing"),
    ],
)
def test_planted_fault_is_seen(browser, tmp_path, piece, message):
    site, name = tmp_path / "html", "book/notation.html"
    shutil.copytree(SITE, site, copy_function=link)
    text = (site / name).read_text()
    (site / name).unlink()
    (site / name).write_text(text.replace("</article>", f"{piece}</article>", 1))
    page, faults = visit(browser, site / name, "light")
    page.wait_for_timeout(200)
    assert any(message in fault for fault in faults + faults_of(page))
    page.context.close()


def link(source, target):
    Path(target).symlink_to(source)
