"""single_location, head_competition, specialization_chain: gradients, law test, bad input."""

import numpy as np
import pytest
import torch

from mhabook_lib.head_competition import logit_curvature
from mhabook_lib.single_location import (
    KINDS,
    HeadState,
    feature_law,
    location_gradient,
    location_residual,
    multihead_weights,
)
from mhabook_lib.specialization_chain import full_sgd, reduced_sgd

LAW = feature_law("flip", [2, 2])


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_and_curvature_are_derivatives_of_the_loss(kind):
    z = torch.from_numpy(np.random.default_rng(0).standard_normal((3, 5)))

    def loss(z):
        weights = multihead_weights(z, torch.zeros(3), kind)
        return location_residual(weights, kind).square().sum() / 2

    weights = multihead_weights(z, torch.zeros(3), kind)
    slope = torch.autograd.functional.jacobian(loss, z)
    hessian = torch.autograd.functional.hessian(loss, z)
    assert torch.allclose(slope, location_gradient(weights, kind), atol=1e-14)
    all_tokens = torch.einsum("hlkl->hk", hessian)
    assert torch.allclose(all_tokens, logit_curvature(weights, kind), atol=1e-14)
    assert torch.allclose(hessian[:, 0, :, 0], logit_curvature(weights, kind, token=0), atol=1e-14)


def statistics(state, runs):
    """Entries of M and R, (runs, 7), after the last step."""
    overlaps = state.overlaps.reshape(-1, 4)[-runs:]
    return torch.cat([overlaps, state.gram.reshape(-1, 4)[-runs:, [0, 1, 3]]], dim=1)


@pytest.mark.parametrize(
    ("kind", "loss"), [("softmax", "location"), ("bsoftmax", "token"), ("softmax1", "location")]
)
def test_reduced_chain_has_the_law_of_sgd(kind, loss):
    runs = 2000
    overlaps = torch.tensor([[0.3, 0.1], [0.1, -0.2]], dtype=torch.float64)
    gram = torch.tensor([[1.0, 0.2], [0.2, 0.8]], dtype=torch.float64)
    start = HeadState(overlaps.expand(runs, 2, 2), gram.expand(runs, 2, 2))
    plan = (50, 5, LAW, kind, 150)
    full = statistics(full_sgd(start, *plan, np.random.default_rng(0), 2.0, loss), runs)
    chain = reduced_sgd(start, *plan, np.random.default_rng(1), 2.0, loss=loss, wishart="exact")
    reduced = statistics(chain, runs)
    scale = ((full.var(0) + reduced.var(0)) / runs).sqrt()
    assert float(((full.mean(0) - reduced.mean(0)) / scale).abs().max()) < 4
    if loss == "location":  # keys frozen for 15 steps are another law
        frozen = reduced_sgd(start, *plan, np.random.default_rng(2), 2.0, block=15)
        frozen = statistics(frozen, runs)
        scale = ((full.var(0) + frozen.var(0)) / runs).sqrt()
        assert float(((full.mean(0) - frozen.mean(0)) / scale).abs().max()) > 4


def test_bad_input():
    start = HeadState(torch.zeros(1, 2, 2), torch.eye(2).expand(1, 2, 2))
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="dimension=8: expected at least"):
        reduced_sgd(start, 8, 5, LAW, "softmax", 1, rng)
    with pytest.raises(ValueError, match="kind='tanh'"):
        reduced_sgd(start, 50, 5, LAW, "tanh", 1, rng)
    with pytest.raises(ValueError, match="law='cauchy'"):
        feature_law("cauchy", [1])
    with pytest.raises(ValueError, match="expected at least one, all >= 0"):
        feature_law("flip", [1, -1])
    with pytest.raises(ValueError, match="continuous"):
        feature_law("gauss", [1]).atoms()
