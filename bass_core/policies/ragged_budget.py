"""Draft lengths per row: one budget of drafted tokens for the batch, spent where acceptance is likeliest.

All rows draft equally far, and then tokens are submitted one by one, the likeliest first, until one more is not worth
verifying. Rows submit different numbers of tokens, which saves something only because verification is packed
(`Runner.feed`): the target sees the submitted tokens alone.

What keeps it exact: whether x_j is submitted is decided before x_j is seen. A token's score is known before it is
drawn; its own probability, and the distribution after it, are shown by `HiddenDraft` once it is submitted. (Ranking
tokens by their own probabilities would be wrong by a total variation of 0.12 in a small example.)
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from bass_core.draft_length import HiddenDraft, RowsView
from bass_core.policies.draft_signals import PRIOR
from bass_core.policies.goodput import Goodput, require_draft_passes


@dataclass
class RaggedBudget(Goodput):
    """The N drafts of a batch that are likeliest to be accepted, N of most expected tokens per second.

    A draft's score is Π q(x_i)^γ over the drafts before it, times (max q_j)^γ; it never rises along a row. Scores are
    spent in falling order (ties: the earlier slot, then the row that comes first) while the expected tokens of the step
    over its time still rise. γ makes the draft's probabilities, which are those of temperature 1, agree with the
    acceptance seen so far. Rows draft further than `Goodput` would, as far as it prolongs its step by the share
    `reach` at most; where it does not draft, neither does this.
    """

    reach: float = 0.05

    def __post_init__(self):
        super().__post_init__()
        require_draft_passes(self)
        if not self.reach >= 0:
            raise ValueError(f"reach must be >= 0, a share of a step's time, got {self.reach}")

    def _reset(self) -> None:
        super()._reset()
        self.told, self.kept, self.count = 0.0, 0.0, 0.0  # of decided drafts: sum of q(x), accepted, number

    def plan(self, rows: RowsView) -> int | Tensor:
        plan, k = super().plan(rows), self.k
        self.hidden: HiddenDraft | None = None
        self.rows = rows
        if k == 0 or self.probing:
            return plan
        looked = self.seconds.look_up(rows)
        affordable = looked.drafts <= looked.drafts[k] + self.reach * looked.steps[k]
        return int(np.flatnonzero(affordable)[-1])

    def choose(self, hidden: HiddenDraft) -> None:
        """Submit drafts until the next one is not worth its verification."""
        self.hidden = hidden
        gamma, rows = self._power(), len(hidden.lengths)
        looked = self.seconds.look_up(self.rows)
        passes = looked.drafts[int(hidden.lengths.max())]
        verify = looked.steps - looked.drafts  # [limit + 1], by drafts per row
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
        """γ: what the draft's mean probability has to be raised to, to be the mean acceptance."""
        rate, told = ((total + PRIOR) / (self.count + 1) for total in (self.kept, self.told))
        return float(np.clip(np.log(min(rate, 0.999)) / np.log(min(told, 0.999)), 0.05, 20.0))

    def update(self, drafted: Tensor, accepted: Tensor) -> None:
        if self.hidden is None:  # nothing was drafted, or not by a model
            super().update(drafted, accepted)
            return
        drafted, accepted = drafted.numpy(), accepted.numpy()
        if drafted.any():
            self._learn(drafted, accepted)
        decided = np.arange(self.hidden.chances.shape[1]) < np.minimum(drafted, accepted + 1)[:, None]  # [B, K]
        self.told += self.hidden.chances[decided].sum()
        self.kept += accepted.sum()
        self.count += decided.sum()
