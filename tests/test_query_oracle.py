"""The black box of heads and its answers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mhabook_lib.query_oracle import (
    QueryHeads,
    QueryOracle,
    canonical_heads,
    probe_outputs,
    query_heads,
    random_query_heads,
    recovery_error,
    sequence_outputs,
)


def fixture(num_heads, dim, phi=0.0):
    """Deterministic heads and tokens without a generator."""
    h, a, b = np.ogrid[:num_heads, :dim, :dim]
    w = np.cos(1.3 + phi + 1.7 * h + 0.9 * a + 2.1 * b + 0.37 * (a + 1) * (b + 1) * (h + 1))
    h, a = np.ogrid[:num_heads, :dim]
    v = np.sin(0.7 + phi + 1.1 * h + 1.9 * a + 0.53 * (h + 1) * (a + 1))
    return QueryHeads(w, v)


def tokens(count, dim, phi=0.0):
    i, a = np.ogrid[:count, :dim]
    return np.sin(0.4 + phi + 1.9 * i + 0.8 * a + 0.33 * (i + 1) * (a + 1))


def test_reference_values():
    heads = fixture(2, 3)
    answer = sequence_outputs(heads, tokens(4, 3)[None])[0]
    assert answer == pytest.approx(-0.08870437447974755, abs=1e-14)
    i, a = np.ogrid[:3, :3]
    u = np.cos(0.5 + 2.3 * i + 1.1 * a + 0.81 * (i + 1) * (a + 1))[:1]
    b = np.sin(0.2 + 1.7 * i + 0.6 * a + 0.47 * (i + 1) * (a + 1))[:1]
    counts = np.array([[c, 1.0] for c in (1, 2, 3, 4)])
    r = probe_outputs(heads, u, b, counts)[0] - (b @ heads.total)[0]
    wanted = [0.7656458426324301, 0.9919823542119101, 1.1016224466771116, 1.166457750776198]
    assert np.allclose(r, wanted, atol=1e-14)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 999))
def test_probes_are_sequences(num_heads, dim, seed):
    rng = np.random.default_rng(seed)
    heads = random_query_heads(num_heads, dim, rng)
    u, b = rng.standard_normal((2, 3, dim))
    counts = np.array([[1.0, 1.0], [3.0, 1.0], [2.0, 3.0]])
    short, literal = QueryOracle(heads), QueryOracle(heads, literal=True)
    assert np.allclose(short.probe(u, b, counts), literal.probe(u, b, counts), atol=1e-11)
    assert short.num_queries == literal.num_queries == 9
    assert short.max_length == literal.max_length == 5


def test_order_of_keys_does_not_matter_and_the_last_token_asks():
    heads, x = fixture(2, 3), tokens(4, 3)
    shuffled = x[[2, 0, 1, 3]]
    other = x[[3, 0, 1, 2]]
    answer = sequence_outputs(heads, np.stack([x, shuffled, other]))
    assert answer[0] == pytest.approx(answer[1], abs=1e-14)
    assert abs(answer[0] - answer[2]) > 1e-3


def test_canonical_form_merges_drops_and_keeps_answers():
    heads = fixture(3, 3)
    raw = QueryHeads(
        heads.w[[0, 1, 1, 2, 2]], np.stack([*heads.v, heads.v[0], -heads.v[0]])[[0, 1, 2, 3, 4]]
    )
    form = canonical_heads(raw)
    assert len(form.w) == 2
    x = np.random.default_rng(0).standard_normal((50, 4, 3))
    assert np.allclose(sequence_outputs(form, x), sequence_outputs(raw, x), atol=1e-13)
    nothing = canonical_heads(QueryHeads(heads.w[:1], np.zeros((1, 3))))
    assert nothing.w.shape == (0, 3, 3)


def test_noise_rounding_and_limits():
    heads, x = fixture(2, 3), tokens(4, 3)[None]
    exact = sequence_outputs(heads, x)
    loud = QueryOracle(heads, noise=0.1, rng=np.random.default_rng(0))
    spread = np.std([loud.value(x)[0] - exact[0] for _ in range(400)])
    assert spread == pytest.approx(0.1, rel=0.15)
    assert QueryOracle(heads, decimals=3).value(x)[0] == round(exact[0], 3)
    with pytest.raises(ValueError, match="at most 3"):
        QueryOracle(heads, max_length=3).value(x)


def test_errors_are_relative_and_after_the_best_assignment():
    heads = fixture(3, 3)
    swapped = QueryHeads(heads.w[[2, 0, 1]], heads.v[[2, 0, 1]])
    assert recovery_error(swapped, heads) == 0
    off = QueryHeads(heads.w[[2, 0, 1]] * 1.01, heads.v[[2, 0, 1]])
    assert recovery_error(off, heads) == pytest.approx(0.01)
    with pytest.raises(ValueError, match="2 heads found for 3"):
        recovery_error(QueryHeads(heads.w[:2], heads.v[:2]), heads)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: query_heads(np.zeros((2, 3, 3)), np.zeros((2, 4))), r"\(H, d, d\)"),
        (lambda: query_heads(np.full((1, 2, 2), np.nan), np.zeros((1, 2))), "w="),
        (lambda: sequence_outputs(fixture(1, 3), np.zeros((2, 0, 3))), "N >= 1"),
        (lambda: sequence_outputs(fixture(1, 3), np.zeros((2, 2, 4))), r"\(B, N, 3\)"),
        (lambda: QueryOracle(fixture(1, 2), noise=0.1), "generator"),
        (lambda: random_query_heads(0, 2, np.random.default_rng(0)), "num_heads"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
