"""Ways to decode the same prompts, timed: one after the other, or in turns, a step of one and a step of another."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from bass_core.engine import Session
from bass_core.environment import synchronize
from bass_core.generation import Generation
from bass_core.models import ModelPair
from bass_core.trace import Trace

LATENCIES = ("first_ms", "last_ms", "mean_ms")


@dataclass
class Clock:
    """When rows of one run emitted: at first (with the time, how many tokens that were) and at last, in seconds."""

    first: dict[int, tuple[float, int]] = field(default_factory=dict)
    last: dict[int, float] = field(default_factory=dict)
    away: float = 0.0  # seconds that others had, where runs take turns

    def tick(self, rows: Sequence[int], emitted: int) -> None:
        """These rows have just emitted; each has `emitted` tokens if these are its first."""
        now = time.perf_counter() - self.away
        for row in rows:
            self.first.setdefault(row, (now, emitted))
            self.last[row] = now

    def latencies(self, new: int) -> dict[str, float]:
        """Milliseconds per token of the first row to finish, of the last, and their mean over the rows of `new` tokens:
        from a row's first tokens (its prefill gives one; assisted generation's first step may give more) to its end,
        divided by the tokens in between (names: the paper's; definition: ours). NaN if there were none."""
        per_row = [
            1e3 * (self.last[row] - start) / (new - had) for row, (start, had) in self.first.items() if new > had
        ]
        if not per_row:
            return dict.fromkeys(LATENCIES, float("nan"))
        first, last = min(per_row), max(per_row)
        mean = min(max(sum(per_row) / len(per_row), first), last)  # the mean of equal numbers need not be equal to them
        return dict(zip(LATENCIES, (first, last, mean), strict=True))


class Way(NamedTuple):
    """A method as it is called. k: its draft length, None where it drafts nothing or a policy decides. options: of this
    engine's methods, as in `generate`."""

    k: int | None
    decode: Callable[[Clock, int], Generation | list[Tensor]]  # clock, seed -> texts
    options: dict[str, Any] | None = None


class Run(NamedTuple):
    """One method in one repeat. trace: None for methods of transformers'."""

    seconds: float
    clock: Clock
    trace: Trace | None


def one_by_one(
    pair: ModelPair, ids: Sequence[Tensor], ways: dict[str, Way], *, seed: int, progress: Callable[[str], None]
) -> Iterator[tuple[str, Run]]:
    """Each method from its first token to its last. progress: told each method's name before it begins."""
    for method, way in ways.items():
        progress(method)
        clock = Clock()
        synchronize(pair.device)
        started = time.perf_counter()
        out = way.decode(clock, seed)
        synchronize(pair.device)
        yield method, Run(time.perf_counter() - started, clock, out.trace if isinstance(out, Generation) else None)


def in_turns(
    pair: ModelPair, ids: Sequence[Tensor], ways: dict[str, Way], *, seed: int, progress: Callable[[str], None]
) -> Iterator[tuple[str, Run]]:
    """All methods side by side: the next step is always that of the one that has emitted the fewest tokens.

    So all of them write the same part of a text in the same moments. Raises ValueError for methods of transformers'.
    """
    if peers := [method for method, way in ways.items() if way.options is None]:
        raise ValueError(f"only this engine's methods (regular, single, batched) can take turns, not {peers}")
    progress("in turns")
    names = list(ways)
    names = names[seed % len(names) :] + names[: seed % len(names)]  # none is always the first
    with ExitStack() as stack:  # leaves sessions, and how they switched the models, in the reverse of their order
        decodes = {name: _Decode(pair, ids, ways[name].options, seed, stack) for name in names}
        while going := [decode for decode in decodes.values() if not decode.session.idle]:
            min(going, key=lambda decode: decode.emitted).step()
        for method in ways:
            decode = decodes[method]
            yield method, Run(decode.seconds, decode.clock, decode.session.trace)


class _Decode:
    """What `generate` does, a step at a time, timed in its own steps alone."""

    def __init__(self, pair: ModelPair, ids: Sequence[Tensor], options: dict[str, Any], seed: int, stack: ExitStack):
        """stack: keeps the session open."""
        self.device, self.clock, self.seconds, self.emitted = pair.device, Clock(), 0.0, 0
        options = {"max_batch_size": len(ids), "seed": seed} | options
        new = options.pop("max_new_tokens")
        with self._turn():
            self.session = stack.enter_context(Session(pair, eos_token_id=(), **options))
            self.handles = [self.session.submit(row, max_new_tokens=new) for row in ids]
            self.session.reserve(max(handle.limit for handle in self.handles))
            stack.enter_context(self.session.prepared())

    def step(self) -> None:
        """One step; the last one fetches the results, too."""
        with self._turn():
            event = self.session.step()
            self.clock.tick(event.rows, emitted=1)  # a row's first step is its prefill
            if self.session.idle:
                for handle in self.handles:
                    self.session.result(handle)
        self.emitted += sum(map(len, event.new_tokens))

    @contextmanager
    def _turn(self) -> Iterator[None]:
        synchronize(self.device)
        started = time.perf_counter()
        self.clock.away = started - self.seconds
        yield
        synchronize(self.device)
        self.seconds += time.perf_counter() - started
