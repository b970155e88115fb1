r"""The covariance of two heads as a function of the angles between their subspaces.

Tokens `X ~ N(0, I_d)`, Gaussian kernels of bandwidth h on the subspaces `U_g`, `U_h`. To first
order in 1/n the noise covariance of two heads is `(sigma^2/n) R_gh(x)`, where
`R_gh = E[K_g K_h]/(E K_g E K_h)` is the *kernel overlap*. It depends on the cosines `c_j` of the
principal angles and on the coordinates of the query in the two subspaces. `s2 = 1 + h^2`.
"""

from __future__ import annotations

import numpy as np
import torch

from .diversity import require_heads, require_orthonormal
from .numerics.quadrature import gauss_hermite, gauss_legendre
from .validation import require_finite, require_positive


def require_cosines(cosines) -> torch.Tensor:
    """The cosines as a float64 tensor; ValueError unless they lie in [0, 1]."""
    cosines = torch.as_tensor(cosines, dtype=torch.float64)
    require_finite("cosines", cosines)
    low, high = float(cosines.min()), float(cosines.max())
    if low < 0 or high > 1:
        wrong = low if low < 0 else high
        raise ValueError(f"cosines with entry {wrong!r}: expected values in [0, 1]")
    return cosines


def require_query_scale(bandwidth, tau) -> None:
    """Raise unless `tau^2 < s2 (s2 + 1)/2`, without which the overlap has no mean."""
    require_positive("bandwidth", bandwidth)
    require_positive("tau", tau)
    s2 = 1 + torch.as_tensor(bandwidth, dtype=torch.float64) ** 2
    limit = s2 * (s2 + 1) / 2
    if bool((torch.as_tensor(tau, dtype=torch.float64) ** 2 >= limit).any()):
        raise ValueError(f"tau={tau}: expected tau^2 < s2 (s2 + 1)/2 = {float(limit.min()):.4g}")


def mehler(r, a, b) -> torch.Tensor:
    r"""Ratio of a Gaussian pair's density to the product of its margins, over coordinates: (...).

    `prod_j (1 - r_j^2)^(-1/2) exp((r_j a_j b_j - r_j^2 (a_j^2 + b_j^2)/2)/(1 - r_j^2))` for unit
    variances and correlations `r (..., k)` at the points a, b (..., k). Source: ensemble.T5.

    >>> mehler(torch.tensor([0.6]), torch.zeros(1), torch.zeros(1))
    tensor(1.2500)
    """
    rest = 1 - r.square()
    exponent = r * a * b - r.square() * (a.square() + b.square()) / 2
    return (exponent / rest - rest.log() / 2).sum(-1).exp()


def kernel_overlap_gaussian(cosines, bandwidth, a=None, b=None) -> torch.Tensor:
    r"""`R(x)` of two heads with principal cosines `(..., k)`: (...), float64.

    a, b (..., k): coordinates of the query along the principal vectors of either head, zero by
    default. `mehler(c/s2, a/sqrt(s2), b/sqrt(s2))`. Raises ValueError for cosines outside [0, 1]
    and bandwidth <= 0. Source: ensemble.T5.

    >>> kernel_overlap_gaussian([1.0], 0.5).round(decimals=4)  # (1 - s2^-2)^(-1/2)
    tensor(1.6667, dtype=torch.float64)
    """
    cosines = require_cosines(cosines)
    require_positive("bandwidth", bandwidth)
    s2 = 1 + bandwidth**2
    zero = torch.zeros_like(cosines)
    a, b = (zero if part is None else part / s2**0.5 for part in (a, b))
    return mehler(cosines / s2, a, b)


def overlap_bracket(cos2, bandwidth, tau) -> torch.Tensor:
    r"""`B(u) = (1 - tau^2 u/s2^2)^2 - u (1/s2 - tau^2/s2^2)^2`, u a squared cosine, elementwise.

    `B(u)^(-1/2)` is the mean overlap of two lines, over queries `x ~ N(0, tau^2 I)`. Raises
    ValueError where it has no mean. Source: ensemble.T5.

    >>> overlap_bracket(0.0, 0.5, 0.5)
    tensor(1., dtype=torch.float64)
    """
    require_query_scale(bandwidth, tau)
    u, s2 = torch.as_tensor(cos2, dtype=torch.float64), 1 + bandwidth**2
    pull = (tau / s2) ** 2
    return (1 - pull * u).square() - u * (1 / s2 - pull) ** 2


def kernel_overlap_gaussian_mean(cosines, bandwidth, tau) -> torch.Tensor:
    r"""Mean of `R(x)` over queries `x ~ N(0, tau^2 I)`: `prod_j B(c_j^2)^(-1/2)`, (...), float64.

    cosines (..., k). Increases in every cosine. Raises ValueError for cosines outside [0, 1],
    bandwidth or tau <= 0, and tau^2 >= s2 (s2 + 1)/2. Source: ensemble.T5.

    >>> kernel_overlap_gaussian_mean(np.cos(np.radians([40.0])), 0.5, 0.5).round(decimals=5)
    tensor(1.3123, dtype=torch.float64)
    """
    cosines = require_cosines(cosines)
    return overlap_bracket(cosines.square(), bandwidth, tau).prod(-1).rsqrt()


def head_correlation_at_origin(angles, bandwidth) -> torch.Tensor:
    r"""Correlation of two heads' noise at x = 0: `prod_j sqrt((s2^2 - 1)/(s2^2 - cos^2 theta_j))`.

    angles (..., k) in radians -> (...), float64. Raises ValueError for bandwidth <= 0.
    Source: ensemble.T5.

    >>> head_correlation_at_origin([np.pi / 2], 0.5).round(decimals=4)
    tensor(0.6000, dtype=torch.float64)
    """
    require_positive("bandwidth", bandwidth)
    angles = torch.as_tensor(angles, dtype=torch.float64)
    least = (1 + bandwidth**2) ** 2 - 1
    return (least / (least + angles.sin().square())).prod(-1).sqrt()


def pair_cosines(bases: torch.Tensor) -> torch.Tensor:
    """Cosines of the principal angles of all pairs of heads: (..., H, d, k) -> (..., H, H, k).

    Singular values of `U_g^T U_h`, descending, at most 1. Raises ValueError unless the bases are
    orthonormal.

    >>> pair_cosines(torch.tensor([[[1.0], [0.0]], [[0.6], [0.8]]])).squeeze(-1)
    tensor([[1.0000, 0.6000],
            [0.6000, 1.0000]])
    """
    require_heads("bases", bases, least=1)
    require_orthonormal("bases", bases)
    return torch.linalg.svdvals(bases.unsqueeze(-3).mT @ bases.unsqueeze(-4)).clamp(max=1)


def head_overlap(bases, x, bandwidth, covariance=None) -> torch.Tensor:
    r"""`R_gh(x)` of all pairs of heads: bases (..., H, d, k), x (n_q, d) -> (..., n_q, H, H).

    For tokens `X ~ N(0, S)`, S = `covariance (d, d)` or the identity: `mehler` at the singular
    values of `(U_g^T S U_g + h^2)^(-1/2) U_g^T S U_h (U_h^T S U_h + h^2)^(-1/2)` (regularised
    canonical correlations), with one decomposition for all queries. Raises ValueError unless the
    bases are orthonormal and bandwidth > 0. Source: ensemble.T5.

    >>> lines = torch.tensor([[[1.0], [0.0]], [[0.0], [1.0]]])
    >>> head_overlap(lines, torch.zeros(1, 2), 0.5)
    tensor([[[1.6667, 1.0000],
             [1.0000, 1.6667]]])
    """
    require_heads("bases", bases, least=1)
    require_orthonormal("bases", bases)
    require_positive("bandwidth", bandwidth)
    spread = bases if covariance is None else covariance @ bases
    noise = bandwidth**2 * torch.eye(bases.shape[-1], dtype=bases.dtype, device=bases.device)
    values, vectors = torch.linalg.eigh(bases.mT @ spread + noise)
    whiten = vectors * values.rsqrt().unsqueeze(-2) @ vectors.mT  # (..., H, k, k)
    seen = bases @ whiten  # a smoothed coordinate U_h^T (X + noise) has unit variance here
    cross = seen.unsqueeze(-3).mT @ (spread @ whiten).unsqueeze(-4)
    left, r, right = torch.linalg.svd(cross)
    place = (x @ seen).movedim(-3, -2)  # (..., n_q, H, k)
    a = place[..., :, None, None, :] @ left.unsqueeze(-5)
    b = place[..., None, :, None, :] @ right.mT.unsqueeze(-5)
    return mehler(r.unsqueeze(-4), a.squeeze(-2), b.squeeze(-2))


def covariance_envelopes(hdi, d_head: int, bandwidth, tau):
    r"""The least and the largest mean noise covariance of heads with a given diversity.

    `R(1 - HDI)^d_k <= (n/sigma^2) mean covariance of two heads <= HDI + (1 - HDI) R(1)^d_k`, with
    `R(u) = B(u)^(-1/2)`, averaged over queries `x ~ N(0, tau^2 I)`; HDI is the subspace index.
    Sharp: below, all angles of all pairs are equal; above, each pair is aligned or orthogonal.
    Raises ValueError unless 0 <= hdi <= 1, and as `overlap_bracket`. Source: ensemble.X3.

    >>> [round(float(end), 4) for end in covariance_envelopes(2 / 3, 1, 0.3, 0.5)]
    [1.1969, 1.6149]
    """
    hdi = torch.as_tensor(hdi, dtype=torch.float64)
    low, high = float(hdi.min()), float(hdi.max())
    if low < 0 or high > 1:
        raise ValueError(f"hdi={low if low < 0 else high!r}: expected values in [0, 1]")
    aligned = overlap_bracket(1.0, bandwidth, tau) ** (-d_head / 2)
    return overlap_bracket(1 - hdi, bandwidth, tau) ** (-d_head / 2), hdi + (1 - hdi) * aligned


def line_overlap_mean(kernel, reach: float, cosine: float, tau: float, num_nodes=40) -> float:
    r"""Mean overlap of two one-dimensional heads with any kernel on [-reach, reach].

    Tokens N(0, I), queries `x ~ N(0, tau^2 I)`; `kernel` maps arrays of distances to weights. Four
    nested Gauss rules: over the two coordinates of the query, and over those of a token within
    reach of it. Raises ValueError unless -1 < cosine < 1, reach > 0 and tau > 0.
    Source: ensemble.T5.

    >>> round(line_overlap_mean(np.ones_like, 0.6, np.cos(np.radians(40)), 0.5), 3)
    1.407
    """
    require_positive("reach", reach)
    require_positive("tau", tau)
    if not -1 < cosine < 1:
        raise ValueError(f"cosine={cosine}: expected a value in (-1, 1)")
    sine = (1 - cosine**2) ** 0.5
    nodes, weights = gauss_hermite(num_nodes)
    unit, share = gauss_legendre(num_nodes)
    offset = reach * (2 * unit - 1)
    mass = share * kernel(offset)
    first = tau * nodes[:, None]  # coordinates of the query in the two heads
    second = cosine * first + tau * sine * nodes
    near_first, near_second = first[..., None] + offset, second[..., None] + offset
    density = np.exp(-(near_first**2) / 2) * mass, np.exp(-(near_second**2) / 2) * mass
    r = cosine
    cross = near_first[..., :, None] * near_second[..., None, :]
    squares = near_first[..., :, None] ** 2 + near_second[..., None, :] ** 2
    joint = np.exp((r * cross - r**2 * squares / 2) / sine**2) / sine
    overlap = np.einsum("qi,qpj,qpij->qp", density[0][:, 0], density[1], joint)
    overlap /= density[0].sum(-1) * density[1].sum(-1)
    return float(weights @ overlap @ weights)
