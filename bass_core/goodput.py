"""Draft lengths from costs: the k with the most expected tokens per second, measured costs against observed acceptance.

A step with draft length k emits 1 + S_1 + … + S_k tokens per row on average, S_j the chance that j drafts in a row are
accepted, and takes as long as the cost model says. `Goodput` takes the best of all k, 0 among them, so that it falls
back to regular decoding where drafts do not pay. (Lengths by goodput: Liu et al. 2024, SmartSpec; expected tokens:
Leviathan et al. 2023, equation 1.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from bass_core.costs import costs_like
from bass_core.draft_length import DraftLengthPolicy, RowsView, as_policy
from bass_core.models import ModelPair

if TYPE_CHECKING:
    from bass_core.replay import Cost

PRIOR = 0.8  # chance of acceptance before anything was seen
DECAY = 0.98  # of counts per step
CHAIN = 8.0  # observations that a slot's chance counts as for the next one
TOLERANCE = 0.02  # of goodput: among lengths as good as the best, the shortest
LIMIT = 16  # drafts per step: what calibrated grids reach
KV_STEP = 64  # costs are looked up once per so many tokens of KV length
PROBED = 4.0  # observations that all former ones count as when a probe's come in: they are old by then


class SlotAcceptance:
    """The chance that the j-th draft of a step is accepted, given that all before it were; learnt as steps go by.

    Every slot counts what was accepted there of what was reached, older steps less (`DECAY` per step). Its chance is
    the mean of a Beta posterior. The prior of the first slot is `PRIOR`, with the weight of one observation, so that a
    useless draft is found out at once; that of a later slot is the slot before it, with the weight of `CHAIN`, so that
    slots never tried continue the last one seen.
    """

    def __init__(self, slots: int = LIMIT):
        self.slots = np.arange(slots)
        self.reached, self.accepted = np.zeros(slots), np.zeros(slots)
        self.hazards = np.full(slots, PRIOR)  # [slots], the chance in each

    def update(self, tried: np.ndarray, accepted: np.ndarray) -> None:
        """One step's rows [B]: how many drafts each tried, and how many of them were accepted."""
        self.reached *= DECAY
        self.accepted *= DECAY
        decided = np.minimum(tried, accepted + 1)  # slots whose outcome is known
        self.reached += (self.slots[:, None] < decided).sum(1)
        self.accepted += (self.slots[:, None] < accepted).sum(1)
        chance, weight = PRIOR, 1.0
        for slot in self.slots:
            chance = (self.accepted[slot] + weight * chance) / (self.reached[slot] + weight)
            self.hazards[slot], weight = chance, CHAIN

    def forget(self, weight: float) -> None:
        """Let all that was seen count as at most `weight` observations of the first slot."""
        share = min(1.0, weight / max(self.reached[0], 1e-9))
        self.reached *= share
        self.accepted *= share

    def survival(self) -> np.ndarray:
        """[slots + 1]: chance that the first j drafts are all accepted; 1 for j = 0."""
        return np.concatenate([[1.0], np.cumprod(self.hazards)])


class StepSeconds:
    """`cost.step` over all draft lengths, looked up once per batch size and `KV_STEP` tokens of KV length.

    `drafts` is the part of it that the draft's passes take.
    """

    def __init__(self, cost: Cost, limit: int = LIMIT):
        self.cost, self.limit = cost, limit
        self.over_rows = np.max if getattr(cost, "kv_of_rows", "mean") == "max" else np.mean
        self._known: dict[tuple[int, int, bool], np.ndarray] = {}

    def __call__(self, rows: RowsView) -> np.ndarray:
        """Seconds [limit + 1] of a step of these rows with each draft length."""
        return self._look_up(rows, drafts_only=False)

    def drafts(self, rows: RowsView) -> np.ndarray:
        """Seconds [limit + 1] of the draft's passes for these rows with each draft length."""
        return self._look_up(rows, drafts_only=True)

    def _look_up(self, rows: RowsView, drafts_only: bool) -> np.ndarray:
        batch, kv_steps = len(rows.ids), round(float(self.over_rows(rows.lengths)) / KV_STEP)
        key = batch, kv_steps, drafts_only
        if key not in self._known:
            seconds = self.cost.draft if drafts_only else self.cost.step
            found = seconds(batch, np.arange(self.limit + 1), kv_steps * KV_STEP)
            self._known[key] = np.broadcast_to(np.asarray(found, dtype=float), self.limit + 1)
        return self._known[key]


@dataclass
class Goodput(DraftLengthPolicy):
    """The draft length of most expected tokens per second; 0, regular decoding, where drafts do not pay.

    cost: seconds of steps, `costs.CostModel` or alike. Chances of acceptance are learnt per slot from all rows
    (`SlotAcceptance`). Of lengths within `TOLERANCE` of the best the shortest is taken: estimates are no better than
    that, and a batch, which is done when its last row is, gains less from long drafts than its rows do on average.
    After `probe`, then twice, four times … as many steps in a row without drafts one step probes k = 1, or else 0 would
    be for ever; a probe of which half is accepted is followed by another.
    """

    cost: Cost = field(repr=False)
    limit: int = LIMIT
    probe: int = 16

    def __post_init__(self):
        if self.limit < 1 or self.probe < 1:
            raise ValueError(f"needs limit >= 1 and probe >= 1, got {self}")
        self.seconds = StepSeconds(self.cost, self.limit)
        self._reset()

    def _reset(self) -> None:
        self.acceptance = SlotAcceptance(self.limit)
        self.zeros, self.next_probe, self.probing = 0, self.probe, False

    def start(self, rows: RowsView) -> None:
        if not rows.steps.any():
            self._reset()

    def plan(self, rows: RowsView) -> int:
        k = self._length(rows)
        self.wanted = np.minimum(k, rows.remaining - 1)
        return k

    def _length(self, rows: RowsView) -> int:
        self.gains = self.goodputs(rows)
        k = int((self.gains >= (1 - TOLERANCE) * self.gains.max()).argmax())  # the first of them
        self.probing = k == 0 and self.zeros >= self.next_probe
        if self.probing:
            self.zeros, self.next_probe = 0, 2 * self.next_probe
            return 1
        if k == 0:
            self.zeros += 1
        else:
            self.zeros, self.next_probe = 0, self.probe
        return k

    def goodputs(self, rows: RowsView) -> np.ndarray:
        """Expected tokens per second of a step with draft length 0, 1, … as far as the rows may still go."""
        room = rows.remaining - 1  # drafts that a row may still submit
        tokens = self.tokens(rows).cumsum(-1)  # [B or 1, limit + 1]
        lengths = np.arange(min(int(room.max()), self.limit) + 1)
        submitted = np.minimum(lengths, room[:, None])  # [B, K]
        per_row = np.take_along_axis(np.broadcast_to(tokens, (len(room), tokens.shape[-1])), submitted, 1)
        return per_row.sum(0) / self.seconds(rows)[: len(lengths)]

    def tokens(self, rows: RowsView) -> np.ndarray:
        """What the draft in each slot is worth, after the target's own token: [1 or B, limit + 1]."""
        return self.acceptance.survival()[None]

    def update(self, drafted: Tensor, accepted: Tensor) -> None:
        if drafted.any():
            # what was wanted and not drafted counts as refused: an n-gram lookup that found nothing
            self._learn(self.wanted, accepted.numpy())

    def _learn(self, tried: np.ndarray, accepted: np.ndarray) -> None:
        if self.probing:
            self.acceptance.forget(PROBED)
            if 2 * accepted.sum() >= tried.sum():
                self.zeros, self.next_probe = self.probe, self.probe  # promising: the next step probes again
        self.acceptance.update(tried, accepted)


def require_draft_passes(policy: Goodput) -> None:
    """Raises ValueError for a policy on the costs of a pair without a draft model: it has no distributions to go by."""
    if getattr(policy.cost, "draft_passes", True) is None:
        raise ValueError(
            f"{type(policy).__name__} needs a draft model: without one there is no distribution to look at"
        )


def default_policy(pair: ModelPair) -> DraftLengthPolicy:
    """What `generate` decodes with unless told otherwise: `Goodput` where the pair's costs are known (`bass calibrate`
    measures them, once per device; the embedded pair's ship with the library), a fixed length elsewhere."""
    cost = costs_like(pair)
    return as_policy(None) if cost is None else Goodput(cost)


def policy_for(pair: ModelPair, draft_length: int | DraftLengthPolicy | None) -> DraftLengthPolicy:
    """The policy that `generate`'s argument means for this pair. Raises TypeError or ValueError as `as_policy` does."""
    return default_policy(pair) if draft_length is None else as_policy(draft_length)
