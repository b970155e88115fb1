"""Markov chains of high order whose next token depends on each past position by a matrix.

`P(y | x_1..x_K) = softmax(sum_k A_k x_k)[y]` with one-hot tokens, x_1 the most recent; d letters.
Source of the task: \\cite yuksel2026incremental; the reference teacher is ours.
"""

from __future__ import annotations

import numpy as np
from scipy.special import softmax

from mhabook_lib.validation import require_count, require_finite, require_positive

STATIONARY = 1e-14


def helmert_basis(dim: int) -> np.ndarray:
    """Orthonormal basis (d, d-1) of the complement of the all-ones vector.

    Column j is `(1, .., 1, -j, 0, ..)/sqrt(j(j+1))` with j ones.

    >>> basis = helmert_basis(4)
    >>> bool(np.allclose(basis.T @ basis, np.eye(3)) and np.allclose(basis.sum(0), 0))
    True
    """
    require_count("dim", dim)
    j = np.arange(1, dim)
    above = np.arange(dim)[:, None] < j
    return (above - j * (np.arange(dim)[:, None] == j)) / np.sqrt(j * (j + 1))


def reference_teacher(dim: int, num_lags: int, ratio: float, strength: float, seed: int):
    """Matrices A_k (K, d, d), Frobenius-orthogonal, `||A_k|| = sqrt(d) strength ratio^(K-k)`.

    Polar factors of Gaussian matrices on the complement of the ones, made orthogonal to each other
    by Gram-Schmidt; rows and columns sum to zero. Raises ValueError when there is no room for K
    orthogonal matrices.
    """
    require_count("num_lags", num_lags)
    require_positive("ratio", ratio)
    require_positive("strength", strength)
    if dim < 2 or num_lags > (dim - 1) ** 2:
        raise ValueError(f"num_lags={num_lags}, dim={dim}: expected K <= (d - 1)^2, d >= 2")
    rng, basis = np.random.default_rng(seed), helmert_basis(dim)
    directions: list[np.ndarray] = []
    for _ in range(num_lags):
        u, _, vt = np.linalg.svd(rng.standard_normal((dim - 1, dim - 1)))
        new = u @ vt
        for old in directions:
            new = new - (new * old).sum() * old
        length = np.linalg.norm(new)
        if length < 1e-8:
            raise ValueError(f"dim={dim}, seed={seed}: its orthogonal factors are dependent")
        directions.append(new / length)
    scale = strength * ratio ** np.arange(num_lags - 1, -1, -1.0) * np.sqrt(dim)
    return scale[:, None, None] * (basis @ np.stack(directions) @ basis.T)


def next_token_law(teacher: np.ndarray) -> np.ndarray:
    """`P[x_1, .., x_K, y]`, all transition probabilities, (d,) * (K + 1)."""
    teacher = _checked(teacher)
    lags, dim, _ = teacher.shape
    logits = np.zeros((dim,) * (lags + 1))
    for k, matrix in enumerate(teacher):
        shape = [1] * (lags + 1)
        shape[k] = shape[-1] = dim
        logits = logits + matrix.T.reshape(shape)
    return softmax(logits, axis=-1)


def stationary_law(law: np.ndarray, max_steps: int = 100_000) -> np.ndarray:
    """Stationary probabilities of the last K tokens, (d,) * K, by power iteration.

    Raises ValueError when the iteration does not settle.
    """
    lags = law.ndim - 1
    state = np.full(law.shape[:-1], 1 / law[..., 0].size)
    for _ in range(max_steps):
        new = np.moveaxis((state[..., None] * law).sum(lags - 1), -1, 0)
        if np.abs(new - state).sum() < STATIONARY * lags:
            return new
        state = new
    raise ValueError(f"no stationary law after {max_steps} steps: expected a chain that mixes")


def context_law(law: np.ndarray, num_positions: int, stationary=None) -> np.ndarray:
    """Joint law of T consecutive tokens of the stationary chain, most recent first, (d,) * T.

    Raises ValueError when T is below the order K of the chain.
    """
    lags = law.ndim - 1
    if num_positions < lags:
        raise ValueError(f"num_positions={num_positions}: expected at least the order {lags}")
    joint = stationary_law(law) if stationary is None else stationary
    for _ in range(num_positions - lags):
        extra = (1,) * (joint.ndim - lags)
        step = law.reshape(law.shape[:-1] + extra + law.shape[-1:])
        joint = np.moveaxis(joint[..., None] * step, -1, 0)
    return joint


def sample_chain(teacher: np.ndarray, count: int, length: int, rng: np.random.Generator):
    """`count` sequences of `length` tokens in the order of time, after K uniform ones, (B, L).

    All sequences advance together: the columns of A_k are gathered by token, and the inverse of the
    distribution function draws the next one. Raises ValueError for a length of at most the order K.
    """
    teacher = _checked(teacher)
    lags, dim, _ = teacher.shape
    require_count("count", count)
    if length <= lags:
        raise ValueError(f"length={length}: expected more tokens than the order {lags}")
    columns = np.ascontiguousarray(teacher.transpose(0, 2, 1))
    tokens = np.empty((length, count), dtype=np.int64)
    tokens[:lags] = rng.integers(dim, size=(lags, count))
    for t in range(lags, length):
        logits = columns[0, tokens[t - 1]]
        for k in range(1, lags):
            logits += columns[k, tokens[t - 1 - k]]
        logits -= logits.max(1, keepdims=True)
        below = np.exp(logits, out=logits).cumsum(1)
        level = rng.random((count, 1)) * below[:, -1:]
        tokens[t] = (below <= level).sum(1)
    return tokens.T


def windows(sequences: np.ndarray, num_positions: int) -> tuple[np.ndarray, np.ndarray]:
    """All contexts (N, T), most recent first, of sequences (B, L), and the tokens that follow."""
    if sequences.shape[1] <= num_positions:
        raise ValueError(
            f"sequences of {sequences.shape[1]} tokens: expected more than num_positions="
            f"{num_positions}"
        )
    view = np.lib.stride_tricks.sliding_window_view(sequences, num_positions + 1, axis=1)
    flat = view.reshape(-1, num_positions + 1)
    return flat[:, -2::-1], flat[:, -1]


def _checked(teacher) -> np.ndarray:
    teacher = np.asarray(teacher, dtype=float)
    if teacher.ndim != 3 or teacher.shape[1] != teacher.shape[2]:
        raise ValueError(f"teacher of shape {teacher.shape}: expected (K, d, d)")
    require_finite("teacher", teacher)
    return teacher
