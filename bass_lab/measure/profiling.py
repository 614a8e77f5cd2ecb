"""Kernel timelines by decode step and phase: the kernels, their times, and the gaps between them.

    with profile() as prof:
        generate(pair, prompts, max_new_tokens=32)
    prof.phases                         # time, kernels and gaps per phase
    prof.totals().head(10)              # the kernels that take longest
    prof.save("timeline.json.gz")       # opens in ui.perfetto.dev; Profile.load reads it back

A *kernel* depends on the device. On a GPU, kernels include copies and fills. On a CPU, a kernel is an operator called
from Python, including nested operators. All tables come from torch's Chrome trace, so a saved timeline can be explored
on a machine without a GPU. The engine reports its phases to `Session.on_phase` only during a profile.
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
from bass_core.loading.model_pair import ModelPair
from bass_core.loop.phases import FIRST
from bass_core.loop.trace import Trace
from bass_core.session import Session
from bass_lab.measure import kernel_events
from bass_lab.provenance import describe_environment, describe_run

PHASES = ("prefill", "plan", "draft", "verify", "commit")
COUNTS = ("rows", "k", "drafted", "accepted", "emitted")


class Profile:
    """A recorded or loaded profile. Times are milliseconds since the first phase began.

    about: device, dtype, versions and commit of the recording. The properties raise ValueError until the `profile`
    block has ended, and for a block without steps.
    """

    def __init__(self):
        self.about: dict = {}
        self._trace = b""  # torch's Chrome trace, gzipped
        self._steps = pd.DataFrame()

    @property
    def on_gpu(self) -> bool:
        """True if kernels are GPU kernels, False if they are CPU operators."""
        return self.about["device_type"] == "cuda"

    @cached_property
    def kernels(self) -> pd.DataFrame:
        """One line per kernel: step, phase (missing: launched outside a step), name, start_ms, duration_ms, launch_ms
        (time of the launch on the host; on a CPU the start), lane (stream or thread)."""
        ranges, found = self._joined
        table = ranges[["step", "phase"]].reindex(found.owner).reset_index(drop=True).astype({"step": "Int64"})
        return table.join(found.drop(columns="owner"))

    @cached_property
    def spans(self) -> pd.DataFrame:
        """One line per step and phase: step, phase, kind, start_ms, duration_ms, kernels (count), busy_ms (a kernel of
        the phase ran) and gap_ms (the rest: Python, launching, waiting); host_start_ms and host_ms (start and duration
        of the phase on the host).

        On a CPU, a span is the time of the phase. On a GPU, which runs behind the host, a phase ends with the last
        kernel that it launched, and the next phase begins. A step never begins or ends before the step on the host.
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
        """One line per step, in execution order; the index is `step` of the other tables. Columns: run (number of the
        `generate` call or Session), number (`Trace.steps.step`), kind, rows, k (longest), drafted, accepted and emitted
        (sums over rows, missing with trace="off"), start_ms, duration_ms."""
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
        table.insert(5, "gap_share", (table.gap_ms / table.ms).fillna(0.0))  # on a GPU, planning may take 0 ms
        order = [(kind, phase) for kind in ("prefill", "decode") for phase in PHASES]
        return table.reindex([key for key in order if key in table.index])

    def totals(self, by: Sequence[str] = ("phase", "name"), kind: str = "decode") -> pd.DataFrame:
        """Return the kernels of decode (or prefill) steps, grouped, longest first: count, total_ms, mean_us, share (of
        the time of all kernels of this kind of step)."""
        steps = self.steps.index[self.steps.kind == kind]
        times = self.kernels[self.kernels.step.isin(steps)].groupby(list(by)).duration_ms
        table = pd.DataFrame({"count": times.size(), "total_ms": times.sum(), "mean_us": 1e3 * times.mean()})
        table.insert(2, "share", table.total_ms / table.total_ms.sum())
        return table.sort_values("total_ms", ascending=False)

    def save(self, path: str | Path) -> None:
        """Write a Chrome trace for ui.perfetto.dev and `Profile.load`, gzipped if the name ends in .gz.

        The file has all events of torch's trace, and no host name. `distributedInfo` and names for all lanes are added,
        because some viewers for many devices require them.
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
        """Load a profile from a file of `save`. Raises ValueError for another file."""
        data = Path(path).read_bytes()
        text = gzip.decompress(data) if Path(path).suffix == ".gz" else data
        document = json.loads(text)
        if not isinstance(document, dict) or "bass" not in document:
            raise ValueError(f"{path} was not written by Profile.save: the field 'bass' is missing")
        return cls()._fill(text, pd.DataFrame(document["bass"]["steps"]), document["bass"]["about"])

    def _fill(self, text: bytes, steps: pd.DataFrame, about: dict) -> Profile:
        self._trace, self.about = gzip.compress(text, 1), about
        self._steps = steps.rename_axis("step").astype(dict.fromkeys(COUNTS, "Int64")) if len(steps) else steps
        return self

    def _document(self) -> dict:
        if not self._trace:
            raise ValueError("the profile is empty; read a profile after its with block has ended")
        # NaN and infinity are not JSON, and viewers reject them.
        text = gzip.decompress(self._trace).decode(errors="replace")
        document = json.loads(text, parse_constant=lambda name: None)
        return {name: value for name, value in document.items() if name not in ("host_name", "traceName")}

    @cached_property
    def _joined(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        events = self._document()["traceEvents"]
        if self._steps.empty:
            raise ValueError("no step ran in this profile; call generate or Session.step inside the with block")
        ranges, kernels = kernel_events.join(events, self.on_gpu)
        if self.on_gpu and kernels.empty:
            raise ValueError(
                "the models ran on a GPU, but torch's profiler recorded no kernel there: another process may hold the "
                "GPU's counters, or CUPTI is missing. Set KINETO_LOG_LEVEL=0 in the environment for details"
            )
        return ranges, kernels


@contextmanager
def profile() -> Iterator[Profile]:
    """Profile the `generate` calls and Session steps of this thread inside the with block.

    Yields a Profile that is complete when the block has ended. Profiling costs time (lesson 06 measures the overhead)
    and memory: on a CPU, a decode step of the embedded pair is about 7,000 events of 250 bytes. Profile tens of steps,
    after a warm-up call outside the block. On a GPU, steps do not overlap during a profile, which keeps phases apart.
    Raises RuntimeError if another profiler is active.
    """
    if Session.on_phase is not None or torch.autograd._profiler_enabled():
        raise RuntimeError("a profiler is running already, and profiles do not nest; end the other profile first")
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
    result._fill(text, phases.table(), phases.about())


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the two lines that torch 2.13 writes to stderr for every profile. torch reads the level at the first
    profile. Missing kernels are still reported, by `Profile`."""
    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("KINETO_LOG_LEVEL", None)


class _Phases:
    """Listener that turns the phases of sessions into ranges of torch's profiler, and counts the steps."""

    def __init__(self):
        self._pair: ModelPair | None = None
        self._thread = threading.get_ident()  # torch profiles only this thread
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
            self._pair = session.pair
        if phase:
            self._range = record_function(kernel_events.range_name(len(self._steps) - 1, phase))
            self._range.__enter__()

    def close(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def about(self) -> dict:
        """Return the fields of `Profile.about`."""
        if self._pair is None:
            return {"device_type": "cpu", "dtype": ""} | describe_environment(torch.device("cpu"))
        return {"device_type": self._pair.device.type} | describe_run(self._pair)

    def table(self) -> pd.DataFrame:
        """Return the steps with the counts from their traces."""
        if not self._steps:
            return pd.DataFrame()
        steps = pd.DataFrame(self._steps)
        parts = [trace.steps.assign(run=run) for run, trace in enumerate(self._traces)]
        sums = {"rows": ("row", "size"), "k": ("k", "max")} | {name: (name, "sum") for name in COUNTS[2:]}
        counts = pd.concat(parts).rename(columns={"step": "number"}).groupby(["run", "number"]).agg(**sums)
        table = steps.join(counts.astype("Int64"), on=["run", "number"])
        # The step after an interrupted step has the same number.
        table.loc[steps.duplicated(["run", "number"], keep="last"), list(COUNTS)] = pd.NA
        return table


def _lane_names(events: Sequence[dict]) -> list[dict]:
    """Return metadata events that name the processes and threads without a name in torch's trace."""
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
