"""numerics: quadrature, roots, integrator, Monte Carlo, regression, linear algebra."""

import numpy as np
import pytest
import torch
from mpmath import iv
from scipy.linalg import subspace_angles
from scipy.special import factorial2
from scipy.stats import binomtest, linregress

from mhabook_lib.numerics.intervals import ends, exact
from mhabook_lib.numerics.laplace import talbot
from mhabook_lib.numerics.linalg import (
    connected_components,
    lanczos_quadrature,
    orthonormal_basis,
    principal_angles,
    random_orthonormal,
)
from mhabook_lib.numerics.montecarlo import proportion, standard_error, wilson_interval
from mhabook_lib.numerics.ode import integrate
from mhabook_lib.numerics.quadrature import (
    chi_square_mean_rule,
    gauss_hermite,
    gauss_legendre,
    simpson,
)
from mhabook_lib.numerics.regression import fit_slope
from mhabook_lib.numerics.roots import bisect, bracketed_newton
from mhabook_lib.numerics.series import lagrange_inverse, multiply


@pytest.mark.parametrize("count", [1, 2, 5, 64])
def test_gauss_legendre_is_exact_to_its_degree(count):
    nodes, weights = gauss_legendre(count)
    powers = np.arange(2 * count)
    np.testing.assert_allclose(
        nodes[:, None].T ** powers[:, None] @ weights, 1 / (powers + 1), rtol=1e-12
    )
    if count <= 5:  # and no further
        assert abs(weights @ nodes ** (2 * count) - 1 / (2 * count + 1)) > 1e-8
    with pytest.raises(ValueError, match="num_nodes=0"):
        gauss_legendre(0)
    with pytest.raises(ValueError, match="read-only"):
        nodes[0] = 0


@pytest.mark.parametrize("count", [1, 2, 5, 80])
def test_gauss_hermite_has_the_moments_of_a_normal(count):
    nodes, weights = gauss_hermite(count)
    powers = np.arange(0, min(2 * count, 20), 2)
    moments = np.where(powers == 0, 1.0, factorial2(np.maximum(powers - 1, 1)))
    np.testing.assert_allclose(nodes ** powers[:, None] @ weights, moments, rtol=1e-10)
    if count <= 5:  # and no further
        assert abs(weights @ nodes ** (2 * count) - factorial2(2 * count - 1)) > 1e-3
    with pytest.raises(ValueError, match="num_nodes=0"):
        gauss_hermite(0)
    with pytest.raises(ValueError, match="read-only"):
        nodes[0] = 0


def test_simpson():
    t = np.linspace(0, 2, 5)
    assert simpson(t**3, 0.5) == pytest.approx(4.0)
    both = torch.from_numpy(np.stack([t**3, t**2], axis=1))
    assert torch.allclose(simpson(both, 0.5), torch.tensor([4.0, 8 / 3], dtype=torch.float64))
    assert torch.allclose(simpson(both.mT, 0.5, axis=1), simpson(both, 0.5))
    with pytest.raises(ValueError, match="odd number"):
        simpson(t[:4], 0.5)


def test_bisect():
    target = torch.tensor([0.1, 0.5, 2.0], dtype=torch.float64)
    root = bisect(lambda t: t**3 - target, torch.zeros(3).double(), torch.full((3,), 2.0).double())
    torch.testing.assert_close(root, target ** (1 / 3), rtol=1e-14, atol=0)
    falling = bisect(lambda t: np.array([1.0, 2.0]) - t, [0.0, 0.0], [3.0, 3.0])
    np.testing.assert_allclose(falling, [1, 2], rtol=1e-15)
    with pytest.raises(ValueError, match="no sign change"):
        bisect(lambda t: t**2 + 1, 0.0, 1.0)


# Problems that carry their exact solution


class Decay:
    """x' = -x."""

    x0 = torch.tensor([[1.0, -2.0]], dtype=torch.float64)

    def field(self, x):
        return -x

    def exact(self, t):
        return self.x0 * np.exp(-t)


class Rotation:
    """x' = J x: a rotation, which stays on the circle."""

    x0 = torch.tensor([[1.0, 0.0]], dtype=torch.float64)

    def field(self, x):
        return torch.stack([-x[..., 1], x[..., 0]], dim=-1)

    def exact(self, t):
        return torch.tensor([[np.cos(t), np.sin(t)]], dtype=torch.float64)


class Logistic:
    """x' = x (1 - x)."""

    x0 = torch.tensor([[0.1], [0.6]], dtype=torch.float64)

    def field(self, x):
        return x * (1 - x)

    def exact(self, t):
        return 1 / (1 + (1 / self.x0 - 1) * np.exp(-t))


PROBLEMS = [Decay(), Rotation(), Logistic()]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: type(p).__name__)
@pytest.mark.parametrize(("method", "tolerance"), [("rk4", 1e-8), ("dop853", 1e-9)])
def test_integrate_against_exact_solutions(problem, method, tolerance):
    times = [0.0, 0.3, 1.0, 1.7]
    path = integrate(problem.field, problem.x0, times, method, 50, rtol=1e-11)
    assert path.shape == (4, *problem.x0.shape)
    for x, t in zip(path, times, strict=True):
        torch.testing.assert_close(x, problem.exact(t), rtol=0, atol=tolerance)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: type(p).__name__)
def test_rk4_has_order_four(problem):
    steps = np.array([8, 16, 32])
    errors = [
        float(
            (integrate(problem.field, problem.x0, [0, 1], "rk4", k)[-1] - problem.exact(1))
            .abs()
            .max()
        )
        for k in steps
    ]
    assert fit_slope(np.log(steps), np.log(errors)).slope == pytest.approx(-4, abs=0.15)


@pytest.mark.parametrize("method", ["rk4", "dop853"])
def test_retraction_observation_and_rescaled_time(method):
    problem = Rotation()
    path = integrate(problem.field, problem.x0, [0, 5], method, 20, "normalize", rtol=1e-6)
    assert abs(float(torch.linalg.vector_norm(path[-1])) - 1) < 1e-15
    # x' = -x^2 from 1 or 2, rescaled by its own speed x: x = x0 e^{-tau}, t = (e^tau - 1)/x0
    x0 = torch.tensor([1.0, 2.0], dtype=torch.float64).reshape(2, 1, 1)
    states, times = integrate(
        lambda x: -(x**2),
        x0,
        [0, 1, 2],
        method,
        100,
        rescale=lambda x: x[:, 0, 0],
        observe=lambda x: (x.sum(-1), x),
        rtol=1e-10,
    )
    tau = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)[:, None]
    torch.testing.assert_close(states[1][..., 0, 0], x0[:, 0, 0] * (-tau).exp(), rtol=1e-7, atol=0)
    torch.testing.assert_close(states[0].shape, torch.Size([3, 2, 1]))
    torch.testing.assert_close(times, tau.expm1() / x0[:, 0, 0], rtol=1e-7, atol=1e-12)


def test_integrate_keeps_the_precision_of_its_input():
    x0 = Rotation.x0.float()
    for method in ("rk4", "dop853"):
        assert integrate(Rotation().field, x0, [0, 1], method).dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "euler"}, "method='euler'"),
        ({"retraction": "clip"}, "retraction='clip'"),
        ({"steps_per_interval": 0}, "steps_per_interval=0"),
        ({"times": [0, 0]}, "increasing"),
        ({"times": [0, np.inf]}, "finite"),
        ({"times": []}, "increasing"),
    ],
)
def test_integrate_errors(options, message):
    times = options.pop("times", [0, 1])
    with pytest.raises(ValueError, match=message):
        integrate(lambda x: x, Decay.x0, times, **options)


def test_a_blow_up_is_reported():
    x0 = torch.ones(1, 1, dtype=torch.float64)
    for method in ("rk4", "dop853"):
        with pytest.raises(ValueError, match=r"not finite|adaptive solver stopped"):
            integrate(lambda x: x**3, x0, [0, 5], method, 20)


def test_wilson_interval():
    for successes, trials in ((0, 50), (3, 40), (40, 40), (1234, 4000)):
        expected = binomtest(successes, trials).proportion_ci(0.95, method="wilson")
        got = wilson_interval(successes, trials)
        np.testing.assert_allclose(got, (expected.low, expected.high), rtol=1e-12, atol=1e-15)
    low, _ = wilson_interval(np.array([1, 2]), 10, confidence=0.5)
    assert low.shape == (2,)
    measured = proportion(torch.tensor([[True, False], [False, False]]))
    assert measured.value == 0.25 and measured.low < 0.25 < measured.high
    with pytest.raises(ValueError, match="successes=5"):
        wilson_interval(5, 4)
    with pytest.raises(ValueError, match="confidence=95"):
        wilson_interval(1, 4, 95)


def test_standard_error():
    samples = torch.from_numpy(np.random.default_rng(1).standard_normal((400, 3)))
    error = standard_error(samples)
    torch.testing.assert_close(error, samples.std(0) / 20)
    torch.testing.assert_close(standard_error(samples.mT, dim=1), error)
    with pytest.raises(ValueError, match=r"\(1, 3\)"):
        standard_error(samples[:1])


def test_fit_slope():
    rng = np.random.default_rng(2)
    x = rng.standard_normal(30)
    y = 2 * x + rng.standard_normal(30)
    line, peer = fit_slope(x, y), linregress(x, y)
    np.testing.assert_allclose(line, (peer.slope, peer.intercept, peer.rvalue**2), rtol=1e-12)
    with pytest.raises(ValueError, match=r"\(1,\)"):
        fit_slope([1.0], [1.0])


def test_random_orthonormal_is_orthonormal_and_uniform():
    q = random_orthonormal((4000, 3, 2), np.random.default_rng(3))
    identity = torch.eye(2, dtype=torch.float64).expand(4000, 2, 2)
    torch.testing.assert_close(q.mT @ q, identity, rtol=0, atol=1e-13)
    assert float(q.mean(0).abs().max()) < 5 * (1 / 3 / 4000) ** 0.5  # five standard errors
    assert float((q**2).mean(0).sub(1 / 3).abs().max()) < 5 * (4 / 45 / 4000) ** 0.5
    with pytest.raises(ValueError, match="at most 2"):
        random_orthonormal((2, 3), np.random.default_rng(0))


def test_connected_components_of_a_batch():
    adjacency = torch.eye(5, dtype=torch.bool).repeat(2, 3, 1, 1)
    adjacency[0, 0, 0, 4] = adjacency[0, 0, 4, 2] = True  # one direction is enough
    adjacency[1, 2] = True
    labels = connected_components(adjacency)
    assert labels.shape == (2, 3, 5)
    assert labels[0, 0].tolist() == [0, 1, 0, 2, 0]
    assert labels[1, 2].tolist() == [0] * 5
    assert labels[0, 1].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("d", "k", "l"), [(5, 2, 2), (6, 3, 1), (4, 1, 3), (3, 3, 2)])
def test_principal_angles_against_scipy(d, k, l):
    rng = np.random.default_rng(4)
    first, second = rng.standard_normal((3, d, k)), rng.standard_normal((3, d, l))
    found = principal_angles(torch.from_numpy(first), torch.from_numpy(second))
    expected = [subspace_angles(a, b)[::-1] for a, b in zip(first, second, strict=True)]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_small_and_large_angles_keep_their_digits():
    angles = torch.tensor([1e-12, 1e-7, 0.5, np.pi / 2 - 1e-9], dtype=torch.float64)
    frame = torch.eye(8, dtype=torch.float64)
    second = angles.cos() * frame[:, :4] + angles.sin() * frame[:, 4:]
    mixing = torch.from_numpy(np.random.default_rng(5).standard_normal((4, 4)))
    found = principal_angles(frame[:, :4], second)
    torch.testing.assert_close(found, angles, rtol=1e-9, atol=1e-16)
    mixed = principal_angles(frame[:, :4] @ mixing, second @ mixing)
    torch.testing.assert_close(mixed[1:], angles[1:], rtol=1e-6, atol=1e-13)


def test_bases_and_angles_reject_bad_input():
    tall = torch.from_numpy(np.random.default_rng(6).standard_normal((5, 2)))
    basis = orthonormal_basis(tall)
    torch.testing.assert_close(basis @ (basis.mT @ tall), tall)
    flat = tall.clone()
    flat[:, 1] = -3 * flat[:, 0]
    for call, message in (
        (lambda: orthonormal_basis(tall.mT, "keys"), r"keys of shape \(2, 5\)"),
        (lambda: orthonormal_basis(tall[:, :0]), r"matrix of shape \(5, 0\)"),
        (lambda: orthonormal_basis(flat, "keys"), "keys of rank 1: expected rank 2"),
        (lambda: orthonormal_basis(0 * tall), "matrix of rank 0"),
        (lambda: principal_angles(tall, flat), "second of rank 1"),
        (lambda: principal_angles(tall / 0, tall), "first.*finite"),
        (lambda: principal_angles(tall, tall[:4]), r"first of shape \(5, 2\) and second of shape"),
        (lambda: principal_angles(tall[:, 0], tall), r"first of shape \(5,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_intervals_contain_what_they_stand_for():
    low, high = ends(exact(0.1) * 3)
    assert low < 0.3 < high and high - low < 1e-15
    low, high = ends(iv.exp(exact(1)))
    assert low < np.e < high


@pytest.mark.parametrize("slope", [1.0, 40.0])
def test_bracketed_newton(slope):
    target = np.array([0.1, 0.5, 0.9])

    def function(x):
        value = np.arctan(slope * (x - target))
        return value, slope / (1 + (slope * (x - target)) ** 2)

    assert np.allclose(bracketed_newton(function, 0.0, 1.0), target, atol=1e-14)
    steep = bracketed_newton(
        lambda x: (np.where(x < 0.3, x - 0.3, np.inf), np.ones_like(x)), np.zeros(2), 1.0
    )
    assert np.allclose(steep, 0.3)
    with pytest.raises(ValueError, match="no change from negative to positive"):
        bracketed_newton(function, 0.95, 1.0)
    with pytest.raises(ValueError, match="still move by"):
        bracketed_newton(function, 0.0, 1.0, iterations=1)


def test_talbot():
    times = np.array([[0.1, 1.0], [3.0, 20.0]])
    assert np.allclose(talbot(lambda s: s**-1.5, times), 2 * np.sqrt(times / np.pi), rtol=1e-10)
    smooth = talbot(lambda s: 1 / np.sqrt(s + 1), times)
    assert np.allclose(smooth, np.exp(-times) / np.sqrt(np.pi * times), atol=1e-10)
    with pytest.raises(ValueError, match=r"times=0.0"):
        talbot(lambda s: 1 / s, [0.0, 1.0])


def test_lagrange_inversion():
    """u = eta e^{-eta}: Lambert's tree series, and a function of it."""
    growth = 1 / np.cumprod([1.0, 1, 2, 3, 4, 5])
    outer = np.zeros(7)
    outer[1] = 1
    q = np.arange(1, 7)
    factorials = np.cumprod(q.astype(float))
    assert np.allclose(lagrange_inverse(outer, growth), q ** (q - 1.0) / factorials)
    assert np.allclose(
        multiply(growth, np.array([1, -1, 1 / 2, -1 / 6, 1 / 24, -1 / 120])), np.eye(6)[0]
    )
    batch = lagrange_inverse(np.stack([outer, 2 * outer]), growth)
    assert np.allclose(batch[1], 2 * batch[0])


@pytest.mark.parametrize("degrees", [1.0, 64.0, 4096.0])
def test_chi_square_mean_rule(degrees):
    v, weights = chi_square_mean_rule(degrees, 10)
    power, moment = np.arange(1, 8), np.cumprod(1 + 2 * np.arange(7) / degrees)
    assert np.allclose((weights * v ** power[:, None]).sum(1), moment, rtol=1e-11)
    assert np.all(v > 0) and np.all(weights > 0)
    with pytest.raises(ValueError, match="degrees=0"):
        chi_square_mean_rule(0, 3)


def test_lanczos_quadrature():
    rng = np.random.default_rng(0)
    z = torch.from_numpy(rng.standard_normal((3, 60, 80)))
    gram = z @ z.mT / 80
    start = torch.from_numpy(rng.standard_normal((3, 60)))

    def product(v):
        return (gram @ v.unsqueeze(-1)).squeeze(-1)

    nodes, weights = lanczos_quadrature(product, start, 25)
    assert nodes.shape == (3, 25) and torch.allclose(weights.sum(-1), torch.ones(3).double())
    eigenvalues, vectors = torch.linalg.eigh(gram)
    shares = (vectors.mT @ start.unsqueeze(-1)).squeeze(-1).square()
    shares = shares / shares.sum(-1, keepdim=True)
    for t in (0.5, 5.0):
        exact = (shares * torch.exp(-t * eigenvalues)).sum(-1)
        assert torch.allclose((weights * torch.exp(-t * nodes)).sum(-1), exact, atol=1e-10)
    flat, _ = lanczos_quadrature(lambda v: 2 * v, start, 25)
    assert flat.shape == (3, 1) and torch.allclose(flat, torch.full((3, 1), 2.0).double())
    with pytest.raises(ValueError, match="start vectors that are not 0"):
        lanczos_quadrature(product, torch.zeros(3, 60), 4)
