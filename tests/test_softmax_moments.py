"""softmax_moments: exact sums against simulation, limits and other precision."""

import math

import numpy as np
import pytest

from mhabook_lib.exp_features import exp_feature_coefficients
from mhabook_lib.softmax_moments import (
    finite_size_coefficients,
    first_order_row_variance,
    mean_norm_ratio,
    mean_row_variance,
    row_normalizer_moments,
    softmax_participation,
    softmax_thresholds,
)


def sampled_rows(n, beta, v, rows, rng):
    scores = math.sqrt(v) * rng.standard_normal((rows, n))
    weights = np.exp(beta * scores)
    return scores, weights / weights.sum(1, keepdims=True)


@pytest.mark.parametrize(("n", "beta", "v"), [(256, 1, 1), (64, 4, 1), (16, 1.5, 0.6)])
def test_participation_by_simulation(n, beta, v):
    _, pattern = sampled_rows(n, beta, v, 20_000, np.random.default_rng(0))
    values = n * np.square(pattern).sum(1)
    error = values.std() / math.sqrt(len(values))
    assert abs(values.mean() - softmax_participation(n, beta, v)) < 4 * error


def test_participation_in_small_and_large_cases():
    assert abs(softmax_participation(1, 2.0) - 1) < 1e-10
    # n = 2: A_1 = sigmoid(x), x normal of variance 2 beta^2
    x = np.linspace(-40, 40, 200_001)
    weight = np.exp(-(x**2) / 4) / math.sqrt(4 * math.pi) * (x[1] - x[0])
    pair = 2 * (weight * (1 + np.tanh(x / 2) ** 2) / 2).sum()
    assert abs(softmax_participation(2, 1.0) - pair) < 1e-10
    assert abs(softmax_participation(1e20, 1.0) - math.e) < 1e-10
    assert abs(softmax_participation(10, 20.0) / 10 - 1) < 0.09  # one entry takes the row


def test_participation_values_and_shape():
    n, beta = np.array([256, 1024, 256, 64]), np.array([1, 1, 2, 4.0])
    known = [2.645623, 2.698659, 18.602426, 29.321754]
    assert np.allclose(softmax_participation(n, beta), known, atol=6e-7)
    assert softmax_participation(n[:, None], beta).shape == (4, 4)


def test_row_variance_expansion():
    for n in (1e3, 1e4):
        exact = mean_row_variance(n, n, 0.7)
        assert abs(exact - first_order_row_variance(n, n, 0.7)) < 40 / n**2
    assert np.allclose(
        mean_row_variance(512, [8, 64], 1.0, 12), mean_row_variance(512, [8, 64], 1.0, 24)
    )


def test_linear_coefficient_by_simulation():
    n, beta = 32, 1.0
    scores, pattern = sampled_rows(n, beta, 1.0, 40_000, np.random.default_rng(1))
    slopes = n * (pattern * scores).mean(1)
    error = slopes.std() / math.sqrt(len(slopes))
    expected = beta * (1 - softmax_participation(n, beta) / n)
    assert abs(slopes.mean() - expected) < 4 * error


def test_finite_size_coefficients_have_a_limit():
    feature, finite = exp_feature_coefficients(1.0), finite_size_coefficients(1e12, 1e12, 1.0)
    assert abs(finite.theta1 - feature.theta1) < 1e-9
    assert abs(finite.fraction - feature.fraction) < 1e-9


def test_row_normalizer():
    moments = row_normalizer_moments(64, 64, 1.0)
    assert abs(moments.mean - 1.003955) < 5e-7 and abs(moments.variance - 0.0376201) < 5e-8
    rng = np.random.default_rng(2)
    v = rng.chisquare(64, (20_000, 1)) / 64
    sums = np.exp(np.sqrt(v) * rng.standard_normal((20_000, 64)) - 0.5).mean(1)
    assert abs(sums.mean() - moments.mean) < 4 * sums.std() / math.sqrt(len(sums))
    spread = np.square(sums - sums.mean())
    assert abs(spread.mean() - moments.variance) < 4 * spread.std() / math.sqrt(len(sums))
    far = row_normalizer_moments(1e6, 1e6, 1.0).variance
    assert abs(far / (np.expm1(1) / 1e6 + 1 / 2e6) - 1) < 1e-4


def test_mean_norm_ratio():
    thresholds = softmax_thresholds()
    n = np.array([1e6, 1e12, 1e20])
    beta = 0.9 * np.sqrt(np.log(n))
    exact = (softmax_participation(n, beta) - 1) / np.expm1(beta**2)
    assert np.all(np.abs(mean_norm_ratio(n, 0.9) - exact) < [5e-3, 2e-4, 1e-4])
    at = mean_norm_ratio(n, thresholds.mean_norm)
    slow = 0.5 - 1 / (thresholds.mean_norm * np.sqrt(2 * np.pi * np.log(n)))
    assert np.all(np.diff(at) > 0) and np.all(at < 0.5) and np.all(np.abs(at - slow) < 0.04)
    assert mean_norm_ratio(1e20, 0.5) > 0.999 and mean_norm_ratio(1e20, 1.2) < 1e-4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: row_normalizer_moments(64, 4, 1.0), "expected d_k > 4 beta\\^2"),
        (lambda: row_normalizer_moments(64, 64, -1.0), "beta=-1.0"),
        (lambda: softmax_participation(0, 1.0), "n=0"),
        (lambda: softmax_participation(8, 1.0, 0.0), "v=0.0"),
        (lambda: mean_norm_ratio(1.0, 0.5), "n=1.0: expected a value > 1"),
        (lambda: mean_norm_ratio(100, 0.0), "b=0.0"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()
