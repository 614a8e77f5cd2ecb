"""Interleaved timing of all kernels of a case, as CUDA graphs on a GPU.

A graph holds calls over all KV sets, to exclude launch gaps and the L2 cache. Graphs are replayed round robin, so clock
drift affects all kernels equally. Calls that cannot be captured are launched one by one and marked as not captured. A
CPU also launches one by one; its times are meaningless for kernels.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil, nan
from statistics import median

import torch
from torch import Tensor

from bass_core.loop.phases import Stopwatch

CALLS = 20  # per graph, at least one per KV set
GRAPH_MS = 3.0  # limit of a graph's time, if one call per set takes less
REPLAYS = 50
BUDGET_MS = 300.0  # time limit of a graph's replays
FEWEST_REPLAYS = 5  # even beyond BUDGET_MS


@dataclass
class Timing:
    """Calls that are launched together. `samples`: milliseconds of all calls."""

    held: list[Callable[[], object]]  # the calls keep tensors alive that a graph only uses
    replay: Callable[[], object] | None = None  # of the captured graph
    first: Tensor | None = None  # output of the first call in a replay
    samples: list[float] = field(default_factory=list)
    replays: int = REPLAYS

    def __post_init__(self) -> None:
        self.calls, self.captured = len(self.held), self.replay is not None

    def launch(self) -> None:
        for call in [self.replay] if self.captured else self.held:
            call()

    @property
    def us(self) -> float:
        """Return the median time of one call, in µs."""
        return 1000 * median(self.samples) / self.calls

    def replayed(self) -> Tensor | None:
        """Fill the first call's output with NaN, replay, and return the output; None if nothing was captured.

        Call this method before the next capture, which may reuse the memory.
        """
        if self.first is None:
            return None
        self.first.fill_(nan)
        self.launch()
        torch.cuda.synchronize()
        out, self.first = self.first.clone(), None
        return out


class Timer:
    """Times calls on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._pool, self._watch = device, None, Stopwatch(device)
        self._on_cuda = device.type == "cuda"
        self.calls, self._most = (CALLS, REPLAYS) if self._on_cuda else (1, 1)

    def new_case(self) -> None:
        """Start a new memory pool. Graphs of a case share a pool, because they run one at a time and keep nothing."""
        if self._on_cuda:
            gc.collect()
            torch.cuda.empty_cache()
            self._pool = torch.cuda.graph_pool_handle()

    def prepare(self, calls: list[Callable[[], object]]) -> Timing:
        """Launch every call once, then capture enough rounds of all calls for about `CALLS` calls."""
        once = Timing(calls)
        once.launch()
        rounds = max(1, min(ceil(self.calls / len(calls)), int(GRAPH_MS / self._milliseconds([once])[0])))
        return self._capture(calls * rounds) if self._on_cuda else Timing(calls * rounds)

    def measure(self, timings: list[Timing]) -> None:
        """Record the samples of all timings, round robin, and release their calls."""
        for timing in timings:
            self._milliseconds([timing])  # the first replay uploads the graph
            (taken,) = self._milliseconds([timing])
            timing.replays = int(min(self._most, max(FEWEST_REPLAYS, BUDGET_MS / taken)))
        order = [timing for turn in range(self._most) for timing in timings if turn < timing.replays]
        for timing, taken in zip(order, self._milliseconds(order), strict=True):
            timing.samples.append(taken)
        for timing in timings:
            timing.held, timing.replay = [], None

    def _milliseconds(self, timings: list[Timing]) -> list[float]:
        """Launch the timings back to back and return their milliseconds."""
        self._watch.start()
        for timing in timings:
            self._watch.mark()
            timing.launch()
            self._watch.mark()
        return self._watch.intervals()[1::2]

    def _capture(self, calls: list[Callable[[], object]]) -> Timing:
        torch.cuda.synchronize()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        gc.disable()  # freeing a graph or an event invalidates a capture
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                first = calls[0]()
                for call in calls[1:]:
                    call()
        except Exception:
            torch.cuda.set_stream(stream)  # a failed capture does not restore the stream
            torch.cuda.synchronize()  # raises if the device is broken
            self._pool = torch.cuda.graph_pool_handle()
            return Timing(calls)
        finally:
            gc.enable()
        return Timing(calls, graph.replay, first if isinstance(first, Tensor) else None)
