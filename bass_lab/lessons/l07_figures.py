"""Figures and a widget of lesson 07: keys read by each program, their cost, and the roofline."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import pandas as pd
import plotly.graph_objects as go

from bass_lab.measure.roofline import Device, StepWork
from bass_lab.show.live_figures import live, slider, widgets
from bass_lab.show.looks import CURVES, LOOKS, bars, curve, empty_figure, panels

if TYPE_CHECKING:  # the kernels need Triton, available only for Linux
    from bass_kernels.accounting import Account, Read

# Okabe & Ito, with dark colours lightened, so that numbers are readable on all colours.
PROGRAMS = ("#56B4E9", "#E69F00", "#4DC0A0", "#D99BBD", "#F0E442", "#F08A4B", "#B8B8B8")
KERNELS = {  # description, look
    "pad": ("one launch; every row as long as the longest", "regular"),
    "ragged": ("one launch; numbers are positions in the work list", "accepted"),
    "split": ("one launch per row, one after the other", "recovered"),  # last, in front of ragged
}


def batch_figure(lengths: Sequence[int], query_length: int) -> go.Figure:
    """Return the batch: committed keys, new tokens, and unused slots per row."""
    figure = empty_figure("A ragged batch: keys per row", "position", "row", height=190 + 26 * len(lengths))
    rows, most = list(range(len(lengths))), max(lengths)
    committed = [length - query_length for length in lengths]
    parts = [
        ("committed", [0] * len(rows), committed, "accepted"),
        (f"{query_length} new tokens", committed, [query_length] * len(rows), "recovered"),
        ("unused by the row", list(lengths), [most - length for length in lengths], "nothing"),
    ]
    for name, base, width, look in parts:
        figure.add_trace(bars(name, width, rows, look, orientation="h", base=base))
    figure.update_traces(hovertemplate="row %{y}: from %{base}, %{x} keys<extra></extra>")
    figure.update_layout(barmode="overlay")
    return figure.update_yaxes(autorange="reversed", dtick=1, showgrid=False)


def reads_figure(lengths: Sequence[int], launches: dict[str, list[Read]], block: int) -> go.Figure:
    """Return rows × blocks of keys for each kernel in `launches`: one colour per program, unused slots hatched."""
    titles = [f"<b>{name}</b>: {KERNELS[name][0]}" for name in launches]
    height = 150 + 26 * len(lengths) * len(launches)
    stacked = {"shared_xaxes": True, "vertical_spacing": 0.08}
    figure = panels(len(launches), 1, titles, "Keys read by each program (per KV head)", height, **stacked)
    for place, (name, reads) in enumerate(launches.items(), start=1):
        for wasted, part in _cells(lengths, reads, block).groupby("wasted"):
            about = "unused by the row" if wasted else name
            drawn = bars(about, part.end - part.begin, part.row, "nothing", orientation="h", base=part.begin)
            if not wasted:
                drawn.marker = {"color": [PROGRAMS[program % len(PROGRAMS)] for program in part.program]}
            hover = "row %{y}, program %{customdata}: %{x} keys from %{base}<extra></extra>"
            drawn.update(marker_line={"color": "white", "width": 1}, customdata=part.program, hovertemplate=hover)
            figure.add_trace(drawn, place, 1)
        figure.add_trace(_numbers(reads), place, 1)
    figure.update_layout(barmode="overlay", showlegend=False)
    figure.update_yaxes(autorange="reversed", dtick=1, showgrid=False, title="row").update_xaxes(showgrid=False)
    return figure.update_xaxes(title=f"position (cells are blocks of {block} keys)", row=len(launches), col=1)


def _cells(lengths: Sequence[int], reads: Sequence[Read], block: int) -> pd.DataFrame:
    cells = []
    for program, read in enumerate(reads):
        length = lengths[read.row]
        edges = {read.begin, read.end, *range(read.begin // block * block + block, read.end, block)}
        edges |= {length} if read.begin < length < read.end else set()
        ordered = sorted(edges)
        cells += [(read.row, a, b, program, a >= length) for a, b in itertools.pairwise(ordered)]
    return pd.DataFrame(cells, columns=["row", "begin", "end", "program", "wasted"])


def _numbers(reads: Sequence[Read]) -> go.Scatter:
    widest = max(read.end for read in reads)
    shown = [(number, read) for number, read in enumerate(reads) if read.end - read.begin > widest / 30]
    places = {"x": [(read.begin + read.end) / 2 for _, read in shown], "y": [read.row for _, read in shown]}
    return go.Scatter(mode="text", text=[f"<b>{number}</b>" for number, _ in shown], hoverinfo="skip", **places)


def cost_chart(accounts: dict[str, Account], bytes_per_key: int) -> go.Figure:
    """Return MB of keys and values per kernel, wasted MB hatched (left), and the kernel's end (right)."""
    titles = ["MB read per layer (hatched: wasted)", "done after … keys (model)"]
    figure = panels(1, 2, titles, "", 230, shared_yaxes=True, horizontal_spacing=0.06)
    found = pd.DataFrame({name: account._asdict() for name, account in accounts.items()}).T
    megabytes = found[["needed", "wasted"]] * bytes_per_key / 1e6
    for name, values, look, form, column in (
        ("needed", megabytes.needed, "accepted", ".2f", 1),
        ("wasted", megabytes.wasted, "nothing", ".2f", 1),
        ("done", found.finish, "accepted", ",.0f", 2),
    ):
        texts = [format(value, form) if value else "" for value in values]
        drawn = bars(name, values, found.index, look, orientation="h", text=texts, textposition="auto")
        # White on stripes is hard to read.
        drawn.update(textfont_color="black" if look == "nothing" else None)
        figure.add_trace(drawn.update(hovertemplate=f"%{{y}}, {name}: %{{x:{form}}}<extra></extra>"), 1, column)
    figure.update_layout(barmode="stack", showlegend=False, margin={"t": 40, "b": 30})
    return figure.update_yaxes(autorange="reversed", showgrid=False)


def spread_slider(
    account: Callable[[list[int]], dict[str, Account]], batch: int, mean: int, bytes_per_key: int, value: float = 0.5
) -> widgets.VBox:
    """Return a slider for the spread of the lengths, at equal mean, above a sentence and `cost_chart`. account:
    function from KV lengths to accounts by kernel."""
    from bass_kernels.accounting import spread_lengths

    def draw(spread: float):
        lengths = spread_lengths(batch, mean, spread)
        accounts = account(lengths)
        sentence = (
            f"<b>spread {spread:.1f}</b>: rows of {min(lengths)} … {max(lengths)} keys; "
            f"<i>pad</i> wastes {accounts['pad'].wasted_share:.0%} of its reads"
        )
        return sentence, cost_chart(accounts, bytes_per_key)

    return live(draw, spread=slider(value, 0, 1, "spread", step=0.1))


def spread_chart(
    account: Callable[[list[int]], dict[str, Account]], batch: int, mean: int, spreads: Sequence[float]
) -> go.Figure:
    """Return keys read ÷ keys needed, and time (model), against the spread of `spread_slider`."""
    from bass_kernels.accounting import spread_lengths

    titles = ["keys read ÷ keys needed", "done after … keys (model)"]
    figure = panels(1, 2, titles, "Keys read and time against the spread", 360, horizontal_spacing=0.1)
    found = [account(spread_lengths(batch, mean, spread)) for spread in spreads]
    for name, (_, look) in KERNELS.items():
        costs = [each[name] for each in found]
        read = [(cost.needed + cost.wasted) / cost.needed for cost in costs]
        for place, values in enumerate((read, [cost.finish for cost in costs]), start=1):
            figure.add_trace(curve(name, spreads, values, look, legendgroup=name, showlegend=place == 1), 1, place)
    return figure.update_xaxes(title="spread of the KV lengths (equal mean)").update_yaxes(rangemode="tozero")


def floor_table(models: Mapping[str, StepWork], kv_lengths: Sequence[int], batch: int, device: Device) -> pd.DataFrame:
    """Return per model and KV length: MB of keys and values per layer, least time in µs, and share of a step's
    bytes."""
    lines = []
    for name, model in models.items():
        for kv_length in kv_lengths:
            cache = model.cache_bytes(batch * kv_length)
            layer, share = cache / model.layers, cache / (cache + model.element * model.weights)
            line = {"model": name, "KV length": kv_length, "MB per layer": layer / 1e6}
            lines.append(line | {"floor µs per layer": layer / device.bandwidth * 1e6, "share of a step": share})
    return pd.DataFrame(lines).set_index(["model", "KV length"])


def share_chart(table: pd.DataFrame) -> go.Figure:
    """Return attention's share of a decode step's bytes per model and KV length, from `floor_table`."""
    wide = table["share of a step"].unstack("model", sort=False)
    figure = empty_figure("Attention's share of a decode step", "KV length of every row", "", height=350)
    for (name, shares), look in zip(wide.items(), CURVES, strict=False):
        texts = [f"{share:.0%}" for share in shares]
        figure.add_trace(bars(name, wide.index.astype(str), shares, look, text=texts, textposition="outside"))
    figure.update_xaxes(type="category")
    return figure.update_yaxes(tickformat=".0%", title="share of bytes read", range=[0, 1])


def roofline(models: Mapping[str, StepWork], query_lengths: Sequence[int], device: Device) -> go.Figure:
    """Return attainable flop/s against flop per byte, with bf16 attention of each model at these query lengths."""
    title = f"Roofline of one {device.name}: ridge at {device.ridge:.0f} flop per byte"
    figure = empty_figure(title, "flop per byte read = query length × group", "attainable Tflop/s", height=450)
    roof = [0.5, device.ridge, 2000.0]
    line = [device.attainable(x) / 1e12 for x in roof]
    figure.add_scatter(x=roof, y=line, mode="lines", name="roof", line={"color": "black"})
    for group, look in zip(sorted({model.group for model in models.values()}), CURVES, strict=False):
        same = {name: model for name, model in models.items() if model.group == group}
        x = [next(iter(same.values())).attention_intensity(query_length) for query_length in query_lengths]
        y = [device.attainable(value) / 1e12 for value in x]
        points = curve(f"{' and '.join(same)} (group {group})", x, y, look, "markers+text", marker_size=11)
        points.update(text=[f"Q = {query_length}" for query_length in query_lengths])
        figure.add_trace(points.update(textposition="bottom right" if group == 1 else "top left"))
    return figure.update_xaxes(type="log", dtick=1).update_yaxes(type="log", dtick=1)


def beside_the_floor(records: pd.DataFrame, batch: int = 8) -> pd.DataFrame:
    """Return per model, KV length and query length of ragged batches: MB to read, floor in µs (bandwidth of a copy),
    µs and percent of that bandwidth for `ragged` and the fastest peer. records: of kind "kernels"."""
    index, lines = ["model", "kv_length", "query_length"], []
    columns = [*index, "MB", "floor µs", "ragged µs", "ragged %", "fastest peer", "peer µs", "peer %"]
    for case, part in records.query("batch == @batch and distribution == 'ragged'").groupby(index):
        line = dict(zip(index, case, strict=True))
        line |= {"MB": 1e3 * part.gb.iloc[0], "floor µs": (1e6 * part.gb / part.copy_gb_per_s).iloc[0]}
        for kernel in part[part.kernel == "ragged"].itertuples():
            line |= {"ragged µs": kernel.us, "ragged %": kernel.percent_of_copy}
        for peer in part[~part.kernel.isin(KERNELS)].nsmallest(1, "us").itertuples():
            line |= {"fastest peer": peer.kernel, "peer µs": peer.us, "peer %": peer.percent_of_copy}
        lines.append(line)
    table = pd.DataFrame(lines, columns=columns).rename(columns={"kv_length": "KV length", "query_length": "Q"})
    return table.set_index(["model", "KV length", "Q"])


def shares_figure(records: pd.DataFrame) -> go.Figure:
    """Return percent of a copy's bandwidth against bytes, for `ragged` and the fastest peer. The limit is at 100."""
    figure = empty_figure("Bandwidth", "MB of keys and values per layer", "percent of a copy's bandwidth", 430)
    case = ["model", "batch", "query_length", "kv_length", "distribution"]
    peers = records[~records.kernel.isin(KERNELS)].sort_values("us").drop_duplicates(case)
    for name, part, look in (("ragged", records[records.kernel == "ragged"], "accepted"),
                             ("fastest peer", peers, "transformers")):  # fmt: skip
        points = curve(name, 1e3 * part.gb, part.percent_of_copy, look, "markers")
        points.update(customdata=part[["kernel", "us", *case]])
        hover = "%{customdata[0]}, %{customdata[2]}, batch %{customdata[3]}, Q %{customdata[4]}, "
        hover += "%{customdata[5]} keys %{customdata[6]}: %{customdata[1]:.1f} µs, %{y:.0f}%<extra></extra>"
        figure.add_trace(points.update(hovertemplate=hover))
    figure.add_hline(100, line={"color": "black", "width": 1}, annotation_text="limit: as fast as a copy")
    return figure.update_xaxes(type="log", dtick=1).update_yaxes(rangemode="tozero")


def records_table(records: pd.DataFrame) -> pd.DataFrame:
    """Return percent of the copy bandwidth per device, kernel and query length, for reads of at least 64 MB."""
    large = records.query("gb >= 0.064")
    index = ["device", "kernel", "query_length"]
    return large.groupby(index).percent_of_copy.agg(["count", "min", "median", "max"]).round(1)


def records_figure(records: pd.DataFrame) -> go.Figure:
    """Return every measured case of at least 64 MB as a point: percent of the copy bandwidth, by kernel."""
    large = records.query("gb >= 0.064")
    kernels = large.groupby("kernel").percent_of_copy.median().sort_values().index
    title = "Recorded bandwidth per kernel (a dot is a case, a box the middle half of the cases)"
    figure = empty_figure(title, "percent of a copy's bandwidth", "", height=140 + 40 * len(kernels))
    for kernel in kernels:
        part = large[large.kernel == kernel]
        about = part.model + ", batch " + part.batch.astype(str) + ", Q " + part.query_length.astype(str)
        colour = LOOKS["accepted" if kernel in KERNELS else "plan"].colour
        points = {"boxpoints": "all", "text": about, "marker_color": colour, "orientation": "h"}
        figure.add_trace(go.Box(name=kernel, x=part.percent_of_copy, **points))
    return figure.update_layout(showlegend=False)
