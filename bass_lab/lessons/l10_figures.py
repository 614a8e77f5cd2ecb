"""Figures of lesson 10: codes of a channel, bytes of a step, blocks of a kernel's programs, and the front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from torch import Tensor

from bass_lab.measure.roofline import Device
from bass_lab.show.looks import bars, curve, empty_figure, panels

KIND_LOOKS = {"full": "regular", "int8": "accepted", "int4": "recovered"}
WAY_LOOKS = ("regular", "accepted", "bonus", "draft", "transformers", "recovered", "rejected", "other")
SYMBOLS = ("square", "circle", "diamond", "triangle-up", "cross", "x", "star", "triangle-down")


def channel_figure(weight: Tensor, copies: Mapping[str, Tensor], shown: int = 64) -> go.Figure:
    """Return the first weights [K] of an output channel in each copy: values above, errors below."""
    figure = panels(2, 1, ["weights", "rounding error"], "One output channel", 520, shared_xaxes=True)
    inputs = np.arange(min(shown, len(weight)))
    weight, copies = weight.numpy(), {kind: copy.numpy() for kind, copy in copies.items()}
    figure.add_trace(curve("full", inputs, weight[:shown], KIND_LOOKS["full"]), 1, 1)
    for kind, copy in copies.items():
        look = {"look": KIND_LOOKS[kind], "mode": "markers", "legendgroup": kind}
        figure.add_trace(curve(kind, inputs, copy[:shown], **look), 1, 1)
        figure.add_trace(curve(kind, inputs, (copy - weight)[:shown], **look, showlegend=False), 2, 1)
    figure.update_traces(marker_size=6, hovertemplate="input %{x}: %{y:.4f}")
    return figure.update_xaxes(title="input", row=2, col=1)


def step_figure(steps: Mapping[str, pd.DataFrame], draft_length: int) -> go.Figure:
    """Return MB of weights read per speculative step, a panel per pair (`l10_demonstrations.step_bytes`)."""
    title = f"Weights read in a step: one target pass, {draft_length} draft passes"
    figure = panels(1, len(steps), list(steps), title, 380, horizontal_spacing=0.1)
    for column, table in enumerate(steps.values(), 1):
        for role, look in (("target", "verify"), ("drafts", "draft")):
            text = [f"{size:,.0f}" for size in table[role]]
            drawn = bars(role, table.index, table[role], look, text=text, textposition="inside", legendgroup=role)
            figure.add_trace(drawn.update(showlegend=column == 1, hovertemplate="%{x}: %{y:,.1f} MB"), 1, column)
    return figure.update_layout(barmode="stack").update_yaxes(title="MB", col=1)


def blocks_figure(columns: int, inputs: int, block_n: int, block_k: int, splits: int, shown: int = 8) -> go.Figure:
    """Return the program of each block of a weight matrix. Rows of blocks are cut into `splits` pieces."""
    owners = programs(columns, inputs, block_n, block_k, splits)[:shown]
    title = f"Weights read by each program: {columns} outputs × {inputs} inputs, K cut into {splits}"
    axes = f"inputs, blocks of {block_k}", f"outputs, blocks of {block_n}"
    figure = empty_figure(title, *axes, 130 + 36 * len(owners))
    figure.add_trace(
        go.Heatmap(z=owners % 7, text=owners, texttemplate="%{text}", colorscale="Cividis", showscale=False,
                   xgap=2, ygap=2, hovertemplate="program %{text}<extra></extra>")
    )  # fmt: skip
    return figure.update_yaxes(autorange="reversed", dtick=1).update_xaxes(dtick=1)


def programs(columns: int, inputs: int, block_n: int, block_k: int, splits: int) -> np.ndarray:
    """Return the program number of each block: int [blocks of outputs, blocks of inputs]."""
    rows, blocks = -(-columns // block_n), -(-inputs // block_k)
    piece = np.arange(blocks) // -(-blocks // splits)
    return np.arange(rows)[:, None] * splits + piece


def products_figure(columns: int, inputs: int, rows: Sequence[int], device: Device) -> go.Figure:
    """Return the MODELLED least time of a product against the rows, for weights of 16, 8 and 4 bits."""
    title = f"Least time of a product, {columns} × {inputs} weights: {device.name}"
    figure = empty_figure(title, "rows", "µs (modelled)", 400)
    count = np.asarray(rows)
    for kind, bits in {"full": 16, "int8": 8, "int4": 4.5}.items():  # with a scale of 16 bits per 32 weights
        moved = columns * inputs * bits / 8 + 2 * count * (columns + inputs)
        seconds = np.maximum(moved / device.bandwidth, 2 * count * columns * inputs / device.flops)
        line = curve("bf16" if kind == "full" else kind, count, 1e6 * seconds, KIND_LOOKS[kind])
        figure.add_trace(line.update(hovertemplate="%{x} rows: %{y:.1f} µs"))
    return figure.update_xaxes(type="log", tickvals=count).update_yaxes(rangemode="tozero")


def front_figure(front: pd.DataFrame, machines: Mapping[str, str]) -> go.Figure:
    """Return TV of the next token against ms per token: a mark per method with pass@1, a panel per machine. machines:
    titles by column."""
    titles = list(machines.values())
    figure = panels(1, len(machines), titles, "TV × milliseconds × pass@1", 500, horizontal_spacing=0.1)
    for place, column in enumerate(machines, 1):
        for number, (name, line) in enumerate(front.iterrows()):
            passes = "" if np.isnan(line["pass@1"]) else f"{line['pass@1']:.0%}"
            mark = curve(name, [line[column]], [line.tv], WAY_LOOKS[number % len(WAY_LOOKS)], "markers+text")
            mark.update(text=[passes], textposition="top center" if line.tv else "bottom center")
            mark.update(legendgroup=name, showlegend=place == 1)
            mark.update(marker={"symbol": SYMBOLS[number % len(SYMBOLS)], "size": 12})
            figure.add_trace(mark.update(hovertemplate="%{x:.2f} ms, TV %{y:.4f}"), 1, place)
    figure.update_xaxes(title="ms per token of a row", rangemode="tozero")
    top = 1.25 * max(front.tv.max(), 0.004)
    return figure.update_yaxes(range=[-0.1 * top, top]).update_yaxes(title="TV from the full target", col=1)
