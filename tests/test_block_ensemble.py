"""block_ensemble: closed risks against quadrature, plain loops and simulation; limits; errors."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.stats import norm

from mhabook_lib.block_ensemble import BlockEnsemble, Replicates, replicate, replicate_risk
from mhabook_lib.nadaraya_watson import nadaraya_watson_weights

PROBLEM = BlockEnsemble(48, 0.75, 0.5, 9.0)


NODES = np.linspace(-10, 10, 4001)


def kernel_moment(x, bandwidth, kernels, power):
    """E[K(x - X)^kernels X^power]/(E K)^kernels, X ~ N(0, 1), x (m,), by the trapezoidal rule."""
    kernel = np.exp(-((x[:, None] - NODES) ** 2) / (2 * bandwidth**2))
    density = norm.pdf(NODES) * (NODES[1] - NODES[0])
    return kernel**kernels @ (density * NODES**power) / (kernel @ density) ** kernels


def over_queries(function, tau):
    x = np.linspace(-10 * tau, 10 * tau, 801)
    return (norm.pdf(x, scale=tau) * function(x)).sum() * (x[1] - x[0])


@pytest.mark.parametrize(("bandwidth", "tau"), [(0.75, 0.5), (1.5, 0.9)])
def test_constants_by_quadrature(bandwidth, tau):
    problem = BlockEnsemble(4, bandwidth, tau, 1.0)
    overlap = over_queries(lambda x: kernel_moment(x, bandwidth, 2, 0), tau)
    assert problem.kappa == pytest.approx(math.log(overlap), rel=1e-9)
    weighted = over_queries(lambda x: x**2 * kernel_moment(x, bandwidth, 2, 0), tau)
    assert problem.query_moment == pytest.approx(weighted / overlap, rel=1e-9)
    x = np.array([0.8])
    mean = kernel_moment(x, bandwidth, 1, 1)
    assert mean == pytest.approx(x / problem.s2, rel=1e-9)
    mean_of_square = kernel_moment(x, bandwidth, 2, 1) / kernel_moment(x, bandwidth, 2, 0)
    assert mean_of_square - mean == pytest.approx(problem.delta * x, rel=1e-9)


def test_one_head_of_one_dimension_by_quadrature():
    """D = 1: bias, its 1/n part and the variance of a single kernel regression."""
    bandwidth, tau, sigma2, n = 0.8, 0.6, 2.0, 300.0
    problem = BlockEnsemble(1, bandwidth, tau, sigma2)

    def risk(x):
        overlap, mean = kernel_moment(x, bandwidth, 2, 0), kernel_moment(x, bandwidth, 1, 1)
        first, second = (kernel_moment(x, bandwidth, 2, p) / overlap for p in (1, 2))
        shift = -overlap * (first - mean) / n
        variance = overlap / n * (sigma2 + second - 2 * first * mean + mean**2)
        return (mean - x) ** 2 + 2 * (mean - x) * shift + variance

    assert problem.mean_readout(1, n).item() == pytest.approx(over_queries(risk, tau), rel=1e-9)


@pytest.mark.parametrize("readout", ["mean", "sum"])
def test_closed_risk_against_simulation(readout):
    problem, d, n = BlockEnsemble(6, 1.0, 0.5, 4.0), 2, 1000
    rng = np.random.default_rng(0)
    out = replicate(problem, d, n, 60, 40, rng)
    if readout == "mean":
        (risk, error), closed = replicate_risk(problem, out, d), problem.mean_readout(d, n)
    else:
        scale = float(problem.sum_scale(d, n)) * 3
        risk, error = replicate_risk(problem, out, d, scale)
        closed = problem.sum_readout(d, n)
    allowed = 4 * error + 2 / problem.effective_size(d, n) * closed
    assert abs(risk - closed) < allowed < 0.05 * closed


def test_replicates_against_loops():
    problem = BlockEnsemble(4, 0.7, 0.5, 3.0, 2.0)
    out = replicate(problem, 2, 9, 2, 3, np.random.default_rng(5))
    rng = np.random.default_rng(5)
    for design in range(2):
        x = torch.from_numpy(0.5 * rng.standard_normal((3, 4)))
        tokens = torch.from_numpy(rng.standard_normal((9, 4)))
        for q in range(3):
            row = torch.zeros(9, dtype=torch.float64)
            for block in (slice(0, 2), slice(2, 4)):
                w = nadaraya_watson_weights(x[q : q + 1, block], tokens[:, block], 0.7)[0]
                row += w / 2
            mean = row @ tokens
            wanted = [mean @ mean, mean @ x[q], x[q] @ x[q], row @ row]
            assert [float(part[design, q]) for part in out] == pytest.approx(
                [float(entry) for entry in wanted], abs=1e-14
            )


def test_the_integrals_over_labels_are_what_draws_average_to():
    """Risk with coefficients and noise integrated, against 200000 draws of both."""
    problem, scale = BlockEnsemble(4, 0.7, 0.5, 3.0, 2.0), 1.7
    out = replicate(problem, 2, 9, 2, 1, np.random.default_rng(6))
    exact, _ = replicate_risk(problem, out, 2, scale, control_variate=False)
    rng, risks = np.random.default_rng(6), []
    for _ in range(2):
        x = 0.5 * rng.standard_normal((1, 4))
        tokens = rng.standard_normal((9, 4))
        rows = [
            nadaraya_watson_weights(torch.from_numpy(x[:, b]), torch.from_numpy(tokens[:, b]), 0.7)
            for b in (slice(0, 2), slice(2, 4))
        ]
        w = scale * (rows[0] + rows[1]).numpy()[0] / 2
        draw = np.random.default_rng(7)
        coef = draw.standard_normal((200_000, 4)) * math.sqrt(2 / 4)
        noise = draw.standard_normal((200_000, 9)) * math.sqrt(3)
        risks.append(((coef @ tokens.T + noise) @ w - coef @ x[0]) ** 2)
    drawn = np.mean(risks, 0)
    assert abs(drawn.mean() - exact) < 4 * drawn.std() / math.sqrt(200_000)


def test_control_variate_has_mean_zero_and_saves_replicates():
    out = replicate(PROBLEM, 8, 2048, 16, 8, np.random.default_rng(1))
    exact = replace_queries(out)
    plain, scatter = replicate_risk(PROBLEM, out, 8, control_variate=False)
    controlled, less = replicate_risk(PROBLEM, out, 8)
    assert abs(plain - controlled) < 4 * scatter
    assert less < scatter / 5
    both = [replicate_risk(PROBLEM, exact, 8, control_variate=c)[0].item() for c in (True, False)]
    assert both[0] == pytest.approx(both[1], rel=1e-12)


def replace_queries(out):
    """The same replicates, with queries scaled so that `|x|^2` has its expected mean."""
    return Replicates(
        out.mean_sq,
        out.inner,
        out.query_sq * 48 * 0.25 / out.query_sq.mean(-1, keepdim=True),
        out.weight_sq,
    )


def test_limits():
    n = 1e12
    bias = PROBLEM.b2 * PROBLEM.tau**2 * (6 / (48 * PROBLEM.s2) - 1) ** 2
    assert PROBLEM.mean_readout(6, n).item() == pytest.approx(bias, rel=1e-8)
    assert PROBLEM.sum_readout(6, n).item() < 1e-8
    assert PROBLEM.sum_scale(6, n).item() == pytest.approx(PROBLEM.s2, rel=1e-6)


def test_best_factor_of_the_sum():
    signal = PROBLEM.tau**2

    def risk(a):
        return (a / PROBLEM.s2 - 1) ** 2 * signal + a**2 * PROBLEM.sum_variance(6, 4096).item()

    found = minimize_scalar(risk)
    assert PROBLEM.sum_scale(6, 4096).item() == pytest.approx(found.x, rel=1e-6)
    assert PROBLEM.sum_readout(6, 4096).item() == pytest.approx(found.fun, rel=1e-12)


@pytest.mark.parametrize("readout", ["mean", "sum"])
def test_optimal_dimension_against_a_minimiser(readout):
    risk = PROBLEM.mean_readout if readout == "mean" else PROBLEM.sum_readout
    n = torch.tensor([512.0, 8192.0])
    best = PROBLEM.optimal_dimension(n, readout)
    for size, d in zip(n.tolist(), best.tolist(), strict=True):
        found = minimize_scalar(
            lambda d, size=size: risk(d, size).item(), bounds=(1, 48), method="bounded"
        )
        assert d == pytest.approx(found.x, abs=1e-3)


@pytest.mark.parametrize("problem", [PROBLEM, BlockEnsemble(48, 0.6, 0.6, 4.0)])
def test_wide_limit(problem):
    n = torch.tensor([2048.0, 32768.0])
    gaps = []
    for budget in (1e3, 1e4, 1e7):
        exact = problem.with_budget(budget).optimal_dimension(n)
        gaps.append((exact - torch.from_numpy(problem.wide_limit(n.numpy()))).abs().max().item())
    assert gaps[2] < 1e-5 and 8 < gaps[0] / gaps[1] < 12  # the gap is of order 1/D


def test_bad_input():
    with pytest.raises(ValueError, match=r"bandwidth=0.0: expected a value > 0"):
        BlockEnsemble(48, 0.0, 0.5, 9.0)
    with pytest.raises(ValueError, match=r"tau=1.5: expected tau\^2 < s2 \(s2 \+ 1\)/2"):
        BlockEnsemble(48, 0.3, 1.5, 9.0)
    with pytest.raises(ValueError, match="readout='max': expected one of"):
        PROBLEM.optimal_dimension([512.0], "max")
    with pytest.raises(ValueError, match="no sign change"):
        PROBLEM.with_budget(2).optimal_dimension([1e9])
    with pytest.raises(ValueError, match="d_head=5: expected a divisor of the budget 48"):
        replicate(PROBLEM, 5, 10, 2, 2, np.random.default_rng(0))
