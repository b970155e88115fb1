"""Gaussian equivalence: exact-in-law sampling and explicit curves against the plain way.

Errors are relative distances from a reference that is named at each task.
"""

from __future__ import annotations

import mpmath
import numpy as np
import torch
from scipy.optimize import brentq

from mhabook_lib.attention_spectra import (
    centered_attention_gram,
    output_gram,
    sample_qkv,
    spectrum,
)
from mhabook_lib.exp_features import exp_feature_coefficients
from mhabook_lib.free_probability import s_transform_affine_mp
from mhabook_lib.numerics.linalg import lanczos_quadrature, random_orthonormal
from mhabook_lib.spectral_laws import SpectralLaw

from .timing import largest_gaps, row

C = exp_feature_coefficients(1.0).fraction

# The plain ways


def dense_layer_spectrum(x, num_heads, width, rng):
    """Squared singular values of a centred layer: weights drawn, X multiplied, W_O applied, SVD."""
    n, d = x.shape
    outputs = []
    for _ in range(num_heads):
        w_q, w_k, w_v = torch.from_numpy(rng.standard_normal((3, d, width)) / d**0.5)
        scores = (x @ w_q) @ (x @ w_k).T / width**0.5
        outputs.append((torch.softmax(scores, dim=-1) - 1 / n) @ (x @ w_v))
    joined = torch.cat(outputs, dim=-1)
    w_out = torch.from_numpy(rng.standard_normal((joined.shape[1], d)))
    return torch.linalg.svdvals(joined @ w_out / joined.shape[1] ** 0.5).square()


def mean_row_variance(n, width, rng, rows=40_000):
    """`n E sum_j A_ij^2 - 1` by sampling rows: given the query, n independent scores."""
    scale = np.sqrt(rng.chisquare(width, rows) / width)
    weights = np.exp(scale[:, None] * rng.standard_normal((rows, n)))
    return n * np.mean(np.square(weights).sum(1) / np.square(weights.sum(1))) - 1


def gaver_stehfest(transform, t, terms, digits):
    """Laplace inversion on the real axis; its weights alternate and grow, hence the digits."""
    with mpmath.workdps(digits):
        half, total = terms // 2, mpmath.mpf(0)
        for k in range(1, terms + 1):
            weight = sum(
                mpmath.mpf(j) ** half
                * mpmath.factorial(2 * j)
                / mpmath.factorial(half - j)
                / mpmath.factorial(j)
                / mpmath.factorial(j - 1)
                / mpmath.factorial(k - j)
                / mpmath.factorial(2 * j - k)
                for j in range((k + 1) // 2, min(k, half) + 1)
            )
            total += (-1) ** (half + k) * weight * transform(k * mpmath.log(2) / t)
        return float(total * mpmath.log(2) / t)


def precise_dof(lam, c, gamma_k, factors):
    """w(lam) in the working precision: a secant from the float64 root of the scalar equation."""

    def excess(w):
        u = c * w / gamma_k
        inverse_s = (1 - u + mpmath.sqrt((1 + u) ** 2 - 4 * c * u)) / 2
        product = mpmath.mpf(1)
        for a in (1.0, *factors):
            product *= 1 - w / a
        return product * inverse_s - lam * w

    start = float(SpectralLaw(c, gamma_k, factors).dof(float(lam)))
    return mpmath.findroot(excess, (mpmath.mpf(start), mpmath.mpf(start) * (1 - 1e-9)))


def dof_by_brent(lam, c, gamma_k, factors):
    """w(lam) of one law at one point: a bracketing root finder on the scalar equation."""

    def excess(w):
        product = np.prod([1 - w / a for a in (1.0, *factors)])
        return product / s_transform_affine_mp(-w, c, gamma_k) - lam * w

    top = min(1.0, *factors)
    return brentq(excess, 0.0, top * (1 - 1e-15), xtol=1e-14, rtol=1e-14)


# The tasks


def exact_sampler(n: int, d: int, num_heads: int, width: int) -> dict:
    """Reference: the mean eigenvalue `d/n * m_1(n)`, m_1 from 40 000 independent rows."""
    rng = np.random.default_rng(1)
    x = random_orthonormal((d, n), rng).T * d**0.5
    mean = d / n * mean_row_variance(n, width, rng)

    def ours():
        q, k, v = sample_qkv(n, num_heads, width, width, rng)
        gram = centered_attention_gram(q, k, v, beta=1.0)
        return spectrum(output_gram(gram, d, num_heads * width, rng))

    return row(
        "gaussian_equivalence",
        "one draw of the output spectrum, exact in law",
        f"n={n}, d={d}, H={num_heads}, d_k={width}",
        "dense layer and SVD",
        ours,
        lambda: dense_layer_spectrum(x, num_heads, width, rng),
        lambda *spectra: [abs(float(e.mean()) / mean - 1) for e in spectra],
        repeats=3,
    )


def learning_curve_by_inversion() -> dict:
    """Reference: Gaver-Stehfest with 48 terms at 130 digits."""
    factors, times = (64.0, 1.0, 2.0), np.geomspace(0.3, 30, 60)
    law = SpectralLaw(C, 1.0, factors)

    def stehfest(terms, digits):
        def transform(s):
            return (1 - precise_dof(s / 2, C, 1.0, factors)) / s

        return np.array([gaver_stehfest(transform, t, terms, digits) for t in times])

    return row(
        "gaussian_equivalence",
        "learning curve from its Laplace transform",
        "60 times, H=64",
        "Gaver-Stehfest, 40 terms at 110 digits",
        lambda: law.training_loss(times),
        lambda: stehfest(40, 110),
        largest_gaps(stehfest(48, 130)),
        repeats=1,
    )


def map_of_degrees_of_freedom() -> dict:
    """Errors: the residual of the scalar equation, relative to `lam w`."""
    h = np.geomspace(1, 128, 60)[:, None]
    gamma_o = np.linspace(0.2, 3, 50)
    shape = np.broadcast_shapes(h.shape, gamma_o.shape)
    law = SpectralLaw(C, h / 64, (h, h / 64, gamma_o))
    points = [a.ravel() for a in np.broadcast_arrays(h, gamma_o)]

    def one_by_one():
        found = [
            dof_by_brent(0.01, C, h / 64, (h, h / 64, o)) for h, o in zip(*points, strict=True)
        ]
        return np.reshape(found, shape)

    def residual(w):
        product = (1 - w) * (1 - w / h) * (1 - 64 * w / h) * (1 - w / gamma_o)
        wanted = product / s_transform_affine_mp(-w, C, h / 64)
        return np.abs(wanted / (0.01 * w) - 1).max()

    return row(
        "gaussian_equivalence",
        "degrees of freedom over a map of heads and widths",
        "3000 laws",
        "Brent, one law at a time",
        lambda: law.dof(0.01),
        one_by_one,
        lambda ours, other: (residual(ours), residual(other)),
        repeats=3,
    )


def learning_curve_of_one_target(n: int = 1024) -> dict:
    """Reference: the other way, the full eigendecomposition."""
    rng = np.random.default_rng(2)
    q, k, _ = sample_qkv(n, 4, n // 4, 1, rng)
    gram = centered_attention_gram(q, k, beta=1.0) / np.expm1(1.0)
    target = torch.from_numpy(rng.standard_normal(n))
    times = torch.logspace(-1, 2, 50, dtype=torch.float64)

    def by_lanczos():
        nodes, weights = lanczos_quadrature(lambda v: (gram @ v.mT).mT, target[None], 60)
        return torch.exp(-2 * times[:, None] * nodes[0]) @ weights[0]

    def by_eigenvectors():
        x, vectors = torch.linalg.eigh(gram)
        shares = (vectors.T @ target).square() / (target @ target)
        return torch.exp(-2 * times[:, None] * x) @ shares

    return row(
        "gaussian_equivalence",
        "learning curve of one target, 60 Lanczos steps",
        f"n={n}, 50 times",
        "all eigenvectors",
        by_lanczos,
        by_eigenvectors,
        largest_gaps(by_eigenvectors()),
        repeats=3,
    )


def rows() -> list[dict]:
    """All comparisons of this chapter."""
    return [
        exact_sampler(256, 2048, 16, 64),
        exact_sampler(256, 4096, 24, 64),
        learning_curve_by_inversion(),
        map_of_degrees_of_freedom(),
        learning_curve_of_one_target(),
    ]
