"""One multi-head attention layer in all its variants: the parameters and the forward pass.

Tokens are `x (..., L, E)`. The parameters of a layer are a dictionary of tensors,

    w_q (..., H, D, E)   w_k (..., G, D, E)   w_v (..., G, C, E)   w_o (..., H, E, C)
    b_q (..., H, D)      b_k (..., G, D)      b_v (..., G, C)      b_o (..., E)
    gain_q (..., D)      gain_k (..., D)

of which the biases and gains may be missing, and `w_o` too: then the outputs of the heads stand
side by side. `H` query heads share `G` key/value groups (`G = H`: multi-head, `G = 1`: multi-query
attention). Leading axes of tokens and parameters broadcast against each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from .attention import weights_kernel
from .validation import require_activation, require_broadcast, require_finite, require_tokens

Weights = Mapping[str, torch.Tensor]


class LayerParts(NamedTuple):
    """What a layer computes on the way to its output.

    `scores (..., H, L, M)` without the factor `1/sqrt(D)` and without mask, `pattern` of the same
    shape, `heads (..., H, L, C)` and `output (..., L, E)`.
    """

    scores: torch.Tensor
    pattern: torch.Tensor
    heads: torch.Tensor
    output: torch.Tensor


# Parameters


def weight_shapes(
    num_heads: int,
    d_model: int,
    d_head: int,
    *,
    groups: int | None = None,
    d_value: int | None = None,
    memory_dim: int | None = None,
    biases: str = "",
    gains: bool = False,
    output_projection: bool = True,
) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters of a layer, by name, in the order in which they are flattened.

    `memory_dim` is the width of the tokens that keys and values read (cross-attention), `biases`
    a selection of the letters "qkvo". Raises ValueError unless `groups` divides `num_heads`.
    Source: identification, setting.

    >>> weight_shapes(4, 8, 2, groups=2, biases="q")["b_q"]
    (4, 2)
    """
    groups, d_value = groups or num_heads, d_value or d_head
    memory_dim = memory_dim or d_model
    require_groups(num_heads, groups)
    if set(biases) - set("qkvo"):
        raise ValueError(f"biases={biases!r}: expected a selection of the letters 'qkvo'")
    shapes = {
        "w_q": (num_heads, d_head, d_model),
        "w_k": (groups, d_head, memory_dim),
        "w_v": (groups, d_value, memory_dim),
    }
    if output_projection:
        shapes["w_o"] = (num_heads, d_model, d_value)
    sizes = {
        "q": (num_heads, d_head),
        "k": (groups, d_head),
        "v": (groups, d_value),
        "o": (d_model,),
    }
    shapes |= {f"b_{letter}": size for letter, size in sizes.items() if letter in biases}
    if gains:
        shapes |= {"gain_q": (d_head,), "gain_k": (d_head,)}
    return shapes


def random_weights(
    shapes: Mapping[str, tuple[int, ...]],
    rng: np.random.Generator,
    scale: float = 1.0,
    batch: tuple[int, ...] = (),
) -> dict[str, torch.Tensor]:
    """Independent Gaussian parameters with standard deviation `scale`, float64.

    Gains get one added. `batch` are leading axes.

    >>> random_weights({"b_o": (8,)}, np.random.default_rng(0), batch=(3,))["b_o"].shape
    torch.Size([3, 8])
    """
    weights = {
        name: scale * torch.from_numpy(rng.standard_normal((*batch, *shape)))
        for name, shape in shapes.items()
    }
    return {
        name: value + 1 if name.startswith("gain") else value for name, value in weights.items()
    }


# Rotary positions and norms


def rope_frequencies(rotary_dim: int, base: float = 10_000.0) -> torch.Tensor:
    """Frequencies `base^(-2i/rotary_dim)` of the rotated planes, (rotary_dim / 2,), float64.

    Raises ValueError for an odd or negative `rotary_dim` and a base that is not positive.
    Source: identification.T7.

    >>> rope_frequencies(4, 100.0)
    tensor([1.0000, 0.1000], dtype=torch.float64)
    """
    require_rotary_dim(rotary_dim)
    require_finite("base", base)
    if base <= 0:
        raise ValueError(f"base={base}: expected a positive number")
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / max(rotary_dim, 1)
    return float(base) ** -exponents


def apply_rope(u: torch.Tensor, frequencies: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Turn plane `(2i, 2i+1)` of `u (..., L, D)` by the angle `positions[l] frequencies[i]`.

    The first `2 len(frequencies)` coordinates turn, the others stay (partial RoPE). `positions`
    broadcasts against (..., L). Source: identification.T7.

    >>> apply_rope(torch.eye(2)[:1], torch.tensor([torch.pi / 4]), torch.ones(1))
    tensor([[0.7071, 0.7071]])
    """
    angles = positions.unsqueeze(-1) * frequencies.to(positions.device)
    cos, sin = angles.cos().to(u), angles.sin().to(u)
    turned, kept = u.tensor_split([2 * len(frequencies)], dim=-1)
    first, second = turned[..., 0::2], turned[..., 1::2]
    rotated = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1)
    rotated = rotated.flatten(-2)
    return torch.cat([rotated, kept.expand(*rotated.shape[:-1], -1)], dim=-1)


def rms_norm(x: torch.Tensor, gain: torch.Tensor | None = None) -> torch.Tensor:
    """`sqrt(d) x / |x|` along the last axis, times the gain; no epsilon, so x must not be 0.

    >>> rms_norm(torch.tensor([3.0, 4.0])).square().mean()
    tensor(1.)
    """
    normed = x * x.square().mean(-1, keepdim=True).rsqrt()
    return normed if gain is None else normed * gain


def layer_norm(
    x: torch.Tensor, gain: torch.Tensor | None = None, shift: torch.Tensor | None = None
) -> torch.Tensor:
    """Centre the last axis, `rms_norm` it, multiply by the gain and add the shift.

    >>> layer_norm(torch.tensor([1.0, 2.0, 3.0])).sum()
    tensor(0.)
    """
    normed = rms_norm(x - x.mean(-1, keepdim=True), gain)
    return normed if shift is None else normed + shift


# The forward pass


def attention_forward(
    weights: Weights,
    x: torch.Tensor,
    *,
    causal: bool = True,
    rope: torch.Tensor | None = None,
    memory: torch.Tensor | None = None,
    qk_norm: bool = False,
    activation: str = "softmax",
) -> torch.Tensor:
    """Output of a multi-head attention layer.

    `f(x)_i = sum_h W_O^h sum_j A^h_ij (W_V^g x_j + b_V^g) + b_O` with the pattern
    `A^h = activation(<R_i(W_Q^h x_i + b_Q^h), R_j(W_K^g x_j + b_K^g)> / sqrt(D))`.

    x (..., L, E) -> (..., L, E). `causal`: query i sees j <= i. `rope`: frequencies of the rotated
    planes. `memory (..., M, E_kv)`: keys and values come from these tokens (not causal).
    `qk_norm`: `rms_norm` of queries and keys, before they are turned. `activation`: "softmax",
    "softmax1", "sigmoid", "relu" (`max(s, 0)`, without `1/sqrt(D)`) or "linear".
    Raises ValueError if G does not divide H, for shapes that do not fit, for a rotated part wider
    than the head, for an unknown activation and for values that are not finite.
    Source: identification, setting.

    >>> shapes = weight_shapes(2, 4, 2, biases="qkvo")
    >>> weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
    >>> weights["b_o"] += 1
    >>> attention_forward(weights, torch.ones(1, 4))
    tensor([[1., 1., 1., 1.]])
    """
    options = {"causal": causal, "rope": rope, "memory": memory, "qk_norm": qk_norm}
    return attention_parts(weights, x, **options, activation=activation).output


def attention_parts(
    weights: Weights,
    x: torch.Tensor,
    *,
    causal: bool = True,
    rope: torch.Tensor | None = None,
    memory: torch.Tensor | None = None,
    qk_norm: bool = False,
    activation: str = "softmax",
) -> LayerParts:
    """Scores, pattern and head outputs beside the output; arguments as `attention_forward`.

    >>> weights = {name: torch.ones(shape) for name, shape in weight_shapes(1, 2, 1).items()}
    >>> attention_parts(weights, torch.eye(2)).pattern
    tensor([[[1.0000, 0.0000],
             [0.5000, 0.5000]]])
    """
    require_layer(weights, x, memory, rope)
    require_activation(activation)
    if causal and memory is not None:
        raise ValueError("causal=True with a memory: expected causal=False for cross-attention")
    return attention_core(
        weights,
        x,
        causal=causal,
        rope=rope,
        memory=memory,
        qk_norm=qk_norm,
        activation=activation,
    )


def attention_core(
    weights: Weights,
    x: torch.Tensor,
    *,
    causal: bool = True,
    rope: torch.Tensor | None = None,
    memory: torch.Tensor | None = None,
    qk_norm: bool = False,
    activation: str = "softmax",
) -> LayerParts:
    """`attention_parts` without checks, for inner loops and for `torch.func`."""
    source = x if memory is None else memory
    q = project(x, weights["w_q"], weights.get("b_q"))
    k = project(source, weights["w_k"], weights.get("b_k"))
    v = project(source, weights["w_v"], weights.get("b_v"))
    if qk_norm:
        gain_q, gain_k = (
            None if gain is None else gain[..., None, None, :]
            for gain in (weights.get("gain_q"), weights.get("gain_k"))
        )
        q, k = rms_norm(q, gain_q), rms_norm(k, gain_k)
    if rope is not None:
        q = apply_rope(q, rope, torch.arange(q.shape[-2], device=x.device))
        k = apply_rope(k, rope, torch.arange(k.shape[-2], device=x.device))
    scores, pattern, heads = attend(q, k, v, causal=causal, activation=activation)
    return LayerParts(
        scores, pattern, heads, merge_heads(heads, weights.get("w_o"), weights.get("b_o"))
    )


def project(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    """`W^h x_i + b^h` of all heads: x (..., L, E), w (..., H, D, E) -> (..., H, L, D).

    >>> project(torch.eye(2), torch.ones(3, 1, 2)).shape
    torch.Size([3, 2, 1])
    """
    num_heads, d_head = w.shape[-3:-1]
    flat = x @ w.flatten(-3, -2).mT
    heads = flat.unflatten(-1, (num_heads, d_head)).transpose(-3, -2)
    return heads if b is None else heads + b.unsqueeze(-2)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    activation: str = "softmax",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores, pattern and head outputs from queries, keys and values.

    q (..., H, L, D), k (..., G, M, D), v (..., G, M, C); the pattern is the activation of the
    scores times `1/sqrt(D)`, and zero where a causal query looks ahead.

    >>> q, v = torch.zeros(1, 2, 1), torch.tensor([[[1.0], [3.0]]])
    >>> attend(q, q, v)[2].flatten()
    tensor([1., 2.])
    """
    share = q.shape[-3] // k.shape[-3]
    if share > 1:
        k, v = k.repeat_interleave(share, dim=-3), v.repeat_interleave(share, dim=-3)
    scores = q @ k.mT
    visible = scores
    if causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        visible = scores.masked_fill(ahead, 0.0 if activation == "linear" else -torch.inf)
    pattern = weights_kernel(visible, q.shape[-1] ** -0.5, activation)
    return scores, pattern, pattern @ v


def merge_heads(
    heads: torch.Tensor, w_o: torch.Tensor | None = None, b_o: torch.Tensor | None = None
) -> torch.Tensor:
    """`sum_h W_O^h o^h + b_O`: heads (..., H, L, C), w_o (..., H, E, C) -> (..., L, E).

    Without `w_o` the heads stand side by side, (..., L, H C).

    >>> merge_heads(torch.ones(3, 2, 1)).shape
    torch.Size([2, 3])
    """
    output = heads.transpose(-3, -2).flatten(-2)
    if w_o is not None:
        output = output @ w_o.mT.flatten(-3, -2)
    return output if b_o is None else output + b_o.unsqueeze(-2)


# Checks


def require_groups(num_heads: int, groups: int) -> None:
    """Raise unless the groups share the heads evenly."""
    if num_heads < 1 or groups < 1 or num_heads % groups:
        raise ValueError(
            f"num_heads={num_heads}, groups={groups}: expected groups that divide num_heads"
        )


def require_rotary_dim(rotary_dim: int, d_head: int | None = None) -> None:
    """Raise unless the rotated part is made of planes and fits in the head."""
    if rotary_dim < 0 or rotary_dim % 2:
        raise ValueError(f"rotary_dim={rotary_dim}: expected an even number >= 0")
    if d_head is not None and rotary_dim > d_head:
        raise ValueError(f"rotary_dim={rotary_dim}: expected at most d_head={d_head}")


def require_layer(
    weights: Weights,
    x: torch.Tensor,
    memory: torch.Tensor | None = None,
    rope: torch.Tensor | None = None,
) -> None:
    """Raise unless parameters, tokens and frequencies fit one another and are finite."""
    require_tokens(x)
    source = x if memory is None else memory
    require_tokens(source)
    missing = {"w_q", "w_k", "w_v"} - set(weights)
    if missing or min(weights[name].ndim for name in ("w_q", "w_k", "w_v")) < 3:
        raise ValueError(
            f"weights {sorted(weights)}: expected w_q, w_k and w_v, each (..., H, D, E)"
        )
    num_heads, d_head, _ = weights["w_q"].shape[-3:]
    groups, d_value, _ = weights["w_v"].shape[-3:]
    expected = weight_shapes(
        num_heads,
        x.shape[-1],
        d_head,
        groups=groups,
        d_value=d_value,
        memory_dim=source.shape[-1],
        biases="qkvo",
        gains=True,
    )
    for name, value in weights.items():
        shape = expected.get(name)
        if shape is None:
            raise ValueError(f"weights[{name!r}]: expected one of {', '.join(expected)}")
        if tuple(value.shape[-len(shape) :]) != shape:
            raise ValueError(
                f"weights[{name!r}] of shape {tuple(value.shape)}: expected (..., "
                f"{', '.join(map(str, shape))}) with x of shape {tuple(x.shape)}"
            )
        lead = value.shape[: value.ndim - len(shape)]
        require_broadcast(f"weights[{name!r}]", lead, "x", x.shape[:-2])
        require_finite(f"weights[{name!r}]", value)
    if rope is not None:
        require_finite("rope", rope)
        require_rotary_dim(2 * len(rope), d_head)
