"""Paired repeats of interleaved methods, and speed ratios with a confidence interval."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike

Found = TypeVar("Found")


def counted_repeats(
    once: Callable[[int], Found], repeats: int, recordings: Callable[[], int], first: int = 0
) -> Iterator[tuple[Found, bool]]:
    """Yield the result of `once` for each of `repeats` repeats, and True if the repeat was disturbed.

    A repeat runs all compared methods. A policy may choose a new draft length at any time. The repeat then captures a
    CUDA graph and takes longer, so another repeat replaces it, up to 2 · `repeats` times. Later repeats with a capture
    are disturbed.

    once: receives the number of the repeat, starting at `first`. recordings: returns the number of captures so far.
    """
    again, counted = 2 * repeats, 0
    for number in itertools.count(first):
        before = recordings()
        found = once(number)
        disturbed = recordings() > before
        if disturbed and again > 0:
            again -= 1
            continue
        yield found, disturbed
        counted += 1
        if counted == repeats:
            return


class Ratio(NamedTuple):
    """Median of paired ratios with a 95% bootstrap interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: ArrayLike, others: ArrayLike) -> Ratio:
        """Return the speed relative to another method. seconds, others: times of both methods in each repeat."""
        ratios = np.asarray(others) / np.asarray(seconds)
        resamples = np.random.default_rng(0).choice(ratios, (10_000, len(ratios)))
        low, high = np.quantile(np.median(resamples, axis=1), [0.025, 0.975])
        return cls(float(np.median(ratios)), float(low), float(high))

    def __str__(self) -> str:
        return f"{self.median:.2f}× ({self.low:.2f}-{self.high:.2f})"
