"""head_systems: prescribed angles, and certificates around the floating-point values."""

import math

import pytest
import torch

from mhabook_lib.diversity import head_diversity_index
from mhabook_lib.ensemble_risk import isotropic_ensemble_mse
from mhabook_lib.head_systems import (
    angle_pair,
    certified_correlation,
    certified_diversity,
    certified_fan_mse,
    fan,
)
from mhabook_lib.kernel_overlap import head_correlation_at_origin
from mhabook_lib.numerics.linalg import principal_angles


def test_angle_pair_has_its_angles():
    angles = torch.tensor([[0.2, 0.9], [0.0, math.pi / 2]], dtype=torch.float64)
    pair = angle_pair(angles, 5)
    assert pair.shape == (2, 2, 5, 2)
    torch.testing.assert_close(principal_angles(pair[:, 0], pair[:, 1]), angles)
    with pytest.raises(ValueError, match="d_model=3: expected at least 4"):
        angle_pair(angles, 3)


def test_no_angle_of_the_fan_shrinks():
    lines = fan(torch.linspace(0, math.pi / 2, 20), 4)
    assert lines.shape == (20, 4, 4, 1)
    cosines = (lines.unsqueeze(-3).mT @ lines.unsqueeze(-4)).flatten(-2)[..., 0]
    assert float(cosines.diff(dim=0).max()) < 1e-15
    torch.testing.assert_close(lines[-1].squeeze(-1), torch.eye(4, dtype=torch.float64))
    torch.testing.assert_close(lines[:, 0, 0, 0], torch.ones(20, dtype=torch.float64))


@pytest.mark.parametrize("degrees", [(0, 90), (40, 40), (20, 70)])
def test_certified_pairs_contain_the_float(degrees):
    angles = torch.deg2rad(torch.tensor(degrees, dtype=torch.float64))
    for (low, high), value in (
        (certified_correlation(degrees, 0.1), head_correlation_at_origin(angles, 0.1)),
        (certified_diversity(degrees), head_diversity_index(angle_pair(angles, 4))),
    ):
        assert low - 1e-14 < float(value) < high + 1e-14
        assert 0 < high - low < 1e-12


def aligned_risk(bandwidth, tau, sigma2, n):
    """First-order risk of one head on its own line, m = x_1, as isotropic risk with d = 1."""
    line = torch.ones(1, 1, 1, dtype=torch.float64)
    return float(isotropic_ensemble_mse(line, bandwidth, tau, sigma2, 1.0, n).mse)


@pytest.mark.parametrize("arguments", [(0.3, 0.7, 1.0, 1000), (0.8, 0.4, 5.0, 50)])
@pytest.mark.parametrize("num_heads", [2, 4, 7])
def test_certified_fan_against_the_closed_risk(num_heads, arguments):
    ends = certified_fan_mse(num_heads, *arguments)
    bandwidth, tau, sigma2, n = arguments
    angles = torch.tensor([0.0, math.pi / 2])
    risks = isotropic_ensemble_mse(fan(angles, num_heads), bandwidth, tau, sigma2, 1.0, n)
    aligned, orthogonal = risks.mse.tolist()
    wanted = {"isotropic aligned": aligned, "orthogonal": orthogonal}
    wanted["aligned"] = aligned_risk(*arguments)
    for name, value in wanted.items():
        low, high = ends[name]
        assert low - 1e-13 < value < high + 1e-13 and high - low < 1e-11, name


def test_certified_fan_errors():
    for arguments, message in (
        ((4, 0.0, 0.7, 1.0, 10), "bandwidth=0.0"),
        ((4, 0.3, -0.5, 1.0, 10), "tau=-0.5"),
        ((4, 0.3, 0.7, 0.0, 10), "sigma2=0.0"),
        ((4, 0.3, 0.7, 1.0, 0), "n=0"),
        ((4, 0.3, 1.2, 1.0, 10), "tau=1.2: expected 2 tau"),
    ):
        with pytest.raises(ValueError, match=message):
            certified_fan_mse(*arguments)
