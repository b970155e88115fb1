"""interaction_energy: the test vector, gradients, Hessian, rates and entropy production."""

import math

import numpy as np
import pytest
import torch
from clustering_instances import loop_weights, test_vector
from hypothesis import given, settings
from hypothesis import strategies as st

from mhabook_lib.attention import ScalarHeads, attention_entropy, attention_scores, head_outputs
from mhabook_lib.energy import (
    attention_entropy_rate,
    energy_gradient,
    energy_hessian,
    energy_rate,
    interaction_energy,
    relu_energy,
    score_rates,
)
from mhabook_lib.token_flow import (
    attention_velocity,
    orthogonal_heads,
    random_heads,
    sample_sphere,
)


def values(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def test_the_test_vector():
    """Printed to 12 decimals; half a unit of the last digit is allowed."""
    x, m, beta = test_vector()
    exact = {"rtol": 0, "atol": 5.1e-13}
    u = attention_velocity(x, m, beta, "unnormalized")
    flat = attention_velocity(x, m, beta, "unnormalized", sphere=False)
    s = attention_velocity(x, m, beta, "softmax")
    rate_u = energy_rate(x, u, m, beta)
    close = torch.testing.assert_close
    close(interaction_energy(x, m, beta), values(0.343005006491, 0.341760627274), **exact)
    close(rate_u, values(0.005603120715, 0.005232571051), **exact)
    close(energy_rate(x, flat, m, beta), values(0.010278148283, 0.009164887380), **exact)
    close(energy_rate(x, s, m, beta), values(0.005424990038, 0.005054368196), **exact)
    entropy = attention_entropy(attention_scores(x, m), beta)[:, 0]
    close(entropy, values(1.751276523240, 1.749131042705), **exact)
    production = attention_entropy_rate(x, s, m, beta)[:, 0]
    close(production, values(-0.002054162719, -0.005312868590), **exact)
    close((u**2).sum() / 6, values(0.010835691766).squeeze(), **exact)
    close((u**2).sum() / 6, rate_u.sum(), rtol=1e-13, atol=0)


def test_energies_against_loops():
    x, m, beta = test_vector()
    for h in range(2):
        kernel = loop_weights(x, m[h], beta, "unnormalized")
        expected = sum(map(sum, kernel)) / (2 * beta * 36)
        assert float(interaction_energy(x, m, beta)[h]) == pytest.approx(expected, rel=1e-13)
        positive = loop_weights(x, m[h], beta, "relu")
        expected = sum(w * w for row in positive for w in row) / (4 * 36)
        assert float(relu_energy(x, m)[h]) == pytest.approx(expected, rel=1e-13)


@given(seed=st.integers(0, 10**6), beta=st.floats(0.1, 5), n=st.integers(1, 6))
@settings(max_examples=20, deadline=None)
def test_gradient_for_any_heads(seed, beta, n):
    rng = np.random.default_rng(seed)
    x = sample_sphere((n, 5), rng).requires_grad_()
    m = random_heads((3, 5, 5), rng, "general")
    energies = interaction_energy(x, m, beta)
    gradient = energy_gradient(x.detach(), m, beta)
    for h in range(3):
        (auto,) = torch.autograd.grad(energies[h], x, retain_graph=True)
        torch.testing.assert_close(gradient[h], auto, rtol=1e-10, atol=1e-13)


def test_flows_are_gradients_only_for_symmetric_heads():
    rng = np.random.default_rng(1)
    x = sample_sphere((64, 7, 5), rng)
    gaps = {}
    for kind in ("symmetric", "general"):
        m = random_heads((64, 3, 5, 5), rng, kind)
        v = attention_velocity(x, m, 1.3, "unnormalized", sphere=False) / 7
        gradient = energy_gradient(x, m, 1.3).sum(-3)
        gaps[kind] = float((gradient - v).abs().max() / v.abs().max())
        outputs = head_outputs(x, m, 1.3, "unnormalized") / 49
        if kind == "symmetric":
            torch.testing.assert_close(energy_gradient(x, m, 1.3), outputs)
            y = x.clone().requires_grad_()
            (auto,) = torch.autograd.grad(relu_energy(y, m).sum(), y)
            relu = attention_velocity(x, m, 1.3, "relu", sphere=False) / 7
            torch.testing.assert_close(auto, relu, rtol=1e-11, atol=1e-14)
    assert gaps["symmetric"] < 1e-13
    assert gaps["general"] > 0.1


@pytest.mark.parametrize("normalization", ["unnormalized", "softmax", "relu"])
def test_energy_rate_against_the_gradient(normalization):
    rng = np.random.default_rng(2)
    x = sample_sphere((9, 6, 4), rng)
    m = random_heads((9, 2, 4, 4), rng, "general")
    v = attention_velocity(x, m, 0.9, normalization)
    expected = (energy_gradient(x, m, 0.9) * v.unsqueeze(-3)).sum((-2, -1))
    torch.testing.assert_close(energy_rate(x, v, m, 0.9), expected, rtol=1e-11, atol=1e-14)


def test_the_total_energy_rate_is_the_dissipation():
    rng = np.random.default_rng(3)
    x, m = sample_sphere((200, 7, 5), rng), random_heads((200, 3, 5, 5), rng, "symmetric")
    for beta in (0.5, 4.0):
        for sphere in (True, False):
            v = attention_velocity(x, m, beta, "unnormalized", sphere=sphere)
            rates = energy_rate(x, v, m, beta)
            dissipation = (v**2).sum((-2, -1)) / 7
            torch.testing.assert_close(rates.sum(-1), dissipation, rtol=1e-11, atol=1e-14)
    transposed = random_heads((2000, 3, 5, 5), rng, "general")
    y = sample_sphere((2000, 7, 5), rng)
    v = attention_velocity(y, transposed, 4.0, "unnormalized", values=transposed.mT)
    assert bool((energy_rate(y, v, transposed, 4.0).sum(-1) < 0).any())


@pytest.mark.parametrize("kind", ["dense", "scalar", "block"])
def test_hessian_against_autograd(kind):
    rng = np.random.default_rng(4)
    x = sample_sphere((2, 4, 4), rng)
    heads = {
        "dense": random_heads((2, 2, 4, 4), rng, "symmetric"),
        "scalar": ScalarHeads(torch.tensor([0.5, -1.0], dtype=torch.float64)),
        "block": orthogonal_heads(torch.from_numpy(rng.standard_normal((2, 2, 2))), rng, 4),
    }[kind]
    hessian = energy_hessian(x, heads, 1.7)
    dense = heads if kind == "dense" else heads.dense(4)
    for b in range(2):
        m = dense if kind == "scalar" else dense[b]
        auto = torch.autograd.functional.hessian(
            lambda y, m=m: interaction_energy(y, m, 1.7).sum(), x[b]
        )
        torch.testing.assert_close(hessian[b], auto.reshape(16, 16), rtol=1e-11, atol=1e-14)


def test_psd_heads_make_the_energy_convex():
    rng = np.random.default_rng(5)
    x, psd = sample_sphere((50, 4, 3), rng), random_heads((50, 2, 3, 3), rng, "psd")
    eigenvalues = torch.linalg.eigvalsh(energy_hessian(x, psd, 1.7))
    assert bool((eigenvalues[:, 0] >= -1e-12 * eigenvalues[:, -1]).all())
    indefinite = torch.linalg.eigvalsh(energy_hessian(x, psd - torch.eye(3), 1.7))
    assert float(indefinite.min()) < -1e-3
    with pytest.raises(ValueError, match="symmetric"):
        energy_hessian(x, random_heads((2, 3, 3), rng, "general"), 1.0)


def test_entropy_production_against_a_forward_derivative():
    rng = np.random.default_rng(6)
    x, m = sample_sphere((3, 6, 4), rng), random_heads((3, 2, 4, 4), rng, "general")
    beta = values(0.4, 1.5, 5.0)
    for v in (attention_velocity(x, m, beta), torch.from_numpy(rng.standard_normal(x.shape))):
        _, derivative = torch.func.jvp(
            lambda y: attention_entropy(attention_scores(y, m), beta), (x,), (v,)
        )
        rate = attention_entropy_rate(x, v, m, beta)
        torch.testing.assert_close(rate, derivative, rtol=1e-10, atol=1e-13)
    half = torch.einsum("bia,bhac,bjc->bhij", v, m, x)  # without the second half of s'
    assert float((score_rates(x, v, m) - half).abs().max()) > 0.1


def test_energy_of_one_cluster_is_exact():
    x = values(1.0, 0.0).expand(5, 2)
    heads = ScalarHeads(values(0.5, -2.0))
    expected = values(math.exp(0.75), math.exp(-3.0)) / 3
    torch.testing.assert_close(interaction_energy(x, heads, 1.5), expected)


def test_errors():
    x, m, _ = test_vector()
    with pytest.raises(ValueError, match="beta=0"):
        interaction_energy(x, m, 0.0)
    with pytest.raises(ValueError, match=r"velocity of shape \(6, 3\) and x of shape \(6, 4\)"):
        energy_rate(x, x[:, :3], m, 1.0)
