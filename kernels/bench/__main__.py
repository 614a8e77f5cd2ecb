"""`PYTHONPATH=.:kernels python -m bench`: measure, print a table per case, and one JSON document as the last line."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import triton

from bass_core.environment import describe_environment
from bass_lab.measure import records
from bench import report, schema, shapes
from bench.measure import DeviceLost, Outcome, line, measure
from bench.peers import PEERS, by_default
from bench.timing import FakeClock, GraphClock

SECONDS = 450.0  # a run without --all ends here
NO_GPU = 2  # exit code


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench", description="Time ragged-attention kernels against their peers.")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="few cases, about a minute")
    size.add_argument("--all", action="store_true", help="every case; takes long, see --models and --batches")
    size.add_argument("--dry-run", action="store_true", help="one tiny case on the CPU with made-up times")
    parser.add_argument("--models", nargs="+", choices=shapes.MODELS, default=list(shapes.MODELS))
    parser.add_argument("--batches", nargs="+", type=int, choices=shapes.BATCHES)
    parser.add_argument("--kernels", nargs="+", choices=PEERS, help="only these (flex then runs on every case)")
    parser.add_argument("--seconds", type=float, help=f"start no case after this time ({SECONDS:.0f} unless --all)")
    parser.add_argument("--commit", default="", help="of this tree, where it came without its repository")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON lines go here (notebooks/records/kernels_<device>.jsonl)")
    return parser.parse_args(given)


def chosen_cases(options: argparse.Namespace) -> list[shapes.Case]:
    models = [shapes.MODELS[name] for name in options.models]
    if options.dry_run:
        return [shapes.tiny_case()]
    if options.quick:
        quick = shapes.quick_cases()
        return [c for c in quick if c.model in models and c.batch in (options.batches or shapes.BATCHES)]
    return (shapes.all_cases if options.all else shapes.default_cases)(models, options.batches)


def environment(commit: str) -> dict[str, str | None]:
    """The fields of a record that say where it was measured. commit: of a tree that does not know its own."""
    here = describe_environment()
    return {
        "device": here["device"],
        "driver": _driver(),
        "torch": here["torch"],
        "triton": triton.__version__,
        "flashinfer": _installed("flashinfer-python"),
        "commit": here["commit"] or commit,
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip().split("\n")[0]
    except OSError:
        return ""


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@torch.no_grad()
def run(options: argparse.Namespace) -> int:
    """Measure and write case by case, so that a run cut short keeps what it has. Returns the exit code."""
    started, here = time.monotonic(), environment(options.commit)
    device = torch.device("cpu" if options.dry_run else "cuda")
    clock = FakeClock() if options.dry_run else GraphClock()
    output = options.output or (None if options.dry_run else records.device_file("kernels", here["device"]))
    limit = options.seconds or (math.inf if options.all else SECONDS)
    copy = clock.copy_bytes_per_second()
    cases, written, lost = chosen_cases(options), [], None
    note = "  FAKE TIMES, a dry run" if options.dry_run else ""
    print(
        f"{here['device']}: a copy moves {copy / 1e9:.0f} GB/s, read and written; {len(cases)} cases{note}", flush=True
    )
    left = list(cases)
    while left and lost is None and time.monotonic() - started < limit:
        case = left.pop(0)
        wanted = [name for name in PEERS if options.kernels is None or name in options.kernels]
        few = options.kernels is None
        unasked = [name for name in wanted if few and not by_default(name, case, options.quick)]
        try:
            outcomes = measure(case, [n for n in wanted if n not in unasked], device, options.seed, clock)
        except DeviceLost as error:
            outcomes, lost = [Outcome(error.kernel, f"broke the device: {error.reason}")], str(error)
        outcomes += [Outcome(name, "compiles for long: not on this shape unless named") for name in unasked]
        lines = [line(case, outcome, copy, clock, options.seed, here) for outcome in outcomes]
        print(report.table(case, lines), flush=True)
        written += lines
        if output is not None:
            schema.append(output, lines)
    document = report.summary(written) | {
        "device": here["device"],
        "clock": clock.name,
        "copy_gb_per_s": round(copy / 1e9, 1),
        "copy_gb_per_s_at_the_end": None if lost else round(clock.copy_bytes_per_second() / 1e9, 1),
        "cases_left_out": len(left),
        "lost": lost,
        "output": str(output) if output else None,
        "seconds": round(time.monotonic() - started, 1),
    }
    print()
    print(json.dumps(document, ensure_ascii=False))
    return 1 if lost else 0


def main(given: list[str] | None = None) -> int:
    options = arguments(given)
    if not options.dry_run and not torch.cuda.is_available():
        print("bench needs a CUDA GPU, and torch sees none here; --dry-run shows what it does", file=sys.stderr)
        return NO_GPU
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
