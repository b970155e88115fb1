"""benchmarks: the timing helper, and that both ways of each cheap comparison agree."""

import sys
import time

import pytest

from benchmarks import (
    clustering,
    ensemble,
    gaussian_equivalence,
    identification,
    incremental,
    queries,
    timing,
)


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


def test_jacobians_agree(monkeypatch):
    monkeypatch.setattr(timing, "compare", lambda *_: {})
    exact = identification.closed_form_jacobian("reverse-mode autodiff (jacrev)")
    assert exact["ours_error"] < 1e-14 and exact["other_error"] < 1e-14
    differences = identification.closed_form_jacobian("central differences")
    assert 1e-13 < differences["other_error"] < 1e-7


def test_kernel_regressions_agree(monkeypatch):
    monkeypatch.setattr(timing, "compare", lambda *_: {})
    row = ensemble.against_loops("fused", ensemble.fused_nadaraya_watson)
    assert row["ours_error"] < 1e-14 and row["other_error"] < 1e-14
    row = ensemble.binned()
    assert row["ours_error"] < 1e-6 and row["other_error"] < 1e-13


def test_statsmodels_agrees(monkeypatch):
    pytest.importorskip("statsmodels")
    monkeypatch.setattr(timing, "compare", lambda *_: {})
    row = ensemble.against_statsmodels()
    assert row["ours_error"] < 1e-13 and row["other_error"] < 1e-13


def test_without_statsmodels_its_row_is_left_out(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "statsmodels", None)
    assert ensemble.against_statsmodels() is None
    assert "statsmodels is missing" in capsys.readouterr().out


def test_integrated_labels_save_replicates(monkeypatch):
    same = {"ours_s": 1.0, "other_s": 1.0, "ratio": 1.0, "spread": 0.0}
    monkeypatch.setattr(timing, "compare", lambda *_: dict(same))
    row = ensemble.integrated_labels()
    assert row["ratio"] == row["other_s"] > 1000
    assert row["other_error"] / row["ours_error"] > 30  # relative standard errors


def test_projections_and_balanced_factors_agree(monkeypatch):
    monkeypatch.setattr(timing, "compare", lambda *_: {})
    for task in (
        lambda: identification.sylvester_projection(3, 5),
        lambda: identification.balancing(2, 3, 8),
    ):
        row = task()
        assert row["ours_error"] < 1e-13 and row["other_error"] < 1e-13


def test_both_samplers_have_the_mean_of_the_rows(monkeypatch):
    monkeypatch.setattr(timing, "compare", lambda *_: {})
    row = gaussian_equivalence.exact_sampler(128, 256, 8, 32)
    assert row["chapter"] == "gaussian_equivalence"
    assert row["ours_error"] < 0.08 and row["other_error"] < 0.08


def test_laws_and_curves_agree(monkeypatch):
    monkeypatch.setattr(timing, "compare", lambda *_: {})
    row = gaussian_equivalence.map_of_degrees_of_freedom()
    assert row["ours_error"] < 1e-9 and row["other_error"] < 1e-6
    row = gaussian_equivalence.learning_curve_of_one_target(128)
    assert row["ours_error"] < 1e-12


def test_students_stacks_and_samplers_agree(monkeypatch):
    monkeypatch.setattr(timing, "compare", lambda *_: {})
    row = incremental.one_product(64)
    assert row["ours_error"] < 1e-14 and row["other_error"] < 1e-14
    row = incremental.stacked_training(3, 8)
    assert row["ours_error"] < 1e-12 and row["other_error"] == 0
    row = incremental.sampler()
    assert row["ours_error"] < 0.2 and row["other_error"] < 0.2


def test_euler_steps_go_where_the_flow_goes(monkeypatch):
    monkeypatch.setattr(timing, "compare", lambda *_: {})
    monkeypatch.setattr(incremental, "END", 20.0)
    row = incremental.reduced_flow()
    assert row["ours_error"] < 1e-6 and row["other_error"] < 0.02


def test_answers_scores_and_links_agree(monkeypatch):
    monkeypatch.setattr(timing, "compare", lambda *_: {})
    for other in (queries.batched_answers, queries.looped_answers):
        assert queries.answering("other", other)["other_error"] < 1e-12
    row = queries.separating()
    assert row["ours_error"] < 1e-8 and row["other_error"] < 1e-8
    row = queries.linking(5)
    assert row["ours_error"] == row["other_error"] == 0
