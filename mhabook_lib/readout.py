"""A linear readout on frozen attention features: ridge error and the budget of parameters."""

from __future__ import annotations

import numpy as np
import torch

from .attention_spectra import output_gram
from .curve_law import CurveLaw
from .numerics.linalg import wishart_factor
from .validation import require_count, require_finite, require_positive


def ridge_coefficient_error(law: CurveLaw, gamma_o, lam, sigma2) -> np.ndarray:
    """Limiting error of the ridge estimate of a readout, `E|v - v_0|^2`.

    `1 - w/gamma_o + (lam/gamma_o - sigma^2) w'(lam)` with the degrees of freedom w of the mean-one
    law. Teacher `v_0 ~ N(0, I/d_o)`, labels `y = sqrt(n) F v_0 + noise` of variance sigma2, and v
    minimises `|F v - y/sqrt(n)|^2 + lam |v|^2`. Raises ValueError unless gamma_o, lam > 0 and
    sigma2 >= 0. Source: gaussian_equivalence.P5.
    """
    require_positive("gamma_o", gamma_o)
    _require_noise(sigma2)
    lam, gamma_o = np.asarray(lam, dtype=float), np.asarray(gamma_o, dtype=float)
    slope = law.dof_derivative(lam)
    return 1 - law.dof(lam) / gamma_o + (lam / gamma_o - np.asarray(sigma2)) * slope


def ridge_coefficient_error_empirical(
    eigenvalues: torch.Tensor, d_out: int, lam: float, sigma2: float
) -> torch.Tensor:
    """The same error at finite size, averaged exactly over teacher and noise: (...).

    eigenvalues (..., n) of `F F^T`, zeros included, F with d_out columns:
    `1 - n/d_out + sum_i (lam^2/d_out + sigma^2 x_i/n) / (x_i + lam)^2`. Raises ValueError unless
    lam > 0, sigma2 >= 0 and d_out >= 1. Source: gaussian_equivalence.P5.

    >>> float(ridge_coefficient_error_empirical(torch.tensor([1.0, 1.0]), 2, 1.0, 0.0))
    0.25
    """
    require_positive("lam", lam)
    require_count("d_out", d_out)
    _require_noise(sigma2)
    n = eigenvalues.shape[-1]
    bias, variance = lam**2 / d_out, sigma2 * eigenvalues / n
    return 1 - n / d_out + ((bias + variance) / (eigenvalues + lam).square()).sum(-1)


def parameter_count(d, num_heads, kv_heads, d_k, d_v, d_out, tied: bool = False):
    """Weights of a multi-head layer: `d H d_k + d H_kv (d_k + d_v) + H d_v d_out`.

    With `tied` values there is no value matrix. Source: gaussian_equivalence.F3a.

    >>> parameter_count(768, 12, 12, 64, 64, 768)
    2359296
    """
    shared = d_k if tied else d_k + d_v
    return d * num_heads * d_k + d * kv_heads * shared + num_heads * d_v * d_out


def readout_gram(outputs: torch.Tensor, d_out: int, rng: np.random.Generator) -> torch.Tensor:
    """`O O^T` (..., n, n) for `O = C G / sqrt(m)`, C (..., n, m), G (m, d_out) normal.

    Exact in law: G G^T is a Wishart matrix, and its triangular factor is drawn on the smaller
    side, m or n, so that the cost does not depend on d_out. Raises ValueError unless d_out >= 1.
    Source: gaussian_equivalence.P4 (algorithm).

    >>> readout_gram(torch.ones(3, 2), 5, np.random.default_rng(0)).shape
    torch.Size([3, 3])
    """
    require_count("d_out", d_out)
    n, width = outputs.shape[-2:]
    if width >= n:
        return output_gram(outputs @ outputs.mT, d_out, width, rng)
    factor = wishart_factor(width, d_out, rng, tuple(outputs.shape[:-2])).to(outputs)
    projected = outputs @ factor / width**0.5
    return projected @ projected.mT


def _require_noise(sigma2) -> None:
    require_finite("sigma2", sigma2)
    if np.any(np.asarray(sigma2) < 0):
        raise ValueError(f"sigma2={sigma2!r}: expected a variance >= 0")
