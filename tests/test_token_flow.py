"""token_flow: velocity, projections, layers, flows with known answers, clusters."""

import math

import numpy as np
import pytest
import torch
from clustering_instances import loop_velocity, test_vector
from hypothesis import given, settings
from hypothesis import strategies as st

from mhabook_lib.attention import BlockHeads, ScalarHeads, attention_entropy, attention_scores
from mhabook_lib.energy import energy_rate, interaction_energy
from mhabook_lib.equiangular import equiangular_flow, equiangular_time_closed
from mhabook_lib.numerics.linalg import random_orthonormal
from mhabook_lib.numerics.ode import integrate
from mhabook_lib.numerics.quadrature import simpson
from mhabook_lib.token_flow import (
    attention_velocity,
    cluster_fraction,
    cluster_labels,
    cluster_sizes,
    count_clusters,
    equiangular_tokens,
    flat_blowup_time,
    flow,
    layer_path,
    layer_step,
    normalize_tokens,
    orthogonal_heads,
    project_tangent,
    random_heads,
    sample_sphere,
    velocity_field,
)

FLOWS = ("softmax", "unnormalized", "relu")
ONE = ScalarHeads(torch.ones(1, dtype=torch.float64))


def generator(seed=0):
    return np.random.default_rng(seed)


@given(seed=st.integers(0, 10**6), n=st.integers(1, 6), d=st.integers(1, 6))
@settings(max_examples=30, deadline=None)
def test_projection_is_symmetric_and_idempotent(seed, n, d):
    rng = generator(seed)
    x = sample_sphere((n, d), rng)
    u, w = (torch.from_numpy(rng.standard_normal((n, d))) for _ in range(2))
    pu, pw = project_tangent(x, u), project_tangent(x, w)
    formula = (u * w).sum(-1) - (u * x).sum(-1) * (w * x).sum(-1)
    for product in ((pu * w).sum(-1), (u * pw).sum(-1), (pu * pw).sum(-1)):
        torch.testing.assert_close(product, formula, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(project_tangent(x, pu), pu, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("normalization", FLOWS)
@pytest.mark.parametrize("sphere", [True, False])
def test_velocity_against_loops(normalization, sphere):
    x, matrices, beta = test_vector()
    values = random_heads((2, 4, 4), generator(), "general")
    for v in (None, values):
        fast = attention_velocity(x, matrices, beta, normalization, v, sphere)
        slow = loop_velocity(x, matrices, beta, normalization, v, sphere)
        torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("normalization", FLOWS)
@pytest.mark.parametrize("sphere", [True, False])
def test_structured_heads_move_tokens_as_dense_ones(normalization, sphere):
    rng = generator(1)
    x = sample_sphere((3, 5, 6), rng)
    beta = torch.tensor([0.3, 1.0, 9.0], dtype=torch.float64)
    scalar = ScalarHeads(torch.from_numpy(rng.standard_normal((3, 4))))
    block = BlockHeads(random_orthonormal((2, 6, 3), rng), torch.from_numpy(rng.random((2, 3))))
    for heads in (scalar, block, ONE):
        fast = attention_velocity(x, heads, beta, normalization, sphere=sphere)
        slow = attention_velocity(x, heads.dense(6), beta, normalization, sphere=sphere)
        torch.testing.assert_close(fast, slow, rtol=1e-11, atol=1e-13)


def test_softmax_survives_a_large_beta():
    x = sample_sphere((5, 3), generator(2))
    v = attention_velocity(x, ONE, 1e5, sphere=False)
    torch.testing.assert_close(v, x)  # each token attends to itself only
    assert float(attention_velocity(x, ONE, 1e5).abs().max()) < 1e-12


@pytest.mark.parametrize("normalization", FLOWS)
def test_velocity_symmetries(normalization):
    rng = generator(3)
    x, m = sample_sphere((6, 4), rng), random_heads((2, 4, 4), rng, "general")
    v = attention_velocity(x, m, 1.7, normalization)
    order = torch.from_numpy(rng.permutation(6))
    torch.testing.assert_close(attention_velocity(x[order], m, 1.7, normalization), v[order])
    q = random_orthonormal((4, 4), rng)
    rotated = attention_velocity(x @ q.mT, q @ m @ q.mT, 1.7, normalization)
    torch.testing.assert_close(rotated, v @ q.mT, rtol=1e-11, atol=1e-13)
    assert float((v * x).sum(-1).abs().max()) < 1e-14  # tangent


def test_limits_of_beta():
    x, m, _ = test_vector()
    uniform = project_tangent(x, (x.mean(0) @ m.mT).sum(0).expand(6, 4))
    torch.testing.assert_close(attention_velocity(x, m, 1e-12), uniform, rtol=1e-9, atol=1e-11)
    hardest = attention_scores(x, m).argmax(-1)  # (H, n)
    target = sum(x[hardest[h]] @ m[h].mT for h in range(2))
    torch.testing.assert_close(attention_velocity(x, m, 1e6), project_tangent(x, target))


def test_equiangular_tokens():
    for n, d, gamma in ((2, 2, 0.3), (5, 7, -0.2), (5, 5, 0.999), (5, 4, -0.25), (8, 20, 0.0)):
        x = equiangular_tokens(n, d, gamma)
        gram = (1 - gamma) * torch.eye(n, dtype=torch.float64) + gamma
        torch.testing.assert_close(x @ x.mT, gram, rtol=0, atol=1e-14)
    batch = equiangular_tokens(4, 6, torch.tensor([[-1 / 3], [0.5]], dtype=torch.float64))
    assert batch.shape == (2, 1, 4, 6)
    torch.testing.assert_close(batch[1, 0], equiangular_tokens(4, 6, 0.5))
    for n, d, gamma in ((5, 4, 0.0), (5, 3, -0.25), (5, 5, 1.0), (5, 5, -0.3), (1, 3, 0.0)):
        with pytest.raises(ValueError):
            equiangular_tokens(n, d, gamma)


def test_random_heads():
    rng = generator(4)
    general = random_heads((2000, 1, 4, 4), rng, "general")
    assert abs(float(general.var()) * 4 - 1) < 0.05
    psd = random_heads((50, 2, 4, 4), rng, "psd")
    assert float(torch.linalg.eigvalsh(psd).min()) > -1e-14
    with pytest.raises(ValueError, match="kind='PSD'"):
        random_heads((1, 2, 2), rng, "PSD")
    with pytest.raises(ValueError, match=r"shape=\(1, 2, 3\)"):
        random_heads((1, 2, 3), rng, "psd")


# Known trajectories


@pytest.mark.parametrize(
    ("normalization", "strengths", "expected"),
    [
        ("unnormalized", (1.0,), 0.82229166),
        ("softmax", (1.0,), 0.39005256),
        ("softmax", (0.5, 1.0, 2.0), 0.98088498),
        ("softmax", (1.5, -0.7), 0.11017446),
        ("relu", (1.0, 2.0), None),
        ("unnormalized", (1.5, -0.7), None),
    ],
)
def test_equiangular_tokens_follow_the_scalar_equation(normalization, strengths, expected):
    x0 = equiangular_tokens(12, 16, 0.05)
    heads = ScalarHeads(torch.tensor(strengths, dtype=torch.float64))
    path = flow(x0, heads, 1.5, [0, 1], normalization, steps_per_interval=400)
    gram = path[-1] @ path[-1].mT
    off_diagonal = gram[~torch.eye(12, dtype=torch.bool)]
    gamma = float(equiangular_flow(0.05, [0, 1], strengths, 1.5, 12, normalization)[-1])
    assert float((off_diagonal - gamma).abs().max()) < 2e-10
    assert float(off_diagonal.max() - off_diagonal.min()) < 1e-13
    if expected is not None:
        assert abs(gamma - expected) < 6e-9


def test_relu_simulation_ends_where_the_closed_form_says():
    time = float(equiangular_time_closed(0.02, 0.5, 1.0, 1.0, 16, "relu"))
    assert abs(time - 12.00471459) < 6e-9
    x0 = equiangular_tokens(16, 16, 0.02)
    x = flow(x0, ONE, 1.0, [0, time], "relu", steps_per_interval=400)[-1]
    assert abs(float(x[0] @ x[1]) - 0.5) < 1e-8


def test_reduction_to_the_span_is_exact():
    rng = generator(5)
    x0 = sample_sphere((2, 4, 9), rng)
    heads = ScalarHeads(torch.tensor([0.5, 2.0], dtype=torch.float64))
    times = [0, 0.01]  # before the flat blow-up
    for normalization in FLOWS:
        for sphere in (True, False):
            options = {"steps_per_interval": 5, "sphere": sphere}
            reduced = flow(x0, heads, 0.8, times, normalization, **options)
            field = velocity_field(x0, heads, 0.8, normalization, sphere=sphere)
            full = integrate(field, x0, times, "rk4", 5, "normalize" if sphere else None)
            torch.testing.assert_close(reduced, full, rtol=1e-12, atol=1e-13)
            options["steps_per_interval"] = 100
            reduced = flow(x0, heads, 0.8, times, normalization, **options)
            dense = flow(x0, heads.dense(9), 0.8, times, normalization, **options)
            torch.testing.assert_close(reduced, dense, rtol=0, atol=1e-9)
    seen = flow(x0, heads, 0.8, [0, 0.2], observe=lambda x: x[..., 0, :])
    assert seen.shape == (2, 2, 9)


def test_flow_broadcasts_beta_and_observes():
    x0 = sample_sphere((3, 5, 2), generator(6))
    beta = torch.tensor([[1.0], [4.0]], dtype=torch.float64)

    def observe(x):
        return cluster_fraction(x), attention_entropy(attention_scores(x, ONE), beta)

    times = np.linspace(0, 2, 11)
    path = flow(x0, ONE, beta, times)
    fraction, entropy = flow(x0, ONE, beta, times, observe=observe)
    assert path.shape == (11, 2, 3, 5, 2)
    torch.testing.assert_close(fraction, cluster_fraction(path))
    assert entropy.shape == (11, 2, 3, 1, 5)
    alone = flow(x0[2], ONE, 4.0, times)
    torch.testing.assert_close(path[:, 1, 2], alone, rtol=1e-12, atol=1e-13)


def test_methods_agree():
    x0 = sample_sphere((6, 3), generator(7))
    m = random_heads((2, 3, 3), generator(8), "symmetric")
    times = [0.0, 0.3, 1.0]
    fine = flow(x0, m, 2.0, times, steps_per_interval=200)
    adaptive = flow(x0, m, 2.0, times, method="dop853", rtol=1e-12)
    torch.testing.assert_close(fine, adaptive, rtol=0, atol=1e-9)


def test_rescaled_time_gives_the_same_path_and_true_times():
    x0 = sample_sphere((2, 8, 20), generator(9))
    heads = ScalarHeads(torch.tensor([1.0], dtype=torch.float64))
    states, times = flow(
        x0, heads, 3.0, np.linspace(0, 1, 5), "unnormalized", rescale=True, steps_per_interval=40
    )
    assert times.shape == (5, 2)
    for b in range(2):
        direct = flow(
            x0[b], heads, 3.0, times[:, b].tolist(), "unnormalized", method="dop853", rtol=1e-12
        )
        torch.testing.assert_close(states[:, b], direct, rtol=0, atol=1e-7)
    with pytest.raises(ValueError, match="rescale=True"):
        flow(x0, heads, 3.0, [0, 1], "softmax", rescale=True)


def test_total_energy_grows_by_the_dissipation():
    rng = generator(10)
    x0, m = sample_sphere((8, 4), rng), random_heads((3, 4, 4), rng, "symmetric")

    def observe(x):
        v = attention_velocity(x, m, 1.0, "unnormalized")
        return interaction_energy(x, m, 1.0).sum(-1), (v**2).sum((-2, -1)) / 8

    energy, rate = flow(x0, m, 1.0, np.arange(0, 1.001, 0.005), "unnormalized", observe=observe)
    assert abs(float(energy[-1] - energy[0]) - simpson(rate, 0.005)) < 1e-10
    assert float(energy.diff().min()) > 0


def test_flat_flow_of_orthogonal_heads_decouples():
    rng = generator(11)
    x0 = sample_sphere((7, 6), rng)
    heads = orthogonal_heads(torch.from_numpy(rng.standard_normal((3, 2))), rng, 6)
    alone = BlockHeads(heads.basis[:1], heads.eigenvalues[:1])
    options = {"normalization": "unnormalized", "steps_per_interval": 20}
    gap = {}
    for sphere in (False, True):
        together = flow(x0, heads, 1.0, [0, 0.5], sphere=sphere, **options)[-1]
        single = flow(x0, alone, 1.0, [0, 0.5], sphere=sphere, **options)[-1]
        energies = interaction_energy(together, alone, 1.0), interaction_energy(single, alone, 1.0)
        gap[sphere] = abs(float(energies[0] - energies[1]))
    assert gap[False] < 1e-14
    assert gap[True] > 1e-4


def test_flat_flow_blows_up_when_it_should():
    time = flat_blowup_time(1.0, 1.0, 1.0)
    assert abs(time - 0.10969197) < 6e-9
    x0 = torch.tensor([[1.0, 0.0]], dtype=torch.float64)

    def radius(x):
        return torch.linalg.vector_norm(x[0])

    options = {"sphere": False, "method": "dop853", "rtol": 1e-12, "observe": radius}
    r = flow(x0, ONE, 1.0, [0, 0.999 * time], "unnormalized", **options)[-1]
    # The remaining time from the reached radius is again the closed form.
    assert abs(flat_blowup_time(1.0, 1.0, float(r)) - 0.001 * time) < 1e-9
    with pytest.raises(ValueError, match="not finite"):
        flow(x0, ONE, 1.0, [0, 3 * time], "unnormalized", sphere=False, steps_per_interval=50)


def test_two_tokens_on_the_circle():
    """theta' = -sin(theta) (e^{beta cos theta}) in flow U for n = 2, lambda = 1."""
    x0 = torch.tensor([[1.0, 0.0], [math.cos(2.0), math.sin(2.0)]], dtype=torch.float64)
    x = flow(x0, ONE, 1.0, [0, 0.8], "unnormalized", steps_per_interval=200)[-1]
    time = equiangular_time_closed(math.cos(2.0), float(x[0] @ x[1]), 1.0, 1.0, 2, "unnormalized")
    assert abs(float(time) - 0.8) < 1e-9


# Layers


def test_layers():
    rng = generator(12)
    x, m = sample_sphere((5, 6, 4), rng), random_heads((2, 4, 4), rng, "psd")
    v = attention_velocity(x, m, 1.0, "unnormalized", sphere=False)
    torch.testing.assert_close(layer_step(x, m, 1.0, 0.3), normalize_tokens(x + 0.3 * v))
    torch.testing.assert_close(layer_step(x, m, 1.0, math.inf), normalize_tokens(v))
    tiny = (layer_step(x, m, 1.0, 1e-7) - x) / 1e-7
    torch.testing.assert_close(tiny, project_tangent(x, v), rtol=1e-5, atol=1e-6)
    steps = torch.tensor([0.1, math.inf], dtype=torch.float64)[:, None, None]
    path = layer_path(x, m, 1.0, steps, 4)
    assert path.shape == (5, 2, 5, 6, 4)
    expected = layer_step(layer_step(x, m, 1.0, 0.1), m, 1.0, 0.1)
    torch.testing.assert_close(path[2, 0], expected)
    per_token = torch.linspace(0.1, 1, 6, dtype=torch.float64)
    y = layer_step(x, m, 1.0, per_token)
    torch.testing.assert_close(y[:, 3], layer_step(x, m, 1.0, float(per_token[3]))[:, 3])
    with pytest.raises(ValueError, match="step="):
        layer_step(x, m, 1.0, 0.0)


def test_layer_energy_bound_for_psd_heads():
    """E(Y) - E(X) >= (1/2n) sum |y_i - x_i|^2 / step for any step."""
    rng = generator(13)
    x, m = sample_sphere((60, 8, 4), rng), random_heads((60, 2, 4, 4), rng, "psd")
    for step in (0.01, 1.0, 100.0, math.inf):
        path = layer_path(x, m, 1.0, step, 6)
        energy = interaction_energy(path, m, 1.0).sum(-1)
        bound = (path.diff(dim=0) ** 2).sum((-2, -1)) / (2 * 8 * step)
        assert bool((energy.diff(dim=0) - bound >= -1e-12 * energy[1:]).all())


# Clusters


def test_cluster_counts_against_a_search():
    rng = generator(14)
    x = sample_sphere((6, 20, 2), rng)
    labels = cluster_labels(x, 0.97)
    for b in range(6):
        close = (x[b] @ x[b].mT > 0.97).numpy()
        colour = list(range(20))
        for _ in range(20):  # the smallest index spreads through the graph
            colour = [min(colour[j] for j in range(20) if close[i, j]) for i in range(20)]
        ranks = {c: k for k, c in enumerate(dict.fromkeys(colour))}
        assert labels[b].tolist() == [ranks[c] for c in colour]
        sizes = sorted((colour.count(c) for c in ranks), reverse=True)
        assert cluster_sizes(x, 0.97)[b].tolist() == sizes + [0] * (20 - len(sizes))
    assert count_clusters(x, 0.97).tolist() == (labels.amax(-1) + 1).tolist()
    pairs = [(x[0, i] @ x[0, j]) > 0.97 for i in range(20) for j in range(20) if i != j]
    assert float(cluster_fraction(x, 0.97)[0]) == pytest.approx(float(np.mean(pairs)), abs=1e-15)


def test_mixed_signs_end_in_two_antipodal_clusters():
    heads = ScalarHeads(torch.tensor([1.0, -1.5], dtype=torch.float64))
    x0 = sample_sphere((4, 8, 3), generator(15))
    x = flow(x0, heads, 2.0, [0, 60], "unnormalized", steps_per_interval=3000)[-1]
    assert count_clusters(x).tolist() == [2] * 4
    assert float((x @ x.mT).abs().min()) > 0.999


def test_errors():
    x = sample_sphere((4, 3), generator(16))
    with pytest.raises(ValueError, match="leaves the unit sphere by 1"):
        attention_velocity(2 * x, ONE, 1.0)
    attention_velocity(2 * x, ONE, 1.0, sphere=False)
    with pytest.raises(ValueError, match=r"v of shape \(4, 2\) and x of shape \(4, 3\)"):
        project_tangent(x, x[:, :2])
    with pytest.raises(ValueError, match="beta with leading shape"):
        flow(x.expand(2, 4, 3), ONE, torch.ones(3), [0, 1])
    with pytest.raises(ValueError, match="normalization='linear'"):
        flow(x, ONE, 1.0, [0, 1], "linear")
    with pytest.raises(ValueError, match="beta=-2"):
        flat_blowup_time(1.0, -2.0, 1.0)


def test_energy_rate_is_the_slope_along_the_flow():
    x, m, beta = test_vector()
    v = attention_velocity(x, m, beta)
    h = 1e-4
    path = flow(x, m, beta, [0, h, 2 * h])
    energy = interaction_energy(path, m, beta)
    slope = (-3 * energy[0] + 4 * energy[1] - energy[2]) / (2 * h)
    torch.testing.assert_close(energy_rate(x, v, m, beta), slope, rtol=1e-5, atol=1e-9)
