"""Figures and a widget of lesson 07: who reads which keys, what that costs, and where the limit lies.

Reads are counted by `bass_kernels.accounting`, bytes and bounds by `bass_lab.measure.roofline`. Beside colour,
hatching says what is wasted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from bass_lab.measure.roofline import Device, Workload
from bass_lab.show import plots
from bass_lab.show.live_figures import live_figure, redraw, stacked
from bass_lab.show.plots import COLOURS

if TYPE_CHECKING:  # optional packages; imported where they are used
    import ipywidgets
    import plotly.graph_objects as go

    from bass_kernels.accounting import Account, Read

# Okabe & Ito's, the dark ones lightened, so that numbers can be read on all of them.
PROGRAMS = ("#56B4E9", "#E69F00", "#4DC0A0", "#D99BBD", "#F0E442", "#F08A4B", "#B8B8B8")
WASTED = {"color": "#EDEDED", "pattern": {"shape": "/", "fgcolor": "#999999", "size": 5}}
MEANINGS = {
    "pad": "one launch; every row as long as the longest",
    "split": "one launch per row, one after the other",
    "ragged": "one launch; the numbers are places in the work list",
}


def batch_figure(lengths: Sequence[int], query_length: int) -> go.Figure:
    """The batch: per row the committed keys, the new tokens at their end, and slots that are not the row's."""
    import plotly.graph_objects as go

    figure = plots.empty_figure("A ragged batch: keys per row", "position", "row", height=170 + 26 * len(lengths))
    rows, most = list(range(len(lengths))), max(lengths)
    new = {"color": COLOURS["recovered"], "pattern": {"shape": "x", "fgcolor": "white", "size": 5}}
    committed = [length - query_length for length in lengths]
    parts = [
        ("committed", [0] * len(rows), committed, {"color": COLOURS["accepted"]}),
        (f"{query_length} new tokens", committed, [query_length] * len(rows), new),
        ("not the row's", list(lengths), [most - length for length in lengths], WASTED),
    ]
    for name, base, width, marker in parts:
        figure.add_trace(go.Bar(name=name, orientation="h", y=rows, base=base, x=width, marker=marker))
    figure.update_traces(hovertemplate="row %{y}: from %{base}, %{x} keys<extra></extra>", marker_line_width=0)
    figure.update_layout(barmode="overlay", legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0})
    figure.update_layout(margin={"t": 80})
    figure.update_yaxes(autorange="reversed", dtick=1, showgrid=False)
    return figure


def reads_figure(lengths: Sequence[int], launches: dict[str, list[Read]], block: int) -> go.Figure:
    """Rows × blocks of keys, for each kernel in `launches`: one colour per program, hatched what is not the row's."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    titles = [f"<b>{name}</b>: {MEANINGS[name]}" for name in launches]
    figure = make_subplots(len(launches), 1, shared_xaxes=True, subplot_titles=titles, vertical_spacing=0.08)
    for place, (name, reads) in enumerate(launches.items(), start=1):
        cells = _cells(lengths, reads, block)
        for wasted, part in cells.groupby("wasted"):
            colours = [PROGRAMS[program % len(PROGRAMS)] for program in part.program]
            marker = WASTED if wasted else {"color": colours}
            bars = go.Bar(
                name="not the row's" if wasted else name,
                orientation="h",
                y=part.row,
                base=part.begin,
                x=part.end - part.begin,
                marker={**marker, "line": {"color": "white", "width": 1}},
                customdata=part.program,
                hovertemplate="row %{y}, program %{customdata}: keys %{base} and on, %{x} of them<extra></extra>",
            )
            figure.add_trace(bars, row=place, col=1)
        figure.add_trace(_numbers(reads), row=place, col=1)
    height = 150 + 26 * len(lengths) * len(launches)
    figure.update_layout(plots.house("Who reads which keys (per KV head)", height), barmode="overlay", showlegend=False)
    figure.update_yaxes(autorange="reversed", dtick=1, showgrid=False, zeroline=False, title="row")
    figure.update_xaxes(showgrid=False, zeroline=False)
    figure.update_xaxes(title=f"position (cells are blocks of {block} keys)", row=len(launches), col=1)
    figure.update_annotations(x=0, xanchor="left", font_size=13)
    return figure


def _cells(lengths: Sequence[int], reads: Sequence[Read], block: int) -> pd.DataFrame:
    """Every read cut at the edges of blocks and at the end of its row."""
    cells = []
    for program, read in enumerate(reads):
        length = lengths[read.row]
        edges = {read.begin, read.end, *range(read.begin // block * block + block, read.end, block)}
        edges |= {length} if read.begin < length < read.end else set()
        ordered = sorted(edges)
        cells += [(read.row, a, b, program, a >= length) for a, b in itertools.pairwise(ordered)]
    return pd.DataFrame(cells, columns=["row", "begin", "end", "program", "wasted"])


def _numbers(reads: Sequence[Read]) -> go.Scatter:
    """The programs' numbers, in their middle, where there is room."""
    import plotly.graph_objects as go

    widest = max(read.end for read in reads)
    shown = [(number, read) for number, read in enumerate(reads) if read.end - read.begin > widest / 30]
    return go.Scatter(
        mode="text",
        x=[(read.begin + read.end) / 2 for _, read in shown],
        y=[read.row for _, read in shown],
        text=[f"<b>{number}</b>" for number, _ in shown],
        hoverinfo="skip",
    )


def cost_chart(accounts: dict[str, Account], bytes_per_key: int) -> go.Figure:
    """Left: megabytes of keys and values that each kernel reads, the wasted ones hatched. Right: when it is done."""
    from plotly.subplots import make_subplots

    titles = ["MB read for one layer (hatched: in vain)", "done after … keys (model)"]
    figure = make_subplots(1, 2, shared_yaxes=True, subplot_titles=titles, horizontal_spacing=0.06)
    names, found = list(accounts), list(accounts.values())
    needed = [account.needed * bytes_per_key / 1e6 for account in found]
    wasted = [account.wasted * bytes_per_key / 1e6 for account in found]
    solid = {"color": COLOURS["accepted"]}
    ends = {"color": COLOURS["recovered"]}
    figure.add_trace(_bars("needed", names, needed, solid, ".2f"), row=1, col=1)
    figure.add_trace(_bars("wasted", names, wasted, WASTED, ".2f"), row=1, col=1)
    figure.add_trace(_bars("done", names, [account.finish for account in found], ends, ",.0f"), row=1, col=2)
    figure.update_layout(plots.house("", 230), barmode="stack", showlegend=False)
    figure.update_layout(margin={"t": 40, "b": 30})
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_annotations(font_size=13)
    return figure


def _bars(name: str, names: list[str], values: list[float], marker: dict, form: str) -> go.Bar:
    import plotly.graph_objects as go

    texts = [format(value, form) if value else "" for value in values]
    hover = f"%{{y}}, {name}: %{{x:{form}}}<extra></extra>"
    return go.Bar(
        name=name,
        orientation="h",
        y=names,
        x=values,
        marker=marker,
        text=texts,
        textposition="auto",
        textfont={"color": "black" if marker is WASTED else None},
        hovertemplate=hover,
    )


def spread_slider(
    account: Callable[[list[int]], dict[str, Account]], batch: int, mean: int, bytes_per_key: int, value: float = 0.5
) -> ipywidgets.VBox:
    """A slider for how ragged the lengths are, at equal mean, above `cost_chart` of them.

    account: KV lengths to what they cost, by kernel. Children: the slider, a sentence, the figure; setting
    `slider.value` counts again and redraws.
    """
    import ipywidgets

    from bass_kernels.accounting import spread_lengths

    style = {"description_width": "initial"}
    slider = ipywidgets.FloatSlider(value, min=0, max=1, step=0.1, description="spread", style=style)
    slider.continuous_update = False
    sentence, figure = ipywidgets.HTML(), live_figure()

    def draw(spread: float) -> None:
        lengths = spread_lengths(batch, mean, spread)
        accounts = account(lengths)
        chart = cost_chart(accounts, bytes_per_key)
        sentence.value = (
            f"<b>spread {spread:.1f}</b>: rows of {min(lengths)} … {max(lengths)} keys; "
            f"{accounts['pad'].wasted_share:.0%} of what <i>pad</i> reads is wasted"
        )
        redraw(figure, chart)

    slider.observe(lambda change: draw(change.new), names="value")
    draw(value)
    return stacked(slider, sentence, figure)


def spread_chart(
    account: Callable[[list[int]], dict[str, Account]], batch: int, mean: int, spreads: Sequence[float]
) -> go.Figure:
    """What `spread_slider` shows, at every spread at once: keys read over keys needed, and time (model)."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    from bass_kernels.accounting import spread_lengths

    lines = []
    for spread in spreads:
        for name, found in account(spread_lengths(batch, mean, spread)).items():
            lines.append((spread, name, (found.needed + found.wasted) / found.needed, found.finish))
    table = pd.DataFrame(lines, columns=["spread", "kernel", "read", "finish"])
    titles = ["keys read ÷ keys needed", "done after … keys (model)"]
    figure = make_subplots(1, 2, subplot_titles=titles, horizontal_spacing=0.1)
    styles = {
        "pad": ("#5A5A5A", "dot"),
        "ragged": (COLOURS["accepted"], "solid"),
        "split": (COLOURS["recovered"], "dash"),  # last: where it equals ragged, both show
    }
    for place, column in enumerate(("read", "finish"), start=1):
        for name, (colour, dash) in styles.items():
            part = table[table.kernel == name]
            line = go.Scatter(x=part.spread, y=part[column], name=name, legendgroup=name, showlegend=place == 1,
                              mode="lines+markers", line={"color": colour, "dash": dash})  # fmt: skip
            figure.add_trace(line, row=1, col=place)
    figure.update_layout(plots.house("The same, at every spread", 330))
    figure.update_xaxes(title="spread of the KV lengths (equal mean)")
    figure.update_yaxes(rangemode="tozero")
    figure.update_annotations(font_size=13)
    return figure


def floor_table(models: Mapping[str, Workload], kv_lengths: Sequence[int], batch: int, device: Device) -> pd.DataFrame:
    """Per model and KV length: megabytes of keys and values per layer, the least time for them in µs, and attention's
    share of the bytes of a decode step."""
    lines = []
    for name, model in models.items():
        for kv_length in kv_lengths:
            cache = model.cache_bytes(batch * kv_length)
            lines.append(
                {
                    "model": name,
                    "KV length": kv_length,
                    "MB per layer": cache / model.layers / 1e6,
                    "floor µs per layer": cache / model.layers / device.bandwidth * 1e6,
                    "share of a step": cache / (cache + model.element * model.weights),
                }
            )
    return pd.DataFrame(lines).set_index(["model", "KV length"])


def share_chart(table: pd.DataFrame) -> go.Figure:
    """Attention's share of a decode step's bytes, from `floor_table`: bars per model and KV length."""
    import plotly.graph_objects as go

    wide = table["share of a step"].unstack("model", sort=False)
    figure = plots.empty_figure("How much of a decode step is attention?", "KV length of every row", "", height=320)
    for number, (name, shares) in enumerate(wide.items()):
        marker = {"color": PROGRAMS[number], "pattern": {"shape": ("", "/", "x")[number % 3], "fgcolor": "white"}}
        texts = [f"{share:.0%}" for share in shares]
        figure.add_trace(go.Bar(name=name, x=wide.index.astype(str), y=shares, marker=marker, text=texts))
    figure.update_traces(textposition="outside")
    figure.update_xaxes(type="category")
    figure.update_yaxes(tickformat=".0%", title="share of bytes read", range=[0, 1])
    return figure


def roofline(models: Mapping[str, Workload], query_lengths: Sequence[int], device: Device) -> go.Figure:
    """Attainable flop/s over flop per byte, with bf16 attention of each model at these query lengths marked."""
    import plotly.graph_objects as go

    title = f"Roofline of one {device.name}: ridge at {device.ridge:.0f} flop per byte"
    figure = plots.empty_figure(title, "flop per byte read = query length × group", "Tflop/s at most", height=420)
    roof = [0.5, device.ridge, 2000.0]
    line = [device.attainable(x) / 1e12 for x in roof]
    figure.add_trace(go.Scatter(x=roof, y=line, mode="lines", name="roof", line={"color": "black"}))
    symbols = ("circle", "diamond", "square")
    for group in sorted({model.group for model in models.values()}):
        same = {name: model for name, model in models.items() if model.group == group}
        x = [next(iter(same.values())).attention_intensity(query_length) for query_length in query_lengths]
        points = go.Scatter(
            name=f"{' and '.join(same)} (group {group})",
            x=x,
            y=[device.attainable(value) / 1e12 for value in x],
            mode="markers+text",
            text=[f"Q = {query_length}" for query_length in query_lengths],
            textposition="bottom right" if group == 1 else "top left",
            marker={"size": 11, "symbol": symbols[len(figure.data) - 1], "color": PROGRAMS[len(figure.data) - 1]},
        )
        figure.add_trace(points)
    figure.update_xaxes(type="log", dtick=1)
    figure.update_yaxes(type="log", dtick=1)
    figure.update_layout(legend={"x": 0.99, "xanchor": "right", "y": 0.02, "yanchor": "bottom"})
    return figure


def gpu_records(folder: str | Path) -> pd.DataFrame:
    """Lines of kernels_*.jsonl in this folder that hold a time measured on a GPU (fields: kernels/bench/schema.py)."""
    tables = [pd.read_json(path, lines=True) for path in sorted(Path(folder).glob("kernels_*.jsonl"))]
    if not tables:
        return pd.DataFrame()
    return pd.concat(tables, ignore_index=True).query("clock == 'cuda' and us.notna()")


def records_table(records: pd.DataFrame) -> pd.DataFrame:
    """Median percent of the copy bandwidth per device, kernel and query length, of reads from 64 MB on."""
    large = records.query("gb >= 0.064")
    index = ["device", "kernel", "query_length"]
    return large.groupby(index).percent_of_copy.agg(["count", "min", "median", "max"]).round(1)


def records_figure(records: pd.DataFrame) -> go.Figure:
    """Every measured case from 64 MB on as a point: percent of the copy bandwidth, by kernel."""
    import plotly.graph_objects as go

    large = records.query("gb >= 0.064")
    kernels = large.groupby("kernel").percent_of_copy.median().sort_values().index
    figure = plots.empty_figure(
        "Measured, per kernel", "percent of a copy's bandwidth", "", height=140 + 40 * len(kernels)
    )
    for kernel in kernels:
        part = large[large.kernel == kernel]
        colour = COLOURS["accepted"] if kernel in MEANINGS else "#8C8C8C"
        about = part.model + ", batch " + part.batch.astype(str) + ", Q " + part.query_length.astype(str)
        box = go.Box(
            name=kernel, x=part.percent_of_copy, boxpoints="all", text=about, marker_color=colour, orientation="h"
        )
        figure.add_trace(box)
    figure.update_layout(showlegend=False, margin={"l": 160})
    return figure
