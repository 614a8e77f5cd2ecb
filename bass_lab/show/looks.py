"""Look of all figures: colours (Okabe & Ito), hatchings, dashes and symbols by name (`LOOKS`), a template, and the
parts of a figure. No figure depends on colour alone."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import plotly.io as pio
from IPython.display import HTML
from plotly.subplots import make_subplots

from bass_core.loop.trace import Trace


@dataclass(frozen=True)
class Look:
    """Colour, hatching and hatching colour (ink) of bars, and dash and symbol of curves."""

    colour: str
    hatch: str = ""
    dash: str = "solid"
    symbol: str = "circle"
    ink: str = "white"


LOOKS = {
    # outcome of a token
    "accepted": Look("#0072B2"),
    "recovered": Look("#D55E00", "-", "dash", "diamond"),
    "bonus": Look("#009E73", ".", "dot", "square"),
    "rejected": Look("#CC79A7", "x", "longdash", "cross"),
    "not reached": Look("#E3BDD1", "/", ink="#9A6A86"),
    "regular": Look("#5A5A5A", "/", "dot", "square"),  # also the method
    "baseline": Look("#B0B0B0", "/"),  # anything else in a comparison
    # missing, wasted or late
    "nothing": Look("#E8E8E8", "/", ink="#9A9A9A"),
    # phases of a step
    "prefill": Look("#CC79A7", "."),
    "plan": Look("#8C8C8C", "-"),
    "draft": Look("#E69F00", "/"),
    "verify": Look("#56B4E9"),
    "commit": Look("#009E73", "x"),
    "other": Look("#5A5A5A", "x"),
    # decoding methods
    "transformers": Look("#56B4E9", ".", "dashdot", "triangle-up"),
}
LOOKS |= {"batched": LOOKS["accepted"], "single": LOOKS["recovered"], "assisted": LOOKS["rejected"]}
METHODS = ("transformers", "assisted", "regular", "single", "batched")
CURVES = ("accepted", "recovered", "bonus", "rejected", "transformers")  # for data without a named look
FAINT = {"color": "#9A9A9A", "width": 1}  # reference line

_CELLS = {"colorscale": "Cividis", "xgap": 2, "ygap": 2, "texttemplate": "%{text}", "colorbar": {"thickness": 14}}
_OURS = go.layout.Template(
    layout={
        "title": {"x": 0.01, "xanchor": "left", "font": {"size": 16}},
        "font": {"family": "system-ui, sans-serif", "size": 13},
        "margin": {"l": 70, "r": 20, "t": 60, "b": 50},
        "xaxis": {"zeroline": False},
        "yaxis": {"zeroline": False},
        # A legend below the figure leaves the full width to the panel.
        "legend": {
            "orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom", "traceorder": "normal",
        },
        "coloraxis": {"colorscale": "Cividis", "colorbar": {"thickness": 14}},
    },
    data={
        "bar": [{"marker": {"line": {"width": 0}, "pattern": {"size": 6}}}],
        "scatter": [{"marker": {"size": 9}}],
        "heatmap": [_CELLS],
    },
)  # fmt: skip
# Merged once, because plotly would merge "plotly_white+bass" anew for every figure.
pio.templates["bass"] = pio.templates.merge_templates("plotly_white", _OURS)
TEMPLATE = "bass"


def projector(pixels: int = 19) -> HTML:
    """Set the size of text in later figures. The returned HTML sets the size in tables and views of JupyterLab."""
    pio.templates[TEMPLATE].layout.update(font_size=pixels, title_font_size=pixels + 3)
    names = ("content-font-size1", "ui-font-size1", "code-font-size", "widgets-font-size")
    return HTML(f"<style>.jp-Notebook {{{''.join(f'--jp-{name}: {pixels}px; ' for name in names)}}}</style>")


def titled(title: str, *sources: Trace | pd.DataFrame) -> str:
    """Return the title, marked "(synthetic)" if a trace or a table of records is synthetic."""
    marked = any(
        source.synthetic if isinstance(source, Trace) else "synthetic" in source and source.synthetic.any()
        for source in sources
    )
    return f"{title} (synthetic)" if marked else title


def empty_figure(title: str, x: str, y: str, height: int) -> go.Figure:
    """Return an empty figure of one panel with named axes."""
    axes = {"xaxis": {"title": x}, "yaxis": {"title": y}}
    return go.Figure(layout={"template": TEMPLATE, "title": {"text": title}, "height": height, **axes})


def panels(rows: int, columns: int, titles: Sequence[str], title: str, height: float, **options) -> go.Figure:
    """Return a figure of empty panels with titles, wrapped for narrow pages. options: of plotly's `make_subplots`."""
    if columns > 1:
        titles = ["<br>".join(textwrap.wrap(each, 78 // columns)) for each in titles]
    figure = make_subplots(rows, columns, subplot_titles=titles, **options)
    more = 18 * max((each.count("<br>") for each in titles), default=0)
    figure.update_layout(template=TEMPLATE, title_text=title, height=height + more, margin_t=80 + more)
    return figure.update_annotations(font_size=None, **({"x": 0, "xanchor": "left"} if columns == 1 else {}))


def bars(name: str, x: Sequence, y: Sequence, look: str | Sequence[str], **options) -> go.Bar:
    """Return bars with one look, or with one look per bar. options: of plotly's `Bar`."""
    looks = [LOOKS[each] for each in ([look] if isinstance(look, str) else look)]
    parts = [look.colour for look in looks], [look.hatch for look in looks], [look.ink for look in looks]
    colour, hatch, ink = (part[0] for part in parts) if isinstance(look, str) else parts
    marker = {"color": colour, "pattern": {"shape": hatch, "fgcolor": ink}}
    return go.Bar(name=name, x=x, y=y, marker=marker, **options)


def curve(name: str, x: Sequence, y: Sequence, look: str, mode: str = "lines+markers", **options) -> go.Scatter:
    """Return a curve of lines, markers or both. options: of plotly's `Scatter`."""
    colour, dash, symbol = LOOKS[look].colour, LOOKS[look].dash, LOOKS[look].symbol
    line, marker = {"color": colour, "dash": dash}, {"color": colour, "symbol": symbol}
    return go.Scatter(name=name, x=x, y=y, mode=mode, line=line, marker=marker, **options)


def cells(matrix: pd.DataFrame, **options) -> go.Heatmap:
    """Return a cell with its number for every value except NaN. options: of plotly's `Heatmap`."""
    values = matrix.astype(object).where(matrix.notna(), None).to_numpy()  # JSON has no NaN
    text = matrix.map(lambda value: "" if np.isnan(value) else f"{value:.0f}").to_numpy()
    drawn = {"x": matrix.columns.to_numpy(), "y": matrix.index.to_numpy(), "z": values, "text": text}
    return go.Heatmap(drawn | options)


def interval(value: pd.Series, low: pd.Series, high: pd.Series, **options) -> dict:
    """Return error bars from low to high around a value."""
    return {"type": "data", "symmetric": False, "array": high - value, "arrayminus": value - low, **options}
