"""The thread that drives the engine. Only this thread uses the `Session`, so a step never blocks the event loop."""

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
    """The driver has ended."""


class Full(RuntimeError):
    """Out of memory for a request's rows."""


@dataclass(frozen=True)
class Row:
    """A row of a request. own: arguments of `Session.submit`. ends: deadline on the clock of time.monotonic()."""

    prompt: Tensor
    own: dict[str, Any]
    ends: float | None = None


@dataclass(frozen=True)
class Update:
    """Progress of a job's row: new tokens, their log-probabilities if the job requests these, and the row's end."""

    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: Ended | None = None


@dataclass(frozen=True)
class Ended:
    """A row's end. steps: decode steps. waited, took: seconds to the first token (None: no token) and to the end."""

    result: Result
    drafted: int
    accepted: int
    steps: int
    waited: float | None
    took: float

    @property
    def decoded(self) -> int:
        """Tokens from decode steps: all except the first, which the prefill emits."""
        return max(len(self.result.sequence) - 1, 0)


@dataclass
class _Live:
    """The driver's state of a submitted row."""

    handle: Request
    steps: int = 0
    first: float | None = None
    ended: bool = False


class Job:
    """The rows of a request. The event loop reads `updates`: `Update`s, or an exception if the job has failed."""

    def __init__(self, rows: Sequence[Row], streams: bool, logprobs: bool = False):
        """streams: send an update for every token. logprobs: include log-probabilities."""
        self.rows, self.streams, self.logprobs = rows, streams, logprobs
        self.updates: asyncio.Queue[Update | Exception] = asyncio.Queue()
        self.began = time.monotonic()
        self.live: list[_Live] = []  # used by the driver's thread
        self.unfinished = len(rows)  # used by the event loop


class Driver:
    """Steps a session in a thread of its own while there are rows, and sleeps otherwise.

    The event loop calls all public methods. on_row_end is called in the event loop, once per row of every started job,
    with the row's end (None: the job failed). `over` is set when the thread has ended, `error` after an exception.
    """

    def __init__(self, session: Session, counts: Counts, on_row_end: Callable[[Ended | None], None]):
        self.session, self.counts, self._on_row_end = session, counts, on_row_end
        self.error: BaseException | None = None
        self.over = asyncio.Event()
        self._inbox: deque[tuple[str, Job | None]] = deque()
        self._wake = threading.Event()
        self._jobs: list[Job] = []  # used by the thread
        self._started: set[Job] = set()  # unfinished jobs; used by the event loop
        self._thread = threading.Thread(target=self._run, name="bass driver", daemon=True)

    def begin(self) -> None:
        """Start the thread, which reports to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def start(self, job: Job) -> None:
        """Decode the rows of a job. Raises Dead if the thread has ended."""
        if self.error is not None or self.over.is_set():
            raise Dead("the engine has stopped, and this server is shutting down")
        self._started.add(job)
        self._put("start", job)

    def cancel(self, job: Job) -> None:
        """End the unfinished rows of a job. Finished jobs are left alone."""
        if job in self._started:
            self._put("cancel", job)

    def cancel_all(self) -> None:
        """End all rows with their partial texts."""
        for job in list(self._started):
            self.cancel(job)

    def end(self) -> None:
        """End the thread, and with the thread all rows."""
        self._put("end", None)

    @property
    def jobs(self) -> int:
        """Number of unfinished jobs."""
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
        except BaseException as error:  # of any kind: waiting requests must be failed in `_finish`
            self.error = error
        self._call(self._finish)

    def _without_the_largest(self, error: Exception) -> bool:
        """Fail the request of the largest waiting row after an out-of-memory error. Return False if no row waits."""
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
        """Process the event loop's commands. Return False for the command to end."""
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
        """Submit all rows of a job between two steps, so that samples of a prompt share a prefill."""
        try:
            for row in job.rows:
                deadline = None if row.ends is None else max(0.0, row.ends - time.monotonic())
                job.live.append(_Live(self.session.submit(row.prompt, **row.own, deadline=deadline)))
        except (ValueError, TypeError) as error:  # affects only this request
            for row in job.live:
                self.session.cancel(row.handle)
            self._call(self._fail, job, error)
        else:
            self._jobs.append(job)

    def _tell(self, event: StepEvent | None) -> None:
        """Send the rows' updates after a step or a cancellation."""
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
        elif tokens:  # from the prefill
            row.first = time.monotonic()
        row.ended = row.handle.finish_reason is not None
        if not row.ended and not (tokens and job.streams):
            return None
        # Fetched only if needed: on a GPU, `result` waits for the step in progress.
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
        with suppress(RuntimeError):  # the event loop is closed
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
            self._fail(job, Dead("the engine has stopped, and this server is shutting down"))
        self.over.set()
