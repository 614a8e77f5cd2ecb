"""Figures and widgets of lesson 02: lock-step, the ragged cache, and what a bug does to a text.

Data come from `l02_demonstrations` and `l02_naive_batches`; nothing is decoded here. Beside colour, dashes, hatching
and numbers tell things apart.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from torch import Tensor

from bass_lab.lessons import l02_naive_batches
from bass_lab.lessons.l02_demonstrations import expected_speed, expected_tokens
from bass_lab.show import plots
from bass_lab.show.live_figures import live_figure, redraw, stacked
from bass_lab.show.plots import COLOURS

if TYPE_CHECKING:  # optional packages; imported where they are used
    import ipywidgets
    import plotly.graph_objects as go
    from transformers import PreTrainedTokenizerBase

OWN = {"name": "each row at its own pace", "colour": COLOURS["accepted"], "dash": "solid", "symbol": "circle"}
LOCK_STEP = {"name": "lock-step", "colour": COLOURS["recovered"], "dash": "dash", "symbol": "diamond"}
BATCHES = range(1, 17)
SLOTS = {  # what a slot of the cache holds: colour and hatching
    "committed": {"color": COLOURS["accepted"]},
    "committed in this step": {
        "color": COLOURS["bonus"],
        "pattern": {"shape": ".", "fgcolor": "white", "size": 5},
    },
    "stale: rejected, overwritten next": {
        "color": COLOURS["rejected"],
        "pattern": {"shape": "x", "fgcolor": "white", "size": 5},
    },
    "none of the row's": {"color": "#EDEDED", "pattern": {"shape": "/", "fgcolor": "#999999", "size": 5}},
}


# --- lock-step ------------------------------------------------------------------------------------


def lock_step_figure(alpha: float, k: int, batch: int) -> go.Figure:
    """Left: chance that the i-th drafted token is kept. Right: speed over regular decoding against the batch size."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    titles = ["chance that a drafted token is kept", "speed over regular decoding (model)"]
    figure = make_subplots(1, 2, subplot_titles=titles, horizontal_spacing=0.1)
    for style, rows in ((OWN, 1), (LOCK_STEP, batch)):
        places = list(range(1, k + 1))
        marker = {"color": style["colour"], "pattern": {"shape": "/" if style is LOCK_STEP else "", "fgcolor": "white"}}
        bars = go.Bar(
            name=style["name"],
            x=places,
            y=[alpha ** (rows * place) for place in places],
            marker=marker,
            legendgroup=style["name"],
            hovertemplate="place %{x}: %{y:.1%}",
        )
        figure.add_trace(bars, row=1, col=1)
    for style in (OWN, LOCK_STEP):
        speeds = [expected_speed(alpha, k, rows if style is LOCK_STEP else 1) for rows in BATCHES]
        line = go.Scatter(
            name=style["name"],
            x=list(BATCHES),
            y=speeds,
            mode="lines+markers",
            line={"color": style["colour"], "dash": style["dash"]},
            marker={"symbol": style["symbol"], "size": [13 if rows == batch else 5 for rows in BATCHES]},
            legendgroup=style["name"],
            showlegend=False,
            hovertemplate="batch %{x}: %{y:.2f}×",
        )
        figure.add_trace(line, row=1, col=2)
    title = f"α = {alpha:.2f}, {k} drafted tokens, {batch} rows"
    figure.update_layout(plots.house(title, 420))
    figure.update_layout(plots.LEGEND_BELOW, barmode="group")
    figure.update_xaxes(title="place in the draft", dtick=max(1, k // 8), col=1)
    figure.update_yaxes(range=[0, 1], tickformat=".0%", col=1)
    figure.update_xaxes(title="batch size", dtick=2, col=2)
    figure.update_yaxes(rangemode="tozero", title="times as fast", col=2)
    figure.update_annotations(font_size=13)
    return figure


def lock_step_table(alphas: Sequence[float], k: int, batches: Sequence[int]) -> pd.DataFrame:
    """Expected tokens per step and row: one line per α, lock-step in batches of each size beside a row's own pace."""
    lines = {
        alpha: {"own pace, any batch": expected_tokens(alpha, k)}
        | {f"lock-step, batch {batch}": expected_tokens(alpha, k, batch) for batch in batches}
        for alpha in alphas
    }
    return pd.DataFrame(lines).T.rename_axis("α")


def lock_step_explorer(alpha: float = 0.9, k: int = 5, batch: int = 8) -> ipywidgets.VBox:
    """Sliders for α, batch size and draft length above `lock_step_figure`.

    Its children are the three sliders, a sentence with the expected tokens per step and speeds, and the figure; setting
    a slider's value redraws.
    """
    import ipywidgets

    style = {"description_width": "90px"}
    alpha_slider = ipywidgets.FloatSlider(alpha, min=0.5, max=0.99, step=0.01, description="α", style=style)
    batch_slider = ipywidgets.IntSlider(batch, BATCHES.start, BATCHES.stop - 1, description="batch size", style=style)
    k_slider = ipywidgets.IntSlider(k, 1, 16, description="draft length", style=style)
    sentence, controls = ipywidgets.HTML(), (alpha_slider, batch_slider, k_slider)
    figure = live_figure()

    def draw(_=None) -> None:
        a, rows, length = (control.value for control in controls)
        redraw(figure, lock_step_figure(a, length, rows))
        own, together = (f"{expected_tokens(a, length, n):.2f}" for n in (1, rows))
        fast, slow = (f"{expected_speed(a, length, n):.2f}×" for n in (1, rows))
        sentence.value = (
            f"tokens per step and row: <b>{own}</b> at its own pace, <b>{together}</b> in lock-step · "
            f"speed over regular decoding (model): <b>{fast}</b> and <b>{slow}</b>"
        )

    for control in controls:
        control.continuous_update = False
        control.observe(draw, names="value")
    draw()
    return stacked(*controls, sentence, figure)


def kept_figure(accepted: Mapping[str, pd.DataFrame]) -> go.Figure:
    """One panel per run: accepted drafts per row and step, and below them the least of each step.

    accepted: by name, rows down and steps across, NaN where a row has ended (`plots.raster_matrix`).
    """
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    figure = make_subplots(len(accepted), 1, subplot_titles=list(accepted), vertical_spacing=0.16)
    for panel, table in enumerate(accepted.values(), start=1):
        below = len(table) + 0.4  # a little apart from the rows
        for part, places in ((table, list(range(len(table)))), (table.min().to_frame().T, [below])):
            cells = go.Heatmap(
                z=part.astype(object).where(part.notna(), None).to_numpy(),  # NaN is no JSON
                x=part.columns.to_numpy(),
                y=places,
                xgap=2,
                ygap=2,
                coloraxis="coloraxis",
                text=part.map(lambda count: "" if np.isnan(count) else f"{count:.0f}").to_numpy(),
                texttemplate="%{text}",
                hovertemplate="step %{x}: %{z:.0f} accepted<extra></extra>",
            )
            figure.add_trace(cells, row=panel, col=1)
        labels = {"tickvals": [*range(len(table)), below], "ticktext": [*map(str, table.index), "least"]}
        figure.update_yaxes(**labels, range=[below + 0.6, -0.6], title="row", row=panel, col=1)
    rows = sum(len(table) + 2.5 for table in accepted.values())
    figure.update_layout(plots.house("Accepted draft tokens, and the least of each step", int(150 + 27 * rows)))
    colours = {"title": "accepted", "thickness": 14, "tickformat": "d"}
    most = max(float(np.nanmax(table.to_numpy())) for table in accepted.values())
    figure.update_layout(coloraxis={"colorscale": "Cividis", "cmin": 0, "cmax": max(most, 1), "colorbar": colours})
    figure.update_xaxes(title="decode step", showgrid=False, zeroline=False)
    figure.update_yaxes(showgrid=False, zeroline=False)
    figure.update_annotations(x=0, xanchor="left", font_size=13)
    return figure


def progress_figure(schedules: Mapping[str, tuple[pd.DataFrame, pd.DataFrame]]) -> go.Figure:
    """One panel per prompt set: tokens written against the target's passes, for every row and in lock-step.

    schedules: by name, accepted drafts per row and step (own pace, lock-step), both of `ragged_batches.replay`.
    """
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    figure = make_subplots(
        1, len(schedules), subplot_titles=list(schedules), shared_yaxes=True, horizontal_spacing=0.06
    )
    for panel, (own, together) in enumerate(schedules.values(), start=1):
        for style, table in ((OWN, own), (LOCK_STEP, together.iloc[:1])):
            for number, (_, accepted) in enumerate(table.iterrows()):
                counts = accepted.dropna()
                line = go.Scatter(
                    name=style["name"],
                    x=[0, *counts.index],
                    y=[1, *(1 + (counts + 1).cumsum())],
                    mode="lines+markers",
                    line={"color": style["colour"], "dash": style["dash"], "width": 2 if style is LOCK_STEP else 1},
                    marker={"symbol": style["symbol"], "size": 5},
                    legendgroup=style["name"],
                    showlegend=panel == 1 and number == 0,
                    hovertemplate="after %{x} passes: %{y} tokens",
                )
                figure.add_trace(line, row=1, col=panel)
        tokens = 1 + int((own + 1).sum(axis=1).max())
        regular = go.Scatter(
            name="regular decoding",
            x=[0, tokens - 1],
            y=[1, tokens],
            mode="lines",
            line={"color": COLOURS["regular"], "dash": "dot", "width": 3},
            showlegend=panel == 1,
        )
        figure.add_trace(regular, row=1, col=panel)
    figure.update_layout(plots.house("The same texts at two paces", 450))
    figure.update_layout(plots.LEGEND_BELOW)
    figure.update_xaxes(title="passes of the target", rangemode="tozero")
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(title="tokens written", col=1)
    figure.update_annotations(font_size=13)
    return figure


# --- the cache ------------------------------------------------------------------------------------


def cache_figure(states: pd.DataFrame, steps: Sequence[int]) -> go.Figure:
    """One panel per step: what the slots of each row hold after it. states: of `ragged_batches.cache_states`."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    rows = sorted(states.row.unique())
    titles = [f"after step {step}" for step in steps]
    drawn = len(steps) * (24 * len(rows) + 45)  # pixels
    figure = make_subplots(len(steps), 1, subplot_titles=titles, shared_xaxes=True, vertical_spacing=45 / drawn)
    for panel, step in enumerate(steps, start=1):
        part = states[states.step == step]
        longest = part[["stale_end", "read"]].to_numpy().max()
        edges = [part.first * 0, part["first"], part.kept, part.stale_end, part.row * 0 + longest]
        for (name, marker), begin, end in zip(SLOTS.items(), edges, edges[1:], strict=False):
            bars = go.Bar(
                name=name,
                orientation="h",
                y=part.row,
                base=begin,
                x=end - begin,
                marker=marker,
                showlegend=panel == 1,
                legendgroup=name,
                hovertemplate=f"row %{{y}}: %{{x}} slots from %{{base}}, {name}<extra></extra>",
            )
            figure.add_trace(bars, row=panel, col=1)
    figure.update_layout(plots.house("The target's cache", drawn + 160))
    figure.update_layout(plots.LEGEND_BELOW, barmode="overlay", bargap=0.25)
    figure.update_yaxes(range=[max(rows) + 0.6, min(rows) - 0.6], dtick=1, showgrid=False, zeroline=False, title="row")
    figure.update_xaxes(range=[0, states.stale_end.max() * 1.01], showgrid=False, zeroline=False)
    figure.update_xaxes(title="slot = position", row=len(steps), col=1)
    figure.update_annotations(x=0, xanchor="left", font_size=13)
    return figure


def cache_sentence(states: pd.DataFrame, step: int) -> str:
    """HTML: the figures of one step."""
    part = states[states.step == step]
    padded = len(part) * part.read.max()
    return (
        f"<b>step {step}</b>: {len(part)} rows of {part.kept.min()} … {part.kept.max()} entries; "
        f"{(part.kept - part['first']).sum()} new ones are kept, {(part.written - part.kept).sum()} are stale, and "
        f"{part.overwritten.sum()} stale ones of the step before were overwritten. A rectangle would be "
        f"{1 - part.read.sum() / padded:.0%} padding."
    )


def cache_slider(states: pd.DataFrame, step: int | None = None) -> ipywidgets.VBox:
    """A slider for the step above `cache_figure` of it. Children: slider, sentence, figure; setting the slider's value
    redraws. step: where it starts (None: the first)."""
    import ipywidgets

    numbers = sorted(states.step.unique().tolist())
    slider = ipywidgets.IntSlider(
        numbers[0] if step is None else step, numbers[0], numbers[-1], description="step", continuous_update=False
    )
    sentence, figure = ipywidgets.HTML(), live_figure()

    def draw(_=None) -> None:
        sentence.value = cache_sentence(states, slider.value)
        redraw(figure, cache_figure(states, [slider.value]))

    slider.observe(draw, names="value")
    draw()
    return stacked(slider, sentence, figure)


# --- bugs -----------------------------------------------------------------------------------------


def text_diff(right: Tensor, found: Tensor, tokenizer: PreTrainedTokenizerBase, title: str = "with the bug") -> str:
    """HTML: the right text beside the one found, both marked from the first token that differs."""
    (same,) = l02_naive_batches.right_tokens([found], [right])
    pre = f"{plots.CODE}line-height:1.6;margin:0"
    columns = []
    for name, tokens, style in (
        ("the row alone", right, f"color:{COLOURS['accepted']};border-bottom:2px solid"),
        (title, found, f"color:{COLOURS['recovered']};border-bottom:2px dashed"),
    ):
        before = tokenizer.decode(tokens[:same], skip_special_tokens=True)
        after = tokenizer.decode(tokens, skip_special_tokens=True)[len(before) :]
        columns.append(
            f"<div style='flex:1;min-width:280px'><h4 style='margin:8px 0'>{html.escape(name)}</h4>"
            f"<pre style='{pre}'><span style='color:#5A5A5A'>{html.escape(before)}</span>"
            f"<span style='{style}'>{html.escape(after)}</span></pre></div>"
        )
    headline = f"{same} tokens are right, then the texts part:" if same < len(right) else "The same text."
    return f"<p>{headline}</p><div style='display:flex;gap:24px;flex-wrap:wrap'>{''.join(columns)}</div>"


def damage_figure(runs: Mapping[str | None, Sequence[Tensor]], alone: Sequence[Tensor]) -> go.Figure:
    """Bugs down, rows across: how many tokens are right before the first wrong one; ✓ where all are.

    runs: generated ids per row, by bug.
    """
    import plotly.graph_objects as go

    names = [l02_naive_batches.BUGS.get(bug, "none") for bug in runs]
    counts = [l02_naive_batches.right_tokens(found, alone) for found in runs.values()]
    whole = [len(row) for row in alone]
    texts = [["✓" if n == all_ else str(n) for n, all_ in zip(line, whole, strict=True)] for line in counts]
    figure = plots.empty_figure(
        "Right tokens before the first wrong one", "row of the batch", "", height=170 + 34 * len(names)
    )
    cells = go.Heatmap(
        z=counts,
        x=list(range(len(alone))),
        y=names,
        text=texts,
        texttemplate="%{text}",
        colorscale="Cividis",
        zmin=0,
        zmax=max(whole),
        xgap=2,
        ygap=2,
        hovertemplate="%{y}, row %{x}: %{z} tokens right<extra></extra>",
        colorbar={"title": "tokens", "thickness": 14},
    )
    figure.add_trace(cells)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_xaxes(dtick=1, showgrid=False)
    figure.update_layout(margin={"l": 250})
    return figure
