"""Faults in a chapter are named before or during its run, and never become a result."""

import json
import signal
import time

import pytest

MARKED = ":tags: [nbval-check-output]"


def add_cell(book, code, before=":tags: [nbval-check-output]"):
    """Put a code cell before the marked one."""
    opening = "```{code-cell} ipython3\n"
    new = f"{opening}{code}\n```\n\n{opening}{before}"
    book.edit(f"{opening}{before}", new)


def test_a_sound_chapter_runs(ran):
    facts = json.loads((ran.result / "run.json").read_text())
    assert facts["claims"] == 2 and facts["warnings"] == [] and facts["parameters"] == {}
    assert facts["seconds"] > 0 and facts["peak_memory_mb"] > 20
    assert {p.name for p in (ran.result / "figures").iterdir()} == {"F1.svg", "F1.png", "F1.npz"}
    assert "seed" in json.loads((ran.result / "claims.json").read_text())[0]


def test_unknown_parameter_is_named_with_the_known_ones(fresh):
    said = fresh("run", "tiny", "-p", "sizes=3", code=1)
    assert "no parameter 'sizes'" in said and "Did you mean 'size'" in said
    assert "Parameters: seed, size" in said
    assert not fresh.result.exists()


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("size=many", "must be a whole number"),
        ("size", "name=value"),
        ("profile=paper", "--profile paper"),
    ],
)
def test_impossible_parameter_values_are_refused(fresh, pair, message):
    assert message in fresh("run", "-p", pair, code=1)


def test_changed_parameter_leaves_the_published_run_alone(copy):
    before = (copy.result / "claims.json").read_text()
    where = copy("run", "-p", "size=6").split()[-1]
    assert (copy.result / "claims.json").read_text() == before
    changed = json.loads((copy.root / where).with_name("claims.json").read_text())
    assert changed[0]["measured"] == 91


def test_missing_parameters_cell(fresh):
    fresh.edit(":tags: [parameters]", ":tags: [setting]")
    assert "has no cell tagged 'parameters'" in fresh("run", code=1)


def test_second_parameters_cell(fresh):
    add_cell(fresh, ":tags: [parameters]\n\nother = 1")
    assert "has 2 cells tagged 'parameters'" in fresh("run", code=1)


def test_foreign_kernel(fresh):
    fresh.edit("  name: python3", "  name: my-private-env")
    said = fresh("run", code=1)
    assert "asks for the kernel 'my-private-env'" in said and "python3" in said


def test_missing_kernel(fresh):
    block = "kernelspec:\n  display_name: Python 3\n  language: python\n  name: python3\n"
    fresh.edit(block, "")
    assert "names no kernel" in fresh("run", code=1)


def test_broken_header(fresh):
    fresh.edit("  name: python3", "  other: x")
    assert "tiny.md is not a MyST notebook" in fresh("run", code=1)


def test_raising_cell_is_named_and_the_other_chapters_go_on(copy):
    other = copy.source.with_name("broken.md")
    other.write_text(copy.source.read_text().replace("tiny", "broken"))
    words = copy.root / "mhabook_lib" / "chapters"
    (words / "broken.toml").write_text((words / "tiny.toml").read_text())
    text = other.read_text().replace("from mhabook_lib.broken", "from mhabook_lib.tiny")
    other.write_text(text.replace("values = squares(size)", "values = squares(1 / 0)"))
    said = copy("run", "--force", "--jobs", "2", code=1)
    assert "chapter 'broken' failed, code cell 2 (`import numpy as np`)" in said
    assert "ZeroDivisionError: division by zero" in said
    assert "tiny: 2 claims" in said and "1 of 2 chapters failed" in said
    assert "ZeroDivisionError" in (copy.root / "_build/logs/broken-run.log").read_text()


def test_hanging_cell_meets_the_time_limit(fresh):
    add_cell(fresh, "import time\ntime.sleep(60)")
    said = fresh("run", "--time-limit", "3", code=1)
    assert "code cell 5" in said and "still running after 3 s" in said


def test_killed_kernel(fresh):
    add_cell(fresh, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    said = fresh("run", code=1)
    assert "code cell 5" in said and "the kernel died" in said


def test_failed_run_leaves_the_good_one(copy):
    before = (copy.result / "tiny.ipynb").read_bytes()
    copy.edit("values = squares(size)", "values = squares(size) / undefined")
    copy("run", code=1)
    assert (copy.result / "tiny.ipynb").read_bytes() == before


def test_interrupted_run_leaves_the_good_one(copy):
    before = (copy.result / "tiny.ipynb").read_bytes()
    add_cell(copy, "import time\nopen('/tmp/mhabook-started', 'w')\ntime.sleep(60)".replace(
        "/tmp/mhabook-started", str(copy.root / "started")))
    process = copy.start("run")
    deadline = time.monotonic() + 60
    while not (copy.root / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "earlier results are as they were" in err
    assert (copy.result / "tiny.ipynb").read_bytes() == before
    assert not list((copy.root / "_build" / "tmp").iterdir())


def test_second_run_executes_nothing(ran):
    before = (ran.result / "run.json").stat().st_mtime_ns
    assert "tiny: up to date" in ran("run")
    assert (ran.result / "run.json").stat().st_mtime_ns == before


def test_one_number_deep_in_the_library_executes_again(copy):
    copy.edit("FIRST = 1", "FIRST = 2", "mhabook_lib/tiny_base.py")
    assert "run was" not in copy("list") and "(out of date)" in copy("list")
    assert "tiny: running" in copy("run")
    record = json.loads((copy.result / "claims.json").read_text())[0]
    assert record["measured"] == 4 + 9 + 16 + 25 + 36 and record["verdict"] == "not reproduced"


def test_prose_alone_does_not_execute_again(copy):
    copy.edit("one question", "one short question")
    assert "tiny: up to date" in copy("run")


def test_chapters_run_side_by_side(copy):
    other = copy.source.with_name("second.md")
    text = copy.source.read_text().replace("tiny", "second")
    other.write_text(text.replace("mhabook_lib.second", "mhabook_lib.tiny"))
    words = copy.root / "mhabook_lib" / "chapters"
    (words / "second.toml").write_text((words / "tiny.toml").read_text())
    said = copy("run", "--force", "--jobs", "2")
    assert said.count("2 claims in") == 2
    assert said.index("second: running") < said.index("2 claims in")


def test_warnings_are_not_shown_but_known(fresh):
    add_cell(fresh, 'import warnings\nwarnings.warn("the step is large")')
    assert "the step is large" in fresh("run")


def test_unknown_chapter(ran):
    said = ran("run", "tinny", code=1)
    assert "no chapter 'tinny'" in said and "Did you mean 'tiny'" in said


def test_cuda_without_cuda(ran):
    from mhabook_lib.book.run import cuda_available

    if cuda_available():
        pytest.skip("this machine has CUDA")
    assert "finds no CUDA device" in ran("run", "--device", "cuda", code=1)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("    control=values.sum() + 1,\n", "", "tiny.T1: has no control"),
        ("control=values.sum() + 1", "control=values.sum()", "T1: its control was not rejected"),
        ('ledger.claim("F1")', 'ledger.claim("T1")', "tiny.F1: missing from the claims data"),
        ('ledger.claim("F1")', 'ledger.claim("T1")', "two different claims under one ID"),
        ('ledger.claim("F1")', 'ledger.claim("F7")', "has no claim 'F7'"),
    ],
)
def test_ledger_out_of_order(fresh, old, new, message):
    fresh.edit(old, new)
    assert message in fresh("run", code=1) + (fresh.root / "_build/logs/tiny-run.log").read_text()


def tamper(book, change):
    """Let the chapter write claims data that went through `change`."""
    code = (
        "import json\nrecords = json.loads(path.read_text())\n"
        f"{change}\n_ = path.write_text(json.dumps(records))"
    )
    book.edit("path = ledger.close()", f"path = ledger.close()\n{code}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("records.pop()", "tiny.F1: missing"),
        ("records.append(records[0])", "tiny.T1: appears 2 times"),
        ("records[0]['control'] = None", "tiny.T1: has no control"),
        ("records[0]['control']['failed'] = False", "its control was not rejected"),
        ("records[0]['verdict'] = 'fine'", "verdict 'fine' is not one of"),
    ],
)
def test_claims_data_is_read_again_by_the_runner(fresh, change, message):
    """Not only the ledger looks: the data that the pages use is validated itself."""
    tamper(fresh, change)
    assert message in fresh("run", code=1)
    assert not fresh.result.exists()


def test_chapter_without_claims_data(fresh):
    fresh.edit("path = ledger.close()", "path = None")
    assert "wrote no claims data" in fresh("run", code=1)
