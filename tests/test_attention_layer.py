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
