"""Heads next to plain softmax attention: causal mask, normalised keys, and the steps of the proof.

Heads are scaled as in `attention_spectra`: n x n matrices with entries of order n^{-1/2}.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from .attention_spectra import normals, scaled_scores, softmax_heads
from .exp_features import exp_feature_coefficients
from .numerics.linalg import psd_root

CHAIN = ("softmax", "exp feature", "without key mean", "Gaussian rows", "Gaussian model")


def normalize_keys(k: torch.Tensor) -> torch.Tensor:
    """Keys (..., d_k) rescaled to squared length d_k ("QK-norm" of the keys).

    Raises ValueError for a key that is zero. Source: gaussian_equivalence.X4.

    >>> normalize_keys(torch.tensor([[3.0, 4.0]])).square().sum().round()
    tensor(2.)
    """
    norms = torch.linalg.vector_norm(k, dim=-1, keepdim=True)
    if bool((norms == 0).any()):
        raise ValueError("k with a zero row: expected keys that can be normalised")
    return k * (k.shape[-1] ** 0.5 / norms)


def key_popularity(k: torch.Tensor, beta: float) -> torch.Tensor:
    """Expected attention a key draws, `exp(beta^2 (|k_j|^2/d_k - 1)/2)`: (..., n).

    The mean over queries of `exp(beta s_ij - beta^2/2)`. Source: gaussian_equivalence.X4.
    """
    return torch.exp(beta**2 / 2 * (k.square().mean(-1) - 1))


def causal_softmax_heads(q, k, beta: float) -> Iterator[torch.Tensor]:
    """`sqrt(n) (A_r - T/i)`: token i attends to tokens 1..i, less its uniform average.

    T is the lower triangle of ones, row i divided by i. Source: gaussian_equivalence.X10.
    """
    n = q.shape[-2]
    visible = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
    uniform = visible.to(q) / visible.sum(-1, keepdim=True)
    for scores in scaled_scores(q, k):
        pattern = torch.softmax((beta * scores).masked_fill(~visible, -torch.inf), dim=-1)
        yield n**0.5 * (pattern - uniform)


def causal_gaussian_heads(q, k, beta: float, rng: np.random.Generator) -> Iterator[torch.Tensor]:
    """Masked Gaussian heads `sqrt(n) T o (sqrt(theta_2) S_r + sqrt(theta_1 - theta_2) W_r) / i`.

    Source: gaussian_equivalence.X10.
    """
    theta, n = exp_feature_coefficients(beta), q.shape[-2]
    row = torch.arange(1, n + 1).to(q)[:, None]
    for scores in scaled_scores(q, k):
        noise = theta.noise**0.5 * normals(scores.shape, rng, q)
        yield n**0.5 * (theta.theta2**0.5 * scores + noise).tril() / row


def feature_covariance(k: torch.Tensor, beta: float) -> torch.Tensor:
    """Covariance of the entries `f(s_ij)`, j = 1..n, of one row, given the keys (..., n, d_k).

    `e^{beta^2 (rho_ii + rho_jj - 2)/2} (e^{beta^2 rho_ij} - 1)` with `rho = K K^T / d_k` and
    `f(x) = e^{beta x - beta^2/2} - 1`. Source: gaussian_equivalence.T1 (step iv).
    """
    rho = k @ k.mT / k.shape[-1]
    length = key_popularity(k, beta)
    return length.unsqueeze(-1) * length.unsqueeze(-2) * torch.expm1(beta**2 * rho)


def equivalence_chain(q, k, beta: float, rng: np.random.Generator) -> list[torch.Tensor]:
    """Five heads on the way from softmax to the Gaussian model, one head q, k (..., n, d_k).

    In the order of `CHAIN`: `sqrt(n) (A - 11^T/n)`; `f(S)/sqrt(n)`; the same less its mean given
    the keys; Gaussian rows with the same covariance given the keys; the Gaussian model. The last
    two share their normals only in law. Source: gaussian_equivalence.F0.
    """
    theta, n = exp_feature_coefficients(beta), q.shape[-2]
    (softmax,) = softmax_heads(q.unsqueeze(-3), k.unsqueeze(-3), beta)
    (scores,) = scaled_scores(q.unsqueeze(-3), k.unsqueeze(-3))
    feature = torch.expm1(beta * scores - beta**2 / 2)
    centered = feature - (key_popularity(k, beta) - 1).unsqueeze(-2)
    rows = normals(scores.shape, rng, q) @ psd_root(feature_covariance(k, beta)).mT
    noise = normals(scores.shape, rng, q)
    gaussian = theta.theta2**0.5 * scores + theta.noise**0.5 * noise
    return [softmax, *(matrix / n**0.5 for matrix in (feature, centered, rows, gaussian))]
