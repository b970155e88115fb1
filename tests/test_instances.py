"""Random instances and the signs of their rates."""

import numpy as np
import pytest
import torch

from mhabook_lib.energy import energy_rate, interaction_energy
from mhabook_lib.instances import (
    flow_rates,
    head_falls,
    layer_energies,
    layer_falls,
    orthogonal_instances,
    random_instances,
    total_falls,
)
from mhabook_lib.token_flow import attention_velocity, layer_step


@pytest.fixture
def rng():
    return np.random.default_rng(5)


@pytest.mark.parametrize(
    "law, low, high", [("normal", -9, 9), ("positive", 0, 9), ("bounded", 0.2, 1.5)]
)
def test_orthogonal_instances_follow_their_law(rng, law, low, high):
    x, heads = orthogonal_instances(50, 7, 6, 3, law, rng)
    torch.testing.assert_close(x.norm(dim=-1), torch.ones(50, 7, dtype=torch.float64))
    assert low <= heads.eigenvalues.min() and heads.eigenvalues.max() <= high
    dense = heads.dense(6)
    for h in range(3):
        for g in range(h):
            assert (dense[:, h] @ dense[:, g]).abs().max() < 1e-14


def test_impossible_instances_are_refused(rng):
    with pytest.raises(ValueError, match="law='cauchy': expected one of normal, positive, bounded"):
        orthogonal_instances(1, 7, 6, 3, "cauchy", rng)
    with pytest.raises(ValueError, match="d=7, num_heads=3"):
        orthogonal_instances(1, 7, 7, 3, "normal", rng)
    with pytest.raises(ValueError, match="kind"):
        random_instances(1, 7, 5, 3, "odd", rng)


def test_flow_rates_are_the_slopes_of_the_energies(rng):
    x, heads = random_instances(4, 5, 3, 2, "general", rng)
    for kind in ("unnormalized", "softmax", "relu"):
        v = attention_velocity(x, heads, 0.7, kind)
        step = 1e-6
        slope = interaction_energy(x + step * v, heads, 0.7)
        slope = (slope - interaction_energy(x - step * v, heads, 0.7)) / (2 * step)
        torch.testing.assert_close(flow_rates(x, heads, 0.7, kind), slope, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(flow_rates(x, heads, 0.7, kind), energy_rate(x, v, heads, 0.7))


def test_signs_ignore_rounding_and_nothing_else():
    pairs = [[1.0, -1.0 - 1e-15], [1.0, -1.0 - 1e-9], [1.0, -1e-15]]
    rates = torch.tensor(pairs, dtype=torch.float64)
    assert total_falls(rates).tolist() == [False, True, False]
    assert head_falls(rates).tolist() == [[False, True], [False, True], [False, False]]
    energies = torch.tensor([1.0, 1.0 - 1e-15, 0.9], dtype=torch.float64)
    assert layer_falls(energies).tolist() == [False, True]


def test_layer_energies_follow_single_layers(rng):
    x, heads = random_instances(3, 5, 3, 2, "psd", rng)
    energy, moved = layer_energies(x, heads, 0.7, 2.0, 3, "softmax")
    for k in range(3):
        torch.testing.assert_close(energy[k], interaction_energy(x, heads, 0.7).sum(-1))
        y = layer_step(x, heads, 0.7, 2.0, "softmax")
        torch.testing.assert_close(moved[k], (y - x).square().sum(-1))
        x = y
