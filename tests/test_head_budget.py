"""head_budget: optima against dense grids and general minimisers, corners, growth laws, errors."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from mhabook_lib.head_budget import (
    fixed_bandwidth_optimum,
    fixed_bandwidth_risk,
    head_number_elasticity,
    optimal_bandwidth,
    optimal_head_dimension,
    optimized_bandwidth_optimum,
    optimized_bandwidth_risk,
)

POSITIVE = st.floats(0.05, 2)


def tail_of(d, tail, rate):
    return {"exponential": np.exp(-2 * rate * d), "polynomial": d ** (-2.0 * rate), "none": 0 * d}[
        tail
    ]


@settings(max_examples=100, deadline=None)
@given(POSITIVE, POSITIVE, st.floats(1, 30), st.floats(1, 8), POSITIVE, POSITIVE)
def test_lambert_solves_the_stationarity(gamma, kappa, log_n, log_budget, tail, noise):
    n, budget = np.exp(log_n), np.exp(log_budget)
    scales = {"tail_scale": tail, "noise_scale": noise}
    d = float(optimal_head_dimension(gamma, kappa, n, budget, **scales))
    assert 1 <= d <= budget
    q = 2 * gamma * tail * n * budget / noise
    slope = np.log(kappa * d + 1) + (kappa + 2 * gamma) * d - np.log(q)
    if 1 < d < budget:
        assert abs(slope) < 1e-9 * max(1, abs(np.log(q)))
    else:  # the risk rises from the left corner, or falls to the right one
        assert slope >= -1e-9 if d == 1 else slope <= 1e-9


def test_corner_exactly_where_predicted():
    gamma, kappa, n = 0.25, 0.5, 1.0
    edge = (kappa + 1) * np.exp(kappa + 2 * gamma) / (2 * gamma * n)  # the budget at the corner
    assert float(optimal_head_dimension(gamma, kappa, n, 0.99 * edge)) == 1
    assert float(optimal_head_dimension(gamma, kappa, n, 1.01 * edge)) > 1


def test_nothing_overflows():
    huge = np.array(1e300)
    d = optimal_head_dimension(0.25, 0.5, huge, huge)
    assert np.log(0.5 * d + 1) + d == pytest.approx(np.log(0.5) + 600 * np.log(10), rel=1e-12)


def test_lambert_and_bisection_agree():
    n = 10.0 ** np.arange(2, 16)
    lambert = optimal_head_dimension(0.25, 0.5, n, 512)
    root = fixed_bandwidth_optimum(n, 512, 0.5, "exponential", 0.25)
    np.testing.assert_allclose(root, lambert, rtol=1e-12)


@pytest.mark.parametrize("tail", ["exponential", "polynomial", "none"])
@pytest.mark.parametrize("n", [30.0, 1e4, 1e9])
def test_fixed_bandwidth_against_a_grid(tail, n):
    d = np.linspace(1, 64, 630_001)
    risk = fixed_bandwidth_risk(d, n, 64, 0.5, tail, 0.7)
    plain = tail_of(d, tail, 0.7) + np.exp(0.5 * d) * d / (n * 64)
    np.testing.assert_allclose(risk, plain, rtol=1e-14)
    best = fixed_bandwidth_optimum(n, 64, 0.5, tail, 0.7)
    assert abs(best - d[risk.argmin()]) < 2e-4


def test_bandwidth_in_closed_form():
    for d, n, heads, smoothness in ((1.0, 100.0, 1, 1.0), (5.0, 1e6, 8, 2.0), (30.0, 1e9, 2, 0.5)):

        def risk(log_h, d=d, n=n, heads=heads, smoothness=smoothness):
            return np.exp(2 * smoothness * log_h) + np.exp(-d * log_h) / (n * heads)

        found = minimize_scalar(risk, bounds=(-20, 3), method="bounded", options={"xatol": 1e-10})
        assert optimal_bandwidth(d, n, heads, smoothness) == pytest.approx(
            np.exp(found.x), rel=1e-6
        )
        assert optimized_bandwidth_risk(d, n, heads, smoothness) == pytest.approx(
            found.fun, rel=1e-12
        )


@pytest.mark.parametrize("tail", ["exponential", "polynomial", "none"])
@pytest.mark.parametrize("one_head", [False, True])
@pytest.mark.parametrize("n", [30.0, 1e4, 1e9])
def test_optimized_bandwidth_against_a_grid(tail, one_head, n):
    d = np.linspace(1, 64, 630_001)
    heads = 1.0 if one_head else 64 / d
    risk = tail_of(d, tail, 0.7) + optimized_bandwidth_risk(d, n, heads, 2.0)
    best = optimized_bandwidth_optimum(n, 64, 2.0, tail, 0.7, one_head=one_head)
    assert abs(best - d[risk.argmin()]) < 2e-4


def test_without_a_tail_the_smallest_head_is_exactly_best():
    n = 10.0 ** np.arange(2, 12)
    assert set(fixed_bandwidth_optimum(n, 512, 0.5, "none", 1.0)) == {1.0}
    assert set(optimized_bandwidth_optimum(n, 512, 2.0, "none", 1.0)) == {1.0}


def test_budget_of_one():
    assert float(fixed_bandwidth_optimum(1e6, 1, 0.5, "exponential", 0.25)) == 1
    assert float(optimal_head_dimension(0.25, 0.5, 1e6, 1)) == 1


def test_right_corner():
    assert float(fixed_bandwidth_optimum(1e9, 4, 0.01, "polynomial", 0.1)) == 4


def test_elasticity_against_differences():
    budget = np.array([64.0, 4096.0])
    d = optimal_head_dimension(0.25, 0.5, 1e4, budget)
    more = optimal_head_dimension(0.25, 0.5, 1e4, budget * np.exp(1e-5))
    measured = 1 - np.log(more / d) / 1e-5
    np.testing.assert_allclose(head_number_elasticity(d, 0.25, 0.5), measured, atol=1e-5)


def test_increments_approach_their_limits():
    def growth(optimum, n):
        low, high = optimum(np.array([n, n * np.e]))
        return high - low

    exponential = growth(lambda n: fixed_bandwidth_optimum(n, 9e9, 0.5, "exponential", 0.25), 1e200)
    assert exponential == pytest.approx(1 / (0.5 + 0.5), rel=0.01)
    polynomial = growth(lambda n: fixed_bandwidth_optimum(n, 9e9, 0.5, "polynomial", 1.0), 1e200)
    assert polynomial == pytest.approx(1 / 0.5, rel=0.02)
    square = growth(
        lambda n: optimized_bandwidth_optimum(n, 9e9, 2.0, "exponential", 0.25) ** 2, 1e200
    )
    assert square == pytest.approx(2 / 0.25, rel=0.1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: optimal_head_dimension(0.0, 0.5, 9, 9), "gamma=0.0: expected a value > 0"),
        (lambda: optimal_head_dimension(0.1, 0.5, 9, -1), "budget=-1.0: expected a value > 0"),
        (lambda: fixed_bandwidth_optimum(9, 9, 0.5, "cubic", 1.0), "tail='cubic': expected one of"),
        (lambda: fixed_bandwidth_optimum(0, 9, 0.5, "none", 1.0), "n=0.0: expected a value > 0"),
        (lambda: fixed_bandwidth_risk(1.0, 9, 9, 0.5, "x", 1.0), "tail='x': expected one of"),
        (lambda: optimized_bandwidth_optimum(9, 9, -2.0, "none", 1.0), "smoothness=-2.0: expected"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
