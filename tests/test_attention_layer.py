"""attention_layer: every variant against loops over heads, queries and keys; errors."""

import math

import numpy as np
import pytest
import torch

from mhabook_lib.attention_layer import (
    apply_rope,
    attention_core,
    attention_forward,
    attention_parts,
    layer_norm,
    random_weights,
    rms_norm,
    rope_frequencies,
    weight_shapes,
)

CLOSE = {"rtol": 1e-12, "atol": 1e-13}


def slow_activation(row, activation):
    """Weights of one row of scaled scores, in Python floats."""
    if activation == "linear":
        return row
    if activation == "relu":
        return [max(s, 0.0) for s in row]
    if activation == "sigmoid":
        return [1 / (1 + math.exp(-s)) for s in row]
    total = sum(math.exp(s) for s in row) + (activation == "softmax1")
    return [math.exp(s) / total for s in row]


def rotation(frequencies, position, d_head):
    """The D x D rotation matrix of one position."""
    blocks = np.eye(d_head)
    for i, frequency in enumerate(frequencies):
        c, s = math.cos(position * frequency), math.sin(position * frequency)
        blocks[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = [[c, -s], [s, c]]
    return blocks


def slow_forward(weights, x, causal, rope, memory, qk_norm, activation):
    """The formula of the layer, one head, one query and one key at a time."""
    w = {name: value.numpy() for name, value in weights.items()}
    x = x.numpy()
    source = x if memory is None else memory.numpy()
    num_heads, d_head, _ = w["w_q"].shape
    share = num_heads // len(w["w_k"])
    frequencies = [] if rope is None else rope.tolist()

    def vector(letter, h, token, position):
        u = w[f"w_{letter}"][h] @ token + (w[f"b_{letter}"][h] if f"b_{letter}" in w else 0)
        if qk_norm:
            u = u / math.sqrt(np.mean(u**2)) * w.get(f"gain_{letter}", 1.0)
        return rotation(frequencies, position, d_head) @ u

    output = np.zeros((len(x), w["w_o"].shape[1]))
    for h in range(num_heads):
        g = h // share
        for i in range(len(x)):
            seen = range(i + 1) if causal else range(len(source))
            q = vector("q", h, x[i], i)
            row = [q @ vector("k", g, source[j], j) for j in seen]
            scale = 1 if activation == "relu" else d_head**-0.5
            pattern = slow_activation([s * scale for s in row], activation)
            for j, a in zip(seen, pattern, strict=True):
                value = w["w_v"][g] @ source[j] + (w["b_v"][g] if "b_v" in w else 0)
                output[i] += a * (w["w_o"][h] @ value)
    return output + w.get("b_o", 0.0)


VARIANTS = {
    "multi-head": ({}, {}),
    "no mask": ({}, {"causal": False}),
    "grouped": ({"groups": 2}, {}),
    "multi-query with RoPE": ({"groups": 1}, {"rope": rope_frequencies(4)}),
    "partial RoPE": ({"biases": "qkvo"}, {"rope": torch.tensor([0.7], dtype=torch.float64)}),
    "all biases": ({"biases": "qkvo"}, {}),
    "other value size": ({"d_value": 3, "biases": "v"}, {}),
    "QK-norm": ({"gains": True, "biases": "k"}, {"qk_norm": True}),
    "QK-norm without gains": ({}, {"qk_norm": True, "rope": rope_frequencies(4)}),
    "cross-attention": ({"memory_dim": 5}, {"causal": False}),
    "softmax1": ({"biases": "k"}, {"activation": "softmax1"}),
    "sigmoid": ({}, {"activation": "sigmoid"}),
    "relu": ({}, {"activation": "relu"}),
    "linear": ({}, {"activation": "linear"}),
}


@pytest.fixture
def rng():
    return np.random.default_rng(3)


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_against_loops(name, rng):
    shape, options = VARIANTS[name]
    weights = random_weights(weight_shapes(4, 6, 4, **shape), rng, 0.5)
    x, memory = (torch.from_numpy(rng.standard_normal(s)) for s in ((7, 6), (3, 5)))
    options = {"causal": True, "rope": None, "qk_norm": False, "activation": "softmax"} | options
    options["memory"] = memory if "memory_dim" in shape else None
    fast = attention_forward(weights, x, **options)
    slow = torch.from_numpy(slow_forward(weights, x, **options))
    torch.testing.assert_close(fast, slow, **CLOSE)


def test_leading_axes_are_loops(rng):
    shapes = weight_shapes(4, 6, 4, groups=2, biases="qkvo", gains=True)
    weights = random_weights(shapes, rng, 0.5, batch=(3,))
    x = torch.from_numpy(rng.standard_normal((3, 5, 6)))
    batched = attention_forward(weights, x, qk_norm=True, rope=rope_frequencies(2))
    shared = attention_forward({n: w[0] for n, w in weights.items()}, x)
    for k in range(3):
        one = {name: value[k] for name, value in weights.items()}
        expected = attention_forward(one, x[k], qk_norm=True, rope=rope_frequencies(2))
        torch.testing.assert_close(batched[k], expected, **CLOSE)
        first = {name: value[0] for name, value in weights.items()}
        torch.testing.assert_close(shared[k], attention_forward(first, x[k]), **CLOSE)
    moved = {"w_q": 0, "w_k": 0, "w_v": 0, "w_o": 0}
    stacked = {name: weights[name] for name in moved}
    by_vmap = torch.func.vmap(lambda w: attention_core(w, x[0]).output)(stacked)
    torch.testing.assert_close(by_vmap, attention_core(stacked, x[0]).output, **CLOSE)


def test_gradients_of_functions_and_of_autograd_agree(rng):
    weights = random_weights(weight_shapes(2, 4, 2, biases="qkvo"), rng)
    x = torch.from_numpy(rng.standard_normal((3, 5, 4)))
    leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
    loss = attention_forward(leaves, x, rope=rope_frequencies(2)).square().sum()
    by_autograd = torch.autograd.grad(loss, list(leaves.values()))

    def value(w):
        return attention_core(w, x, rope=rope_frequencies(2)).output.square().sum()

    for name, gradient in zip(weights, by_autograd, strict=True):
        torch.testing.assert_close(torch.func.grad(value)(weights)[name], gradient, **CLOSE)


def test_softmax_patterns_are_probabilities_and_causal(rng):
    weights = random_weights(weight_shapes(2, 4, 2), rng)
    x = torch.from_numpy(rng.standard_normal((6, 4)))
    parts = attention_parts(weights, x)
    torch.testing.assert_close(parts.pattern.sum(-1), torch.ones(2, 6, dtype=torch.float64))
    assert bool((parts.pattern.triu(1) == 0).all())
    for activation in ("softmax1", "sigmoid", "relu", "linear"):
        pattern = attention_parts(weights, x, activation=activation).pattern
        assert bool((pattern.triu(1) == 0).all())
    changed = x.clone()
    changed[4:] += 1
    output = attention_forward(weights, changed)
    torch.testing.assert_close(output[:4], parts.output[:4], **CLOSE)


def test_equal_keys_give_the_mean_of_the_values(rng):
    weights = random_weights(weight_shapes(2, 4, 2), rng)
    weights["w_k"] = torch.zeros_like(weights["w_k"])
    x = torch.from_numpy(rng.standard_normal((6, 4)))
    mean = torch.einsum("hec,hcf,f->e", weights["w_o"], weights["w_v"], x.mean(0))
    output = attention_forward(weights, x, causal=False)
    torch.testing.assert_close(output, mean.expand(6, 4), **CLOSE)


def test_rotations_depend_on_the_difference_of_positions(rng):
    q, k = torch.from_numpy(rng.standard_normal((2, 6)))
    frequencies = rope_frequencies(6, 100.0)

    def score(m, n):
        places = torch.tensor([m, n], dtype=torch.float64)
        turned = apply_rope(torch.stack([q, k]), frequencies, places)
        return turned[0] @ turned[1]

    torch.testing.assert_close(score(3.0, 5.0), score(10.0, 12.0), **CLOSE)
    assert abs(score(3.0, 5.0) - score(3.0, 6.0)) > 1e-3
    turned = apply_rope(q, frequencies, torch.tensor(7.0))
    torch.testing.assert_close(turned.norm(), q.norm(), **CLOSE)


def test_norms(rng):
    x = torch.from_numpy(rng.standard_normal((5, 8)))
    torch.testing.assert_close(layer_norm(x).mean(-1), torch.zeros(5, dtype=torch.float64))
    ours = layer_norm(x, x[0], x[1])
    torch_norm = torch.nn.functional.layer_norm(x, (8,), x[0], x[1], eps=0.0)
    torch.testing.assert_close(ours, torch_norm, **CLOSE)
    torch_rms = torch.nn.functional.rms_norm(x, (8,), x[2], eps=0.0)
    torch.testing.assert_close(rms_norm(x, x[2]), torch_rms, **CLOSE)


def changed(weights, **new):
    return {**weights, **new}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w, x: weight_shapes(4, 8, 2, groups=3), "num_heads=4, groups=3"),
        (lambda w, x: weight_shapes(4, 8, 2, biases="x"), "biases='x'"),
        (lambda w, x: rope_frequencies(3), "rotary_dim=3: expected an even"),
        (lambda w, x: rope_frequencies(4, -1.0), "base=-1"),
        (lambda w, x: attention_forward(w, x, rope=rope_frequencies(4)), "at most d_head=2"),
        (lambda w, x: attention_forward(w, x / 0), "x=tensor of shape .* finite"),
        (lambda w, x: attention_forward(w, x[..., :3]), r"w_q.*\(2, 2, 4\): expected .*2, 2, 3"),
        (lambda w, x: attention_forward(changed(w, w_q=w["w_q"] / 0), x), "w_q.*finite"),
        (lambda w, x: attention_forward(changed(w, w_k=w["w_k"][:1]), x), r"w_k.*\(1, 2, 4\)"),
        (
            lambda w, x: attention_forward(changed(w, bias=x), x),
            "weights\\['bias'\\]: expected one",
        ),
        (lambda w, x: attention_forward({"w_q": w["w_q"]}, x), "expected w_q, w_k and w_v"),
        (lambda w, x: attention_forward(w, x, activation="max"), "activation='max'"),
        (lambda w, x: attention_forward(w, x, memory=x), "causal=False for cross-attention"),
        (
            lambda w, x: attention_forward(
                changed(w, w_q=w["w_q"].expand(7, 2, 2, 4)), x.expand(3, 5, 4)
            ),
            "expected shapes that broadcast",
        ),
    ],
)
def test_errors(call, message, rng):
    weights = random_weights(weight_shapes(2, 4, 2), rng)
    x = torch.from_numpy(rng.standard_normal((5, 4)))
    with pytest.raises(ValueError, match=message):
        call(weights, x)


def test_groups_must_divide_the_heads_of_the_weights(rng):
    weights = random_weights(weight_shapes(3, 4, 2), rng)
    two = {name: value[:2] if name in ("w_k", "w_v") else value for name, value in weights.items()}
    with pytest.raises(ValueError, match="num_heads=3, groups=2"):
        attention_forward(two, torch.ones(5, 4))
