"""Draft lengths per row: one budget of draft tokens for the whole batch, spent on the likeliest tokens."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from bass_core.policies.costs import Cost, rounded_kv_length, step_seconds
from bass_core.policies.goodput import Goodput
from bass_core.policies.protocol import HiddenDraft, RowsView

PRIOR = 0.8  # acceptance probability before the first observation


def draft_seconds(cost: Cost, limit: int, rows: RowsView) -> np.ndarray:
    """Return the seconds of the draft phase at draft lengths 0, 1, … `limit`, float [limit + 1]."""
    seconds = cost.draft(len(rows.ids), np.arange(limit + 1), rounded_kv_length(cost, rows))
    return np.broadcast_to(np.asarray(seconds, dtype=float), limit + 1)


@dataclass
class RaggedBudget(Goodput):
    """Draft length per row: submit the N likeliest draft tokens of the batch, N by expected tokens per second.

    All rows use the same draft length. Then the policy submits tokens one by one, the likeliest first, until the next
    token is not worth its verification. This saves time only if verification is packed (`Runner.feed`). Replayed CUDA
    graphs are not packed. Decoding stays exact because a token's score is known before the token is drawn.
    `HiddenDraft` shows the token's probability and the next distribution only after submission. (Ranking by the tokens'
    own probabilities changes the output distribution: by a total variation of 0.12 in a small example.)

    The score of draft token x_j is Π q(x_i)^γ over i < j, times (max q_j)^γ. Scores never rise along a row. Ties go to
    the earlier slot, then to the earlier row. γ fits the draft probabilities (at temperature 1) to the acceptance rate.
    Rows draft longer than `Goodput` would, if the step takes at most the share `reach` longer. If `Goodput` does not
    draft, neither does this policy.
    """

    reach: float = 0.05

    def __post_init__(self):
        super().__post_init__()
        if getattr(self.cost, "draft_phases", True) is None:
            raise ValueError("RaggedBudget needs a draft model, but this cost model belongs to a pair without one")
        if not self.reach >= 0:
            raise ValueError(f"reach must be >= 0 (a share of a step's time), got {self.reach}")

    def _reset(self) -> None:
        super()._reset()
        self.told, self.kept, self.count = 0.0, 0.0, 0.0  # decided draft tokens: sum of q(x), accepted, total

    def plan(self, rows: RowsView) -> int | Tensor:
        plan, k = super().plan(rows), self.k
        self.hidden: HiddenDraft | None = None
        self.rows = rows
        if k == 0 or self.probing:
            return plan
        steps, drafts = (seconds(self.cost, self.limit, rows) for seconds in (step_seconds, draft_seconds))
        affordable = drafts <= drafts[k] + self.reach * steps[k]
        return int(np.flatnonzero(affordable)[-1])

    def choose(self, hidden: HiddenDraft) -> None:
        """Submit draft tokens until the next token is not worth its verification."""
        self.hidden = hidden
        gamma, rows = self._power(), len(hidden.lengths)
        steps, drafts = (seconds(self.cost, self.limit, self.rows) for seconds in (step_seconds, draft_seconds))
        passes, verify = drafts[int(hidden.lengths.max())], steps - drafts  # [limit + 1], by draft length
        queue = [(-(hidden.maximum(row) ** gamma), 0, row, 1.0) for row in range(rows) if hidden.lengths[row]]
        heapq.heapify(queue)
        tokens, spent, lengths = float(rows), 0, np.arange(len(verify))
        seconds = passes + verify[0]
        while queue:
            score, slot, row, path = heapq.heappop(queue)
            longer = passes + np.interp((spent + 1) / rows, lengths, verify)
            if (tokens - score) / longer <= tokens / seconds and not self.probing:
                return
            tokens, seconds, spent = tokens - score, longer, spent + 1
            path *= hidden.submit(row) ** gamma
            if slot + 1 < hidden.lengths[row]:
                heapq.heappush(queue, (-path * hidden.maximum(row) ** gamma, slot + 1, row, path))

    def _power(self) -> float:
        """Return γ, the exponent that maps the mean draft probability to the acceptance rate."""
        rate, told = ((total + PRIOR) / (self.count + 1) for total in (self.kept, self.told))
        return float(np.clip(np.log(min(rate, 0.999)) / np.log(min(told, 0.999)), 0.05, 20.0))

    def update(self, drafted: Tensor, accepted: Tensor) -> None:
        if self.hidden is None:  # no draft tokens, or not from a model
            super().update(drafted, accepted)
            return
        self.wanted = drafted.numpy()
        super().update(drafted, accepted)
        drafted, accepted = drafted.numpy(), accepted.numpy()
        if not drafted.any():
            # The draft passes led to no draft token. Count the predicted outcomes as observed; without this, `Goodput`
            # would pay for such passes forever.
            asked = self.hidden.lengths > 0
            first = [self.hidden.maximum(row) if some else 0.0 for row, some in enumerate(asked)]
            chances = np.array(first) ** self._power() * asked
            self.alphas.update(chances, asked - chances)
        decided = np.arange(self.hidden.chances.shape[1]) < np.minimum(drafted, accepted + 1)[:, None]  # [B, K]
        self.told += self.hidden.chances[decided].sum()
        self.kept += accepted.sum()
        self.count += decided.sum()
