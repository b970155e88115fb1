"""The two numbers by which softmax attention at initialisation enters its spectrum."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.special import hyp1f1

from .validation import require_positive


class ExpFeature(NamedTuple):
    """Coefficients of `f(x) = exp(beta x - beta^2/2) - 1` on a standard normal x.

    `theta1 = E f^2`, `theta2 = (E f')^2`, `noise = theta1 - theta2`, `fraction = theta2 / theta1`.
    """

    theta1: float
    theta2: float
    noise: float
    fraction: float


def exp_feature_coefficients(beta) -> ExpFeature:
    """`theta1 = e^{beta^2} - 1`, `theta2 = beta^2`, their difference and their ratio in (0, 1).

    Numbers for a number beta, NumPy arrays for an array. The difference is a confluent
    hypergeometric function, `theta2^2/2 1F1(1; 3; theta2)`, which does not cancel at small beta.
    Raises ValueError unless beta > 0 and e^{beta^2} is finite.
    Source: gaussian_equivalence section 2.

    >>> [round(value, 6) for value in exp_feature_coefficients(1.0)]
    [1.718282, 1.0, 0.718282, 0.581977]
    """
    require_positive("beta", beta)
    square = np.square(np.asarray(beta, dtype=float))
    if np.any(square > 700):
        raise ValueError(f"beta={beta!r}: expected beta^2 <= 700, where e^(beta^2) is finite")
    theta1 = np.expm1(square)
    noise = square**2 / 2 * hyp1f1(1.0, 3.0, square)
    values = (theta1, square, noise, square / theta1)
    return ExpFeature(*(v.item() if np.ndim(beta) == 0 else v for v in values))
