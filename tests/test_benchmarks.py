"""benchmarks: the timing helper, and that both ways of each cheap comparison agree."""

import time

import pytest

from benchmarks import clustering, gaussian_equivalence, timing


def test_compare_measures_the_ratio():
    result = timing.compare(lambda: time.sleep(1e-3), lambda: time.sleep(8e-3), repeats=3)
    assert result.keys() == {"ours_s", "other_s", "ratio", "spread"}
    assert result["ours_s"] >= 1e-3 and result["other_s"] >= 8e-3
    assert result["spread"] >= 0


@pytest.mark.parametrize("task", [clustering.one_gram_matrix, lambda: clustering.blocks(128)])
def test_both_ways_agree(task, monkeypatch):
    monkeypatch.setattr(timing, "compare", lambda *_: {})
    row = task()
    assert row["chapter"] == "clustering"
    assert row["ours_error"] < 1e-14 and row["other_error"] < 1e-14


def test_both_samplers_have_the_mean_of_the_rows(monkeypatch):
    monkeypatch.setattr(timing, "compare", lambda *_: {})
    row = gaussian_equivalence.exact_sampler(128, 256, 8, 32)
    assert row["chapter"] == "gaussian_equivalence"
    assert row["ours_error"] < 0.08 and row["other_error"] < 0.08
