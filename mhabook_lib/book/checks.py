"""One comparison of a measured value with what it should be, and the same on a wrong object.

Every rule takes the measured value to `True` or `False`; the control is a value measured on a
deliberately wrong object, and the very same rule must reject it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

LONGEST_LIST = 8


def as_array(value: Any) -> np.ndarray:
    """Tensor, array, number, string or nested list as a NumPy array."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    return np.asarray(value)


def stable(value: Any, digits: int = 6) -> str:
    """Text of a number or array that is the same on every machine.

    `digits` significant digits, no negative zero, lists for arrays. Values that are nothing but
    rounding noise are not stable on any machine: do not print them.

    >>> stable(0.1 + 0.2), stable(-0.0), stable([1.0, 2.5e-7]), stable(7)
    ('0.3', '0', '[1, 2.5e-07]', '7')
    """
    array = as_array(value)
    if array.ndim:
        return "[" + ", ".join(stable(item, digits) for item in array) + "]"
    item = array.item()
    if isinstance(item, (bool, str, int)):
        return str(item)
    return f"{item + 0.0:.{digits}g}" if item else "0"


def plain(value: Any, worst: int | None = None) -> Any:
    """JSON form of a value; of a long array only its worst entry is kept."""
    array = as_array(value)
    if array.ndim and array.size > LONGEST_LIST:
        return array.flat[0 if worst is None else worst].item()
    return array.tolist()


def show(control: Any) -> str:
    """A control, or several named ones, with four digits."""
    if isinstance(control, dict):
        return ", ".join(f"{name} {stable(value, 4)}" for name, value in control.items())
    return stable(control, 4)


@dataclass(frozen=True)
class Rule:
    """When a measured value is accepted: `margin(value) >= 0` in every entry."""

    margin: Callable[[np.ndarray], np.ndarray]
    reference: Any
    tolerance: Any
    sign: str

    def accepts(self, value: np.ndarray) -> bool:
        return bool(np.all(self.margin(value) >= 0))

    def worst(self, value: np.ndarray) -> int:
        return int(np.argmin(self.margin(value)))


def agreement(reference: Any, rtol: float, atol: float) -> Rule:
    """|value - reference| <= atol + rtol |reference|, entry by entry."""
    target = as_array(reference)
    allowed = atol + rtol * np.abs(target)
    tolerance = rtol if rtol else atol
    return Rule(lambda v: allowed - np.abs(v - target), reference, tolerance, "=")


def equality(reference: Any) -> Rule:
    """Exactly equal: integers, booleans, words."""
    target = as_array(reference)

    def margin(value: np.ndarray) -> np.ndarray:
        if value.shape != target.shape:
            return np.array([-1])
        return np.where(value == target, 0, -1)

    return Rule(margin, reference, 0, "=")


def upper_bound(bound: Any) -> Rule:
    """value <= bound."""
    return Rule(lambda v: as_array(bound) - v, bound, 0.0, "<=")


def lower_bound(bound: Any) -> Rule:
    """value >= bound."""
    return Rule(lambda v: v - as_array(bound), bound, 0.0, ">=")


def interval(low: Any, high: Any) -> Rule:
    """low <= value <= high."""
    lo, hi = as_array(low), as_array(high)
    return Rule(
        lambda v: np.minimum(v - lo, hi - v), (lo + hi) / 2, (hi - lo).max().item() / 2, "within"
    )


def statistical(reference: Any, stderr: Any, sigmas: float) -> Rule:
    """|value - reference| <= sigmas standard errors."""
    allowed = sigmas * as_array(stderr)
    target = as_array(reference)
    return Rule(lambda v: allowed - np.abs(v - target), reference, float(np.max(allowed)), "=")


@dataclass(frozen=True)
class Check:
    """A finished check. `control_failed` is None when the check has no control of its own."""

    name: str
    sign: str
    measured: Any
    reference: Any
    tolerance: float
    passed: bool
    uncertainty: float | None = None
    control: Any = None
    control_failed: bool | None = None

    def line(self) -> str:
        """One line of plain text: what was measured, against what, and its control."""
        text = f"{self.name}: {stable(self.measured, 4)}"
        text += f" (wanted {self.sign} {stable(self.reference, 4)}"
        if self.tolerance:
            text += f", tolerance {self.tolerance:.2g}"
        text += ")" if self.passed else ") FAILED"
        if self.control_failed is not None:
            outcome = "rejected" if self.control_failed else "NOT REJECTED"
            text += f"; control {show(self.control)} {outcome}"
        return text


def perform(name: str, rule: Rule, measured: Any, control: Any, uncertainty: Any = None) -> Check:
    """Apply the rule to the measured value and, where given, to each control.

    `control` is one value or a dictionary of named values; all of them must be rejected.
    Raises ValueError when either is not finite: a NaN would fail every rule, and a control
    that fails by being undefined controls nothing.
    """
    value = finite(name, "measured value", measured)
    named = control if isinstance(control, dict) else {"": control}
    wrong = {k: finite(name, "control", v) for k, v in named.items() if v is not None}
    shown = {k: plain(v, rule.worst(v)) for k, v in wrong.items()}
    rejected = not any(rule.accepts(v) for v in wrong.values()) if wrong else None
    worst = rule.worst(value)
    reference = as_array(rule.reference)
    reference = reference if reference.ndim else reference.item()
    return Check(
        name=name,
        sign=rule.sign,
        measured=plain(measured, worst),
        reference=plain(reference, worst),
        tolerance=rule.tolerance,
        passed=rule.accepts(value),
        uncertainty=None if uncertainty is None else float(np.max(as_array(uncertainty))),
        control=shown.get("", shown or None),
        control_failed=rejected,
    )


def finite(name: str, what: str, value: Any) -> np.ndarray:
    """The value as an array; ValueError when it is empty or has a NaN or an infinity."""
    array = as_array(value)
    if array.size == 0:
        raise ValueError(f"check {name!r}: the {what} is empty")
    if array.dtype.kind in "fc" and not np.all(np.isfinite(array)):
        raise ValueError(f"check {name!r}: the {what} is not finite, got {array.tolist()}")
    return array
