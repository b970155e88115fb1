"""Learners that ask fewer questions: by continuation, and in two rounds with dual directions.

Continuation asks `H (d^2 + d) + 1` queries, one more than the number of parameters; dual probing
shows at most two heads at a time once the values are known. Both are ours; queries.X2, X7.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.special import expit, logit

from mhabook_lib.query_oracle import (
    QueryHeads,
    QueryOracle,
    RecoveryError,
    ask_probes,
    ask_tokens,
    probe_outputs,
)
from mhabook_lib.query_recovery import Plan, Recovery, assemble, polished, probe_system
from mhabook_lib.rational_probes import probe_counts, separate_heads
from mhabook_lib.validation import require_count, require_positive

WORST_VALUES = 1e6
EXACT = 1e-11
VERIFIED = 1e-5
CHECKS = 2
ONCE = np.array([[1.0, 1.0]])
THREE = np.array([[1.0, 2.0], [1.0, 1.0], [2.0, 1.0]])


class Answers:
    """Probes that were asked one group after the other, as one system for a joint fit."""

    def __init__(self, oracle: QueryOracle):
        self.oracle, self.groups = oracle, []
        self.singles, self.alone = np.zeros((0, oracle.dim)), np.zeros(0)

    def single(self, b) -> np.ndarray:
        self.singles = np.atleast_2d(b)
        self.alone = ask_tokens(self.oracle, self.singles)
        return self.alone

    def probe(self, u, b, counts) -> np.ndarray:
        u, b = np.broadcast_arrays(np.atleast_2d(u), np.atleast_2d(b))
        answers = ask_probes(self.oracle, u, b, counts)
        self.groups.append((u, b, counts, answers))
        return answers

    @property
    def size(self) -> float:
        return max(float(np.abs(group[3]).max()) for group in self.groups)

    def system(self, heads: QueryHeads):
        nothing = (np.zeros((0, heads.dim)), np.zeros(0))
        parts = [probe_system(heads, *group, *nothing) for group in self.groups]
        u, b, counts, answers = self.groups[0]
        alone = probe_system(heads, u[:0], b[:0], counts, answers[:0], self.singles, self.alone)
        misfits, jacobians = zip(*parts, alone, strict=True)
        return np.concatenate(misfits), np.concatenate(jacobians)

    def finished(self, raw: QueryHeads, report: dict, rng) -> Recovery:
        """Polish on everything that was asked, then verify on CHECKS random probes.

        With hardly more answers than parameters a wrong model may fit them all: only further
        questions tell. RecoveryError when the model does not explain one or the other.
        """
        report |= {"num_queries": self.oracle.num_queries, "max_length": self.oracle.max_length}
        if not all(np.isfinite(part).all() for part in raw):
            raise RecoveryError("the raw model is not finite", report)
        found = polished(raw, self)
        report["residual"] = float(np.abs(self.system(found)[0]).max() / self.size)
        u, b = rng.standard_normal((2, CHECKS, raw.dim))
        heard = ask_probes(self.oracle, u, b, ONCE)
        report["verification"] = float(
            np.abs(probe_outputs(found, u, b, ONCE) - heard).max() / self.size
        )
        for name, allowed in (("residual", EXACT), ("verification", VERIFIED)):
            if not report[name] <= allowed:
                raise RecoveryError(
                    f"{name} {report[name]:.2g} of the size of the answers: expected at most "
                    f"{allowed:g}",
                    report,
                )
        return Recovery(found, raw, report)


def learn_by_continuation(
    oracle: QueryOracle, num_heads: int, *, rng: np.random.Generator, step: float = 0.03
) -> Recovery:
    """Recover from `H (d^2 + d) + 1` queries: one rational fit, then small steps from it.

    At u_1 + step q_i heads keep their labels by nearness; then the values are known, and at b_1 +
    step q_j only H scores per pair are new: H counts and Newton's method from the neighbour. Local:
    exact for a small enough step only. Two more queries verify the result; RecoveryError when it
    does not explain the answers. Source: queries.X2.
    """
    require_count("num_heads", num_heads)
    require_positive("step", step)
    dim, asked = oracle.dim, Answers(oracle)
    u, b = (np.linalg.qr(rng.standard_normal((dim, dim)))[0] for _ in range(2))
    u = 2 * np.vstack([u[0], u[0] + step * u[1:]])
    b = np.vstack([b[0], b[0] + step * b[1:]])
    alone = asked.single(b[:1])[0]
    counts = probe_counts(2 * num_heads, 2 * num_heads + 1)
    t = counts[:, 0] / counts.sum(1)
    pair = separate_heads(t, asked.probe(u, b[:1], counts) - alone, num_heads)
    s, g = pair.s.copy(), pair.g.copy()
    for i in range(1, dim):
        gap = np.abs(s[0][:, None] - s[i]) + np.abs(g[0][:, None] - g[i])
        order = linear_sum_assignment(np.nan_to_num(gap, nan=1e30, posinf=1e30))[1]
        s[i], g[i] = s[i][order], g[i][order]
    v = np.linalg.solve(u, g)
    few = probe_counts(num_heads, 2 * num_heads + 1)
    logs = np.log(few[:, 0] / few[:, 1])
    scores = [s]
    for other in b[1:]:
        r = asked.probe(u, other, few) - other @ v.sum(1)
        scores.append(_newton_scores(s, g, r, logs))
    left = np.linalg.solve(u, np.stack(scores, axis=1).transpose(2, 0, 1))
    return asked.finished(QueryHeads(np.linalg.solve(b, left.mT).mT, v.T), {}, rng)


def _newton_scores(s, g, r, logs, iterations: int = 12) -> np.ndarray:
    """Scores (M, H) near s with `r = sum_h g_h sigmoid(s_h + log z)` at H values of z."""
    for _ in range(iterations):
        shares = expit(s[:, None] + logs[:, None])
        slope = shares * (1 - shares) * g[:, None]
        missing = r - np.einsum("mqh,mh->mq", shares, g)
        s = s + np.clip((np.linalg.pinv(slope) @ missing[..., None])[..., 0], -0.5, 0.5)
    return s


def dual_query_count(num_heads: int, dim: int) -> int:
    """`(2H-1)(2d-1) + d + (d-1)(H d + H(H-1)/2)`; queries.X7.

    >>> [dual_query_count(*shape) for shape in ((1, 3), (2, 3), (3, 4), (5, 8))]
    [14, 32, 84, 493]
    """
    pairs = num_heads * (num_heads - 1) // 2
    first = (2 * num_heads - 1) * (2 * dim - 1) + dim
    return first + (dim - 1) * (num_heads * dim + pairs)


def learn_by_dual_probes(
    oracle: QueryOracle, num_heads: int, *, rng: np.random.Generator
) -> Recovery:
    """Two rounds: one column as usual, then probes in directions dual to the values.

    Round 1 gives all v_h and W_h b_1. With `v_k . u_h = 0` for k != h a probe at u_h shows head h
    alone; a probe between two dual directions shows two, whose poles solve a quadratic equation.
    Raises ValueError for more heads than dimensions, and RecoveryError when the values are nearly
    dependent (condition above 1e6) or the result does not explain the answers. Source: queries.X7.
    """
    require_count("num_heads", num_heads)
    dim, asked = oracle.dim, Answers(oracle)
    if num_heads > dim:
        raise ValueError(f"num_heads={num_heads}: independent values need at most dim={dim} heads")
    u, b = (np.linalg.qr(rng.standard_normal((dim, dim)))[0] for _ in range(2))
    total = np.linalg.solve(b, asked.single(b))
    v, first = _first_column(asked, 2 * u, b[0], total, num_heads)
    spread = float(np.linalg.cond(v))
    if not spread < WORST_VALUES:
        raise RecoveryError(f"the values v_h are nearly dependent: condition {spread:.2g}", {})
    dual = np.linalg.pinv(v).T
    dual = 2 * dual / np.linalg.norm(dual, axis=1, keepdims=True)
    free = 2 * np.linalg.svd(v)[2][num_heads:]
    columns = [first] + [_dual_column(asked, dual, free, v, total, other) for other in b[1:]]
    w = np.linalg.solve(b, np.stack(columns, axis=0).transpose(1, 0, 2)).mT
    return asked.finished(QueryHeads(w, v), {"condition": spread}, rng)


class OneColumn:
    """The answers at one b see W_h b only: the rest of W_h is held at zero."""

    def __init__(self, asked: Answers, b: np.ndarray):
        self.asked = asked
        self.others = np.linalg.svd(b[None])[2][1:]

    def system(self, heads: QueryHeads):
        misfit, jacobian = self.asked.system(heads)
        rows, dim = heads.v.shape
        held = np.zeros((rows * dim * (dim - 1), jacobian.shape[1]))
        held[:, : heads.w.size] = np.kron(np.eye(rows * dim), self.others)
        rest = (heads.w @ self.others.T).ravel()
        return np.concatenate([misfit, rest]), np.concatenate([jacobian, held])


def _first_column(asked: Answers, u, b, total, num_heads):
    """Values v (H, d) and W_h b (H, d) from the pairs of one column and its links."""
    dim = len(u)
    pairs = np.vstack([u, u[0] + u[1:]])
    counts = probe_counts(2 * num_heads - 1, 2 * num_heads)
    t = np.append(counts[:, 0] / counts.sum(1), 1.0)
    r = asked.probe(pairs, b, counts) - b @ total
    found = separate_heads(t, np.column_stack([r, pairs @ total]), num_heads)
    index = np.arange(2 * dim - 1)
    plan = Plan(
        pairs, np.broadcast_to(b, pairs.shape), index[:dim, None], index[dim:, None], index[:0]
    )
    column = assemble(plan, t, found, u, np.eye(1))
    if not all(np.isfinite(part).all() for part in column):
        raise RecoveryError("the first column has no finite model", {})
    joint = polished(QueryHeads(column.w * b, column.v), OneColumn(asked, b))
    return joint.v, joint.w @ b


def _dual_column(asked: Answers, dual, free, v, total, b) -> np.ndarray:
    """W_h b (H, d) for a new b, from scores along dual and free directions."""
    heads, dim = v.shape
    g = np.einsum("hd,hd->h", dual, v)
    offset = b @ total
    alone = np.concatenate([dual[:, None], dual[:, None] + free], axis=1)
    f = asked.probe(alone.reshape(-1, dim), b, ONCE)[:, 0].reshape(heads, -1) - offset
    with np.errstate(all="ignore"):
        seen = logit(f / g[:, None])
    scores = np.zeros((heads, dim))
    scores[np.arange(heads), np.arange(heads)] = seen[:, 0]
    scores[:, heads:] = seen[:, 1:] - seen[:, :1]
    for h in range(heads):
        for k in range(h + 1, heads):
            mix = 2 * g[h] / g[k]
            r = asked.probe(dual[h] + mix * dual[k], b, THREE)[0] - offset
            sh, sk = _two_scores(r, g[h], mix * g[k])
            scores[h, k] = (sh - seen[h, 0]) / mix
            scores[k, h] = sk - mix * seen[k, 0]
    return np.linalg.solve(np.vstack([dual, free]), scores.T).T


def _two_scores(r, gh, gk) -> tuple[float, float]:
    """Scores of two heads with known values from r at z = 1/2, 1, 2; NaN where there are none."""
    z = THREE[:, 0] / THREE[:, 1]
    y = r / z
    system = np.stack([y * z, y, -np.ones(3)], axis=1)
    if np.linalg.matrix_rank(system) < 3:  # one of the heads is saturated at all three
        return np.nan, np.nan
    e1, e2, mixed = np.linalg.solve(system, (gh + gk) * z - y * z**2)
    roots = np.roots([1.0, -e1, e2]).astype(complex)
    if np.abs(roots.imag).max() > 1e-6 * np.abs(roots).max() or roots.real.min() <= 0:
        return np.nan, np.nan
    one, two = roots.real
    straight, crossed = (abs(gh * q + gk * p - mixed) for p, q in ((one, two), (two, one)))
    rho_h, rho_k = (one, two) if straight < crossed else (two, one)
    return -np.log(rho_h), -np.log(rho_k)
