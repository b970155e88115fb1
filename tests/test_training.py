"""training: against torch.optim, hooks, checkpoints that resume to the last bit, errors."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from mhabook_lib.sequences import InductionTask, Text
from mhabook_lib.symmetries import (
    head_diagnostics,
    horizontal_step,
    imbalance,
    query_key_factors,
    rebalance_layer,
)
from mhabook_lib.tiny_transformer import (
    TransformerShape,
    initial_parameters,
    next_token_losses,
)
from mhabook_lib.training import Optimiser, TrainingConfig, train

SHAPE = TransformerShape(6, 7, 8, 2, 1, biases="qkvo")
TASK = InductionTask(6)
SGD = Optimiser("sgd", 0.3, weight_decay=0.01)
MOMENTUM = Optimiser("sgd", 0.1, momentum=0.8)
ADAMW = Optimiser("adamw", 0.02, weight_decay=0.1, betas=(0.9, 0.98))
REBALANCED = replace(ADAMW, edit_parameters=rebalance_layer, edit_every=4)
PROJECTED = replace(ADAMW, edit_step=horizontal_step)
CONFIG = TrainingConfig(
    SHAPE,
    (SGD, MOMENTUM, ADAMW),
    steps=12,
    batch_size=5,
    seed=3,
    initial_scale=0.2,
    warmup=3,
    final_rate=0.1,
    clip=0.7,
)


def plain_run(config, optimiser, kind):
    """The same training with an optimiser of torch, one model, no stack."""
    p = initial_parameters(config.shape, np.random.default_rng(config.seed), config.initial_scale)
    leaves = {name: value.requires_grad_() for name, value in p.items()}
    biases = [v for name, v in leaves.items() if name.startswith("b_")]
    matrices = [v for name, v in leaves.items() if not name.startswith("b_")]
    decay = optimiser.weight_decay
    groups = [{"params": matrices, "weight_decay": decay}, {"params": biases, "weight_decay": 0.0}]
    torch_optimiser = kind(groups)
    losses = []
    for t in range(config.steps):
        rng = np.random.default_rng([config.seed, t])
        tokens = torch.from_numpy(TASK.batch(config.batch_size, config.shape.seq_len + 1, rng))
        loss = next_token_losses(config.shape, leaves, tokens).sum()
        losses.append(loss.item())
        torch_optimiser.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(float(v.grad.square().sum()) for v in leaves.values()))
        for value in leaves.values():
            value.grad *= min(1.0, config.clip / norm)
        for group in torch_optimiser.param_groups:
            group["lr"] = optimiser.learning_rate * config.rate(t)
        torch_optimiser.step()
    return losses, leaves


@pytest.mark.parametrize("index", range(3))
def test_steps_are_those_of_torch(index):
    optimiser = CONFIG.optimisers[index]
    if optimiser.kind == "adamw":
        kind = lambda g: torch.optim.AdamW(g, betas=optimiser.betas, eps=1e-8)  # noqa: E731
    else:
        kind = lambda g: torch.optim.SGD(g, lr=1.0, momentum=optimiser.momentum)  # noqa: E731
    losses, leaves = plain_run(CONFIG, optimiser, kind)
    run = train(CONFIG, TASK)
    np.testing.assert_allclose(run.losses[:, index], losses, rtol=1e-11)
    assert run.losses[0, index] > run.losses[-3:, index].mean()
    for name, value in leaves.items():
        noise = 1e-10 if name == "b_k" else 1e-12  # its gradient is a rounding error
        torch.testing.assert_close(
            run.parameters[name][index], value[0].detach(), rtol=1e-9, atol=noise
        )


def test_rates_rise_and_follow_a_cosine():
    config = replace(CONFIG, steps=103, warmup=3, final_rate=0.2)
    assert [config.rate(t) for t in range(4)] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert config.rate(53) == pytest.approx(0.6)
    assert config.rate(103) == pytest.approx(0.2)
    assert replace(config, warmup=0, final_rate=1.0).rate(70) == 1.0


def test_clipping_bounds_a_model_at_a_time():
    """With a tiny clip, every model of gradient descent moves by rate times clip."""
    config = replace(CONFIG, optimisers=(replace(SGD, weight_decay=0.0),) * 2, clip=1e-3, warmup=0)
    seen = []
    train(
        replace(config, steps=2),
        TASK,
        lambda step: (
            seen.append(sum(v.flatten(1).square().sum(1) for v in step.change.values())) or {}
        ),
    )
    assert seen[0].sqrt().tolist() == pytest.approx([0.3e-3] * 2, rel=1e-10)


def test_hooks_see_the_step():
    steps = []
    run = train(CONFIG, TASK, lambda step: steps.append(step) or {"n": step.change["w_q"]}, every=5)
    assert run.observed == [0, 5, 10] == [step.index for step in steps]
    assert run.records["n"].shape == (3, 3, *SHAPE.parameter_shapes()["w_q"])
    for step in steps:
        for name, value in step.before.items():
            assert torch.equal(value + step.change[name], step.after[name])
    assert torch.equal(run.records["n"][1], steps[1].change["w_q"])
    assert run.finished and run.losses.shape == (12, 3)


def test_edits_of_steps_and_parameters():
    config = replace(CONFIG, optimisers=(ADAMW, REBALANCED, PROJECTED))

    def watch(step):
        left = imbalance(*query_key_factors(step.after)).abs().amax((1, 2, 3, 4))
        return {"rho": head_diagnostics(step.before, step.change).rho.amax((1, 2)), "left": left}

    run = train(config, TASK, watch)
    rho, left = run.records["rho"], run.records["left"]
    assert rho[:, 0].min() > 1e-4 and rho[:, 2].max() < 1e-24
    balanced = [t for t in range(12) if left[t, 1] < 1e-12]
    assert balanced == [3, 7, 11]
    assert torch.equal(run.losses[:4, 0], run.losses[:4, 1])  # the function has not changed yet
    torch.testing.assert_close(run.losses[4, 0], run.losses[4, 1], rtol=1e-12, atol=0)
    assert run.losses[6, 0] != run.losses[6, 1]


def test_replaced_parameters_lose_their_averages():
    """After a replacement Adam's next step is one of length rate in each coordinate."""
    optimiser = Optimiser(
        "adamw", 0.01, edit_parameters=lambda p: {**p, "w_q": 1.0 * p["w_q"]}, edit_every=3
    )
    config = TrainingConfig(SHAPE, (optimiser,), 5, 4, initial_scale=0.2)
    steps = []
    train(config, TASK, lambda step: steps.append(step) or {})
    for step in (steps[0], steps[3]):
        g = step.gradients["w_q"]
        torch.testing.assert_close(step.change["w_q"], -0.01 * g / (g.abs() + 1e-8))
    assert (steps[3].change["w_k"].abs() - 0.01).abs().max() > 1e-4


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_continued_runs_are_the_same_to_the_last_bit(tmp_path, dropout):
    config = replace(CONFIG, optimisers=(SGD, ADAMW, REBALANCED, PROJECTED), dropout=dropout)

    def watch(step):
        return head_diagnostics(step.before, step.change)._asdict()

    whole = train(config, TASK, watch, every=2)
    path = tmp_path / "runs" / "a.pt"
    for stop in (5, 10, 12):
        run = train(config, TASK, watch, every=2, max_steps=5, checkpoint=path, checkpoint_every=3)
        assert run.step == stop
    assert run.finished and run.observed == whole.observed
    assert torch.equal(run.losses, whole.losses)
    for name, value in whole.parameters.items():
        assert torch.equal(run.parameters[name], value)
    for name, value in whole.records.items():
        assert torch.equal(run.records[name], value)
    again = train(config, TASK, watch, every=2, checkpoint=path)
    assert again.step == 12 and torch.equal(again.losses, whole.losses)


def test_a_killed_run_continues_from_its_last_save(tmp_path):
    path = tmp_path / "a.pt"

    def fail_at_8(step):
        if step.index == 8:
            raise KeyboardInterrupt
        return {"beta": step.after["w_q"]}

    with pytest.raises(KeyboardInterrupt):
        train(CONFIG, TASK, fail_at_8, checkpoint=path, checkpoint_every=3)
    keep = lambda step: {"beta": step.after["w_q"]}  # noqa: E731
    run = train(CONFIG, TASK, keep, checkpoint=path)
    whole = train(CONFIG, TASK, keep)
    assert torch.equal(run.losses, whole.losses)
    assert torch.equal(run.records["beta"], whole.records["beta"])
    assert not list(tmp_path.glob("*.part"))


def test_dropout_changes_the_run_but_not_its_seed():
    config = replace(CONFIG, dropout=0.3)
    first, second = (train(config, TASK).losses for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, train(CONFIG, TASK).losses)


def test_text_is_learned(tmp_path):
    path = tmp_path / "t.txt"
    path.write_text("abcabd" * 60)
    shape = TransformerShape(4, 6, 8, 2, 1)
    config = TrainingConfig(shape, (Optimiser("adamw", 0.03),), 80, 8, initial_scale=0.2, warmup=5)
    losses = train(config, Text(path)).losses[:, 0]
    assert losses[:5].mean() > 1.2 and losses[-10:].mean() < 0.5


def test_errors(tmp_path):
    with pytest.raises(ValueError, match=r"kind='lion': expected one of \('sgd', 'adamw'\)"):
        Optimiser("lion", 0.1)
    with pytest.raises(ValueError, match="vocab_size=6: expected at least 9, for induction with 9"):
        train(CONFIG, InductionTask(9))
    wild = replace(CONFIG, optimisers=(Optimiser("sgd", 1e200),), clip=math.inf, warmup=0)
    with pytest.raises(ValueError, match=r"losses .* at step \d+: expected finite losses; lower"):
        train(wild, TASK)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 4}, "has seed=3: expected 4; remove the file or name another"),
        ({"optimisers": (SGD, MOMENTUM)}, r"has optimisers\[2\].* expected None"),
        ({"optimisers": (SGD, MOMENTUM, replace(ADAMW, learning_rate=0.01))}, "learning_rate=0.02"),
        ({"optimisers": (SGD, MOMENTUM, PROJECTED)}, "edit_step=None: expected horizontal_step"),
        ({"dropout": 0.1}, "has dropout=0.0: expected 0.1"),
    ],
)
def test_checkpoints_of_other_runs_are_refused(tmp_path, change, message):
    path = tmp_path / "a.pt"
    train(CONFIG, TASK, max_steps=1, checkpoint=path)
    with pytest.raises(ValueError, match=message):
        train(replace(CONFIG, **change), TASK, checkpoint=path)


def test_checkpoints_of_other_texts_are_refused(tmp_path):
    path = tmp_path / "a.pt"
    train(CONFIG, TASK, max_steps=1, checkpoint=path)
    with pytest.raises(
        ValueError, match=r"has source=induction with 6 .* expected induction with 5"
    ):
        train(CONFIG, InductionTask(5), checkpoint=path)
