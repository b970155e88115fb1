"""How the sphere couples heads: radial shadows, Radial Dominance, approximate orthogonality.

Here `f^h_i` are head outputs with the unnormalized weights and without the factor 1/n:
`head_outputs(x, heads, beta, "unnormalized")`; `r^h_i = <x_i, f^h_i>`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .attention import over_trailing
from .numerics.roots import bisect
from .validation import require_beta, require_finite, require_positive, require_same_shape


class RadialShadow(NamedTuple):
    """`tangential_sq = |P_i f^h_i|^2`, `shadow = r^h_i sum_{g != h} r^g_i`, `radial = r^h_i`."""

    tangential_sq: torch.Tensor
    shadow: torch.Tensor
    radial: torch.Tensor


def radial_shadow(x: torch.Tensor, outputs: torch.Tensor) -> RadialShadow:
    """Tangential and radial parts of the head outputs, and their shadow products.

    x (..., n, d), outputs (..., H, n, d) -> three tensors (..., H, n). Raises ValueError on shape
    mismatch. Source: clustering.T2.

    >>> x = torch.tensor([[1.0, 0.0]])
    >>> radial_shadow(x, torch.tensor([[[1.0, 2.0]], [[3.0, 0.0]]])).shadow
    tensor([[3.],
            [3.]])
    """
    require_same_shape("outputs", outputs, "x", x)
    x = x.unsqueeze(-3)
    radial = (outputs * x).sum(-1)
    tangential = outputs - radial.unsqueeze(-1) * x
    return RadialShadow((tangential**2).sum(-1), radial * _sum_of_others(radial), radial)


def radial_dominance_margin(
    x: torch.Tensor, outputs: torch.Tensor, strong: bool = False
) -> torch.Tensor:
    """Margin of Radial Dominance, `min_{h,i} |P_i f^h_i|^2 - r^h_i sum_{g != h} r^g_i`.

    x (..., n, d), outputs (..., H, n, d) -> (...). The condition holds where the margin is >= 0;
    `strong` puts absolute values on the r. Raises as `radial_shadow`. Source: clustering.T3.

    >>> x = torch.tensor([[1.0, 0.0]])
    >>> radial_dominance_margin(x, torch.tensor([[[1.0, 2.0]], [[-3.0, 0.0]]]))
    tensor(3.)
    """
    tangential_sq, shadow, radial = radial_shadow(x, outputs)
    if strong:
        shadow = radial.abs() * _sum_of_others(radial.abs())
    return (tangential_sq - shadow).amin((-2, -1))


def shadow_rate(x: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """dE_h/dt of flow U on the sphere, by the formula for mutually orthogonal heads.

    `(1/n^3) sum_i [|P_i f^h_i|^2 - r^h_i sum_{g != h} r^g_i]`; x (..., n, d),
    outputs (..., H, n, d) -> (..., H). Exact for symmetric, value-aligned, orthogonal heads.
    Raises as `radial_shadow`. Source: clustering.T2.

    >>> x = torch.tensor([[1.0, 0.0]])
    >>> shadow_rate(x, torch.tensor([[[1.0, 2.0]], [[3.0, 0.0]]]))
    tensor([ 1., -3.])
    """
    tangential_sq, shadow, _ = radial_shadow(x, outputs)
    return (tangential_sq - shadow).sum(-1) / x.shape[-2] ** 3


def overlap_bound(scores: torch.Tensor, beta, eps) -> torch.Tensor:
    """How far dE_h/dt can be from `shadow_rate` when heads overlap by at most eps.

    `(eps/n^3) sum_i Z^h_i sum_{g != h} Z^g_i`, Z the partition sums; scores (..., H, n, n) and
    eps (...) -> (..., H). Raises ValueError for beta <= 0 or negative eps.
    Source: clustering.T4.

    >>> overlap_bound(torch.zeros(2, 1, 1), 1.0, 0.1)
    tensor([0.1000, 0.1000])
    """
    require_finite("scores", scores)
    require_beta(beta, scores.shape[:-3])
    eps = over_trailing(eps, scores, 1)
    if bool((eps < 0).any()):
        raise ValueError(f"eps={float(eps.min())!r}: expected values >= 0")
    partition = torch.exp(over_trailing(beta, scores, 3) * scores).sum(-1)
    return eps * (partition * _sum_of_others(partition)).sum(-1) / scores.shape[-1] ** 3


def head_overlap(heads_dense: torch.Tensor) -> torch.Tensor:
    """Largest overlap of two heads, `max_{h != g} ||M_h M_g||_op`: (..., H, d, d) -> (...).

    Raises ValueError for fewer than two heads. Source: clustering.T4.

    >>> head_overlap(torch.diag_embed(torch.tensor([[1.0, 0.0], [0.5, 1.0]])))
    tensor(0.5000)
    """
    num_heads = heads_dense.shape[-3]
    if num_heads < 2:
        raise ValueError(f"heads of shape {tuple(heads_dense.shape)}: expected at least two heads")
    first, second = (~torch.eye(num_heads, dtype=torch.bool)).nonzero(as_tuple=True)
    products = heads_dense[..., first, :, :] @ heads_dense[..., second, :, :]
    return torch.linalg.matrix_norm(products, ord=2).amax(-1)


def perturb_to_overlap(
    heads_dense: torch.Tensor, noise: torch.Tensor, eps, iterations: int = 50
) -> torch.Tensor:
    """Orthogonal heads plus noise, `M_h + t N_h`, with t such that the overlap is eps.

    heads_dense, noise (..., H, d, d), eps (...), broadcast against one another. t is found by
    bisection from [0, a power of two beyond eps]. Raises ValueError on shape mismatch or if
    the unperturbed overlap already exceeds eps. Source: clustering.T4.

    >>> m = torch.diag_embed(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    >>> round(float(head_overlap(perturb_to_overlap(m, torch.ones(2, 2, 2), 0.1))), 6)
    0.1
    """
    require_same_shape("noise", noise, "heads", heads_dense)
    require_positive("eps", eps)
    eps = over_trailing(eps, heads_dense, 0)

    def perturbed(scale):
        return heads_dense + scale[..., None, None, None] * noise

    def excess(scale):
        return head_overlap(perturbed(scale)) - eps

    low = torch.zeros_like(excess(torch.zeros_like(eps)))
    high = torch.full_like(low, 2.0**-20)
    while bool((below := excess(high) <= 0).any()):
        high = torch.where(below, 4 * high, high)
    return perturbed(bisect(excess, low, high, iterations))


def _sum_of_others(values: torch.Tensor) -> torch.Tensor:
    """`sum_{g != h} values^g` along the head axis, without subtracting large numbers."""
    num_heads = values.shape[-2]
    others = 1 - torch.eye(num_heads, dtype=values.dtype, device=values.device)
    return others @ values
