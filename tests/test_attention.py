"""attention: structured heads against dense ones, weights, entropy, errors."""

import numpy as np
import pytest
import torch
from clustering_instances import loop_weights, test_vector
from hypothesis import given, settings
from hypothesis import strategies as st

from mhabook_lib.attention import (
    BlockHeads,
    DenseHeads,
    ScalarHeads,
    attention_entropy,
    attention_scores,
    attention_weights,
    head_outputs,
)
from mhabook_lib.numerics.linalg import random_orthonormal
from mhabook_lib.token_flow import orthogonal_heads, random_heads, sample_sphere

FLOWS = ("softmax", "unnormalized", "relu")


def some_heads(rng, batch=()):
    """The three structured kinds in d = 6, H = 3."""
    scalar = ScalarHeads(torch.from_numpy(rng.standard_normal((*batch, 3))))
    basis = random_orthonormal((*batch, 3, 6, 2), rng)  # overlapping blocks are allowed
    block = BlockHeads(basis, torch.from_numpy(rng.standard_normal((*batch, 3, 2))))
    return scalar, block, DenseHeads(random_heads((*batch, 3, 6, 6), rng, "general"))


@pytest.mark.parametrize("normalization", FLOWS)
def test_weights_and_outputs_against_loops(normalization):
    x, matrices, beta = test_vector()
    weights = attention_weights(attention_scores(x, matrices), beta, normalization)
    outputs = head_outputs(x, matrices, beta, normalization)
    for h, m in enumerate(matrices):
        slow = torch.tensor(loop_weights(x, m, beta, normalization), dtype=torch.float64)
        torch.testing.assert_close(weights[h], slow, rtol=1e-14, atol=1e-15)
        for i in range(6):
            expected = sum(slow[i, j] * (m @ x[j]) for j in range(6))
            torch.testing.assert_close(outputs[h, i], expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["scalar", "block", "dense"])
@pytest.mark.parametrize("batch", [(), (4,)], ids=["shared heads", "batched heads"])
def test_structured_heads_agree_with_their_dense_matrices(kind, batch):
    rng = np.random.default_rng(1)
    heads = some_heads(rng, batch)[kind]
    dense = DenseHeads(heads.dense(6))
    x, y = sample_sphere((4, 5, 6), rng), sample_sphere((4, 5, 6), rng)
    pattern = torch.from_numpy(rng.standard_normal((4, 3, 5, 5)))
    close = {"rtol": 1e-12, "atol": 1e-13}
    torch.testing.assert_close(heads.scores(x), dense.scores(x), **close)
    torch.testing.assert_close(heads.scores(x, y), dense.scores(x, y), **close)
    torch.testing.assert_close(heads.outputs(pattern, x), dense.outputs(pattern, x), **close)
    summed = dense.outputs(pattern, x).sum(-3)
    torch.testing.assert_close(heads.summed_outputs(pattern, x), summed, **close)
    torch.testing.assert_close(heads.transposed().dense(6), heads.dense(6).mT)
    assert heads.num_heads == 3
    assert heads.to(torch.float32).dense(6).dtype == torch.float32


def test_values_may_differ_from_scores():
    rng = np.random.default_rng(2)
    x, m = sample_sphere((5, 4), rng), random_heads((2, 4, 4), rng, "general")
    v = random_heads((2, 4, 4), rng, "general")
    pattern = attention_weights(attention_scores(x, m), 0.7)
    expected = torch.einsum("hij,hab,jb->hia", pattern, v, x)
    torch.testing.assert_close(head_outputs(x, m, 0.7, values=v), expected)


@given(seed=st.integers(0, 10**6), beta=st.floats(0.05, 20), n=st.integers(1, 7))
@settings(max_examples=25, deadline=None)
def test_softmax_rows_and_entropy(seed, beta, n):
    scores = torch.from_numpy(np.random.default_rng(seed).standard_normal((2, n, n)))
    weights = attention_weights(scores, beta)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, n, dtype=torch.float64))
    entropy = attention_entropy(scores, beta)
    direct = torch.special.entr(weights).sum(-1)
    torch.testing.assert_close(entropy, direct, rtol=1e-11, atol=1e-12)
    assert bool((entropy >= -1e-12).all()) and bool((entropy <= np.log(n) + 1e-12).all())


def test_entropy_survives_large_scores():
    scores = torch.tensor([[[1e4, 0.0], [5.0, 5.0]]], dtype=torch.float64)
    expected = torch.tensor([[0.0, np.log(2)]], dtype=torch.float64)
    torch.testing.assert_close(attention_entropy(scores, 3.0), expected)


def test_batches_are_loops_over_their_entries():
    rng = np.random.default_rng(3)
    x = sample_sphere((2, 3, 5, 6), rng)
    beta = torch.tensor([[0.5], [2.0]], dtype=torch.float64)  # over the first axis
    for heads in some_heads(rng):
        for normalization in FLOWS:
            batched = head_outputs(x, heads, beta, normalization)
            for a in range(2):
                for b in range(3):
                    one = head_outputs(x[a, b], heads, float(beta[a, 0]), normalization)
                    torch.testing.assert_close(batched[a, b], one, rtol=1e-12, atol=1e-14)


def test_token_order_does_not_matter():
    rng = np.random.default_rng(4)
    x, order = sample_sphere((7, 6), rng), torch.from_numpy(rng.permutation(7))
    for heads in some_heads(rng):
        scores = attention_scores(x, heads)
        permuted = attention_scores(x[order], heads)
        torch.testing.assert_close(permuted, scores[:, order][:, :, order])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: attention_scores(x, torch.ones(2, 3, 3)), r"\(2, 3, 3\).*\(5, 4\)"),
        (lambda x: attention_scores(x, torch.ones(7, 2, 4, 4)[..., :3]), "expected heads"),
        (lambda x: attention_scores(x.expand(3, 5, 4), torch.ones(2, 1, 4, 4)), "broadcast"),
        (lambda x: attention_scores(x / 0, torch.ones(1, 4, 4)), "x=tensor of shape .* finite"),
        (lambda x: attention_scores(x, torch.full((1, 4, 4), np.nan)), "heads=.*finite"),
        (lambda x: attention_scores(x[0], torch.ones(1, 4, 4)), r"\(4,\).*\(\.\.\., n, d\)"),
        (lambda x: attention_scores(x.long(), torch.ones(1, 4, 4)), "floating-point"),
        (lambda x: attention_scores(x, ScalarHeads(torch.tensor(1.0))), r"\(\.\.\., H\)"),
        (
            lambda x: attention_scores(x, BlockHeads(torch.ones(1, 4, 2), torch.ones(1, 3))),
            r"\(1, 4, 2\).*\(1, 3\).*\(5, 4\)",
        ),
        (lambda x: attention_weights(x.unsqueeze(0), -1.0), r"beta=-1\.0.*> 0"),
        (lambda x: attention_weights(x.unsqueeze(0), np.inf), "beta=inf"),
        (lambda x: attention_weights(x.unsqueeze(0), 1.0, "sofmax"), "normalization='sofmax'"),
        (lambda x: attention_weights(x.expand(2, 1, 5, 4), torch.ones(3)), "beta with leading"),
        (lambda x: attention_entropy(x.unsqueeze(0), 0.0), r"beta=0\.0"),
    ],
)
def test_errors_name_the_argument(call, message):
    x = torch.eye(5, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match=message):
        call(x)


def test_orthogonal_heads_annihilate_one_another():
    rng = np.random.default_rng(5)
    heads = orthogonal_heads(torch.from_numpy(rng.standard_normal((4, 3, 2))), rng, 7)
    dense = heads.dense(7)
    for h in range(3):
        for g in range(3):
            if h != g:
                assert float((dense[:, h] @ dense[:, g]).abs().max()) < 1e-14
    spectrum = torch.linalg.eigvalsh(dense).abs().sort(-1).values[..., -2:]
    torch.testing.assert_close(spectrum, heads.eigenvalues.abs().sort(-1).values)
    with pytest.raises(ValueError, match="H \\* k <= d"):
        orthogonal_heads(torch.ones(3, 2), rng, 5)
