"""Random multi-head attention at initialisation, and the Gaussian model with the same spectrum.

With orthogonal tokens `X X^T / d = I` and weights N(0, 1/d), queries, keys and values are arrays
of independent standard normals, so they are drawn directly: q and k (..., H, n, d_k),
v (..., H, n, d_v). Leading axes are independent draws. A *head* is an n x n matrix with entries of
order n^{-1/2}: `sqrt(n) (A - 11^T/n)` for softmax attention, and for the Gaussian model
`Y = (sqrt(theta_2) S + sqrt(theta_1 - theta_2) W) / sqrt(n)`. Heads are produced one at a time, so
that memory is n^2, not H n^2.

All Gram matrices are scaled so that the limiting laws of the chapter describe their eigenvalues.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from .exp_features import exp_feature_coefficients
from .numerics.linalg import psd_root, wishart_factor
from .validation import require_count, require_finite, require_positive

SHARING = ("none", "kv_across", "q_across", "kv_tied")


def normals(shape: tuple[int, ...], rng: np.random.Generator, like=None) -> torch.Tensor:
    """Standard normals drawn by NumPy, on the device and in the precision of `like`."""
    draws = torch.from_numpy(rng.standard_normal(shape))
    return draws if like is None else draws.to(like)


def sample_qkv(
    n: int,
    num_heads: int,
    d_k: int,
    d_v: int,
    rng: np.random.Generator,
    *,
    share: str = "none",
    groups: int = 1,
    draws: tuple[int, ...] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys (*draws, H, n, d_k) and values (*draws, H, n, d_v) of orthogonal tokens.

    Exact in law: `X W` has independent N(0, 1) entries when `X X^T = d I` and W has N(0, 1/d)
    entries. `share`: "none"; "kv_across": `groups` pairs of keys and values, each used by
    num_heads / groups consecutive heads (grouped-query attention; one group is multi-query);
    "q_across": one query matrix for all heads; "kv_tied": values equal to keys.

    Raises ValueError for sizes < 1, an unknown `share`, tied widths that differ, and a number of
    groups that does not divide the number of heads. Source: gaussian_equivalence.T1.

    >>> q, k, v = sample_qkv(5, 4, 3, 2, np.random.default_rng(0), share="kv_across", groups=2)
    >>> v.shape, bool((k[0] == k[1]).all()), bool((k[1] == k[2]).any())
    (torch.Size([4, 5, 2]), True, False)
    """
    for name, size in {"n": n, "num_heads": num_heads, "d_k": d_k, "d_v": d_v}.items():
        require_count(name, size)
    if share not in SHARING:
        raise ValueError(f"share={share!r}: expected one of {SHARING}")
    if share == "kv_tied" and d_k != d_v:
        raise ValueError(f"d_k={d_k}, d_v={d_v}: expected equal widths for tied keys and values")
    if share == "kv_across" and (groups < 1 or num_heads % groups):
        raise ValueError(f"groups={groups}: expected a divisor of num_heads={num_heads}")
    kv_heads = groups if share == "kv_across" else num_heads
    q = normals((*draws, 1 if share == "q_across" else num_heads, n, d_k), rng)
    k = normals((*draws, kv_heads, n, d_k), rng)
    v = k if share == "kv_tied" else normals((*draws, kv_heads, n, d_v), rng)
    per_group = num_heads // kv_heads
    if share == "q_across":
        q = q.expand(*draws, num_heads, n, d_k)
    if per_group > 1:
        k, v = (x.repeat_interleave(per_group, dim=-3) for x in (k, v))
    return q, k, v


def project_tokens(
    x: torch.Tensor, num_heads: int, d_k: int, d_v: int, rng: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values `x W` of any tokens x (..., n, d), weights N(0, 1/d).

    The long way round for orthogonal tokens, and the only way for others.
    Source: gaussian_equivalence.X7.
    """
    *draws, _, d = x.shape
    return tuple(
        x.unsqueeze(-3) @ normals((*draws, num_heads, d, width), rng, x) / d**0.5
        for width in (d_k, d_k, d_v)
    )


def _check_queries(q: torch.Tensor, k: torch.Tensor) -> None:
    if q.ndim < 3 or q.shape != k.shape:
        raise ValueError(
            f"q of shape {tuple(q.shape)} and k of shape {tuple(k.shape)}: "
            "expected the same shape (..., H, n, d_k)"
        )
    require_finite("q", q)
    require_finite("k", k)


def _check_values(q: torch.Tensor, v: torch.Tensor) -> None:
    if v.shape[:-1] != q.shape[:-1]:
        raise ValueError(
            f"v of shape {tuple(v.shape)}: expected {tuple(q.shape[:-1])} and d_v, as q has"
        )
    require_finite("v", v)


def _check_variances(linear: float, noise: float) -> None:
    if not 0 <= min(linear, noise) <= max(linear, noise) < float("inf"):
        raise ValueError(f"linear={linear}, noise={noise}: expected two finite variances >= 0")


def scaled_scores(q: torch.Tensor, k: torch.Tensor) -> Iterator[torch.Tensor]:
    """The scores `S_r = Q_r K_r^T / sqrt(d_k)`, (..., n, n), one head after the other."""
    for r in range(q.shape[-3]):
        yield (q[..., r, :, :] / q.shape[-1] ** 0.5) @ k[..., r, :, :].mT


def softmax_heads(q, k, beta: float, centered: bool = True) -> Iterator[torch.Tensor]:
    """Softmax heads `sqrt(n) (A_r - 11^T/n)`, or `sqrt(n) A_r`, with `A_r = softmax(beta S_r)`.

    Raises ValueError for shapes that differ, values that are not finite, beta <= 0.
    """
    _check_queries(q, k)
    require_positive("beta", beta)
    n = q.shape[-2]
    for scores in scaled_scores(q, k):
        pattern = torch.softmax(scores.mul_(beta), dim=-1)
        yield (pattern.sub_(1 / n) if centered else pattern).mul_(n**0.5)


def gaussian_heads(q, k, linear: float, noise: float, rng) -> Iterator[torch.Tensor]:
    """Gaussian heads `(sqrt(linear) S_r + sqrt(noise) W_r) / sqrt(n)`, W_r fresh standard normals.

    The model of attention has `linear = theta_2`, `noise = theta_1 - theta_2`.
    Raises ValueError as `softmax_heads`, and for a negative variance.
    """
    _check_queries(q, k)
    _check_variances(linear, noise)
    n = q.shape[-2]
    for scores in scaled_scores(q, k):
        head = (linear / n) ** 0.5 * scores
        if noise > 0:
            head = head + (noise / n) ** 0.5 * normals(scores.shape, rng, q)
        yield head


def gaussian_outputs(q, k, v, linear: float, noise: float, rng) -> torch.Tensor:
    """Outputs `[Y_1 V_1, ..., Y_H V_H] / sqrt(n)` (..., n, H d_v) of Gaussian heads, exact in law.

    No n x n matrix is formed: `S_r V_r = Q_r (K_r^T V_r) / sqrt(d_k)`, and given the values
    `W_r V_r` has independent rows with covariance `V_r^T V_r = R_r R_r^T`, so it is `Z_r R_r^T`
    with Z_r (n, d_v) normal. Raises ValueError as `gaussian_heads`, and if v does not fit.
    """
    _check_queries(q, k)
    _check_values(q, v)
    _check_variances(linear, noise)
    n, d_v = v.shape[-2:]
    outputs = linear**0.5 * (q @ (k.mT @ v)) / q.shape[-1] ** 0.5
    if noise > 0:
        root = psd_root(v.mT @ v).mT if d_v <= n else v
        outputs = outputs + noise**0.5 * normals((*v.shape[:-2], n, min(n, d_v)), rng, q) @ root
    return _side_by_side(outputs / n)


def concatenated_outputs(heads: Iterable[torch.Tensor], v: torch.Tensor) -> torch.Tensor:
    """Outputs `[Y_1 V_1, ..., Y_H V_H] / sqrt(n)` (..., n, H d_v) of heads, v (..., H, n, d_v).

    For softmax heads this is `[A_1 V_1, ...]`, centred or not as the heads are.
    """
    outputs = [head @ v[..., r, :, :] for r, head in enumerate(heads)]
    return torch.cat(outputs, dim=-1) / v.shape[-2] ** 0.5


def _side_by_side(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.transpose(-3, -2).flatten(-2)


def concatenated_gram(heads: Iterable[torch.Tensor]) -> torch.Tensor:
    """Gram matrix `(1/H) sum_r Y_r Y_r^T` (..., n, n) of heads side by side."""
    gram, count = 0, 0
    for head in heads:
        gram, count = gram + head @ head.mT, count + 1
    return gram / count


def averaged_gram(heads: Iterable[torch.Tensor]) -> torch.Tensor:
    """`(1/H) (sum_r Y_r)(sum_r Y_r)^T`: the Gram matrix of sqrt(n H) times the head average.

    Source: gaussian_equivalence.P2.
    """
    total, count = 0, 0
    for head in heads:
        total, count = total + head, count + 1
    return total @ total.mT / count


def centered_attention_gram(q, k, v=None, *, beta: float) -> torch.Tensor:
    """Gram matrix (..., n, n) of centred softmax attention of all heads.

    `(n/H) sum_r Ap_r Ap_r^T`, `Ap_r = A_r - 11^T/n`, and with values `sum_r Ap_r V_r V_r^T Ap_r^T`.
    Means of the limiting laws: `theta_1`, and `(H d_v / n) theta_1` for independent values.
    Raises ValueError as `softmax_heads`, and for values of another shape.
    Source: gaussian_equivalence.T3, T4.

    >>> q, k, v = sample_qkv(64, 2, 64, 64, np.random.default_rng(0))
    >>> centered_attention_gram(q, k, beta=1.0).shape
    torch.Size([64, 64])
    """
    heads = softmax_heads(q, k, beta)
    if v is None:
        return concatenated_gram(heads)
    _check_values(q, v)
    outputs = concatenated_outputs(heads, v)
    return outputs @ outputs.mT


def gaussian_equivalent_gram(q, k, v=None, *, beta: float, rng) -> torch.Tensor:
    """The same Gram matrix of the Gaussian model `Y_r`, on the same scale, with fresh noise.

    Source: gaussian_equivalence.T1.
    """
    theta = exp_feature_coefficients(beta)
    if v is None:
        return concatenated_gram(gaussian_heads(q, k, theta.theta2, theta.noise, rng))
    outputs = gaussian_outputs(q, k, v, theta.theta2, theta.noise, rng)
    return outputs @ outputs.mT


def output_gram(gram: torch.Tensor, d_out: int, width: int, rng) -> torch.Tensor:
    """`O O^T` (..., n, n) for `O = C W`, `W = G / sqrt(width)` with G (width, d_out) normal.

    `gram = C C^T` is all that is needed: given C, `O O^T` has exactly the law of
    `R F F^T R^T / width` with `R R^T = gram` and `F F^T` a Wishart matrix of d_out degrees of
    freedom, whose triangular factor costs n^2/2 normals whatever d_out is.
    Raises ValueError for sizes < 1. Source: gaussian_equivalence.T4 (algorithm).

    >>> gram = output_gram(torch.eye(2), 10**8, 10**8, np.random.default_rng(0))
    >>> bool((gram - torch.eye(2)).abs().max() < 1e-3)
    True
    """
    require_count("d_out", d_out)
    require_count("width", width)
    factor = wishart_factor(gram.shape[-1], d_out, rng, tuple(gram.shape[:-2])).to(gram)
    root = psd_root(gram) @ factor
    return root @ root.mT / width


def spectrum(gram: torch.Tensor) -> torch.Tensor:
    """Eigenvalues (..., n) of positive semidefinite matrices, rising; rounding below 0 is 0."""
    return torch.linalg.eigvalsh(gram).clamp_min(0)


def training_loss_empirical(gram: torch.Tensor, times, target=None) -> torch.Tensor:
    """Training loss of gradient flow on a linear readout, relative to the start: (..., len(times)).

    `gram = F F^T` (..., n, n) of features in token space, `y^T e^{-2tG} y / |y|^2` for the centred
    target y (n); without one, the mean over all centred targets,
    `(tr e^{-2tG} - 1^T e^{-2tG} 1 / n) / (n - 1)`.
    Raises ValueError for negative times and for a target that is constant.
    Source: gaussian_equivalence.P4.

    >>> training_loss_empirical(torch.diag(torch.tensor([1.0, 1.0, 3.0])), [0.0, 1.0]).shape
    torch.Size([2])
    """
    times = torch.as_tensor(times, dtype=gram.dtype, device=gram.device)
    if bool((times < 0).any()):
        raise ValueError(f"times={times.tolist()}: expected times >= 0")
    eigenvalues, vectors = torch.linalg.eigh(gram)
    decay = torch.exp(-2 * times[:, None] * eigenvalues.unsqueeze(-2).clamp_min(0))
    n = gram.shape[-1]
    if target is None:
        weights = (1 - vectors.sum(-2).square() / n) / (n - 1)
    else:
        centered = target - target.mean()
        if float(centered.norm()) <= 1e-12 * float(target.norm()):
            raise ValueError("target is constant: expected a target with a part orthogonal to 1")
        weights = (vectors.mT @ centered).square() / centered.square().sum()
    return (decay * weights.unsqueeze(-2)).sum(-1)


def key_norm_spike(beta: float, gamma_k: float, num_heads: int) -> float:
    """Squared size `beta^4 H / (2 gamma_k theta_1)` of the key-norm mode of mean-one attention.

    Long keys are popular with every query: `(1/n) sum_i n A_ij` is about
    `exp(beta^2 (|k_j|^2/d_k - 1) / 2)`. To be fed to the outlier equation of a spectral law.
    Raises ValueError for beta, gamma_k <= 0 and num_heads < 1. Source: gaussian_equivalence.X4.

    >>> round(key_norm_spike(1.0, 12 * 64 / 512, 12), 6)
    2.327907
    """
    require_positive("gamma_k", gamma_k)
    require_count("num_heads", num_heads)
    theta1 = exp_feature_coefficients(beta).theta1
    return float(beta**4 * num_heads / (2 * gamma_k * theta1))


def largest_entry_spike(q, k, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared size and row of the largest attention weight: two tensors over the leading axes.

    `max_{r,i,j} n A_ij^2 / (H theta_1)`, the spike it plants in mean-one attention.
    Raises ValueError as `softmax_heads`. Source: gaussian_equivalence.X3.
    """
    rows = torch.stack([head.amax(-1) for head in softmax_heads(q, k, beta, centered=False)])
    best = rows.amax(0).max(dim=-1)
    theta1 = exp_feature_coefficients(beta).theta1
    return best.values.square() / (q.shape[-3] * theta1), best.indices
