"""Stages of `make gpu` besides tests and benchmarks: exactness, costs, memory errors and races, lessons.

Each stage writes case by case.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

import bass_core as bass
from bass_lab.checks import exactness
from bass_lab.gpu import step_parts
from bass_lab.gpu.command import PartFile
from bass_lab.measure import records
from bass_lab.measure.profiling import Profile, profile
from bass_lab.measure.repeated_way import WARM_UPS
from bass_lab.provenance import describe_run
from bass_lab.study import calibration, cost_check, recording
from bass_lab.texts.prompt_sets import prompt_set

WATCHED = 120  # seconds for a test under compute-sanitizer
# By default compute-sanitizer stops a program that does not use the GPU within ten seconds.
SANITIZER = ["compute-sanitizer", "--launch-timeout", str(WATCHED // 2), "--show-backtrace", "no", "--tool"]


def check(folder: Path, rehearse: bool) -> PartFile:
    """Run `bass verify` on the embedded pair with CUDA graphs, without and with compiled layers."""
    pair, part = bass.load_pair(), PartFile(folder / "exactness.jsonl")
    fewer = {"samples": 1000, "max_new_tokens": 8} if rehearse else {"samples": 2000, "max_new_tokens": 24}
    for way in ("off", "compiled") if rehearse else ("graphs", "compiled+graphs"):

        def verdict(way: str = way) -> dict:
            found = json.loads(exactness.verify(pair, prompt_set("mini", 4), compile=way, **fewer).to_json())
            return found if found["verdict"] == "PASS" else found | {"failed": "the verdict is not PASS"}

        part.case(way, verdict)
    return part


def costs(folder: Path, rehearse: bool) -> PartFile:
    """Measure the embedded pair's costs, a timeline, predicted and real decode times, and acceptance."""
    pair, part = bass.load_pair(), PartFile(folder / "costs_check.jsonl")
    file, profiled, acceptance = (folder / name for name in ("costs.json", "timeline.json.gz", "acceptance.npz"))
    batches = (1, 2) if rehearse else (1, 2, 4, 8, 16, 32)

    def calibrated() -> dict:
        calibration.calibrate(pair, batches, seconds=1.0 if rehearse else 42.0).save(file)
        return {"saved": file.name}

    def compared() -> dict:
        cost = bass.CostModel.load(file)
        return {"predicted": cost_check.check(cost, pair).to_dict("records")}

    def seen() -> dict:
        texts = prompt_set("mini", 2 if rehearse else 8)
        with bass.Session(pair, max_batch_size=len(texts)) as session:
            timeline(session, texts, max_new_tokens=8 if rehearse else 48).save(profiled)
        return {"saved": profiled.name}

    def recorded() -> dict:
        texts = prompt_set("mini", 2 if rehearse else 96)
        limits = {"samples": 1, "max_new_tokens": 8 if rehearse else 128, "temperature": 0.2, "seed": 0}
        trace = recording.record(pair, texts, rollout=12, **limits)
        trace.meta.update(describe_run(pair), prompt_set="mini")
        trace.save(acceptance)
        return {"saved": acceptance.name, "alpha": trace.alpha}

    for case, measure in (("costs", calibrated), ("timeline", seen), ("check", compared), ("acceptance", recorded)):
        part.case(case, measure)
    return part


def timeline(session: bass.Session, prompts: Sequence, max_new_tokens: int) -> Profile:
    """Return a profile of decoding these prompts, without compilation and graph capture.

    The warm-up runs are profiled too, because a profiled session launches no step ahead and so needs other graphs.
    """
    for _ in range(WARM_UPS + 1):
        with profile() as found:
            for prompt in prompts:
                session.submit(prompt, max_new_tokens=max_new_tokens)
            while not session.idle:
                session.step()
    return found


def sanitized(folder: Path, rehearse: bool) -> PartFile:
    """Run every kernel on small shapes under memcheck and racecheck.

    All tests run without a sanitizer first, which compiles the kernels. If a test fails, the stage ends.
    """
    part, file = PartFile(folder / "sanitizers.jsonl"), records.ROOT / "tests/gpu/test_gpu_small.py"
    tests = re.findall(r"^def (test_\w+)", file.read_text("utf-8"), re.MULTILINE)
    # Without torch's memory pool an access beyond a tensor's end does not hit the next tensor.
    surroundings = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}

    def passed(tool: str | None, test: str) -> dict:
        pytest = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", f"{file}{test}"]
        watched = [*SANITIZER, tool] if tool else []
        with tempfile.TemporaryFile("w+") as output:  # leftover processes would keep a pipe open
            how = {"cwd": records.ROOT, "env": surroundings, "stdout": output, "stderr": subprocess.STDOUT}
            try:
                limit = WATCHED if tool else 2 * WATCHED  # includes compilation
                code = subprocess.run([*watched, *pytest], timeout=limit, **how).returncode
            except subprocess.TimeoutExpired:
                code = f"none within {limit} s"
            output.seek(0)
            said = output.read()
        summaries, ran = re.findall(r"SUMMARY: (.*)", said), rehearse or re.search(r"\d+ passed", said)
        clean = summaries and all(each.startswith("0 ") for each in summaries)
        if code != 0 or not ran or not (clean or tool is None):
            first = said[max(said.find("========= "), 0) :][:800]
            raise RuntimeError(f"exit status {code}: {first}\n...\n{said[-800:]}")
        return {"summary": summaries[-1] if tool else said.strip().splitlines()[-1]}

    part.case("unwatched", lambda: passed(None, ""))
    if part.failed:
        return part
    cases = {
        f"{tool} {test}": (tool, f"::{test}") for test, tool in itertools.product(tests, ("memcheck", "racecheck"))
    }
    tried = {line["case"] for line in part.before}
    for case in sorted(cases, key=tried.__contains__):  # cases that an earlier run tried go last
        part.case(case, lambda case=case: passed(*cases[case]))
    return part


def lessons(folder: Path, rehearse: bool) -> PartFile:
    """Execute every lesson with papermill; a rehearsal executes only the first."""
    import papermill

    part = PartFile(folder / "notebooks.jsonl")
    found = sorted((records.ROOT / "notebooks").glob("*.ipynb"))
    for lesson in found[:1] if rehearse else found:

        def executed(lesson: Path = lesson) -> dict:
            parameters = {"batch_size": 2, "max_new_tokens": 8, "repeats": 1} if rehearse else {}
            options = {"progress_bar": False, "cwd": lesson.parent, "store_widget_state": False}
            papermill.execute_notebook(lesson, folder / "executed.ipynb", parameters, **options)
            return {}

        part.case(lesson.stem, executed)
    return part


PARTS = {
    "exactness": check,
    "costs": costs,
    "sanitizers": sanitized,
    "notebooks": lessons,
    "passes": step_parts.passes,
    "trace": step_parts.trace,
}


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu-part", description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args(given)
    if options.rehearse:
        torch.set_num_threads(1)
    return 1 if PARTS[options.part](options.folder, options.rehearse).failed else 0


if __name__ == "__main__":
    sys.exit(main())
