"""Laws on [0, inf) that are explicit on one curve: all that follows from the curve alone.

A law has mean one and is given by a curve `zeta(eta)` and a list of factors a:

    z = prod_a (1 + zeta/a) / eta,    int x/(z - x) dnu(x) = zeta.

Negative eta gives `lam = -z` and the degrees of freedom `w = -zeta`; positive eta below the edge
gives z above the bulk; eta in the lower half-plane gives z in the upper. With
`K(eta) = int_0^eta zeta/eta` the logarithmic potential is

    int log(z - x) dnu(x) = log z + sum_a [zeta - a log(1 + zeta/a)] - K(eta),

so that density and distribution function need one complex root a point and no quadrature.
NumPy arrays in and out; arguments broadcast against the parameters of the law.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import NamedTuple

import numpy as np

from .numerics.laplace import talbot
from .numerics.quadrature import gauss_legendre
from .numerics.roots import bisect, bracketed_newton
from .numerics.series import lagrange_inverse, multiply
from .validation import require_finite, require_positive

SETTLED = 1e-9  # largest |log z(eta) - log z| that counts as solved
ROUNDING = 1e-15
LOWERING = 0.55  # factor of Im z from one stage of the continuation to the next
NEAR_AXIS = 1e-13  # Im z / x at which a real x > 0 is evaluated
PINNED = 1e-10  # |1 + zeta/a| below which all that is left of the law is its atom
DEEP, DEEPEST = 1e-12, 1e-24  # x / edge: where a bulk is still looked for, and followed to
OFF = -1e-150  # imaginary part off the bulk: nothing but its sign


class CurvePoint(NamedTuple):
    """z, zeta, and the derivatives of log zeta in log eta and of log(z eta) in log zeta."""

    z: np.ndarray
    zeta: np.ndarray
    elasticity: np.ndarray
    order: np.ndarray


class Outlier(NamedTuple):
    """Where a rank-one spike sends the top eigenvalue, and its squared overlap with the spike."""

    value: np.ndarray
    overlap: np.ndarray
    separated: np.ndarray


class CurveLaw:
    """What the families share. A family gives the curve (`_zeta`, `_primitive`, `_series`), its
    first singularity `_pole` on the positive axis and `_reach`, the limit of -zeta at -infinity."""

    def __init__(self, factors, *parameters):
        for factor in factors:
            if np.any(np.isnan(factor)) or np.any(np.asarray(factor) <= 0):
                raise ValueError(f"factors={factors}: expected ratios > 0 (inf: factor absent)")
        self._inverse = [1 / np.asarray(a, dtype=float) for a in (1.0, *factors)]
        self.shape = np.broadcast_shapes(*map(np.shape, (*self._inverse, *parameters)))
        self._smallest = np.minimum.reduce(np.broadcast_arrays(*map(np.asarray, (1.0, *factors))))

    # The curve

    def curve(self, eta) -> CurvePoint:
        """The point of the curve at real or complex eta != 0."""
        eta = np.asarray(eta)
        zeta, elasticity = self._zeta(eta)
        product, order = 1.0, 0.0
        for inverse in self._inverse:
            share = zeta * inverse
            product = product * (1 + share)
            order = order + share / (1 + share)
        return CurvePoint(product / eta, zeta, elasticity, order)

    def _curve_at(self, lam):
        """The point at real z = -lam < 0: Newton in log(-eta) between two bounds."""
        lam = np.asarray(lam, dtype=float)
        require_positive("lam", lam)
        lam = np.broadcast_to(lam, np.broadcast_shapes(lam.shape, self.shape))

        def excess(u):
            with np.errstate(all="ignore"):
                point = self.curve(-np.exp(u))
                inside = -point.zeta < self._smallest
                value = np.where(inside, np.log(lam) - np.log(-point.z), np.inf)
                return value, 1 - point.elasticity * point.order

        low = np.minimum(self._smallest / (2 * len(self._inverse)), 0.5 / lam)
        return self.curve(-np.exp(bracketed_newton(excess, np.log(low), -np.log(lam))))

    def _eta(self, z):
        """eta at complex z, Im z > 0, continued from high above where eta = 1/z."""
        z = np.broadcast_to(z, np.broadcast_shapes(np.shape(z), self.shape))
        height = np.maximum(z.imag, 8 * self.edge())
        stages = math.ceil(np.log(np.max(height / z.imag)) / -math.log(LOWERING))
        target = z.real + 1j * height
        u = -np.log(target)
        for stage in range(stages + 1):
            last = stage == stages
            target = z.real + 1j * height * (z.imag / height) ** (stage / max(stages, 1))
            target = z if last else target
            u = self._newton(u, target, 40 if last else 8 if stage == 0 else 3)
        point = self.curve(np.exp(u))
        allowed = SETTLED * np.maximum(1, np.abs(1 - point.elasticity * point.order))
        allowed = allowed + ROUNDING * np.abs(point.order)  # zeta itself is rounded
        residual = np.abs(np.log(point.z / z))
        settled = (residual <= allowed) | self._pinned(point.zeta)
        if not np.all(settled):
            raise ValueError(
                f"the curve was not met at z={z[~settled][0]:.4g}: "
                f"residual {residual[~settled].max():.1e}, expected below {SETTLED:.0e}"
            )
        return np.exp(u)

    def _newton(self, u, z, steps):
        for _ in range(steps):
            point = self.curve(np.exp(u))
            step = np.log(point.z / z) / (1 - point.elasticity * point.order)
            size = np.abs(step)
            u = u + step / np.maximum(1, size)
            if size.max() < 1e-14:
                break
        return u

    def _above(self, x):
        """zeta and eta just above real x > 0; their imaginary parts are `OFF` off the bulk."""
        eta = self._eta(x * (1 + 1j * NEAR_AXIS))
        point = self.curve(eta)
        slope = point.zeta * point.elasticity / (1 - point.elasticity * point.order)
        in_bulk = -point.zeta.imag > 2 * NEAR_AXIS * np.abs(slope) + ROUNDING
        return (np.where(in_bulk, v, v.real + 1j * OFF) for v in (point.zeta, eta))

    def _pinned(self, zeta):
        """Whether zeta is at its limit at z = 0, to rounding: what is left is the atom."""
        return np.logical_or.reduce([np.abs(1 + zeta * i) < PINNED for i in self._inverse])

    @cached_property
    def _floor(self):
        """No bulk begins below this x > 0, or none that double precision resolves."""
        zeta, _ = self._above(DEEP * self.edge())
        return np.where(zeta.imag < OFF, DEEPEST, DEEP) * self.edge()

    # Functions of lam

    def dof(self, lam) -> np.ndarray:
        """Effective degrees of freedom a token, `w(lam) = int x/(x + lam) dnu`, lam > 0."""
        return -self._curve_at(lam).zeta

    def dof_derivative(self, lam) -> np.ndarray:
        """`w'(lam) = -(w/lam) el/(1 - el Sg)` with `el`, `Sg` the two derivatives of the curve."""
        point = self._curve_at(lam)
        return point.zeta / lam * point.elasticity / (1 - point.elasticity * point.order)

    # Functions of x

    def density(self, x) -> np.ndarray:
        """Density of the continuous part at x > 0; zero off the bulk.

        Raises ValueError for x <= 0, and below 1e-24 of the edge if the bulk reaches down to there.
        """
        x = on_half_line(x, strict=True)
        lowest = DEEPEST * self.edge()
        if np.any((x < lowest) & (self._floor <= lowest)):
            raise ValueError(f"x={float(x.min())!r}: expected values >= 1e-24 of the upper edge")
        zeta, _ = self._above(np.maximum(x, self._floor))
        return np.where(zeta.imag < OFF, -zeta.imag / (math.pi * x), 0.0)

    def cdf(self, x) -> np.ndarray:
        """`nu([0, x])` for x >= 0; at 0 it is the atom. Absolute error below 1e-8.

        Raises ValueError for x < 0.
        """
        x = on_half_line(x)
        zeta, eta = self._above(np.maximum(x, self._floor))
        phase = -self._primitive(eta).imag
        for inverse in self._inverse:
            width = 1 / np.where(inverse == 0, 1.0, inverse)
            bend = zeta.imag - width * np.angle(1 + zeta * inverse)
            phase = phase + np.where(inverse == 0, 0.0, bend)
        at_atom = (x == 0) | self._pinned(zeta)
        return np.where(at_atom, self.atom(), np.clip(1 - phase / math.pi, self.atom(), 1.0))

    def atom(self) -> np.ndarray:
        """Mass at zero."""
        return 1 - np.minimum(self._smallest, self._reach)

    def edge(self) -> np.ndarray:
        """Upper edge of the bulk, where `el Sg = 1`."""
        return self.curve(self._edge_eta).z

    @cached_property
    def _edge_eta(self):
        with np.errstate(divide="ignore"):
            caps = [(1 + 1e-9) / np.sqrt(inverse) for inverse in self._inverse[1:]]
        high = np.minimum.reduce(np.broadcast_arrays(self._pole * (1 - 1e-15), *caps))

        def slope(u):
            point = self.curve(np.exp(u))
            return point.elasticity * point.order - 1

        high = np.broadcast_to(np.log(high), self.shape)
        return np.exp(bisect(slope, high - 45, high))

    def moments(self, count: int) -> np.ndarray:
        """Moments 1, ..., count on a new last axis, exact (series inversion)."""
        zeta = np.concatenate([np.zeros((*self.shape, 1)), self._series(count)], axis=-1)
        growth = np.zeros((*self.shape, count))
        growth[..., 0] = 1.0
        for inverse in self._inverse:
            factor = zeta[..., :count] * np.asarray(inverse)[..., None]
            factor[..., 0] += 1
            growth = multiply(growth, factor)
        return lagrange_inverse(zeta, growth)

    def stop_loss(self, level, nodes: int = 200) -> np.ndarray:
        """`int (x - level)_+ dnu = int_level^edge (1 - F)`, level >= 0, by Gauss-Legendre nodes."""
        level = on_half_line(level)
        level = np.broadcast_to(level, np.broadcast_shapes(level.shape, self.shape))
        grid, weights = (rule.reshape(-1, *[1] * level.ndim) for rule in gauss_legendre(nodes))
        gap = np.maximum(self.edge() - level, 0.0)
        tail = 1 - self.cdf(np.maximum(self.edge() - gap * grid**2, 0.0))
        return (2 * gap * grid * weights * tail).sum(0)

    def outlier(self, s2) -> Outlier:
        """Effect of a rank-one spike of squared size s2 added to the mean-one matrix.

        `eta = 1/s2`; value `z(eta)`, overlap `(1 + zeta)(1 - el Sg)`, and whether `eta` lies below
        the edge point, so that the outlier separates from the bulk. Value and overlap are those
        of the edge, and 0, where it does not. Source: gaussian_equivalence.X3, X4.
        """
        require_positive("s2", s2)
        edge_eta = self._edge_eta
        eta = 1 / np.asarray(s2, dtype=float)
        separated = eta < edge_eta
        point = self.curve(np.minimum(eta, edge_eta))
        overlap = (1 + point.zeta) * (1 - point.elasticity * point.order)
        return Outlier(point.z, np.where(separated, overlap, 0.0), separated)

    # Learning

    def training_loss(self, t) -> np.ndarray:
        """`int e^{-2tx} dnu`, t > 0, by Talbot inversion of `(1 - w(s/2))/s`.

        Source: gaussian_equivalence.P4.
        """
        return talbot(lambda s: (1 + self._zeta_off_axis(-s / 2)) / s, t)

    def _zeta_off_axis(self, z):
        """zeta at complex z, Im z >= 0, on the first (real, negative) node and above."""
        upper = np.where(z.imag > 0, z, np.conj(z))
        real = upper.imag == 0
        zeta = self.curve(self._eta(np.where(real, 1j, upper))).zeta
        zeta = np.where(z.imag > 0, zeta, np.conj(zeta))
        return np.where(real, self._curve_at(np.where(real, -upper.real, 1.0)).zeta, zeta)

    def arrival_time(self, level) -> np.ndarray:
        """The time t at which the training loss falls to `level`.

        Raises ValueError unless atom < level < 1: below the atom there is no arrival.
        Source: gaussian_equivalence.F3a.
        """
        level, atom = np.asarray(level, dtype=float), self.atom()
        if np.any((level <= atom) | (level >= 1)):
            raise ValueError(
                f"level={level.tolist()}: expected values between the mass at zero "
                f"({float(atom.max()):.4g}) and 1; the loss never falls to that mass"
            )
        shape = np.broadcast_shapes(level.shape, self.shape)
        low = np.broadcast_to(np.log(-np.log(level) / 2), shape)  # e^{-2t} <= loss

        def loss_and_slope(s):
            zeta = self._zeta_off_axis(-s[:, 0] / 2)
            return np.stack([(1 + zeta) / s[:, 0], zeta], axis=1)

        def excess(u):
            t = np.exp(u)
            loss, slope = talbot(loss_and_slope, np.stack([t, t]))
            return np.log(level / loss), -t * slope / loss

        high = low + 1.0
        while np.any(unreached := excess(high)[0] < 0):
            low, high = np.where(unreached, high, low), np.where(unreached, high + 1.0, high)
        return np.exp(bracketed_newton(excess, low - 1e-9, high, 1e-12))


def floats(value) -> np.ndarray:
    return np.asarray(value, dtype=float)


def on_half_line(x, strict: bool = False) -> np.ndarray:
    x = floats(x)
    require_finite("x", x)
    if np.any(x <= 0 if strict else x < 0):
        wanted = "> 0" if strict else ">= 0"
        raise ValueError(f"x={float(x.min())!r}: outside the half-line, expected values {wanted}")
    return x
