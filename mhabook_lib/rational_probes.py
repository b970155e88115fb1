"""From answers at several numbers of copies to the heads of one pair (u, b).

In the share of copies `t = c/(c+m)` a probe is a rational function of degree H,
`r(t) = sum_h g_h t / (t + (1 - t) rho_h)`, `rho_h = exp(-s_h)`: the heads are its poles and
residues. t = 1 is the limit of many copies, r(1) = V^T u. Source: queries.T2, queries.X1.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import numpy as np
from scipy.special import expit

from mhabook_lib.validation import require_count

DESIGNS = ("integer", "balanced")
OFFSET = 0.93


class PairHeads(NamedTuple):
    """Per pair: scores s, value differences g (M, H), and whether the pair makes sense (M,)."""

    s: np.ndarray
    g: np.ndarray
    ok: np.ndarray


def probe_counts(num: int, max_length: int, design: str = "balanced") -> np.ndarray:
    """`num` counts (c, m) with c + m <= max_length, (num, 2).

    "integer": c = 1, 2, .. and m = 1. "balanced": the fractions c/m nearest to equal steps of the
    logarithm between the extreme ones. Raises ValueError when there are not so many.

    >>> [f"{c:g}/{m:g}" for c, m in probe_counts(4, 5)]
    ['1/4', '2/3', '3/2', '4/1']
    """
    require_count("num", num)
    if design not in DESIGNS:
        raise ValueError(f"design={design!r}: expected one of {DESIGNS}")
    if design == "integer":
        found = [Fraction(c) for c in range(1, max_length)]
    else:
        pairs = ((c, m) for c in range(1, max_length) for m in range(1, max_length + 1 - c))
        found = sorted({Fraction(c, m) for c, m in pairs})
    if len(found) < num:
        raise ValueError(f"max_length={max_length}: only {len(found)} fractions, {num} needed")
    if design == "integer":
        chosen = found[:num]
    else:
        logs = np.log([float(f) for f in found])
        chosen, free = [], np.ones(len(found), dtype=bool)
        for goal in np.linspace(logs[0], logs[-1], num):
            k = int(np.where(free, np.abs(logs - goal).round(12), np.inf).argmin())
            free[k] = False
            chosen.append(found[k])
    return np.array([(f.numerator, f.denominator) for f in sorted(chosen)], dtype=float)


def shifted_share(t: np.ndarray) -> np.ndarray:
    """`x = z / (z + OFFSET)` for shares t = z / (z + 1).

    In t a score of zero, rho = 1, has its pole at infinity; in x no generic score has.
    """
    return t / (t + OFFSET * (1 - t))


def loewner_pencil(t: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Loewner matrices (L, L_shifted), (M, n/2, n/2), of values y (M, n) at increasing t (n,).

    `L_ij = (y(a_i) - y(b_j)) / (a_i - b_j)` with every other point in a; the eigenvalues of the
    pencil (L_shifted, L) are the poles, and L has the rank of the function.
    """
    a, b = t[::2], t[1::2]
    gap = a[:, None] - b
    ya, yb = y[..., ::2, None], y[..., None, 1::2]
    return (ya - yb) / gap, (a[:, None] * ya - b * yb) / gap


def loewner_ranks(t, y, rtol: float = 1e-13) -> np.ndarray:
    """Numerical rank of the Loewner matrix of each pair, (M,)."""
    values = np.linalg.svd(loewner_pencil(t, y)[0], compute_uv=False)
    return (values > rtol * values[..., :1]).sum(-1)


def pair_jacobian(t, s, g) -> np.ndarray:
    """Derivative of r(t) by (s, g), (M, n, 2H); at t = 1 it is one in g and zero in s."""
    with np.errstate(divide="ignore"):
        shares = expit(s[..., None, :] + np.log(t / (1 - t))[:, None])
    return np.concatenate([g[..., None, :] * shares * (1 - shares), shares], axis=-1)


def separate_heads(t, r, num_heads: int, refinements: int = 3) -> PairHeads:
    """Scores and values of the heads of each pair from answers r (M, n) at shares t (n,).

    Poles from the pencil, reduced to its leading `num_heads` singular directions when there are
    more samples than unknowns; values by least squares; then Gauss-Newton steps on the samples
    of the pair. A pole that is complex, non-finite or not that of a head makes a pair not ok; its
    place is taken by a start for a joint fit, and the caller must judge that fit. Raises
    ValueError for fewer than 2 H samples.
    """
    t, r = np.asarray(t, dtype=float), np.atleast_2d(np.asarray(r, dtype=float))
    if len(t) < 2 * num_heads or len(t) % 2:
        raise ValueError(f"{len(t)} samples: expected an even number of at least {2 * num_heads}")
    order = np.argsort(t)
    t, r = t[order], r[:, order]
    x = shifted_share(t)
    flat, shifted = loewner_pencil(x, r / x)
    if flat.shape[-1] > num_heads:
        left, _, right = np.linalg.svd(flat)
        left, right = left[..., :num_heads], right[..., :num_heads, :]
        flat, shifted = (left.mT @ part @ right.mT for part in (flat, shifted))
    with np.errstate(all="ignore"):
        pole = _eigenvalues(flat, shifted)
        rho = -OFFSET * pole / (1 - pole)
        ok = np.isfinite(rho).all(-1) & (rho.real > 0).all(-1)
        ok &= (np.abs(rho.imag) < 1e-9 * np.abs(rho)).all(-1)
        usable = np.isfinite(rho.real) & (rho.real > 0)
        s = -np.log(np.where(usable, rho.real, 1.0))
    shares = pair_jacobian(t, s, np.ones_like(s))[..., num_heads:]
    g = _least_squares(shares, r)
    for _ in range(refinements):
        step = _newton_step(t, r, s, g)
        fine = np.isfinite(step).all(-1, keepdims=True) & (np.abs(step).max(-1, keepdims=True) < 1)
        step = np.where(fine, step, 0.0)
        s, g = s + step[:, :num_heads], g + step[:, num_heads:]
    return PairHeads(s, g, ok)


def pair_variances(t, pair: PairHeads) -> tuple[np.ndarray, np.ndarray]:
    """Variances of s and g per unit variance of the answers: rows of the pseudo-inverse."""
    rows = np.linalg.pinv(pair_jacobian(t, pair.s, pair.g), rcond=1e-15)
    variance = np.square(rows).sum(-1)
    heads = pair.s.shape[-1]
    return variance[..., :heads], variance[..., heads:]


def condition(t, s, g) -> np.ndarray:
    """`1 / sigma_min` of the Jacobian of one pair: digits lost, as a factor; queries.X3."""
    return 1 / np.linalg.svd(pair_jacobian(np.asarray(t), s, g), compute_uv=False)[..., -1]


def _least_squares(matrices, r) -> np.ndarray:
    """Least squares for each pair; by LU or QR, by singular values if a pair is singular."""
    rows, columns = matrices.shape[-2:]
    try:
        if rows == columns:
            return np.linalg.solve(matrices, r[..., None])[..., 0]
        q, triangle = np.linalg.qr(matrices)
        return np.linalg.solve(triangle, q.mT @ r[..., None])[..., 0]
    except np.linalg.LinAlgError:
        return (np.linalg.pinv(matrices) @ r[..., None])[..., 0]


def _newton_step(t, r, s, g) -> np.ndarray:
    jacobian = pair_jacobian(t, s, g)
    heads = s.shape[-1]
    missing = r - (jacobian[..., heads:] @ g[..., None])[..., 0]
    return _least_squares(jacobian, missing)


def _eigenvalues(flat, shifted) -> np.ndarray:
    """Eigenvalues of the pencils; NaN where one is not finite, those of the range if singular."""
    out = np.full(flat.shape[:-1], np.nan, dtype=complex)
    finite = np.isfinite(flat).all((-1, -2)) & np.isfinite(shifted).all((-1, -2))
    try:
        quotient = np.linalg.solve(flat[finite], shifted[finite])
    except np.linalg.LinAlgError:
        quotient = np.linalg.pinv(flat[finite], rcond=1e-16) @ shifted[finite]
    out[finite] = np.linalg.eigvals(quotient)
    return out
