"""Gaussian equivalence: exact-in-law sampling and explicit curves against the plain way.

Errors are relative distances from a reference that is named at each task.
"""

from __future__ import annotations

import numpy as np
import torch

from mhabook_lib.attention_spectra import (
    centered_attention_gram,
    output_gram,
    sample_qkv,
    spectrum,
)
from mhabook_lib.numerics.linalg import random_orthonormal

from .timing import row

# The plain ways


def dense_layer_spectrum(x, num_heads, width, rng):
    """Squared singular values of a centred layer: weights drawn, X multiplied, W_O applied, SVD."""
    n, d = x.shape
    outputs = []
    for _ in range(num_heads):
        w_q, w_k, w_v = torch.from_numpy(rng.standard_normal((3, d, width)) / d**0.5)
        scores = (x @ w_q) @ (x @ w_k).T / width**0.5
        outputs.append((torch.softmax(scores, dim=-1) - 1 / n) @ (x @ w_v))
    joined = torch.cat(outputs, dim=-1)
    w_out = torch.from_numpy(rng.standard_normal((joined.shape[1], d)))
    return torch.linalg.svdvals(joined @ w_out / joined.shape[1] ** 0.5).square()


def mean_row_variance(n, width, rng, rows=40_000):
    """`n E sum_j A_ij^2 - 1` by sampling rows: given the query, n independent scores."""
    scale = np.sqrt(rng.chisquare(width, rows) / width)
    weights = np.exp(scale[:, None] * rng.standard_normal((rows, n)))
    return n * np.mean(np.square(weights).sum(1) / np.square(weights.sum(1))) - 1


# The tasks


def exact_sampler(n: int, d: int, num_heads: int, width: int) -> dict:
    """Reference: the mean eigenvalue `d/n * m_1(n)`, m_1 from 40 000 independent rows."""
    rng = np.random.default_rng(1)
    x = random_orthonormal((d, n), rng).T * d**0.5
    mean = d / n * mean_row_variance(n, width, rng)

    def ours():
        q, k, v = sample_qkv(n, num_heads, width, width, rng)
        gram = centered_attention_gram(q, k, v, beta=1.0)
        return spectrum(output_gram(gram, d, num_heads * width, rng))

    return row(
        "gaussian_equivalence",
        "one draw of the output spectrum, exact in law",
        f"n={n}, d={d}, H={num_heads}, d_k={width}",
        "dense layer and SVD",
        ours,
        lambda: dense_layer_spectrum(x, num_heads, width, rng),
        lambda *spectra: [abs(float(e.mean()) / mean - 1) for e in spectra],
        repeats=3,
    )


def rows() -> list[dict]:
    """All comparisons of this chapter."""
    return [exact_sampler(256, 2048, 16, 64), exact_sampler(256, 4096, 24, 64)]
