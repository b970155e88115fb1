"""Errors of the single-location model by quadrature, at a cost that does not depend on L.

The Laplace transform `1/Z^n = int s^{n-1} e^{-sZ} ds/(n-1)!` of the partition function makes the
tokens independent: an average over L tokens is an integral over s of averages over one token.
"""

from __future__ import annotations

import math

import torch

from .numerics.quadrature import gauss_hermite
from .single_location import HeadState
from .validation import require_count

STEP = 0.25  # of the trapezoid rules in ln s, exact to e^{-39} for the double exponential
NEGLIGIBLE = 1e-17  # mass, under the noise or under the signal, that is left out
TINY = 1e-290  # weights below cannot be divided by


def bayes_error(law, tokens: int, bins: int = 12_000) -> float:
    """Least possible `E|e_eps - a|^2`, `1 - int_0^inf phi''(s) phi(s)^{L-1} ds`.

    `phi(s) = E_noise exp(-s Ev)` with the evidence Ev of one token. Up to two flipping features on
    a product grid; else features are folded one at a time into a histogram of ln Ev, extrapolated
    in the width of its bins. Raises ValueError unless tokens >= 1, and for strengths (above 40 or
    so, Gaussian) whose evidence leaves double precision. Source: specialization.P7.

    >>> from mhabook_lib.single_location import feature_law
    >>> round(bayes_error(feature_law("flip", [2, 2]), 5), 6)
    0.397226
    """
    require_count("tokens", tokens)
    if law.num_features <= 2 and law.name == "flip":
        return float(_posterior_error(*_evidence_grid(law), tokens))
    coarse, fine = (_posterior_error(*_folded(law, n), tokens) for n in (bins, 2 * bins))
    return float(fine + (fine - coarse) / 3)


def normal_grid(strength: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Trapezoid nodes and weights for N(0, 1), wide and fine enough for a signal of `strength`."""
    top = 10 + 9 * strength**0.5
    x = torch.arange(-top, top, 0.3 / (1 + strength) ** 0.5, dtype=torch.float64)
    weights = torch.exp(-x.square() / 2)
    return x, weights / weights.sum()


def _evidence_grid(law):
    """Points of ln Ev with their weights; points of no weight for noise and signal are dropped."""
    points, weights = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    for f, nu in enumerate(law.strengths):
        values, mass = _add_feature(points, weights, law, f, nu)
        points, weights = values, mass
    return points, weights


def _add_feature(points, weights, law, f, nu):
    x, w = normal_grid(nu)
    full = torch.zeros(x.numel(), law.num_features, dtype=x.dtype)
    full[:, f] = x
    evidence = law.log_evidence(full)[:, f]
    seen = float(torch.exp(evidence + w.log())[w > TINY].sum())  # E Ev = 1 under the noise
    if abs(seen - 1) > 1e-8:
        raise ValueError(
            f"strength {nu:g}: {1 - seen:.2g} of the signal is beyond double precision"
        )
    values = (points.unsqueeze(-1) + evidence).flatten()
    mass = (weights.unsqueeze(-1) * w).flatten()
    kept = _matters(values, mass)
    return values[kept], mass[kept]


def _matters(log_values, weights):
    """Where the mass under the noise, or under the signal, is not negligible."""
    heavy = weights.log() + torch.logaddexp(log_values, torch.zeros_like(log_values))
    return (heavy > math.log(NEGLIGIBLE)) & (weights > TINY)


def _folded(law, bins):
    """Points and weights of ln Ev: a histogram with linear sharing between neighbouring bins."""
    points, weights = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    for f, nu in enumerate(law.strengths):
        values, mass = _add_feature(points, weights, law, f, nu)
        low, high = values.min(), values.max()
        place = (values - low) / (high - low) * (bins - 1)
        index = place.floor().long().clamp(max=bins - 2)
        right = place - index
        weights = torch.zeros(bins, dtype=mass.dtype).index_add_(0, index, mass * (1 - right))
        weights.index_add_(0, index + 1, mass * right)
        points = torch.linspace(float(low), float(high), bins, dtype=mass.dtype)
    return points, weights


def laplace_nodes(log_values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Nodes ln s between which every integrand of this module lives."""
    heavy = log_values[_matters(log_values, weights)]
    return torch.arange(
        -float(heavy.max()) - 40, -float(heavy.min()) + 5, STEP, dtype=torch.float64
    )


def moments(log_values, weights, log_s, powers):
    """`s^k E[y^k e^{-sy}]` for y = exp(log_values): one (nodes,) tensor for each k in `powers`."""
    found = []
    for chunk in log_s.split(64):
        scaled = chunk.unsqueeze(-1) + log_values
        damped = torch.exp(-torch.exp(scaled.clamp(max=50)))
        found.append([(torch.exp(k * scaled.clamp(max=50)) * damped) @ weights for k in powers])
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def _posterior_error(log_values, weights, tokens):
    log_s = laplace_nodes(log_values, weights)
    phi, second = moments(log_values, weights, log_s, (0, 2))
    return 1 - STEP * (second * phi ** (tokens - 1) / log_s.exp()).sum()


def joint_error(noise, signal, tokens: int) -> float:
    """`E|e_eps - a|^2` of `a_l = y_l/sum_l' y_l'` with independent tokens.

    `noise` and `signal` are pairs (ln y, weights) that describe y away from and at the hidden
    place. `1 - 2 E a_eps + E a_eps^2 + (L-1) E a_l^2` with one integral over s for each term.
    """
    log_s = laplace_nodes(*noise)
    low = laplace_nodes(*signal)
    start, stop = min(log_s[0], low[0]), max(log_s[-1], low[-1])
    log_s = torch.arange(float(start), float(stop), STEP, dtype=torch.float64)
    phi, square = moments(*noise, log_s, (0, 2))
    damped, first, second = moments(*signal, log_s, (0, 1, 2))
    power = phi ** (tokens - 2)
    hit = STEP * (first * phi * power).sum()
    right = STEP * (second * phi * power).sum()
    wrong = STEP * (damped * square * power).sum()
    return float(1 - 2 * hit + right + (tokens - 1) * wrong)


def equal_heads_error(overlap: float, orthogonal: float, law, tokens: int) -> float:
    """Error of one softmax head `m = (overlap, 0, ..)`, R = orthogonal, for laws with theta_1 = 1.

    Equal heads with any H have the same. At `overlap = sqrt(nu_1)` and R = 0 it is the Bayes error
    of the first feature alone. Source: specialization.P4.
    """
    x, weights = normal_grid(law.strengths[0])
    scale = (overlap**2 + orthogonal) ** 0.5
    shift = overlap * law.strengths[0] ** 0.5
    return joint_error((scale * x, weights), (scale * x + shift, weights), tokens)


def _gaussian_points(covariance, means, nodes):
    """Product Gauss-Hermite points (P, n) and weights of a mixture of Gaussians of one covariance.

    Directions without variance are left out, so that the grid has the dimension of the rank.
    """
    values, vectors = torch.linalg.eigh(covariance)
    kept = values > 1e-12 * values.max().clamp_min(1e-300)
    frame = vectors[:, kept] * values[kept].sqrt()
    x, w = (torch.tensor(part.copy()) for part in gauss_hermite(nodes))
    rank = int(kept.sum())
    z = torch.cartesian_prod(*([x] * rank)).reshape(-1, rank)
    weights = torch.cartesian_prod(*([w] * rank)).reshape(-1, rank).prod(-1)
    points = means.unsqueeze(1) + z @ frame.T
    return points.flatten(0, 1), (weights / len(means)).repeat(len(means))


def _token_clouds(state: HeadState, law, nodes: int):
    """Logits (P, H) with weights of a noise token and of the hidden one."""
    overlaps, gram = (part.double() for part in state)
    covariance = overlaps @ overlaps.T + gram
    means, variances = law.signal_mixture()
    spread = covariance + (overlaps * variances) @ overlaps.T
    none = torch.zeros(1, len(gram))
    noise = _gaussian_points(covariance, none, nodes)
    return noise, _gaussian_points(spread, means.double() @ overlaps.T, nodes)


def bsoftmax_error(state: HeadState, law, tokens: int, nodes: int = 61, norm_bias=True) -> float:
    """Error of Bayes-softmax heads at one state (H, F), (H, H), by `joint_error`.

    The grid has `nodes^rank(Q)` points. Source: specialization.P7 (ours).
    """
    bias = state.square_norms / 2 if norm_bias else torch.zeros(len(state.gram))
    clouds = _token_clouds(state, law, nodes)
    return joint_error(*((torch.logsumexp(x - bias, -1), w) for x, w in clouds), tokens)


def softmax_error(state: HeadState, law, tokens: int, nodes: int = 48) -> float:
    """Error of softmax heads at one state: two-dimensional Laplace integrals for pairs of heads.

    `E|e - a|^2 = 1 - 2 E a_eps + sum_l E a_l^2`, `E p_hl p_h'l` from
    `int int E[e^{x + x'} e^{-s e^x - s' e^x'}] phi(s, s')^{L-1} ds ds'`. The Gaussian pair (x, x')
    has a grid of `nodes^2` points. Source: specialization.P7 (ours).
    """
    heads, error = len(state.gram), 1.0
    for h in range(heads):
        for k in range(h, heads):
            pair = HeadState(state.overlaps[[h, k]], state.gram[[h, k]][:, [h, k]])
            hit, square = _pair_products(pair, law, tokens, nodes)
            error += (1 if h == k else 2) * square / heads**2 - (2 * hit / heads if h == k else 0)
    return float(error)


def _pair_products(pair, law, tokens, nodes):
    """`E p_h,eps` of the first head, and `sum_l E p_hl p_h'l`."""
    clouds = _token_clouds(pair, law, nodes)
    every = torch.cat([x for x, _ in clouds])
    log_s = torch.arange(
        -float(every.max()) - 15, -float(every.min()) + 4, STEP, dtype=torch.float64
    )
    if len(log_s) > 600:
        raise ValueError(f"{len(log_s)} Laplace nodes: expected keys of moderate norm")
    tables = {}
    for name, (x, w) in zip(("noise", "signal"), clouds, strict=True):
        scaled = (log_s[:, None, None] + x).clamp(max=50)
        damped = torch.exp(-scaled.exp())
        lifted = scaled.exp() * damped
        for kind, y in (("0", damped), ("1", lifted)):
            tables[name + kind] = (y[..., 0] * w) @ y[..., 1].T
        if name == "signal":
            tables["hit"] = lifted[..., 0] @ w
        else:
            tables["phi"] = damped[..., 0] @ w
    power, step = tables["noise0"] ** (tokens - 2), STEP**2
    right = (tables["signal1"] * tables["noise0"] * power).sum() * step
    wrong = (tables["signal0"] * tables["noise1"] * power).sum() * step
    hit = (tables["hit"] * tables["phi"] ** (tokens - 1)).sum() * STEP
    return hit, right + (tokens - 1) * wrong
