"""Join the events of torch's Chrome trace to the phases of decode steps: each kernel to the phase that launched it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pandas as pd

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of torch's trace
LAUNCHES = ("cuda_runtime", "cuda_driver")
_RANGE = re.compile(r"bass step (\d+): (\w+)")
_ROUNDING = 0.002  # µs; the trace rounds times to nanoseconds


def range_name(step: int, phase: str) -> str:
    """Return the name of a phase's range in the trace."""
    return f"bass step {step}: {phase}"


def join(events: Sequence[dict], on_gpu: bool) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the phases' ranges on the host, and the kernels with the index of the launching range (`owner`).

    events: of a Chrome trace as torch writes it (times in µs). A GPU kernel belongs to the phase during which the host
    launched the kernel, even if the kernel ran later. Launch and kernel share a `correlation`; all kernels of a CUDA
    graph have the correlation of the replay call. If the trace lacks the launch, the operator with the kernel's
    `External id` is used instead. owner -1: no phase launched the kernel.

    Columns of ranges: step, phase, thread, start_ms, end_ms. Columns of kernels: owner, name, start_ms, duration_ms,
    launch_ms, lane. Times are in milliseconds since the start of the first range.
    """
    table = pd.DataFrame(
        [
            (e["cat"], e["name"], e["pid"], e["tid"], float(e["ts"]), float(e.get("dur", 0)), e.get("args") or {})
            for e in events
            if e.get("ph") == "X" and "cat" in e
        ],
        columns=["category", "name", "process", "thread", "start", "duration", "args"],
    )
    ranges = _ranges(table[table.category == "user_annotation"])
    operators = table[table.category == "cpu_op"]
    kernels = _launched(table, operators) if on_gpu else _outermost(operators)
    owner = _owners(kernels.launch.to_numpy(), kernels.host_thread.to_numpy(), ranges)
    zero = ranges.start.min()
    found = pd.DataFrame(
        {
            "owner": owner,
            "name": kernels.name,
            "start_ms": (kernels.start - zero) / 1e3,
            "duration_ms": kernels.duration / 1e3,
            "launch_ms": (kernels.launch - zero) / 1e3,
            "lane": kernels.lane,
        }
    )
    ranges = ranges.assign(start_ms=(ranges.start - zero) / 1e3, end_ms=(ranges.end - zero) / 1e3)
    return ranges.drop(columns=["start", "end"]), found.sort_values("start_ms", ignore_index=True)


def _ranges(annotations: pd.DataFrame) -> pd.DataFrame:
    """Return step, phase, thread, start and end of this project's annotations, by start."""
    matches = annotations.name.map(_RANGE.fullmatch)
    ours = annotations[matches.notna()].sort_values("start")
    parts = [matches[place].groups() for place in ours.index]
    return pd.DataFrame(
        {
            "step": np.array([step for step, _ in parts], dtype=int),
            "phase": [phase for _, phase in parts],
            "thread": ours.thread.to_numpy(),
            "start": ours.start.to_numpy(),
            "end": (ours.start + ours.duration).to_numpy(),
        }
    )


def _outermost(operators: pd.DataFrame) -> pd.DataFrame:
    """Return the operators that no other operator of the same thread contains."""
    ordered = operators.sort_values(["thread", "start", "duration"], ascending=[True, True, False])
    ends = (ordered.start + ordered.duration).groupby(ordered.thread)
    reached = ends.cummax().groupby(ordered.thread).shift(fill_value=-np.inf)
    found = ordered[ordered.start >= reached - _ROUNDING]
    lanes = {thread: f"CPU, thread {place}" for place, thread in enumerate(found.thread.unique())}
    return found.assign(launch=found.start, host_thread=found.thread, lane=found.thread.map(lanes))


def _launched(table: pd.DataFrame, operators: pd.DataFrame) -> pd.DataFrame:
    """Return the GPU's events, each with the time and thread of the launch (NaN and None if unknown)."""
    found = table[table.category.isin(ON_DEVICE)]
    calls = _by_id(table[table.category.isin(LAUNCHES)], "correlation")
    callers = _by_id(operators, "External id")
    launches = [
        calls.get(args.get("correlation")) or callers.get(args.get("External id")) or (np.nan, None)
        for args in found.args
    ]
    return found.assign(
        launch=np.array([start for start, _ in launches], dtype=float),
        host_thread=[thread for _, thread in launches],
        lane=[f"GPU {args.get('device', 0)}, stream {args.get('stream', 0)}" for args in found.args],
    )


def _by_id(events: pd.DataFrame, name: str) -> dict[int, tuple[float, object]]:
    """Return start and thread of each event by the id with this name."""
    rows = zip(events.args, events.start, events.thread, strict=True)
    return {args[name]: (start, thread) for args, start, thread in rows if name in args}


def _owners(times: np.ndarray, threads: np.ndarray, ranges: pd.DataFrame) -> np.ndarray:
    """Return the index of the range open on that thread at each time, or -1. Ranges of a thread do not overlap."""
    owner = np.full(len(times), -1)
    for thread, part in ranges.groupby("thread"):
        place = np.searchsorted(part.start, times, side="right") - 1  # NaN sorts last, after every end
        inside = (threads == thread) & (place >= 0) & (times < part.end.to_numpy()[place])
        owner[inside] = part.index.to_numpy()[place[inside]]
    return owner


def gpu_spans(ranges: pd.DataFrame, kernels: pd.DataFrame) -> pd.DataFrame:
    """Return the ranges shifted to the times at which the GPU ran their kernels, without overlap."""
    last = (kernels.start_ms + kernels.duration_ms).groupby(kernels.owner).max()
    starts, ends, reached = [], [], -np.inf
    for place, current in ranges.iterrows():
        is_first = place == 0 or ranges.step[place - 1] != current.step
        is_last = place + 1 == len(ranges) or ranges.step[place + 1] != current.step
        start = max(reached, current.start_ms) if is_first else reached
        reached = max(start, last.get(place, start), current.end_ms if is_last else start)
        starts.append(start)
        ends.append(reached)
    return ranges.assign(start_ms=starts, end_ms=ends)


def busy_time(starts: np.ndarray, ends: np.ndarray) -> float:
    """Return the total length of the union of intervals. Intervals may overlap and need no order."""
    order = np.argsort(starts, kind="stable")
    starts, ends = np.asarray(starts)[order], np.asarray(ends)[order]
    reached = np.maximum.accumulate(np.concatenate([[-np.inf], ends]))[:-1]
    return float(np.clip(ends - np.maximum(starts, reached), 0, None).sum())
