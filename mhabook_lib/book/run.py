"""Run chapters: text notebook -> parameters -> papermill -> claims data -> published folder."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nbformat

from mhabook_lib.book.chapters import (
    BookError,
    Chapter,
    Project,
    check_kernel,
    literal_assignments,
    parameters_cell,
    parse_overrides,
)
from mhabook_lib.book.claims import validate_claims
from mhabook_lib.book.keys import digest, execution_key, versions

TIME_LIMIT = 600
PATIENCE = 5


@dataclass(frozen=True)
class Job:
    """One chapter with everything that decides its outcome."""

    chapter: Chapter
    profile: str
    device: str
    given: dict[str, Any]
    parameters: dict[str, Any]
    key: str

    @property
    def folder(self) -> Path:
        """Where the result goes: runs with changed parameters never replace the published one."""
        if not self.given:
            return self.chapter.result(self.profile)
        name = f"{self.chapter.slug}-{digest(self.profile, self.given)[:8]}"
        return self.chapter.project.build / "custom" / name

    @property
    def up_to_date(self) -> bool:
        restore(self.folder)
        return read_run(self.folder).get("key") == self.key


@dataclass(frozen=True)
class Outcome:
    """What became of one job."""

    job: Job
    state: str  # ran, kept, failed
    message: str = ""

    @property
    def failed(self) -> bool:
        return self.state == "failed"


def read_run(folder: Path) -> dict[str, Any]:
    """The facts of a finished run, or nothing."""
    path = folder / "run.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def cuda_possible() -> bool:
    """Cheap test before importing torch: is there a driver at all?"""
    return any(Path(p).exists() for p in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg"))


def cuda_available() -> bool:
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not cuda_possible():
        return False
    import torch

    return torch.cuda.is_available()


def resolve_device(device: str) -> str:
    """`auto` as what it means here; BookError for CUDA that is not there."""
    if device == "cpu":
        return "cpu"
    found = cuda_available()
    if device == "cuda" and not found:
        raise BookError(
            "--device cuda: PyTorch finds no CUDA device here. Use --device cpu, or install "
            "a driver and the CUDA build of torch (`mhabook doctor` shows what is seen)."
        )
    return "cuda" if found else "cpu"


def prepare(chapter: Chapter, profile: str, device: str, overrides: list[str]) -> Job:
    """Check everything that can be checked before a kernel starts."""
    notebook = chapter.notebook()
    check_kernel(notebook, chapter.slug)
    defaults = literal_assignments(parameters_cell(notebook, chapter.slug).source, chapter.slug)
    chapter.words  # noqa: B018 - a chapter without claim words must not start
    given = parse_overrides(overrides, defaults, chapter.slug)
    given = {name: value for name, value in given.items() if value != defaults[name]}
    run = {name: v for name, v in (("profile", profile), ("device", device)) if name in defaults}
    if "profile" not in defaults and profile != "quick":
        raise BookError(f"chapter '{chapter.slug}' has no parameter 'profile'.")
    changed = {name: v for name, v in (run | given).items() if defaults[name] != v}
    key = published_key(chapter, profile, resolve_device(device), given)
    return Job(chapter, profile, device, given, changed, key)


def published_key(
    chapter: Chapter, profile: str, device: str, given: dict[str, Any] | None = None
) -> str:
    """The key of a run on a device that may be one of another machine."""
    values = chapter.parameters() | {"profile": profile} | (given or {})
    values.pop("device", None)
    return execution_key(chapter, values, device)


@contextmanager
def workplace(project: Project, slug: str) -> Iterator[Path]:
    """A private folder under _build that goes away whatever happens."""
    above = project.build / "tmp"
    above.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{slug}-", dir=above))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def environment(project: Project, threads: int | None) -> dict[str, str]:
    """The kernel imports the library of this checkout, whatever is installed."""
    path = [str(project.root), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path), "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    if threads:
        env |= {f"{name}_NUM_THREADS": str(threads) for name in ("OMP", "MKL", "OPENBLAS")}
    return env


class Runner:
    """Runs jobs side by side, each in its own process; a failing one does not stop the others."""

    def __init__(
        self,
        *,
        jobs: int = 1,
        threads: int | None = None,
        time_limit: int = TIME_LIMIT,
        say: Callable[[str], None] = print,
    ):
        self.width = jobs
        self.threads = threads or (max(1, (os.cpu_count() or 1) // jobs) if jobs > 1 else None)
        self.time_limit = time_limit
        self.say = say
        self.processes: set[subprocess.Popen] = set()

    def run(self, jobs: list[Job], *, force: bool = False) -> list[Outcome]:
        """All outcomes in the order of the jobs."""
        with ThreadPoolExecutor(self.width) as pool:
            slots = [pool.submit(self._one, job, i, force) for i, job in enumerate(jobs)]
            try:
                return [slot.result() for slot in slots]
            except KeyboardInterrupt:
                for slot in slots:
                    slot.cancel()
                self._stop()
                raise

    def _stop(self) -> None:
        for process in list(self.processes):
            process.send_signal(signal.SIGINT)
        for process in list(self.processes):
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()

    def _one(self, job: Job, place: int, force: bool) -> Outcome:
        if job.up_to_date and not force:
            self.say(f"{job.chapter.slug}: up to date")
            return Outcome(job, "kept")
        self.say(f"{job.chapter.slug}: running (profile {job.profile}, device {job.device})")
        with workplace(job.chapter.project, job.chapter.slug) as folder:
            outcome = self._execute(job, folder, place % self.width)
            problem = outcome.get("error") and describe(job, outcome)
            problem = problem or fault_of_result(job, folder / "out")
            if problem:
                log = keep_log(job, folder, outcome.get("log", problem))
                self.say(f"{problem}\n  log: {log}")
                return Outcome(job, "failed", problem)
            facts = publish(job, folder / "out", outcome)
        self.say(f"{job.chapter.slug}: {summary(facts)}")
        return Outcome(job, "ran", summary(facts))

    def _execute(self, job: Job, folder: Path, position: int) -> dict[str, Any]:
        nbformat.write(job.chapter.notebook(), folder / "source.ipynb")
        task = {
            "slug": job.chapter.slug,
            "folder": str(folder),
            "parameters": job.parameters,
            "time_limit": self.time_limit,
            "progress": sys.stderr.isatty(),
            "position": position,
        }
        (folder / "job.json").write_text(json.dumps(task))
        command = [sys.executable, "-m", "mhabook_lib.book.worker", str(folder / "job.json")]
        env = environment(job.chapter.project, self.threads)
        process = subprocess.Popen(command, env=env, cwd=folder)
        self.processes.add(process)
        try:
            code = process.wait()
        finally:
            self.processes.discard(process)
        if (folder / "outcome.json").is_file():
            return json.loads((folder / "outcome.json").read_text())
        said = f"the run was cut short (exit code {code})"
        noise = folder / "worker.log"
        return {"error": said, "log": noise.read_text() if noise.is_file() else said}


def describe(job: Job, outcome: dict[str, Any]) -> str:
    """Chapter, cell and error in one line."""
    place = ""
    if outcome.get("cell"):
        place = f", code cell {outcome['cell']} (`{outcome['code'][:60]}`)"
    return f"chapter '{job.chapter.slug}' failed{place}: {outcome['error']}"


def fault_of_result(job: Job, out: Path) -> str:
    """Why a run that reached its end is still no result; empty when it is one."""
    slug = job.chapter.slug
    notebook = nbformat.read(out / f"{slug}.ipynb", as_version=4)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                return f"chapter '{slug}' holds an error output: {output.ename}: {output.evalue}"
    path = out / "claims.json"
    if not path.is_file():
        return f"chapter '{slug}' wrote no claims data: its last code cell must be ledger.close()"
    problems = validate_claims(json.loads(path.read_text()), job.chapter.claim_ids)
    if problems:
        return f"chapter '{slug}': the claims data is not in order: " + "; ".join(problems)
    return ""


def warnings_of(notebook) -> list[str]:
    """What the chapter wrote on stderr, one line a cell; the page does not show it."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "stream" and output.name == "stderr" and output.text.strip():
                first = output.text.strip().splitlines()[0]
                warning = re.search(r"\w+Warning: .*", first)
                found.append((warning[0] if warning else first)[:200])
    return found


def publish(job: Job, out: Path, outcome: dict[str, Any]) -> dict[str, Any]:
    """Write the facts of the run beside its outputs and put the folder in its place."""
    notebook = nbformat.read(out / f"{job.chapter.slug}.ipynb", as_version=4)
    facts = {
        "slug": job.chapter.slug,
        "key": job.key,
        "profile": job.profile,
        "device": resolve_device(job.device),
        "parameters": job.given,
        "seconds": outcome["seconds"],
        "peak_memory_mb": outcome["peak_memory_mb"],
        "cells": sum(c.cell_type == "code" for c in notebook.cells),
        "claims": len(json.loads((out / "claims.json").read_text())),
        "warnings": warnings_of(notebook),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "machine": f"{platform.system()} {platform.machine()}",
    }
    (out / "run.json").write_text(json.dumps(facts, indent=1))
    replace_folder(out, job.folder)
    return facts


def replace_folder(new: Path, place: Path) -> None:
    """Put a finished folder in the place of an earlier one; both are whole at any moment."""
    place.parent.mkdir(parents=True, exist_ok=True)
    old = place.with_name(place.name + ".old")
    restore(place)
    if place.exists():
        place.rename(old)
    new.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def restore(place: Path) -> None:
    """Undo a replacement that was cut short between its two renames."""
    old = place.with_name(place.name + ".old")
    if old.exists():
        if place.exists():
            shutil.rmtree(old)
        else:
            old.rename(place)


def keep_log(job: Job, folder: Path, text: str) -> Path:
    """Keep what helps to find the fault: the message and the half-executed notebook."""
    path = keep_text(job.chapter, "run", text)
    partial = folder / "out" / f"{job.chapter.slug}.ipynb"
    if partial.is_file():
        shutil.copy(partial, path.with_suffix(".ipynb"))
    return path


def keep_text(chapter: Chapter, stage: str, text: str) -> Path:
    """A log file of one step of a chapter."""
    logs = chapter.project.logs
    logs.mkdir(parents=True, exist_ok=True)
    path = logs / f"{chapter.slug}-{stage}.log"
    path.write_text(text + "\n", encoding="utf-8")
    return path


def summary(facts: dict[str, Any]) -> str:
    text = f"{facts['claims']} claims in {facts['seconds']:.1f} s"
    if facts["warnings"]:
        text += f"; {len(facts['warnings'])} warnings on stderr, the first: {facts['warnings'][0]}"
    return text
