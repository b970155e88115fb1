"""Steps that change no function: their share of an update, what they conserve, and balancing.

Everything is stated for the two factors of a product, `w_q (..., D, E)` and `w_k (..., D, E')`,
which enter as `M = W_K^T W_Q`. The widths may differ: a query bias is one more column of `w_q`, the
queries of a group of heads stand side by side, and outputs with values are the pair
`(W_O^T, W_V)`. `query_key_factors` and `output_value_factors` make such pairs from a layer.
All projections are computed in float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .attention_layer import Weights
from .identifiability import canonical_form
from .validation import require_finite, require_same_shape

EPS = torch.finfo(torch.float64).eps


class Projection(NamedTuple):
    """The vertical part of an update: `generator (..., D, D)`, and `rho (...)`, its share.

    For rotary heads the generator is `(..., D/2)`, complex.
    """

    generator: torch.Tensor
    rho: torch.Tensor


class HeadDiagnostics(NamedTuple):
    """What is watched of each head in training, all (...).

    `rho`: vertical share of the update; `step_norm`: its norm; `beta`, `tau`: norm and trace of the
    imbalance; `mu`: sum of the smallest eigenvalues of the two Gram matrices.
    """

    rho: torch.Tensor
    step_norm: torch.Tensor
    beta: torch.Tensor
    tau: torch.Tensor
    mu: torch.Tensor


# What is conserved


def imbalance(w_q: torch.Tensor, w_k: torch.Tensor) -> torch.Tensor:
    """`Delta = W_Q W_Q^T - W_K W_K^T`, (..., D, D). Source: identification.T11.

    >>> imbalance(torch.tensor([[2.0, 1.0]]), torch.tensor([[1.0, 1.0]]))
    tensor([[3.]])
    """
    _require_pair(w_q, w_k)
    return w_q @ w_q.mT - w_k @ w_k.mT


def plane_imbalance(w_q: torch.Tensor, w_k: torch.Tensor) -> torch.Tensor:
    """`|W_Q|^2 - |W_K|^2` in each plane of rows `(2d, 2d+1)`, (..., D/2).

    What is left of the imbalance with rotary positions. Raises ValueError for odd D.
    Source: identification.T11.

    >>> plane_imbalance(torch.tensor([[2.0], [1.0]]), torch.tensor([[1.0], [1.0]]))
    tensor([3.])
    """
    z_q, z_k = _planes(w_q, w_k)
    return _square(z_q) - _square(z_k)


# Projections


def vertical_projection(
    w_q: torch.Tensor, w_k: torch.Tensor, dw_q: torch.Tensor, dw_k: torch.Tensor
) -> Projection:
    """The vertical step `(A W_Q, -A^T W_K)` nearest to an update, and its share of the square norm.

    A solves `A G_Q + G_K A = Y` with the Gram matrices `G = W W^T` and
    `Y = dW_Q W_Q^T - W_K dW_K^T`: with `G = U diag(l) U^T` for each,
    `A = U_K [(U_K^T Y U_Q)_ij / (l_K,i + l_Q,j)] U_Q^T`. The share is
    `rho = <A, Y> / (|dW_Q|^2 + |dW_K|^2)`, NaN for an update that is zero. Raises ValueError when
    both Gram matrices are singular, for shapes that do not fit and for values that are not finite.
    Source: identification.P1.

    >>> w = torch.tensor([[1.0, 0.0]])
    >>> vertical_projection(w, w, w, -w).rho.item()
    1.0
    """
    w_q, w_k, dw_q, dw_k = _float64(w_q, w_k, dw_q, dw_k)
    grams = torch.stack([w_q @ w_q.mT, w_k @ w_k.mT])
    (values_q, values_k), (basis_q, basis_k) = torch.linalg.eigh(grams)
    sums = values_k.unsqueeze(-1) + values_q.unsqueeze(-2)
    _require_regular(sums)
    right_side = dw_q @ w_q.mT - w_k @ dw_k.mT
    generator = basis_k @ ((basis_k.mT @ right_side @ basis_q) / sums) @ basis_q.mT
    vertical = (generator * right_side).sum((-2, -1))
    return Projection(generator, vertical / (_square(dw_q, 2) + _square(dw_k, 2)))


def vertical_step(
    generator: torch.Tensor, w_q: torch.Tensor, w_k: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(A W_Q, -A^T W_K)`. Source: identification.T3.

    >>> vertical_step(torch.tensor([[2.0]]), torch.tensor([[1.0]]), torch.tensor([[3.0]]))
    (tensor([[2.]]), tensor([[-6.]]))
    """
    generator = generator.to(w_q)
    return generator @ w_q, -generator.mT @ w_k


def rope_projection(
    w_q: torch.Tensor, w_k: torch.Tensor, dw_q: torch.Tensor, dw_k: torch.Tensor
) -> Projection:
    """`vertical_projection` for heads with rotary positions on all planes, distinct frequencies.

    Rows `(2d, 2d+1)` are read as one complex row: z of the weights, w of the update. Vertical steps
    are `(alpha z_Q, -conj(alpha) z_K)` and, with `<x, y> = sum conj(x) y`, the nearest one has
    `alpha = (<z_Q, w_Q> - conj <z_K, w_K>) / (|z_Q|^2 + |z_K|^2)`. Biases are columns of both.
    Raises ValueError for odd D, for a plane where both factors vanish, and as
    `vertical_projection`. Source: identification.X10.

    >>> w = torch.tensor([[1.0], [0.0]])
    >>> rope_projection(w, w, torch.tensor([[0.0], [1.0]]), torch.zeros(2, 1)).generator
    tensor([0.+0.5000j], dtype=torch.complex128)
    """
    w_q, w_k, dw_q, dw_k = _float64(w_q, w_k, dw_q, dw_k)
    (z_q, z_k), (dz_q, dz_k) = _planes(w_q, w_k), _planes(dw_q, dw_k)
    weight = _square(z_q) + _square(z_k)
    _require_regular(weight.unsqueeze(-1))
    inner_q, inner_k = (z_q.conj() * dz_q).sum(-1), (z_k.conj() * dz_k).sum(-1)
    alpha = (inner_q - inner_k.conj()) / weight
    vertical = (alpha.abs().square() * weight).sum(-1)
    return Projection(alpha, vertical / (_square(dw_q, 2) + _square(dw_k, 2)))


def rope_step(
    alpha: torch.Tensor, w_q: torch.Tensor, w_k: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(alpha z_Q, -conj(alpha) z_K)` as real rows. Source: identification.X10.

    >>> w = torch.tensor([[1.0], [0.0]])
    >>> [step.flatten().tolist() for step in rope_step(torch.tensor([0.5 + 1j]), w, w)]
    [[0.5, 1.0], [-0.5, 1.0]]
    """
    z_q, z_k = _planes(w_q, w_k)
    alpha = alpha.unsqueeze(-1).to(z_q)
    return _rows(alpha * z_q), _rows(-alpha.conj() * z_k)


# Balancing


def rebalance(
    w_q: torch.Tensor, w_k: torch.Tensor, align: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest factors of the same product with `Delta = 0`.

    The canonical form is balanced, `W_Q' W_Q'^T = W_K' W_K'^T = Sigma`, and all balanced factors
    are `(Z W_Q', Z W_K')` with orthogonal Z. `align` takes for Z the polar factor of
    `W_Q W_Q'^T + W_K W_K'^T`, the nearest of them. They minimise `|W_Q|^2 + |W_K|^2` among all
    factors of the product; the minimum is twice its nuclear norm. Not for heads with rotary
    positions. Raises as `canonical_form`. Source: identification.P6.

    >>> w_q, w_k = rebalance(torch.tensor([[-4.0, 0.0]]), torch.tensor([[1.0, 0.0]]))
    >>> w_q[0, 0].item(), w_k[0, 0].item()
    (-2.0, 2.0)
    """
    new_q, new_k = canonical_form(w_q, w_k)
    if not align:
        return new_q, new_k
    left, _, right = torch.linalg.svd(w_q @ new_q.mT + w_k @ new_k.mT)
    turn = left @ right
    return turn @ new_q, turn @ new_k


def rebalance_rope(w_q: torch.Tensor, w_k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale every plane of queries, and of keys inversely, to equal norms.

    `a_d = (|W_K^(d)| / |W_Q^(d)|)^(1/2)`: the nearest and the smallest point that rotary positions
    allow. Raises ValueError for odd D, for a plane where a factor vanishes and for values that are
    not finite. Source: identification.P6.

    >>> rebalance_rope(torch.tensor([[4.0], [0.0]]), torch.tensor([[0.0], [1.0]]))
    (tensor([[2.],
            [0.]]), tensor([[0.],
            [2.]]))
    """
    z_q, z_k = _planes(w_q, w_k)
    norm_q, norm_k = z_q.norm(dim=-1, keepdim=True), z_k.norm(dim=-1, keepdim=True)
    if not bool((norm_q * norm_k > 0).all()):
        raise ValueError("w_q, w_k: expected no plane in which one of them vanishes")
    scale = (norm_k / norm_q).sqrt()
    return _rows(scale * z_q), _rows(z_k / scale)


# Layers


def query_key_factors(weights: Weights, rotary: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors of each group: queries (..., G, D, (H/G)(E+1)) and keys (..., G, D, E).

    Query biases are columns, if there are any; with rotary positions key biases are, too, and only
    then, because else no output depends on them. Source: identification.T11, P6.

    >>> layer = {"w_q": torch.ones(4, 2, 5), "w_k": torch.ones(2, 2, 5), "b_q": torch.ones(4, 2)}
    >>> [tuple(factor.shape) for factor in query_key_factors(layer)]
    [(2, 2, 12), (2, 2, 5)]
    """
    queries = _with_column(weights["w_q"], weights.get("b_q"))
    keys = _with_column(weights["w_k"], weights.get("b_k") if rotary else None)
    return _side_by_side(queries, keys.shape[-3]), keys


def output_value_factors(weights: Weights) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors `W_O^T (..., G, C, (H/G) E)` and `W_V (..., G, C, E)`, value biases as a column.

    Source: identification.T11.

    >>> layer = {"w_o": torch.ones(4, 5, 2), "w_v": torch.ones(2, 2, 5)}
    >>> [tuple(factor.shape) for factor in output_value_factors(layer)]
    [(2, 2, 10), (2, 2, 5)]
    """
    values = _with_column(weights["w_v"], weights.get("b_v"))
    return _side_by_side(weights["w_o"].mT, values.shape[-3]), values


def rebalance_layer(weights: Weights, rotary: bool = False) -> dict[str, torch.Tensor]:
    """The same layer with balanced queries and keys, biases included.

    Raises as `rebalance`, and as `rebalance_rope` with rotary positions. Source: identification.P6.

    >>> layer = {"w_q": torch.full((1, 1, 1), 4.0), "w_k": torch.ones(1, 1, 1)}
    >>> rebalance_layer(layer)["w_k"].item()
    2.0
    """
    factors = query_key_factors(weights, rotary)
    balanced = rebalance_rope(*factors) if rotary else rebalance(*factors)
    return {**weights, **_from_factors(weights, *balanced, rotary)}


def horizontal_step(
    weights: Weights, step: Weights, rotary: bool = False
) -> dict[str, torch.Tensor]:
    """A step of a layer without the vertical part of its queries and keys.

    Raises as `vertical_projection`, or `rope_projection`. Source: identification.X7.

    >>> one = torch.ones(1, 1, 1)
    >>> layer, step = {"w_q": one, "w_k": one}, {"w_q": one, "w_k": 0 * one}
    >>> horizontal_step(layer, step)["w_k"].item()
    0.5
    """
    factors, update = query_key_factors(weights, rotary), query_key_factors(step, rotary)
    project, move = (rope_projection, rope_step) if rotary else (vertical_projection, vertical_step)
    vertical = move(project(*factors, *update).generator, *factors)
    kept = [part - away for part, away in zip(update, vertical, strict=True)]
    return {**step, **_from_factors(weights, *kept, rotary)}


def head_diagnostics(weights: Weights, step: Weights, rotary: bool = False) -> HeadDiagnostics:
    """What is watched of each head, or group of heads: from the weights before a step and the step.

    `rho` is that of `rope_projection` with rotary positions. Raises as the projections.
    Source: identification.F2.

    >>> layer = {"w_q": torch.full((1, 1, 1), 2.0), "w_k": torch.ones(1, 1, 1)}
    >>> head_diagnostics(layer, {"w_q": torch.zeros(1, 1, 1), "w_k": torch.ones(1, 1, 1)}).tau
    tensor([3.])
    """
    factors, update = query_key_factors(weights, rotary), query_key_factors(step, rotary)
    project = rope_projection if rotary else vertical_projection
    delta = imbalance(*factors)
    lowest = [torch.linalg.eigvalsh(w @ w.mT)[..., 0] for w in factors]
    return HeadDiagnostics(
        rho=project(*factors, *update).rho,
        step_norm=(_square(update[0], 2) + _square(update[1], 2)).sqrt(),
        beta=delta.flatten(-2).norm(dim=-1),
        tau=delta.diagonal(dim1=-2, dim2=-1).sum(-1),
        mu=lowest[0] + lowest[1],
    )


def _with_column(w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    return w if b is None else torch.cat([w, b.unsqueeze(-1)], dim=-1)


def _side_by_side(w: torch.Tensor, groups: int) -> torch.Tensor:
    """(..., H, D, E) -> (..., G, D, (H/G) E)."""
    return w.unflatten(-3, (groups, -1)).transpose(-3, -2).flatten(-2)


def _from_factors(weights, queries, keys, rotary) -> dict[str, torch.Tensor]:
    """The inverse of `query_key_factors`."""
    share = weights["w_q"].shape[-3] // weights["w_k"].shape[-3]
    queries = queries.unflatten(-1, (share, -1)).transpose(-3, -2).flatten(-4, -3)
    width = weights["w_q"].shape[-1]
    parts = {"w_q": queries[..., :width], "w_k": keys[..., :width]}
    if "b_q" in weights:
        parts["b_q"] = queries[..., width]
    if rotary and "b_k" in weights:
        parts["b_k"] = keys[..., width]
    return parts


# Helpers and checks


def _square(x: torch.Tensor, axes: int = 1) -> torch.Tensor:
    """Sum of the squared moduli over the last axes."""
    return x.abs().square().sum(tuple(range(-axes, 0)))


def _planes(w_q: torch.Tensor, w_k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `(2d, 2d+1)` as complex rows, (..., D/2, E)."""
    _require_pair(w_q, w_k)
    if w_q.shape[-2] % 2:
        raise ValueError(f"w_q of shape {tuple(w_q.shape)}: expected an even number of rows")
    return tuple(torch.complex(w[..., 0::2, :], w[..., 1::2, :]) for w in (w_q, w_k))


def _rows(z: torch.Tensor) -> torch.Tensor:
    """The inverse of `_planes` for one factor."""
    return torch.stack([z.real, z.imag], dim=-2).flatten(-3, -2)


def _float64(w_q, w_k, dw_q, dw_k) -> tuple[torch.Tensor, ...]:
    _require_pair(w_q, w_k)
    require_same_shape("dw_q", dw_q, "w_q", w_q)
    require_same_shape("dw_k", dw_k, "w_k", w_k)
    require_finite("dw_q", dw_q)
    require_finite("dw_k", dw_k)
    return w_q.double(), w_k.double(), dw_q.double(), dw_k.double()


def _require_pair(w_q: torch.Tensor, w_k: torch.Tensor) -> None:
    require_finite("w_q", w_q)
    require_finite("w_k", w_k)
    if w_q.ndim < 2 or w_q.shape[-2] != w_k.shape[-2]:
        raise ValueError(
            f"w_q of shape {tuple(w_q.shape)}, w_k of shape {tuple(w_k.shape)}: "
            "expected (..., D, E) both, with one D"
        )


def _require_regular(sums: torch.Tensor) -> None:
    """Raise where a sum of eigenvalues of the two Gram matrices vanishes."""
    low, high = sums.amin((-2, -1)), sums.amax((-2, -1))
    singular = low <= 100 * EPS * high
    if bool(singular.any()):
        raise ValueError(
            f"w_q and w_k of {int(singular.sum())} of {singular.numel()} heads are both singular, "
            "so that the projection is not unique: expected one of them with full row rank"
        )
