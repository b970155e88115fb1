"""When is a result still good? One key over code, parameters, library, claim words, versions."""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

from mhabook_lib.book.chapters import Chapter, tags

PACKAGE = "mhabook_lib"
VERSIONED = ("torch", "numpy", "scipy", "matplotlib", "mpmath")


def versions() -> dict[str, str]:
    """What decides a number: Python and the packages that compute and draw."""
    found = {"python": platform.python_version()}
    for name in VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def code_cells(notebook) -> list:
    return [c for c in notebook.cells if c.cell_type == "code"]


def own_code_cells(notebook) -> list:
    """The chapter's code cells, without those that the runner put in."""
    return [c for c in code_cells(notebook) if "injected-parameters" not in tags(c)]


def python_of(notebook) -> str:
    """The code of a notebook with shell and magic lines blanked out."""
    lines = "\n".join(cell.source for cell in code_cells(notebook)).splitlines()
    return "\n".join(re.sub(r"^(\s*)[%!].*", r"\1pass", line) for line in lines)


def imported_modules(code: str, module: str = "", package: bool = False) -> set[str]:
    """Names of library modules that a piece of code imports, anywhere in it."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return set()
    found = set()
    parts = module.split(".") if module else []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = parts[: len(parts) - node.level + package]
                base = ".".join([*up, base] if base else up)
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == PACKAGE}


def module_file(root: Path, name: str) -> Path | None:
    base = root.joinpath(*name.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def reached_files(root: Path, code: str) -> list[Path]:
    """Library files that a chapter reaches through its imports, and theirs."""
    todo, seen = imported_modules(code), {}
    while todo:
        name = todo.pop()
        path = module_file(root, name)
        if name in seen or path is None:
            continue
        seen[name] = path
        text = path.read_text(encoding="utf-8")
        inner = imported_modules(text, name, path.name == "__init__.py")
        parents = {name.rsplit(".", k)[0] for k in range(1, name.count(".") + 1)}
        todo |= (inner | parents) - set(seen)
    return sorted(set(seen.values()))


def digest(*parts: Any) -> str:
    """A short hash of text, bytes and plain data."""
    total = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else json.dumps(part, sort_keys=True).encode()
        total.update(len(data).to_bytes(8, "big") + data)
    return total.hexdigest()[:20]


def execution_key(chapter: Chapter, parameters: dict[str, Any], device: str) -> str:
    """Same key, same outputs: prose may change without a run, anything else may not."""
    notebook = chapter.notebook()
    root = chapter.project.root
    cells = [[c.source, tags(c)] for c in code_cells(notebook)]
    library = {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in [*reached_files(root, python_of(notebook)), chapter.words_file]
        if path.is_file()
    }
    return digest(cells, parameters, device, library, versions())
