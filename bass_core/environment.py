"""The device: its name, its free memory, waiting until it is done. Files that a kill or a full disk cannot spoil."""

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
    """Wait until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def is_full(error: BaseException) -> bool:
    """Whether an allocator, or a library that has asked one, says that there is no memory left."""
    kinds, said = (torch.OutOfMemoryError, MemoryError), ("can't allocate memory", "out of memory", "ALLOC_FAILED")
    return isinstance(error, kinds) or (isinstance(error, RuntimeError) and any(each in str(error) for each in said))


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on the device; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    memory = Path("/proc/meminfo")
    found = re.search(r"MemAvailable: *(\d+) kB", memory.read_text()) if memory.exists() else None
    return int(found[1]) * 1024 if found else None


def processor() -> str:
    """The processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


class Fetched:
    """A tensor as it is now, on its way to the host: the copy begins at once, and what the device is given next may
    write over it."""

    def __init__(self, tensor: Tensor):
        self._arrived: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._copied, self._arrived = tensor.to("cpu", non_blocking=True), torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(tensor.device))
        else:
            self._copied = tensor.clone()

    def __call__(self) -> np.ndarray:
        """Waits for it."""
        arrived = self._arrived
        if arrived is not None:
            arrived.synchronize()
            # Page-locked memory is dear. Two threads may ask: the event goes last.
            self._copied, self._arrived = self._copied.clone(), None
        return self._copied.numpy()


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file (text as UTF-8): after an error or a kill at any moment it is the old one or the new one, whole.

    Raises OSError, and leaves nothing beside the old file then. A device or a pipe is written to as it is.
    """
    content = content.encode() if isinstance(content, str) else content
    path = Path(path)
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    path = path.resolve()  # a link stays one: what it leads to is replaced
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")  # two may write the same file at once
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
    """Give all work inside to a CUDA stream: freed memory goes back to that one's pool. None: there is no GPU.

    A caller on another stream waits for the work there, as the work waits for what came before.
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
        with contextlib.suppress(RuntimeError):  # the device was lost: what was raised says so
            callers.wait_stream(stream)
        raise
    callers.wait_stream(stream)
