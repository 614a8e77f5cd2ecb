"""Figures of lesson 14: utilisation, lock-step, bytes of attention, draft lengths against the batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pandas as pd
import plotly.graph_objects as go

from bass_lab.show.looks import CURVES, FAINT, bars, curve, empty_figure, panels


def utilisation_figure(table: pd.DataFrame) -> go.Figure:
    """Return the share of the peak against the batch by method. table: batch, method, verified, emitted."""
    titles = ["verified positions", "emitted tokens"]
    figure = panels(1, 2, titles, "GPU utilisation (modelled A100)", 430)
    for column, measure in enumerate(("verified", "emitted"), 1):
        for method, part in table.groupby("method", sort=False):
            line = curve(method, part.batch, part[measure], method, legendgroup=method, showlegend=column == 1)
            line.update(hovertemplate=f"{method}, batch %{{x}}: %{{y:.1%}}<extra></extra>")
            figure.add_trace(line, 1, column)
    figure.update_xaxes(title="batch", type="log", tickvals=sorted(set(table.batch)), ticktext=sorted(set(table.batch)))
    return figure.update_yaxes(tickformat=".0%", rangemode="tozero", matches="y")


def lock_step_figure(chances: pd.DataFrame, alpha: float) -> go.Figure:
    """Return tokens per step against the batch. chances: lock-step and own pace (columns) by batch."""
    figure = empty_figure(f"Acceptance probability {alpha} per draft token", "batch", "tokens per step of a row", 400)
    for (name, values), look in zip(chances.items(), ("regular", "accepted"), strict=True):
        figure.add_trace(curve(name, chances.index, values, look, hovertemplate="batch %{x}: %{y:.2f}"))
    return figure.update_yaxes(rangemode="tozero")


def bytes_figure(table: pd.DataFrame) -> go.Figure:
    """Return MB of a layer's attention by method. table: of `l14_demonstrations.attention_bytes`."""
    figure = empty_figure("Bytes of attention in one layer (counted)", "MB", "", 340)
    for name, look in (("keys and values", "accepted"), ("scores", "recovered")):
        drawn = bars(name, table[name], table.index, look, orientation="h")
        figure.add_trace(drawn.update(hovertemplate=f"%{{y}}: {name} %{{x:.2f}} MB<extra></extra>"))
    for way, line in table.iterrows():
        note = f"{line.products:.0f} launch{'es' if line.products > 1 else ''}"
        total = line["keys and values"] + line.scores
        figure.add_annotation(x=total, y=way, text=note, showarrow=False, xanchor="left")
    figure.update_layout(barmode="stack", margin_l=180)
    figure.update_xaxes(range=[0, 1.15 * (table["keys and values"] + table.scores).max()])
    return figure.update_yaxes(autorange="reversed")


def lengths_figure(table: pd.DataFrame, shown: Sequence[str], title: str) -> go.Figure:
    """Return speed ÷ best fixed length's (left) and mean length (right). table: batch, policy,
    k, tokens_per_s, over_best."""
    figure = panels(1, 2, ["speed ÷ speed of the best fixed length", "mean draft length"], title, 430)
    for name, look in zip(shown, CURVES, strict=False):
        part = table[table.policy == name]
        for column, measure in enumerate(("over_best", "k"), 1):
            line = curve(name, part.batch, part[measure], look, legendgroup=name, showlegend=column == 1)
            line.update(hovertemplate=f"{name}, batch %{{x}}: %{{y:.2f}}<extra></extra>")
            figure.add_trace(line, 1, column)
    best = table[table.policy.str.startswith("fixed")].sort_values("tokens_per_s").groupby("batch").k.last()
    figure.add_trace(curve("best fixed", best.index, best, "regular"), 1, 2)
    figure.add_hline(1, line=FAINT, row=1, col=1)
    batches = sorted(set(table.batch))
    figure.update_xaxes(title="batch", type="log", tickvals=batches, ticktext=batches)
    return figure.update_yaxes(rangemode="tozero")


def phases_figure(phases: Mapping[str, tuple[float, float]], ridge: float) -> go.Figure:
    """Return operations per byte of each phase and the ridge. phases: (operations per byte, ms) by name."""
    figure = empty_figure("Two phases of one model (counted)", "operations per byte", "", 260)
    for (name, (intensity, ms)), look in zip(phases.items(), ("prefill", "regular", "verify"), strict=True):
        point = curve(name, [intensity], [name], look, "markers+text", text=f"{ms:.1f} ms at least", marker_size=14)
        figure.add_trace(point.update(textposition="top center"))
    figure.add_vline(ridge, line={"color": "black", "dash": "dash"})
    label = {"text": "ridge of an A100", "showarrow": False, "yanchor": "bottom"}
    figure.add_annotation(x=math.log10(ridge), y=1, yref="paper", **label)  # annotations take logarithms on this axis
    figure.update_layout(showlegend=False, margin_l=200)
    return figure.update_xaxes(type="log", range=[0, 4]).update_yaxes(range=[2.5, -0.7])
