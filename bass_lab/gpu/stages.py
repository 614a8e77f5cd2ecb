"""`make gpu`: everything that needs a GPU, in stages of minutes, the most valuable first.

    python -m bass_lab.gpu.stages FOLDER                    all stages
    python -m bass_lab.gpu.stages FOLDER --stage decode     one stage; a second call resumes an interrupted stage
    python -m bass_lab.gpu.stages FOLDER --within 400 --stage decode --stage passes     several, in 400 seconds in all
    python -m bass_lab.gpu.stages FOLDER --rehearse         tiny run on a CPU: meaningless times, but every file
    python -m bass_lab.gpu.stages FOLDER --collect          copy the files into bass_lab/assets/records

Each stage is a program with its own time limit. It appends to its files case by case and skips cases that the files
have for this device and commit. Stages need torch, triton, transformers, pandas and pytest; the last needs papermill.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from bass_lab.gpu.command import NO_GPU
from bass_lab.measure import records

Command = Callable[[str, str, bool], list[str]]  # (folder, seconds, rehearse) -> arguments of python


@dataclass(frozen=True)
class Stage:
    """seconds: time limit. files: output. needs, program: module and program without which the stage is skipped."""

    about: str
    seconds: int
    files: tuple[str, ...]
    command: Command
    needs: str | None = None
    program: str | None = None


def _tests(folder: str, seconds: str, rehearse: bool) -> list[str]:
    at_once = ["-n", "auto", "--maxprocesses", "16"] if _installed("xdist") and not rehearse else []
    each = ["--timeout", "300"] if _installed("pytest_timeout") else []
    files = sorted((records.ROOT / "tests").rglob("test_*.py"))  # other tests import packages that a GPU box may lack
    marked = [str(file) for file in files if "pytest.mark.gpu" in file.read_text("utf-8")]
    return ["-m", "pytest", "-m", "gpu", "-q", "-p", "gpu_log", "-p", "no:cacheprovider", *at_once, *each, *marked]


def _timed(module: str, file: str, size: str | None = None, after: float = 0.0) -> Command:
    """Return the command of a benchmark. after: seconds between the start of its last case and its end."""

    def command(folder: str, seconds: str, rehearse: bool) -> list[str]:
        sizes = ["--dry-run"] if rehearse else [size] if size else []
        begins = str(float(seconds) - min(after, float(seconds) / 2))
        return ["-m", f"bass_lab.gpu.{module}", *sizes, "--resume", "--output", f"{folder}/{file}", "--seconds", begins]

    return command


def _part(name: str) -> Command:
    def command(folder: str, seconds: str, rehearse: bool) -> list[str]:
        return ["-m", "bass_lab.gpu.parts", name, folder, *(["--rehearse"] if rehearse else [])]

    return command


EXACTNESS = 130.0  # seconds of the last method and the exactness check
_decoding = partial(_timed, "decoding", after=EXACTNESS)
COSTS = ("costs.json", "costs_check.jsonl", "timeline.json.gz", "acceptance.npz")
WATCH = "compute-sanitizer"
STAGES = {
    "decode": Stage("7.8B + 310M: regular and batched", 460, ("gpu.jsonl",), _decoding("gpu.jsonl", "--quick")),
    "passes": Stage("the price of a pass by its tokens", 100, ("passes.jsonl",), _part("passes")),
    "trace": Stage("a decode step, kernel by kernel", 130, ("trace.jsonl",), _part("trace")),
    "tests": Stage("the GPU tests, in parallel on all cores", 400, ("tests.jsonl",), _tests),
    "kernels": Stage("kernels and their peers", 460, ("kernels.jsonl",), _timed("kernels", "kernels.jsonl")),
    "peers": Stage("the same with transformers' generate", 300, ("peers.jsonl",), _decoding("peers.jsonl", "--peers")),
    "exactness": Stage("`bass verify`, CUDA graphs and compiled layers", 460, ("exactness.jsonl",), _part("exactness")),
    "costs": Stage("costs of steps, a profile, recorded acceptance", 460, COSTS, _part("costs")),
    "products": Stage("INT8 and INT4 products", 260, ("products.jsonl",), _timed("kernels.products", "products.jsonl")),
    "sanitizers": Stage(f"kernels under {WATCH}", 460, ("sanitizers.jsonl",), _part("sanitizers"), program=WATCH),
    "notebooks": Stage("the lessons", 460, ("notebooks.jsonl",), _part("notebooks"), needs="papermill"),
}


def run(name: str, folder: Path, rehearse: bool = False, seconds: float | None = None) -> dict:
    """Run a stage, at most until its time limit. Return a summary with the size of its files in lines or bytes."""
    stage, started = STAGES[name], time.monotonic()
    summary = {"stage": name, "about": stage.about}
    missing = stage.needs if stage.needs and not _installed(stage.needs) else None
    if stage.program and shutil.which(stage.program) is None:
        missing = stage.program
    if missing:
        return summary | {"left_out": f"{missing} is not installed here"}
    folder.mkdir(parents=True, exist_ok=True)
    limit = seconds or stage.seconds
    command = [sys.executable, *stage.command(str(folder), f"{limit - 20:.0f}" if limit > 60 else f"{limit}", rehearse)]
    paths = [records.ROOT, records.ROOT / "kernels", records.ROOT / "tests/support"]
    surroundings = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "TORCHINDUCTOR_COMPILE_THREADS": "2",
        "GPU_LOG": str(folder / "tests.jsonl"),
        **({"BASS_REHEARSE": "1"} if rehearse else {}),  # tests/gpu/test_gpu_steps.py
    }
    process = subprocess.Popen(command, cwd=records.ROOT, env=surroundings, start_new_session=True)
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        code = None
    finally:  # also after Ctrl-C: kill all processes of the stage
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    files = {file: _size(folder / file) for file in stage.files}
    return summary | {"code": code, "seconds": round(time.monotonic() - started, 1), "files": files}


def _size(file: Path) -> str:
    if not file.exists():
        return "missing"
    if file.suffix == ".jsonl":
        return f"{len(file.read_text().splitlines())} lines"
    return f"{file.stat().st_size} bytes"


def collect(folder: Path) -> list[Path]:
    """Copy the stages' files into this repository's records, named by device. Return the new files."""
    lines = [line for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    if not lines:
        raise ValueError(f"{folder} holds no line of a stage; run the stages into it first")
    device = json.loads(lines[0])["device"]
    written = []
    for file in (folder / file for stage in STAGES.values() for file in stage.files):
        if file.exists():
            kind, _, ending = file.name.partition(".")
            target = records.device_file(kind, device).with_suffix(f".{ending}")
            shutil.copyfile(file, target)
            written.append(target)
    return written


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu", description="Run everything that needs a GPU, in stages of minutes.")
    parser.add_argument("folder", type=Path, help="folder of the stages' files")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--stage", choices=STAGES, action="append", help="run only this stage; may be repeated")
    what.add_argument("--collect", action="store_true", help="copy the files into bass_lab/assets/records")
    parser.add_argument("--seconds", type=float, help="time limit of each stage; default: its own")
    parser.add_argument("--within", type=float, default=math.inf, help="time limit of all stages together, in seconds")
    parser.add_argument("--rehearse", action="store_true", help="run tiny cases on a CPU, with meaningless times")
    options = parser.parse_args(given)
    if options.collect:
        print("\n".join(f"wrote {path}" for path in collect(options.folder)))
        return 0
    if not (options.rehearse or torch.cuda.is_available()):
        print("this command needs a CUDA GPU, and torch finds none; use --rehearse to try it on a CPU", file=sys.stderr)
        return NO_GPU
    codes, end, names = [], time.monotonic() + options.within, options.stage or list(STAGES)
    for place, name in enumerate(names):
        # Every later stage keeps half of its own time, if the total allows.
        kept = sum(STAGES[later].seconds for later in names[place + 1 :]) / 2
        left = end - time.monotonic()
        limit = min(options.seconds or STAGES[name].seconds, max(left - kept, left / 2))
        summary = run(name, options.folder.resolve(), options.rehearse, limit)
        print(json.dumps(summary, ensure_ascii=False), flush=True)
        codes.append(summary.get("code", 0))
    return 0 if not any(code != 0 for code in codes) else 1


if __name__ == "__main__":
    sys.exit(main())
