"""A new chapter from an existing one, or from the template: its own name, labels and claims."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import yaml

from mhabook_lib.book.chapters import SLUG, BookError, Chapter, Project
from mhabook_lib.book.export import notebook_labels

TEMPLATE = "template"


def new_chapter(project: Project, name: str, source: str | None, title: str | None) -> Chapter:
    """Write notebook, claims file and entry in the contents; all three or nothing."""
    if not SLUG.fullmatch(name):
        raise BookError(
            f"'{name}' cannot name a chapter: use lower-case letters, digits and single hyphens, "
            "starting with a letter, as in my-experiment."
        )
    chapter = Chapter(project, name)
    if chapter.source.exists() or chapter.words_file.exists():
        raise BookError(f"chapter '{name}' exists already; choose another name.")
    title = title or name.replace("-", " ").replace("_", " ").capitalize()
    text, words, labels = material(project, source)
    old = source or TEMPLATE
    text, words = (renamed(part, old, name, labels) for part in (text, words))
    contents = with_entry((project.root / "_toc.yml").read_text(encoding="utf-8"), name, source)
    files = {
        chapter.source: retitled(text, title),
        chapter.words_file: retitled_words(words, title),
        project.root / "_toc.yml": contents,
    }
    write_all(files)
    return chapter


def material(project: Project, source: str | None) -> tuple[str, str, list[str]]:
    """Notebook text, claim words and labels of what is copied."""
    if source is None:
        folder = resources.files("mhabook_lib.book") / TEMPLATE
        text = (folder / "template.md").read_text(encoding="utf-8")
        words = (folder / "template.toml").read_text(encoding="utf-8")
        import jupytext

        return text, words, list(notebook_labels(jupytext.reads(text, fmt="md:myst")))
    chapter = project.chapter(source)
    chapter.words  # noqa: B018 - a chapter without claim words cannot be forked
    text = chapter.source.read_text(encoding="utf-8")
    words = chapter.words_file.read_text(encoding="utf-8")
    return text, words, list(notebook_labels(chapter.notebook()))


def renamed(text: str, old: str, new: str, labels: list[str]) -> str:
    """Labels and claim IDs get the new name: every label of the book exists once."""
    for label in sorted(labels, key=len, reverse=True):
        tail = label.removeprefix(f"{old}-")
        text = re.sub(rf"(?<![\w-]){re.escape(label)}(?![\w-])", f"{new}-{tail}", text)
    text = re.sub(rf"(?<![\w-]){re.escape(old)}\.(?=[A-Z])", f"{new}.", text)
    return re.sub(rf"(Ledger\(\s*[\"']){re.escape(old)}([\"'])", rf"\g<1>{new}\g<2>", text)


def retitled(text: str, title: str) -> str:
    return re.sub(r"(?m)^# .*$", lambda _: f"# {title}", text, count=1)


def retitled_words(words: str, title: str) -> str:
    quoted = title.replace("\\", "\\\\").replace('"', '\\"')
    return re.sub(r"(?m)^title\s*=.*$", lambda _: f'title = "{quoted}"', words, count=1)


def with_entry(contents: str, name: str, source: str | None) -> str:
    """The contents with the new chapter below its source, or below the last chapter."""
    lines = contents.splitlines()
    entry = re.compile(r"^(\s*- )file:\s*notebooks/(\S+)\s*$")
    places = [(i, m) for i, line in enumerate(lines) if (m := entry.match(line))]
    chosen = [(i, m) for i, m in places if source is None or m[2].removesuffix(".md") == source]
    if not chosen:
        raise BookError("_toc.yml lists no chapter to put the new one below; add one by hand.")
    place, match = chosen[-1]
    lines.insert(place + 1, f"{match[1]}file: notebooks/{name}")
    text = "\n".join(lines) + "\n"
    yaml.safe_load(text)
    return text


def write_all(files: dict[Path, str]) -> None:
    """Write every file or leave everything as it was."""
    before = {path: path.read_bytes() if path.exists() else None for path in files}
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except BaseException:
        for path, data in before.items():
            if data is None:
                path.unlink(missing_ok=True)
            else:
                path.write_bytes(data)
        raise
