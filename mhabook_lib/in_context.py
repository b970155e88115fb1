r"""Training one layer of Nadaraya-Watson heads to regress in context, many runs in one graph.

A task is a linear function `y = <coef, x> + noise`, `coef ~ N(0, I_r/r)` on the first r of d
coordinates, shown by 64 examples `x_i ~ N(0, I_d)` and asked for at 16 queries
`x ~ N(0, 0.49 I_d)`. Head h projects queries and examples with one free matrix `W_h (d, d_k)` and
answers by kernel regression of bandwidth 1; the layer answers `sum_h a_h mhat_h(x)`. Its loss is
the mean squared distance to `<coef, x>`.

All runs and seeds are one batch, so that a step costs a handful of kernels. A seed has the same
start and sees the same tasks in every run.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from .diversity import head_diversity_index
from .nadaraya_watson import fused_nadaraya_watson, nadaraya_watson_weights
from .numerics.linalg import random_orthonormal

EXAMPLES, QUERIES = 64, 16
QUERY_SCALE, NOISE = 0.7, 0.3
LEARNING_RATE = 0.02


class Run(NamedTuple):
    """Signal rank, reward per unit of diversity, and whether the readout a_h is learned."""

    rank: int
    force: float = 0.0
    learned: bool = False


class Training(NamedTuple):
    """Records of a training: `steps (T,)`, `diversity` and `loss` (T, runs, seeds).

    With the final `projections (runs, seeds, H, d, d_k)` and `readout (runs, seeds, H)`.
    """

    steps: list[int]
    diversity: torch.Tensor
    loss: torch.Tensor
    projections: torch.Tensor
    readout: torch.Tensor


class Tasks(NamedTuple):
    """`examples (S, B, n, d)`, `queries (S, B, n_q, d)`, `coef (S, B, d)`, `noise (S, B, n)`."""

    examples: torch.Tensor
    queries: torch.Tensor
    coef: torch.Tensor
    noise: torch.Tensor


def draw_tasks(seeds: int, count: int, d_model: int, rng, device="cpu") -> Tasks:
    """`count` tasks for each seed; the coefficients are still N(0, I_d).

    >>> draw_tasks(2, 3, 5, np.random.default_rng(0)).examples.shape
    torch.Size([2, 3, 64, 5])
    """
    shapes = (EXAMPLES, d_model), (QUERIES, d_model), (d_model,), (EXAMPLES,)
    drawn = (
        torch.from_numpy(rng.standard_normal((seeds, count, *shape))).to(device) for shape in shapes
    )
    examples, queries, coef, noise = drawn
    return Tasks(examples, QUERY_SCALE * queries, coef, NOISE * noise)


def project(tokens, projections):
    """tokens (S, B, m, d), projections (R, S, H, d, d_k) -> (R, S, B, H, m, d_k)."""
    num_heads, d_head = projections.shape[-3], projections.shape[-1]
    side_by_side = projections.movedim(-3, -2).flatten(-2)  # (R, S, d, H d_k)
    flat = tokens.flatten(1, 2) @ side_by_side
    heads = flat.unflatten(-1, (num_heads, d_head)).unflatten(2, tokens.shape[1:3])
    return heads.movedim(-2, -3)


def signal_mask(rank: torch.Tensor, d_model: int) -> torch.Tensor:
    """Rows (runs, d): `1/sqrt(r)` on the first r coordinates, zero after.

    >>> signal_mask(torch.tensor([1, 4]), 4).tolist()
    [[1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0.5]]
    """
    inside = torch.arange(d_model, device=rank.device) < rank[:, None]
    return inside / rank[:, None].to(torch.float64).sqrt()


def sampled_loss(projections, readout, tasks: Tasks, mask) -> torch.Tensor:
    """Squared distance to `<coef, x>` on the drawn coefficients and noise, (runs, seeds)."""
    coef = tasks.coef * mask[:, None, None]  # (R, S, B, d)
    answers = (tasks.examples @ coef.unsqueeze(-1)) + tasks.noise.unsqueeze(-1)
    wanted = (tasks.queries @ coef.unsqueeze(-1)).squeeze(-1)
    keys, queries = (project(part, projections) for part in (tasks.examples, tasks.queries))
    heads = fused_nadaraya_watson(queries, keys, answers.unsqueeze(-3), 1.0)
    mean = (readout[:, :, None, :, None] * heads.squeeze(-1)).sum(-2)
    return (mean - wanted).square().mean((-1, -2))


def exact_loss(projections, readout, tasks: Tasks, mask) -> torch.Tensor:
    """Mean of `sampled_loss` over coefficients and noise, given the tokens, (runs, seeds).

    `|sum_i w_i x_i - x|^2/r` on the first r coordinates plus `noise^2 |w|^2`, w the row of weights
    of the whole layer, `w = sum_h a_h w^h`.
    """
    keys, queries = (project(part, projections) for part in (tasks.examples, tasks.queries))
    rows = nadaraya_watson_weights(queries, keys, 1.0)
    rows = (readout[:, :, None, :, None, None] * rows).sum(-3)  # (R, S, B, n_q, n)
    gap = (rows @ tasks.examples - tasks.queries) * mask[:, None, None, None]
    risk = gap.square().sum(-1) + NOISE**2 * rows.square().sum(-1)
    return risk.mean((-1, -2))


def train_in_context(
    runs, num_heads, d_head, d_model, *, seeds, steps, rng, sampled=False, device="cpu"
) -> Training:
    """Adam on `loss - force * diversity` for all runs and seeds at once, from `W ~ N(0, 4/d)`.

    Every step draws fresh tasks: two with `exact_loss`, or, if `sampled`, eight with
    `sampled_loss`. Diversity and `exact_loss` on 16 fixed tasks are recorded 21 times. Raises
    ValueError unless the ranks lie in 1..d_model, d_head <= d_model and there are two heads.
    Source: ensemble.X2.

    >>> out = train_in_context([Run(2)], 3, 2, 4, seeds=2, steps=1, rng=np.random.default_rng(0))
    >>> out.steps, tuple(out.loss.shape), tuple(out.projections.shape)
    ([0, 1], (2, 1, 2), (1, 2, 3, 4, 2))
    """
    require_runs(runs, num_heads, d_head, d_model)
    loss_of, count = (sampled_loss, 8) if sampled else (exact_loss, 2)
    start = torch.from_numpy(rng.standard_normal((seeds, num_heads, d_model, d_head))).to(device)
    projections = (start * (4 / d_model) ** 0.5).repeat(len(runs), 1, 1, 1, 1).requires_grad_()
    shift = torch.zeros_like(projections[..., 0, 0]).requires_grad_()  # of learned readouts
    rank, force, learned = (torch.tensor(entry, device=device) for entry in zip(*runs, strict=True))
    mask, forced = signal_mask(rank, d_model), force.nonzero().squeeze(-1)
    fixed = draw_tasks(seeds, 16, d_model, rng, device)
    optimizer = torch.optim.Adam([projections, shift], lr=LEARNING_RATE)

    def layer():
        return projections, 1 / num_heads + shift * learned[:, None, None]

    def diversity_of(projections):
        return head_diversity_index(torch.linalg.qr(projections).Q)

    @torch.no_grad()
    def record():
        return torch.stack([diversity_of(projections), exact_loss(*layer(), fixed, mask)])

    def step():
        loss = loss_of(*layer(), draw_tasks(seeds, count, d_model, rng, device), mask).sum()
        if len(forced):
            loss = loss - (force[forced, None] * diversity_of(projections[forced])).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    moments = np.unique(np.linspace(0, steps, 21).round().astype(int)).tolist()
    records = [record()]
    for first, last in pairwise(moments):
        for _ in range(last - first):
            step()
        records.append(record())
    diversity, loss = torch.stack(records, dim=1)
    return Training(moments, diversity, loss, *(part.detach() for part in layer()))


def require_runs(runs, num_heads: int, d_head: int, d_model: int) -> None:
    """Raise unless there are runs, all ranks lie in 1..d_model, and the heads fit."""
    ranks = [run.rank for run in runs]
    if not ranks or min(ranks) < 1 or max(ranks) > d_model:
        raise ValueError(f"runs with ranks {ranks}: expected at least one, ranks in 1..{d_model}")
    if num_heads < 2 or not 1 <= d_head <= d_model:
        raise ValueError(
            f"num_heads={num_heads}, d_head={d_head}: expected at least two heads of 1..{d_model} "
            f"dimensions"
        )


def largest_diversity(num_heads: int, d_head: int, dimension: int, rng, sweeps: int = 100) -> float:
    """Largest subspace diversity of H planes of d_head dimensions in R^dimension, found by search.

    One plane after the other moves to where the others are least: the lowest eigenvectors of the
    sum of their projectors, which is the best choice for it. The best of 32 random starts.
    Never above `H/(H - 1) (1 - d_head/dimension)` and below it where no tight frame exists.
    Raises ValueError unless d_head <= dimension. Source: ensemble.X2, ensemble.T6.

    >>> round(largest_diversity(3, 1, 2, np.random.default_rng(0)), 6)  # three lines at 120 degrees
    0.75
    >>> round(largest_diversity(2, 2, 3, np.random.default_rng(0)), 6)  # two planes share a line
    0.5
    """
    bases = random_orthonormal((32, num_heads, dimension, d_head), rng)
    for _ in range(sweeps):
        for head in range(num_heads):
            projectors = bases @ bases.mT
            others = projectors.sum(1) - projectors[:, head]
            bases[:, head] = torch.linalg.eigh(others).eigenvectors[..., :d_head]
    return head_diversity_index(bases).max().item()


def predicted_diversity(num_heads: int, d_head: int, rank: int, rng) -> float:
    """Diversity at which a uniform readout should end, for a signal of `rank` dimensions.

    Where the signal has room, r >= d_k, the heads spread over it as evenly as they can:
    `largest_diversity(H, d_k, r)`, which is 1 if r >= H d_k. Otherwise all heads share the
    signal and their d_k - r spare directions decorrelate: `(d_k - r)/d_k`. Source: ensemble.X2.

    >>> [round(predicted_diversity(4, 2, r, np.random.default_rng(0)), 4) for r in (1, 2, 4, 9)]
    [0.5, 0.0, 0.6667, 1.0]
    """
    if rank < d_head:
        return (d_head - rank) / d_head
    return largest_diversity(num_heads, d_head, rank, rng)
