"""Quadrature rules."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from scipy.linalg import eigh_tridiagonal


@lru_cache(maxsize=32)
def gauss_legendre(num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes in (0, 1) and weights of the Gauss-Legendre rule on the unit interval (float64).

    `int_a^b f = (b - a) sum_k w_k f(a + (b - a) x_k)`, exact for polynomials of degree
    2 num_nodes - 1. The arrays are computed once and are read-only. Raises ValueError unless
    num_nodes >= 1.

    >>> nodes, weights = gauss_legendre(3)
    >>> round(float(weights @ nodes**5), 12)
    0.166666666667
    """
    if num_nodes < 1:
        raise ValueError(f"num_nodes={num_nodes}: expected an integer >= 1")
    nodes, weights = np.polynomial.legendre.leggauss(num_nodes)
    nodes, weights = (nodes + 1) / 2, weights / 2
    nodes.flags.writeable = weights.flags.writeable = False
    return nodes, weights


@lru_cache(maxsize=32)
def gauss_hermite(num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of the Gauss-Hermite rule for the standard normal law (float64).

    `E f(Z) = sum_k w_k f(x_k)`, exact for polynomials of degree 2 num_nodes - 1. The arrays are
    computed once and are read-only. Raises ValueError unless num_nodes >= 1.

    >>> nodes, weights = gauss_hermite(4)
    >>> round(float(weights @ nodes**6), 12)
    15.0
    """
    if num_nodes < 1:
        raise ValueError(f"num_nodes={num_nodes}: expected an integer >= 1")
    nodes, weights = np.polynomial.hermite_e.hermegauss(num_nodes)
    weights = weights / weights.sum()
    nodes.flags.writeable = weights.flags.writeable = False
    return nodes, weights


def simpson(values, step: float, axis: int = 0):
    """Composite Simpson rule for samples at a constant `step`, along `axis`.

    `(step/3)(f_0 + 4 f_1 + 2 f_2 + ... + 4 f_{m-1} + f_m)`, error O(step^4). Takes NumPy arrays
    or tensors with an odd number of samples along `axis`; raises ValueError for an even number.

    >>> simpson(np.array([0.0, 1.0, 8.0]), 1.0)  # int_0^2 t^3 dt
    4.0
    """
    count = values.shape[axis]
    if count < 3 or count % 2 == 0:
        raise ValueError(f"{count} samples along axis {axis}: expected an odd number >= 3")
    moved = values.swapaxes(0, axis)
    inner = 4 * moved[1:-1:2].sum(0) + 2 * moved[2:-1:2].sum(0)
    total = (moved[0] + moved[-1] + inner) * (step / 3)
    return float(total) if total.ndim == 0 else total


def chi_square_mean_rule(degrees: float, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Gauss nodes and weights for the mean of `degrees` squared standard normals.

    `E f(chi2/degrees) = sum_k w_k f(v_k)`, weights of sum one, exact for polynomials of degree
    2 num_nodes - 1: generalised Gauss-Laguerre from the eigenvectors of the Jacobi matrix, which
    does not overflow for large `degrees`. Raises ValueError unless degrees > 0 and num_nodes >= 1.

    >>> v, weights = chi_square_mean_rule(64, 12)
    >>> [round(float(weights @ v**power), 10) for power in (0, 1, 2)]  # 1, 1, 1 + 2/64
    [1.0, 1.0, 1.03125]
    """
    if degrees <= 0 or num_nodes < 1:
        raise ValueError(f"degrees={degrees}, num_nodes={num_nodes}: expected > 0 and >= 1")
    k = np.arange(num_nodes)
    alpha = degrees / 2 - 1
    beside = np.sqrt(k[1:] * (k[1:] + alpha))
    nodes, vectors = eigh_tridiagonal(2 * k + alpha + 1, beside)
    return 2 * nodes / degrees, np.square(vectors[0])
