"""finite_data: the laws against ranks of exact Jacobians on few tokens and on flat inputs."""

import numpy as np
import pytest
import torch

from mhabook_lib.attention_layer import random_weights
from mhabook_lib.attention_shapes import AttentionShape
from mhabook_lib.finite_data import finite_data_rank, input_limited_count, sequences_needed
from mhabook_lib.identifiability import (
    attention_jacobian,
    generic_jacobian,
    numerical_rank,
)


@pytest.fixture
def rng():
    return np.random.default_rng(6)


def test_random_shapes(rng):
    for _ in range(120):
        heads, d, c = (int(n) for n in rng.integers((2, 1, 1), 5))
        d_model = max(d, heads * c) + int(rng.integers(0, 4))
        if d_model > 10:
            continue
        shape = AttentionShape(
            d_model, heads, d_head=d, d_value=c, rotary_dim=2 * int(rng.integers(0, d // 2 + 1))
        )
        seq_len = int(rng.integers(3 if shape.rotary_dim else 2, 6))
        causal = bool(rng.integers(2))
        n = int(rng.integers(1, sequences_needed(shape, seq_len, causal) + 3))
        jacobian = generic_jacobian(shape, rng, seq_len=seq_len, sequences=n, causal=causal)
        law = finite_data_rank(shape, seq_len, n, causal)
        assert numerical_rank(jacobian).rank == law, (shape, seq_len, n, causal)


def test_one_head_is_bounded_and_may_miss_the_bound(rng):
    missed = set()
    for d_model in range(2, 6):
        for c in range(1, d_model + 1):
            shape = AttentionShape(d_model, 1, d_head=2, d_value=c)
            for seq_len, causal in ((2, True), (2, False), (3, True), (3, False)):
                for n in range(1, 5):
                    options = {"seq_len": seq_len, "sequences": n, "causal": causal}
                    rank = numerical_rank(generic_jacobian(shape, rng, **options)).rank
                    law = finite_data_rank(shape, seq_len, n, causal)
                    assert rank <= law
                    # The scores act inside the span of n (L - 1) differences of values.
                    inside = min(c, n * (seq_len - 1))
                    tokens = n * seq_len
                    bound = inside * tokens + (c - inside) * min(tokens, d_model)
                    assert rank <= bound + (d_model - c) * min(tokens, c)
                    if rank < law:
                        missed.add((d_model, c))
    assert missed == {(3, 3), (5, 4), (5, 5)}


def test_one_token_shows_only_the_sum_of_the_value_circuits(rng):
    shape = AttentionShape(8, 2)
    jacobian = generic_jacobian(shape, rng, seq_len=1, sequences=80)
    assert numerical_rank(jacobian).rank == 8**2
    assert finite_data_rank(shape, 1, 80) == 8**2


def test_enough_is_enough(rng):
    shape = AttentionShape(8, 8)
    assert sequences_needed(shape, 2) == 22
    for n in (22, 44, 1000):
        assert finite_data_rank(shape, 2, n) == 256 - 16
    assert finite_data_rank(shape, 2, 21) < 256 - 16


def flat_inputs(d_model, span, affine, rng, n=30, seq_len=5):
    """Tokens with the given linear span and affine hull."""
    basis = torch.from_numpy(rng.standard_normal((span, d_model)))
    coordinates = torch.from_numpy(rng.standard_normal((n, seq_len, span)))
    if affine < span:
        coordinates[..., -1] = 1
    return coordinates @ basis


@pytest.mark.parametrize("biases", ["", "q", "k", "qk", "v", "o", "vo", "qkvo"])
def test_flat_inputs(biases, rng):
    for heads, d, c, affine, shift in ((2, 4, 4, 7, 0), (2, 3, 2, 6, 1), (1, 2, 4, 5, 0)):
        shape = AttentionShape(8, heads, d_head=d, d_value=c, biases=biases)
        weights = random_weights(shape.weight_shapes(), rng, 0.4)
        x = flat_inputs(8, affine + shift, affine, rng)
        rank = numerical_rank(attention_jacobian(weights, x)).rank
        expected = input_limited_count(shape, affine + shift, affine)
        assert shape.parameter_count() - rank == expected
        full = shape.unidentified_count().total
        assert input_limited_count(shape, 8, 8) == full


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: finite_data_rank(AttentionShape(8, 2), 0, 4), "seq_len=0, sequences=4"),
        (lambda: finite_data_rank(AttentionShape(8, 4, groups=2), 2, 4), "one group a head"),
        (lambda: finite_data_rank(AttentionShape(8, 2, biases="q"), 2, 4), "no biases"),
        (lambda: finite_data_rank(AttentionShape(6, 3, d_head=6), 2, 4), "H C <= E"),
        (lambda: finite_data_rank(AttentionShape(6, 1, rotary_dim=6), 2, 4), "at least 3"),
        (lambda: sequences_needed(AttentionShape(8, 2), 1), "seq_len=1"),
        (lambda: input_limited_count(AttentionShape(8, 2), 8, 6), "span=8, affine=6"),
        (lambda: input_limited_count(AttentionShape(8, 2), 3, 3), "affine=3: expected at least"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
