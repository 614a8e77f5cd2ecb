"""The phases of a step, timed and reported: plan, draft, verify, commit; of a prefill: prefill, commit."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

FIRST = ("plan", "prefill")  # a step begins with one of them

Listener = Callable[[str], None]  # receives the name of each phase as it begins; "" ends the last one


class Stopwatch:
    """Wall time between marks, in milliseconds. On CUDA by events, read after the step's one copy to the host.

    A step that is launched ahead has its marks before it starts: those that it asks for then are there already.
    """

    def __init__(self, device: torch.device):
        self._on_cuda = device.type == "cuda"
        self._marks: list = []
        self._asked = 0  # for how many of them this step has asked
        self._next: list = []  # the next step's, where it is under way
        self._free: list[torch.cuda.Event] = []  # of earlier steps, read or dropped
        self._stream = torch.cuda.current_stream(device) if self._on_cuda else None

    def start(self) -> None:
        """The first mark; an interrupted step's are dropped."""
        self._let_go(self._marks)
        self._marks, self._next, self._asked = self._next, [], 0
        self.mark()

    def mark(self) -> None:
        self._asked += 1
        if self._asked > len(self._marks):
            self._marks.append(self._now())

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Marks made inside are those of the next step. Its first one is made here, and ends this step, too."""
        now = self._now()
        this, asked = [*self._marks, now], self._asked
        self._marks, self._asked = [now], 1
        try:
            yield
            self._next = self._marks
        finally:
            self._marks, self._asked = this, asked

    def drop_ahead(self) -> None:
        """The step that was launched ahead is none after all."""
        del self._marks[self._asked :]
        self._next = []  # their events are made anew: this is rare

    def intervals(self) -> list[float]:
        """Milliseconds between consecutive marks; starts over."""
        marks, self._marks = self._marks, []
        pairs = itertools.pairwise(marks)
        if self._on_cuda:
            marks[-1].synchronize()
            found = [a.elapsed_time(b) for a, b in pairs]
            self._let_go(marks)
            return found
        return [(b - a) * 1e3 for a, b in pairs]

    def _let_go(self, marks: list) -> None:
        """Use their events again, but for one that the next step begins with."""
        if self._on_cuda:
            self._free += [mark for mark in marks if not any(mark is other for other in self._next)]

    def _now(self) -> float | torch.cuda.Event:
        if not self._on_cuda:
            return time.perf_counter()
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event


class Phases:
    """Times the phases of a session's steps, and reports them while somebody listens."""

    def __init__(self, device: torch.device, listener: Callable[[], Listener | None]):
        """listener: returns who listens now."""
        self.watch, self._listener = Stopwatch(device), listener

    def enter(self, phase: str) -> None:
        """A phase of the step begins; "" ends the last one."""
        if phase in FIRST:
            self.watch.start()
        else:
            self.watch.mark()
        if (listener := self._listener()) is not None:
            listener(phase)

    def end(self) -> list[float]:
        """End the step. Returns the milliseconds of its phases."""
        self.enter("")
        return self.watch.intervals()

    @property
    def watch_ahead(self) -> Stopwatch | None:
        """Stopwatch for an overlapped step, or None if phases are reported one by one as they begin."""
        return self.watch if self._listener() is None else None
