"""readout: the ridge error against explicit regressions, and its limit against random matrices."""

import numpy as np
import pytest
import torch

from mhabook_lib.exp_features import exp_feature_coefficients
from mhabook_lib.readout import (
    parameter_count,
    readout_gram,
    ridge_coefficient_error,
    ridge_coefficient_error_empirical,
)
from mhabook_lib.spectral_laws import SpectralLaw, TiedSpectralLaw

C = exp_feature_coefficients(1.0).fraction


@pytest.mark.parametrize("d_out", [5, 12])
def test_explicit_regressions(d_out):
    rng, n, lam, sigma2 = np.random.default_rng(0), 8, 0.3, 0.4
    f = rng.standard_normal((n, d_out)) / np.sqrt(n)
    eigenvalues = torch.from_numpy(np.linalg.eigvalsh(f @ f.T)).clamp_min(0)
    solve = np.linalg.solve(f.T @ f + lam * np.eye(d_out), f.T)
    v0 = rng.standard_normal((40_000, d_out)) / np.sqrt(d_out)
    noise = np.sqrt(sigma2 / n) * rng.standard_normal((40_000, n))
    errors = np.square((v0 @ f.T + noise) @ solve.T - v0).sum(1)
    expected = float(ridge_coefficient_error_empirical(eigenvalues, d_out, lam, sigma2))
    assert abs(errors.mean() - expected) < 4 * errors.std() / np.sqrt(len(errors))


def test_limit_of_random_features():
    n, d_out, lam, sigma2 = 1000, 500, 0.05, 0.2
    f = torch.from_numpy(np.random.default_rng(1).standard_normal((n, d_out))) / d_out**0.5
    eigenvalues = torch.linalg.eigvalsh(f @ f.T).clamp_min(0)
    law = SpectralLaw(0.0, 1.0, (d_out / n,))
    measured = float(ridge_coefficient_error_empirical(eigenvalues, d_out, lam, sigma2))
    assert abs(ridge_coefficient_error(law, d_out / n, lam, sigma2) / measured - 1) < 0.01


def test_closed_values():
    h = np.array([16, 24, 32, 40, 64, 96, 120.0])
    law = SpectralLaw(C, h / 64, (h, h / 64, 0.5))
    known = [0.52272, 0.37238, 2.85103, 0.32076, 0.11814, 0.08403, 0.07472]
    assert np.allclose(ridge_coefficient_error(law, 0.5, 1e-4, 0.1), known, atol=6e-6)
    h = np.array([2, 4, 8, 16, 32.0])
    tied = ridge_coefficient_error(TiedSpectralLaw(C, 0.5, h, 0.5), 0.5, 1e-4, 0.1)
    assert np.allclose(tied, [3.74589, 3.07496, 2.75856, 2.60550, 2.53033], atol=6e-6)


def test_no_data_and_no_penalty():
    law = SpectralLaw(C, 1.0, (8.0, 2.0, 3.0))
    assert abs(ridge_coefficient_error(law, 3.0, 1e8, 0.0) - 1) < 1e-6  # v = 0
    assert abs(ridge_coefficient_error(law, 3.0, 1e-8, 0.0) - 2 / 3) < 1e-6  # n of d_out known


@pytest.mark.parametrize(("width", "d_out"), [(3, 6), (3, 2), (9, 6), (9, 2)])
def test_readout_gram_has_the_law_of_the_product(width, d_out):
    rng = np.random.default_rng(2)
    outputs = torch.from_numpy(rng.standard_normal((5, width))).expand(20_000, 5, width)
    ours = readout_gram(outputs, d_out, rng)
    weights = torch.from_numpy(rng.standard_normal((20_000, width, d_out))) / width**0.5
    plain = (outputs @ weights) @ (outputs @ weights).mT
    for power in (ours, plain), (ours @ ours, plain @ plain):
        traces = [g.diagonal(dim1=-2, dim2=-1).sum(-1) for g in power]
        error = sum(t.var() / len(t) for t in traces) ** 0.5
        assert abs(traces[0].mean() - traces[1].mean()) < 4 * error
    assert int(torch.linalg.matrix_rank(ours[0], rtol=1e-9)) == min(5, width, d_out)


def test_parameter_count():
    assert parameter_count(768, 12, 12, 64, 64, 768) == 4 * 768**2
    untied, tied = (parameter_count(512, 8, 2, 64, 64, 512, tied=t) for t in (False, True))
    assert untied - tied == 512 * 2 * 64


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ridge_coefficient_error(SpectralLaw(C, 1.0), 0.0, 0.1, 0.1), "gamma_o=0.0"),
        (lambda: ridge_coefficient_error(SpectralLaw(C, 1.0), 1.0, -0.1, 0.1), "lam=-0.1"),
        (lambda: ridge_coefficient_error(SpectralLaw(C, 1.0), 1.0, 0.1, -0.1), "sigma2=-0.1"),
        (lambda: readout_gram(torch.ones(3, 2), 0, np.random.default_rng(0)), "d_out=0"),
        (lambda: ridge_coefficient_error_empirical(torch.ones(3), 0, 0.1, 0.1), "d_out=0"),
        (lambda: ridge_coefficient_error_empirical(torch.ones(3), 2, 0.0, 0.1), "lam=0.0"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()
