r"""Bias, variance and covariance of heads, and the average of many.

Head h answers `mhat_h = <w^h, y>` with a row of weights `w^h` (its attention pattern), the ensemble
`sum_h a_h mhat_h`. If the noise in y has variance sigma^2, then given the tokens
`Cov(mhat_g, mhat_h) = sigma^2 <w^g, w^h>`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .nadaraya_watson import (
    WEIGHTS_AT_ONCE,
    augmented,
    nadaraya_watson_weights,
    require_sample,
)
from .validation import require_finite


def require_head_axis(query: torch.Tensor, key: torch.Tensor) -> None:
    """Raise unless queries and keys fit each other and carry the same number of heads."""
    require_sample(query, key)
    if min(query.ndim, key.ndim) < 3 or query.shape[-3] != key.shape[-3]:
        raise ValueError(
            f"query of shape {tuple(query.shape)} and key of shape {tuple(key.shape)}: "
            f"expected (..., H, n_q, d_k) and (..., H, n, d_k)"
        )


def head_covariance(query, key, bandwidth) -> torch.Tensor:
    """Inner products `<w^g, w^h>` of the heads' rows: (..., n_q, H, H), in units of sigma^2.

    query (..., H, n_q, d_k), key (..., H, n, d_k). Queries go through in chunks, a Gram matrix
    for each. Raises ValueError as `nadaraya_watson_weights`, and unless both have the same number
    of heads. Source: ensemble.T4.

    >>> key = torch.tensor([[[0.0], [2.0]], [[0.0], [0.0]]])
    >>> head_covariance(torch.zeros(2, 1, 1), key, 0.1)
    tensor([[[1.0000, 0.5000],
             [0.5000, 0.5000]]])
    """
    require_head_axis(query, key)

    def gram(chunk):
        rows = nadaraya_watson_weights(chunk, key, bandwidth).movedim(-3, -2)
        return rows @ rows.mT

    return torch.cat([gram(chunk) for chunk in _chunks(query, key)], dim=-3)


def log_head_covariance(query, key, bandwidth) -> torch.Tensor:
    """Logarithm of `head_covariance` from log-sum-exps alone: (..., n_q, H, H).

    `LSE(s^g + s^h) - LSE(s^g) - LSE(s^h)` over the keys, s the scores: the first is the LSE of one
    attention whose head is g and h side by side. It keeps its digits where the product of two
    rows underflows. Arguments and errors as `head_covariance`. Source: ensemble.T4.

    >>> key = torch.tensor([[[0.0], [2.0]], [[2.0], [0.0]]], dtype=torch.float64)
    >>> query = torch.zeros(2, 1, 1, dtype=torch.float64)
    >>> log_head_covariance(query, key, 0.01)[0, 0, 1].round()
    tensor(-19999., dtype=torch.float64)
    """
    require_head_axis(query, key)
    queries, keys = augmented(query, key, bandwidth)

    def pairs(chunk):
        scores = chunk @ keys.mT
        own = scores.logsumexp(-1)
        joint = [(head.unsqueeze(-3) + scores).logsumexp(-1) for head in scores.unbind(-3)]
        joint = torch.stack(joint, dim=-3)  # (..., H, H, n_q)
        return (joint - own.unsqueeze(-3) - own.unsqueeze(-2)).movedim(-1, -3)

    return torch.cat([pairs(chunk) for chunk in _chunks(queries, key)], dim=-3)


def _chunks(query, key):
    """The queries in pieces whose rows of weights, over all heads, fit in memory."""
    batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
    return query.split(max(1, WEIGHTS_AT_ONCE // (batch.numel() * key.shape[-2])), dim=-2)


def correlation(covariance: torch.Tensor) -> torch.Tensor:
    """`C_gh / sqrt(C_gg C_hh)`, (..., H, H).

    >>> correlation(torch.tensor([[4.0, 1.0], [1.0, 1.0]]))
    tensor([[1.0000, 0.5000],
            [0.5000, 1.0000]])
    """
    scale = covariance.diagonal(dim1=-2, dim2=-1).rsqrt()
    return covariance * scale.unsqueeze(-1) * scale.unsqueeze(-2)


def effective_heads(covariance: torch.Tensor) -> torch.Tensor:
    """How many independent heads the average is worth: mean variance over its variance, (...).

    `H_eff = mean_h C_hh / mean_gh C_gh`, which is `H/(1 + (H-1) rho)` for equal variances and mean
    correlation rho. Source: ensemble.T3, ensemble.T4.

    >>> effective_heads(torch.tensor([[1.0, 0.5], [0.5, 1.0]]))
    tensor(1.3333)
    """
    return covariance.diagonal(dim1=-2, dim2=-1).mean(-1) / covariance.mean((-1, -2))


class ErrorParts(NamedTuple):
    """Squared bias, variance and covariance parts of a mean squared error."""

    bias2: torch.Tensor
    variance: torch.Tensor
    covariance: torch.Tensor

    @property
    def mse(self) -> torch.Tensor:
        """Their sum."""
        return self.bias2 + self.variance + self.covariance


def bias_variance_covariance(bias, covariance, weights=None) -> ErrorParts:
    r"""The three parts of the error of `sum_h a_h mhat_h`: `ErrorParts` of shape (...).

    `(sum a_h b_h)^2`, `sum a_h^2 C_hh` and `sum_{g != h} a_g a_h C_gh`. bias (..., H), covariance
    (..., H, H), weights (..., H), by default 1/H. Raises ValueError for shapes that do not fit.
    Source: ensemble.T3.

    >>> parts = bias_variance_covariance(torch.ones(2), torch.tensor([[1.0, 0.5], [0.5, 1.0]]))
    >>> [float(part) for part in (*parts, parts.mse)]
    [1.0, 0.5, 0.25, 1.75]
    """
    num_heads = bias.shape[-1]
    if covariance.shape[-2:] != (num_heads, num_heads):
        raise ValueError(
            f"covariance of shape {tuple(covariance.shape)}: expected (..., {num_heads}, "
            f"{num_heads}) for bias of shape {tuple(bias.shape)}"
        )
    weights = torch.full_like(bias, 1 / num_heads) if weights is None else weights
    if weights.shape[-1] != num_heads:
        raise ValueError(f"weights of shape {tuple(weights.shape)}: expected (..., {num_heads})")
    total = (weights.unsqueeze(-2) @ covariance @ weights.unsqueeze(-1)).squeeze(-1).squeeze(-1)
    own = (weights.square() * covariance.diagonal(dim1=-2, dim2=-1)).sum(-1)
    return ErrorParts((weights * bias).sum(-1).square(), own, total - own)


def best_weights(bias, covariance) -> torch.Tensor:
    """The weights with sum one and the least error, `M^-1 1 / (1^T M^-1 1)`, `M = C + b b^T`.

    bias (..., H), covariance (..., H, H) -> (..., H). Weights may be negative. Raises ValueError
    for entries that are not finite. Source: ensemble.T3.

    >>> best_weights(torch.tensor([1.0, -1.0]), torch.eye(2))
    tensor([0.5000, 0.5000])
    """
    require_finite("covariance", covariance)
    moment = covariance + bias.unsqueeze(-1) * bias.unsqueeze(-2)
    direction = torch.linalg.solve(moment, torch.ones_like(bias))
    return direction / direction.sum(-1, keepdim=True)
