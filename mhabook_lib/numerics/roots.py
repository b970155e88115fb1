"""Bracketed roots of many functions at once."""

from __future__ import annotations

import numpy as np
import torch


def bisect(function, low, high, iterations: int = 60):
    """Roots of a batch of scalar functions by bisection, each in its own bracket [low, high].

    `function` maps an array of arguments to the array of values, elementwise; `low` and `high`
    are numbers, NumPy arrays or tensors of the same shape. The error is
    (high - low) / 2^iterations. Raises ValueError if the sign does not change over a bracket.

    >>> bool(abs(bisect(lambda t: t**2 - 2, 0.0, 2.0) - 2**0.5) < 1e-15)
    True
    """
    if not isinstance(low, torch.Tensor):
        low, high = np.asarray(low, dtype=float), np.asarray(high, dtype=float)
    where = torch.where if isinstance(low, torch.Tensor) else np.where
    low_sign, high_sign = function(low) > 0, function(high) > 0
    if bool((low_sign == high_sign).any()):
        raise ValueError(f"no sign change over the bracket [{low}, {high}]: expected one in each")
    for _ in range(iterations):
        middle = (low + high) / 2
        left = (function(middle) > 0) == low_sign
        low, high = where(left, middle, low), where(left, high, middle)
    return (low + high) / 2
