"""Two ways to the same result, timed in turn."""

from __future__ import annotations

from statistics import median
from time import perf_counter


def seconds_per_call(function, calls: int) -> float:
    """Mean wall time of one call over `calls` calls in a row."""
    start = perf_counter()
    for _ in range(calls):
        function()
    return (perf_counter() - start) / calls


def calls_for(function, shortest: float) -> int:
    """How many calls last about `shortest` seconds; a fast function is tried twice to warm up."""
    seconds = seconds_per_call(function, 1)
    if seconds < 0.1:
        seconds = seconds_per_call(function, 1)
    return max(1, round(shortest / seconds))


def compare(ours, other, repeats: int = 5, shortest: float = 0.1) -> dict:
    """Time `ours()` and `other()` alternately and return medians.

    Short functions are called often enough for each measurement to last `shortest` seconds.
    `ratio` is the median of the paired ratios other / ours, `spread` the largest relative
    distance of a paired ratio from it.
    """
    our_calls, other_calls = calls_for(ours, shortest), calls_for(other, shortest)
    pairs = [
        (seconds_per_call(ours, our_calls), seconds_per_call(other, other_calls))
        for _ in range(repeats)
    ]
    ratios = [slow / fast for fast, slow in pairs]
    ratio = median(ratios)
    return {
        "ours_s": median(fast for fast, _ in pairs),
        "other_s": median(slow for _, slow in pairs),
        "ratio": ratio,
        "spread": max(abs(value / ratio - 1) for value in ratios),
    }


def row(chapter, task, size, other_name, ours, other, errors, repeats=5) -> dict:
    """One row of the table: the timing of both, and `errors(ours(), other())`."""
    ours_error, other_error = errors(ours(), other())
    return {
        "chapter": chapter,
        "task": task,
        "size": size,
        "other": other_name,
        "ours_error": float(ours_error),
        "other_error": float(other_error),
        **compare(ours, other, repeats),
    }


def largest_gaps(reference):
    """Errors of both results against one reference."""
    return lambda ours, other: (abs(ours - reference).max(), abs(other - reference).max())
