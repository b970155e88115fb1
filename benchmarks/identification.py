"""Identification: exact Jacobians in closed form against the plain ways.

Errors are the largest absolute differences from a reference that is named at each task.
"""

from __future__ import annotations

import numpy as np
import torch

from mhabook_lib.attention_layer import attention_core, random_weights
from mhabook_lib.attention_shapes import AttentionShape
from mhabook_lib.identifiability import attention_jacobian, functional_jacobian

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


def rows() -> list[dict]:
    """All comparisons of this chapter."""
    return [
        closed_form_jacobian("reverse-mode autodiff (jacrev)"),
        closed_form_jacobian("central differences"),
    ]
