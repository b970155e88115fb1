"""The ladders of classification: what can be reached with the first r lags, or with r patterns.

A joint law is an array (d,) * (T + 1) over the T context tokens, most recent first, and the next
token. Values in nats. Source: incremental.F3.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import minimize

from mhabook_lib.markov import context_law, next_token_law
from mhabook_lib.positional_attention import CrossEntropy, PositionalHeads, every_context
from mhabook_lib.validation import require_count


def context_joint(law: np.ndarray, num_positions: int, white: bool = False) -> np.ndarray:
    """Joint law (d,) * (T + 1) of T context tokens and the next one.

    The contexts follow the stationary chain, or are independent and uniform (`white`).
    """
    lags, dim = law.ndim - 1, law.shape[-1]
    if white:
        context = np.full((dim,) * num_positions, float(dim) ** -num_positions)
    else:
        context = context_law(law, num_positions)
    extra = (1,) * (num_positions - lags)
    return context[..., None] * law.reshape(law.shape[:-1] + extra + law.shape[-1:])


def first_lags(joint: np.ndarray, lags: int) -> np.ndarray:
    """Law of the first `lags` context tokens and the next token."""
    positions = joint.ndim - 1
    if not 0 <= lags <= positions:
        raise ValueError(f"lags={lags}: expected 0 to {positions}")
    return joint.sum(tuple(range(lags, positions)))


def truncated_cross_entropy(teacher: np.ndarray, joint: np.ndarray, lags: int) -> float:
    """Cross entropy of the teacher with only its first matrices, softmax(sum_{k<=r} A_k x_k)."""
    dim = joint.shape[-1]
    law = next_token_law(teacher[:lags]) if lags else np.full(dim, 1 / dim)
    return float(-(first_lags(joint, lags) * np.log(law)).sum())


def restricted_cross_entropy(joint: np.ndarray, lags: int) -> float:
    """Least cross entropy of softmax(sum_{k<=r} B_k x_k): a convex problem, solved by L-BFGS."""
    dim, law = joint.shape[-1], first_lags(joint, lags)
    if lags == 0:
        return float(-(law * np.log(law)).sum())
    population = exact_population(law)

    def objective(flat):
        w = torch.as_tensor(flat).reshape(lags, dim, dim)
        loss, slope = population.at(w, population.x @ w.movedim(-2, -3).flatten(-2).mT)
        return float(loss), slope.numpy().ravel()

    return _least(objective, np.zeros(lags * dim * dim))


def pattern_cross_entropy(joint: np.ndarray, heads: int, restarts: int, rng) -> float:
    """Best cross entropy found for `heads` attention patterns over all T positions.

    The problem is not convex: the best of `restarts` runs of L-BFGS, an upper bound.
    """
    require_count("restarts", restarts)
    dim, positions = joint.shape[-1], joint.ndim - 1
    population, cut = exact_population(joint), heads * positions

    def objective(flat):
        flat = torch.as_tensor(flat)
        model = PositionalHeads(
            flat[:cut].reshape(heads, positions), flat[cut:].reshape(heads, dim, dim)
        )
        loss, gradient = population.loss_and_gradient(model)
        return float(loss), torch.cat([part.flatten() for part in gradient]).numpy()

    starts = (
        np.concatenate(
            [1.5 * rng.standard_normal(cut), 0.3 * rng.standard_normal(heads * dim * dim)]
        )
        for _ in range(restarts)
    )
    return min(_least(objective, start) for start in starts)


def exact_population(joint: np.ndarray, device=None, stacked: bool = False) -> CrossEntropy:
    """The loss of all d^T contexts with their probabilities and next-token laws.

    joint (d,) * (T + 1), or (E,) + (d,) * (T + 1), one law per model, when `stacked`.
    """
    dim, stack = joint.shape[-1], joint.shape[:1] if stacked else ()
    positions = joint.ndim - 1 - len(stack)
    rows = torch.as_tensor(joint.reshape(*stack, -1, dim), device=device)
    weights = rows.sum(-1)
    return CrossEntropy(every_context(positions, dim, device), weights, rows / weights[..., None])


def _least(objective, start) -> float:
    options = {"maxiter": 3000, "maxfun": 6000, "ftol": 1e-15, "gtol": 1e-9}
    return float(minimize(objective, start, jac=True, method="L-BFGS-B", options=options).fun)


def plateau_slopes(joint: np.ndarray) -> np.ndarray:
    """`D_i = dL/ds_i` at full attention on the last token, its value matrix the exact fit, (T,).

    A negative D_i pulls attention towards lag i on the first plateau. Source: incremental.X1.
    """
    population = exact_population(joint)
    pair = first_lags(joint, 1)
    value = torch.as_tensor(np.log(pair / pair.sum(-1, keepdims=True)).T.copy())
    w = value.new_zeros(joint.ndim - 1, *value.shape)
    w[0] = value
    slope = population.at(w, population.x @ w.movedim(-2, -3).flatten(-2).mT)[1]
    return (slope * value).sum((-2, -1)).numpy()
