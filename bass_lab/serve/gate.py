"""Who may come in: the key, the host, the size of a body, the queue's places, and nobody while the server drains."""

from __future__ import annotations

import hmac
import ipaddress
import math
from collections.abc import Mapping
from typing import Any

MOST_BYTES = 8 * 2**20  # of a body
MOST_PARTS = 2**14  # texts, lists and objects of a body
MOST_NUMBERS = 2**20  # of a body, such as token ids
LONGEST_WAIT = 60  # seconds that Retry-After names at most


class Refused(Exception):
    """A request that is answered with an error, in OpenAI's shape. status: HTTP's; field: which one is wrong."""

    def __init__(
        self, status: int, message: str, field: str | None = None, code: str | None = None, retry: int | None = None
    ):
        super().__init__(message)
        self.status, self.message, self.field, self.code = status, message, field, code
        self.headers = {} if retry is None else {"Retry-After": str(retry)}
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"

    @property
    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error", 404: "not_found_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.field, "code": self.code}}


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server on that address. Names other than localhost count as others."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Gate:
    """places: rows that are decoded at once; queue: rows that may wait for these."""

    def __init__(self, places: int, queue: int, api_key: str | None = None):
        self.places, self.queue, self._key = places, queue, api_key
        self.rows = 0  # that came in and have not ended
        self.draining = False
        self._row_seconds = 1.0  # a moving mean of how long rows took

    @property
    def waiting(self) -> int:
        return max(0, self.rows - self.places)

    def check_caller(self, path: str, headers: Mapping[str, str]) -> None:
        """Raises Refused for a wrong key and, where there is none, for a page of another site in a browser here."""
        if self._key is None:
            host = headers.get("host", "localhost")
            if not is_loopback(host.rpartition("]")[0][1:] if host.startswith("[") else host.partition(":")[0]):
                only = "without an API key this server answers to localhost, 127.0.0.1 and [::1] alone"
                raise Refused(403, f"the Host header names {host[:100]!r}; {only}")
        elif path != "/health":
            scheme, _, token = headers.get("authorization", "").partition(" ")
            given = token.strip(" ").encode("latin-1") if scheme.lower() == "bearer" else b""
            if not hmac.compare_digest(given, self._key.encode()):
                raise Refused(
                    401, "the API key is missing or wrong: send Authorization: Bearer KEY", code="invalid_api_key"
                )

    def enter(self, rows: int) -> None:
        """Take places for rows. Raises Refused where they do not fit now, or never."""
        if self.draining:
            raise Refused(503, "this server is shutting down and takes no new requests", retry=LONGEST_WAIT)
        if rows > self.places + self.queue:
            raise Refused(
                400,
                f"n: the request asks for {rows} rows (prompts times n), and this server holds at most "
                f"{self.places + self.queue} ({self.places} decoded at once, {self.queue} waiting)",
                field="n",
            )
        if self.rows + rows > self.places + self.queue:
            wait = math.ceil(self._row_seconds * max(1, self.waiting) / self.places)
            full = f"the queue is full: {self.rows} rows are decoded or waiting, and this request has {rows}"
            raise Refused(429, full, code="queue_full", retry=min(max(wait, 1), LONGEST_WAIT))
        self.rows += rows

    def leave(self, rows: int = 1, seconds: float | None = None) -> None:
        """Give places back. seconds: how long the row took."""
        self.rows -= rows
        if seconds is not None:
            self._row_seconds += 0.1 * (seconds - self._row_seconds)
