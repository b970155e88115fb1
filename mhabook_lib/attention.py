"""Attention of many heads as functions of the token array: scores, weights, outputs, entropy.

Tokens are `x (..., n, d)`. The heads are a tensor of score matrices `M (..., H, d, d)`, or one of
the structured kinds `ScalarHeads` and `BlockHeads`, which compute the same numbers faster.
Scores are `s^h_ij = <x_i, M_h x_j>`; the inverse temperature `beta` enters with the weights.
`beta` is a number or a tensor over the leading (batch) axes of the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from .validation import (
    require_beta,
    require_broadcast,
    require_finite,
    require_normalization,
    require_tokens,
)


def over_trailing(value, like: torch.Tensor, trailing: int):
    """View a per-batch number or tensor so that it broadcasts against `trailing` more axes.

    >>> over_trailing(torch.ones(5), torch.ones(()), 2).shape
    torch.Size([5, 1, 1])
    """
    tensor = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    return tensor.reshape(tensor.shape + (1,) * trailing)


@dataclass(frozen=True)
class DenseHeads:
    """Heads with arbitrary score matrices `M (..., H, d, d)`; a plain tensor is read as this."""

    matrices: torch.Tensor

    @property
    def num_heads(self) -> int:
        return self.matrices.shape[-3]

    def check(self, x: torch.Tensor) -> None:
        """Raise unless the matrices fit the tokens."""
        shape = tuple(self.matrices.shape)
        if len(shape) < 3 or shape[-2:] != (x.shape[-1], x.shape[-1]):
            raise ValueError(
                f"heads of shape {shape} and x of shape {tuple(x.shape)}: "
                f"expected heads (..., H, d, d) with d={x.shape[-1]}"
            )
        require_broadcast("heads", shape[:-3], "x", x.shape[:-2])
        require_finite("heads", self.matrices)

    def scores(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        """`<x_i, M_h y_j>` with shape (..., H, n, n); `y` defaults to `x`."""
        return x.unsqueeze(-3) @ self._applied(x if y is None else y).mT

    def outputs(self, pattern: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`f^h_i = sum_j pattern^h_ij M_h x_j` with shape (..., H, n, d)."""
        return pattern @ self._applied(x)

    def summed_outputs(self, pattern: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`sum_h f^h_i` with shape (..., n, d)."""
        return self.outputs(pattern, x).sum(-3)

    def attended(self, x: torch.Tensor, weigh) -> torch.Tensor:
        """`summed_outputs(weigh(scores(x)), x)`, with the products M_h x_j formed once."""
        applied = self._applied(x)
        return (weigh(x.unsqueeze(-3) @ applied.mT) @ applied).sum(-3)

    def transposed(self) -> DenseHeads:
        """The heads with score matrices `M_h^T`."""
        return DenseHeads(self.matrices.mT)

    def dense(self, d: int) -> torch.Tensor:
        """The score matrices (..., H, d, d)."""
        return self.matrices

    def to(self, *args, **kwargs) -> DenseHeads:
        """Move to a device or dtype, as `torch.Tensor.to`."""
        return DenseHeads(self.matrices.to(*args, **kwargs))

    def _applied(self, y: torch.Tensor) -> torch.Tensor:
        return y.unsqueeze(-3) @ self.matrices.mT  # (..., H, n, d), row j is M_h y_j


@dataclass(frozen=True)
class ScalarHeads:
    """Heads `M_h = lambda_h I`, given by `strengths (..., H)`.

    One Gram matrix serves all heads, and the kernels are summed before the one product with the
    tokens: 2 n^2 d + H n^2 operations instead of 2 H n^2 d.

    >>> ScalarHeads(torch.tensor([1.0, 2.0])).dense(2)[1]
    tensor([[2., 0.],
            [0., 2.]])
    """

    strengths: torch.Tensor

    @property
    def num_heads(self) -> int:
        return self.strengths.shape[-1]

    def check(self, x: torch.Tensor) -> None:
        """Raise unless there is at least one head and all strengths are finite."""
        if self.strengths.ndim < 1:
            raise ValueError("strengths of shape (): expected (..., H)")
        require_broadcast("strengths", self.strengths.shape[:-1], "x", x.shape[:-2])
        require_finite("strengths", self.strengths)

    def scores(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        """`lambda_h <x_i, y_j>` with shape (..., H, n, n); `y` defaults to `x`."""
        gram = x @ (x if y is None else y).mT
        return self._column * gram.unsqueeze(-3)

    def outputs(self, pattern: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`f^h_i = lambda_h sum_j pattern^h_ij x_j` with shape (..., H, n, d)."""
        return self._column * (pattern @ x.unsqueeze(-3))

    def summed_outputs(self, pattern: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`sum_h f^h_i`: the kernels of all heads are summed first."""
        return (self._column * pattern).sum(-3) @ x

    def attended(self, x: torch.Tensor, weigh) -> torch.Tensor:
        """`summed_outputs(weigh(scores(x)), x)`."""
        return self.summed_outputs(weigh(self.scores(x)), x)

    def transposed(self) -> ScalarHeads:
        """Scalar score matrices are symmetric."""
        return self

    def dense(self, d: int) -> torch.Tensor:
        """The score matrices (..., H, d, d)."""
        identity = torch.eye(d, dtype=self.strengths.dtype, device=self.strengths.device)
        return self._column * identity

    def to(self, *args, **kwargs) -> ScalarHeads:
        """Move to a device or dtype, as `torch.Tensor.to`."""
        return ScalarHeads(self.strengths.to(*args, **kwargs))

    @property
    def _column(self) -> torch.Tensor:
        return self.strengths[..., :, None, None]


@dataclass(frozen=True)
class BlockHeads:
    """Symmetric heads of low rank, `M_h = U_h diag(ev_h) U_h^T`.

    `basis (..., H, d, k)` holds the U_h with orthonormal columns, `eigenvalues (..., H, k)` the
    ev_h. All work is done in the blocks: n^2 k instead of n^2 d per head.

    >>> BlockHeads(torch.eye(2).reshape(1, 2, 2), torch.tensor([[1.0, 3.0]])).dense(2)
    tensor([[[1., 0.],
             [0., 3.]]])
    """

    basis: torch.Tensor
    eigenvalues: torch.Tensor

    @property
    def num_heads(self) -> int:
        return self.basis.shape[-3]

    def check(self, x: torch.Tensor) -> None:
        """Raise unless basis, eigenvalues and tokens fit one another."""
        basis, values = tuple(self.basis.shape), tuple(self.eigenvalues.shape)
        if len(basis) < 3 or basis[-2] != x.shape[-1] or basis[-1] != values[-1]:
            raise ValueError(
                f"basis of shape {basis}, eigenvalues of shape {values} and x of shape "
                f"{tuple(x.shape)}: expected (..., H, d, k), (..., H, k) and (..., n, d)"
            )
        require_broadcast("basis", basis[:-3], "x", x.shape[:-2])
        require_broadcast("basis", basis[:-2], "eigenvalues", values[:-1])
        require_finite("basis", self.basis)
        require_finite("eigenvalues", self.eigenvalues)

    def scores(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        """`<x_i, M_h y_j>` with shape (..., H, n, n); `y` defaults to `x`."""
        blocks = self._blocks(x)
        other = blocks if y is None else self._blocks(y)
        return self._scaled(blocks) @ other.mT

    def outputs(self, pattern: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`f^h_i = sum_j pattern^h_ij M_h x_j` with shape (..., H, n, d)."""
        return (pattern @ self._scaled(self._blocks(x))) @ self.basis.mT

    def summed_outputs(self, pattern: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`sum_h f^h_i`: one product with all bases side by side, (n, H k) times (H k, d)."""
        return self._merged(pattern @ self._scaled(self._blocks(x)))

    def attended(self, x: torch.Tensor, weigh) -> torch.Tensor:
        """`summed_outputs(weigh(scores(x)), x)`, with the blocks of the tokens formed once."""
        blocks = self._blocks(x)
        scaled = self._scaled(blocks)
        return self._merged(weigh(scaled @ blocks.mT) @ scaled)

    def transposed(self) -> BlockHeads:
        """The score matrices are symmetric."""
        return self

    def dense(self, d: int) -> torch.Tensor:
        """The score matrices (..., H, d, d)."""
        return (self.basis * self.eigenvalues.unsqueeze(-2)) @ self.basis.mT

    def to(self, *args, **kwargs) -> BlockHeads:
        """Move to a device or dtype, as `torch.Tensor.to`."""
        return BlockHeads(self.basis.to(*args, **kwargs), self.eigenvalues.to(*args, **kwargs))

    @cached_property
    def _frame(self) -> torch.Tensor:
        return self.basis.movedim(-3, -2).flatten(-2)  # (..., d, H k), all bases side by side

    def _blocks(self, x: torch.Tensor) -> torch.Tensor:
        split = (x @ self._frame).unflatten(-1, (self.num_heads, self.basis.shape[-1]))
        return split.transpose(-3, -2).contiguous()  # (..., H, n, k)

    def _scaled(self, blocks: torch.Tensor) -> torch.Tensor:
        return blocks * self.eigenvalues.unsqueeze(-2)

    def _merged(self, blocks: torch.Tensor) -> torch.Tensor:
        return blocks.transpose(-3, -2).flatten(-2) @ self._frame.mT


Heads = torch.Tensor | DenseHeads | ScalarHeads | BlockHeads


def as_heads(heads: Heads) -> DenseHeads | ScalarHeads | BlockHeads:
    """Read a tensor of score matrices as `DenseHeads`; the other kinds pass unchanged.

    >>> as_heads(torch.zeros(3, 4, 4)).num_heads
    3
    """
    return DenseHeads(heads) if isinstance(heads, torch.Tensor) else heads


def attention_scores(x: torch.Tensor, heads: Heads) -> torch.Tensor:
    """Scores `s^h_ij = <x_i, M_h x_j>`.

    x (..., n, d) -> (..., H, n, n). No beta inside.
    Raises ValueError on shape mismatch or non-finite input. Source: clustering, setting.

    >>> attention_scores(torch.eye(2), 3 * torch.eye(2).unsqueeze(0))
    tensor([[[3., 0.],
             [0., 3.]]])
    """
    heads = as_heads(heads)
    require_tokens(x)
    heads.check(x)
    return heads.scores(x)


def attention_weights(scores: torch.Tensor, beta, normalization: str = "softmax") -> torch.Tensor:
    """Weights a^h_ij of the scores (..., H, n, n), same shape.

    "softmax" (flow S): `exp(beta s_ij) / sum_k exp(beta s_ik)`; "unnormalized" (flow U):
    `exp(beta s_ij)`; "relu" (flow R): `max(s_ij, 0)`, for which beta plays no part.
    Raises ValueError for an unknown normalization, beta <= 0 or non-finite scores.
    Source: clustering, setting.

    >>> attention_weights(torch.zeros(1, 1, 2), 1.0)
    tensor([[[0.5000, 0.5000]]])
    """
    require_normalization(normalization)
    require_finite("scores", scores)
    require_beta(beta, scores.shape[:-3])
    return weights_kernel(scores, over_trailing(beta, scores, 3), normalization)


def weights_kernel(scores: torch.Tensor, beta: torch.Tensor, normalization: str) -> torch.Tensor:
    """`attention_weights` without checks, for inner loops; `beta` broadcasts against `scores`.

    Also, for whole layers: "softmax1" `exp(beta s_ij) / (1 + sum_k exp(beta s_ik))`, "sigmoid"
    `1 / (1 + exp(-beta s_ij))` and "linear" `beta s_ij`.
    """
    if normalization == "softmax":
        return torch.softmax(beta * scores, dim=-1)
    if normalization == "unnormalized":
        return torch.exp(beta * scores)
    if normalization == "relu":
        return scores.clamp(min=0)
    if normalization == "softmax1":
        with_sink = torch.nn.functional.pad(beta * scores, (0, 1))
        return torch.softmax(with_sink, dim=-1)[..., :-1]
    if normalization == "sigmoid":
        return torch.sigmoid(beta * scores)
    return beta * scores


def head_outputs(
    x: torch.Tensor,
    heads: Heads,
    beta,
    normalization: str = "softmax",
    values: Heads | None = None,
) -> torch.Tensor:
    """Head outputs `f^h_i = sum_j a^h_ij V_h x_j`, without any factor 1/n.

    x (..., n, d) -> (..., H, n, d). `values` are the value matrices, by default the score
    matrices ("value alignment"). Raises as `attention_scores` and `attention_weights`.
    Source: clustering, setting.

    >>> head_outputs(torch.eye(2), ScalarHeads(torch.ones(1)), 1.0, "relu")
    tensor([[[1., 0.],
             [0., 1.]]])
    """
    pattern = attention_weights(attention_scores(x, heads), beta, normalization)
    values = as_heads(heads if values is None else values)
    values.check(x)
    return values.outputs(pattern, x)


def attention_entropy(scores: torch.Tensor, beta) -> torch.Tensor:
    """Entropy of the softmax rows in nats, `S^h_i = log Z^h_i - beta <s^h_ij>_j`.

    scores (..., H, n, n) -> (..., H, n). Raises ValueError for beta <= 0 or non-finite scores.
    Source: clustering.T8.

    >>> attention_entropy(torch.zeros(1, 1, 4), 2.0).exp()
    tensor([[4.]])
    """
    require_finite("scores", scores)
    require_beta(beta, scores.shape[:-3])
    logits = over_trailing(beta, scores, 3) * scores
    log_partition = torch.logsumexp(logits, dim=-1, keepdim=True)
    return log_partition.squeeze(-1) - ((logits - log_partition).exp() * logits).sum(-1)
