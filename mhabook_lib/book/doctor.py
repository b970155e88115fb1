"""Is this machine ready for the book, and what to do where it is not."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from mhabook_lib.book.browser import find_browser
from mhabook_lib.book.chapters import BookError, find_project

NEEDED_DISK = 3
NEEDED_MEMORY = 3
INSTALL = "run `make book`, or: pip install -c constraints.txt -e '.[book,test]'"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report."""

    name: str
    seen: str
    good: bool = True
    essential: bool = True
    advice: str = ""


def examine() -> Iterator[Finding]:
    yield python_version()
    yield from packages()
    yield kernel()
    yield cuda()
    yield from room()
    yield browser()
    yield book()


def python_version() -> Finding:
    good = sys.version_info >= (3, 11)
    seen = sys.version.split()[0]
    return Finding("Python", seen, good, advice="install Python 3.11 or newer")


def requirements() -> list[Requirement]:
    """What the installed package says it needs, the extra `book` included."""
    texts = metadata.requires("mhabook") or []
    parsed = [Requirement(text) for text in texts]
    return [r for r in parsed if not r.marker or r.marker.evaluate({"extra": "book"})]


def packages() -> Iterator[Finding]:
    try:
        needed = requirements()
    except metadata.PackageNotFoundError:
        yield Finding("mhabook", "not installed", False, advice=INSTALL)
        return
    pins = pinned_versions()
    for requirement in needed:
        yield package(requirement, pins.get(canonical(requirement.name), ""))


def package(requirement: Requirement, pin: str) -> Finding:
    try:
        seen = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return Finding(requirement.name, "missing", False, advice=INSTALL)
    if not requirement.specifier.contains(seen, prereleases=True):
        advice = f"needs {requirement.specifier}; {INSTALL}"
        return Finding(requirement.name, seen, False, advice=advice)
    other = pin and seen.split("+")[0] != pin
    note = f"the published book uses {pin}" if other else ""
    return Finding(requirement.name, seen, not other, essential=False, advice=note)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned_versions() -> dict[str, str]:
    """constraints.txt of the checkout, if we stand in one."""
    try:
        path = find_project().root / "constraints.txt"
    except BookError:
        return {}
    lines = path.read_text().splitlines() if path.is_file() else []
    pairs = [line.split("==") for line in lines if "==" in line and line[0] != "#"]
    return {canonical(name): version.split(";")[0].strip() for name, version in pairs}


def kernel() -> Finding:
    try:
        from jupyter_client.kernelspec import KernelSpecManager

        spec = KernelSpecManager().get_kernel_spec("python3")
    except Exception as error:
        return Finding("kernel python3", str(error), False, advice="pip install ipykernel")
    program = spec.argv[0]
    good = same_environment(program)
    advice = f"it starts {program}; run: {sys.executable} -m ipykernel install --sys-prefix"
    return Finding("kernel python3", spec.resource_dir, good, advice=advice)


def same_environment(program: str) -> bool:
    """A kernel that asks for plain `python` is started with the running one."""
    if re.fullmatch(r"python[\d.]*", program):
        return True
    return Path(program).exists() and Path(program).resolve() == Path(sys.executable).resolve()


def cuda() -> Finding:
    try:
        torch = importlib.import_module("torch")
    except Exception as error:
        return Finding("torch", f"does not import: {error}", False, advice=INSTALL)
    if torch.cuda.is_available():
        return Finding("CUDA", torch.cuda.get_device_name(0))
    return Finding("CUDA", "none; every chapter runs on the CPU", essential=False)


def room() -> Iterator[Finding]:
    free = shutil.disk_usage(".").free / 2**30
    advice = f"the book needs about {NEEDED_DISK} GiB"
    yield Finding("free disk", f"{free:.0f} GiB", free >= NEEDED_DISK, False, advice)
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
        advice = f"a chapter needs up to {NEEDED_MEMORY - 1} GiB"
        yield Finding("memory", f"{memory:.0f} GiB", memory >= NEEDED_MEMORY, False, advice)
    yield Finding("CPU cores", str(os.cpu_count()))


def browser() -> Finding:
    found = find_browser()
    advice = "only `make pdf` and the browser tests of `make test` use it; the tests are skipped"
    return Finding("Chromium", found or "not found", found is not None, False, advice)


def book() -> Finding:
    try:
        project = find_project()
    except BookError as error:
        return Finding("book", "not found", False, advice=str(error))
    done = [c.slug for c in project.chapters() if (c.result("quick") / "run.json").is_file()]
    site = project.build / "html" / "index.html"
    built = "built" if site.is_file() else "not built yet (mhabook build)"
    return Finding("book", f"{project.root}; run: {', '.join(done) or 'nothing yet'}; {built}")


def as_json(findings: list[Finding]) -> str:
    return json.dumps([vars(finding) for finding in findings], indent=1)
