"""Holding one way of computing against another."""

from __future__ import annotations

import torch


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """|value - reference| / |reference| in the Euclidean norm over all entries.

    Raises ValueError for different shapes or a reference that is zero.

    >>> relative_error(torch.tensor([3.0, 6.5]), torch.tensor([3.0, 4.0]))
    0.5
    """
    if value.shape != reference.shape:
        raise ValueError(f"shapes differ: {tuple(value.shape)} and {tuple(reference.shape)}")
    scale = reference.norm()
    if scale == 0:
        raise ValueError("the reference is zero, so a relative error has no meaning")
    return float((value - reference).norm() / scale)


def autograd_gradient(function, x: torch.Tensor) -> torch.Tensor:
    """Gradient of the sum of `function(x)` by automatic differentiation, in the shape of x.

    >>> autograd_gradient(lambda x: x**2, torch.tensor([1.0, 2.0]))
    tensor([2., 4.])
    """
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(function(x).sum(), x)[0]
