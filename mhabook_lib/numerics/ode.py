"""Ordinary differential equations for arrays of particles, batched, with a retraction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch
from scipy.integrate import solve_ivp

METHODS = ("rk4", "dop853")
RETRACTIONS = (None, "normalize")


def integrate(
    field: Callable[[torch.Tensor], torch.Tensor],
    x0: torch.Tensor,
    times: Sequence[float],
    method: str = "rk4",
    steps_per_interval: int = 1,
    retraction: str | None = None,
    rescale: Callable[[torch.Tensor], torch.Tensor] | None = None,
    observe: Callable[[torch.Tensor], torch.Tensor] | None = None,
    rtol: float = 1e-8,
):
    """Solve the autonomous equation `x' = field(x)`, `x(times[0]) = x0`.

    x0 (..., n, d) -> (len(times), ..., n, d). `method` is "rk4" (classical, with
    `steps_per_interval` equal steps between two entries of `times`) or "dop853" (SciPy's adaptive
    method of order 8 with tolerance `rtol` on the whole batch at once; steps on the CPU).
    `retraction="normalize"` puts tokens back on the unit sphere, after every RK4 step or on every
    adaptive output.

    `rescale(x) -> (...)`: a positive speed per batch entry. Then `times` is the rescaled time tau,
    `dx/dtau = field(x) / rescale(x)`, `dt/dtau = 1 / rescale(x)`, and the pair
    `(states, true times (len(times), ...))` is returned.

    `observe(x)`: a tensor, or a tuple of tensors, computed at each of `times`; the stacked
    observations replace the states, so that no trajectory is stored.

    Raises ValueError for an unknown method or retraction, times that do not increase, and states
    that become non-finite (a blow-up, or a step too large).

    >>> x = integrate(lambda x: -x, torch.ones(1, 1, dtype=torch.float64), [0, 1], "rk4", 100)
    >>> round(float(x[-1]), 8)
    0.36787944
    """
    times = _checked(times, method, steps_per_interval, retraction)
    retract = _normalize if retraction == "normalize" else None
    if rescale is not None:
        field, x0, retract, unpack = _rescaled(field, x0, retract, rescale)
    run = _rk4 if method == "rk4" else _dop853
    option = steps_per_interval if method == "rk4" else rtol
    collected = []
    for time, state in zip(times, run(field, x0, times, option, retract), strict=True):
        if not bool(torch.isfinite(state).all()):
            raise ValueError(
                f"the state is not finite at time {time:.6g}: expected a time before any blow-up "
                f"and a step that resolves the dynamics (steps_per_interval={steps_per_interval})"
            )
        if rescale is None:
            collected.append(state if observe is None else observe(state))
        else:
            x, true_time = unpack(state)
            collected.append((x if observe is None else observe(x), true_time))
    return _stack(collected)


def _checked(times, method, steps_per_interval, retraction) -> list[float]:
    if method not in METHODS:
        raise ValueError(f"method={method!r}: expected one of {METHODS}")
    if retraction not in RETRACTIONS:
        raise ValueError(f"retraction={retraction!r}: expected one of {RETRACTIONS}")
    if steps_per_interval < 1:
        raise ValueError(f"steps_per_interval={steps_per_interval}: expected an integer >= 1")
    times = [float(time) for time in times]
    if len(times) < 1 or not np.all(np.isfinite(times)) or np.any(np.diff(times) <= 0):
        raise ValueError(f"times={times}: expected finite, strictly increasing values")
    return times


def _normalize(x: torch.Tensor) -> torch.Tensor:
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def _rk4(field, x, times, steps, retract):
    yield x
    for start, stop in pairwise(times):
        h = (stop - start) / steps
        for _ in range(steps):
            k1 = field(x)
            k2 = field(x + (h / 2) * k1)
            k3 = field(x + (h / 2) * k2)
            k4 = field(x + h * k3)
            x = x + (h / 6) * (k1 + 2 * (k2 + k3) + k4)
            if retract is not None:
                x = retract(x)
        yield x


def _dop853(field, x0, times, rtol, retract):
    def flat_field(_, flat):
        x = torch.from_numpy(flat.copy()).to(x0).reshape(x0.shape)
        return field(x).detach().cpu().double().numpy().ravel()

    yield x0
    if len(times) > 1:
        start = x0.detach().cpu().double().numpy().ravel()
        solution = solve_ivp(
            flat_field, (times[0], times[-1]), start, "DOP853", times[1:], rtol=rtol, atol=rtol
        )
        if not solution.success:
            raise ValueError(f"the adaptive solver stopped: {solution.message}")
        for flat in solution.y.T:
            x = torch.from_numpy(flat.copy()).to(x0).reshape(x0.shape)
            yield x if retract is None else retract(x)


def _rescaled(field, x0, retract, rescale):
    """The problem in rescaled time, with the true time as one more coordinate per batch entry."""
    shape = x0.shape[-2:]

    def pack(x, time):
        return torch.cat([x.flatten(-2), time.unsqueeze(-1)], dim=-1)

    def unpack(state):
        return state[..., :-1].unflatten(-1, shape), state[..., -1]

    def packed_field(state):
        x, _ = unpack(state)
        slowness = 1 / rescale(x)
        return pack(field(x) * slowness[..., None, None], slowness)

    def packed_retract(state):
        x, time = unpack(state)
        return pack(retract(x), time)

    state0 = pack(x0, x0.new_zeros(x0.shape[:-2]))
    return packed_field, state0, packed_retract if retract else None, unpack


def _stack(collected):
    if isinstance(collected[0], tuple):
        return tuple(_stack(list(column)) for column in zip(*collected, strict=True))
    return torch.stack(collected)
