"""head_competition, growth_rates: two forms of the flow, growth matrices, fresh samples."""

import math

import pytest
import torch

from mhabook_lib.growth_rates import blind_rates
from mhabook_lib.head_competition import (
    growth_matrix,
    integrate_competition,
    symmetrised_samples,
    velocity,
)
from mhabook_lib.single_location import KINDS, HeadState, feature_law


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def general_state():
    overlaps = torch.tensor([[0.6, 0.2], [0.4, -0.3]], dtype=torch.float64)
    return HeadState(overlaps, torch.tensor([[0.5, 0.1], [0.1, 0.4]], dtype=torch.float64))


@pytest.mark.parametrize("kind", KINDS)
def test_both_forms_of_the_flow_have_the_same_mean(kind):
    law, source = feature_law("flip", [2, 3]), generator()
    gaps = []
    for _ in range(40):
        samples = symmetrised_samples(2048, 5, 2, law, source)
        stein, direct = (
            velocity(general_state(), samples, kind, form=f) for f in ("stein", "direct")
        )
        gaps.append(torch.cat([(a - b).flatten() for a, b in zip(stein, direct, strict=True)]))
    gaps = torch.stack(gaps)
    z = gaps.mean(0) / (gaps.std(0) / math.sqrt(40)).clamp_min(1e-12)
    assert float(z.abs().max()) < 4.5
    halved = gaps + torch.cat([p.flatten() for p in stein]) / 2
    assert float((halved.mean(0) / (gaps.std(0) / math.sqrt(40))).abs().max()) > 20


def test_noise_is_the_square_of_the_step():
    samples = symmetrised_samples(256, 5, 2, feature_law("flip", [2, 3]), generator())
    with_noise = velocity(general_state(), samples, "softmax", eta=2.0)
    without = velocity(general_state(), samples, "softmax", eta=2.0, noise=False)
    assert torch.equal(with_noise.overlaps, without.overlaps)
    added = with_noise.gram - without.gram
    assert float(torch.linalg.eigvalsh(added).min()) > 0
    twice = velocity(general_state(), samples, "softmax", eta=4.0)
    assert torch.allclose(twice.gram - 2 * without.gram, 4 * added, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens, heads, nu", [(5, 8, 20.0), (4, 3, 5.0), (2, 2, 4.0)])
def test_growth_at_the_blind_point_is_closed(kind, tokens, heads, nu):
    """With M = R = 0 all weights are equal: the growth matrix needs no sampling."""
    blind = HeadState(torch.zeros(heads, 1).double(), torch.zeros(heads, heads).double())
    samples = symmetrised_samples(1, tokens, heads, feature_law("gauss", [nu]), generator())
    matrix = growth_matrix(blind, nu, samples, kind)
    apart, together = torch.zeros(heads).double(), torch.ones(heads).double()
    apart[:2] = torch.tensor([1.0, -1.0])
    rates = blind_rates(tokens, heads, nu, kind)
    assert torch.allclose(matrix @ apart, rates.difference * apart, atol=1e-12)
    assert torch.allclose(matrix @ together, rates.common * together, atol=1e-12)


@pytest.mark.parametrize(
    "kind, name", [("softmax", "flip"), ("softmax1", "gauss"), ("bsoftmax", "flip")]
)
def test_growth_matrix_is_the_derivative_of_the_velocity(kind, name):
    law, step = feature_law(name, [2, 3]), 1e-3
    start = general_state()
    start.overlaps[:, 1] = 0
    samples = symmetrised_samples(2**14, 5, 2, law, generator(2))
    matrix = growth_matrix(start, 3.0, samples, kind)
    for h in range(2):
        ends = []
        for sign in (1, -1):
            moved = start.overlaps.clone()
            moved[h, 1] += sign * step
            ends.append(velocity(HeadState(moved, start.gram), samples, kind).overlaps[:, 1])
        assert torch.allclose((ends[0] - ends[1]) / (2 * step), matrix[:, h], atol=6e-3)
    assert not torch.allclose(growth_matrix(start, 0.0, samples, kind), matrix, atol=6e-3)


def test_symmetrised_sets_keep_an_unlearned_feature_at_zero():
    start = general_state()
    start.overlaps[:, 1] = 0
    law = feature_law("flip", [2, 2])
    run = integrate_competition(start, 5, law, "softmax", [0, 5], generator(), points=16)
    assert float(run.overlaps[-1, :, 1].abs().max()) < 1e-13
    lopsided = general_state()
    run = integrate_competition(lopsided, 5, law, "softmax", [0, 5], generator(), points=16)
    assert float(run.overlaps[-1, :, 1].abs().max()) > 1e-2


def test_fresh_samples_follow_the_exact_chain():
    """Ten tokens, two flipping features: values of the exact chain at D = 10^4."""
    start = HeadState(
        torch.tensor([[-0.005, -0.006], [-0.006, 0.007]], dtype=torch.float64),
        torch.eye(2, dtype=torch.float64),
    )
    law = feature_law("flip", [2, 2])
    run = integrate_competition(start, 10, law, "softmax", [0, 10, 40], generator(1))
    assert float(run.overlaps[1, 0, 0]) == pytest.approx(0.561, abs=0.02)
    assert float(run.overlaps[2, 0, 0]) == pytest.approx(1.293, abs=0.02)
    assert float(run.gram[2, 0, 0]) == pytest.approx(0.271, abs=0.02)
    quiet = integrate_competition(start, 10, law, "softmax", [0, 40], generator(1), noise=False)
    assert float(quiet.gram[1, 0, 0]) < 0.2


def test_bad_input_is_named():
    law, start = feature_law("flip", [2, 2]), general_state()
    samples = symmetrised_samples(4, 5, 2, law, generator())
    with pytest.raises(ValueError, match="form='stokes'"):
        velocity(start, samples, "softmax", form="stokes")
    with pytest.raises(ValueError, match="points=0"):
        symmetrised_samples(0, 5, 2, law, generator())
    with pytest.raises(ValueError, match="strictly increasing"):
        integrate_competition(start, 5, law, "softmax", [0, 0], generator())
    with pytest.raises(ValueError, match="not finite at time"):
        lost = HeadState(start.overlaps * math.nan, start.gram)
        integrate_competition(lost, 5, law, "softmax1", [0, 0.5], generator())
