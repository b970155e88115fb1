"""ensemble_risk: closed forms against sampling, quadrature, and each other."""

import numpy as np
import pytest
import torch
from scipy.stats import norm

from mhabook_lib import ensemble_risk as module
from mhabook_lib.block_ensemble import BlockEnsemble
from mhabook_lib.ensemble_risk import (
    LinearTarget,
    SinusoidTarget,
    conditional_mse,
    draw_ensemble,
    gaussian_head_moments,
    isotropic_ensemble_mse,
    population_bias2,
    tilted_law,
)
from mhabook_lib.head_systems import fan
from mhabook_lib.nadaraya_watson import nadaraya_watson, nadaraya_watson_weights
from mhabook_lib.numerics.linalg import random_orthonormal


def draw(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape))


def waves(rng, d, count=3):
    return SinusoidTarget(draw(rng, count), draw(rng, count, d), draw(rng, count))


@pytest.mark.parametrize("kind", ["linear", "sinusoid"])
def test_moments_of_targets_against_samples(kind):
    rng = np.random.default_rng(0)
    target = LinearTarget(draw(rng, 3)) if kind == "linear" else waves(rng, 3)
    mean, factor = draw(rng, 3), 0.5 * draw(rng, 3, 3)
    sample = target(mean + draw(rng, 400_000, 3) @ factor.mT)
    first, second = target.moments(mean, factor @ factor.mT)
    assert abs(float(sample.mean() - first)) < 4 * float(sample.std()) / 400_000**0.5
    squares = sample.square()
    assert abs(float(squares.mean() - second)) < 4 * float(squares.std()) / 400_000**0.5


def test_tilted_law_from_precisions():
    rng = np.random.default_rng(1)
    bases, x, h = random_orthonormal((3, 4, 2), rng), draw(rng, 5, 4), 0.7
    mean, covariance = tilted_law(bases, x, h)
    projectors = bases @ bases.mT
    for g in range(3):
        for k in range(3):
            kernels = (projectors[g] + projectors[k]) / h**2
            precision = torch.eye(4, dtype=torch.float64) + kernels
            torch.testing.assert_close(covariance[g, k], torch.linalg.inv(precision))
            wanted = torch.linalg.solve(precision, kernels @ x.mT).mT
            torch.testing.assert_close(mean[:, g, k], wanted)


def test_one_line_against_integrals():
    """One head in one dimension: every moment is an ordinary integral."""
    target, x, h, n, sigma2 = waves(np.random.default_rng(2), 1), 0.8, 0.5, 50, 0.3

    grid = np.linspace(-10, 10, 20_001)
    values = target(torch.from_numpy(grid[:, None])).numpy()
    kernel = np.exp(-((grid - x) ** 2) / (2 * h**2))

    def mean(function, power):
        """Trapezoidal rule, exact to rounding for such functions."""
        return float((function(values) * kernel**power * norm.pdf(grid)).sum() * 1e-3)

    one = mean(lambda m: 1, 1)
    limit = mean(lambda m: m, 1) / one
    shift = -(mean(lambda m: m, 2) - limit * mean(lambda m: 1, 2)) / one**2 / n
    spread = mean(lambda m: (m - limit) ** 2 + sigma2, 2) / one**2 / n
    at = torch.tensor([[x]], dtype=torch.float64)
    line = torch.ones(1, 1, 1, dtype=torch.float64)
    parts = gaussian_head_moments(line, at, h, target, sigma2, n)
    assert float(parts.bias) == pytest.approx(limit - float(target(at)), rel=1e-9)
    assert float(parts.shift) == pytest.approx(shift, rel=1e-9)
    assert float(parts.covariance) == pytest.approx(spread, rel=1e-9)


def test_closed_risk_against_simulation():
    rng = np.random.default_rng(3)
    bases, x = random_orthonormal((3, 4, 2), rng), 0.4 * draw(rng, 3, 4)
    target, n = waves(rng, 4), 800
    drawn = draw_ensemble(bases, x, 0.7, n, 1500, rng, lambda t: target(t)[..., None])
    parts = gaussian_head_moments(bases, x, 0.7, target, 0.25, n)
    error = parts.ensemble()
    gap = drawn.mean[..., 0] - target(x)
    bias = (parts.bias + parts.shift).mean(-1)
    assert bool(((gap.mean(0) - bias).abs() < 4 * gap.std(0) / 1500**0.5 + 1e-4).all())
    scatter = (gap - gap.mean(0)).square() + 0.25 * drawn.weight_sq
    allowed = 4 * scatter.std(0) / 1500**0.5 + 0.02 * scatter.mean(0)
    assert bool(((scatter.mean(0) - error.variance - error.covariance).abs() < allowed).all())


def test_moments_take_batches_of_systems():
    rng = np.random.default_rng(4)
    bases, x = random_orthonormal((5, 3, 4, 2), rng), draw(rng, 6, 4)
    for target in (LinearTarget(draw(rng, 4)), waves(rng, 4)):
        batch = gaussian_head_moments(bases, x, 0.6, target, 1.0, 100)
        one = gaussian_head_moments(bases[3], x, 0.6, target, 1.0, 100)
        for name in ("bias", "shift", "covariance"):
            torch.testing.assert_close(getattr(batch, name)[3], getattr(one, name))
        assert batch.ensemble().mse.shape == (5, 6)


def test_draws_are_those_of_the_estimator(monkeypatch):
    rng = np.random.default_rng(5)
    bases, x = random_orthonormal((3, 4, 2), rng), draw(rng, 2, 4)
    whole = draw_ensemble(bases, x, 0.6, 20, 5, np.random.default_rng(6), lambda t: t[..., :2])
    tokens = torch.from_numpy(np.random.default_rng(6).standard_normal((5, 20, 4)))
    heads = nadaraya_watson(x @ bases, tokens[:, None] @ bases, tokens[:, None, :, :2], 0.6)
    torch.testing.assert_close(whole.mean, heads.mean(1))
    rows = nadaraya_watson_weights(x @ bases, tokens[:, None] @ bases, 0.6).mean(1)
    torch.testing.assert_close(whole.weight_sq, rows.square().sum(-1))
    monkeypatch.setattr(module, "WEIGHTS_AT_ONCE", 1)
    single = draw_ensemble(bases, x, 0.6, 20, 5, np.random.default_rng(6), lambda t: t[..., :2])
    torch.testing.assert_close(single, whole)
    # the error given the tokens, noise integrated
    target = LinearTarget(torch.tensor([1.0, -2, 0, 0], dtype=torch.float64))
    found = conditional_mse(rows, target(tokens), target(x), 0.5)
    gap = whole.mean @ torch.tensor([1.0, -2.0], dtype=torch.float64) - target(x)
    torch.testing.assert_close(found, gap.square() + 0.5 * whole.weight_sq)


@pytest.mark.parametrize(("num_heads", "d", "d_head"), [(3, 5, 2), (4, 4, 1), (2, 3, 3), (1, 4, 2)])
def test_isotropic_risk_against_sampled_queries(num_heads, d, d_head):
    rng = np.random.default_rng(7)
    bases, n, tau, h = random_orthonormal((num_heads, d, d_head), rng), 300, 0.6, 0.8
    x = tau * draw(rng, 40_000, d)
    average = (bases @ bases.mT).mean(0) / (1 + h**2) - torch.eye(d, dtype=torch.float64)
    parts = [
        gaussian_head_moments(bases, x, h, LinearTarget(2**0.5 * e), 0.5, n).ensemble()
        for e in torch.eye(d, dtype=torch.float64)
    ]  # E coef coef^T = (2/d) I
    closed = isotropic_ensemble_mse(bases, h, tau, 0.5, 2.0, n)
    leading = 2 / d * (x @ average).square().sum(-1)  # known mean: a control variate
    known = 2 / d * tau**2 * average.square().sum()
    for name in ("bias2", "variance", "covariance"):
        values = sum(getattr(p, name) for p in parts) / d
        if name == "bias2":
            values = values - leading + known
        error = float(values.std()) / 40_000**0.5
        assert abs(float(values.mean() - getattr(closed, name))) < 4 * error + 1e-12


def test_isotropic_risk_of_orthogonal_blocks():
    problem = BlockEnsemble(12, 0.7, 0.5, 3.0)
    bases = torch.eye(12, dtype=torch.float64).unflatten(0, (4, 3)).mT
    closed = isotropic_ensemble_mse(bases, 0.7, 0.5, 3.0, 1.0, 500)
    assert float(closed.mse) == pytest.approx(float(problem.mean_readout(3, 500)), rel=1e-12)
    assert float(closed.variance) == pytest.approx(float(problem.head_variance(3, 500)) / 4)


def test_isotropic_risk_falls_along_the_fan():
    mse = isotropic_ensemble_mse(fan(torch.linspace(0, 1.5, 40), 4), 0.3, 0.7, 1.0, 1.0, 100).mse
    assert float(mse.diff().max()) < 0


def test_population_bias_against_samples():
    rng = np.random.default_rng(8)
    bases, x = random_orthonormal((3, 5, 2), rng), draw(rng, 200_000, 5)
    weights = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    for target in (LinearTarget(draw(rng, 5)), waves(rng, 5)):
        squared, variance = population_bias2(bases, target, weights)
        error = target.projection_error(bases, weights)(x).square()
        assert abs(float(error.mean() - squared)) < 4 * float(error.std()) / 200_000**0.5
        spread = (target(x) - target(x).mean()).square()
        assert abs(float(spread.mean() - variance)) < 4 * float(spread.std()) / 200_000**0.5


def test_projection_is_the_limit_of_the_head():
    rng = np.random.default_rng(9)
    bases, x, target = random_orthonormal((2, 4, 2), rng), draw(rng, 6, 4), waves(rng, 4)
    parts = gaussian_head_moments(bases, x, 1e-3, target, 0.0, 10)
    weights = torch.tensor([0.5, 0.5], dtype=torch.float64)
    limit = target.projection_error(bases, weights)(x)
    torch.testing.assert_close(parts.bias.mean(-1), limit, rtol=0, atol=1e-4)


def test_the_floor_of_an_average():
    rng = np.random.default_rng(10)
    bases = random_orthonormal((4, 6, 2), rng)
    top = torch.linalg.eigh((bases @ bases.mT).mean(0))
    floor = (1 - float(top[0][-1])) ** 2
    linear = population_bias2(bases, LinearTarget(top[1][:, -1]))
    assert float(linear[0] / linear[1]) == pytest.approx(floor, rel=1e-10)
    for _ in range(20):
        squared, variance = population_bias2(bases, waves(rng, 6))
        assert float(squared / variance) >= floor


def test_errors():
    bases, x = torch.eye(4).double().reshape(2, 2, 4).mT, torch.zeros(1, 4).double()
    target = LinearTarget(torch.ones(4).double())
    for call, message in (
        (lambda: gaussian_head_moments(bases, x, 0.5, target, -1.0, 10), "sigma2=-1.0"),
        (lambda: gaussian_head_moments(bases, x, 0.5, target, 1.0, 0), "n=0"),
        (lambda: gaussian_head_moments(bases, x, 0.0, target, 1.0, 10), "bandwidth=0.0"),
        (lambda: gaussian_head_moments(2 * bases, x, 0.5, target, 1.0, 10), "orthonormal"),
        (lambda: isotropic_ensemble_mse(bases, 0.5, 0.5, 1.0, 0.0, 10), "b2=0.0"),
        (lambda: isotropic_ensemble_mse(bases, 0.5, 0.5, -1.0, 1.0, 10), "sigma2=-1.0"),
        (lambda: isotropic_ensemble_mse(bases, 0.5, 0.5, 1.0, 1.0, 2.5), "n=2.5"),
        (lambda: isotropic_ensemble_mse(bases, 0.5, 3.0, 1.0, 1.0, 10), "tau=3.0"),
        (lambda: population_bias2(2 * bases, target), "orthonormal"),
        (lambda: population_bias2(bases[0], target), r"\(4, 2\)"),
        (lambda: conditional_mse(torch.ones(2, 3), torch.ones(4), torch.ones(2), 1.0), "m_train"),
        (lambda: conditional_mse(torch.ones(2, 3), torch.ones(3), torch.ones(3), 1.0), "m_query"),
        (
            lambda: draw_ensemble(bases, x, 0.5, 0, 5, np.random.default_rng(0), lambda t: t),
            "n=0",
        ),
        (
            lambda: draw_ensemble(bases, x, 0.5, 5, 0, np.random.default_rng(0), lambda t: t),
            "designs=0",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
