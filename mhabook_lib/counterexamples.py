"""Counterexamples of the attention flow whose sign is proved by interval arithmetic.

Each certifying function returns an interval `(low, high)` that contains the exact value; its
sign is proved when both ends have it. Decimal arguments mean the decimal number that is printed.
"""

from __future__ import annotations

import torch
from mpmath import iv

from .attention import BlockHeads, ScalarHeads
from .numerics.intervals import Interval, ends, exact

FIVE_ANGLES = (-1.9, 1.4, -0.1, -1.9, 2.8)
FIVE_STRENGTHS = (0.3, 3.0)
FIVE_BETA = 4.0

# The configurations as arrays


def one_token(t, a, b) -> tuple[torch.Tensor, BlockHeads]:
    """One token (cos t, sin t) in the plane and the orthogonal heads a e1 e1^T, b e2 e2^T.

    t: a number or tensor (...) -> x (..., 1, 2), float64. Source: clustering.T2.

    >>> one_token(0.0, 1.0, 0.9)[0]
    tensor([[1., 0.]], dtype=torch.float64)
    """
    t = torch.as_tensor(t, dtype=torch.float64)
    x = torch.stack([t.cos(), t.sin()], dim=-1).unsqueeze(-2)
    basis = torch.eye(2, dtype=torch.float64).unsqueeze(-1)
    return x, BlockHeads(basis, torch.tensor([[a], [b]], dtype=torch.float64))


def five_tokens() -> tuple[torch.Tensor, ScalarHeads]:
    """Five tokens on the circle (5, 2) and two positive scalar heads; used at beta = 4.

    Source: clustering.T2.

    >>> tuple(five_tokens()[0].shape)
    (5, 2)
    """
    angles = torch.tensor(FIVE_ANGLES, dtype=torch.float64)
    x = torch.stack([angles.cos(), angles.sin()], dim=-1)
    return x, ScalarHeads(torch.tensor(FIVE_STRENGTHS, dtype=torch.float64))


def rectangle_tokens(a) -> torch.Tensor:
    """The rectangle (+-cos a, +-sin a): a number or tensor (...) -> (..., 4, 2), float64.

    Under one head M = I it stays a rectangle. Source: clustering.X2.

    >>> rectangle_tokens(0.0)[1]
    tensor([1., -0.], dtype=torch.float64)
    """
    a = torch.as_tensor(a, dtype=torch.float64)
    c, s = a.cos(), a.sin()
    return torch.stack(
        [torch.stack(pair, dim=-1) for pair in ((c, s), (c, -s), (-c, s), (-c, -s))], dim=-2
    )


def rectangle_entropy(a, beta) -> torch.Tensor:
    """Entropy of every row at the rectangle, `h(beta cos^2 a) + h(beta sin^2 a)`.

    `h(x) = log(2 cosh x) - x tanh x`; a and beta broadcast, float64. Source: clustering.X2.

    >>> rectangle_entropy(0.6, 1.0)
    tensor(1.1505, dtype=torch.float64)
    """
    a, beta = (torch.as_tensor(value, dtype=torch.float64) for value in (a, beta))
    return _pair_entropy(beta * a.cos() ** 2) + _pair_entropy(beta * a.sin() ** 2)


def _pair_entropy(x: torch.Tensor) -> torch.Tensor:
    x = x.abs()
    return x + torch.log1p(torch.exp(-2 * x)) - x * torch.tanh(x)


# Their certified signs


def one_token_head_rate(t=1.2, a=1.0, b=0.9, beta=2.0) -> Interval:
    """dE_1/dt of `one_token` in flow U, `a Z_1 c^2 s^2 (a Z_1 - b Z_2)`.

    `Z_1 = e^{beta a c^2}`, `Z_2 = e^{beta b s^2}`: one orthogonal head of two loses energy.
    Source: clustering.T2.

    >>> low, high = one_token_head_rate()
    >>> high < 0
    True
    """
    a, b, square, first, second = _one_token(t, a, b, beta)
    return ends(a * first * square * (a * first - b * second))


def one_token_softmax_rate(t=1.2, a=1.0, b=0.9, beta=2.0) -> Interval:
    """dE/dt of `one_token` in flow S, `c^2 s^2 (a - b)(a Z_1 - b Z_2)`.

    The total energy falls under softmax weights. Source: clustering.X1.

    >>> low, high = one_token_softmax_rate()
    >>> high < 0
    True
    """
    a, b, square, first, second = _one_token(t, a, b, beta)
    return ends(square * (a - b) * (a * first - b * second))


def five_token_rates(normalization: str) -> tuple[Interval, Interval, Interval]:
    """(dE_1/dt, dE_2/dt, dE/dt) of `five_tokens` at beta = 4, flow "unnormalized" or "softmax".

    On the circle, with `T^h_i = sum_j lambda_h e^{beta s^h_ij} sin(theta_j - theta_i)`:
    U `(1/n^3) sum_i T^h_i sum_g T^g_i`, S `(1/n^2) sum_i T^h_i sum_g T^g_i / Z^g_i`.
    Raises ValueError for another normalization. Source: clustering.T2, clustering.X1.

    >>> five_token_rates("unnormalized")[0][1] < 0, five_token_rates("softmax")[2][1] < 0
    (True, True)
    """
    if normalization not in ("unnormalized", "softmax"):
        raise ValueError(f"normalization={normalization!r}: expected 'unnormalized' or 'softmax'")
    angles = [exact(angle) for angle in FIVE_ANGLES]
    n, beta = len(angles), exact(FIVE_BETA)
    rates = [iv.mpf(0), iv.mpf(0)]
    for own in angles:
        pulls, speed = [], iv.mpf(0)
        for strength in map(exact, FIVE_STRENGTHS):
            kernel = [iv.exp(beta * strength * iv.cos(other - own)) for other in angles]
            sines = [iv.sin(other - own) for other in angles]
            pull = strength * sum(k * sine for k, sine in zip(kernel, sines, strict=True))
            pulls.append(pull)
            speed += pull / (n if normalization == "unnormalized" else sum(kernel))
        rates = [rate + pull * speed / n**2 for rate, pull in zip(rates, pulls, strict=True)]
    return ends(rates[0]), ends(rates[1]), ends(rates[0] + rates[1])


def rectangle_entropy_change(beta=1.0) -> Interval:
    """Entropy at the end minus entropy at the square, `h(beta) + log 2 - 2 h(beta/2)`.

    The square a = pi/4 contracts to two antipodal clusters, a = 0. Source: clustering.X2.

    >>> low, high = rectangle_entropy_change()
    >>> high < 0
    True
    """
    beta = exact(beta)
    return ends(_certified_entropy(beta) + iv.log(2) - 2 * _certified_entropy(beta / 2))


def rectangle_entropy_rate(a=0.6, beta=1.0, normalization: str = "softmax") -> Interval:
    """dS/dt at the rectangle under one head M = I, flow "softmax" or "unnormalized".

    `dS/da = 2 beta^2 c s [c^2 / cosh^2(beta c^2) - s^2 / cosh^2(beta s^2)]`;
    U: `a' = -c s sinh(beta cos 2a)`; S: that times `1/(cosh(beta c^2) cosh(beta s^2))`.
    Raises ValueError for another normalization. Source: clustering.X2.

    >>> low, high = rectangle_entropy_rate()
    >>> high < 0
    True
    """
    if normalization not in ("unnormalized", "softmax"):
        raise ValueError(f"normalization={normalization!r}: expected 'unnormalized' or 'softmax'")
    a, beta = exact(a), exact(beta)
    c, s = iv.cos(a), iv.sin(a)
    cosh_c, cosh_s = _cosh(beta * c**2), _cosh(beta * s**2)
    slope = 2 * beta**2 * c * s * (c**2 / cosh_c**2 - s**2 / cosh_s**2)
    exponent = beta * (c**2 - s**2)
    speed = -c * s * (iv.exp(exponent) - iv.exp(-exponent)) / 2
    if normalization == "softmax":
        speed /= cosh_c * cosh_s
    return ends(slope * speed)


def bipolar_excess(strengths=(1.0, 1.0, 1.0, -2.0), beta=1.0) -> Interval:
    """Energy of two balanced antipodal clusters minus that of one cluster, scalar heads.

    `-(1/(2 beta)) sum_h sinh(beta lambda_h)`: positive although `sum_h lambda_h > 0`.
    Source: clustering.X6.

    >>> low, high = bipolar_excess()
    >>> low > 0
    True
    """
    beta = exact(beta)
    exponents = [beta * exact(strength) for strength in strengths]
    total = sum((iv.exp(value) - iv.exp(-value)) / 2 for value in exponents)
    return ends(-total / (2 * beta))


def _one_token(t, a, b, beta):
    t, a, b, beta = map(exact, (t, a, b, beta))
    c2, s2 = iv.cos(t) ** 2, iv.sin(t) ** 2
    return a, b, c2 * s2, iv.exp(beta * a * c2), iv.exp(beta * b * s2)


def _cosh(x):
    return (iv.exp(x) + iv.exp(-x)) / 2


def _certified_entropy(x):
    tanh = 1 - 2 / (iv.exp(2 * x) + 1)
    return iv.log(2 * _cosh(x)) - x * tanh
