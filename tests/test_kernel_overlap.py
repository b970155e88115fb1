"""kernel_overlap: the angle law against Gaussian integrals, quadrature, limits, simulation."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhabook_lib.diversity import head_diversity_index, head_subspaces
from mhabook_lib.head_covariance import head_covariance
from mhabook_lib.head_systems import angle_pair
from mhabook_lib.kernel_overlap import (
    covariance_envelopes,
    head_correlation_at_origin,
    head_overlap,
    kernel_overlap_gaussian,
    kernel_overlap_gaussian_mean,
    line_overlap_mean,
    mehler,
    overlap_bracket,
    pair_cosines,
)
from mhabook_lib.numerics.linalg import principal_angles, random_orthonormal
from mhabook_lib.numerics.quadrature import gauss_hermite


def kernel_mean(bases, x, bandwidth, covariance):
    """E prod_h K_h(X - x) for X ~ N(0, covariance), by a determinant over all coordinates."""
    precision = sum(u @ u.mT for u in bases) / bandwidth**2
    widened = torch.eye(len(x), dtype=x.dtype) + covariance @ precision
    exponent = x @ precision @ torch.linalg.solve(widened, x)
    return torch.linalg.det(widened) ** -0.5 * torch.exp(-exponent / 2)


@pytest.mark.parametrize("correlated", [False, True])
@pytest.mark.parametrize("shape", [(3, 5, 2), (2, 4, 4), (4, 3, 1)])
def test_head_overlap_against_determinants(shape, correlated):
    rng = np.random.default_rng(0)
    bases = random_orthonormal(shape, rng)
    d = shape[1]
    mixing = torch.from_numpy(rng.standard_normal((d, d)))
    covariance = mixing @ mixing.mT if correlated else torch.eye(d, dtype=torch.float64)
    x = torch.from_numpy(rng.standard_normal((3, d)))
    found = head_overlap(bases, x, 0.6, covariance if correlated else None)
    for i, query in enumerate(x):
        alone = [kernel_mean([u], query, 0.6, covariance) for u in bases]
        for g in range(shape[0]):
            for h in range(shape[0]):
                both = kernel_mean([bases[g], bases[h]], query, 0.6, covariance)
                expected = float(both / (alone[g] * alone[h]))
                assert float(found[i, g, h]) == pytest.approx(expected, rel=1e-9)


def test_overlap_depends_on_angles_and_coordinates_only():
    angles, bandwidth = torch.tensor([0.3, 1.1], dtype=torch.float64), 0.5
    pair = angle_pair(angles, 6)
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((4, 6)))
    a, b = x @ pair[0], x @ pair[1]
    expected = kernel_overlap_gaussian(angles.cos().expand(4, 2), bandwidth, a, b)
    torch.testing.assert_close(head_overlap(pair, x, bandwidth)[:, 0, 1], expected)
    rotation = random_orthonormal((6, 6), np.random.default_rng(2))
    turned = head_overlap(rotation @ pair, x @ rotation.mT, bandwidth)
    torch.testing.assert_close(turned[:, 0, 1], expected)


def test_a_batch_of_systems():
    bases = random_orthonormal((5, 3, 4, 2), np.random.default_rng(3))
    x = torch.from_numpy(np.random.default_rng(4).standard_normal((7, 4)))
    found = head_overlap(bases, x, 0.8)
    assert found.shape == (5, 7, 3, 3)
    torch.testing.assert_close(found[2], head_overlap(bases[2], x, 0.8))
    torch.testing.assert_close(found, found.mT)


def test_mean_over_queries_against_quadrature():
    nodes, weights = (torch.from_numpy(part.copy()) for part in gauss_hermite(80))
    for degrees, bandwidth, tau in ((40, 0.5, 0.5), (0, 0.8, 0.9), (75, 0.3, 0.4)):
        c = math.cos(math.radians(degrees))
        a = tau * nodes[:, None].expand(80, 80)
        b = c * a + tau * math.sqrt(1 - c**2) * nodes
        cosines = torch.full((80, 80, 1), c, dtype=torch.float64)
        values = kernel_overlap_gaussian(cosines, bandwidth, a[..., None], b[..., None])
        mean = float(kernel_overlap_gaussian_mean([c], bandwidth, tau))
        assert float(weights @ values @ weights) == pytest.approx(mean, rel=1e-10)


def test_origin_and_limits():
    angles = torch.tensor([0.4, 1.2], dtype=torch.float64)
    overlap = head_overlap(angle_pair(angles, 4), torch.zeros(1, 4, dtype=torch.float64), 0.3)[0]
    rho = head_correlation_at_origin(angles, 0.3)
    assert float(overlap[0, 1] / overlap[0, 0]) == pytest.approx(float(rho), rel=1e-12)
    small = kernel_overlap_gaussian(angles.cos(), 1e-4)
    assert float(small) == pytest.approx(float(1 / angles.sin().prod()), rel=1e-6)
    wide = kernel_overlap_gaussian(angles.cos(), 1e4)
    assert float(wide) == pytest.approx(1, abs=1e-6)
    mean = kernel_overlap_gaussian_mean(angles.cos(), 1e-4, 1.0)
    assert float(mean) == pytest.approx(float((angles.sin() ** -2).prod()), rel=1e-5)
    assert float(kernel_overlap_gaussian([0.0, 0.0], 0.2)) == 1.0


def test_mehler_is_a_ratio_of_densities():
    r, a, b = 0.7, 0.3, -1.1
    pair = torch.distributions.MultivariateNormal(
        torch.zeros(2).double(), torch.tensor([[1, r], [r, 1]], dtype=torch.float64)
    )
    one = torch.distributions.Normal(0.0, 1.0)
    a, b = (torch.tensor([v], dtype=torch.float64) for v in (a, b))
    ratio = pair.log_prob(torch.cat([a, b])) - one.log_prob(a) - one.log_prob(b)
    found = mehler(torch.tensor([r], dtype=torch.float64), a, b).log()
    torch.testing.assert_close(found, ratio[0], rtol=1e-12, atol=0)


@given(
    bandwidth=st.floats(0.05, 3),
    share=st.floats(0.05, 0.95),
    cosines=st.lists(st.floats(0, 1), min_size=1, max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_mean_overlap_increases_in_every_cosine(bandwidth, share, cosines):
    s2 = 1 + bandwidth**2
    tau = share * math.sqrt(s2 * (s2 + 1) / 2)
    base = float(kernel_overlap_gaussian_mean(cosines, bandwidth, tau))
    assert base >= 1
    for j, c in enumerate(cosines):
        larger = [*cosines[:j], (1 + c) / 2, *cosines[j + 1 :]]
        assert float(kernel_overlap_gaussian_mean(larger, bandwidth, tau)) >= base * (1 - 1e-12)


def test_simulated_rows():
    pair = angle_pair(torch.deg2rad(torch.tensor([20.0, 70.0]).double()), 4)
    rng = np.random.default_rng(5)
    x = torch.from_numpy(0.5 * rng.standard_normal((2, 4)))
    keys = torch.from_numpy(rng.standard_normal((200, 1, 1000, 4))) @ pair
    rows = 1000 * head_covariance((x @ pair).expand(200, -1, -1, -1), keys, 0.5)
    error, formula = rows.std(0) / 200**0.5, head_overlap(pair, x, 0.5)
    slack = 2 / 1000 * formula.square()  # 2/n_eff, relative
    assert bool(((rows.mean(0) - formula).abs() < 4 * error + slack).all())


def test_pair_cosines_against_principal_angles():
    bases = head_subspaces(torch.from_numpy(np.random.default_rng(6).standard_normal((4, 7, 3))))
    found = pair_cosines(bases)
    for g in range(4):
        for h in range(4):
            angles = principal_angles(bases[g], bases[h])
            torch.testing.assert_close(found[g, h], angles.cos(), rtol=0, atol=1e-12)


@given(seed=st.integers(0, 10**6), d_head=st.integers(1, 3), num_heads=st.integers(2, 5))
@settings(max_examples=40, deadline=None)
def test_every_system_is_inside_its_band(seed, d_head, num_heads):
    rng = np.random.default_rng(seed)
    bases = random_orthonormal((num_heads, d_head + int(rng.integers(1, 6)), d_head), rng)
    bandwidth, tau = rng.uniform(0.05, 2), rng.uniform(0.05, 0.99)
    pairs = kernel_overlap_gaussian_mean(pair_cosines(bases), bandwidth, tau)
    mean = (pairs.sum() - pairs.diagonal().sum()) / (num_heads * (num_heads - 1))
    low, high = covariance_envelopes(head_diversity_index(bases), d_head, bandwidth, tau)
    assert low * (1 - 1e-9) <= mean <= high * (1 + 1e-9)


def test_the_edges_of_the_band_are_reached():
    angle = torch.full((2,), 0.8, dtype=torch.float64)
    hdi, mean = math.sin(0.8) ** 2, float(kernel_overlap_gaussian_mean(angle.cos(), 0.3, 0.5))
    assert float(covariance_envelopes(hdi, 2, 0.3, 0.5)[0]) == pytest.approx(mean, rel=1e-12)
    aligned = float(kernel_overlap_gaussian_mean([1.0, 1.0], 0.3, 0.5))
    assert float(covariance_envelopes(2 / 3, 2, 0.3, 0.5)[1]) == pytest.approx((aligned + 2) / 3)
    for end in covariance_envelopes(torch.tensor([0.0, 1.0]), 2, 0.3, 0.5):
        torch.testing.assert_close(end, torch.tensor([aligned, 1.0], dtype=torch.float64))


def test_log_overlap_is_convex():
    u = torch.linspace(0, 1, 101, dtype=torch.float64)
    for bandwidth, tau in ((0.1, 0.9), (0.5, 0.3), (2.0, 2.5)):
        assert float(-overlap_bracket(u, bandwidth, tau).log().diff(n=2).max()) > 0


def test_any_kernel_on_a_line():
    def gaussian(distance):
        return np.exp(-(distance**2) / (2 * 0.4**2))

    c = math.cos(math.radians(35))
    found = line_overlap_mean(gaussian, 3.2, c, 0.5, num_nodes=60)
    expected = float(kernel_overlap_gaussian_mean([c], 0.4, 0.5))
    assert found == pytest.approx(expected, rel=1e-8)
    assert line_overlap_mean(np.ones_like, 0.6, 0.0, 0.5) == pytest.approx(1, abs=1e-12)
    reflected = line_overlap_mean(np.ones_like, 0.6, -0.5, 0.5)
    assert reflected == pytest.approx(line_overlap_mean(np.ones_like, 0.6, 0.5, 0.5), rel=1e-10)


def test_errors():
    bases = torch.eye(4).reshape(2, 2, 4).mT
    for call, message in (
        (lambda: kernel_overlap_gaussian([1.2], 0.5), r"cosines with entry 1\.2"),
        (lambda: kernel_overlap_gaussian([-0.1], 0.5), "cosines with entry -0.1"),
        (lambda: kernel_overlap_gaussian([0.5], 0.0), "bandwidth=0.0"),
        (lambda: kernel_overlap_gaussian_mean([0.5], 0.5, -1.0), "tau=-1.0"),
        (lambda: kernel_overlap_gaussian_mean([0.5], 0.5, 1.3), r"tau=1\.3: expected tau\^2 <"),
        (lambda: head_correlation_at_origin([0.5], -1.0), "bandwidth=-1.0"),
        (lambda: head_overlap(2 * bases, torch.zeros(1, 4), 0.5), "orthonormal"),
        (lambda: head_overlap(bases[0], torch.zeros(1, 4), 0.5), r"\(4, 2\).*H >= 1"),
        (lambda: pair_cosines(2 * bases), "orthonormal"),
        (lambda: covariance_envelopes(1.5, 1, 0.5, 0.5), "hdi=1.5"),
        (lambda: covariance_envelopes(-0.5, 1, 0.5, 0.5), "hdi=-0.5"),
        (lambda: line_overlap_mean(np.ones_like, 0.6, 1.0, 0.5), "cosine=1.0"),
        (lambda: line_overlap_mean(np.ones_like, -0.6, 0.5, 0.5), "reach=-0.6"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
