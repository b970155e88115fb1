"""head_covariance: inner products of rows, their logarithms, the parts of an error."""

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhabook_lib import head_covariance as module
from mhabook_lib.head_covariance import (
    best_weights,
    bias_variance_covariance,
    correlation,
    effective_heads,
    head_covariance,
    log_head_covariance,
)

RNG = np.random.default_rng(0)


def draw(*shape):
    return torch.from_numpy(RNG.standard_normal(shape))


def slow_covariance(query, key, bandwidth):
    """Head pair after head pair, from the kernel's definition: (n_q, H, H)."""
    rows = []
    for q, k in zip(query, key, strict=True):
        kernel = torch.exp(-((q[:, None] - k) ** 2).sum(-1) / (2 * bandwidth**2))
        rows.append(kernel / kernel.sum(-1, keepdim=True))
    gram = [[(v * w).sum(-1) for w in rows] for v in rows]
    return torch.stack([torch.stack(row, -1) for row in gram], -2)


@pytest.mark.parametrize("at_once", [7, 2**20])
def test_both_ways_agree_with_the_definition(at_once, monkeypatch):
    monkeypatch.setattr(module, "WEIGHTS_AT_ONCE", at_once)
    query, key = draw(3, 11, 2), draw(3, 40, 2)
    expected = slow_covariance(query, key, 0.7)
    torch.testing.assert_close(head_covariance(query, key, 0.7), expected, rtol=1e-12, atol=0)
    found = log_head_covariance(query, key, 0.7).exp()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_leading_axes_broadcast():
    query, key = draw(3, 4, 2), draw(5, 3, 20, 2)
    both = head_covariance(query, key, 0.6), log_head_covariance(query, key, 0.6)
    for found in both:
        assert found.shape == (5, 4, 3, 3)
    torch.testing.assert_close(both[0][2], head_covariance(query, key[2], 0.6))
    torch.testing.assert_close(both[1][2], log_head_covariance(query, key[2], 0.6))


def test_the_logarithm_survives_where_the_product_is_zero():
    query, key, bandwidth = draw(2, 1, 1), draw(2, 6, 1), 0.003
    assert float(head_covariance(query, key, bandwidth)[0, 0, 1]) < 1e-300
    mpmath.mp.dps = 60
    scores = [
        [
            -((mpmath.mpf(float(q)) - mpmath.mpf(float(k))) ** 2) / (2 * bandwidth**2)
            for k in keys[:, 0]
        ]
        for q, keys in zip(query[:, 0, 0], key, strict=True)
    ]
    tops = [max(row) for row in scores]
    sums = [
        mpmath.fsum(mpmath.exp(s - top) for s in row) for row, top in zip(scores, tops, strict=True)
    ]
    joint = [a + b for a, b in zip(*scores, strict=True)]
    exact = max(joint) + mpmath.log(mpmath.fsum(mpmath.exp(s - max(joint)) for s in joint))
    exact -= sum(tops) + mpmath.log(sums[0]) + mpmath.log(sums[1])
    found = float(log_head_covariance(query, key, bandwidth)[0, 0, 1])
    assert found == pytest.approx(float(exact), rel=1e-9) and found < -700


def test_positive_rows_bound_the_effective_number_of_heads():
    n = 30
    gram = head_covariance(draw(6, 50, 2), draw(6, n, 2), 0.4)
    inverse = gram.diagonal(dim1=-2, dim2=-1).mean(-1)
    assert bool((gram > 0).all())
    count = effective_heads(gram)
    assert bool((count >= 1).all()) and bool((count < torch.clamp(n * inverse, max=6)).all())
    assert bool((gram.mean((-1, -2)) >= 1 / n).all())


def test_effective_heads_of_equal_correlation():
    rho, num_heads = 0.3, 5
    matrix = 2.0 * (rho + (1 - rho) * torch.eye(num_heads, dtype=torch.float64))
    assert float(effective_heads(matrix)) == pytest.approx(num_heads / (1 + 4 * rho))
    torch.testing.assert_close(correlation(matrix), matrix / 2)


def test_parts_are_those_of_a_sample():
    answers, weights = draw(500, 4), draw(4)
    bias, covariance = answers.mean(0) - 0.3, torch.cov(answers.T, correction=0)
    for a in (None, weights):
        share = torch.full((4,), 0.25, dtype=torch.float64) if a is None else a
        parts = bias_variance_covariance(bias, covariance, a)
        shifted = ((answers - 0.3) @ share).square().mean()
        torch.testing.assert_close(parts.mse, shifted, rtol=1e-12, atol=0)
        torch.testing.assert_close(parts.bias2, (bias @ share).square())
        own = (share.square() * covariance.diagonal()).sum()
        torch.testing.assert_close(parts.variance, own)
    assert bias_variance_covariance(bias.expand(2, 4), covariance).mse.shape == (2,)


@given(seed=st.integers(0, 10**6), num_heads=st.integers(2, 6))
@settings(max_examples=40, deadline=None)
def test_best_weights_are_a_minimum(seed, num_heads):
    rng = np.random.default_rng(seed)
    factor = torch.from_numpy(rng.standard_normal((num_heads, num_heads + 2)))
    covariance = factor @ factor.mT + 0.1 * torch.eye(num_heads, dtype=torch.float64)
    bias = torch.from_numpy(rng.standard_normal(num_heads))
    best = best_weights(bias, covariance)
    assert float(best.sum()) == pytest.approx(1, abs=1e-12)
    step = torch.from_numpy(rng.standard_normal(num_heads))
    step -= step.mean()
    least = bias_variance_covariance(bias, covariance, best).mse
    for size in (-0.1, 0.1):
        assert bias_variance_covariance(bias, covariance, best + size * step).mse > least


def test_uniform_is_best_for_equal_row_sums():
    matrix = torch.tensor([[2.0, 0.5, 0.1], [0.5, 1.6, 0.5], [0.1, 0.5, 2.0]]).double()
    expected = torch.full((3,), 1 / 3, dtype=torch.float64)
    torch.testing.assert_close(best_weights(torch.zeros(3).double(), matrix), expected)


def test_errors():
    query, key = draw(3, 4, 2), draw(3, 9, 2)
    for call, message in (
        (lambda: head_covariance(query[0], key[0], 0.5), r"expected \(\.\.\., H, n_q, d_k\)"),
        (lambda: head_covariance(query, key[:2], 0.5), "query.*key|H, n_q"),
        (lambda: log_head_covariance(query, key[..., :1], 0.5), r"\(\.\.\., n, d_k\)"),
        (lambda: head_covariance(query, key, 0.0), "bandwidth=0.0"),
        (lambda: log_head_covariance(query, key, -1.0), "bandwidth=-1.0"),
        (lambda: head_covariance(query, key[:, :0], 0.5), "at least one key"),
        (lambda: bias_variance_covariance(torch.ones(2), torch.eye(3)), r"covariance.*\(3, 3\)"),
        (
            lambda: bias_variance_covariance(torch.ones(2), torch.eye(2), torch.ones(3)),
            r"weights of shape \(3,\)",
        ),
        (lambda: best_weights(torch.ones(2), torch.full((2, 2), torch.nan)), "covariance.*finite"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
