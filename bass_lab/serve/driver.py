"""The thread that drives the engine: it alone touches the `Session`, and nobody waits for a step of it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from bass_core.environment import is_full
from bass_core.loop.rows import Request
from bass_core.loop.trace import StepEvent
from bass_core.session import Result, Session
from bass_lab.serve.counts import Counts


class Dead(RuntimeError):
    """The driver has ended, and decodes nothing any more."""


class Full(RuntimeError):
    """There is no memory for a request's rows."""


@dataclass(frozen=True)
class Row:
    """One row of a request. own: arguments of `Session.submit`; ends: the time.monotonic() at which it ends."""

    prompt: Tensor
    own: dict[str, Any]
    ends: float | None = None


@dataclass(frozen=True)
class Update:
    """What happened to a row of a job: tokens gained, with log-probabilities where its job wants them, or its end."""

    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: Ended | None = None


@dataclass(frozen=True)
class Ended:
    """A row's end. steps: decode steps; waited, took: seconds until its first token (None: it has none) and its end."""

    result: Result
    drafted: int
    accepted: int
    steps: int
    waited: float | None
    took: float

    @property
    def decoded(self) -> int:
        """Tokens that decode steps emitted: all but the first, which is the prefill's."""
        return max(len(self.result.sequence) - 1, 0)


@dataclass
class _Live:
    """A submitted row, as the driver follows it."""

    handle: Request
    steps: int = 0
    first: float | None = None
    ended: bool = False


class Job:
    """The rows of one request. Its `updates`, on the event loop, are `Update`s, or an exception when it has failed."""

    def __init__(self, rows: Sequence[Row], streams: bool, logprobs: bool = False):
        """streams: told of every token; logprobs: of its log-probability, too."""
        self.rows, self.streams, self.logprobs = rows, streams, logprobs
        self.updates: asyncio.Queue[Update | Exception] = asyncio.Queue()
        self.began = time.monotonic()
        self.live: list[_Live] = []  # the driver's
        self.unfinished = len(rows)  # the event loop's


class Driver:
    """Steps a session in a thread of its own while there are rows, and sleeps while there are none.

    The event loop calls all but `run`, and on_row_end is called there once per row of every started job, with its end
    (None: its job failed). `over` is set when the thread has ended; `error` is why, if it was to go on.
    """

    def __init__(self, session: Session, counts: Counts, on_row_end: Callable[[Ended | None], None]):
        self.session, self.counts, self._on_row_end = session, counts, on_row_end
        self.error: BaseException | None = None
        self.over = asyncio.Event()
        self._inbox: deque[tuple[str, Job | None]] = deque()
        self._wake = threading.Event()
        self._jobs: list[Job] = []  # the thread's
        self._started: set[Job] = set()  # the event loop's: not over
        self._thread = threading.Thread(target=self._run, name="bass driver", daemon=True)

    def begin(self) -> None:
        """Start the thread; what it tells comes to the event loop that runs now."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def start(self, job: Job) -> None:
        """Decode the rows of a job. Raises Dead if the thread has ended."""
        if self.error is not None or self.over.is_set():
            raise Dead("the engine has stopped, and this server is about to end")
        self._started.add(job)
        self._put("start", job)

    def cancel(self, job: Job) -> None:
        """End what has not ended of a job; nothing happens to one that is over."""
        if job in self._started:
            self._put("cancel", job)

    def cancel_all(self) -> None:
        """End all rows with what they have."""
        for job in list(self._started):
            self.cancel(job)

    def end(self) -> None:
        """Have the thread end, and its rows with it."""
        self._put("end", None)

    @property
    def jobs(self) -> int:
        """Jobs that are not over."""
        return len(self._started)

    def _put(self, what: str, job: Job | None) -> None:
        self._inbox.append((what, job))
        self._wake.set()

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self.session, self.session.prepared():
                while self._take():
                    if self.session.idle:
                        self._wake.wait()
                        self._wake.clear()
                    else:
                        began = time.monotonic()
                        try:
                            event = self.session.step()
                        except Exception as error:
                            admitting = self.session.batch.admitting and is_full(error)
                            if not (admitting and self._without_the_largest(error)):
                                raise
                            self._tell(None)
                            continue
                        self.counts.step(event, time.monotonic() - began)
                        self._tell(event)
        except BaseException as error:  # whatever it was: nobody else can tell the requests
            self.error = error
        self._call(self._finish)

    def _without_the_largest(self, error: Exception) -> bool:
        """Fail the request of the largest waiting row, where one found no memory. False: none waits."""
        waiting = {
            row.handle.limit: job
            for job in self._jobs
            for row in job.live
            if row.first is None and row.handle.finish_reason is None
        }
        if not waiting:
            return False
        job = waiting[max(waiting)]
        self._jobs.remove(job)
        for row in job.live:
            self.session.cancel(row.handle)
        self._call(self._fail, job, Full(str(error).partition(". Lower")[0]))
        return True

    def _take(self) -> bool:
        """Do what the event loop has asked for. False: end."""
        while self._inbox:
            what, job = self._inbox.popleft()
            if what == "end":
                return False
            if what == "start":
                self._submit(job)
            else:
                for row in job.live:
                    self.session.cancel(row.handle)
            self._tell(None)
        return True

    def _submit(self, job: Job) -> None:
        """Queue all rows of a job between two steps, so that samples of a prompt share its prefill."""
        try:
            for row in job.rows:
                deadline = None if row.ends is None else max(0.0, row.ends - time.monotonic())
                job.live.append(_Live(self.session.submit(row.prompt, **row.own, deadline=deadline)))
        except (ValueError, TypeError) as error:  # this request's alone
            for row in job.live:
                self.session.cancel(row.handle)
            self._call(self._fail, job, error)
        else:
            self._jobs.append(job)

    def _tell(self, event: StepEvent | None) -> None:
        """What a step, or a cancellation, did to the rows."""
        new = {} if event is None else dict(zip(event.rows, event.new_tokens, strict=True))
        told: list[tuple[Job, Update]] = []
        for job in self._jobs:
            for index, row in enumerate(job.live):
                if not row.ended and (update := self._update(job, index, row, new)) is not None:
                    told.append((job, update))
        self._jobs = [job for job in self._jobs if not all(row.ended for row in job.live)]
        if told:
            self._call(self._deliver, told)

    def _update(self, job: Job, index: int, row: _Live, new: dict[int, list[int]]) -> Update | None:
        tokens = new.get(row.handle.row, [])
        if row.first is not None:
            row.steps += row.handle.row in new
        elif tokens:  # of the prefill
            row.first = time.monotonic()
        row.ended = row.handle.finish_reason is not None
        if not row.ended and not (tokens and job.streams):
            return None
        # Only where it is wanted: on a GPU it waits for the step that is under way.
        result = self.session.result(row.handle) if row.ended or job.logprobs else None
        told, logprobs = tokens if job.streams else [], []
        if told and job.logprobs:
            logprobs = result.logprobs[len(result.logprobs) - len(told) :].tolist()
        return Update(index, told, logprobs, self._ended(job, row, result) if row.ended else None)

    def _ended(self, job: Job, row: _Live, result: Result) -> Ended:
        waited = None if row.first is None else row.first - job.began
        took = time.monotonic() - job.began
        return Ended(result, row.handle.drafted, row.handle.accepted, row.steps, waited, took)

    def _call(self, what: Callable, *arguments: Any) -> None:
        with suppress(RuntimeError):  # the event loop has been closed: nobody is there to be told
            self._loop.call_soon_threadsafe(what, *arguments)

    # --- the event loop ---------------------------------------------------------------------------

    def _deliver(self, told: list[tuple[Job, Update]]) -> None:
        for job, update in told:
            if job not in self._started:
                continue
            job.updates.put_nowait(update)
            if update.ended is not None:
                job.unfinished -= 1
                self._on_row_end(update.ended)
                if not job.unfinished:
                    self._started.discard(job)

    def _fail(self, job: Job, error: Exception) -> None:
        if job in self._started:
            self._started.discard(job)
            job.updates.put_nowait(error)
            for _ in range(job.unfinished):
                self._on_row_end(None)

    def _finish(self) -> None:
        for job in list(self._started):
            self._fail(job, Dead("the engine has stopped, and this server is about to end"))
        self.over.set()
