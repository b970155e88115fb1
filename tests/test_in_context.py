"""in_context: losses against loops and draws, batched training against single runs, predictions."""

import numpy as np
import pytest
import torch

from mhabook_lib.in_context import (
    NOISE,
    Run,
    Tasks,
    draw_tasks,
    exact_loss,
    largest_diversity,
    predicted_diversity,
    project,
    sampled_loss,
    signal_mask,
    train_in_context,
)
from mhabook_lib.nadaraya_watson import nadaraya_watson_weights


def weights(runs=2, seeds=3, num_heads=2, d=4, d_head=2):
    rng = np.random.default_rng(0)
    projections = torch.from_numpy(rng.standard_normal((runs, seeds, num_heads, d, d_head)))
    return projections, torch.from_numpy(rng.uniform(0.2, 0.8, (runs, seeds, num_heads)))


def layer_rows(projections, readout, tasks, run, seed, task):
    """Rows of weights (n_q, n) of one layer on one task, head after head."""
    rows = 0
    for a, w in zip(readout[run, seed], projections[run, seed], strict=True):
        queries, keys = (part[seed, task] @ w for part in (tasks.queries, tasks.examples))
        rows = rows + a * nadaraya_watson_weights(queries, keys, 1.0)
    return rows


def test_losses_against_loops():
    projections, readout = weights()
    tasks = draw_tasks(3, 2, 4, np.random.default_rng(1))
    ranks = torch.tensor([1, 3])
    mask = signal_mask(ranks, 4)
    sampled, exact = torch.zeros(2, 3).double(), torch.zeros(2, 3).double()
    for run, seed, task in np.ndindex(2, 3, 2):
        r = int(ranks[run])
        rows = layer_rows(projections, readout, tasks, run, seed, task)
        x, q = tasks.examples[seed, task], tasks.queries[seed, task]
        coef = torch.cat([tasks.coef[seed, task, :r] / r**0.5, torch.zeros(4 - r)])
        answer = rows @ (x @ coef + tasks.noise[seed, task])
        sampled[run, seed] += (answer - q @ coef).square().mean() / 2
        gap = ((rows @ x - q)[:, :r] ** 2).sum(-1) / r
        exact[run, seed] += (gap + NOISE**2 * rows.square().sum(-1)).mean() / 2
    got = sampled_loss(projections, readout, tasks, mask)
    torch.testing.assert_close(got, sampled, rtol=0, atol=1e-13)
    got = exact_loss(projections, readout, tasks, mask)
    torch.testing.assert_close(got, exact, rtol=0, atol=1e-13)


def test_the_exact_loss_is_the_mean_of_the_sampled_one():
    projections, readout = weights(1, 1)
    mask, rng = signal_mask(torch.tensor([2]), 4), np.random.default_rng(2)
    few = draw_tasks(1, 1, 4, rng)
    many = draw_tasks(1, 4000, 4, rng)
    repeated = Tasks(
        few.examples.expand_as(many.examples), few.queries.expand_as(many.queries), *many[2:]
    )
    losses = torch.stack(
        [
            sampled_loss(
                projections, readout, Tasks(*(part[:, i : i + 200] for part in repeated)), mask
            )
            for i in range(0, 4000, 200)
        ]
    ).flatten()
    error = losses.std() / 20**0.5
    assert abs(losses.mean() - exact_loss(projections, readout, few, mask)) < 4 * error


def test_project():
    projections, _ = weights()
    tokens = torch.from_numpy(np.random.default_rng(3).standard_normal((3, 5, 7, 4)))
    wanted = torch.einsum("sbmd,rshdk->rsbhmk", tokens, projections)
    torch.testing.assert_close(project(tokens, projections), wanted, rtol=0, atol=1e-14)


@pytest.mark.parametrize("sampled", [False, True])
def test_runs_do_not_see_each_other(sampled):
    runs = [Run(2), Run(1, force=0.3), Run(4, learned=True)]

    def train(runs):
        rng = np.random.default_rng(4)
        return train_in_context(runs, 2, 2, 4, seeds=2, steps=5, rng=rng, sampled=sampled)

    together = train(runs)
    for k, run in enumerate(runs):
        alone = train([run])
        gap = (together.projections[k] - alone.projections[0]).abs().max()
        assert gap < 1e-9 and (together.loss[:, k] - alone.loss[:, 0]).abs().max() < 1e-9
    assert bool((together.readout[:2] == 0.5).all()) and bool((together.readout[2] != 0.5).all())
    assert together.steps == list(range(6)) and together.diversity.shape == (6, 3, 2)


def test_training_lowers_the_loss_and_a_force_raises_the_diversity():
    rng = np.random.default_rng(5)
    out = train_in_context([Run(2), Run(2, force=0.5)], 2, 2, 4, seeds=2, steps=60, rng=rng)
    assert bool((out.loss[-1, 0] < 0.5 * out.loss[0, 0]).all())
    assert bool((out.diversity[-1, 1] > out.diversity[-1, 0] + 0.2).all())
    assert len(out.steps) == 21 and out.steps[-1] == 60


@pytest.mark.parametrize(
    ("num_heads", "d_head", "dimension", "best"),
    [(3, 1, 2, 0.75), (2, 2, 3, 0.5), (4, 2, 8, 1), (4, 2, 9, 1), (2, 2, 2, 0), (4, 2, 7, 17 / 18)],
)
def test_largest_diversity(num_heads, d_head, dimension, best):
    found = largest_diversity(num_heads, d_head, dimension, np.random.default_rng(6))
    assert found == pytest.approx(best, abs=1e-6)
    assert found <= num_heads / (num_heads - 1) * (1 - d_head / dimension) + 1e-9


def test_predicted_diversity():
    rng = np.random.default_rng(7)
    assert predicted_diversity(4, 2, 1, rng) == 0.5
    assert predicted_diversity(3, 3, 1, rng) == pytest.approx(2 / 3)
    assert predicted_diversity(3, 3, 6, rng) == pytest.approx(0.75, abs=1e-6)


@pytest.mark.parametrize(
    ("runs", "num_heads", "d_head", "message"),
    [
        ([], 2, 2, r"runs with ranks \[\]: expected at least one"),
        ([Run(0)], 2, 2, r"ranks \[0\]: expected at least one, ranks in 1..4"),
        ([Run(2), Run(5)], 2, 2, r"ranks \[2, 5\]"),
        ([Run(2)], 1, 2, "num_heads=1, d_head=2: expected at least two heads"),
        ([Run(2)], 2, 5, "d_head=5: expected at least two heads of 1..4"),
    ],
)
def test_bad_input(runs, num_heads, d_head, message):
    rng = np.random.default_rng(8)
    with pytest.raises(ValueError, match=message):
        train_in_context(runs, num_heads, d_head, 4, seeds=1, steps=1, rng=rng)
