"""Compare chapters with outputs that were accepted earlier (nbval, marked cells only).

A reference file holds, for every cell tagged `nbval-check-output`, its code and its outputs. Cells
are matched by their code: a cell may move freely, but one whose code changed has no accepted
output until somebody accepts it anew. nbval runs the current source, never an old copy of it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import nbformat

from mhabook_lib.book.chapters import BookError, Chapter, tags
from mhabook_lib.book.keys import code_cells, digest, own_code_cells
from mhabook_lib.book.results import executed_notebook, read_check
from mhabook_lib.book.run import (
    TIME_LIMIT,
    environment,
    keep_text,
    published_key,
    read_run,
    resolve_device,
    workplace,
)

MARK = "nbval-check-output"
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def marked(cells: list) -> list:
    return [cell for cell in cells if MARK in tags(cell)]


def accepted_outputs(cell) -> list[dict[str, Any]]:
    """Outputs as they are kept: no picture data, no counters."""
    kept = []
    for output in json.loads(json.dumps(cell.outputs)):
        for picture in ("image/png", "image/jpeg"):
            if picture in output.get("data", {}):
                output["data"][picture] = ""
        if "execution_count" in output:
            output["execution_count"] = None
        kept.append(output)
    return kept


def accept(chapter: Chapter) -> int:
    """Write the reference from the last good run; returns the number of cells."""
    executed = executed_notebook(chapter, "quick")
    facts = read_run(chapter.result("quick"))
    if published_key(chapter, "quick", facts["device"]) != facts["key"]:
        slug = chapter.slug
        raise BookError(f"chapter '{slug}' changed since its run: mhabook run {slug}")
    cells = marked(own_code_cells(executed))
    if not cells:
        raise BookError(f"chapter '{chapter.slug}' has no cell tagged '{MARK}': nothing to accept")
    records = [{"code": c.source, "executed": True, "outputs": accepted_outputs(c)} for c in cells]
    chapter.reference.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"chapter": chapter.slug, "cells": records}, indent=1, ensure_ascii=False)
    chapter.reference.write_text(text + "\n", encoding="utf-8")
    return len(cells)


def merged(chapter: Chapter):
    """The current source carrying the accepted outputs; BookError where one is missing."""
    notebook = chapter.notebook()
    cells = marked(code_cells(notebook))
    if not cells:
        raise BookError(f"chapter '{chapter.slug}' has no cell tagged '{MARK}'")
    renew = f"look at the output, then: mhabook accept {chapter.slug}"
    if not chapter.reference.is_file():
        raise BookError(f"chapter '{chapter.slug}' has no accepted outputs; {renew}")
    waiting = defaultdict(list)
    for record in json.loads(chapter.reference.read_text(encoding="utf-8"))["cells"]:
        waiting[record["code"].strip()].append(record)
    for number, cell in enumerate(cells, start=1):
        records = waiting[cell.source.strip()]
        where = f"chapter '{chapter.slug}', marked cell {number}"
        if not records:
            raise BookError(f"{where} has no accepted output; {renew}")
        record = records.pop(0)
        if not record.get("executed") or not record["outputs"]:
            raise BookError(f"{where}: its reference was never executed; {renew}")
        cell.outputs = nbformat.from_dict(record["outputs"])
        cell.execution_count = 1
    return notebook


def check_key(chapter: Chapter) -> str:
    reference = chapter.reference.read_text(encoding="utf-8")
    return digest(published_key(chapter, "quick", resolve_device("auto")), reference)


def check(
    chapter: Chapter,
    *,
    force: bool = False,
    time_limit: int = TIME_LIMIT,
    say: Callable[[str], None] = print,
) -> bool:
    """Is every marked output what it was when it was accepted? A green answer is remembered."""
    notebook = merged(chapter)
    key = check_key(chapter)
    if not force and read_check(chapter).get("key") == key:
        say(f"{chapter.slug}: compared already, nothing changed")
        return True
    say(f"{chapter.slug}: comparing with the accepted outputs ...")
    started = time.perf_counter()
    code, text = run_nbval(chapter, notebook, time_limit)
    seconds = time.perf_counter() - started
    compared = len(marked(code_cells(notebook)))
    if code:
        log = keep_text(chapter, "check", text)
        say(f"{chapter.slug}: differs from what was accepted\n{difference(text)}\n  log: {log}")
        return False
    remember(chapter, {"key": key, "seconds": round(seconds, 1), "compared": compared})
    say(f"{chapter.slug}: {compared} marked cells as accepted ({seconds:.0f} s)")
    return True


def run_nbval(chapter: Chapter, notebook, time_limit: int) -> tuple[int, str]:
    """pytest's exit code and report on a private copy of the merged notebook."""
    with workplace(chapter.project, f"{chapter.slug}-check") as folder:
        path = folder / f"{chapter.slug}.ipynb"
        nbformat.write(notebook, path)
        (folder / "pytest.ini").write_text("[pytest]\n")
        command = [sys.executable, "-m", "pytest", "-c", "pytest.ini", "--color=no", "-vv"]
        command += ["-p", "no:cacheprovider", "--nbval-lax", "--nbval-current-env", "--tb=short"]
        command += [f"--nbval-cell-timeout={time_limit}", path.name]
        env = environment(chapter.project, None) | {"MHABOOK_OUTPUT": str(folder / "out")}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, cwd=folder, env=env, **streams)
    return done.returncode, ANSI.sub("", done.stdout)


def difference(text: str, most: int = 30) -> str:
    """The part of nbval's report that names the cell and what differs."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("____")), 0)
    shown = [line for line in lines[start:] if line.strip()][:most]
    return "\n".join(f"  {line}" for line in shown)


def remember(chapter: Chapter, facts: dict[str, Any]) -> None:
    """Keep a green answer with the run that it speaks for."""
    folder = chapter.project.build / "checks"
    folder.mkdir(parents=True, exist_ok=True)
    facts |= {
        "passed": True,
        "run_key": published_key(chapter, "quick", resolve_device("auto")),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
        json.dump(facts, file, indent=1)
    os.replace(file.name, folder / f"{chapter.slug}.json")
