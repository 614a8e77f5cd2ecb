"""Exchange lines of JSON over two pipes with a deadline, between harness, checker and sandboxed worker.

The other end may be hostile: send half a line and wait, never read, send without end, or close the pipe.
"""

from __future__ import annotations

import json
import os
import select
import time

MOST_BYTES = 2**20  # maximum length of a line


class ChannelError(BaseException):
    """Violation of the protocol by the other end. str(error) is the kind: "timeout", "died", ...

    A BaseException, because checks of the datasets may contain `except Exception`.
    """


class Channel:
    """Reads lines from a file descriptor and writes lines to another. Deadlines are times of `time.monotonic`."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._buffer = b""
        os.set_blocking(write, False)  # an end that does not read must not block the writer beyond the deadline

    def send(self, message: dict, deadline: float | None = None) -> None:
        data = memoryview(json.dumps(message).encode() + b"\n")
        while data:
            self._wait(self._write, select.POLLOUT, deadline)
            try:
                data = data[os.write(self._write, data) :]
            except BlockingIOError:
                continue
            except OSError:
                raise ChannelError("died") from None

    def receive(self, deadline: float | None = None) -> bytes:
        """Return the next line, unparsed."""
        while b"\n" not in self._buffer:
            self._wait(self._read, select.POLLIN, deadline)
            chunk = os.read(self._read, 2**16)
            if not chunk:
                raise ChannelError("died")
            self._buffer += chunk
            if len(self._buffer) > MOST_BYTES:
                raise ChannelError(f"error: a reply of more than {MOST_BYTES} bytes")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def pending(self) -> bool:
        """Return True if there is unread data."""
        return bool(self._buffer) or bool(_poll(self._read, select.POLLIN, 0) & select.POLLIN)

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)

    def _wait(self, descriptor: int, events: int, deadline: float | None) -> None:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and (left <= 0 or not _poll(descriptor, events, left)):
            raise ChannelError("timeout")
        if left is None:
            _poll(descriptor, events, None)


def _poll(descriptor: int, events: int, seconds: float | None) -> int:
    poll = select.poll()
    poll.register(descriptor, events)
    ready = poll.poll(None if seconds is None else seconds * 1000)
    return ready[0][1] if ready else 0
