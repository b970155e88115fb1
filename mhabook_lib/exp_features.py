"""The two numbers by which softmax attention at initialisation enters its spectrum."""

from __future__ import annotations

import math
from typing import NamedTuple

from .validation import require_positive


class ExpFeature(NamedTuple):
    """Coefficients of `f(x) = exp(beta x - beta^2/2) - 1` on a standard normal x.

    `theta1 = E f^2`, `theta2 = (E f')^2`, `noise = theta1 - theta2`, `fraction = theta2 / theta1`.
    """

    theta1: float
    theta2: float
    noise: float
    fraction: float


def exp_feature_coefficients(beta: float) -> ExpFeature:
    """`theta1 = e^{beta^2} - 1`, `theta2 = beta^2`, their difference and their ratio in (0, 1).

    The difference is summed as `beta^4/2 + beta^6/6 + ...` for small beta, where it would cancel.
    Raises ValueError unless beta > 0 and e^{beta^2} is finite.
    Source: gaussian_equivalence section 2.

    >>> [round(value, 6) for value in exp_feature_coefficients(1.0)]
    [1.718282, 1.0, 0.718282, 0.581977]
    """
    require_positive("beta", beta)
    square = float(beta) ** 2
    if square > 700:
        raise ValueError(f"beta={beta!r}: expected beta^2 <= 700, where e^(beta^2) is finite")
    theta1 = math.expm1(square)
    if square < 0.5:
        noise = math.fsum(square**p / math.factorial(p) for p in range(2, 18))
    else:
        noise = theta1 - square
    return ExpFeature(theta1, square, noise, square / theta1)
