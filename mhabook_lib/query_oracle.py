"""A black box of attention heads that answers queries with one number, and counts them.

The model reads a sequence of tokens and answers at its last one, x_N:
`f(X) = sum_h sum_i softmax_i(x_i^T W_h x_N) v_h^T x_i`. A *probe* is the sequence of c copies of
b + u followed by m copies of b; only `z = c/m` matters, and with the scores `s_h = u^T W_h b`

    f = V^T b + sum_h v_h^T u sigmoid(s_h + log z),   V = sum_h v_h.

Source: \\cite kim2026queries, setting and claim queries.T2.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.special import expit, softmax

from mhabook_lib.validation import require_count, require_finite


class QueryHeads(NamedTuple):
    """Score matrices w (H, d, d), key slot first, and values v (H, d)."""

    w: np.ndarray
    v: np.ndarray

    @property
    def dim(self) -> int:
        return self.v.shape[-1]

    @property
    def total(self) -> np.ndarray:
        """V = sum_h v_h."""
        return self.v.sum(0)


class RecoveryError(ValueError):
    """No model was recovered; `report` holds what is known about the failure."""

    def __init__(self, message: str, report: dict | None = None):
        super().__init__(message)
        self.report = report or {}


def query_heads(w, v) -> QueryHeads:
    """Checked heads; ValueError for shapes other than (H, d, d), (H, d) and for non-finite."""
    w, v = np.asarray(w, dtype=float), np.asarray(v, dtype=float)
    if v.ndim != 2 or w.shape != (*v.shape, v.shape[-1]):
        raise ValueError(f"w of shape {w.shape}, v of shape {v.shape}: expected (H, d, d), (H, d)")
    require_finite("w", w)
    require_finite("v", v)
    return QueryHeads(w, v)


def random_query_heads(num_heads: int, dim: int, rng: np.random.Generator, scale: float = 1.0):
    """Gaussian heads: entries of w N(0, scale^2), of v N(0, 1)."""
    require_count("num_heads", num_heads)
    require_count("dim", dim)
    w = scale * rng.standard_normal((num_heads, dim, dim))
    return QueryHeads(w, rng.standard_normal((num_heads, dim)))


def sequence_outputs(heads: QueryHeads, x) -> np.ndarray:
    """f of sequences x (B, N, d), token by token, (B,)."""
    x = np.asarray(x, dtype=float)
    if x.ndim != 3 or x.shape[1] < 1 or x.shape[2] != heads.dim:
        raise ValueError(f"x of shape {x.shape}: expected (B, N, {heads.dim}) with N >= 1")
    require_finite("x", x)
    weights = softmax(np.einsum("bia,hac,bc->bhi", x, heads.w, x[:, -1], optimize=True), axis=-1)
    return np.einsum("bhi,bia,ha->b", weights, x, heads.v, optimize=True)


def probe_outputs(heads: QueryHeads, u, b, counts) -> np.ndarray:
    """f of the probes of all pairs u, b (M, d) at all counts (Q, 2) of copies, (M, Q).

    Two different tokens have two different scores: O(M Q H) after the scores.
    """
    scores = np.einsum("ma,hac,mc->mh", u, heads.w, b, optimize=True)
    logs = np.log(counts[:, 0] / counts[:, 1])
    shares = expit(scores[:, None, :] + logs[:, None])
    return (b @ heads.total)[:, None] + np.einsum("mqh,mh->mq", shares, u @ heads.v.T)


class QueryOracle:
    """The black box: answers, counts sequences, and remembers the longest one.

    `noise` adds independent Gaussian errors, `decimals` rounds the answers, `max_length` refuses
    longer sequences with ValueError. `literal=True` answers probes by the full sequences.
    """

    def __init__(
        self,
        heads: QueryHeads,
        *,
        noise=0.0,
        decimals=None,
        max_length=None,
        rng=None,
        literal=False,
    ):
        if noise < 0 or (noise and rng is None):
            raise ValueError(
                f"noise={noise!r}: expected >= 0, and a generator `rng` to draw it from"
            )
        self._heads, self.noise, self.decimals = query_heads(*heads), noise, decimals
        self.limit, self.rng, self.literal = max_length, rng, literal
        self.num_queries, self.max_length = 0, 0

    @property
    def dim(self) -> int:
        return self._heads.dim

    def value(self, x) -> np.ndarray:
        """Answers to sequences x (B, N, d)."""
        x = np.asarray(x, dtype=float)
        self._count(len(x), x.shape[1])
        return self._heard(sequence_outputs(self._heads, x))

    def probe(self, u, b, counts) -> np.ndarray:
        """Answers to all probes of pairs u, b (M, d) at counts (Q, 2), (M, Q)."""
        u, b, counts = np.atleast_2d(u), np.atleast_2d(b), np.atleast_2d(counts)
        for c, m in counts:
            self._count(len(u), int(c + m))
        if not self.literal:
            return self._heard(probe_outputs(self._heads, u, b, counts))
        columns = []
        for c, m in counts.astype(int):
            x = np.concatenate(
                [np.repeat((u + b)[:, None], c, 1), np.repeat(b[:, None], m, 1)], axis=1
            )
            columns.append(sequence_outputs(self._heads, x))
        return self._heard(np.stack(columns, axis=1))

    def _count(self, sequences: int, length: int) -> None:
        if self.limit and length > self.limit:
            raise ValueError(f"a sequence of {length} tokens: expected at most {self.limit}")
        self.num_queries += sequences
        self.max_length = max(self.max_length, length)

    def _heard(self, answers: np.ndarray) -> np.ndarray:
        if self.noise:
            answers = answers + self.noise * self.rng.standard_normal(answers.shape)
        return answers if self.decimals is None else np.round(answers, self.decimals)


def ask_probes(oracle, u, b, counts) -> np.ndarray:
    """Answers of any box to the probes of pairs u, b (M, d) at counts (Q, 2), checked, (M, Q).

    RecoveryError for another number of answers, and for answers that are not finite.
    """
    return _checked(oracle.probe(u, b, counts), (len(u), len(counts)))


def ask_tokens(oracle, tokens) -> np.ndarray:
    """Answers V^T b to single tokens (n, d), checked as in `ask_probes`, (n,)."""
    return _checked(oracle.value(tokens[:, None]), (len(tokens),))


def _checked(answers, shape: tuple[int, ...]) -> np.ndarray:
    answers = np.asarray(answers, dtype=float)
    if answers.shape != shape:
        raise RecoveryError(f"the box gave answers of shape {answers.shape}: expected {shape}")
    if not np.isfinite(answers).all():
        raise RecoveryError("the box gave an answer that is not finite")
    return answers


def canonical_heads(heads: QueryHeads) -> QueryHeads:
    """Merge heads with equal W, adding their values, and drop those whose sum is zero.

    Two canonical models with the same f are equal up to the order of heads (queries.T1).

    >>> same = QueryHeads(np.ones((2, 1, 1)), np.array([[1.0], [2.0]]))
    >>> canonical_heads(same).v.tolist()
    [[3.0]]
    """
    kept: list[list[np.ndarray]] = []
    for w, v in zip(*query_heads(*heads), strict=True):
        twin = next((pair for pair in kept if np.array_equal(pair[0], w)), None)
        if twin:
            twin[1] = twin[1] + v
        else:
            kept.append([w, v])
    kept = [pair for pair in kept if np.any(pair[1])]
    shape = heads.dim
    w = np.array([pair[0] for pair in kept]).reshape(-1, shape, shape)
    return QueryHeads(w, np.array([pair[1] for pair in kept]).reshape(-1, shape))


def recovery_error(found: QueryHeads, truth: QueryHeads) -> float:
    """Largest relative Frobenius error of a W_h or v_h after the best assignment of heads.

    Raises ValueError when the numbers of heads differ.
    """
    if found.v.shape != truth.v.shape:
        raise ValueError(f"{len(found.v)} heads found for {len(truth.v)}: expected equal numbers")
    gaps = np.stack(
        [
            np.linalg.norm((a[:, None] - b).reshape(len(a), len(b), -1), axis=-1)
            / np.linalg.norm(b.reshape(len(b), -1), axis=-1)
            for a, b in zip(found, truth, strict=True)
        ]
    )
    finite = np.nan_to_num(gaps.sum(0), nan=1e300, posinf=1e300)
    return float(gaps[:, *linear_sum_assignment(finite)].max())
