"""Send a workload to a server with OpenAI's HTTP API. Each request streams in a thread of its own."""

from __future__ import annotations

import http.client
import json
import math
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pandas as pd

from bass_core import checks
from bass_lab.load.result import PIECES, REQUESTS, STEPS, LoadRun
from bass_lab.load.workload import Workload

PATIENCE = 600.0  # seconds without data until a request times out
TOGETHER = 1e-3  # seconds; an end event that follows a text sooner belongs to the same step


def over_http(
    workload: Workload, url: str, *, model: str | None = None, api_key: str | None = None, **fields: object
) -> LoadRun:
    """Send each request at its arrival time to `<url>/v1/completions` (conversations: `/v1/chat/completions`).

    model: name on the server (None: the server's first model). fields: further fields of every body, such as
    temperature=0. A client closes the connection at the deadline. Token counts come from the server (`usage`), else
    each piece of text counts as a token. A later end event without text is also a piece: its token took time. queue_ms
    and steps are unknown. A failed request has the reason "error", and `meta["errors"]` has the cause. Raises
    ValueError for an invalid url, OSError without a server.
    """
    address = _Address(url, api_key)
    model = address.first_model() if model is None else model
    clients = [_Client(address, line, model, fields) for line in workload.requests.itertuples()]
    zero = time.perf_counter() + 0.1  # all threads have started by then
    threads = [threading.Thread(target=client.run, args=(zero,), daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pieces = [(client.number, at, tokens) for client in clients for at, tokens in client.counted()]
    columns = [
        range(len(clients)), workload.requests.arrived, math.nan, [client.first for client in clients],
        [client.ended for client in clients], [client.tokens for client in clients],
        workload.requests.max_new_tokens, workload.requests.deadline, [client.reason for client in clients],
        ["".join(client.texts) for client in clients],
    ]  # fmt: skip
    errors = {client.number: client.error for client in clients if client.error}
    return LoadRun(
        pd.DataFrame(dict(zip(REQUESTS, columns, strict=True))),
        pd.DataFrame(pieces, columns=list(PIECES)),
        pd.DataFrame(columns=list(STEPS)),
        {"simulated": False, "url": url, "model": model, "errors": errors},
    )


class _Address:
    """Address of a server, and requests to this server."""

    def __init__(self, url: str, api_key: str | None):
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url must be an http or https address, such as http://127.0.0.1:8000; got {url!r}")
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        self._kind, self._host, self._port = kinds[parts.scheme], parts.hostname, parts.port
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"} | (
            {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        )

    def ask(
        self, path: str, body: dict | None = None, patience: float = PATIENCE
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Return the connection and response of a request. Raises OSError without a server, or for a status not 200."""
        connection = self._kind(self._host, self._port, timeout=patience)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request("GET" if body is None else "POST", f"{self._path}/v1/{path}", data, self._headers)
            answer = connection.getresponse()
            if answer.status != 200:
                said = answer.read(2000).decode(errors="replace")
                raise OSError(f"the server responded with status {answer.status}: {' '.join(said.split())}")
        except BaseException as error:
            connection.close()
            if isinstance(error, http.client.HTTPException):
                raise OSError(f"the server's response is not HTTP: {error!r}") from error
            raise
        return connection, answer

    def first_model(self) -> str:
        """Return the name of the server's first model. Raises OSError if the server lists no model."""
        connection, answer = self.ask("models")
        try:
            return json.loads(answer.read())["data"][0]["id"]
        except (ValueError, LookupError, TypeError) as error:
            raise OSError("the server lists no models at /v1/models; name a model") from error
        finally:
            connection.close()


class _Client:
    """The client of one request. first, ended: seconds since zero."""

    def __init__(self, address: _Address, line: object, model: str, fields: dict):
        self.number, self._arrives, self._address = line.Index, line.arrived, address
        self._leaves = math.inf if math.isnan(line.deadline) else line.arrived + line.deadline
        is_text = isinstance(line.prompt, str)
        self._path = "completions" if is_text else "chat/completions"
        asked = {"prompt" if is_text else "messages": line.prompt, "max_tokens": int(line.max_new_tokens)}
        self._body = {"model": model, "seed": int(line.seed), "stream": True, **asked}
        self._body |= {"stream_options": {"include_usage": True}, **fields}
        self.first = self.ended = math.nan
        self.reason, self.error, self.total = None, None, None
        self.texts: list[str] = []
        self._at: list[float] = []

    @property
    def tokens(self) -> int:
        return len(self._at) if self.total is None else self.total

    def counted(self) -> Iterator[tuple[float, float]]:
        """Yield the time of each piece and an equal share of the tokens. Servers do not report tokens per piece."""
        for at in self._at:
            yield at, self.tokens / len(self._at)

    def run(self, zero: float) -> None:
        time.sleep(max(zero + self._arrives - time.perf_counter(), 0.0))
        connection = None
        try:
            left = min(self._leaves - (time.perf_counter() - zero), PATIENCE)
            connection, answer = self._address.ask(self._path, self._body, max(left, 1e-3))
            self._read(connection, answer, zero)
            self.reason = self.reason or "error"
            if self.reason == "error":
                self.error = self.error or "the response ended without a finish_reason"
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError) as error:
            self._failed(error, zero)
        finally:
            self.ended = self._at[-1] if self._at and self.reason in ("stop", "length") else time.perf_counter() - zero
            if connection is not None:
                connection.close()

    def _failed(self, error: Exception, zero: float) -> None:
        """Set the reason of a failed request: "budget" after the client's deadline, otherwise "error"."""
        gone = time.perf_counter() - zero >= self._leaves
        self.reason = "budget" if gone else "error"
        self.error = None if gone else f"{type(error).__name__}: {error}"

    def _read(self, connection: http.client.HTTPConnection, answer: http.client.HTTPResponse, zero: float) -> None:
        """Read server-sent events until the last."""
        for line in answer:
            now = time.perf_counter() - zero
            if now >= self._leaves:
                raise TimeoutError("the client has left")
            if connection.sock is not None and self._leaves < math.inf:
                connection.sock.settimeout(self._leaves - now)
            data = line.decode().strip()
            if not data.startswith("data:"):
                continue
            data = data.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            self._take(json.loads(data), now)

    def _take(self, event: dict, now: float) -> None:
        """Process an event: a piece of text, the finish reason, the token counts."""
        if "error" in event:
            raise ValueError(f"the server reported an error: {json.dumps(event['error'])[:200]}")
        for choice in event.get("choices", ()):
            text = choice.get("text") or (choice.get("delta") or {}).get("content")
            self.reason = choice.get("finish_reason") or self.reason
            if text:
                self.texts.append(text)
            if text or (choice.get("finish_reason") and not (self._at and now - self._at[-1] < TOGETHER)):
                self.first = now if math.isnan(self.first) else self.first
                self._at.append(now)
        if event.get("usage"):
            self.total = checks.integer("completion_tokens", event["usage"]["completion_tokens"])
