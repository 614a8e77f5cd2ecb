"""The server process: a socket, uvicorn with the API, and a graceful shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn

from bass_core.async_session import AsyncSession
from bass_core.loading.model_pair import ModelPair
from bass_lab.serve import connections
from bass_lab.serve.api import Service, make_app
from bass_lab.serve.counts import Counts
from bass_lab.serve.ends import Ended
from bass_lab.serve.gate import Gate, is_loopback

try:
    import resource
except ImportError:  # Windows
    resource = None

LAST_WORDS = 2.0  # seconds in which a server with a dead engine still sends error responses
GOODBYE = 5  # seconds for connections to close after their rows have ended


@dataclass(frozen=True)
class Settings:
    """queue: maximum number of rows that wait for a batch slot. deadline: seconds per row. drain: seconds for running
    rows after SIGTERM. allow_origins: sites whose pages may call (CORS). session: further options of `Session`."""

    name: str
    max_batch_size: int = 8
    queue: int = 64
    deadline: float | None = None
    drain: float = 30.0
    api_key: str | None = None
    allow_origins: tuple[str, ...] = ()
    session: dict[str, Any] | None = None


def bound(host: str, port: int, api_key: str | None) -> socket.socket:
    """Return a bound socket. Raises ValueError for a public address without a key, or an unavailable address."""
    if not is_loopback(host) and api_key is None:
        raise ValueError(
            f"--host {host} can be reached from other machines; set an API key with the environment variable "
            "BASS_API_KEY, or with --api-key, which other users of this machine can see"
        )
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen()
    except OSError as error:
        raise ValueError(
            f"cannot listen at {host} port {port}: {error.strerror or error}; --port 0 selects a free port"
        ) from error
    return found


def _open_files() -> int:
    """Return the limit of open files of this process."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] if resource else 1024


class Server(uvicorn.Server):
    """uvicorn's server with draining: after SIGTERM or SIGINT, new requests get 503 until the running requests end; a
    second signal ends these at once. `failed`: the engine died. say: receives model, address and docs at startup."""

    def __init__(self, pair: ModelPair, settings: Settings, say: Callable[[dict[str, str]], None]):
        self.settings, self._say, self.failed = settings, say, False
        options = {"temperature": 1.0, "on_row_error": "finish", "trace": "off"} | (settings.session or {})
        counts = self._counts = Counts()
        self.gate = Gate(settings.max_batch_size, settings.queue, settings.api_key)
        self.engine = AsyncSession(pair, max_batch_size=settings.max_batch_size, on_step=counts.step, **options)
        shared = self.engine, self.gate, counts, self._row_ended, settings.deadline
        self.service = Service(pair, settings.name, *shared)
        limit, burst = connections.limits(_open_files(), settings.max_batch_size + settings.queue)
        options = {"log_level": "warning", "access_log": False, "lifespan": "off", "ws": "none", "server_header": False}
        options |= {"backlog": burst, "timeout_graceful_shutdown": GOODBYE}
        options["http"] = functools.partial(connections.Connection, limit=limit)
        super().__init__(uvicorn.Config(make_app(self.service, settings.allow_origins), **options))

    def _row_ended(self, ended: Ended | None) -> None:
        if ended is None:
            self._counts.row("failed")
            self.gate.leave()
        else:
            self._counts.row(ended.result.finish_reason, ended.waited, ended.took)
            self.gate.leave(seconds=ended.took)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await self.engine.__aenter__()
        self._watch = asyncio.ensure_future(self._watched())
        await super().startup(sockets)
        sockets[0].listen(connections.QUEUED)  # asyncio sets the queue's length to the number accepted at once
        host, port = sockets[0].getsockname()[:2]
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        where = {"model": self.settings.name, "address": f"{self.address}/v1", "docs": f"{self.address}/docs"}
        self._say(where)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        self._watch.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.engine.close(), GOODBYE)

    async def _watched(self) -> None:
        """Shut down the server after the engine has died and pending requests had time to receive errors."""
        await asyncio.wait({self.engine.ended})
        if (error := self.engine.error) is None:
            return  # closed by `_drained`
        self.failed = True
        print(f"error: the engine has stopped: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        await asyncio.sleep(LAST_WORDS)
        self.should_exit = True

    def drain(self) -> None:
        """Accept no new requests. End when running requests have ended, after `drain` seconds, or at a second call."""
        if self.gate.draining:
            self._ending = asyncio.ensure_future(self.engine.close())
        else:
            self.gate.draining = True
            self._draining = asyncio.ensure_future(self._drained())

    async def _drained(self) -> None:
        ends = self._loop.time() + self.settings.drain
        while self.gate.rows and self._loop.time() < ends and not self.engine.ended.done():
            await asyncio.sleep(0.05)
        await self.engine.close()
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def told(number: int, frame: object) -> None:
            self._loop.call_soon_threadsafe(self.drain)

        self._loop = asyncio.get_running_loop()
        before = {number: signal.signal(number, told) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
