"""Stubbed CUDA graphs: memory of captures, failed captures, captures by several threads."""

import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from bass_core.gpu import graphs
from bass_core.gpu.graphs import Graphs, NotRecordable


@pytest.fixture
def captures(monkeypatch):
    """Record the calls to the GPU during captures. The first `voids` captures fail at the end with the error `said`."""
    calls, gpu = [], SimpleNamespace(voids=0, graphs=weakref.WeakSet())
    gpu.said = "operation failed due to a previous error during capture"

    class Graph:
        def __init__(self):
            gpu.graphs.add(self)

        def capture_begin(self, pool, **options):
            calls.append("begin")
            self.open = True

        def capture_end(self):
            if not self.open:
                raise RuntimeError("no recording is under way")
            self.open = False
            calls.append("end")
            if gpu.voids > 0:
                gpu.voids -= 1
                raise RuntimeError(gpu.said)

        def pool(self):
            return 0, 1

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, stands_for in (
        ("device", nullcontext), ("stream", nullcontext), ("Stream", lambda *_: stream),
        ("current_stream", lambda *_: stream), ("synchronize", lambda: None), ("CUDAGraph", Graph),
        ("current_device", lambda: 0), ("graph_pool_handle", lambda: (0, 1)),
        ("empty_cache", lambda: calls.append("empty")),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stands_for)
    clear = "_cuda_clearCublasWorkspaces"
    monkeypatch.setattr(torch._C, clear, lambda: calls.append("clear"), raising=False)
    end = "_cuda_endAllocateToPool"
    monkeypatch.setattr(torch._C, end, lambda device, pool: calls.append(f"end of pool {pool}"), raising=False)
    graphs._stream_beside.cache_clear()
    gpu.calls, gpu.record = calls, graphs.captured(torch.device("cuda"))
    yield gpu
    graphs._stream_beside.cache_clear()


def test_failed_recording_is_repeated_once(captures):
    """The failure: another thread waited for the device. The allocator must leave the capture's memory pool."""
    void = ["begin", "run", "end", "end of pool (0, 1)"]
    captures.voids = 1
    captures.record(lambda: captures.calls.append("run"))
    whole = ["clear", "begin", "run", "end", "clear"]
    assert captures.calls[-11:] == ["clear", *void, "clear", "empty", *whole][-11:]
    captures.voids = 2
    with pytest.raises(NotRecordable, match=r"a previous error during capture.*compile='off'"):
        captures.record(lambda: captures.calls.append("run"))
    assert captures.calls[-13:] == ["clear", *void, "clear", "empty", "clear", *void, "clear"]


def test_cached_memory_is_freed_for_a_recording(captures):
    """torch's allocator does not use cached memory during a capture."""
    turns = iter(range(5))  # the fourth call is captured

    def function():
        if next(turns) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        assert len(captures.graphs) < 2

    replay = captures.record(function)
    assert captures.calls[-7:] == ["end of pool (0, 1)", "clear", "empty", "clear", "begin", "end", "clear"]
    assert replay is not None and len(captures.graphs) == 1  # the failed capture was freed before the next


def test_full_memory_of_the_driver_is_an_out_of_memory_error(captures):
    captures.voids, captures.said = 2, "CUDA error: out of memory"
    with pytest.raises(torch.OutOfMemoryError, match="CUDA error: out of memory"):
        captures.record(lambda: None)
    captures.voids = 1
    assert captures.record(lambda: None) is not None


def test_interrupted_recording_leaves_nothing(captures):
    turns = iter(range(4))  # three calls before the capture

    def interrupted():
        if next(turns) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        captures.record(interrupted)
    assert captures.calls[-4:] == ["begin", "end", "end of pool (0, 1)", "clear"]


def test_threads_record_one_after_the_other():
    """Threads share a stream, and a capture contains all launches on the stream."""
    running, most = [], []

    def record(function):
        running.append(function)
        time.sleep(0.01)
        most.append(len(running))
        running.remove(function)
        return function

    def work(number):
        graphs = Graphs(record)
        for key in range(5):
            graphs.run(key, lambda: record(number))  # a compiler, too, waits for the device
            graphs.record(key, lambda: number)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert most == [1] * 40


def test_first_call_is_not_recorded():
    graphs = Graphs(lambda function: lambda: "replayed")
    assert not graphs.due("sum") and graphs.run("sum", lambda: "called") == "called"
    assert graphs.due("sum")
    graphs.record("sum", lambda: "called")
    assert graphs.run("sum", lambda: "called") == "replayed" and graphs.made == 2  # met, then captured
