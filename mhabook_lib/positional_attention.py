"""Heads that attend by position only: one matrix product, exact losses, stacked training.

A model is `logits` (..., H, T) and `values` (..., H, d, d); head h adds `V_h sum_i softmax(a_h)_i
x_i`. All heads together are one linear map of the T d numbers of a context,
`W[i] = sum_h s_hi V_h`. Leading dimensions are separate models, trained in one pass.
Source: \\cite yuksel2026incremental, claims incremental.F2 to F5.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from mhabook_lib.markov import sample_chain, windows
from mhabook_lib.training import Optimiser, Schedule, train_stacked
from mhabook_lib.validation import require_count, require_finite, require_positive

ADAM = (0.9, 0.999)


class PositionalHeads(NamedTuple):
    """Attention logits (..., H, T) and value matrices (..., H, d, d)."""

    logits: torch.Tensor
    values: torch.Tensor

    @property
    def attention(self) -> torch.Tensor:
        return torch.softmax(self.logits, -1)

    def matrix(self) -> torch.Tensor:
        """`W[i] = sum_h s_hi V_h`, (..., T, d_out, d_in)."""
        return torch.einsum("...hi,...hoc->...ioc", self.attention, self.values)

    def pulled_back(self, slope: torch.Tensor) -> PositionalHeads:
        """Gradient of a loss whose derivative by W is `slope` (..., T, d_out, d_in)."""
        s = self.attention
        by_attention = torch.einsum("...ioc,...hoc->...hi", slope, self.values)
        centred = by_attention - (s * by_attention).sum(-1, keepdim=True)
        return PositionalHeads(s * centred, torch.einsum("...hi,...ioc->...hoc", s, slope))


def positional_heads(logits, dim: int, device=None) -> PositionalHeads:
    """Heads with these logits (..., H, T) and zero values; ValueError for more heads than T."""
    a = torch.as_tensor(np.asarray(logits, dtype=float), device=device)
    if a.ndim < 2 or a.shape[-2] > a.shape[-1]:
        raise ValueError(f"logits of shape {tuple(a.shape)}: expected (..., H, T) with H <= T")
    require_finite("logits", a)
    return PositionalHeads(a, a.new_zeros(*a.shape[:-1], dim, dim))


def one_hot(contexts, dim: int, device=None) -> torch.Tensor:
    """Tokens (..., T) as rows of T d zeros and ones, (..., T d), float64."""
    tokens = torch.as_tensor(np.ascontiguousarray(contexts), device=device)
    rows = torch.zeros(*tokens.shape, dim, dtype=torch.float64, device=device)
    return rows.scatter_(-1, tokens.unsqueeze(-1), 1.0).flatten(-2)


def predictions(heads: PositionalHeads, x: torch.Tensor) -> torch.Tensor:
    """Outputs (..., N, d) for contexts x (..., N, T d) in one product; x may lack the models."""
    w = heads.matrix()
    flat = w.movedim(-2, -3).flatten(-2)
    if x.ndim == 2 and flat.ndim > 2:
        out = x @ flat.reshape(-1, flat.shape[-1]).T
        return out.reshape(len(x), *flat.shape[:-1]).movedim(0, -2)
    return x @ flat.mT


class CrossEntropy:
    """Cross entropy of next tokens, exact over a weighted set of contexts.

    contexts x (N, T d) or (E, N, T d) one-hot, weights (N,) or (E, N) that sum to one, targets
    (N, d) or (E, N, d): probabilities of the next token. The targets enter through the statistic
    `X^T (w Y)` only: `CE = w . logsumexp(X W) - <X^T w Y, W>`.
    """

    def __init__(self, x: torch.Tensor, weights: torch.Tensor, targets: torch.Tensor):
        self.x, self.weights, self.dim = x, weights, targets.shape[-1]
        self.num_positions = x.shape[-1] // self.dim
        self.statistic = self.by_position(weights[..., None] * targets)

    def loss(self, heads: PositionalHeads) -> torch.Tensor:
        """One number per model."""
        return self.at(heads.matrix(), predictions(heads, self.x))[0]

    def loss_and_gradient(self, heads: PositionalHeads, step: int = 0):
        loss, slope = self.at(heads.matrix(), predictions(heads, self.x))
        return loss, heads.pulled_back(slope)

    def at(self, w: torch.Tensor, outputs: torch.Tensor):
        """Loss and its derivative by W, for W and the outputs X W that it gives."""
        top = outputs.amax(-1, keepdim=True)
        shares = torch.exp(outputs - top)
        total = shares.sum(-1, keepdim=True)
        normaliser = (self.weights * (top + total.log()).squeeze(-1)).sum(-1)
        slope = self.by_position(shares * (self.weights[..., None] / total)) - self.statistic
        return normaliser - (self.statistic * w).sum((-3, -2, -1)), slope

    def by_position(self, rows: torch.Tensor) -> torch.Tensor:
        """`sum_n rows_n x_n^T` by position, (..., T, d_out, d_in)."""
        if self.x.ndim == 2 and rows.ndim > 2:
            merged = rows.movedim(-2, 0)
            total = (merged.flatten(1).T @ self.x).reshape(*merged.shape[1:], -1)
        else:
            total = rows.mT @ self.x
        return total.unflatten(-1, (self.num_positions, self.dim)).movedim(-2, -3)


class SquaredError:
    """Regression `y = sum_i A_i x_i`, x_i ~ N(0, I_d), loss 1/2 |y - f|^2, teacher (T, d, d).

    The loss is exact, `1/2 sum_i |W_i - A_i|^2`; the gradient is that of a batch drawn from `seed`
    and the step, or of the population when `batch` is None.
    """

    def __init__(self, teacher: torch.Tensor, batch: int | None = None, seed: int = 0):
        self.teacher, self.batch, self.seed = teacher, batch, seed

    def loss_and_gradient(self, heads: PositionalHeads, step: int = 0):
        error = heads.matrix() - self.teacher
        loss = error.square().sum((-3, -2, -1)) / 2
        slope = error if self.batch is None else self._sampled(error, step)
        return loss, heads.pulled_back(slope)

    def _sampled(self, error: torch.Tensor, step: int) -> torch.Tensor:
        positions, dim = self.teacher.shape[0], self.teacher.shape[-1]
        draw = np.random.default_rng([self.seed, step]).standard_normal
        x = torch.as_tensor(draw((self.batch, positions * dim)), device=error.device)
        residual = x @ error.movedim(-2, -3).flatten(-2).mT
        slope = residual.mT @ x / self.batch
        return slope.unflatten(-1, (positions, dim)).movedim(-2, -3)


class FreshWindows:
    """Cross entropy of windows of `count` sequences that are drawn from `seed` and the step."""

    def __init__(
        self, teacher, num_positions: int, count: int, length: int, seed: int, device=None
    ):
        self.teacher, self.num_positions = teacher, num_positions
        self.count, self.length, self.seed, self.device = count, length, seed, device

    def draw(self, step: int) -> CrossEntropy:
        rng = np.random.default_rng([self.seed, step])
        sequences = sample_chain(self.teacher, self.count, self.length, rng)
        return observed_windows(sequences, self.num_positions, len(self.teacher[0]), self.device)

    def loss_and_gradient(self, heads: PositionalHeads, step: int = 0):
        return self.draw(step).loss_and_gradient(heads)


def observed_windows(sequences, num_positions: int, dim: int, device=None) -> CrossEntropy:
    """The empirical cross entropy of all windows of sequences (..., B, L), models first."""
    pairs = [windows(s, num_positions) for s in sequences.reshape(-1, *sequences.shape[-2:])]
    contexts, following = (np.stack(part) for part in zip(*pairs, strict=True))
    shape = (*sequences.shape[:-2], contexts.shape[1])
    x = one_hot(contexts.reshape(*shape, num_positions), dim, device)
    targets = one_hot(following.reshape(*shape, 1), dim, device)
    return CrossEntropy(x, x.new_full(shape, 1 / shape[-1]), targets)


class HeadsRun(NamedTuple):
    """At the recorded steps (n,): losses (n, E), attention (n, E, H, T), and what was observed."""

    steps: np.ndarray
    losses: np.ndarray
    attention: np.ndarray
    observed: np.ndarray
    heads: PositionalHeads


def train_heads(
    task,
    heads: PositionalHeads,
    kind: str,
    rate: float,
    steps: int,
    *,
    every: int = 5,
    observe: Callable[[PositionalHeads], torch.Tensor] | None = None,
    checkpoint: Path | None = None,
) -> HeadsRun:
    """Train a stack of E models on `task.loss_and_gradient(heads, step)`; records every few steps.

    Steps 0 to `steps`, recorded before the update of steps 0, every, 2 every, ... `kind` "sgd"
    (gradient descent, stochastic when the gradient is) or "adamw" (Adam, no decay).
    `observe(heads)` adds a tensor (E, ...) to each record. Checkpoints and errors as in
    `training.train_stacked`; ValueError also for a rate that is not positive.
    """
    require_positive("rate", rate)
    optimiser = Optimiser(kind, rate, betas=ADAM)

    def losses(parameters, step):
        with torch.no_grad():
            loss, gradient = task.loss_and_gradient(PositionalHeads(**parameters), step)
        return loss, gradient._asdict()

    def record(step):
        model = PositionalHeads(**step.before)
        seen = {} if observe is None else {"observed": observe(model)}
        return {"attention": model.attention} | seen

    run = train_stacked(
        losses,
        heads._asdict(),
        Schedule((optimiser,) * len(heads.logits), steps + 1),
        record,
        every=every,
        checkpoint=checkpoint,
        checkpoint_every=20 * every,
    )
    return HeadsRun(
        np.array(run.observed),
        run.losses[run.observed].numpy(),
        run.records["attention"].numpy(),
        run.records.get("observed", torch.empty(0)).numpy(),
        PositionalHeads(**run.parameters),
    )


def every_context(num_positions: int, dim: int, device=None) -> torch.Tensor:
    """All d^T contexts as one-hot rows (d^T, T d), in the order of a flattened (d,) * T array."""
    require_count("num_positions", num_positions)
    grid = np.indices((dim,) * num_positions).reshape(num_positions, -1).T
    return one_hot(grid, dim, device)
