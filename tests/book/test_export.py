"""Files that leave the book: plain notebooks, scripts, figures with their data."""

import io
import shutil
import zipfile

import nbformat
import numpy as np
import pytest
from pybtex.database import Entry

from mhabook_lib.book.chapters import BookError
from mhabook_lib.book.crawl import RAW
from mhabook_lib.book.export import authors
from mhabook_lib.book.myst import Context, defined_labels, plain

URL = "https://github.com/someone/their-book"


def exported(book):
    return nbformat.read(book.root / "_build/stage/downloads/tiny.ipynb", as_version=4)


def prose(notebook):
    return "\n\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")


def raw_syntax(text):
    return [w for w in ("a raw directive", "a raw role") if RAW[w].search(text)]


def test_download_is_plain_markdown_and_code(built):
    notebook = exported(built)
    nbformat.validate(notebook)
    text = prose(notebook)
    assert raw_syntax(text) == []
    for words in (
        "**Theorem T1 (Squares).**",
        "<summary>Why it holds</summary>",
        "[Noether (1918)](https://arxiv.org/abs/physics/0503066)",
        "**Figure F1.** Squares $n^2$.",
        "> **Verdicts.** 2 reproduced",
        "see Setting",
        "## References cited here",
    ):
        assert words in text
    assert not any("google.colab" in c.source for c in notebook.cells)
    assert notebook.metadata.kernelspec.name == "python3"


def test_the_pages_own_download_button_gives_the_plain_notebook(built):
    path = built.root / "_build/html/_sources/notebooks/tiny.ipynb"
    assert nbformat.read(path, as_version=4) == exported(built)


def test_figures_come_with_their_numbers(built):
    with zipfile.ZipFile(built.root / "_build/stage/downloads/tiny-figures.zip") as archive:
        assert set(archive.namelist()) == {"F1.svg", "F1.png", "F1.npz", "claims.json"}
        data = np.load(io.BytesIO(archive.read("F1.npz")))
    assert data["values"].tolist() == [1, 4, 9, 16, 25]


def test_script_runs_as_python(built):
    text = (built.root / "_build/stage/downloads/tiny.py").read_text()
    compile(text, "tiny.py", "exec")


@pytest.fixture(scope="module")
def published(ran, tmp_path_factory):
    """The tiny book as the publishing workflow builds it, with a repository address."""
    book = type(ran)(tmp_path_factory.mktemp("published") / "book")
    shutil.copytree(ran.root, book.root)
    patch = pytest.MonkeyPatch()
    patch.setenv("MHABOOK_REPOSITORY_URL", URL)
    book("build")
    patch.undo()
    return book


def test_every_launch_target_opens(published):
    page = (published.root / "_build/html/notebooks/tiny.html").read_text()
    place = "notebooks/tiny.ipynb"
    base = "https://colab.research.google.com/github/someone/their-book/blob/launch/"
    assert f"{base}{place}" in page
    assert f"https://mybinder.org/v2/gh/someone/their-book/launch?urlpath=lab/tree/{place}" in page
    for path in (published.root / "_build/launch").rglob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        assert raw_syntax(prose(notebook)) == []
        code = notebook.cells[0].source
        assert 'if "google.colab" in sys.modules:' in code
        assert f'%pip install -q "git+{URL}"' in code
        assert "torch" not in code and "numpy" not in code
    assert (published.root / "_build/launch" / place).is_file()


def test_launch_button_without_its_target_is_red(published):
    from mhabook_lib.book.crawl import crawl

    site = published.root / "_build/html"
    assert crawl(site, published.root / "_build/launch", "launch") == []
    assert "launch link without a target" in crawl(site, published.root / "_build/no", "launch")[0]


def test_address_that_is_none(ran, monkeypatch):
    monkeypatch.setenv("MHABOOK_REPOSITORY_URL", "my repository")
    assert "must look like https://host/owner/name" in ran("build", code=1)


TEXT = '''(here)=
## A place

:::::{prf:lemma}
:label: x-L2
Body with {math}`a^2`.

::::{admonition} Inner
:class: tip
deep {eq}`one`
::::
:::::

```{math}
:label: one
a = b
```

`````{tab-set}
````{tab-item} First
text
````
`````

```{figure} a.png
:alt: A picture
:name: fig
Caption {cite:p}`k`
```

```{list-table}
:header-rows: 1
* - a
  - b|c
* - $x$
  - {sub}`2`
```

[A link](../book/x.md), [](#x-L2), [outside](https://arxiv.org/abs/1), ![pic](a.png)

{ref}`here`, {ref}`there <here>`, {numref}`Figure %s <fig>`, {doc}`notation`, {prf:ref}`x-L2`.

% a comment

```python
kept = "{ref}`here` and :::{note}"
```
'''


def test_every_construct_becomes_plain():
    pages = {"notation": "Notation"}
    context = Context(defined_labels(TEXT), lambda role, keys: f"({keys})", pages)
    text = plain(TEXT, context)
    without_code = text.split("```python")[0]
    assert raw_syntax(without_code) == [] and "(here)=" not in text and "a comment" not in text
    for words in (
        "> **Lemma L2.**", "> > **Inner**", "> > deep (one)", "$a^2$", "$$\na = b\n$$",
        "<summary>First</summary>", "![A picture](a.png)", "Caption (k)",
        "| a | b\\|c |", "<sub>2</sub>",
        "A link, Lemma L2, [outside](https://arxiv.org/abs/1), ![pic](a.png)",
        "A place, there, Figure (fig), Notation, Lemma L2.",
        'kept = "{ref}`here` and :::{note}"',
    ):
        assert words in text, f"{words!r} is not in\n{text}"


def test_a_title_that_starts_with_its_label_says_it_once():
    text = "```{prf:theorem} T2 · Radial shadows\n:label: tiny-T2\n\nA shadow.\n```"
    context = Context(defined_labels(text), lambda role, keys: "", {})
    assert "> **Theorem T2 (Radial shadows).**" in plain(text, context)


def test_entry_without_author_is_named():
    entry = Entry("misc", fields={"title": "A note"})
    entry.key = "note2026"
    with pytest.raises(BookError, match="note2026 has no author"):
        authors(entry)
