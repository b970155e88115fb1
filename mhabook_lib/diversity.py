r"""How different are the heads? Diversity indices from weights and from outputs.

Heads are given by their projection matrices `(..., H, d, d_k)` (for instance the key weights) or
by orthonormal bases `U_h` of their column spaces; `P_h = U_h U_h^T` are the projectors and
`P = (1/H) sum_h P_h` is their average.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .numerics.linalg import orthonormal_basis
from .validation import require_finite

KINDS = ("subspace", "spectral")


def require_heads(name: str, value: torch.Tensor, least: int = 2) -> None:
    """Raise unless `value` is a finite stack (..., H, d, d_k) with H >= least and d_k <= d."""
    shape = tuple(value.shape)
    if len(shape) < 3 or shape[-3] < least or not 1 <= shape[-1] <= shape[-2]:
        raise ValueError(
            f"{name} of shape {shape}: expected (..., H, d, d_k) with H >= {least} and d_k <= d"
        )
    require_finite(name, value)


def require_orthonormal(name: str, bases: torch.Tensor) -> None:
    """Raise unless the columns of every matrix (..., d, k) are orthonormal."""
    bases = bases.detach()
    identity = torch.eye(bases.shape[-1], dtype=bases.dtype, device=bases.device)
    off = float((bases.mT @ bases - identity).abs().max())
    if off > torch.finfo(bases.dtype).eps ** 0.5:
        raise ValueError(
            f"{name} is {off:.3g} away from orthonormal columns: expected bases as head_subspaces "
            f"returns them"
        )


def head_subspaces(projections: torch.Tensor) -> torch.Tensor:
    """Orthonormal bases (..., H, d, d_k) of the subspaces that the heads see.

    `projections (..., H, d, d_k)` are key (or query) weights; any invertible change
    `W_h -> W_h G` gives the same subspaces. Raises ValueError for fewer than two heads, d_k > d,
    entries that are not finite, and a projection that is not of full rank. Source: ensemble.T6.

    >>> head_subspaces(torch.tensor([[[2.0], [0.0]], [[3.0], [4.0]]])).abs()[1].T
    tensor([[0.6000, 0.8000]])
    """
    require_heads("projections", projections)
    return orthonormal_basis(projections, "projections")


def average_projector(bases: torch.Tensor) -> torch.Tensor:
    """`P = (1/H) sum_h U_h U_h^T`, (..., H, d, d_k) -> (..., d, d): trace d_k, spectrum in [0, 1].

    Raises ValueError unless the bases are orthonormal. Source: ensemble.T6.

    >>> average_projector(torch.tensor([[[1.0], [0.0]], [[0.0], [1.0]]]))
    tensor([[0.5000, 0.0000],
            [0.0000, 0.5000]])
    """
    require_heads("bases", bases)
    require_orthonormal("bases", bases)
    frame = bases.movedim(-3, -2).flatten(-2)  # all bases side by side
    return frame @ frame.mT / bases.shape[-3]


def head_diversity_index(bases: torch.Tensor, kind: str = "subspace") -> torch.Tensor:
    r"""Diversity of the subspaces, between 0 and 1: (..., H, d, d_k) -> (...).

    "subspace": the mean of `sin^2` over all principal angles of all pairs of heads,
    `(H/(H-1)) (1 - |P|_F^2/d_k)`: 0 if all subspaces are equal, 1 if they are orthogonal.
    "spectral": `(1 - lambda_max(P))/(1 - 1/H)`, never larger: 0 if all share one direction.
    Raises ValueError for another kind, fewer than two heads, and bases that are not orthonormal.
    Source: ensemble.T6.

    >>> lines = torch.tensor([[[1.0], [0.0]], [[-0.5], [0.75**0.5]], [[-0.5], [-(0.75**0.5)]]])
    >>> head_diversity_index(lines), head_diversity_index(lines, "spectral")
    (tensor(0.7500), tensor(0.7500))
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}: expected one of {KINDS}")
    require_heads("bases", bases)
    require_orthonormal("bases", bases)
    num_heads, d_head = bases.shape[-3], bases.shape[-1]
    frame = bases.movedim(-3, -2).flatten(-2)
    if kind == "spectral":
        largest = torch.linalg.matrix_norm(frame, 2).square() / num_heads
        return (1 - largest) * num_heads / (num_heads - 1)
    overlap = (frame.mT @ frame).square().sum((-1, -2)) / num_heads**2
    return (1 - overlap / d_head) * num_heads / (num_heads - 1)


def output_diversity_index(correlation: torch.Tensor) -> torch.Tensor:
    """`1 - mean off-diagonal correlation` of the head outputs: (..., H, H) -> (...).

    Raises ValueError unless there are two heads or more and the diagonal is one.
    Source: ensemble.T6, ensemble.T7.

    >>> output_diversity_index(torch.tensor([[1.0, 0.4], [0.4, 1.0]]))
    tensor(0.6000)
    """
    shape, diagonal = tuple(correlation.shape), correlation.diagonal(dim1=-2, dim2=-1)
    if len(shape) < 2 or shape[-1] != shape[-2] or shape[-1] < 2:
        raise ValueError(f"correlation of shape {shape}: expected (..., H, H) with H >= 2")
    off = float((diagonal - 1).abs().max())
    if off > 1e-6:
        raise ValueError(f"correlation with a diagonal {off:.3g} away from 1: expected ones")
    num_heads = shape[-1]
    total = correlation.sum((-1, -2)) - num_heads
    return 1 - total / (num_heads * (num_heads - 1))


def hdi_random_baseline(d_model: int, d_head: int) -> float:
    """Mean of the subspace index over independent uniform subspaces, exactly `1 - d_k/d`.

    Raises ValueError unless 1 <= d_head <= d_model. Source: ensemble.T6.

    >>> hdi_random_baseline(8, 2)
    0.75
    """
    if not 1 <= d_head <= d_model:
        raise ValueError(f"d_model={d_model}, d_head={d_head}: expected 1 <= d_head <= d_model")
    return 1 - d_head / d_model


def hdi_upper_bound(num_heads: int, d_model: int, d_head: int) -> float:
    """No heads have a larger index: `min(1, (H/(H-1)) (1 - d_k/d))`, of either kind.

    A bound of Welch type. It is attained if H d_k <= d, and if d_k divides d; not always.
    Raises ValueError unless num_heads >= 2 and 1 <= d_head <= d_model. Source: ensemble.T6.

    >>> hdi_upper_bound(3, 2, 1), hdi_upper_bound(4, 8, 2)
    (0.75, 1.0)
    """
    if num_heads < 2:
        raise ValueError(f"num_heads={num_heads}: expected an integer >= 2")
    baseline = hdi_random_baseline(d_model, d_head)
    return 1.0 if num_heads * d_head <= d_model else num_heads / (num_heads - 1) * baseline


@dataclass(frozen=True)
class HeadDiversity:
    """Both indices of a layer's heads, with what random heads have and what no heads exceed."""

    subspace: float
    spectral: float
    random_baseline: float
    upper_bound: float

    def __str__(self) -> str:
        return (
            f"HDI_sub {self.subspace:.4f}, HDI_spec {self.spectral:.4f} "
            f"(random heads {self.random_baseline:.4f}, at most {self.upper_bound:.4f})"
        )


def head_diversity(projections: torch.Tensor) -> HeadDiversity:
    """The diversity of the heads of any layer, from its key (or query) projections (H, d, d_k).

    Compare `subspace` with `random_baseline`: untrained heads are there already. Computed in
    float64. Raises ValueError for another shape and as `head_subspaces`. Source: ensemble.T6.

    >>> print(head_diversity(torch.eye(4).reshape(2, 2, 4).mT))
    HDI_sub 1.0000, HDI_spec 1.0000 (random heads 0.5000, at most 1.0000)
    """
    if projections.ndim != 3:
        raise ValueError(f"projections of shape {tuple(projections.shape)}: expected (H, d, d_k)")
    bases = head_subspaces(projections.detach().double())
    num_heads, d_model, d_head = bases.shape
    return HeadDiversity(
        *(float(head_diversity_index(bases, kind).clamp(0, 1)) for kind in KINDS),
        hdi_random_baseline(d_model, d_head),
        hdi_upper_bound(num_heads, d_model, d_head),
    )
