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
from bass_core.goodput import PRIOR, Goodput

Weights = Callable[[RowsView, float], np.ndarray]
DECAY = 0.95  # of a row's own counts per step
STRENGTH = 4.0  # observations that the rows' common chance counts as against a row's own


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

    elapsed: seconds that the decode's steps took so far, by the cost model (never by the clock). Each row has a chance
    of acceptance of its own: its survival of j drafts is the common S_j to a power that its own record sets.
    """

    weights: Weights = field(default=EQUAL, repr=False)

    def _reset(self) -> None:
        super()._reset()
        self.elapsed = 0.0
        self.ids = np.zeros(0, np.int64)
        self.own: dict[int, np.ndarray] = {}  # by row: accepted, reached

    def plan(self, rows: RowsView) -> int | Tensor:
        self.ids = rows.ids
        self.own = {row: self.own[row] for row in rows.ids.tolist() if row in self.own}  # ended rows are forgotten
        plan = super().plan(rows)
        self.elapsed += self.seconds(rows)[self.k]
        return plan

    def tokens(self, rows: RowsView) -> np.ndarray:
        accepted, reached = np.array([self.own.get(row, np.zeros(2)) for row in rows.ids.tolist()]).T
        mean = accepted.sum() / reached.sum() if reached.any() else PRIOR
        alpha = (accepted + STRENGTH * mean) / (reached + STRENGTH)
        power = np.log(np.clip(alpha, 1e-3, 0.999)) / np.log(np.clip(mean, 1e-3, 0.999))
        weights = np.asarray(self.weights(rows, self.elapsed), dtype=float)
        if weights.shape != rows.ids.shape or not (weights >= 0).all() or not weights.any():
            raise ValueError(f"weights must give a number >= 0 per row, one of them above 0; got {weights!r}")
        return weights[:, None] * (self.acceptance.survival ** power[:, None]).cumsum(-1)

    def importance(self, rows: RowsView) -> np.ndarray:
        return np.ones(len(rows.ids))  # the weights say whose tokens count; chances are those of all rows

    def update(self, drafted: Tensor, accepted: Tensor) -> None:
        super().update(drafted, accepted)
        for row, submitted, kept in zip(self.ids.tolist(), drafted.tolist(), accepted.tolist(), strict=True):
            if submitted:
                self.own[row] = DECAY * self.own.get(row, np.zeros(2)) + [kept, min(submitted, kept + 1)]
