"""Draft lengths from costs: the k with the most expected tokens per second, measured costs against observed acceptance.

Every row has an α, the chance that a draft is accepted if all before it in its step were. It is learnt from the row's
own steps, older ones counting less, and leans on what all rows show, those that ended not long ago among them. What a
step with k drafts then yields on average is `expected_tokens`, and how long it takes, by the cost model, `StepSeconds`.
`Goodput` takes the best of all k, 0 among them, so that it falls back to regular decoding where drafts do not pay.
(Lengths by goodput: Liu et al. 2024, SmartSpec; expected tokens: Leviathan et al. 2023, equation 1.)

What a step is worth depends on which rows are to be served: `Goodput` serves those that end last, since a batch is done
when its last row is, but all alike once rows have joined: then others come and go, and no row's end is that of all.
`Objective` serves whom it is told to (the first rows, the last ones, those with a deadline).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from bass_core.policies.costs import Cost, StepSeconds
from bass_core.policies.protocol import DraftLengthPolicy, RowsView, expected_tokens

STRAGGLING = 8  # power of the steps that a row still needs by which it counts
LIMIT = 16  # drafts per step: what calibrated grids reach
DECAY = 0.96  # of the weight of what was seen, per step
LEAN = 12.0  # drafts of its own after which a row is judged as much by them as by all rows
SPREAD = 24.0  # α varies along a text as if it were known of so many drafts: long runs are likelier than α^k
PRIOR = 2.0, 0.7  # drafts accepted and refused, where nothing was ever seen
FORMER = 8.0  # drafts that all those of rows that ended count as at most, and all that a calibration has seen
FADING = 0.96  # of which so much stays, each time that costs are looked at and nothing is drafted
OLD = 2.0  # drafts that all former ones count as at most when a probe's are accepted: they are old by then
SAME = 8  # steps without drafts after which costs are looked at again: nothing else has changed
PROBED = 4  # one row in so many drafts in a probe: what it missed has to be fed to the draft model first


class RowAlphas:
    """α of each live row, from the drafts that were accepted and the steps that ended with one refused.

    expected: float [2], drafts accepted and refused before anything was seen. kept, lost: float [B], of each row, older
    ones counting less. former: float [2], of all rows that ended, and `expected`.
    """

    def __init__(self, expected: Sequence[float] | np.ndarray = PRIOR):
        self.ids = np.zeros(0, np.int64)
        self.kept, self.lost = np.zeros(0), np.zeros(0)
        self.expected = self.former = np.array(expected)

    def follow(self, ids: np.ndarray) -> None:
        """These rows are live now, in this order: what those that ended have shown goes to `former`, new ones have
        shown nothing yet."""
        if ids.tolist() != self.ids.tolist():
            same = ids[:, None] == self.ids
            same &= same.cumsum(1) == 1  # two rows may have been given one number
            before = self.kept.sum(), self.lost.sum()
            self.kept, self.lost, self.ids = same @ self.kept, same @ self.lost, ids
            former = self.former + before - (self.kept.sum(), self.lost.sum())
            self.former = former * min(1.0, FORMER / former.sum())

    def __call__(self) -> np.ndarray:
        """float [B]"""
        kept, lost = self.kept.sum() + self.former[0], self.lost.sum() + self.former[1]
        return (self.kept + LEAN * kept / (kept + lost)) / (self.kept + self.lost + LEAN)

    def update(self, kept: np.ndarray, lost: np.ndarray) -> None:
        """One step: drafts of each row that were accepted, and whether one was refused, [B] each."""
        self.kept, self.lost = DECAY * self.kept + kept, DECAY * self.lost + lost

    def fade(self) -> None:
        """Time goes by in which nothing is drafted: what rows that ended have shown counts less."""
        self.former = self.expected + FADING * (self.former - self.expected)

    def forget(self) -> None:
        """Let all drafts that live rows have shown count as `OLD` at most, those of rows that ended not at all."""
        share = OLD / max(OLD, self.kept.sum() + self.lost.sum())
        self.kept, self.lost, self.former = share * self.kept, share * self.lost, np.array(PRIOR)


@dataclass
class Goodput(DraftLengthPolicy):
    """The draft length of most expected tokens per second; 0, regular decoding, where drafts do not pay.

    cost: seconds of steps, `costs.CostModel` or alike. Rows that still need many steps count more than others
    (`weigh`), until rows join the batch. After `probe`, then twice, four times … as many steps in a row without drafts
    some rows probe k = 1, or else 0 would be for ever, unless less than that is left to write and no rows come; if more
    than half of a probe is accepted, what was known before counts little. Where costs promise little even if all drafts
    were accepted (`costs.WORTH`), nothing is tried. What a pair's first rows begin with is what its calibration has
    seen, and a session's later rows with what its earlier ones have shown: where these did not draft, with a probe.
    """

    cost: Cost = field(repr=False)
    limit: int = LIMIT
    probe: int = 32

    def __post_init__(self):
        if self.limit < 1 or self.probe < 1:
            raise ValueError(f"needs limit >= 1 and probe >= 1, got {self}")
        self.seconds, self.alphas = StepSeconds(self.cost, self.limit), RowAlphas(_expected(self.cost))
        self._reset()

    def _reset(self) -> None:
        self.k = self.zeros = 0  # draft length of the last step, and for how many steps it has been 0
        self.rest = 0  # nothing is drafted before the step in which it reaches this
        self.next_probe, self.probing, self.batch = self.probe, False, 0
        self.joined = False  # whether rows came while others were decoded

    def start(self, rows: RowsView) -> None:
        if rows.steps.any():
            self.joined, self.batch = True, 0  # others live now: what was found of those before says nothing of these
            return
        self._reset()
        if len(self.alphas.ids) and rows.ids.min() > self.alphas.ids.max():
            # Numbers go on upwards, as a session's do: where its earlier rows did not draft, these try at once.
            self.zeros = self.probe
        else:
            self.alphas = RowAlphas(self.alphas.expected)

    def foretell(self) -> int | None:
        return 0 if 0 < self.zeros < self.rest else None

    def plan(self, rows: RowsView) -> int | Tensor:
        if self.foretell() == 0 and len(rows.ids) == self.batch:
            self.zeros += 1
            if self.zeros == self.rest and not self._is_due(rows, 1):  # looked at now, the next step can be foretold
                best, may_pay = self._best(rows)
                if best == 0:
                    self._rest(rows, may_pay)
            return 0
        self.alphas.follow(rows.ids)
        self.batch = len(rows.ids)
        (self.k, may_pay), self.probing = self._best(rows), False
        if self.k > 0:
            self.zeros, self.next_probe = 0, self.probe
        elif may_pay and self._is_due(rows):
            self.k, self.probing = 1, True
            self.zeros, self.next_probe = 0, 2 * self.next_probe
        else:
            self.zeros += 1
            self._rest(rows, may_pay)
            return 0
        self.wanted = np.minimum(self.k, rows.remaining - 1)
        if self.probing:
            self.wanted[-(-len(rows.ids) // PROBED) :] = 0
            return torch.from_numpy(self.wanted)
        return self.k

    def _is_due(self, rows: RowsView, steps: int = 0) -> bool:
        """Whether a probe is, of these rows, so many steps from now. Where rows come and go, more will."""
        return self.zeros >= self.next_probe and (self.joined or self.next_probe <= rows.remaining.max() - steps)

    def _rest(self, rows: RowsView, may_pay: bool) -> None:
        """Nothing is drafted in this step and some more."""
        if not may_pay:
            self.zeros = 1  # no probe is ever due
        self.rest = self.zeros - self.zeros % SAME + SAME
        if may_pay and self._is_due(rows, 1):
            self.rest = self.zeros
        elif self.zeros < self.next_probe:
            self.rest = min(self.rest, self.next_probe)
        self.alphas.fade()

    def _best(self, rows: RowsView) -> tuple[int, bool]:
        """The draft length of most expected tokens per second, and whether any promises enough to be tried."""
        if not self.seconds.look_up(rows).may_pay:
            return 0, False
        self.gains = self.goodputs(rows)
        return int(self.gains.argmax()), True

    def goodputs(self, rows: RowsView) -> np.ndarray:
        """Expected tokens per second of a step with draft length 0, 1, … as far as the rows may still go."""
        tokens = expected_tokens(self.alphas(), self.limit, SPREAD)  # [B, limit + 1]
        seconds, remaining = self.seconds(rows), rows.remaining.tolist()
        if min(remaining) <= self.limit:
            most = min(max(remaining), self.limit + 1)  # of the tokens to go one is the target's own
            tokens = np.take_along_axis(tokens, np.minimum(np.arange(most), rows.remaining[:, None] - 1), 1)
            seconds = seconds[:most]
        return self.weigh(rows, tokens) @ tokens / seconds

    def weigh(self, rows: RowsView, tokens: np.ndarray) -> np.ndarray:
        """How much each row's tokens count, [B]; their sum is B.

        tokens [B, K]: what a step with each draft length is expected to yield. Rows count by the steps that they still
        need if all of them draft as far as the last one did.
        """
        if self.joined or len(tokens) == 1:
            return np.ones(len(tokens))
        steps = rows.remaining / tokens[:, min(max(self.k, 1), tokens.shape[1] - 1)]
        weights = (steps / steps.max()) ** STRAGGLING
        return weights * (len(weights) / weights.sum())

    def update(self, drafted: Tensor, accepted: Tensor) -> None:
        if drafted.numpy().any():
            # what was wanted and not drafted counts as refused: an n-gram lookup that found nothing
            self._learn(self.wanted, accepted.numpy())

    def _learn(self, tried: np.ndarray, kept: np.ndarray) -> None:
        if self.probing and 2 * kept.sum() > tried.sum():
            self.alphas.forget()
            self.next_probe = self.probe
        self.alphas.update(kept, kept < tried)


def _expected(cost: Cost) -> tuple[float, float]:
    """Drafts accepted and refused that are expected of a pair with these costs: as it was calibrated, or `PRIOR`."""
    kept, lost = getattr(cost, "acceptance", None) or PRIOR
    share = min(1.0, FORMER / (kept + lost))
    return share * kept, share * lost


def require_draft_passes(policy: Goodput) -> None:
    """Raises ValueError for a policy on the costs of a pair without a draft model: it has no distributions to go by."""
    if getattr(policy.cost, "draft_phases", True) is None:
        raise ValueError(
            f"{type(policy).__name__} needs a draft model: without one there is no distribution to look at"
        )


# --- other ends than the batch's ------------------------------------------------------------------

Weights = Callable[[RowsView, float], np.ndarray]


def first_finished(sharpness: float) -> Weights:
    """Rows nearer to their limit count more: weight (least remaining / remaining) ** sharpness."""
    return lambda rows, elapsed: (rows.remaining.min() / rows.remaining) ** sharpness


def last_finished(sharpness: float) -> Weights:
    """Rows farther from their limit count more: weight (remaining / most remaining) ** sharpness."""
    return lambda rows, elapsed: (rows.remaining / rows.remaining.max()) ** sharpness


def deadlines(seconds: Mapping[int, float]) -> Weights:
    """Rows count by the tokens per second that they still need; seconds: by row, from the decode's first step on.

    Rows without a deadline, and those that have missed theirs, count a hundredth of the most urgent one.
    """

    def weights(rows: RowsView, elapsed: float) -> np.ndarray:
        left = np.array([seconds.get(row, np.inf) for row in rows.ids.tolist()]) - elapsed
        needed = np.where(left > 0, rows.remaining / np.maximum(left, 1e-9), 0.0)
        return np.maximum(needed / needed.max(), 0.01) if needed.any() else np.ones(len(needed))

    return weights


EQUAL = last_finished(0.0)


@dataclass
class Objective(Goodput):
    """`Goodput` of weighted rows: weights(rows, elapsed) gives one weight >= 0 per row.

    elapsed: seconds that the decode's steps took so far, by the cost model (never by the clock).
    """

    weights: Weights = field(default=EQUAL, repr=False)

    def _reset(self) -> None:
        super()._reset()
        self.elapsed = 0.0

    def plan(self, rows: RowsView) -> int | Tensor:
        plan = super().plan(rows)
        self.elapsed += self.seconds(rows)[self.k]
        return plan

    def weigh(self, rows: RowsView, tokens: np.ndarray) -> np.ndarray:
        weights = np.asarray(self.weights(rows, self.elapsed), dtype=float)
        if weights.shape != rows.ids.shape or not (weights >= 0).all() or not weights.any():
            raise ValueError(f"weights must give a number >= 0 per row, one of them above 0; got {weights!r}")
        return weights
