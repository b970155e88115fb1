"""Tokens moved by attention: initial states, velocity fields, flows, layers and clusters.

Depth is time. Flow S ("softmax") has `v_i = sum_h f^h_i`; flows U ("unnormalized") and R ("relu")
have `v_i = (1/n) sum_h f^h_i`. Flat: `x_i' = v_i`; sphere: `x_i' = P_i v_i`.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.linalg import helmert
from scipy.special import exp1

from .attention import BlockHeads, Heads, ScalarHeads, as_heads, over_trailing, weights_kernel
from .numerics.linalg import connected_components, random_orthonormal
from .numerics.ode import integrate
from .validation import (
    require_beta,
    require_gamma,
    require_normalization,
    require_positive,
    require_same_shape,
    require_tokens,
)


def project_tangent(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Projection on the tangent space of the sphere at each token, `P_i v = v - <v, x_i> x_i`.

    x (..., n, d), v (..., n, d) -> (..., n, d). Raises ValueError on shape mismatch.
    Source: clustering.P1.

    >>> project_tangent(torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 3.0]]))
    tensor([[0., 3.]])
    """
    require_same_shape("v", v, "x", x)
    return _projected(x, v)


def _projected(x, v):
    return v - (v * x).sum(-1, keepdim=True) * x


def normalize_tokens(x: torch.Tensor) -> torch.Tensor:
    """Each row divided by its length: (..., n, d) -> (..., n, d) on the unit sphere.

    >>> normalize_tokens(torch.tensor([[3.0, 4.0]]))
    tensor([[0.6000, 0.8000]])
    """
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)


# Initial states and heads


def sample_sphere(shape: tuple[int, ...], rng: np.random.Generator) -> torch.Tensor:
    """Independent uniform points on the unit sphere of R^d, d = shape[-1]; float64.

    >>> x = sample_sphere((5, 3), np.random.default_rng(0))
    >>> bool(((x**2).sum(-1) - 1).abs().max() < 1e-15)
    True
    """
    return normalize_tokens(torch.from_numpy(rng.standard_normal(shape)))


def random_heads(shape: tuple[int, ...], rng: np.random.Generator, kind: str) -> torch.Tensor:
    """Random score matrices of shape (..., H, d, d), float64.

    With G of entries N(0, 1)/sqrt(d): "general" M = G, "symmetric" M = (G + G^T)/2, "psd"
    M = G G^T. Raises ValueError for another kind or a shape that is not square.
    Source: clustering, setting.

    >>> m = random_heads((2, 3, 3), np.random.default_rng(0), "symmetric")
    >>> bool((m == m.mT).all())
    True
    """
    if kind not in ("general", "symmetric", "psd"):
        raise ValueError(f"kind={kind!r}: expected 'general', 'symmetric' or 'psd'")
    if len(shape) < 3 or shape[-1] != shape[-2]:
        raise ValueError(f"shape={shape}: expected (..., H, d, d)")
    g = torch.from_numpy(rng.standard_normal(shape)) / shape[-1] ** 0.5
    if kind == "general":
        return g
    return (g + g.mT) / 2 if kind == "symmetric" else g @ g.mT


def orthogonal_heads(eigenvalues: torch.Tensor, rng: np.random.Generator, d: int) -> BlockHeads:
    """Mutually orthogonal symmetric heads, `M_h M_g = 0` for h != g, in random position.

    eigenvalues (..., H, k) -> BlockHeads with basis (..., H, d, k), Haar distributed.
    Raises ValueError if H k > d. Source: clustering.T2.

    >>> ones = torch.ones(2, 2, dtype=torch.float64)
    >>> m = orthogonal_heads(ones, np.random.default_rng(0), 4).dense(4)
    >>> bool((m[0] @ m[1]).abs().max() < 1e-14)
    True
    """
    *batch, num_heads, rank = eigenvalues.shape
    if num_heads * rank > d:
        raise ValueError(
            f"eigenvalues of shape {tuple(eigenvalues.shape)} and d={d}: expected H * k <= d"
        )
    frame = random_orthonormal((*batch, d, num_heads * rank), rng).to(eigenvalues)
    basis = frame.unflatten(-1, (num_heads, rank)).movedim(-2, -3)
    return BlockHeads(basis.contiguous(), eigenvalues)


def equiangular_tokens(n: int, d: int, gamma) -> torch.Tensor:
    """Unit tokens with `<x_i, x_j> = gamma` for all i != j.

    gamma: a number or a tensor (...) -> (..., n, d), float64 for a number. The columns are the
    eigenvectors of the Gram matrix times the roots of its eigenvalues, `1 - gamma` (n - 1 times)
    and `1 + (n-1) gamma`. Raises ValueError unless gamma is in [-1/(n-1), 1) and d >= n (d >= n - 1
    for the simplex gamma = -1/(n-1)). Source: clustering.P2.

    >>> x = equiangular_tokens(3, 4, 0.5)
    >>> torch.round(x @ x.mT, decimals=12)[0].tolist()
    [1.0, 0.5, 0.5]
    """
    require_gamma(gamma, n)
    gamma = torch.as_tensor(gamma, dtype=None if torch.is_tensor(gamma) else torch.float64)
    total = (1 + (n - 1) * gamma).clamp(min=0)
    if d < n and (d < n - 1 or bool((total > 1e-12).any())):
        raise ValueError(f"d={d}, n={n}: expected d >= n (or n - 1 for gamma = -1/(n-1))")
    frame = torch.from_numpy(helmert(n, full=True)).to(gamma).mT  # column 0 is constant
    x = gamma.new_zeros((*gamma.shape, n, max(d, n)))
    x[..., : n - 1] = frame[:, 1:] * (1 - gamma).sqrt()[..., None, None]
    x[..., n - 1] = frame[:, 0] * total.sqrt().unsqueeze(-1)
    return x[..., :d]


# Velocity fields


def attention_velocity(
    x: torch.Tensor,
    heads: Heads,
    beta,
    normalization: str = "softmax",
    values: Heads | None = None,
    sphere: bool = True,
) -> torch.Tensor:
    """Velocity of every token: `sum_h f^h_i`, times 1/n for "unnormalized" and "relu".

    x (..., n, d) -> (..., n, d); projected by P_i when `sphere`. `values` default to the score
    matrices. Raises ValueError on bad shapes or parameters, and for tokens more than 1e-6 off
    the unit sphere when `sphere`. Source: clustering, setting.

    >>> attention_velocity(torch.eye(2), ScalarHeads(torch.ones(1)), 1.0, "unnormalized")
    tensor([[0.0000, 0.5000],
            [0.5000, 0.0000]])
    """
    return velocity_field(x, heads, beta, normalization, values, sphere)(x)


def velocity_field(
    x: torch.Tensor,
    heads: Heads,
    beta,
    normalization: str = "softmax",
    values: Heads | None = None,
    sphere: bool = True,
):
    """The velocity as a function `x -> v`, checked once for tokens like `x`, for inner loops.

    On the sphere it equals `attention_velocity`; off it (inside a Runge-Kutta step) flows U and R
    with scalar heads leave out the self term, which is radial. Arguments and errors as
    `attention_velocity`.

    >>> field = velocity_field(torch.eye(2), ScalarHeads(torch.ones(1)), 1.0, "relu")
    >>> field(torch.eye(2))
    tensor([[0., 0.],
            [0., 0.]])
    """
    require_normalization(normalization)
    require_tokens(x, sphere)
    heads = as_heads(heads)
    heads.check(x)
    require_beta(beta, x.shape[:-2])
    if values is None and isinstance(heads, ScalarHeads):
        return _scalar_field(heads.strengths, beta, normalization, x, sphere)
    if values is not None:
        values = as_heads(values)
        values.check(x)
    beta = over_trailing(beta, x, 3)
    scale = 1.0 if normalization == "softmax" else 1.0 / x.shape[-2]

    def weigh(scores):
        return weights_kernel(scores, beta, normalization)

    def field(x):
        if values is None:
            v = heads.attended(x, weigh)
        else:
            v = values.summed_outputs(weigh(heads.scores(x)), x)
        v = v if scale == 1 else scale * v
        return _projected(x, v) if sphere else v

    return field


def _scalar_field(strengths, beta, normalization, x, sphere):
    """Scalar heads: one Gram matrix; on the sphere the self term is radial and is dropped."""
    rates = (over_trailing(beta, x, 1) * strengths)[..., None, None]
    column = strengths[..., None, None]
    scale = 1.0 if normalization == "softmax" else 1.0 / x.shape[-2]
    # On the sphere scores are bounded by |lambda|: the softmax needs no shift against overflow.
    bounded = sphere and float(rates.abs().max()) < math.log(torch.finfo(x.dtype).max) / 3

    def field(x):
        gram = (x @ x.mT).unsqueeze(-3)
        if normalization == "softmax" and bounded:
            kernel = (rates * gram).exp_()
            factor = column / kernel.sum(-1, keepdim=True)
            if kernel.shape[-3] == 1:  # scale the rows after the product, not the kernel
                return _projected(x, factor.squeeze(-3) * (kernel.squeeze(-3) @ x))
            kernel = _head_sum(factor * kernel)
        elif normalization == "relu":
            kernel = _head_sum((scale * column) * (column * gram).clamp(min=0))
        else:
            kernel = _head_sum((scale * column) * weights_kernel(gram, rates, normalization))
        if sphere and normalization != "softmax":
            kernel = kernel - torch.diag_embed(kernel.diagonal(dim1=-2, dim2=-1))
        v = kernel @ x
        return _projected(x, v) if sphere else v

    return field


def _head_sum(kernels: torch.Tensor) -> torch.Tensor:
    return kernels.squeeze(-3) if kernels.shape[-3] == 1 else kernels.sum(-3)


# Flows and layers


def flat_blowup_time(strength: float, beta: float, r0: float) -> float:
    """Time at which the flat flow U at consensus `x_i = r u` becomes infinite, one scalar head.

    `r' = lambda r e^{beta lambda r^2}` from r0 gives `T = E1(beta lambda r0^2) / (2 lambda)`.
    Raises ValueError unless all three are > 0. Source: clustering.X4.

    >>> round(flat_blowup_time(1.0, 1.0, 1.0), 8)
    0.10969197
    """
    for name, value in (("strength", strength), ("beta", beta), ("r0", r0)):
        require_positive(name, value)
    return float(exp1(beta * strength * r0**2)) / (2 * strength)


def flow(
    x0: torch.Tensor,
    heads: Heads,
    beta,
    times,
    normalization: str = "softmax",
    sphere: bool = True,
    values: Heads | None = None,
    method: str = "rk4",
    steps_per_interval: int = 1,
    rescale: bool = False,
    observe=None,
    rtol: float = 1e-8,
):
    """Integrate the attention flow from x0 (..., n, d): states (len(times), ..., n, d).

    x0, heads and beta are broadcast over their leading axes. `method`, `steps_per_interval`,
    `observe` and `rtol` are those of `numerics.ode.integrate`. Scalar heads with d > n move in
    the span of x0: they are simulated in R^n by one QR factorisation, which is exact.

    `rescale=True` (scalar heads in flow U): `times` is tau with
    `dt = dtau / max_i (1/n) sum_{j != i} sum_h |lambda_h| exp(beta lambda_h <x_i, x_j>)`, and the
    pair (states, true times) is returned; steps of order 0.1 in tau suffice at any beta.

    Raises ValueError as `attention_velocity` and `integrate`.

    >>> x = flow(equiangular_tokens(4, 4, 0.0), ScalarHeads(torch.ones(1)), 1.0, [0.0, 9.0],
    ...          "unnormalized", steps_per_interval=90)
    >>> cluster_fraction(x).tolist()
    [0.0, 1.0]
    """
    field = velocity_field(x0, heads, beta, normalization, values, sphere)
    scalar, speed = isinstance(heads, ScalarHeads) and values is None, None
    if rescale:
        if not scalar or normalization != "unnormalized":
            raise ValueError("rescale=True: expected ScalarHeads in the 'unnormalized' flow")
        speed = _kernel_speed(heads.strengths, beta, x0)
    if scalar and x0.shape[-1] > x0.shape[-2]:
        frame, start = torch.linalg.qr(x0.mT)  # x0 = start^T frame^T
        x0 = start.mT.contiguous()
        observe = _lifted(observe, frame)
    x0 = x0.expand(field(x0).shape)
    retraction = "normalize" if sphere else None
    return integrate(field, x0, times, method, steps_per_interval, retraction, speed, observe, rtol)


def _lifted(observe, frame):
    def lifted(coordinates):
        x = coordinates @ frame.mT
        return x if observe is None else observe(x)

    return lifted


def _kernel_speed(strengths, beta, x):
    rates = (over_trailing(beta, x, 1) * strengths)[..., None, None]
    column = strengths.abs()[..., None, None]

    def speed(x):
        kernel = (column * torch.exp(rates * (x @ x.mT).unsqueeze(-3))).sum(-3)
        off_diagonal = kernel.sum(-1) - kernel.diagonal(dim1=-2, dim2=-1)
        return off_diagonal.amax(-1) / x.shape[-2]

    return speed


def layer_step(
    x: torch.Tensor, heads: Heads, beta, step, normalization: str = "unnormalized"
) -> torch.Tensor:
    """One layer on the sphere, `y_i = normalise(x_i + step_i v_i)`, all tokens together.

    x (..., n, d) -> (..., n, d). v is the flat velocity; `step` in (0, inf] is a number or a
    tensor over (..., n); infinity means `y_i = v_i / |v_i|`. Raises as `attention_velocity`, and
    ValueError for step <= 0. Source: clustering.X3.

    >>> x = torch.eye(2)
    >>> layer_step(x, ScalarHeads(torch.ones(1)), 1.0, float("inf"), "relu")
    tensor([[1., 0.],
            [0., 1.]])
    """
    step = torch.as_tensor(step, dtype=x.dtype, device=x.device)
    if not bool((step > 0).all()):
        raise ValueError(f"step={step}: expected values in (0, inf]")
    require_tokens(x, sphere=True)
    v = attention_velocity(x, heads, beta, normalization, sphere=False)
    return normalize_tokens(x / step.unsqueeze(-1) + v)


def layer_path(
    x0: torch.Tensor, heads: Heads, beta, step, num_layers: int, normalization: str = "unnormalized"
) -> torch.Tensor:
    """The tokens after 0, 1, ..., num_layers layers: (num_layers + 1, ..., n, d).

    Arguments and errors as `layer_step`. Source: clustering.X3.

    >>> layer_path(torch.eye(2), ScalarHeads(torch.ones(1)), 1.0, 0.1, 3).shape
    torch.Size([4, 2, 2])
    """
    path = [x0]
    for _ in range(num_layers):
        path.append(layer_step(path[-1], heads, beta, step, normalization))
    return torch.stack([x.expand(path[-1].shape) for x in path])


# Clusters


def cluster_fraction(x: torch.Tensor, threshold: float = 0.999) -> torch.Tensor:
    """Fraction of the pairs i != j with `<x_i, x_j> > threshold`: (..., n, d) -> (...).

    Source: clustering.X5.

    >>> cluster_fraction(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]))
    tensor(0.3333)
    """
    require_tokens(x)
    n = x.shape[-2]
    close = (x @ x.mT > threshold).to(x.dtype)
    close.diagonal(dim1=-2, dim2=-1).zero_()
    return close.sum((-2, -1)) / (n * (n - 1))


def cluster_labels(x: torch.Tensor, threshold: float = 0.999) -> torch.Tensor:
    """Cluster of each token: connected components of the graph `<x_i, x_j> > threshold`.

    (..., n, d) -> (..., n) integers 0, 1, ... in order of first appearance.

    >>> cluster_labels(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]))
    tensor([0, 1, 0])
    """
    require_tokens(x)
    return connected_components(x @ x.mT > threshold)


def count_clusters(x: torch.Tensor, threshold: float = 0.999) -> torch.Tensor:
    """Number of clusters, (..., n, d) -> (...), as in `cluster_labels`.

    >>> count_clusters(torch.eye(3))
    tensor(3)
    """
    return cluster_labels(x, threshold).amax(-1) + 1


def cluster_sizes(x: torch.Tensor, threshold: float = 0.999) -> torch.Tensor:
    """Sizes of the clusters, largest first, filled with zeros: (..., n, d) -> (..., n).

    >>> cluster_sizes(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]))
    tensor([2, 1, 0])
    """
    labels = cluster_labels(x, threshold)
    sizes = torch.zeros_like(labels).scatter_add_(-1, labels, torch.ones_like(labels))
    return sizes.sort(-1, descending=True).values
