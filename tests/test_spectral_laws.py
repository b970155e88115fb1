"""spectral_laws, curve_law, free_probability: closed forms, limits, slow independent ways."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import brentq

from mhabook_lib.exp_features import exp_feature_coefficients
from mhabook_lib.free_probability import (
    free_poisson_moments,
    free_poisson_psi,
    r_transform_affine_mp,
    s_transform_affine_mp,
)
from mhabook_lib.numerics.quadrature import gauss_legendre
from mhabook_lib.spectral_laws import SpectralLaw, TiedSpectralLaw

C = exp_feature_coefficients(1.0).fraction
LAWS = {
    "one head": SpectralLaw(C, 1.0, (1.0,)),
    "four heads": SpectralLaw(C, 16.0, (4.0,)),
    "layer": SpectralLaw(C, 0.8, (3.0, 1.3, 0.7)),
    "narrow, two bulks": SpectralLaw(C, 0.1, (50.0,)),
    "quadratic part": SpectralLaw(C, 0.5, (16.0,), extra=[(0.29, 0.4)]),
    "tied": TiedSpectralLaw(C, 16.0, 16.0),
    "tied with output": TiedSpectralLaw(C, 2.0, 4.0, 0.5),
    "tied, few keys": TiedSpectralLaw(C, 0.5, 16.0, 3.0),
}
each_law = pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)


def marchenko_pastur(x, y):
    """Density and distribution function of the mean-one law with ratio y <= 1."""
    low, high = (1 - math.sqrt(y)) ** 2, (1 + math.sqrt(y)) ** 2

    def density(t):
        return math.sqrt(max((t - low) * (high - t), 0.0)) / (2 * math.pi * y * t)

    return density(x), quad(density, low, x)[0]


def integral(law, function, nodes=1000):
    """`int f dnu = f(0) + int f'(x) (1 - F)`: by quadrature of the distribution function."""
    grid, weights = gauss_legendre(nodes)
    edge = law.edge()
    x = edge * (1 - grid**2)
    return float(function(x) @ ((1 - law.cdf(x)) * 2 * grid * weights * edge))


@pytest.mark.parametrize("y", [0.3, 0.8])
def test_marchenko_pastur(y):
    law = SpectralLaw(0.0, 1.0, (1 / y,))
    assert abs(law.edge() - (1 + math.sqrt(y)) ** 2) < 1e-12
    for x in (0.5, 1.0, 2.0):
        density, cdf = marchenko_pastur(x, y)
        assert abs(law.density(x) - density) < 1e-11
        assert abs(law.cdf(x) - cdf) < 1e-7
    lam = 0.3
    root = math.sqrt((1 + lam - y) ** 2 + 4 * y * lam)
    assert abs(law.dof(lam) - (1 + lam + y - root) / (2 * y)) < 1e-14


def test_free_poisson():
    rate = 0.4
    law = SpectralLaw(0.0, 1.0, (rate,))  # pi_rate / rate
    assert abs(law.atom() - 0.6) < 1e-15
    assert abs(law.edge() * rate - (1 + math.sqrt(rate)) ** 2) < 1e-12
    moments = free_poisson_moments(rate, 5) / rate ** np.arange(1, 6)
    assert np.allclose(law.moments(5), moments, rtol=1e-13)
    x = 3.0 + 0.5j
    series = sum(free_poisson_moments(0.1, 40)[k] / x ** (k + 1) for k in range(40))
    assert abs(free_poisson_psi(x, 0.1) - series) < 1e-12


def test_values_of_one_head():
    law = LAWS["one head"]
    cdf = law.cdf([0.1, 0.5, 1, 2, 4])
    assert np.allclose(cdf, [0.23023, 0.48836, 0.64834, 0.82035, 0.96919], atol=6e-6)
    assert abs(law.edge() - 5.24334) < 5e-6


def test_closed_moments():
    h, g = np.array([1.0, 4.0, 32.0]), np.array([0.3, 16.0, 2.0])
    m = SpectralLaw(C, g, (h,)).moments(4)
    second = 1 + 1 / h + C**2 / g
    third = 1 + 3 * (1 / h + C**2 / g) + 1 / h**2 + 3 * C**2 / (h * g) + C**3 / g**2
    assert np.allclose(m[:, 0], 1) and np.allclose(m[:, 1], second, rtol=1e-14)
    assert np.allclose(m[:, 2], third, rtol=1e-14)
    assert abs(m[1, 3] - 3.115247) < 5e-7
    law = SpectralLaw(C, 2.0, (3.0, 1.3, 0.7))
    assert abs(law.moments(2)[1] - (1 + 1 / 3 + 1 / 1.3 + 1 / 0.7 + C**2 / 2)) < 1e-14
    h = 8.0
    independent = SpectralLaw(C, h, (h, h)).moments(2)[1]
    assert abs(independent - (1 + (2 + 1 / np.expm1(1) ** 2) / h)) < 1e-14
    tied = TiedSpectralLaw(C, h, h).moments(2)[1]
    assert abs(tied - (1 + (2 + 2 / math.e + 2 / math.e**2) / h)) < 1e-14


@each_law
def test_quadrature_gives_the_moments(law):
    m = law.moments(3)
    assert abs(integral(law, np.ones_like) - 1) < 4e-5
    assert abs(integral(law, lambda x: 2 * x) / m[1] - 1) < 4e-5
    assert abs(integral(law, lambda x: 3 * x**2) / m[2] - 1) < 4e-5


@each_law
def test_density_is_the_slope_of_the_cdf(law):
    x = np.linspace(0.02, 0.98, 40) * law.edge()
    step = 1e-5
    slope = (law.cdf(x + step) - law.cdf(x - step)) / (2 * step)
    smooth = np.abs(slope - law.density(x)) < 1e-6 * np.maximum(1, slope)
    assert smooth.sum() >= 38  # an inner edge may lie on the grid
    beyond = law.edge() * np.array([1.001, 2.0, 50.0])
    assert np.all(law.density(beyond) == 0) and np.all(1 - law.cdf(beyond) < 1e-12)


@each_law
def test_dof_is_the_integral(law):
    """The potential and the curve on the negative axis describe one law."""
    lam = 0.3
    dof = integral(law, lambda x: lam / (x + lam) ** 2)
    assert abs(law.dof(lam) - dof) < 4e-5
    slope = (law.dof(lam * 1.0001) - law.dof(lam * 0.9999)) / (2e-4 * lam)
    assert abs(law.dof_derivative(lam) / slope - 1) < 1e-7
    assert abs(law.dof(1e-9) - (1 - law.atom())) < 1e-4


@each_law
def test_distribution_function_down_to_zero(law):
    x = np.append(0.0, np.logspace(-45, 0, 300) * law.edge())
    values = law.cdf(x)
    assert values[0] == law.atom() and values[-1] > 1 - 1e-10
    assert np.diff(values).min() > -5e-6 and abs(values[1] - law.atom()) < 1e-5


@pytest.mark.parametrize("ratio", [0.4, 2.0])
def test_nothing_lies_between_zero_and_a_hard_edge(ratio):
    law = SpectralLaw(0.0, 1.0, (ratio,))
    low = (1 - 1 / math.sqrt(ratio)) ** 2
    x = np.logspace(-40, math.log10(0.999 * low), 200)
    assert np.all(law.density(x) == 0) and np.all(law.cdf(x) == law.atom())
    assert law.density(1.01 * low) > 0.01


def test_a_bulk_down_to_zero():
    """The square case: the distribution function starts as (2/pi) sqrt(x), the root of rounding."""
    law = SpectralLaw(0.0, 1.0, (1.0,))
    x = np.logspace(-20, -8, 13)
    assert np.allclose(law.density(x) * math.pi * np.sqrt(x), 1.0, atol=1e-7)
    assert np.allclose(law.cdf(x), 2 / math.pi * np.sqrt(x), rtol=1e-5, atol=1e-8)


def polynomial_dof(lam, c, gamma_k, factors):
    """Root in (0, min a) of `lam^2 w - lam (1 - c w/g) Pi - c (1-c) Pi^2/g`."""
    w = np.poly1d([1.0, 0.0])
    product = np.poly1d([1.0])
    for a in (1.0, *factors):
        product = product * np.poly1d([-1 / a, 1.0])
    whole = lam**2 * w - lam * np.poly1d([-c / gamma_k, 1.0]) * product
    whole = whole - c * (1 - c) / gamma_k * product**2
    roots = np.roots(whole.coeffs)
    real = roots[np.abs(roots.imag) < 1e-9 * np.abs(roots)].real
    return real[(real > 0) & (real < min(1.0, *factors))].min()


positive = st.floats(0.05, 20.0)


@settings(max_examples=40, deadline=None)
@given(st.floats(0.05, 0.95), positive, st.integers(1, 40), positive, positive, positive)
def test_dof_solves_the_scalar_equation(c, gamma_k, h, gamma_v, gamma_o, lam):
    law = SpectralLaw(c, gamma_k, (h, gamma_v, gamma_o))
    w = law.dof(lam)
    product = (1 - w) * (1 - w / h) * (1 - w / gamma_v) * (1 - w / gamma_o)
    assert abs(lam * w * s_transform_affine_mp(-w, c, gamma_k) - product) < 1e-12
    law = SpectralLaw(c, gamma_k, (h, gamma_v))
    assert abs(law.dof(lam) - polynomial_dof(lam, c, gamma_k, (h, gamma_v))) < 1e-7


@settings(max_examples=30, deadline=None)
@given(st.floats(0.05, 0.95), positive, st.integers(1, 40), positive)
def test_tied_curve_is_the_integral(c, gamma_k, h, depth):
    """The closed form against quadrature of `int s phi/(1 - s phi)`."""
    law, g = TiedSpectralLaw(c, gamma_k, h), gamma_k / h
    s = -depth / (gamma_k + h * c)
    nodes, weights = gauss_legendre(400)
    theta = np.pi * nodes
    x = 1 + g - 2 * math.sqrt(g) * np.cos(theta)
    mass = 2 * g * np.sin(theta) ** 2 / (np.pi * x) * np.pi * weights
    phi = (1 - c) * x + c / g * x**2
    expected = h * (mass * s * phi / (1 - s * phi)).sum()
    assert abs(law.curve(-depth).zeta / expected - 1) < 1e-6


def test_tied_curve_at_a_double_root():
    law = TiedSpectralLaw(C, 2.0, 4.0)
    eta = -4 * (C / 0.5) / (1 - C) ** 2 * (2.0 + 4.0 * C)
    around = law.curve(eta * (1 + np.array([-1e-4, 0, 1e-4]) + 1e-9)).zeta
    assert abs(around[1] - (around[0] + around[2]) / 2) < 1e-6


def test_transforms_are_inverse():
    z = np.array([-0.9, -0.3, 0.5, 4.0])
    for c, ratio in ((0.2, 5.0), (0.58, 0.4), (0.95, 0.05)):
        s = s_transform_affine_mp(z, c, ratio)
        assert np.allclose(s * r_transform_affine_mp(z * s, c, ratio), 1, atol=1e-12)
    wide, narrow = s_transform_affine_mp(np.array([-0.4]), 1 - 1e-9, np.array([0.2, 0.1]))
    assert wide > 0 and narrow > 0


def gaver_stehfest(transform, t, terms=20):
    """Salzer's sum in extended precision, another inversion on the real axis."""
    with mpmath.workdps(45):
        half, total = terms // 2, mpmath.mpf(0)
        for k in range(1, terms + 1):
            weight = mpmath.mpf(0)
            for j in range((k + 1) // 2, min(k, half) + 1):
                weight += (
                    mpmath.mpf(j) ** half
                    * mpmath.factorial(2 * j)
                    / (
                        mpmath.factorial(half - j)
                        * mpmath.factorial(j)
                        * mpmath.factorial(j - 1)
                        * mpmath.factorial(k - j)
                        * mpmath.factorial(2 * j - k)
                    )
                )
            s = k * mpmath.log(2) / t
            total += (-1) ** (half + k) * weight * transform(s)
        return float(total * mpmath.log(2) / t)


def mp_dof(lam, c, gamma_k, factors):
    """w in extended precision, by root finding on the scalar equation."""

    def excess(w):
        q = -c * w / gamma_k
        inverse_s = (1 + q + mpmath.sqrt((1 - q) ** 2 - 4 * c**2 * w / gamma_k)) / 2
        product = mpmath.mpf(1)
        for a in (1, *factors):
            product *= 1 - w / mpmath.mpf(a)
        return product * inverse_s - lam * w

    return mpmath.findroot(excess, (0, min(1, *factors)), solver="anderson", tol=1e-38)


def test_training_loss_against_gaver_stehfest():
    c, gamma, factors = mpmath.mpf(C), 1.0, (16.0, 1.0, 2.0)
    law = SpectralLaw(C, gamma, factors)
    for t in (0.3, 10.0):

        def transform(s):
            return (1 - mp_dof(s / 2, c, gamma, factors)) / s

        assert abs(law.training_loss(t) - gaver_stehfest(transform, t)) < 1e-6


@each_law
def test_training_loss_against_quadrature(law):
    t = np.array([0.2, 1.0, 5.0])
    direct = [1 - integral(law, lambda x, t=t: 2 * t * np.exp(-2 * t * x)) for t in t]
    assert np.allclose(law.training_loss(t), direct, atol=4e-5)


def test_training_loss_values():
    h = np.array([32.0, 64.0, 128.0])
    law = SpectralLaw(C, h / 64, (h, h / 64, 2.0))
    loss = law.training_loss(np.array([[1.0], [10.0], [100.0]]))
    known = [
        [0.613089, 0.476420, 0.382439],
        [0.504029, 0.192334, 0.0554640],
        [0.5, 0.0651262, 7.55267e-5],
    ]
    assert np.allclose(loss, known, rtol=3e-6)


def test_arrival_times():
    gamma = np.array([1.0, 5 / (3 + 2 / 64)])
    law = SpectralLaw(C, gamma, (64.0, gamma, 2.0))
    time = law.arrival_time(0.1)
    assert np.allclose(time, [41.2236, 7.80398], rtol=2e-6)
    assert np.allclose(law.training_loss(time), 0.1, rtol=1e-10)
    root = brentq(lambda t: float(LAWS["tied"].training_loss(t)) - 0.3, 0.1, 10, xtol=1e-12)
    assert abs(LAWS["tied"].arrival_time(0.3) - root) < 1e-9


def test_stop_loss():
    law, level = LAWS["layer"], np.array([0.05, 0.2, 0.5, 1, 2, 4, 8])
    known = [0.96698, 0.88633, 0.76083, 0.60315, 0.38640, 0.14776, 0.00455]
    assert np.allclose(law.stop_loss(level), known, atol=6e-6)
    assert law.stop_loss(100.0) == 0
    assert abs(LAWS["tied"].stop_loss(0.0) - 1) < 1e-5


def test_outlier_in_a_random_matrix():
    """A planted spike in MP: value (1 + s^2)(1 + y/s^2), s^4 > y, in the normalisation of one."""
    y = 0.5
    outlier = SpectralLaw(0.0, 1.0, (1 / y,)).outlier(np.array([2.0, 0.5]))
    assert abs(outlier.value[0] - (1 + 2.0) * (1 + y / 2.0)) < 1e-12
    assert abs(outlier.overlap[0] - (1 - y / 4.0) / (1 + y / 2.0)) < 1e-12
    assert outlier.separated.tolist() == [True, False]
    assert abs(outlier.value[1] - (1 + math.sqrt(y)) ** 2) < 1e-9 and outlier.overlap[1] == 0


def test_outlier_closed_form():
    beta, h, gamma_k = 1.0, 12, 1.5
    c = exp_feature_coefficients(beta).fraction
    s2 = beta**4 * h / (2 * gamma_k * np.expm1(beta**2))
    zeta = (1 + 2 * c / (beta**2 * h - 2)) / s2
    outlier = SpectralLaw(c, gamma_k, (h,)).outlier(s2)
    assert abs(outlier.value - s2 * (1 + zeta) * (1 + zeta / h)) < 1e-12
    assert abs(outlier.value - 3.582) < 5e-4 and abs(outlier.overlap - 0.876) < 5e-4


def test_parameters_broadcast():
    h = np.array([2.0, 4.0, 8.0])
    grid = SpectralLaw(C, 2.0, (h, 2.0))
    lam = np.array([[1.0], [5.0], [20.0]])
    columns = [SpectralLaw(C, 2.0, (k, 2.0)) for k in h]
    one_by_one = [law.dof(lam[:, 0]) for law in columns]
    assert np.allclose(grid.dof(lam).T, one_by_one, atol=1e-15)
    assert np.allclose(grid.dof(lam)[0], [0.38085, 0.40199, 0.41272], atol=5e-6)
    assert np.allclose(grid.cdf(lam).T, [law.cdf(lam[:, 0]) for law in columns])


def test_absent_factors():
    with_all = SpectralLaw(C, 2.0, (4.0, math.inf, math.inf))
    x = np.array([0.3, 1.0, 2.0])
    assert np.allclose(with_all.cdf(x), SpectralLaw(C, 2.0, (4.0,)).cdf(x), atol=1e-14)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SpectralLaw(-0.1, 1.0), "c=-0.1: expected linear fractions >= 0"),
        (lambda: SpectralLaw(0.5, 0.0), "gamma_k=0.0: expected ratios > 0"),
        (lambda: SpectralLaw(0.5, 1.0, (0.0,)), "expected ratios > 0"),
        (lambda: SpectralLaw(0.8, 1.0, extra=[(0.3, 1.0)]), "sum is at most 1"),
        (lambda: TiedSpectralLaw(1.2, 1.0, 2), "at most 1"),
        (lambda: TiedSpectralLaw(0.5, -1.0, 2), "gamma_k=-1.0"),
        (lambda: LAWS["layer"].dof(0.0), "lam=0.0"),
        (lambda: LAWS["layer"].density(0.0), "x=0.0: outside the half-line"),
        (lambda: SpectralLaw(0.0, 1.0, (1.0,)).density(1e-30), "expected values >= 1e-24"),
        (lambda: LAWS["layer"].cdf(-1.0), "x=-1.0: outside the half-line"),
        (lambda: LAWS["layer"].arrival_time(0.2), "the mass at zero"),
        (lambda: LAWS["layer"].training_loss(0.0), "times=0.0"),
        (lambda: LAWS["layer"].outlier(0.0), "s2=0.0"),
        (lambda: s_transform_affine_mp(-1.0, 0.5, 1.0), "z=-1.0"),
        (lambda: r_transform_affine_mp(0.1, 0.5, 0.0), "ratio=0.0"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        make()


def test_unconverged_curve_names_the_residual(monkeypatch):
    law = SpectralLaw(C, 1.0, (1.0,))
    monkeypatch.setattr(law, "_newton", lambda u, z, steps: u)
    with pytest.raises(ValueError, match=r"the curve was not met at z=.*residual"):
        law.cdf(1.0)
