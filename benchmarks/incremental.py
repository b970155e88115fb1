"""Incremental learning: flows, students, chains and stacks against the plain ways."""

from __future__ import annotations

import numpy as np
import torch

from mhabook_lib.attention_flow import attention_flow, group_target, position_target
from mhabook_lib.markov import next_token_law, reference_teacher, sample_chain
from mhabook_lib.positional_attention import (
    CrossEntropy,
    PositionalHeads,
    observed_windows,
    one_hot,
    positional_heads,
    train_heads,
)

from .timing import largest_gaps, row

IMPORTANCES = [1.7**2, 1.7, 1.0]
END = 500.0


def euler_flow(rows, logits, step: float = 0.005):
    """Euler steps of attention itself, head by head, clipped and normalised after every step."""
    heads = len(logits)
    s = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    v = np.zeros((heads, len(rows)))
    for _ in range(round(END / step)):
        residual = rows - v.T @ s
        for h in range(heads):
            force = residual.T @ v[h]
            change = residual @ s[h]
            s[h] = s[h] + step * (np.diag(s[h]) - np.outer(s[h], s[h])) @ force
            s[h] = np.clip(s[h], 1e-12, None)
            s[h] /= s[h].sum()
            v[h] = v[h] + step * change
    return s[:, : len(rows)]


def reduced_flow():
    """The trajectory of the paper's figure: three heads, forty positions, until time 500."""
    small = group_target(IMPORTANCES, 40)
    rows = small.matrix[:, np.repeat(np.arange(4), [1, 1, 1, 37])]
    logits = np.pad(1e-3 * np.random.default_rng(0).standard_normal((3, 3)), ((0, 0), (0, 1)))
    wide = np.pad(logits, ((0, 0), (0, 36)))
    reference = attention_flow(position_target(rows), [0, END], wide, rtol=1e-12, atol=1e-14)

    def ours():
        return attention_flow(small, [0, END], logits).attention[-1, :, :3]

    return row(
        "incremental",
        "flow until time 500",
        "T=40, H=3",
        "Euler steps of attention, head by head",
        ours,
        lambda: euler_flow(rows, wide),
        largest_gaps(reference.attention[-1, :, :3]),
        repeats=3,
    )


def literal_student(queries, values, tokens, targets):
    """All T x T attention on tokens and positions, head by head, and gradients by autodiff."""
    n, length, dim = tokens.shape
    place = torch.eye(length, dtype=tokens.dtype).expand(n, length, length)
    x = torch.cat([tokens, place], dim=-1)
    queries, values = (p.detach().requires_grad_() for p in (queries, values))
    total = 0
    for q, v in zip(queries, values, strict=True):
        scores = (x[..., dim:] @ q) @ x[..., dim:].mT
        total = total + torch.softmax(scores, -1) @ (x[..., :dim] @ v.mT)
    loss = torch.nn.functional.cross_entropy(total[:, 0], targets)
    loss.backward()
    return np.concatenate([queries.grad[:, 0].numpy().ravel(), values.grad.numpy().ravel()])


def one_product(n: int):
    """Loss and gradient of a student over n contexts."""
    rng, length, dim, heads = np.random.default_rng(0), 12, 8, 3
    contexts, following = rng.integers(dim, size=(n, length)), rng.integers(dim, size=n)
    model = PositionalHeads(
        torch.as_tensor(rng.standard_normal((heads, length))),
        torch.as_tensor(rng.standard_normal((heads, dim, dim))),
    )
    x = one_hot(contexts, dim)
    targets = torch.as_tensor(following)
    task = CrossEntropy(x, torch.full((n,), 1 / n), one_hot(following[:, None], dim))
    queries = model.logits.new_zeros(heads, length, length)
    queries[:, 0] = model.logits

    def ours():
        gradient = task.loss_and_gradient(model)[1]
        return np.concatenate([part.numpy().ravel() for part in gradient])

    free = PositionalHeads(*(p.clone().requires_grad_() for p in model))
    exact = torch.autograd.grad(task.loss(free), free)
    return row(
        "incremental",
        "student, loss and gradient",
        f"N={n}, T=12, d=8",
        "T x T attention, loop over heads, autodiff",
        ours,
        lambda: literal_student(queries, model.values, x.unflatten(-1, (length, dim)), targets),
        largest_gaps(np.concatenate([part.numpy().ravel() for part in exact])),
    )


def sequence_loop(teacher, count, length, rng):
    """One sequence at a time, one token at a time."""
    lags, dim, _ = teacher.shape
    sequences = []
    for _ in range(count):
        tokens = list(rng.integers(dim, size=lags))
        while len(tokens) < length:
            logits = sum(teacher[k] @ np.eye(dim)[tokens[-1 - k]] for k in range(lags))
            p = np.exp(logits - logits.max())
            tokens.append(rng.choice(dim, p=p / p.sum()))
        sequences.append(tokens)
    return np.array(sequences)


def sampler():
    """Sequences of a chain of order 3 over 50 letters; errors: surprise minus its expectation."""
    teacher, count, length = reference_teacher(50, 3, 1.7, 0.7, 0), 1000, 20
    law = next_token_law(teacher)

    def surprise(tokens):
        rows = law[tokens[:, -2], tokens[:, -3], tokens[:, -4]]
        own = -np.log(rows[np.arange(count), tokens[:, -1]])
        return abs((own + (rows * np.log(rows)).sum(1)).mean())

    return row(
        "incremental",
        "sampling a chain",
        "B=1000, L=20, d=50",
        "one sequence at a time",
        lambda: sample_chain(teacher, count, length, np.random.default_rng(0)),
        lambda: sequence_loop(teacher, count, length, np.random.default_rng(0)),
        lambda ours, other: (surprise(ours), surprise(other)),
        repeats=3,
    )


def stacked_training(models: int, n: int):
    """Fifty steps of Adam for a stack of models on n windows each."""
    rng = np.random.default_rng(0)
    teacher = reference_teacher(8, 3, 1.7, 1.5, 0)
    data = sample_chain(teacher, models * n, 10, rng)[:, -7:].reshape(models, n, 7)
    start = 1e-3 * rng.standard_normal((models, 3, 6))
    stack = observed_windows(data, 6, 8)
    single = [observed_windows(d, 6, 8) for d in data]

    def train(task, logits):
        heads = positional_heads(logits, 8)
        return train_heads(task, heads, "adamw", 0.03, 50, every=50).losses[-1]

    def loop():
        return np.concatenate([train(t, a[None]) for t, a in zip(single, start, strict=True)])

    return row(
        "incremental",
        "training of a stack",
        f"{models} models, n={n}",
        "one model after the other",
        lambda: train(stack, start),
        loop,
        largest_gaps(loop()),
        repeats=3,
    )


def rows() -> list[dict]:
    """All comparisons of this chapter."""
    return [
        reduced_flow(),
        one_product(256),
        one_product(4096),
        sampler(),
        stacked_training(32, 32),
        stacked_training(32, 128),
    ]
