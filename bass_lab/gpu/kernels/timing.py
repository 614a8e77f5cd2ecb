"""Times of all kernels of a case, in turn; on a GPU by CUDA graph.

A graph holds calls over all KV sets, so that launch gaps and the L2 cache stay out of the numbers; graphs are replayed
round robin, so that drift of the clocks hits all alike. What cannot be captured is timed as the same calls launched one
by one, and says so; so is everything on a CPU, where times say nothing about a kernel.
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
GRAPH_MS = 3.0  # but no more than this takes, where one call per set takes less
REPLAYS = 50
BUDGET_MS = 300.0  # slower calls are replayed less often, in this time,
FEWEST_REPLAYS = 5  # but this often


@dataclass
class Timing:
    """Calls launched together; `samples` are milliseconds of all of them."""

    held: list[Callable[[], object]]  # the calls, whose tensors a graph uses but does not keep alive
    replay: Callable[[], object] | None = None  # of the graph that holds them
    first: Tensor | None = None  # where the first call writes in a replay
    samples: list[float] = field(default_factory=list)
    replays: int = REPLAYS

    def __post_init__(self) -> None:
        self.calls, self.captured = len(self.held), self.replay is not None

    def launch(self) -> None:
        for call in [self.replay] if self.captured else self.held:
            call()

    @property
    def us(self) -> float:
        """Median time of one call."""
        return 1000 * median(self.samples) / self.calls

    def replayed(self) -> Tensor | None:
        """What the captured first call writes in a replay, over NaN; None where nothing was captured.

        To be read before the next graph is captured, which may use the same memory.
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
        """Forget the graphs' memory. Graphs of one case share it: they run one at a time and keep nothing."""
        if self._on_cuda:
            gc.collect()
            torch.cuda.empty_cache()
            self._pool = torch.cuda.graph_pool_handle()

    def prepare(self, calls: list[Callable[[], object]]) -> Timing:
        """Launch every call once, then capture them, in turn as often as it takes for about `CALLS` of them."""
        once = Timing(calls)
        once.launch()
        rounds = max(1, min(ceil(self.calls / len(calls)), int(GRAPH_MS / self._milliseconds([once])[0])))
        return self._capture(calls * rounds) if self._on_cuda else Timing(calls * rounds)

    def measure(self, timings: list[Timing]) -> None:
        """Fill in the samples of all of them, round robin, and let go of their calls."""
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
        """Launch them one after the other, without a wait in between."""
        self._watch.start()
        for timing in timings:
            self._watch.mark()
            timing.launch()
            self._watch.mark()
        return self._watch.intervals()[1::2]

    def _capture(self, calls: list[Callable[[], object]]) -> Timing:
        torch.cuda.synchronize()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        gc.disable()  # a graph or an event freed while another is captured spoils it
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                first = calls[0]()
                for call in calls[1:]:
                    call()
        except Exception:
            torch.cuda.set_stream(stream)  # a failed capture leaves its own stream behind
            torch.cuda.synchronize()  # raises if more than the capture is broken
            self._pool = torch.cuda.graph_pool_handle()
            return Timing(calls)
        finally:
            gc.enable()
        return Timing(calls, graph.replay, first if isinstance(first, Tensor) else None)
