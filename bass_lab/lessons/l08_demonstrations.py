"""Lesson 08: times of a step's phases, their roofline bounds, and a comparison with the paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd
import torch

from bass_core.generation import generate
from bass_core.loading.model_pair import ModelPair
from bass_lab.gpu.decoding import CONTEXT, NEW, PAPER_MS
from bass_lab.gpu.recorded import GpuRecord
from bass_lab.measure import records
from bass_lab.measure.roofline import H100, Device, Roofline, StepWork, utilisation
from bass_lab.named_pairs import SHAPES, named_config

PAPER = {  # arXiv 2404.15778, abstract
    "device": "one A100",
    "batch": 8,
    "mean ms per token": PAPER_MS,
    "tokens/s": 1100.0,
    "over_regular_mean": 2.15,  # stands next to the mean latency; the abstract does not define it
}
SHAPE, BATCHES = "paper-7.8b", (1, 8, 32)  # in the record at real sizes
PLAIN = {"attention": "ragged", "compile": "compiled+graphs"}  # usual settings; other settings are named
COLUMNS = ["batch", "way", "source", "method", "device", "dtype", "synthetic", "ms", "over_regular_mean", "tokens/s",
           "over_regular", "bandwidth", "exact"]  # fmt: skip
PHASES = ("draft", "verify", "other")


def step_phases(
    pair: ModelPair, prompts: Sequence[str], batches: Sequence[int], draft_lengths: Sequence[int | None],
    repeats: int = 5, **options,
) -> pd.DataFrame:  # fmt: skip
    """Return medians over the decode steps of interleaved runs, one line per (batch, k).

    For the default policy (None), only steps with its most frequent length count. Columns: batch, k; draft, verify,
    other: ms of a step; step: total; tokens: per row and step; kv: mean KV length of a row. options: as in `generate`.
    """
    parts = []
    for repeat in range(repeats + 1):
        for batch in batches:
            for k in draft_lengths:
                out = generate(pair, prompts[:batch], draft_length=k, eos_token_id=(), **options)
                steps = out.trace.steps.query("kind == 'decode'" if k is None else "kind == 'decode' and k == @k")
                whole = steps[steps.groupby("step").row.transform("size") == batch]  # all rows live
                if repeat:  # the first repeat warms up
                    parts.append(whole.assign(batch=batch, policy=k is None, tokens=whole.accepted + 1))
    steps = pd.concat(parts)
    usual = steps.groupby(["batch", "policy"]).k.transform(lambda lengths: lengths.mode()[0])
    grouped = steps[~steps.policy | (steps.k == usual)].groupby(["batch", "k"])
    phases = grouped[["draft_ms", "verify_ms", "other_ms"]].median().rename(columns=lambda name: name[: -len("_ms")])
    found = phases.assign(step=phases.sum(axis=1), tokens=grouped.tokens.mean(), kv=grouped.kv_length.mean())
    return found.reset_index()


def bounds(phases: pd.DataFrame, roofline: Roofline) -> pd.DataFrame:
    """Return the target pass of each line of `step_phases`, its roofline time, and the device utilisation.

    Columns: batch, k, verify and roof (ms), limit ("arithmetic" or "memory"), share (roof / verify), intensity (flop
    per byte), verified and emitted (`roofline.utilisation`).
    """
    lines = []
    for line in phases.itertuples():
        shape = line.batch, line.k + 1, line.kv + line.k + 1
        roof, intensity = 1e3 * roofline.seconds(*shape), roofline.intensity(*shape)
        limit = "arithmetic" if intensity > roofline.device.ridge else "memory"
        used = utilisation(_as_step(line), roofline.work, None, roofline.device)
        found = {"batch": line.batch, "k": line.k, "verify": line.verify, "roof": roof, "limit": limit}
        found |= {"share": roof / line.verify, "intensity": intensity}
        lines.append(found | {"verified": used.verified, "emitted": used.emitted})
    return pd.DataFrame(lines)


def _as_step(line: NamedTuple) -> pd.DataFrame:
    """Return a line of `step_phases` as a step of a trace with the mean values in every row."""
    rows = {"step": 0, "row": range(line.batch), "kind": "decode", "drafted": line.k, "emitted": line.tokens}
    return pd.DataFrame(rows | {"kv_length": line.kv} | {f"{phase}_ms": getattr(line, phase) for phase in PHASES})


def beside_the_paper(table: pd.DataFrame, batch: int = 8) -> pd.DataFrame:
    """Return the numbers of the abstract and of `batched` in a record at this batch size, with hardware."""
    table = records.with_means(table, ["prompt_set", "batch"])
    lines = [{"source": "the paper's abstract: 7.8B target", **PAPER}]
    for line in table[(table.method == "batched") & (table.batch == batch)].itertuples():
        about = {"device": f"{line.device} ({line.cores} CPU cores)", "batch": line.batch}
        speed = {"mean ms per token": line.mean_ms, "tokens/s": line.tokens_per_second}
        speed |= {"over_regular_mean": line.over_regular_mean, "over_regular": line.over_regular}
        lengths = "default policy" if pd.isna(line.k) else f"k {line.k:.0f}"
        lines.append({"source": f"{line.models}, {line.prompt_set}, {lengths}"} | about | speed)
    return pd.DataFrame(lines).set_index("source")


def gpu_of(record: GpuRecord | None) -> Device:
    """Return the GPU of a record at real sizes with measured peaks, or an H100's data sheet without a record."""
    if record is None:
        return H100
    line = record.content.iloc[-1]
    name = f"{record.device} (a copy, measured)"
    return Device(name, bandwidth=1e9 * line.copy_gb_per_s, flops=1e12 * line.matrix_tflops)


def nearest_to_the_paper(record: GpuRecord | None) -> pd.Series | None:
    """Return the fastest batched line of a GPU's record at the paper's sizes and batch, or None."""
    if record is None:
        return None
    lines = record.content.query("shape == @SHAPE and batch == @PAPER['batch'] and method == 'batched'")
    return None if lines.empty else lines.loc[lines.mean_ms.idxmin()]


def at_real_sizes(record: GpuRecord | None) -> pd.DataFrame:
    """Return times at the paper's 7.8B + 310M by batch size: roofline of regular decoding, recorded on a GPU, paper.

    Columns: batch, way, source ("recorded", "roofline" or "the paper"), method, device, dtype, synthetic, ms (mean per
    token of a row), over_regular_mean, tokens/s, over_regular, bandwidth (share of a copy's), exact (of the embedded
    pair).
    """
    device, work = gpu_of(record), StepWork.of(named_config(SHAPES[SHAPE].target, SHAPE), torch.bfloat16)
    timed = [] if record is None else record.content.query("shape == @SHAPE").to_dict("records")
    batches, lines = {line["batch"] for line in timed} or BATCHES, [line | _measured(line) for line in timed]
    for batch in batches:
        least = Roofline(work, device).seconds(batch, 1, CONTEXT + NEW / 2)
        line = {"batch": batch, "way": "regular, least time", "source": "roofline", "method": "regular"}
        line |= {"device": device.name, "dtype": "bfloat16", "synthetic": False}
        lines.append(line | {"ms": 1e3 * least, "tokens/s": batch / least})
    line = PAPER | {"way": "batched", "source": "the paper", "method": "batched", "synthetic": False}
    lines.append(line | {"ms": PAPER["mean ms per token"]})
    order = {"roofline": 0, "recorded": 1, "the paper": 2}
    table = pd.DataFrame(lines, columns=COLUMNS)
    return table.sort_values(["batch", "source"], key=lambda column: column.replace(order), kind="stable")


def _measured(line: dict) -> dict:
    """Return the columns of `at_real_sizes` that a line of a record has under another name."""
    parts = [f"{line['method']} {line['policy']}".strip()]
    parts += [f"α {line['alpha']:g}"] if pd.notna(line["alpha"]) else []
    parts += [line[name] for name, usual in PLAIN.items() if line[name] != usual]
    found = {"way": ", ".join(parts), "source": "recorded", "ms": line["mean_ms"]}
    used = line["utilisation"] or {}
    return found | {"tokens/s": line["tokens_per_second"], "bandwidth": used.get("bandwidth")}
