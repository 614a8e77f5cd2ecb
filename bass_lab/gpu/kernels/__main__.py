"""`PYTHONPATH=.:kernels python -m bass_lab.gpu.kernels`: print a table per case, and JSON as the last line."""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import torch
import triton

from bass_lab.gpu import command
from bass_lab.gpu.kernels import cases, report, schema
from bass_lab.gpu.kernels.measure import DeviceLost, Outcome, measure
from bass_lab.gpu.kernels.peers import OURS, PEERS, by_default
from bass_lab.gpu.kernels.timing import Timer
from bass_lab.measure.roofline import copy_bandwidth

SECONDS = 450.0  # a run without --all ends here


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = command.parser(
        "kernels",
        "Time ragged-attention kernels against their peers.",
        quick="few cases, about a minute",
        all="every case; takes long, see --models and --batches",
        dry_run="one tiny case on the CPU, in times that mean nothing",
    )
    parser.add_argument("--models", nargs="+", choices=cases.MODELS, default=cases.MODELS)
    parser.add_argument("--batches", nargs="+", type=int, choices=cases.BATCHES)
    parser.add_argument("--kernels", nargs="+", choices=PEERS, help="only these (flex then runs on every case)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(given)


def chosen_cases(options: argparse.Namespace) -> list[cases.Case]:
    if options.dry_run:
        return [cases.tiny_case()]
    if options.quick:
        batches = options.batches or cases.BATCHES
        return [case for case in cases.quick_cases() if case.model in options.models and case.batch in batches]
    return (cases.all_cases if options.all else cases.default_cases)(options.models, options.batches)


def environment(here: dict) -> dict[str, str | None]:
    """The fields of a record that say where it was measured. here: `describe_environment`'s."""
    about = {name: here[name] for name in ("device", "torch", "commit")}
    return about | {"driver": _driver(), "triton": triton.__version__, "flashinfer": _installed("flashinfer-python")}


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
    """Measure and write case by case. Returns the exit code."""
    lines = command.Lines("kernels", options, schema.check, limit=math.inf if options.all else SECONDS)
    here, device = environment(lines.environment), torch.device("cpu" if options.dry_run else "cuda")
    timer, copy = Timer(device), copy_bandwidth(device)
    left, lost = [case for case in chosen_cases(options) if not lines.has(**schema.of_case(case))], None
    note = "; a dry run, its times mean nothing" if options.dry_run else ""
    print(
        f"{here['device']}: a copy moves {copy / 1e9:.0f} GB/s, read and written; {len(left)} cases{note}", flush=True
    )
    while left and lost is None and not lines.out_of_time:
        case = left.pop(0)
        wanted = options.kernels or list(PEERS)
        unasked = [name for name in wanted if not (options.kernels or by_default(name, case, options.quick))]
        try:
            outcomes = measure(case, [name for name in wanted if name not in unasked], options.seed, timer)
        except DeviceLost as error:
            outcomes, lost = [Outcome(error.kernel, f"broke the device: {error.reason}")], str(error)
        outcomes += [Outcome(name, "compiles for long: not on this shape unless named") for name in unasked]
        found = [schema.line(case, outcome, copy, device.type, options.seed, here) for outcome in outcomes]
        print(report.table(case, [lines.add(line) for line in found]), flush=True)
    document = report.summary(lines.written) | {
        "device": here["device"],
        "clock": device.type,
        "copy_gb_per_s": round(copy / 1e9, 1),
        "copy_gb_per_s_at_the_end": None if lost else round(copy_bandwidth(device) / 1e9, 1),
        "cases_left_out": len(left),
        "lost": lost,
    }
    lines.end(document)
    return 1 if lost else command.verdict(lines.known, OURS)


def main(given: list[str] | None = None) -> int:
    return command.main(run, arguments(given))


if __name__ == "__main__":
    sys.exit(main())
