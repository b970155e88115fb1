"""A small transformer for sequences of tokens, many models at once.

The parameters of S models are one dictionary of tensors with a leading model axis; the layers of
a model stand on the second axis:

    embedding (S, V, E)   positions (S, L, E), absent with rotary positions
    w_q (S, N, H, D, E) and the like: the N attention layers, named as in `attention_layer`
    mlp_in (S, N, 4E, E)   mlp_out (S, N, E, 4E)

A block is `x + attention(LN x)`, then `x + W_out gelu(W_in LN x)`. Norms have neither gain nor
shift nor epsilon, and the embedding is also the matrix of the logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import gelu
from torch.nn.functional import layer_norm as fused_layer_norm

from .attention_layer import (
    apply_rope,
    attend,
    merge_heads,
    project,
    require_groups,
    rope_frequencies,
    weight_shapes,
)

Parameters = dict[str, torch.Tensor]


@dataclass(frozen=True)
class TransformerShape:
    """Sizes of a transformer with heads of size E / H.

    `biases` are those of the attention layers, a selection of the letters "qkvo"; `rotary` turns
    all coordinates of queries and keys in place of learned positions. Raises ValueError for heads
    that do not divide the width, groups that do not divide the heads, and rotary heads of odd size.

    >>> TransformerShape(16, 32, 32, 4, 2).d_head
    8
    """

    vocab_size: int
    seq_len: int
    d_model: int
    num_heads: int
    num_layers: int
    groups: int | None = None
    biases: str = ""
    rotary: bool = False

    def __post_init__(self):
        require_groups(self.num_heads, self.groups or self.num_heads)
        if self.d_model % self.num_heads:
            raise ValueError(
                f"num_heads={self.num_heads}: expected a divisor of d_model={self.d_model}"
            )
        if self.rotary and self.d_head % 2:
            raise ValueError(f"d_head={self.d_head}: expected an even size for rotary positions")

    @property
    def d_head(self) -> int:
        return self.d_model // self.num_heads

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters of one model, by name."""
        width = self.d_model
        layer = weight_shapes(
            self.num_heads, width, self.d_head, groups=self.groups, biases=self.biases
        )
        layer |= {"mlp_in": (4 * width, width), "mlp_out": (width, 4 * width)}
        tokens = {"embedding": (self.vocab_size, width)}
        if not self.rotary:
            tokens["positions"] = (self.seq_len, width)
        return tokens | {name: (self.num_layers, *size) for name, size in layer.items()}


def initial_parameters(
    shape: TransformerShape, rng: np.random.Generator, scale: float = 0.02, models: int = 1
) -> Parameters:
    """Parameters of `models` models that start from the same point, float64.

    Matrices are N(0, scale^2), those that write to the tokens divided by `sqrt(2 N)`; biases are
    zero.

    >>> shape = TransformerShape(16, 8, 4, 2, num_layers=3, biases="q")
    >>> initial_parameters(shape, np.random.default_rng(0), models=2)["b_q"].shape
    torch.Size([2, 3, 2, 2])
    """
    parameters = {}
    for name, size in shape.parameter_shapes().items():
        factor = 0.0 if name.startswith("b_") else scale
        if name in ("w_o", "mlp_out"):
            factor /= math.sqrt(2 * shape.num_layers)
        value = factor * torch.from_numpy(rng.standard_normal(size))
        parameters[name] = value.repeat(models, *[1] * len(size))
    return parameters


def transformer_logits(
    shape: TransformerShape,
    parameters: Mapping[str, torch.Tensor],
    tokens: torch.Tensor,
    dropout: float = 0.0,
    noise: torch.Generator | None = None,
) -> torch.Tensor:
    """Logits of the token after each token: tokens (B, L) of integers -> (S, B, L, V).

    `dropout`: the probability of losing a coordinate of an embedded token or of what a sublayer
    adds to it, drawn from `noise`, the same for all models. Raises ValueError for sequences longer
    than the learned positions.

    >>> shape = TransformerShape(5, 4, 4, 2, num_layers=1)
    >>> parameters = initial_parameters(shape, np.random.default_rng(0), models=3)
    >>> transformer_logits(shape, parameters, torch.tensor([[0, 4, 2]])).shape
    torch.Size([3, 1, 3, 5])
    """
    batch, length = tokens.shape
    if length > shape.seq_len:
        raise ValueError(f"tokens of length {length}: expected at most seq_len={shape.seq_len}")

    def drop(x):
        if not dropout:
            return x
        kept = torch.rand(x.shape[1:], generator=noise, device=x.device) >= dropout
        return x * kept / (1 - dropout)

    x = parameters["embedding"][:, tokens]
    if not shape.rotary:
        x = x + parameters["positions"][:, None, :length]
    x = drop(x.flatten(1, 2))  # (S, B L, E), so that weights meet all sequences in one product
    for n in range(shape.num_layers):
        layer = {
            name: value[:, n]
            for name, value in parameters.items()
            if name not in ("embedding", "positions")
        }
        x = x + drop(_attention(shape, layer, _norm(x), batch))
        hidden = gelu(_norm(x) @ layer["mlp_in"].mT)
        x = x + drop(hidden @ layer["mlp_out"].mT)
    return (_norm(x) @ parameters["embedding"].mT).unflatten(1, (batch, length))


def next_token_losses(
    shape: TransformerShape,
    parameters: Mapping[str, torch.Tensor],
    tokens: torch.Tensor,
    dropout: float = 0.0,
    noise: torch.Generator | None = None,
) -> torch.Tensor:
    """Mean cross-entropy, in nats, of tokens 1, ..., L of sequences (B, L + 1), for each model.

    >>> shape = TransformerShape(5, 4, 4, 2, num_layers=1)
    >>> zero = {name: torch.zeros(1, *size) for name, size in shape.parameter_shapes().items()}
    >>> zero["positions"] += torch.eye(4)
    >>> next_token_losses(shape, zero, torch.ones(2, 5).long())
    tensor([1.6094])
    """
    logits = transformer_logits(shape, parameters, tokens[:, :-1], dropout, noise)
    targets = tokens[:, 1:, None].expand(len(logits), -1, -1, 1)
    return -torch.log_softmax(logits, -1).gather(-1, targets).mean((1, 2, 3))


def _norm(x: torch.Tensor) -> torch.Tensor:
    return fused_layer_norm(x, x.shape[-1:], eps=0.0)


def _attention(shape, layer, x, batch) -> torch.Tensor:
    """The attention layer of each model on tokens (S, B L, E)."""
    q, k, v = (
        project(x, layer[f"w_{letter}"], layer.get(f"b_{letter}"))
        .unflatten(-2, (batch, -1))
        .transpose(1, 2)
        for letter in "qkv"
    )
    if shape.rotary:
        places = torch.arange(q.shape[-2], device=x.device)
        frequencies = rope_frequencies(shape.d_head).to(x)
        q, k = apply_rope(q, frequencies, places), apply_rope(k, frequencies, places)
    heads = attend(q, k, v)[2].transpose(1, 2).flatten(2, 3)
    return merge_heads(heads, layer["w_o"], layer.get("b_o"))
