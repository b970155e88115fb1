"""Heads that attend by position only: one matrix product, exact losses, stacked training.

A model is `logits` (..., H, T) and `values` (..., H, d, d); head h adds `V_h sum_i softmax(a_h)_i
x_i`. All heads together are one linear map of the T d numbers of a context,
`W[i] = sum_h s_hi V_h`. Leading dimensions are separate models, trained in one pass.
Source: \\cite yuksel2026incremental, claims incremental.F2 to F5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from mhabook_lib.markov import sample_chain, windows
from mhabook_lib.validation import require_count, require_finite, require_positive

OPTIMISERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}


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
    return torch.nn.functional.one_hot(tokens, dim).flatten(-2).double()


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

    def loss_and_gradient(self, heads: PositionalHeads):
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
    """Fresh regression batches: `y = sum_i A_i x_i + noise`, x_i ~ N(0, I_d), loss 1/2 |y - f|^2.

    teacher (T, d, d) by position. The recorded loss is exact, `1/2 sum_i |W_i - A_i|^2` (without
    the noise); the gradient is that of a batch, of the population when `batch` is None.
    """

    def __init__(self, teacher: torch.Tensor, batch: int | None, rng=None, noise: float = 0.0):
        self.teacher, self.batch, self.rng, self.noise = teacher, batch, rng, noise

    def loss_and_gradient(self, heads: PositionalHeads):
        error = heads.matrix() - self.teacher
        loss = error.square().sum((-3, -2, -1)) / 2
        slope = error if self.batch is None else self._sampled(error)
        return loss, heads.pulled_back(slope)

    def _sampled(self, error: torch.Tensor) -> torch.Tensor:
        positions, dim = self.teacher.shape[0], self.teacher.shape[-1]
        draw = self.rng.standard_normal((self.batch, positions * dim))
        x = torch.as_tensor(draw, device=error.device)
        residual = x @ error.movedim(-2, -3).flatten(-2).mT
        if self.noise:
            extra = self.noise * self.rng.standard_normal(residual.shape)
            residual = residual + torch.as_tensor(extra, device=error.device)
        slope = residual.mT @ x / self.batch
        return slope.unflatten(-1, (positions, dim)).movedim(-2, -3)


class FreshWindows:
    """Cross entropy of windows that are sampled anew at every call: `count` sequences at a time."""

    def __init__(self, teacher, num_positions: int, count: int, length: int, rng, device=None):
        self.teacher, self.num_positions = teacher, num_positions
        self.count, self.length, self.rng, self.device = count, length, rng, device

    def draw(self) -> CrossEntropy:
        sequences = sample_chain(self.teacher, self.count, self.length, self.rng)
        return observed_windows(sequences, self.num_positions, len(self.teacher[0]), self.device)

    def loss_and_gradient(self, heads: PositionalHeads):
        return self.draw().loss_and_gradient(heads)


def observed_windows(sequences, num_positions: int, dim: int, device=None) -> CrossEntropy:
    """The empirical cross entropy of all windows of sequences (..., B, L), models first."""
    pairs = [windows(s, num_positions) for s in sequences.reshape(-1, *sequences.shape[-2:])]
    contexts, following = (np.stack(part) for part in zip(*pairs, strict=True))
    shape = (*sequences.shape[:-2], contexts.shape[1])
    x = one_hot(contexts.reshape(*shape, num_positions), dim, device)
    targets = one_hot(following.reshape(*shape, 1), dim, device)
    return CrossEntropy(x, x.new_full(shape, 1 / shape[-1]), targets)


class StackedRun(NamedTuple):
    """At the recorded steps (n,): losses (n, ...), attention (n, ..., H, T), what was observed."""

    steps: np.ndarray
    losses: np.ndarray
    attention: np.ndarray
    observed: np.ndarray
    heads: PositionalHeads


def train_stacked(
    loss_and_gradient: Callable,
    heads: PositionalHeads,
    optimiser: str,
    rate: float,
    record_at: Sequence[int],
    observe: Callable | None = None,
    checkpoint: Path | None = None,
) -> StackedRun:
    """Train all models of a stack in one pass; record before the update of the steps `record_at`.

    "sgd" (gradient descent, stochastic when the gradient is) or "adam": both act on each number
    alone, so one optimiser serves all models. `observe(heads)` adds a tensor to each record. With
    `checkpoint` the run is saved at each record and goes on from there when called again. Raises
    ValueError for an unknown optimiser, a rate that is not positive, a loss that becomes
    non-finite, and a checkpoint of models of other shapes.
    """
    if optimiser not in OPTIMISERS:
        raise ValueError(f"optimiser={optimiser!r}: expected one of {tuple(OPTIMISERS)}")
    require_positive("rate", rate)
    record_at = sorted(set(record_at))
    parameters, records, first = [p.clone() for p in heads], [], 0
    rule = OPTIMISERS[optimiser](parameters, lr=rate)
    if checkpoint and checkpoint.is_file():
        first, records = _resume(checkpoint, parameters, rule)
    for step in range(first, record_at[-1] + 1):
        model = PositionalHeads(*parameters)
        loss, gradient = loss_and_gradient(model)
        if step == record_at[len(records)]:
            if not bool(torch.isfinite(loss).all()):
                raise ValueError(f"the loss at step {step} is not finite: rate={rate} is too large")
            seen = loss.new_zeros(()) if observe is None else observe(model)
            records.append([t.cpu().numpy().copy() for t in (loss, model.attention, seen)])
        for parameter, slope in zip(parameters, gradient, strict=True):
            parameter.grad = slope
        rule.step()
        if checkpoint and step in record_at:
            _save(checkpoint, step + 1, parameters, rule, records)
    columns = [np.stack(column) for column in zip(*records, strict=True)]
    return StackedRun(np.array(record_at), *columns, PositionalHeads(*parameters))


def _save(path: Path, step: int, parameters, rule, records) -> None:
    state = {"step": step, "parameters": parameters, "rule": rule.state_dict(), "records": records}
    fresh = path.with_suffix(".new")
    torch.save(state, fresh)
    fresh.replace(path)


def _resume(path: Path, parameters, rule) -> tuple[int, list]:
    state = torch.load(path, weights_only=False, map_location=parameters[0].device)
    for old, new in zip(state["parameters"], parameters, strict=True):
        if old.shape != new.shape:
            raise ValueError(
                f"checkpoint {path} holds models of shape {tuple(old.shape)}: expected "
                f"{tuple(new.shape)}"
            )
        new.copy_(old)
    rule.load_state_dict(state["rule"])
    return state["step"], state["records"]


def every_context(num_positions: int, dim: int, device=None) -> torch.Tensor:
    """All d^T contexts as one-hot rows (d^T, T d), in the order of a flattened (d,) * T array."""
    require_count("num_positions", num_positions)
    grid = np.indices((dim,) * num_positions).reshape(num_positions, -1).T
    return one_hot(grid, dim, device)
