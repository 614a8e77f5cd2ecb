"""What the commands that time a GPU share: their options, their time, their records, and the exit code."""

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
    """An error has broken the CUDA context: nothing more can be measured in this process. by: a kernel or a way."""

    def __init__(self, by: str, reason: str):
        super().__init__(f"{by} broke the device: {reason}")
        self.by, self.reason = by, reason


def parser(kind: str, description: str, **sizes: str) -> argparse.ArgumentParser:
    """kind: of the records. sizes: names and help of flags that exclude each other, --dry-run among them."""
    found = argparse.ArgumentParser(prog=f"bench-{kind}", description=description)
    size = found.add_mutually_exclusive_group()
    for name, meaning in sizes.items():
        size.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=meaning)
    found.add_argument("--seconds", type=float, help="begin nothing new after this time (else as the size says)")
    found.add_argument("--resume", action="store_true", help="leave out what the output has, of this device and commit")
    file = f"bass_lab/assets/records/{kind}_<device>.jsonl"
    found.add_argument("--output", type=Path, help=f"JSON lines go here ({file}; none in a dry run)")
    found.set_defaults(kind=kind)
    return found


class Lines:
    """The records of a run, each checked and written as it comes: a run that is cut short keeps what it has.

    here: the environment, which every line gets. written, before: lines of this run and of the one that it resumes.
    """

    def __init__(
        self, path: Path | None, *kinds: str, also: Sequence[str] = (), resume: bool = True, limit: float = math.inf
    ):
        """path: None writes nothing. also: fields of the environment besides device, torch and commit. limit: seconds.

        A run that is resumed was made in the same environment.
        """
        environment = describe_environment()
        self.here = {name: environment[name] for name in ("device", "torch", "commit", *also)}
        self.path, self.kinds, self.limit, self.started = path, kinds, limit, time.monotonic()
        self.before = records.earlier(path, self.here) if resume and path is not None else []
        self.written: list[dict] = []

    @classmethod
    def of(cls, options: argparse.Namespace, *kinds: str, limit: float, also: Sequence[str] = ()) -> Lines:
        """limit: unless the options have another."""
        path = options.output
        if path is None and not options.dry_run:
            path = records.device_file(options.kind, torch.cuda.get_device_name())
        return cls(path, *kinds, also=also, resume=options.resume, limit=options.seconds or limit)

    def copy_bandwidth(self, device: torch.device, note: str) -> float:
        """Measure and print the bytes per second of a copy, read and written."""
        found = copy_bandwidth(device)
        print(f"{self.here['device']}: a copy moves {found / 1e9:.0f} GB/s, read and written; {note}", flush=True)
        return found

    def has(self, **fields) -> bool:
        """Return True if the run that is resumed has measured this: a line with these fields that did not fail."""
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
        """Raises ValueError for a line that does not pass the check."""
        line = line | self.here
        records.check(line, *self.kinds)
        if self.path is not None:
            records.append(self.path, [line])
        self.written.append(line)
        return line

    def amend(self, change: Callable[[dict], dict]) -> None:
        """Change the `known` lines, in the file, too."""
        changed = list(map(change, self.known))
        for line in changed:
            records.check(line, *self.kinds)
        if self.path is not None:
            new = {json.dumps(old): json.dumps(line) for old, line in zip(self.known, changed, strict=True)}
            stored = self.path.read_text(encoding="utf-8").splitlines()
            write_whole(self.path, "".join(f"{new.get(line, line)}\n" for line in stored))
        self.before, self.written = changed[: len(self.before)], changed[len(self.before) :]

    def end(self, document: dict) -> None:
        """Print the outcome as one JSON object, the last line."""
        output = None if self.path is None else str(self.path)
        print(json.dumps(document | {"output": output, "seconds": round(self.seconds, 1)}, ensure_ascii=False))


def verdict(lines: Sequence[dict], ours: Sequence[str]) -> int:
    """The exit code for timed kernels: 1 where one of ours gave wrong numbers, or where nothing was timed."""
    wrong = [line for line in lines if line["kernel"] in ours and (line["reason"] or "").startswith("wrong")]
    return int(bool(wrong) or not any(line["us"] for line in lines))


def main(run: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """`run` where there is a GPU, or in a dry run; returns the exit code."""
    if options.dry_run or torch.cuda.is_available():
        return run(options)
    print("this needs a CUDA GPU, and torch sees none here; --dry-run shows what it does", file=sys.stderr)
    return NO_GPU
