"""attention_shapes: counts against ranks of exact Jacobians, for every kind of layer."""

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhabook_lib.attention_layer import random_weights, rope_frequencies
from mhabook_lib.attention_shapes import (
    AttentionShape,
    LatentShape,
    commutant_dimension,
    frequency_blocks,
    matching_head_size,
    matching_width,
    product_kernel,
)
from mhabook_lib.identifiability import (
    functional_jacobian,
    generic_jacobian,
    numerical_rank,
    unidentified_directions,
)
from mhabook_lib.latent_attention import latent_core


def wide(*args, **kwargs):
    """A shape whose heads may be wider than the model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AttentionShape(*args, **kwargs)


@pytest.fixture
def rng():
    return np.random.default_rng(4)


SHAPES = [  # shape, P, u
    (AttentionShape(8, 2), 256, 64),
    (AttentionShape(8, 8), 256, 16),
    (AttentionShape(8, 2, d_head=3, d_value=5), 256, 68),
    (AttentionShape(6, 3, d_head=6), 432, 216),
    (wide(3, 1, d_head=5), 60, 42),
    (wide(1, 1, d_head=4, d_value=1), 10, 8),
    (AttentionShape(8, 2, biases="q"), 264, 64),
    (AttentionShape(8, 2, biases="k"), 264, 72),
    (AttentionShape(8, 2, biases="v"), 264, 64),
    (AttentionShape(8, 2, biases="qkvo"), 288, 80),
    (AttentionShape(6, 3, d_head=6, biases="v"), 450, 228),
    (AttentionShape(6, 1, d_head=4, d_value=6, output_projection=False), 84, 16),
    (AttentionShape(6, 1, d_head=4, d_value=6, output_projection=False, biases="qkv"), 98, 20),
    (AttentionShape(8, 2, rotary_dim=4), 256, 40),
    (AttentionShape(8, 2, d_head=6, rotary_dim=2, biases="qkvo"), 428, 128),
    (AttentionShape(8, 4, groups=2), 192, 16),
    (AttentionShape(8, 4, groups=1), 160, 8),
    (AttentionShape(8, 4, groups=2, d_head=4, rotary_dim=4), 384, 40),
    (wide(3, 4, groups=2, d_head=5, d_value=2), 126, 62),
    (AttentionShape(8, 2, qk_norm="plain"), 256, 48),
    (AttentionShape(8, 2, qk_norm="plain", rotary_dim=4), 256, 40),
    (AttentionShape(8, 2, qk_norm="gain"), 264, 40),
    (AttentionShape(8, 2, qk_norm="gain", rotary_dim=4, biases="qkvo"), 296, 46),
    (AttentionShape(8, 4, groups=2, d_head=3, qk_norm="gain"), 294, 27),
]


@pytest.mark.parametrize("case", SHAPES, ids=lambda case: str(case[0]))
def test_counts_against_ranks(case, rng):
    shape, parameters, unidentified = case
    assert shape.parameter_count() == parameters
    assert shape.unidentified_count().total == unidentified
    assert shape.share() == unidentified / parameters
    assert unidentified_directions(generic_jacobian(shape, rng)) == unidentified


def test_cross_attention(rng):
    shape = AttentionShape(8, 2, d_head=3, memory_dim=6)
    assert (shape.parameter_count(), shape.unidentified_count().total) == (168, 36)
    assert unidentified_directions(generic_jacobian(shape, rng, causal=False)) == 36


def test_wide_heads_with_rotary_positions_need_many_offsets(rng):
    """Each plane is a product over C of its own, once the sequences show enough offsets."""
    shape = wide(3, 2, d_head=6, d_value=2, rotary_dim=4, biases="qk")
    rope = torch.tensor([math.pi, 0.7], dtype=torch.float64)
    jacobian = generic_jacobian(shape, rng, seq_len=9, rope=rope)
    assert unidentified_directions(jacobian) == shape.unidentified_count(rope.tolist()).total


@pytest.mark.parametrize(
    ("frequencies", "d_head", "expected"),
    [
        ([1.0, 0.1], 4, 4),
        ([0.7, 0.7], 4, 8),
        ([0.7, -0.7], 4, 8),
        ([0.7, 2 * math.pi - 0.7], 4, 8),
        ([0.7, 0.0], 4, 6),
        ([0.7, math.pi], 4, 6),
        ([math.pi, 3 * math.pi], 4, 16),
        ([1.0], 6, 18),
        ([], 3, 9),
    ],
)
def test_commutant_by_rank(frequencies, d_head, expected, rng):
    """S with R_t S = S R_t for t = 1, 2, 3: the kernel of S -> R_t S - S R_t."""
    assert commutant_dimension(frequencies, d_head) == expected
    rotation = np.eye(d_head)
    for i, f in enumerate(frequencies):
        block = [[math.cos(f), -math.sin(f)], [math.sin(f), math.cos(f)]]
        rotation[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = block
    turned = [np.linalg.matrix_power(rotation, t) for t in (1, 2, 3)]
    eye = np.eye(d_head)
    matrix = np.concatenate([np.kron(r, eye) - np.kron(eye, r.T) for r in turned])
    rank = np.linalg.matrix_rank(matrix, tol=1e-9)
    assert d_head**2 - rank == expected


@given(d=st.integers(1, 9), a=st.integers(1, 9), b=st.integers(1, 9), seed=st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_product_kernel_by_rank(d, a, b, seed):
    rng = np.random.default_rng(seed)
    left, right = rng.standard_normal((d, a)), rng.standard_normal((d, b))
    # d(A^T B) = dA^T B + A^T dB, with dA and dB flattened by rows
    by_left = np.einsum("dj,if->ijdf", right, np.eye(a)).reshape(a * b, d * a)
    by_right = np.einsum("di,jf->ijdf", left, np.eye(b)).reshape(a * b, d * b)
    rank = numerical_rank(torch.from_numpy(np.concatenate([by_left, by_right], axis=1))).rank
    assert product_kernel(d, a, b) == d * (a + b) - rank


LATENT = [
    (LatentShape(8, 2, 5, 6, 2, 2, 2), 224, 79),
    (LatentShape(8, 2, 5, 6, 2, 2, 2, normed=True), 235, 56),
    (LatentShape(8, 3, 4, None, 2, 4, 3), 340, 59),
]


@pytest.mark.parametrize("case", LATENT, ids=lambda case: str(case[0]))
def test_latent_counts_against_ranks(case, rng):
    shape, parameters, unidentified = case
    assert shape.parameter_count() == parameters
    assert shape.unidentified_count().total == unidentified
    assert shape.share() == unidentified / parameters
    weights = random_weights(shape.weight_shapes(), rng, 0.4)
    x = torch.from_numpy(rng.standard_normal((18, 5, 8)))
    rope = rope_frequencies(shape.d_rotary)
    jacobian = functional_jacobian(lambda w: latent_core(w, x, rope), weights)
    assert unidentified_directions(jacobian) == unidentified


def test_matching_width():
    for num_heads, expected in zip(
        (2, 4, 6, 8, 12, 16), (941, 1016, 1040, 1052, 1064, 1070), strict=True
    ):
        width = matching_width(768, num_heads)
        assert width == expected == math.ceil(768 * math.sqrt(2 - 1 / num_heads))
    assert matching_width(5, 1) == 5


def test_matching_head_size():
    for d_model, num_heads, d_head, expected in ((8, 2, 2, 4), (16, 8, 1, 12)):
        assert matching_head_size(d_model, num_heads, d_head) == expected
        many = AttentionShape(d_model, num_heads, d_head=d_head)
        one = AttentionShape(d_model, 1, d_head=expected, d_value=d_model, output_projection=False)
        identified = [s.parameter_count() - s.unidentified_count().total for s in (many, one)]
        assert identified[0] == identified[1]
    assert matching_head_size(8, 2, 4) is None  # too much for one head
    assert matching_head_size(16, 4, 1) is None  # its value matrix alone is too much


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: AttentionShape(0, 1), "d_model=0"),
        (lambda: AttentionShape(8, 3), "d_model=8, num_heads=3"),
        (lambda: AttentionShape(8, 4, groups=3), "num_heads=4, groups=3"),
        (lambda: AttentionShape(8, 2, d_head=0), "d_head=0"),
        (lambda: AttentionShape(8, 2, rotary_dim=3), "rotary_dim=3: expected an even"),
        (lambda: AttentionShape(8, 2, rotary_dim=6), "rotary_dim=6: expected at most d_head=4"),
        (lambda: AttentionShape(8, 2, qk_norm="full"), "qk_norm='full'"),
        (lambda: AttentionShape(8, 8, qk_norm="plain"), "d_head=1.*no count is known"),
        (lambda: AttentionShape(8, 2, biases="z").parameter_count(), "biases='z'"),
        (lambda: AttentionShape(8, 1, biases="o", output_projection=False), "no 'o' without"),
        (lambda: AttentionShape(8, 2, rotary_dim=4).unidentified_count([1.0]), "rotary_dim/2=2"),
        (lambda: frequency_blocks([1.0, 2.0], 3), "at most d_head=3"),
        (lambda: frequency_blocks([math.nan], 3), "frequencies=.*finite"),
        (lambda: LatentShape(8, 1, 5, 3, 2, 2, 2), "d_latent=5: expected at most 4"),
        (lambda: LatentShape(8, 2, 5, 9, 2, 2, 2), "d_query=9: expected at most 8"),
        (lambda: LatentShape(8, 2, 5, 6, 2, 1, 2), "rotary_dim=1"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_wide_heads_warn():
    with pytest.warns(UserWarning, match="more than D\\^2"):
        AttentionShape(3, 1, d_head=5)
