"""Building blocks of the spectral laws: affine Marchenko-Pastur and free Poisson.

NumPy arrays in and out; all arguments broadcast.
"""

from __future__ import annotations

import numpy as np

from .validation import require_finite, require_positive


def r_transform_affine_mp(eta, c, ratio):
    """R-transform of `1 - c + c x`, x of the mean-one Marchenko-Pastur law with parameter 1/ratio.

    `R(eta) = 1 - c + c/(1 - c eta/ratio)`, real or complex eta off the pole. Raises ValueError
    unless ratio > 0. Source: gaussian_equivalence, setting.

    >>> float(r_transform_affine_mp(0.5, 0.5, 1.0))
    1.1666666666666665
    """
    require_positive("ratio", ratio)
    return 1 - c + c / (1 - c * np.asarray(eta) / ratio)


def s_transform_affine_mp(z, c, ratio):
    """S-transform of the same law at real z > -1.

    `S(z) = 2/(1 + q + sqrt((1 - q)^2 + 4 c^2 z/ratio))`, `q = c z/ratio`; for q < -1 the
    denominator is rewritten so that nothing cancels. Raises ValueError unless ratio > 0 and
    z > -1. Source: gaussian_equivalence, setting.

    >>> s = s_transform_affine_mp(-0.4, 0.6, 2.0)
    >>> bool(abs(s * r_transform_affine_mp(-0.4 * s, 0.6, 2.0) - 1) < 1e-15)
    True
    """
    require_positive("ratio", ratio)
    require_finite("z", z)
    z, c = np.asarray(z, dtype=float), np.asarray(c, dtype=float)
    if np.any(z <= -1):
        raise ValueError(f"z={float(z.min())!r}: expected a value > -1")
    q = c * z / ratio
    root = np.sqrt((1 - q) ** 2 + 4 * c**2 * z / ratio)
    with np.errstate(divide="ignore", invalid="ignore"):
        narrow = (root - q - 1) / (-2 * q * (1 - c))
        return np.where(q < -1, narrow, 2 / (1 + q + root))


def free_poisson_psi(x, rate):
    """`int y/(x - y) dpi(y)` for the free Poisson law of this rate, at complex x off its support.

    `M = 2 rate/(x - 1 - rate + sqrt((x - a)(x - b)))` with the edges `a, b = (1 -+ sqrt(rate))^2`;
    the free Poisson law is that of `Z Z^T/n`, Z Gaussian with n rows and rate * n columns.
    Source: gaussian_equivalence, setting.

    >>> float(free_poisson_psi(100.0, 2.0).real.round(6))  # 2/100 + 6/100^2 + ...
    0.020623
    """
    x = np.asarray(x, dtype=complex)
    low, high = (1 - np.sqrt(rate)) ** 2, (1 + np.sqrt(rate)) ** 2
    return 2 * rate / (x - 1 - rate + np.sqrt(x - low) * np.sqrt(x - high))


def free_poisson_moments(rate, count: int) -> np.ndarray:
    """Moments 1, ..., count of the free Poisson law: `m_p = sum_j N(p, j) rate^j` (Narayana).

    rate (...) -> (..., count).

    >>> free_poisson_moments(2.0, 3).tolist()
    [2.0, 6.0, 22.0]
    """
    rate = np.asarray(rate, dtype=float)
    found = []
    for p in range(1, count + 1):
        narayana, total = 1.0, 0.0
        for j in range(1, p + 1):
            total = total + narayana * rate**j
            narayana *= (p - j) * (p - j + 1) / (j * (j + 1))
        found.append(total)
    return np.stack(found, axis=-1)
