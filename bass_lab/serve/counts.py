"""What `/metrics` tells: counters in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from bass_core.loop.trace import StepEvent

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Counts:
    """Of one server. All names begin with bass_; times are in seconds."""

    def __init__(self):
        self._registry = CollectorRegistry()
        named = {"registry": self._registry}
        self.requests = Counter("bass_requests", "requests answered", ["path", "status"], **named)
        self._rows = Counter("bass_rows", "rows that ended, by the engine's reason", ["reason"], **named)
        self._tokens = Counter("bass_tokens", "tokens generated, drafted, accepted", ["kind"], **named)
        self._steps = Histogram("bass_step_seconds", "one step of the engine", buckets=SECONDS, **named)
        self._waits = Histogram("bass_first_token_seconds", "until a row's first token", buckets=SECONDS, **named)
        self._times = Histogram("bass_row_seconds", "until a row's end", buckets=SECONDS, **named)
        self._gauges = named

    def watch(self, name: str, about: str, read: Callable[[], float]) -> None:
        """Tell a number that is read when it is asked for."""
        Gauge(name, about, **self._gauges).set_function(read)

    def step(self, event: StepEvent, seconds: float) -> None:
        """A step of the engine, in the driver's thread."""
        self._steps.observe(seconds)
        self._tokens.labels("generated").inc(sum(map(len, event.new_tokens)))
        self._tokens.labels("drafted").inc(sum(event.drafted))
        self._tokens.labels("accepted").inc(sum(event.accepted))

    def row(self, reason: str, waited: float | None = None, took: float | None = None) -> None:
        """A row's end. waited, took: seconds until its first token, and until now."""
        self._rows.labels(reason).inc()
        for seconds, times in ((waited, self._waits), (took, self._times)):
            if seconds is not None:
                times.observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)
