"""Admission of requests: API key, Host header, body limits, queue limit, and draining."""

from __future__ import annotations

import hmac
import ipaddress
import math
from collections.abc import Mapping
from typing import Any

MOST_BYTES = 8 * 2**20  # maximum length of a body
MOST_PARTS = 2**14  # maximum strings, lists and objects of a body
MOST_NUMBERS = 2**20  # maximum numbers of a body, such as token ids
LONGEST_WAIT = 60  # maximum seconds in Retry-After


class Refused(Exception):
    """An error response in OpenAI's format. status: of HTTP. field: the wrong field. retry: seconds in Retry-After."""

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


def line(text: str) -> str:
    """Return the text as one line of at most 500 characters."""
    text = " ".join(text.split())
    return text if len(text) <= 500 else f"{text[:500]} …"


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach a server on the address. Of names, only localhost counts."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Gate:
    """places: number of batch slots. queue: maximum number of rows that wait for a batch slot."""

    def __init__(self, places: int, queue: int, api_key: str | None = None):
        self.places, self.queue, self._key = places, queue, api_key
        self.rows = 0  # running and waiting rows
        self.draining = False
        self._row_seconds = 1.0  # moving average of the duration of a row

    @property
    def waiting(self) -> int:
        return max(0, self.rows - self.places)

    def check_caller(self, path: str, headers: Mapping[str, str]) -> None:
        """Raise Refused for a wrong key or, without a key, for a foreign Host header, such as that of a web page."""
        if self._key is None:
            host = headers.get("host", "localhost")
            if not is_loopback(host.rpartition("]")[0][1:] if host.startswith("[") else host.partition(":")[0]):
                only = "a server without an API key accepts only localhost, 127.0.0.1 and [::1]"
                raise Refused(403, f"the Host header names {host[:100]!r}; {only}")
        elif path != "/health":
            scheme, _, token = headers.get("authorization", "").partition(" ")
            given = token.strip(" ").encode("latin-1") if scheme.lower() == "bearer" else b""
            if not hmac.compare_digest(given, self._key.encode()):
                raise Refused(
                    401, "the API key is missing or wrong: send Authorization: Bearer KEY", code="invalid_api_key"
                )

    def enter(self, rows: int) -> None:
        """Admit the rows of a request. Raises Refused if batch and queue are full, or too small for the request."""
        if self.draining:
            raise Refused(503, "this server is shutting down and accepts no new requests", retry=LONGEST_WAIT)
        if rows > self.places + self.queue:
            raise Refused(
                400,
                f"n: the request has {rows} rows (prompts times n), and this server holds at most "
                f"{self.places + self.queue} ({self.places} batch slots, {self.queue} waiting rows)",
                field="n",
            )
        if self.rows + rows > self.places + self.queue:
            wait = math.ceil(self._row_seconds * max(1, self.waiting) / self.places)
            full = f"the queue is full: {self.rows} rows are running or waiting, and this request has {rows}"
            raise Refused(429, full, code="queue_full", retry=min(max(wait, 1), LONGEST_WAIT))
        self.rows += rows

    def leave(self, rows: int = 1, seconds: float | None = None) -> None:
        """Remove ended rows. seconds: duration of the row."""
        self.rows -= rows
        if seconds is not None:
            self._row_seconds += 0.1 * (seconds - self._row_seconds)
