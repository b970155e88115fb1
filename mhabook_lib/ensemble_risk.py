r"""The mean squared error of an ensemble of kernel regressions, without simulating it.

Tokens `x_i ~ N(0, I_d)`, values `y_i = m(x_i) + noise` with variance sigma2, H heads with
orthonormal bases `U_h (d, d_k)` and projectors `P_h`, Gaussian kernels of bandwidth h, n keys.
Errors are `E (mhat(x) - m(x))^2`; closed forms are exact to the order 1/n. `s2 = 1 + h^2`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from .diversity import require_heads, require_orthonormal
from .head_covariance import ErrorParts, bias_variance_covariance
from .kernel_overlap import head_overlap, overlap_bracket, pair_cosines
from .nadaraya_watson import WEIGHTS_AT_ONCE, average_weights
from .validation import require_count, require_positive


@dataclass(frozen=True)
class LinearTarget:
    """`m(x) = <coef, x>`, coef (d,)."""

    coef: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.coef

    def moments(self, mean, covariance):
        """`E m` and `E m^2` under N(mean (..., d), covariance (..., d, d)): two tensors (...)."""
        first = self(mean)
        return first, first.square() + (covariance @ self.coef) @ self.coef

    def projection_error(self, bases, weights) -> LinearTarget:
        """`sum_h a_h E[m | U_h^T X] - m` for X ~ N(0, I), as a target."""
        seen = (bases @ (bases.mT @ self.coef).unsqueeze(-1)).squeeze(-1)
        return LinearTarget(weights @ seen - self.coef)


@dataclass(frozen=True)
class SinusoidTarget:
    """`m(x) = sum_k amplitude_k sin(<frequency_k, x> + phase_k)`; (K,), (K, d), (K,)."""

    amplitude: torch.Tensor
    frequency: torch.Tensor
    phase: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x @ self.frequency.mT + self.phase) @ self.amplitude

    def moments(self, mean, covariance):
        """`E m` and `E m^2` under N(mean (..., d), covariance (..., d, d)): two tensors (...).

        `E sin(w.X + p) = exp(-w.C w/2) sin(w.mean + p)`; products of sines are sums of cosines.
        """
        turn = mean @ self.frequency.mT + self.phase  # (..., K)
        gram = self.frequency @ covariance @ self.frequency.mT  # (..., K, K)
        spread = gram.diagonal(dim1=-2, dim2=-1)
        first = (-spread / 2).exp() * turn.sin() @ self.amplitude
        both = spread.unsqueeze(-1) + spread.unsqueeze(-2)
        left, right = turn.unsqueeze(-1), turn.unsqueeze(-2)
        near = (gram - both / 2).exp() * (left - right).cos()
        far = (-gram - both / 2).exp() * (left + right).cos()
        return first, ((near - far) / 2 @ self.amplitude) @ self.amplitude

    def projection_error(self, bases, weights) -> SinusoidTarget:
        """`sum_h a_h E[m | U_h^T X] - m` for X ~ N(0, I), as a target."""
        seen = self.frequency @ bases @ bases.mT  # (H, K, d)
        lost = (self.frequency - seen).square().sum(-1)
        damped = weights.unsqueeze(-1) * (-lost / 2).exp() * self.amplitude
        return SinusoidTarget(
            torch.cat([damped.flatten(), -self.amplitude]),
            torch.cat([seen.flatten(0, 1), self.frequency]),
            self.phase.repeat(len(bases) + 1),
        )


def population_bias2(bases, target, weights=None):
    r"""`E bias^2` and `Var m` for n to infinity, then h to zero, queries X ~ N(0, I).

    Then head h answers `E[m | U_h^T X]`, and the bias of `sum_h a_h E[m | U_h^T X]` has a closed
    second moment. bases (H, d, d_k), weights (H,), by default 1/H. Raises ValueError unless the
    bases are orthonormal. Source: ensemble.T8.

    >>> lines = torch.eye(2).unsqueeze(-1)  # two orthogonal lines
    >>> population_bias2(lines, LinearTarget(torch.tensor([3.0, 4.0])))
    (tensor(6.2500), tensor(25.))
    """
    require_heads("bases", bases, least=1)
    require_orthonormal("bases", bases)
    num_heads, d_model, _ = bases.shape
    weights = bases.new_full((num_heads,), 1 / num_heads) if weights is None else weights
    law = bases.new_zeros(d_model), torch.eye(d_model, dtype=bases.dtype, device=bases.device)
    first, second = target.moments(*law)
    return target.projection_error(bases, weights).moments(*law)[1], second - first.square()


@dataclass(frozen=True)
class HeadMoments:
    """First-order moments of the heads at queries: each (..., n_q, H), `covariance` (..., H, H).

    `bias`: limit of the head minus m(x); `shift`: its correction of order 1/n.
    """

    bias: torch.Tensor
    shift: torch.Tensor
    covariance: torch.Tensor

    def ensemble(self, weights=None) -> ErrorParts:
        """Error of `sum_h a_h mhat_h` at every query, in its three parts (..., n_q)."""
        return bias_variance_covariance(self.bias + self.shift, self.covariance, weights)


def tilted_law(bases, x, bandwidth):
    """Tokens N(0, I) weighted by the kernels of two heads are normal: means and covariances.

    `L = (I + (P_g + P_h)/h^2)^-1` (..., H, H, d, d) and `L (P_g + P_h) x/h^2` (..., n_q, H, H, d),
    for bases (..., H, d, k) and x (n_q, d).

    >>> mean, covariance = tilted_law(torch.ones(1, 1, 1), torch.ones(1, 1), 1.0)
    >>> mean, covariance
    (tensor([[[[0.6667]]]]), tensor([[[[0.3333]]]]))
    """
    projectors = bases @ bases.mT
    precision = (projectors.unsqueeze(-3) + projectors.unsqueeze(-4)) / bandwidth**2
    identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    covariance = torch.linalg.inv(identity + precision)
    pull = identity - covariance  # = L (P_g + P_h)/h^2, symmetric
    mean = x @ pull.flatten(-4, -2).mT  # (..., n_q, H H d)
    return mean.unflatten(-1, pull.shape[-4:-1]), covariance


def gaussian_head_moments(bases, x, bandwidth, target, sigma2, n) -> HeadMoments:
    r"""Bias, its correction and the covariance of all heads at the queries x, to the order 1/n.

    With `mbar_h` the mean of m under the kernel of head h, E_gh under those of g and h, and R_gh
    the kernel overlap: `bias = mbar_h - m(x)`, `shift = -(R_hh/n)(E_hh m - mbar_h)`,
    `C_gh = (R_gh/n)(sigma2 + E_gh (m - mbar_g)(m - mbar_h))`. bases (..., H, d, k), x (n_q, d).

    Raises ValueError unless the bases are orthonormal, bandwidth > 0, sigma2 >= 0 and n >= 1.
    Source: ensemble.P2.

    >>> one = torch.ones(1, 1, 1, dtype=torch.float64)
    >>> line = LinearTarget(one[0, 0])
    >>> parts = gaussian_head_moments(torch.cat([one, one]), 1.5 * one[0], 0.5, line, 0.0, 100)
    >>> [round(float(part[0, 0]), 5) for part in (parts.bias, parts.shift)]
    [-0.3, -0.00495]
    """
    require_count("n", n)
    if sigma2 < 0:
        raise ValueError(f"sigma2={sigma2}: expected a value >= 0")
    overlap = head_overlap(bases, x, bandwidth)
    mean, covariance = tilted_law(bases, x, bandwidth)
    first, second = target.moments(mean, covariance.unsqueeze(-5))
    projectors = bases @ bases.mT
    shrink = 1 / (1 + bandwidth**2)
    identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    alone = ((x @ projectors) * shrink).movedim(-3, -2)  # one kernel: mean (..., n_q, H, d)
    limit, _ = target.moments(alone, (identity - shrink * projectors).unsqueeze(-4))
    product = limit.unsqueeze(-1) * limit.unsqueeze(-2)
    spread = second - (limit.unsqueeze(-1) + limit.unsqueeze(-2)) * first + product
    shift = -(overlap * (first - limit.unsqueeze(-1))).diagonal(dim1=-2, dim2=-1) / n
    return HeadMoments(limit - target(x).unsqueeze(-1), shift, overlap * (sigma2 + spread) / n)


def conditional_mse(weights, m_train, m_query, sigma2) -> torch.Tensor:
    """Error given the tokens, noise integrated: `(<w, m(X)> - m(x))^2 + sigma2 |w|^2`, (..., n_q).

    weights (..., n_q, n): the row of the whole ensemble, `sum_h a_h w^h`; m_train (..., n) and
    m_query (..., n_q): the target without noise. Raises ValueError for shapes that do not fit.
    Source: ensemble.T4.

    >>> conditional_mse(torch.tensor([[0.5, 0.5]]), torch.tensor([0.0, 4.0]), torch.ones(1), 1.0)
    tensor([1.5000])
    """
    if m_train.shape[-1] != weights.shape[-1] or m_query.shape[-1] != weights.shape[-2]:
        raise ValueError(
            f"weights of shape {tuple(weights.shape)}, m_train of shape {tuple(m_train.shape)}, "
            f"m_query of shape {tuple(m_query.shape)}: expected (..., n_q, n), (..., n), (..., n_q)"
        )
    mean = (weights @ m_train.unsqueeze(-1)).squeeze(-1)
    return (mean - m_query).square() + sigma2 * weights.square().sum(-1)


class EnsembleDraws(NamedTuple):
    """What the average of the heads made of simulated tokens, each (designs, n_q, ...).

    `mean`: the average of the values under the ensemble's row; `weight_sq`: `|wbar|^2`.
    """

    mean: torch.Tensor
    weight_sq: torch.Tensor


def draw_ensemble(
    bases, x, bandwidth, n, designs, rng: np.random.Generator, values
) -> EnsembleDraws:
    """Simulate the average of the heads at the queries on fresh tokens N(0, I), without noise.

    bases (H, d, k), x (n_q, d), `values` a function of tokens (..., n, d) -> (..., n, c); the means
    are (designs, n_q, c). Label noise of variance s adds `s weight_sq` to the variance, exactly,
    so it is never drawn. Source: ensemble.T4.

    >>> rng, line = np.random.default_rng(0), torch.ones(2, 1, 1, dtype=torch.float64)
    >>> draws = draw_ensemble(line, line[0], 0.5, 10, 7, rng, lambda tokens: tokens)
    >>> draws.mean.shape, draws.weight_sq.shape
    (torch.Size([7, 1, 1]), torch.Size([7, 1]))
    """
    require_heads("bases", bases, least=1)
    require_count("n", n)
    require_count("designs", designs)
    at_once = max(1, WEIGHTS_AT_ONCE // (len(bases) * len(x) * n))
    collected = []
    for first in range(0, designs, at_once):
        count = min(at_once, designs - first)
        tokens = torch.from_numpy(rng.standard_normal((count, n, x.shape[-1]))).to(x.device)
        keys = tokens.unsqueeze(1) @ bases
        row = average_weights((x @ bases).expand(count, -1, -1, -1), keys, bandwidth)
        collected.append((row @ values(tokens), row.square().sum(-1)))
    return EnsembleDraws(*(torch.cat(part) for part in zip(*collected, strict=True)))


def isotropic_ensemble_mse(bases, bandwidth, tau, sigma2, b2, n) -> ErrorParts:
    r"""Error of the average for a linear target without preferred direction, from angles alone.

    Averaged over `m = <coef, x>`, `E coef coef^T = (b2/d) I`, and queries `x ~ N(0, tau^2 I)`;
    parts of shape (...) for bases (..., H, d, k), to the order 1/n. With HDI the subspace index,
    `q = (d_k/s2)(1 - (1 - 1/H) HDI)` and c_j the cosines of two heads:
    `bias2 = (b2 tau^2/d)(d - 2 d_k/s2 + q/s2)` plus a term of order 1/n, and
    `C_gh = (1/n) prod_j B(c_j^2)^(-1/2) [sigma2 + (b2/d)(d - 2 d_k + sum_j t(c_j))]`.

    Raises ValueError unless the bases are orthonormal, b2 > 0, sigma2 >= 0, n >= 1, and as
    `kernel_overlap_gaussian_mean`. Source: ensemble.X3.

    >>> fan = torch.eye(4, dtype=torch.float64).unsqueeze(-1)
    >>> isotropic_ensemble_mse(fan, 0.3, 0.7, 1.0, 1.0, 1000).mse.round(decimals=4)
    tensor(0.2937, dtype=torch.float64)
    """
    require_positive("b2", b2)
    require_count("n", n)
    if sigma2 < 0:
        raise ValueError(f"sigma2={sigma2}: expected a value >= 0")
    cosines = pair_cosines(bases)
    num_heads, d_model, d_head = bases.shape[-3:]
    s2 = 1 + bandwidth**2
    inflation = overlap_bracket(cosines.square(), bandwidth, tau).prod(-1).rsqrt()
    spread = d_model - 2 * d_head + _pair_spread(cosines, bandwidth, tau).sum(-1)
    covariance = inflation / n * (sigma2 + b2 / d_model * spread)
    shared = cosines.square().sum(-1).mean((-1, -2))  # d_k (1 - (1 - 1/H) HDI)
    delta = 2 / (2 + bandwidth**2) - 1 / s2
    moment = tau**2 / (1 - 2 * tau**2 / (s2 * (s2 + 1)))
    shift = 2 * delta * moment * inflation[..., 0, 0] / n * (d_head - shared / s2)
    bias2 = b2 / d_model * (tau**2 * (d_model - 2 * d_head / s2 + shared / s2**2) + shift)
    own = covariance.diagonal(dim1=-2, dim2=-1).sum(-1) / num_heads**2
    return ErrorParts(bias2, own, covariance.mean((-1, -2)) - own)


def _pair_spread(cosines, bandwidth, tau):
    """`t(c)`: what two heads with cosine c leave of one dimension's variance, query-averaged."""
    h2, s2 = bandwidth**2, 1 + bandwidth**2
    total = 2 * h2 * s2 / (s2**2 - cosines.square())
    for sign in (1, -1):
        c = sign * cosines
        weighted = tau**2 * s2 * (s2 + c) / (s2 * (s2 + c) - sign * tau**2 * cosines * (1 + c))
        total = total + c * (1 + c) * (1 / (2 * s2**2) - (1 + c) / (s2 * (s2 + c) ** 2)) * weighted
    return total
