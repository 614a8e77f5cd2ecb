"""Published draft-length policies: transformers' schedule, AdaEDL and SVIP.

None of the three uses step costs. `AdaEDL` and `SVIP` use the draft's distributions at temperature 1. At low
temperatures, both stop too early.
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
class AdaEDL(DraftLengthPolicy):
    """Stop a row before x_j if 1 - sqrt(0.2 H(q_j)) < λ. λ adapts towards the acceptance rate `wanted`. (Agrawal et al.
    2024, arXiv 2410.18351; λ as in Zhang et al. 2023, arXiv 2309.08168.)"""

    limit: int = 16
    wanted: float = 0.9
    threshold: float = 0.6  # initial λ

    def __post_init__(self):
        if self.limit < 1 or not 0 < self.wanted < 1:
            raise ValueError(f"limit must be >= 1 and wanted between 0 and 1 (exclusive), got {self}")
        self._reset()

    def _reset(self) -> None:
        self.bar, self.rate = self.threshold, self.wanted

    def start(self, rows: RowsView) -> None:
        if not rows.steps.any():
            self._reset()

    def plan(self, rows: RowsView) -> int:
        return self.limit

    def keep_drafting(self, signals: Signals) -> Tensor:
        return 1 - (0.2 * signals.entropy).sqrt() >= self.bar

    def update(self, drafted: Tensor, accepted: Tensor) -> None:
        if not drafted.any():
            return
        self.rate = 0.5 * self.rate + 0.5 * float(accepted.sum() / drafted.sum())
        moved = self.bar + (0.01 if self.rate < self.wanted else -0.01)
        self.bar = 0.9 * self.bar + 0.1 * moved


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
