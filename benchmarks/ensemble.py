"""Ensemble: batched, fused and binned kernel regression, and integrals in the place of draws.

Errors are the largest absolute differences from a reference of higher accuracy, which is named at
each task.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from mhabook_lib.nadaraya_watson import (
    average_weights,
    binned_nadaraya_watson,
    fused_nadaraya_watson,
    nadaraya_watson,
)

from . import timing
from .timing import largest_gaps, row

# The plain ways


def loop_regression(query, key, value, bandwidth, dtype=float):
    """Head after head and query after query in NumPy; the reference in long doubles."""
    query, key, value = (part.numpy().astype(dtype) for part in (query, key, value))
    out = np.empty((*query.shape[:2], value.shape[-1]))
    for h in range(len(query)):
        for i, x in enumerate(query[h]):
            w = np.exp(-((x - key[h]) ** 2).sum(-1) / (2 * bandwidth**2))
            out[h, i] = w @ value / w.sum()
    return torch.from_numpy(out)


def kernel_reg(query, key, value, bandwidth):
    """statsmodels' local constant estimator, head after head; it finds the slopes as well."""
    from statsmodels.nonparametric.kernel_regression import KernelReg

    kinds, widths = "c" * key.shape[-1], [bandwidth] * key.shape[-1]
    heads = []
    for q, k in zip(query.numpy(), key.numpy(), strict=True):
        mean, _ = KernelReg(value.numpy(), k, kinds, reg_type="lc", bw=widths).fit(q)
        heads.append(mean)
    return torch.from_numpy(np.stack(heads))[..., None]


# The tasks


def sample(num_heads, d_head, n, num_queries):
    """Heads that project the same N(0, I_32) tokens, with a common scalar response."""
    rng = np.random.default_rng(0)
    x, queries = rng.standard_normal((n, 32)), rng.standard_normal((num_queries, 32))
    bases = np.linalg.qr(rng.standard_normal((num_heads, 32, d_head)))[0]
    value = np.sin(x[:, :1]) + 0.3 * rng.standard_normal((n, 1))
    return (torch.from_numpy(part) for part in (queries @ bases, x @ bases, value))


def against_loops(name, regression) -> dict:
    """Reference: long doubles, on the first 32 queries."""
    query, key, value = sample(8, 4, 8192, 512)
    reference = loop_regression(query[:, :32], key, value, 0.5, np.longdouble)
    gaps = largest_gaps(reference)
    return row(
        "ensemble",
        name,
        "n=8192, 512 queries, H=8, d_k=4",
        "NumPy loop over heads and queries",
        lambda: regression(query, key, value, 0.5),
        lambda: loop_regression(query, key, value, 0.5),
        lambda ours, other: gaps(ours[:, :32], other[:, :32]),
        repeats=3,
    )


def against_statsmodels() -> dict | None:
    """Reference: long doubles. None, with a message, where statsmodels is not installed."""
    try:
        import statsmodels  # noqa: F401
    except ImportError:
        print(
            "no row for KernelReg: statsmodels is missing, install with pip install -e '.[bench]'"
        )
        return None
    query, key, value = sample(8, 4, 8192, 64)
    return row(
        "ensemble",
        "kernel regression, all heads, in chunks",
        "n=8192, 64 queries, H=8, d_k=4",
        "statsmodels KernelReg, local constant, fixed bandwidth",
        lambda: nadaraya_watson(query, key, value, 0.5),
        lambda: kernel_reg(query, key, value, 0.5),
        largest_gaps(loop_regression(query, key, value, 0.5, np.longdouble)),
        repeats=3,
    )


def binned() -> dict:
    """Reference: the direct sum for ours, long doubles on 32 queries for the direct sum."""
    rng = np.random.default_rng(1)
    key, query = (torch.from_numpy(rng.standard_normal((1, m, 1))) for m in (131_072, 2048))
    value = torch.sin(3 * key[0]) + 0.3 * torch.from_numpy(rng.standard_normal((131_072, 1)))
    exact = loop_regression(query[:, :32], key, value, 0.1, np.longdouble)
    return row(
        "ensemble",
        "one-dimensional head on a grid of 2048 nodes, by FFT",
        "n=131072, 2048 queries, d_k=1",
        "direct sum in chunks (ours)",
        lambda: binned_nadaraya_watson(query, key, value, 0.1),
        lambda: nadaraya_watson(query, key, value, 0.1),
        lambda ours, other: (abs(ours - other).max(), abs(other[:, :32] - exact).max()),
        repeats=3,
    )


def integrated_labels() -> dict:
    """Times to an equal standard error: both are scaled by the variance of one replicate.

    What is estimated is the noise variance of an ensemble at one query, averaged over tokens. Ours
    is `|wbar|^2` of each draw of the tokens; the other draws labels as well and squares the error.
    Errors: relative standard errors after 400 replicates, measured in this run.
    """
    rng = np.random.default_rng(2)
    bases = torch.from_numpy(np.linalg.qr(rng.standard_normal((4, 8, 2)))[0])
    x = torch.from_numpy(0.5 * rng.standard_normal((1, 8))) @ bases
    replicates, n = 400, 2000

    def rows_of_weights():
        tokens = torch.from_numpy(rng.standard_normal((replicates, 1, n, 8)))
        return average_weights(x.expand(replicates, -1, -1, -1), tokens @ bases, 0.5)[:, 0]

    def integrated():
        return rows_of_weights().square().sum(-1)

    def redrawn():
        labels = torch.from_numpy(rng.standard_normal((replicates, n)))
        return (rows_of_weights() * labels).sum(-1).square()

    ours, other = integrated(), redrawn()
    factor = float(other.var() / ours.var())
    measured = timing.compare(integrated, redrawn, 3)
    spread = [float(part.std() / part.mean() / math.sqrt(replicates)) for part in (ours, other)]
    return {
        "chapter": "ensemble",
        "task": f"noise variance to an equal standard error: 1/{factor:.0f} of the replicates",
        "size": "n=2000, H=4, d_k=2, 400 draws of tokens",
        "other": "labels redrawn; time scaled to the standard error of ours",
        "ours_error": spread[0],
        "other_error": spread[1],
        **measured,
        "other_s": measured["other_s"] * factor,
        "ratio": measured["ratio"] * factor,
    }


def rows() -> list[dict]:
    """All comparisons of this chapter."""
    found = [
        against_loops("kernel regression, all heads, in chunks", nadaraya_watson),
        against_loops("kernel regression, all heads, fused attention", fused_nadaraya_watson),
        against_statsmodels(),
        binned(),
        integrated_labels(),
    ]
    return [entry for entry in found if entry is not None]
