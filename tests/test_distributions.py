"""numerics.distributions and the random factors of numerics.linalg."""

import numpy as np
import pytest
import torch
from scipy import stats

from mhabook_lib.numerics.distributions import (
    ks_distance,
    relative_w1,
    tabulated_cdf,
    two_sample_ks,
)
from mhabook_lib.numerics.linalg import psd_root, wishart_factor
from mhabook_lib.numerics.montecarlo import standard_error


def rng(seed=0):
    return np.random.default_rng(seed)


def test_ks_distance_is_that_of_scipy_for_every_batch_entry():
    samples = torch.from_numpy(rng().exponential(size=(3, 50)))
    expected = [stats.kstest(row, stats.expon.cdf).statistic for row in samples.numpy()]
    distances = ks_distance(samples, stats.expon.cdf)
    torch.testing.assert_close(distances, torch.tensor(expected, dtype=torch.float64))


def test_ks_distance_counts_an_atom_once():
    positive = torch.from_numpy(rng(1).exponential(size=300))
    mixed = torch.cat([torch.full((100,), 1e-14, dtype=torch.float64), positive])

    def cdf(x, atom=0.25):
        return atom + (1 - atom) * stats.expon.cdf(x)

    alone = ks_distance(positive, stats.expon.cdf)
    torch.testing.assert_close(ks_distance(mixed, cdf), 0.75 * alone)
    assert ks_distance(mixed, lambda x: cdf(x, 0.4)) >= 0.15 - 1e-12
    everything = torch.zeros(4, dtype=torch.float64)
    assert float(ks_distance(everything, cdf)) == pytest.approx(0.75)


def test_two_sample_distances_are_those_of_scipy():
    first, second = (torch.from_numpy(rng(s).exponential(s, (2, 40))) for s in (2, 3))
    for row in range(2):
        pair = first[row].numpy(), second[row].numpy()
        assert float(two_sample_ks(first, second)[row]) == pytest.approx(
            stats.ks_2samp(*pair).statistic, abs=1e-12
        )
        assert 2.0 * float(relative_w1(first, second, 2.0)[row]) == pytest.approx(
            stats.wasserstein_distance(*pair)
        )
    longer = torch.from_numpy(rng(4).exponential(size=70))
    assert float(two_sample_ks(first[0], longer)) == pytest.approx(
        stats.ks_2samp(first[0].numpy(), longer.numpy()).statistic, abs=1e-12
    )
    assert float(two_sample_ks(first, first).max()) == 0


def test_messages_of_the_distances():
    ones = torch.ones(3)
    with pytest.raises(ValueError, match=r"samples with minimum -1: expected values >= 0"):
        ks_distance(-ones, stats.expon.cdf)
    with pytest.raises(ValueError, match=r"shapes \(3,\), \(4,\): expected equal sizes"):
        relative_w1(ones, torch.ones(4), 1.0)
    with pytest.raises(ValueError, match=r"mean=0.0: expected a value > 0"):
        relative_w1(ones, ones, 0.0)


@pytest.mark.parametrize("rank", [2, 5])
def test_psd_root(rank):
    factor = torch.from_numpy(rng(5).standard_normal((4, 5, rank)))
    gram = factor @ factor.mT
    root = psd_root(gram)
    torch.testing.assert_close(root @ root.mT, gram, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="expected a positive semidefinite matrix"):
        psd_root(torch.diag(torch.tensor([1.0, -0.5])))


@pytest.mark.parametrize("degrees", [3, 5, 12])
def test_wishart_factor_has_the_moments_of_a_wishart_matrix(degrees):
    n, draws = 5, 40_000
    factor = wishart_factor(n, degrees, rng(6), (draws,))
    assert factor.shape == (draws, n, min(n, degrees))
    wishart = factor @ factor.mT
    # E W = degrees I;  E W^2 = degrees (degrees + n + 1) I;  E det W = degrees!/(degrees - n)!
    for power, value in ((wishart, degrees), (wishart @ wishart, degrees * (degrees + n + 1))):
        gap = power.mean(0) - value * torch.eye(n, dtype=torch.float64)
        assert bool((gap.abs() < 5 * standard_error(power)).all())
    determinant = torch.linalg.det(wishart)
    expected = float(np.prod(degrees - np.arange(n)))
    assert (
        abs(float(determinant.mean()) - expected) <= 5 * float(standard_error(determinant)) + 1e-9
    )
    if degrees >= n:
        assert torch.equal(factor, factor.tril())
    with pytest.raises(ValueError, match="n=0, degrees=3: expected integers >= 1"):
        wishart_factor(0, 3, rng())


@pytest.mark.parametrize("power", [0.25, 0.5, 1.0])
def test_a_tabulated_law_is_the_law(power):
    """A power at zero and a square root at the upper edge, with an atom."""

    def cdf(x):
        return 0.2 + 0.8 * (1 - (1 - np.asarray(x) / 3) ** 1.5) ** power

    table = tabulated_cdf(cdf, 3.0)
    x = np.concatenate([[0.0], np.geomspace(1e-10, 3, 1001)])
    assert np.abs(table(x) - cdf(np.minimum(x, 3))).max() < 2e-5
    assert table(0.0) == 0.2 and table(3.5) == 1
    samples = torch.from_numpy(rng(7).random((2, 100)) * 3)
    close = ks_distance(samples, table) - ks_distance(samples, cdf)
    assert float(close.abs().max()) < 2e-5
    with pytest.raises(ValueError, match=r"top=0.0: expected a value > 0"):
        tabulated_cdf(cdf, 0.0)
    with pytest.raises(ValueError, match="points=7: expected an integer >= 8"):
        tabulated_cdf(cdf, 1.0, 7)
