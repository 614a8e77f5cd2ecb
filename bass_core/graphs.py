"""Functions over fixed memory, recorded once and replayed: CUDA graphs, captured when first needed.

Launching a pass kernel by kernel costs the host more than a GPU needs for a small model's pass. A CUDA graph launches
all of them at once, and holds exactly what was recorded: these kernels, on these addresses, with these numbers. What is
to change from one replay to the next has to stand in device memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

MOST = 64  # recordings kept: a batch's draft lengths, and what is left of earlier batch sizes
WARM_UPS = 2  # calls beside the main stream before the recording: libraries make their workspaces there

Function = Callable[[], Any]


class NotRecordable(ValueError):
    """A function that cannot be a graph: the host reads what the device has computed."""


class NothingReadByHost(TorchDispatchMode):
    """Raises NotRecordable where the host waits for a value of the device's, or makes a tensor of its own numbers."""

    READS = torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.masked_select
    MAKES = torch.ops.aten.lift_fresh, torch.ops.aten.lift_fresh_copy

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.overloadpacket in (*self.READS, *self.MAKES):
            raise NotRecordable(f"{operator} ties the pass to a value on the host: use compile='off'")
        return operator(*args, **(kwargs or {}))


class Graphs:
    """At most `most` recordings by key; the one that was not used for longest makes room."""

    def __init__(
        self,
        record: Callable[[Function], Function],
        most: int = MOST,
        fall_back: Callable[[], None] | None = None,
    ):
        """record: makes of a function what replays it. fall_back: called if a function turns out not to be recordable;
        from then on functions are called each time. None: NotRecordable is raised."""
        self._record, self._most, self._fall_back = record, most, fall_back
        self._recordings: OrderedDict[Hashable, Function] = OrderedDict()
        self.made = 0  # recordings so far, those that were dropped again among them

    def __contains__(self, key: Hashable) -> bool:
        return key in self._recordings

    def __len__(self) -> int:
        return len(self._recordings)

    def record(self, key: Hashable, function: Function) -> None:
        """Record a function; it is called while it is recorded, any number of times."""
        self.made += 1
        if len(self._recordings) >= self._most:
            self._recordings.popitem(last=False)
        try:
            self._recordings[key] = self._record(function)
        except NotRecordable:
            if self._fall_back is None:
                raise
            self._fall_back()
            self._record = launched_each_time
            self._recordings[key] = self._record(function)

    def replay(self, key: Hashable) -> Any:
        """What the function returned when it was recorded, with the values of now. Raises KeyError if it was not."""
        self._recordings.move_to_end(key)
        return self._recordings[key]()

    def clear(self) -> None:
        """Forget all recordings: the memory that they stand for has moved, or is to be freed."""
        self._recordings.clear()


def launched_each_time(function: Function) -> Function:
    """Records nothing: what a session does that compiles its passes and has no graphs."""
    return function


def captured(device: torch.device, compiled: bool) -> Callable[[Function], Function]:
    """Records CUDA graphs on this GPU, all in one memory pool: they run one after the other.

    compiled: the functions hold compiled code, in which the compiler has looked for the host already. Else they raise
    NotRecordable where it reads.
    """
    pool = torch.cuda.graph_pool_handle()

    def record(function: Function) -> Function:
        with torch.cuda.device(device):
            with nullcontext() if compiled else NothingReadByHost():
                function()
            beside = torch.cuda.Stream()
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                for _ in range(WARM_UPS):
                    function()
            torch.cuda.current_stream().wait_stream(beside)
            torch.cuda.synchronize()  # a recording that makes room may still be running
            graph = torch.cuda.CUDAGraph()
            # Other threads of a notebook may use the GPU meanwhile: only this one's mistakes end the recording.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                result = function()

        def replay() -> Any:
            graph.replay()
            return result

        return replay

    return record
