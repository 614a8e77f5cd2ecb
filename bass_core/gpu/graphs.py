"""Functions over fixed memory, recorded once and replayed: CUDA graphs, captured when first needed.

Launching a pass kernel by kernel costs the host more than a GPU needs for a small model's pass. A CUDA graph launches
all of them at once, and holds exactly what was recorded: these kernels, on these addresses, with these numbers. What is
to change from one replay to the next has to stand in device memory.
"""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from bass_core.environment import is_full

MOST = 64  # recordings kept: a batch's draft lengths, and what is left of earlier batch sizes
WARM_UPS = 2  # calls beside the main stream before the recording: libraries make their workspaces there

Function = Callable[[], Any]
# One at a time: recordings share a stream, and would hold each other's launches. A step that is met for the first time
# is not called beside one: compilers time what they make, and so wait for the device, which voids a recording.
# (Prefills, and steps that are never recorded, may: a recording is made once more.)
_RECORDING = threading.RLock()


class NotRecordable(ValueError):
    """A function that cannot be a graph: the host reads what the device has computed."""


class NothingReadByHost(TorchDispatchMode):
    """Raises NotRecordable where the host waits for a value of the device's, or makes a tensor of its own numbers."""

    READS = (
        torch.ops.aten._local_scalar_dense,
        torch.ops.aten.nonzero,
        torch.ops.aten.masked_select,
        torch.ops.aten.equal,
        torch.ops.aten.repeat_interleave,
        torch.ops.aten._unique2,
        torch.ops.aten.unique_dim,
        torch.ops.aten.unique_consecutive,
    )
    INDEXES = torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_
    MAKES = torch.ops.aten.lift_fresh, torch.ops.aten.lift_fresh_copy

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with self:  # what consists of other operators comes whole in inference mode: `item`, say
            found = operator.decompose(*args, **kwargs)
        if found is not NotImplemented:
            return found
        kind = operator.overloadpacket
        by_mask = kind in self.INDEXES and any(_is_mask(index) for index in args[1])
        fetched = kind == torch.ops.aten._to_copy and _is_host(kwargs.get("device")) and not _is_host(args[0].device)
        if by_mask or fetched or kind in (*self.READS, *self.MAKES):
            raise NotRecordable(f"{operator} ties the pass to a value on the host: use compile='off'")
        return operator(*args, **kwargs)


def _is_mask(index: Tensor | None) -> bool:
    """Whether an index selects by truth, so that how many it selects has to be counted first."""
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _is_host(device: torch.device | None) -> bool:
    return device is not None and device.type == "cpu"


def unwatched(function: Callable) -> Callable:
    """The function, out of sight of `NothingReadByHost`: code that was compiled whole reads nothing on the host, and is
    not to be compiled under somebody's eyes."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


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
        self._met: set[Hashable] = set()
        self.recorded = True  # until a function turns out not to be recordable
        self.made = 0  # functions met for the first time and recordings so far: what takes longer than it will again

    def due(self, key: Hashable) -> bool:
        """Whether this function is to be recorded now: it was called before, and there is no recording of it."""
        return key in self._met and key not in self._recordings

    def __len__(self) -> int:
        return len(self._recordings)

    def record(self, key: Hashable, function: Function) -> None:
        """Record a function; it is called while it is recorded, any number of times."""
        self.made += 1
        if len(self._recordings) >= self._most:
            self._recordings.popitem(last=False)
        try:
            with _RECORDING:
                self._recordings[key] = self._record(function)
        except NotRecordable:
            if self._fall_back is None:
                raise
            self._fall_back()
            self._record, self.recorded = launched_each_time, False
            self._recordings[key] = self._record(function)

    def run(self, key: Hashable, function: Function) -> Any:
        """What `function` returns: replayed if it is recorded under this key, else called.

        A recording costs some calls. What occurs a single time (the last steps of rows, say) is not worth one: the
        second time it is `due`.
        """
        if key in self._recordings:
            return self.replay(key)
        if key not in self._met:
            self._met.add(key)
            self.made += 1
            with _RECORDING:
                return function()
        return function()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._recordings

    def replay(self, key: Hashable) -> Any:
        """What a function that is recorded under this key returns."""
        self._recordings.move_to_end(key)
        return self._recordings[key]()

    def clear(self) -> None:
        """Forget all recordings: the memory that they stand for has moved, or is to be freed."""
        self._recordings.clear()


def launched_each_time(function: Function) -> Function:
    """Records nothing: what a session does that compiles its passes and has no graphs."""
    return function


def captured(device: torch.device) -> Callable[[Function], Function]:
    """Records CUDA graphs on this GPU, all in one memory pool: they run one after the other. Raises NotRecordable where
    the host reads; in compiled code the compiler has looked for that (`unwatched`)."""
    # A pool lives as long as a graph that was recorded into it: where there is none any more, a new one is begun.
    alive: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def record(function: Function) -> Function:
        with torch.cuda.device(device):
            with NothingReadByHost():
                function()
            beside = _stream_beside(device)
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                for _ in range(WARM_UPS):
                    function()
                torch.cuda.synchronize()  # a recording that made room may still have been running
                companion = next(iter(alive), None)  # held until this one is recorded
                for is_last in (False, True):
                    with suppress(*([] if is_last else [NotRecordable, torch.OutOfMemoryError])):
                        with _no_garbage_collection(), _own_workspaces():
                            graph, result = _capture(companion, function)
                        break
                    # Once more: another thread may have waited for the device, and a recording takes no memory that
                    # is cached. What the first one has left is garbage now.
                    gc.collect()
                    torch.cuda.empty_cache()
                alive.add(graph)
            torch.cuda.current_stream().wait_stream(beside)

        def replay() -> Any:
            graph.replay()
            return result

        return replay

    return record


@functools.cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings on a device: libraries keep a workspace for every stream that they ever saw."""
    return torch.cuda.Stream(device)


def _capture(companion: torch.cuda.CUDAGraph | None, function: Function) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The function recorded, and what it returned. Raises NotRecordable for what CUDA refuses to record.

    companion: whose memory pool it shares (None: one of its own).
    """
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle() if companion is None else companion.pool()
    try:
        # Other threads of a notebook may use the GPU meanwhile; only where one waits for all of it is this void.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        result = function()
        graph.capture_end()
    except BaseException as error:
        with suppress(RuntimeError):  # the recording is void
            graph.capture_end()
        with suppress(RuntimeError):  # torch 2.11 goes on allocating from a void recording's pool; others have ended it
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
            raise
        if is_full(error):  # the driver's, for the graph itself
            raise torch.OutOfMemoryError(str(error)) from None
        reason = str(error).strip().splitlines()[0]
        raise NotRecordable(f"CUDA does not record these passes ({reason}): use compile='off'") from error
    return graph, result


@contextmanager
def _own_workspaces() -> Iterator[None]:
    """Workspaces of matrix products are made inside, in the recording's memory, and nothing else uses them afterwards:
    others free the memory of those outside (transformers' compiled `generate` does)."""
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Which may destroy things of CUDA's in the midst of a recording."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
