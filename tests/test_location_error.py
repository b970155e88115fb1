"""location_error, growth_rates: quadratures against closed forms, samples and each other."""

import math

import mpmath as mp
import pytest
import torch

from mhabook_lib.growth_rates import split_average, unspecialized_rate
from mhabook_lib.head_competition import growth_matrix, location_error, symmetrised_samples
from mhabook_lib.location_error import (
    bayes_error,
    bsoftmax_error,
    equal_heads_error,
    softmax_error,
)
from mhabook_lib.single_location import HeadState, feature_law


def state(overlaps, gram=None):
    overlaps = torch.tensor(overlaps, dtype=torch.float64)
    gram = torch.zeros(len(overlaps), len(overlaps)) if gram is None else torch.tensor(gram)
    return HeadState(overlaps, gram.double())


def two_equal_gaussian_features(nu, tokens):
    """The evidence of two features of strength nu is a Pareto variable: one integral."""
    tail = mp.mpf(1 + nu) / nu

    def integrand(v):
        x = mp.e**v
        return tail * mp.expint(tail - 1, x) * (tail * mp.expint(tail + 1, x)) ** (tokens - 1) * x

    cuts = [-2500, -1000, -500, -250, -120, -50, -20, -10, -5, -2, 0, 2, 5]
    return float(1 - mp.quad(integrand, cuts) / (1 + nu))


@pytest.mark.parametrize("nu", [2, 30])
def test_bayes_error_of_two_equal_gaussian_features(nu):
    found = bayes_error(feature_law("gauss", [nu, nu]), 5)
    assert found == pytest.approx(two_equal_gaussian_features(nu, 5), abs=2e-6)


def test_bayes_error_at_its_ends():
    assert bayes_error(feature_law("flip", [1e-12, 1e-12]), 4) == pytest.approx(0.75, abs=1e-6)
    assert bayes_error(feature_law("flip", [60, 2]), 4) < 1e-3
    assert bayes_error(feature_law("flip", [2, 2]), 1) == pytest.approx(0, abs=1e-9)
    with pytest.raises(ValueError, match="beyond double precision"):
        bayes_error(feature_law("gauss", [100]), 5)


def test_heads_at_the_atoms_reach_the_bayes_error():
    law, root = feature_law("flip", [2, 2]), math.sqrt(2)
    atoms = [[root, root], [root, -root]]
    best = bayes_error(law, 5)
    assert bsoftmax_error(state(atoms), law, 5) == pytest.approx(best, abs=1e-7)
    assert bsoftmax_error(state(atoms + atoms), law, 5) == pytest.approx(best, abs=1e-7)
    uneven = bsoftmax_error(state([atoms[0], *atoms]), law, 5)
    assert uneven == pytest.approx(0.4054534, abs=1e-6) and uneven > best + 5e-3


def test_equal_heads_at_the_root_of_the_strength_know_one_feature():
    law = feature_law("flip", [2, 2])
    one = bayes_error(feature_law("flip", [2]), 5)
    assert equal_heads_error(math.sqrt(2), 0.0, law, 5) == pytest.approx(one, abs=1e-8)
    assert equal_heads_error(1.2, 0.0, law, 5) > one + 1e-3


KEYS = state([[1.2, 0.5], [1.1, -0.6]], [[0.2, -0.05], [-0.05, 0.25]])


@pytest.mark.parametrize(
    "kind, name", [("softmax", "flip"), ("bsoftmax", "flip"), ("softmax", "gauss")]
)
def test_quadratures_agree_with_samples(kind, name):
    law = feature_law(name, [2, 2])
    quadrature = softmax_error if kind == "softmax" else bsoftmax_error
    generator = torch.Generator().manual_seed(3)
    draws = torch.stack(
        [
            location_error(KEYS, symmetrised_samples(2**14, 5, 2, law, generator), kind)
            for _ in range(40)
        ]
    )
    error = float(draws.std()) / math.sqrt(40)
    assert quadrature(KEYS, law, 5) == pytest.approx(float(draws.mean()), abs=4 * error)
    assert error < 7e-4


def test_softmax_error_does_not_hang_on_its_grids():
    law = feature_law("flip", [2, 2])
    assert softmax_error(KEYS, law, 5, 24) == pytest.approx(softmax_error(KEYS, law, 5), abs=1e-9)


@pytest.mark.parametrize(
    "tokens, nu, average",
    [(3, 2, 0.01029), (4, 8, 0.000995), (5, 0.5, 0.06828), (5, 4, 0.009444), (10, 2, 0.04401)],
)
def test_split_average(tokens, nu, average):
    assert split_average(tokens, nu) == pytest.approx(average, rel=1e-3)


def test_two_tokens_never_split_and_no_spike_is_the_blind_point():
    assert split_average(2, 3.0) == pytest.approx(0, abs=1e-9)
    blind = 4 * 3 / 5**3  # (L - 1)(L - 2) / L^3
    assert split_average(5, 1e-9) == pytest.approx(blind, rel=1e-6)


def test_unspecialized_rate_is_an_eigenvalue_of_the_growth_matrix():
    law, root = feature_law("flip", [2, 2]), math.sqrt(2)
    equal = state([[root, 0.0], [root, 0.0]])
    generator, rates = torch.Generator().manual_seed(5), []
    for _ in range(30):
        matrix = growth_matrix(
            equal, 2.0, symmetrised_samples(4096, 5, 2, law, generator), "softmax"
        )
        rates.append(float(matrix[0, 0] - matrix[0, 1]))
    rates = torch.tensor(rates)
    error = float(rates.std()) / math.sqrt(30)
    assert unspecialized_rate(5, 2, 2.0, 2.0) == pytest.approx(float(rates.mean()), abs=4 * error)
    assert error < 3e-4
