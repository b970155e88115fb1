"""Truncated power series: coefficients of t^0, t^1, ... along the last axis."""

from __future__ import annotations

import numpy as np


def multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Product of two series (..., m), truncated to m terms.

    >>> multiply(np.array([1.0, 1, 0]), np.array([1.0, 2, 0])).tolist()
    [1.0, 3.0, 2.0]
    """
    shape = np.broadcast_shapes(a.shape, b.shape)
    product = np.zeros(shape)
    for k in range(shape[-1]):
        product[..., k:] += a[..., k : k + 1] * b[..., : shape[-1] - k]
    return product


def lagrange_inverse(outer: np.ndarray, growth: np.ndarray) -> np.ndarray:
    """Coefficients of `H(eta(u))` in u, where `u = eta / phi(eta)` (Lagrange and Buermann).

    `[u^q] H = (1/q) [eta^{q-1}] H'(eta) phi(eta)^q`. outer (..., m+1): the coefficients of H up to
    eta^m; growth (..., m): those of phi, phi(0) = 1. Returns (..., m): the coefficients of
    u^1, ..., u^m.

    >>> ones = np.ones(3)  # phi = 1/(1 - eta), H = eta: the Catalan numbers
    >>> lagrange_inverse(np.array([0.0, 1, 0, 0]), ones).tolist()
    [1.0, 1.0, 2.0]
    """
    terms = growth.shape[-1]
    slope = outer[..., 1:] * np.arange(1, terms + 1)
    power, found = np.zeros(terms), []
    power[0] = 1.0
    for q in range(1, terms + 1):
        power = multiply(power, growth)
        found.append(multiply(slope, power)[..., q - 1] / q)
    return np.stack(found, axis=-1)
