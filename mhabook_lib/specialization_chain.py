"""One-pass SGD of attention heads in the single-location model: D-dimensional, and reduced.

Both chains start from order parameters and return them; runs are a batch of leading axis S.
"""

from __future__ import annotations

import numpy as np
import torch

from .numerics.linalg import psd_root, wishart_factor
from .single_location import (
    HeadState,
    location_gradient,
    multihead_weights,
    require_dimension,
    require_kind,
    torch_generator,
    uses_bias,
)
from .validation import require_count, require_positive

LOSSES = ("location", "token")


def initial_state(
    runs: int, heads: int, num_features: int, dimension: int, scale: float, rng
) -> HeadState:
    """Order parameters of keys with entries N(0, scale): `M ~ N(0, scale/D)`, R Wishart.

    >>> initial_state(3, 2, 2, 10**8, 1.0, np.random.default_rng(0)).gram[0].round(decimals=2).abs()
    tensor([[1., 0.],
            [0., 1.]], dtype=torch.float64)
    """
    require_positive("scale", scale)
    overlaps = torch.from_numpy(rng.standard_normal((runs, heads, num_features)))
    factor = wishart_factor(heads, dimension - num_features, rng, (runs,))
    share = scale / dimension
    return HeadState(share**0.5 * overlaps, share * factor @ factor.mT)


def reduced_sgd(
    state: HeadState,
    dimension: int,
    tokens: int,
    law,
    kind: str,
    steps: int,
    rng: np.random.Generator,
    eta: float = 1.0,
    block: int = 1,
    loss: str = "location",
    wishart: str = "mean",
    norm_bias: bool = True,
    record: int | None = None,
) -> HeadState:
    """SGD on the order parameters, without the D dimensions: states after every `record` steps.

    state (S, H, F), (S, H, H) -> (K, S, H, F), (K, S, H, H) with the start first. A step needs the
    projections chi* (L, F), the coordinates w (L, H) along the orthogonal parts of the keys, and
    the Gram W ~ Wishart_L(D - F - H) of the rest, independent of both:
    `chi = M chi*^T + C w^T`, `M -= (eta/D) G chi*`, `C -= (eta/D) G w`,
    `R = C C^T + (eta/D)^2 G W G^T`, with the bias adding `(eta/D) diag(G 1)` times M and C.
    With wishart="exact" and block=1 the law is that of D-dimensional SGD at every D >= F + H + L;
    wishart="mean" puts (D - F - H) I for W; a block of B steps is drawn with frozen keys (weak
    error O(B/D)). Raises ValueError for a smaller D, an unknown kind, loss or wishart, steps that
    are not a multiple of `block` and `record`, and an exact W or the token loss with blocks.
    Source: specialization.P2 (ours).
    """
    heads, num_features = state.overlaps.shape[-2:]
    record = steps if record is None else record
    require_kind(kind)
    require_dimension(dimension, num_features, heads, tokens)
    _require_plan(steps, block, record, loss, wishart)
    generator = torch_generator(rng, state.gram.device)
    rate, spare = eta / dimension, dimension - num_features - heads
    overlaps, gram = state
    path = [state]
    for step in range(block, steps + 1, block):
        runs = len(gram)
        root = psd_root(gram)
        z = torch.randn(
            (runs, block * tokens, num_features + heads),
            generator=generator, dtype=gram.dtype, device=gram.device,
        )  # fmt: skip
        shift = law.theta((runs, block), generator, gram.dtype) * law.amplitudes(gram)
        z.view(runs, block, tokens, -1)[:, :, 0, :num_features] += shift
        keys = torch.cat([overlaps, root], dim=-1)
        logits = (keys @ z.mT).unflatten(-1, (block, tokens)).transpose(1, 2)
        square_norms = HeadState(overlaps, gram).square_norms.unsqueeze(1)
        weights = multihead_weights(logits, square_norms, kind, norm_bias)
        factor = token_gram = None
        if wishart == "exact":
            factor = wishart_factor(tokens, spare, rng, (runs,)).to(gram)
        if loss == "token":
            rest = factor @ factor.mT if wishart == "exact" else spare * torch.eye(tokens).to(gram)
            token_gram = ((z @ z.mT + rest) / dimension).unsqueeze(1)
        gradient = location_gradient(weights, kind, token_gram)
        flat = gradient.transpose(1, 2).flatten(-2)  # (S, H, B L)
        moved = keys - rate * flat @ z
        if uses_bias(kind, norm_bias):
            moved = moved + rate * flat.sum(-1, keepdim=True) * keys
        overlaps, root = moved[..., :num_features], moved[..., num_features:]
        noise = flat @ factor if wishart == "exact" else spare**0.5 * flat
        gram = root @ root.mT + rate**2 * noise @ noise.mT
        if step % record == 0:
            path.append(HeadState(overlaps, gram))
    return HeadState(*(torch.stack(parts) for parts in zip(*path, strict=True)))


def _require_plan(steps, block, record, loss, wishart) -> None:
    require_count("steps", steps)
    require_count("block", block)
    if steps % record or record % block:
        raise ValueError(
            f"steps={steps}, record={record}, block={block}: expected multiples of one another"
        )
    if loss not in LOSSES:
        raise ValueError(f"loss={loss!r}: expected one of {LOSSES}")
    if wishart not in ("exact", "mean"):
        raise ValueError(f"wishart={wishart!r}: expected 'exact' or 'mean'")
    if block > 1 and (wishart == "exact" or loss == "token"):
        raise ValueError(f"block={block}: expected 1 with wishart='exact' or loss='token'")


def full_sgd(
    state: HeadState,
    dimension: int,
    tokens: int,
    law,
    kind: str,
    steps: int,
    rng: np.random.Generator,
    eta: float = 1.0,
    loss: str = "location",
    norm_bias: bool = True,
    dtype: torch.dtype = torch.float64,
) -> HeadState:
    """SGD on keys in R^D, one sequence a step: the order parameters after `steps` steps.

    The hidden directions are the first F coordinate axes, scaled to norm sqrt(D); the orthogonal
    parts of the first keys are put on the next H axes. `k_h -= eta dl/dk_h`, the gradient of the
    bias included. Raises ValueError as `reduced_sgd`. Source: specialization, setting.
    """
    runs, heads, num_features = state.overlaps.shape
    require_kind(kind)
    require_dimension(dimension, num_features, heads, tokens)
    _require_plan(steps, 1, 1, loss, "mean")
    generator = torch_generator(rng, state.gram.device)
    keys = torch.zeros(runs, heads, dimension, dtype=dtype, device=state.gram.device)
    start = torch.cat([state.overlaps, psd_root(state.gram)], dim=-1).to(dtype)
    keys[..., : num_features + heads] = dimension**0.5 * start
    shape = (runs, tokens, dimension)
    for _ in range(steps):
        x = torch.randn(shape, generator=generator, dtype=dtype, device=keys.device)
        x[:, 0, :num_features] += law.theta(runs, generator, dtype) * law.amplitudes(keys)
        square_norms = keys.square().sum(-1) / dimension
        logits = keys @ x.mT / dimension**0.5
        weights = multihead_weights(logits, square_norms, kind, norm_bias)
        token_gram = x @ x.mT / dimension if loss == "token" else None
        gradient = location_gradient(weights, kind, token_gram)
        slope = gradient @ x / dimension**0.5
        if uses_bias(kind, norm_bias):
            slope = slope - gradient.sum(-1, keepdim=True) * keys / dimension
        keys = keys - eta * slope
    overlaps = keys[..., :num_features] / dimension**0.5
    rest = keys[..., num_features:]
    return HeadState(overlaps, rest @ rest.mT / dimension)
