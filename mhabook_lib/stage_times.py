"""When the stages of the reduced flow come: plateaus, competition, symmetry breaking.

Notation as in `attention_flow`: importances g_j, group sizes p_j, T positions, H heads,
`sigma_j = g_j sqrt(p_j)`. The laws are ours; source: incremental.T1 and T3 to T5.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.integrate import solve_ivp

from mhabook_lib.attention_flow import Target, class_softmax, flow_velocity, solve
from mhabook_lib.validation import require_count, require_positive


def plateau_losses(target: Target) -> np.ndarray:
    """`L_r = 1/2 sum_{j>r} sigma_j(G)^2`, r = 0..K: the least loss of r heads (incremental.T1).

    >>> from mhabook_lib.attention_flow import group_target
    >>> plateau_losses(group_target([3.0, 2.0, 1.0], 9)).tolist()
    [7.0, 2.5, 0.5, 0.0]
    """
    full = target.matrix * np.sqrt(target.counts)
    squares = np.linalg.svd(full, compute_uv=False) ** 2
    tail = np.append(np.cumsum(squares[::-1])[::-1], 0.0) / 2
    return np.round(tail, 15)


def crossing_time(times, values, level: float) -> float:
    """First time at which `values` falls below `level`, interpolated; NaN when it never does."""
    times, values = np.asarray(times), np.asarray(values)
    below = np.nonzero(values < level)[0]
    if not len(below):
        return math.nan
    k = below[0]
    if k == 0:
        return float(times[0])
    share = (values[k - 1] - level) / (values[k - 1] - values[k])
    return float(times[k - 1] + share * (times[k] - times[k - 1]))


def stage_times(target: Target, times, loss) -> np.ndarray:
    """Times at which the loss crosses the midpoints between neighbouring plateaus, (K,)."""
    ladder = plateau_losses(target)
    return np.array([crossing_time(times, loss, level) for level in (ladder[1:] + ladder[:-1]) / 2])


def competition_time(importance, num_positions, group_size=1, *, power: int = 1, num_heads=1):
    """End of the first stage from uniform attention and zero values (incremental.T3).

    Power 1: `pi sqrt(T / (2 p)) / g`, where `log s_1` solves Liouville's equation. Power 2:
    `tau* T` with the blow-up time tau* of `y' = g y^2 v`, `v' = g y - H v`, y(0)=1, v(0)=0, for
    `g sqrt(p)` in place of g.

    >>> round(competition_time(2.89, 640), 3), round(competition_time(2.89, 1, power=2), 4)
    (19.446, 0.4606)
    """
    require_positive("importance", importance)
    require_count("num_positions", num_positions)
    sigma = importance * math.sqrt(group_size)
    if power == 1:
        return math.pi * math.sqrt(num_positions / 2) / sigma

    def field(_, state):
        inverse, value = state  # 1/y falls to zero
        return [-sigma * value, sigma / inverse - num_heads * value]

    def exploded(_, state):
        return state[0] - 1e-9

    exploded.terminal = True
    limit = 10 * (math.sqrt(math.pi / 2) / sigma + num_heads / sigma**2)
    done = solve_ivp(
        field, (0, limit), [1.0, 0.0], events=exploded, method="LSODA", rtol=1e-10, atol=1e-14
    )
    return float(done.t_events[0][0]) * num_positions


def growth_constants(importances, num_heads: int, group_sizes=None) -> np.ndarray:
    """`kappa_j = H sigma_j^2 / (p_1 (sigma_1^2 - sigma_j^2))` of the groups after the first.

    Under power 1 the asymmetry of group j grows like `exp(2 sqrt(kappa_j t))`; incremental.T5.

    >>> growth_constants([2.0, 1.0], 3).tolist()
    [1.0]
    """
    g = np.asarray(importances, dtype=float)
    p = np.ones_like(g) if group_sizes is None else np.asarray(group_sizes, dtype=float)
    require_positive("importances", g)
    squares = g**2 * p
    if np.any(squares[1:] >= squares[0]):
        raise ValueError(f"squared strengths {squares.tolist()}: expected the first to be largest")
    return num_heads * squares[1:] / (p[0] * (squares[0] - squares[1:]))


def coupled_growth(importances, num_heads: int, group_sizes=None) -> float:
    """`Lambda`, largest eigenvalue of `p_1 diag(kappa) + u u^T`, `u_j = sqrt(p_j kappa_j)`.

    Under power 2 the asymmetry grows like `exp(sqrt(2 Lambda t / T))`; incremental.T5.

    >>> round(coupled_growth([1.7**2, 1.7, 1.0], 3), 5)
    3.42305
    """
    kappa = growth_constants(importances, num_heads, group_sizes)
    p = np.ones(len(kappa) + 1) if group_sizes is None else np.asarray(group_sizes, dtype=float)
    root = np.sqrt(p[1:] * kappa)
    return float(np.linalg.eigvalsh(p[0] * np.diag(kappa) + np.outer(root, root))[-1])


def riccati_amplitude(target: Target, times, num_heads: int) -> tuple[np.ndarray, np.ndarray]:
    """`log(eta(t)/eta(0))` of the second group under power 1, and its attention s_2, at `times`.

    Along the symmetric flow `rho' = R_22 (s_2 - rho^2)`, `(log eta)' = R_22 rho`: the linear growth
    of an asymmetry between heads, after the first stage. Source: incremental.T5.
    """
    features, classes = target.matrix.shape

    def field(_, state):
        a, v = state[None, :classes], state[None, classes : classes + features]
        rho = state[-2]
        da, dv = flow_velocity(target, a, v, [num_heads])
        s = class_softmax(a, target.counts)
        gap = target.residual(s, v, [num_heads])[1, 1]
        return np.concatenate([da[0], dv[0], [gap * (s[0, 1] - rho**2), gap * rho]])

    states = solve(field, np.zeros(classes + features + 2), times)
    return states[:, -1], class_softmax(states[:, :classes], target.counts)[:, 1]


def asymmetry_amplitude(
    target: Target, times, num_heads: int, power: int = 1, gram=None
) -> np.ndarray:
    """`E(t) = log |da_2 - da_1|` of the antisymmetric mode that starts as da = e_2.

    The full variational equation along the symmetric flow, in which the sum over heads stays put:
    `ds = s (da - s.da)`, `df = R^T M w`, `w' = R ds`, and `da' = df - d(s.f)` (power 1) or
    `ds (f - s.f) + s (df - d(s.f))` (power 2). Direction and logarithm of the length are
    integrated, so that nothing overflows. Source: incremental.T5.
    """
    features, classes = target.matrix.shape
    counts, size = target.counts, classes + features
    overlaps = np.eye(features) if gram is None else np.asarray(gram)

    def variation(a, v, da, w):
        s = class_softmax(a, counts)
        residual = target.residual(s[None], v[None], [num_heads])
        force = v @ overlaps @ residual
        mean = (s * force) @ counts
        ds = s * (da - (s * da) @ counts)
        df = w @ overlaps @ residual
        centred = df - (ds * force + s * df) @ counts
        if power == 2:
            centred = ds * (force - mean) + s * centred
        return np.concatenate([centred, residual @ (counts * ds)])

    def field(_, state):
        a, v = state[:classes], state[classes:size]
        base = flow_velocity(target, a[None], v[None], [num_heads], power, gram)
        mode = state[size : 2 * size]
        mode = mode / np.linalg.norm(mode)
        change = variation(a, v, mode[:classes], mode[classes:])
        rate = mode @ change
        return np.concatenate([base[0][0], base[1][0], change - rate * mode, [rate]])

    start = np.zeros(2 * size + 1)
    start[size + 1] = 1.0
    states = solve(field, start, times)
    mode = states[:, size : 2 * size]
    mode = mode / np.linalg.norm(mode, axis=1, keepdims=True)
    return states[:, -1] + np.log(np.abs(mode[:, 1] - mode[:, 0]))


def amplification_time(times, amplitude, asymmetry: float, attention) -> float:
    """First time at which `asymmetry exp(amplitude) >= log(1 / attention)`; NaN when never.

    The logit of the odd head has then made up for the attention (n,) that the symmetric flow has
    left for the second group, and half of that head looks there. Source: incremental.T5.
    """
    missing = np.log(np.log(1 / np.asarray(attention))) - np.asarray(amplitude)
    return crossing_time(times, missing, math.log(asymmetry))


def ladder_risk(importances, num_samples, dim: int, noise: float) -> np.ndarray:
    """Expected test error of least squares on the first r groups, r = 0..K, (..., K+1).

    `E(n, r) = B_r (n - 1) / (n - r d - 1)`, infinite for `n <= r d + 1`, with
    `B_r = sum_{j>r} sigma_j^2 + d noise`. Source: incremental.T8.
    """
    rest = _rest(importances, dim, noise)
    n = np.asarray(num_samples, dtype=float)[..., None]
    freedom = n - dim * np.arange(len(rest)) - 1
    with np.errstate(divide="ignore"):
        return np.where(freedom > 0, rest * (n - 1) / np.maximum(freedom, 1e-300), np.inf)


def ladder_thresholds(importances, dim: int, noise: float) -> np.ndarray:
    """`n_k = 1 + d (k + B_k / sigma_k^2)`: rung k pays beyond n_k samples, (K,); incremental.T8.

    >>> ladder_thresholds([1.7**2, 1.7, 1.0], 8, 0.25).round(3).tolist()
    [14.642, 25.304, 41.0]
    """
    rest, sigma = _rest(importances, dim, noise), np.asarray(importances, dtype=float)
    return 1 + dim * (np.arange(1, len(sigma) + 1) + rest[1:] / sigma**2)


def _rest(importances, dim: int, noise: float) -> np.ndarray:
    require_positive("importances", importances)
    require_count("dim", dim)
    if noise < 0:
        raise ValueError(f"noise={noise!r}: expected a variance >= 0")
    squares = np.asarray(importances, dtype=float) ** 2
    return np.append(np.cumsum(squares[::-1])[::-1], 0.0) + dim * noise
