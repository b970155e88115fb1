r"""How to cut a budget `D = H d_k` into heads: risk models and their optima.

`Risk(d) = A T(d) + noise(d)`, with `T` the bias that is left when a head sees d dimensions, and
noise averaged over `H = D/d` heads. The tail is "exponential", `T = exp(-2 gamma d)`,
"polynomial", `T = d^(-2 s)`, or "none"; `rate` is gamma or s. Where it does not matter A = 1 and
the constant of the noise is 1. Arguments are numbers or NumPy arrays that broadcast.
"""

from __future__ import annotations

import numpy as np
from scipy.special import wrightomega

from .numerics.roots import bisect
from .validation import require_positive

TAILS = ("exponential", "polynomial", "none")


def require_tail(tail: str) -> None:
    """Raise unless `tail` names one of the three tails."""
    if tail not in TAILS:
        raise ValueError(f"tail={tail!r}: expected one of {TAILS}")


def fixed_bandwidth_risk(d_head, n, budget, kappa, tail, rate):
    r"""`T(d) + exp(kappa d) d / (n D)`: a head's variance grows by exp(kappa) per dimension.

    Raises ValueError for an unknown tail. Source: ensemble.T9 (our model).

    >>> round(float(fixed_bandwidth_risk(2.0, 100, 10, 0.5, "polynomial", 1.0)), 6)
    0.255437
    """
    require_tail(tail)
    d_head = np.asarray(d_head, dtype=float)
    bias = {
        "exponential": lambda: np.exp(-2 * rate * d_head),
        "polynomial": lambda: d_head ** (-2 * rate),
        "none": lambda: 0.0,
    }[tail]()
    return bias + np.exp(kappa * d_head) * d_head / (n * budget)


def optimal_head_dimension(gamma, kappa, n, budget, *, tail_scale=1.0, noise_scale=1.0):
    r"""The d in [1, D] with the least `A exp(-2 gamma d) + (V/n) exp(kappa d) d/D`.

    Stationarity is `(kappa d + 1) exp((kappa + 2 gamma) d) = Q`, `Q = 2 gamma A n D / V`, so with
    `c = 1 + 2 gamma/kappa` the optimum is `d = W(c Q e^c)/(kappa + 2 gamma) - 1/kappa`, clipped to
    [1, D]. The Lambert function is evaluated by the logarithm of its argument, as Wright's omega:
    nothing overflows. `tail_scale` is A, `noise_scale` is V. Raises ValueError unless all
    arguments are positive. Source: ensemble.T9.

    >>> round(float(optimal_head_dimension(0.25, 0.5, 1e3, 512)), 3)
    10.611
    """
    for name, value in (("gamma", gamma), ("kappa", kappa), ("n", n), ("budget", budget)):
        require_positive(name, value)
    total = kappa + 2 * gamma
    c = total / kappa
    log_q = np.log(2 * gamma * tail_scale / noise_scale) + np.log(n) + np.log(budget)
    interior = wrightomega(np.log(c) + log_q + c) / total - 1 / kappa
    return np.clip(interior, 1, budget)


def head_number_elasticity(d_head, gamma, kappa):
    r"""`d log H / d log D` at the interior optimum `d_head`, `H = D/d`.

    `1 - (kappa d + 1) / (d [(kappa + 2 gamma)(kappa d + 1) + kappa])`. Source: ensemble.T9.

    >>> round(float(head_number_elasticity(10.0, 0.25, 0.5)), 4)
    0.9077
    """
    grown = kappa * np.asarray(d_head, dtype=float) + 1
    return 1 - grown / (d_head * ((kappa + 2 * gamma) * grown + kappa))


def _log_tail_slope(d_head, tail, rate):
    """log of -T'(d); minus infinity without a tail."""
    if tail == "exponential":
        return np.log(2 * rate) - 2 * rate * d_head
    if tail == "polynomial":
        return np.log(2 * rate) - (2 * rate + 1) * np.log(d_head)
    return np.full_like(d_head, -np.inf)


def _least_dimension(excess, n, budget):
    """The d in [1, D] where the slope of the noise overtakes that of the tail: `excess(d) > 0`."""
    _, budget = np.broadcast_arrays(n, np.asarray(budget, dtype=float))
    one = np.ones_like(budget)

    def sign(d):
        return np.where(d <= one, -1.0, np.where(d >= budget, 1.0, excess(d)))

    root = np.minimum(bisect(sign, one, 2 * budget), budget)
    return np.where(excess(one) >= 0, one, root)


def fixed_bandwidth_optimum(n, budget, kappa, tail, rate):
    r"""The d in [1, D] with the least `fixed_bandwidth_risk`, for any tail.

    Root of `kappa d + log(kappa d + 1) - log(n D) = log(-T'(d))`; for the exponential tail the
    same as `optimal_head_dimension`. Raises ValueError for an unknown tail and for arguments that
    are not positive. Source: ensemble.T9, ensemble.T10.

    >>> fixed_bandwidth_optimum([1e3, 1e9], 512, 0.5, "polynomial", 1.0).round(1).tolist()
    [10.2, 29.5]
    """
    require_tail(tail)
    for name, value in (("n", n), ("budget", budget), ("kappa", kappa), ("rate", rate)):
        require_positive(name, value)

    def excess(d):
        noise = kappa * d + np.log1p(kappa * d) - np.log(n) - np.log(budget)
        return noise - _log_tail_slope(d, tail, rate)

    return _least_dimension(excess, n, budget)


def optimal_bandwidth(d_head, n, num_heads, smoothness):
    r"""The h with the least `h^(2 beta) + 1/(n H h^d)`: `h^(2 beta + d) = d / (2 beta n H)`.

    Source: ensemble.T10.

    >>> round(float(optimal_bandwidth(1.0, 1000, 1, 2.0)), 4)
    0.1904
    """
    exponent = 1 / (2 * smoothness + d_head)
    return (d_head / (2 * smoothness * n * num_heads)) ** exponent


def optimized_bandwidth_risk(d_head, n, num_heads, smoothness):
    r"""`min_h h^(2 beta) + 1/(n H h^d)` in closed form, without a tail.

    `(1/nH)^p [q^p + q^(p - 1)]`, `p = 2 beta/(2 beta + d)`, `q = d/(2 beta)`.
    Source: ensemble.T10.

    >>> h = optimal_bandwidth(3.0, 1000, 4, 2.0)
    >>> risk = optimized_bandwidth_risk(3.0, 1000, 4, 2.0)
    >>> bool(abs(h**4 + 1 / (4000 * h**3) - risk) < 1e-15)
    True
    """
    d_head = np.asarray(d_head, dtype=float)
    p, q = 2 * smoothness / (2 * smoothness + d_head), d_head / (2 * smoothness)
    return (n * num_heads) ** -p * (q**p + q ** (p - 1))


def optimized_bandwidth_optimum(n, budget, smoothness, tail, rate, *, one_head=False):
    r"""The d in [1, D] with the least tail plus `optimized_bandwidth_risk`, bandwidth free.

    With `H = D/d` heads, or one head. By the envelope theorem the slope of the noise at the
    best h is `h^(-d) (1 - d log h)/(n D)`, or `-h^(-d) log(h)/n` for one head. Raises ValueError as
    `fixed_bandwidth_optimum`. Source: ensemble.T10.

    >>> optimized_bandwidth_optimum([1e3, 1e9], 512, 2.0, "exponential", 0.25).round(1).tolist()
    [7.2, 11.8]
    """
    require_tail(tail)
    for name, value in (("n", n), ("budget", budget), ("smoothness", smoothness), ("rate", rate)):
        require_positive(name, value)

    def excess(d):
        heads = 1.0 if one_head else np.asarray(budget) / d
        log_h = np.log(optimal_bandwidth(d, np.asarray(n), heads, smoothness))
        growth = -log_h if one_head else 1 / d - log_h
        rising = growth > 0  # otherwise the noise still falls with d
        log_slope = np.log(np.where(rising, growth, 1.0)) - d * log_h - np.log(n * heads)
        return np.where(rising, log_slope - _log_tail_slope(d, tail, rate), -np.inf)

    return _least_dimension(excess, n, budget)
