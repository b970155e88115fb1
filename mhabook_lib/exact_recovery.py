"""The stated recipe in exact-like arithmetic: as many decimal digits as wanted (mpmath).

Slow, for small cases: it shows that the recipe is exact, by errors that fall with every digit.
Source: queries.T2 and T3.
"""

from __future__ import annotations

import mpmath as mp
import numpy as np
from scipy.optimize import linear_sum_assignment

from mhabook_lib.query_oracle import QueryHeads, canonical_heads
from mhabook_lib.query_recovery import query_plan


def exact_recovery(
    heads: QueryHeads,
    digits: int,
    rng: np.random.Generator,
    *,
    max_heads: int | None = None,
) -> tuple[mp.mpf, int, int, int]:
    """Relative error, number of queries, longest sequence, and number of heads found.

    All of it at `digits` decimal digits. With `max_heads` the number of heads is the rank of the
    Loewner matrix of the first pair. The error is that against the canonical form of `heads`.
    """
    bound = max_heads or len(heads.w)
    dim, counted = heads.dim, {"queries": 0, "length": 0}
    with mp.workdps(digits):
        w = [mp.matrix(a.tolist()) for a in heads.w]
        v = [mp.matrix(a.tolist()) for a in heads.v]
        bases = rng.standard_normal((2, dim, dim))
        plan = query_plan(*bases)

        def ask(u, b, copies):
            """f of `copies` times b + u and once b, or of b alone."""
            counted["queries"] += 1
            counted["length"] = max(counted["length"], copies + 1)
            u, b = mp.matrix(u.tolist()), mp.matrix(b.tolist())
            answer = mp.mpf(0)
            for matrix, value in zip(w, v, strict=True):
                z = copies * mp.exp((u.T * matrix * b)[0])
                answer += (value.T * b)[0] + (value.T * u)[0] * z / (1 + z)
            return answer

        copies = range(1, 2 * bound + 1)
        answers = [[ask(u, b, c) for c in copies] for u, b in zip(plan.u, plan.b, strict=True)]
        alone = ask(np.zeros(dim), plan.b[plan.cells[0, 0]], 0)
        count = _rank([a - alone for a in answers[0]], digits) if max_heads else len(heads.w)
        first = [_separate([a - alone for a in answers[k]], count) for k in plan.cells[:, 0]]
        u_inverse = mp.inverse(mp.matrix(bases[0].tolist()))
        b_inverse = mp.inverse(mp.matrix(bases[1].tolist()))
        total = u_inverse * mp.matrix([sum(g) for _, g in first])
        offsets = [(total.T * mp.matrix(b.tolist()))[0] for b in plan.b]
        pairs = [
            _separate([a - offset for a in row], count)
            for row, offset in zip(answers, offsets, strict=True)
        ]
        found_w, found_v = _assembled(plan, pairs, count, u_inverse, b_inverse)
        truth = canonical_heads(heads)
        if count != len(truth.w):
            return mp.inf, *counted.values(), count
        w, v = ([mp.matrix(a.tolist()) for a in part] for part in truth)
        return _error(found_w, found_v, w, v), *counted.values(), count


def _pencil(r):
    y = [value / (k + 1) for k, value in enumerate(r)]
    a, b = range(0, len(y), 2), range(1, len(y), 2)
    flat = mp.matrix([[(y[i] - y[j]) / (i - j) for j in b] for i in a])
    shifted = mp.matrix([[((i + 1) * y[i] - (j + 1) * y[j]) / (i - j) for j in b] for i in a])
    return flat, shifted


def _rank(r, digits: int) -> int:
    values = mp.svd_r(_pencil(r)[0], compute_uv=False)
    return sum(1 for value in values if value > mp.mpf(10) ** (-digits // 2) * values[0])


def _separate(r, count: int):
    """Scores and values of one pair from its values at c = 1, 2, ..., by pencil and solve."""
    flat, shifted = _pencil(r[: 2 * count])
    pencil = mp.inverse(flat) * shifted
    poles = [pencil[0]] if count == 1 else mp.eig(pencil, left=False, right=False)
    rho = [-mp.re(pole) for pole in poles]
    shares = mp.matrix([[c / (c + p) for p in rho] for c in range(1, count + 1)])
    return [-mp.log(p) for p in rho], list(mp.lu_solve(shares, mp.matrix(r[:count])))


def _assembled(plan, pairs, count, u_inverse, b_inverse):
    dim = len(plan.cells)
    order = {(0, 0): list(range(count))}
    for j in range(dim):
        if j:
            order[0, j] = _link(
                plan, pairs, plan.cells[0, 0], plan.cells[0, j], plan.columns[j - 1]
            )
        for i in range(1, dim):
            top, own, both = plan.cells[0, j], plan.cells[i, j], plan.rows[i - 1, j]
            link = _link(plan, pairs, top, own, both)
            order[i, j] = [link[k] for k in order[0, j]]
    found_w, found_v = [], []
    for h in range(count):
        scores, values = mp.matrix(dim, dim), mp.matrix(dim, 1)
        for (i, j), place in order.items():
            s, g = pairs[plan.cells[i, j]]
            scores[i, j] = s[place[h]]
            values[i] += g[place[h]] / dim
        found_w.append(u_inverse * scores * b_inverse.T)
        found_v.append(u_inverse * values)
    return found_w, found_v


def _link(plan, pairs, first, second, third) -> list[int]:
    """Scores add along a link; the smallest misfit decides."""
    (a, _), (b, _), (c, _) = (pairs[k] for k in (first, second, third))
    cost = np.array([[float(min(abs(x + y - z) for z in c)) for y in b] for x in a])
    with np.errstate(divide="ignore"):
        return linear_sum_assignment(np.maximum(np.log(cost), -1e4))[1].tolist()


def _error(found_w, found_v, w, v) -> mp.mpf:
    cost = [[mp.mnorm(a - b, "f") / mp.mnorm(b, "f") for b in w] for a in found_w]
    rows, columns = linear_sum_assignment(np.array([[float(x) for x in row] for row in cost]))
    pairs = list(zip(rows, columns, strict=True))
    values = [mp.norm(found_v[i] - v[j]) / mp.norm(v[j]) for i, j in pairs]
    return max([cost[i][j] for i, j in pairs] + values)
