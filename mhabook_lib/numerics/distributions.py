"""Distances between samples, and between a sample and a law on [0, inf)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from scipy.interpolate import PchipInterpolator

from ..validation import require_positive

ZERO = 1e-9  # samples below this share of the largest one are zeros with rounding


def ks_distance(samples: torch.Tensor, cdf: Callable) -> torch.Tensor:
    """Kolmogorov distance `sup_x |F_n(x) - F(x)|` of samples (..., n) to a law: (...).

    `cdf` maps an array of points to F, which may jump at zero only. Samples below 1e-9 of the
    largest of all are counted as zeros. Raises ValueError for negative samples.

    >>> ks_distance(torch.tensor([0.0, 0.0, 0.5, 1.0]), lambda x: 0.5 + x / 2)
    tensor(0.2500)
    """
    if bool((samples < 0).any()):
        raise ValueError(f"samples with minimum {float(samples.min()):.3g}: expected values >= 0")
    points, n = samples.sort(dim=-1).values, samples.shape[-1]
    points = torch.where(points < ZERO * points.max(), 0.0, points)
    law = torch.as_tensor(cdf(points.cpu().numpy())).to(points)
    at = torch.arange(1, n + 1).to(points) / n
    gaps = torch.maximum((law - at).abs(), (law - at + 1 / n).abs())
    gaps = torch.where(points == 0, 0.0, gaps)
    zeros = (points == 0).sum(-1).to(points) / n
    atom = torch.as_tensor(cdf(np.zeros(1))).to(points)[0]
    return torch.maximum(gaps.amax(-1), (atom - zeros).abs())


def two_sample_ks(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Kolmogorov distance between two samples (..., m) and (..., n): (...).

    >>> two_sample_ks(torch.tensor([1.0, 2.0]), torch.tensor([1.5, 3.0]))
    tensor(0.5000)
    """
    first, second = first.sort(dim=-1).values, second.sort(dim=-1).values
    points = torch.cat([first, second], dim=-1)
    shares = [
        torch.searchsorted(sample, points, right=True).to(points) / sample.shape[-1]
        for sample in (first.contiguous(), second.contiguous())
    ]
    return (shares[0] - shares[1]).abs().amax(-1)


def relative_w1(first: torch.Tensor, second: torch.Tensor, mean: float) -> torch.Tensor:
    """Mean distance of ordered samples (..., n), relative to `mean`: Wasserstein-1 over the mean.

    Raises ValueError for samples of different sizes and mean <= 0.

    >>> relative_w1(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 1.0]), 2.0)
    tensor(0.2500)
    """
    require_positive("mean", mean)
    if first.shape[-1] != second.shape[-1]:
        raise ValueError(
            f"samples of shapes {tuple(first.shape)}, {tuple(second.shape)}: expected equal sizes"
        )
    gaps = first.sort(dim=-1).values - second.sort(dim=-1).values
    return gaps.abs().mean(-1) / mean


def tabulated_cdf(cdf: Callable, top: float, points: int = 400) -> Callable:
    """A distribution function on [0, top] as a monotone cubic through `points` exact values.

    For laws that cost much a point. Nodes `x = top s^4`, s = (1 - cos)/2, are dense at zero, where
    densities grow like a power of x, and at the upper edge. Above `top` the value is 1.
    Raises ValueError for top <= 0 and points < 8.

    >>> table = tabulated_cdf(lambda x: np.sqrt(x), 1.0)
    >>> bool(np.abs(table(np.linspace(0, 1, 99)) - np.linspace(0, 1, 99) ** 0.5).max() < 1e-5)
    True
    """
    require_positive("top", top)
    if points < 8:
        raise ValueError(f"points={points}: expected an integer >= 8")
    nodes = ((1 - np.cos(np.linspace(0, np.pi, points))) / 2) ** 4
    nodes = nodes[(nodes == 0) | (nodes > ZERO)]
    table = PchipInterpolator(nodes**0.25, cdf(top * nodes))

    def interpolated(x):
        share = np.minimum(np.asarray(x, dtype=float) / top, 1.0)
        return np.where(share < 1, table(share**0.25), 1.0)

    return interpolated
