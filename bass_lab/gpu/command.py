"""Shared parts of the GPU benchmarks: options, time limits, records, and exit codes."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bass_core.environment import write_whole
from bass_lab.measure import records
from bass_lab.measure.roofline import copy_bandwidth
from bass_lab.provenance import describe_environment

NO_GPU = 2  # exit code


class DeviceLost(Exception):
    """The CUDA context is broken and this process can measure nothing more. by: the kernel or method that failed."""

    def __init__(self, by: str, reason: str):
        super().__init__(f"{by} broke the device: {reason}")
        self.by, self.reason = by, reason


def parser(kind: str, description: str, **sizes: str) -> argparse.ArgumentParser:
    """Return the parser. kind: of the records. sizes: names and help of exclusive flags, including --dry-run."""
    found = argparse.ArgumentParser(prog=f"bench-{kind}", description=description)
    size = found.add_mutually_exclusive_group()
    for name, meaning in sizes.items():
        size.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=meaning)
    found.add_argument("--seconds", type=float, help="start nothing new after this time; default: by size")
    found.add_argument("--resume", action="store_true", help="skip cases in the output, for this device and commit")
    file = f"bass_lab/assets/records/{kind}_<device>.jsonl"
    found.add_argument("--output", type=Path, help=f"JSON lines; default: {file}, none in a dry run")
    found.set_defaults(kind=kind)
    return found


class Lines:
    """The records of a run. Each record is checked and written at once, so an interrupted run keeps its records.

    here: the environment, added to every line. written: lines of this run. before: lines of the resumed run.
    """

    def __init__(
        self, path: Path | None, *kinds: str, also: Sequence[str] = (), resume: bool = True, limit: float = math.inf
    ):
        """Read the lines of the resumed run, if its environment is the same.

        path: None writes nothing. also: environment fields besides device, torch and commit. limit: seconds.
        """
        environment = describe_environment()
        self.here = {name: environment[name] for name in ("device", "torch", "commit", *also)}
        self.path, self.kinds, self.limit, self.started = path, kinds, limit, time.monotonic()
        self.before = records.earlier(path, self.here) if resume and path is not None else []
        self.written: list[dict] = []

    @classmethod
    def of(cls, options: argparse.Namespace, *kinds: str, limit: float, also: Sequence[str] = ()) -> Lines:
        """Return the records for these options. limit: seconds, unless the options set another limit."""
        path = options.output
        if path is None and not options.dry_run:
            path = records.device_file(options.kind, torch.cuda.get_device_name())
        return cls(path, *kinds, also=also, resume=options.resume, limit=options.seconds or limit)

    def copy_bandwidth(self, device: torch.device, note: str) -> float:
        """Measure, print and return the bandwidth of a copy: bytes read and written per second."""
        found = copy_bandwidth(device)
        print(f"{self.here['device']}: a copy moves {found / 1e9:.0f} GB/s, read and written; {note}", flush=True)
        return found

    def has(self, **fields) -> bool:
        """Return True if the resumed run has a line with these fields that did not fail."""
        failed = ("reason", "failed")
        return any(fields.items() <= line.items() and not any(map(line.get, failed)) for line in self.before)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def out_of_time(self) -> bool:
        return self.seconds > self.limit

    @property
    def known(self) -> list[dict]:
        return [*self.before, *self.written]

    def add(self, line: dict) -> dict:
        """Write the line with the environment and return it. Raises ValueError for an invalid line."""
        line = line | self.here
        records.check(line, *self.kinds)
        if self.path is not None:
            records.append(self.path, [line])
        self.written.append(line)
        return line

    def amend(self, change: Callable[[dict], dict]) -> None:
        """Apply the change to the `known` lines, also in the file."""
        changed = list(map(change, self.known))
        for line in changed:
            records.check(line, *self.kinds)
        if self.path is not None:
            new = {json.dumps(old): json.dumps(line) for old, line in zip(self.known, changed, strict=True)}
            stored = self.path.read_text(encoding="utf-8").splitlines()
            write_whole(self.path, "".join(f"{new.get(line, line)}\n" for line in stored))
        self.before, self.written = changed[: len(self.before)], changed[len(self.before) :]

    def end(self, document: dict) -> None:
        """Print the outcome as one JSON object, the last line of the output."""
        output = None if self.path is None else str(self.path)
        print(json.dumps(document | {"output": output, "seconds": round(self.seconds, 1)}, ensure_ascii=False))


class PartFile(Lines):
    """A file of JSON lines, one per case. failed: failed cases of this run."""

    def __init__(self, file: Path):
        super().__init__(file, "stage", also=["transformers"])
        self.failed: list[str] = []

    def case(self, name: str, measure: Callable[[], dict]) -> None:
        """Write the measured case or the reason of its failure, unless the file already has the case."""
        if self.has(case=name):
            return
        started = time.perf_counter()
        try:
            found = measure()
        except Exception as error:  # continue with the next case
            found = {"failed": f"{type(error).__name__}: {error}"[:2000]}
        if "failed" in found:
            self.failed.append(name)
        line = {"schema": "stage", "case": name} | found | {"seconds": round(time.perf_counter() - started, 1)}
        print(json.dumps(self.add(line), ensure_ascii=False)[:2000], flush=True)


def verdict(lines: Sequence[dict], ours: Sequence[str]) -> int:
    """Return the exit code for timed kernels: 1 if a kernel of ours was wrong or nothing was timed, else 0."""
    wrong = [line for line in lines if line["kernel"] in ours and (line["reason"] or "").startswith("wrong")]
    return int(bool(wrong) or not any(line["us"] for line in lines))


def main(run: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Call `run` if there is a GPU or this is a dry run. Return the exit code."""
    if options.dry_run or torch.cuda.is_available():
        return run(options)
    print("this command needs a CUDA GPU, and torch finds none; use --dry-run to try it on a CPU", file=sys.stderr)
    return NO_GPU
