"""A one-layer transformer with a bias-free ReLU network, learned from its answers.

`F(X) = sum_j a_j relu(z_j . P(X))` with the pooled tokens P of all heads, stacked. P is odd, so
`F(X) - F(-X) = vbar . P(X)` is a black box of attention heads; and every neuron changes sign on the
way from X to -X. Source: queries.T5; conditions and algorithm are ours.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.special import softmax

from mhabook_lib.query_oracle import QueryHeads, RecoveryError
from mhabook_lib.validation import require_finite

STEPS = (0.1, 0.03, 0.01, 3e-3, 1e-3, 3e-4)


class ReluTransformer(NamedTuple):
    """Score matrices w (H, d, d), neurons z (m, H d) and their output weights a (m,)."""

    w: np.ndarray
    z: np.ndarray
    a: np.ndarray

    def __call__(self, x) -> np.ndarray:
        return np.maximum(pooled_tokens(x, self.w) @ self.z.T, 0) @ self.a

    @property
    def odd_heads(self) -> QueryHeads:
        """The attention heads that F(X) - F(-X) is: values `vbar = sum_j a_j z_j`."""
        return QueryHeads(self.w, (self.a @ self.z).reshape(self.w.shape[:2]))


def pooled_tokens(x, w) -> np.ndarray:
    """`p_h = sum_i softmax_i(x_i^T W_h x_N) x_i` of all heads, stacked, (B, H d)."""
    weights = softmax(np.einsum("bia,hac,bc->bhi", x, w, x[:, -1], optimize=True), axis=-1)
    return np.einsum("bhi,bia->bha", weights, x).reshape(len(x), -1)


class OddOracle:
    """The black box F(X) - F(-X): twice the queries of the box it asks."""

    noise = 0.0

    def __init__(self, function, dim: int):
        self.function, self.dim = function, dim
        self.num_queries, self.max_length = 0, 0

    def value(self, x) -> np.ndarray:
        x = np.asarray(x, dtype=float)
        self.num_queries += 2 * len(x)
        self.max_length = max(self.max_length, x.shape[1])
        return self.function(x) - self.function(-x)

    def probe(self, u, b, counts) -> np.ndarray:
        columns = []
        for c, m in np.atleast_2d(counts).astype(int):
            pair = [np.repeat((u + b)[:, None], c, 1), np.repeat(b[:, None], m, 1)]
            columns.append(self.value(np.concatenate(pair, axis=1)))
        return np.stack(columns, axis=1)


class LearnedTransformer(NamedTuple):
    """`F = 1/2 vbar . P + 1/2 sum_j sign(a_j) |D_j . P|` with signed neurons D_j = +-a_j z_j.

    directions (m, H d), signs (m,).
    """

    heads: QueryHeads
    directions: np.ndarray
    signs: np.ndarray

    def __call__(self, x) -> np.ndarray:
        p = pooled_tokens(x, self.heads.w)
        even = np.abs(p @ self.directions.T) @ self.signs
        return (p @ self.heads.v.ravel() + even) / 2


def learn_transformer(
    function, heads: QueryHeads, *, rng, length: int | None = None, walks: int = 3
):
    """The whole transformer, once the heads of its odd part are known.

    Walks half circles of sequences from X to -X and collects the neurons that switch. Raises
    RecoveryError when the collected neurons do not explain F on fresh sequences.
    """
    require_finite("w", heads.w)
    length = length or len(heads.w) + 2
    collected: list = []
    fresh = 0.6 * rng.standard_normal((200, length, heads.dim))
    wanted = function(fresh)
    gap = np.inf
    for _ in range(walks):
        start, side = 0.6 * rng.standard_normal((2, length, heads.dim))
        try:
            collected = _merged(collected + _walk(function, heads.w, start, side, rng))
        except _Lost:
            continue
        if not collected:
            continue
        directions, signs = (np.array(part) for part in zip(*collected, strict=True))
        found = LearnedTransformer(heads, directions, signs)
        gap = float(np.abs(found(fresh) - wanted).max() / np.abs(wanted).max())
        if gap < 1e-7:
            return found
    raise RecoveryError(
        f"{len(collected)} neurons found leave an error of {gap:.2g}", {"neurons": len(collected)}
    )


class _Lost(Exception):
    """The walk met a place where no piece can be fitted."""


def _walk(function, w, start, side, rng) -> list:
    """Neurons that switch on the half circle: (D, sign of a) each."""

    def at(t):
        return np.cos(t)[..., None, None] * start + np.sin(t)[..., None, None] * side

    def misfit(t, piece):
        x = at(np.atleast_1d(np.asarray(t, dtype=float)))
        return function(x) - pooled_tokens(x, w) @ piece

    scale = np.abs(function(at(np.linspace(0, np.pi, 40)))).max()
    piece, here, found = _fit(function, w, at, 0.0, 0.03, scale, rng), 0.0, []
    while True:
        grid = np.linspace(here, np.pi, 1500)[1:]
        off = np.abs(misfit(grid, piece)) > 1e-9 * scale
        if not off.any():
            return found
        k = int(off.argmax())
        low, high = (grid[k - 1] if k else here), grid[k]
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (
                (low, middle) if abs(misfit(middle, piece)[0]) > 1e-11 * scale else (middle, high)
            )
        following, here = _behind(function, w, at, high, piece, scale, rng)
        sign = np.sign(misfit(high + 0.3 * (here - high), piece)[0])
        found.append((following - piece, sign))
        piece = following


def _behind(function, w, at, place, piece, scale, rng):
    """The next piece, fitted a little behind a kink; its difference must vanish at the kink."""
    p = pooled_tokens(at(np.atleast_1d(place)), w)[0]
    for step in STEPS:
        here = place + step
        try:
            following = _fit(function, w, at, here, 0.3 * step, scale, rng)
        except _Lost:
            continue
        change = following - piece
        if abs(change @ p) < 1e-5 * np.linalg.norm(change) * np.linalg.norm(p):
            return following, here
    raise _Lost


def _fit(function, w, at, t, reach, scale, rng) -> np.ndarray:
    """The linear function of P that F is in a small ball around X(t)."""
    middle = at(np.atleast_1d(t))
    count = w.shape[0] * w.shape[-1] + 6
    for _ in range(5):
        x = middle + reach * rng.standard_normal((count, *middle.shape[1:]))
        p, f = pooled_tokens(x, w), function(x)
        piece = np.linalg.lstsq(p, f, rcond=None)[0]
        if np.abs(p @ piece - f).max() < 1e-12 * scale:
            return piece
        reach *= 0.3
    raise _Lost


def _merged(collected) -> list:
    """One entry for each direction up to sign."""
    kept: list = []
    for d, sign in collected:
        unit = d / np.linalg.norm(d)
        if not any(abs(abs(unit @ e) / np.linalg.norm(e) - 1) < 1e-6 for e, _ in kept):
            kept.append((d, sign))
    return kept
