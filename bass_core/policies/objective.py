"""Draft lengths for other ends than throughput: who should finish first, last, or in time?

All rows of a step share one draft length. Rows whose drafts are accepted more often want a longer one: serving them
first means drafting more than pays on the whole. `Objective` weights the rows' expected tokens; the weights are a
function of the rows' state, so that the same policy serves leaders, stragglers or deadlines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from bass_core.draft_length import RowsView
from bass_core.policies.goodput import Goodput

Weights = Callable[[RowsView, float], np.ndarray]


def first_finished(sharpness: float) -> Weights:
    """Rows nearer to their limit count more: weight (least remaining / remaining) ** sharpness."""
    return lambda rows, elapsed: (rows.remaining.min() / rows.remaining) ** sharpness


def last_finished(sharpness: float) -> Weights:
    """Rows farther from their limit count more: weight (remaining / most remaining) ** sharpness."""
    return lambda rows, elapsed: (rows.remaining / rows.remaining.max()) ** sharpness


def deadlines(seconds: Mapping[int, float]) -> Weights:
    """Rows count by the tokens per second that they still need; seconds: by row, from the decode's first step on.

    Rows without a deadline, and those that have missed theirs, count a hundredth of the most urgent one.
    """

    def weights(rows: RowsView, elapsed: float) -> np.ndarray:
        left = np.array([seconds.get(row, np.inf) for row in rows.ids.tolist()]) - elapsed
        needed = np.where(left > 0, rows.remaining / np.maximum(left, 1e-9), 0.0)
        return np.maximum(needed / needed.max(), 0.01) if needed.any() else np.ones(len(needed))

    return weights


EQUAL = last_finished(0.0)


@dataclass
class Objective(Goodput):
    """`Goodput` of weighted rows: weights(rows, elapsed) gives one weight >= 0 per row.

    elapsed: seconds that the decode's steps took so far, by the cost model (never by the clock).
    """

    weights: Weights = field(default=EQUAL, repr=False)

    def _reset(self) -> None:
        super()._reset()
        self.elapsed = 0.0

    def plan(self, rows: RowsView) -> int | Tensor:
        plan = super().plan(rows)
        self.elapsed += self.seconds(rows)[self.k]
        return plan

    def weigh(self, rows: RowsView, tokens: np.ndarray) -> np.ndarray:
        weights = np.asarray(self.weights(rows, self.elapsed), dtype=float)
        if weights.shape != rows.ids.shape or not (weights >= 0).all() or not weights.any():
            raise ValueError(f"weights must give a number >= 0 per row, one of them above 0; got {weights!r}")
        return weights
