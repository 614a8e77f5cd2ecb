"""Draft-length policies: the interface, a fixed length, and the paper's Algorithm 1.

Decoding stays exact because a policy sees only the past, the drafts' distributions and other rows. A policy never sees
a draft token before it is submitted (non-anticipation). The engine passes nothing else.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class RowsView:
    """The live rows before a step, as numpy arrays with one entry per row.

    ids: row ids (the output index). steps: decode steps of the row so far, 0 right after the prefill. lengths,
    generated: committed tokens with and without the prompt. remaining: tokens that the row may still emit.
    """

    ids: np.ndarray
    steps: np.ndarray
    lengths: np.ndarray
    generated: np.ndarray
    remaining: np.ndarray

    def of(self, rows: list[int]) -> RowsView:
        """Return the rows with these indices."""
        return RowsView(*(column[rows] for column in vars(self).values()))


@dataclass(frozen=True)
class Signals:
    """Information before x_j is drawn. Entropy and maximum are the draft's own, unprocessed, at temperature 1."""

    slot: int  # j - 1: number of tokens drafted in this step
    entropy: Tensor  # [B], nats
    maximum: Tensor  # [B], largest probability
    drafting: Tensor  # bool [B], rows that have not stopped


class DraftLengthPolicy(ABC):
    """Decides the draft length k of every step; 0 is regular decoding. Subclasses implement `plan`.

    Policies keep state between steps and never read the clock.
    """

    # keep_drafting(signals) is called before each x_j is drawn. It returns bool [B] (False stops a row before x_j) or
    # int64 [B], draft lengths by the current information (j: x_j is the last, no draft pass follows). A stopped row
    # stays stopped. With None, the engine skips the draft's entropies and a copy to the host per draft pass.
    keep_drafting: Callable[[Signals], Tensor] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def start(self, rows: RowsView) -> None:
        """Called after rows were admitted: a decode begins (all steps are 0), or rows join a running one."""

    @abstractmethod
    def plan(self, rows: RowsView) -> int | Tensor:
        """Return k for this step, or a k for each row (int64 [B])."""

    def update(self, drafted: Tensor, accepted: Tensor) -> None:
        """Receive the submitted and the accepted draft tokens of each row in this step: host copies, int64 [B] each."""

    def predict_next(self) -> int | None:
        """Return the next step's plan if independent of this step's results (unless rows end), else None. Called after
        `plan`. On a GPU, a predicted step begins before this step's results are read; a wrong prediction is undone."""
        return None


@dataclass
class FixedLength(DraftLengthPolicy):
    """Always drafts k tokens."""

    k: int

    def __post_init__(self):
        if isinstance(self.k, bool) or not isinstance(self.k, int) or not 0 <= self.k < 2**31:
            raise ValueError(f"draft_length must be an integer >= 0 (0 = regular decoding), got {self.k!r}")

    def plan(self, rows: RowsView) -> int:
        return self.k

    def predict_next(self) -> int:
        return self.k


@dataclass
class BassHeuristic(DraftLengthPolicy):
    """The paper's Algorithm 1: one draft length for the batch, which grows while some row accepts all of it.

    The length grows by `increment`. Otherwise it shrinks by ceil(l / modulus), and by one more from the second miss in
    a row on, but never below the largest accepted length. Constants: the paper's, from a public re-implementation.
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
            return  # every row was about to end
        if most_accepted == most_drafted:
            self.length, self.shrinking = min(self.length + self.increment, self.limit), 0
        else:
            shorter = self.length - math.ceil(self.length / self.modulus) - self.shrinking
            self.length, self.shrinking = max(1, most_accepted, shorter), 1


class OfEachRow(DraftLengthPolicy):
    """Several policies, each for its own rows. Every policy sees only these rows."""

    def __init__(self, policies: Sequence[DraftLengthPolicy]):
        """policies: of each live row."""
        self.rows, groups = len(policies), {}
        for row, policy in enumerate(policies):
            groups.setdefault(id(policy), (policy, []))[1].append(row)
        self.groups: list[tuple[DraftLengthPolicy, list[int]]] = list(groups.values())
        if any(policy.keep_drafting is not None for policy, _ in self.groups):
            self.keep_drafting = self._keep_drafting

    def start(self, rows: RowsView) -> None:
        for policy, own in self.groups:
            if not rows.steps[own].all():  # some rows are new
                policy.start(rows.of(own))

    def plan(self, rows: RowsView) -> Tensor:
        planned = np.zeros(self.rows, np.int64)
        for policy, own in self.groups:
            view = rows.of(own)
            planned[own] = planned_lengths(policy.plan(view), view)[0]
        return torch.from_numpy(planned)

    def _keep_drafting(self, signals: Signals) -> Tensor:
        answer = np.full(self.rows, np.iinfo(np.int64).max)
        for policy, own in self.groups:
            if policy.keep_drafting is not None:
                parts = (part[own] for part in (signals.entropy, signals.maximum, signals.drafting))
                answer[own] = cut_lengths(
                    answer[own], policy.keep_drafting(Signals(signals.slot, *parts)), signals.slot
                )
        return torch.from_numpy(answer)

    def update(self, drafted: Tensor, accepted: Tensor) -> None:
        for policy, own in self.groups:
            policy.update(drafted[own], accepted[own])


def expected_tokens(alpha: float | np.ndarray, most: int, seen: float = math.inf) -> np.ndarray:
    """Return the expected tokens of a step with 0, 1, … `most` drafts, including the target's token: [..., most + 1].

    alpha [...]: probability that a draft is accepted if all before were (Leviathan et al. 2023, equation 1).
    seen: certainty of α (Beta distributed) as a number of observed drafts, because α is estimated and varies along a
    text. Infinite: certain. Lower certainty makes long runs likelier than α^k: accepted drafts raise the estimate.
    """
    own, others = _shares(most, seen)
    return (np.asarray(alpha)[..., None] * own + others).cumprod(-1).cumsum(-1)


@functools.lru_cache
def _shares(most: int, seen: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights that interpolate each position's acceptance probability between α and 1."""
    before = np.arange(most) / seen
    return np.append(0, 1 / (1 + before)), np.append(1, before / (1 + before))


def as_policy(draft_length: int | DraftLengthPolicy | None) -> DraftLengthPolicy:
    """Return the policy for a draft_length argument: an int is a fixed length, None is the fixed length 5.

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


def own_policy(draft_length: int | DraftLengthPolicy | None, default: DraftLengthPolicy) -> DraftLengthPolicy | None:
    """Return the policy of a request, None for the session's policy `default`. Raises as `as_policy`, and ValueError
    for drafts in a session without a drafter."""
    policy = None if draft_length is None else as_policy(draft_length)
    if default == FixedLength(0) and policy not in (None, default):
        raise ValueError(
            f"draft_length={draft_length!r} needs a drafter, but this session has draft_length=0; open the session "
            "with draft_length=None"
        )
    return policy


def planned_lengths(k: int | Tensor, rows: RowsView) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's planned draft length, and the length limited by the row's remaining tokens: int64 [B] each.

    The target's own token is among the remaining tokens, so no position exceeds the row's end.
    Raises ValueError for a plan with negative lengths or of the wrong shape.
    """
    shape = rows.remaining.shape
    plan = k.cpu().numpy() if isinstance(k, Tensor) else np.asarray(k)
    if plan.shape not in ((), shape) or plan.dtype.kind not in "iu" or plan.min(initial=0) < 0:
        raise ValueError(f"plan must return an integer >= 0, or {len(rows.ids)} of them (one per row); got {k!r}")
    planned = np.empty(shape, np.int64)
    planned[:] = plan
    return planned, np.minimum(planned, rows.remaining - 1)


def cut_lengths(lengths: np.ndarray, answer: Tensor, slot: int) -> np.ndarray:
    """Return the draft lengths [B] after an answer of `keep_drafting` with `slot` tokens drafted; lengths never grow.

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
