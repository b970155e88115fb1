"""sequences: the induction task and windows of a text."""

import numpy as np
import pytest

from mhabook_lib.sequences import InductionTask, Text


@pytest.fixture
def rng():
    return np.random.default_rng(10)


def test_induction_repeats_its_first_half(rng):
    x = InductionTask(16).batch(50, 32, rng)
    assert x.shape == (50, 32) and x.min() >= 0 and x.max() == 15
    assert np.array_equal(x[:, :16], x[:, 16:])


def test_successors_follow_half_of_the_time(rng):
    """A successor also comes by chance, with probability 1/2 + 1/(2 V)."""
    task = InductionTask(16)
    x = task.batch(4000, 16, rng)[:, :8]
    rate = np.mean(x[:, 1:] == (5 * x[:, :-1] + 3) % 16)
    expected = 0.5 + 0.5 / 16
    assert abs(rate - expected) < 4 * np.sqrt(expected * (1 - expected) / x[:, 1:].size)
    first = np.bincount(x[:, 0], minlength=16) / 4000
    assert np.abs(first - 1 / 16).max() < 4 * np.sqrt(1 / 16 / 4000)


def test_same_generator_same_sequences():
    first, second = (InductionTask().batch(3, 10, np.random.default_rng(4)) for _ in range(2))
    assert np.array_equal(first, second)
    assert InductionTask(12).name == "induction with 12 symbols"


def test_windows_of_a_text(tmp_path, rng):
    path = tmp_path / "poem.txt"
    path.write_text("abracadabra é!", encoding="utf-8")
    source = Text(path)
    assert source.alphabet == " !abcdré"
    assert source.vocab_size == 8
    assert source.name == "text poem.txt of 14 characters"
    windows = source.batch(200, 5, rng)
    text = "".join(source.alphabet[t] for t in source.tokens)
    assert text == "abracadabra é!"
    seen = {"".join(source.alphabet[t] for t in window) for window in windows}
    assert seen == {text[i : i + 5] for i in range(10)}


def test_one_window_fills_the_text(tmp_path, rng):
    path = tmp_path / "short.txt"
    path.write_text("ab")
    assert Text(path).batch(2, 2, rng).tolist() == [[0, 1], [0, 1]]


def test_errors(tmp_path, rng):
    with pytest.raises(ValueError, match="length=7: expected an even number, two equal halves"):
        InductionTask().batch(1, 7, rng)
    with pytest.raises(ValueError, match=r"path='.*none.txt': expected a text file, none in"):
        Text(tmp_path / "none.txt")
    path = tmp_path / "short.txt"
    path.write_text("abc")
    with pytest.raises(ValueError, match=r"short.txt of 3 characters: expected at least 4"):
        Text(path).batch(1, 4, rng)
