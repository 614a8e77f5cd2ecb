"""Times of all kernels of a case, in turn; on a GPU by CUDA graph.

A graph holds calls over all KV sets, so that launch gaps and the L2 cache stay out of the numbers; graphs are replayed
round robin, so that drift of the clocks hits all alike. What cannot be captured is timed as the same calls launched one
by one, and says so; so is everything on a CPU, where times say nothing about a kernel.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import ceil, nan
from statistics import median

import torch
from torch import Tensor

from bass_core.environment import synchronize

CALLS = 20  # per graph, at least one per KV set
GRAPH_MS = 3.0  # but no more than this takes, where one call per set takes less
REPLAYS = 50
BUDGET_MS = 300.0  # slower calls are replayed less often, in this time,
FEWEST_REPLAYS = 5  # but this often


@dataclass
class Timing:
    """Calls launched together; `samples` are milliseconds of all of them."""

    launch: Callable[[], object] | None
    held: list[Callable[[], object]]  # the calls, whose tensors a graph uses but does not keep alive
    captured: bool
    first: Tensor | None = None  # where the first call writes
    samples: list[float] = field(default_factory=list)
    calls: int = 0
    replays: int = REPLAYS

    def __post_init__(self) -> None:
        self.calls = len(self.held)

    @property
    def us(self) -> float:
        """Median time of one call."""
        return 1000 * median(self.samples) / self.calls

    def finish(self, samples: list[float]) -> None:
        """Keep the times and let go of everything else."""
        self.samples, self.replays = samples, len(samples)
        self.launch, self.held = None, []


class HostEvent:
    """What a CUDA event is on a GPU."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, later: HostEvent) -> float:
        return 1e3 * (later.at - self.at)


class Timer:
    """Times calls on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._pool = device, None
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
        _one_by_one(calls)
        once = self._milliseconds(partial(_one_by_one, calls))
        rounds = max(1, min(ceil(self.calls / len(calls)), int(GRAPH_MS / once)))
        calls = calls * rounds
        return self._capture(calls) if self._on_cuda else Timing(partial(_one_by_one, calls), calls, captured=False)

    def measure(self, timings: list[Timing]) -> None:
        """Fill in the samples of all of them, round robin."""
        for timing in timings:
            self._milliseconds(timing.launch)  # the first replay uploads the graph
            timing.replays = int(min(self._most, max(FEWEST_REPLAYS, BUDGET_MS / self._milliseconds(timing.launch))))
        events = [[] for _ in timings]
        for turn in range(self._most):
            for timing, pairs in zip(timings, events, strict=True):
                if turn < timing.replays:
                    pairs.append(self._recorded(timing.launch))
        synchronize(self.device)
        for timing, pairs in zip(timings, events, strict=True):
            timing.finish([start.elapsed_time(end) for start, end in pairs])

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
            return Timing(partial(_one_by_one, calls), calls, captured=False)
        finally:
            gc.enable()
        return Timing(graph.replay, calls, captured=True, first=first if isinstance(first, Tensor) else None)

    def _milliseconds(self, launch: Callable[[], object]) -> float:
        start, end = self._recorded(launch)
        synchronize(self.device)
        return start.elapsed_time(end)

    def _recorded(self, launch: Callable[[], object]) -> tuple:
        start, end = (torch.cuda.Event(enable_timing=True) if self._on_cuda else HostEvent() for _ in range(2))
        start.record()
        launch()
        end.record()
        return start, end


def _one_by_one(calls: list[Callable[[], object]]) -> None:
    for call in calls:
        call()


def replayed(timing: Timing) -> Tensor | None:
    """What the captured first call writes in a replay, over NaN; None where nothing was captured.

    To be read before the next graph is captured, which may use the same memory.
    """
    if timing.first is None:
        return None
    timing.first.fill_(nan)
    timing.launch()
    torch.cuda.synchronize()
    out, timing.first = timing.first.clone(), None
    return out
