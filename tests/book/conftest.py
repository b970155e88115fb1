"""A tiny book in a temporary folder: one chapter that runs in about two seconds.

It carries a copy of the bookmaking package and a library module of its own, so that a test may
break anything in it.
"""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CHAPTER = '''---
jupytext:
  text_representation:
    extension: .md
    format_name: myst
kernelspec:
  display_name: Python 3
  language: python
  name: python3
---

# A tiny chapter

It asks {cite:t}`noether1918` one question.

```{code-cell} ipython3
:tags: [parameters]

profile = "quick"
device = "auto"
seed = 0
size = 5
```

```{code-cell} ipython3
import numpy as np

from mhabook_lib.book import Ledger, stable
from mhabook_lib.plotting import label, panels
from mhabook_lib.tiny import squares

ledger = Ledger("tiny", profile=profile, device=device, seed=seed)
values = squares(size)
```

(tiny-setting)=
## Setting

````{prf:theorem} Squares
:label: tiny-T1

The sum of the first $n$ squares is

$$
n (n + 1) (2 n + 1) / 6
$$ (tiny-sum)
````

````{dropdown} Why it holds
By induction from {eq}`tiny-sum` and {prf:ref}`tiny-T1`; see {ref}`tiny-setting`.
````

```{code-cell} ipython3
ledger.claim("T1").equals(
    "sum", values.sum(), size * (size + 1) * (2 * size + 1) // 6,
    control=values.sum() + 1,
)
```

See {numref}`tiny-F1`.

```{code-cell} ipython3
---
tags: [hide-input]
mystnb:
  image: {alt: "Points on a parabola.", width: 60%}
  figure: {caption: "Squares $n^2$.", name: tiny-F1}
---
figure, axis = panels()
axis.plot(values, "o")
label(axis, x="n", y="square")
ledger.claim("F1").above("growth", np.diff(values), 1, control=-np.diff(values))
ledger.figure("F1", figure, values=values)
```

```{code-cell} ipython3
:tags: [nbval-check-output]

print(stable(np.sqrt(values.astype(float)).sum(), 10), stable(values[-1] / 7))
ledger.verdicts()
```

```{code-cell} ipython3
:tags: [remove-cell]

path = ledger.close()
```
'''

WORDS = '''[chapter]
title = "A tiny chapter"
short = "One question."
paper = "noether1918"
paper_title = "Invariante Variationsprobleme"
covers = "squares"
prerequisites = "none"
part = "Tiny"

[claims.T1]
kind = "theorem"
statement = "The sum of the first $n$ squares is $n(n+1)(2n+1)/6$."
provenance = "classical"
why_tolerance = "integers"
control = "one more"

[claims.F1]
kind = "figure"
statement = "The squares grow."
provenance = "classical"
why_tolerance = "a sign"
control = "the curve upside down"
'''

LIBRARY = '''"""Squares."""

import numpy as np

from mhabook_lib.tiny_base import FIRST


def squares(size):
    """The first `size` squares."""
    return np.arange(FIRST, FIRST + size) ** 2
'''

BIB = '''@article{noether1918,
  author = {Noether, Emmy},
  title = {Invariante Variationsprobleme},
  journal = {Nachrichten der Gesellschaft der Wissenschaften},
  year = {1918},
  url = {https://arxiv.org/abs/physics/0503066}
}
'''

INTRO = '''# A tiny book

It says {cite:t}`noether1918` and shows numbers.

```{include} generated/totals.md
```

```{include} generated/figure.md
```

```{include} generated/chapters.md
```

Read {doc}`../notebooks/tiny`.
'''

REFERENCES = '''# References

```{bibliography}
```
'''

TOC = '''format: jb-book
root: book/intro
parts:
  - caption: Chapters
    numbered: true
    chapters:
      - file: notebooks/tiny
  - caption: Evidence
    chapters:
      - file: book/ledger
      - file: book/status
      - file: book/speed
      - file: book/references
'''


class Book:
    """The tiny book and a command line on it."""

    def __init__(self, root: Path):
        self.root = root

    @property
    def source(self) -> Path:
        return self.root / "notebooks" / "tiny.md"

    @property
    def result(self) -> Path:
        return self.root / "_build" / "quick" / "tiny"

    def edit(self, old: str, new: str, path: str = "notebooks/tiny.md") -> None:
        file = self.root / path
        text = file.read_text()
        assert old in text, f"{old!r} is not in {path}"
        file.write_text(text.replace(old, new))

    def start(self, *arguments: str, **options) -> subprocess.Popen:
        """Start a command; it hears an interrupt even where this process ignores them."""
        return subprocess.Popen(
            [sys.executable, "-m", "mhabook_lib.book.cli", *arguments],
            cwd=self.root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            **options,
        )

    def __call__(self, *arguments: str, code: int = 0, **options) -> str:
        """Run a command; its output and messages, after looking at the exit code."""
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=300)
        assert process.returncode == code, f"exit code {process.returncode}\n{out}\n{err}"
        assert "Traceback (most recent call last):\n  File" not in err, err
        return err + out


def write_tiny(root: Path) -> Book:
    library = root / "mhabook_lib"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "mhabook_lib" / "book", library / "book", ignore=ignored)
    for name in ("__init__.py", "plotting.py", "chapters/__init__.py"):
        (library / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / "mhabook_lib" / name, library / name)
    shutil.copytree(ROOT / "book" / "_static", root / "book" / "_static")
    shutil.copy(ROOT / "_config.yml", root)
    files = {
        "notebooks/tiny.md": CHAPTER,
        "mhabook_lib/chapters/tiny.toml": WORDS,
        "mhabook_lib/tiny.py": LIBRARY,
        "mhabook_lib/tiny_base.py": "FIRST = 1\n",
        "book/references.bib": BIB,
        "book/intro.md": INTRO,
        "book/references.md": REFERENCES,
        "_toc.yml": TOC,
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return Book(root)


@pytest.fixture
def fresh(tmp_path) -> Book:
    """A tiny book in which nothing has been run."""
    return write_tiny(tmp_path / "book")


@pytest.fixture(scope="session")
def ran(tmp_path_factory) -> Book:
    """A tiny book that was run and accepted. Read only: take `copy` to change it."""
    book = write_tiny(tmp_path_factory.mktemp("ran") / "book")
    book("run")
    book("accept")
    return book


@pytest.fixture(scope="session")
def built(ran, tmp_path_factory) -> Book:
    """A tiny book that was run, compared and built. Read only."""
    book = Book(tmp_path_factory.mktemp("built") / "book")
    shutil.copytree(ran.root, book.root)
    book("check")
    book("build")
    return book


@pytest.fixture
def copy(ran, tmp_path) -> Book:
    """A private copy of the tiny book that was run and accepted."""
    shutil.copytree(ran.root, tmp_path / "copy")
    return Book(tmp_path / "copy")
