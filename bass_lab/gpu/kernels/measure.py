"""Measure a case: check every kernel against float64, then time the correct kernels interleaved."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bass_core.environment import synchronize
from bass_lab.gpu.command import DeviceLost
from bass_lab.gpu.kernels import tensors
from bass_lab.gpu.kernels.cases import Case
from bass_lab.gpu.kernels.peers import PEERS, Prepared, Unavailable
from bass_lab.gpu.kernels.tensors import TOLERANCES
from bass_lab.gpu.kernels.timing import Timer, Timing
from bass_lab.measure.records import MOST_PERCENT_OF_COPY

TIMES = ("us", "us_plan_share", "gb_per_s", "percent_of_copy", "captured", "calls", "replays")  # null with a reason


@dataclass
class KernelOutcome:
    """Times of a kernel, or the reason of their absence. `shared`: time of work that is done once for all layers."""

    kernel: str
    reason: str | None = None
    error: float | None = None
    timing: Timing | None = None
    shared: Timing | None = None
    size: int | None = None  # bytes to read, if kernels of a case differ

    def fields(self, gb: float, copy: float, layers: int = 1) -> dict:
        """Return the fields of a record. gb: gigabytes to read. copy: bytes per second of a copy."""
        timing, found = self.timing, {"error": self.error, "reason": self.reason} | dict.fromkeys(TIMES)
        if timing is None:
            return found
        share = self.shared.us / layers if self.shared else None
        us = timing.us + (share or 0.0)
        percent = 100 * gb / us * 1e15 / copy
        if percent > MOST_PERCENT_OF_COPY:
            return found | {"reason": f"implausible: {us:.2f} µs would be {percent:.0f}% of the copy bandwidth"}
        times = us, share, gb / us * 1e6, percent, timing.captured, timing.calls, timing.replays
        return found | dict(zip(TIMES, times, strict=True))


def measure(case: Case, kernels: Sequence[str], seed: int, timer: Timer) -> list[KernelOutcome]:
    """Return the outcomes of all kernels, timed interleaved. Raises DeviceLost."""
    device = timer.device
    timer.new_case()
    sets = tensors.number_of_sets(case.kv_bytes(seed), device)
    if reason := _too_large(case, sets, device, seed):
        return [KernelOutcome(kernel, reason) for kernel in kernels]
    try:
        inputs = tensors.make(case, device, seed, sets)
        wanted = tensors.expected(inputs)
    except torch.OutOfMemoryError as error:
        return [KernelOutcome(kernel, f"skipped: {_described(error, [])}") for kernel in kernels]
    return timed({kernel: partial(PEERS[kernel], inputs) for kernel in kernels}, timer, wanted)


def timed(
    kernels: dict[str, Callable[[], Prepared]], timer: Timer, wanted: Tensor | None = None
) -> list[KernelOutcome]:
    """Return the outcomes of all kernels, timed interleaved. wanted: common float64 result. Raises DeviceLost."""
    outcomes = [attempt(kernel, prepare, timer, wanted) for kernel, prepare in kernels.items()]
    try:
        timer.measure([each for outcome in outcomes for each in (outcome.timing, outcome.shared) if each is not None])
    except Exception as error:  # each kernel ran before, so the device is broken
        raise DeviceLost("unknown", _described(error, [])) from error
    return outcomes


def _too_large(case: Case, sets: int, device: torch.device, seed: int) -> str | None:
    """Return the reason to skip a case that does not fit: KV sets and copies in the peers' layouts, or None."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info()
    needed = 2 * sets * case.cache_bytes(seed)
    if needed <= 0.9 * free:
        return None
    return f"skipped: {sets} KV sets and copies of them take {needed / 1e9:.0f} GB, {free / 1e9:.0f} GB are free"


def attempt(kernel: str, prepare: Callable[[], Prepared], timer: Timer, wanted: Tensor | None = None) -> KernelOutcome:
    """Check a kernel, called and replayed, and prepare its timing."""
    outcome = KernelOutcome(kernel)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            prepared = prepare()
            outcome.size, wanted = prepared.size, wanted if prepared.wanted is None else prepared.wanted
            if _right(outcome, prepared.calls[0](), wanted):
                timing = timer.prepare(prepared.calls)
                again = timing.replayed()
                if again is None or _right(outcome, again, wanted):
                    outcome.timing = timing
                    outcome.shared = timer.prepare([prepared.shared] * timer.calls) if prepared.shared else None
        except Unavailable as unavailable:
            outcome.reason = str(unavailable)
        except Exception as error:  # a peer may raise anything; record it
            outcome.timing, outcome.reason = None, _described(error, [str(warning.message) for warning in heard])
    if outcome.timing is None:
        try:
            synchronize(timer.device)
        except Exception:
            raise DeviceLost(kernel, outcome.reason or "") from None
    return outcome


def _right(outcome: KernelOutcome, out: Tensor, wanted: Tensor) -> bool:
    error, allowed = tensors.relative_error(out, wanted), TOLERANCES[out.dtype]
    if error <= allowed:
        outcome.error = max(error, outcome.error or 0.0)
        return True
    outcome.reason = f"wrong: off by {error:.1e} of the float64 result, allowed {allowed:.1e}"
    return False


def _described(error: Exception, warned: list[str]) -> str:
    """Return an error and earlier warnings in one line. SDPA gives a backend's reason to refuse as a warning."""
    lines = [f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]]
    for text in dict.fromkeys(warned):
        if text.strip() and "runtime disabled" not in text and "not used because" not in text:
            lines.append(text.strip().splitlines()[0].split(" (Triggered")[0])
    return " | ".join(lines)[:600]
