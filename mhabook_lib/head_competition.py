"""The motion of the order parameters (M, R) of attention heads as D goes to infinity."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from .single_location import (
    HeadState,
    attention,
    location_gradient,
    location_residual,
    multihead_weights,
    require_kind,
    uses_bias,
)
from .validation import require_count

FORMS = ("stein", "direct")


class Samples(NamedTuple):
    """Sequences in law: projections (N, L, F), the signal (N, F) in them, coordinates (N, L, H)."""

    projections: torch.Tensor
    signal: torch.Tensor
    coordinates: torch.Tensor


def symmetrised_samples(points, tokens, heads, law, generator, dtype=torch.float64) -> Samples:
    """`points` random sequences and their images under every reflection of a zero-mean feature.

    Averages over the set keep the symmetry `m_f -> -m_f` exactly. There are `points` times 2 for
    each zero-mean feature in all. Raises ValueError unless points >= 1. Source: specialization.X4.

    >>> from mhabook_lib.single_location import feature_law
    >>> law = feature_law("flip", [2, 2])
    >>> symmetrised_samples(8, 5, 3, law, torch.Generator()).coordinates.shape
    torch.Size([16, 5, 3])
    """
    require_count("points", points)
    width = law.num_features + heads
    options = {"generator": generator, "device": generator.device, "dtype": dtype}
    z = torch.randn((points, tokens, width), **options)
    signal = law.theta(points, generator, dtype) * law.amplitudes(z)
    projections, coordinates = z[..., : law.num_features], z[..., law.num_features :]
    for f, symmetric in enumerate(law.symmetric):
        if symmetric:
            flip = torch.ones(law.num_features, dtype=dtype, device=z.device)
            flip[f] = -1
            projections = torch.cat([projections, flip * projections])
            signal = torch.cat([signal, flip * signal])
            coordinates = torch.cat([coordinates, coordinates])
    projections = projections.clone()
    projections[:, 0] += signal
    return Samples(projections, signal, coordinates)


def symmetric_root(gram: torch.Tensor) -> torch.Tensor:
    """The symmetric root of positive semidefinite matrices, rounding below zero set to zero."""
    values, vectors = torch.linalg.eigh(gram)
    return (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)) @ vectors.mT


def sampled_weights(state: HeadState, samples: Samples, kind: str, norm_bias: bool = True):
    """The weights `p (..., N, H, L)` of all samples at a state with batch axes."""
    keys = torch.cat([state.overlaps, symmetric_root(state.gram)], dim=-1)
    z = torch.cat([samples.projections, samples.coordinates], dim=-1)
    logits = keys.unsqueeze(-3) @ z.mT
    return multihead_weights(logits, state.square_norms.unsqueeze(-2), kind, norm_bias)


def logit_curvature(weights: torch.Tensor, kind: str, token: int | None = None) -> torch.Tensor:
    """`B_hh' = sum_l dG_hl/dz_h'l`, (..., H, L) -> (..., H, H); one term of it with `token`.

    Source: specialization.P1 and X2 (ours).
    """
    p, u, a = weights, location_residual(weights, kind), attention(weights, kind)
    if kind == "bsoftmax":
        centred = u - (a * u).sum(-1, keepdim=True)
        push = 1 - a + u - a - (a * (u - a)).sum(-1, keepdim=True) + centred
        push = push.unsqueeze(-2).expand_as(p)
        own = p * centred.unsqueeze(-2)
        picked = slice(None) if token is None else slice(token, token + 1)
        outer = (p * push)[..., picked] @ p[..., picked].mT
        return outer - torch.diag_embed(own[..., picked].sum(-1))
    share = 1 / p.shape[-2] if kind == "softmax" else 1.0
    inner = p @ p.mT
    centred = u.unsqueeze(-2) - (p * u.unsqueeze(-2)).sum(-1, keepdim=True)
    own = share * p * (1 - 2 * p) * centred
    square = p.square()
    if token is None:
        outer = inner - square @ p.mT - p @ square.mT + inner.square()
        return share**2 * outer - torch.diag_embed(own.sum(-1))
    at = p[..., token]
    pair = at.unsqueeze(-1) * at.unsqueeze(-2)
    outer = pair * (1 - at.unsqueeze(-1) - at.unsqueeze(-2) + inner)
    return share**2 * outer - torch.diag_embed(own[..., token])


def velocity(
    state: HeadState,
    samples: Samples,
    kind: str,
    eta: float = 1.0,
    noise: bool = True,
    norm_bias: bool = True,
    form: str = "stein",
) -> HeadState:
    """`(dM/dt, dR/dt)`, t = steps/D, averaged over the samples; shapes as the state's.

    "stein", after Gaussian integration by parts, with s_h = E sum_l G_hl (zero without a bias):
    `dM = -eta (B M + V) + eta diag(s) M`, `dR = -eta (B R + R B^T) + eta (diag(s) R + R diag(s)) +
    eta^2 E[G G^T]`, `V_hf = E[G_h,eps sqrt(nu_f) theta_f]`. "direct": `E[G chi*]` and `E[G w] C^T`
    in their place. `noise=False` drops the eta^2 term: gradient flow. Raises ValueError for an
    unknown kind or form. Source: specialization.P1 (our derivation).
    """
    require_kind(kind)
    if form not in FORMS:
        raise ValueError(f"form={form!r}: expected one of {FORMS}")
    overlaps, gram = state
    weights = sampled_weights(state, samples, kind, norm_bias)
    gradient = location_gradient(weights, kind)
    if form == "stein":
        mixing = logit_curvature(weights, kind).mean(-3)
        pull = gradient[..., 0].mT @ samples.signal / len(samples.signal)
        d_overlaps, half = mixing @ overlaps + pull, mixing @ gram
    else:
        d_overlaps = (gradient @ samples.projections).mean(-3)
        half = (gradient @ samples.coordinates).mean(-3) @ symmetric_root(gram)
    if uses_bias(kind, norm_bias):
        bias = gradient.sum(-1).mean(-2).unsqueeze(-1)
        d_overlaps, half = d_overlaps - bias * overlaps, half - bias * gram
    d_gram = -eta * (half + half.mT)
    if noise:
        d_gram = d_gram + eta**2 * (gradient @ gradient.mT).mean(-3)
    return HeadState(-eta * d_overlaps, d_gram)


def location_error(state: HeadState, samples: Samples, kind: str, norm_bias: bool = True):
    """`E|e_eps - a|^2` of each state of a batch, averaged over the samples: (...)."""
    weights = sampled_weights(state, samples, kind, norm_bias)
    return location_residual(weights, kind).square().sum(-1).mean(-1)


def growth_matrix(
    state: HeadState, nu: float, samples: Samples, kind: str, eta: float = 1.0, norm_bias=True
) -> torch.Tensor:
    """`A_f = eta (diag(s) - B - nu_f E[theta_f^2] T)` of a feature with column zero: (..., H, H).

    `nu` is `nu_f E[theta_f^2]`, T the term l = eps of the sum that defines B; a small column obeys
    `dm_f/dt = A_f m_f`. theta_f must be symmetric and independent of the other features.
    Source: specialization.X2 (ours).
    """
    weights = sampled_weights(state, samples, kind, norm_bias)
    growth = -logit_curvature(weights, kind).mean(-3)
    growth = growth - nu * logit_curvature(weights, kind, token=0).mean(-3)
    if uses_bias(kind, norm_bias):
        bias = location_gradient(weights, kind).sum(-1).mean(-2)
        growth = growth + torch.diag_embed(bias)
    return eta * growth


def integrate_competition(
    state: HeadState,
    tokens: int,
    law,
    kind: str,
    times,
    generator: torch.Generator,
    eta: float = 1.0,
    dt: float = 0.5,
    points: int = 512,
    samples: Samples | None = None,
    **options,
) -> HeadState:
    """Euler steps of at most dt with fresh samples each: states (K, ..., H, F) at `times`.

    `times` start with that of `state`. With `samples` the same set serves every step, which the
    motion overfits. `options` go to `velocity`. Raises ValueError for times that do not increase
    and for states that become non-finite. Source: specialization.X4 (ours).
    """
    times = [float(time) for time in times]
    if any(late <= early for early, late in pairwise(times)):
        raise ValueError(f"times={times}: expected strictly increasing values")
    path = [state]
    for early, late in pairwise(times):
        count = max(1, round((late - early) / dt))
        for _ in range(count):
            heads = state.gram.shape[-1]
            drawn = samples or symmetrised_samples(points, tokens, heads, law, generator)
            change = velocity(state, drawn, kind, eta, **options)
            state = HeadState(
                *(x + (late - early) / count * d for x, d in zip(state, change, strict=True))
            )
        if not bool(torch.isfinite(state.gram).all()):
            raise ValueError(f"the state is not finite at time {late}: expected a smaller dt={dt}")
        path.append(state)
    return HeadState(*(torch.stack(parts) for parts in zip(*path, strict=True)))
