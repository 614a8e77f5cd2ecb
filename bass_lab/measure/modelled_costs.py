"""Costs computed from the roofline, the shipped CPU costs, and two uses of costs: predict the seconds of a run, and
find the best fixed draft length."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np

from bass_core.loading.measured_costs import SHIPPED
from bass_core.loop.trace import Trace
from bass_core.policies.costs import PASS_AXES, PHASE_AXES, CostModel, Table
from bass_core.policies.protocol import expected_tokens
from bass_lab.measure.roofline import DRAFT_310M, H100, TARGET_8B, Roofline

SHARE = 0.8  # share of the data sheet's bandwidth and arithmetic that a pass reaches
OVERHEAD = 3e-4  # seconds per step outside the passes
BATCHES, KV_LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128), (1, 512, 1024, 2048, 4096)
LONGEST = 32  # maximum draft length


def modelled_costs(
    target: Roofline,
    draft: Roofline | None = None,
    *,
    target_launch: float = 0.0,
    target_token: float = 0.0,
    draft_launch: float = 0.0,
    overhead: float = 0.0,
) -> CostModel:
    """Return synthetic costs: the roofline bound of each pass plus a launch time.

    draft: None for drafting without a model. target_launch, draft_launch: seconds per pass. target_token: seconds per
    token of a row after the first. overhead: seconds per step outside the passes.
    """

    def verify(batch: int, query_length: int, kv_length: int) -> float:
        return target_launch + target_token * (query_length - 1) + target.seconds(batch, query_length, kv_length)

    def phase(batch: int, k: int, kv_length: int) -> float:
        first, later = draft.seconds(batch, 2, kv_length), draft.seconds(batch, 1, kv_length + k / 2)
        return k * draft_launch + first + (k - 1) * later  # the cache grows by a token per pass: k / 2 on average

    def model(roofline: Roofline | None) -> dict[str, str | None]:
        name = "n-gram lookup" if roofline is None else f"{roofline.work.weights / 1e9:.3g}B parameters"
        return {
            "name": name,
            "fingerprint": f"synthetic {name}",
            "attention": None if roofline is None else "ragged",
        }

    passes = dict(zip(PASS_AXES, (BATCHES, range(1, LONGEST + 2), KV_LENGTHS), strict=True))
    phases = dict(zip(PHASE_AXES, (BATCHES, range(1, LONGEST + 1), KV_LENGTHS), strict=True))
    host = {"batch": (BATCHES[0], BATCHES[-1]), "draft_length": (0, LONGEST)}
    return CostModel(
        device=target.device.name,
        models={"target": model(target), "draft": model(draft)},
        target_passes=Table.of(passes, verify),
        draft_phases=None if draft is None else Table.of(phases, phase),
        overheads=Table.of(host, lambda *_: overhead),
        is_synthetic=True,
    )


def modelled_h100(launch_ms: float = 0.5) -> CostModel:
    """Return synthetic costs of the paper's 7.8B + 310M models on an H100: the roofline at `SHARE` of the data sheet,
    plus launch_ms per target pass, a fifth of launch_ms per draft pass, and `OVERHEAD` per step."""
    device = replace(H100, bandwidth=SHARE * H100.bandwidth, flops=SHARE * H100.flops)
    target, draft = Roofline(TARGET_8B, device), Roofline(DRAFT_310M, device)
    launch = launch_ms / 1e3
    return modelled_costs(target, draft, target_launch=launch, draft_launch=launch / 5, overhead=OVERHEAD)


@functools.cache  # the controls of lessons call this at every move
def measured_cpu() -> CostModel:
    """Return the shipped costs of the embedded pair, measured on the CPU in the field `device`."""
    found = (CostModel.load(path) for path in sorted(SHIPPED.glob("*.json")))
    return next(cost for cost in found if cost.measured.get("device_type") == "cpu" and cost.draft_phases is not None)


def predict(cost: CostModel, trace: Trace) -> float:
    """Return the seconds that the decode steps of a run take on the device of these costs, without prefill.

    The cost of a step depends on the live rows, the longest draft, and the rows' KV lengths. Raises ValueError for a
    trace without steps.
    """
    if trace.level == "off":
        raise ValueError("steps were not recorded because of trace='off'; use trace='steps'")
    decode = trace.steps[trace.steps.kind == "decode"]
    steps = decode.groupby("step").agg(
        batch=("row", "size"), k=("drafted", "max"), tokens=("kv_length", cost.kv_of_rows)
    )
    return float(np.sum(cost.step(steps.batch, steps.k, steps.tokens - 1)))  # the last token is not cached yet


def best_fixed_length(
    cost: CostModel, batch: int, alpha: float, kv_length: float = 256, most: int = 16
) -> tuple[int, float]:
    """Return the draft length with the most expected tokens per second, and the speed relative to regular decoding.

    alpha: probability that a draft token is accepted if all earlier draft tokens of the step were, equal for all rows
    and positions. No row ends early: the gain is in tokens per step.
    """
    seconds = cost.step(batch, np.arange(most + 1), kv_length)
    gain = expected_tokens(alpha, most) * seconds[0] / seconds
    return int(gain.argmax()), float(gain.max())
