"""`generate` as an engineer would call it who decodes again and again: what a session has recorded, it keeps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

from torch import Tensor

from bass_core.engine import Session, StepEvent
from bass_core.environment import synchronize
from bass_core.generation import Generation, generate
from bass_core.models import ModelPair
from bass_core.rows import Request
from bass_core.trace import Trace

MOST = 6  # runs until nothing is recorded: a shape is met in one run and recorded in the next, and rows may end anew


class KeptSession:
    """Decodes as `generate` does, any number of times.

    Where steps are recorded (on a GPU) that is by one session: each `generate` records its steps anew, which takes
    longer than a short text. Elsewhere it is `generate`.
    """

    def __init__(self, pair: ModelPair, rows: int, **options: object):
        """rows: at most. options: those of `Session`; a policy among them goes on with what it has learnt."""
        self.pair, self.options = pair, {"max_batch_size": rows} | options
        self.seconds = 0.0  # of the last run
        session = Session(pair, **self.options)
        self.session = session if session.device_step.records else None
        if self.session is None:
            session.close()

    def __call__(
        self,
        prompts: Sequence[str | Tensor],
        *,
        max_new_tokens: int = 128,
        num_return_sequences: int = 1,
        seed: int = 0,
        time_budget: float | None = None,
        on_step: Callable[[StepEvent], None] | None = None,
    ) -> Generation:
        """As `generate`: the same texts."""
        how = {"max_new_tokens": max_new_tokens, "num_return_sequences": num_return_sequences, "seed": seed}
        synchronize(self.pair.device)
        started = time.perf_counter()
        if self.session is None:
            how |= self.options | {"time_budget": time_budget, "on_step": on_step}
            found = generate(self.pair, prompts, **how)
        else:
            found = self._decoded(self.submit(prompts, **how), time_budget, on_step)
        synchronize(self.pair.device)
        self.seconds = time.perf_counter() - started
        return replace(found, samples=num_return_sequences)

    def _decoded(self, handles: list[Request], time_budget: float | None, on_step: Callable | None) -> Generation:
        session, ends = self.session, math.inf if time_budget is None else time.monotonic() + time_budget
        with session.prepared() if on_step is None else nullcontext():
            while not session.idle:
                if time.monotonic() >= ends:
                    for handle in handles:
                        session.cancel(handle, "budget")
                    break
                event = session.step()
                if on_step is not None:
                    on_step(event)
        results = [session.result(handle) for handle in handles]
        return Generation(*(list(column) for column in zip(*results, strict=True)), session.trace)

    def settled(self, prompts: Sequence[str | Tensor], **options: object) -> Generation:
        """The first run of these in which nothing is recorded; elsewhere the first."""
        for _ in range(MOST):
            before = self.recordings
            found = self(prompts, **options)
            if self.recordings == before:
                break
        return found

    def submit(
        self, prompts: Sequence[str | Tensor], *, max_new_tokens: int, seed: int, num_return_sequences: int = 1
    ) -> list[Request]:
        """The rows of a run, with a trace of its own."""
        session, prompts = self.session, [prompts] if isinstance(prompts, str) else prompts
        session.trace = Trace(session.trace.level, **session.trace.meta)
        rows = [prompt for prompt in prompts for _ in range(num_return_sequences)]
        handles = [
            session.submit(prompt, max_new_tokens=max_new_tokens, seed=seed, row=row) for row, prompt in enumerate(rows)
        ]
        longest = max(handle.limit for handle in handles)
        session.reserve(1 << (longest - 1).bit_length())  # seldom: what is recorded stands on this memory
        return handles

    @property
    def rounds(self) -> int:
        """After how many runs of the same texts nothing is recorded any more: in one a shape is met, in the next it is
        recorded."""
        return 1 if self.session is None else 3

    @property
    def recordings(self) -> int:
        """How many functions were met or recorded so far: a run in which it grows takes longer than later ones."""
        return 0 if self.session is None else self.session.device_step.recordings

    def close(self) -> None:
        if self.session is not None:
            self.session.close()
