"""counterexamples: every certified interval contains what the float arrays give, and its sign."""

import numpy as np
import pytest
import torch

from mhabook_lib import counterexamples as cx
from mhabook_lib.attention import ScalarHeads, attention_entropy, attention_scores
from mhabook_lib.critical import scalar_head_optimum
from mhabook_lib.energy import attention_entropy_rate, energy_rate
from mhabook_lib.numerics.roots import bisect
from mhabook_lib.token_flow import attention_velocity, flow

ONE = ScalarHeads(torch.ones(1, dtype=torch.float64))


def assert_certifies(interval, value, printed, digits=8, rounding=1e-12):
    """`value` comes from float64 arrays, `printed` is rounded or cut at `digits` decimals."""
    low, high = interval
    assert low <= high and high - low < 1e-9
    assert low * high > 0  # the sign is proved
    assert abs(value - (low + high) / 2) < rounding
    assert abs((low + high) / 2 - printed) < 10.0**-digits


def rates(x, heads, beta, normalization):
    return energy_rate(x, attention_velocity(x, heads, beta, normalization), heads, beta)


def test_one_token():
    x, heads = cx.one_token(1.2, 1.0, 0.9)
    first, second = rates(x, heads, 2.0, "unnormalized")
    assert_certifies(cx.one_token_head_rate(), float(first), -0.44470044)
    assert abs(float(second) - 1.47010400) < 5.1e-9
    total = float(rates(x, heads, 2.0, "softmax").sum())
    assert_certifies(cx.one_token_softmax_rate(), total, -0.03419945)
    batch, _ = cx.one_token(torch.linspace(0, 1, 5), 1.0, 0.9)
    assert batch.shape == (5, 1, 2)


def test_five_tokens():
    x, heads = cx.five_tokens()
    u = rates(x, heads, cx.FIVE_BETA, "unnormalized")
    intervals = cx.five_token_rates("unnormalized")
    # Kernels reach e^12 and multiply velocities of that size: float64 keeps 1e-16 e^24 of them.
    rounding = 1e-16 * np.exp(24)
    assert_certifies(intervals[0], float(u[0]), -0.02187858, rounding=rounding)
    assert_certifies(intervals[1], float(u[1]), 4.86514970, rounding=rounding)
    assert_certifies(intervals[2], float(u.sum()), 4.84327112, rounding=rounding)
    s = rates(x, heads, cx.FIVE_BETA, "softmax")
    # Softmax velocities are of order one: one factor e^12 less.
    rounding = 1e-16 * np.exp(12)
    interval = cx.five_token_rates("softmax")[2]
    assert_certifies(interval, float(s.sum()), -0.01619680, rounding=rounding)
    with pytest.raises(ValueError, match="normalization='relu'"):
        cx.five_token_rates("relu")


def test_rectangle_entropy():
    x = cx.rectangle_tokens([0.2, 0.6])
    for beta in (0.5, 1.0):
        rows = attention_entropy(attention_scores(x, ONE), beta)[:, 0]
        closed = cx.rectangle_entropy([0.2, 0.6], beta)
        torch.testing.assert_close(rows, closed[:, None].expand(2, 4), rtol=1e-13, atol=0)
    assert abs(float(cx.rectangle_entropy(0.6, 1.0)) - 1.15049850) < 5.1e-9
    for normalization, printed in (("softmax", -0.01895301), ("unnormalized", -0.02472850)):
        v = attention_velocity(x, ONE, 1.0, normalization)
        rate = attention_entropy_rate(x, v, ONE, 1.0)[1, 0]
        torch.testing.assert_close(rate, rate[0].expand(4))
        interval = cx.rectangle_entropy_rate(0.6, 1.0, normalization)
        assert_certifies(interval, float(rate[0]), printed)
    with pytest.raises(ValueError, match="normalization='relu'"):
        cx.rectangle_entropy_rate(normalization="relu")


def test_rectangle_entropy_change():
    for beta, drop in ((0.5, 0.05034434), (1.0, 0.10592518), (1.5, 0.06609098)):
        ends = cx.rectangle_entropy(torch.tensor([0.0, np.pi / 4], dtype=torch.float64), beta)
        assert_certifies(cx.rectangle_entropy_change(beta), float(ends[0] - ends[1]), -drop)
    flip = bisect(
        lambda beta: np.asarray(
            cx.rectangle_entropy(0.0, beta) - cx.rectangle_entropy(np.pi / 4, beta)
        ),
        1.0,
        3.0,
    )
    assert abs(float(flip) - 1.80303701) < 5.1e-9
    assert cx.rectangle_entropy_change(1.81)[0] > 0


def test_a_rectangle_stays_one():
    x = flow(cx.rectangle_tokens(0.6), ONE, 1.0, [0, 2], steps_per_interval=100)[-1]
    a = float(torch.atan2(x[0, 1], x[0, 0]))
    torch.testing.assert_close(x, cx.rectangle_tokens(a), rtol=0, atol=1e-12)
    assert 0 < a < 0.6


def test_two_antipodal_clusters_beat_one():
    low, high = cx.bipolar_excess()
    best = float(scalar_head_optimum([1, 1, 1, -2], 1.0).max_energy)
    one = (3 * np.e + np.exp(-2)) / 2
    assert_certifies((low, high), best - one, 4.1957 - 4.1451, digits=4)
    assert abs(best - 4.1957) < 5.1e-5 and abs(one - 4.1451) < 5.1e-5
    assert cx.bipolar_excess(beta=0.9)[1] < 0
