"""environment.yml, pyproject.toml and constraints.txt describe one and the same installation."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = [
    Requirement(text)
    for text in [*PROJECT["dependencies"], *(r for extra in EXTRAS.values() for r in extra)]
]


def pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def pinned():
    return {canonicalize_name(Requirement(p).name): Requirement(p) for p in pins()}


def environment():
    text = (ROOT / "environment.yml").read_text()
    dependencies = yaml.safe_load(text)["dependencies"]
    plain = [d for d in dependencies if isinstance(d, str)]
    (pip,) = [d["pip"] for d in dependencies if isinstance(d, dict)]
    return plain, pip


def test_constraints_are_exact_versions_and_nothing_else():
    names = []
    for pin in pins():
        assert re.fullmatch(r"[\w.-]+==[\w.!]+", pin), f"{pin!r} is no plain pin"
        names.append(canonicalize_name(pin.split("==")[0]))
    assert len(names) == len(set(names))
    assert not {"pip", "setuptools", "wheel", "mhabook"} & set(names)


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda r: r.name)
def test_every_dependency_is_pinned_within_its_bounds(requirement):
    pin = pinned().get(canonicalize_name(requirement.name))
    assert pin is not None, f"constraints.txt does not pin {requirement.name}"
    (version,) = [spec.version for spec in pin.specifier]
    assert requirement.specifier.contains(version, prereleases=True)


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda r: r.name)
def test_every_dependency_has_a_lower_bound_and_no_address(requirement):
    operators = {spec.operator for spec in requirement.specifier}
    assert operators & {">=", ">", "=="} and requirement.url is None


def test_torch_is_pinned_without_a_build():
    (spec,) = pinned()["torch"].specifier
    assert spec.operator == "==" and "+" not in spec.version


def test_no_address_of_a_package_index_in_the_files():
    for name in ("constraints.txt", "environment.yml", "Makefile", "pyproject.toml"):
        assert "http" not in (ROOT / name).read_text(), name


def test_conda_installs_the_same_package_through_pip():
    plain, pip = environment()
    assert sorted(re.split(r"[ <>=]", d)[0] for d in plain) == ["pip", "python"]
    assert pip == ["-c constraints.txt", "-e .[book,test]"]
    assert set(EXTRAS) == {"book", "test", "bench", "digits"}


def test_python_bounds_agree():
    (python,) = [d.removeprefix("python ") for d in environment()[0] if d.startswith("python")]
    conda, project = SpecifierSet(python), SpecifierSet(PROJECT["requires-python"])
    for minor in range(8, 20):
        version = Version(f"3.{minor}")
        assert version not in conda or version in project
    assert "3.11" in conda and "3.11" in project


def test_make_and_the_package_agree_on_python():
    makefile = (ROOT / "Makefile").read_text()
    assert "version_info < (3, 11)" in makefile
    assert PROJECT["requires-python"] == ">=3.11"


def test_workflows_call_make_and_invent_no_address():
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        text = path.read_text()
        assert yaml.safe_load(text)["jobs"]
        assert re.search(r"make (test|book)", text), path.name
        assert "pip install" not in text and "github.com/" not in text, path.name
    assert "make test" in (ROOT / ".ci/run").read_text()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("", "needs Python 3.11 or newer, and found none"),
        ("exit 1", "is too old: the book needs Python 3.11 or newer"),
        ('case "$1" in -m) exit 1;; esac', "install its venv module"),
    ],
)
@pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")
def test_make_says_what_is_missing(tmp_path, script, message):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / "some-python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    command = ["make", "setup", f"PYTHON={'./some-python' if script else ''}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0 and message in done.stderr
    assert not (tmp_path / ".venv").exists()
