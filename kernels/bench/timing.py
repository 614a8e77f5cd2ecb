"""Times by CUDA graph, all kernels of a case in turn.

A graph holds calls over all KV sets, so that launch gaps and the L2 cache stay out of the numbers; graphs are replayed
round robin, so that drift of the clocks hits all alike. What cannot be captured is timed as the same calls launched
one by one, and says so.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import ceil, nan
from statistics import median

import torch
from torch import Tensor

CALLS = 20  # per graph, at least one per KV set
GRAPH_MS = 3.0  # but no more than this takes, where one call per set takes less
REPLAYS = 50
BUDGET_MS = 300.0  # slower runs are replayed less often, in this time,
FEWEST_REPLAYS = 5  # but this often
COPIED_BYTES = 2**31


@dataclass
class Run:
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


class GraphClock:
    """Measures on the current CUDA device."""

    name = "cuda"

    def __init__(self) -> None:
        self._pool = None

    def new_case(self) -> None:
        """Forget the graphs' memory. Graphs of one case share it: they run one at a time and keep nothing."""
        gc.collect()
        torch.cuda.empty_cache()
        self._pool = torch.cuda.graph_pool_handle()

    def prepare(self, calls: list[Callable[[], object]]) -> Run:
        """Launch every call once, then capture them, in turn as often as it takes for about `CALLS` of them."""
        _one_by_one(calls)
        once = self._milliseconds(partial(_one_by_one, calls))
        rounds = max(1, min(ceil(CALLS / len(calls)), int(GRAPH_MS / once)))
        return self._capture(calls * rounds)

    def measure(self, runs: list[Run]) -> None:
        """Fill in the samples of all runs, round robin."""
        for run in runs:
            self._milliseconds(run.launch)  # the first replay uploads the graph
            run.replays = int(min(REPLAYS, max(FEWEST_REPLAYS, BUDGET_MS / self._milliseconds(run.launch))))
        events = [[] for _ in runs]
        for turn in range(REPLAYS):
            for run, pairs in zip(runs, events, strict=True):
                if turn < run.replays:
                    pairs.append(_recorded(run.launch))
        torch.cuda.synchronize()
        for run, pairs in zip(runs, events, strict=True):
            run.finish([start.elapsed_time(end) for start, end in pairs])

    def copy_bytes_per_second(self) -> float:
        """Bytes read and written by a large copy on the device, per second."""
        source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda").random_()
        target = torch.empty_like(source)
        copy = partial(target.copy_, source)
        run = Run(copy, [copy], captured=False)
        self.measure([run])
        return 2 * COPIED_BYTES / (run.us * 1e-6)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def _capture(self, calls: list[Callable[[], object]]) -> Run:
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
            return Run(partial(_one_by_one, calls), calls, captured=False)
        finally:
            gc.enable()
        return Run(graph.replay, calls, captured=True, first=first if isinstance(first, Tensor) else None)

    def _milliseconds(self, launch: Callable[[], object]) -> float:
        start, end = _recorded(launch)
        torch.cuda.synchronize()
        return start.elapsed_time(end)


def _one_by_one(calls: list[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _recorded(launch: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    launch()
    end.record()
    return start, end


class FakeClock:
    """For dry runs without a GPU: every call is made once and said to take a millisecond."""

    name = "fake"

    def new_case(self) -> None:
        pass

    def prepare(self, calls: list[Callable[[], object]]) -> Run:
        return Run(partial(_one_by_one, calls), calls, captured=False)

    def measure(self, runs: list[Run]) -> None:
        for run in runs:
            run.launch()
            run.finish([float(run.calls)])

    def copy_bytes_per_second(self) -> float:
        return 1e9

    def synchronize(self) -> None:
        pass


def replayed(run: Run) -> Tensor | None:
    """What the captured first call writes in a replay, over NaN; None where nothing was captured.

    To be read before the next graph is captured, which may use the same memory.
    """
    if run.first is None:
        return None
    run.first.fill_(nan)
    run.launch()
    torch.cuda.synchronize()
    out, run.first = run.first.clone(), None
    return out
