"""Time measurement: of a block, of the fastest of many calls, of model passes, and of the tokens of each row."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch

from bass_core.environment import synchronize
from bass_core.loading.model_pair import ModelPair
from bass_core.loop.phases import Stopwatch
from bass_core.loop.trace import StepEvent

LATENCIES = ("first_ms", "last_ms", "mean_ms")


class Elapsed:
    """Time a with block, synchronizing the device at both ends.

    started: `time.perf_counter()` at the start. seconds: set when the block has ended.
    """

    def __init__(self, device: torch.device):
        self.device = device

    def __enter__(self) -> Elapsed:
        synchronize(self.device)
        self.started = time.perf_counter()
        return self

    def __exit__(self, *exc) -> None:
        synchronize(self.device)
        self.seconds = time.perf_counter() - self.started


def best_seconds(call: Callable[[], object], device: torch.device, spend: float) -> float:
    """Return the shortest time of a call in seconds, after a warm-up. On CUDA, ten consecutive calls are timed together
    to hide launch latency. spend: seconds to measure."""
    inner = 10 if device.type == "cuda" else 1
    call()
    times, end = [], time.perf_counter() + spend
    while not times or time.perf_counter() < end:
        with Elapsed(device) as elapsed:
            for _ in range(inner):
                call()
        times.append(elapsed.seconds / inner)
    return min(times)


@contextmanager
def passes_marked(pair: ModelPair) -> Iterator[Stopwatch]:
    """Yield a stopwatch with a mark at the start and end of each forward pass of the pair's models."""
    watch = Stopwatch(pair.device)
    with ExitStack() as hooks:
        for model in {id(model): model for model in pair.models}.values():  # one model may be both
            hooks.callback(model.register_forward_pre_hook(lambda *_: watch.mark()).remove)
            hooks.callback(model.register_forward_hook(lambda *_: watch.mark()).remove)
        yield watch


@dataclass
class Clock:
    """Emission times of the rows of one run, in seconds: the first (with its number of tokens) and the last."""

    first: dict[int, tuple[float, int]] = field(default_factory=dict)
    last: dict[int, float] = field(default_factory=dict)
    away: float = 0.0  # seconds spent in other runs, if runs are interleaved

    def tick(self, rows: Sequence[int], emitted: int) -> None:
        """Note that these rows emitted tokens now. emitted: tokens of a row at the first emission."""
        now = time.perf_counter() - self.away
        for row in rows:
            self.first.setdefault(row, (now, emitted))
            self.last[row] = now

    def stepped(self, event: StepEvent) -> None:
        """Note the end of a `Session` step. The step ended with a copy to the host, so the device has finished too. The
        first step of a row is the prefill, which emits one token."""
        self.tick(event.rows, emitted=1)

    def latencies(self, new: int) -> dict[str, float]:
        """Return milliseconds per token of the fastest and slowest row, and the mean over rows of `new` tokens. A row's
        latency is the time from first to last emission, divided by the tokens after the first emission. NaN if no row
        has such tokens. The names are the paper's, the definition is ours."""
        per_row = [
            1e3 * (self.last[row] - start) / (new - had) for row, (start, had) in self.first.items() if new > had
        ]
        if not per_row:
            return dict.fromkeys(LATENCIES, float("nan"))
        first, last = min(per_row), max(per_row)
        mean = min(max(sum(per_row) / len(per_row), first), last)  # rounding can move a mean of equal numbers
        return dict(zip(LATENCIES, (first, last, mean), strict=True))

    def decoding_seconds(self, one_by_one: bool = False) -> float:
        """Return seconds from the latest prefill to the last emission; with one_by_one the sum over sequential rows."""
        if one_by_one:
            return sum(self.last[row] - start for row, (start, _) in self.first.items())
        return max(self.last.values()) - max(start for start, _ in self.first.values())
