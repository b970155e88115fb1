"""Limiting spectra of multi-head attention at initialisation.

Two families, both of mean one: keys and values free of each other (`SpectralLaw`), values equal to
keys (`TiedSpectralLaw`). Density, distribution function, edge, moments, outliers and learning
curves come from `CurveLaw`. NumPy arrays in and out; arguments broadcast against the parameters.
"""

from __future__ import annotations

import math

import numpy as np

from .curve_law import CurveLaw, floats
from .free_probability import free_poisson_moments, free_poisson_psi
from .validation import require_positive


class SpectralLaw(CurveLaw):
    """The law of attention with keys, values and output weights free of each other.

    `rho x MP_{1/a_1} x MP_{1/a_2} ...` (free multiplicative convolution), mean one, where rho is
    the law of `1 - c + c x`, x ~ MP_{1/gamma_k}. Attention alone: `factors=(h,)`; with Gaussian
    values and output weights `(h, gamma_v, gamma_o)`; a factor `inf` is absent. `extra`: pairs
    `(c_2, gamma_2)`, further parts `c_2/(1 - c_2 eta/gamma_2)` of the R-transform. Here
    `zeta = eta R(eta)`. Raises ValueError unless c >= 0, the parts sum to at most 1, and all
    ratios are > 0. Source: gaussian_equivalence.T3, T4, X5.

    >>> law = SpectralLaw(0.581976706869, 1.0, factors=(1.0,))  # one head, beta = 1
    >>> round(float(law.edge()), 5), round(float(law.cdf(1.0)), 4)
    (5.24334, 0.6483)
    """

    def __init__(self, c, gamma_k, factors=(), extra=()):
        self._parts = [
            (np.asarray(p, float), np.asarray(g, float)) for p, g in ((c, gamma_k), *extra)
        ]
        for part, ratio in self._parts:
            if not np.all(part >= 0):
                raise ValueError(f"c={part.tolist()}: expected linear fractions >= 0")
            if not np.all(ratio > 0):
                raise ValueError(f"gamma_k={ratio.tolist()}: expected ratios > 0")
        self._constant = 1 - sum(part for part, _ in self._parts)
        if np.any(self._constant < -1e-12):
            raise ValueError(f"c={c}, extra={extra}: expected fractions whose sum is at most 1")
        self._constant = np.maximum(self._constant, 0.0)
        rank = sum(np.where(part > 0, ratio, 0.0) for part, ratio in self._parts)
        self._reach = np.where(self._constant > 0, np.inf, rank)
        with np.errstate(divide="ignore"):
            poles = [ratio / part for part, ratio in self._parts]
        self._pole = np.minimum.reduce(np.broadcast_arrays(*poles))
        super().__init__(factors, *(p for pair in self._parts for p in pair))

    def _zeta(self, eta):
        total, slope = self._constant, 0.0
        for part, ratio in self._parts:
            bend = part * eta / ratio
            total = total + part / (1 - bend)
            slope = slope + part * bend / (1 - bend) ** 2
        return eta * total, 1 + slope / total

    def _primitive(self, eta):
        logs = sum(ratio * np.log(1 - part * eta / ratio) for part, ratio in self._parts)
        return self._constant * eta - logs

    def _series(self, count):
        terms = [np.ones(self.shape)]
        for k in range(2, count + 1):
            terms.append(sum(part**k / ratio ** (k - 1) for part, ratio in self._parts))
        return np.stack(np.broadcast_arrays(*terms), axis=-1)


class TiedSpectralLaw(CurveLaw):
    """The law of attention whose values are its keys, mean one.

    `pi(mu, h)` or, with Gaussian output weights, that times `MP_{1/gamma_o}`: mu is the law of
    `phi(x) = (1 - c) x + (h c/gamma_k) x^2`, x free Poisson of rate `gamma_k/h`, and
    `zeta = h int s phi/(1 - s phi)`, `s = eta/(gamma_k + h c)`. With the roots x_1, x_2 of
    `s phi(x) = 1` and `M_i = int y/(x_i - y)` the integral is closed:
    `zeta = h M_1 M_2 (1 + g + M_1 + M_2 + (1-c) g/c)/(M_1 M_2 - g)`, `g = gamma_k/h`.
    Raises ValueError unless 0 < c <= 1 and all ratios are > 0. Source: gaussian_equivalence.T5.

    >>> law = TiedSpectralLaw(0.581976706869, 16.0, 16)
    >>> round(float(law.moments(2)[1]), 6)  # 1 + (2 + 2/e + 2/e^2)/h
    1.187902
    """

    def __init__(self, c, gamma_k, num_heads, gamma_o=math.inf):
        c, gamma_k, h = map(floats, (c, gamma_k, num_heads))
        for name, value in (("c", c), ("gamma_k", gamma_k), ("num_heads", h)):
            require_positive(name, value)
        if np.any(c > 1):
            raise ValueError(f"c={float(c.max())!r}: expected a linear fraction of at most 1")
        self._c, self._h, self._rate = c, h, gamma_k / h
        self._square = c / self._rate
        self._unit = gamma_k + h * c  # eta / s
        self._reach = np.minimum(h, gamma_k)
        top = (1 + np.sqrt(self._rate)) ** 2
        self._pole = self._unit / ((1 - c) * top + self._square * top**2)
        super().__init__((gamma_o,), c, gamma_k, h)

    def _roots(self, eta):
        """s, the roots of `s phi(x) = 1` and `int y/(x - y)` at both."""
        s = np.asarray(eta, dtype=complex) / self._unit
        linear = s * (1 - self._c)
        root = np.sqrt(linear**2 + 4 * s * self._square)
        root = np.where((linear * root.conj()).real < 0, -root, root)
        q = -(linear + root) / 2
        x = (-1 / q, q / (s * self._square))
        return s, x, [free_poisson_psi(one, self._rate) for one in x]

    def _zeta(self, eta):
        s, (x1, x2), (m1, m2) = self._roots(eta)
        g = self._rate
        above, below = 1 + g + m1 + m2 + (1 - self._c) / self._square, m1 * m2 - g
        zeta = self._h * m1 * m2 * above / below
        speed = 1 / (s * self._square * (x2 - x1))  # s dx_1/ds = -s dx_2/ds
        d1, d2 = (sign * speed * m**2 / (m**2 - g) for sign, m in ((1, m1), (-1, m2)))
        elasticity = d1 / m1 + d2 / m2 + (d1 + d2) / above - (d1 * m2 + m1 * d2) / below
        if np.isrealobj(eta):
            return zeta.real, elasticity.real
        return zeta, elasticity

    def _primitive(self, eta):
        _, _, psi = self._roots(eta)
        g = self._rate
        return self._h * sum(np.log(1 + m) + g * np.log(1 + m / g) - m for m in psi)

    def _series(self, count):
        powers = free_poisson_moments(self._rate, 2 * count)
        terms = []
        for k in range(1, count + 1):
            mean = sum(
                math.comb(k, j)
                * (1 - self._c) ** (k - j)
                * self._square**j
                * powers[..., k + j - 1]
                for j in range(k + 1)
            )
            terms.append(self._h * mean / self._unit**k)
        return np.stack([np.broadcast_to(t, self.shape) for t in terms], axis=-1)
