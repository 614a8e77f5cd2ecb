"""`generate` as an engineer would call it who decodes again and again: what a session has recorded, it keeps."""

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

MOST = 6  # runs until nothing is recorded: a shape is met in one run and recorded in the next, and rows may end anew


class HasSession:
    """What may have a session that stays."""

    session: Session | None

    @property
    def recordings(self) -> int:
        """How many functions were met or recorded so far: a run in which it grows takes longer than later ones."""
        return 0 if self.session is None else self.session.device_step.recordings

    def close(self) -> None:
        if self.session is not None:
            self.session.close()


class KeptSession(HasSession):
    """`generate` with one session for all calls, so that steps are recorded once. A context manager: leaving it frees
    the caches."""

    def __init__(self, pair: ModelPair, rows: int, **options: object):
        """rows: at most. options: those of `Session` and `generate` but for `seed`. Raises TypeError for others, and as
        `Session`."""
        if unknown := [name for name in options if name in ("seed", "prefill_chunk")]:
            raise TypeError(f"KeptSession takes no {unknown[0]}")
        self.pair, self.options = pair, {"max_batch_size": rows} | options
        self.started = self.seconds = 0.0  # of the last run: by time.perf_counter, and how long it took
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
        """As `generate`: the same prompts and texts. (A Ctrl-C raises KeyboardInterrupt, without the rows so far.)"""
        how = {"max_new_tokens": max_new_tokens, "num_return_sequences": num_return_sequences, "seed": seed}
        synchronize(self.pair.device)  # nothing left over from before is counted
        self.started = time.perf_counter()
        if self.session is None:
            how |= self.options | {"time_budget": time_budget, "on_step": on_step}
            found = generate(self.pair, prompts, **how)
        else:
            ends, handles = deadline(time_budget), self.submit(prompts, **how)
            self._broken = True  # rows that have not ended would go on in the next run
            with self.session.prepared() if on_step is None else nullcontext():
                for event in steps_until(self.session, handles, ends):
                    if on_step is not None:
                        on_step(event)
            found, self._broken = Generation.of(self.session, handles, num_return_sequences), False
        synchronize(self.pair.device)
        self.seconds = time.perf_counter() - self.started
        return found

    def settled(self, prompts: PromptLike | Iterable[PromptLike], **options: object) -> Generation:
        """The first run of these in which nothing is recorded, or the last of `MOST`; elsewhere the first."""
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
        """The rows of a run, with a trace of its own."""
        samples = checks.integer("num_return_sequences", num_return_sequences, least=1)
        each = [prompt for prompt in self._read(prompts, max_new_tokens) for _ in range(samples)]
        if self._broken:
            self.session.close()
            self.session = Session(self.pair, **self.options)
        session, self._broken = self.session, True  # what is submitted is part of the next run, if there is an error
        session.drafter.forget()
        session.trace = Trace(session.trace.level, **session.trace.meta)
        handles = [
            session.submit(prompt, max_new_tokens=max_new_tokens, seed=seed, row=row) for row, prompt in enumerate(each)
        ]
        self._reserve(max(handle.limit for handle in handles))
        self._broken = False
        return handles

    def reserve(self, prompts: PromptLike | Iterable[PromptLike], max_new_tokens: int) -> None:
        """Make room for runs of these: what is recorded is recorded anew where memory has to grow."""
        if self.session is not None:
            self._reserve(max(len(prompt.ids) for prompt in self._read(prompts, max_new_tokens)) + max_new_tokens)

    def _reserve(self, longest: int) -> None:
        # Later it grows with rows that need it, to twice as much where there is room.
        if not self.session.rows.capacity:
            self.session.reserve(longest)

    def _read(self, prompts: PromptLike | Iterable[PromptLike], max_new_tokens: int) -> list[Prompt]:
        return prompts_of(self.pair, prompts, max_new_tokens, self.options.get("generation_config"))

    @property
    def rounds(self) -> int:
        """Runs of the same texts until nothing is recorded: one meets a shape, the next records it."""
        return 1 if self.session is None else 3
