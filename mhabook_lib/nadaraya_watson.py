r"""Nadaraya-Watson regression with a Gaussian kernel, batched over heads, seeds and bandwidths.

`mhat(x) = sum_i w_i(x) y_i`, `w_i(x) = K((x - x_i)/h) / sum_j K((x - x_j)/h)`,
`K(u) = exp(-|u|^2/2)`. Queries are `(..., n_q, d_k)`, keys `(..., n, d_k)`, values `(..., n, c)`;
leading axes broadcast, and the bandwidth is a number or a tensor over them.

The row of weights is dot-product attention with one more coordinate: the part of
`-|x - x_i|^2 / 2h^2` that depends on the key is `<(x, 1) / h^2, (x_i, -|x_i|^2/2)>`. Keys and
queries are centred at the mean key first, which changes nothing but the rounding: without it
`|x_i|^2 / h^2` costs float32 all its digits when the keys are far from the origin.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from .attention import over_trailing
from .validation import require_broadcast, require_positive

WEIGHTS_AT_ONCE = 2**20
LEAST_MASS = 1e-2  # of one key three bandwidths away
NODES = {1: 2048, 2: 512}


def require_sample(query, key, value=None) -> None:
    """Raise unless queries, keys and values fit each other and there is at least one key."""
    if min(query.ndim, key.ndim) < 2 or query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"query of shape {tuple(query.shape)} and key of shape {tuple(key.shape)}: "
            f"expected (..., n_q, d_k) and (..., n, d_k)"
        )
    if key.shape[-2] == 0:
        raise ValueError(f"key of shape {tuple(key.shape)}: expected at least one key")
    require_broadcast("query", query.shape[:-2], "key", key.shape[:-2])
    if value is not None:
        if value.ndim < 2 or value.shape[-2] != key.shape[-2]:
            raise ValueError(
                f"value of shape {tuple(value.shape)}: expected (..., n, c) with n={key.shape[-2]}"
            )
        require_broadcast("value", value.shape[:-2], "key", key.shape[:-2])


def augmented(query, key, bandwidth, prior_log_weights=None):
    """Queries and keys with one more coordinate, whose dot products are the scores.

    `<q', k'> = -|q - k|^2 / 2h^2` up to a constant of the row; with `prior_log_weights (..., n)`
    there is a second new coordinate that adds them. Both are centred at the mean key.

    >>> q, k = augmented(torch.tensor([[1.0]]), torch.tensor([[0.0], [2.0]]), 1.0)
    >>> (q @ k.mT).tolist()
    [[-0.5, -0.5]]
    """
    require_positive("bandwidth", bandwidth)
    center = key.mean(-2, keepdim=True)
    query, key = query - center, key - center
    scale = over_trailing(bandwidth, query, 2) ** -2
    half_norm = key.square() @ key.new_full((key.shape[-1], 1), 0.5)  # faster than a sum
    query = pad(query, (0, 1), value=1.0) * scale
    key = torch.cat([key, -half_norm], dim=-1)
    if prior_log_weights is not None:
        prior = prior_log_weights.unsqueeze(-1)
        batch = torch.broadcast_shapes(key.shape[:-1], prior.shape[:-1])
        query = pad(query, (0, 1), value=1.0)
        key = torch.cat([key.expand(*batch, -1), prior.expand(*batch, 1)], dim=-1)
    return query, key


def nadaraya_watson_weights(query, key, bandwidth, prior_log_weights=None) -> torch.Tensor:
    """Rows of weights (..., n_q, n), non-negative with sum one: the attention pattern.

    query (..., n_q, d_k), key (..., n, d_k), `bandwidth` and `prior_log_weights (..., n)` as in
    `nadaraya_watson`. Raises ValueError as there. Source: ensemble.T1.

    >>> nadaraya_watson_weights(torch.tensor([[1.0]]), torch.tensor([[0.0], [2.0]]), 0.3)
    tensor([[0.5000, 0.5000]])
    """
    require_sample(query, key)
    query, key = augmented(query, key, bandwidth, prior_log_weights)
    return torch.softmax(query @ key.mT, dim=-1)


def nadaraya_watson(
    query, key, value, bandwidth, *, prior_log_weights=None, chunk_size=WEIGHTS_AT_ONCE
) -> torch.Tensor:
    """Kernel regression `sum_i w_i(query) value_i`, (..., n_q, c).

    query (..., n_q, d_k), key (..., n, d_k), value (..., n, c); `bandwidth` is a number or a
    tensor over the leading axes; `prior_log_weights (..., n)` are logarithms of factors of the
    kernel, one per key. Queries go through in chunks of about `chunk_size` weights, so that the
    weights of all queries are never held at once.

    Raises ValueError for a bandwidth that is not positive, for shapes that do not fit, and for an
    empty sample. Source: ensemble.T1.

    >>> x = torch.linspace(-3, 3, 601)[:, None]
    >>> nadaraya_watson(torch.tensor([[1.0]]), x, x**2, 0.1).round(decimals=3)
    tensor([[1.0100]])
    """
    require_sample(query, key, value)
    query, key = augmented(query, key, bandwidth, prior_log_weights)
    batch, n = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2]), key.shape[-2]
    chunks = query.split(max(1, chunk_size // (batch.numel() * n)), dim=-2)
    if torch.is_grad_enabled() and any(part.requires_grad for part in (query, key, value)):
        means = [torch.softmax(chunk @ key.mT, dim=-1) @ value for chunk in chunks]
        return torch.cat(means, dim=-2)
    scratch = query.new_empty(2, batch.numel() * chunks[0].shape[-2] * n)  # for all chunks

    def mean(chunk):
        shape = (*batch, chunk.shape[-2], n)
        scores, pattern = (part[: math.prod(shape)].view(shape) for part in scratch)
        torch.matmul(chunk, key.mT, out=scores)
        return torch.softmax(scores, dim=-1, out=pattern) @ value

    return torch.cat([mean(chunk) for chunk in chunks], dim=-2)


def fused_nadaraya_watson(query, key, value, bandwidth, *, prior_log_weights=None) -> torch.Tensor:
    """The same numbers by one fused `scaled_dot_product_attention`: memory O(n + n_q) per head.

    PyTorch's fused kernel wants queries, keys and values of one width, so the narrower side is
    padded with zeros. Arguments, result and errors as `nadaraya_watson`. Source: ensemble.T1.

    >>> x = torch.linspace(-3, 3, 601)[:, None]
    >>> fused_nadaraya_watson(torch.tensor([[1.0]]), x, x**2, 0.1).round(decimals=3)
    tensor([[1.0100]])
    """
    require_sample(query, key, value)
    query, key = augmented(query, key, bandwidth, prior_log_weights)
    parts, channels = (query, key, value), value.shape[-1]
    batch = torch.broadcast_shapes(*(part.shape[:-2] for part in parts))
    width = max(part.shape[-1] for part in parts)
    padded = (pad(part, (0, width - part.shape[-1])).expand(*batch, -1, -1) for part in parts)
    heads = (part.reshape(1, -1, *part.shape[-2:]) for part in padded)
    mean = scaled_dot_product_attention(*heads, scale=1.0)
    return mean[..., :channels].reshape(*batch, -1, channels)


def average_weights(query, key, bandwidth) -> torch.Tensor:
    """Mean over the heads of the rows of weights, (..., n_q, n), a few heads at a time.

    query (..., H, n_q, d_k), key (..., H, n, d_k). Raises ValueError as `nadaraya_watson`, and
    unless both have the same number of heads.

    >>> key = torch.tensor([[[0.0], [2.0]], [[0.0], [0.0]]])
    >>> average_weights(torch.zeros(2, 1, 1), key, 0.1)
    tensor([[0.7500, 0.2500]])
    """
    require_sample(query, key)
    if query.ndim < 3 or query.shape[-3] != key.shape[-3]:
        raise ValueError(
            f"query of shape {tuple(query.shape)} and key of shape {tuple(key.shape)}: "
            f"expected (..., H, n_q, d_k) and (..., H, n, d_k)"
        )
    batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3])
    at_once = max(1, WEIGHTS_AT_ONCE // (batch.numel() * query.shape[-2] * key.shape[-2]))
    groups = zip(query.split(at_once, -3), key.split(at_once, -3), strict=True)
    rows = (nadaraya_watson_weights(q, k, bandwidth).sum(-3) for q, k in groups)
    return sum(rows) / key.shape[-3]


def binned_nadaraya_watson(query, key, value, bandwidth: float, num_nodes: int | None = None):
    """Kernel regression for d_k <= 2 on a grid: cost O(n + n_q + G^d_k log G), not O(n n_q).

    Keys and their values are spread over the nodes of a grid with cubic Lagrange weights, smoothed
    along each axis with a fast Fourier transform, and read off at the queries with the same
    weights: error O((step / bandwidth)^4). Queries with next to no key in reach (kernel mass below
    that of one key three bandwidths away, or outside the grid) are computed directly.

    query (..., n_q, d_k), key (..., n, d_k), value (..., n, c) -> (..., n_q, c), one bandwidth for
    all. `num_nodes` per axis defaults to 2048 in one dimension and 512 in two. Raises ValueError as
    `nadaraya_watson`, for d_k > 2, and unless the step is below a tenth of the bandwidth.
    Source: ensemble, fast algorithms.

    >>> x = torch.linspace(-3, 3, 601)[:, None]
    >>> binned_nadaraya_watson(torch.tensor([[1.0]]), x, x**2, 0.1).round(decimals=3)
    tensor([[1.0100]])
    """
    require_sample(query, key, value)
    require_positive("bandwidth", bandwidth)
    width = key.shape[-1]
    if width not in NODES:
        raise ValueError(f"keys of dimension {width}: expected 1 or 2 (use nadaraya_watson)")
    nodes = NODES[width] if num_nodes is None else num_nodes
    low, high = key.amin((*range(key.ndim - 1),)), key.amax((*range(key.ndim - 1),))
    step = float((high - low).max()) / (nodes - 5) or bandwidth / 20
    if step >= bandwidth / 10:
        raise ValueError(
            f"num_nodes={nodes}: expected a grid step below bandwidth/10={bandwidth / 10:.3g}, "
            f"got {step:.3g}"
        )
    batch = torch.broadcast_shapes(*(part.shape[:-2] for part in (query, key, value)))
    query, key, value = (part.expand(*batch, -1, -1) for part in (query, key, value))
    origin = low - 2 * step
    grid = _spread((key - origin) / step, pad(value, (0, 1), value=1.0), nodes)
    for axis in range(width):
        grid = _smooth(grid, len(batch) + axis, bandwidth / step)
    place = (query - origin) / step
    total = _read(place, grid.flatten(len(batch), -2), nodes)
    inside = ((place >= 1) & (place <= nodes - 2)).all(-1)
    reached = inside & (total[..., -1] >= LEAST_MASS)
    mean = total[..., :-1] / torch.where(reached, total[..., -1], 1.0)[..., None]
    _fill_directly(mean, ~reached, query, key, value, bandwidth)
    return mean


def _fill_directly(mean, lost, query, key, value, bandwidth):
    """Replace the `lost` entries (..., n_q) of `mean` by the direct sum."""
    parts = [part.reshape(-1, *part.shape[-2:]) for part in (mean, query, key, value)]
    for here, rows, q, k, v in zip(lost.reshape(-1, lost.shape[-1]), *parts, strict=True):
        if bool(here.any()):
            rows[here] = nadaraya_watson(q[here], k, v, bandwidth)


def _lagrange(place, nodes):
    """Node numbers and weights (..., 4^d_k) of cubic interpolation at `place (..., d_k)`."""
    first = place.floor().clamp(1, nodes - 3) - 1
    t = place - first - 1  # in [0, 1) between the two middle nodes
    weights = torch.stack(
        [
            -t * (t - 1) * (t - 2) / 6,
            (t + 1) * (t - 1) * (t - 2) / 2,
            -(t + 1) * t * (t - 2) / 2,
            (t + 1) * t * (t - 1) / 6,
        ],
        dim=-1,
    )
    index = first.long().unsqueeze(-1) + torch.arange(4, device=place.device)
    if place.shape[-1] == 1:
        return index[..., 0, :], weights[..., 0, :]
    pairs = index[..., 0, :, None] * nodes + index[..., 1, None, :]
    products = weights[..., 0, :, None] * weights[..., 1, None, :]
    return pairs.flatten(-2), products.flatten(-2)


def _spread(place, value, nodes):
    """Sums of the values over the grid, (..., nodes, [nodes,] c)."""
    index, weights = _lagrange(place, nodes)
    batch = index.shape[:-2]
    size = nodes ** place.shape[-1]
    shift = size * torch.arange(batch.numel(), device=index.device)
    flat = (index + shift.reshape(*batch, 1, 1)).flatten()
    sums = [
        torch.zeros(len(shift) * size, dtype=value.dtype, device=value.device).index_add_(
            0, flat, (weights * channel.unsqueeze(-1)).flatten()
        )
        for channel in value.unbind(-1)
    ]
    return torch.stack(sums, -1).reshape(*batch, *[nodes] * place.shape[-1], -1)


def _smooth(grid, axis, bandwidth):
    """Convolution with the Gaussian kernel along one axis; `bandwidth` in grid steps."""
    nodes = grid.shape[axis]
    distance = torch.arange(2 * nodes, device=grid.device)
    distance = torch.minimum(distance, 2 * nodes - distance).to(grid.dtype)
    kernel = torch.fft.rfft(torch.exp(-((distance / bandwidth) ** 2) / 2))
    spectrum = torch.fft.rfft(grid.movedim(axis, -1), 2 * nodes) * kernel
    return torch.fft.irfft(spectrum)[..., :nodes].movedim(-1, axis)


def _read(place, table, nodes):
    """Cubic interpolation of `table (..., nodes^d_k, c)` at `place`: (..., n_q, c)."""
    index, weights = _lagrange(place, nodes)
    *batch, n_q, corners = index.shape
    channels = table.shape[-1]
    rows = index.flatten(-2).unsqueeze(-1).expand(*batch, n_q * corners, channels)
    corners_values = table.gather(-2, rows).unflatten(-2, (n_q, corners))
    return (weights.unsqueeze(-1) * corners_values).sum(-2)
