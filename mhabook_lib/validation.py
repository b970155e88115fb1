"""Checks at the border: a `ValueError` names the argument, its value and what was expected."""

from __future__ import annotations

import math

import numpy as np
import torch

NORMALIZATIONS = ("softmax", "unnormalized", "relu")
ACTIVATIONS = ("softmax", "softmax1", "sigmoid", "relu", "linear")
UNIT_TOLERANCE = 1e-6


def require_normalization(normalization: str) -> None:
    """Raise unless `normalization` names one of the three flows."""
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"normalization={normalization!r}: expected one of {NORMALIZATIONS}")


def require_activation(activation: str) -> None:
    """Raise unless `activation` names a way from the scores of a layer to its pattern."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r}: expected one of {ACTIVATIONS}")


def require_finite(name: str, value) -> None:
    """Raise if a number, array or tensor holds NaN or infinity."""
    if isinstance(value, np.ndarray) and min(value.strides, default=0) < 0:
        value = value.copy()  # torch takes no reversed views
    tensor = torch.as_tensor(value).detach()
    if math.isfinite(float(tensor.sum())):  # one cheap pass in the usual case
        return
    if not bool(torch.isfinite(tensor).all()):
        shown = tensor.item() if tensor.ndim == 0 else f"tensor of shape {tuple(tensor.shape)}"
        raise ValueError(f"{name}={shown}: expected finite values only")


def require_positive(name: str, value) -> None:
    """Raise unless every entry is finite and > 0."""
    require_finite(name, value)
    lowest = float(value.min() if hasattr(value, "min") else np.min(value))
    if not lowest > 0:
        raise ValueError(f"{name}={lowest!r}: expected a value > 0")


def require_count(name: str, value) -> None:
    """Raise unless `value` is an integer >= 1."""
    if not float(value).is_integer() or value < 1:
        raise ValueError(f"{name}={value!r}: expected an integer >= 1")


def require_broadcast(name: str, batch, other_name: str, other_batch) -> None:
    """Raise unless two leading (batch) shapes broadcast; the message shows both."""
    try:
        torch.broadcast_shapes(batch, other_batch)
    except RuntimeError:
        raise ValueError(
            f"{name} with leading shape {tuple(batch)} and {other_name} with leading shape "
            f"{tuple(other_batch)}: expected shapes that broadcast"
        ) from None


def require_beta(beta, batch) -> None:
    """Raise unless `beta` is positive, finite and broadcasts over the leading shape `batch`."""
    require_positive("beta", beta)
    require_broadcast("beta", torch.as_tensor(beta).shape, "its data", batch)


def require_tokens(x: torch.Tensor, sphere: bool = False) -> None:
    """Raise unless `x` is a finite float tensor (..., n, d), with unit rows when `sphere`."""
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        raise ValueError(f"x of type {type(x).__name__}: expected a floating-point tensor")
    if x.ndim < 2:
        raise ValueError(f"x of shape {tuple(x.shape)}: expected (..., n, d)")
    require_finite("x", x)
    if sphere:
        off = float((torch.linalg.vector_norm(x.detach(), dim=-1) - 1).abs().max())
        if off > UNIT_TOLERANCE:
            raise ValueError(
                f"x leaves the unit sphere by {off:.3g}: expected unit tokens "
                f"(tolerance {UNIT_TOLERANCE:g}), or sphere=False"
            )


def require_same_shape(name: str, value: torch.Tensor, other_name: str, other) -> None:
    """Raise unless the last two axes of two tensors agree; the message shows both shapes."""
    if value.shape[-2:] != other.shape[-2:]:
        raise ValueError(
            f"{name} of shape {tuple(value.shape)} and {other_name} of shape "
            f"{tuple(other.shape)}: expected the same last two axes"
        )


def require_gamma(gamma, n) -> None:
    """Raise unless every inner product `gamma` lies in [-1/(n-1), 1) for n >= 2 tokens."""
    gamma, n = (
        value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
        for value in (gamma, n)
    )
    if np.any(n < 2):
        raise ValueError(f"n={n}: expected at least two tokens")
    outside = ~((gamma >= -(1 + 1e-12) / (n - 1)) & (gamma < 1))
    if np.any(outside):
        wrong = float(np.broadcast_to(gamma, outside.shape)[outside][0])
        raise ValueError(f"gamma={wrong!r}: expected a value in [-1/(n-1), 1) with n={n}")
