"""Figures and coloured text of a trace. Each function takes data and returns something to show; none computes text.

One light template, a colour-blind safe palette (Okabe & Ito), and a second cue beside colour everywhere: numbers in the
raster, underline styles in text, hatching on bars.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from bass_core.trace import Trace

if TYPE_CHECKING:  # plotly is optional; imported where a figure is made
    import plotly.graph_objects as go
    from transformers import PreTrainedTokenizerBase

COLOURS = {
    "accepted": "#0072B2",
    "recovered": "#D55E00",
    "bonus": "#009E73",
    "regular": "#5A5A5A",
    "rejected": "#CC79A7",
}
METHODS = {  # ways to decode: colour, dash, symbol, hatching
    "transformers": ("#56B4E9", "dashdot", "triangle-up", "."),
    "assisted": ("#CC79A7", "longdash", "cross", "x"),
    "regular": (COLOURS["regular"], "dot", "square", "/"),
    "single": (COLOURS["recovered"], "dash", "diamond", "\\"),
    "batched": (COLOURS["accepted"], "solid", "circle", ""),
}
CODE = "font-family:ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere;"  # pages style <pre> themselves
_TEXT_STYLES = {
    "accepted": "border-bottom:2px solid",
    "recovered": "border-bottom:2px dashed",
    "bonus": "border-bottom:4px double",
    "regular": "border-bottom:2px dotted",
}
_MEANINGS = {
    "accepted": "drafted, accepted",
    "recovered": "the target's, after a rejection",
    "bonus": "the target's, after full acceptance",
    "regular": "the target's, nothing drafted",
}


def house(title: str, height: int) -> dict:
    """The layout of the house style, without axes."""
    return {
        "template": "plotly_white",
        "title": {"text": title, "x": 0.01, "xanchor": "left", "font": {"size": 16}},
        "font": {"family": "system-ui, sans-serif", "size": 13},
        "margin": {"l": 70, "r": 20, "t": 60, "b": 50},
        "height": height,
    }


def titled(title: str, *sources: Trace | pd.DataFrame) -> str:
    """The title, which says so where a trace or a table of records is synthetic."""
    marked = any(
        source.synthetic if isinstance(source, Trace) else "synthetic" in source and source.synthetic.any()
        for source in sources
    )
    return f"{title} (synthetic)" if marked else title


# A legend under the figure: it takes no width from a narrow window. To be added to `house`, with room for panel titles.
LEGEND_BELOW = {
    "margin": {"t": 80},
    "legend": {"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom"},
}


def empty_figure(title: str, x: str, y: str, height: int) -> go.Figure:
    """A figure of one panel in the house style, with named axes and nothing in it."""
    import plotly.graph_objects as go

    axes = {"xaxis": {"title": x, "zeroline": False}, "yaxis": {"title": y, "zeroline": False}}
    return go.Figure(layout=house(title, height) | axes)


def raster_matrix(trace: Trace) -> pd.DataFrame:
    """Accepted drafts per row and decode step of that row (NaN once it has ended): rows down, steps across."""
    decode = trace.steps.query("kind == 'decode'")
    numbered = decode.assign(nth=decode.groupby("row").cumcount() + 1)
    return numbered.pivot(index="row", columns="nth", values="accepted")


def acceptance_raster(trace: Trace, title: str = "Accepted draft tokens, per row and step") -> go.Figure:
    """The batch as it ran: one line per row, one cell per decode step, coloured and numbered by accepted drafts."""
    import plotly.graph_objects as go

    matrix = raster_matrix(trace)
    drafted = int(trace.steps.drafted.max())
    figure = empty_figure(titled(title, trace), "decode step of the row", "row", height=140 + 34 * len(matrix))
    figure.add_trace(
        go.Heatmap(
            z=matrix.astype(object).where(matrix.notna(), None).to_numpy(),  # NaN is no JSON
            x=matrix.columns.to_numpy(),
            y=matrix.index.to_numpy(),
            zmin=0,
            zmax=max(drafted, 1),
            colorscale="Cividis",
            xgap=2,
            ygap=2,
            text=matrix.map(lambda value: "" if np.isnan(value) else f"{value:.0f}").to_numpy(),
            texttemplate="%{text}",
            hovertemplate="row %{y}, step %{x}: %{z:.0f} accepted<extra></extra>",
            colorbar={"title": f"accepted<br>of {drafted}", "thickness": 14, "tickformat": "d"},
        )
    )
    figure.update_yaxes(autorange="reversed", dtick=1, showgrid=False)
    figure.update_xaxes(showgrid=False)
    return figure


def speed_chart(table: pd.DataFrame, title: str = "Speed over regular decoding") -> go.Figure:
    """Bars of `over_regular` with the interval `low` … `high`, one per line of the table, labelled by `label`."""
    import plotly.graph_objects as go

    figure = empty_figure(
        titled(title, table), "times as fast (1 = this engine without drafting)", "", height=120 + 42 * len(table)
    )
    figure.add_trace(
        go.Bar(
            orientation="h",
            y=table.label,
            x=table.over_regular,
            error_x={
                "type": "data",
                "symmetric": False,
                "array": table.high - table.over_regular,
                "arrayminus": table.over_regular - table.low,
            },
            marker={
                "color": [COLOURS["accepted"] if "batched" in label else "#B0B0B0" for label in table.label],
                "pattern": {"shape": ["" if "batched" in label else "/" for label in table.label]},
            },
            text=[f"{value:.2f}×" for value in table.over_regular],
            textposition="inside",
            insidetextanchor="start",
            hovertemplate="%{y}: %{x:.2f}×<extra></extra>",
        )
    )
    figure.add_vline(x=1, line={"color": "black", "width": 1})
    figure.update_yaxes(autorange="reversed")
    figure.update_layout(margin={"l": 200})
    return figure


def legend() -> str:
    """HTML: what the colours and underlines of `coloured_text` mean."""
    return " &nbsp; ".join(
        f'<span style="color:{COLOURS[kind]};{style}">{kind}</span> {_MEANINGS[kind]}'
        for kind, style in _TEXT_STYLES.items()
    )


def coloured_text(
    tokens: Sequence[int],
    kinds: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt: str = "",
    titles: Sequence[str] | None = None,
    marked: Sequence[bool] | None = None,
) -> str:
    """HTML of generated tokens, each underlined and coloured by where it came from (`Trace.tokens.kind`).

    prompt: shown in grey before them. titles: what the mouse reads on each token. marked: on a yellow ground.
    """
    titles = [""] * len(tokens) if titles is None else titles
    marked = [False] * len(tokens) if marked is None else marked
    spans = [f'<span style="color:#707070">{html.escape(prompt)}</span>'] if prompt else []
    for piece, kind, title, mark in zip(_pieces(tokens, tokenizer), kinds, titles, marked, strict=True):
        style = f"color:{COLOURS[kind]};{_TEXT_STYLES[kind]}" + (";background:#FFF3B0" if mark else "")
        hover = f' title="{html.escape(title)}"' if title else ""
        spans.append(f'<span{hover} style="{style}">{html.escape(piece)}</span>')
    return f'<pre style="{CODE}line-height:1.6;margin:0">{"".join(spans)}</pre>'


def _pieces(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text that each token adds. A character split over tokens appears with the last of them."""
    pieces, done = [], ""
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:end], skip_special_tokens=True)
        complete = text[: -len("�")] if text.endswith("�") else text
        pieces.append(complete[len(done) :] if complete.startswith(done) else "")
        done = complete
    return pieces
