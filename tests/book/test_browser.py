"""The built book as a reader meets it: opened from its folder, without a network."""

import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "_build/html"
CHROMIUM = next((p for n in ("chromium", "chromium-browser") if (p := shutil.which(n))), None)
ARGUMENTS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync"
).split()
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


def check_page(page):
    """Faults that only the rendered page shows."""
    facts = page.evaluate(
        """() => ({
            overflow: document.documentElement.scrollWidth - innerWidth,
            formulas: document.querySelectorAll('.math').length,
            rendered: document.querySelectorAll('mjx-container').length,
            broken: document.querySelectorAll('mjx-merror').length,
            pictures: [...document.images].filter(i => i.complete && !i.naturalWidth).length,
            text: document.querySelector('article').innerText,
        })"""
    )
    assert facts["overflow"] <= 0, "the page scrolls sideways"
    assert facts["rendered"] >= facts["formulas"] and not facts["broken"]
    assert facts["pictures"] == 0 and "\\(" not in facts["text"]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", pages(SITE) if SITE.is_dir() else [])
def test_page_opens_from_its_folder_without_network(browser, name, reader):
    page, faults = visit(browser, SITE / name, reader)
    assert faults == []
    check_page(page)
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
        ('<div style="width: 3000px">wide</div>', "scrolls sideways"),
        ('<span class="math notranslate">\\(\\nosuchmacro{\\)</span>', "assert"),
        ('<img alt="x" src="missing.png">', "ERR_FILE_NOT_FOUND"),
    ],
)
def test_planted_fault_is_seen(browser, tmp_path, piece, message):
    name = "book/ledger.html"
    shutil.copytree(SITE / "_static", tmp_path / "_static", copy_function=link)
    (tmp_path / "book").mkdir()
    text = (SITE / name).read_text().replace("</article>", f"{piece}</article>")
    (tmp_path / name).write_text(text)
    page, faults = visit(browser, tmp_path / name, "light")
    with pytest.raises(AssertionError) as seen:
        assert faults == []
        check_page(page)
    assert message in str(seen.value)
    page.context.close()


def link(source, target):
    Path(target).symlink_to(source)
