"""A step launched before the one before it is read: the device decodes on while the host takes in what was decided.

What comes between two steps on the host (a copy, the rows' ends, a policy's plan, the caller) takes as long as a large
model needs for a tenth of a step, and a small one for a whole one. The next step needs nothing of it where the policy
foretells that it drafts as many tokens: all else that it reads stands on the device, where a row that has reached its
limit submits nothing. So recordings are replayed once more. The loop asks for that step as for any other, with what it
has learnt meanwhile. If it asks for another one after all, the rows are set back, and that is launched as if there had
been none: random numbers go by a row's own steps, so texts are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bass_core.drafters import Context, Draft, Drafter
from bass_core.gpu.graph_step import NOBODY, Announced, Execution, RecordedStep
from bass_core.gpu.graphs import Graphs, captured, launched_each_time
from bass_core.loop.rows import Fetched, Request, Rows
from bass_core.loop.step import Decided, EagerStep, StepOptions
from bass_core.loop.trace import Stopwatch
from bass_core.model.runner import Runner
from bass_core.policies.protocol import DraftLengthPolicy


class Ahead(NamedTuple):
    """A step under way that nobody has asked for: its rows by place, how many drafts it plans for each, for how many
    its recordings have room, what it decides, and how passes were switched."""

    requests: list[Request]
    planned: int
    room: int
    fetched: Fetched
    switched: tuple


class StepAhead(RecordedStep):
    """Recorded steps, of which one more is under way as often as can be."""

    def __init__(self, rows: Rows, target: Runner, drafter: Drafter, options: StepOptions, graphs: Graphs):
        # A row that has ended goes on in a step under way: what becomes of it there must not keep the others where they
        # are. Where a row's logits are not numbers and that is raised, rows are set back instead.
        super().__init__(rows, target, drafter, replace(options, all_or_none=False), graphs)
        self._watch: Stopwatch | None = None  # that was told of the step under way
        self._under_way: Ahead | None = None
        self._asked_for: Callable[[], np.ndarray] | None = None  # what it decides, from its draft to its verification
        self._foretold: int | None = None  # how many drafts all rows plan in the next step as in this; None: who knows

    @property
    def is_ahead(self) -> bool:
        return self._under_way is not None

    def draft(self, context: Context, planned: np.ndarray, lengths: np.ndarray, policy: DraftLengthPolicy) -> Draft:
        ahead, self._under_way, self._asked_for = self._under_way, None, None
        if ahead is not None and ((planned != ahead.planned).any() or self.switched != ahead.switched):
            self.take_back()
            ahead = None
        foretold = policy.foretell()
        self._foretold = foretold if foretold is not None and (planned == foretold).all() else None
        if ahead is None:
            return super().draft(context, planned, lengths, policy)
        here, room = list(self.rows.live), ahead.room
        rows, where = len(here), self._places_of(ahead)
        self._asked_for = lambda: ahead.fetched()[where]
        at = slice(rows) if here == ahead.requests else self._up(where)
        self._announced = Announced(here, lengths.copy())
        if lengths.any():
            self.drafter.catch_up(context, lengths, room)
        q = None if self._q is None or room == 0 else self._q[at, :room]
        return Draft(self._drafted[at, :room], self.planned[:rows], lengths, q, self._finite[at])

    def verify(self, context: Context, draft: Draft, logits: Tensor | None = None) -> Decided:
        asked_for, self._asked_for = self._asked_for, None
        if asked_for is not None:
            self.options.begin("commit")
            decided = Decided(None, fetched=asked_for)
        else:
            decided = super().verify(context, draft, logits)
            if logits is not None or self.replayed is None:
                return decided
            decided = decided._replace(fetched=Fetched(decided.block))
        if self._is_certain(context, draft.lengths_host):
            self._launch()
        return decided

    def _places_of(self, ahead: Ahead) -> list[int]:
        """Where the rows that live now were when it was launched: others have ended since, and some have moved."""
        place_of = {request: place for place, request in enumerate(ahead.requests)}
        return [place_of[request] for request in self.rows.live]

    def _up(self, places: list[int]) -> Tensor:
        """Rows have moved from these places to the first ones: what they submit next is said of those now. Returns the
        places, on the device."""
        device = self.planned.device
        moved = torch.tensor(places, device="cpu", pin_memory=device.type == "cuda").to(device, non_blocking=True)
        self.planned[: len(places)] = self.planned[moved]
        self.planned[len(places) :] = NOBODY
        return moved

    def _is_certain(self, context: Context, lengths: np.ndarray) -> bool:
        """Whether the next step will be this one again, as far as can be known before this one is read."""
        rows, replayed = self.rows, self.replayed
        if self._foretold is None or replayed is None or self._announced is None or not self.graphs.recorded:
            return False
        if self._memory != self._stands_on():
            return False  # recordings are of memory that has moved
        goes_on = rows.limits_host[: len(lengths)] - context.lengths_host > lengths + 1  # [B], unless it ends on EOS
        if not goes_on.any() or (rows.waiting and (rows.free or not goes_on.all())):
            return False  # all may end; a place is or may become free for a row that waits
        longest = int(context.lengths_host.max() + 2 * lengths.max()) + 1
        places, runners = self._places(len(lengths)), (*([self.drafter.runner] if replayed[1:] else []), self.target)
        return all(
            key in self.graphs and key[1] == places and key[3] == runner.extent(longest)
            for key, runner in zip(replayed, runners, strict=True)
        )

    def _launch(self) -> None:
        """The recordings of the last step once more."""
        self._watch = watch = self.options.watch()
        if watch is None:
            return
        with watch.ahead():
            watch.mark()
            *drafting, verifying = self.replayed
            for key in drafting:
                self.graphs.replay(key)
            watch.mark()
            block = self.graphs.replay(verifying)
            watch.mark()
            decided = Fetched(block)
            self._under_way = Ahead(list(self.rows.live), self._foretold, verifying[2], decided, self.switched)

    def take_back(self) -> None:
        self._under_way = self._asked_for = None
        if self._watch is not None:
            self._watch.drop_ahead()
        super().take_back()

    def release(self) -> None:
        self._under_way = self._asked_for = None
        if self.rows.device.type == "cuda":  # a step may be under way, and its recordings go now
            with suppress(RuntimeError):  # whoever asks the device next hears of it
                torch.cuda.current_stream(self.rows.device).synchronize()
        super().release()


def make(
    way: Execution,
    fall_back: Callable[[], None] | None,
    rows: Rows,
    target: Runner,
    drafter: Drafter,
    options: StepOptions,
) -> EagerStep:
    """The steps of `rows` in that way. fall_back: called if they cannot be recorded after all (None: that raises)."""
    if way == Execution():
        return EagerStep(rows, target, drafter, options)
    if not way.recorded:
        return RecordedStep(rows, target, drafter, options, Graphs(launched_each_time, fall_back=fall_back))
    return StepAhead(rows, target, drafter, options, Graphs(captured(rows.device), fall_back=fall_back))
