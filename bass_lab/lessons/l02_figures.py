"""Figures and widgets of lesson 02: lock-step, the ragged cache, and texts with a bug."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from bass_core.policies.protocol import expected_tokens
from bass_lab.lessons import l02_naive_batches
from bass_lab.lessons.l02_demonstrations import expected_speed
from bass_lab.show import plots
from bass_lab.show.live_figures import live, slider, widgets
from bass_lab.show.looks import LOOKS, bars, cells, curve, empty_figure, panels

PACES = {"each row at its own pace": "accepted", "lock-step": "recovered"}  # name: look
BATCHES = range(1, 17)
SLOTS = {  # content of a KV slot: look
    "committed": "accepted",
    "committed in this step": "bonus",
    "stale: rejected, overwritten next": "rejected",
    "unused by the row": "nothing",
}


def lock_step_figure(alpha: float, k: int, batch: int) -> go.Figure:
    """Return the acceptance probability by slot (left), and the speed against the batch size (right)."""
    titles = ["probability that a draft token is kept", "speed relative to regular decoding (model)"]
    title = f"α = {alpha:.2f}, draft length {k}, {batch} rows"
    figure = panels(1, 2, titles, title, 420, horizontal_spacing=0.1)
    places = list(range(1, k + 1))
    for (name, look), waits_for in zip(PACES.items(), (1, batch), strict=True):
        kept = [alpha ** (waits_for * place) for place in places]
        hover = "slot %{x}: %{y:.1%}"
        figure.add_trace(bars(name, places, kept, look, legendgroup=name, hovertemplate=hover), 1, 1)
    for name, look in PACES.items():
        speeds = [expected_speed(alpha, k, rows if name == "lock-step" else 1) for rows in BATCHES]
        line = curve(name, list(BATCHES), speeds, look, legendgroup=name, showlegend=False)
        sizes = [13 if rows == batch else 5 for rows in BATCHES]
        figure.add_trace(line.update(marker_size=sizes, hovertemplate="batch %{x}: %{y:.2f}×"), 1, 2)
    figure.update_layout(barmode="group")
    figure.update_xaxes(title="slot in the draft", dtick=max(1, k // 8), col=1)
    figure.update_yaxes(range=[0, 1], tickformat=".0%", col=1)
    figure.update_xaxes(title="batch size", dtick=2, col=2)
    return figure.update_yaxes(rangemode="tozero", title="times as fast", col=2)


def lock_step_table(alphas: Sequence[float], k: int, batches: Sequence[int]) -> pd.DataFrame:
    """Return expected tokens per step and row, one line per α: own pace, and lock-step at each batch size."""
    columns = {"own pace, any batch": 1} | {f"lock-step, batch {batch}": batch for batch in batches}
    table = {name: expected_tokens(np.array(alphas) ** rows, k)[:, k] for name, rows in columns.items()}
    return pd.DataFrame(table, index=pd.Index(alphas, name="α"))


def lock_step_explorer(alpha: float = 0.9, k: int = 5, batch: int = 8) -> widgets.VBox:
    """Return sliders for α, batch size and draft length above a sentence and `lock_step_figure`."""

    def draw(alpha: float, batch: int, k: int):
        own, together = (f"{expected_tokens(alpha**rows, k)[k]:.2f}" for rows in (1, batch))
        fast, slow = (f"{expected_speed(alpha, k, rows):.2f}×" for rows in (1, batch))
        sentence = (
            f"tokens per step and row: <b>{own}</b> at its own pace, <b>{together}</b> in lock-step · "
            f"speed relative to regular decoding (model): <b>{fast}</b> and <b>{slow}</b>"
        )
        return sentence, lock_step_figure(alpha, k, batch)

    rows = slider(batch, BATCHES.start, BATCHES.stop - 1, "batch size")
    return live(draw, alpha=slider(alpha, 0.5, 0.99, "α", step=0.01), batch=rows, k=slider(k, 1, 16, "draft length"))


def kept_figure(accepted: Mapping[str, pd.DataFrame]) -> go.Figure:
    """Return one panel per run: accepted lengths by row and step (`plots.raster_matrix`), and the minimum per step."""
    rows = sum(len(table) + 2.5 for table in accepted.values())
    title = "Accepted draft tokens, and the minimum of each step"
    figure = panels(len(accepted), 1, list(accepted), title, int(150 + 27 * rows), vertical_spacing=0.16)
    for panel, table in enumerate(accepted.values(), start=1):
        places, below = list(range(len(table))), len(table) + 0.4  # with a gap below the rows
        for part, at in ((table, places), (table.min().to_frame().T, [below])):
            hover = "step %{x}: %{z:.0f} accepted<extra></extra>"
            figure.add_trace(cells(part, y=at, coloraxis="coloraxis", hovertemplate=hover), panel, 1)
        labels = {"tickvals": [*places, below], "ticktext": [*map(str, table.index), "minimum"]}
        figure.update_yaxes(**labels, range=[below + 0.6, -0.6], title="row", row=panel, col=1)
    most = max(float(np.nanmax(table.to_numpy())) for table in accepted.values())
    colours = {"cmin": 0, "cmax": max(most, 1), "colorbar": {"title": "accepted", "tickformat": "d"}}
    figure.update_layout(coloraxis=colours)
    return figure.update_xaxes(title="decode step", showgrid=False).update_yaxes(showgrid=False)


def progress_figure(schedules: Mapping[str, tuple[pd.DataFrame, pd.DataFrame]]) -> go.Figure:
    """Return one panel per prompt set: tokens against target passes, for every row and in lock-step. schedules: (own
    pace, lock-step) by name, from `l02_demonstrations.replay`."""
    shared = {"shared_yaxes": True, "horizontal_spacing": 0.06}
    figure = panels(1, len(schedules), list(schedules), "The same texts at two paces", 450, **shared)
    for panel, (own, together) in enumerate(schedules.values(), start=1):
        for (name, look), table, width in zip(PACES.items(), (own, together.iloc[:1]), (1, 2), strict=True):
            for number, (_, accepted) in enumerate(table.iterrows()):
                counts = accepted.dropna()
                line = curve(name, [0, *counts.index], [1, *(1 + (counts + 1).cumsum())], look, line_width=width)
                line.update(legendgroup=name, showlegend=panel == 1 and number == 0, marker_size=5)
                figure.add_trace(line.update(hovertemplate="after %{x} passes: %{y} tokens"), 1, panel)
        tokens = 1 + int((own + 1).sum(axis=1).max())
        regular = curve("regular decoding", [0, tokens - 1], [1, tokens], "regular", "lines", line_width=3)
        figure.add_trace(regular.update(showlegend=panel == 1), 1, panel)
    figure.update_xaxes(title="target passes", rangemode="tozero")
    return figure.update_yaxes(rangemode="tozero").update_yaxes(title="tokens written", col=1)


def cache_figure(states: pd.DataFrame, steps: Sequence[int]) -> go.Figure:
    """Return one panel per step: the KV slots of each row after it. states: of `l02_demonstrations.cache_states`."""
    rows = sorted(states.row.unique())
    titles = [f"after step {step}" for step in steps]
    drawn = len(steps) * (24 * len(rows) + 45)  # pixels
    stacked = {"shared_xaxes": True, "vertical_spacing": 45 / drawn}
    figure = panels(len(steps), 1, titles, "The target's cache", drawn + 160, **stacked)
    for panel, step in enumerate(steps, start=1):
        part = states[states.step == step]
        longest = part[["stale_end", "read"]].to_numpy().max()
        edges = [part["first"] * 0, part["first"], part.kept, part.stale_end, part.row * 0 + longest]
        for (name, look), begin, end in zip(SLOTS.items(), edges, edges[1:], strict=False):
            slots = bars(name, end - begin, part.row, look, orientation="h", base=begin, legendgroup=name)
            hover = f"row %{{y}}: %{{x}} slots from %{{base}}, {name}<extra></extra>"
            figure.add_trace(slots.update(showlegend=panel == 1, hovertemplate=hover), panel, 1)
    figure.update_layout(barmode="overlay", bargap=0.25)
    figure.update_yaxes(range=[max(rows) + 0.6, min(rows) - 0.6], dtick=1, showgrid=False, title="row")
    figure.update_xaxes(range=[0, states.stale_end.max() * 1.01], showgrid=False)
    return figure.update_xaxes(title="slot = position", row=len(steps), col=1)


def cache_slider(states: pd.DataFrame) -> widgets.VBox:
    """Return a step slider above a sentence and `cache_figure`."""

    def draw(step: int):
        part = states[states.step == step]
        sentence = (
            f"<b>step {step}</b>: {len(part)} rows of {part.kept.min()} … {part.kept.max()} entries; "
            f"{(part.kept - part['first']).sum()} new entries are kept, {(part.written - part.kept).sum()} are stale. "
            f"{part.overwritten.sum()} stale entries of earlier steps were overwritten. A rectangular cache would be "
            f"{1 - part.read.sum() / (len(part) * part.read.max()):.0%} padding."
        )
        return sentence, cache_figure(states, [step])

    steps = int(states.step.min()), int(states.step.max())
    return live(draw, step=slider(steps[0], *steps, "step"))


def text_diff(right: Tensor, found: Tensor, tokenizer: PreTrainedTokenizerBase, title: str = "with the bug") -> str:
    """Return HTML: the right text next to the found text, both marked from the first difference."""
    (same,) = l02_naive_batches.right_tokens([found], [right])
    columns = ""
    for name, tokens, look, line in (
        ("the row alone", right, "accepted", "solid"),
        (title, found, "recovered", "dashed"),
    ):
        before = tokenizer.decode(tokens[:same], skip_special_tokens=True)
        after = tokenizer.decode(tokens, skip_special_tokens=True)[len(before) :]
        style = f"color:{LOOKS[look].colour};border-bottom:2px {line}"
        columns += plots.COLUMN.format(
            html.escape(name),
            f"<pre style='{plots.CODE}line-height:1.6;margin:0'><span style='color:{plots.GREY}'>{html.escape(before)}"
            f"</span><span style='{style}'>{html.escape(after)}</span></pre>",
        )
    headline = f"{same} tokens are right, then the texts differ:" if same < len(right) else "The same text."
    return f"<p>{headline}</p>{plots.SIDE_BY_SIDE.format(columns)}"


def damage_figure(runs: Mapping[str | None, Sequence[Tensor]], alone: Sequence[Tensor]) -> go.Figure:
    """Return the right tokens before the first wrong token, by bug and row; ✓ if all are right. runs: ids by bug."""
    names = [l02_naive_batches.BUGS.get(bug, "none") for bug in runs]
    counts = pd.DataFrame([l02_naive_batches.right_tokens(found, alone) for found in runs.values()], index=names)
    whole = np.array([len(row) for row in alone])
    title = "Right tokens before the first wrong token"
    figure = empty_figure(title, "row of the batch", "", height=170 + 34 * len(names))
    texts = counts.astype(str).mask(counts == whole, "✓").to_numpy()
    hover = "%{y}, row %{x}: %{z} tokens right<extra></extra>"
    scale = {"zmin": 0, "zmax": int(whole.max()), "colorbar_title": "tokens"}
    figure.add_trace(cells(counts, text=texts, hovertemplate=hover, **scale))
    return figure.update_yaxes(autorange="reversed", showgrid=False).update_xaxes(dtick=1, showgrid=False)
