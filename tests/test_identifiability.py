"""identifiability: closed-form and automatic Jacobians, differences, ranks, factors, errors."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhabook_lib.attention_layer import (
    attention_core,
    random_weights,
    rope_frequencies,
    weight_shapes,
)
from mhabook_lib.attention_shapes import AttentionShape
from mhabook_lib.identifiability import (
    attention_jacobian,
    canonical_form,
    change_basis,
    factor_differential,
    functional_jacobian,
    generic_jacobian,
    kernel_dimensions,
    numerical_rank,
    unidentified_directions,
    vertical_steps,
)

LAYERS = {
    "plain": ({}, {}),
    "no mask, biases": ({"biases": "qkvo"}, {"causal": False}),
    "groups, biases, RoPE": ({"groups": 2, "biases": "qkvo"}, {"rope": rope_frequencies(4)}),
    "partial RoPE, value size": ({"d_value": 3, "biases": "kv"}, {"rope": rope_frequencies(2)}),
}


@pytest.fixture
def rng():
    return np.random.default_rng(8)


@pytest.mark.parametrize("name", LAYERS)
def test_the_two_jacobians_agree(name, rng):
    shape, options = LAYERS[name]
    weights = random_weights(weight_shapes(4, 6, 4, **shape), rng, 0.5)
    x = torch.from_numpy(rng.standard_normal((3, 5, 6)))
    closed = attention_jacobian(weights, x, **options)
    automatic = functional_jacobian(lambda w: attention_core(w, x, **options).output, weights)
    torch.testing.assert_close(closed, automatic, rtol=1e-12, atol=1e-14)


def test_columns_are_differences_of_outputs(rng):
    weights = random_weights(weight_shapes(2, 4, 2, biases="q"), rng, 0.5)
    x = torch.from_numpy(rng.standard_normal((2, 3, 4)))
    jacobian = attention_jacobian(weights, x)
    direction = torch.from_numpy(rng.standard_normal(jacobian.shape[1]))
    pieces = direction.split([value.numel() for value in weights.values()])

    def output(step):
        moved = {
            name: value + step * piece.reshape(value.shape)
            for (name, value), piece in zip(weights.items(), pieces, strict=True)
        }
        return attention_core(moved, x).output.flatten()

    slope = (output(1e-5) - output(-1e-5)) / 2e-5
    torch.testing.assert_close(jacobian @ direction, slope, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("variant", ["softmax1", "cross", "headless", "normed"])
def test_generic_jacobians_of_other_variants(variant, rng):
    """For these the function, not the closed form, is differentiated; u from first principles."""
    shape, options, expected = {
        "softmax1": (AttentionShape(4, 2, biases="qkvo"), {"activation": "softmax1"}, 16),
        "cross": (AttentionShape(4, 2, memory_dim=3), {"causal": False}, 16),
        "headless": (AttentionShape(4, 1, d_head=2, output_projection=False), {}, 4),
        "normed": (AttentionShape(4, 2, qk_norm="plain"), {}, 8 + 2 * 3),
    }[variant]
    jacobian = generic_jacobian(shape, rng, **options)
    assert unidentified_directions(jacobian) == expected
    assert jacobian.shape[1] == shape.parameter_count()


@given(seed=st.integers(0, 10**6), rank=st.integers(1, 6))
@settings(max_examples=20, deadline=None)
def test_rank_of_products(seed, rank):
    rng = np.random.default_rng(seed)
    left, right = (torch.from_numpy(rng.standard_normal((n, rank))) for n in (9, 7))
    found = numerical_rank(left @ right.mT)
    assert found.rank == rank
    assert found.sigma_in > 1e-6 and found.sigma_out < 1e-13


def test_no_gap_no_rank():
    # Values that sink through the cut one after the other: nothing says where the rank ends.
    with pytest.raises(ValueError, match=r"no gap at rank 8: .* expected a ratio above"):
        numerical_rank(torch.diag(torch.logspace(0, -20, 12, dtype=torch.float64)))
    kept = numerical_rank(torch.diag(torch.tensor([1.0, 1e-9, 1e-16], dtype=torch.float64)))
    assert kept.rank == 2


def test_too_little_data_is_refused(rng):
    jacobian = generic_jacobian(AttentionShape(8, 2), rng, seq_len=5, sequences=2)
    with pytest.raises(ValueError, match=r"80 rows and 256 columns.*expected more data"):
        unidentified_directions(jacobian)


# Factors


@pytest.mark.parametrize(("d_model", "d_head"), [(7, 4), (5, 5), (3, 4)])
def test_kernel_dimensions_by_rank(d_model, d_head, rng):
    top = min(d_model, d_head)
    for rank_q in range(top + 1):
        for rank_k in range(top + 1):
            w_q, w_k = (
                torch.from_numpy(
                    rng.standard_normal((d_head, r)) @ rng.standard_normal((r, d_model))
                )
                for r in (rank_q, rank_k)
            )
            matrix = factor_differential(w_q, w_k)
            rank = 0 if rank_q == rank_k == 0 else numerical_rank(matrix).rank
            vertical = vertical_steps(w_q, w_k)
            orbit = 0 if rank_q == rank_k == 0 else numerical_rank(vertical).rank
            expected = kernel_dimensions(d_model, d_head, rank_q, rank_k)
            assert (2 * d_head * d_model - rank, orbit) == expected
            assert float((matrix @ vertical).abs().max()) < 1e-12


@pytest.mark.parametrize("groups", [4, 2, 1])
def test_change_of_basis_keeps_the_layer(groups, rng):
    weights = random_weights(weight_shapes(4, 6, 3, groups=groups, d_value=2, biases="qkvo"), rng)
    x = torch.from_numpy(rng.standard_normal((5, 6)))
    s, t = (torch.from_numpy(rng.standard_normal((groups, d, d))) for d in (3, 2))
    moved = change_basis(weights, s, t)
    before, after = attention_core(weights, x), attention_core(moved, x)
    torch.testing.assert_close(after.output, before.output, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(moved["b_q"][0], s[0] @ weights["b_q"][0])
    back = change_basis(moved, torch.linalg.inv(s), torch.linalg.inv(t))
    for name, value in weights.items():
        torch.testing.assert_close(back[name], value, rtol=1e-9, atol=1e-10)


def test_factor_differential_is_a_derivative(rng):
    w_q, w_k, d_q, d_k = torch.from_numpy(rng.standard_normal((4, 2, 3, 5)))
    step = torch.cat([d_q.flatten(1), d_k.flatten(1)], dim=1).unsqueeze(-1)
    expected = w_k.mT @ d_q + d_k.mT @ w_q
    moved = (factor_differential(w_q, w_k) @ step).reshape(2, 5, 5)
    torch.testing.assert_close(moved, expected)


def test_canonical_form(rng):
    w_q, w_k = torch.from_numpy(rng.standard_normal((2, 6, 3, 5)))
    new_q, new_k = canonical_form(w_q, w_k)
    product = w_k.mT @ w_q
    torch.testing.assert_close(new_k.mT @ new_q, product, rtol=1e-12, atol=1e-13)
    sigma = torch.linalg.svdvals(product)[:, :3]
    for factor in (new_q, new_k):  # rows are orthogonal with squared norms sigma
        torch.testing.assert_close(factor @ factor.mT, torch.diag_embed(sigma))
    a = torch.from_numpy(rng.standard_normal((6, 3, 3)))
    other = canonical_form(a @ w_q, torch.linalg.inv(a).mT @ w_k)
    signs = (new_q * other[0]).sum(-1, keepdim=True).sign()
    torch.testing.assert_close(signs * other[0], new_q, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(signs * other[1], new_k, rtol=1e-7, atol=1e-8)


ONE = torch.ones(1, 1, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: numerical_rank(torch.zeros(3, 2)), r"\(3, 2\): expected an entry not 0"),
        (lambda: numerical_rank(torch.full((2, 2), math.nan)), "jacobian=.*finite"),
        (lambda: kernel_dimensions(7, 4, 5, 1), "rank_q=5, rank_k=1"),
        (lambda: canonical_form(torch.ones(3, 2), torch.ones(3, 2)), "D <= E"),
        (lambda: canonical_form(torch.ones(2, 3), torch.ones(2, 4)), r"\(2, 3\).*\(2, 4\)"),
        (lambda: factor_differential(ONE / 0, ONE), "w_q=.*finite"),
        (
            lambda: change_basis({f"w_{c}": ONE for c in "qkvo"}, ONE, torch.ones(2, 1, 1)),
            r"t of shape \(2, 1, 1\): expected \(..., 1, 1, 1\)",
        ),
        (
            lambda: attention_jacobian({f"w_{c}": ONE for c in "qkv"}, ONE),
            "expected a layer with w_o",
        ),
        (lambda: attention_jacobian({f"w_{c}": ONE for c in "qkvo"}, ONE[0]), r"x \(n, L, E\)"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
