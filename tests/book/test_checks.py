"""Checks and claims by themselves: every rule accepts what it should and rejects the rest."""

import json

import numpy as np
import pytest
import torch

from mhabook_lib.book import ClaimError, Ledger, stable
from mhabook_lib.book.claims import CONDITIONAL, NOT_REPRODUCED, REPRODUCED, Claim

WORDS = {
    "kind": "theorem",
    "statement": "Two and two are four.",
    "provenance": "ours",
    "why_tolerance": "arithmetic",
    "control": "five",
}


def claim(**more):
    return Claim("demo.T1", {**WORDS, **more})


ACCEPTED = [
    lambda c, k: c.agrees("", 1.0 + 1e-12, 1.0, rtol=1e-10, control=k and 1.1),
    lambda c, k: c.agrees("", [1.0, 2.0], [1.0, 2.0], atol=1e-9, control=k and [1.0, 2.1]),
    lambda c, k: c.equals("", 3, 3, control=k and 4),
    lambda c, k: c.equals("", ["a", "b"], ["a", "b"], control=k and ["a", "c"]),
    lambda c, k: c.equals("", [1, 2], [1, 2], control=k and [1, 2, 3]),
    lambda c, k: c.below("", [0.1, 0.2], 0.2, control=k and [0.1, 0.3]),
    lambda c, k: c.above("", torch.tensor([1.0, 2.0]), 1.0, control=k and 0.5),
    lambda c, k: c.between("", 0.5, 0.4, 0.6, control=k and 0.7),
    lambda c, k: c.consistent("", 1.3, 1.0, 0.1, control=k and 1.5),
]


@pytest.mark.parametrize("check", ACCEPTED)
def test_rule_accepts_the_value_and_rejects_the_control(check):
    made = check(claim(), True)
    assert made.verdict == REPRODUCED
    assert made.record()["control"]["failed"]


@pytest.mark.parametrize(
    "check",
    [
        lambda c: c.agrees("", 1.01, 1.0, rtol=1e-3),
        lambda c: c.equals("", 3, 4),
        lambda c: c.equals("", [1, 2], [1, 2, 3]),
        lambda c: c.below("", [0.1, 0.3], 0.2),
        lambda c: c.above("", [1.0, 0.9], 1.0),
        lambda c: c.between("", [0.5, 0.7], 0.4, 0.6),
        lambda c: c.consistent("", 1.5, 1.0, 0.1),
    ],
)
def test_rule_rejects(check):
    assert check(claim()).verdict == NOT_REPRODUCED


def test_one_failing_check_decides_and_is_shown():
    made = claim().below("good", 0.0, 1.0, control=2.0).below("bad", 3.0, 1.0)
    assert made.verdict == NOT_REPRODUCED
    assert made.record()["check"] == "bad" and made.record()["measured"] == 3.0
    assert "FAILED" in repr(made) and "bad" in made._repr_html_().split("<details>")[0]


def test_condition_makes_the_verdict_conditional():
    made = claim(condition="n is even").equals("", 1, 1, control=2)
    assert made.verdict == CONDITIONAL
    assert "n is even" in repr(made) and "n is even" in made._repr_html_()


def test_control_that_passes_is_recorded_as_such():
    made = claim().below("", 0.0, 1.0, control=0.5)
    assert made.record()["control"] == {"description": "five", "measured": 0.5, "failed": False}
    assert "NOT REJECTED" in repr(made)


def test_every_one_of_several_controls_must_be_rejected():
    good = claim().below("", 0.0, 1.0, control={"a": 2.0, "b": 3.0})
    leaky = claim().below("", 0.0, 1.0, control={"a": 2.0, "b": 0.5})
    assert good.record()["control"]["failed"] and not leaky.record()["control"]["failed"]
    assert "a 2, b 3" in repr(good)


@pytest.mark.parametrize("value", [float("nan"), [1.0, np.inf], []])
@pytest.mark.parametrize("place", ["measured", "control"])
def test_undefined_values_are_refused(value, place):
    measured, control = (value, 2.0) if place == "measured" else (0.0, value)
    with pytest.raises(ValueError, match=r"not finite|empty"):
        claim().below("rate", measured, 1.0, control=control)


def test_long_arrays_keep_their_worst_entry():
    value = np.zeros(100)
    value[37] = 0.9
    record = claim().below("", value, 1.0, control=2.0).record()
    assert record["measured"] == 0.9
    json.dumps(record, allow_nan=False)


def test_stable_rounds_and_has_no_negative_zero():
    assert stable(1 / 3) == "0.333333" and stable(-0.0) == "0"
    assert stable(np.array([[1.0, 2.0]])) == "[[1, 2]]" and stable(True) == "True"
    assert stable(0.123456789 * (1 + 1e-12)) == stable(0.123456789)
    assert stable(0.123456789 * 1.01) != stable(0.123456789)


def test_ledger_refuses_unknown_chapters_and_labels():
    with pytest.raises(ClaimError, match=r"known chapters: .*clustering"):
        Ledger("nothing", profile="quick", device="cpu", seed=0)
    ledger = Ledger("clustering", profile="quick", device="cpu", seed=0)
    with pytest.raises(ClaimError, match="no claim 'T99'"):
        ledger.claim("T99")


def test_running_a_cell_again_replaces_its_claim(tmp_path, monkeypatch):
    monkeypatch.setenv("MHABOOK_OUTPUT", str(tmp_path))
    ledger = Ledger("clustering", profile="quick", device="cpu", seed=0)
    for value in (0.1, 0.2):
        for label in ledger.words["claims"]:
            ledger.claim(label).below("size", value, 1.0, control=2.0)
    records = json.loads(ledger.close().read_text())
    assert [r["id"] for r in records] == ledger.expected_ids
    assert {r["measured"] for r in records} == {0.2}
    ledger.claim("P1").above("another claim", 2.0, 1.0, control=0.0)
    with pytest.raises(ClaimError, match="P1: two different claims"):
        ledger.close()


def test_plotted_arrays_are_stored_and_must_be_finite(tmp_path, monkeypatch):
    import matplotlib.pyplot as plt

    monkeypatch.setenv("MHABOOK_OUTPUT", str(tmp_path))
    ledger = Ledger("clustering", profile="quick", device="cpu", seed=0)
    figure, axis = plt.subplots()
    axis.plot([0, 1])
    assert ledger.figure("F1", figure, y=torch.tensor([0.0, 1.0])) is figure
    assert np.load(tmp_path / "figures/F1.npz")["y"].tolist() == [0, 1]
    assert (tmp_path / "figures/F1.svg").is_file() and (tmp_path / "figures/F1.png").is_file()
    with pytest.raises(ValueError, match="plotted array 'y' is not finite"):
        ledger.figure("F1", figure, y=[np.nan])
