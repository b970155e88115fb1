"""Plateaus and times of the stages of the reduced flow."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import iv

from mhabook_lib.attention_flow import attention_flow, group_target, position_target
from mhabook_lib.stage_times import (
    amplification_time,
    asymmetry_amplitude,
    competition_time,
    coupled_growth,
    crossing_time,
    growth_constants,
    ladder_risk,
    ladder_thresholds,
    plateau_losses,
    riccati_amplitude,
    stage_times,
)

G = [2.89, 1.7, 1.0]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000))
def test_plateaus_do_not_depend_on_how_classes_are_written(seed):
    rng = np.random.default_rng(seed)
    g = np.sort(rng.uniform(0.5, 3, 3))[::-1]
    sizes = rng.integers(1, 4, 3)
    small = group_target(g, 12, sizes)
    rows = small.matrix[:, np.repeat(np.arange(len(small.counts)), small.counts.astype(int))]
    squares = np.sort(g**2 * sizes)[::-1]
    tails = [squares[r:].sum() / 2 for r in range(4)]
    assert np.allclose(plateau_losses(small), tails)
    assert np.allclose(plateau_losses(position_target(rows)), tails)


def test_crossing_is_interpolated_and_nan_when_it_never_comes():
    times, values = [0.0, 1.0, 2.0], [3.0, 2.0, 0.0]
    assert crossing_time(times, values, 1.0) == 1.5
    assert crossing_time(times, values, 4.0) == 0.0
    assert math.isnan(crossing_time(times, values, -1.0))


def test_equal_heads_have_one_stage():
    target = group_target(G, 10)
    times = np.linspace(0, 50, 501)
    run = attention_flow(target, times, np.zeros((1, 4)), head_counts=[3])
    found = stage_times(target, times, run.loss)
    assert np.isfinite(found).tolist() == [True, False, False]


def test_blow_up_without_heads_term_and_with_many_heads():
    assert competition_time(2.89, 1, power=2, num_heads=1e-9) == pytest.approx(
        math.sqrt(math.pi / 2) / 2.89, rel=1e-5
    )
    many = competition_time(2.89, 1, power=2, num_heads=10_000)
    assert many == pytest.approx(10_000 / (2 * 2.89**2), rel=0.01)
    assert competition_time(1.0, 8, 4) == pytest.approx(competition_time(2.0, 8))


def test_growth_of_two_groups_and_of_groups_with_sizes():
    assert coupled_growth([2.0, 1.0], 3) == pytest.approx(2 * growth_constants([2.0, 1.0], 3)[0])
    assert growth_constants([2.0, 1.0], 3, [1, 2])[0] == pytest.approx(3 * 2 / (4 - 2))
    with pytest.raises(ValueError, match="first to be largest"):
        growth_constants([2.0, 1.0], 3, [1, 5])


def test_riccati_amplitude_follows_the_bessel_solution_late():
    """With s_2 = H/((g_1^2-g_2^2) t) the mode is sqrt(t) I_1(2 sqrt(kappa t))."""
    target = group_target(G, 40)
    times = np.array([0.0, 2e3, 2e4])
    amplitude, _ = riccati_amplitude(target, times, 3)
    kappa = growth_constants(G, 3)[0]
    bessel = [math.log(math.sqrt(t)) + math.log(iv(1, 2 * math.sqrt(kappa * t))) for t in times[1:]]
    assert amplitude[2] - amplitude[1] == pytest.approx(bessel[1] - bessel[0], rel=0.01)


@pytest.mark.parametrize("power, gram", [(1, None), (2, None), (1, 0.1), (2, -0.1)])
def test_amplitude_is_the_growth_of_a_small_difference_between_two_heads(power, gram):
    target = group_target(G, 10)
    overlaps = None
    if gram is not None:
        overlaps = np.eye(3)
        overlaps[0, 1] = overlaps[1, 0] = gram
    eps, times = 1e-5, np.linspace(0, 12 if power == 1 else 40, 7)
    logits = np.zeros((2, 4))
    logits[0, 1], logits[1, 1] = eps, -eps
    run = attention_flow(target, times, logits, power=power, gram=overlaps, rtol=1e-11)
    gap = (run.logits[:, 0] - run.logits[:, 1]) / (2 * eps)
    amplitude = asymmetry_amplitude(target, times, 2, power, overlaps)
    assert np.allclose(amplitude[1:], np.log(np.abs(gap[1:, 1] - gap[1:, 0])), atol=2e-3)


def test_amplification_time_of_a_plain_exponential():
    times = np.linspace(0, 20, 2001)
    found = amplification_time(times, 0.5 * times, 1e-3, np.full(2001, math.exp(-2.0)))
    assert found == pytest.approx(2 * math.log(2000), abs=0.02)


def test_rungs_are_where_risks_cross():
    rungs = ladder_thresholds(G, 8, 0.25)
    assert np.all(np.diff(rungs) > 0)
    n = np.arange(2, 200)
    best = ladder_risk(G, n, 8, 0.25).argmin(-1)
    assert np.array_equal(best, (n[:, None] > rungs).sum(1))
    assert np.isinf(ladder_risk(G, 9, 8, 0.25)[1:]).all()
    with pytest.raises(ValueError, match="noise"):
        ladder_thresholds(G, 8, -1.0)
