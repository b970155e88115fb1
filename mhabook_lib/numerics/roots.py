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


def bracketed_newton(function, low, high, tolerance: float = 1e-15, iterations: int = 200):
    """Roots of a batch of scalar functions by Newton's method, each kept in its bracket.

    `function` maps an array to `(values, derivatives)`, elementwise; its values are negative at
    `low` and positive (or infinite) at `high`. A Newton step that leaves the bracket, or does not
    halve the step before it, is replaced by bisection. Stops when no root moves by more than
    `tolerance * max(1, |root|)`. NumPy only. Raises ValueError if the sign does not change over a
    bracket, or if the roots still move after `iterations`.

    >>> root = bracketed_newton(lambda t: (t**2 - 2, 2 * t), 0.0, 2.0)
    >>> bool(abs(root - 2**0.5) < 1e-15)
    True
    """
    low, high = (np.array(a, dtype=float) for a in np.broadcast_arrays(low, high))
    if not np.all((function(low)[0] <= 0) & (function(high)[0] >= 0)):
        raise ValueError(
            f"no change from negative to positive over the bracket [{low.min()}, {high.max()}]"
        )
    x, previous = (low + high) / 2, high - low
    for _ in range(iterations):
        value, derivative = function(x)
        low, high = np.where(value < 0, x, low), np.where(value < 0, high, x)
        with np.errstate(invalid="ignore", divide="ignore"):
            step = -value / derivative
            inside = (x + step > low) & (x + step < high)
            good = inside & (np.abs(step) <= previous / 2)
        new = np.where(value == 0, x, np.where(good, x + np.where(good, step, 0), (low + high) / 2))
        previous = np.abs(new - x)
        x = new
        if np.all(previous <= tolerance * np.maximum(1, np.abs(x))):
            return x
    raise ValueError(f"after {iterations} steps the roots still move by {previous.max():.1e}")
