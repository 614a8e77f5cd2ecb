"""Lesson 08: where a step's time goes, what bounds it, and the figures of speed and latency.

Speeds come from `benchmark` and `records`, bounds from `roofline`; here they are put side by side and drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from bass_core.generation import generate
from bass_core.models import ModelPair
from bass_lab.measure.roofline import Roofline, utilisation
from bass_lab.show import plots

if TYPE_CHECKING:  # plotly is optional; imported where a figure is made
    import plotly.graph_objects as go

PAPER = {  # arXiv 2404.15778, abstract
    "models": "7.8B target",
    "device": "one A100",
    "batch": 8,
    "mean ms per token": 5.8,
    "tokens/s": 1100.0,
    "over regular": 2.15,
}
A100_BANDWIDTH = (1.55e12, 2.0e12)  # bytes/s: the 40 GB and the 80 GB variant; the abstract does not say which
PHASES = {  # colour, hatching
    "draft": (plots.COLOURS["recovered"], "/"),
    "verify": (plots.COLOURS["accepted"], ""),
    "other": (plots.COLOURS["regular"], "x"),
}


def step_phases(
    pair: ModelPair, prompts: Sequence[str], batches: Sequence[int], draft_lengths: Sequence[int | None],
    repeats: int = 5, **options,
) -> pd.DataFrame:  # fmt: skip
    """Medians over the decode steps of several runs that take turns, one line per (batch, k).

    Of the default policy (draft length None) those steps count that have its most frequent length.

    Columns: batch, k; draft, verify, other: milliseconds of a step; step: their sum; tokens: emitted per row and step;
    kv: mean keys of a row. options: as in `generate`.
    """
    parts = []
    for repeat in range(repeats + 1):
        for batch in batches:
            for k in draft_lengths:
                out = generate(pair, prompts[:batch], draft_length=k, eos_token_id=(), **options)
                steps = out.trace.steps.query("kind == 'decode'" if k is None else "kind == 'decode' and k == @k")
                whole = steps[steps.groupby("step").row.transform("size") == batch]  # before any row has ended
                if repeat:  # the first warms up
                    parts.append(whole.assign(batch=batch, policy=k is None, tokens=whole.accepted + 1))
    steps = pd.concat(parts)
    usual = steps.groupby(["batch", "policy"]).k.transform(lambda lengths: lengths.mode()[0])
    grouped = steps[~steps.policy | (steps.k == usual)].groupby(["batch", "k"])
    phases = grouped[["draft_ms", "verify_ms", "other_ms"]].median().rename(columns=lambda name: name[: -len("_ms")])
    found = phases.assign(step=phases.sum(axis=1), tokens=grouped.tokens.mean(), kv=grouped.kv_length.mean())
    return found.reset_index()


def bounds(phases: pd.DataFrame, roofline: Roofline) -> pd.DataFrame:
    """The target's pass of each line of `step_phases` against its roof, and what of the device is used.

    Columns: batch, k, verify (ms, measured), roof (ms, the least time), limit (what the roof is made of), share (of the
    roof that is reached), intensity (flop per byte), verified and emitted: `roofline.utilisation` of such steps.
    """
    lines = []
    for line in phases.itertuples():
        shape = line.batch, line.k + 1, line.kv + line.k + 1
        roof = 1e3 * roofline.seconds(*shape)
        used = utilisation(_as_step(line), roofline.work, None, roofline.device)
        lines.append(
            {
                "batch": line.batch,
                "k": line.k,
                "verify": line.verify,
                "roof": roof,
                "limit": "arithmetic" if roofline.intensity(*shape) > roofline.device.ridge else "memory",
                "share": roof / line.verify,
                "intensity": roofline.intensity(*shape),
                "verified": used.verified,
                "emitted": used.emitted,
            }
        )
    return pd.DataFrame(lines)


def _as_step(line: NamedTuple) -> pd.DataFrame:
    """A line of `step_phases` as a trace's step in which every row drafts, emits and holds the mean."""
    rows = {"step": 0, "row": range(line.batch), "kind": "decode", "drafted": line.k, "emitted": line.tokens}
    return pd.DataFrame(rows | {"kv_length": line.kv} | {f"{phase}_ms": getattr(line, phase) for phase in PHASES})


def beside_the_paper(records: pd.DataFrame, batch: int = 8) -> pd.DataFrame:
    """The abstract's figures and those of `batched` in the records at this batch size, hardware named."""
    ours = records[(records.method == "batched") & (records.batch == batch)]
    lines = [{"source": "the paper, abstract", **PAPER}]
    for line in ours.itertuples():
        lines.append(
            {
                "source": f"measured, {line.prompt_set} prompts, k {line.k:.0f}",
                "models": line.models,
                "device": f"{line.device} ({line.cores} CPU cores)",
                "batch": line.batch,
                "mean ms per token": line.mean_ms,
                "tokens/s": line.tokens_per_second,
                "over regular": line.over_regular,
            }
        )
    return pd.DataFrame(lines).set_index("source")


def scaled_to(bandwidth: float) -> tuple[float, float]:
    """The paper's 5.8 ms per token at another memory bandwidth (bytes/s), from either A100: what it would be if bytes
    were all that counts. For devices on which a 7.8B model fits."""
    slow, fast = A100_BANDWIDTH
    return PAPER["mean ms per token"] * slow / bandwidth, PAPER["mean ms per token"] * fast / bandwidth


# ------------------------------------------------------------------------------------------------------------- figures


def throughput_figure(records: pd.DataFrame) -> go.Figure:
    """Tokens per second of all rows together, per batch size and method."""
    import plotly.graph_objects as go

    figure = plots.empty_figure(
        plots.titled("Throughput of the batch", records), "batch size", "tokens per second", 420
    )
    for method, part in _by_method(records):
        colour, _, _, hatching = plots.METHODS[method]
        marker = {"color": colour, "pattern": {"shape": hatching, "fgcolor": "white", "size": 6}}
        hover = f"{method}, batch %{{x}}: %{{y:,.0f}} tokens/s<extra></extra>"
        bars = go.Bar(name=method, x=part.batch.astype(str), y=part.tokens_per_second, marker=marker)
        figure.add_trace(bars.update(hovertemplate=hover))
    return figure.update_layout(plots.LEGEND_BELOW).update_xaxes(type="category")


def gain_figure(records: pd.DataFrame) -> go.Figure:
    """Speed over regular decoding against the batch size, with 95% intervals of the paired ratios."""
    import plotly.graph_objects as go

    figure = plots.empty_figure(
        plots.titled("Speed over regular decoding", records), "batch size", "times as fast", 420
    )
    for method, part in _by_method(records):
        if method == "regular":
            continue
        colour, dash, symbol, _ = plots.METHODS[method]
        spread = {"array": part.high - part.over_regular, "arrayminus": part.over_regular - part.low}
        figure.add_trace(
            go.Scatter(
                name=method,
                x=part.batch.astype(str),
                y=part.over_regular,
                error_y={"type": "data", "symmetric": False, **spread},
                mode="lines+markers",
                line={"color": colour, "dash": dash},
                marker={"symbol": symbol, "size": 9},
                hovertemplate=f"{method}, batch %{{x}}: %{{y:.2f}}×<extra></extra>",
            )
        )
    figure.add_hline(1, line={"color": "#444444", "width": 1})
    return figure.update_layout(plots.LEGEND_BELOW).update_xaxes(type="category").update_yaxes(rangemode="tozero")


def latency_figure(records: pd.DataFrame) -> go.Figure:
    """Milliseconds per token of a row: from the first row to finish to the last, the mean marked."""
    import plotly.graph_objects as go

    figure = plots.empty_figure("Latency of a row: first, mean and last", "batch size", "ms per token", 420)
    parts = _by_method(records)
    sizes = sorted(records.batch.unique())
    for place, (method, part) in enumerate(parts):
        colour, _, symbol, _ = plots.METHODS[method]
        x = np.array([sizes.index(batch) for batch in part.batch]) + (place - (len(parts) - 1) / 2) * 0.13
        figure.add_trace(
            go.Scatter(
                name=method,
                x=x,
                y=part.mean_ms,
                error_y={
                    "type": "data",
                    "symmetric": False,
                    "array": part.last_ms - part.mean_ms,
                    "arrayminus": part.mean_ms - part.first_ms,
                    "thickness": 3,
                },
                mode="markers",
                marker={"symbol": symbol, "size": 10, "color": colour},
                customdata=np.stack([part.batch, part.first_ms, part.last_ms], axis=1),
                hovertemplate=f"{method}, batch %{{customdata[0]}}: first %{{customdata[1]:.2f}}, mean %{{y:.2f}}, "
                "last %{customdata[2]:.2f} ms<extra></extra>",
            )
        )
    ticks = {"tickvals": list(range(len(sizes))), "ticktext": [str(size) for size in sizes]}
    return figure.update_layout(plots.LEGEND_BELOW).update_xaxes(ticks).update_yaxes(rangemode="tozero")


def _by_method(records: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The lines of each method in the order of `plots.METHODS`; of several draft lengths the first."""
    once = records.drop_duplicates(["method", "batch"])
    return [(method, once[once.method == method]) for method in plots.METHODS if (once.method == method).any()]


def phases_figure(phases: pd.DataFrame) -> go.Figure:
    """What an emitted token costs: a step's phases divided by the tokens that a row emits in it."""
    import plotly.graph_objects as go

    figure = plots.empty_figure("Time per token of a row, by phase", "ms per token", "", 170 + 38 * len(phases))
    labels = [f"batch {line.batch}, {f'k = {line.k}' if line.k else 'regular'}" for line in phases.itertuples()]
    for phase, (colour, hatching) in PHASES.items():
        marker = {"color": colour, "pattern": {"shape": hatching, "fgcolor": "white", "size": 5}}
        bars = go.Bar(name=phase, orientation="h", y=labels, x=phases[phase] / phases.tokens, marker=marker)
        hover = f"%{{y}}, {phase}: %{{x:.2f}} ms per token, %{{customdata:.2f}} ms per step<extra></extra>"
        figure.add_trace(bars.update(hovertemplate=hover, customdata=phases[phase]))
    figure.update_layout(plots.LEGEND_BELOW, barmode="stack", legend_traceorder="normal")
    return figure.update_yaxes(autorange="reversed")


def roofline_figure(bound: pd.DataFrame, roofline: Roofline) -> go.Figure:
    """The target's passes under the roof of the device: arithmetic against flop per byte, both logarithmic."""
    import plotly.graph_objects as go

    device = roofline.device
    figure = plots.empty_figure(f"Roofline: {device.name}", "flop per byte of memory", "Gflop/s", 460)
    x = np.geomspace(bound.intensity.min() / 2, max(bound.intensity.max(), device.ridge) * 2, 60)
    roof = np.minimum(x * device.bandwidth, device.flops) / 1e9
    figure.add_trace(go.Scatter(name="roof", x=x, y=roof, mode="lines", line={"color": "black"}, hoverinfo="skip"))
    for method, part in (("regular", bound[bound.k == 0]), ("batched", bound[bound.k > 0])):
        colour, _, symbol, _ = plots.METHODS[method]
        reached = part.intensity.map(lambda i: min(i * device.bandwidth, device.flops)) * part.share / 1e9
        figure.add_trace(
            go.Scatter(
                name=f"{method}: passes of the target",
                x=part.intensity,
                y=reached,
                mode="markers+text",
                text=[f"{batch}" for batch in part.batch],
                textposition="top left",
                marker={"symbol": symbol, "size": 11, "color": colour},
                customdata=part.share,
                hovertemplate=f"{method}, batch %{{text}}: %{{y:.0f}} Gflop/s, %{{customdata:.0%}} of the roof"
                "<extra></extra>",
            )
        )
    return figure.update_layout(plots.LEGEND_BELOW).update_xaxes(type="log", dtick=1).update_yaxes(type="log", dtick=1)
