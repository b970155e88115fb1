"""Sequences of tokens to train on: an induction task, and any text file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np


class TokenSource(Protocol):
    """Draws sequences (count, length) of integers in [0, vocab_size)."""

    name: str
    vocab_size: int

    def batch(self, count: int, length: int, rng: np.random.Generator) -> np.ndarray: ...


@dataclass(frozen=True)
class InductionTask:
    """Random symbols, then the same symbols again.

    The first half of a sequence starts anywhere; each further symbol is, with probability 1/2, the
    successor `(5 x + 3) mod V` of the one before, else uniform. The second half repeats the first,
    so that it can be predicted by a model that looks up what followed last time.
    Source: identification, training.

    >>> InductionTask(16).batch(1, 8, np.random.default_rng(0))
    array([[13,  4,  8,  4, 13,  4,  8,  4]])
    """

    vocab_size: int = 16

    @property
    def name(self) -> str:
        return f"induction with {self.vocab_size} symbols"

    def batch(self, count: int, length: int, rng: np.random.Generator) -> np.ndarray:
        """Sequences (count, length). Raises ValueError for an odd length."""
        if length % 2:
            raise ValueError(f"length={length}: expected an even number, two equal halves")
        symbols = rng.integers(self.vocab_size, size=(count, length // 2))
        follows = rng.random(symbols.shape) < 0.5
        for t in range(1, length // 2):
            successor = (5 * symbols[:, t - 1] + 3) % self.vocab_size
            symbols[:, t] = np.where(follows[:, t], successor, symbols[:, t])
        return np.concatenate([symbols, symbols], axis=1)


class Text:
    """Windows of a text file, a token for each character that occurs in it.

    Raises ValueError for a file that is missing, and in `batch` for one shorter than a window.
    """

    def __init__(self, path: str | Path):
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"path={str(path)!r}: expected a text file, none in {Path.cwd()}")
        text = path.read_text(encoding="utf-8")
        self.name = f"text {path.name} of {len(text)} characters"
        self.alphabet = "".join(sorted(set(text)))
        self.vocab_size = len(self.alphabet)
        self.tokens = np.searchsorted(np.array(list(self.alphabet)), np.array(list(text)))

    def batch(self, count: int, length: int, rng: np.random.Generator) -> np.ndarray:
        """Windows (count, length) that start anywhere in the text."""
        if len(self.tokens) < length:
            raise ValueError(f"{self.name}: expected at least {length}, one window")
        starts = rng.integers(len(self.tokens) - length + 1, size=(count, 1))
        return self.tokens[starts + np.arange(length)]
