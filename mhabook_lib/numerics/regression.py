"""Straight lines through measured points."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Line(NamedTuple):
    """A fitted line `y = slope x + intercept` and the share of variance it explains."""

    slope: float
    intercept: float
    r_squared: float


def fit_slope(x, y) -> Line:
    """Least-squares line through the points (x_k, y_k).

    Raises ValueError unless x and y are one-dimensional, equally long, with two distinct x.

    >>> fit_slope([0, 1, 2], [1, 3, 5])
    Line(slope=2.0, intercept=1.0, r_squared=1.0)
    """
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if x.ndim != 1 or x.shape != y.shape or x.size < 2 or np.ptp(x) == 0:
        raise ValueError(f"x of shape {x.shape}, y of shape {y.shape}: expected two equal lists")
    dx, dy = x - x.mean(), y - y.mean()
    slope = (dx @ dy) / (dx @ dx)
    total = dy @ dy
    residual = dy - slope * dx
    r_squared = 1.0 - (residual @ residual) / total if total > 0 else 1.0
    return Line(float(slope), float(y.mean() - slope * x.mean()), float(r_squared))
