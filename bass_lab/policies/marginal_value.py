"""Draft lengths from the draft model's distributions: a step stops drafting when the draft model is unsure.

The policy sees the distribution at temperature 1 under any sampling parameters, and learns the acceptance rate at each
confidence. Decoding stays exact: the decision to submit x_j falls before x_j is drawn (`Signals`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bass_core.policies.costs import Cost, rounded_kv_length, step_seconds
from bass_core.policies.goodput import DECAY, Goodput
from bass_core.policies.protocol import RowsView, Signals

BINS = 10  # bins of the draft model's largest probability
PRIOR = 0.8  # acceptance probability before the first observation
STRENGTH = 4.0  # weight of the power law in a bin, in observations


class Calibration:
    """Acceptance rate of draft tokens by the draft model's largest probability m, in `BINS` equal bins.

    Older steps weigh less (`DECAY` per step). A bin with few observations is shrunk towards a power of m. The exponent
    maps the mean m to the overall acceptance rate. (At low temperatures the acceptance rate is far above m.)
    """

    def __init__(self):
        self.reached, self.accepted, self.expected = np.zeros(BINS), np.zeros(BINS), np.zeros(BINS)

    def __call__(self, maximum: np.ndarray) -> np.ndarray:
        """Return the acceptance probability for each largest probability."""
        centres = (np.arange(BINS) + 0.5) / BINS
        seen = self.reached.sum() + 1
        rate = (self.accepted.sum() + PRIOR) / seen  # overall acceptance rate; next line: mean m
        given = (self.reached @ centres + PRIOR) / seen
        leaning = centres ** np.clip(np.log(min(rate, 0.999)) / np.log(given), 0.05, 20.0)
        chances = (self.accepted + STRENGTH * leaning) / (self.reached + STRENGTH)
        return chances[_bins(maximum)]

    def update(self, maximum: np.ndarray, chances: np.ndarray, accepted: np.ndarray) -> None:
        """Count decided draft tokens. Each has a largest probability, a predicted chance and an outcome."""
        bins = _bins(maximum)
        for counts, seen in ((self.reached, None), (self.accepted, accepted), (self.expected, chances)):
            counts *= DECAY
            counts += np.bincount(bins, seen, BINS)

    def error(self) -> float:
        """Return the expected calibration error: mean distance of predicted chance and acceptance rate over bins."""
        seen = self.reached.sum()
        return float(np.abs(self.accepted - self.expected).sum() / seen) if seen else 1.0


def _bins(maximum: np.ndarray) -> np.ndarray:
    # NaN logits count as unsure; the engine reports them after the step
    return np.minimum((np.nan_to_num(maximum) * BINS).astype(int), BINS - 1)


def draft_seconds(cost: Cost, limit: int, rows: RowsView) -> np.ndarray:
    """Return the seconds of the draft phase at draft lengths 0, 1, … `limit`, float [limit + 1]."""
    seconds = cost.draft(len(rows.ids), np.arange(limit + 1), rounded_kv_length(cost, rows))
    return np.broadcast_to(np.asarray(seconds, dtype=float), limit + 1)


def require_draft_passes(policy: Goodput) -> None:
    """Raise ValueError if the policy's costs belong to a pair without a draft model."""
    if getattr(policy.cost, "draft_phases", True) is None:
        raise ValueError(
            f"{type(policy).__name__} needs a draft model, but this cost model belongs to a pair without one"
        )


@dataclass
class MarginalValue(Goodput):
    """Draft while one more slot is worth its time, by the draft model's distribution before each token.

    The value of slot j is the sum over rows of S_{i,j}, the probability that row i accepts all draft tokens up to x_j:
    a product of calibrated largest probabilities. The cost of slot j is one draft pass and a longer verification, in
    tokens at the goodput that `Goodput` expects of this step. After its draft pass, x_j is drawn if slot j is worth
    the verification. The next draft pass follows if slot j + 1 is expected to be worth both. The policy uses the length
    of `Goodput` if that length is 0, in probes, and while the calibration error is above `trusted`.
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
        # Prices in tokens: draft pass and verification [limit + 1] (last: infinite), verification alone [limit]
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
        following = self.survival * chances  # assumes that slot j + 1 has the chance of slot j
        if self.survival[self.room > slot].sum() <= self.verify_price[slot]:
            length = slot
        elif following[self.room > slot + 1].sum() <= self.price[slot + 1]:
            length = slot + 1
        else:
            length = self.limit
        return torch.full(signals.drafting.shape, length, device="cpu")

    def update(self, drafted: Tensor, accepted: Tensor) -> None:
        if not self.seen:  # no draft tokens, or not from a model
            super().update(drafted, accepted)
            return
        self.wanted = drafted.numpy()
        super().update(drafted, accepted)
        drafted, accepted = drafted.numpy(), accepted.numpy()
        if not drafted.any():
            # The draft pass led to no draft token. Count the predicted outcome as observed; without this, `Goodput`
            # would pay for such passes forever.
            _, chances = self.seen[0]
            self.alphas.update(chances, 1 - chances)
        slots = np.arange(len(self.seen))[:, None]
        decided = slots < np.minimum(drafted, accepted + 1)  # [slots, B]
        maximum, chances = np.stack(self.seen, axis=1)
        self.calibration.update(maximum[decided], chances[decided], (slots < accepted)[decided])
