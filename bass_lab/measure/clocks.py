"""How time is taken: of a block, of the best of many calls, of a model's passes, and when rows emitted their tokens."""

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
    """Seconds of a with block, from when the device has done all that came before until it has done all of the block.

    started: on the clock of `time.perf_counter`. seconds: known when the block has ended.
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
    """Shortest time of a call after one that warms up; on CUDA of ten in a row, so that launching is not counted.

    spend: seconds to go on measuring.
    """
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
    """A stopwatch that is marked where a forward pass of the pair's models begins and where it ends."""
    watch = Stopwatch(pair.device)
    with ExitStack() as hooks:
        for model in {id(model): model for model in pair.models}.values():  # one model may be both
            hooks.callback(model.register_forward_pre_hook(lambda *_: watch.mark()).remove)
            hooks.callback(model.register_forward_hook(lambda *_: watch.mark()).remove)
        yield watch


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

    def stepped(self, event: StepEvent) -> None:
        """A step of a session's has ended, with a copy to the host: its time is the device's, too. A row's first step
        is its prefill, which gives one token."""
        self.tick(event.rows, emitted=1)

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

    def decoding_seconds(self, one_by_one: bool = False) -> float:
        """From the last row's first tokens, which its prefill gives, to the last tokens; of single rows, the sum."""
        if one_by_one:
            return sum(self.last[row] - start for row, (start, _) in self.first.items())
        return max(self.last.values()) - max(start for start, _ in self.first.values())
