"""The command line as a stranger meets it."""

import json

import pytest

COMMANDS = ["list", "run", "check", "accept", "build", "claims", "new", "doctor"]


def test_help_names_every_command(ran):
    text = ran("--help")
    assert all(f" {name} " in text for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(ran, name):
    assert "Usage:" in ran(name, "--help")


def test_list(ran):
    assert "tiny" in ran("list") and "A tiny chapter" in ran("list")


def test_claims_as_table_and_as_data(ran):
    assert "tiny.T1" in ran("claims") and "56 rejected" in ran("claims", "tiny")
    data = json.loads(ran("claims", "tiny", "--json"))
    assert [record["id"] for record in data] == ["tiny.T1", "tiny.F1"]
    assert data[0]["control"]["failed"] is True and data[0]["versions"]["torch"]


def test_claims_of_a_chapter_that_was_not_run(fresh):
    assert "has not been run: mhabook run tiny" in fresh("claims", "tiny", code=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--profile", "fast"], "'fast' is not one of quick, paper"),
        (["run", "--device", "tpu"], "'tpu' is not one of auto, cpu, cuda"),
        (["run", "--jobs", "0"], "--jobs"),
        (["bulid"], "bulid"),
    ],
)
def test_wrong_use_is_explained(ran, arguments, message):
    assert message in ran(*arguments, code=2)


def test_outside_a_book(ran, tmp_path):
    process = ran.start("list", env={"MHABOOK_ROOT": str(tmp_path), "PYTHONPATH": str(ran.root)})
    _, err = process.communicate()
    assert process.returncode == 1 and err.startswith("mhabook: no book found in MHABOOK_ROOT")


def test_doctor_finds_this_machine_ready(ran):
    text = ran("doctor")
    assert "ok    Python" in text and "ok    kernel python3" in text and "WRONG" not in text


def test_doctor_says_what_to_do(monkeypatch):
    from packaging.requirements import Requirement

    from mhabook_lib.book import doctor

    missing = doctor.package(Requirement("no-such-package>=1"), "")
    assert not missing.good and missing.essential and "make book" in missing.advice
    old = doctor.package(Requirement("numpy>=99"), "")
    assert not old.good and "needs >=99" in old.advice
    other = doctor.package(Requirement("numpy>=1"), "1.0.0")
    assert not other.good and not other.essential and "uses 1.0.0" in other.advice
    monkeypatch.setattr("jupyter_client.kernelspec.KernelSpecManager.get_kernel_spec", broken)
    assert "ipykernel" in doctor.kernel().advice


def broken(self, name):
    raise KeyError(f"No such kernel named {name}")
