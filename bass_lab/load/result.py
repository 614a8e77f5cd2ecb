"""What became of a workload: when every request was begun, answered and done, and what that says of the service.

| metric | of a request, in milliseconds |
| --- | --- |
| `queue_ms` | from its arrival until the step that prefilled it began |
| `first_ms` | from its arrival to its first token |
| `between_ms` | from one token to the next, mean over the request: first token to last, by the tokens after the first |
| `gap_ms` | between two pieces of its text; a piece is what one step brought, a token or several |
| `end_ms` | from its arrival to its end |

A drafting step brings several tokens at once. `between_ms` says how fast the text grows, `gap_ms` how long it stands
still; the 99th percentile of the first is over requests, that of the second over all pieces of all requests.
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
SPANS = 24  # parts of the time that rates are resampled by


@dataclass(frozen=True)
class Target:
    """Milliseconds by metric, at most, for this share of the requests (of `gap_ms`: of the pieces). None: no limit."""

    between_ms: float | None = None
    first_ms: float | None = None
    end_ms: float | None = None
    gap_ms: float | None = None
    share: float = 0.99

    def __post_init__(self):
        if not self.limits or not all(limit > 0 for limit in self.limits.values()) or not 0 < self.share <= 1:
            raise ValueError(f"a target names milliseconds > 0 for a metric or more, and a share in (0, 1]; got {self}")

    @property
    def limits(self) -> dict[str, float]:
        """The milliseconds that are asked for, by metric."""
        found = {name: getattr(self, name) for name in ("between_ms", "first_ms", "end_ms", "gap_ms")}
        return {name: limit for name, limit in found.items() if limit is not None}


@dataclass(frozen=True, eq=False)
class LoadRun:
    """A workload that was served.

    requests: a line per request, times in seconds since the start: `REQUESTS`; started, first: NaN where unknown.
    pieces: a line per piece of text: request, at (seconds), tokens. steps: a line per step, `STEPS`: prefill or decode,
    rows, planned k (mean), tokens drafted, accepted and emitted; empty where unknown. meta: what served it, and how.
    """

    requests: pd.DataFrame
    pieces: pd.DataFrame
    steps: pd.DataFrame
    meta: dict = field(default_factory=dict)

    def __post_init__(self):
        for name, columns in (("requests", REQUESTS), ("pieces", PIECES), ("steps", STEPS)):
            if missing := [column for column in columns if column not in getattr(self, name)]:
                raise ValueError(f"{name} lacks {', '.join(missing)}")
        for name, columns in (("requests", ("started", "first", "ended", "deadline")), ("pieces", PIECES[1:])):
            numbers = getattr(self, name).astype(dict.fromkeys(columns, float))  # of an empty table nobody knows
            object.__setattr__(self, name, numbers)

    @cached_property
    def latencies(self) -> pd.DataFrame:
        """A line per request: request, queue_ms, first_ms, between_ms, end_ms (NaN: none), late (its client left
        first)."""
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
        """A line per piece after a request's first: request, gap_ms."""
        pieces = self.pieces.sort_values(["request", "at"], kind="stable")
        gaps = 1e3 * pieces.groupby("request")["at"].diff()
        return pd.DataFrame({"request": pieces.request, "gap_ms": gaps}).dropna()

    def counted(self, warm_up: float = 0.1) -> np.ndarray:
        """bool, of the requests that count: all but the first share `warm_up` of them, whom an idle server meets."""
        if not 0 <= warm_up < 1:
            raise ValueError(f"warm_up is a share of the requests in [0, 1), got {warm_up}")
        return np.arange(len(self.requests)) >= int(warm_up * len(self.requests))

    def met(self, target: Target) -> np.ndarray:
        """Return bool [requests]: ended by themselves, in time and within the target's limits (no longer gap)."""
        longest = self.gaps.groupby("request").gap_ms.max().reindex(self.requests.request).to_numpy()
        own = self.latencies.assign(gap_ms=longest)
        good = self.requests.finish_reason.isin(FINISHED).to_numpy() & ~own.late.to_numpy()
        for name, limit in target.limits.items():
            good &= ~(own[name].to_numpy() > limit)
        return good

    def quantile(self, metric: str, share: float, warm_up: float = 0.1) -> float:
        """Return the least value that this share of the requests (of `gap_ms`: of the pieces) does not exceed. A
        missing value counts as infinite."""
        counted = self.counted(warm_up)
        values, owners = self._values(metric, counted)
        return float(_quantiles(values, owners, np.ones((1, int(counted.sum()))), [share])[0, 0])

    def holds(self, target: Target, warm_up: float = 0.1) -> bool:
        """Whether the target is kept in every metric that it names."""
        return all(self.quantile(name, target.share, warm_up) <= limit for name, limit in target.limits.items())

    def summary(
        self, target: Target | None = None, *, warm_up: float = 0.1, resamples: int = RESAMPLES, seed: int = 0
    ) -> pd.DataFrame:
        """By metric and statistic: value, and its 95% interval low … high (bootstrap).

        Latencies: mean, p50, p95, p99; blocks of √n consecutive requests are drawn. Rates, from the first counted
        arrival to the last end, resampled by parts of that time: requests_per_s, tokens_per_s, goodput_per_s (met the
        target), batch (rows decoding). late: share whose client left first; tokens_per_step: of a row. Unknown lines
        are missing. warm_up: share of the first requests that are left out.
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
        """A metric's values, and which of the counted requests each is of."""
        if metric == "gap_ms":
            places = np.full(len(counted), -1)
            places[counted] = np.arange(counted.sum())
            owners = places[pd.Index(self.requests.request).get_indexer(self.gaps.request)]
            return self.gaps.gap_ms.to_numpy()[owners >= 0], owners[owners >= 0]
        if metric not in LATENCIES:
            raise ValueError(f"metric must be one of {', '.join(LATENCIES)}; got {metric!r}")
        values = self.latencies[metric].to_numpy()
        if metric != "between_ms" and np.isfinite(values).any():  # one token has nothing between
            values = np.where(np.isnan(values), np.inf, values)
        known = counted & ~np.isnan(values)
        return values[known], (counted.cumsum() - 1)[known]

    def _amounts(self, counted: np.ndarray, target: Target | None) -> dict[str, np.ndarray]:
        """What there was in each span of the time, and how much of what it is divided by: [spans, 2] by metric."""
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
        """The latencies of `summary` for people, a line per metric: mean, and percentiles with their intervals."""
        lines: dict[str, dict[str, str]] = {}
        for (metric, statistic), found in self.summary(target, **options).iterrows():
            if metric in LATENCIES:
                interval = "" if statistic == "mean" else f" ({found.low:.3g}-{found.high:.3g})"
                lines.setdefault(metric, {"ms": metric.removesuffix("_ms")})[statistic] = f"{found.value:.3g}{interval}"
        return list(lines.values())

    def rates(self, target: Target | None = None, **options) -> dict[str, str]:
        """The rest of `summary` for people: by metric its value and interval."""
        found = self.summary(target, **options)
        return {
            metric: f"{line.value:.3g} ({line.low:.3g}-{line.high:.3g})"
            for (metric, _), line in found.iterrows()
            if metric not in LATENCIES
        }


def _line(metric: str, statistic: str, value: float, resampled: np.ndarray) -> dict:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail], method="inverted_cdf")  # takes infinite ones
    return {"metric": metric, "statistic": statistic, "value": float(value), "low": float(low), "high": float(high)}


def _latency_lines(metric: str, values: np.ndarray, owners: np.ndarray, weights: np.ndarray) -> list[dict]:
    """Mean and quantiles of values, whose requests are drawn so often: weights [resamples, requests]."""
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
    """The least values that these shares do not exceed, [resamples, shares]: values count as often as their owners."""
    order = np.argsort(values, kind="stable")
    values, owners = values[order], owners[order]
    shares, found = np.array(list(shares)), []
    for counts in weights:
        until = counts[owners].cumsum()
        places = np.searchsorted(until, shares * until[-1] * (1 - 1e-12)) if len(values) else None
        found.append(np.full(len(shares), np.nan) if places is None else values[np.minimum(places, len(values) - 1)])
    return np.array(found)


def _block_counts(n: int, resamples: int, generator: np.random.Generator) -> np.ndarray:
    """How often each of n requests is drawn, [resamples, n]: blocks of √n consecutive ones, in a circle."""
    size = int(np.ceil(np.sqrt(n)))
    starts = generator.integers(n, size=(resamples, -(-n // size)))
    drawn = (starts[..., None] + np.arange(size)).reshape(resamples, -1) % n
    counts = np.zeros((resamples, n))
    np.add.at(counts, (np.arange(resamples)[:, None], drawn), 1)
    return counts
