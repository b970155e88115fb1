"""tiny_transformer: against a slow one written token by token, limits, stacks, errors."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from mhabook_lib.attention_layer import rope_frequencies
from mhabook_lib.tiny_transformer import (
    TransformerShape,
    initial_parameters,
    next_token_losses,
    transformer_logits,
)

SHAPES = {
    "plain": TransformerShape(7, 5, 6, 2, 2),
    "biases": TransformerShape(7, 5, 6, 3, 1, biases="qkvo"),
    "groups": TransformerShape(7, 5, 8, 4, 2, groups=2, biases="q"),
    "rotary": TransformerShape(7, 5, 8, 2, 2, rotary=True, biases="qk"),
}


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def drawn(shape, rng, models=1):
    """Random parameters, biases included."""
    return {
        name: torch.from_numpy(rng.standard_normal((models, *size))) / 2
        for name, size in shape.parameter_shapes().items()
    }


def slow_logits(shape, parameters, tokens):
    """One model and one sequence with loops, in NumPy."""
    p = {name: value.numpy() for name, value in parameters.items()}
    x = [p["embedding"][t] for t in tokens]
    if not shape.rotary:
        x = [row + p["positions"][i] for i, row in enumerate(x)]
    for n in range(shape.num_layers):
        y = slow_attention(shape, {k: v[n] for k, v in p.items() if k[:2] in ("w_", "b_")}, x)
        x = [a + b for a, b in zip(x, y, strict=True)]
        for i, row in enumerate(x):
            hidden = p["mlp_in"][n] @ norm(row)
            gelu = [v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in hidden]
            x[i] = row + p["mlp_out"][n] @ np.array(gelu)
    return np.array([p["embedding"] @ norm(row) for row in x])


def norm(row):
    centred = row - row.mean()
    return centred / math.sqrt((centred**2).mean())


def turned(row, position):
    pairs = row.reshape(-1, 2) @ np.array([1, 1j])
    pairs = pairs * np.exp(1j * position * rope_frequencies(len(row)).numpy())
    return np.stack([pairs.real, pairs.imag], axis=1).ravel()


def slow_attention(shape, w, x):
    x = [norm(row) for row in x]
    share = shape.num_heads // (shape.groups or shape.num_heads)
    result = [np.zeros(shape.d_model) + w.get("b_o", 0.0) for _ in x]
    for h in range(shape.num_heads):
        g = h // share

        def read(letter, index, row, w=w):
            bias = w[f"b_{letter}"][index] if f"b_{letter}" in w else 0.0
            return w[f"w_{letter}"][index] @ row + bias

        q = [read("q", h, row) for row in x]
        k = [read("k", g, row) for row in x]
        v = [read("v", g, row) for row in x]
        if shape.rotary:
            q, k = ([turned(row, i) for i, row in enumerate(rows)] for rows in (q, k))
        for i in range(len(x)):
            scores = np.exp([q[i] @ k[j] / math.sqrt(shape.d_head) for j in range(i + 1)])
            mean = sum(a * b for a, b in zip(scores / scores.sum(), v, strict=False))
            result[i] = result[i] + w["w_o"][h] @ mean
    return result


@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_losses_against_the_slow_way(name, rng):
    shape = SHAPES[name]
    parameters = drawn(shape, rng)
    tokens = torch.from_numpy(rng.integers(7, size=(2, 6)))
    logits = transformer_logits(shape, parameters, tokens[:, :-1])[0]
    one = {k: v[0] for k, v in parameters.items()}
    expected = np.stack([slow_logits(shape, one, row[:-1]) for row in tokens.tolist()])
    np.testing.assert_allclose(logits, expected, rtol=1e-11, atol=1e-12)
    picked = [
        math.log(np.exp(expected[b, i]).sum()) - expected[b, i, tokens[b, i + 1]]
        for b in range(2)
        for i in range(5)
    ]
    loss = next_token_losses(shape, parameters, tokens)
    assert loss.item() == pytest.approx(np.mean(picked), rel=1e-12)


def test_models_of_a_stack_do_not_mix(rng):
    shape = SHAPES["groups"]
    parameters = drawn(shape, rng, models=3)
    tokens = torch.from_numpy(rng.integers(7, size=(4, 6)))
    together = next_token_losses(shape, parameters, tokens)
    for i in range(3):
        alone = next_token_losses(shape, {k: v[i : i + 1] for k, v in parameters.items()}, tokens)
        torch.testing.assert_close(together[i : i + 1], alone, rtol=1e-13, atol=0)


def test_no_look_ahead(rng):
    shape = SHAPES["plain"]
    parameters = drawn(shape, rng)
    tokens = torch.from_numpy(rng.integers(7, size=(1, 5)))
    other = tokens.clone()
    other[0, 3:] = (other[0, 3:] + 1) % 7
    before, after = (transformer_logits(shape, parameters, t)[0, 0] for t in (tokens, other))
    assert torch.equal(before[:3], after[:3])
    assert (before[3:] - after[3:]).abs().min() > 1e-6


def test_rotary_models_have_no_positions(rng):
    """One model reads sequences of any length: a longest one is not part of its parameters."""
    shape = SHAPES["rotary"]
    longer = replace(shape, seq_len=50)
    assert shape.parameter_shapes() == longer.parameter_shapes()
    parameters = drawn(shape, rng)
    tokens = torch.from_numpy(rng.integers(7, size=(1, 20)))
    whole = transformer_logits(longer, parameters, tokens)
    torch.testing.assert_close(
        whole[:, :, :5],
        transformer_logits(shape, parameters, tokens[:, :5]),
        rtol=1e-12,
        atol=1e-12,
    )


def test_initial_parameters(rng):
    shape = TransformerShape(16, 32, 32, 4, 8, biases="qkvo")
    parameters = initial_parameters(shape, rng, scale=0.1, models=2)
    sizes = shape.parameter_shapes()
    assert {k: tuple(v.shape) for k, v in parameters.items()} == {
        k: (2, *size) for k, size in sizes.items()
    }
    for name, value in parameters.items():
        assert torch.equal(value[0], value[1]) and value.dtype == torch.float64
        expected = 0.1 / 4 if name in ("w_o", "mlp_out") else 0.1
        if name.startswith("b_"):
            assert not value.any()
        else:
            count = value[0].numel()
            assert abs(value[0].std() / expected - 1) < 4 / math.sqrt(2 * count)


def test_dropout_is_unbiased_and_shared(rng):
    """Dropped embeddings alone: without layers that matter, logits of kept ones."""
    shape = SHAPES["plain"]
    parameters = drawn(shape, rng, models=1)
    parameters = {k: torch.cat([v, v]) for k, v in parameters.items()}
    tokens = torch.from_numpy(rng.integers(7, size=(2, 5)))
    noise = torch.Generator().manual_seed(3)
    first = transformer_logits(shape, parameters, tokens, 0.3, noise)
    assert torch.equal(first[0], first[1])
    second = transformer_logits(shape, parameters, tokens, 0.3, noise)
    assert not torch.equal(first, second)
    again = transformer_logits(shape, parameters, tokens, 0.3, torch.Generator().manual_seed(3))
    assert torch.equal(first, again)
    clean = transformer_logits(shape, parameters, tokens)
    assert torch.equal(clean, transformer_logits(shape, parameters, tokens, 0.0, noise))


def test_errors(rng):
    with pytest.raises(ValueError, match="num_heads=3: expected a divisor of d_model=8"):
        TransformerShape(4, 4, 8, 3, 1)
    with pytest.raises(ValueError, match="num_heads=4, groups=3: expected groups that divide"):
        TransformerShape(4, 4, 8, 4, 1, groups=3)
    with pytest.raises(ValueError, match="d_head=3: expected an even size for rotary positions"):
        TransformerShape(4, 4, 6, 2, 1, rotary=True)
    shape = SHAPES["plain"]
    with pytest.raises(ValueError, match="tokens of length 6: expected at most seq_len=5"):
        transformer_logits(shape, drawn(shape, rng), torch.zeros(1, 6).long())
