"""`AsyncSession` decodes for coroutines: a thread runs the steps, and an event loop receives the rows' progress.

One thread per device runs the steps of all open sessions, interleaved. Only this thread switches the models, so two
sessions of one pair can decode at the same time.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from bass_core.detokenizer import FinalText
from bass_core.environment import is_full
from bass_core.loading.model_pair import ModelPair
from bass_core.loop.rows import Prompt, Request, Result
from bass_core.loop.trace import StepEvent
from bass_core.prompts import PromptLike, model_pair
from bass_core.session import Session


@dataclass(frozen=True)
class Update:
    """Progress of row `index` of a job. logprobs: of `tokens`, if requested. result: None while the row runs."""

    index: int
    handle: Request
    tokens: list[int]
    logprobs: list[float]
    result: Result | None


class Job:
    """Rows that start together. `async for` yields updates until all rows have ended, or raises the rows' error."""

    def __init__(self, session: AsyncSession, requests: Sequence, logprobs: bool, notify: Callable):
        self.requests, self.logprobs, self._session, self._notify = requests, logprobs, session, notify
        self.rows: dict[int, Request] = {}  # rows that have not ended; used by the thread
        self._updates: asyncio.Queue[Update | BaseException] = asyncio.Queue()
        self._left: int = len(requests)  # rows whose end has not been yielded

    def cancel(self) -> None:
        """End the rows that have not ended yet, with reason "cancelled"."""
        self._session._put(self._session._cancel, self)

    async def __aiter__(self) -> AsyncIterator[Update]:
        while self._left:
            update = await self._updates.get()
            if isinstance(update, BaseException):
                self._left = 0
                raise update
            self._left -= update.result is not None
            yield update

    async def texts(self) -> AsyncIterator[tuple[int, str]]:
        """Yield (index, text) when more text of a row is final."""
        texts: dict[int, FinalText] = {}
        async for update in self:
            if update.index not in texts:
                texts[update.index] = FinalText(self._session.pair.tokenizer, update.handle.stop)
            if piece := texts[update.index].feed(update.tokens, ended=update.result is not None):
                yield update.index, piece

    def _receive(self, update: Update | BaseException) -> None:
        self._updates.put_nowait(update)
        try:
            self._notify(update)
        except Exception as error:  # the caller's fault, and other jobs wait
            said = {"message": "an AsyncSession's notify failed", "exception": error}
            self._session._loop.call_exception_handler(said)


class AsyncSession:
    """A `Session` that many coroutines share. Requests of all coroutines are decoded in one batch.

        async with bass.AsyncSession(pair, max_batch_size=8) as session:
            async for piece in session.stream("def f():\\n", max_new_tokens=32): ...
            result = await session.generate("def g():\\n", temperature=0.8)

    Options are as in `Session`; invalid options raise on entry. Use the session in the event loop that entered it. If a
    consumer is cancelled or closed, its rows end after the running step. If memory is full when rows start, only the
    largest waiting request fails. Any other error of a step is raised in all consumers and ends the session. Until the
    session is closed, the models cannot decode for a `Session` of another thread.

    on_step: called in the thread after each step, with the event and the seconds of the step.
    error: the error that ended the session, or None.
    """

    error: BaseException | None = None
    session: Session  # used by the thread
    _loop: asyncio.AbstractEventLoop | None = None
    _closing = _over = _steps = False  # `close` was called; the session has ended; a step waits in the thread

    def __init__(
        self,
        pair: ModelPair,
        *,
        max_batch_size: int = 8,
        on_step: Callable[[StepEvent, float], None] = lambda event, seconds: None,
        **options: Any,
    ):
        self.pair, self._on_step = model_pair(pair), on_step
        self._options = {"max_batch_size": max_batch_size, **options}
        self._jobs: list[Job] = []  # jobs with rows in `session`; used by the thread
        self._waited: set[Job] = set()  # jobs without an end; used by the event loop

    async def __aenter__(self) -> AsyncSession:
        if self._loop is not None:
            raise RuntimeError("an AsyncSession can be entered only once; make a new session")
        self._loop = asyncio.get_running_loop()
        self._opened, self.ended = self._loop.create_future(), self._loop.create_future()  # `ended` becomes `error`
        self._engine = _Engine.of(self.pair.device)
        self._put(self._open)
        try:
            await asyncio.wait({self._opened, self.ended}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self.close()
            raise
        if self.error is not None:
            raise self.error
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all rows with reason "cancelled" after the running step, and free the memory."""
        self._check_loop()
        if not self._closing:
            self._closing = True
            self._put(self._end)
        await asyncio.wait({self.ended})

    async def generate(self, prompt: PromptLike, **arguments: Any) -> Result:
        """Return the result of one row. Arguments and errors are as in `Session.submit`."""
        job = self.start([(prompt, arguments)])
        try:
            *_, last = [update async for update in job]
            return last.result
        finally:
            job.cancel()

    async def stream(self, prompt: PromptLike, **arguments: Any) -> AsyncIterator[str]:
        """Yield pieces of final text of one row (see `FinalText`). Arguments and errors are as in `Session.submit`."""
        if self.pair.tokenizer is None:
            raise ValueError("stream yields text, but the pair has no tokenizer; use ModelPair(..., tokenizer=...)")
        job = self.start([(prompt, arguments)])
        try:
            async for _, piece in job.texts():
                yield piece
        finally:
            job.cancel()

    def start(
        self,
        requests: Sequence[tuple[PromptLike | Prompt, Mapping[str, Any]]],
        *,
        logprobs: bool = False,
        notify: Callable[[Update | BaseException], None] = lambda update: None,
    ) -> Job:
        """Submit rows between the same two steps, and return their job. Samples of one prompt share a prefill.

        requests: prompts with arguments of `Session.submit`. The thread tokenizes the prompts.
        logprobs: send log-probabilities of new tokens.
        notify: called in the event loop with each update, or the rows' error, even after `Job.cancel`.
        """
        self._check_loop()
        if not requests:
            raise ValueError("requests is empty; pass at least one prompt with arguments")
        if self.error is not None:
            raise RuntimeError(f"the session ended after {self.error!r}; make a new session") from self.error
        if self._closing:
            raise RuntimeError("the session is closed; make a new session")
        job = Job(self, requests, logprobs, notify)
        self._waited.add(job)
        self._put(self._submit, job)
        return job

    def _check_loop(self) -> None:
        if self._loop is not asyncio.get_running_loop():
            state = "is not open" if self._loop is None else "belongs to another event loop"
            raise RuntimeError(f"the session {state}; use it inside `async with AsyncSession(...) as session:`")

    def _put(self, command: Callable[..., None], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the thread has ended, and `_finish` fails all jobs
            self._engine.thread.submit(self._run, command, *arguments)

    def _deliver(self, updates: Sequence[tuple[Job, Update | BaseException]], ended: Sequence[Job]) -> None:
        for job, update in updates:
            job._receive(update)
        self._waited.difference_update(ended)

    def _finish(self, error: BaseException | None) -> None:
        self.error = error
        for job in self._waited:
            job._receive(error or RuntimeError("the session is closed"))
        self._waited.clear()
        self.ended.set_result(error)

    # --- the thread -------------------------------------------------------------------------------

    def _run(self, command: Callable[..., None], *arguments: Any) -> None:
        """Run a command or a step, and put the next step behind the commands and steps that wait."""
        if self._over:
            return
        try:
            command(*arguments)
        except BaseException as error:  # of any kind, since consumers wait for the session
            self._end(error)
        if not (self._over or self._steps or self.session.idle):
            self._steps = True
            self._put(self._step)

    def _call(self, what: Callable[..., object], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(what, *arguments)
        except RuntimeError:  # the event loop is closed, and no coroutine can close the session
            self._put(self._end)

    def _open(self) -> None:
        self._engine.switch(None)  # the attention probe needs the models in their owner's state
        self.session = Session(self.pair, **self._options)
        self._call(self._opened.set_result, None)

    def _step(self) -> None:
        self._steps = False
        self._engine.switch(self)
        event, began = None, time.monotonic()
        try:
            event = self.session.step()
        except Exception as error:
            if not (self.session.batch.admitting and is_full(error) and self._fail_the_largest(error)):
                raise
        if event is not None:
            self._on_step(event, time.monotonic() - began)
        self._report(event)

    def _submit(self, job: Job) -> None:
        try:
            for index, (prompt, arguments) in enumerate(job.requests):
                job.rows[index] = self.session.submit(prompt, **arguments)
        except Exception as error:  # affects only this request
            self._fail(job, error)
        else:
            self._jobs.append(job)
            self._report()

    def _cancel(self, *jobs: Job) -> None:
        for handle in [handle for job in jobs for handle in job.rows.values()]:
            self.session.cancel(handle)
        self._report()

    def _fail(self, job: Job, error: Exception) -> None:
        self._jobs = [each for each in self._jobs if each is not job]
        self._cancel(job)
        self._call(self._deliver, [(job, error)], [job])

    def _fail_the_largest(self, error: Exception) -> bool:
        """Fail the job of the largest waiting row after an out-of-memory error. Return False if no row waits."""
        rows = [(row, job) for job in self._jobs for row in job.rows.values() if row.finish_reason is None]
        waiting = {row.limit: job for row, job in rows if row not in self.session.rows.live}
        if waiting:
            self._fail(waiting[max(waiting)], error)
        return bool(waiting)

    def _report(self, event: StepEvent | None = None) -> None:
        """Send the rows' updates after a step or a command."""
        new = {} if event is None else dict(zip(event.rows, event.new_tokens, strict=True))
        updates: list[tuple[Job, Update]] = []
        for job, index, handle in [(each, *row) for each in self._jobs for row in each.rows.items()]:
            tokens, ended = new.get(handle.row, []), handle.finish_reason is not None
            if tokens or ended:
                # On a GPU, `result` waits for the step in progress.
                result = self.session.result(handle) if ended or job.logprobs else None
                logprobs = result.logprobs[len(result.logprobs) - len(tokens) :].tolist() if job.logprobs else []
                updates.append((job, Update(index, handle, tokens, logprobs, result if ended else None)))
            if ended:
                del job.rows[index]
        if updates:
            self._call(self._deliver, updates, [job for job in self._jobs if not job.rows])
            self._jobs = [job for job in self._jobs if job.rows]

    def _end(self, error: BaseException | None = None) -> None:
        """Close the session, after an error or at the command."""
        self._over = True
        try:
            self._engine.switch(None)
            if error is None:
                self._cancel(*self._jobs)
            self.session.close()
        except Exception as failure:  # also AttributeError, without a session
            error = error or failure
        self._engine.leave()
        self._call(self._finish, error)


class _Engine:
    """Thread that runs the commands and steps of a device's sessions, in order. Ends with the last session."""

    _running: ClassVar[dict[torch.device, _Engine]] = {}
    _joining: ClassVar = threading.Lock()  # held while a session joins or leaves

    def __init__(self, device: torch.device):
        self.device, self.users = device, 0  # users: sessions that have not ended
        chosen = (torch.cuda.set_device, (device,)) if device.type == "cuda" else ()
        self.thread = ThreadPoolExecutor(1, f"bass engine {device}", *chosen)
        self._current: AsyncSession | None = None
        self._prepared = ExitStack()

    @classmethod
    def of(cls, device: torch.device) -> _Engine:
        """Return the device's thread, for one more session."""
        with cls._joining:
            engine = cls._running.setdefault(device, cls(device))
            engine.users += 1
            return engine

    def leave(self) -> None:
        with self._joining:
            self.users -= 1
            if not self.users:
                del self._running[self.device]
                self.thread.shutdown(wait=False)

    def switch(self, session: AsyncSession | None) -> None:
        """Switch the models to this session's attention paths, and back from the previous session's."""
        if session is not self._current:
            self._current = None
            self._prepared.close()
            if session is not None:
                self._prepared.enter_context(session.session.prepared())
                self._current = session
