"""Cold probing: make attention so sharp that one head at a time switches.

With u of length beta a head is on or off except in a thin slab around (W_h b).u = 0. Along a half
circle of u the answer is a staircase with one step a head: plateaus give the values, steps the
score matrices. No poles, no matching, sequences of length 3. Source: queries.X5; the method is
ours.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import logit

from mhabook_lib.query_oracle import (
    QueryHeads,
    QueryOracle,
    RecoveryError,
    ask_probes,
    ask_tokens,
)
from mhabook_lib.query_recovery import Recovery, polished, probe_system
from mhabook_lib.validation import require_count, require_positive

FLAT = 1e-6
SHORT = np.array([[1.0, 1.0], [1.0, 2.0], [2.0, 1.0], [1.0, 3.0]])
EXACT = 1e-11


class _Refused(Exception):
    """This circle does not separate the heads: draw another one."""


def learn_attention_cold(
    oracle: QueryOracle,
    num_heads: int,
    *,
    rng: np.random.Generator,
    beta: float | None = None,
    redraws: int = 4,
) -> Recovery:
    """Recover `num_heads` heads in float64, far beyond where rational interpolation survives.

    `beta` (length of u) is 3000 + 300 H^2 when left out. Raises ValueError for impossible
    arguments, and RecoveryError when no circle out of 1 + `redraws` separates the heads or the
    polished model misses the answers: never a wrong model.
    """
    require_count("num_heads", num_heads)
    beta = 3000.0 + 300.0 * num_heads**2 if beta is None else beta
    require_positive("beta", beta)
    if oracle.dim < 2:
        raise ValueError(f"dim={oracle.dim}: a half circle of directions needs d >= 2")
    reasons: list[str] = []
    for _ in range(1 + redraws):
        try:
            circle = Circle(oracle, num_heads, beta, rng)
            raw = circle.heads()
            sample = ShortProbes(oracle, num_heads, rng)
            found = polished(raw, sample)
            residual = float(np.abs(sample.system(found)[0]).max() / sample.size)
            if not residual <= EXACT:
                raise _Refused(f"the polished model misses the answers by {residual:.2g}")
            return Recovery(found, raw, _report(oracle, reasons) | {"residual": residual})
        except _Refused as reason:
            reasons.append(str(reason))
    raise RecoveryError(
        f"no model after {1 + redraws} circles: {reasons[-1]}", _report(oracle, reasons)
    )


def _report(oracle, reasons) -> dict:
    return {
        "num_queries": oracle.num_queries,
        "max_length": oracle.max_length,
        "refused_circles": reasons,
    }


class ShortProbes:
    """Well conditioned random pairs at few copies, for the joint polish."""

    def __init__(self, oracle: QueryOracle, num_heads: int, rng):
        dim = oracle.dim
        count = max(dim**2 + dim, math.ceil(1.5 * num_heads * (dim**2 + dim) / 4))
        u, b = rng.standard_normal((2, count, dim))
        self.u = 2 * u / np.linalg.norm(u, axis=1, keepdims=True)
        self.b = b / np.linalg.norm(b, axis=1, keepdims=True)
        self.answers = ask_probes(oracle, self.u, self.b, SHORT)
        self.size = float(np.abs(self.answers).max())

    def system(self, heads: QueryHeads):
        nothing = np.zeros((0, heads.dim))
        return probe_system(heads, self.u, self.b, SHORT, self.answers, nothing, np.zeros(0))


class Circle:
    """One staircase: `u(t) = beta (p cos t + q sin t)`, t in [0, pi], at the query b."""

    def __init__(self, oracle: QueryOracle, num_heads: int, beta: float, rng):
        self.oracle, self.num_heads, self.beta = oracle, num_heads, beta
        dim = oracle.dim
        self.total = ask_tokens(oracle, np.eye(dim))
        b = rng.standard_normal(dim)
        self.b = b / np.linalg.norm(b)
        self.frame = np.linalg.qr(rng.standard_normal((dim, dim)))[0]

    def u(self, t) -> np.ndarray:
        t = np.asarray(t)[..., None]
        return self.beta * (self.frame[0] * np.cos(t) + self.frame[1] * np.sin(t))

    def answers(self, u, b=None, copies: int = 1) -> np.ndarray:
        """f - V^T b of length-2 (or longer) probes."""
        b = self.b if b is None else b
        u = np.atleast_2d(u)
        counts = np.array([[float(copies), 1.0]])
        b = np.broadcast_to(b, u.shape)
        return ask_probes(self.oracle, u, b, counts)[:, 0] - b @ self.total

    def heads(self) -> QueryHeads:
        """All heads, one for each step between two plateaus."""
        plateaus = self.plateaus()
        values = [self.plateau_vector(*ends) for ends in plateaus]
        w, v = [], []
        for k in range(self.num_heads):
            jump = values[k + 1] - values[k]
            matrix, sign = self.step(plateaus[k], plateaus[k + 1], values[k], jump)
            w.append(sign * matrix)
            v.append(sign * jump)
        return QueryHeads(np.array(w), np.array(v))

    def plateaus(self) -> list[tuple[float, float]]:
        """Intervals of t on which f - V^T b is linear in u; there must be H + 1."""
        width = math.pi / (4 * self.num_heads)
        left = width * np.arange(4 * self.num_heads)
        flat: list[tuple[float, float]] = []
        while width > 1.5 / self.beta and len(left):
            t = left[:, None] + width * np.array([0.0, 0.31, 0.5, 1.0])
            f = self.answers(self.u(t).reshape(-1, self.oracle.dim)).reshape(t.shape)
            design = np.stack([np.cos(t), np.sin(t)], axis=-1)
            fit = design @ (np.linalg.pinv(design) @ f[..., None])
            good = np.abs(fit[..., 0] - f).max(-1) < FLAT * self.beta
            flat += [(a, a + width) for a in left[good]]
            width /= 2
            left = np.concatenate([left[~good], left[~good] + width])
        joined: list[list[float]] = []
        for a, b in sorted(flat):
            if joined and a - joined[-1][1] < 1e-12:
                joined[-1][1] = b
            else:
                joined.append([a, b])
        found = [(a, b) for a, b in joined if b - a > 20 / self.beta]
        if len(found) != self.num_heads + 1:
            raise _Refused(f"{len(found)} plateaus: expected {self.num_heads + 1}")
        return found

    def plateau_vector(self, start: float, end: float) -> np.ndarray:
        """The sum v^S of the values of the heads that are on: f - V^T b = v^S . u there."""
        middle, dim = self.u((start + end) / 2), self.oracle.dim
        reach = 0.1 * (end - start) * self.beta
        around = np.vstack([np.zeros(dim), self.frame[1:], self.frame[1:].sum(0) / dim])
        for _ in range(12):
            u = middle + reach * around
            f = self.answers(u)
            vector = np.linalg.solve(u[:dim], f[:dim])
            if abs(u[dim] @ vector - f[dim]) < 1e-12 * self.beta:
                return vector
            reach *= 0.3
        raise _Refused("a plateau is not linear")

    def step(self, before, after, low, jump) -> tuple[np.ndarray, float]:
        """(W_h, +1) or (-W_h, -1) of the head that switches between two plateaus."""

        def share(u, b=None, copies=1):
            u = np.atleast_2d(u)
            return (self.answers(u, b, copies) - u @ low) / (u @ jump)

        middle = self.u(self.halfway(before[1], after[0], share))
        normal = self.rough_normal(middle, after[0] - before[1], share)
        matrix = self.score_matrix(
            middle, normal, min(before[1] - before[0], after[1] - after[0]), share
        )
        shift = logit(share(middle, copies=2)) - logit(share(middle))
        if not np.isfinite(shift[0]) or abs(abs(shift[0]) - math.log(2)) > 0.05 * math.log(2):
            raise _Refused("a step that is not that of one head")
        return matrix, math.copysign(1.0, shift[0])

    def halfway(self, low, high, share) -> float:
        rising = share(self.u(high))[0] > 0.5
        for _ in range(80):
            t = (low + high) / 2
            phi = share(self.u(t))[0]
            if 0.3 < phi < 0.7:
                return t
            low, high = (low, t) if (phi > 0.5) == rising else (t, high)
        raise _Refused("a step without a middle")

    def rough_normal(self, middle, length, share) -> np.ndarray:
        """w = W_h b near enough: solves u_i . w = logit of the share at d points."""
        dim, reach = self.oracle.dim, max(length, 1 / self.beta) / 40 * self.beta
        around = np.vstack(
            [np.zeros(dim), np.linalg.qr(np.vstack([middle, np.eye(dim)]).T)[0].T[1:]]
        )
        for _ in range(40):
            u = middle + reach * around
            phi = share(u)
            if np.all((phi > 0.01) & (phi < 0.99)):
                return np.linalg.solve(u, logit(phi))
            reach *= 0.4
        raise _Refused("a step too steep to measure")

    def score_matrix(self, middle, normal, plateau, share) -> np.ndarray:
        """W_h column by column: scores at d points near the slab, at b and at b + e_j / beta."""
        dim, size = self.oracle.dim, normal @ normal
        along = np.linalg.qr(np.vstack([normal, middle, np.eye(dim)]).T)[0].T[2:dim]
        reach, goals = 0.1 * plateau, np.zeros(dim)
        goals[-1] = 1.5
        queries = [self.b, *(self.b + np.eye(dim) / self.beta)]
        for _ in range(40):
            u = np.vstack([middle, middle + reach * self.beta * along, middle])
            u = u + ((goals - u @ normal) / size)[:, None] * normal
            phi = np.stack([share(u, b) for b in queries])
            inside = np.all((phi > 1e-4) & (phi < 1 - 1e-4))
            if inside and np.abs(logit(phi[0, :-1])).max() < 0.05:
                scores = logit(phi)
                return self.beta * np.linalg.solve(u, (scores[1:] - scores[0]).T)
            reach *= 0.4
        raise _Refused("no points near the slab of a step")
