"""Learn all heads of a black box: probes in a grid, links between cells, a joint polish.

Scores are additive in u inside a column b, and in b inside a row u, which tells whose pole is
whose; a spanning tree of links needs 2 d^2 - 1 pairs. Source: queries.T2, T3, X1, X3.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares, linear_sum_assignment
from scipy.special import expit

from mhabook_lib.query_oracle import (
    QueryHeads,
    QueryOracle,
    RecoveryError,
    ask_probes,
    ask_tokens,
)
from mhabook_lib.rational_probes import (
    PairHeads,
    condition,
    loewner_ranks,
    pair_variances,
    probe_counts,
    separate_heads,
    shifted_share,
)
from mhabook_lib.validation import require_count

DESIGNS = ("stated", "balanced", "infinity", "distinct")
EXACT = 1e-12
CERTAIN = 1e-8
VAGUE = 0.1
MIRROR = 2.5e-3
FAR = 1e30


class Recovery(NamedTuple):
    """Recovered heads and what was seen on the way."""

    heads: QueryHeads
    raw: QueryHeads
    report: dict


class Plan(NamedTuple):
    """Pairs u, b (M, d) by their kind: grid cells, row links, column links."""

    u: np.ndarray
    b: np.ndarray
    cells: np.ndarray  # (d, d) index of the pair (u_i, b_j)
    rows: np.ndarray  # (d - 1, columns with links) index of (u_1 + u_i, b_j)
    columns: np.ndarray  # (d - 1,) index of (u_1, b_1 + b_j); empty when values tell heads apart


def num_queries(num_heads: int, dim: int, design: str = "stated") -> int:
    """How many queries a design asks.

    stated, balanced: `4 H d^2 - 2 H + 1`; infinity: `(2H-1)(2d^2-1) + d`;
    distinct: `(2H-1)(d^2+d-1) + d`. Source: queries.T2, queries.X1.

    >>> [num_queries(5, 6, design) for design in DESIGNS]
    [711, 711, 645, 375]
    """
    if design not in DESIGNS:
        raise ValueError(f"design={design!r}: expected one of {DESIGNS}")
    if design in ("stated", "balanced"):
        return 4 * num_heads * dim**2 - 2 * num_heads + 1
    pairs = 2 * dim**2 - 1 if design == "infinity" else dim**2 + dim - 1
    return (2 * num_heads - 1) * pairs + dim


def query_plan(u_basis: np.ndarray, b_basis: np.ndarray, distinct: bool = False) -> Plan:
    """All pairs of a grid over two bases (d, d), rows are vectors, and its spanning tree."""
    dim = len(u_basis)
    grid = [(u, b) for u in u_basis for b in b_basis]
    linked = 1 if distinct else dim
    rows = [(u_basis[0] + u, b) for u in u_basis[1:] for b in b_basis[:linked]]
    columns = [] if distinct else [(u_basis[0], b_basis[0] + b) for b in b_basis[1:]]
    pairs = np.array(grid + rows + columns).reshape(-1, 2, dim)
    index = np.arange(len(pairs))
    cut = dim**2 + len(rows)
    return Plan(
        pairs[:, 0],
        pairs[:, 1],
        index[: dim**2].reshape(dim, dim),
        index[dim**2 : cut].reshape(dim - 1, linked),
        index[cut:],
    )


def link_heads(first, second, third, *, same_u: bool) -> np.ndarray:
    """Order of the heads of `second` that matches them to those of `first`, (H,).

    Each argument is (s, g, variance of s, variance of g), each (H,), of one pair; the third pair is
    the sum of the two. Scores add; values add too, or are equal when the pairs share u. The cost of
    a triple is its squared misfit in units of its variance, least over the third.
    """
    (sa, ga, psa, pga), (sb, gb, psb, pgb), (sc, gc, psc, pgc) = first, second, third

    def misfit(a, b, c, pa, pb, pc):
        gap = a[:, None, None] + b[:, None] - c
        with np.errstate(all="ignore"):
            return gap**2 / (pa[:, None, None] + pb[:, None] + pc)

    cost = misfit(sa, sb, sc, psa, psb, psc)
    if same_u:
        zero = np.zeros_like(ga)
        cost = cost + misfit(ga, -gb, zero, pga, pgb, zero) + misfit(ga, zero, gc, pga, zero, pgc)
    else:
        cost = cost + misfit(ga, gb, gc, pga, pgb, pgc)
    return linear_sum_assignment(np.nan_to_num(cost.min(-1), nan=FAR, posinf=FAR))[1]


def learn_attention(
    oracle: QueryOracle,
    num_heads: int | None = None,
    *,
    max_heads: int | None = None,
    design: str = "infinity",
    rng: np.random.Generator,
    u_scale: float = 2.0,
) -> Recovery:
    """Recover all heads of `oracle` from queries that are chosen in advance.

    With `max_heads` the number of heads is found as the most frequent rank over all pairs. Raises
    ValueError for impossible arguments, and RecoveryError, with the report, when an answer is not
    finite, no raw model comes out, the model does not explain the answers, or they do not determine
    it.
    """
    bound = num_heads if max_heads is None else max_heads
    _check(num_heads, max_heads, design)
    dim = oracle.dim
    u_basis, b_basis = (
        scale * np.linalg.qr(rng.standard_normal((dim, dim)))[0] for scale in (u_scale, 1.0)
    )
    plan = query_plan(u_basis, b_basis, design == "distinct")
    asked = Asked(oracle, plan, bound, design)
    votes = None if max_heads is None else asked.ranks(b_basis)
    heads = num_heads if votes is None else int(np.bincount(votes).argmax())
    pairs = asked.separate(heads, b_basis, u_basis)
    raw = assemble(plan, asked.shares, pairs, u_basis, b_basis)
    with np.errstate(all="ignore"):
        kappa = condition(asked.shares, pairs.s, pairs.g)
    report = asked.counts_asked | {"num_heads": heads, "votes": votes, "condition": kappa}
    if not np.isfinite(raw.w).all():
        bad = int((~pairs.ok).sum())
        raise RecoveryError(f"{bad} of {len(pairs.ok)} pairs have no admissible poles", report)
    found = polished(raw, asked)
    report["residual"] = asked.residual(found)
    level = oracle.noise or report["residual"] * asked.size
    report["predicted"] = predicted_error(found, asked, level)
    _accept(found, asked, design, oracle.noise, report)
    return Recovery(found, raw, report)


def _accept(found: QueryHeads, asked: Asked, design: str, noise: float, report: dict) -> None:
    """RecoveryError unless the model explains the answers and they determine it."""
    allowed = max(EXACT, 5 * noise / asked.size)
    if not report["residual"] <= allowed:
        raise RecoveryError(
            f"the model found misses the answers by {report['residual']:.2g} of their size: "
            f"expected at most {allowed:.2g}",
            report,
        )
    if design == "distinct" and closest_scores(found, asked.plan) < MIRROR:
        raise RecoveryError("two scores of a pair without links nearly coincide", report)
    certain = VAGUE if noise else CERTAIN
    if not report["predicted"] <= certain:
        raise RecoveryError(
            f"the answers determine the model to {report['predicted']:.2g} only: expected at most "
            f"{certain:g}",
            report,
        )


class Asked:
    """All answers of one plan, and the system they make."""

    def __init__(self, oracle: QueryOracle, plan: Plan, bound: int, design: str):
        self.plan, self.free_limit = plan, design in ("infinity", "distinct")
        samples = 2 * bound - self.free_limit
        kind = "integer" if design == "stated" else "balanced"
        self.counts = probe_counts(samples, samples + 1, kind)
        shares = self.counts[:, 0] / self.counts.sum(1)
        self.shares = np.append(shares, 1.0) if self.free_limit else shares
        bases = plan.b[plan.cells[0]]
        self.singles = bases if self.free_limit else bases[:1]
        before = oracle.num_queries
        self.alone = ask_tokens(oracle, self.singles)
        self.answers = ask_probes(oracle, plan.u, plan.b, self.counts)
        self.counts_asked = {
            "num_queries": oracle.num_queries - before,
            "max_length": oracle.max_length,
        }
        self.size = float(np.abs(self.answers).max())
        if self.size == 0:
            raise RecoveryError("all answers are zero: there is no head to see")

    def ranks(self, b_basis) -> np.ndarray:
        """Ranks of the Loewner matrices of the first column, whose V^T b was asked."""
        rows = np.concatenate([self.plan.cells[:, 0], self.plan.rows[:, 0]])
        r = self.answers[rows] - self.alone[0]
        if self.free_limit:
            limit = self.plan.u[rows] @ np.linalg.solve(b_basis, self.alone)
            r = np.column_stack([r, limit])
        x = shifted_share(self.shares)
        return loewner_ranks(x, r / x)

    def separate(self, heads: int, b_basis, u_basis) -> PairHeads:
        """Heads of every pair; where V was not asked, column 1 gives it."""
        if self.free_limit:
            total = np.linalg.solve(b_basis, self.alone)
            r = self.answers - (self.plan.b @ total)[:, None]
            return separate_heads(self.shares, np.column_stack([r, self.plan.u @ total]), heads)
        first = self.plan.cells[:, 0]
        pair = separate_heads(self.shares, self.answers[first] - self.alone[0], heads)
        total = np.linalg.solve(u_basis, pair.g.sum(-1))
        offset = self.plan.b @ total
        offset[np.all(self.plan.b == b_basis[0], axis=1)] = self.alone[0]
        return separate_heads(self.shares, self.answers - offset[:, None], heads)

    def system(self, heads: QueryHeads) -> tuple[np.ndarray, np.ndarray]:
        """Misfit of all answers and its Jacobian by (W, v), (Q,) and (Q, H (d^2 + d))."""
        return probe_system(
            heads, self.plan.u, self.plan.b, self.counts, self.answers, self.singles, self.alone
        )

    def residual(self, heads: QueryHeads) -> float:
        """Largest misfit over the largest answer."""
        return float(np.abs(self.system(heads)[0]).max() / self.size)


def probe_system(heads, u, b, counts, answers, singles, alone):
    """Misfit of probes and of single tokens, and its derivative by all W, then all v."""
    scores = np.einsum("ma,hac,mc->mh", u, heads.w, b, optimize=True)
    logs = np.log(counts[:, 0] / counts[:, 1])
    shares = expit(scores[:, None] + logs[:, None])
    g = u @ heads.v.T
    misfit = np.einsum("mqh,mh->mq", shares, g) + (b @ heads.total)[:, None] - answers
    slope = shares * (1 - shares) * g[:, None]
    by_w = np.einsum("mqh,ma,mc->mqhac", slope, u, b, optimize=True)
    by_v = shares[..., None] * u[:, None, None] + b[:, None, None]
    size = answers.size
    jacobian = np.concatenate(
        [by_w.reshape(size, heads.w.size), by_v.reshape(size, heads.v.size)], axis=1
    )
    plain = np.zeros((len(singles), jacobian.shape[1]))
    plain[:, heads.w.size :] = np.tile(singles, len(heads.v))
    return (
        np.concatenate([misfit.ravel(), singles @ heads.total - alone]),
        np.concatenate([jacobian, plain]),
    )


def closest_scores(heads: QueryHeads, plan: Plan) -> float:
    """Smallest gap of two scores at a cell outside the first column.

    Scores mirrored at their mean (weighted by the values) give the same answers up to the third
    order of their gap: without links such a pair is not determined by answers with rounding.
    """
    cells = plan.cells[:, 1:].ravel()
    if not len(cells) or len(heads.w) < 2:
        return np.inf
    scores = np.einsum("ma,hac,mc->mh", plan.u[cells], heads.w, plan.b[cells], optimize=True)
    return float(np.diff(np.sort(scores, axis=1), axis=1).min())


def predicted_error(heads: QueryHeads, asked, noise: float) -> float:
    """Largest relative error of a W_h or v_h that `noise^2 (J^T J)^-1` predicts; queries.T4.

    Relative to the head's own norm, or to a hundredth of the largest where that is more.
    """
    _, scales, directions = np.linalg.svd(asked.system(heads)[1], full_matrices=False)
    scales = np.maximum(scales, np.finfo(float).eps * scales[0])  # undetermined, not left out
    variance = np.square(noise * directions / scales[:, None]).sum(0)
    errors = []
    for part, value in zip(np.split(variance, [heads.w.size]), heads, strict=True):
        norms = np.linalg.norm(value.reshape(len(value), -1), axis=1)
        size = np.sqrt(part.reshape(len(value), -1).sum(1))
        errors.append(size / np.maximum(norms, norms.max() / 100))
    return float(np.max(errors))


def polished(start: QueryHeads, asked) -> QueryHeads:
    """Levenberg-Marquardt (MINPACK, by QR) on all answers and all parameters at once."""
    cut = start.w.size

    def unpack(flat):
        return QueryHeads(flat[:cut].reshape(start.w.shape), flat[cut:].reshape(start.v.shape))

    with np.errstate(over="ignore"):
        done = least_squares(
            lambda flat: asked.system(unpack(flat))[0],
            np.concatenate([start.w.ravel(), start.v.ravel()]),
            jac=lambda flat: asked.system(unpack(flat))[1],
            method="lm",
            xtol=1e-15,
            ftol=1e-15,
            gtol=1e-15,
            max_nfev=60,
        )
    return unpack(done.x)


def assemble(plan: Plan, t, pairs: PairHeads, u_basis, b_basis) -> QueryHeads:
    """Put the heads of all cells in one order along the links, and solve for W and v."""
    dim, columns = plan.cells.shape
    heads = pairs.s.shape[-1]
    with np.errstate(all="ignore"):
        facts = (pairs.s, pairs.g, *pair_variances(t, pairs))
    at = [tuple(part[k] for part in facts) for k in range(len(pairs.s))]
    order = np.tile(np.arange(heads), (dim, columns, 1))
    for j in range(columns):
        if j and len(plan.columns):
            top, own, both = plan.cells[0, 0], plan.cells[0, j], plan.columns[j - 1]
            order[0, j] = link_heads(at[top], at[own], at[both], same_u=True)
        for i in range(1, dim):
            if j < plan.rows.shape[1]:
                top, own, both = plan.cells[0, j], plan.cells[i, j], plan.rows[i - 1, j]
                order[i, j] = link_heads(at[top], at[own], at[both], same_u=False)[order[0, j]]
    if not len(plan.columns):
        match_by_value(plan, pairs, order)
    cell = np.take_along_axis(pairs.s[plan.cells], order, -1)
    values = np.take_along_axis(pairs.g[plan.cells], order, -1).mean(1)
    left = np.linalg.solve(u_basis, cell.transpose(2, 0, 1))
    w = np.linalg.solve(b_basis, left.mT).mT
    return QueryHeads(w, np.linalg.solve(u_basis, values).T)


def match_by_value(plan: Plan, pairs: PairHeads, order: np.ndarray) -> None:
    """Columns after the first by their values g, which do not depend on b; in place."""
    rows, columns = plan.cells.shape
    for i in range(rows):
        wanted = pairs.g[plan.cells[i, 0]][order[i, 0]]
        for j in range(1, columns):
            gap = np.abs(wanted[:, None] - pairs.g[plan.cells[i, j]])
            order[i, j] = linear_sum_assignment(np.nan_to_num(gap, nan=FAR, posinf=FAR))[1]


def _check(num_heads, max_heads, design) -> None:
    if design not in DESIGNS:
        raise ValueError(f"design={design!r}: expected one of {DESIGNS}")
    if (num_heads is None) == (max_heads is None):
        raise ValueError(
            f"num_heads={num_heads}, max_heads={max_heads}: expected exactly one of them"
        )
    name, bound = ("num_heads", num_heads) if max_heads is None else ("max_heads", max_heads)
    require_count(name, bound)
