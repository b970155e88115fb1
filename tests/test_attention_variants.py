"""attention_variants: causal mask, normalised keys, the chain of the proof."""

import math

import numpy as np
import pytest
import torch

from mhabook_lib.attention_spectra import sample_qkv, softmax_heads
from mhabook_lib.attention_variants import (
    CHAIN,
    causal_gaussian_heads,
    causal_softmax_heads,
    equivalence_chain,
    feature_covariance,
    key_popularity,
    normalize_keys,
)
from mhabook_lib.numerics.montecarlo import standard_error


def rng(seed=0):
    return np.random.default_rng(seed)


def test_causal_softmax_against_loops():
    n, d_k, beta = 6, 3, 1.2
    q, k, _ = sample_qkv(n, 2, d_k, 1, rng(1))
    for r, head in enumerate(causal_softmax_heads(q, k, beta)):
        for i in range(n):
            row = [math.exp(beta * float(q[r, i] @ k[r, j]) / d_k**0.5) for j in range(i + 1)]
            expected = [math.sqrt(n) * (w / sum(row) - 1 / (i + 1)) for w in row]
            assert head[i].tolist() == pytest.approx(expected + [0.0] * (n - 1 - i), abs=1e-12)
    (last,) = softmax_heads(q[1:], k[1:], beta)
    torch.testing.assert_close(head[-1], last[-1])  # the last token sees all


def test_causal_gaussian_model_has_the_variances_of_its_rows():
    n, draws = 5, 20_000
    q, k, _ = sample_qkv(n, 1, 4, 1, rng(2), draws=(draws,))
    (head,) = causal_gaussian_heads(q, k, 0.9, rng(3))
    row = torch.arange(1, n + 1)[:, None]
    expected = n * math.expm1(0.81) * torch.ones(n, n).tril() / row**2
    squares = head.square()
    assert bool(((squares.mean(0) - expected).abs() <= 4.5 * standard_error(squares)).all())


def test_keys_of_one_length_are_equally_popular():
    k = torch.from_numpy(rng(4).standard_normal((3, 7, 5)))
    even = normalize_keys(k)
    torch.testing.assert_close(key_popularity(even, 1.3), torch.ones(3, 7, dtype=torch.float64))
    cosines = torch.nn.functional.cosine_similarity(even, k, dim=-1)
    torch.testing.assert_close(cosines, torch.ones_like(cosines))
    with pytest.raises(ValueError, match="k with a zero row"):
        normalize_keys(torch.zeros(2, 3))


def test_mean_and_covariance_of_the_features_given_the_keys():
    """Against features of many random queries."""
    n, d_k, beta, draws = 4, 6, 0.7, 200_000
    k = torch.from_numpy(rng(5).standard_normal((n, d_k)))
    scores = torch.from_numpy(rng(6).standard_normal((draws, d_k))) @ k.mT / d_k**0.5
    feature = torch.exp(beta * scores - beta**2 / 2) - 1
    mean = key_popularity(k, beta) - 1
    assert bool(((feature.mean(0) - mean).abs() < 4.5 * standard_error(feature)).all())
    off = feature - mean
    products = off[:, :, None] * off[:, None]
    gap = products.mean(0) - feature_covariance(k, beta)
    assert bool((gap.abs() < 5 * standard_error(products)).all())
    assert float(torch.linalg.eigvalsh(feature_covariance(k, beta))[0]) > 0


def test_the_chain():
    n, d_k, beta = 5, 40, 0.6
    q, k, _ = sample_qkv(n, 1, d_k, 1, rng(7), draws=(4000,))
    q, k = q[:, 0], k[:, 0]
    chain = dict(zip(CHAIN, equivalence_chain(q, k, beta, rng(8)), strict=True))
    (softmax,) = softmax_heads(q[:, None], k[:, None], beta)
    assert chain["softmax"].equal(softmax)
    scores = q @ k.mT / d_k**0.5
    feature = (torch.exp(beta * scores - beta**2 / 2) - 1) / n**0.5
    torch.testing.assert_close(chain["exp feature"], feature)
    # steps after the first change no second moment by more than the key norms do
    energy = {name: head.square().sum((-1, -2)) for name, head in chain.items()}
    rows, without = energy["Gaussian rows"], energy["without key mean"]
    error = (standard_error(rows) ** 2 + standard_error(without) ** 2) ** 0.5
    assert float((rows.mean() - without.mean()).abs()) < 4.5 * float(error)
    exact = feature_covariance(k, beta).diagonal(dim1=-2, dim2=-1).sum(-1)
    difference = rows - exact
    assert float(difference.mean().abs()) < 4.5 * float(standard_error(difference))
    model = energy["Gaussian model"] / n
    limit = math.expm1(beta**2)
    assert abs(float(model.mean()) - limit) < 4.5 * float(standard_error(model))
