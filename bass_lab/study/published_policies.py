"""The draft-length schedule of transformers. The schedule uses no step costs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bass_core.policies.protocol import DraftLengthPolicy, RowsView


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
