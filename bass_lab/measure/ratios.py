"""Paired repeats of interleaved methods, and confidence intervals of speed ratios and of means."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

Found = TypeVar("Found")
# 97.5% quantiles of Student's t distribution with 1, 2, … degrees of freedom: scipy.stats.t.ppf(0.975, freedom)
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def half_width(values: pd.Series) -> float:
    """Return half the width of the 95% confidence interval of the mean, by Student's t. NaN for a single value."""
    freedom = len(values) - 1
    few = freedom <= len(STUDENT)
    return values.sem() * (STUDENT[freedom - 1] if few else 1.96 + 2.372 / freedom + 2.823 / freedom**2)


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
