"""CUDA graphs: functions over fixed memory, captured when first needed and then replayed.

For a small model, the host takes longer to launch a pass kernel by kernel than the GPU takes to run the pass. A CUDA
graph launches all kernels at once, with the addresses and scalar arguments of the capture. Values that change between
replays must be in device memory.
"""

from __future__ import annotations

import functools
import gc
import logging
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

log = logging.getLogger(__name__)
MOST = 64  # captured graphs kept: the draft lengths of a batch, and some of earlier batch sizes
WARM_UPS = 2  # calls on the side stream before a capture, in which libraries allocate workspaces

Function = Callable[[], Any]
# Held during a capture, since captures share a stream and would include each other's launches. Also held during the
# first call of a function: compilers may benchmark and synchronize the device, which invalidates a capture. Prefills
# and uncaptured steps do not take the lock; a capture that they invalidate is repeated.
_RECORDING = threading.RLock()


class NotRecordable(ValueError):
    """Raised for a function that cannot be captured, for instance if the host reads a device value."""


class NothingReadByHost(TorchDispatchMode):
    """Raises NotRecordable if the host waits for a device value, or makes a device tensor from host values."""

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
        with self:  # inference mode does not decompose composite operators such as `item`
            found = operator.decompose(*args, **kwargs)
        if found is not NotImplemented:
            return found
        kind = operator.overloadpacket
        by_mask = kind in self.INDEXES and any(_is_mask(index) for index in args[1])
        fetched = kind == torch.ops.aten._to_copy and _is_host(kwargs.get("device")) and not _is_host(args[0].device)
        if by_mask or fetched or kind in (*self.READS, *self.MAKES):
            raise NotRecordable(f"{operator} makes the pass depend on a value on the host; use compile='off'")
        return operator(*args, **kwargs)


def _is_mask(index: Tensor | None) -> bool:
    """Return True for a boolean mask. The host must wait for the number of selected elements."""
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _is_host(device: torch.device | None) -> bool:
    return device is not None and device.type == "cpu"


def unwatched(function: Callable) -> Callable:
    """Return the function without the check of `NothingReadByHost`. Fully compiled code reads no device value on the
    host, and dispatch modes must not be active during compilation."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


class Graphs:
    """Cache of at most `most` captured graphs by key. The least recently used graph is evicted."""

    def __init__(
        self,
        record: Callable[[Function], Function],
        most: int = MOST,
        fall_back: Callable[[], None] | None = None,
    ):
        """record: captures a function and returns the replay function. fall_back: called if a function cannot be
        captured; all functions captured later are then called each time. None: raise NotRecordable instead."""
        self._record, self._most, self._fall_back = record, most, fall_back
        self._recordings: OrderedDict[Hashable, Function] = OrderedDict()
        self._met: set[Hashable] = set()
        self.recorded = True  # False once a function could not be captured
        self.made = 0  # first calls and captures so far; both take longer than later calls

    def due(self, key: Hashable) -> bool:
        """Return True if this function must be captured now: it was called before and has no graph."""
        return key in self._met and key not in self._recordings

    def __len__(self) -> int:
        return len(self._recordings)

    def record(self, key: Hashable, function: Function) -> None:
        """Capture a function. The capture calls the function several times."""
        self.made += 1
        if len(self._recordings) >= self._most:
            self._recordings.popitem(last=False)
        try:
            with _RECORDING:
                self._recordings[key] = self._record(function)
        except NotRecordable as error:
            if self._fall_back is None:
                raise
            log.warning("steps of this session run without CUDA graphs: %s", error)
            self._fall_back()
            self._record, self.recorded = launched_each_time, False
            self._recordings[key] = self._record(function)

    def run(self, key: Hashable, function: Function) -> Any:
        """Replay the graph of this key if there is one, else call `function`. Returns the function's result.

        A capture costs several calls and does not pay for a function that runs only once, as in the last steps of rows.
        A function is therefore `due` at its second call.
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
        """Replay the graph of this key and return the function's result."""
        self._recordings.move_to_end(key)
        return self._recordings[key]()

    def clear(self) -> None:
        """Drop all graphs, since their memory has moved or will be freed."""
        self._recordings.clear()


def launched_each_time(function: Function) -> Function:
    """Return the function itself, for sessions that compile passes and capture no graphs."""
    return function


def captured(device: torch.device) -> Callable[[Function], Function]:
    """Return a function that captures CUDA graphs on this GPU, in one memory pool, since graphs run sequentially. It
    raises NotRecordable if the host reads a device value. Compiled code is exempt from this check (`unwatched`)."""
    # A pool lives as long as a graph captured into the pool. Without a live graph, a new pool begins.
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
                torch.cuda.synchronize()  # an evicted graph may still be running
                companion = next(iter(alive), None)  # keeps the memory pool alive during the capture
                for is_last in (False, True):
                    with suppress(*([] if is_last else [NotRecordable, torch.OutOfMemoryError])):
                        with _no_garbage_collection(), _own_workspaces():
                            graph, result = _capture(companion, function)
                        break
                    # Try again: another thread may have synchronized the device, or memory was full, since a capture
                    # cannot use cached memory. Free cached memory and the garbage of the first attempt.
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
    """Return the side stream for all captures on a device. Libraries keep a workspace for each stream."""
    return torch.cuda.Stream(device)


def _capture(companion: torch.cuda.CUDAGraph | None, function: Function) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture a function and return the graph and the function's result. Raises NotRecordable if CUDA cannot capture.

    companion: a graph whose memory pool is shared. None: a new pool.
    """
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle() if companion is None else companion.pool()
    try:
        # Other threads may use the GPU meanwhile. Only a device-wide synchronization invalidates the capture.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        result = function()
        graph.capture_end()
    except BaseException as error:
        with suppress(RuntimeError):  # the capture is invalid
            graph.capture_end()
        with suppress(RuntimeError):  # torch 2.11 keeps allocating from the pool of an invalid capture
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
            raise
        if is_full(error):  # the driver has no memory for the graph
            raise torch.OutOfMemoryError(str(error)) from None
        reason = str(error).strip().splitlines()[0]
        raise NotRecordable(f"CUDA cannot capture these passes ({reason}); use compile='off'") from error
    return graph, result


@contextmanager
def _own_workspaces() -> Iterator[None]:
    """Give a capture its own cuBLAS workspaces, allocated in the capture's memory pool. Other code, such as
    transformers' compiled `generate`, may free shared workspaces."""
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection, which may destroy CUDA objects during a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
