"""Clustering: closed forms, reductions and batching against the plain way.

Errors are the largest absolute (times: relative) differences from a reference of higher accuracy,
which is named at each task.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.integrate import solve_ivp

from mhabook_lib.attention import ScalarHeads
from mhabook_lib.equiangular import equiangular_time
from mhabook_lib.numerics.ode import integrate
from mhabook_lib.token_flow import (
    flow,
    orthogonal_heads,
    project_tangent,
    sample_sphere,
    velocity_field,
)

from .timing import largest_gaps, row

# The plain ways


def loop_velocity(x, matrices, beta):
    """Softmax velocity on the sphere (B, n, d): one head after the other, with d x d matrices.

    Scores and values are two products, as in any layer whose values are not known to be its scores.
    """
    v = torch.zeros_like(x)
    for m in matrices:
        scores = x @ m @ x.mT
        v = v + torch.softmax(beta * scores, dim=-1) @ (x @ m.mT)
    return project_tangent(x, v)


def extended_velocity(x, matrices, beta):
    """The same in extended precision, on NumPy's long doubles: the reference."""
    x, v = x.numpy().astype(np.longdouble), 0
    for m in matrices.numpy().astype(np.longdouble):
        moved = x @ m.T
        kernel = np.exp(beta * (x @ moved.swapaxes(-1, -2)))
        v = v + kernel / kernel.sum(-1, keepdims=True) @ moved
    v = v - (v * x).sum(-1, keepdims=True) * x
    return torch.from_numpy(v.astype(float))


def adaptive_times(betas, n, gamma1):
    """Times 0 -> gamma1 in flow S by one adaptive solve for each beta, with an event."""

    def rate(_, gamma, beta):
        drive = 1 / (np.exp(beta * (1 - gamma)) + n - 1)
        return 2 * drive * (1 - gamma) * (1 + (n - 1) * gamma)

    def reached(_, gamma, *args):
        return gamma[0] - gamma1

    reached.terminal = True
    times = []
    for beta in betas:
        solution = solve_ivp(
            rate, (0, 1e9), [0.0], events=reached, args=(beta,), rtol=1e-8, atol=1e-10
        )
        times.append(solution.t_events[0][0])
    return np.array(times)


def euler(x, field, time, steps):
    """Euler steps followed by normalisation."""
    for _ in range(steps):
        x = x + (time / steps) * field(x)
        x = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x


# The tasks


def clustering_time_curve() -> dict:
    """Reference: 512 quadrature nodes."""
    betas, n, gamma1 = np.linspace(0.1, 12, 50), 128, 0.9
    reference = equiangular_time(0.0, gamma1, [1.0], betas, n, "softmax", nodes=512)
    return row(
        "clustering",
        "clustering time against beta, flow S",
        "50 betas, n=128",
        "50 adaptive ODE solves (RK45, rtol 1e-8)",
        lambda: equiangular_time(0.0, gamma1, [1.0], betas, n, "softmax"),
        lambda: adaptive_times(betas, n, gamma1),
        lambda ours, other: (abs(ours / reference - 1).max(), abs(other / reference - 1).max()),
    )


def tokens_in_many_dimensions() -> dict:
    """Reference: ten times smaller steps."""
    rng = np.random.default_rng(1)
    x0 = sample_sphere((4, 32, 1024), rng)
    heads = ScalarHeads(torch.from_numpy(rng.uniform(0.5, 1.5, 8)))
    matrices = heads.dense(1024)
    times, steps = [0.0, 1.0], 50
    reference = flow(x0, heads, 1.0, times, steps_per_interval=10 * steps)[-1]

    def in_full_space():
        field = lambda x: loop_velocity(x, matrices, 1.0)  # noqa: E731
        return integrate(field, x0, times, "rk4", steps, "normalize")[-1]

    return row(
        "clustering",
        "scalar heads, d >> n: 50 RK4 steps after a QR reduction",
        "n=32, d=1024, H=8, 4 runs",
        "loop over heads in R^d",
        lambda: flow(x0, heads, 1.0, times, steps_per_interval=steps)[-1],
        in_full_space,
        largest_gaps(reference),
        repeats=3,
    )


def one_gram_matrix() -> dict:
    """Reference: extended precision."""
    rng = np.random.default_rng(2)
    x = sample_sphere((16, 64, 64), rng)
    heads = ScalarHeads(torch.from_numpy(rng.uniform(0.5, 1.5, 8)))
    matrices, field = heads.dense(64), velocity_field(x, heads, 1.0)
    return row(
        "clustering",
        "scalar heads: one Gram matrix for all",
        "n=64, d=64, H=8, 16 runs",
        "loop over heads",
        lambda: field(x),
        lambda: loop_velocity(x, matrices, 1.0),
        largest_gaps(extended_velocity(x, matrices, 1.0)),
    )


def blocks(d: int) -> dict:
    """Reference: extended precision."""
    rng = np.random.default_rng(3)
    heads = orthogonal_heads(torch.from_numpy(rng.uniform(0.5, 1.5, (8, d // 8))), rng, d)
    matrices, x = heads.dense(d), sample_sphere((1, 64, d), rng)
    field = velocity_field(x, heads, 1.0)
    return row(
        "clustering",
        "orthogonal heads: work in the blocks",
        f"n=64, d={d}, H=8",
        "loop over heads with d x d matrices",
        lambda: field(x),
        lambda: loop_velocity(x, matrices, 1.0),
        largest_gaps(extended_velocity(x, matrices, 1.0)),
    )


def many_runs() -> dict:
    """Reference: ten times smaller steps."""
    rng = np.random.default_rng(4)
    x0, heads = sample_sphere((256, 32, 3), rng), ScalarHeads(torch.ones(1))
    times = [0.0, 1.0]

    def simulate(x, steps=10):
        return flow(x, heads, 2.0, times, steps_per_interval=steps)[-1]

    return row(
        "clustering",
        "many runs in one batch, 10 RK4 steps",
        "256 runs, n=32, d=3",
        "loop over runs",
        lambda: simulate(x0),
        lambda: torch.stack([simulate(x) for x in x0]),
        largest_gaps(simulate(x0, 100)),
    )


def rk4_against_euler() -> dict:
    """As many RK4 steps as reach the error of Euler. Reference: DOP853, rtol 1e-12."""
    rng = np.random.default_rng(5)
    x0, heads, time = sample_sphere((32, 3), rng), ScalarHeads(torch.ones(1)), 10.0
    reference = flow(x0, heads, 4.0, [0, time], method="dop853", rtol=1e-12)[-1]
    field = velocity_field(x0, heads, 4.0)
    euler_steps = 16000

    def by_rk4(steps):
        return flow(x0, heads, 4.0, [0, time], steps_per_interval=steps)[-1]

    target = (euler(x0, field, time, euler_steps) - reference).abs().max()
    steps = next(k for k in range(10, 4000) if (by_rk4(k) - reference).abs().max() <= target)
    return row(
        "clustering",
        f"RK4 ({steps} steps) at the error of Euler",
        "n=32, d=3, beta=4, T=10",
        f"Euler, {euler_steps} steps",
        lambda: by_rk4(steps),
        lambda: euler(x0, field, time, euler_steps),
        largest_gaps(reference),
        repeats=3,
    )


def rows() -> list[dict]:
    """All comparisons of this chapter."""
    return [
        clustering_time_curve(),
        tokens_in_many_dimensions(),
        one_gram_matrix(),
        blocks(128),
        blocks(512),
        many_runs(),
        rk4_against_euler(),
    ]
