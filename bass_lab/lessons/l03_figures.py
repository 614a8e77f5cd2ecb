"""Figures of lesson 03: every decision of a run, and acceptance against the draft length."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from bass_core.loop.trace import Trace
from bass_lab.show.looks import CURVES, FAINT, curve, empty_figure, titled
from bass_lab.show.token_views import outcomes


def p_against_q(trace: Trace) -> go.Figure:
    """Return q, p and the decision of every checked draft token."""
    title = titled("Every decision of the run", trace)
    figure = empty_figure(title, "q: the draft's probability", "p: the target's probability", 460)
    figure.add_scatter(name="p = q", x=[0, 1], y=[0, 1], mode="lines", line=FAINT | {"dash": "dot"}, hoverinfo="skip")
    tokens = outcomes(trace)
    for outcome, symbol in (("accepted", "circle-open"), ("rejected", "x")):
        part = tokens[tokens.outcome == outcome].dropna(subset=["q"])
        hover = "row %{customdata[0]}, step %{customdata[1]}: q = %{x:.2f}, p = %{y:.2f}"
        points = curve(f"{outcome} ({len(part)})", part.q, part.p, outcome, "markers", hovertemplate=hover)
        figure.add_trace(points.update(customdata=part[["row", "nth"]], marker={"symbol": symbol, "size": 7}))
    return figure.update_xaxes(range=[-0.03, 1.03]).update_yaxes(range=[-0.03, 1.03])


def rates_figure(table: pd.DataFrame) -> go.Figure:
    """Return acceptance rate and α against the draft length, per prompt set (`l03_explorer.acceptance_table`)."""
    title = "α and acceptance rate against the draft length"
    figure = empty_figure(title, "draft length k", "rate", height=410)
    styles = {"α": ("solid", "circle"), "acceptance rate": ("dash", "diamond-open")}
    for (name, part), look in zip(table.groupby("prompt set", sort=False), CURVES, strict=False):
        for column, (dash, symbol) in styles.items():
            hover = f"{name}, k = %{{x}}: {column} %{{y:.2f}}<extra></extra>"
            line = curve(f"{column}, {name}", part["draft length"], part[column], look, hovertemplate=hover)
            figure.add_trace(line.update(line_dash=dash, marker_symbol=symbol))
    figure.update_yaxes(range=[0, 1.05], tickformat=".1f")
    return figure.update_xaxes(tickvals=sorted(table["draft length"].unique()))
