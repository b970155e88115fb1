"""How far two arrays are apart."""

from __future__ import annotations

import torch


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """|value - reference| / |reference| in the Euclidean norm over all entries.

    Raises ValueError for different shapes or a reference that is zero.

    >>> relative_error(torch.tensor([3.0, 4.4]), torch.tensor([3.0, 4.0]))  # doctest: +ELLIPSIS
    0.08...
    """
    if value.shape != reference.shape:
        raise ValueError(f"shapes differ: {tuple(value.shape)} and {tuple(reference.shape)}")
    scale = reference.norm()
    if scale == 0:
        raise ValueError("the reference is zero, so a relative error has no meaning")
    return float((value - reference).norm() / scale)
