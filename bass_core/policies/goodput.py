"""The default policy: the draft length with the most expected tokens per second, by measured costs.

Expected tokens follow from each row's acceptance probability α (`RowAlphas`, `expected_tokens`), and seconds from the
cost model (`step_seconds`). Length 0 is a candidate, so decoding returns to regular steps if drafts do not pay.
(Lengths by goodput: Liu et al. 2024, SmartSpec. Expected tokens: Leviathan et al. 2023, equation 1.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from bass_core.policies.costs import Cost, step_seconds
from bass_core.policies.protocol import DraftLengthPolicy, RowsView, expected_tokens

PRIOR = 2.0, 0.7  # accepted and rejected drafts assumed for a pair without calibration
FORMER = 8.0  # drafts: largest weight of a calibration, and of ended rows
DECAY = 0.96  # factor of old counts: for a row per step, for ended rows per comparison without drafts
LEAN = 12.0  # drafts: weight of the common acceptance rate in each row's α
SPREAD = 24.0  # drafts: certainty of α in `expected_tokens`
PROBED = 4  # a probe drafts in one of so many rows, because the draft model must read all missed tokens
RECHECK = 8  # steps without drafts between comparisons of costs, because KV lengths grow
STRAGGLING = 8  # exponent of a row's remaining steps in its weight: the last row ends the batch


class RowAlphas:
    """Acceptance probability α of each live row: the row's own rate, shrunk towards the rate of all rows.

    counts: float [2, B], accepted drafts and rejections of each row, with less weight for older steps. former: float
    [2], the same for ended rows; `expected` before the first row ends.
    """

    def __init__(self, expected: Sequence[float] = PRIOR):
        self.expected = np.array(expected) * min(1.0, FORMER / sum(expected))
        self.ids, self.counts, self.former = np.zeros(0, np.int64), np.zeros((2, 0)), self.expected

    def __call__(self) -> np.ndarray:
        """Return α of each row, float [B]."""
        total = self.counts.sum(1) + self.former
        accepted, refused = self.counts + LEAN * (total / total.sum())[:, None]
        return accepted / (accepted + refused)

    def follow(self, ids: np.ndarray) -> None:
        """Set the live rows, in this order. Ended rows join `former`, and new rows begin without counts."""
        if ids.tolist() == self.ids.tolist():
            return
        places = {row: place for place, row in enumerate(self.ids.tolist())}
        before, padded = self.counts.sum(1), np.pad(self.counts, ((0, 0), (0, 1)))
        self.ids, self.counts = ids, padded[:, [places.get(row, -1) for row in ids.tolist()]]
        former = self.former + before - self.counts.sum(1)
        self.former = former * min(1.0, FORMER / former.sum())

    def update(self, accepted: np.ndarray, refused: np.ndarray) -> None:
        """Count a step: accepted drafts of each row, and True for a rejection, [B] each."""
        self.counts = DECAY * self.counts + (accepted, refused)

    def fade(self) -> None:
        """Move the counts of ended rows towards `expected`, because no draft has confirmed them recently."""
        self.former = self.expected + DECAY * (self.former - self.expected)


@dataclass
class Goodput(DraftLengthPolicy):
    """The draft length with the most expected tokens per second; 0, regular decoding, if drafts do not pay.

    cost: seconds of steps, `CostModel` or another `Cost`. limit: longest draft. probe: number of steps without drafts
    before a probe, a step that drafts one token in some rows to test whether drafts pay again. Each further probe waits
    twice as long, until a probe is accepted or drafts pay. No probe runs with fewer tokens left, unless rows joined.

    Rows with many more steps to go weigh more (`weigh`), until rows join the batch. α begins with the calibration's
    counts, or in a session with the counts of earlier rows. If drafts do not pay by these, the first step is a probe.
    """

    cost: Cost = field(repr=False)
    limit: int = 16
    probe: int = 32

    def __post_init__(self):
        if self.limit < 1 or self.probe < 1:
            raise ValueError(f"needs limit >= 1 and probe >= 1, got {self}")
        self.alphas = RowAlphas(getattr(self.cost, "acceptance", None) or PRIOR)
        self._reset()

    def _reset(self) -> None:
        self.k = self.idle = 0  # draft length of the last step, steps without drafts since the last draft
        self.next_probe, self.probing = self.probe, False
        self.resting = False  # True if the next step drafts nothing, independent of this step
        self.batch = 0  # rows of the last step for which goodputs were computed
        self.joined = False  # True once rows joined the batch

    def start(self, rows: RowsView) -> None:
        if rows.steps.any():
            self.joined, self.batch = True, 0
            return
        self._reset()
        if len(self.alphas.ids) and rows.ids.min() > self.alphas.ids.max():  # later rows of a session
            self.idle = self.probe
        else:
            self.alphas = RowAlphas(self.alphas.expected)

    def predict_next(self) -> int | None:
        return 0 if self.resting and self.idle != self.next_probe else None

    def plan(self, rows: RowsView) -> int | Tensor:
        if self.predict_next() == 0 and len(rows.ids) == self.batch:
            self.idle += 1
            if self.idle % RECHECK == 0:
                self.resting = self.goodputs(rows).argmax() == 0
                self.alphas.fade()
            return 0
        self.alphas.follow(rows.ids)
        self.batch, self.probing = len(rows.ids), False
        self.gains = self.goodputs(rows)
        self.k = int(self.gains.argmax())
        self.resting = self.k == 0
        if self.k > 0:
            self.idle, self.next_probe = 0, self.probe
        elif self.idle >= self.next_probe and (self.joined or self.next_probe <= rows.remaining.max()):
            self.k, self.probing, self.resting = 1, True, False
            self.idle, self.next_probe = 0, 2 * self.next_probe
        else:
            self.idle += 1
            self.alphas.fade()
        self.wanted = np.minimum(self.k, rows.remaining - 1)
        if self.probing:
            self.wanted[-(-self.batch // PROBED) :] = 0
            return torch.from_numpy(self.wanted)
        return self.k

    def goodputs(self, rows: RowsView) -> np.ndarray:
        """Return expected tokens per second of a step with draft length 0, 1, … up to the longest possible one."""
        lengths = np.arange(min(int(rows.remaining.max()), self.limit + 1))
        tokens = expected_tokens(self.alphas(), self.limit, SPREAD)  # [B, limit + 1]
        tokens = np.take_along_axis(tokens, np.minimum(lengths, rows.remaining[:, None] - 1), 1)
        return self.weigh(rows, tokens) @ tokens / step_seconds(self.cost, self.limit, rows)[: len(lengths)]

    def weigh(self, rows: RowsView, tokens: np.ndarray) -> np.ndarray:
        """Return the weight of each row's tokens, [B], with sum B. tokens: [B, K], expected for each draft length.

        The last row ends the batch, so rows weigh by the number of steps to go at the last draft length. After rows
        have joined, all weigh the same.
        """
        if self.joined:
            return np.ones(len(tokens))
        steps = rows.remaining / tokens[:, min(max(self.k, 1), tokens.shape[1] - 1)]
        weights = (steps / steps.max()) ** STRAGGLING
        return weights * (len(weights) / weights.sum())

    def update(self, drafted: Tensor, accepted: Tensor) -> None:
        if not drafted.any():
            return
        # planned but missing drafts count as rejected, for example without an n-gram match
        tried, accepted = self.wanted, accepted.numpy()
        if self.probing and 2 * accepted.sum() > tried.sum():  # drafts pay again, so old counts are out of date
            self.alphas.counts, self.alphas.former = 0 * self.alphas.counts, np.array(PRIOR)
            self.next_probe = self.probe
        self.alphas.update(accepted, accepted < tried)
