"""Thresholds of the attention flow in closed form: temperatures, strengths, sign changes.

NumPy arrays in and out; all arguments broadcast, `strengths (..., H)` over their leading axes.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import lambertw

from .attention import BlockHeads
from .equiangular import as_array
from .numerics.roots import bisect
from .token_flow import equiangular_tokens
from .validation import require_finite, require_gamma, require_positive

# Radial Dominance


def rd_threshold(n, num_heads, gamma=0.0, strength=1.0) -> np.ndarray:
    """Largest beta with Radial Dominance, for equal scalar heads at an equiangular point.

    `log(sqrt((n-1)(1-gamma)(1+(n-1)gamma)/(H-1)) - (n-1) gamma) / (lambda (1-gamma))`; 0 where it
    holds for no beta > 0. Raises ValueError unless H >= 2, lambda > 0 and 0 <= gamma < 1.
    Source: clustering.T5(a).

    >>> round(float(rd_threshold(8, 2)), 8)
    0.97295507
    """
    n, num_heads, gamma = as_array(n), as_array(num_heads), as_array(gamma)
    require_positive("strength", strength)
    require_gamma(gamma, n)
    if np.any(num_heads < 2) or np.any(gamma < 0):
        raise ValueError(f"num_heads={num_heads}, gamma={gamma}: expected H >= 2, gamma >= 0")
    tangential = np.sqrt((n - 1) * (1 - gamma) * (1 + (n - 1) * gamma) / (num_heads - 1))
    room = np.maximum(tangential - (n - 1) * gamma, 1.0)
    return np.log(room) / (as_array(strength) * (1 - gamma))


def rd_threshold_two(n, strength, other) -> np.ndarray:
    """Largest beta with Radial Dominance, for two scalar heads at gamma = 0.

    `log((n-1) min(l1/l2, l2/l1)) / (l1 + l2)`; 0 where it holds for no beta > 0. Raises ValueError
    unless both strengths are > 0. Source: clustering.T5(a).

    >>> round(float(rd_threshold_two(20, 0.5, 1.3)), 8)
    1.10495974
    """
    require_positive("strength", strength)
    require_positive("other", other)
    l1, l2 = as_array(strength), as_array(other)
    room = np.maximum((as_array(n) - 1) * np.minimum(l1 / l2, l2 / l1), 1.0)
    return np.log(room) / (l1 + l2)


def rd_partner_strength(strength, beta, n) -> np.ndarray:
    """Largest second strength that leaves Radial Dominance to the first of two, at gamma = 0.

    `W(beta (n-1) l1 e^{-beta l1}) / beta`. Raises ValueError unless l1 > 0 and beta > 0.
    Source: clustering.T5(c).

    >>> round(float(rd_partner_strength(1.0, 0.5, 9)), 8)
    1.88792568
    """
    require_positive("strength", strength)
    require_positive("beta", beta)
    l1, beta, n = as_array(strength), as_array(beta), as_array(n)
    return lambertw(beta * (n - 1) * l1 * np.exp(-beta * l1)).real / beta


# Orthogonal heads on blocks


def block_head_rate(beta, n, gamma, strengths, weights) -> np.ndarray:
    """dE_h/dt in flow U of orthogonal heads, each with its own block of equiangular tokens.

    Tokens `x_i = (sqrt(w_h) y_i)_h`, `M_h = lambda_h` times the block's projection. With
    `b = beta lambda w`, `q = e^b + (n-1) gamma e^{b gamma}`:
    `(lambda_h w_h q_h / n^2) { lambda_h [q_h^2 + e^{2 b gamma} (n-1)(1-gamma)(1+(n-1)gamma)] / q_h
    - sum_g lambda_g w_g q_g }`. beta, n, gamma (...), strengths and weights (..., H) -> (..., H).
    Raises ValueError unless strengths and weights are > 0, sum w = 1 and 0 <= gamma < 1.
    Source: clustering.T5(b).

    >>> bool(block_head_rate(0.4, 4, 0.0, [1.0, 3.0], [0.5, 0.5])[0] > 0)
    True
    >>> bool(block_head_rate(0.5, 4, 0.0, [1.0, 3.0], [0.5, 0.5])[0] > 0)
    False
    """
    require_positive("beta", beta)
    strengths, weights = _checked_blocks(n, gamma, strengths, weights)
    beta, n, gamma = (as_array(value)[..., None] for value in (beta, n, gamma))
    b = beta * strengths * weights
    q = np.exp(b) + (n - 1) * gamma * np.exp(b * gamma)
    tangential = np.exp(2 * b * gamma) * (n - 1) * (1 - gamma) * (1 + (n - 1) * gamma)
    pull = (strengths * weights * q).sum(-1, keepdims=True)
    return strengths * weights * (strengths * (q**2 + tangential) - q * pull) / n**2


def block_threshold(n, strength=1.0) -> np.ndarray:
    """The beta at which the weak one of two orthogonal heads begins to lose energy.

    Strengths (lambda, 3 lambda), two equal blocks, gamma = 0:
    `log((1 + sqrt(1 + 24 (n-1)))/6) / lambda`. Raises ValueError unless lambda > 0.
    Source: clustering.T5(b).

    >>> np.round(block_threshold([4, 16, 64]), 8).tolist()
    [0.46415361, 1.2039728, 1.8945492]
    """
    require_positive("strength", strength)
    return np.log((1 + np.sqrt(1 + 24 * (as_array(n) - 1))) / 6) / as_array(strength)


def block_tokens(n: int, gamma, strengths, weights) -> tuple[torch.Tensor, BlockHeads]:
    """The tokens (n, H n) and heads of `block_head_rate` as arrays (float64).

    Raises as `block_head_rate`. Source: clustering.T5(b).

    >>> x, heads = block_tokens(4, 0.0, [1.0, 3.0], [0.5, 0.5])
    >>> tuple(x.shape), heads.num_heads
    ((4, 8), 2)
    """
    strengths, weights = _checked_blocks(n, gamma, strengths, weights)
    y = equiangular_tokens(n, n, float(gamma))
    x = torch.cat([float(w) ** 0.5 * y for w in weights], dim=-1)
    num_heads = len(weights)
    basis = torch.eye(num_heads * n, dtype=x.dtype).unflatten(-1, (num_heads, n)).movedim(1, 0)
    eigenvalues = torch.from_numpy(strengths.copy()).unsqueeze(-1).expand(num_heads, n)
    return x, BlockHeads(basis.contiguous(), eigenvalues)


def _checked_blocks(n, gamma, strengths, weights):
    require_positive("strengths", strengths)
    require_positive("weights", weights)
    require_gamma(as_array(gamma), as_array(n))
    strengths, weights = as_array(strengths), as_array(weights)
    if strengths.ndim < 1 or strengths.shape[-1:] != weights.shape[-1:]:
        raise ValueError(
            f"strengths of shape {strengths.shape} and weights of shape {weights.shape}: "
            f"expected (..., H) for both"
        )
    if np.any(np.abs(weights.sum(-1) - 1) > 1e-12) or np.any(as_array(gamma) < 0):
        raise ValueError(f"weights={weights}, gamma={gamma}: expected sum 1 and gamma >= 0")
    return strengths, weights


# Strengths and convexity of the softmax drive


def lambert_peak(n, gamma=0.0, strength=1.0) -> np.ndarray:
    """Where one softmax head clusters fastest, `(1 + W((n-1)/e)) / (lambda (1 - gamma))`.

    The drive `lambda/(e^{beta lambda (1-gamma)} + n - 1)`, as a function of lambda at fixed beta,
    is largest at `beta lambda (1 - gamma) = u* = 1 + W((n-1)/e)`. Given lambda this is the beta
    above which a stronger head is slower; beta and lambda may be exchanged. Raises ValueError
    unless strength > 0 and gamma is in range. Source: clustering.T5(c).

    >>> np.round(lambert_peak([2, 8, 32, 128]), 8).tolist()
    [1.27846454, 1.97313875, 2.82978741, 3.81073948]
    """
    require_positive("strength", strength)
    require_gamma(as_array(gamma), as_array(n))
    peak = 1 + lambertw((as_array(n) - 1) / np.e).real
    return peak / (as_array(strength) * (1 - as_array(gamma)))


def curvature_threshold(n) -> np.ndarray:
    """The u_c up to which the softmax drive is concave in the strength, and convex beyond.

    Root of `(u - 2) e^u = (n - 1)(u + 2)`, u = beta lambda (1 - gamma). Raises ValueError unless
    n >= 2. Source: clustering.T6.

    >>> np.round(curvature_threshold([2, 8, 32, 128, 1024]), 8).tolist()
    [2.39935728, 3.33261097, 4.41176337, 5.59249971, 7.47867595]
    """
    n = as_array(n)
    if np.any(n < 2):
        raise ValueError(f"n={n}: expected at least two tokens")
    return bisect(
        lambda u: (u - 2) - (n - 1) * (u + 2) * np.exp(-u), np.full(n.shape, 2.0), 4 + np.log(n)
    )


def sign_change_gamma(a, b, beta) -> np.ndarray:
    """gamma at which the drive of flow U vanishes for the heads (a, -b).

    `log(b/a) / (beta (a + b))`: equiangular tokens above it gather in one cluster. Raises
    ValueError unless a, b, beta > 0. Source: clustering.T5(d).

    >>> round(float(sign_change_gamma(1.0, 1.5, 2.0)), 8)
    0.08109302
    """
    for name, value in (("a", a), ("b", b), ("beta", beta)):
        require_positive(name, value)
    a, b = as_array(a), as_array(b)
    return np.log(b / a) / (as_array(beta) * (a + b))


# ReLU against softmax


def relu_crossings(beta, strength) -> tuple[np.ndarray, np.ndarray]:
    """The interval of gamma in which ReLU drives harder than flow U, for one head.

    `(-W_0(-beta), -W_{-1}(-beta)) / (beta lambda)`, the solutions of
    `e^{beta lambda gamma} = lambda gamma`; NaN for beta > 1/e, where there are none. The interval
    may lie beyond gamma = 1. Raises ValueError unless beta, strength > 0.
    Source: clustering.T7.

    >>> [round(float(end), 8) for end in relu_crossings(0.35, 4.0)]
    [0.51188487, 0.96408375]
    """
    require_positive("beta", beta)
    require_positive("strength", strength)
    beta, strength = as_array(beta), as_array(strength)
    argument = np.where(beta <= 1 / np.e, -beta, np.nan)
    scale = -1 / (beta * strength)
    return scale * lambertw(argument, 0).real, scale * lambertw(argument, -1).real


def relu_softmax_threshold(n) -> np.ndarray:
    """The beta above which ReLU drives harder than softmax somewhere on the way, lambda = 1.

    The curves `gamma (e^{beta (1-gamma)} + n - 1)` and n touch where u = beta (1 - gamma) solves
    `(e^u + n - 1)(e^u - 1) = n u e^u`; then `beta = u (e^u + n - 1)/(e^u - 1)`. Raises ValueError
    unless n >= 3. Source: clustering.T7.

    >>> np.round(relu_softmax_threshold([8, 32, 128]), 4).tolist()
    [4.2498, 6.0743, 7.7505]
    """
    n = as_array(n)
    if np.any(n < 3):
        raise ValueError(f"n={n}: expected at least three tokens")
    u = bisect(
        lambda u: (np.exp(u) + n - 1) * -np.expm1(-u) - n * u,
        np.full(n.shape, 1e-3),
        2 + 2 * np.log(n),
    )
    return u * (np.exp(u) + n - 1) / np.expm1(u)


class LinearTimes(NamedTuple):
    """Clustering times (one head, lambda = 1) from equations linearised at gamma = 0."""

    frozen_softmax: np.ndarray
    frozen_relu: np.ndarray
    first_order: np.ndarray
    relu: np.ndarray


def linear_times(gamma0, gamma1, beta, n) -> LinearTimes:
    """Linearised times to gamma1; gamma0 is where ReLU starts (the others start at 0).

    `frozen_softmax = n gamma1 / 2` and `frozen_relu = (n/2) log(gamma1/gamma0)` freeze the factor
    1 + (n-1) gamma at 1; `first_order = n log(1 + (n-2+beta) gamma1) / (2 (n-2+beta))` keeps the
    first order of flow U; `relu = (n/2) log(1 + 1/((n-1) gamma0))` is the ReLU time up to
    O(log n). Raises ValueError unless 0 < gamma0, gamma1 < 1. Source: clustering.T7.

    >>> round(float(linear_times(0.1, 0.5, 1.0, 8).frozen_softmax), 6)
    2.0
    """
    for name, value in (("gamma0", gamma0), ("gamma1", gamma1), ("beta", beta)):
        require_positive(name, value)
    gamma0, gamma1, beta, n = map(as_array, (gamma0, gamma1, beta, n))
    require_gamma(gamma0, n)
    require_gamma(gamma1, n)
    growth = n - 2 + beta
    return LinearTimes(
        n * gamma1 / 2,
        n / 2 * np.log(gamma1 / gamma0),
        n / (2 * growth) * np.log1p(growth * gamma1),
        n / 2 * np.log1p(1 / ((n - 1) * gamma0)),
    )


# Mixed signs: the best configuration


class Optimum(NamedTuple):
    """Shape of the best configuration ("one", "antipodal" or "tie") and its total energy."""

    shape: np.ndarray
    max_energy: np.ndarray


class BipolarRates(NamedTuple):
    """Decay rates inside the first and second antipodal cluster, and between them."""

    first: np.ndarray
    second: np.ndarray
    between: np.ndarray


def scalar_head_optimum(strengths, beta) -> Optimum:
    """Largest total energy of flow U over all tokens on the sphere, for scalar heads of any sign.

    With `F(gamma) = sum_h e^{beta lambda_h gamma}`: "one" cluster and `F(1)/(2 beta)` if
    `sum_h sinh(beta lambda_h) > 0`; "antipodal" and `(F(1) + F(-1))/(4 beta)` if < 0, attained by
    two antipodal clusters of n/2 tokens (only a bound for odd n); "tie" if the sum is 0.
    strengths (..., H), beta (...) -> arrays (...). Raises ValueError for beta <= 0.
    Source: clustering.X6.

    >>> str(scalar_head_optimum([1.0, 1.0, 1.0, -2.0], 1.0).shape)
    'antipodal'
    """
    require_positive("beta", beta)
    require_finite("strengths", strengths)
    strengths, beta = as_array(strengths), as_array(beta)
    exponent = beta[..., None] * strengths
    balance = np.sinh(exponent).sum(-1)
    aligned, opposed = np.exp(exponent).sum(-1), np.exp(-exponent).sum(-1)
    shape = np.select([balance > 0, balance < 0], ["one", "antipodal"], "tie")
    best = np.where(balance > 0, aligned / (2 * beta), (aligned + opposed) / (4 * beta))
    return Optimum(shape, best)


def bipolar_rates(p, q, strengths, beta) -> BipolarRates:
    """Local decay rates at two antipodal clusters of p and q tokens, scalar heads, flow U.

    With `alpha = sum lambda_h e^{beta lambda_h}`, `kappa = -sum lambda_h e^{-beta lambda_h}`:
    `(p alpha + q kappa)/n`, `(q alpha + p kappa)/n` and `kappa`, n = p + q; q = 0 is one cluster
    with the first rate alpha (the other two do not apply). p, q, beta (...), strengths (..., H).
    Raises ValueError for beta <= 0, p < 1 or q < 0. Source: clustering.X6.

    >>> [round(float(rate), 8) for rate in bipolar_rates(3, 5, [1.0, -1.5], 2.0)]
    [21.48849712, 15.81884847, 29.9929701]
    """
    require_positive("beta", beta)
    require_finite("strengths", strengths)
    p, q, strengths, beta = map(as_array, (p, q, strengths, beta))
    if np.any(p < 1) or np.any(q < 0):
        raise ValueError(f"p={p}, q={q}: expected p >= 1 and q >= 0 tokens")
    exponent = beta[..., None] * strengths
    alpha = (strengths * np.exp(exponent)).sum(-1)
    kappa = -(strengths * np.exp(-exponent)).sum(-1)
    first, second = (p * alpha + q * kappa) / (p + q), (q * alpha + p * kappa) / (p + q)
    return BipolarRates(first, second, kappa + np.zeros_like(first))


def bipolar_critical_beta(strengths) -> float:
    """The beta beyond which two antipodal clusters beat one: root of `sum_h sinh(beta lambda_h)`.

    strengths (H,). The root exists and is unique if `sum lambda_h > 0` and the head strengths,
    ordered by |lambda| and added where equal, change sign exactly once; else ValueError.
    Source: clustering.X6.

    >>> round(bipolar_critical_beta([1.0, 1.0, 1.0, -2.0]), 8)
    0.96242365
    """
    require_finite("strengths", strengths)
    strengths = as_array(strengths)
    sizes = np.unique(np.abs(strengths))
    counts = [np.sign(strengths[np.abs(strengths) == size]).sum() for size in sizes]
    signs = [np.sign(count) for count in counts if count != 0]
    changes = sum(one != two for one, two in pairwise(signs))
    if strengths.sum() <= 0 or changes != 1 or signs[-1] > 0:
        raise ValueError(
            f"strengths={strengths}: expected a positive sum and a strongest head that repels"
        )

    def scaled(beta):
        return (
            np.sign(strengths)
            * (-np.expm1(-2 * beta * np.abs(strengths)))
            * np.exp(beta * (np.abs(strengths) - sizes[-1]))
        ).sum()

    high = 1.0 / sizes[-1]
    while scaled(high) > 0:
        high *= 2
    return float(brentq(scaled, 1e-6 * high, high, xtol=1e-15, rtol=1e-14))
