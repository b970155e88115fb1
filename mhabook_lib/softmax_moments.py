"""Row statistics of softmax attention at finite size, exact in the number of tokens.

With orthogonal tokens the n scores of a row, given its query q, are independent N(0, v) with
`v = |q|^2/d_k`. That turns averages over rows into one-dimensional sums, for any n up to 1e20.
NumPy arrays in and out; arguments broadcast.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from .exp_features import exp_feature_coefficients
from .numerics.quadrature import chi_square_mean_rule
from .validation import require_positive

GAUSS_REACH = 9.0  # standard deviations kept of a normal variable


class RowNormalizer(NamedTuple):
    """Mean, second moment and variance of a row sum of `e^{beta S - beta^2/2}`, divided by n."""

    mean: np.ndarray
    second: np.ndarray
    variance: np.ndarray


class FiniteSize(NamedTuple):
    """Coefficients of the feature as n tokens of head width d_k see them, and their ratio."""

    theta1: np.ndarray
    theta2: np.ndarray
    fraction: np.ndarray


class Thresholds(NamedTuple):
    """Values of `beta/sqrt(log n)` at which something fails; see `softmax_thresholds`."""

    edge: float
    gap: float
    typical_row: float
    mean_norm: float
    freezing: float


def row_normalizer_moments(n, d_k, beta) -> RowNormalizer:
    """Moments of `D = (1/n) sum_j e^{beta s_j - beta^2/2}` over one row of scores, exact.

    `E D = e^{-beta^2/2} (1 - beta^2/d_k)^{-d_k/2}` and `E D^2 = e^{-beta^2} [(1 - 1/n)
    (1 - 2 beta^2/d_k)^{-d_k/2} + (1/n) (1 - 4 beta^2/d_k)^{-d_k/2}]`. Raises ValueError unless
    n >= 1, beta > 0 and d_k > 4 beta^2: below that the second moment is infinite.
    Source: gaussian_equivalence.P3.

    >>> [round(float(value), 6) for value in row_normalizer_moments(64, 64, 1.0)]
    [1.003955, 1.045546, 0.03762]
    """
    n, d_k, beta = _positive(n=n, d_k=d_k, beta=beta)
    square = beta**2
    if np.any(d_k <= 4 * square):
        raise ValueError(
            f"d_k={d_k.tolist()}, beta={beta.tolist()}: expected d_k > 4 beta^2; "
            "below that the second moment is infinite"
        )

    def query_average(power):  # E e^{power beta^2 v / 2}
        return -d_k / 2 * np.log1p(-power * square / d_k)

    mean = np.exp(query_average(1) - square / 2)
    apart, together = (np.exp(query_average(power) - square) for power in (2, 4))
    second = apart + (together - apart) / n
    return RowNormalizer(mean, second, second - mean**2)


def softmax_participation(n, beta, v=1.0) -> np.ndarray:
    """`r_n = n E sum_j A_ij^2` of a softmax row over n independent scores N(0, v), exact.

    `1/S^2 = int t e^{-tS} dt` gives `r_n = int tau E[a^2 e^{-tau a/n}] (E e^{-tau a/n})^{n-1} dtau`
    with `a = e^{s g - s^2/2}`, `s = beta sqrt(v)`. The trapezoidal rule in g and in log tau
    converges exponentially. Every n >= 1, even 1e20.
    Raises ValueError unless n, beta, v > 0. Source: gaussian_equivalence.X1.

    >>> [round(float(softmax_participation(n, b)), 6) for n, b in ((256, 1), (1024, 1), (64, 4))]
    [2.645623, 2.698659, 29.321754]
    """
    n, beta, v = np.broadcast_arrays(*_positive(n=n, beta=beta, v=v))
    flat = zip(n.ravel(), (beta * np.sqrt(v)).ravel(), strict=True)
    return np.array([_participation(*pair) for pair in flat]).reshape(n.shape)


def _participation(n: float, s: float) -> float:
    step = min(0.4, 0.25 / s)
    g = np.arange(-GAUSS_REACH, GAUSS_REACH + 2 * s, step)
    normal = step / math.sqrt(2 * math.pi) * np.exp(-(g**2) / 2)
    log_tau = np.arange(-20.0, 4 + s**2 / 2 + GAUSS_REACH * s, 0.2)[:, None]
    log_entry = log_tau + s * g - s**2 / 2  # log(tau a)
    with np.errstate(over="ignore"):
        entry = np.exp(log_entry - math.log(n))
    own = np.exp(2 * log_entry - entry) @ normal
    lost = -np.expm1(-entry) @ normal
    others = np.exp((n - 1) * np.log1p(-np.minimum(lost, 1 - 1e-16)))
    return float(0.2 * (own * others).sum())


def mean_row_variance(n, d_k, beta, nodes: int = 12) -> np.ndarray:
    """`m_1(n) = E_v r_n(beta, v) - 1`: the first moment of attention's spectrum at finite size.

    v is chi-squared with d_k degrees of freedom, over d_k. The limit is
    `theta_1 = e^{beta^2} - 1`, the corrections are `(e^{b2}/n)(3 e^{b2} - 2 e^{2 b2} - 1) +
    b2^2 e^{b2}/d_k` with `b2 = beta^2`. Source: gaussian_equivalence.X1.

    >>> round(float(mean_row_variance(4096, 64, 1.0)), 5)
    1.7558
    """
    n, d_k, beta = np.broadcast_arrays(*_positive(n=n, d_k=d_k, beta=beta))
    means = []
    for size, width, heat in zip(n.ravel(), d_k.ravel(), beta.ravel(), strict=True):
        v, weights = chi_square_mean_rule(width, nodes)
        means.append(weights @ softmax_participation(size, heat, v) - 1)
    return np.array(means).reshape(n.shape)


def finite_size_coefficients(n, d_k, beta) -> FiniteSize:
    """The pair to use in place of `theta_1, theta_2` at finite size, and its ratio.

    `theta_1(n) = m_1(n)`, `theta_2(n) = beta^2 (1 - (1 + m_1)/n)^2`: the second is the exact
    regression of `n A_ij` on its score at v = 1 (Stein's identity).
    Source: gaussian_equivalence.X1.

    >>> round(float(finite_size_coefficients(4096, 64, 1.0).fraction), 6)
    0.568773
    """
    mean = mean_row_variance(n, d_k, beta)
    linear = np.square(beta * (1 - (1 + mean) / np.asarray(n, dtype=float)))
    return FiniteSize(mean, linear, linear / mean)


def mean_norm_ratio(n, b, exponent: float = 1.5) -> np.ndarray:
    """`Psi_n(b) = E (1 + e^{beta g + 3 beta^2/2}/n)^{-2}`, `beta = b sqrt(log n)`.

    The limit of `m_1(n)/theta_1` for beta growing with n: 1, 1/2, 0 for b below, at and above
    sqrt(2/3). The factor 3/2 in the exponent comes from tilting one score by 2 beta; `exponent`
    replaces it. Raises ValueError unless n > 1 and b > 0. Source: gaussian_equivalence.X2.

    >>> [round(float(mean_norm_ratio(n, (2 / 3) ** 0.5)), 4) for n in (1e6, 1e20)]
    [0.3862, 0.4315]
    """
    n, b = _positive(n=n, b=b)
    if np.any(n <= 1):
        raise ValueError(f"n={float(n.min())!r}: expected a value > 1")
    beta = (b * np.sqrt(np.log(n)))[..., None]
    g = np.arange(-GAUSS_REACH, GAUSS_REACH, 0.005)
    normal = 0.005 / math.sqrt(2 * math.pi) * np.exp(-(g**2) / 2)
    excess = beta * g + exponent * beta**2 - np.log(n)[..., None]
    return np.exp(-2 * np.logaddexp(0, excess)) @ normal


def softmax_thresholds() -> Thresholds:
    """Where `b = beta/sqrt(log n)` breaks the equivalence, one property after the other.

    `edge` 1 - 1/sqrt 2: single entries leave the edge of the bulk; `gap` 2 - sqrt 2: the gap
    s_2/s_1 stops vanishing; `typical_row` 1/sqrt 2: the typical row loses its variance;
    `mean_norm` sqrt(2/3): the mean Frobenius norm fails; `freezing` sqrt 2: one entry takes the
    row. Source: gaussian_equivalence.X2.

    >>> [round(b, 3) for b in softmax_thresholds()]
    [0.293, 0.586, 0.707, 0.816, 1.414]
    """
    root = math.sqrt(2)
    return Thresholds(1 - 1 / root, 2 - root, 1 / root, math.sqrt(2 / 3), root)


def first_order_row_variance(n, d_k, beta) -> np.ndarray:
    """`m_1(n)` to first order in 1/n and 1/d_k. Source: gaussian_equivalence.X1.

    >>> bool(abs(first_order_row_variance(512, 512, 1.0) - mean_row_variance(512, 512, 1.0)) < 2e-3)
    True
    """
    n, d_k = _positive(n=n, d_k=d_k)
    theta = exp_feature_coefficients(beta)
    growth = theta.theta1 + 1
    by_tokens = growth * (3 * growth - 2 * growth**2 - 1) / n
    return theta.theta1 + by_tokens + theta.theta2**2 * growth / d_k


def _positive(**values) -> list[np.ndarray]:
    for name, value in values.items():
        require_positive(name, value)
    return [np.asarray(value, dtype=float) for value in values.values()]
