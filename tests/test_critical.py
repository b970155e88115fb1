"""critical: thresholds against the quantities they are thresholds of, on real token arrays."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhabook_lib.attention import ScalarHeads, head_outputs
from mhabook_lib.critical import (
    bipolar_critical_beta,
    bipolar_rates,
    block_head_rate,
    block_threshold,
    block_tokens,
    curvature_threshold,
    lambert_peak,
    linear_times,
    rd_partner_strength,
    rd_threshold,
    rd_threshold_two,
    relu_crossings,
    relu_softmax_threshold,
    scalar_head_optimum,
    sign_change_gamma,
)
from mhabook_lib.energy import energy_rate, interaction_energy
from mhabook_lib.equiangular import equiangular_drive, equiangular_time
from mhabook_lib.numerics.regression import fit_slope
from mhabook_lib.numerics.roots import bisect
from mhabook_lib.shadows import radial_dominance_margin, shadow_rate
from mhabook_lib.token_flow import (
    attention_velocity,
    equiangular_tokens,
    flow,
    sample_sphere,
)


def tensor(values):
    return torch.as_tensor(values, dtype=torch.float64)


def margin_root(x, strengths):
    """The beta at which Radial Dominance is lost, by bisection on the arrays."""
    heads = ScalarHeads(tensor(strengths))

    def margin(beta):
        return radial_dominance_margin(x, head_outputs(x, heads, beta, "unnormalized"))

    return float(bisect(margin, tensor([1e-3]), tensor([9.0])))


@pytest.mark.parametrize(
    ("n", "num_heads", "gamma", "expected"),
    [
        (8, 2, 0.0, 0.97295507),
        (8, 4, 0.0, 0.42364893),
        (32, 2, 0.0, 1.71699360),
        (32, 4, 0.0, 1.16768746),
        (32, 2, 0.1, 2.25281452),
    ],
)
def test_radial_dominance_threshold(n, num_heads, gamma, expected):
    threshold = float(rd_threshold(n, num_heads, gamma))
    assert abs(threshold - expected) < 5.1e-9
    x = equiangular_tokens(n, n, gamma)
    assert abs(margin_root(x, [1.0] * num_heads) - threshold) < 1e-8
    assert float(rd_threshold(n, num_heads, gamma, 2.0)) == pytest.approx(threshold / 2)


def test_radial_dominance_of_unequal_heads():
    assert abs(float(rd_threshold_two(20, 0.5, 1.3)) - 1.10495974) < 5.1e-9
    root = margin_root(equiangular_tokens(20, 20, 0.0), [0.5, 1.3])
    assert abs(root - float(rd_threshold_two(20, 0.5, 1.3))) < 1e-8
    assert float(rd_threshold(3, 8, 0.5)) == 0.0  # no beta > 0
    # The partner's strength is the same boundary, solved for lambda_2.
    beta = float(rd_threshold_two(20, 0.5, 1.3))
    assert float(rd_partner_strength(0.5, beta, 20)) == pytest.approx(1.3, rel=1e-12)


@given(
    seed=st.integers(0, 10**6),
    n=st.integers(2, 9),
    gamma=st.floats(0, 0.95),
    beta=st.floats(0.1, 4),
)
@settings(max_examples=20, deadline=None)
def test_block_rates_on_token_arrays(seed, n, gamma, beta):
    rng = np.random.default_rng(seed)
    strengths, weights = rng.uniform(0.2, 2, 3), rng.dirichlet([2, 2, 2])
    x, heads = block_tokens(n, gamma, strengths, weights)
    rate = energy_rate(x, attention_velocity(x, heads, beta, "unnormalized"), heads, beta)
    shadow = shadow_rate(x, head_outputs(x, heads, beta, "unnormalized"))
    formula = block_head_rate(beta, n, gamma, strengths, weights)
    np.testing.assert_allclose(formula, rate, rtol=1e-9, atol=1e-11 * float(rate.abs().max()))
    np.testing.assert_allclose(formula, shadow, rtol=1e-9, atol=1e-11 * float(rate.abs().max()))


def test_block_threshold_on_token_arrays():
    for n, expected in ((4, 0.46415361), (16, 1.20397280), (64, 1.89454920)):
        x, heads = block_tokens(n, 0.0, [1.0, 3.0], [0.5, 0.5])

        def weak_rate(beta, x=x, heads=heads):
            v = attention_velocity(x, heads, beta, "unnormalized")
            return energy_rate(x, v, heads, beta)[..., 0]

        threshold = float(block_threshold(n))
        assert abs(threshold - expected) < 5.1e-9
        assert abs(float(bisect(weak_rate, tensor([0.1]), tensor([4.0]), 40)) - threshold) < 1e-8
        before, after = weak_rate(tensor([0.99 * threshold, 1.01 * threshold]))
        assert float(before) > 0 > float(after)
    assert float(block_threshold(16, 2.0)) == pytest.approx(float(block_threshold(16)) / 2)
    equal = block_head_rate(np.linspace(0.1, 20, 50), 16, 0.3, [1.0, 1.0], [0.5, 0.5])
    assert np.all(equal > 0)


def test_lambert_peak_is_the_largest_drive():
    for n, gamma, beta in ((2, 0.0, 1.0), (8, 0.3, 2.0), (128, 0.0, 0.5)):
        peak = float(lambert_peak(n, gamma, beta))  # beta and lambda may be exchanged
        grid = np.linspace(0.5, 1.5, 2001) * peak
        drive = equiangular_drive(gamma, grid[:, None], beta, n, "softmax")
        assert abs(grid[drive.argmax()] - peak) <= grid[1] - grid[0]
        best = np.exp(-peak * beta * (1 - gamma)) / (beta * (1 - gamma))
        assert float(equiangular_drive(gamma, [peak], beta, n, "softmax")) == pytest.approx(best)


def test_curvature_threshold_is_the_inflection():
    n = np.array([2, 8, 32, 128, 1024])
    u, h = curvature_threshold(n), 1e-3

    def second(u):
        value = [(u + k * h) / (np.exp(u + k * h) + n - 1) for k in (-1, 0, 1)]
        return value[0] - 2 * value[1] + value[2]

    assert np.all(second(u - 0.05) < 0) and np.all(second(u + 0.05) > 0)
    np.testing.assert_allclose((u - 2) * np.exp(u), (n - 1) * (u + 2), rtol=1e-12)


def test_sign_change_of_the_drive():
    gamma = float(sign_change_gamma(1.0, 1.5, 2.0))
    assert abs(gamma - 0.08109302) < 5.1e-9
    heads = ScalarHeads(tensor([1.0, -1.5]))
    for factor, sign in ((0.95, -1), (1.05, 1)):
        x = equiangular_tokens(8, 8, factor * gamma)
        v = attention_velocity(x, heads, 2.0, "unnormalized")
        assert np.sign(float(x[0] @ v[1] + v[0] @ x[1])) == sign
    assert abs(float(equiangular_drive(gamma, [1.0, -1.5], 2.0, 8, "unnormalized"))) < 1e-15


def test_relu_crossings():
    low, high = relu_crossings(0.35, 4.0)
    for gamma in (float(low), float(high)):
        drives = [equiangular_drive(gamma, [4.0], 0.35, 9, f) for f in ("relu", "unnormalized")]
        assert drives[0] == pytest.approx(drives[1], rel=1e-13)
    middle = [equiangular_drive(0.7, [4.0], 0.35, 9, f) for f in ("relu", "unnormalized")]
    assert middle[0] > middle[1]
    assert abs(float(relu_crossings(0.3, 3.0)[0]) - 0.54378025) < 5.1e-9
    assert np.isnan(relu_crossings(0.5, 3.0)).all()


def test_relu_softmax_threshold():
    gamma = np.linspace(0.01, 0.999, 4000)
    for n in (3, 8, 32, 128):
        beta = float(relu_softmax_threshold(n))
        for factor, wins in ((0.999, False), (1.001, True)):
            relu = equiangular_drive(gamma, [1.0], factor * beta, n, "relu")
            softmax = equiangular_drive(gamma, [1.0], factor * beta, n, "softmax")
            assert bool((relu > softmax).any()) is wins


def test_linear_times_and_scaling():
    times = linear_times(4096**-0.5, 0.5, 1.0, 8)
    assert float(times.frozen_relu / times.frozen_softmax) == pytest.approx(6.9, abs=0.05)
    n = np.array([8, 16, 32, 64, 128, 256, 512])
    t_u = equiangular_time(0.0, 0.5, [1.0], 1.0, n, "unnormalized")
    line = fit_slope(np.log(n), t_u)
    assert line.slope == pytest.approx(0.466, abs=5.1e-4)
    assert line.r_squared == pytest.approx(0.9991, abs=5.1e-5)
    assert fit_slope(n, t_u).r_squared == pytest.approx(0.79, abs=5.1e-3)
    log_d = 6 * np.log(n)
    t_r = equiangular_time(np.exp(-log_d / 2), 0.5, [1.0], 1.0, n, "relu")
    assert fit_slope(n * log_d, t_r).slope == pytest.approx(0.16675, abs=5.1e-6)
    # In the early phase the first-order time is right up to terms of second order in gamma1.
    early = equiangular_time(0.0, 1e-3, [1.0], 1.0, 8, "unnormalized")
    assert float(linear_times(0.1, 1e-3, 1.0, 8).first_order) == pytest.approx(
        float(early), rel=1e-4
    )


# Mixed signs


def test_no_configuration_beats_the_optimum():
    rng = np.random.default_rng(1)
    for n, d in ((2, 2), (5, 3), (6, 4)):
        strengths, beta = rng.uniform(-2, 2, (500, 3)), rng.uniform(0.2, 3, 500)
        x = sample_sphere((500, n, d), rng)
        energy = interaction_energy(x, ScalarHeads(tensor(strengths)), tensor(beta)).sum(-1)
        best = tensor(scalar_head_optimum(strengths, beta).max_energy)
        assert bool((energy <= best * (1 + 1e-12)).all())


def test_the_optimum_is_attained():
    for strengths, beta, shape in (
        ([1.0, 1.0, 1.0, -2.0], 0.9, "one"),
        ([1.0, 1.0, 1.0, -2.0], 1.0, "antipodal"),
        ([1.0, -1.0], 2.0, "tie"),
    ):
        optimum = scalar_head_optimum(strengths, beta)
        assert str(optimum.shape) == shape
        signs = [1.0] * 4 if shape == "one" else [1.0, 1.0, -1.0, -1.0]
        x = tensor(signs)[:, None] * tensor([[1.0, 0.0]])
        energy = interaction_energy(x, ScalarHeads(tensor(strengths)), beta).sum()
        assert float(optimum.max_energy) == pytest.approx(float(energy), rel=1e-13)


def test_critical_beta():
    assert bipolar_critical_beta([1, 1, 1, -2]) == pytest.approx(np.arccosh(1.5), abs=1e-13)
    five = bipolar_critical_beta([1] * 5 + [-3])
    assert five == pytest.approx(np.arcsinh(np.sqrt(2) / 2), abs=1e-13)
    assert abs(bipolar_critical_beta([1, 1, 1, -1.5]) - 2.17414029) < 5.1e-9
    for strengths in ([1, -1.5], [1, 2, -1], [1, 1], [1, -1], [3, -2, -2, 1.9, 1.9, -3.5, 0.5]):
        with pytest.raises(ValueError, match="expected a positive sum"):
            bipolar_critical_beta(strengths)


@pytest.mark.parametrize(("p", "q"), [(3, 5), (4, 4), (8, 0)])
def test_bipolar_rates_are_eigenvalues(p, q):
    """Jacobian of the flow in angles on the circle: deviations inside and between clusters."""
    heads = ScalarHeads(tensor([1.0, -1.5]))
    start = tensor([0.0] * p + [np.pi] * q)

    def angle_velocity(theta):
        x = torch.stack([theta.cos(), theta.sin()], -1)
        v = attention_velocity(x, heads, 2.0, "unnormalized")
        return v[:, 1] * theta.cos() - v[:, 0] * theta.sin()

    jacobian = torch.autograd.functional.jacobian(angle_velocity, start)
    decay = sorted(-torch.linalg.eigvals(jacobian).real)
    first, second, between = bipolar_rates(p, q, [1.0, -1.5], 2.0)
    expected = [0.0] + [float(first)] * (p - 1) + ([float(second)] * (q - 1) if q else [])
    expected = sorted(expected + ([float(between)] if q else []))
    np.testing.assert_allclose(decay, expected, rtol=1e-9, atol=1e-11)


def test_stable_clusters_decay_at_these_rates():
    heads, rng = ScalarHeads(tensor([1.0, 1.0, 1.0, -2.0])), np.random.default_rng(2)
    signs = tensor([1.0] * 4 + [-1.0] * 4)[:, None]
    x0 = signs * tensor([[1.0, 0.0, 0.0]]) + 1e-4 * torch.from_numpy(rng.standard_normal((8, 3)))
    x0 = x0 / torch.linalg.vector_norm(x0, dim=-1, keepdim=True)
    x = flow(x0, heads, 1.0, [0, 0.4, 0.5], "unnormalized", steps_per_interval=100)
    width = [float((y[:4] - y[:4].mean(0)).norm()) for y in x]
    rate = np.log(width[1] / width[2]) / 0.1
    assert rate == pytest.approx(float(bipolar_rates(4, 4, [1, 1, 1, -2], 1.0).first), rel=1e-3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rd_threshold(8, 1), "num_heads=1"),
        (lambda: rd_threshold(8, 2, -0.1), "gamma >= 0"),
        (lambda: rd_threshold(8, 2, 0.0, -1.0), "strength=-1"),
        (lambda: rd_threshold_two(8, 1.0, 0.0), "other=0"),
        (lambda: block_head_rate(1.0, 4, 0.0, [1.0, 3.0], [0.5, 0.6]), "sum 1"),
        (lambda: block_head_rate(1.0, 4, 0.0, [1.0, 3.0], [1.0]), r"\(2,\).*\(1,\)"),
        (lambda: lambert_peak(8, 1.0), "gamma=1.0"),
        (lambda: curvature_threshold(1), "two tokens"),
        (lambda: sign_change_gamma(1.0, -1.5, 2.0), "b=-1.5"),
        (lambda: relu_softmax_threshold(2), "three tokens"),
        (lambda: linear_times(0.0, 0.5, 1.0, 8), "gamma0=0"),
        (lambda: bipolar_rates(0, 3, [1.0], 1.0), "p=0"),
        (lambda: scalar_head_optimum([1.0], -1.0), "beta=-1"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
