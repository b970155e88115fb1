"""The reduced flow of position-only attention."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mhabook_lib.attention_flow import (
    attention_flow,
    class_softmax,
    flow_velocity,
    group_target,
    position_target,
    teacher_target,
)

G = [2.89, 1.7, 1.0]


def numerical_gradient(target, logits, values, counts, gram):
    """Central differences of the loss, per head of a kind, in logits and values."""

    def loss(a, v):
        s = class_softmax(a, target.counts)
        return np.trace(target.loss_parts(target.residual(s, v, counts), gram))

    step, out = 1e-6, []
    for which, array in enumerate((logits, values)):
        gradient = np.zeros_like(array)
        for index in np.ndindex(array.shape):
            pair = []
            for sign in (1, -1):
                moved = [logits.copy(), values.copy()]
                moved[which][index] += sign * step
                pair.append(loss(*moved))
            gradient[index] = (pair[0] - pair[1]) / (2 * step)
        out.append(gradient)
    return out


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000))
def test_power_two_is_minus_the_gradient_of_the_loss(seed):
    rng = np.random.default_rng(seed)
    target = group_target(G, 9, [1, 2, 1])
    mixing = rng.standard_normal((3, 3))
    gram = mixing @ mixing.T
    a, v = rng.standard_normal((2, 4)), rng.standard_normal((2, 3))
    counts = np.array([1.0, 1.0])
    by_a, by_v = numerical_gradient(target, a, v, counts, gram)
    da, _ = flow_velocity(target, a, v, counts, power=2, gram=gram)
    # a class logit moves all its positions together
    assert np.allclose(da * target.counts, -by_a, atol=1e-6)
    _, dv = flow_velocity(target, a, v, counts, power=2)
    _, by_v = numerical_gradient(target, a, v, counts, None)
    assert np.allclose(dv, -by_v, atol=1e-6)


def test_power_one_is_a_replicator_equation():
    rng = np.random.default_rng(1)
    target = group_target(G, 5)
    a, v = rng.standard_normal((2, 4)), rng.standard_normal((2, 3))
    s = class_softmax(a, target.counts)
    da, _ = flow_velocity(target, a, v, [1, 1])
    ds = s * (da - ((s * da) @ target.counts)[:, None])
    force = v @ target.residual(s, v, [1, 1])
    wanted = s * (force - ((s * force) @ target.counts)[:, None])
    assert np.allclose(ds, wanted, atol=1e-14)


@pytest.mark.parametrize("power", [1, 2])
def test_classes_and_kinds_of_heads_are_exact(power):
    """Forty numbers a head and three heads, against four numbers and two kinds of heads."""
    sizes = [1, 2, 1]
    small = group_target(G, 12, sizes)
    rows = small.matrix[:, np.repeat(np.arange(4), [1, 2, 1, 8])]
    logits = np.zeros((2, 4))
    logits[1, 1] = 0.1
    times = np.linspace(0, 30, 7)
    reduced = attention_flow(small, times, logits, head_counts=[2, 1], power=power)
    wide = np.repeat(logits[[0, 0, 1]], [1, 2, 1, 8], axis=1)
    whole = attention_flow(position_target(rows), times, wide, power=power)
    assert np.allclose(whole.loss, reduced.loss, atol=1e-6)
    assert np.allclose(
        whole.attention[-1][[0, 2]][:, [0, 1, 3, 4]], reduced.attention[-1], atol=1e-5
    )


def test_equal_heads_rest_on_the_first_plateau():
    run = attention_flow(
        group_target(G, 8), [0.0, 100.0, 3000.0], np.zeros((1, 4)), head_counts=[3]
    )
    assert run.loss[-1] == pytest.approx(1.945, abs=1e-4)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([1, 2]))
def test_the_loss_never_rises_without_decay(seed, power):
    rng = np.random.default_rng(seed)
    target = group_target(G, 6)
    run = attention_flow(target, np.linspace(0, 20, 60), rng.standard_normal((2, 4)), power=power)
    assert np.all(np.diff(run.loss) <= 1e-9)


def test_attention_sums_to_one_over_positions():
    target = group_target(G, 10, [2, 3, 1])
    run = attention_flow(target, [0.0, 5.0], np.random.default_rng(0).standard_normal((2, 4)))
    assert np.allclose(run.attention @ target.counts, 1)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (([1.0, 2.0], 5), "expected decreasing"),
        (([1.0, -2.0], 5), "importances"),
        (([2.0, 1.0], 1), "groups alone need 2"),
        (([2.0, 1.0], 5, [1, 0]), "group_sizes"),
        (([2.0, 1.0], 5, [1]), "expected \\(2,\\)"),
    ],
)
def test_impossible_targets_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        group_target(*arguments)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"power": 3}, "power=3"),
        ({"logits0": np.zeros((1, 3))}, "logits0 of shape"),
        ({"values0": np.zeros((1, 2))}, "values0 of shape"),
        ({"gram": np.eye(2)}, "gram of shape"),
        ({"head_counts": [0]}, "head_counts"),
        ({"logits0": np.full((1, 4), np.nan)}, "logits0"),
        ({"times": [0.0]}, "times"),
        ({"times": [0.0, 1.0, 0.5]}, "times"),
    ],
)
def test_bad_input_is_named(options, message):
    arguments = {"times": [0.0, 1.0], "logits0": np.zeros((1, 4))} | options
    with pytest.raises(ValueError, match=message):
        attention_flow(group_target(G, 9), **arguments)


def test_a_target_must_be_a_finite_matrix():
    with pytest.raises(ValueError, match="expected \\(K, T\\)"):
        position_target([1.0, 2.0])
    with pytest.raises(ValueError, match="matrix"):
        position_target([[1.0, np.inf]])


def test_transition_maps_must_be_orthogonal():
    maps = np.zeros((2, 3, 3))
    maps[0, 0, 0], maps[1, 1, 1] = 2.0, 1.0
    target = teacher_target(maps, 5, [2, 1])
    assert np.array_equal(target.matrix, group_target([2.0, 1.0], 5, [2, 1]).matrix)
    maps[1, 0, 0] = 0.1
    with pytest.raises(ValueError, match="expected orthogonal"):
        teacher_target(maps, 5)
    with pytest.raises(ValueError, match="expected \\(K, d, d\\)"):
        teacher_target(maps[0], 5)
    with pytest.raises(ValueError, match="norms of the transition maps"):
        teacher_target(np.zeros((2, 3, 3)), 5)
