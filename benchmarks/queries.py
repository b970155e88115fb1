"""Queries: answering, separating, linking and learning against the plain ways."""

from __future__ import annotations

from itertools import permutations

import numpy as np

from mhabook_lib.distillation import distil
from mhabook_lib.query_oracle import (
    QueryOracle,
    probe_outputs,
    random_query_heads,
    recovery_error,
    sequence_outputs,
)
from mhabook_lib.query_recovery import Asked, learn_attention, link_heads, query_plan
from mhabook_lib.rational_probes import probe_counts, separate_heads

from .timing import largest_gaps, row


def sequences(u, b, counts):
    """All probes as full sequences, grouped by their counts."""
    return [
        np.concatenate([np.repeat((u + b)[:, None], c, 1), np.repeat(b[:, None], m, 1)], axis=1)
        for c, m in counts.astype(int)
    ]


def batched_answers(heads, groups):
    return np.stack([sequence_outputs(heads, x) for x in groups], axis=1)


def looped_answers(heads, groups):
    return np.stack([np.array([sequence_outputs(heads, x[None])[0] for x in g]) for g in groups], 1)


def answering(other_name: str, other):
    """All probes of the stated plan, five heads, d = 6."""
    rng = np.random.default_rng(0)
    heads = random_query_heads(5, 6, rng, 0.4)
    u, b = rng.standard_normal((2, 71, 6))
    counts = probe_counts(10, 11, "integer")
    groups = sequences(u, b, counts)
    return row(
        "queries",
        "answers to probes",
        "H=5, d=6, 710 probes",
        other_name,
        lambda: probe_outputs(heads, u, b, counts),
        lambda: other(heads, groups),
        largest_gaps(probe_outputs(heads, u, b, counts)),
        repeats=3,
    )


def looped_scores(t, r, num_heads):
    """The same poles, values and Newton steps, pair by pair."""
    return np.concatenate([separate_heads(t, values[None], num_heads).s for values in r])


def separating():
    """Scores of the 71 pairs of one plan, three heads, d = 6."""
    rng = np.random.default_rng(1)
    s, g = 1.5 * rng.standard_normal((71, 3)), 1 + rng.random((71, 3))
    counts = probe_counts(6, 7)
    t = counts[:, 0] / counts.sum(1)
    z = counts[:, 0] / counts[:, 1]
    r = np.einsum("mh,mqh->mq", g, z[:, None] / (z[:, None] + np.exp(-s)[:, None]))

    def errors(ours, other):
        truth = np.sort(s, axis=1)
        return tuple(np.median(np.abs(found - truth)) for found in (ours, other))

    return row(
        "queries",
        "separation of pairs",
        "71 pairs, H=3",
        "the same, pair by pair",
        lambda: np.sort(separate_heads(t, r, 3).s, axis=1),
        lambda: np.sort(looped_scores(t, r, 3), axis=1),
        errors,
        repeats=3,
    )


def permuted_link(first, second, third):
    """The permutation whose sums are nearest to the third pair, by trying all."""
    sa, sb, sc = first[0], second[0], third[0]
    order = np.array(list(permutations(range(len(sa)))))
    gaps = np.abs((sa + sb[order])[:, :, None] - sc).min(-1)
    return order[np.square(gaps).sum(1).argmin()]


def linking(num_heads: int):
    """Whose pole is whose, for one link."""
    rng = np.random.default_rng(2)
    sa, sb = rng.standard_normal((2, num_heads))
    hidden = rng.permutation(num_heads)
    ones = np.ones(num_heads)
    first, second = (sa, 0 * sa, ones, ones), (sb[hidden], 0 * sb, ones, ones)
    third = (rng.permutation(sa + sb), 0 * sa, ones, ones)
    truth = np.argsort(hidden)
    return row(
        "queries",
        "one link between pairs",
        f"H={num_heads}",
        "all permutations",
        lambda: link_heads(first, second, third, same_u=False),
        lambda: permuted_link(first, second, third),
        lambda ours, other: ((ours != truth).sum(), (other != truth).sum()),
        repeats=3,
    )


def learning(num_heads: int):
    """The whole learner against gradient distillation on as many questions."""
    rng = np.random.default_rng(3)
    truth = random_query_heads(num_heads, 4, rng)
    bases = [scale * np.linalg.qr(rng.standard_normal((4, 4)))[0] for scale in (2, 1)]
    asked = Asked(QueryOracle(truth), query_plan(*bases), num_heads, "balanced")

    def ours():
        box = QueryOracle(truth)
        return learn_attention(
            box, num_heads, design="balanced", rng=np.random.default_rng(4)
        ).heads

    def adam():
        return distil(
            asked.plan.u,
            asked.plan.b,
            asked.counts,
            asked.answers,
            num_heads,
            steps=1000,
            restarts=8,
            rng=np.random.default_rng(5),
        )[0]

    return row(
        "queries",
        "learning all heads",
        f"H={num_heads}, d=4",
        "Adam, 1000 steps, 8 starts",
        ours,
        adam,
        lambda a, b: (recovery_error(a, truth), recovery_error(b, truth)),
        repeats=2,
    )


def rows() -> list[dict]:
    """All comparisons of this chapter."""
    return [
        answering("full sequences in batches", batched_answers),
        answering("full sequences in a loop", looped_answers),
        separating(),
        linking(6),
        linking(8),
        learning(2),
    ]
