"""Heads that attend by position, their exact losses and their training."""

import numpy as np
import pytest
import torch

from mhabook_lib.context_ladders import (
    context_joint,
    exact_population,
    pattern_cross_entropy,
    plateau_slopes,
    restricted_cross_entropy,
    truncated_cross_entropy,
)
from mhabook_lib.markov import next_token_law, reference_teacher, sample_chain
from mhabook_lib.positional_attention import (
    CrossEntropy,
    FreshWindows,
    PositionalHeads,
    SquaredError,
    observed_windows,
    one_hot,
    positional_heads,
    predictions,
    train_heads,
)


def random_heads(rng, *stack, heads=3, positions=5, dim=4):
    return PositionalHeads(
        torch.as_tensor(rng.standard_normal((*stack, heads, positions))),
        torch.as_tensor(rng.standard_normal((*stack, heads, dim, dim))),
    )


@pytest.mark.parametrize("stack", [(), (2,), (2, 3)])
def test_one_product_is_the_literal_sum_over_heads(stack):
    rng = np.random.default_rng(0)
    heads = random_heads(rng, *stack)
    tokens = rng.integers(4, size=(7, 5))
    out = predictions(heads, one_hot(tokens, 4))
    assert out.shape == (*stack, 7, 4)
    for index in np.ndindex(*stack):
        a, v = heads.logits[index], heads.values[index]
        for n, context in enumerate(tokens):
            literal = torch.zeros(4, dtype=torch.float64)
            for h in range(3):
                s = torch.softmax(a[h], -1)
                literal += sum(s[i] * v[h][:, token] for i, token in enumerate(context))
            assert torch.allclose(out[index][n], literal, atol=1e-12)


def test_a_transformer_layer_with_position_queries_is_such_a_model():
    """Keys = one-hot positions, one query vector a head, values on the token block."""
    rng = np.random.default_rng(1)
    heads = random_heads(rng)
    tokens = one_hot(rng.integers(4, size=(6, 5)), 4).unflatten(-1, (5, 4))
    scores = torch.einsum("hi,ij->hj", heads.logits, torch.eye(5, dtype=torch.float64))
    pattern = torch.softmax(scores, -1)
    layer = torch.einsum("hj,hoc,bjc->bo", pattern, heads.values, tokens)
    assert torch.allclose(predictions(heads, tokens.flatten(1)), layer, atol=1e-12)


@pytest.mark.parametrize("stack", [(), (2,)])
@pytest.mark.parametrize("own_contexts", [False, True])
def test_cross_entropy_and_its_gradient(stack, own_contexts):
    rng = np.random.default_rng(2)
    heads = random_heads(rng, *stack)
    batch = stack if own_contexts else ()
    x = one_hot(rng.integers(4, size=(*batch, 9, 5)), 4)
    weights = torch.as_tensor(rng.dirichlet(np.ones(9), size=stack))
    targets = torch.as_tensor(rng.dirichlet(np.ones(4), size=(*stack, 9)))
    task = CrossEntropy(x, weights, targets)
    free = PositionalHeads(*(p.clone().requires_grad_() for p in heads))
    logs = torch.log_softmax(predictions(free, x), -1)
    direct = -(weights[..., None] * targets * logs).sum((-2, -1))
    loss, gradient = task.loss_and_gradient(heads)
    assert torch.allclose(loss, direct, atol=1e-12)
    assert torch.allclose(task.loss(heads), direct, atol=1e-12)
    for ours, wanted in zip(gradient, torch.autograd.grad(direct.sum(), free), strict=True):
        assert torch.allclose(ours, wanted, atol=1e-12)


def test_squared_error_of_the_population_is_the_mean_of_batches():
    rng = np.random.default_rng(3)
    heads = random_heads(rng)
    teacher = torch.as_tensor(rng.standard_normal((5, 4, 4)))
    exact = SquaredError(teacher)
    free = PositionalHeads(*(p.clone().requires_grad_() for p in heads))
    direct = (free.matrix() - teacher).square().sum() / 2
    loss, gradient = exact.loss_and_gradient(heads)
    assert torch.allclose(loss, direct)
    for ours, wanted in zip(gradient, torch.autograd.grad(direct, free), strict=True):
        assert torch.allclose(ours, wanted, atol=1e-12)
    sampled = SquaredError(teacher, 200_000, 5).loss_and_gradient(heads)[1]
    assert torch.allclose(sampled.values, gradient.values, atol=0.1)


def test_a_stack_trains_like_its_models_one_by_one():
    rng = np.random.default_rng(4)
    joint = context_joint(next_token_law(reference_teacher(4, 2, 1.5, 1.0, 0)), 3)
    task = exact_population(joint)
    start = 0.1 * rng.standard_normal((3, 2, 3))
    for kind, rate in (("adamw", 0.02), ("sgd", 1.0)):
        together = train_heads(task, positional_heads(start, 4), kind, rate, 30)
        for k in range(3):
            alone = train_heads(task, positional_heads(start[k : k + 1], 4), kind, rate, 30)
            assert np.allclose(together.losses[:, k], alone.losses[:, 0], atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "rule"),
    [("adamw", lambda p: torch.optim.Adam(p, lr=0.02)), ("sgd", lambda p: torch.optim.SGD(p, 0.5))],
)
def test_training_is_that_of_torch(kind, rule):
    joint = context_joint(next_token_law(reference_teacher(4, 2, 1.5, 1.0, 0)), 3)
    task = exact_population(joint)
    start = random_heads(np.random.default_rng(6), 1, heads=2, positions=3)
    ours = train_heads(task, start, kind, 0.02 if kind == "adamw" else 0.5, 20, every=1)
    parameters = [p.clone().requires_grad_() for p in start]
    optimiser, losses = rule(parameters), []
    for _ in range(21):
        loss = task.loss(PositionalHeads(*parameters)).sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert np.allclose(ours.losses[:, 0], losses, atol=1e-12)


class Interrupted(FreshWindows):
    """Stops once, at step 130."""

    def loss_and_gradient(self, heads, step=0):
        if step == 130:
            raise KeyboardInterrupt
        return super().loss_and_gradient(heads, step)


def test_training_on_fresh_samples_goes_on_from_a_checkpoint_to_the_last_bit(tmp_path):
    plan = (reference_teacher(4, 2, 1.5, 1.0, 0), 3, 4, 12, 7)
    start, path = positional_heads(np.eye(2, 3)[None], 4), tmp_path / "state.pt"
    whole = train_heads(FreshWindows(*plan), start, "adamw", 0.02, 150)
    with pytest.raises(KeyboardInterrupt):
        train_heads(Interrupted(*plan), start, "adamw", 0.02, 150, checkpoint=path)
    rest = train_heads(FreshWindows(*plan), start, "adamw", 0.02, 150, checkpoint=path)
    assert np.array_equal(rest.losses, whole.losses)
    assert np.array_equal(rest.attention, whole.attention)
    with pytest.raises(ValueError, match="expected 300"):
        train_heads(FreshWindows(*plan), start, "adamw", 0.02, 299, checkpoint=path)


def test_fresh_and_observed_windows_estimate_the_exact_loss():
    teacher = reference_teacher(4, 2, 1.5, 1.0, 0)
    rng = np.random.default_rng(5)
    heads = random_heads(rng, positions=3)
    exact = exact_population(context_joint(next_token_law(teacher), 3)).loss(heads)
    sequences = sample_chain(teacher, 20_000, 24, rng)[:, -4:]
    observed = observed_windows(sequences, 3, 4).loss(heads)
    assert float(observed) == pytest.approx(float(exact), abs=0.05)
    fresh = FreshWindows(teacher, 3, 50, 20, 8).loss_and_gradient(heads)[0]
    assert float(fresh) == pytest.approx(float(exact), abs=0.5)


def test_ladders_are_in_order_and_meet_where_they_must():
    teacher = reference_teacher(5, 2, 1.7, 1.0, 0)
    joint = context_joint(next_token_law(teacher), 3)
    restricted = [restricted_cross_entropy(joint, r) for r in range(3)]
    truncated = [truncated_cross_entropy(teacher, joint, r) for r in range(3)]
    assert np.all(np.diff(restricted) < 0)
    assert np.all(np.array(restricted) <= np.array(truncated) + 1e-9)
    assert restricted[2] == pytest.approx(truncated[2], abs=1e-8)
    pattern = pattern_cross_entropy(joint, 1, 2, np.random.default_rng(0))
    assert truncated[2] < pattern <= restricted[1] + 1e-9
    pairs = joint.sum((1, 2))
    conditional = pairs / pairs.sum(1, keepdims=True)
    assert restricted[1] == pytest.approx(-(pairs * np.log(conditional)).sum(), abs=1e-7)


def test_plateau_slopes_are_derivatives_of_the_loss():
    joint = context_joint(next_token_law(reference_teacher(5, 2, 1.7, 1.0, 3)), 3)
    task = exact_population(joint)
    pair = joint.sum((1, 2))
    value = torch.as_tensor(np.log(pair / pair.sum(1, keepdims=True)).T.copy())
    s = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64, requires_grad=True)
    w = s[:, None, None] * value
    outputs = task.x @ w.movedim(-2, -3).flatten(-2).mT
    loss = (task.weights * torch.logsumexp(outputs, -1)).sum() - (task.statistic * w).sum()
    (gradient,) = torch.autograd.grad(loss, s)
    assert np.allclose(plateau_slopes(joint), gradient.numpy(), atol=1e-12)


def test_bad_input_is_named():
    task = exact_population(context_joint(next_token_law(reference_teacher(4, 2, 1.5, 1.0, 0)), 3))
    heads = positional_heads(np.eye(2, 3)[None], 4)
    with pytest.raises(ValueError, match="H <= T"):
        positional_heads(np.zeros((4, 3)), 4)
    with pytest.raises(ValueError, match="logits"):
        positional_heads(np.full((2, 3), np.nan), 4)
    with pytest.raises(ValueError, match="kind='lion'"):
        train_heads(task, heads, "lion", 0.1, 5)
    with pytest.raises(ValueError, match="rate"):
        train_heads(task, heads, "sgd", 0.0, 5)
    wild = SquaredError(torch.ones(3, 4, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="finite losses"):
        train_heads(wild, heads, "sgd", 1e6, 200)
    with pytest.raises(ValueError, match="lags=4"):
        restricted_cross_entropy(np.full((2,) * 4, 1 / 16), 4)


def test_as_many_models_as_letters_are_no_further_position():
    joints = np.stack(
        [context_joint(next_token_law(reference_teacher(4, 2, 1.5, 1.0, k)), 2) for k in range(4)]
    )
    heads = random_heads(np.random.default_rng(9), 4, heads=2, positions=2)
    together = exact_population(joints, stacked=True).loss(heads)
    for k in range(4):
        alone = PositionalHeads(heads.logits[k], heads.values[k])
        assert torch.allclose(together[k], exact_population(joints[k]).loss(alone), atol=1e-12)
