"""Draft lengths learnt per task and kept from one decode to the next.

Prediction with expert advice: each fixed length k is an expert. A step with draft length k also shows the outcome of
all shorter drafts. (Hedge: Freund and Schapire 1997, here with discounted losses to follow changes of text.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from bass_core.policies.costs import Cost, step_seconds
from bass_core.policies.goodput import DECAY, PRIOR
from bass_core.policies.protocol import DraftLengthPolicy, RowsView, expected_tokens

LIMIT = 16  # longest draft length; calibrated grids end there
STRAGGLING = 6  # exponent of a row's remaining tokens in the row's weight
GOLDEN = (5**0.5 - 1) / 2  # multiples of GOLDEN mod 1 spread evenly over [0, 1): draws without random numbers


@dataclass(eq=False)
class _Memory:
    """State of one task. losses: of the experts; kept, lost: accepted and rejected draft tokens."""

    losses: np.ndarray
    kept: float = 0.0
    lost: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    steps: int = 0


@dataclass
class Learned(DraftLengthPolicy):
    """Discounted Hedge over the draft lengths `lengths`, with a memory per `task` that outlives decodes.

    An expert's loss in a step is its seconds, minus its tokens times the current seconds per token. The unit is one
    step of regular decoding. Seconds come from the cost model, and the seconds per token are discounted like the
    losses. A batch ends with its last row, so rows with more remaining tokens weigh more. If a row accepted all k draft
    tokens, a longer expert is credited with the tokens expected at the task's α. A low-discrepancy sequence draws the
    step's k from the experts' weights.

    cost: seconds of steps. task: any label, set between decodes (`policy.task = "chat"`). Tasks do not share their
    memory. rate: learning rate of the weights. decay: factor on past losses per step.
    """

    cost: Cost = field(repr=False)
    lengths: Sequence[int] = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
    task: str = ""
    rate: float = 8.0
    decay: float = 0.95

    def __post_init__(self):
        self.lengths = tuple(sorted(set(self.lengths)))
        if not self.lengths or self.lengths[0] < 0 or self.lengths[-1] > LIMIT:
            raise ValueError(f"lengths must be draft lengths from 0 to {LIMIT}, got {self.lengths}")
        if not (self.rate > 0 and 0 < self.decay < 1):
            raise ValueError(f"rate must be > 0 and decay between 0 and 1 (exclusive), got {self}")
        self.experts = np.array(self.lengths)
        self.memories: dict[str, _Memory] = defaultdict(lambda: _Memory(np.zeros(len(self.lengths))))

    def weights(self) -> np.ndarray:
        """Return the normalized weights of the experts for the current task."""
        losses = self.memories[self.task].losses
        weights = np.exp(-self.rate * (losses - losses.min()))
        return weights / weights.sum()

    def plan(self, rows: RowsView) -> int:
        memory = self.memories[self.task]
        self.rows = rows
        memory.steps += 1
        point = memory.steps * GOLDEN % 1
        return int(self.experts[min(self.weights().cumsum().searchsorted(point, side="right"), len(self.experts) - 1)])

    def update(self, drafted: Tensor, accepted: Tensor) -> None:
        memory, room = self.memories[self.task], self.rows.remaining - 1
        drafted, accepted = drafted.numpy(), accepted.numpy()
        share = (self.rows.remaining / self.rows.remaining.max()) ** STRAGGLING
        memory.kept = DECAY * memory.kept + float(share @ accepted)
        memory.lost = DECAY * memory.lost + float(share @ (accepted < drafted))
        alpha = (memory.kept + PRIOR[0]) / (memory.kept + memory.lost + sum(PRIOR))
        share = share * (len(room) / share.sum())
        steps = step_seconds(self.cost, self.lengths[-1], self.rows)
        memory.tokens = self.decay * memory.tokens + float(share @ (accepted + 1))
        memory.seconds = self.decay * memory.seconds + steps[int(drafted.max())]
        tokens = self._tokens(drafted, accepted, room, alpha) @ share
        losses = (steps[np.minimum(self.experts, room.max())] - tokens * memory.seconds / memory.tokens) / steps[0]
        memory.losses = self.decay * memory.losses + losses

    def _tokens(self, drafted: np.ndarray, accepted: np.ndarray, room: np.ndarray, alpha: float) -> np.ndarray:
        """Return the tokens of each expert in this step, observed or else expected: [experts, B]."""
        own = np.minimum(self.experts[:, None], room)  # [experts, B]
        seen = np.minimum(own, accepted) + 1.0
        more = expected_tokens(alpha, self.lengths[-1])[np.maximum(own - accepted, 0)] - 1
        return np.where((accepted == drafted) & (own > drafted), seen + more, seen)
