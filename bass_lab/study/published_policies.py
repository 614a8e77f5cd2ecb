"""Published draft-length policies: transformers' schedule, and SVIP.

Neither uses step costs. `SVIP` uses the draft's distributions at temperature 1. At low temperatures, it stops too
early.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bass_core.policies.protocol import DraftLengthPolicy, RowsView, Signals


@dataclass
class HuggingFaceHeuristic(DraftLengthPolicy):
    """transformers' heuristic schedule: k + 2 if every live row accepted all submitted draft tokens, else k - 1."""

    initial: int = 5

    def __post_init__(self):
        if self.initial < 1:
            raise ValueError(f"initial must be >= 1, got {self}")
        self.length = self.initial

    def start(self, rows: RowsView) -> None:
        if not rows.steps.any():
            self.length = self.initial

    def plan(self, rows: RowsView) -> int:
        return self.length

    def update(self, drafted: Tensor, accepted: Tensor) -> None:
        if not drafted.any():
            return
        self.length = self.length + 2 if bool((accepted == drafted).all()) else max(1, self.length - 1)


@dataclass
class SVIP(DraftLengthPolicy):
    """Stop a row before x_j if the draft model is unsure: sqrt(0.15 H(q_j)) > `bound`. (Zhang et al. 2024, arXiv
    2411.18462.)"""

    limit: int = 16
    bound: float = 0.3

    def __post_init__(self):
        if self.limit < 1 or not self.bound > 0:
            raise ValueError(f"limit must be >= 1 and bound > 0, got {self}")

    def plan(self, rows: RowsView) -> int:
        return self.limit

    def keep_drafting(self, signals: Signals) -> Tensor:
        return (0.15 * signals.entropy).sqrt() <= self.bound
