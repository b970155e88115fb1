"""What a layer's output can tell about its parameters: Jacobians, ranks and kernels.

A direction of parameter space is *unidentified* when the derivative of the output along it
vanishes for all inputs. Their number is `u = P - rank J`, with the Jacobian J of the outputs on
enough generic sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from .attention_layer import (
    Weights,
    apply_rope,
    attention_core,
    project,
    random_weights,
    require_layer,
    rope_frequencies,
)
from .attention_shapes import AttentionShape
from .validation import require_finite

GAP = 1e4
EPS = torch.finfo(torch.float64).eps


class Rank(NamedTuple):
    """A numerical rank, and the relative singular values on both sides of the cut."""

    rank: int
    sigma_in: float
    sigma_out: float


class KernelDimensions(NamedTuple):
    """Dimensions of the null directions of a product and of the tangent space of its orbit."""

    kernel: int
    orbit: int


# Jacobians


def functional_jacobian(
    function: Callable[[Weights], torch.Tensor], weights: Weights
) -> torch.Tensor:
    """Jacobian of `function(weights)` by automatic differentiation, (outputs, P).

    The columns are the flattened parameters, in the order of the dictionary. Works for every
    variant of a layer; `attention_jacobian` is the fast way for the usual ones.
    Source: identification, algorithm 1.

    >>> functional_jacobian(lambda w: w["a"] * 3, {"a": torch.ones(2)})
    tensor([[3., 0.],
            [0., 3.]])
    """
    blocks = torch.func.jacrev(lambda w: function(w).flatten())(dict(weights))
    return torch.cat([blocks[name].flatten(1) for name in weights], dim=1)


def attention_jacobian(
    weights: Weights,
    x: torch.Tensor,
    *,
    causal: bool = True,
    rope: torch.Tensor | None = None,
) -> torch.Tensor:
    """Jacobian of a softmax attention layer in closed form, (n L E, P), columns as above.

    x (n, L, E). With the pattern A, `u_m = W_O v_m`, `y_l = sum_m A_lm u_m` and
    `c_lm = A_lm (u_m - y_l)`, the derivative of y_l by the logit (l, m),

        J_Q[le, hdf] = sum_m c_lme k_md x_lf / sqrt(D)     J_V[le, hcf] = W_O[e, c] (A x)_lf
        J_K[le, hdf] = sum_m c_lme q_ld x_mf / sqrt(D)     J_O[le, e'c] = delta_ee' (A v)_lc

    per head, summed over the heads of a group for keys and values. A bias is the column of a
    constant coordinate 1 of x. With rotary positions k_m and q_l are seen turned by the difference
    of the positions. Raises as `attention_forward`, and ValueError for gains or no `w_o`.
    Source: identification, algorithm 1.

    >>> weights = {name: torch.ones(1, 1, 1) for name in ("w_q", "w_k", "w_v", "w_o")}
    >>> attention_jacobian(weights, torch.ones(1, 1, 1))
    tensor([[0., 0., 1., 1.]])
    """
    require_layer(weights, x, rope=rope)
    if "w_o" not in weights or "gain_q" in weights or x.ndim != 3:
        raise ValueError(
            f"weights {sorted(weights)} and x of shape {tuple(x.shape)}: expected a layer with "
            "w_o and without gains, and x (n, L, E)"
        )
    q, k, v = (project(x, weights[f"w_{c}"], weights.get(f"b_{c}")) for c in "qkv")
    share = q.shape[1] // k.shape[1]
    _, pattern, heads, _ = attention_core(weights, x, causal=causal, rope=rope)
    moved = v.repeat_interleave(share, dim=1) @ weights["w_o"].mT  # u
    slopes = moved.unsqueeze(-3) - (pattern @ moved).unsqueeze(-2)
    slopes = slopes * pattern.unsqueeze(-1) * q.shape[-1] ** -0.5  # c / sqrt(D)
    keys, queries = k.repeat_interleave(share, dim=1).unsqueeze(-3), q.unsqueeze(-2)
    if rope is not None:
        places = torch.arange(x.shape[1], device=x.device)
        ahead = places - places[:, None]  # m - l
        keys, queries = apply_rope(keys, rope, ahead), apply_rope(queries, rope, -ahead)
    constant = torch.cat([x, torch.ones_like(x[..., :1])], dim=-1)  # the last column is a bias
    attended, identity = pattern @ constant.unsqueeze(1), torch.eye(x.shape[-1]).to(x)
    blocks = {
        "q": torch.einsum("nhlme,nhlmd,nlf->nlehdf", slopes, keys, constant),
        "k": torch.einsum("nhlme,nhlmd,nmf->nlehdf", slopes, queries, constant),
        "v": torch.einsum("hec,nhlf->nlehcf", weights["w_o"], attended),
        "o": torch.einsum("ae,nhlc->nlahec", identity, heads),
    }
    for letter in "kv":  # the heads of a group share these parameters
        blocks[letter] = blocks[letter].unflatten(3, (-1, share)).sum(4)
    columns = {"w_o": blocks.pop("o"), "b_o": identity.expand(*x.shape, -1)}
    columns |= {f"w_{letter}": block[..., :-1] for letter, block in blocks.items()}
    columns |= {f"b_{letter}": block[..., -1] for letter, block in blocks.items()}
    return torch.cat([columns[name].flatten(3).flatten(0, 2) for name in weights], dim=1)


def generic_jacobian(
    shape: AttentionShape,
    rng: np.random.Generator,
    *,
    seq_len: int = 5,
    sequences: int | None = None,
    causal: bool = True,
    rope: torch.Tensor | None = None,
    activation: str = "softmax",
) -> torch.Tensor:
    """Jacobian of a layer of this shape at Gaussian parameters on Gaussian tokens.

    By default with 40 per cent more sequences than the parameters and the logits need, and with
    the usual frequencies on the rotated planes. The closed form where it applies, else automatic
    differentiation. Source: identification, algorithm 1.

    >>> generic_jacobian(AttentionShape(2, 1), np.random.default_rng(0)).shape[1]
    16
    """
    weights = random_weights(shape.weight_shapes(), rng, shape.d_model**-0.5)
    n = sequences or _enough_sequences(shape, seq_len)
    x = torch.from_numpy(rng.standard_normal((n, seq_len, shape.d_model)))
    if rope is None and shape.rotary_dim:
        rope = rope_frequencies(shape.rotary_dim)
    cross = shape.memory_dim != shape.d_model
    if activation == "softmax" and shape.output_projection and not shape.qk_norm and not cross:
        return attention_jacobian(weights, x, causal=causal, rope=rope)
    memory = rng.standard_normal((n, seq_len, shape.memory_dim)) if cross else None
    options = {
        "causal": causal,
        "rope": rope,
        "memory": None if memory is None else torch.from_numpy(memory),
        "qk_norm": shape.qk_norm is not None,
        "activation": activation,
    }
    return functional_jacobian(lambda w: attention_core(w, x, **options).output, weights)


def _enough_sequences(shape: AttentionShape, seq_len: int) -> int:
    """Rows for all parameters, and logit differences for all query-key parameters of a head."""
    rows = max(seq_len - 1, 1) * (shape.d_model if shape.output_projection else shape.d_value)
    logits = sum(min(shape.d_value, l) for l in range(1, seq_len)) or 1
    by_rows = math.ceil(1.4 * shape.parameter_count() / rows) + 2
    return max(by_rows, math.ceil(2.8 * shape.d_head * (shape.d_model + 1) / logits))


# Ranks


def numerical_rank(jacobian: torch.Tensor) -> Rank:
    """Rank of a matrix by its singular values, refused where they leave no gap.

    The cut is at `50 max(shape) eps` of the largest singular value. `sigma_in` is the smallest
    value kept, `sigma_out` the largest one dropped, both relative to the largest; where none is
    dropped it is `eps`. Raises ValueError unless `sigma_in / sigma_out > 1e4`, and for matrices
    that are empty, zero or not finite. Source: identification, algorithm 2.

    >>> numerical_rank(torch.diag(torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64))).rank
    2
    """
    require_finite("jacobian", jacobian)
    sigma = torch.linalg.svdvals(jacobian.double())
    if len(sigma) == 0 or sigma[0] == 0:
        raise ValueError(f"jacobian of shape {tuple(jacobian.shape)}: expected an entry not 0")
    sigma = sigma / sigma[0]
    rank = int((sigma > 50 * max(jacobian.shape) * EPS).sum())
    sigma_in = float(sigma[rank - 1])
    sigma_out = max(float(sigma[rank]), EPS**2) if rank < len(sigma) else EPS
    if sigma_in < GAP * sigma_out:
        raise ValueError(
            f"no gap at rank {rank}: relative singular values {sigma_in:.1e} and {sigma_out:.1e}: "
            f"expected a ratio above {GAP:.0e}, so that rounding cannot decide the rank"
        )
    return Rank(rank, sigma_in, sigma_out)


def unidentified_directions(jacobian: torch.Tensor) -> int:
    """`u = P - rank J`, refused when the rows of J run out before its rank.

    Raises ValueError as `numerical_rank`, and when all rows are independent: then there may be too
    little data, and P - rank only counts what these data do not show. Source: identification.T5.

    >>> unidentified_directions(torch.ones(3, 2, dtype=torch.float64))
    1
    """
    rows, columns = jacobian.shape
    rank = numerical_rank(jacobian).rank
    if rank == rows < columns:
        raise ValueError(
            f"jacobian with {rows} rows and {columns} columns, all rows independent: "
            "expected more data"
        )
    return columns - rank


# The two factors of one head


def factor_differential(w_q: torch.Tensor, w_k: torch.Tensor) -> torch.Tensor:
    """Matrix of `(dW_Q, dW_K) -> W_K^T dW_Q + dW_K^T W_Q`, (..., E^2, 2 D E).

    w_q, w_k (..., D, E). Source: identification.T3.

    >>> factor_differential(torch.tensor([[2.0]]), torch.tensor([[3.0]]))
    tensor([[3., 2.]])
    """
    _require_factors(w_q, w_k)
    identity = torch.eye(w_q.shape[-1]).to(w_q)
    by_query = torch.einsum("...di,jf->...ijdf", w_k, identity)
    by_key = torch.einsum("...dj,if->...ijdf", w_q, identity)
    blocks = [block.flatten(-2).flatten(-3, -2) for block in (by_query, by_key)]
    return torch.cat(blocks, dim=-1)


def vertical_steps(w_q: torch.Tensor, w_k: torch.Tensor) -> torch.Tensor:
    """All steps `(A W_Q, -A^T W_K)`, flattened, one column for each entry of A, (..., 2DE, D^2).

    They span the tangent space of the orbit of the factors. Source: identification.T3.

    >>> vertical_steps(torch.tensor([[2.0]]), torch.tensor([[3.0]]))
    tensor([[ 2.],
            [-3.]])
    """
    _require_factors(w_q, w_k)
    d_head = w_q.shape[-2]
    generators = torch.eye(d_head**2).to(w_q).unflatten(1, (d_head, d_head))
    w_q, w_k = w_q.unsqueeze(-3), w_k.unsqueeze(-3)
    return torch.cat([(generators @ w_q).flatten(-2), -(generators.mT @ w_k).flatten(-2)], -1).mT


def change_basis(weights: Weights, s: torch.Tensor, t: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same layer in other coordinates of its heads.

    `W_Q -> S W_Q`, `W_K -> S^-T W_K`, `W_V -> T W_V`, `W_O -> W_O T^-1`, biases with their
    weights; s (..., G, D, D) and t (..., G, C, C), one for each group. Without rotary positions
    and QK-norm the output stays the same. Raises ValueError for shapes that do not fit.
    Source: identification.T1, T6, T8.

    >>> one = {name: torch.ones(1, 1, 1) for name in ("w_q", "w_k", "w_v", "w_o")}
    >>> change_basis(one, torch.full((1, 1, 1), 2.0), torch.ones(1, 1, 1))["w_k"].item()
    0.5
    """
    num_heads, groups = weights["w_q"].shape[-3], weights["w_k"].shape[-3]
    wanted = [(groups, weights[name].shape[-2]) for name in ("w_k", "w_v")]
    for name, matrix, (count, width) in zip("st", (s, t), wanted, strict=True):
        if tuple(matrix.shape[-3:]) != (count, width, width):
            raise ValueError(
                f"{name} of shape {tuple(matrix.shape)}: expected (..., {count}, {width}, {width})"
            )
    shared = {"q": s, "k": torch.linalg.inv(s).mT, "v": t, "o": torch.linalg.inv(t)}
    share = num_heads // groups
    for letter in "qo":
        shared[letter] = shared[letter].repeat_interleave(share, dim=-3)
    moved = {f"w_{c}": shared[c] @ weights[f"w_{c}"] for c in "qkv"}
    moved["w_o"] = weights["w_o"] @ shared["o"]
    moved |= {
        f"b_{c}": (shared[c] @ weights[f"b_{c}"].unsqueeze(-1)).squeeze(-1)
        for c in "qkv"
        if f"b_{c}" in weights
    }
    return {**weights, **moved}


def kernel_dimensions(d_model: int, d_head: int, rank_q: int, rank_k: int) -> KernelDimensions:
    """Dimensions for factors of the given ranks, each at most min(D, E).

    kernel = `2DE - E (r_Q + r_K) + r_Q r_K`, all null directions of the product; orbit =
    `D^2 - (D - r_Q)(D - r_K)`, those of the form `(A W_Q, -A^T W_K)`. Raises ValueError for ranks
    that do not exist. Source: identification.T3.

    >>> kernel_dimensions(7, 4, 4, 3)
    KernelDimensions(kernel=19, orbit=16)
    """
    if min(rank_q, rank_k) < 0 or max(rank_q, rank_k) > min(d_head, d_model):
        raise ValueError(
            f"rank_q={rank_q}, rank_k={rank_k}: expected ranks from 0 to min(d_head, d_model)="
            f"{min(d_head, d_model)}"
        )
    kernel = 2 * d_head * d_model - d_model * (rank_q + rank_k) + rank_q * rank_k
    return KernelDimensions(kernel, d_head**2 - (d_head - rank_q) * (d_head - rank_k))


def canonical_form(w_q: torch.Tensor, w_k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors `W_Q' = S^(1/2) V^T`, `W_K' = S^(1/2) U^T` of `W_K^T W_Q = U S V^T`.

    w_q, w_k (..., D, E) with D <= E. Computed from two thin QR factorisations and the singular
    values of a D x D matrix, without any E x E matrix. The same point for all factors of one
    product, up to signs and order, when its singular values are distinct. Raises ValueError for
    D > E, for different shapes and for values that are not finite. Source: identification.T2, P6.

    >>> w_q, w_k = canonical_form(torch.tensor([[4.0, 0.0]]), torch.tensor([[0.0, 1.0]]))
    >>> w_q.abs(), w_k.abs()
    (tensor([[2., 0.]]), tensor([[0., 2.]]))
    """
    _require_factors(w_q, w_k)
    if w_q.shape[-2] > w_q.shape[-1]:
        raise ValueError(f"w_q of shape {tuple(w_q.shape)}: expected (..., D, E) with D <= E")
    basis_q, r_q = torch.linalg.qr(w_q.mT)
    basis_k, r_k = torch.linalg.qr(w_k.mT)
    left, sigma, right = torch.linalg.svd(r_k @ r_q.mT)
    root = sigma.sqrt().unsqueeze(-1)
    return root * (right @ basis_q.mT), root * (left.mT @ basis_k.mT)


def _require_factors(w_q: torch.Tensor, w_k: torch.Tensor) -> None:
    require_finite("w_q", w_q)
    require_finite("w_k", w_k)
    if w_q.ndim < 2 or w_q.shape[-2:] != w_k.shape[-2:]:
        raise ValueError(
            f"w_q of shape {tuple(w_q.shape)}, w_k of shape {tuple(w_k.shape)}: "
            "expected (..., D, E) both"
        )
