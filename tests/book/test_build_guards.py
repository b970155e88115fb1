"""Faults of built pages keep the book from being published; the earlier site stays."""

import json
import os
import shutil

import pytest

from mhabook_lib.book.crawl import crawl

PLANTED = '''
```{{code-cell}} ipython3
import sys

print("Traceback (most recent call last):\\n  File x")
print("RuntimeWarning: overflow encountered in exp")
sys.stdout.write("10%|#  | 1/10 [00:01, 3it/s]\\r20%|## |")
print(object())
```

```{{code-cell}} ipython3
:tags: [nbval-check-output]
'''.format()


def test_the_tiny_book_is_sound(built):
    site = built.root / "_build/html"
    assert crawl(site) == []
    assert (site / "notebooks/tiny.html").is_file() and (site / "book/ledger.html").is_file()


def test_nothing_changed_nothing_built(built):
    said = built("build")
    assert "the book is up to date" in said and "http.server -d _build/html" in said


def test_faults_of_a_run_and_of_prose_are_all_found_and_the_site_stays(built, tmp_path):
    """One build with every fault that text can bring; all are named."""
    shutil.copytree(built.root, tmp_path / "book")
    book = type(built)(tmp_path / "book")
    book.edit("```{code-cell} ipython3\n:tags: [nbval-check-output]\n", PLANTED)
    prose = (
        "\n\\:::{note} loose\n\n    ```{prf:theorem} shown\n\n"
        "Costs 5 $ here. A word {unknown}`x.\n\n"
        '<a href="nowhere.html">nowhere</a> <a href="tiny.html#no-such-place">lost</a>\n\n'
        '<script src="https://cdn.example.org/x.js"></script>\n'
        '<link rel="stylesheet" href="https://fonts.example.org/css?family=X">\n'
        "<style>@font-face {font-family: X; src: url(//fonts.example.org/x.woff2)}</style>\n\n"
    )
    book.edit("## Setting\n", f"## Setting\n{prose}")
    book.edit('alt: "Points on a parabola.", ', "")
    before = (book.root / "_build/html/build.json").read_text()
    book("run")
    said = book("build", code=1)
    wanted = [
        "a traceback:",
        "a warning: '",
        "progress-bar garbage:",
        "an object's repr:",
        "a raw directive:",
        "a raw role:",
        "a bare dollar sign:",
        "dead link: nowhere.html",
        "dead link: no place 'no-such-place' in notebooks/tiny.html",
        "loads a script from outside: https://cdn.example.org/x.js",
        "loads a link from outside: https://fonts.example.org",
        "loads from outside: //fonts.example.org/x.woff2",
        "image without alternative text",
    ]
    missing = [text for text in wanted if text not in said]
    assert not missing, said
    assert (book.root / "_build/html/build.json").read_text() == before


def test_sphinx_warning_is_an_error_and_the_site_stays(built, tmp_path):
    shutil.copytree(built.root, tmp_path / "book")
    book = type(built)(tmp_path / "book")
    book.edit("See {numref}`tiny-F1`.", "See {numref}`tiny-F9` and {cite}`nobody1900`.")
    before = (book.root / "_build/html/build.json").read_text()
    said = book("build", code=1)
    assert "Jupyter Book found faults" in said
    assert "tiny-f9" in said.lower() and "nobody1900" in said
    assert (book.root / "_build/html/build.json").read_text() == before


@pytest.fixture
def page(built, tmp_path):
    """Plant a piece of HTML in a copy of the built chapter; what the crawl then says."""
    site = tmp_path / "html"
    shutil.copytree(built.root / "_build/html", site, copy_function=os.link)
    path = site / "notebooks/tiny.html"
    text = path.read_text()
    path.unlink()

    def plant(piece, **options):
        path.write_text(text.replace("</article>", f"{piece}</article>"))
        return crawl(site, **options)

    return plant


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        ("<pre>Traceback (most recent call last):</pre>", "a traceback"),
        ('<div class="output traceback">boom</div>', "a traceback"),
        ("<pre>UserWarning: too large</pre>", "a warning"),
        ("<pre>  3%|▎    | 3/100</pre>", "progress-bar garbage"),
        ("<p>one&#13;two</p>", "progress-bar garbage"),
        ("<pre>&lt;Axes at 0x7f3a5c&gt;</pre>", "an object's repr"),
        ("<pre>[&lt;matplotlib.lines.Line2D object at 0x7f3a5c00&gt;]</pre>", "an object's repr"),
        ("<pre>\x1b[31mred</pre>", "terminal colour codes"),
        ("<p>```{prf:theorem} T</p>", "a raw directive"),
        ("<p>:::{note} x</p>", "a raw directive"),
        ("<p>{prf:ref}`x`</p>", "a raw role"),
        ("<p>for $x$ and</p>", "a bare dollar sign"),
        ('<a href="gone.html">x</a>', "dead link: gone.html"),
        ('<a href="#gone">x</a>', "dead link: no place 'gone'"),
        ('<img alt="a" src="gone.png">', "dead link: gone.png"),
        ('<img src="../_static/file.png">', "image without alternative text: file.png"),
        ('<img alt="../_static/file.png" src="../_static/file.png">', "without alternative text"),
        ('<script src="//cdn.example.org/x.js"></script>', "loads a script from outside"),
        ('<link rel="preconnect" href="https://fonts.example.org">', "loads a link from outside"),
        ('<p style="background: url(http://x.example.org/a.png)">x</p>', "loads from outside"),
        ("<style>@import 'https://x.example.org/a.css';</style>", "loads from outside"),
        ('<img alt="a" src="https://x.example.org/a.png">', "loads a img from outside"),
        ('<span class="problematic">x</span>', "message of the page builder"),
        ('<a href="https://colab.research.google.com/github/a/b/blob/launch/n.ipynb">c</a>',
         "launch link without a target"),
        ('<a href="https://mybinder.org/v2/gh/a/b/launch?urlpath=lab/tree/n.ipynb">c</a>',
         "launch link without a target"),
    ],
)
def test_planted_fault_is_found(page, piece, message):
    found = page(piece)
    assert len(found) == 1 and message in found[0], found
    assert found[0].startswith("notebooks/tiny.html: ")


@pytest.mark.parametrize(
    "piece",
    [
        '<a href="https://arxiv.org/abs/2605.04279">outside links are fine</a>',
        '<pre>```{prf:theorem} in code, with $x$ and {ref}`y`</pre>',
        '<span class="math notranslate">\\(x = $\\)</span>',
        '<a href="#setting">here</a> <a href="../book/ledger.html">there</a>',
        '<img alt="A curve." src="../_static/file.png">',
    ],
)
def test_sound_pieces_are_left_alone(page, piece):
    assert page(piece) == []


def test_launch_link_with_its_target(page, tmp_path):
    target = tmp_path / "launch/notebooks/tiny.ipynb"
    target.parent.mkdir(parents=True)
    target.write_text("{}")
    base = "https://colab.research.google.com/github/a/b/blob/launch/notebooks/"
    options = {"launch": tmp_path / "launch", "branch": "launch"}
    assert page(f'<a href="{base}tiny.ipynb">c</a>', **options) == []
    assert len(page(f'<a href="{base}other.ipynb">c</a>', **options)) == 1


def test_outside_font_in_a_style_file(built, tmp_path):
    site = tmp_path / "html"
    shutil.copytree(built.root / "_build/html", site, copy_function=os.link)
    (site / "_static/extra.css").write_text("@font-face{src:url(https://f.example.org/a.woff)}")
    assert crawl(site) == [
        "_static/extra.css: loads from outside: https://f.example.org/a.woff"
    ]


def test_stale_chapters_are_not_built(copy):
    copy.edit("FIRST = 1", "FIRST = 3", "mhabook_lib/tiny_base.py")
    assert "was run before the library" in copy("build", code=1)
    copy.edit("size = 5", "size = 7")
    assert "was run before its code changed: mhabook run tiny" in copy("build", code=1)


def test_chapter_that_was_never_run_is_not_built(fresh):
    assert "has not been run: mhabook run tiny" in fresh("build", code=1)
    assert not (fresh.root / "_build/html").exists()


def test_chapter_missing_from_the_contents(copy):
    copy.edit("      - file: notebooks/tiny\n", "", "_toc.yml")
    assert "tiny.md is not in _toc.yml" in copy("build", code=1)


def test_claim_without_a_place_in_the_chapter(copy):
    copy.edit("tiny-T1", "tiny-S1")
    assert "claim tiny.T1 has no place in its chapter" in copy("build", code=1)


def test_a_new_number_reaches_the_page(copy):
    copy("build")
    page = copy.root / "_build/html/book/ledger.html"
    assert ">55<" in page.read_text()
    copy.edit("size = 5", "size = 6")
    copy("run")
    copy("build")
    assert ">91<" in page.read_text() and ">55<" not in page.read_text()


def test_sites_are_swapped_whole(tmp_path):
    from mhabook_lib.book.run import replace_folder, restore

    site, new = tmp_path / "html", tmp_path / "new"
    for folder, text in ((site, "old"), (new, "new")):
        folder.mkdir()
        (folder / "page").write_text(text)
    site.rename(tmp_path / "html.old")  # as if the machine stopped between the two renames
    restore(site)
    assert (site / "page").read_text() == "old"
    replace_folder(new, site)
    assert (site / "page").read_text() == "new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["html"]


def test_ledger_data_and_page_agree(built):
    claims = json.loads(built("claims", "tiny", "--json"))
    page = (built.root / "_build/html/book/ledger.html").read_text()
    for record in claims:
        assert f"#{record['id'].replace('.', '-')}".lower() in page.lower()
