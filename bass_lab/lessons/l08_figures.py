"""Figures of lesson 08: throughput, latency, phases of a step, and the roofline."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from bass_lab.lessons.l08_demonstrations import PHASES
from bass_lab.measure.records import metrics
from bass_lab.measure.roofline import Roofline
from bass_lab.show.looks import METHODS, bars, curve, empty_figure, interval, titled

UNITS = {name: metric["unit"] for name, metric in metrics().items()}


def throughput_figure(records: pd.DataFrame) -> go.Figure:
    """Return tokens per second of the batch, per batch size and method."""
    figure = empty_figure(titled("Throughput of the batch", records), "batch size", UNITS["tokens_per_second"], 420)
    for method, look, part in _by_method(records):
        drawn = bars(method, part.batch.astype(str), part.tokens_per_second, look)
        figure.add_trace(drawn.update(hovertemplate=f"{method}, batch %{{x}}: %{{y:,.0f}} tokens/s<extra></extra>"))
    return figure.update_xaxes(type="category")


def gain_figure(records: pd.DataFrame) -> go.Figure:
    """Return over_regular against the batch size, with 95% intervals of the paired ratios."""
    sets = ", ".join(records.prompt_set.unique())
    title = titled(f"Throughput ÷ throughput of regular decoding: {sets}", records)
    figure = empty_figure(title, "batch size", UNITS["over_regular"], 420)
    for method, look, part in _by_method(records):
        if method != "regular":
            whiskers = interval(part.over_regular, part.low, part.high)
            line = curve(method, part.batch.astype(str), part.over_regular, look, error_y=whiskers)
            figure.add_trace(line.update(hovertemplate=f"{method}, batch %{{x}}: %{{y:.2f}}×<extra></extra>"))
    figure.add_hline(1, line={"color": "#444444", "width": 1})
    return figure.update_xaxes(type="category").update_yaxes(rangemode="tozero")


def latency_figure(records: pd.DataFrame) -> go.Figure:
    """Return ms per token of a row: the mean as a marker, and a line from the first row to the last row."""
    figure = empty_figure("Latency: mean (marker), first to last row (line)", "batch size", UNITS["mean_ms"], 420)
    parts, sizes = _by_method(records), sorted(records.batch.unique())
    for place, (method, look, part) in enumerate(parts):
        beside = (place - (len(parts) - 1) / 2) * 0.13
        whiskers = interval(part.mean_ms, part.first_ms, part.last_ms, thickness=3)
        hover = f"{method}, batch %{{customdata[0]}}: first %{{customdata[1]:.2f}}, mean %{{y:.2f}}, "
        marks = curve(method, part.batch.map(sizes.index) + beside, part.mean_ms, look, "markers", error_y=whiskers)
        marks.update(customdata=part[["batch", "first_ms", "last_ms"]])
        figure.add_trace(marks.update(hovertemplate=hover + "last %{customdata[2]:.2f} ms<extra></extra>"))
    ticks = {"tickvals": list(range(len(sizes))), "ticktext": [str(size) for size in sizes]}
    return figure.update_xaxes(ticks).update_yaxes(rangemode="tozero")


def _by_method(records: pd.DataFrame) -> list[tuple[str, str, pd.DataFrame]]:
    """Return name, look and lines of each method in the order of `METHODS`, for its first draft length. "batched" with
    the default policy is a method of its own if the record also has a fixed length."""
    once = records.drop_duplicates(["method", "batch"])
    found = [(method, method, once[once.method == method]) for method in METHODS if (once.method == method).any()]
    default = records[(records.method == "batched") & records.k.isna()].drop(once.index, errors="ignore")
    return found + [("batched, default policy", "bonus", default)] * (len(default) > 0)


def phases_figure(phases: pd.DataFrame) -> go.Figure:
    """Return the phases of a step divided by the tokens per row and step."""
    figure = empty_figure("Time per token of a row, by phase", "ms per token", "", 170 + 38 * len(phases))
    labels = [f"batch {line.batch}, {f'k = {line.k}' if line.k else 'regular'}" for line in phases.itertuples()]
    for phase in PHASES:
        drawn = bars(phase, phases[phase] / phases.tokens, labels, phase, orientation="h", customdata=phases[phase])
        hover = f"%{{y}}, {phase}: %{{x:.2f}} ms per token, %{{customdata:.2f}} ms per step<extra></extra>"
        figure.add_trace(drawn.update(hovertemplate=hover))
    return figure.update_layout(barmode="stack").update_yaxes(autorange="reversed")


def roofline_figure(bound: pd.DataFrame, roofline: Roofline) -> go.Figure:
    """Return target passes under the device's roofline: Gflop/s against flop per byte, both logarithmic."""
    device = roofline.device
    figure = empty_figure(f"Roofline: {device.name}", "flop per byte of memory", "Gflop/s", 460)
    x = np.geomspace(bound.intensity.min() / 2, max(bound.intensity.max(), device.ridge) * 2, 60)
    roof = np.minimum(x * device.bandwidth, device.flops) / 1e9
    figure.add_scatter(name="roof", x=x, y=roof, mode="lines", line={"color": "black"}, hoverinfo="skip")
    for method, part in (("regular", bound[bound.k == 0]), ("batched", bound[bound.k > 0])):
        reached = np.minimum(part.intensity * device.bandwidth, device.flops) * part.share / 1e9
        points = curve(f"{method}: target passes", part.intensity, reached, method, "markers+text")
        points.update(text=part.batch.astype(str), textposition="top left", marker_size=11, customdata=part.share)
        hover = f"{method}, batch %{{text}}: %{{y:.0f}} Gflop/s, %{{customdata:.0%}} of the roof<extra></extra>"
        figure.add_trace(points.update(hovertemplate=hover))
    return figure.update_xaxes(type="log", dtick=1).update_yaxes(type="log", dtick=1)


def real_sizes_figure(table: pd.DataFrame) -> go.Figure:
    """Return mean ms per token, a bar per line of `at_real_sizes`. Speculative bars are labelled over_regular_mean, the
    quotient of two bars."""
    title = titled("7.8B + 310M on a GPU: mean time per token of a row", table)
    figure = empty_figure(title, "ms per token (mean over rows)", "", 150 + 27 * len(table))
    papers = table.source.map({"the paper": " (paper, A100)"}).fillna("")
    table = table.assign(label="batch " + table.batch.astype(str) + ": " + table.way + papers)
    looks = {"roofline": "nothing", "the paper": "baseline"}
    for (source, method), part in table.groupby(["source", "method"], sort=False):
        name = {"roofline": "roofline (model)", "the paper": "the paper"}.get(source, method)
        shown = part.over_regular_mean.where(part.method != "regular")
        texts = ["" if pd.isna(value) else f"{value:.2f}×" for value in shown]
        drawn = bars(name, part.ms, part.label, looks.get(source, method), orientation="h", customdata=part.device)
        drawn.update(text=texts, textposition="outside", cliponaxis=False)
        figure.add_trace(drawn.update(hovertemplate="%{y}: %{x:.2f} ms, %{customdata}<extra></extra>"))
    figure.update_layout(barmode="overlay").update_xaxes(range=[0, 1.1 * table.ms.max()])
    return figure.update_yaxes(categoryorder="array", categoryarray=table.label[::-1], ticksuffix=" ")
