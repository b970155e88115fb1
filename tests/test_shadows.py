"""radial_shadow: the shadow identity, Radial Dominance, approximately orthogonal heads."""

import numpy as np
import pytest
import torch
from clustering_instances import test_vector

from mhabook_lib.attention import attention_scores, head_outputs
from mhabook_lib.counterexamples import one_token
from mhabook_lib.energy import energy_rate
from mhabook_lib.shadows import (
    head_overlap,
    overlap_bound,
    perturb_to_overlap,
    radial_dominance_margin,
    radial_shadow,
    shadow_rate,
)
from mhabook_lib.token_flow import (
    attention_velocity,
    orthogonal_heads,
    random_heads,
    sample_sphere,
)


def orthogonal_instances(seed, count, d, n, num_heads, psd=True):
    rng = np.random.default_rng(seed)
    shape = (count, num_heads, d // num_heads)
    eigenvalues = rng.uniform(0.2, 1.5, shape) if psd else rng.standard_normal(shape)
    heads = orthogonal_heads(torch.from_numpy(eigenvalues), rng, d)
    return sample_sphere((count, n, d), rng), heads


def test_shadow_against_loops():
    x, m, beta = test_vector()
    m = torch.cat([m, m[:1] @ m[1:]])  # three heads
    f = head_outputs(x, m, beta, "unnormalized")
    tangential_sq, shadow, radial = radial_shadow(x, f)
    margins, strong = [], []
    for h in range(3):
        for i in range(6):
            r = [float(x[i] @ f[g, i]) for g in range(3)]
            tangent = f[h, i] - r[h] * x[i]
            others = sum(r[g] for g in range(3) if g != h)
            assert float(radial[h, i]) == pytest.approx(r[h], abs=1e-14)
            assert float(shadow[h, i]) == pytest.approx(r[h] * others, abs=1e-14)
            assert float(tangential_sq[h, i]) == pytest.approx(float(tangent @ tangent), abs=1e-14)
            margins.append(float(tangent @ tangent) - r[h] * others)
            absolute = sum(abs(r[g]) for g in range(3) if g != h)
            strong.append(float(tangent @ tangent) - abs(r[h]) * absolute)
    assert float(radial_dominance_margin(x, f)) == pytest.approx(min(margins), abs=1e-14)
    assert float(radial_dominance_margin(x, f, strong=True)) == pytest.approx(
        min(strong), abs=1e-14
    )


@pytest.mark.parametrize("psd", [True, False])
def test_shadow_identity_for_orthogonal_heads(psd):
    x, heads = orthogonal_instances(1, 50, 6, 7, 3, psd)
    f = head_outputs(x, heads, 1.3, "unnormalized")
    rate = energy_rate(x, attention_velocity(x, heads, 1.3, "unnormalized"), heads, 1.3)
    torch.testing.assert_close(shadow_rate(x, f), rate, rtol=1e-10, atol=1e-14)
    tangential_sq, shadow, radial = radial_shadow(x, f)
    wrong = (tangential_sq + shadow).sum(-1) / 7**3
    assert float(((wrong - rate).abs() / rate.abs()).max()) > 0.5
    second_form = ((f**2).sum(-1) - radial * radial.sum(-2, keepdim=True)).sum(-1) / 7**3
    torch.testing.assert_close(second_form, rate, rtol=1e-9, atol=1e-13)
    flat = energy_rate(
        x, attention_velocity(x, heads, 1.3, "unnormalized", sphere=False), heads, 1.3
    )
    torch.testing.assert_close(flat, (f**2).sum((-2, -1)) / 7**3, rtol=1e-11, atol=1e-14)


def test_one_token_values():
    x, heads = one_token(1.2, 1.0, 0.9)
    rate = shadow_rate(x, head_outputs(x, heads, 2.0, "unnormalized"))
    expected = torch.tensor([-0.44470044, 1.47010400], dtype=torch.float64)
    torch.testing.assert_close(rate, expected, rtol=0, atol=5.1e-9)


def test_radial_dominance_is_sufficient_but_the_wrong_sign_is_not():
    met = 0
    for seed, d in ((2, 6), (3, 32)):
        x, heads = orthogonal_instances(seed, 400, d, 16, d // 8 if d > 8 else 3)
        for beta in (0.1, 1.0, 4.0):
            f = head_outputs(x, heads, beta, "unnormalized")
            rate = shadow_rate(x, f)
            decreasing = (rate < -1e-12 * rate.abs().sum(-1, keepdim=True)).any(-1)
            weak, strong = (radial_dominance_margin(x, f, s) >= 0 for s in (False, True))
            assert not bool((strong & ~weak).any())
            assert not bool((weak & decreasing).any())
            part = radial_shadow(x, f)
            wrong = (part.tangential_sq + part.shadow >= 0).flatten(1).all(-1)
            met += int((wrong & decreasing).sum())
    assert met > 0


def test_one_head_is_always_dominant():
    x, heads = orthogonal_instances(4, 20, 4, 5, 1)
    f = head_outputs(x, heads, 8.0, "unnormalized")
    assert bool((radial_dominance_margin(x, f) >= 0).all())


def test_overlap_bound_holds_and_is_sharp():
    x, heads = orthogonal_instances(5, 60, 6, 9, 3)
    rng = np.random.default_rng(6)
    noise = random_heads((60, 3, 6, 6), rng, "symmetric")
    eps = torch.tensor([1e-3, 1e-1], dtype=torch.float64)[:, None]
    m = perturb_to_overlap(heads.dense(6), noise, eps)
    assert m.shape == (2, 60, 3, 6, 6)
    torch.testing.assert_close(head_overlap(m), eps.expand(2, 60), rtol=1e-12, atol=1e-14)
    rate = energy_rate(x, attention_velocity(x, m, 1.7, "unnormalized"), m, 1.7)
    gap = (rate - shadow_rate(x, head_outputs(x, m, 1.7, "unnormalized"))).abs()
    bound = overlap_bound(attention_scores(x, m), 1.7, eps)
    assert bool((gap <= bound).all())
    assert bool((gap > bound / 20).any())
    # One token, M_1 = diag(1, 0), M_2 = diag(0.1, 1): the bound is reached.
    one = torch.eye(1, 2, dtype=torch.float64)
    m = torch.diag_embed(torch.tensor([[1.0, 0.0], [0.1, 1.0]], dtype=torch.float64))
    rate = energy_rate(one, attention_velocity(one, m, 1.0, "unnormalized"), m, 1.0)
    gap = (rate - shadow_rate(one, head_outputs(one, m, 1.0, "unnormalized"))).abs()
    torch.testing.assert_close(gap, overlap_bound(attention_scores(one, m), 1.0, 0.1))


def test_head_overlap_against_singular_values():
    m = random_heads((4, 3, 5, 5), np.random.default_rng(7), "general")
    for b in range(4):
        norms = [
            np.linalg.svd((m[b, h] @ m[b, g]).numpy(), compute_uv=False)[0]
            for h in range(3)
            for g in range(3)
            if h != g
        ]
        assert float(head_overlap(m)[b]) == pytest.approx(max(norms), rel=1e-12)


def test_errors():
    x, m, beta = test_vector()
    f = head_outputs(x, m, beta, "unnormalized")
    with pytest.raises(ValueError, match=r"outputs of shape \(2, 5, 4\) and x of shape \(6, 4\)"):
        radial_shadow(x, f[:, :5])
    with pytest.raises(ValueError, match="at least two heads"):
        head_overlap(m[:1])
    with pytest.raises(ValueError, match=r"eps=-0\.1"):
        overlap_bound(attention_scores(x, m), beta, -0.1)
    with pytest.raises(ValueError, match="sign change"):
        perturb_to_overlap(m, m, 1e-9)  # these heads overlap already
