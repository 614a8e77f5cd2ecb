"""One JSON line per kernel and case: its time, or the reason why there is none."""

from __future__ import annotations

import math

from bass_lab.gpu.kernels.cases import Case
from bass_lab.gpu.kernels.measure import Outcome
from bass_lab.measure import record_schema

SHAPE = ("heads", "kv_heads", "head_dim")  # of a `Workload`
CASE = ("model", "batch", "query_length", "kv_length", "distribution", "dtype")  # of a `Case`
TIMES = ("us", "us_plan_share", "gb_per_s", "percent_of_copy", "captured", "calls", "replays")  # null with a reason
# Reading alone may beat a copy's read and write by some percent; much more comes out of a cache.
MOST_PERCENT_OF_COPY = 125.0


def check(line: dict) -> None:
    """ValueError naming the field that is missing, of the wrong type, or contradicts another."""
    record_schema.check(line, "kernel")
    if line["reason"] is None:
        _check_timed(line)
    elif not line["reason"] or any(line[name] is not None for name in TIMES):
        raise ValueError(f"either a time or a reason, got us {line['us']!r} and reason {line['reason']!r}")


def _check_timed(line: dict) -> None:
    for name in ("error", *TIMES):
        if line[name] is None and name != "us_plan_share":
            raise ValueError(f"without a reason, {name} must be given")
    if line["us"] <= 0 or line["us"] < (line["us_plan_share"] or 0):
        raise ValueError(f"us must be positive and hold us_plan_share, got {line['us']!r}")
    if not math.isclose(line["gb_per_s"], line["gb"] / line["us"] * 1e6, rel_tol=1e-6):
        raise ValueError(f"gb_per_s is not gb / us: {line['gb_per_s']!r}")
    if not math.isclose(line["percent_of_copy"], 100 * line["gb_per_s"] / line["copy_gb_per_s"], rel_tol=1e-6):
        raise ValueError(f"percent_of_copy is not gb_per_s / copy_gb_per_s: {line['percent_of_copy']!r}")
    if line["percent_of_copy"] > MOST_PERCENT_OF_COPY:
        raise ValueError(f"{line['percent_of_copy']:.0f}% of the copy bandwidth: the KV sets were in a cache")


def of_case(case: Case) -> dict:
    """The fields of a line that name its case."""
    return {name: getattr(case, name) for name in CASE}


def line(case: Case, outcome: Outcome, copy: float, clock: str, seed: int, environment: dict) -> dict:
    """The record of one kernel. copy: bytes per second. clock: the kind of device that the times are of."""
    gigabytes, timing = case.kv_bytes(seed) / 1e9, outcome.timing
    found = {"schema": "kernel", "kernel": outcome.kernel}
    found |= of_case(case) | {name: getattr(case.work, name) for name in SHAPE}
    found |= {"total_kv": sum(case.lengths(seed)), "gb": gigabytes, "seed": seed, "clock": clock}
    found |= {"copy_gb_per_s": copy / 1e9, "error": outcome.error, "reason": outcome.reason}
    found |= dict.fromkeys(TIMES) | environment
    if timing is None:
        return found
    share = outcome.shared.us / case.work.layers if outcome.shared else None
    us = timing.us + (share or 0.0)
    percent = 100 * gigabytes / us * 1e15 / copy
    if percent > MOST_PERCENT_OF_COPY:
        return found | {"reason": f"implausible: {us:.2f} µs would be {percent:.0f}% of the copy bandwidth"}
    times = us, share, gigabytes / us * 1e6, percent, timing.captured, timing.calls, timing.replays
    return found | dict(zip(TIMES, times, strict=True))
