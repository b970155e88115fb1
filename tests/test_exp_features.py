"""exp_features: the two coefficients against Gauss-Hermite quadrature, and small beta."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mhabook_lib.exp_features import exp_feature_coefficients


@given(st.floats(0.05, 1.5))
def test_coefficients_are_gaussian_integrals(beta):
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    weights = weights / math.sqrt(2 * math.pi)
    growth = np.exp(beta * nodes - beta**2 / 2)
    theta = exp_feature_coefficients(beta)
    assert theta.theta1 == pytest.approx(weights @ (growth - 1) ** 2, rel=1e-9)
    assert theta.theta2 == pytest.approx((weights @ (beta * growth)) ** 2, rel=1e-9)
    assert theta.fraction == pytest.approx(theta.theta2 / theta.theta1, rel=1e-12)
    assert 0 < theta.fraction < 1


@pytest.mark.parametrize("beta", [1e-6, 1e-3, 0.1, 0.7, 0.7072, 1.0, 5.0])
def test_noise_does_not_cancel(beta):
    with mpmath.workdps(60):
        square = mpmath.mpf(beta) ** 2
        exact = float(mpmath.expm1(square) - square)
    assert exp_feature_coefficients(beta).noise == pytest.approx(exact, rel=1e-14)


def test_messages():
    with pytest.raises(ValueError, match=r"beta=0.0: expected a value > 0"):
        exp_feature_coefficients(0.0)
    with pytest.raises(ValueError, match=r"beta=30.0: expected beta\^2 <= 700"):
        exp_feature_coefficients(30.0)
