"""Markov chains of high order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mhabook_lib.markov import (
    context_law,
    next_token_law,
    reference_teacher,
    sample_chain,
    stationary_law,
    windows,
)


@settings(max_examples=20, deadline=None)
@given(st.integers(4, 9), st.integers(1, 4), st.integers(0, 100))
def test_teacher_is_orthogonal_with_the_stated_norms(dim, lags, seed):
    teacher = reference_teacher(dim, lags, 1.7, 0.7, seed)
    flat = teacher.reshape(lags, -1)
    norms = np.sqrt(dim) * 0.7 * 1.7 ** np.arange(lags - 1, -1, -1.0)
    assert np.allclose(flat @ flat.T, np.diag(norms**2), atol=1e-10)
    assert np.allclose(teacher.sum(1), 0) and np.allclose(teacher.sum(2), 0)


def test_law_is_the_softmax_of_a_sum_of_columns():
    teacher = reference_teacher(4, 3, 1.5, 0.8, 0)
    law = next_token_law(teacher)
    logits = teacher[0][:, 1] + teacher[1][:, 3] + teacher[2][:, 0]
    wanted = np.exp(logits) / np.exp(logits).sum()
    assert np.allclose(law[1, 3, 0], wanted)


def test_stationary_law_of_a_chain_of_order_one_is_the_eigenvector():
    law = next_token_law(np.random.default_rng(0).standard_normal((1, 5, 5)))
    values, vectors = np.linalg.eig(law.T)
    vector = np.real(vectors[:, np.argmax(np.real(values))])
    assert np.allclose(stationary_law(law), vector / vector.sum(), atol=1e-12)


def test_contexts_are_stationary_and_consistent():
    law = next_token_law(reference_teacher(4, 2, 1.5, 1.0, 1))
    pi = stationary_law(law)
    joint = context_law(law, 4)
    assert joint.sum() == pytest.approx(1)
    assert np.allclose(joint.sum((2, 3)), pi, atol=1e-12)
    assert np.allclose(joint.sum((0, 1)), pi, atol=1e-12)


def test_sampler_follows_the_law():
    teacher = reference_teacher(3, 2, 1.5, 1.0, 0)
    law = next_token_law(teacher)
    tokens = sample_chain(teacher, 60_000, 3, np.random.default_rng(0))
    counts = np.zeros((3, 3, 3))
    np.add.at(counts, (tokens[:, 1], tokens[:, 0], tokens[:, 2]), 1)
    total = counts.sum(-1, keepdims=True)
    z = (counts - total * law) / np.sqrt(total * law * (1 - law))
    assert np.abs(z).max() < 4.5
    wrong = (counts - total * law.transpose(1, 0, 2)) / np.sqrt(total * law * (1 - law))
    assert np.abs(wrong).max() > 10


def test_windows_are_most_recent_first():
    contexts, following = windows(np.array([[0, 1, 2, 3]]), 2)
    assert contexts.tolist() == [[1, 0], [2, 1]] and following.tolist() == [2, 3]


def test_impossible_chains_are_refused():
    teacher = reference_teacher(3, 2, 1.5, 1.0, 0)
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="K <= "):
        reference_teacher(2, 2, 1.5, 1.0, 0)
    with pytest.raises(ValueError, match="dependent"):
        reference_teacher(3, 3, 1.5, 1.0, 3)
    with pytest.raises(ValueError, match="ratio"):
        reference_teacher(4, 2, -1.0, 1.0, 0)
    with pytest.raises(ValueError, match="more tokens than the order 2"):
        sample_chain(teacher, 5, 2, rng)
    with pytest.raises(ValueError, match="at least the order 2"):
        context_law(next_token_law(teacher), 1)
    with pytest.raises(ValueError, match="num_positions=4"):
        windows(np.zeros((2, 4), int), 4)
    with pytest.raises(ValueError, match="expected \\(K, d, d\\)"):
        next_token_law(np.zeros((3, 3)))
    swapping = np.zeros((2, 2))
    swapping[[0, 1], [1, 0]] = 1.0
    assert np.allclose(stationary_law(swapping), 0.5)
