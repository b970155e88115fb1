"""nadaraya_watson: every fast way against a plain loop, limits, symmetries and errors."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhabook_lib import nadaraya_watson as module
from mhabook_lib.nadaraya_watson import (
    average_weights,
    binned_nadaraya_watson,
    fused_nadaraya_watson,
    nadaraya_watson,
    nadaraya_watson_weights,
)

WAYS = [nadaraya_watson, fused_nadaraya_watson]


def normal(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng([seed, *shape]).standard_normal(shape))


def loop(query, key, value, bandwidth, prior=None):
    """One query (n_q, k), one key (n, k), in pure Python."""
    rows = []
    for x in query.tolist():
        logs = [-(math.dist(x, k) ** 2) / (2 * bandwidth**2) for k in key.tolist()]
        logs = logs if prior is None else [a + b for a, b in zip(logs, prior.tolist(), strict=True)]
        top = max(logs)
        w = [math.exp(a - top) for a in logs]
        columns = value.mT.tolist()
        rows.append([sum(map(math.prod, zip(w, c, strict=True))) / sum(w) for c in columns])
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("channels", [1, 7])  # fewer and more than coordinates of a key
def test_against_a_loop(way, channels):
    query, key, value = normal(2, 5, 3), normal(2, 40, 3), normal(40, channels)
    prior = normal(2, 40, seed=1)
    got = way(query, key, value, 0.4, prior_log_weights=prior)
    for h in range(2):
        wanted = loop(query[h], key[h], value, 0.4, prior[h])
        torch.testing.assert_close(got[h], wanted, rtol=0, atol=1e-13)
        assert (way(query[h], key[h], value, 0.4) - wanted).abs().max() > 1e-3  # prior matters


@pytest.mark.parametrize("way", WAYS)
def test_leading_axes_and_bandwidths_broadcast(way):
    query, key, value = normal(1, 4, 6, 2), normal(3, 1, 30, 2), normal(30, 2)
    bandwidth = torch.tensor([0.2, 0.5, 1.5])[:, None]
    got = way(query, key, value, bandwidth)
    assert got.shape == (3, 4, 6, 2)
    for s, h in ((0, 0), (1, 3), (2, 2)):
        wanted = way(query[0, h], key[s, 0], value, float(bandwidth[s]))
        torch.testing.assert_close(got[s, h], wanted, rtol=0, atol=1e-14)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 30), st.floats(0.05, 5), st.integers(1, 60), st.integers(0, 9)
)
def test_rows_are_weights_and_the_chunk_size_does_not_matter(k, n, bandwidth, chunk, seed):
    query, key, value = normal(7, k, seed=seed), normal(n, k, seed=seed + 1), normal(n, 2)
    rows = nadaraya_watson_weights(query, key, bandwidth)
    assert bool((rows >= 0).all())
    torch.testing.assert_close(rows.sum(-1), torch.ones(7).double(), rtol=0, atol=1e-13)
    got = nadaraya_watson(query, key, value, bandwidth, chunk_size=chunk)
    torch.testing.assert_close(got, rows @ value, rtol=0, atol=1e-12)
    turned = torch.linalg.qr(normal(k, k, seed=seed + 2)).Q
    moved = nadaraya_watson_weights(query @ turned + 3, key @ turned + 3, bandwidth)
    torch.testing.assert_close(moved, rows, rtol=0, atol=1e-10)


def test_limits_of_the_bandwidth():
    query, key, value = normal(6, 2), normal(50, 2), normal(50, 1)
    nearest = torch.cdist(query, key).argmin(-1)
    narrow = nadaraya_watson(query, key, value, 1e-4)
    torch.testing.assert_close(narrow, value[nearest], rtol=0, atol=1e-12)
    wide = nadaraya_watson(query, key, value, 1e6)
    torch.testing.assert_close(wide, value.mean(0).expand(6, 1), rtol=0, atol=1e-10)


@pytest.mark.parametrize("way", WAYS)
def test_gradients(way):
    query, key, value = (p.requires_grad_() for p in (normal(3, 2), normal(9, 2), normal(9, 2)))
    assert torch.autograd.gradcheck(lambda *parts: way(*parts, 0.7), (query, key, value))


def test_chunks_never_hold_all_weights(monkeypatch):
    sizes = []
    softmax = torch.softmax

    def spy(scores, *args, **kwargs):
        sizes.append(scores.numel())
        return softmax(scores, *args, **kwargs)

    monkeypatch.setattr(torch, "softmax", spy)
    nadaraya_watson(normal(4, 100, 2), normal(4, 50, 2), normal(50, 1), 0.5, chunk_size=2000)
    assert max(sizes) <= 2000 and sum(sizes) == 4 * 100 * 50


def test_average_weights(monkeypatch):
    query, key = normal(3, 5, 6, 2), normal(3, 5, 20, 2)
    wanted = nadaraya_watson_weights(query, key, 0.6).mean(-3)
    torch.testing.assert_close(average_weights(query, key, 0.6), wanted, rtol=0, atol=1e-15)
    monkeypatch.setattr(module, "WEIGHTS_AT_ONCE", 2 * 3 * 6 * 20)  # two heads at a time
    torch.testing.assert_close(average_weights(query, key, 0.6), wanted, rtol=0, atol=1e-15)


# float32 and keys that are far from the origin


@pytest.mark.parametrize(("offset", "uncentred_error"), [(0, 0), (100, 1e-3), (1000, 0.1)])
def test_centring_saves_float32(offset, uncentred_error):
    query, key = ((normal(m, 2) + offset).float() for m in (20, 500))
    exact = nadaraya_watson_weights(query.double(), key.double(), 0.2)
    assert (nadaraya_watson_weights(query, key, 0.2) - exact).abs().max() < 5e-6
    scores = (query @ key.mT - key.square().sum(-1) / 2) / 0.2**2
    assert (torch.softmax(scores, -1) - exact).abs().max() > uncentred_error


# binning


@pytest.mark.parametrize(
    ("d_head", "n", "bandwidth", "error"), [(1, 20_000, 0.1, 1e-6), (2, 20_000, 0.4, 1e-5)]
)
def test_binned_against_the_direct_sum(d_head, n, bandwidth, error):
    query, key = normal(200, d_head), normal(n, d_head, seed=1)
    value = torch.cat([torch.sin(3 * key[:, :1]), normal(n, 1)], dim=-1)
    got = binned_nadaraya_watson(query, key, value, bandwidth)
    assert (got - nadaraya_watson(query, key, value, bandwidth)).abs().max() < error


def test_the_error_of_binning_falls_with_the_fourth_power_of_the_step():
    query, key = normal(500, 1), normal(4000, 1, seed=1)
    value = torch.sin(3 * key)
    exact = nadaraya_watson(query, key, value, 0.3)
    coarse, fine = (
        (binned_nadaraya_watson(query, key, value, 0.3, nodes) - exact).abs().max()
        for nodes in (400, 1600)
    )
    assert 4**3.5 < coarse / fine < 4**4.5


def test_binned_far_queries_and_batches():
    key, value = normal(2, 3, 400, 1), normal(400, 2)
    query = 4 * normal(2, 1, 50, 1)
    query[0, 0, :2, 0] = torch.tensor([30.0, -9.0])  # outside of any grid
    got = binned_nadaraya_watson(query, key, value, 0.2)
    assert got.shape == (2, 3, 50, 2)
    assert (got - nadaraya_watson(query, key, value, 0.2)).abs().max() < 1e-5


def test_binned_single_point():
    got = binned_nadaraya_watson(torch.zeros(1, 1), torch.zeros(3, 1), torch.ones(3, 1), 0.5)
    assert got.item() == pytest.approx(1, abs=1e-12)


# bad input


@pytest.mark.parametrize("way", [*WAYS, binned_nadaraya_watson])
@pytest.mark.parametrize(
    ("query", "key", "value", "bandwidth", "message"),
    [
        ((2, 1), (0, 1), (0, 1), 1.0, r"key of shape \(0, 1\): expected at least one key"),
        ((2, 1), (3, 1), (3, 1), 0.0, "bandwidth=0.0: expected a value > 0"),
        ((2, 1), (3, 1), (3, 1), -1.0, "bandwidth=-1.0: expected a value > 0"),
        ((2, 1), (3, 1), (3, 1), math.nan, "bandwidth=nan: expected finite"),
        ((2, 2), (3, 1), (3, 1), 1.0, r"query of shape \(2, 2\) and key of shape \(3, 1\)"),
        ((2,), (3, 1), (3, 1), 1.0, r"query of shape \(2,\)"),
        ((2, 1), (3, 1), (4, 1), 1.0, r"value of shape \(4, 1\): expected .* with n=3"),
        ((2, 1), (3, 1), (3,), 1.0, r"value of shape \(3,\)"),
        ((2, 2, 1), (3, 3, 1), (3, 1), 1.0, "query with leading shape"),
        ((2, 1), (3, 3, 1), (2, 3, 1), 1.0, "value with leading shape"),
    ],
)
def test_bad_input(way, query, key, value, bandwidth, message):
    with pytest.raises(ValueError, match=message):
        way(torch.ones(query), torch.ones(key), torch.ones(value), bandwidth)


def test_bad_input_of_the_grid():
    with pytest.raises(ValueError, match="keys of dimension 3: expected 1 or 2"):
        binned_nadaraya_watson(normal(2, 3), normal(9, 3), normal(9, 1), 1.0)
    with pytest.raises(ValueError, match="num_nodes=50: expected a grid step below bandwidth/10"):
        binned_nadaraya_watson(normal(2, 1), normal(99, 1), normal(99, 1), 0.1, 50)


def test_bad_input_of_the_average():
    with pytest.raises(ValueError, match=r"expected \(..., H, n_q, d_k\)"):
        average_weights(normal(1, 5, 1), normal(3, 5, 1), 1.0)
