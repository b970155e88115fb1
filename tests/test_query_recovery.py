"""Learners of black boxes: what they recover, what they ask, what they refuse."""

import mpmath as mp
import numpy as np
import pytest

from mhabook_lib.adaptive_probing import (
    dual_query_count,
    learn_by_continuation,
    learn_by_dual_probes,
)
from mhabook_lib.cold_probing import Circle, learn_attention_cold
from mhabook_lib.distillation import distil, learn_single_head
from mhabook_lib.exact_recovery import exact_recovery
from mhabook_lib.query_oracle import (
    QueryHeads,
    QueryOracle,
    RecoveryError,
    probe_outputs,
    random_query_heads,
    recovery_error,
)
from mhabook_lib.query_recovery import (
    DESIGNS,
    learn_attention,
    num_queries,
    probe_system,
    query_plan,
)
from mhabook_lib.rational_probes import (
    condition,
    loewner_ranks,
    pair_jacobian,
    probe_counts,
    separate_heads,
)
from mhabook_lib.transformer_recovery import (
    OddOracle,
    ReluTransformer,
    learn_transformer,
    pooled_tokens,
)


def rng(*key):
    return np.random.default_rng(key)


def model(num_heads, dim, seed=0, scale=1.0):
    return random_query_heads(num_heads, dim, rng(seed, num_heads, dim), scale)


# One pair


def test_balanced_counts():
    assert probe_counts(6, 7).tolist() == [[1, 6], [1, 3], [2, 3], [3, 2], [3, 1], [6, 1]]
    assert probe_counts(5, 6).tolist() == [[1, 5], [1, 2], [1, 1], [2, 1], [5, 1]]
    assert probe_counts(3, 4, "integer").tolist() == [[1, 1], [2, 1], [3, 1]]
    with pytest.raises(ValueError, match="only 1 fractions"):
        probe_counts(2, 2)
    with pytest.raises(ValueError, match="design='odd'"):
        probe_counts(2, 5, "odd")


@pytest.mark.parametrize("free_limit", [False, True])
def test_scores_come_from_poles_whatever_their_order(free_limit):
    s, g = np.array([[2.0, -1.0, 0.0]]), np.array([[1.0, -2.0, 0.5]])
    counts = probe_counts(5, 6) if free_limit else probe_counts(6, 7)
    t = counts[:, 0] / counts.sum(1)
    if free_limit:
        t = np.append(t, 1.0)
    r = (pair_jacobian(t, s, g)[..., 3:] @ g[..., None])[..., 0]
    found = separate_heads(t, r, 3)
    order = np.argsort(found.s[0])
    assert found.ok.all()
    assert np.allclose(found.s[0][order], [-1, 0, 2], atol=1e-8)
    assert np.allclose(found.g[0][order], [-2, 0.5, 1], atol=1e-8)


def test_answers_that_are_no_heads_are_marked():
    counts = probe_counts(4, 5)
    t = counts[:, 0] / counts.sum(1)
    noise = rng(3).standard_normal((20, 4))
    assert not separate_heads(t, noise, 2).ok.all()
    with pytest.raises(ValueError, match="even number of at least 6"):
        separate_heads(t, noise, 3)


def test_jacobian_and_rank():
    t = np.linspace(0.1, 0.9, 6)
    s, g = rng(1).standard_normal((2, 1, 2))
    jacobian, step = pair_jacobian(t, s, g)[0], 1e-6

    def r(flat):
        return (pair_jacobian(t, flat[None, :2], flat[None, 2:])[0, :, 2:]) @ flat[2:]

    flat = np.concatenate([s[0], g[0]])
    for k in range(4):
        bump = step * np.eye(4)[k]
        assert np.allclose(
            (r(flat + bump) - r(flat - bump)) / (2 * step), jacobian[:, k], atol=1e-8
        )
    assert loewner_ranks(t, (r(flat) / t)[None], 1e-10)[0] == 2
    assert condition(t, s, g)[0] > 1


# All heads


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("num_heads, dim", [(1, 1), (1, 3), (2, 2), (3, 3)])
def test_recovery_and_counts(design, num_heads, dim):
    truth = model(num_heads, dim, seed=5)
    box = QueryOracle(truth)
    found = learn_attention(box, num_heads, design=design, rng=rng(6))
    assert recovery_error(found.heads, truth) < 1e-8
    assert box.num_queries == num_queries(num_heads, dim, design)
    assert box.max_length == 2 * num_heads + (design in ("stated", "balanced"))


def test_equal_values_and_zero_scores_are_no_obstacle():
    truth = model(2, 3, seed=1)
    same = QueryHeads(truth.w, truth.v[[0, 0]])
    assert recovery_error(learn_attention(QueryOracle(same), 2, rng=rng(2)).heads, same) < 1e-8
    plain = QueryHeads(np.stack([truth.w[0], np.zeros((3, 3))]), truth.v)
    found = learn_attention(QueryOracle(plain), 2, rng=rng(3)).heads
    x = rng(4).standard_normal((3, 3))
    ones = np.array([[1.0, 1.0]])
    assert np.allclose(
        probe_outputs(found, x, x, ones), probe_outputs(plain, x, x, ones), atol=1e-9
    )


def test_number_of_heads_from_a_bound():
    truth = model(2, 3, seed=7)
    found = learn_attention(QueryOracle(truth), max_heads=4, design="stated", rng=rng(8))
    assert found.report["num_heads"] == 2 and recovery_error(found.heads, truth) < 1e-8


@pytest.mark.parametrize("max_heads", [2, 3])
@pytest.mark.parametrize("design", DESIGNS)
def test_every_design_reads_the_number_of_heads_a_zero_score_matrix_included(design, max_heads):
    truth = model(2, 3, seed=1)
    plain = QueryHeads(np.stack([truth.w[0], np.zeros((3, 3))]), truth.v)
    box = QueryOracle(plain)
    found = learn_attention(box, max_heads=max_heads, design=design, rng=rng(3))
    assert found.report["num_heads"] == 2
    assert box.num_queries == num_queries(max_heads, 3, design)


def test_system_is_the_derivative_of_the_answers():
    heads = model(2, 3)
    u, b = rng(9).standard_normal((2, 4, 3))
    counts, singles = probe_counts(3, 4), rng(10).standard_normal((2, 3))
    zero = (np.zeros((4, 3)), singles, np.zeros(2))
    jacobian = probe_system(heads, u, b, counts, *zero)[1]
    flat, step = np.concatenate([heads.w.ravel(), heads.v.ravel()]), 1e-6
    for k in (0, 7, 17, 18, 23):
        ends = []
        for sign in (1, -1):
            moved = flat.copy()
            moved[k] += sign * step
            moved = QueryHeads(moved[:18].reshape(2, 3, 3), moved[18:].reshape(2, 3))
            ends.append(probe_system(moved, u, b, counts, *zero)[0])
        assert np.allclose((ends[0] - ends[1]) / (2 * step), jacobian[:, k], atol=1e-7)


def test_the_plan_is_a_spanning_tree():
    plan = query_plan(np.eye(4), np.eye(4))
    assert len(plan.u) == 2 * 16 - 1
    assert len(query_plan(np.eye(4), np.eye(4), distinct=True).u) == 16 + 3


@pytest.mark.parametrize("digits", [40, 80])
def test_exact_arithmetic_loses_a_constant_number_of_digits(digits):
    error, asked, longest, count = exact_recovery(model(2, 2, scale=0.7), digits, rng(11))
    assert mp.log10(error) < 20 - digits
    assert (asked, longest, count) == (num_queries(2, 2), 5, 2)


def test_exact_arithmetic_finds_the_canonical_number_of_heads():
    base = model(2, 2, scale=0.7)
    raw = QueryHeads(base.w[[0, 0, 1]], np.round(base.v[[0, 1, 1]] * 2**20) / 2**20)
    error, asked, _, count = exact_recovery(raw, 80, rng(12), max_heads=3)
    assert count == 2 and asked == num_queries(3, 2) and mp.log10(error) < -50


# Refusals


class Broken(QueryOracle):
    def probe(self, u, b, counts):
        answers = super().probe(u, b, counts)
        answers[0, 0] = np.nan
        return answers


class Short(QueryOracle):
    def probe(self, u, b, counts):
        return super().probe(u, b, counts)[:-1]


def refusals():
    three, twins = model(3, 3), model(2, 3)
    twins = QueryHeads(twins.w[[0, 0]], twins.v)
    silent = model(2, 3)
    silent = QueryHeads(silent.w, silent.v * [[1.0], [0.0]])
    loud = QueryOracle(three, noise=0.3, rng=rng(13))
    return {
        "too few heads assumed": (QueryOracle(three), 2),
        "equal score matrices": (QueryOracle(twins), 2),
        "a head without value": (QueryOracle(silent), 2),
        "NaN": (Broken(three), 3),
        "wrong number of answers": (Short(three), 3),
        "noise that hides the heads": (loud, 3),
        "more heads than double precision separates": (QueryOracle(model(9, 3)), 9),
    }


@pytest.mark.parametrize("case", refusals())
def test_nothing_is_pretended(case):
    box, num_heads = refusals()[case]
    with pytest.raises(RecoveryError):
        learn_attention(box, num_heads, rng=rng(14))


@pytest.mark.parametrize("box", [Broken, Short])
@pytest.mark.parametrize(
    "learn", [learn_attention_cold, learn_by_continuation, learn_by_dual_probes]
)
def test_every_learner_hears_what_is_wrong_with_the_answers(learn, box):
    with pytest.raises(RecoveryError, match=r"the box gave (an answer|answers)"):
        learn(box(model(2, 3)), 2, rng=rng(31))


def test_a_bound_below_the_truth_is_refused():
    with pytest.raises(RecoveryError):
        learn_attention(QueryOracle(model(3, 3)), max_heads=2, design="stated", rng=rng(15))


def test_scores_that_nearly_coincide_without_links_are_refused():
    source = rng(99, 5, 7)
    truth = random_query_heads(5, 4, source)
    with pytest.raises(RecoveryError, match="nearly coincide"):
        learn_attention(QueryOracle(truth), 5, design="distinct", rng=source)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_heads": 2, "design": "odd"}, "design='odd'"),
        ({"num_heads": 2, "max_heads": 3}, "exactly one"),
        ({}, "exactly one"),
        ({"num_heads": 0}, "num_heads=0"),
    ],
)
def test_impossible_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        learn_attention(QueryOracle(model(2, 2)), rng=rng(0), **options)


# Cold, dual, by continuation


@pytest.mark.parametrize("num_heads, dim", [(1, 2), (2, 3), (6, 4), (12, 4)])
def test_cold_probing(num_heads, dim):
    truth = model(num_heads, dim, seed=2)
    box = QueryOracle(truth, literal=True)
    found = learn_attention_cold(box, num_heads, rng=rng(16, num_heads))
    assert recovery_error(found.heads, truth) < 1e-10 and box.max_length == 4


def test_a_half_circle_has_one_step_for_each_head():
    circle = Circle(QueryOracle(model(5, 4)), 5, 2e4, rng(17))
    assert len(circle.plateaus()) == 6


def test_cold_probing_refuses():
    pair = model(2, 3)
    mirrored = QueryHeads(np.stack([pair.w[0], -pair.w[0]]), pair.v)
    with pytest.raises(RecoveryError, match="no model after 2 circles"):
        learn_attention_cold(QueryOracle(mirrored), 2, rng=rng(18), redraws=1)
    with pytest.raises(RecoveryError):
        learn_attention_cold(QueryOracle(pair), 3, rng=rng(18), redraws=0)
    with pytest.raises(ValueError, match="d >= 2"):
        learn_attention_cold(QueryOracle(model(1, 1)), 1, rng=rng(18))
    with pytest.raises(ValueError, match="beta"):
        learn_attention_cold(QueryOracle(pair), 2, rng=rng(18), beta=-1.0)


def test_continuation_and_dual_probes():
    for learn, count in (
        (learn_by_continuation, 2 * 12 + 1),
        (learn_by_dual_probes, dual_query_count(2, 3)),
    ):
        truth = model(2, 3, seed=4)
        found = learn(QueryOracle(truth), 2, rng=rng(19))
        assert found.report["num_queries"] == count
        assert recovery_error(found.heads, truth) < 1e-4
    with pytest.raises(ValueError, match="at most dim=2"):
        learn_by_dual_probes(QueryOracle(model(3, 2)), 3, rng=rng(19))
    dependent = QueryHeads(truth.w, truth.v[[0, 0]])
    with pytest.raises(RecoveryError, match="nearly dependent"):
        learn_by_dual_probes(QueryOracle(dependent), 2, rng=rng(19))
    with pytest.raises(ValueError, match="step"):
        learn_by_continuation(QueryOracle(truth), 2, rng=rng(19), step=0.0)


@pytest.mark.parametrize("scale", [1.0, 10.0, 100.0])
@pytest.mark.parametrize(
    "learn", [learn_attention, learn_by_continuation, learn_by_dual_probes, learn_attention_cold]
)
def test_saturated_heads_are_recovered_or_refused(learn, scale):
    for seed in range(4):
        truth = model(2, 3, seed=seed, scale=scale)
        try:
            found = learn(QueryOracle(truth), 2, rng=rng(32, seed))
        except RecoveryError:
            continue
        assert recovery_error(found.heads, truth) < 1e-3


# Transformers and baselines


def test_pooled_tokens_are_odd_and_the_odd_part_is_a_box_of_heads():
    box = ReluTransformer(*(rng(20).standard_normal(s) for s in ((2, 3, 3), (5, 6), (5,))))
    x = rng(21).standard_normal((7, 4, 3))
    assert np.allclose(pooled_tokens(-x, box.w), -pooled_tokens(x, box.w), atol=1e-14)
    odd = OddOracle(box, 3)
    assert np.allclose(odd.value(x), QueryOracle(box.odd_heads).value(x), atol=1e-13)
    assert odd.num_queries == 14 and odd.max_length == 4


def test_a_transformer_is_recovered_or_refused():
    box = ReluTransformer(*(rng(22).standard_normal(s) for s in ((2, 3, 3), (4, 6), (4,))))
    heads = learn_attention(OddOracle(box, 3), 2, rng=rng(23)).heads
    found = learn_transformer(box, heads, rng=rng(24))
    x = 0.6 * rng(25).standard_normal((500, 6, 3))
    assert np.abs(found(x) - box(x)).max() < 1e-8 * np.abs(box(x)).max()
    assert len(found.signs) == 4
    wrong = QueryHeads(heads.w + 0.1, heads.v)
    with pytest.raises(RecoveryError):
        learn_transformer(box, wrong, rng=rng(26), walks=1)
    mirrored = ReluTransformer(
        box.w, np.concatenate([box.z, -box.z]), np.concatenate([box.a, box.a])
    )
    with pytest.raises(RecoveryError):
        learn_attention(OddOracle(mirrored, 3), 2, rng=rng(27))


def test_baselines():
    truth = model(1, 4)
    box = QueryOracle(truth)
    assert recovery_error(learn_single_head(box), truth) < 1e-10
    assert box.num_queries == 4**2 + 4
    u, b = rng(28).standard_normal((2, 30, 4))
    counts = probe_counts(2, 3)
    answers = probe_outputs(truth, u, b, counts)
    _, losses = distil(u, b, counts, answers, 1, steps=60, restarts=3, rng=rng(29))
    assert losses.shape == (60, 3) and losses[-1].min() < losses[0].min()
    with pytest.raises(ValueError, match="steps"):
        distil(u, b, counts, answers, 1, steps=0, restarts=1, rng=rng(30))
