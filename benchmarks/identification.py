"""Identification: exact Jacobians, projections and balancing against the plain ways.

Errors are the largest absolute differences from a reference that is named at each task.
"""

from __future__ import annotations

import numpy as np
import torch

from mhabook_lib.attention_layer import attention_core, random_weights
from mhabook_lib.attention_shapes import AttentionShape
from mhabook_lib.identifiability import (
    attention_jacobian,
    functional_jacobian,
    vertical_steps,
)
from mhabook_lib.symmetries import rebalance, vertical_projection, vertical_step

from .timing import largest_gaps, row

# The plain ways


def difference_jacobian(function, weights, step: float = 1e-5):
    """Central differences, one pair of forward passes for each parameter."""
    columns = []
    for name, value in weights.items():
        for k in range(value.numel()):
            bump = torch.zeros_like(value)
            bump.view(-1)[k] = step
            ends = [function({**weights, name: value + s * bump}).flatten() for s in (1, -1)]
            columns.append((ends[0] - ends[1]) / (2 * step))
    return torch.stack(columns, dim=1)


def dense_projection(w_q, w_k, dw_q, dw_k):
    """The vertical parts of updates, flat (heads, 2DE), by least squares over D^2 columns."""
    updates = torch.cat([dw_q.flatten(1), dw_k.flatten(1)], dim=1)
    parts = []
    for q, k, update in zip(w_q, w_k, updates, strict=True):
        columns = vertical_steps(q, k)
        fit = np.linalg.lstsq(columns.numpy(), update.numpy(), rcond=None)[0]
        parts.append(columns @ torch.from_numpy(fit))
    return torch.stack(parts)


def product_svd(w_q, w_k):
    """Balanced factors from the singular value decomposition of the E x E product."""
    left, sigma, right = torch.linalg.svd(w_k.mT @ w_q)
    width = w_q.shape[-2]
    root = sigma[..., :width, None].sqrt()
    return root * right[..., :width, :], root * left[..., :, :width].mT


# The tasks


def layer():
    """A layer of E=12, H=3, D=4 and the sequences that its rank needs."""
    rng = np.random.default_rng(1)
    weights = random_weights(AttentionShape(12, 3).weight_shapes(), rng, 12**-0.5)
    x = torch.from_numpy(rng.standard_normal((14, 5, 12)))
    return weights, x, lambda w: attention_core(w, x).output


def closed_form_jacobian(plain: str) -> dict:
    """Reference: forward-mode automatic differentiation."""
    weights, x, function = layer()
    forward = torch.func.jacfwd(lambda w: function(w).flatten())(weights)
    reference = torch.cat([forward[name].flatten(1) for name in weights], dim=1)
    ways = {
        "reverse-mode autodiff (jacrev)": lambda: functional_jacobian(function, weights),
        "central differences": lambda: difference_jacobian(function, weights),
    }
    return row(
        "identification",
        "exact Jacobian of a layer in closed form",
        "E=12, H=3, D=4, 840 outputs",
        plain,
        lambda: attention_jacobian(weights, x),
        ways[plain],
        largest_gaps(reference),
    )


def sylvester_projection(d_head: int = 16, d_model: int = 96, heads: int = 48) -> dict:
    """Reference: orthonormal bases of the vertical steps."""
    rng = np.random.default_rng(2)
    w_q, w_k, dw_q, dw_k = torch.from_numpy(rng.standard_normal((4, heads, d_head, d_model)))
    bases = [torch.linalg.qr(vertical_steps(q, k))[0] for q, k in zip(w_q, w_k, strict=True)]
    updates = torch.cat([dw_q.flatten(1), dw_k.flatten(1)], dim=1)
    reference = torch.stack([b @ (b.mT @ u) for b, u in zip(bases, updates, strict=True)])

    def ours():
        found = vertical_projection(w_q, w_k, dw_q, dw_k)
        steps = vertical_step(found.generator, w_q, w_k)
        return torch.cat([step.flatten(1) for step in steps], dim=1)

    return row(
        "identification",
        "vertical parts of updates by Sylvester equations",
        f"D={d_head}, E={d_model}, {heads} heads",
        "numpy.linalg.lstsq over D^2 columns",
        ours,
        lambda: dense_projection(w_q, w_k, dw_q, dw_k),
        largest_gaps(reference),
    )


def balancing(heads: int = 36, d_head: int = 64, d_model: int = 384) -> dict:
    """Reference: zero, for the imbalance and for the change of the product, relative."""
    rng = np.random.default_rng(3)
    w_q, w_k = 0.02 * torch.from_numpy(rng.standard_normal((2, heads, d_head, d_model)))
    product = w_k.mT @ w_q

    def error(new_q, new_k):
        gap = (new_q @ new_q.mT - new_k @ new_k.mT).abs().max() / product.abs().max()
        change = (new_k.mT @ new_q - product).abs().max() / product.abs().max()
        return max(gap, change)

    return row(
        "identification",
        "balanced factors by thin QR",
        f"{heads} heads of {d_head} x {d_model}",
        "singular values of the E x E product",
        lambda: rebalance(w_q, w_k),
        lambda: product_svd(w_q, w_k),
        lambda ours, other: (error(*ours), error(*other)),
    )


def rows() -> list[dict]:
    """All comparisons of this chapter."""
    return [
        closed_form_jacobian("reverse-mode autodiff (jacrev)"),
        closed_form_jacobian("central differences"),
        sylvester_projection(),
        sylvester_projection(24, 144, heads=4),
        balancing(),
    ]
