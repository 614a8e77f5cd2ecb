"""Draft lengths from costs: the k with the most expected tokens per second, measured costs against observed acceptance.

A step with draft length k emits 1 + S_1 + … + S_k tokens per row on average, S_j the chance that j drafts in a row are
accepted (`acceptance_laws`), and takes as long as the cost model says (`StepSeconds`). `Goodput` takes the best of all
k, 0 among them, so that it falls back to regular decoding where drafts do not pay. (Lengths by goodput: Liu et al.
2024, SmartSpec; expected tokens: Leviathan et al. 2023, equation 1.)
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bass_core.draft_length import DraftLengthPolicy, RowsView, as_policy
from bass_core.models import ModelPair
from bass_core.policies.acceptance_laws import AcceptanceByRow
from bass_core.policies.costs import Cost, CostModel, costs_like

STRAGGLING = 8  # power of the steps that a row still needs by which it counts
TOLERANCE = 0.0065  # of goodput: among lengths as good as the best, the shortest
LEARNT = 0.02  # of goodput: as much a step without drafts has to promise more, for nothing is learnt from it
LIMIT = 16  # drafts per step: what calibrated grids reach
FIRST = 4  # drafts of the first step at most; then twice as many as those whose fate is known
SAME = 8  # steps without drafts after which costs are looked at again: nothing else has changed
PROBED = 4  # one row in so many drafts in a probe: what it missed has to be fed to the draft model first
OLD = 2.0  # drafts that all former ones count as at most when a probe's are accepted: they are old by then
WORTH = 0.1  # gain over regular decoding that all drafts accepted must promise, or none are tried
KV_STEP = 64  # costs are looked up once per so many tokens of KV length
END = 4  # tokens more than the longest step yields: rows that have no more to go are near their end


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

    cost: seconds of steps, `costs.CostModel` or alike. Each row's chances of acceptance are learnt from its own steps
    and from those of the others (`AcceptanceByRow`; what calibration has found of these models comes first). A batch
    is done when its last row is, so rows that still need many steps count more than others (`weigh`); once all rows
    are near their end, tokens count by the time that they save (`worth_near_the_end`). Of lengths within `TOLERANCE`
    of the best the shortest is taken: estimates are no better than that. Only 0, from which nothing is learnt, has to
    promise `LEARNT` more than any other. After `probe`, then twice, four times … as many steps in a row without drafts
    some rows probe k = 1, or else 0 would be for ever; if more than half of a probe is accepted, what was known before
    counts little. Where costs promise less than `WORTH` even if all drafts were accepted, nothing is tried.
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
        before = getattr(self.cost, "accepted", None)
        self.acceptance = AcceptanceByRow(self.limit, before)
        self.knows_texts = before is not None
        self.k = FIRST
        self.zeros, self.next_probe, self.probing, self.batch = 0, self.probe, False, 0

    def start(self, rows: RowsView) -> None:
        if not rows.steps.any():
            self._reset()

    def plan(self, rows: RowsView) -> int | Tensor:
        self.k = self._length(rows)
        if self.k == 0:
            return 0
        self.wanted = np.minimum(self.k, rows.remaining - 1)
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
        k = self._shortest_of_the_best() if may_pay else 0
        self.probing = may_pay and k == 0 and self.zeros >= self.next_probe
        if self.probing:
            self.zeros, self.next_probe = 0, 2 * self.next_probe
            return 1
        if k == 0:
            self.zeros = self.zeros + 1 if may_pay else 1  # 1: no probe is ever due
            return 0
        self.zeros, self.next_probe = 0, self.probe
        return k if self.knows_texts else min(k, math.ceil(2 * self.acceptance.seen) or FIRST)

    def _shortest_of_the_best(self) -> int:
        worth = self.gains.tolist()
        worth[0] *= 1 - LEARNT
        enough = (1 - TOLERANCE) * max(worth)
        return next(k for k, gain in enumerate(worth) if gain >= enough)

    def goodputs(self, rows: RowsView) -> np.ndarray:
        """Expected tokens per second of a step with draft length 0, 1, … as far as the rows may still go."""
        return self._gains(rows, self.seconds(rows))

    def _gains(self, rows: RowsView, seconds: np.ndarray) -> np.ndarray:
        self.acceptance.follow(rows.ids)
        tokens = yields = self.acceptance.tokens()
        remaining = rows.remaining.tolist()
        lengths = min(max(remaining), self.limit + 1)  # 0, 1, …: of the tokens to go one is the target's own
        if min(remaining) <= self.limit:
            room = np.minimum(np.arange(lengths), rows.remaining[:, None] - 1)
            yields = np.take_along_axis(tokens, room, 1)
        weights = self.weigh(rows, yields)
        if max(remaining) <= self.limit + END:
            yields = worth_near_the_end(tokens, rows.remaining, seconds)[:, :lengths]
        return weights @ yields / seconds[:lengths]

    def weigh(self, rows: RowsView, tokens: np.ndarray) -> np.ndarray:
        """How much each row's tokens count, [B]; their sum is B.

        tokens [B, K]: what a step with each draft length is expected to yield. Rows count by the steps that they still
        need if all of them draft as far as the last one did.
        """
        if len(rows.ids) == 1:
            return np.ones(1)
        steps = rows.remaining / tokens[:, min(max(self.k, 1), tokens.shape[1] - 1)]
        weights = (steps / steps.max()) ** STRAGGLING
        return weights * (len(weights) / weights.sum())

    def update(self, drafted: Tensor, accepted: Tensor) -> None:
        if drafted.numpy().any():
            # what was wanted and not drafted counts as refused: an n-gram lookup that found nothing
            self._learn(self.wanted, accepted.numpy())

    def _learn(self, tried: np.ndarray, accepted: np.ndarray) -> None:
        if self.probing and 2 * accepted.sum() > tried.sum():
            self.acceptance.forget(OLD)
            self.next_probe = self.probe
        self.acceptance.update(tried, accepted)


def worth_near_the_end(tokens: np.ndarray, remaining: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """What a step with each draft length is worth to rows near their end [B, K + 1], in tokens far from any end.

    tokens [B, K + 1]: what it is expected to yield; remaining [B]: tokens still to go; seconds [K + 1]: of the step.

    The last tokens of a row are not worth the same: a draft that ends the row saves a whole step, the one before it
    next to nothing. With n tokens to go, the first of them saves v_n = min over k < n of T(k) - Σ S_j v_{n - j} over
    j <= k: the seconds of the best step less those that its drafts save if they are accepted. (Backward induction over
    the row on its own, its chances and the step's seconds as they are now. Far from the end v is 1 / goodput.)
    """
    k, most = tokens.shape[1] - 1, int(remaining.max())
    survival = np.diff(tokens, axis=1, prepend=0)
    saved = np.zeros((len(tokens), k + most + 1))  # v_n at k + n; tokens past the end save nothing
    for n in range(1, most + 1):
        following = saved[:, k + n : n - 1 : -1]  # v_n, not known yet, v_{n - 1}, … v_{n - k}
        saved[:, k + n] = (seconds - (survival * following).cumsum(1))[:, :n].min(1)
    following = np.take_along_axis(saved, k + remaining[:, None] - np.arange(k + 1), 1)
    return (survival * following).cumsum(1) * (tokens / seconds).max(1, keepdims=True)


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
