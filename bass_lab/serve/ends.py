"""Updates of a request's rows, with errors as responses; counts and times of the rows."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from bass_core.async_session import AsyncSession, Job, Update
from bass_core.environment import is_full
from bass_core.session import Result
from bass_lab.serve.bodies import Sampled
from bass_lab.serve.gate import Refused, line

STOPPED = "the engine has stopped, and this server is shutting down"


@dataclass(frozen=True)
class Ended:
    """A row's end. alternatives: likeliest ids of each token. steps: decode steps. waited, took: seconds to the first
    token (None: no token) and to the end."""

    result: Result
    alternatives: list[dict[int, float]]
    drafted: int
    accepted: int
    steps: int
    waited: float | None
    took: float

    @property
    def decoded(self) -> int:
        """Tokens from decode steps: all except the first, a result of the prefill."""
        return max(len(self.result.sequence) - 1, 0)


class Ends:
    """Receives the updates of a job, and calls `on_row_end` once per row: with the row's end, or None for an error."""

    def __init__(self, rows: int, on_row_end: Callable[[Ended | None], None]):
        self._rows, self._on_row_end, self._began = rows, on_row_end, time.monotonic()
        self._times: dict[int, list[float]] = {}  # seconds of each step with new tokens, by row
        self.ended: dict[int, Ended] = {}

    def __call__(self, update: Update | BaseException) -> None:
        if isinstance(update, BaseException):
            for _ in range(self._rows - len(self.ended)):
                self._on_row_end(None)
            return
        index, now = update.index, time.monotonic() - self._began
        times = self._times.setdefault(index, [])
        times += [now] * bool(update.tokens)
        if update.result is not None:
            handle, steps, waited = update.handle, max(len(times) - 1, 0), times[0] if times else None
            counts = handle.drafted, handle.accepted, steps
            self.ended[index] = Ended(update.result, handle.alternatives, *counts, waited, now)
            self._on_row_end(self.ended[index])

    @property
    def in_order(self) -> list[Ended]:
        """The ends of all rows."""
        return [self.ended[index] for index in range(self._rows)]


async def updates(engine: AsyncSession, job: Job) -> AsyncIterator[Update]:
    """Yield a job's updates. Raises Refused for an error of the whole request."""
    try:
        async for update in job:
            if update.result is not None and update.result.finish_reason == "error":
                said = f"a model gave NaN or infinite logits for choice {update.index}"
                if update.handle.processors:
                    said = f"no token is possible after the processors of choice {update.index}, or {said}"
                    raise Refused(400, said, code="no_token")
                raise Refused(500, said, code="bad_logits")
            yield update
    except Refused:
        raise
    except Exception as error:
        if engine.ended.done():
            raise Refused(500, STOPPED) from error
        if is_full(error):
            said = f"{line(str(error).partition('. Lower')[0])}. Request fewer tokens (max_tokens)"
            raise Refused(507, said, code="out_of_memory") from error
        said = line(str(error))
        field = re.match(r"\w*", said)[0]  # such as "draft_length=5 needs a drafter"
        if field in Sampled.model_fields:
            raise Refused(400, f"{field}: {said}", field) from error
        raise Refused(400, said) from error
