r"""Heads with prescribed angles, and counterexamples whose sign is proved by interval arithmetic.

A certifying function returns intervals `(low, high)` that contain the exact values; decimal
arguments mean the decimal number that is printed.
"""

from __future__ import annotations

import torch
from mpmath import iv

from .numerics.intervals import Interval, ends, exact
from .validation import require_positive


def angle_pair(angles, d_model: int) -> torch.Tensor:
    """Two heads with the principal `angles` (..., k), in radians: bases (..., 2, d, k), float64.

    `U_1 = (e_1 .. e_k)`, and column j of U_2 is `cos t_j e_j + sin t_j e_(k+j)`. Raises ValueError
    unless d_model >= 2 k. Source: ensemble.T5.

    >>> angle_pair([torch.pi / 2], 2)[1].T.round()
    tensor([[0., 1.]], dtype=torch.float64)
    """
    angles = torch.as_tensor(angles, dtype=torch.float64)
    k = angles.shape[-1]
    if d_model < 2 * k:
        raise ValueError(f"d_model={d_model}: expected at least {2 * k} for {k} angles")
    frame = torch.eye(d_model, dtype=torch.float64, device=angles.device)
    column = angles.unsqueeze(-2)
    second = column.cos() * frame[:, :k] + column.sin() * frame[:, k : 2 * k]
    return torch.stack([frame[:, :k].expand_as(second), second], dim=-3)


def fan(angles, num_heads: int) -> torch.Tensor:
    """H lines in R^H that open like a fan: angles (...) in radians -> bases (..., H, H, 1).

    Head 1 is e_1, head h is `cos t e_1 + sin t e_h`: aligned at t = 0, orthogonal at pi/2, and no
    angle shrinks in between. Source: ensemble.T7.

    >>> fan(torch.pi / 2, 2).squeeze(-1).round()
    tensor([[1., 0.],
            [0., 1.]], dtype=torch.float64)
    """
    angles = torch.as_tensor(angles, dtype=torch.float64)[..., None, None]
    frame = torch.eye(num_heads, dtype=torch.float64, device=angles.device)
    lines = angles.cos() * frame[0] + angles.sin() * frame
    lines = torch.cat([frame[:1].expand_as(lines[..., :1, :]), lines[..., 1:, :]], dim=-2)
    return lines.unsqueeze(-1)


def certified_diversity(degrees) -> Interval:
    """Subspace index of two heads, the mean of `sin^2` of their angles.

    >>> low, high = certified_diversity([0, 90])
    >>> low <= 0.5 <= high
    True
    """
    squares = [iv.sin(exact(t) * iv.pi / 180) ** 2 for t in degrees]
    return ends(sum(squares) / len(squares))


def certified_correlation(degrees, bandwidth) -> Interval:
    """Noise correlation of two heads at x = 0, as `head_correlation_at_origin`.

    Source: ensemble.T7, counterexample C2.

    >>> certified_correlation([40, 40], 0.1)[1] < certified_correlation([0, 90], 0.1)[0]
    True
    """
    least = (1 + exact(bandwidth) ** 2) ** 2 - 1
    total = iv.mpf(1)
    for t in degrees:
        total *= least / (least + iv.sin(exact(t) * iv.pi / 180) ** 2)
    return ends(iv.sqrt(total))


def certified_fan_mse(num_heads, bandwidth, tau, sigma2, n) -> dict[str, Interval]:
    r"""Errors of the average of the heads at both ends of the `fan`, averaged over queries.

    First order in 1/n, queries `x ~ N(0, tau^2 I)`. Keys: "aligned" and "orthogonal" for
    `m = x_1`, and "isotropic aligned" for the mean over `m = x_1, ..., x_H`; by symmetry the last
    target has the error "orthogonal" at the other end. Raises ValueError unless all arguments are
    positive and 2 tau^2 < s2 (s2 + 1). Source: ensemble.T7, counterexample C1.

    >>> mse = certified_fan_mse(4, 0.3, 0.7, 1.0, 1000)
    >>> mse["aligned"][1] < mse["orthogonal"][0] < mse["isotropic aligned"][0]
    True
    """
    for name, value in (("bandwidth", bandwidth), ("tau", tau), ("sigma2", sigma2), ("n", n)):
        require_positive(name, value)
    h2, t2, noise, n = exact(bandwidth) ** 2, exact(tau) ** 2, exact(sigma2), exact(n)
    s2, heads = 1 + h2, num_heads
    rest = 1 - 2 * t2 / (s2 * (s2 + 1))
    if not rest > 0:
        raise ValueError(f"tau={tau}: expected 2 tau^2 < s2 (s2 + 1) with s2 = 1 + bandwidth^2")
    inflation = 1 / iv.sqrt((1 - 1 / s2**2) * rest)
    delta, moment = 2 / (2 + h2) - 1 / s2, t2 / rest

    def bias2(share):  # of an average that answers share x_1/s2
        missing = share / s2 - 1
        return t2 * missing**2 - 2 * missing * share * delta * inflation * moment / n

    seeing = inflation * (noise + h2 / (2 + h2) + delta**2 * moment) / n
    blind = inflation * (noise + 1) / n
    mixed = 2 * (noise + h2 / s2) + (heads - 2) * (noise + 1)  # pairs that differ
    aligned = bias2(iv.mpf(1)) + seeing
    orthogonal = bias2(1 / iv.mpf(heads)) + seeing / heads**2
    orthogonal += (heads - 1) * (blind + mixed / n) / heads**2
    return {
        "aligned": ends(aligned),
        "orthogonal": ends(orthogonal),
        "isotropic aligned": ends((aligned + (heads - 1) * (t2 + blind)) / heads),
    }
