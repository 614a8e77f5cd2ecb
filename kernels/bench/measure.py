"""One case: every kernel is checked against float64, then all that are right are timed together."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench import inputs as cases
from bench import schema, timing
from bench.inputs import TOLERANCES, Inputs
from bench.peers import PEERS, Unavailable
from bench.shapes import Case

Clock = timing.GraphClock | timing.FakeClock


class DeviceLost(Exception):
    """A kernel broke the CUDA context: nothing more can be measured in this process."""

    def __init__(self, kernel: str, reason: str):
        super().__init__(f"{kernel} broke the device: {reason}")
        self.kernel, self.reason = kernel, reason


@dataclass
class Outcome:
    """A kernel's runs, or the reason why there are none. `shared`: the work that layers divide."""

    kernel: str
    reason: str | None = None
    error: float | None = None
    run: timing.Run | None = None
    shared: timing.Run | None = None


def measure(case: Case, kernels: Sequence[str], device: torch.device, seed: int, clock: Clock) -> list[Outcome]:
    """Outcomes of all kernels, timed in turn. Raises DeviceLost."""
    clock.new_case()
    sets = cases.number_of_sets(case, seed) if device.type == "cuda" else 2
    if reason := _too_large(case, sets, device, seed):
        return [Outcome(kernel, reason) for kernel in kernels]
    try:
        inputs = cases.make(case, device, seed, sets)
        wanted = cases.expected(inputs)
    except torch.OutOfMemoryError as error:
        return [Outcome(kernel, f"skipped: {_described(error, [])}") for kernel in kernels]
    outcomes = [attempt(kernel, inputs, wanted, clock) for kernel in kernels]
    try:
        clock.measure([run for outcome in outcomes for run in (outcome.run, outcome.shared) if run is not None])
    except Exception as error:  # all of them ran before
        raise DeviceLost("unknown", _described(error, [])) from error
    return outcomes


def _too_large(case: Case, sets: int, device: torch.device, seed: int) -> str | None:
    """Why the case is skipped, if it does not fit: the KV sets, and as much again for peers that want their own."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info()
    needed = 2 * sets * case.cache_bytes(seed)
    if needed <= 0.9 * free:
        return None
    return f"skipped: {sets} KV sets and copies of them take {needed / 1e9:.0f} GB, {free / 1e9:.0f} GB are free"


def attempt(kernel: str, inputs: Inputs, wanted: Tensor, clock: Clock) -> Outcome:
    """Check a kernel, called and replayed, and make it ready to be timed."""
    outcome = Outcome(kernel)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            prepared = PEERS[kernel](inputs)
            if _right(outcome, prepared.calls[0](), wanted):
                run = clock.prepare(prepared.calls)
                again = timing.replayed(run)
                if again is None or _right(outcome, again, wanted):
                    outcome.run = run
                    outcome.shared = clock.prepare([prepared.shared] * timing.CALLS) if prepared.shared else None
        except Unavailable as unavailable:
            outcome.reason = str(unavailable)
        except Exception as error:  # whatever a foreign kernel raises is the answer
            outcome.run, outcome.reason = None, _described(error, [str(warning.message) for warning in heard])
    if outcome.run is None:
        try:
            clock.synchronize()
        except Exception:
            raise DeviceLost(kernel, outcome.reason or "") from None
    return outcome


def _right(outcome: Outcome, out: Tensor, wanted: Tensor) -> bool:
    error, allowed = cases.relative_error(out, wanted), TOLERANCES[out.dtype]
    if error <= allowed:
        outcome.error = max(error, outcome.error or 0.0)
        return True
    outcome.reason = f"wrong: off by {error:.1e} of the float64 result, allowed {allowed:.1e}"
    return False


def _described(error: Exception, warned: list[str]) -> str:
    """An error in one line, with what was warned before: SDPA says there why the backend asked for refuses."""
    lines = [f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]]
    for text in dict.fromkeys(warned):
        if text.strip() and "runtime disabled" not in text and "not used because" not in text:
            lines.append(text.strip().splitlines()[0].split(" (Triggered")[0])
    return " | ".join(lines)[:600]


def line(case: Case, outcome: Outcome, copy: float, clock: Clock, seed: int, environment: dict) -> dict:
    """The record of one kernel. copy: bytes per second."""
    gigabytes = case.kv_bytes(seed) / 1e9
    found = {
        "kernel": outcome.kernel,
        "model": case.model.name,
        "heads": case.model.heads,
        "kv_heads": case.model.kv_heads,
        "head_dim": case.model.head_dim,
        "batch": case.batch,
        "query_length": case.query_length,
        "kv_length": case.kv_length,
        "distribution": case.distribution,
        "total_kv": sum(case.lengths(seed)),
        "dtype": case.dtype,
        "gb": gigabytes,
        "seed": seed,
        "clock": clock.name,
        "copy_gb_per_s": copy / 1e9,
        "error": outcome.error,
        "reason": outcome.reason,
        **dict.fromkeys(schema.TIMES),
        **environment,
    }
    if outcome.run is None:
        return found
    share = outcome.shared.us / case.model.layers if outcome.shared else None
    us = outcome.run.us + (share or 0.0)
    percent = 100 * gigabytes / us * 1e15 / copy
    if percent > schema.MOST_PERCENT_OF_COPY:
        return found | {"reason": f"implausible: {us:.2f} µs would be {percent:.0f}% of the copy bandwidth"}
    return found | {
        "us": us,
        "us_plan_share": share,
        "gb_per_s": gigabytes / us * 1e6,
        "percent_of_copy": percent,
        "captured": outcome.run.captured,
        "calls": outcome.run.calls,
        "replays": outcome.run.replays,
    }
