"""Figures and coloured text of a trace. No function runs a model."""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from transformers import PreTrainedTokenizerBase

from bass_core.loop.trace import Trace
from bass_lab.show.looks import LOOKS, bars, cells, empty_figure, interval, titled
from bass_lab.texts.pieces import pieces_of

CODE = "font-family:ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere;"  # HTML pages restyle <pre>
SIDE_BY_SIDE = "<div style='display:flex;gap:24px;flex-wrap:wrap'>{}</div>"  # for columns
COLUMN = "<div style='flex:1;min-width:280px'><h4 style='margin:8px 0'>{}</h4>{}</div>"
GREY = "#707070"  # colour of given text
UNDERLINES = {"accepted": "2px solid", "recovered": "2px dashed", "bonus": "4px double", "regular": "2px dotted"}
MEANINGS = {
    "accepted": "from the draft, accepted",
    "recovered": "from the target, after a rejection",
    "bonus": "from the target, after full acceptance",
    "regular": "from the target, nothing drafted",
    "rejected": "from the draft, rejected",
    "not reached": "from the draft, after a rejection, not checked",
}


def raster_matrix(trace: Trace, column: str = "accepted") -> pd.DataFrame:
    """Return the accepted tokens in the text, or "drafted" tokens: [row, decode step], NaN after the row's end."""
    decode = trace.steps.query("kind == 'decode'")
    decode = decode.assign(accepted=decode[["accepted", "emitted"]].min(axis=1))
    numbered = decode.assign(nth=decode.groupby("row").cumcount() + 1)
    return numbered.pivot(index="row", columns="nth", values=column)


def acceptance_raster(trace: Trace, title: str = "Accepted draft tokens, per row and step") -> go.Figure:
    """Return the batch as a raster: one line per row, and one cell with the accepted tokens per decode step. A step
    without draft tokens has a grey cell with a dot."""
    matrix, drafted = raster_matrix(trace), raster_matrix(trace, "drafted")
    figure = empty_figure(titled(title, trace), "decode step of the row", "row", height=140 + 34 * len(matrix))
    most = int(drafted.max(axis=None))
    hover = "row %{y}, step %{x}: %{z:.0f} accepted<extra></extra>"
    scale = {"title": f"accepted<br>of {most}", "dtick": -(-most // 5) or 1, "tickformat": "d"}
    shown = {"zmin": 0, "zmax": max(most, 1), "colorbar": scale, "showscale": most > 0}
    figure.add_trace(cells(matrix.where(drafted > 0), hovertemplate=hover, **shown))
    regular = cells(matrix.where(drafted == 0), hovertemplate="row %{y}, step %{x}: nothing drafted<extra></extra>")
    grey = [[0, LOOKS["nothing"].colour], [1, LOOKS["nothing"].colour]]
    figure.add_trace(regular.update(text=np.where(drafted == 0, "·", ""), colorscale=grey, showscale=False))
    return figure.update_yaxes(autorange="reversed", dtick=1, showgrid=False).update_xaxes(showgrid=False)


def speed_chart(table: pd.DataFrame) -> go.Figure:
    """Return a bar of `over_regular` with the interval `low` … `high` for each table line, labelled by `label`."""
    title = titled("Speed relative to regular decoding", table)
    figure = empty_figure(title, "times as fast (1 = this engine without drafts)", "", 120 + 42 * len(table))
    looks = ["batched" if "batched" in label else "baseline" for label in table.label]
    labels = [f"{label}: <b>{value:.2f}×</b> " for label, value in zip(table.label, table.over_regular, strict=True)]
    options = {"orientation": "h", "hovertemplate": "%{y}<extra></extra>"}
    whiskers = interval(table.over_regular, table.low, table.high)
    figure.add_trace(bars("", table.over_regular, labels, looks, error_x=whiskers, **options))
    figure.add_vline(x=1, line={"color": "black", "width": 1})
    return figure.update_yaxes(autorange="reversed")


def legend() -> str:
    """Return HTML: the legend of colours and underlines in `coloured_text`."""
    return " &nbsp; ".join(f'<span style="{_style(kind)}">{kind}</span> {MEANINGS[kind]}' for kind in UNDERLINES)


def _style(kind: str) -> str:
    return f"color:{LOOKS[kind].colour};border-bottom:{UNDERLINES[kind]}"


def coloured_text(
    tokens: Sequence[int],
    kinds: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt: str = "",
    titles: Sequence[str] | None = None,
    marked: Sequence[bool] | None = None,
) -> str:
    """Return HTML of generated tokens, underlined and coloured by origin (`Trace.tokens.kind`).

    prompt: shown first, in grey. titles: shown on hover. marked: tokens with a yellow background.
    """
    titles = [""] * len(tokens) if titles is None else titles
    marked = [False] * len(tokens) if marked is None else marked
    spans = [f'<span style="color:{GREY}">{html.escape(prompt)}</span>'] if prompt else []
    for piece, kind, title, mark in zip(pieces_of(tokens, tokenizer), kinds, titles, marked, strict=True):
        style = _style(kind) + (";background:#FFF3B0" if mark else "")
        hover = f' title="{html.escape(title)}"' if title else ""
        spans.append(f'<span{hover} style="{style}">{html.escape(piece)}</span>')
    return f'<pre style="{CODE}line-height:1.6;margin:0">{"".join(spans)}</pre>'
