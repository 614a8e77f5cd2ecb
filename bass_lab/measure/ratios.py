"""The pairing of interleaved repeats, and how much faster one method is than another: ratios and their median."""

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
    """Yield what `once` gives in each of `repeats` repeats, and True for a disturbed one.

    A repeat runs all methods that are compared. One in which CUDA graphs are recorded takes longer, so another one
    replaces it, up to two times `repeats` in all: a policy may ask for a new length at any time. Later ones are
    disturbed.

    once: receives the number of the repeat, from `first`. recordings: how many there were so far.
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
    """Median of paired ratios, and its 95% interval (bootstrap)."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: ArrayLike, others: ArrayLike) -> Ratio:
        """Speed over another way, whose time in each repeat is in `others`."""
        ratios = np.asarray(others) / np.asarray(seconds)
        resamples = np.random.default_rng(0).choice(ratios, (10_000, len(ratios)))
        low, high = np.quantile(np.median(resamples, axis=1), [0.025, 0.975])
        return cls(float(np.median(ratios)), float(low), float(high))

    def __str__(self) -> str:
        return f"{self.median:.2f}× ({self.low:.2f}-{self.high:.2f})"
