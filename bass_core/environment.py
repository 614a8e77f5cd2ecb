"""Utilities for devices (name, free memory, synchronization, copies to the host) and atomic file writes."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def synchronize(device: torch.device) -> None:
    """Wait until all work of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def is_full(error: BaseException) -> bool:
    """Return True if an error of an allocator or library means that memory is full."""
    kinds, said = (torch.OutOfMemoryError, MemoryError), ("can't allocate memory", "out of memory", "ALLOC_FAILED")
    return isinstance(error, kinds) or (isinstance(error, RuntimeError) and any(each in str(error) for each in said))


def free_memory(device: torch.device) -> int | None:
    """Return the free memory of the device in bytes, or None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    memory = Path("/proc/meminfo")
    found = re.search(r"MemAvailable: *(\d+) kB", memory.read_text()) if memory.exists() else None
    return int(found[1]) * 1024 if found else None


def processor() -> str:
    """Return the name of the CPU."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


class Fetched:
    """An asynchronous copy of a tensor to the host. Later device work may overwrite the tensor."""

    def __init__(self, tensor: Tensor):
        self._arrived: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._copied, self._arrived = tensor.to("cpu", non_blocking=True), torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(tensor.device))
        else:
            self._copied = tensor.clone()

    def __call__(self) -> np.ndarray:
        """Wait for the copy and return the array."""
        arrived = self._arrived
        if arrived is not None:
            arrived.synchronize()
            # Free the page-locked memory, which is scarce. Reset the event last, since two threads may call.
            self._copied, self._arrived = self._copied.clone(), None
        return self._copied.numpy()


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file atomically (text as UTF-8). After an error or a kill, the file has the old or the new content.

    Raises OSError and then leaves only the old file. A device or a pipe is written directly.
    """
    content = content.encode() if isinstance(content, str) else content
    path = Path(path)
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    path = path.resolve()  # replace a link's target, not the link
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")  # unique, for concurrent writers
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run all work inside on a CUDA stream, so that freed memory returns to this stream's pool. None: no GPU.

    The work waits for earlier work on the caller's stream, and later work on the caller's stream waits for this work.
    """
    callers = None if stream is None else torch.cuda.current_stream(stream.device)
    if callers == stream:
        yield
        return
    stream.wait_stream(callers)
    try:
        with torch.cuda.stream(stream):
            yield
    except BaseException:
        with contextlib.suppress(RuntimeError):  # the device was lost; the first error is raised
            callers.wait_stream(stream)
        raise
    callers.wait_stream(stream)
