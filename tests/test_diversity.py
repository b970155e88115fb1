"""diversity: the indices against their definitions, range, invariance, baseline, errors."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhabook_lib.diversity import (
    average_projector,
    hdi_random_baseline,
    hdi_upper_bound,
    head_diversity,
    head_diversity_index,
    head_subspaces,
    output_diversity_index,
)
from mhabook_lib.numerics.linalg import principal_angles, random_orthonormal


def weights(shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def by_angles(projections):
    """Mean of sin^2 over all principal angles of all pairs, one pair after the other."""
    num_heads = projections.shape[-3]
    pairs = [
        principal_angles(projections[g], projections[h]).sin().square().mean()
        for g in range(num_heads)
        for h in range(g)
    ]
    return torch.stack(pairs).mean()


@pytest.mark.parametrize("shape", [(2, 3, 1), (3, 5, 4), (5, 8, 2), (4, 4, 4)])
def test_subspace_index_is_the_mean_of_squared_sines(shape):
    heads = weights(shape)
    index = head_diversity_index(head_subspaces(heads))
    torch.testing.assert_close(index, by_angles(heads), rtol=0, atol=1e-13)


def test_indices_are_functions_of_the_average_projector():
    bases = head_subspaces(weights((7, 4, 6, 2)))
    average = average_projector(bases)
    torch.testing.assert_close(average, (bases @ bases.mT).mean(1))
    spectrum = torch.linalg.eigvalsh(average)
    torch.testing.assert_close(spectrum.sum(-1), torch.full((7,), 2.0, dtype=torch.float64))
    sub = (1 - spectrum.square().sum(-1) / 2) * 4 / 3
    torch.testing.assert_close(head_diversity_index(bases), sub)
    torch.testing.assert_close(
        head_diversity_index(bases, "spectral"), (1 - spectrum[:, -1]) * 4 / 3
    )


@given(num_heads=st.integers(2, 6), d=st.integers(1, 8), data=st.data(), seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_range_and_bound(num_heads, d, data, seed):
    d_head = data.draw(st.integers(1, d))
    bases = random_orthonormal((num_heads, d, d_head), np.random.default_rng(seed))
    sub, spec = (float(head_diversity_index(bases, k)) for k in ("subspace", "spectral"))
    assert -1e-12 <= spec <= sub + 1e-12
    assert sub <= hdi_upper_bound(num_heads, d, d_head) + 1e-12


def test_extremes():
    eye = torch.eye(6, dtype=torch.float64)
    equal = eye[:, :2].expand(3, 6, 2)
    orthogonal = eye.unflatten(0, (3, 2)).mT
    shared = torch.stack([eye[:, [0, j]] for j in (1, 2, 3)])
    for heads, sub, spec in ((equal, 0, 0), (orthogonal, 1, 1), (shared, 0.5, 0)):
        assert float(head_diversity_index(heads)) == pytest.approx(sub, abs=1e-14)
        assert float(head_diversity_index(heads, "spectral")) == pytest.approx(spec, abs=1e-14)


def test_the_bases_of_the_heads_do_not_matter():
    heads = weights((3, 4, 7, 2))
    rng = np.random.default_rng(1)
    rotation = random_orthonormal((7, 7), rng)
    mixed = (rotation @ heads @ torch.from_numpy(rng.standard_normal((3, 4, 2, 2))))[
        :, [3, 1, 0, 2]
    ]
    for kind in ("subspace", "spectral"):
        first, second = (head_diversity_index(head_subspaces(h), kind) for h in (heads, mixed))
        torch.testing.assert_close(first, second, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("num_heads", "d", "d_head"), [(4, 8, 2), (3, 5, 1), (2, 6, 4)])
def test_random_heads_have_the_baseline_as_mean(num_heads, d, d_head):
    index = head_diversity_index(head_subspaces(weights((4000, num_heads, d, d_head), 2)))
    error = float(index.std()) / 4000**0.5
    assert abs(float(index.mean()) - hdi_random_baseline(d, d_head)) < 4 * error


def test_output_index():
    matrix = torch.tensor([[1.0, 0.2, 0.4], [0.2, 1.0, 0.0], [0.4, 0.0, 1.0]])
    assert float(output_diversity_index(matrix)) == pytest.approx(0.8)
    assert output_diversity_index(matrix.expand(2, 5, 3, 3)).shape == (2, 5)


def test_the_tool():
    report = head_diversity(weights((12, 48, 4), 3).float())
    bases = head_subspaces(weights((12, 48, 4), 3))
    assert report.subspace == pytest.approx(float(head_diversity_index(bases)), abs=1e-6)
    assert report.random_baseline == 1 - 4 / 48 and report.upper_bound == 1.0
    assert "random heads 0.9167" in str(report)
    same = head_diversity(weights((1, 5, 2)).expand(3, 5, 2))
    assert 0 <= same.subspace < 1e-12 and str(same).startswith("HDI_sub 0.0000, HDI_spec 0.0000")


def test_errors():
    heads = weights((3, 5, 2))
    bases = head_subspaces(heads)
    deficient = heads.clone()
    deficient[1, :, 1] = 2 * deficient[1, :, 0]
    infinite = heads.clone()
    infinite[0, 0, 0] = torch.inf
    for call, message in (
        (lambda: head_subspaces(heads[:1]), r"projections of shape \(1, 5, 2\).*H >= 2"),
        (lambda: head_subspaces(heads.mT), r"projections of shape \(3, 2, 5\).*d_k <= d"),
        (lambda: head_subspaces(heads[0]), r"projections of shape \(5, 2\)"),
        (lambda: head_subspaces(deficient), "projections of rank 1: expected rank 2"),
        (lambda: head_subspaces(infinite), "projections.*finite"),
        (lambda: head_diversity_index(heads), "away from orthonormal columns"),
        (lambda: average_projector(2 * bases), "bases is 3 away from orthonormal"),
        (lambda: head_diversity_index(bases, "trace"), "kind='trace'"),
        (lambda: head_diversity(heads[None]), r"expected \(H, d, d_k\)"),
        (lambda: output_diversity_index(torch.ones(1, 1)), "H >= 2"),
        (lambda: output_diversity_index(2 * torch.eye(3)), "diagonal 1 away from 1"),
        (lambda: hdi_random_baseline(2, 3), "d_model=2, d_head=3"),
        (lambda: hdi_upper_bound(1, 4, 2), "num_heads=1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
