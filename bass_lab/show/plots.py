"""Figures and coloured text of a trace. Each function takes data and returns something to show; none computes text."""

from __future__ import annotations

import html
from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go
from transformers import PreTrainedTokenizerBase

from bass_core.loop.trace import Trace
from bass_lab.show.looks import LOOKS, bars, cells, empty_figure, interval, titled
from bass_lab.texts.pieces import pieces_of

CODE = "font-family:ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere;"  # pages style <pre> themselves
SIDE_BY_SIDE = "<div style='display:flex;gap:24px;flex-wrap:wrap'>{}</div>"  # of columns
COLUMN = "<div style='flex:1;min-width:280px'><h4 style='margin:8px 0'>{}</h4>{}</div>"
GREY = "#707070"  # of text that is given
UNDERLINES = {"accepted": "2px solid", "recovered": "2px dashed", "bonus": "4px double", "regular": "2px dotted"}
MEANINGS = {
    "accepted": "drafted, accepted",
    "recovered": "the target's, after a rejection",
    "bonus": "the target's, after full acceptance",
    "regular": "the target's, nothing drafted",
    "rejected": "drafted, refused",
    "not reached": "drafted behind a refusal, never judged",
}


def raster_matrix(trace: Trace) -> pd.DataFrame:
    """Accepted drafts in the text: rows down, each row's decode steps across (NaN once it has ended)."""
    decode = trace.steps.query("kind == 'decode'")
    decode = decode.assign(accepted=decode[["accepted", "emitted"]].min(axis=1))
    numbered = decode.assign(nth=decode.groupby("row").cumcount() + 1)
    return numbered.pivot(index="row", columns="nth", values="accepted")


def acceptance_raster(trace: Trace, title: str = "Accepted draft tokens, per row and step") -> go.Figure:
    """The batch as it ran: one line per row, one cell per decode step, coloured and numbered by accepted drafts."""
    matrix, drafted = raster_matrix(trace), int(trace.steps.drafted.max())
    figure = empty_figure(titled(title, trace), "decode step of the row", "row", height=140 + 34 * len(matrix))
    hover = "row %{y}, step %{x}: %{z:.0f} accepted<extra></extra>"
    scale = {"zmin": 0, "zmax": max(drafted, 1), "colorbar_title": f"accepted<br>of {drafted}"}
    figure.add_trace(cells(matrix, hovertemplate=hover, colorbar_tickformat="d", **scale))
    return figure.update_yaxes(autorange="reversed", dtick=1, showgrid=False).update_xaxes(showgrid=False)


def speed_chart(table: pd.DataFrame) -> go.Figure:
    """Bars of `over_regular` with the interval `low` … `high`, one per line of the table, labelled by `label`."""
    title = titled("Speed over regular decoding", table)
    figure = empty_figure(title, "times as fast (1 = this engine without drafting)", "", 120 + 42 * len(table))
    looks = ["batched" if "batched" in label else "baseline" for label in table.label]
    texts = {"text": [f"{value:.2f}×" for value in table.over_regular], "insidetextanchor": "start"}
    texts |= {"textposition": "inside", "hovertemplate": "%{y}: %{x:.2f}×<extra></extra>"}
    whiskers = interval(table.over_regular, table.low, table.high)
    figure.add_trace(bars("", table.over_regular, table.label, looks, orientation="h", error_x=whiskers, **texts))
    figure.add_vline(x=1, line={"color": "black", "width": 1})
    return figure.update_yaxes(autorange="reversed")


def legend() -> str:
    """HTML: what the colours and underlines of `coloured_text` mean."""
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
    """HTML of generated tokens, underlined and coloured by origin (`Trace.tokens.kind`).

    prompt: in grey before them. titles: shown on hover. marked: on a yellow ground.
    """
    titles = [""] * len(tokens) if titles is None else titles
    marked = [False] * len(tokens) if marked is None else marked
    spans = [f'<span style="color:{GREY}">{html.escape(prompt)}</span>'] if prompt else []
    for piece, kind, title, mark in zip(pieces_of(tokens, tokenizer), kinds, titles, marked, strict=True):
        style = _style(kind) + (";background:#FFF3B0" if mark else "")
        hover = f' title="{html.escape(title)}"' if title else ""
        spans.append(f'<span{hover} style="{style}">{html.escape(piece)}</span>')
    return f'<pre style="{CODE}line-height:1.6;margin:0">{"".join(spans)}</pre>'
