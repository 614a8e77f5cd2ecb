"""How many tokens to draft next: the policy interface, a fixed length, and the paper's Algorithm 1.

What a policy may see keeps decoding exact (non-anticipation): the past, the drafts' distributions, other rows, but
never a drafted token before it is submitted. The engine passes nothing else.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class RowsView:
    """The live rows as a policy sees them before a step; numpy arrays of one entry per row.

    ids: row ids (the output index). steps: decode steps the row has taken, 0 right after its prefill. lengths,
    generated: committed tokens with the prompt and without. remaining: tokens the row may still emit.
    """

    ids: np.ndarray
    steps: np.ndarray
    lengths: np.ndarray
    generated: np.ndarray
    remaining: np.ndarray


@dataclass(frozen=True)
class Signals:
    """What is known before x_j is drawn. Entropy and maximum are the draft's own, unprocessed, at temperature 1."""

    slot: int  # j - 1: how many tokens of this step are already drafted
    entropy: Tensor  # [B], nats
    maximum: Tensor  # [B], largest probability
    drafting: Tensor  # bool [B], rows that have not stopped


class HiddenDraft:
    """A step's drafts, all drawn and none of them shown: what a policy may know before it submits each.

    lengths: int64 [B], how many each row has drafted; submitted: int64 [B], how many of them are submitted so far. Both
    are read-only.
    """

    def __init__(self, lengths: np.ndarray, maxima: np.ndarray, chances: np.ndarray):
        """maxima, chances: [B, K], the draft model's largest probability for each token and that of the token itself,
        unprocessed, at temperature 1."""
        self._lengths, self._submitted = lengths.copy(), np.zeros_like(lengths)
        self.lengths, self.submitted = self._lengths.view(), self._submitted.view()
        self.lengths.flags.writeable = self.submitted.flags.writeable = False
        self._maxima, self._chances = maxima, chances
        self.chances = np.full(chances.shape, np.nan)  # [B, K], of the submitted tokens; NaN elsewhere

    def maximum(self, row: int) -> float:
        """Largest probability for the row's next draft, known before it was drawn. Raises IndexError: there is none."""
        return float(self._maxima[row, self._next(row)])

    def submit(self, row: int) -> float:
        """Submit the row's next draft, and learn its probability. Raises IndexError if there is none."""
        slot = self._next(row)
        self._submitted[row] += 1
        self.chances[row, slot] = self._chances[row, slot]
        return float(self.chances[row, slot])

    def _next(self, row: int) -> int:
        if self._submitted[row] >= self._lengths[row]:
            raise IndexError(f"row {row} has submitted all of its {self._lengths[row]} drafts")
        return int(self._submitted[row])


class DraftLengthPolicy(ABC):
    """Decides the draft length k of every step; 0 is regular decoding. Subclasses implement `plan`.

    Policies keep state between steps and never read the clock.
    """

    # keep_drafting(signals), asked before each x_j is drawn: bool [B], False stops a row before x_j; or int64 [B], the
    # rows' draft lengths from what is known now (j: x_j is the last, no pass of the draft follows). A row that stopped
    # stays stopped. None: not asked, which spares the draft's entropies and a copy to the host per draft pass.
    keep_drafting: Callable[[Signals], Tensor] | None = None

    # choose(hidden), asked when all rows have drafted with a model: submits some of the drafts, one by one, each row's
    # in their order; the others are dropped unseen. None: all are submitted.
    choose: Callable[[HiddenDraft], None] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @property
    def asks_while_drafting(self) -> bool:
        """Whether drafting has to stop for this policy's answers."""
        return self.keep_drafting is not None or self.choose is not None

    def start(self, rows: RowsView) -> None:
        """Rows were admitted: a decode begins (all steps are 0), or rows join one."""

    @abstractmethod
    def plan(self, rows: RowsView) -> int | Tensor:
        """k for this step, or one k per row (int64 [B])."""

    def update(self, drafted: Tensor, accepted: Tensor) -> None:
        """What each row submitted and had accepted in this step, int64 [B] each, on the host: copies."""

    def predict_next(self) -> int | None:
        """Asked after `plan`: what it will say for the next step whatever this one brings, unless rows end; None: that
        depends. On a GPU a predicted step begins before this one is read. One predicted wrongly is undone."""
        return None


@dataclass
class FixedLength(DraftLengthPolicy):
    """Always k."""

    k: int

    def __post_init__(self):
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 0:
            raise ValueError(f"draft_length must be an integer >= 0 (0 = regular decoding), got {self.k!r}")

    def plan(self, rows: RowsView) -> int:
        return self.k

    def predict_next(self) -> int:
        return self.k


@dataclass
class BassHeuristic(DraftLengthPolicy):
    """The paper's Algorithm 1: one draft length for the batch, grown while some row accepts all of it.

    Growth by `increment`; otherwise it shrinks by ceil(l / modulus), one more from the second miss in a row on, but
    never below what any row accepted. Constants are the paper's empirical values (from a public re-implementation).
    """

    initial: int = 7
    increment: int = 2
    modulus: int = 10
    limit: int = 32

    def __post_init__(self):
        if min(self.initial, self.increment, self.modulus) < 1 or self.limit < self.initial:
            raise ValueError(f"needs initial, increment, modulus >= 1 and limit >= initial, got {self}")
        self._reset()

    def _reset(self) -> None:
        self.length, self.shrinking = self.initial, 0

    def start(self, rows: RowsView) -> None:
        if not rows.steps.any():
            self._reset()

    def plan(self, rows: RowsView) -> int:
        return self.length

    def update(self, drafted: Tensor, accepted: Tensor) -> None:
        most_drafted, most_accepted = int(drafted.max()), int(accepted.max())
        if most_drafted == 0:
            return  # every row was about to end: nothing was learnt
        if most_accepted == most_drafted:
            self.length, self.shrinking = min(self.length + self.increment, self.limit), 0
        else:
            shorter = self.length - math.ceil(self.length / self.modulus) - self.shrinking
            self.length, self.shrinking = max(1, most_accepted, shorter), 1


def expected_tokens(alpha: float | np.ndarray, most: int, seen: float = math.inf) -> np.ndarray:
    """Tokens that a step with 0, 1, … `most` drafts yields on average, the target's own included: [..., most + 1].

    alpha [...]: chance that a draft is accepted if all before it in the step were (Leviathan et al. 2023, equation 1).
    seen: α is Beta distributed as if it were known of so many drafts, since it is, or since it varies along a text;
    infinite: it is certain. The fewer, the likelier is a long run against α^k: its first drafts speak for the others.
    """
    own, others = _shares(most, seen)
    return (np.asarray(alpha)[..., None] * own + others).cumprod(-1).cumsum(-1)


@functools.lru_cache
def _shares(most: int, seen: float) -> tuple[np.ndarray, np.ndarray]:
    """Of 1 and the chances of drafts 1 … `most` if all before were accepted: how much of each is α, and how much 1."""
    before = np.arange(most) / seen
    return np.append(0, 1 / (1 + before)), np.append(1, before / (1 + before))


def as_policy(draft_length: int | DraftLengthPolicy | None) -> DraftLengthPolicy:
    """The policy that an argument means: an int is a fixed length, None the one that needs to know nothing, k = 5.

    Raises TypeError for anything else, ValueError for a negative length.
    """
    if draft_length is None:
        return FixedLength(5)
    if isinstance(draft_length, DraftLengthPolicy):
        return draft_length
    if isinstance(draft_length, int | np.integer) and not isinstance(draft_length, bool):
        return FixedLength(int(draft_length))
    raise TypeError(
        f"draft_length must be None (default policy), an integer >= 0 or a DraftLengthPolicy, got {draft_length!r}"
    )


def planned_lengths(k: int | Tensor, rows: RowsView) -> tuple[np.ndarray, np.ndarray]:
    """Draft length per row as the policy planned it, and cut to what the row may still emit. int64 [B] each.

    One place of the remaining tokens belongs to the target's own, so no position runs past the row's end.
    Raises ValueError for a plan that is negative or of the wrong shape.
    """
    shape = rows.remaining.shape
    plan = k.cpu().numpy() if isinstance(k, Tensor) else np.asarray(k)
    if plan.shape not in ((), shape) or plan.dtype.kind not in "iu" or plan.min(initial=0) < 0:
        raise ValueError(f"plan must return an integer >= 0, or {len(rows.ids)} of them (one per row); got {k!r}")
    planned = np.empty(shape, np.int64)
    planned[:] = plan
    return planned, np.minimum(planned, rows.remaining - 1)


def cut_lengths(lengths: np.ndarray, answer: Tensor, slot: int) -> np.ndarray:
    """Draft lengths [B] after the answer of `keep_drafting` with `slot` tokens drafted: never longer than before.

    Raises ValueError for an answer of another kind or shape.
    """
    answer = answer.cpu().numpy() if isinstance(answer, Tensor) else np.asarray(answer)
    if answer.shape != lengths.shape or answer.dtype.kind not in "biu":
        raise ValueError(
            f"keep_drafting must return one bool or integer for each of {len(lengths)} rows; got {answer!r}"
        )
    if answer.dtype == bool:
        answer = np.where(answer, lengths, slot)
    return np.minimum(lengths, np.maximum(answer, slot))
