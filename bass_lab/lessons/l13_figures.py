"""Figures of lesson 13: the two caches, cross-attention, acceptance by source, and speed by method."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go

from bass_lab.lessons.l13_demonstrations import WAYS
from bass_lab.show.looks import bars, empty_figure, interval, panels

WAY_LOOKS = dict(zip(WAYS, ("accepted", "regular", "transformers", "draft"), strict=True))


def caches_figure(sources: Sequence[int], texts: Sequence[int]) -> go.Figure:
    """Return the caches of each row: a fixed cache of the source, and a growing cache of the text."""
    places = [f"row {row}" for row in range(len(sources))]
    titles = ["source cache: fixed", "text cache: grows"]
    figure = panels(1, 2, titles, "Two caches per row", 340, horizontal_spacing=0.12)
    for column, (lengths, look) in enumerate(((sources, "regular"), (texts, "accepted")), 1):
        longest = max(lengths)
        drawn = bars("filled", lengths, places, look, orientation="h", showlegend=False)
        figure.add_trace(drawn.update(hovertemplate="%{y}: %{x} tokens"), 1, column)
        rest = bars("empty", [longest - length for length in lengths], places, "rejected", orientation="h")
        figure.add_trace(rest.update(opacity=0.25, showlegend=column == 1, hoverinfo="skip"), 1, column)
    figure.update_layout(barmode="stack").update_yaxes(autorange="reversed")
    return figure.update_xaxes(title="slots")


def attention_figure(weights: pd.DataFrame) -> go.Figure:
    """Return the attention weights on source tokens (columns) for each written token (lines)."""
    title = "Cross-attention of the last layer"
    figure = empty_figure(title, "source, token by token", "text, token by token", 120 + 16 * len(weights))
    drawn = go.Heatmap(
        z=weights.to_numpy(), x=list(weights.columns), y=list(weights.index), colorscale="Blues", zmin=0,
        colorbar={"title": "weight"}, hovertemplate="written %{y}<br>source %{x}<br>weight %{z:.2f}<extra></extra>",
    )  # fmt: skip
    figure.add_trace(drawn).update_xaxes(tickangle=90, dtick=1)
    return figure.update_yaxes(autorange="reversed", dtick=1).update_layout(margin={"l": 110, "b": 110})


def sources_figure(table: pd.DataFrame) -> go.Figure:
    """Return α of each source (a table of `by_source`), hardest first."""
    ordered = table.sort_values("α")
    figure = empty_figure("Acceptance by source", "source, hardest first", "α", 360)
    drawn = bars("α", list(range(len(ordered))), ordered["α"], "accepted", customdata=ordered["source"])
    figure.add_trace(drawn.update(hovertemplate="%{customdata}<br>α %{y:.2f}<extra></extra>"))
    return figure.update_yaxes(range=[0, 1.02])


def speed_figure(table: pd.DataFrame) -> go.Figure:
    """Return the speed of each method relative to assisted decoding one by one, grouped by batch size."""
    title = "Speed relative to assisted decoding one by one"
    figure = empty_figure(title, "batch size", "times as fast", 380)
    batches = [str(batch) for batch in table.index.unique("batch")]
    for way in WAYS:
        part = table.xs(way, level="way")
        whiskers = interval(part.speed, part.low, part.high)
        drawn = bars(way, batches, part.speed, WAY_LOOKS[way], error_y=whiskers)
        figure.add_trace(drawn.update(hovertemplate="%{y:.2f}×"))
    return figure.update_layout(barmode="group").update_xaxes(type="category")
