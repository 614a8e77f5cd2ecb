"""How much faster one way is than another: paired repeats, their ratios, and how sure one can be of the median."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike


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
