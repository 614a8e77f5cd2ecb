"""Kernel timelines joined to decode steps: which kernel ran when, for which phase of which step, and when nothing ran.

    with profile() as prof:
        generate(pair, prompts, max_new_tokens=32)
    prof.phases                         # time, kernels and gaps per phase
    prof.totals().head(10)              # the kernels that take longest
    prof.save("timeline.json.gz")       # opens in ui.perfetto.dev; Profile.load reads it back

What a *kernel* is depends on the device. On a GPU: what ran there, copies and fills included. On a CPU: an operator
called from Python; what it calls in turn is part of it. Everything is derived from the Chrome trace that torch writes,
so that a recorded timeline is explored on a machine without the GPU exactly as a fresh one.

The engine announces its phases (`Session.on_phase`); only while a profile is taken does anyone listen.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import pandas as pd
import torch
from torch.profiler import ProfilerActivity, record_function

from bass_core.environment import write_whole
from bass_core.loop.phases import FIRST
from bass_core.loop.trace import Trace
from bass_core.session import Session
from bass_lab.measure import kernel_events
from bass_lab.provenance import describe_environment

PHASES = ("prefill", "plan", "draft", "verify", "commit")
COUNTS = ("rows", "k", "drafted", "accepted", "emitted")


class Profile:
    """What ran during a `profile` block, or in a loaded one. Times are milliseconds since the first phase began.

    about: device, dtype, versions and commit of where it was taken. The properties raise ValueError as long as the
    block has not ended, and where no step ran in it.
    """

    def __init__(self):
        self.about: dict = {}
        self._trace = b""  # torch's Chrome trace, gzipped
        self._steps = pd.DataFrame()

    @property
    def on_gpu(self) -> bool:
        """Kernels are a GPU's; otherwise they are operators on a CPU."""
        return self.about["device_type"] == "cuda"

    @cached_property
    def kernels(self) -> pd.DataFrame:
        """One line per kernel: step, phase (missing: launched outside a step), name, start_ms, duration_ms, launch_ms
        (when the host launched it; on a CPU when it started), lane (the stream, or the thread)."""
        ranges, found = self._joined
        table = ranges[["step", "phase"]].reindex(found.owner).reset_index(drop=True).astype({"step": "Int64"})
        return table.join(found.drop(columns="owner"))

    @cached_property
    def spans(self) -> pd.DataFrame:
        """One line per step and phase: step, phase, kind, start_ms, duration_ms, kernels (how many), busy_ms (some
        kernel of the phase ran) and gap_ms (the rest: Python, launching, waiting); host_start_ms and host_ms, when and
        how long the host was at it.

        On a CPU a span is the phase's own time. A GPU runs behind the host: there a phase ends with the last kernel
        that it launched, and the next one begins; a step begins and ends with the host's, or later.
        """
        ranges, found = self._joined
        spans = kernel_events.gpu_spans(ranges, found) if self.on_gpu else ranges
        spans = spans[["step", "phase", "start_ms", "end_ms"]].copy()
        of_range = dict(list(found.groupby("owner")))
        parts = [of_range.get(place, found[:0]) for place in spans.index]
        edges = zip(parts, spans.start_ms, spans.end_ms, strict=True)
        spans["kernels"] = [len(part) for part in parts]
        spans["busy_ms"] = [
            kernel_events.busy_time(part.start_ms.clip(low, high), (part.start_ms + part.duration_ms).clip(low, high))
            for part, low, high in edges
        ]
        spans.insert(2, "kind", self._steps.kind.reindex(spans.step).to_numpy())
        spans.insert(4, "duration_ms", spans.end_ms - spans.start_ms)
        spans["gap_ms"] = spans.duration_ms - spans.busy_ms
        spans["host_start_ms"] = ranges.start_ms
        spans["host_ms"] = ranges.end_ms - ranges.start_ms
        return spans.drop(columns="end_ms")

    @cached_property
    def steps(self) -> pd.DataFrame:
        """One line per step, in the order in which they ran, the index of all other tables' `step`: run (which
        `generate` or Session) and number (its `Trace.steps.step`), kind, what the trace says summed over the rows
        (rows, drafted, accepted, emitted; k the longest; missing with trace="off"), start_ms, duration_ms."""
        ends = self.spans.assign(end_ms=self.spans.start_ms + self.spans.duration_ms).groupby("step")
        start = ends.start_ms.min()
        return self._steps.assign(start_ms=start, duration_ms=ends.end_ms.max() - start)

    @cached_property
    def phases(self) -> pd.DataFrame:
        """One line per kind of step and phase, mean over steps: ms, share (of the kind's time), kernels, busy_ms,
        gap_ms, gap_share (of the phase's time), host_ms."""
        groups = self.spans.groupby(["kind", "phase"], sort=False)
        table = groups[["duration_ms", "kernels", "busy_ms", "gap_ms", "host_ms"]].mean()
        table = table.rename(columns={"duration_ms": "ms"})
        table.insert(1, "share", table.ms / table.groupby("kind").ms.transform("sum"))
        table.insert(5, "gap_share", (table.gap_ms / table.ms).fillna(0.0))  # a GPU may spend no time on planning
        order = [(kind, phase) for kind in ("prefill", "decode") for phase in PHASES]
        return table.reindex([key for key in order if key in table.index])

    def totals(self, by: Sequence[str] = ("phase", "name"), kind: str = "decode") -> pd.DataFrame:
        """Kernels of decode (or prefill) steps, grouped: count, total_ms, share (of all such kernels' time), mean_us;
        longest first."""
        steps = self.steps.index[self.steps.kind == kind]
        times = self.kernels[self.kernels.step.isin(steps)].groupby(list(by)).duration_ms
        table = pd.DataFrame({"count": times.size(), "total_ms": times.sum(), "mean_us": 1e3 * times.mean()})
        table.insert(2, "share", table.total_ms / table.total_ms.sum())
        return table.sort_values("total_ms", ascending=False)

    def save(self, path: str | Path) -> None:
        """Write a Chrome trace (gzipped where the name ends in .gz), for ui.perfetto.dev and `Profile.load`.

        It holds every event of torch's trace and no host name. `distributedInfo` and names for all lanes are added:
        viewers that were made for many devices refuse a trace without.
        """
        document = self._document()
        named = _lane_names(document["traceEvents"])
        steps = self._steps.astype(object).where(self._steps.notna(), None).to_dict("list")
        document |= {
            "traceEvents": named + document["traceEvents"],
            "distributedInfo": document.get("distributedInfo", {"rank": 0, "world_size": 1}),
            "bass": {"about": self.about, "steps": steps},
        }
        text = json.dumps(document, allow_nan=False).encode()
        write_whole(path, gzip.compress(text) if Path(path).suffix == ".gz" else text)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read what `save` wrote. Raises ValueError for another file."""
        data = Path(path).read_bytes()
        text = gzip.decompress(data) if Path(path).suffix == ".gz" else data
        document = json.loads(text)
        if not isinstance(document, dict) or "bass" not in document:
            raise ValueError(f"{path} was not written by Profile.save: its steps are missing (no field 'bass')")
        return cls()._fill(text, pd.DataFrame(document["bass"]["steps"]), document["bass"]["about"])

    def _fill(self, text: bytes, steps: pd.DataFrame, about: dict) -> Profile:
        self._trace, self.about = gzip.compress(text, 1), about
        self._steps = steps.rename_axis("step").astype(dict.fromkeys(COUNTS, "Int64")) if len(steps) else steps
        return self

    def _document(self) -> dict:
        if not self._trace:
            raise ValueError("nothing is recorded yet: look at a profile after its with block has ended")
        # What is not a number is no JSON either, and no viewer would read it.
        text = gzip.decompress(self._trace).decode(errors="replace")
        document = json.loads(text, parse_constant=lambda name: None)
        return {name: value for name, value in document.items() if name not in ("host_name", "traceName")}

    @cached_property
    def _joined(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        events = self._document()["traceEvents"]
        if self._steps.empty:
            raise ValueError("no step ran in this profile: call generate or Session.step inside its with block")
        ranges, kernels = kernel_events.join(events, self.on_gpu)
        if self.on_gpu and kernels.empty:
            raise ValueError(
                "the models ran on a GPU, but torch's profiler recorded no kernel there: another process may hold the "
                "GPU's counters, or CUPTI is missing; KINETO_LOG_LEVEL=0 in the environment says more"
            )
        return ranges, kernels


@contextmanager
def profile() -> Iterator[Profile]:
    """Record what runs while `generate` is called, or a Session steps, inside the with block (in this thread).

    Yields a Profile that can be used when the block has ended. Recording costs time (lesson 06 measures it) and
    memory: on a CPU a decode step of the embedded pair is some 7,000 events of 250 bytes. Profile tens of steps, not
    thousands, and after a first call outside, which has costs of its own. On a GPU no step is launched before the last
    one is read meanwhile, so that phases are told apart. Raises RuntimeError if a profiler runs.
    """
    if Session.on_phase is not None or torch.autograd._profiler_enabled():
        raise RuntimeError("a profiler is running already, and profiles do not nest: end its with block first")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    phases, result = _Phases(), Profile()
    with _quiet(), torch.profiler.profile(activities=activities) as recorder:
        Session.on_phase = phases.enter
        try:
            yield result
        finally:
            Session.on_phase = None
            phases.close()
    with tempfile.TemporaryDirectory() as folder:
        recorder.export_chrome_trace(f"{folder}/trace.json")
        text = Path(folder, "trace.json").read_bytes()
    result._fill(text, phases.table(), phases.about | describe_environment(phases.device))


@contextmanager
def _quiet() -> Iterator[None]:
    """torch 2.13 writes two lines to stderr for every profile, at any level below this one, read when the first begins.

    What goes wrong is noticed without: `Profile` says so where kernels are missing.
    """
    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("KINETO_LOG_LEVEL", None)


class _Phases:
    """Turns the phases that sessions announce into ranges of torch's profiler, and counts the steps."""

    def __init__(self):
        self.about = {"device_type": "cpu", "dtype": ""}
        self.device = torch.device("cpu")
        self._thread = threading.get_ident()  # torch records this one
        self._steps: list[dict] = []
        self._traces: list[Trace] = []
        self._range: record_function | None = None

    def enter(self, session: Session, number: int, phase: str) -> None:
        if threading.get_ident() != self._thread:
            return
        self.close()
        if phase in FIRST:
            if not any(session.trace is trace for trace in self._traces):
                self._traces.append(session.trace)
            run = next(place for place, trace in enumerate(self._traces) if trace is session.trace)
            kind = "prefill" if phase == "prefill" else "decode"
            self._steps.append({"run": run, "number": number, "kind": kind})
            target = session.pair.target
            self.device = target.device
            self.about = {"device_type": target.device.type, "dtype": str(target.dtype).removeprefix("torch.")}
        if phase:
            self._range = record_function(kernel_events.range_name(len(self._steps) - 1, phase))
            self._range.__enter__()

    def close(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def table(self) -> pd.DataFrame:
        """The steps with what their traces say."""
        if not self._steps:
            return pd.DataFrame()
        steps = pd.DataFrame(self._steps)
        parts = [trace.steps.assign(run=run) for run, trace in enumerate(self._traces)]
        sums = {"rows": ("row", "size"), "k": ("k", "max")} | {name: (name, "sum") for name in COUNTS[2:]}
        counts = pd.concat(parts).rename(columns={"step": "number"}).groupby(["run", "number"]).agg(**sums)
        table = steps.join(counts.astype("Int64"), on=["run", "number"])
        # A step that was interrupted leaves its number to the next one.
        table.loc[steps.duplicated(["run", "number"], keep="last"), list(COUNTS)] = pd.NA
        return table


def _lane_names(events: Sequence[dict]) -> list[dict]:
    """Metadata events for processes and threads with slices that torch left without."""
    named = {(e["name"], e["pid"], e.get("tid") if "thread" in e["name"] else 0) for e in events if e["ph"] == "M"}
    lanes = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    wanted = []
    for process, thread in sorted(lanes, key=str):
        wanted += [
            ("process_name", process, 0, {"name": str(process)}),
            ("process_labels", process, 0, {"labels": ""}),
            ("process_sort_index", process, 0, {"sort_index": 0}),
            ("thread_name", process, thread, {"name": str(thread)}),
        ]
    unique = {key[:3]: key for key in wanted}
    return [
        {"ph": "M", "name": name, "pid": process, "tid": thread, "ts": 0, "args": arguments}
        for (name, process, thread), (*_, arguments) in unique.items()
        if (name, process, thread) not in named
    ]
