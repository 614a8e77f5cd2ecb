"""`generate` for repeated calls. The session stays open and keeps its captured CUDA graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext

from bass_core import checks
from bass_core.environment import synchronize
from bass_core.generation import Generation, deadline, generate, steps_until
from bass_core.loading.model_pair import ModelPair
from bass_core.loop.rows import Prompt, Request
from bass_core.loop.trace import StepEvent, Trace
from bass_core.prompts import PromptLike, prompts_of
from bass_core.session import Session

MOST = 6  # runs until no graph is captured: a run meets a new shape, and the next run captures the graph


class HasSession:
    """Base of objects that may keep a session between calls."""

    session: Session | None

    @property
    def recordings(self) -> int:
        """Return the number of functions met or captured so far. A run that increases this number is a slow run."""
        return 0 if self.session is None else self.session.device_step.recordings

    def close(self) -> None:
        if self.session is not None:
            self.session.close()


class KeptSession(HasSession):
    """`generate` with a session for all calls: steps are captured once. Leaving the context frees the caches."""

    def __init__(self, pair: ModelPair, rows: int, **options: object):
        """rows: the maximum batch size. options: as for `Session`, without `seed` and `prefill_chunk` (TypeError)."""
        if unknown := [name for name in options if name in ("seed", "prefill_chunk")]:
            raise TypeError(f"KeptSession takes no {unknown[0]}")
        self.pair, self.options = pair, {"max_batch_size": rows} | options
        self.started = self.seconds = 0.0  # start (time.perf_counter) and duration of the last run
        self.session: Session | None = Session(pair, **self.options)
        if not self.session.device_step.records:
            self.session.close()
            self.session = None
        self._broken = False

    def __enter__(self) -> KeptSession:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def __call__(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        *,
        max_new_tokens: int = 128,
        num_return_sequences: int = 1,
        seed: int = 0,
        time_budget: float | None = None,
        on_step: Callable[[StepEvent], None] | None = None,
    ) -> Generation:
        """Generate as `generate` does. With a session, Ctrl-C raises KeyboardInterrupt without rows."""
        how = {"max_new_tokens": max_new_tokens, "num_return_sequences": num_return_sequences, "seed": seed}
        synchronize(self.pair.device)  # earlier work is not part of this run's time
        self.started = time.perf_counter()
        if self.session is None:
            how |= self.options | {"time_budget": time_budget, "on_step": on_step}
            found = generate(self.pair, prompts, **how)
        else:
            ends, handles = deadline(time_budget), self.submit(prompts, **how)
            self._broken = True  # after an error, unfinished rows would continue in the next run
            with self.session.prepared() if on_step is None else nullcontext():
                for event in steps_until(self.session, handles, ends):
                    if on_step is not None:
                        on_step(event)
            found, self._broken = Generation.of(self.session, handles, num_return_sequences), False
        synchronize(self.pair.device)
        self.seconds = time.perf_counter() - self.started
        return found

    def settled(self, prompts: PromptLike | Iterable[PromptLike], **options: object) -> Generation:
        """Repeat the run until no graph is captured, at most `MOST` times. Return the last run."""
        for _ in range(MOST):
            before = self.recordings
            found = self(prompts, **options)
            if self.recordings == before:
                break
        return found

    def submit(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        *,
        max_new_tokens: int,
        seed: int,
        num_return_sequences: int = 1,
    ) -> list[Request]:
        """Start a new trace and submit the rows of a run."""
        samples = checks.integer("num_return_sequences", num_return_sequences, least=1)
        each = [prompt for prompt in self._read(prompts, max_new_tokens) for _ in range(samples)]
        if self._broken:
            self.session.close()
            self.session = Session(self.pair, **self.options)
        session, self._broken = self.session, True  # after an error, submitted rows would join the next run
        session.drafter.forget()
        session.trace = Trace(session.trace.level, **session.trace.meta)
        handles = [
            session.submit(prompt, max_new_tokens=max_new_tokens, seed=seed, row=row) for row, prompt in enumerate(each)
        ]
        self._reserve(max(handle.limit for handle in handles))
        self._broken = False
        return handles

    def reserve(self, prompts: PromptLike | Iterable[PromptLike], max_new_tokens: int) -> None:
        """Allocate the caches for runs of `prompts`. Larger caches later would invalidate captured graphs."""
        if self.session is not None:
            self._reserve(max(len(prompt.ids) for prompt in self._read(prompts, max_new_tokens)) + max_new_tokens)

    def _reserve(self, longest: int) -> None:
        if not self.session.rows.capacity:  # later the session doubles its capacity when a row needs more
            self.session.reserve(longest)

    def _read(self, prompts: PromptLike | Iterable[PromptLike], max_new_tokens: int) -> list[Prompt]:
        return prompts_of(self.pair, prompts, max_new_tokens, self.options.get("generation_config"))

    @property
    def rounds(self) -> int:
        """Number of warm-up runs: with CUDA graphs, a run meets a shape and the next captures the graph."""
        return 1 if self.session is None else 3
