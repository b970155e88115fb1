"""The reduced flow of position-only attention: heads chase the groups of a linear target.

A head reads the average of its context with weights `s = softmax(a)` over the T positions and
sends it through a value matrix. For white inputs its d x d value matrices reduce to K coordinates,
and the loss to `1/2 ||G - sum_h v_h s_h^T||^2` with a K x T target G (incremental.T2).

Positions that play the same role keep equal logits, so the flow runs over *classes* of positions
with multiplicities. Source of the flow: \\cite yuksel2026incremental.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.integrate import solve_ivp

from mhabook_lib.validation import require_count, require_finite, require_positive

POWERS = (1, 2)
LSODA_UNTIL = 1e4
ORTHOGONAL = 1e-8


@dataclass(frozen=True)
class Target:
    """What the heads learn: `matrix` (K, C) by feature and class of positions, `counts` (C,)."""

    matrix: np.ndarray
    counts: np.ndarray

    @property
    def num_positions(self) -> int:
        return int(self.counts.sum())

    def residual(self, attention, values, head_counts) -> np.ndarray:
        """R = G - sum_h n_h v_h s_h^T, (..., K, C), from (..., N, C) and (..., N, K)."""
        return self.matrix - np.einsum("n,...nk,...nc->...kc", head_counts, values, attention)

    def loss_parts(self, residual, gram=None) -> np.ndarray:
        """1/2 R M R^T, (..., K, K); its trace is the loss. M: overlaps of the features."""
        weighted = residual if gram is None else np.asarray(gram) @ residual
        return np.einsum("...kc,c,...lc->...kl", weighted, self.counts, residual) / 2


def group_target(importances, num_positions: int, group_sizes=None) -> Target:
    """Disjoint groups: `G[j, i] = g_j` for the p_j positions i of group j, else 0.

    importances g (K,), decreasing and positive; group_sizes p (K,), ones when left out. The classes
    are the groups and, last, the positions that carry nothing. Raises ValueError for importances
    that are not positive or not in order, and for groups that need more than T positions.

    >>> target = group_target([2.0, 1.0], 5)
    >>> target.matrix.tolist(), target.counts.tolist()
    ([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]], [1.0, 1.0, 3.0])
    """
    g = np.asarray(importances, dtype=float)
    p = np.ones_like(g) if group_sizes is None else np.asarray(group_sizes, dtype=float)
    require_positive("importances", g)
    if np.any(np.diff(g) > 0):
        raise ValueError(f"importances={g.tolist()}: expected decreasing values")
    if p.shape != g.shape:
        raise ValueError(f"group_sizes of shape {p.shape}: expected {g.shape}, as importances")
    for size in p:
        require_count("group_sizes", size)
    rest = num_positions - p.sum()
    if rest < 0:
        raise ValueError(f"num_positions={num_positions}: the groups alone need {int(p.sum())}")
    matrix, counts = np.diag(g), p
    if rest:
        matrix, counts = np.pad(matrix, ((0, 0), (0, 1))), np.append(p, rest)
    return Target(matrix, counts)


def teacher_target(teacher, num_positions: int, group_sizes=None) -> Target:
    """Target of a task with transition maps A_k (K, d, d): importances are Frobenius norms.

    The reduction with M = I needs orthogonal maps: raises ValueError for an overlap
    `<A_j, A_k> / (|A_j| |A_k|)` above 1e-8; use `gram` of `attention_flow` for such maps.

    >>> teacher_target(np.diag([2.0, 0.0])[None], 3).matrix.tolist()
    [[2.0, 0.0]]
    """
    teacher = np.asarray(teacher, dtype=float)
    if teacher.ndim != 3:
        raise ValueError(f"teacher of shape {teacher.shape}: expected (K, d, d)")
    require_finite("teacher", teacher)
    flat = teacher.reshape(len(teacher), -1)
    norms = np.linalg.norm(flat, axis=1)
    require_positive("norms of the transition maps", norms)
    overlap = np.abs(flat @ flat.T / np.outer(norms, norms) - np.eye(len(norms))).max()
    if overlap > ORTHOGONAL:
        raise ValueError(f"transition maps with an overlap of {overlap:.2g}: expected orthogonal")
    return group_target(norms, num_positions, group_sizes)


def position_target(matrix) -> Target:
    """Any target (K, T) with one class per position: overlapping groups, unequal weights."""
    matrix = np.array(matrix, dtype=float, order="C")
    if matrix.ndim != 2:
        raise ValueError(f"matrix of shape {matrix.shape}: expected (K, T)")
    require_finite("matrix", matrix)
    return Target(matrix, np.ones(matrix.shape[1]))


@dataclass(frozen=True)
class FlowRun:
    """A solved flow; `attention` is per position of a class, heads of one kind share a row."""

    times: np.ndarray  # (n,)
    logits: np.ndarray  # (n, N, C)
    attention: np.ndarray  # (n, N, C)
    values: np.ndarray  # (n, N, K)
    loss: np.ndarray  # (n,)


def class_softmax(logits, counts) -> np.ndarray:
    """Attention per position of each class: `exp(a_c) / sum_b counts_b exp(a_b)`, (..., C)."""
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / (weights @ counts)[..., None]


def flow_velocity(target: Target, logits, values, head_counts, power=1, gram=None, decay=0.0):
    """Right-hand side of the flow for logits (N, C) and values (N, K).

    With `R = G - sum_h n_h v_h s_h^T`, `f_h = R^T M v_h` and the mean `s.f` over positions,

        v_h' = R s_h - decay v_h,
        a_h' = f_h - s_h.f_h               power 1: s_h' = J(s_h) f_h,
        a_h' = s_h (f_h - s_h.f_h)         power 2: the gradient flow in the logits,

    J(s) = diag(s) - s s^T. Source: incremental.T2 (Gram form), both flows of the paper.
    """
    s = class_softmax(logits, target.counts)
    residual = target.residual(s, values, head_counts)
    signal = values if gram is None else values @ gram
    force = signal @ residual
    force = force - ((s * force) @ target.counts)[:, None]
    if power == 2:
        force = s * force
    return force, (s * target.counts) @ residual.T - decay * values


def attention_flow(
    target: Target,
    times,
    logits0,
    values0=None,
    *,
    head_counts=None,
    power: int = 1,
    gram=None,
    weight_decay: float = 0.0,
    rtol: float = 1e-9,
    atol: float = 1e-12,
) -> FlowRun:
    """Solve the flow from logits0 (N, C), values0 (N, K) (zero when left out) at `times`.

    Row n of the N kinds of heads stands for `head_counts[n]` equal heads. LSODA, and Radau beyond
    time 1e4, in logit coordinates: small asymmetries keep their relative precision, which they lose
    when attention itself is integrated. Raises ValueError for a power other than 1 and 2, shapes
    that do not fit, and when the solver fails.

    >>> target = group_target([2.0, 1.0], 6)
    >>> run = attention_flow(target, [0.0, 300.0], [[0, 0, 0], [0, 1e-2, 0]])
    >>> bool(run.loss[0] == 2.5), bool(run.loss[-1] < 1e-3)
    (True, True)
    """
    a0 = np.atleast_2d(np.asarray(logits0, dtype=float))
    features, classes = target.matrix.shape
    counts = np.ones(len(a0)) if head_counts is None else np.asarray(head_counts, dtype=float)
    v0 = np.zeros((len(a0), features)) if values0 is None else np.asarray(values0, dtype=float)
    _check(target, a0, v0, counts, power, gram)
    times = np.asarray(times, dtype=float)

    def unpack(state):
        return state[: a0.size].reshape(a0.shape), state[a0.size :].reshape(v0.shape)

    def field(_, state):
        da, dv = flow_velocity(target, *unpack(state), counts, power, gram, weight_decay)
        return np.concatenate([da.ravel(), dv.ravel()])

    start = np.concatenate([a0.ravel(), v0.ravel()])
    states = solve(field, start, times, rtol, atol)
    logits = states[:, : a0.size].reshape(-1, len(a0), classes)
    values = states[:, a0.size :].reshape(-1, len(a0), features)
    attention = class_softmax(logits, target.counts)
    residual = target.residual(attention, values, counts)
    loss = np.trace(target.loss_parts(residual, gram), axis1=-2, axis2=-1)
    return FlowRun(times, logits, attention, values, loss)


def solve(field, start, times, rtol=1e-9, atol=1e-12) -> np.ndarray:
    """States at `times` (n, size); LSODA, or Radau when the last time is beyond 1e4."""
    times = np.asarray(times, dtype=float)
    if times.ndim != 1 or len(times) < 2 or np.any(np.diff(times) <= 0):
        raise ValueError(f"times of shape {times.shape}: expected at least two increasing values")
    method = "LSODA" if times[-1] <= LSODA_UNTIL else "Radau"
    with np.errstate(over="ignore"):  # trial steps of the implicit solver
        solution = solve_ivp(
            field, times[[0, -1]], start, method=method, t_eval=times, rtol=rtol, atol=atol
        )
    if not solution.success:
        raise ValueError(f"the flow stops at time {solution.t[-1]:.6g}: {solution.message}")
    return solution.y.T


def _check(target, logits, values, counts, power, gram) -> None:
    features, classes = target.matrix.shape
    if power not in POWERS:
        raise ValueError(f"power={power!r}: expected one of {POWERS}")
    for name, array, shape in (
        ("logits0", logits, (len(logits), classes)),
        ("values0", values, (len(logits), features)),
        ("head_counts", counts, (len(logits),)),
        ("gram", gram, (features, features)),
    ):
        if array is None:
            continue
        if np.shape(array) != shape:
            raise ValueError(f"{name} of shape {np.shape(array)}: expected {shape}")
        require_finite(name, array)
    for count in counts:
        require_count("head_counts", count)
