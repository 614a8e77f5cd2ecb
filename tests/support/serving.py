"""A server for tests, in a thread of this process or in another process."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from typing import Any

import httpx
from waiting import until

import bass_core as bass
from bass_lab.serve.server import Server, Settings, bound

PROMPT = "def add(a, b):\n"


@contextmanager
def served(pair: bass.ModelPair, name: str = "tiny", **settings: Any) -> Iterator[Server]:
    """Serve copies of the models on a free local port. The server drains when the block ends."""
    target, draft = deepcopy((pair.target, pair.draft))
    server = Server(bass.ModelPair(target, draft, pair.tokenizer), Settings(name, **settings), lambda where: None)
    with bound("127.0.0.1", 0, None) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        until(lambda: server.started and hasattr(server, "address"))
        try:
            yield server
        finally:
            with suppress(RuntimeError):  # already ended
                server._loop.call_soon_threadsafe(server.drain)
            thread.join(20)
            assert not thread.is_alive()


@contextmanager
def held(server: Server, after: int = 0) -> Iterator[None]:
    """Hold the engine before its next step, or `after` steps later, until the block ends. The server answers."""
    step, going, left = server.engine.session.step, threading.Event(), iter(range(after))

    def waiting() -> Any:
        if next(left, None) is None:
            assert going.wait(60)
        return step()

    server.engine.session.step = waiting
    try:
        yield
    finally:
        going.set()
        server.engine.session.step = step


def post(server: Server | str, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    address = server if isinstance(server, str) else server.address
    return httpx.post(f"{address}{path}", json=body, timeout=60, trust_env=False, verify=False)


@contextmanager
def process(*options: str, environment: dict[str, str] | None = None) -> Iterator[tuple[subprocess.Popen, str]]:
    """Start `bass serve`, yield its process and address, and kill the process when the block ends."""
    command = [sys.executable, "-m", "bass_lab.cli", "serve", "--port", "0", "--json", *options]
    surroundings = os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=surroundings, start_new_session=True, **pipes) as child:
        try:
            yield child, json.loads(child.stdout.readline())["address"].removesuffix("/v1")
        finally:
            child.kill()


def raw(server: Server, sent: bytes) -> bytes:
    host, port = server.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(sent)
        received = b""
        while piece := connection.recv(65536):
            received += piece
        return received
