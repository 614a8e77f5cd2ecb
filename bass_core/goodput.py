"""Draft lengths from costs: the k with the most expected tokens per second, measured costs against observed acceptance.

A step with draft length k emits 1 + S_1 + … + S_k tokens per row on average, S_j the chance that j drafts in a row are
accepted (`Acceptance`), and takes as long as the cost model says (`StepSeconds`). `Goodput` takes the best of all k, 0
among them, so that it falls back to regular decoding where drafts do not pay. (Lengths by goodput: Liu et al. 2024,
SmartSpec; expected tokens: Leviathan et al. 2023, equation 1.)
"""

from __future__ import annotations

import functools
import math
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bass_core.costs import CostModel, costs_like
from bass_core.draft_length import DraftLengthPolicy, RowsView, as_policy
from bass_core.models import ModelPair

if TYPE_CHECKING:
    from bass_core.replay import Cost

PRIOR = 0.8  # chance of acceptance before anything was seen
DECAY = 0.96  # of the weight of what was seen, per step
USELESS = 0.1  # chance, before anything was seen, that hardly a draft is accepted
STRAGGLING = 6  # power of a row's remaining tokens by which it counts
TOLERANCE = 0.015  # of goodput: among lengths as good as the best, the shortest
LIMIT = 16  # drafts per step: what calibrated grids reach
FIRST = 4  # drafts of the first step at most; then twice as many as those whose fate is known
UNLIKE = 0.2  # chance that a text is like none of those that calibration has met
SAME = 8  # steps without drafts after which costs are looked at again: nothing else has changed
PROBED = 4  # one row in so many drafts in a probe: what it missed has to be fed to the draft model first
OLD = 2.0  # drafts that all former ones count as at most when a probe's are accepted: they are old by then
WORTH = 0.1  # gain over regular decoding that all drafts accepted must promise, or none are tried
KV_STEP = 64  # costs are looked up once per so many tokens of KV length


class Acceptance:
    """How many of a step's drafts are accepted, learnt as steps go by: a posterior over a grid of laws.

    Text has easy and hard places: a draft whose predecessors were accepted is likelier to be accepted, too. So a law
    says that each step draws a chance of acceptance of its own from a Beta distribution of mean m and concentration c,
    which makes S_j = Π (m c + i) / (c + i) over i < j (for large c: m^j). Every step is as likely under each law as its
    rows' accepted counts are; older steps count less (`DECAY` per step). Unlike a frequency per slot this learns from
    slot 1 what to expect of slot 9, and from the first steps how sure to be.
    """

    MEANS = np.append(np.linspace(0.02, 0.98, 25), 0.995)
    CONCENTRATIONS = np.array([0.1, 3.0, 8.0, 24.0])  # of drafts all or none of which are accepted, to equal ones
    ALL_OR_NONE = 0.05  # chance of the first, before anything was seen

    def __init__(self, slots: int = LIMIT, before: tuple[tuple[int, ...], ...] | None = None):
        """before: what became of the drafts of other texts (`CostModel.accepted`); this one may be like any of them."""
        self.laws, self._sums, self._likelihoods, prior = self._tables(slots)
        self._prior = prior if before is None else self._like_others(slots, before)
        self.before = before is not None
        self.seen, self.evidence = 0.0, np.zeros(len(self.laws))  # drafts whose fate is known; log-likelihood of laws
        self._weigh()

    @classmethod
    @functools.cache
    def _like_others(cls, slots: int, before: tuple[tuple[int, ...], ...]) -> np.ndarray:
        """Log of the prior [laws] of a text that is like one of these, or (`UNLIKE`) like none of them."""
        _, _, likelihoods, prior = cls._tables(slots)
        tried = len(before[0]) - 1
        accepted = np.minimum(np.arange(tried + 1), slots)
        known = np.array(before) @ likelihoods[2 * accepted + (accepted < min(tried, slots))] + prior  # [texts, laws]
        known = np.exp(known - known.max(1, keepdims=True))
        like_one = (known / known.sum(1, keepdims=True)).mean(0)
        return np.log((1 - UNLIKE) * like_one + UNLIKE * np.exp(prior) / np.exp(prior).sum())

    @classmethod
    @functools.cache  # a decode begins with a posterior of its own
    def _tables(cls, slots: int) -> tuple[np.ndarray, ...]:
        """S_j of each law [laws, slots + 1]; these and their running sums [laws, 2 (slots + 1)]; log-likelihoods of j
        accepted drafts [2 (slots + 1), laws], after which one was refused (odd lines) or no other was tried (even
        ones); log of the prior [laws]."""
        m, c = (each.reshape(-1, 1) for each in np.meshgrid(cls.MEANS, cls.CONCENTRATIONS))
        chance = (m * c + np.arange(slots)) / (c + np.arange(slots))  # [laws, slots], given all drafts before
        laws = np.concatenate([np.ones_like(m), chance.cumprod(1)], 1)
        refused = -np.diff(laws, axis=1, append=0)  # S_j - S_{j + 1}
        likelihoods = np.log(np.stack([laws.T, refused.T], 1)).reshape(-1, len(laws))
        useful, useless = m / m.sum(), (m < 0.1) / (m < 0.1).sum()
        kind = np.where(c == c.min(), cls.ALL_OR_NONE, (1 - cls.ALL_OR_NONE) / (len(cls.CONCENTRATIONS) - 1))
        prior = np.log(kind * ((1 - USELESS) * useful + USELESS * useless))[:, 0]
        return laws, np.concatenate([laws, laws.cumsum(1)], 1), likelihoods, prior

    def update(self, tried: np.ndarray, accepted: np.ndarray, weights: np.ndarray | None = None) -> None:
        """One step's rows [B]: how many drafts each tried, how many of them were accepted, and how much it counts."""
        refused = accepted < tried
        weights = np.ones(len(tried)) if weights is None else weights
        self.evidence = DECAY * self.evidence + weights @ self._likelihoods.take(2 * accepted + refused, 0)
        self.seen = DECAY * self.seen + weights @ (accepted + refused)
        self._weigh()

    def forget(self, weight: float) -> None:
        """Let all drafts that were seen count as at most so many."""
        share = weight / max(weight, self.seen)
        self.seen, self.evidence = share * self.seen, share * self.evidence

    def _weigh(self) -> None:
        weights = self.evidence + self._prior
        found = np.exp(weights - weights.max()) @ self._sums
        found /= found[0]  # S_0 is 1 under all laws
        # [slots + 1] each: the chance that the first j drafts are all accepted, and their sum up to j, the tokens that
        # a step with j drafts is expected to yield, the target's included
        self.survival, self.tokens = found[: len(found) // 2], found[len(found) // 2 :]


class _Looked(NamedTuple):
    """Of a batch size and KV length. steps: seconds [limit + 1] of a step with each draft length; drafts: of the
    draft's passes in it; may_pay: whether some length would gain `WORTH` over regular decoding if all were accepted."""

    steps: np.ndarray
    drafts: np.ndarray
    may_pay: bool


_KNOWN: weakref.WeakKeyDictionary[CostModel, dict] = weakref.WeakKeyDictionary()  # by costs, then by limit


class StepSeconds:
    """Seconds over all draft lengths, looked up once per batch size and `KV_STEP` tokens of KV length."""

    def __init__(self, cost: Cost, limit: int = LIMIT):
        self.cost, self.lengths = cost, np.arange(limit + 1)
        self.by_longest = getattr(cost, "kv_of_rows", "mean") == "max"
        # What is measured does not change: policies on the same costs look them up together.
        shared = _KNOWN.setdefault(cost, {}) if isinstance(cost, CostModel) else {}
        self._known: dict[tuple[int, int], _Looked] = shared.setdefault(limit, {})

    def __deepcopy__(self, memo: dict) -> StepSeconds:
        return self

    def __call__(self, rows: RowsView) -> np.ndarray:
        """Seconds [limit + 1] of a step of these rows with each draft length."""
        return self.look_up(rows).steps

    def look_up(self, rows: RowsView) -> _Looked:
        """All that is known of steps of these rows."""
        batch = len(rows.ids)
        kv_length = rows.lengths.max() if self.by_longest else rows.lengths.sum() / batch
        key = batch, round(kv_length / KV_STEP)
        if key not in self._known:
            self._known[key] = self._computed(batch, key[1] * KV_STEP)
        return self._known[key]

    def _computed(self, batch: int, kv_length: int) -> _Looked:
        steps, drafts = (
            np.broadcast_to(np.asarray(seconds(batch, self.lengths, kv_length), dtype=float), self.lengths.shape)
            for seconds in (self.cost.step, self.cost.draft)
        )
        gain = ((self.lengths + 1) * steps[0] / steps).max() - 1
        return _Looked(steps, drafts, bool(gain >= WORTH))


@dataclass
class Goodput(DraftLengthPolicy):
    """The draft length of most expected tokens per second; 0, regular decoding, where drafts do not pay.

    cost: seconds of steps, `costs.CostModel` or alike. Chances of acceptance are learnt from all rows (`Acceptance`;
    what calibration has found of these models comes first), from those far from their end before the others: a batch is
    done when its last row is, and that is seldom a row whose drafts are accepted more often than others'. Of lengths
    within `TOLERANCE` of the best the shortest is taken: estimates are no better than that. After `probe`, then twice,
    four times … as many steps in a row without drafts some rows probe k = 1, or else 0 would be for ever; if more than
    half of a probe is accepted, what was known before counts little. Where costs promise less than `WORTH` even if all
    drafts were accepted, nothing is tried.
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
        self.acceptance = Acceptance(self.limit, getattr(self.cost, "accepted", None))
        self.zeros, self.next_probe, self.probing, self.batch = 0, self.probe, False, 0

    def start(self, rows: RowsView) -> None:
        if not rows.steps.any():
            self._reset()

    def plan(self, rows: RowsView) -> int | Tensor:
        self.k = self._length(rows)
        if self.k == 0:
            return 0
        self.wanted = np.minimum(self.k, rows.remaining - 1)
        self.counted = self.importance(rows)
        if self.probing:
            self.wanted[-(-len(rows.ids) // PROBED) :] = 0
            return torch.from_numpy(self.wanted)
        return self.k

    def _length(self, rows: RowsView) -> int:
        if self.zeros % SAME and len(rows.ids) == self.batch and self.zeros < self.next_probe:
            self.zeros += 1
            return 0
        self.batch = len(rows.ids)
        looked = self.seconds.look_up(rows)
        may_pay = looked.may_pay
        self.gains = self._gains(rows, looked.steps)
        k = int((self.gains >= (1 - TOLERANCE) * self.gains.max()).argmax()) if may_pay else 0  # the first of them
        self.probing = may_pay and k == 0 and self.zeros >= self.next_probe
        if self.probing:
            self.zeros, self.next_probe = 0, 2 * self.next_probe
            return 1
        if k == 0:
            self.zeros = self.zeros + 1 if may_pay else 1  # 1: no probe is ever due
            return 0
        self.zeros, self.next_probe = 0, self.probe
        return k if self.acceptance.before else min(k, math.ceil(2 * self.acceptance.seen) or FIRST)

    def goodputs(self, rows: RowsView) -> np.ndarray:
        """Expected tokens per second of a step with draft length 0, 1, … as far as the rows may still go."""
        return self._gains(rows, self.seconds(rows))

    def _gains(self, rows: RowsView, seconds: np.ndarray) -> np.ndarray:
        room = rows.remaining - 1  # drafts that a row may still submit
        tokens = self.tokens(rows)
        if len(tokens) == 1 and room.min() >= self.limit:
            return len(room) * tokens[0] / seconds
        lengths = np.arange(min(int(room.max()), self.limit) + 1)
        submitted = np.minimum(lengths, room[:, None])  # [B, K]
        per_row = np.take_along_axis(np.broadcast_to(tokens, (len(room), tokens.shape[-1])), submitted, 1)
        return per_row.sum(0) / seconds[: len(lengths)]

    def tokens(self, rows: RowsView) -> np.ndarray:
        """What a row's step with draft length k is worth: [1 or B, limit + 1]."""
        return self.acceptance.tokens[None]

    def importance(self, rows: RowsView) -> np.ndarray:
        """How much each row's drafts count in what is learnt from them, [B]."""
        return stragglers_first(rows)

    def update(self, drafted: Tensor, accepted: Tensor) -> None:
        if drafted.any():
            # what was wanted and not drafted counts as refused: an n-gram lookup that found nothing
            self._learn(self.wanted, accepted.numpy())

    def _learn(self, tried: np.ndarray, accepted: np.ndarray) -> None:
        if self.probing and 2 * accepted.sum() > tried.sum():
            self.acceptance.forget(OLD)
            self.next_probe = self.probe
        self.acceptance.update(tried, accepted, self.counted)


def stragglers_first(rows: RowsView) -> np.ndarray:
    """How much each row's drafts count [B]: the more, the further it is from its end."""
    return np.ones(1) if len(rows.ids) == 1 else (rows.remaining / rows.remaining.max()) ** STRAGGLING


def require_draft_passes(policy: Goodput) -> None:
    """Raises ValueError for a policy on the costs of a pair without a draft model: it has no distributions to go by."""
    if getattr(policy.cost, "draft_phases", True) is None:
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
