"""Limits on the time and number of connections that wait for a request."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

ARRIVAL = {h11.IDLE: 5.0, h11.SEND_BODY: 60.0}  # time limits in seconds for a request's headers and body
QUEUED = 2048  # connections in the kernel's queue
SPARE = 1024  # connections in addition to one per row


def limits(files: int, rows: int) -> tuple[int, int]:
    """Return the maximum number of connections, and the number accepted at once, for a limit of open files."""
    return min(files // 2, rows + SPARE), max(1, min(files // 16, QUEUED))


class Connection(H11Protocol):
    """A connection that closes when a request does not arrive in time.

    `limit` is the maximum number of connections. Above the limit, a new connection closes the oldest idle connection.
    """

    def __init__(self, *arguments: Any, limit: int, **options: Any):
        super().__init__(*arguments, **options)
        self._limit = limit
        self._awaited: type | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._start_timer()
        if len(self.connections) > self._limit:
            idle = [each for each in self.connections if each._awaited is h11.IDLE]
            min(idle, key=lambda each: each._timer.when())._close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._start_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._start_timer()

    def _start_timer(self) -> None:
        """Start the timer for the next part of a request, unless the timer is already running."""
        if self.conn.their_state is self._awaited:
            return
        self._awaited = self.conn.their_state
        if self._timer is not None:
            self._timer.cancel()
        if self._awaited in ARRIVAL:
            self._timer = self.loop.call_later(ARRIVAL[self._awaited], self._close)

    def _close(self) -> None:
        self.connections.discard(self)  # immediately, for the count at the next connection
        self.transport.abort()
