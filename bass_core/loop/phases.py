"""Time and report the phases of a step: plan, draft, verify, commit. A prefill has the phases prefill and commit."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

FIRST = ("plan", "prefill")  # first phases of a step

Listener = Callable[[str], None]  # called with the name of each phase when the phase begins, and "" after the step


class Stopwatch:
    """Wall time between marks, in milliseconds. On CUDA, marks are events, read after the step.

    An overlapped step is marked at its launch. When the session requests the step, `mark` finds the existing marks.
    """

    def __init__(self, device: torch.device):
        self._on_cuda = device.type == "cuda"
        self._marks: list = []
        self._asked = 0  # calls of `mark` in this step
        self._next: list = []  # marks of an overlapped step
        self._free: list[torch.cuda.Event] = []  # events of earlier steps, for reuse
        self._stream = torch.cuda.current_stream(device) if self._on_cuda else None

    def start(self) -> None:
        """Set the first mark of a step. Drops marks of an interrupted step."""
        self._let_go(self._marks)
        self._marks, self._next, self._asked = self._next, [], 0
        self.mark()

    def mark(self) -> None:
        self._asked += 1
        if self._asked > len(self._marks):
            self._marks.append(self._now())

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Marks set inside belong to the next step. Entering sets the first mark, which also ends this step."""
        now = self._now()
        this, asked = [*self._marks, now], self._asked
        self._marks, self._asked = [now], 1
        try:
            yield
            self._next = self._marks
        finally:
            self._marks, self._asked = this, asked

    def drop_ahead(self) -> None:
        """Drop the marks of an overlapped step that was taken back."""
        del self._marks[self._asked :]
        self._next = []  # without reuse of the events, since this is rare

    def intervals(self) -> list[float]:
        """Return the milliseconds between consecutive marks, and drop the marks."""
        marks, self._marks = self._marks, []
        pairs = itertools.pairwise(marks)
        if self._on_cuda:
            marks[-1].synchronize()
            found = [a.elapsed_time(b) for a, b in pairs]
            self._let_go(marks)
            return found
        return [(b - a) * 1e3 for a, b in pairs]

    def _let_go(self, marks: list) -> None:
        """Release the events of these marks for reuse, except an event that also begins the next step."""
        if self._on_cuda:
            self._free += [mark for mark in marks if not any(mark is other for other in self._next)]

    def _now(self) -> float | torch.cuda.Event:
        if not self._on_cuda:
            return time.perf_counter()
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event


class Phases:
    """Times the phases of a session's steps and reports them to a listener."""

    def __init__(self, device: torch.device, listener: Callable[[], Listener | None]):
        """listener: returns the current listener, or None."""
        self.watch, self._listener = Stopwatch(device), listener

    def enter(self, phase: str) -> None:
        """Begin a phase of the step. "" ends the last phase."""
        if phase in FIRST:
            self.watch.start()
        else:
            self.watch.mark()
        if (listener := self._listener()) is not None:
            listener(phase)

    def end(self) -> list[float]:
        """End the step and return the milliseconds of each phase."""
        self.enter("")
        return self.watch.intervals()

    @property
    def watch_ahead(self) -> Stopwatch | None:
        """Stopwatch for an overlapped step, or None if phases are reported individually."""
        return self.watch if self._listener() is None else None
