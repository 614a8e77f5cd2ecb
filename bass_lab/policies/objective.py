"""Draft lengths for objectives with arbitrary row weights, for instance to finish the first row early."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from bass_core.policies.costs import step_seconds
from bass_core.policies.goodput import Goodput
from bass_core.policies.protocol import RowsView

Weights = Callable[[RowsView, float], np.ndarray]


def first_finished(sharpness: float) -> Weights:
    """Return weights for rows near their limit: (least remaining / remaining) ** sharpness."""
    return lambda rows, elapsed: (rows.remaining.min() / rows.remaining) ** sharpness


def last_finished(sharpness: float) -> Weights:
    """Return weights for rows far from their limit: (remaining / most remaining) ** sharpness."""
    return lambda rows, elapsed: (rows.remaining / rows.remaining.max()) ** sharpness


EQUAL = last_finished(0.0)


@dataclass
class Objective(Goodput):
    """`Goodput` of weighted rows: weights(rows, elapsed) returns a weight >= 0 for each row.

    elapsed: seconds of all steps in this decode, by the cost model instead of the clock.
    """

    weights: Weights = field(default=EQUAL, repr=False)

    def _reset(self) -> None:
        super()._reset()
        self.elapsed = 0.0

    def plan(self, rows: RowsView) -> int | Tensor:
        plan = super().plan(rows)
        self.elapsed += step_seconds(self.cost, self.limit, rows)[self.k]
        return plan

    def weigh(self, rows: RowsView, tokens: np.ndarray) -> np.ndarray:
        weights = np.asarray(self.weights(rows, self.elapsed), dtype=float)
        if weights.shape != rows.ids.shape or not (weights >= 0).all() or not weights.any():
            raise ValueError(f"weights must give a number >= 0 per row and at least one above 0, got {weights!r}")
        return weights
