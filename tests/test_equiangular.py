"""equiangular: the scalar equation, its times in closed form, its entropy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import solve_ivp

from mhabook_lib.attention import ScalarHeads, attention_entropy, attention_scores
from mhabook_lib.energy import attention_entropy_rate
from mhabook_lib.equiangular import (
    equiangular_drive,
    equiangular_entropy,
    equiangular_entropy_rate,
    equiangular_flow,
    equiangular_rate,
    equiangular_time,
    equiangular_time_closed,
    gamma_to_logit,
    logit_to_gamma,
)
from mhabook_lib.token_flow import attention_velocity, equiangular_tokens

FLOWS = ("softmax", "unnormalized", "relu")
# n, beta, gamma0, gamma1, T_U, T_S, (ReLU's gamma0, T_R); lambda = 1
TIMES = [
    (8, 1, 0, 0.9, 1.3982525, 2.3521816, 0.01, 12.4247511),
    (32, 2, 0, 0.99, 1.7227821, 4.3024341, 0.01, 26.4368800),
    (32, 6, 0.1, 0.999, 0.2632843, 7.6089750, 0.1, 8.3929654),
    (128, 4, 0, 0.5, 1.6127980, 3.0988584, 0.01, 38.1837984),
]


@given(s=st.floats(-30, 30), n=st.integers(2, 2000))
@settings(max_examples=50, deadline=None)
def test_logit_is_inverted(s, n):
    gamma = logit_to_gamma(s, n)
    if gamma < 1:
        slack = 1e-15 * np.exp(abs(s)) * n  # conditioning of 1 - gamma and of 1 + (n-1) gamma
        assert abs(gamma_to_logit(gamma, n) - s) < 1e-13 + 10 * slack
    assert -1 / (n - 1) * (1 + 1e-12) <= gamma <= 1


@pytest.mark.parametrize("normalization", FLOWS)
@pytest.mark.parametrize("strengths", [(1.0,), (0.4, 1.7), (1.5, -0.7)])
def test_rate_against_token_arrays(normalization, strengths):
    heads = ScalarHeads(torch.tensor(strengths, dtype=torch.float64))
    for n, gamma in ((2, 0.3), (7, -0.1), (7, 0.0), (7, 0.9)):
        x = equiangular_tokens(n, n, gamma)
        v = attention_velocity(x, heads, 1.3, normalization)
        expected = float(v[0] @ x[1] + x[0] @ v[1])
        rate = float(equiangular_rate(gamma, strengths, 1.3, n, normalization))
        assert rate == pytest.approx(expected, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("row", TIMES)
def test_the_times_of_the_table(row):
    n, beta, g0, g1, t_u, t_s, r0, t_r = row
    for start, flow, expected in (
        (g0, "unnormalized", t_u),
        (g0, "softmax", t_s),
        (r0, "relu", t_r),
    ):
        quadrature = float(equiangular_time(start, g1, [1.0], beta, n, flow))
        closed = float(equiangular_time_closed(start, g1, 1.0, beta, n, flow))
        assert abs(closed - expected) < 1e-7  # printed with 7 decimals, cut or rounded
        assert quadrature == pytest.approx(closed, rel=1e-10)


@pytest.mark.parametrize("normalization", FLOWS)
@pytest.mark.parametrize("strength", [0.6, 2.0, -0.8])
def test_quadrature_against_closed_form(normalization, strength):
    """Attracting heads drive gamma up, repelling ones down (ReLU: never below zero)."""
    if normalization == "relu":
        start, stop = (0.02, 0.98) if strength > 0 else (-0.01, -0.05)
    else:
        start, stop = (-0.03, 0.98) if strength > 0 else (0.6, -0.05)
    n, beta = np.array([2, 8, 16])[:, None], np.array([0.3, 1.0, 4.0])
    quadrature = equiangular_time(start, stop, [strength], beta, n, normalization, nodes=128)
    closed = equiangular_time_closed(start, stop, strength, beta, n, normalization)
    assert quadrature.shape == (3, 3)
    np.testing.assert_allclose(quadrature, closed, rtol=1e-10)
    assert np.all(quadrature > 0)


@pytest.mark.parametrize("normalization", ["softmax", "unnormalized"])
def test_64_nodes_are_enough(normalization):
    n, beta = np.array([2, 32, 1024])[:, None], np.array([0.1, 3.0, 12.0])
    coarse = equiangular_time(-0.9 / (n - 1), 1 - 1e-8, [1.0], beta, n, normalization)
    fine = equiangular_time(-0.9 / (n - 1), 1 - 1e-8, [1.0], beta, n, normalization, nodes=512)
    np.testing.assert_allclose(coarse, fine, rtol=3e-11)


@given(
    strengths=st.lists(st.floats(0.1, 2), min_size=1, max_size=3),
    beta=st.floats(0.1, 4),
    n=st.integers(2, 60),
    normalization=st.sampled_from(FLOWS),
)
@settings(max_examples=25, deadline=None)
def test_time_and_flow_are_inverse(strengths, beta, n, normalization):
    time = float(equiangular_time(0.03, 0.8, strengths, beta, n, normalization))
    half = float(equiangular_time(0.03, 0.3, strengths, beta, n, normalization))
    path = equiangular_flow(0.03, [0, half, time], strengths, beta, n, normalization)
    np.testing.assert_allclose(path, [0.03, 0.3, 0.8], rtol=1e-9)


def test_flow_against_the_equation_in_gamma():
    """The plain equation in gamma, solved by another method, without the logit."""
    strengths, beta, n = np.array([[0.5, 1.5], [1.0, -0.4]]), 1.2, 9
    times = np.linspace(0, 0.6, 4)
    path = equiangular_flow(0.1, times, strengths, beta, n, "unnormalized")
    for k in range(2):
        solution = solve_ivp(
            lambda _, g, k=k: equiangular_rate(g, strengths[k], beta, n, "unnormalized"),
            (0, 0.6),
            [0.1],
            "Radau",
            times,
            rtol=1e-9,
            atol=1e-11,
        )
        np.testing.assert_allclose(path[:, k], solution.y[0], atol=1e-7)


def test_without_the_simplex_factor_the_equation_is_wrong():
    solution = solve_ivp(
        lambda _, g: 2 * equiangular_drive(g, [1.0], 1.5, 12, "unnormalized") * (1 - g),
        (0, 1),
        [0.05],
        "DOP853",
        [1.0],
        rtol=1e-10,
        atol=1e-12,
    )
    assert abs(solution.y[0, -1] - 0.2264) < 5.1e-5
    right = equiangular_flow(0.05, [0, 1], [1.0], 1.5, 12, "unnormalized")[-1]
    assert abs(solution.y[0, -1] - right) > 1e-2


def test_rates_at_the_ends():
    strengths, beta, n = np.array([0.5, 1.2]), 1.1, 20
    start = {
        "unnormalized": 2 / n * strengths.sum(),
        "softmax": 2 * (strengths / (np.exp(beta * strengths) + n - 1)).sum(),
        "relu": 0.0,
    }
    end = {
        "unnormalized": 2 * (strengths * np.exp(beta * strengths)).sum(),
        "softmax": 2 * strengths.sum(),
        "relu": 2 * (strengths**2).sum(),
    }
    for flow in FLOWS:
        assert equiangular_rate(0, strengths, beta, n, flow) == pytest.approx(start[flow])
        gamma = 1 - 1e-7
        decay = equiangular_rate(gamma, strengths, beta, n, flow) / (1 - gamma)
        assert decay == pytest.approx(end[flow], rel=1e-5)


def test_heterogeneous_heads():
    equal, unequal = [1.0, 1.0, 1.0], [0.5, 1.0, 1.5]
    for flow, ratio in (("unnormalized", 1.10514617), ("softmax", 0.99481268)):
        rates = [equiangular_drive(0.5, s, 1.0, 32, flow) for s in (unequal, equal)]
        assert abs(rates[0] / rates[1] - ratio) < 5.1e-9
    table = {
        ("unnormalized", 1): (0.63203631, 0.67058157),
        ("softmax", 1): (0.98107178, 0.97185524),
        ("unnormalized", 3): (0.37694692, 0.42198192),
        ("softmax", 3): (1.34829594, 1.17975848),
        ("unnormalized", 6): (0.25553223, 0.28782852),
        ("softmax", 6): (3.58497447, 4.54358911),
    }
    for (flow, beta), expected in table.items():
        times = [equiangular_time(0, 0.9, s, beta, 32, flow) for s in (unequal, equal)]
        np.testing.assert_allclose(times, expected, rtol=0, atol=5.1e-9)


def test_relu_separation_table():
    table = [
        (8, 4096, 0.8340134, 1.1923702, 9.3006609),
        (32, 2**20, 1.4715936, 1.8037079, 57.1694689),
        (128, 2**28, 2.1381167, 2.4524679, 312.9520757),
    ]
    for n, d, *expected in table:
        got = [
            equiangular_time(d**-0.5, 0.5, [1.0], 1.0, n, flow)
            for flow in ("unnormalized", "softmax", "relu")
        ]
        np.testing.assert_allclose(got, expected, rtol=0, atol=5.1e-8)


@pytest.mark.parametrize("normalization", FLOWS)
def test_entropy_against_token_arrays(normalization):
    strengths = np.array([0.7, -1.3])
    heads = ScalarHeads(torch.from_numpy(strengths))
    for gamma in (-0.1, 0.0, 0.4, 0.95):
        x = equiangular_tokens(6, 8, gamma)
        entropy = attention_entropy(attention_scores(x, heads), 1.9)
        closed = equiangular_entropy(gamma, strengths, 1.9, 6)
        np.testing.assert_allclose(entropy, closed[:, None] + np.zeros((2, 6)), rtol=1e-12)
        v = attention_velocity(x, heads, 1.9, normalization)
        rate = attention_entropy_rate(x, v, heads, 1.9)
        closed = equiangular_entropy_rate(gamma, strengths, 1.9, 6, normalization)
        np.testing.assert_allclose(rate, closed[:, None] + np.zeros((2, 6)), rtol=1e-9, atol=1e-13)
    assert equiangular_entropy(0.0, 1e4, 1.0, 6) == pytest.approx(0.0, abs=1e-300)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: equiangular_time(0, 0.5, [1.0, -1.5], 2.0, 8, "unnormalized"), "infinite time"),
        (lambda: equiangular_time(0.0, 0.5, [1.0], 2.0, 8, "relu"), "infinite time"),
        (lambda: equiangular_time(0.5, 0.1, [1.0], 2.0, 8, "softmax"), "infinite time"),
        (lambda: equiangular_time(-1 / 7, 0.1, [1.0], 2.0, 8, "softmax"), "infinite time"),
        (lambda: equiangular_time(0.1, 1.0, [1.0], 2.0, 8, "softmax"), "gamma=1.0"),
        (lambda: equiangular_time(-0.2, 0.5, [1.0], 2.0, 8, "softmax"), r"gamma=-0\.2.*n=8"),
        (lambda: equiangular_time(0, 0.5, [1.0], 0.0, 8, "softmax"), r"beta=0\.0"),
        (lambda: equiangular_time(0, 0.5, [1.0], 1.0, 8, "max"), "normalization='max'"),
        (lambda: equiangular_time(0, 0.5, [np.nan], 1.0, 8, "softmax"), "strengths"),
        (lambda: equiangular_drive(0, 1.0, 1.0, 8, "softmax"), r"\(\.\.\., H\)"),
        (lambda: equiangular_drive(0, [1.0], 1.0, 1, "softmax"), "n=1"),
        (lambda: equiangular_time_closed(0.0, 0.5, 1.0, 1.0, 8, "relu"), "strength \\* gamma > 0"),
        (lambda: equiangular_time_closed(0.0, 0.5, 0.0, 1.0, 8, "softmax"), "strength=0"),
        (lambda: equiangular_flow(0.1, [1, 0], [1.0], 1.0, 8, "softmax"), "increasing"),
        (lambda: equiangular_flow(-1 / 7, [0, 1], [1.0], 1.0, 8, "softmax"), "simplex"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_path_to_a_sign_change_takes_for_ever_only_beyond_it():
    critical = np.log(1.5) / 5  # heads (1, -1.5), beta = 2
    args = ([1.0, -1.5], 2.0, 8, "unnormalized")
    assert equiangular_time(1.01 * critical, 0.9, *args) > 0
    assert equiangular_time(0.99 * critical, -0.1, *args) > 0
    with pytest.raises(ValueError, match="infinite time"):
        equiangular_time(0.99 * critical, 0.9, *args)
