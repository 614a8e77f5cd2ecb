"""The metrics of `/metrics`, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from bass_core.loop.trace import StepEvent

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Counts:
    """Metrics of a server. All names begin with bass_. Times are in seconds."""

    def __init__(self):
        self._registry = CollectorRegistry()
        named = {"registry": self._registry}
        self.requests = Counter("bass_requests", "requests answered", ["path", "status"], **named)
        self._rows = Counter("bass_rows", "ended rows, by the engine's finish reason", ["reason"], **named)
        self._tokens = Counter("bass_tokens", "generated, draft and accepted tokens", ["kind"], **named)
        about = "draft and accepted tokens, by position in the draft, from 1"
        self._positions = Counter("bass_draft_position_tokens", about, ["kind", "position"], **named)
        self._steps = Histogram("bass_step_seconds", "duration of an engine step", buckets=SECONDS, **named)
        self._waits = Histogram("bass_first_token_seconds", "time to a row's first token", buckets=SECONDS, **named)
        self._times = Histogram("bass_row_seconds", "time to a row's end", buckets=SECONDS, **named)
        self._gauges = named

    def watch(self, name: str, about: str, read: Callable[[], float]) -> None:
        """Add a gauge that calls `read` at each scrape."""
        Gauge(name, about, **self._gauges).set_function(read)

    def step(self, event: StepEvent, seconds: float) -> None:
        """Count a step of the engine. Called in the engine's thread."""
        self._steps.observe(seconds)
        self._tokens.labels("generated").inc(sum(map(len, event.new_tokens)))
        for kind, counts in (("drafted", event.drafted), ("accepted", event.accepted)):
            self._tokens.labels(kind).inc(sum(counts))
            for position in range(1, max(counts, default=0) + 1):
                rows = sum(count >= position for count in counts)
                self._positions.labels(kind, str(position)).inc(rows)

    def row(self, reason: str, waited: float | None = None, took: float | None = None) -> None:
        """Count a row's end. waited: seconds to the first token. took: seconds to the end."""
        self._rows.labels(reason).inc()
        for seconds, times in ((waited, self._waits), (took, self._times)):
            if seconds is not None:
                times.observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)
