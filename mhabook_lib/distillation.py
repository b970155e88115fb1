"""The plain ways to copy a black box: gradient distillation, many starts, one head at a time.

Baselines with the same questions as the learners of `query_recovery`. Source: queries.X4.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from mhabook_lib.query_oracle import QueryHeads, QueryOracle
from mhabook_lib.validation import require_count


def distil(
    u, b, counts, answers, num_heads: int, *, steps: int, restarts: int, rng, rate: float = 0.03
) -> tuple[QueryHeads, np.ndarray]:
    """Adam on the mean squared misfit of probes, from random starts, all in one batch.

    Cosine schedule. Returns the student with the least loss and the losses (steps, restarts).
    """
    require_count("steps", steps)
    require_count("restarts", restarts)
    dim = u.shape[-1]
    u, b, wanted = (torch.as_tensor(np.ascontiguousarray(part)) for part in (u, b, answers))
    logs = torch.as_tensor(np.log(counts[:, 0] / counts[:, 1]))
    shape = (restarts, num_heads, dim)
    w = torch.as_tensor(rng.standard_normal((*shape, dim))).requires_grad_()
    v = torch.as_tensor(rng.standard_normal(shape)).requires_grad_()
    rule, losses = torch.optim.Adam([w, v], lr=rate), []
    for step in range(steps):
        for group in rule.param_groups:
            group["lr"] = rate * (1 + math.cos(math.pi * step / steps)) / 2
        scores = torch.einsum("ma,rhac,mc->rmh", u, w, b)
        shares = torch.sigmoid(scores[:, :, None] + logs[:, None])
        heard = torch.einsum("rmqh,rhd,md->rmq", shares, v, u) + (v.sum(1) @ b.T)[..., None]
        loss = (heard - wanted).square().mean((1, 2))
        rule.zero_grad()
        loss.sum().backward()
        rule.step()
        losses.append(loss.detach().numpy().copy())
    best = int(np.argmin(losses[-1]))
    return QueryHeads(w[best].detach().numpy(), v[best].detach().numpy()), np.array(losses)


def learn_single_head(oracle: QueryOracle) -> QueryHeads:
    """One head from d^2 + d queries: single tokens give v, length-2 probes W by the logit."""
    dim = oracle.dim
    basis = np.eye(dim)
    v = oracle.value(basis[:, None])
    u = basis + (v[:, None] ** 2 < 1e-6) * v / np.linalg.norm(v)
    pairs = np.array([(a, b) for a in u for b in basis])
    f = oracle.probe(pairs[:, 0], pairs[:, 1], np.array([[1.0, 1.0]]))[:, 0]
    share = (f - pairs[:, 1] @ v) / (pairs[:, 0] @ v)
    with np.errstate(all="ignore"):
        scores = np.log(share / (1 - share)).reshape(dim, dim)
    return QueryHeads(np.linalg.solve(u, scores)[None], v[None])
