"""symmetries: projections against least squares, conserved matrices, balancing, layers, errors."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhabook_lib.attention_layer import (
    attention_core,
    random_weights,
    rope_frequencies,
    weight_shapes,
)
from mhabook_lib.symmetries import (
    head_diagnostics,
    horizontal_step,
    imbalance,
    output_value_factors,
    plane_imbalance,
    query_key_factors,
    rebalance,
    rebalance_layer,
    rebalance_rope,
    rope_projection,
    rope_step,
    vertical_projection,
    vertical_step,
)

LAYERS = {  # arguments of weight_shapes, rotary
    "plain": ({}, False),
    "biases": ({"biases": "qkvo"}, False),
    "groups, biases": ({"groups": 2, "biases": "qkvo"}, False),
    "rotary": ({}, True),
    "rotary, groups, biases": ({"groups": 2, "biases": "qkvo"}, True),
}


@pytest.fixture
def rng():
    return np.random.default_rng(9)


def normal(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape))


def layer_case(name, rng):
    """A layer of four heads, the gradient of a loss, and whether it turns."""
    shape, rotary = LAYERS[name]
    weights = random_weights(weight_shapes(4, 6, 4, **shape), rng, 0.5)
    x, target = normal(rng, 3, 5, 6), normal(rng, 3, 5, 6)
    gradient = torch.func.grad(
        lambda w: (output(w, x, rotary) - target).square().mean() / 2,
    )(weights)
    return weights, gradient, x, rotary


def output(weights, x, rotary):
    return attention_core(weights, x, rope=rope_frequencies(4) if rotary else None).output


def vertical_columns(w_q, w_k):
    """(A W_Q, -A^T W_K) for the D^2 matrices A with a single one, as columns."""
    d = w_q.shape[0]
    columns = []
    for a in torch.eye(d * d).double().reshape(-1, d, d):
        columns.append(torch.cat([(a @ w_q).flatten(), (-a.mT @ w_k).flatten()]))
    return torch.stack(columns, dim=1)


def least_squares_rho(columns, dw_q, dw_k):
    """Share of an update inside the span of columns, without any formula."""
    update = torch.cat([dw_q.flatten(), dw_k.flatten()])
    basis = torch.linalg.svd(columns, full_matrices=False)[0]
    return ((basis.mT @ update).norm() / update.norm()).square()


# Projections


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(0, 4),
    st.integers(0, 4),
    st.integers(0, 2**32 - 1),
)
def test_projection_is_least_squares(d, more_q, more_k, seed):
    rng = np.random.default_rng(seed)
    w_q, dw_q = normal(rng, 2, d, d + more_q)
    w_k, dw_k = normal(rng, 2, d, d + more_k)
    found = vertical_projection(w_q, w_k, dw_q, dw_k)
    columns = vertical_columns(w_q, w_k)
    torch.testing.assert_close(
        found.rho, least_squares_rho(columns, dw_q, dw_k), rtol=1e-9, atol=1e-12
    )
    rest = torch.cat(
        [
            (update - step).flatten()
            for update, step in zip(
                (dw_q, dw_k), vertical_step(found.generator, w_q, w_k), strict=True
            )
        ]
    )
    assert (columns.mT @ rest).abs().max() < 1e-9 * columns.norm() * rest.norm()


def test_one_dimension_by_hand():
    """D=1: along (q, -k), A = (q.dq - k.dk) / (q.q + k.k)."""
    q, k = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 3.0]])
    dq, dk = torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, -1.0]])
    found = vertical_projection(q, k, dq, dk)
    assert found.generator.item() == pytest.approx(6 / 14)
    assert found.rho.item() == pytest.approx((36 / 14) / 7)


def test_a_singular_factor_is_enough(rng):
    w_q, w_k = normal(rng, 2, 3, 5)
    w_k[2] = w_k[0]
    dw_q, dw_k = normal(rng, 2, 3, 5)
    rho = vertical_projection(w_q, w_k, dw_q, dw_k).rho
    expected = least_squares_rho(vertical_columns(w_q, w_k), dw_q, dw_k)
    torch.testing.assert_close(rho, expected, rtol=1e-10, atol=0)


def test_share_of_nothing_is_not_a_number(rng):
    w_q, w_k = normal(rng, 2, 2, 4, 6)
    zero = torch.zeros_like(w_q)
    assert bool(vertical_projection(w_q, w_k, zero, zero).rho.isnan().all())
    assert bool(rope_projection(w_q, w_k, zero, zero).rho.isnan().all())


@pytest.mark.parametrize("project", [vertical_projection, rope_projection])
def test_heads_are_projected_one_by_one(project, rng):
    parts = normal(rng, 4, 2, 3, 4, 6)
    together = project(*parts)
    alone = project(*parts[:, 1, 2])
    torch.testing.assert_close(together.rho[1, 2], alone.rho, rtol=1e-12, atol=0)
    torch.testing.assert_close(together.generator[1, 2], alone.generator, rtol=1e-11, atol=1e-13)


def test_single_precision_is_projected_in_double(rng):
    parts = normal(rng, 4, 4, 6).float()
    single = vertical_projection(*parts).rho
    assert single.dtype == torch.float64
    assert single.item() == vertical_projection(*parts.double()).rho.item()


def test_rotary_projection_is_least_squares(rng):
    w_q, w_k, dw_q, dw_k = normal(rng, 4, 6, 7)
    basis = torch.cat([torch.eye(3) + 0j, 1j * torch.eye(3)])
    steps = rope_step(basis, w_q, w_k)
    columns = torch.cat([step.flatten(1) for step in steps], dim=1).mT
    found = rope_projection(w_q, w_k, dw_q, dw_k)
    expected = least_squares_rho(columns, dw_q, dw_k)
    torch.testing.assert_close(found.rho, expected, rtol=1e-11, atol=0)


def test_rotary_steps_are_vertical_steps_that_commute_with_rotations(rng):
    w_q, w_k = normal(rng, 2, 4, 5)
    alpha = torch.complex(*normal(rng, 2, 2))
    generator = torch.zeros(4, 4).double()
    for d, a in enumerate(alpha):
        block = torch.tensor([[a.real, -a.imag], [a.imag, a.real]])
        generator[2 * d : 2 * d + 2, 2 * d : 2 * d + 2] = block
    for planar, full in zip(
        rope_step(alpha, w_q, w_k), vertical_step(generator, w_q, w_k), strict=True
    ):
        torch.testing.assert_close(planar, full, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_horizontal(name, rng):
    weights, gradient, _, rotary = layer_case(name, rng)
    watched = head_diagnostics(weights, gradient, rotary)
    assert watched.rho.max() < 1e-28
    kept = horizontal_step(weights, gradient, rotary)
    for key, value in gradient.items():
        torch.testing.assert_close(kept[key], value, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("name", LAYERS)
def test_horizontal_steps_have_no_vertical_part(name, rng):
    weights, _, _, rotary = layer_case(name, rng)
    noise = {key: normal(rng, *value.shape) for key, value in weights.items()}
    assert head_diagnostics(weights, noise, rotary).rho.min() > 1e-3
    kept = horizontal_step(weights, noise, rotary)
    assert kept.keys() == noise.keys()
    assert head_diagnostics(weights, kept, rotary).rho.max() < 1e-24
    moved = {"w_q", "w_k", "b_q"} | ({"b_k"} if rotary else set())
    for key in kept.keys() - moved:
        assert torch.equal(kept[key], noise[key])


def test_diagnostics_one_by_one(rng):
    weights = random_weights(weight_shapes(2, 5, 3), rng, 1.0)
    step = {key: normal(rng, *value.shape) for key, value in weights.items()}
    watched = head_diagnostics(weights, step)
    for h in range(2):
        w_q, w_k = weights["w_q"][h].numpy(), weights["w_k"][h].numpy()
        delta = w_q @ w_q.T - w_k @ w_k.T
        lowest = [np.linalg.svd(w)[1][-1] ** 2 for w in (w_q, w_k)]
        norm = np.hypot(np.linalg.norm(step["w_q"][h]), np.linalg.norm(step["w_k"][h]))
        expected = [norm, np.linalg.norm(delta), np.trace(delta), sum(lowest)]
        np.testing.assert_allclose([part[h] for part in watched[1:]], expected, rtol=1e-12)


# What is conserved


@pytest.mark.parametrize("name", [name for name, (_, rotary) in LAYERS.items() if not rotary])
def test_gradients_conserve_the_imbalance(name, rng):
    weights, gradient, *_ = layer_case(name, rng)
    for factors in (query_key_factors, output_value_factors):
        rate = imbalance_rate(imbalance, factors, weights, gradient)
        assert rate < 1e-13


@pytest.mark.parametrize("name", [name for name, (_, rotary) in LAYERS.items() if rotary])
def test_rotary_gradients_conserve_planes_only(name, rng):
    weights, gradient, *_ = layer_case(name, rng)
    factors = lambda w: query_key_factors(w, True)  # noqa: E731
    assert imbalance_rate(plane_imbalance, factors, weights, gradient) < 1e-13
    assert imbalance_rate(imbalance, factors, weights, gradient) > 1e-3


def imbalance_rate(law, factors, weights, gradient):
    """Derivative of a quadratic law along the gradient: exact by a central difference."""
    ends = [
        law(*(w + s * g for w, g in zip(factors(weights), factors(gradient), strict=True)))
        for s in (1, -1)
    ]
    return ((ends[0] - ends[1]).norm() / ends[0].norm()).item()


def test_planes_are_traces_of_blocks(rng):
    w_q, w_k = normal(rng, 2, 3, 4, 5)
    diagonal = imbalance(w_q, w_k).diagonal(dim1=-2, dim2=-1)
    blocks = diagonal[..., 0::2] + diagonal[..., 1::2]
    torch.testing.assert_close(plane_imbalance(w_q, w_k), blocks, rtol=1e-12, atol=1e-12)


# Balancing


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 5), st.integers(0, 4), st.integers(0, 4), st.integers(0, 2**32 - 1))
def test_rebalance_keeps_the_product_and_balances(d, more_q, more_k, seed):
    rng = np.random.default_rng(seed)
    w_q, w_k = normal(rng, d, d + more_q), normal(rng, d, d + more_k)
    new_q, new_k = rebalance(w_q, w_k)
    product = w_k.mT @ w_q
    scale = product.norm()
    assert (new_k.mT @ new_q - product).norm() < 1e-12 * scale
    assert imbalance(new_q, new_k).norm() < 1e-12 * scale
    nuclear = torch.linalg.svdvals(product).sum()
    torch.testing.assert_close(
        new_q.square().sum() + new_k.square().sum(), 2 * nuclear, rtol=1e-12, atol=1e-12
    )
    again = rebalance(new_q, new_k)
    assert (again[0] - new_q).norm() < 1e-9 * new_q.norm()


def test_aligned_is_nearest_among_rotations(rng):
    """All rotations of a plane, on a fine grid."""
    w_q, w_k = normal(rng, 2, 2, 5)
    even = rebalance(w_q, w_k, align=False)
    angles = torch.linspace(0, 2 * torch.pi, 20_001).double()
    cos, sin = angles.cos(), angles.sin()
    turn = torch.stack([cos, -sin, sin, cos], dim=-1).unflatten(-1, (2, 2))
    both = torch.cat([turn, turn @ torch.diag(torch.tensor([1.0, -1.0]).double())])
    distances = sum(
        (both @ new - old).square().sum((-2, -1)) for new, old in zip(even, (w_q, w_k), strict=True)
    )
    nearest = sum(
        (new - old).square().sum() for new, old in zip(rebalance(w_q, w_k), (w_q, w_k), strict=True)
    )
    assert nearest <= distances.min() * (1 + 1e-12)
    assert nearest > distances.min() * (1 - 1e-6)


def test_rotary_balance_is_the_minimum_over_scales(rng):
    w_q, w_k = normal(rng, 2, 4, 5)
    new_q, new_k = rebalance_rope(w_q, w_k)
    assert plane_imbalance(new_q, new_k).abs().max() < 1e-13
    norms = [w.unflatten(0, (2, 2)).flatten(1).square().sum(1) for w in (w_q, w_k)]
    scales = torch.logspace(-2, 2, 4001).double()[:, None]
    smallest = (scales * norms[0] + norms[1] / scales).min(0).values.sum()
    found = new_q.square().sum() + new_k.square().sum()
    assert found <= smallest and found > smallest * (1 - 1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_balanced_layers_compute_the_same(name, rng):
    weights, _, x, rotary = layer_case(name, rng)
    balanced = rebalance_layer(weights, rotary)
    torch.testing.assert_close(
        output(balanced, x, rotary), output(weights, x, rotary), rtol=1e-11, atol=1e-12
    )
    law = plane_imbalance if rotary else imbalance
    assert law(*query_key_factors(balanced, rotary)).abs().max() < 1e-12
    for key in weights.keys() - {"w_q", "w_k", "b_q", "b_k"}:
        assert balanced[key] is weights[key]


def test_full_balancing_breaks_rotary_layers(rng):
    weights, _, x, _ = layer_case("rotary", rng)
    gap = output(rebalance_layer(weights), x, True) - output(weights, x, True)
    assert gap.norm() > 1e-2 * output(weights, x, True).norm()


def test_factors_of_layers(rng):
    weights = random_weights(weight_shapes(4, 3, 2, groups=2, biases="qkvo"), rng, 1.0)
    queries, keys = query_key_factors(weights)
    for g in range(2):
        heads = [
            torch.cat([weights["w_q"][h], weights["b_q"][h, :, None]], dim=1)
            for h in (2 * g, 2 * g + 1)
        ]
        assert torch.equal(queries[g], torch.cat(heads, dim=1))
    assert torch.equal(keys, weights["w_k"])
    turned = query_key_factors(weights, rotary=True)[1]
    assert torch.equal(turned[..., -1], weights["b_k"])
    outputs, values = output_value_factors(weights)
    assert torch.equal(outputs[1, :, :3], weights["w_o"][2].mT)
    assert torch.equal(values[..., -1], weights["b_v"])


# Errors


def bad_pairs():
    w = torch.ones(4, 5).double()
    return {
        "w_q of shape": (torch.ones(3, 5).double(), w),
        "w_q.*finite": (w * torch.nan, w),
        "w_k.*finite": (w, w * torch.inf),
    }


@pytest.mark.parametrize("message", bad_pairs())
@pytest.mark.parametrize("function", [imbalance, plane_imbalance, rebalance, rebalance_rope])
def test_pairs_must_fit(message, function):
    with pytest.raises(ValueError, match=message):
        function(*bad_pairs()[message])


@pytest.mark.parametrize("project", [vertical_projection, rope_projection])
def test_projection_errors(project, rng):
    w_q, w_k, dw_q, dw_k = normal(rng, 4, 3, 4, 5)
    with pytest.raises(ValueError, match=r"dw_q .*shape"):
        project(w_q, w_k, dw_q[..., 1:], dw_k)
    with pytest.raises(ValueError, match=r"dw_k .*shape"):
        project(w_q, w_k, dw_q, dw_k[..., 1:])
    with pytest.raises(ValueError, match=r"dw_q.*finite"):
        project(w_q, w_k, dw_q * torch.nan, dw_k)
    with pytest.raises(ValueError, match=r"dw_k.*finite"):
        project(w_q, w_k, dw_q, dw_k / 0)
    empty = torch.tensor([1.0, 0.0, 1.0]).double()[:, None, None]
    with pytest.raises(ValueError, match="1 of 3 heads are both singular"):
        project(empty * w_q, empty * w_k, dw_q, dw_k)


def test_equal_null_rows_make_the_projection_ambiguous(rng):
    w_q, w_k, dw_q, dw_k = normal(rng, 4, 3, 5)
    w_q[2], w_k[2] = w_q[0], w_k[0]
    with pytest.raises(ValueError, match="both singular"):
        vertical_projection(w_q, w_k, dw_q, dw_k)


def test_planes_need_even_rows(rng):
    odd = normal(rng, 3, 5)
    for function, count in (
        (plane_imbalance, 2),
        (rebalance_rope, 2),
        (rope_projection, 4),
    ):
        with pytest.raises(ValueError, match="expected an even number of rows"):
            function(*[odd] * count)
    with pytest.raises(ValueError, match="expected an even number of rows"):
        rope_step(torch.ones(1), odd, odd)


def test_planes_that_vanish_cannot_be_balanced():
    w = torch.ones(4, 3).double()
    gone = torch.tensor([1.0, 1.0, 0.0, 0.0]).double()[:, None] * w
    with pytest.raises(ValueError, match="expected no plane in which one of them vanishes"):
        rebalance_rope(w, gone)


def test_wide_heads_cannot_be_balanced(rng):
    with pytest.raises(ValueError, match="D <= E"):
        rebalance(*normal(rng, 2, 5, 4))
