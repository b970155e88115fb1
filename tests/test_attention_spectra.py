"""attention_spectra: sampler, heads, Gram matrices, against loops and the honest dense layer."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhabook_lib.attention_spectra import (
    averaged_gram,
    centered_attention_gram,
    concatenated_gram,
    concatenated_outputs,
    gaussian_equivalent_gram,
    gaussian_heads,
    gaussian_outputs,
    key_norm_spike,
    largest_entry_spike,
    output_gram,
    project_tokens,
    sample_qkv,
    softmax_heads,
    spectrum,
    training_loss_empirical,
)
from mhabook_lib.numerics.linalg import random_orthonormal
from mhabook_lib.numerics.montecarlo import standard_error


def rng(seed=0):
    return np.random.default_rng(seed)


def close(a, b, atol=1e-12):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def same_mean(first, second, sigmas=4.5):
    """Whether two batches of samples have equal means within their standard errors."""
    error = (standard_error(first).square() + standard_error(second).square()).sqrt()
    return bool(((first.mean(0) - second.mean(0)).abs() <= sigmas * error).all())


def statistics(grams):
    """Trace, second moment, largest eigenvalue and log-determinant of a batch of spectra."""
    e = spectrum(grams)
    return torch.stack([e.mean(-1), e.square().mean(-1), e[..., -1], e[..., 2:].log().sum(-1)], -1)


# The sampler


@pytest.mark.parametrize("share", ["none", "kv_across", "q_across", "kv_tied"])
def test_shapes_and_sharing(share):
    q, k, v = sample_qkv(6, 4, 3, 3, rng(), share=share, groups=2, draws=(2,))
    assert q.shape == k.shape == v.shape == (2, 4, 6, 3)
    equal = {
        "none": (False, False, False),
        "kv_across": (False, True, False),
        "q_across": (True, False, False),
        "kv_tied": (False, False, True),
    }[share]
    found = (q[:, 0].equal(q[:, 1]), k[:, 0].equal(k[:, 1]), v.equal(k))
    assert found == equal
    assert not k[:, 1].equal(k[:, 2]) and not q[0].equal(q[1])
    if share == "kv_across":
        assert v[:, 2].equal(v[:, 3]) and not v.equal(k)


def test_messages_of_the_sampler():
    for name, sizes in {
        "n": (0, 1, 1, 1),
        "num_heads": (1, 1.5, 1, 1),
        "d_v": (1, 1, 1, -2),
    }.items():
        with pytest.raises(ValueError, match=rf"{name}=.*: expected an integer >= 1"):
            sample_qkv(*sizes, rng())
    with pytest.raises(ValueError, match="share='all': expected one of"):
        sample_qkv(4, 2, 3, 3, rng(), share="all")
    with pytest.raises(ValueError, match="d_k=3, d_v=2: expected equal widths"):
        sample_qkv(4, 2, 3, 2, rng(), share="kv_tied")
    for groups in (0, 3):
        with pytest.raises(ValueError, match=f"groups={groups}: expected a divisor of num_heads=4"):
            sample_qkv(4, 4, 3, 2, rng(), share="kv_across", groups=groups)


def test_equal_in_law_to_the_dense_layer():
    """Orthogonal tokens, explicit weights, explicit W_O, singular values: the honest path."""
    n, d, num_heads, d_k, d_v, draws, beta = 10, 14, 2, 6, 8, 1500, 1.0
    generator = rng(1)
    x = random_orthonormal((draws, d, n), generator).mT * d**0.5
    close(x @ x.mT / d, torch.eye(n, dtype=torch.float64).expand(draws, n, n))
    q, k, v = project_tokens(x, num_heads, d_k, d_v, generator)
    heads = []
    for r in range(num_heads):
        weights = torch.exp(beta * q[:, r] @ k[:, r].mT / d_k**0.5)
        pattern = weights / weights.sum(-1, keepdim=True) - 1 / n
        heads.append(pattern @ v[:, r])
    w_out = torch.from_numpy(generator.standard_normal((draws, num_heads * d_v, d)))
    outputs = torch.cat(heads, -1) @ w_out / (num_heads * d_v) ** 0.5
    dense = outputs @ outputs.mT

    q, k, v = sample_qkv(n, num_heads, d_k, d_v, rng(2), draws=(draws,))
    fast = output_gram(centered_attention_gram(q, k, v, beta=beta), d, num_heads * d_v, rng(3))
    assert same_mean(statistics(dense), statistics(fast))
    other = output_gram(centered_attention_gram(q, k, v, beta=0.9), d, num_heads * d_v, rng(3))
    assert not same_mean(statistics(dense), statistics(other))


def test_project_tokens_sees_the_tokens():
    x = torch.ones(3, 4, 50, dtype=torch.float64)
    q, k, v = project_tokens(x, 2, 5, 6, rng())
    assert q.shape == k.shape == (3, 2, 4, 5) and v.shape == (3, 2, 4, 6)
    close(q[..., 0, :], q[..., 3, :])  # equal tokens have equal queries


# Heads and Gram matrices


def test_gram_matrices_against_loops():
    n, num_heads, d_k, beta = 5, 3, 4, 1.3
    q, k, v = sample_qkv(n, num_heads, d_k, 2, rng(4))
    heads, outputs = np.zeros((num_heads, n, n)), np.zeros((num_heads, n, 2))
    for r in range(num_heads):
        for i in range(n):
            row = [math.exp(beta * float(q[r, i] @ k[r, j]) / math.sqrt(d_k)) for j in range(n)]
            heads[r, i] = np.array(row) / sum(row) - 1 / n
        outputs[r] = heads[r] @ v[r].numpy()
    plain = sum(n / num_heads * head @ head.T for head in heads)
    with_values = sum(out @ out.T for out in outputs)
    mean_head = math.sqrt(n * num_heads) * heads.mean(0)
    close(centered_attention_gram(q, k, beta=beta), torch.from_numpy(plain))
    close(centered_attention_gram(q, k, v, beta=beta), torch.from_numpy(with_values))
    close(averaged_gram(softmax_heads(q, k, beta)), torch.from_numpy(mean_head @ mean_head.T))
    size, row = largest_entry_spike(q, k, beta)
    top = (heads + 1 / n).max()
    assert float(size) == pytest.approx(n * top**2 / (num_heads * math.expm1(beta**2)))
    assert int(row) == np.unravel_index((heads + 1 / n).argmax(), heads.shape)[1]


def test_heads_are_centred_or_stochastic():
    q, k, _ = sample_qkv(7, 2, 3, 1, rng(5))
    for centered, total in ((True, 0.0), (False, 7**0.5)):
        for head in softmax_heads(q, k, 1.0, centered):
            close(head.sum(-1), torch.full((7,), total, dtype=torch.float64))


def test_batches_are_single_draws():
    q, k, v = sample_qkv(6, 2, 3, 4, rng(6), draws=(3,))
    batch = centered_attention_gram(q, k, v, beta=0.8)
    single = torch.stack([centered_attention_gram(*t, beta=0.8) for t in zip(q, k, v, strict=True)])
    close(batch, single)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.2, 2.0))
def test_tokens_and_heads_have_no_order(seed, beta):
    q, k, v = sample_qkv(6, 3, 4, 2, rng(seed))
    tokens, heads = torch.randperm(6), torch.randperm(3)
    gram = centered_attention_gram(q, k, v, beta=beta)
    moved = centered_attention_gram(*(x[heads][:, tokens] for x in (q, k, v)), beta=beta)
    close(moved, gram[tokens][:, tokens])


def test_small_beta_is_the_linear_model():
    """Softmax to first order in beta: A - 11^T/n = beta S (I - 11^T/n) / n."""
    q, k, _ = sample_qkv(8, 2, 5, 1, rng(7))
    beta, center = 1e-5, torch.eye(8, dtype=torch.float64) - 1 / 8
    linear = concatenated_gram(h @ center for h in gaussian_heads(q, k, beta**2, 0.0, rng()))
    close(centered_attention_gram(q, k, beta=beta) / beta**2, linear / beta**2, atol=1e-3)


@pytest.mark.parametrize("d_v", [3, 6, 9])
def test_gaussian_outputs_have_the_law_of_gaussian_heads(d_v):
    n, draws = 6, 4000
    q, k, v = sample_qkv(n, 2, 4, d_v, rng(8), draws=(draws,))
    linear = concatenated_outputs(gaussian_heads(q, k, 0.7, 0.0, rng()), v)
    close(gaussian_outputs(q, k, v, 0.7, 0.0, rng()), linear)
    slow = concatenated_outputs(gaussian_heads(q, k, 0.7, 0.4, rng(9)), v)
    fast = gaussian_outputs(q, k, v, 0.7, 0.4, rng(10))
    assert fast.shape == slow.shape == (draws, n, 2 * d_v)
    slow, fast = slow @ slow.mT, fast @ fast.mT

    def moments(gram):
        e = torch.linalg.eigvalsh(gram)
        return torch.stack([e.sum(-1), e.square().sum(-1), e[:, -1], gram[:, 0, 1] ** 2], -1)

    assert same_mean(moments(slow), moments(fast))
    weaker = gaussian_outputs(q, k, v, 0.7, 0.3, rng(10))
    assert not same_mean(moments(slow), moments(weaker @ weaker.mT))


def test_gaussian_model_has_the_limiting_means():
    n, num_heads, d_v, beta, draws = 60, 2, 30, 1.0, 40
    theta1 = math.expm1(beta**2)
    q, k, v = sample_qkv(n, num_heads, 60, d_v, rng(11), draws=(draws,))
    for values, mean in ((None, theta1), (v, num_heads * d_v / n * theta1)):
        gram = gaussian_equivalent_gram(q, k, values, beta=beta, rng=rng(12))
        traces = gram.diagonal(dim1=-2, dim2=-1).mean(-1)
        assert abs(float(traces.mean()) - mean) < 4 * float(standard_error(traces))


@pytest.mark.parametrize("d_out", [3, 6, 11])
@pytest.mark.parametrize("rank", [4, 6])
def test_output_gram_has_the_law_of_explicit_weights(d_out, rank):
    n, width, draws = 6, 5, 4000
    features = torch.from_numpy(rng(13).standard_normal((n, rank)))
    gram = (features @ features.T).expand(draws, n, n)
    weights = torch.from_numpy(rng(14).standard_normal((draws, rank, d_out))) / width**0.5
    outputs = features @ weights
    slow, fast = outputs @ outputs.mT, output_gram(gram, d_out, width, rng(15))

    def entries(x):
        top = torch.linalg.eigvalsh(x)[:, -1:]
        return torch.cat([x.flatten(1), x.flatten(1).square(), top], 1)

    assert same_mean(entries(slow), entries(fast), 5.0)
    assert int(torch.linalg.matrix_rank(fast[0])) == min(rank, d_out)
    with pytest.raises(ValueError, match="d_out=0: expected an integer >= 1"):
        output_gram(gram, 0, width, rng())
    with pytest.raises(ValueError, match=r"width=0.5: expected an integer >= 1"):
        output_gram(gram, 1, 0.5, rng())


def test_messages_of_the_heads():
    q, k, v = sample_qkv(4, 2, 3, 3, rng())
    with pytest.raises(ValueError, match=r"q of shape \(2, 4, 3\) and k of shape \(2, 3, 3\)"):
        centered_attention_gram(q, k[:, :3], beta=1.0)
    with pytest.raises(ValueError, match=r"expected the same shape \(\.\.\., H, n, d_k\)"):
        centered_attention_gram(q[0], k[0], beta=1.0)
    with pytest.raises(ValueError, match=r"v of shape \(1, 4, 3\): expected \(2, 4\) and d_v"):
        centered_attention_gram(q, k, v[:1], beta=1.0)
    with pytest.raises(ValueError, match=r"v of shape \(1, 4, 3\): expected \(2, 4\) and d_v"):
        gaussian_outputs(q, k, v[:1], 1.0, 1.0, rng())
    for name, wrong in {"q": (q / 0, k, v), "k": (q, k / 0, v), "v": (q, k, v / 0)}.items():
        with pytest.raises(ValueError, match=f"{name}=.*expected finite values only"):
            gaussian_equivalent_gram(*wrong, beta=1.0, rng=rng())
    for gram in (
        centered_attention_gram,
        lambda *a, **b: gaussian_equivalent_gram(*a, **b, rng=rng()),
    ):
        with pytest.raises(ValueError, match=r"beta=-1.0: expected a value > 0"):
            gram(q, k, beta=-1.0)
    with pytest.raises(ValueError, match=r"linear=1.0, noise=-0.1: expected two finite variances"):
        list(gaussian_heads(q, k, 1.0, -0.1, rng()))


# What is computed from them


def test_training_loss_is_that_of_the_matrix_exponential():
    n, times = 5, [0.0, 0.3, 2.0]
    features = torch.from_numpy(rng(16).standard_normal((2, n, 3)))
    gram = features @ features.mT
    flow = torch.stack([torch.matrix_exp(-2 * t * gram) for t in times], 1)
    target = torch.from_numpy(rng(17).standard_normal(n))
    y = target - target.mean()
    single = torch.einsum("i,btij,j->bt", y, flow, y) / y.square().sum()
    close(training_loss_empirical(gram, times, target), single)
    # the mean over targets: an orthonormal basis of the vectors that sum to zero
    basis = torch.linalg.qr(torch.cat([torch.ones(n, 1), torch.eye(n)[:, 1:]], 1).double())[0][
        :, 1:
    ]
    mean = torch.einsum("ik,btij,jk->bt", basis, flow, basis) / (n - 1)
    close(training_loss_empirical(gram, times), mean)
    close(mean[:, 0], torch.ones(2, dtype=torch.float64))


def test_messages_of_the_training_loss():
    with pytest.raises(ValueError, match=r"times=\[-1.0\]: expected times >= 0"):
        training_loss_empirical(torch.eye(3), [-1.0])
    with pytest.raises(ValueError, match="target is constant"):
        training_loss_empirical(torch.eye(3), [1.0], torch.full((3,), 2.0))


def test_key_norm_spike_is_the_size_of_the_mean_rows():
    """One left vector 1/sqrt(n), and on the right the popularity of every key of every head."""
    n, num_heads, d_k, beta = 20_000, 3, 2000, 0.8
    norms = torch.from_numpy(rng(19).chisquare(d_k, (num_heads, n)))
    popularity = torch.exp(beta**2 * (norms / d_k - 1) / 2) - 1
    size = popularity.square().sum() / num_heads / math.expm1(beta**2)
    formula = key_norm_spike(beta, num_heads * d_k / n, num_heads)
    assert float(size) == pytest.approx(formula, rel=0.02)
    with pytest.raises(ValueError, match=r"gamma_k=0.0: expected a value > 0"):
        key_norm_spike(1.0, 0.0, 2)
    with pytest.raises(ValueError, match="num_heads=0: expected an integer >= 1"):
        key_norm_spike(1.0, 1.0, 0)
    with pytest.raises(ValueError, match=r"beta=0.0: expected a value > 0"):
        key_norm_spike(0.0, 1.0, 2)
