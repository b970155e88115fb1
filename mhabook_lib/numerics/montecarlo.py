"""Monte Carlo estimates with their uncertainty."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from scipy.special import ndtri


class Proportion(NamedTuple):
    """A measured proportion with its Wilson interval."""

    value: float
    low: float
    high: float
    successes: int
    trials: int


def wilson_interval(successes, trials, confidence: float = 0.95):
    """Wilson score interval `(low, high)` for a proportion, elementwise over arrays.

    `(p + z^2/2N -+ z sqrt(p(1-p)/N + z^2/4N^2)) / (1 + z^2/N)`. Raises ValueError unless
    0 <= successes <= trials, trials >= 1 and 0 < confidence < 1.

    >>> [round(float(end), 4) for end in wilson_interval(0, 100)]
    [0.0, 0.037]
    """
    successes, trials = np.asarray(successes, dtype=float), np.asarray(trials, dtype=float)
    if np.any(trials < 1) or np.any(successes < 0) or np.any(successes > trials):
        raise ValueError(
            f"successes={successes}, trials={trials}: expected 0 <= successes <= trials"
        )
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence}: expected a value in (0, 1)")
    z = ndtri((1 + confidence) / 2)
    p = successes / trials
    center = p + z**2 / (2 * trials)
    half = z * np.sqrt(p * (1 - p) / trials + z**2 / (4 * trials**2))
    scale = 1 + z**2 / trials
    return np.clip((center - half) / scale, 0, 1), np.clip((center + half) / scale, 0, 1)


def proportion(events: torch.Tensor, confidence: float = 0.95) -> Proportion:
    """The proportion of true entries of a boolean tensor, with its Wilson interval.

    >>> proportion(torch.tensor([True, False, True, True])).value
    0.75
    """
    successes, trials = int(events.sum()), events.numel()
    low, high = wilson_interval(successes, trials, confidence)
    return Proportion(successes / trials, float(low), float(high), successes, trials)


def standard_error(samples: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Standard error of the mean along `dim`, `std / sqrt(N)` with N - 1 in the variance.

    Raises ValueError for fewer than two samples.

    >>> standard_error(torch.tensor([1.0, 3.0]))
    tensor(1.)
    """
    count = samples.shape[dim]
    if count < 2:
        raise ValueError(f"samples of shape {tuple(samples.shape)}: expected >= 2 along dim={dim}")
    return samples.std(dim=dim) / count**0.5
