"""`PYTHONPATH=.:kernels python -m bass_lab.gpu.kernels`: print a table per case, then a JSON line."""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import torch
import triton

from bass_lab.gpu import command
from bass_lab.gpu.command import DeviceLost, Lines
from bass_lab.gpu.kernels import cases, report
from bass_lab.gpu.kernels.measure import KernelOutcome, measure
from bass_lab.gpu.kernels.peers import OURS, PEERS
from bass_lab.gpu.kernels.timing import Timer
from bass_lab.measure.roofline import copy_bandwidth

SECONDS = 450.0  # limit of a run without --all


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = command.parser(
        "kernels",
        "Time ragged-attention kernels against their peers.",
        quick="few cases, about a minute",
        all="every case; takes long, narrow with --models and --batch-sizes",
        dry_run="one tiny case on the CPU, with meaningless times",
    )
    parser.add_argument("--models", nargs="+", choices=cases.MODELS, default=cases.MODELS)
    parser.add_argument("--batch-sizes", nargs="+", type=int, choices=cases.BATCHES)
    parser.add_argument("--kernels", nargs="+", choices=PEERS, help="kernels to time; default: all")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(given)


def chosen_cases(options: argparse.Namespace) -> list[cases.Case]:
    if options.dry_run:
        return [cases.tiny_case()]
    if options.quick:
        batches = options.batch_sizes or cases.BATCHES
        return [case for case in cases.quick_cases() if case.model in options.models and case.batch in batches]
    return (cases.all_cases if options.all else cases.default_cases)(options.models, options.batch_sizes)


def environment() -> dict[str, str | None]:
    """Return the versions that matter only for kernels."""
    return {"driver": _driver(), "triton": triton.__version__, "flashinfer": _installed("flashinfer-python")}


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
    """Measure and write case by case. Return the exit code."""
    lines = Lines.of(options, "kernel", limit=math.inf if options.all else SECONDS)
    timer, versions, lost = Timer(torch.device("cpu" if options.dry_run else "cuda")), environment(), None
    copy = lines.copy_bandwidth(timer.device, "a dry run with meaningless times" if options.dry_run else "")

    def measured(case: cases.Case) -> str:
        nonlocal lost
        try:
            outcomes = measure(case, options.kernels or list(PEERS), options.seed, timer)
        except DeviceLost as error:
            outcomes, lost = [KernelOutcome(error.by, f"broke the device: {error.reason}")], str(error)
        how = copy, timer.device.type, options.seed, versions
        return report.attention_table(case, [lines.add(report.line(case, each, *how)) for each in outcomes])

    left = [case for case in chosen_cases(options) if not lines.has(**report.of_case(case))]
    while left and lost is None and not lines.out_of_time:
        print(measured(left.pop(0)), flush=True)
    document = report.summary(lines.written) | {
        "device": lines.here["device"],
        "clock": timer.device.type,
        "copy_gb_per_s": round(copy / 1e9, 1),
        "copy_gb_per_s_at_the_end": None if lost else round(copy_bandwidth(timer.device) / 1e9, 1),
        "cases_left_out": len(left),
        "lost": lost,
    }
    lines.end(document)
    return 1 if lost else command.verdict(lines.known, OURS)


def main(given: list[str] | None = None) -> int:
    return command.main(run, arguments(given))


if __name__ == "__main__":
    sys.exit(main())
