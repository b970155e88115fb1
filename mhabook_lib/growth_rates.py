"""Closed rates at which attention heads part in the single-location model."""

from __future__ import annotations

from typing import NamedTuple

from .location_error import STEP, laplace_nodes, moments, normal_grid
from .single_location import require_kind
from .validation import require_count


class BlindRates(NamedTuple):
    """Growth rates at M = 0, R = 0: of differences between heads, and of their common motion."""

    difference: float
    common: float


def blind_rates(tokens: int, heads: int, nu: float, kind: str, eta: float = 1.0) -> BlindRates:
    """Rates of a feature of mean zero, `nu = nu_f E theta_f^2`, at the blind point.

    softmax: `eta nu (L-1)(L-2)/(H L^3)`, common less by `eta (L-1)(L+nu)/(H L^3)`.
    bsoftmax: `eta nu (L-1)/(H L^2)`, common as softmax. softmax1 (with bias):
    `eta [2(HL-L-1) + nu (L-1)(L^2+L-H)]/(L+1)^4`, common less by `eta H (L+nu)(L^2+L-1)/(L+1)^4`.
    Raises ValueError for an unknown kind and counts below 1. Source: specialization.P3 (ours).

    >>> round(blind_rates(5, 8, 20.0, "softmax").difference, 12)
    0.24
    """
    require_kind(kind)
    require_count("tokens", tokens)
    require_count("heads", heads)
    count, cube = tokens, heads * tokens**3
    if kind == "softmax1":
        growth = 2 * (heads * count - count - 1) + nu * (count - 1) * (count**2 + count - heads)
        loss = heads * (count + nu) * (count**2 + count - 1)
        return BlindRates(*(eta * rate / (count + 1) ** 4 for rate in (growth, growth - loss)))
    split = eta * nu * (count - 1) * (count - 2) / cube
    common = split - eta * (count - 1) * (count + nu) / cube
    if kind == "bsoftmax":
        split = eta * nu * (count - 1) / (heads * count**2)
    return BlindRates(split, common)


def split_average(tokens: int, nu: float) -> float:
    """`E[S_2 + S_2^2 - 4 S_3 - 2 S_2 S_3 + 4 S_4]`, S_k the power sums of the posterior.

    One integral over s, with `y = exp(sqrt(nu) g - nu/2)`, `phi = E e^{-sy}` and
    `psi_k = E[y^k e^{-sy}]`. Source: specialization.X3 (ours).

    >>> round(split_average(5, 2.0), 5)
    0.02653
    """
    require_count("tokens", tokens)
    x, weights = normal_grid(nu)
    log_y = nu**0.5 * x - nu / 2
    log_s = laplace_nodes(log_y, weights)
    phi, p2, p3, p4, p5 = moments(log_y, weights, log_s, (0, 2, 3, 4, 5))  # with s^k
    one, two = phi ** (tokens - 1), (tokens - 1) * phi ** max(tokens - 2, 0)
    terms = (
        p2 * one + (p4 * one + p2**2 * two) / 2 - 4 * p3 * one
        - (p5 * one + p2 * p3 * two) / 3 + 2 * p4 * one
    )  # fmt: skip
    return float(STEP * (terms / log_s.exp()).sum())


def unspecialized_rate(tokens, heads, nu_1: float, nu_f: float, eta: float = 1.0) -> float:
    """`lambda_f = (eta nu_f/H) split_average(L, nu_1)`: equal heads at m = sqrt(nu_1), R = 0.

    Source: specialization.P4 (ours).
    """
    require_count("heads", heads)
    return eta * nu_f / heads * split_average(tokens, nu_1)
