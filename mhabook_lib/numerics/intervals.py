"""Interval arithmetic: numbers in, guaranteed bounds out."""

from __future__ import annotations

import math

from mpmath import iv

Interval = tuple[float, float]


def exact(value):
    """An interval that contains the decimal number that `value` prints as.

    >>> bool(exact(0.1) * 10 == 1), 1 in exact(0.1) * 10
    (False, True)
    """
    return iv.mpf(repr(float(value)))


def ends(interval) -> Interval:
    """The two ends as floats, rounded outwards.

    >>> low, high = ends(iv.sqrt(iv.mpf(2)))
    >>> low < 2**0.5 < high
    True
    """
    return (
        math.nextafter(float(interval.a), -math.inf),
        math.nextafter(float(interval.b), math.inf),
    )
