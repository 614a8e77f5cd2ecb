"""Results of a served workload: the times of each request, latency metrics and rates.

| metric | milliseconds of a request |
| --- | --- |
| `queue_ms` | from arrival to the start of the prefill step |
| `first_ms` | from arrival to the first token |
| `between_ms` | mean time between tokens: first token to last token, divided by the tokens after the first |
| `gap_ms` | between two pieces of text; a piece is the tokens of a single step |
| `end_ms` | from arrival to end |

A drafting step emits several tokens at once. `between_ms` measures the mean speed of a text, `gap_ms` the pauses.
Percentiles of `between_ms` are over requests, percentiles of `gap_ms` over all pieces of all requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pandas as pd

REQUESTS = (
    "request", "arrived", "started", "first", "ended", "tokens", "max_new_tokens", "deadline", "finish_reason", "text",
)  # fmt: skip
PIECES = ("request", "at", "tokens")
STEPS = ("started", "ended", "kind", "rows", "k", "drafted", "accepted", "emitted")
LATENCIES = ("queue_ms", "first_ms", "between_ms", "gap_ms", "end_ms")
FINISHED = ("eos", "stop", "length")
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
RESAMPLES, CONFIDENCE = 1000, 0.95
SPANS = 24  # time spans for the bootstrap of rates


@dataclass(frozen=True)
class Target:
    """Limits in milliseconds by metric, for a share of the requests (`gap_ms`: of the pieces). None: no limit."""

    between_ms: float | None = None
    first_ms: float | None = None
    end_ms: float | None = None
    gap_ms: float | None = None
    share: float = 0.99

    def __post_init__(self):
        if not self.limits or not all(limit > 0 for limit in self.limits.values()) or not 0 < self.share <= 1:
            raise ValueError(f"a target needs at least one limit, limits > 0 ms and a share in (0, 1]; got {self}")

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are set, in milliseconds by metric."""
        found = {name: getattr(self, name) for name in ("between_ms", "first_ms", "end_ms", "gap_ms")}
        return {name: limit for name, limit in found.items() if limit is not None}


@dataclass(frozen=True, eq=False)
class LoadRun:
    """A served workload.

    requests: a line per request with the columns `REQUESTS`. Times are seconds since the start; started and first may
    be NaN (unknown). pieces: a line per piece of text: request, at (seconds), tokens. steps: a line per step with the
    columns `STEPS`: kind (prefill or decode), rows, mean planned k, tokens drafted, accepted and emitted; empty if
    unknown. meta: settings of the run.
    """

    requests: pd.DataFrame
    pieces: pd.DataFrame
    steps: pd.DataFrame
    meta: dict = field(default_factory=dict)

    def __post_init__(self):
        for name, columns in (("requests", REQUESTS), ("pieces", PIECES), ("steps", STEPS)):
            if missing := [column for column in columns if column not in getattr(self, name)]:
                raise ValueError(f"{name} lacks the columns {', '.join(missing)}")
        for name, columns in (("requests", ("started", "first", "ended", "deadline")), ("pieces", PIECES[1:])):
            numbers = getattr(self, name).astype(dict.fromkeys(columns, float))  # an empty table has dtype object
            object.__setattr__(self, name, numbers)

    @cached_property
    def latencies(self) -> pd.DataFrame:
        """One line per request: request, queue_ms, first_ms, between_ms, end_ms (NaN: none), late (missed deadline)."""
        requests = self.requests
        last = self.pieces.groupby("request")["at"].max().reindex(requests.request).to_numpy()
        after_first = np.where(requests.tokens > 1, requests.tokens - 1, np.nan)
        seconds = {
            "queue_ms": requests.started - requests.arrived,
            "first_ms": requests["first"] - requests.arrived,
            "between_ms": (last - requests["first"]) / after_first,
            "end_ms": (requests.ended - requests.arrived).where(requests.finish_reason.isin(FINISHED)),
        }
        found = pd.DataFrame({name: 1e3 * each for name, each in seconds.items()})
        late = (requests.finish_reason == "budget") | (requests.ended - requests.arrived > requests.deadline)
        return found.assign(request=requests.request, late=late)

    @cached_property
    def gaps(self) -> pd.DataFrame:
        """One line per piece after the first piece of each request: request, gap_ms."""
        pieces = self.pieces.sort_values(["request", "at"], kind="stable")
        gaps = 1e3 * pieces.groupby("request")["at"].diff()
        return pd.DataFrame({"request": pieces.request, "gap_ms": gaps}).dropna()

    def counted(self, warm_up: float = 0.1) -> np.ndarray:
        """Return bool [requests]: True except for the first share `warm_up`, which finds an idle server."""
        if not 0 <= warm_up < 1:
            raise ValueError(f"warm_up must be a share of the requests in [0, 1), got {warm_up}")
        return np.arange(len(self.requests)) >= int(warm_up * len(self.requests))

    def met(self, target: Target) -> np.ndarray:
        """Return bool [requests]: finished by EOS, stop or length, in time, within all limits (`gap_ms`: every gap)."""
        longest = self.gaps.groupby("request").gap_ms.max().reindex(self.requests.request).to_numpy()
        own = self.latencies.assign(gap_ms=longest)
        good = self.requests.finish_reason.isin(FINISHED).to_numpy() & ~own.late.to_numpy()
        for name, limit in target.limits.items():
            good &= ~(own[name].to_numpy() > limit)
        return good

    def quantile(self, metric: str, share: float, warm_up: float = 0.1) -> float:
        """Return the quantile (inverted CDF) of a metric over requests (`gap_ms`: pieces). Missing values are inf."""
        counted = self.counted(warm_up)
        values, owners = self._values(metric, counted)
        return float(_quantiles(values, owners, np.ones((1, int(counted.sum()))), [share])[0, 0])

    def holds(self, target: Target, warm_up: float = 0.1) -> bool:
        """Return True if the run meets all limits of the target."""
        return all(self.quantile(name, target.share, warm_up) <= limit for name, limit in target.limits.items())

    def summary(
        self, target: Target | None = None, *, warm_up: float = 0.1, resamples: int = RESAMPLES, seed: int = 0
    ) -> pd.DataFrame:
        """Return value and 95% bootstrap interval (low, high) by metric and statistic.

        Latencies have mean, p50, p95 and p99; the bootstrap draws blocks of √n consecutive requests. Rates are over the
        time from the first counted arrival to the last end, and the bootstrap draws spans of this time: requests_per_s,
        tokens_per_s, goodput_per_s (requests that met the target), batch (rows decoding). late: share of requests past
        the deadline. tokens_per_step: per row. Unknown lines are missing. warm_up: share of first requests left out.
        """
        counted, generator = self.counted(warm_up), np.random.default_rng(seed)
        weights = _block_counts(int(counted.sum()), resamples, generator)
        lines = []
        for metric in LATENCIES:
            lines += _latency_lines(metric, *self._values(metric, counted), weights)
        late = self.latencies.late.to_numpy()[counted].astype(float)
        lines.append(_line("late", "share", late.mean(), weights @ late / weights.sum(1)))
        for name, amounts in self._amounts(counted, target).items():
            drawn = generator.integers(len(amounts), size=(resamples, len(amounts)))
            per_span, spans = amounts.T
            resampled = per_span[drawn].sum(1) / np.maximum(spans[drawn].sum(1), 1e-12)
            if spans.sum() > 0:
                lines.append(_line(name, "mean", per_span.sum() / spans.sum(), resampled))
        return pd.DataFrame(lines).set_index(["metric", "statistic"])

    def _values(self, metric: str, counted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the values of a metric, and the index of each value among the counted requests."""
        if metric == "gap_ms":
            places = np.full(len(counted), -1)
            places[counted] = np.arange(counted.sum())
            owners = places[pd.Index(self.requests.request).get_indexer(self.gaps.request)]
            return self.gaps.gap_ms.to_numpy()[owners >= 0], owners[owners >= 0]
        if metric not in LATENCIES:
            raise ValueError(f"metric must be one of {', '.join(LATENCIES)}; got {metric!r}")
        values = self.latencies[metric].to_numpy()
        if metric != "between_ms" and np.isfinite(values).any():  # a single token has no between_ms
            values = np.where(np.isnan(values), np.inf, values)
        known = counted & ~np.isnan(values)
        return values[known], (counted.cumsum() - 1)[known]

    def _amounts(self, counted: np.ndarray, target: Target | None) -> dict[str, np.ndarray]:
        """Return the numerator and denominator of each rate in each time span: [spans, 2] by metric."""
        requests, pieces, steps = self.requests, self.pieces, self.steps
        start, end = requests.arrived[counted].iloc[0], requests.ended[counted].max()
        edges = np.linspace(start, max(end, start + 1e-9), SPANS + 1)
        length = np.diff(edges)

        def within(at: pd.Series, amount: np.ndarray) -> np.ndarray:
            return np.histogram(at, edges, weights=np.broadcast_to(amount, len(at)).astype(float))[0]

        ended = requests.finish_reason.isin(FINISHED).to_numpy()
        found = {
            "requests_per_s": (within(requests.ended, ended), length),
            "tokens_per_s": (within(pieces["at"], pieces.tokens.to_numpy()), length),
        }
        if target is not None:
            found["goodput_per_s"] = within(requests.ended, self.met(target)), length
        if len(steps):
            decode = steps[steps.kind == "decode"]
            rows = decode.rows.to_numpy()
            found["batch"] = within(decode.ended, rows * (decode.ended - decode.started).to_numpy()), length
            found["tokens_per_step"] = within(decode.ended, decode.emitted.to_numpy()), within(decode.ended, rows)
        return {name: np.stack(each, axis=1) for name, each in found.items()}

    def __repr__(self) -> str:
        found = self.summary(resamples=2).value

        def shown(metric: str) -> str:
            known = (metric, "p50") in found
            return " / ".join(f"{found[metric, name]:.3g}" for name in ("p50", "p99")) if known else "-"

        rate = len(self.requests) / max(float(self.requests.arrived.iloc[-1]), 1e-9)
        late = f", {found['late', 'share']:.1%} late" if self.requests.deadline.notna().any() else ""
        return (
            f"LoadRun({len(self.requests)} requests at {rate:.3g}/s{late}; p50 / p99 in ms: first token "
            f"{shown('first_ms')}, between tokens {shown('between_ms')}, end {shown('end_ms')}; "
            f"{found['tokens_per_s', 'mean']:.4g} tokens/s)"
        )

    def table(self, target: Target | None = None, **options) -> list[dict[str, str]]:
        """Return the latencies of `summary` as text, a line per metric: mean, and percentiles with intervals."""
        lines: dict[str, dict[str, str]] = {}
        for (metric, statistic), found in self.summary(target, **options).iterrows():
            if metric in LATENCIES:
                interval = "" if statistic == "mean" else f" ({found.low:.3g}-{found.high:.3g})"
                lines.setdefault(metric, {"ms": metric.removesuffix("_ms")})[statistic] = f"{found.value:.3g}{interval}"
        return list(lines.values())

    def rates(self, target: Target | None = None, **options) -> dict[str, str]:
        """Return the rates of `summary` as text: value and interval by metric."""
        found = self.summary(target, **options)
        return {
            metric: f"{line.value:.3g} ({line.low:.3g}-{line.high:.3g})"
            for (metric, _), line in found.iterrows()
            if metric not in LATENCIES
        }


def _line(metric: str, statistic: str, value: float, resampled: np.ndarray) -> dict:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail], method="inverted_cdf")  # supports infinite values
    return {"metric": metric, "statistic": statistic, "value": float(value), "low": float(low), "high": float(high)}


def _latency_lines(metric: str, values: np.ndarray, owners: np.ndarray, weights: np.ndarray) -> list[dict]:
    """Return lines of mean and quantiles. weights: draws of each request, [resamples, requests]."""
    if not len(values):
        return []
    sums, sizes = (np.bincount(owners, each, weights.shape[1]) for each in (values, None))
    infinite = not np.isfinite(values).all()
    means = np.full(len(weights), np.inf) if infinite else weights @ sums / np.maximum(weights @ sizes, 1e-12)
    lines = [_line(metric, "mean", values.mean(), means)]
    whole = _quantiles(values, owners, np.ones((1, weights.shape[1])), QUANTILES.values())[0]
    found = _quantiles(values, owners, weights, QUANTILES.values())
    return lines + [
        _line(metric, name, value, each) for name, value, each in zip(QUANTILES, whole, found.T, strict=True)
    ]


def _quantiles(values: np.ndarray, owners: np.ndarray, weights: np.ndarray, shares: Iterable[float]) -> np.ndarray:
    """Return the quantiles at these shares, [resamples, shares]. Each value is weighted by the draws of its owner."""
    order = np.argsort(values, kind="stable")
    values, owners = values[order], owners[order]
    shares, found = np.array(list(shares)), []
    for counts in weights:
        until = counts[owners].cumsum()
        places = np.searchsorted(until, shares * until[-1] * (1 - 1e-12)) if len(values) else None
        found.append(np.full(len(shares), np.nan) if places is None else values[np.minimum(places, len(values) - 1)])
    return np.array(found)


def _block_counts(n: int, resamples: int, generator: np.random.Generator) -> np.ndarray:
    """Return the draws of each of n requests, [resamples, n], by a circular bootstrap of √n consecutive requests."""
    size = int(np.ceil(np.sqrt(n)))
    starts = generator.integers(n, size=(resamples, -(-n // size)))
    drawn = (starts[..., None] + np.arange(size)).reshape(resamples, -1) % n
    counts = np.zeros((resamples, n))
    np.add.at(counts, (np.arange(resamples)[:, None], drawn), 1)
    return counts
