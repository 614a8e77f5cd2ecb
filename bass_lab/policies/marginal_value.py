"""Draft lengths from the draft model's own distributions: a step stops drafting where the draft model is unsure.

The policy sees the distribution at temperature 1 under any sampling parameters, and learns how often such drafts are
accepted. Decoding stays exact: x_j is submitted or not by what was known before it was drawn (`Signals`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bass_core.policies.costs import Cost, rounded_kv_length, step_seconds
from bass_core.policies.goodput import DECAY, Goodput
from bass_core.policies.protocol import RowsView, Signals

BINS = 10  # of the draft's largest probability
PRIOR = 0.8  # chance of acceptance before anything was seen
STRENGTH = 4.0  # observations that the power law counts as against a bin's own


class Calibration:
    """Acceptance rate of drafts by the draft model's largest probability m, in `BINS` equal bins.

    Older steps weigh less (`DECAY` per step). A bin with few drafts leans on all others: m to the power that makes the
    overall rate come out right. (At low temperatures drafts are accepted far more often than m.)
    """

    def __init__(self):
        self.reached, self.accepted, self.expected = np.zeros(BINS), np.zeros(BINS), np.zeros(BINS)

    def __call__(self, maximum: np.ndarray) -> np.ndarray:
        """Return the chance of acceptance for each largest probability."""
        centres = (np.arange(BINS) + 0.5) / BINS
        seen = self.reached.sum() + 1
        rate = (self.accepted.sum() + PRIOR) / seen  # of acceptance, and what the model gave on average
        given = (self.reached @ centres + PRIOR) / seen
        leaning = centres ** np.clip(np.log(min(rate, 0.999)) / np.log(given), 0.05, 20.0)
        chances = (self.accepted + STRENGTH * leaning) / (self.reached + STRENGTH)
        return chances[_bins(maximum)]

    def update(self, maximum: np.ndarray, chances: np.ndarray, accepted: np.ndarray) -> None:
        """Count decided drafts, one entry each: largest probability, chance that was predicted, and outcome."""
        bins = _bins(maximum)
        for counts, seen in ((self.reached, None), (self.accepted, accepted), (self.expected, chances)):
            counts *= DECAY
            counts += np.bincount(bins, seen, BINS)

    def error(self) -> float:
        """Return the expected calibration error: mean distance of predicted chance and acceptance rate per bin."""
        seen = self.reached.sum()
        return float(np.abs(self.accepted - self.expected).sum() / seen) if seen else 1.0


def _bins(maximum: np.ndarray) -> np.ndarray:
    # NaN (logits that are no numbers; the engine reports them after the step) counts as unsure
    return np.minimum((np.nan_to_num(maximum) * BINS).astype(int), BINS - 1)


def draft_seconds(cost: Cost, limit: int, rows: RowsView) -> np.ndarray:
    """Return the seconds of the draft's passes for these rows with draft length 0, 1, … `limit`, float [limit + 1]."""
    seconds = cost.draft(len(rows.ids), np.arange(limit + 1), rounded_kv_length(cost, rows))
    return np.broadcast_to(np.asarray(seconds, dtype=float), limit + 1)


def require_draft_passes(policy: Goodput) -> None:
    """Raise ValueError if the policy's costs are of a pair without a draft model, which has no distributions."""
    if getattr(policy.cost, "draft_phases", True) is None:
        raise ValueError(
            f"{type(policy).__name__} needs a draft model: without one there is no distribution to look at"
        )


@dataclass
class MarginalValue(Goodput):
    """Draft while one more slot is worth its time, by the draft model's distribution before each token.

    Slot j is worth the sum over rows of S_{i,j}, the probability that row i accepts all drafts up to it: the product of
    its calibrated largest probabilities. The slot costs the draft's pass and the longer verification, priced at the
    goodput that `Goodput` expects of this step. The distribution of x_j is known after its pass. Then x_j is drawn if
    the slot is worth its verification, and the next pass follows if slot j + 1 promises to be worth both. The policy
    takes the length of `Goodput` where that is 0, and while the calibration error is above `trusted`.
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
        rate, steps = self.gains[k], step_seconds(self.cost, self.limit, rows)
        # in tokens: of each slot with its pass [limit + 1] (none pays beyond the limit), and without the pass [limit]
        self.price = rate * np.diff(steps, append=np.inf)
        self.verify_price = rate * np.diff(steps - draft_seconds(self.cost, self.limit, rows))
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
        self.wanted = drafted.numpy()
        super().update(drafted, accepted)
        drafted, accepted = drafted.numpy(), accepted.numpy()
        if not drafted.any():
            # A pass that was not worth a token: what was expected counts as if it had come true, or else `Goodput`
            # would pay for such passes for ever.
            _, chances = self.seen[0]
            self.alphas.update(chances, 1 - chances)
        slots = np.arange(len(self.seen))[:, None]
        decided = slots < np.minimum(drafted, accepted + 1)  # [slots, B]
        maximum, chances = np.stack(self.seen, axis=1)
        self.calibration.update(maximum[decided], chances[decided], (slots < accepted)[decided])
