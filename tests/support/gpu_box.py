"""Invented results of a GPU run (`python -m bass_lab.gpu.stages`)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import gpu_profile

from bass_core.policies.costs import CostModel
from bass_lab.gpu import decoding, stages
from bass_lab.measure import records
from bass_lab.measure.modelled_costs import modelled_costs
from bass_lab.measure.plan import PEERS, Group, PlannedMethod, plan
from bass_lab.measure.profiling import Profile
from bass_lab.measure.roofline import DRAFT_310M, H100, TARGET_8B, Roofline
from bass_lab.study.recorded_acceptance import AcceptanceTrace

KERNELS = str(Path(__file__).parents[2] / "kernels")
DEVICE = "NVIDIA X1 Example"
HERE = {"device": DEVICE, "torch": "2.99.0", "transformers": "5.99.0", "commit": "abcdef123456"}
COPY = 2e12  # bytes/s
MS = {"regular": 8.0, "single": 5.0, "batched": 3.0, "transformers": 9.0}  # milliseconds per token


def of_a_stage(path: Path) -> bool:
    """Return True for records of a GPU. Records of `bass bench` on a CPU have other checks."""
    kinds = [name.partition(".")[0] for stage in stages.STAGES.values() for name in stage.files]
    return any(path.name.startswith(f"{kind}_") for kind in kinds)


def costs(**measured) -> CostModel:
    made_up = modelled_costs(Roofline(TARGET_8B, H100), Roofline(DRAFT_310M, H100), target_launch=2e-3)
    described = {"device_type": "cuda", "dtype": "bfloat16", **HERE} | measured
    return replace(made_up, device=described["device"], is_synthetic=False, measured=described)


def profile(folder: Path, **about) -> Profile:
    path = gpu_profile.write_gpu_profile(folder / "profile.json", dtype="bfloat16", **HERE | about)
    found = Profile.load(path)
    path.unlink()
    return found


def decode_lines(groups: Iterable[Group], **changes) -> list[dict]:
    return [decode_line(group, way, **changes) for group in groups for way in group.ways]


def decode_line(group: Group, way: PlannedMethod, **changes) -> dict:
    """Return a line of `gpu.decoding` with times of `MS`, doubled for a useless draft."""
    ms = MS[way.method] * (2 if way.alpha == 0.02 else 1)
    ratio = MS["regular"] / ms
    transformers = way.method == "transformers"
    return {
        "schema": "gpu_speed",
        "shape": group.shape,
        "method": way.method,
        "policy": "" if way.draft == 0 else f"k={way.draft}",
        "way": str(way),
        "alpha": way.alpha,
        "batch": group.batch,
        "attention": way.attention,
        "compile": way.compile,
        "context": decoding.CONTEXT,
        "max_new_tokens": decoding.NEW,
        "repeats": 2,
        "disturbed": 0,
        "seconds": [ms * 0.127, ms * 0.127],
        "first_ms": ms,
        "mean_ms": ms,
        "last_ms": ms,
        "tokens_per_second": 1e3 * group.batch / ms,
        "tokens_per_step": None if transformers else 1.0,
        "k": None if transformers else 0.0,
        "over_regular": {"median": ratio, "low": ratio, "high": ratio},
        "utilisation": None if transformers else {"verified": 0.1, "emitted": 0.05, "draft": 0.01, "bandwidth": 0.5},
        "host_share": None if transformers else 0.1,
        "copy_gb_per_s": COPY / 1e9,
        "matrix_tflops": 700.0,
        "dtype": "bfloat16",
        "exactness": {"passed": True},
        "synthetic": True,
        **HERE,
    } | changes


def kernel_lines(clock: str = "cuda", **here) -> list[dict]:
    """Return lines of the kernel benchmark: `ragged` at 80% of the copy's bandwidth, a peer at 70%, and a failing
    peer."""
    cases, measure, report, timing = _bench()
    environment = {"driver": "1", "triton": "3", "flashinfer": None} | HERE | here
    del environment["transformers"]
    found = []
    for case in cases.default_cases(cases.MODELS):
        for kernel, share in (("ragged", 0.8), ("flex", 0.7), ("varlen", None)):
            ms = 1e3 * case.kv_bytes(0) / (share * COPY) if share else 0.0
            taken = timing.Timing([print], print, samples=[ms])
            reason = None if share else "it does not run here"
            outcome = measure.KernelOutcome(kernel, error=1e-3, reason=reason, timing=taken if share else None)
            found.append(report.line(case, outcome, COPY, clock, 0, environment))
    return found


def _bench() -> tuple:
    """Import the kernel benchmark, which is never installed."""
    if KERNELS not in sys.path:
        sys.path.append(KERNELS)
    from bass_lab.gpu.kernels import cases, measure, report, timing

    return cases, measure, report, timing


def write(folder: Path) -> Path:
    folder.mkdir(parents=True)
    records.append(folder / "kernels.jsonl", kernel_lines())
    records.append(folder / "gpu.jsonl", decode_lines(plan(quick=True)))
    records.append(folder / "peers.jsonl", decode_lines(PEERS))
    for kind in ("passes", "trace", "tests", "exactness", "costs_check", "products", "sanitizers", "notebooks"):
        (folder / f"{kind}.jsonl").write_text(json.dumps({"case": "some", "seconds": 1.0, **HERE}) + "\n")
    costs().save(folder / "costs.json")
    profile(folder).save(folder / "timeline.json.gz")
    AcceptanceTrace.synthetic(alpha=0.8, length=16, sequences=2).save(folder / "acceptance.npz")
    return folder
