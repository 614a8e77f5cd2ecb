"""Overlapped steps: launch the next step before the host has read the current step.

The host's work between two steps (copy, commit, the policy's plan, the caller) takes about a tenth of a large model's
step, or as long as a small model's whole step. If the policy predicts the next draft length, the next step does not
depend on this work: all other inputs are on the device, and a row at its maximum length submits no tokens. `Overlap`
therefore replays the captured functions once more. The session requests the overlapped step like any other step. If
the session requests a different step, `Overlap` rewinds the rows and launches the requested step. Texts do not change,
since random numbers depend on each row's step number.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bass_core.drafters.protocol import Context, Draft
from bass_core.environment import Fetched
from bass_core.gpu.graph_step import GraphStep, Staged
from bass_core.gpu.graphs import Graphs, captured, launched_each_time
from bass_core.loop.phases import Stopwatch
from bass_core.loop.rows import Request
from bass_core.loop.step import EagerStep, StepReport
from bass_core.policies.protocol import DraftLengthPolicy


class Ahead(NamedTuple):
    """An overlapped step that the session has not requested yet."""

    requests: list[Request]  # by batch slot
    planned: int  # planned draft length of all rows
    width: int  # draft length of the functions
    fetched: Fetched  # the packed report
    switched: tuple  # `GraphStep.switched` at the launch


class Overlap:
    """A `GraphStep` that launches the next step ahead if possible."""

    records = True

    def __init__(self, step: GraphStep):
        self.step, self.graphs, self.context, self.begin = step, step.graphs, step.context, step.begin
        self._watch: Stopwatch | None = None  # times the overlapped step
        self._under_way: Ahead | None = None
        self._asked_for: Callable[[], np.ndarray] | None = None  # fetches the report, between `draft` and `verify`
        self._predicted: int | None = None  # common draft length of this step and the next step, or None

    @property
    def is_ahead(self) -> bool:
        return self._under_way is not None

    def draft(self, context: Context, planned: np.ndarray, lengths: np.ndarray, policy: DraftLengthPolicy) -> Draft:
        """As `EagerStep.draft`. Returns the drafts of the overlapped step if the session requests this step."""
        ahead, self._under_way, self._asked_for = self._under_way, None, None
        if ahead is not None and ((planned != ahead.planned).any() or self.step.switched != ahead.switched):
            self.take_back()
            ahead = None
        predicted = policy.predict_next()
        self._predicted = predicted if predicted is not None and (planned == predicted).all() else None
        if ahead is None:
            return self.step.draft(context, planned, lengths, policy)
        live, drafts = list(self.step.rows.live), self.step.drafts
        where, moved = self._slots_of(ahead), None
        self._asked_for = lambda: ahead.fetched()[where]
        if live != ahead.requests:
            moved = self._on_device(where)
            drafts.move(moved)
        drafts.staged = Staged(live, lengths.copy())
        if lengths.any():
            self.step.drafter.catch_up(context, lengths, ahead.width)
        draft = drafts.view(len(ahead.requests), ahead.width, lengths)
        if moved is None:
            return draft
        probs = None if draft.probs is None else draft.probs[moved]
        return Draft(draft.tokens[moved], drafts.submitted[: len(live)], lengths, probs, draft.finite[moved])

    def verify(self, context: Context, draft: Draft) -> StepReport:
        """As `EagerStep.verify`. Then launches the next step if its shape is known."""
        asked_for, self._asked_for = self._asked_for, None
        if asked_for is not None:
            self.step.phases.enter("commit")
            report = StepReport(None, fetched=asked_for)
        else:
            report = self.step.verify(context, draft)
            if self.step.replayed is None:
                return report
            report = report._replace(fetched=Fetched(report.packed))
        if self._may_launch(context, draft.lengths_host):
            self._launch()
        return report

    def _slots_of(self, ahead: Ahead) -> list[int]:
        """Return the batch slots of the live rows at the launch. Since then, rows have ended or moved."""
        slot_of = {request: slot for slot, request in enumerate(ahead.requests)}
        return [slot_of[request] for request in self.step.rows.live]

    def _on_device(self, batch_slots: list[int]) -> Tensor:
        device = self.step.rows.device
        staged = torch.tensor(batch_slots, device="cpu", pin_memory=device.type == "cuda")
        return staged.to(device, non_blocking=True)

    def _may_launch(self, context: Context, lengths: np.ndarray) -> bool:
        """Return True if the next step will have the functions of this step, as far as the host knows now."""
        step, rows, replayed = self.step, self.step.rows, self.step.replayed
        if self._predicted is None or replayed is None or step.drafts.staged is None or not self.graphs.recorded:
            return False
        if not step.is_in_place:
            return False  # the memory of the captured functions has moved
        goes_on = rows.limits_host[: len(lengths)] - context.lengths_host > lengths + 1  # [B], False near the limit
        if not goes_on.any() or (rows.waiting and (rows.free or not goes_on.all())):
            return False  # all rows may end, or a waiting row may start
        longest = int(context.lengths_host.max() + 2 * lengths.max()) + 1
        runners = (*step.drafter.runners, step.target) if replayed[1:] else (step.target,)
        return all(
            key in self.graphs and key[1] == step.padded(len(lengths)) and key[3] == runner.max_kv_length(longest)
            for key, runner in zip(replayed, runners, strict=True)
        )

    def _launch(self) -> None:
        """Replay the functions of the last step again."""
        self._watch = watch = self.step.phases.watch_ahead
        if watch is None:
            return
        with watch.ahead():
            watch.mark()
            *drafting, verifying = self.step.replayed
            for key in drafting:
                self.graphs.replay(key)
            watch.mark()
            packed = self.graphs.replay(verifying)
            watch.mark()
            decided, live = Fetched(packed), list(self.step.rows.live)
            self._under_way = Ahead(live, self._predicted, verifying[2], decided, self.step.switched)

    def take_back(self) -> None:
        """As `EagerStep.take_back`, including the overlapped step."""
        self._under_way = self._asked_for = None
        if self._watch is not None:
            self._watch.drop_ahead()
        self.step.take_back()

    @property
    def recordings(self) -> int:
        return self.step.recordings

    def release(self) -> None:
        self._under_way = self._asked_for = None
        if self.step.rows.device.type == "cuda":  # an overlapped step may still run its captured functions
            with suppress(RuntimeError):  # the device was lost; the next CUDA call raises the error
                torch.cuda.current_stream(self.step.rows.device).synchronize()
        self.step.release()


def make(eager: EagerStep, recorded: bool, fall_back: Callable[[], None] | None) -> GraphStep | Overlap:
    """Return the step as functions of fixed shapes. recorded: capture CUDA graphs and overlap steps. fall_back: called
    if the step cannot be captured; None raises the error."""
    if not recorded:
        return GraphStep(eager, Graphs(launched_each_time, fall_back=fall_back))
    # An ended row still runs in an overlapped step, and NaN in this row must not stop the other rows. With
    # on_row_error="raise", the session rewinds the rows.
    eager.options = replace(eager.options, all_or_none=False)
    return Overlap(GraphStep(eager, Graphs(captured(eager.rows.device), fall_back=fall_back)))
