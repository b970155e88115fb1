"""Multi-head latent attention: keys and values of all heads pass one narrow latent."""

from __future__ import annotations

import torch

from .attention_layer import Weights, apply_rope, attend, merge_heads, project, rms_norm
from .validation import require_finite, require_tokens


def latent_forward(
    weights: Weights, x: torch.Tensor, rope: torch.Tensor, *, causal: bool = True
) -> torch.Tensor:
    """Output of a layer of multi-head latent attention.

    Latents `c = W_DKV x` and `c' = W_DQ x` (or x), normed when the weights hold gains. Head h has
    the key `(W_UK^h c, R W_KR x)`, the query `W_UQ^h c'` with its last part turned, and the value
    `W_UV^h c`. x (..., L, E) -> (..., L, E); `rope` are the frequencies of the rotated part, and
    the names and shapes of the parameters are those of `attention_shapes.LatentShape`.
    Raises ValueError for tokens, parameters or frequencies that are not finite or do not fit.
    Source: identification.X4.

    >>> from mhabook_lib.attention_shapes import LatentShape
    >>> shapes = LatentShape(4, 1, 1, None, 1, 2, 1).weight_shapes()
    >>> weights = {name: torch.ones(shape) for name, shape in shapes.items()}
    >>> latent_forward(weights, torch.ones(2, 4), torch.ones(1))[0]
    tensor([4., 4., 4., 4.])
    """
    require_tokens(x)
    for name, value in [*weights.items(), ("rope", rope)]:
        require_finite(name, value)
    d_rotary = weights["rotary_k"].shape[-2]
    if weights["down_kv"].shape[-1] != x.shape[-1] or 2 * len(rope) != d_rotary:
        raise ValueError(
            f"down_kv of shape {tuple(weights['down_kv'].shape)}, rotary_k of shape "
            f"{tuple(weights['rotary_k'].shape)} and {len(rope)} frequencies: expected "
            f"(d_latent, {x.shape[-1]}), (1, d_rotary, {x.shape[-1]}) and d_rotary/2"
        )
    return latent_core(weights, x, rope, causal=causal)


def latent_core(
    weights: Weights, x: torch.Tensor, rope: torch.Tensor, *, causal: bool = True
) -> torch.Tensor:
    """`latent_forward` without checks, for inner loops and for `torch.func`."""
    latent = x @ weights["down_kv"].mT
    query = x @ weights["down_q"].mT if "down_q" in weights else x
    if "gain_kv" in weights:
        latent = rms_norm(latent, weights["gain_kv"])
    if "gain_q" in weights:
        query = rms_norm(query, weights["gain_q"])
    places = torch.arange(x.shape[-2], device=x.device)
    q, k = project(query, weights["up_q"]), project(latent, weights["up_k"])
    q_plain, q_turning = q.tensor_split([k.shape[-1]], dim=-1)
    k_turning = apply_rope(project(x, weights["rotary_k"]), rope, places)
    q = torch.cat([q_plain, apply_rope(q_turning, rope, places)], dim=-1)
    k = torch.cat([k, k_turning.expand(*k.shape[:-1], -1)], dim=-1)
    heads = attend(q, k, project(latent, weights["up_v"]), causal=causal)[2]
    return merge_heads(heads, weights["w_o"])
