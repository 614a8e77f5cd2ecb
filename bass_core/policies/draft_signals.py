"""Policies that look at the draft's own distributions: they stop a step, or submit less of it, where it is unsure.

What they may see keeps decoding exact: x_j is submitted or not by what was known before it was drawn (`Signals`). That
is the distribution at temperature 1, whatever is sampled from: how often such drafts are accepted is learnt.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bass_core.policies.goodput import DECAY, Goodput, require_draft_passes
from bass_core.policies.protocol import HiddenDraft, RowsView, Signals

BINS = 10  # of the draft's largest probability
PRIOR = 0.8  # chance of acceptance before anything was seen
STRENGTH = 4.0  # observations that the power law counts as against a bin's own


class Calibration:
    """How often a draft was accepted, by the largest probability m that the draft model gave: `BINS` equal bins.

    Older steps count less (`DECAY` per step). A bin of which little was seen leans on all others together: m to the
    power that makes the whole come out right. (At low temperatures drafts are accepted far more often than m.)
    """

    def __init__(self):
        self.reached, self.accepted, self.expected = np.zeros(BINS), np.zeros(BINS), np.zeros(BINS)

    def __call__(self, maximum: np.ndarray) -> np.ndarray:
        """Chance of acceptance for each largest probability."""
        centres = (np.arange(BINS) + 0.5) / BINS
        seen = self.reached.sum() + 1
        rate = (self.accepted.sum() + PRIOR) / seen  # of acceptance, and what the model gave on average
        given = (self.reached @ centres + PRIOR) / seen
        leaning = centres ** np.clip(np.log(min(rate, 0.999)) / np.log(given), 0.05, 20.0)
        chances = (self.accepted + STRENGTH * leaning) / (self.reached + STRENGTH)
        return chances[_bins(maximum)]

    def update(self, maximum: np.ndarray, chances: np.ndarray, accepted: np.ndarray) -> None:
        """Drafts whose fate is known: what the model gave, what was expected of them then, and what came of them."""
        bins = _bins(maximum)
        for counts, seen in ((self.reached, None), (self.accepted, accepted), (self.expected, chances)):
            counts *= DECAY
            counts += np.bincount(bins, seen, BINS)

    def error(self) -> float:
        """Expected calibration error: how far the chances that were given stood from what happened, bin by bin."""
        seen = self.reached.sum()
        return float(np.abs(self.accepted - self.expected).sum() / seen) if seen else 1.0


def _bins(maximum: np.ndarray) -> np.ndarray:
    # NaN (logits that are no numbers; the engine reports them after the step) counts as unsure
    return np.minimum((np.nan_to_num(maximum) * BINS).astype(int), BINS - 1)


@dataclass
class MarginalValue(Goodput):
    """Drafts on while one more slot is worth its time, judged by what the draft model says before each token.

    Slot j is worth the sum over rows of S_{i,j}, the chance that row i accepts all drafts up to it: the product of its
    calibrated largest probabilities. It costs the draft's pass and the longer verification, paid at ρ tokens per
    second, the goodput that `Goodput` expects of this step. When x_j's distribution is known its pass is spent: x_j is
    drawn if it is worth its verification, and the next pass follows if slot j + 1, at the row's chance so far, is
    expected to be worth both. Where `Goodput` does not draft, neither does this; while the calibration's error is above
    `trusted` its length is taken.
    """

    trusted: float = 0.1

    def __post_init__(self):
        super().__post_init__()
        require_draft_passes(self)

    def _reset(self) -> None:
        super()._reset()
        self.calibration = Calibration()

    def plan(self, rows: RowsView) -> int | Tensor:
        plan, k = super().plan(rows), self.k
        self.seen: list[tuple[np.ndarray, np.ndarray]] = []  # per slot: largest probabilities and chances [B]
        self.survival = np.ones(len(rows.ids))
        self.room = rows.remaining - 1
        if k == 0 or self.probing or self.calibration.error() > self.trusted:
            self.price = None
            return plan
        rate, looked = self.gains[k], self.seconds.look_up(rows)
        # in tokens: of each slot with its pass [limit + 1] (none pays beyond the limit), and without the pass [limit]
        self.price = rate * np.diff(looked.steps, append=np.inf)
        self.verify_price = rate * np.diff(looked.steps - looked.drafts)
        return self.limit

    def keep_drafting(self, signals: Signals) -> Tensor:
        maximum = signals.maximum.cpu().numpy()
        chances = self.calibration(maximum)
        self.seen.append((maximum, chances))
        if self.price is None:
            return torch.ones_like(signals.drafting)
        slot = signals.slot
        self.survival = self.survival * chances
        following = self.survival * chances  # as if slot j + 1 had the chance of slot j
        if self.survival[self.room > slot].sum() <= self.verify_price[slot]:
            length = slot
        elif following[self.room > slot + 1].sum() <= self.price[slot + 1]:
            length = slot + 1
        else:
            length = self.limit
        return torch.full(signals.drafting.shape, length, device="cpu")

    def update(self, drafted: Tensor, accepted: Tensor) -> None:
        if not self.seen:  # nothing was drafted, or not by a model
            super().update(drafted, accepted)
            return
        drafted, accepted = drafted.numpy(), accepted.numpy()
        if drafted.any():
            self._learn(drafted, accepted)
        else:
            # A pass that was not worth a token: what was expected counts as if it had come true, or else `Goodput`
            # would pay for such passes for ever.
            _, chances = self.seen[0]
            self.alphas.update(chances, 1 - chances)
        slots = np.arange(len(self.seen))[:, None]
        decided = slots < np.minimum(drafted, accepted + 1)  # [slots, B]
        maximum, chances = np.stack(self.seen, axis=1)
        self.calibration.update(maximum[decided], chances[decided], (slots < accepted)[decided])


@dataclass
class RaggedBudget(Goodput):
    """Draft lengths per row: the N drafts of a batch that are likeliest to be accepted, N of most tokens per second.

    All rows draft equally far, and then tokens are submitted one by one, the likeliest first, until one more is not
    worth verifying. That saves something only where verification is packed (`Runner.feed`; recorded steps are not): the
    target sees the submitted tokens alone. What keeps it exact: whether x_j is submitted is decided before x_j is seen.
    A token's score is known before it is drawn; its own probability, and the distribution after it, are shown by
    `HiddenDraft` once it is submitted. (Ranking tokens by their own probabilities is wrong by a total variation of 0.12
    in a small example.)

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
        else:  # passes that were not worth a token: as `MarginalValue` does
            asked = self.hidden.lengths > 0
            first = [self.hidden.maximum(row) if some else 0.0 for row, some in enumerate(asked)]
            chances = np.array(first) ** self._power() * asked
            self.alphas.update(chances, asked - chances)
        decided = np.arange(self.hidden.chances.shape[1]) < np.minimum(drafted, accepted + 1)[:, None]  # [B, K]
        self.told += self.hidden.chances[decided].sum()
        self.kept += accepted.sum()
        self.count += decided.sum()
