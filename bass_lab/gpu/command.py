"""What the commands that time a GPU share: their options, their time, where their lines go, and the end."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bass_core.environment import write_whole
from bass_lab.measure import records
from bass_lab.provenance import describe_environment

NO_GPU = 2  # exit code


class DeviceLost(Exception):
    """An error has broken the CUDA context: nothing more can be measured in this process."""


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
    return found


class Lines:
    """The records of a run, each checked and written as it comes, so that a run cut short keeps what it has."""

    def __init__(self, kind: str, options: argparse.Namespace, check: Callable[[dict], None], limit: float):
        """limit: seconds, unless the options have others."""
        self.check, self.limit, self.started = check, options.seconds or limit, time.monotonic()
        self.environment = describe_environment()  # of it, records take what they need
        device = self.environment["device"]
        self.output = options.output or (None if options.dry_run else records.device_file(kind, device))
        self.written: list[dict] = []
        here = {name: self.environment[name] for name in ("device", "torch", "commit")}
        self.before = records.earlier(self.output, here) if options.resume and self.output is not None else []

    def has(self, **fields) -> bool:
        """Whether an earlier run that is resumed has measured this: a line with these fields, and no reason."""
        return any(fields.items() <= line.items() and not line.get("reason") for line in self.before)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def out_of_time(self) -> bool:
        return self.seconds > self.limit

    @property
    def known(self) -> list[dict]:
        """Of this run, and of the one that it resumes."""
        return [*self.before, *self.written]

    def add(self, line: dict) -> dict:
        """Raises ValueError for a line that does not pass the check."""
        self.check(line)
        if self.output is not None:
            records.append(self.output, [line], self.check)
        self.written.append(line)
        return line

    def amend(self, change: Callable[[dict], dict]) -> None:
        """Change the `known` lines, where they stand, too."""
        changed = list(map(change, self.known))
        for line in changed:
            self.check(line)
        if self.output is not None:
            new = {json.dumps(old): json.dumps(line) for old, line in zip(self.known, changed, strict=True)}
            stored = self.output.read_text(encoding="utf-8").splitlines()
            write_whole(self.output, "".join(f"{new.get(line, line)}\n" for line in stored).encode())
        self.before, self.written = changed[: len(self.before)], changed[len(self.before) :]

    def end(self, document: dict) -> None:
        """Print what came of it as one JSON object, the last line."""
        output = None if self.output is None else str(self.output)
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
