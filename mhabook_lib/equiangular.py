"""Equiangular tokens under scalar heads: the attention flow as one scalar equation.

With `<x_i, x_j> = gamma` for all i != j,
`gamma' = 2 K(gamma) (1 - gamma)(1 + (n-1) gamma)`. In the logit coordinate
`s = log((1 + (n-1) gamma)/(1 - gamma))` this is `s' = 2 n K(gamma(s))`, smooth up to the cluster.

NumPy arrays in and out (float64; CPU or CUDA tensors are read as arrays). Arguments broadcast;
`strengths` has one more, last axis: the heads, `(..., H)`.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.integrate import solve_ivp
from scipy.special import expi

from .numerics.quadrature import gauss_legendre
from .validation import require_finite, require_gamma, require_normalization, require_positive


def as_array(value) -> np.ndarray:
    """A float64 NumPy array of a number, list, array or tensor.

    >>> as_array(torch.ones(2))
    array([1., 1.])
    """
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    return np.asarray(value, dtype=float)


def gamma_to_logit(gamma, n) -> np.ndarray:
    """Logit coordinate `s = log((1 + (n-1) gamma)/(1 - gamma))`; s = 0 at gamma = 0.

    Raises ValueError for gamma outside [-1/(n-1), 1). Source: clustering.P2.

    >>> float(gamma_to_logit(0.5, 3))
    1.3862943611198906
    """
    gamma, n = as_array(gamma), as_array(n)
    require_gamma(gamma, n)
    with np.errstate(divide="ignore"):
        return np.log1p(np.maximum((n - 1) * gamma, -1)) - np.log1p(-gamma)


def logit_to_gamma(s, n) -> np.ndarray:
    """Inverse of `gamma_to_logit`, `gamma = (e^s - 1)/(e^s + n - 1)`, for any real s.

    Source: clustering.P2.

    >>> round(float(logit_to_gamma(np.log(4), 3)), 12)
    0.5
    """
    s, n = as_array(s), as_array(n)
    t = np.exp(-np.abs(s))
    numerator, weight = -np.expm1(-np.abs(s)), n - 1
    return np.where(s >= 0, numerator / (1 + weight * t), -numerator / (t + weight))


def equiangular_drive(gamma, strengths, beta, n, normalization: str) -> np.ndarray:
    """The drive K in `gamma' = 2 K (1 - gamma)(1 + (n-1) gamma)`.

    U: `(1/n) sum_h lambda_h e^{beta lambda_h gamma}`;
    S: `sum_h lambda_h / (e^{beta lambda_h (1 - gamma)} + n - 1)`;
    R: `(1/n) sum_h lambda_h max(lambda_h gamma, 0)`.
    gamma, beta, n (...), strengths (..., H) -> (...). gamma = 1 is allowed here. Raises ValueError
    for gamma out of range, beta <= 0 or an unknown normalization. Source: clustering.P2.

    >>> float(equiangular_drive(0.0, [1.0, 2.0], 1.0, 4, "unnormalized"))
    0.75
    """
    gamma, strengths, beta, n = _checked(gamma, strengths, beta, n, normalization)
    return _drive(gamma, 1 - gamma, strengths, beta, n, normalization)


def equiangular_rate(gamma, strengths, beta, n, normalization: str) -> np.ndarray:
    """`gamma' = 2 K(gamma) (1 - gamma)(1 + (n-1) gamma)`, K = `equiangular_drive`.

    Shapes and errors as `equiangular_drive`. Source: clustering.P2.

    >>> float(equiangular_rate(0.0, [1.0, 2.0], 1.0, 4, "unnormalized"))
    1.5
    """
    drive = equiangular_drive(gamma, strengths, beta, n, normalization)
    gamma, n = as_array(gamma), as_array(n)
    return 2 * drive * (1 - gamma) * (1 + (n - 1) * gamma)


def equiangular_time(
    gamma0, gamma1, strengths, beta, n, normalization: str, nodes: int = 64
) -> np.ndarray:
    """Time from gamma0 to gamma1, `t = int ds / (2 n K(gamma(s)))` between the logits.

    Flows U and S: Gauss-Legendre with `nodes` points; no differential equation is solved. With 64
    nodes and one head the relative error is below 3e-11 for n <= 1024, beta <= 12,
    gamma0 >= -0.9/(n-1), 1 - gamma1 >= 1e-8. Flow R: exact, the closed form with
    `sum lambda_h^2` over the heads with lambda_h gamma > 0.
    gamma0, gamma1, beta, n (...), strengths (..., H) -> (...).
    Raises ValueError as `equiangular_drive`, and "infinite time" where gamma1 is never reached:
    K vanishes or changes sign on the way, points away, or an end is the simplex.
    Source: clustering.P2.

    >>> round(float(equiangular_time(0.0, 0.9, [1.0], 1.0, 8, "unnormalized")), 7)
    1.3982525
    """
    _, strengths, beta, n = _checked(gamma0, strengths, beta, n, normalization)
    start, stop = gamma_to_logit(gamma0, n), gamma_to_logit(gamma1, n)
    with np.errstate(all="ignore"):
        if normalization == "relu":
            time = _relu_time(as_array(gamma0), as_array(gamma1), strengths, n)
            time = time + np.zeros_like(beta)  # beta plays no part, but gives shape
        else:
            time = _quadrature_time(start, stop, strengths, beta, n, normalization, nodes)
    time = np.where((start == stop) & np.isfinite(start), 0.0, time)
    if not np.all((time >= 0) & np.isfinite(time)):
        raise ValueError(
            f"infinite time from gamma0={gamma0} to gamma1={gamma1}: expected a drive that keeps "
            f"the sign of gamma1 - gamma0 on the way, and no end at -1/(n-1)"
        )
    return time


def _quadrature_time(start, stop, strengths, beta, n, normalization, nodes):
    """`int ds / (2 n K)`; infinite where K does not keep the sign of the path."""
    points, weights = gauss_legendre(nodes)
    places = np.concatenate([[0.0], points, [1.0]])  # at the two ends K is only checked
    span = stop - start
    s = start[..., None] + span[..., None] * places
    count = n[..., None]
    complement = count / (np.exp(s) + count - 1)  # 1 - gamma
    drive = _drive(
        1 - complement, complement, strengths[..., None, :], beta[..., None], count, normalization
    )
    forward = (drive * np.sign(span)[..., None] > 0).all(-1)
    return np.where(forward, span * ((1 / drive[..., 1:-1]) @ weights) / (2 * n), np.inf)


def _relu_time(gamma0, gamma1, strengths, n):
    """Exact: only the heads with lambda gamma > 0 pull, so that K = sum lambda^2 gamma / n."""
    pull = np.where(strengths * np.sign(gamma0)[..., None] > 0, strengths**2, 0).sum(-1)
    same_side = gamma0 * gamma1 > 0
    time = (_relu_primitive(gamma1, n) - _relu_primitive(gamma0, n)) / (2 * pull)
    return np.where(same_side, time, np.inf)


def _relu_primitive(gamma, n):
    """`n log|g| - log(1-g) - (n-1) log(1+(n-1)g)`, whose slope is n / (g (1-g) (1+(n-1)g))."""
    return n * np.log(np.abs(gamma)) - np.log1p(-gamma) - (n - 1) * np.log1p((n - 1) * gamma)


def equiangular_time_closed(gamma0, gamma1, strength, beta, n, normalization: str) -> np.ndarray:
    """Time from gamma0 to gamma1 for one head, in closed form.

    With m = 1/(n-1), B = beta lambda, differences between the ends of
    U: `[-e^{-B} Ei(B(1-g)) - e^{Bm} E1(B(g+m))] / (2 lambda)`;
    S: `[-Ei(B(1-g)) - e^{B(1+m)} E1(B(g+m)) + (n-1) log((g+m)/(1-g))] / (2 lambda n)`;
    R: `[n log|g| - log(1-g) - (n-1) log(1+(n-1)g)] / (2 lambda^2)`, for lambda g > 0;
    E1(x) is read as -Ei(-x). All arguments broadcast. Raises ValueError for parameters out of
    range, lambda = 0, and in flow R where lambda gamma <= 0. Source: clustering.P2.

    >>> round(float(equiangular_time_closed(0.0, 0.5, 1.0, 4.0, 128, "softmax")), 7)
    3.0988584
    """
    strength = as_array(strength)
    gamma0, _, beta, n = _checked(gamma0, strength[..., None], beta, n, normalization)
    gamma1 = as_array(gamma1)
    require_gamma(gamma1, n)
    if np.any(strength == 0):
        raise ValueError("strength=0: expected a head that moves the tokens")
    if normalization == "relu" and np.any(np.minimum(strength * gamma0, strength * gamma1) <= 0):
        raise ValueError(f"gamma0={gamma0}, gamma1={gamma1}: expected strength * gamma > 0 (ReLU)")
    m, rate = 1 / (n - 1), beta * strength

    def primitive(g):
        if normalization == "relu":
            return _relu_primitive(g, n) / (2 * strength**2) + np.zeros_like(beta)
        cluster, simplex = expi(rate * (1 - g)), -expi(-rate * (g + m))
        if normalization == "unnormalized":
            return -(np.exp(-rate) * cluster + np.exp(rate * m) * simplex) / (2 * strength)
        logarithm = (n - 1) * np.log((g + m) / (1 - g))
        return (logarithm - cluster - np.exp(rate * (1 + m)) * simplex) / (2 * strength * n)

    return primitive(gamma1) - primitive(gamma0)


def equiangular_flow(
    gamma0, times, strengths, beta, n, normalization: str, rtol: float = 1e-12
) -> np.ndarray:
    """gamma at `times`, `gamma(times[0]) = gamma0`: (len(times), ...).

    `s' = 2 n K(gamma(s))` in the logit coordinate, by SciPy's DOP853 for all settings at once.
    Shapes and errors as `equiangular_drive`; ValueError for the simplex gamma0 = -1/(n-1) and
    for times that do not increase. Source: clustering.P2.

    >>> gamma = equiangular_flow(0.05, [0.0, 1.0], [1.0], 1.5, 12, "unnormalized")
    >>> round(float(gamma[1]), 8)
    0.82229166
    """
    gamma0, strengths, beta, n = _checked(gamma0, strengths, beta, n, normalization)
    times = as_array(times)
    if times.ndim != 1 or not np.all(np.isfinite(times)) or np.any(np.diff(times) <= 0):
        raise ValueError(f"times={times}: expected finite, strictly increasing values")
    shape = np.broadcast_shapes(gamma0.shape, strengths.shape[:-1], beta.shape, n.shape)
    start = np.broadcast_to(gamma_to_logit(gamma0, n), shape)
    if not np.all(np.isfinite(start)):
        raise ValueError(f"gamma0={gamma0}: expected a start off the simplex -1/(n-1)")

    def field(_, flat):
        s = flat.reshape(shape)
        complement = n / (np.exp(s) + n - 1)
        gamma = logit_to_gamma(s, n)
        return (2 * n * _drive(gamma, complement, strengths, beta, n, normalization)).ravel()

    if len(times) == 1:
        return logit_to_gamma(start, n)[None]
    solution = solve_ivp(
        field, (times[0], times[-1]), start.ravel(), "DOP853", times, rtol=rtol, atol=rtol
    )
    return logit_to_gamma(solution.y.T.reshape(len(times), *shape), n)


def equiangular_entropy(gamma, strength, beta, n) -> np.ndarray:
    """Entropy of a softmax row, `log(e^u + n - 1) - u p`, `u = beta lambda (1 - gamma)`.

    `p = e^u/(e^u + n - 1)` is the weight of the token itself. All arguments broadcast. Raises
    ValueError as `equiangular_drive`. Source: clustering.T8.

    >>> round(float(np.exp(equiangular_entropy(1.0, 1.0, 2.0, 5))), 12)
    5.0
    """
    strength = as_array(strength)
    gamma, _, beta, n = _checked(gamma, strength[..., None], beta, n, "softmax")
    u = beta * strength * (1 - gamma)
    log_partition = np.logaddexp(u, np.log(n - 1))
    return log_partition - u * np.exp(u - log_partition)


def equiangular_entropy_rate(gamma, strengths, beta, n, normalization: str) -> np.ndarray:
    """Entropy production of each head, `beta^2 lambda_h^2 (1 - gamma) p_h (1 - p_h) gamma'`.

    `p_h` as in `equiangular_entropy`, gamma' of all heads together in the given flow.
    gamma, beta, n (...), strengths (..., H) -> (..., H). Errors as `equiangular_drive`.
    Source: clustering.T8.

    >>> equiangular_entropy_rate(0.0, [1.0, -1.0], 1.0, 4, "unnormalized")
    array([0., 0.])
    """
    rate = equiangular_rate(gamma, strengths, beta, n, normalization)[..., None]
    gamma, strengths, beta, n = _checked(gamma, strengths, beta, n, normalization)
    gamma, beta, n = gamma[..., None], beta[..., None], n[..., None]
    u = beta * strengths * (1 - gamma)
    p = np.exp(u - np.logaddexp(u, np.log(n - 1)))
    return (beta * strengths) ** 2 * (1 - gamma) * p * (1 - p) * rate


def _checked(gamma, strengths, beta, n, normalization):
    require_normalization(normalization)
    require_positive("beta", beta)
    gamma, strengths, beta, n = map(as_array, (gamma, strengths, beta, n))
    require_finite("strengths", strengths)
    if strengths.ndim < 1:
        raise ValueError("strengths of shape (): expected (..., H)")
    require_gamma(np.where(gamma == 1, 0.0, gamma), n)
    return gamma, strengths, beta, n


def _drive(gamma, complement, strengths, beta, n, normalization):
    """K without checks; `complement` is 1 - gamma, given apart because it can be tiny."""
    beta_strengths = beta[..., None] * strengths
    if normalization == "unnormalized":
        return (strengths * np.exp(beta_strengths * gamma[..., None])).sum(-1) / n
    if normalization == "softmax":
        others = n[..., None] - 1
        return (strengths / (np.exp(beta_strengths * complement[..., None]) + others)).sum(-1)
    pull = (strengths * np.maximum(strengths * gamma[..., None], 0)).sum(-1)
    return pull / n + np.zeros_like(beta)  # beta plays no part, but gives shape
