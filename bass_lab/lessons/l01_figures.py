"""Figures and widgets of lesson 01: the price of a step, its decisions, the rule behind them, and what they yield.

All numbers come from `l01_demonstrations`. Beside colour, hatching, dashes and symbols tell things apart.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from torch import Tensor

from bass_lab.lessons import l01_demonstrations, l01_rules
from bass_lab.lessons.l01_demonstrations import Story
from bass_lab.show import plots
from bass_lab.show.live_figures import live_figure, redraw, stacked
from bass_lab.show.plots import COLOURS

if TYPE_CHECKING:  # optional packages; imported where they are used
    import ipywidgets
    import plotly.graph_objects as go
    from transformers import PreTrainedTokenizerBase

# Colour, dash, symbol: one of them per curve, in order.
STYLES = (
    (COLOURS["accepted"], "solid", "circle"),
    (COLOURS["recovered"], "dash", "square"),
    (COLOURS["bonus"], "dot", "diamond"),
    (COLOURS["rejected"], "dashdot", "triangle-up"),
)
VERDICTS = {
    "accepted": {"color": COLOURS["accepted"]},
    "rejected": {"color": COLOURS["rejected"], "pattern": {"shape": "x", "fgcolor": "white", "size": 6}},
    "unread": {"color": "#E4E4E4", "pattern": {"shape": "/", "fgcolor": "#9A9A9A", "size": 6}},
    "recovered": {"color": COLOURS["recovered"], "pattern": {"shape": "-", "fgcolor": "white", "size": 6}},
    "bonus": {"color": COLOURS["bonus"], "pattern": {"shape": ".", "fgcolor": "white", "size": 6}},
    "regular": {"color": COLOURS["regular"]},
}
MEANINGS = {
    "accepted": "accepted",
    "rejected": "rejected",
    "unread": "not looked at any more",
    "recovered": "recovered: the target's, after a rejection",
    "bonus": "bonus: the target's, after full acceptance",
    "regular": "regular: nothing was drafted",
}
PARTS = {  # of a token's p and q, from below
    "both": ("min(p, q): accepted", {"color": COLOURS["accepted"]}),
    "target": (
        "p - q where positive: the residual",
        {"color": COLOURS["recovered"], "pattern": {"shape": "-", "fgcolor": "white", "size": 6}},
    ),
    "draft": (
        "q - p where positive: rejected",
        {"color": COLOURS["rejected"], "pattern": {"shape": "x", "fgcolor": "white", "size": 6}},
    ),
}
LAWS = (  # of the target, of the draft, and of each rule; more rules than these begin anew
    {"color": "#FFFFFF", "line": {"color": "black", "width": 1.5}},
    {"color": "#E4E4E4", "pattern": {"shape": "/", "fgcolor": "#9A9A9A", "size": 6}},
    {"color": COLOURS["accepted"]},
    {"color": COLOURS["recovered"], "pattern": {"shape": "-", "fgcolor": "white", "size": 6}},
    {"color": COLOURS["rejected"], "pattern": {"shape": "x", "fgcolor": "white", "size": 6}},
)


def cost_figure(curves: Mapping[str, pd.DataFrame]) -> go.Figure:
    """T(n) / T(1) against n, one line per curve (costs as of `l01_demonstrations.measured_costs`)."""
    import plotly.graph_objects as go

    most = max(int(costs.n.max()) for costs in curves.values())
    title = "What a target pass over n new tokens per row costs"
    figure = plots.empty_figure(title, "n, new tokens per row", "T(n) / T(1)", height=430)
    whole = go.Scatter(
        name="n passes: nothing gained", x=[1, most], y=[1, most], mode="lines", line={"color": "#9A9A9A", "width": 1}
    )
    figure.add_trace(whole)
    for (name, costs), (colour, dash, symbol) in zip(curves.items(), STYLES, strict=False):
        line = go.Scatter(
            name=name,
            x=costs.n,
            y=costs.target_ms / costs.target_ms.iloc[0],
            customdata=costs.target_ms,
            mode="lines+markers",
            line={"color": colour, "dash": dash},
            marker={"symbol": symbol, "size": 8},
            hovertemplate="n = %{x}: %{y:.2f} T(1), %{customdata:.2f} ms",
        )
        figure.add_trace(line)
    figure.update_xaxes(dtick=1)
    figure.update_yaxes(range=[0, most + 0.3], dtick=1)
    figure.update_layout(legend={"x": 0.02, "xanchor": "left", "y": 0.98, "yanchor": "top"})
    return figure


def step_cost_figure(predictions: pd.DataFrame, k: int) -> go.Figure:
    """Bars in units of T(1): the tokens of a step one by one, and the step. predictions: of `predicted`."""
    import plotly.graph_objects as go

    verify = predictions[f"T({k + 1}), ms"] / predictions["T(1), ms"]
    drafts = predictions[f"{k} drafts, ms"] / predictions["T(1), ms"]
    labels = [f"<b>{name}</b>" for name in predictions.index]
    one_by_one, step = [labels, ["one by one"] * len(labels)], [labels, ["one step"] * len(labels)]
    tokens, speed = predictions["tokens per step"], predictions["speed-up"]
    bars = [
        ("regular passes, one per token", one_by_one, tokens, {"color": COLOURS["regular"]}, [""] * len(labels)),
        (f"{k} drafts", step, drafts, VERDICTS["recovered"], [""] * len(labels)),
        ("one verifying pass", step, verify, VERDICTS["accepted"], [f"{value:.2f}×" for value in speed]),
    ]
    title = f"Time for the {tokens.iloc[0]:.1f} tokens of a step"
    figure = plots.empty_figure(title, "in units of T(1)", "", height=150 + 75 * len(labels))
    for name, y, x, marker, text in bars:
        bar = go.Bar(name=name, orientation="h", y=y, x=x, marker=marker, text=text, textposition="outside")
        figure.add_trace(bar)
    figure.update_traces(hovertemplate="%{x:.2f} T(1)", cliponaxis=False)
    figure.update_layout(barmode="stack", legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0})
    figure.update_layout(margin={"l": 190, "t": 90})
    figure.update_yaxes(autorange="reversed")
    return figure


def steps_figure(story: Story, steps: Sequence[int]) -> go.Figure:
    """One panel per step: a bar per draft as high as its chance to be accepted, its u as a mark, the target's token."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    titles = [f"<b>step {step}</b>: {_headline(story, step)}" for step in steps]
    panel_px, gap_px, top, bottom = 150, 120, 140, 95  # tick labels have four lines
    inner = len(steps) * (panel_px + gap_px) - gap_px
    figure = make_subplots(len(steps), 1, subplot_titles=titles, vertical_spacing=gap_px / inner)
    shown = story.lines[story.lines.step.isin(steps)]
    for verdict in VERDICTS:  # all panels have the same bars, so that a widget can redraw one
        for panel, step in enumerate(steps, start=1):
            part = shown[(shown.step == step) & (shown.verdict == verdict)]
            bar = go.Bar(
                name=MEANINGS[verdict],
                x=part["slot"].tolist() or [None],  # a trace without data has no place in the legend
                y=part.accept.fillna(1.0).tolist() or [None],
                marker=VERDICTS[verdict],
                legendgroup=verdict,
                showlegend=panel == 1 and (verdict != "regular" or "regular" in set(shown.verdict)),
                hovertemplate="%{y:.3f}",
                width=0.7,
            )
            figure.add_trace(bar, row=panel, col=1)
    for panel, step in enumerate(steps, start=1):
        lines = story.lines[story.lines.step == step]
        read = lines[lines.verdict.isin(["accepted", "rejected"])]
        marks = go.Scatter(
            name="u, uniform in [0, 1)",
            x=read["slot"],
            y=read.u,
            mode="markers",
            marker={"symbol": "diamond", "size": 11, "color": "#F0E442", "line": {"color": "black", "width": 1.5}},
            legendgroup="u",
            showlegend=panel == 1,
            hovertemplate="u = %{y:.3f}",
        )
        figure.add_trace(marks, row=panel, col=1)
        figure.update_xaxes(tickvals=lines["slot"], ticktext=lines.apply(_label, axis=1), row=panel, col=1)
    figure.update_layout(plots.house("", inner + top + bottom), barmode="overlay")
    figure.update_layout(legend={"orientation": "h", "y": 1 + 35 / inner, "yanchor": "bottom", "x": 0})
    figure.update_layout(margin={"t": top, "b": bottom})
    figure.update_yaxes(range=[0, 1.08], dtick=0.5, title="min(1, p/q)")
    figure.update_xaxes(range=[0.4, story.lines["slot"].max() + 0.6], showgrid=False, tickangle=0, tickfont_size=12)
    figure.update_annotations(x=0, xanchor="left", font_size=14)
    return figure


def _headline(story: Story, step: int) -> str:
    verdicts = story.lines[story.lines.step == step].verdict.tolist()
    accepted, drafted = verdicts.count("accepted"), len(verdicts) - 1
    if verdicts[-1] == "accepted":
        return f"the text ends with the last of {accepted} accepted drafts"
    return f"{drafted} drafted, {accepted} accepted, {accepted + 1} committed"


def _label(line: pd.Series) -> str:
    """What stands under a bar: the token, p and q, and how it was decided."""
    parts = [f"<b>{_visible(line.text)}</b>", f"p {line.p:.2g}"]
    if np.isnan(line.accept):
        return "<br>".join([*parts, line.verdict])
    parts.append(f"q {line.q:.2g}")
    if line.verdict != "unread":
        parts.append(f"u {line.u:.2f} {'<' if line.u < line.accept else '≥'} {line.accept:.2f}")
    return "<br>".join(parts)


def _visible(text: str) -> str:
    """A token with its blanks and line ends visible."""
    return html.escape(text).replace(" ", "␣").replace("\n", "↵") or "∅"


def step_slider(story: Story, tokenizer: PreTrainedTokenizerBase) -> ipywidgets.VBox:
    """A slider over the steps of a story, above the text so far and `steps_figure` of the step.

    Its children are the slider, the text as HTML, and the figure; setting `slider.value` redraws.
    """
    import ipywidgets

    steps = sorted(set(story.lines.step) - {0})
    slider = ipywidgets.IntSlider(steps[0], steps[0], steps[-1], description="step", continuous_update=False)
    text, figure = ipywidgets.HTML(), live_figure()

    def draw(step: int) -> None:
        committed = story.lines[(story.lines.step <= step) & ~story.lines.verdict.isin(["rejected", "unread"])]
        committed = committed.sort_values("position")
        text.value = plots.coloured_text(committed.token.tolist(), committed.verdict.tolist(), tokenizer)
        redraw(figure, steps_figure(story, [step]))

    slider.observe(lambda change: draw(change.new), names="value")
    draw(steps[0])
    return stacked(slider, text, figure)


def likeliest(
    logits: tuple[Tensor, Tensor], temperature: float, count: int, tokenizer: PreTrainedTokenizerBase
) -> dict[int, str]:
    """The `count` ids with the largest p or q at this temperature, with their texts."""
    p, q = l01_demonstrations.laws(logits, temperature)
    return {token: tokenizer.decode([token]) for token in p.maximum(q).topk(count).indices.tolist()}


def overlap(p: Tensor, q: Tensor, names: Mapping[int, str]) -> pd.DataFrame:
    """What p and q share and what one has more of, by named id and for all others: columns both, target, draft."""
    parts = {"both": p.minimum(q), "target": (p - q).clamp(min=0), "draft": (q - p).clamp(min=0)}
    named = pd.DataFrame({part: mass[list(names)].numpy() for part, mass in parts.items()}, index=list(names.values()))
    named.loc["others"] = [float(mass.sum()) - named[part].sum() for part, mass in parts.items()]
    return named


def overlap_figure(panels: Mapping[str, pd.DataFrame]) -> go.Figure:
    """One panel per table of `overlap`: stacked, what p and q share and what one of them has more of."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    titles = [f"{name}<br>α = {parts.both.sum():.2f}" for name, parts in panels.items()]
    figure = make_subplots(1, len(panels), shared_yaxes=True, subplot_titles=titles, horizontal_spacing=0.03)
    for panel, parts in enumerate(panels.values(), start=1):
        for part, (meaning, marker) in PARTS.items():
            bar = go.Bar(
                name=meaning,
                x=list(range(len(parts))),
                y=parts[part],
                marker=marker,
                legendgroup=part,
                showlegend=panel == 1,
                hovertemplate="%{y:.3f}",
            )
            figure.add_trace(bar, row=1, col=panel)
        names = [f"<b>{_visible(name)}</b>" if name != "others" else "others" for name in parts.index]
        figure.update_xaxes(tickvals=list(range(len(parts))), ticktext=names, row=1, col=panel)
    figure.update_layout(plots.house("", 420), barmode="stack", bargap=0.25, margin={"b": 130})
    figure.update_layout(legend={"orientation": "h", "y": -0.36, "yanchor": "top", "x": 0})
    figure.update_xaxes(showgrid=False, tickangle=-45, title="next token")
    figure.update_yaxes(range=[0, 1])
    figure.update_yaxes(title="probability", col=1)
    figure.update_annotations(font_size=14)
    return figure


def overlap_slider(logits: tuple[Tensor, Tensor], names: Mapping[int, str], value: float) -> ipywidgets.VBox:
    """A slider for the temperature of both models above `overlap_figure` of one position.

    logits: as of `next_logits`. Its children are the slider and the figure; setting `slider.value` redraws.
    """
    import ipywidgets

    style = {"description_width": "initial"}
    slider = ipywidgets.FloatSlider(value, min=0.1, max=2, step=0.1, description="temperature", style=style)
    slider.continuous_update = False
    figure = live_figure()

    def draw(temperature: float) -> None:
        parts = overlap(*l01_demonstrations.laws(logits, temperature), names)
        redraw(figure, overlap_figure({f"temperature {temperature:.1f}": parts}))

    slider.observe(lambda change: draw(change.new), names="value")
    draw(value)
    return stacked(slider, figure)


def laws_figure(p: Tensor, q: Tensor) -> go.Figure:
    """Bars per token: the target's law, the draft's, and the law that each of `l01_rules.RULES` emits."""
    import plotly.graph_objects as go

    letters = [chr(ord("a") + i) for i in range(len(p))]
    figure = plots.empty_figure("What the text gets, by rule", "token", "probability", height=420)
    laws = {"target p": p, "draft q": q}
    laws |= {name: l01_rules.emitted_law(p, q, rule) for name, rule in l01_rules.RULES.items()}
    for (name, law), marker in zip(laws.items(), itertools.cycle(LAWS), strict=False):
        apart = l01_rules.total_variation(p, law)
        label = name if law is p else f"{name} (TV {apart:.2f})"
        bar = go.Bar(name=label, x=letters, y=law.tolist(), marker=marker, hovertemplate="%{y:.3f}")
        figure.add_trace(bar)
    figure.update_layout(barmode="group", bargroupgap=0.1, margin={"b": 110})
    figure.update_layout(legend={"orientation": "h", "y": -0.2, "yanchor": "top", "x": 0})
    return figure


def tokens_figure(table: pd.DataFrame) -> go.Figure:
    """Tokens per step against k, measured (symbols, 95% intervals) and by formula (lines), per prompt set."""
    import plotly.graph_objects as go

    figure = plots.empty_figure("Tokens per step", "k, drafted tokens", "tokens per step", height=430)
    lengths = table.index.get_level_values("k").unique()
    ceiling = {"color": "#9A9A9A", "width": 1}
    figure.add_trace(go.Scatter(name="k + 1: all accepted", x=lengths, y=lengths + 1, mode="lines", line=ceiling))
    for (name, part), (colour, dash, symbol) in zip(table.groupby("prompts", sort=False), STYLES, strict=False):
        k = part.index.get_level_values("k")
        line = {"color": colour, "dash": dash}
        figure.add_trace(go.Scatter(name=f"{name}, formula", x=k, y=part.formula, mode="lines", line=line))
        marker = {"color": colour, "symbol": symbol, "size": 10}
        error = {"type": "data", "array": part.error}
        measured = go.Scatter(
            name=f"{name}, measured", x=k, y=part.measured, error_y=error, mode="markers", marker=marker
        )
        figure.add_trace(measured)
    figure.update_traces(hovertemplate="k = %{x}: %{y:.2f}")
    figure.update_xaxes(dtick=1)
    figure.update_yaxes(rangemode="tozero")
    figure.update_layout(legend={"x": 0.02, "xanchor": "left", "y": 0.98, "yanchor": "top"})
    return figure


def slots_figure(by_slot: pd.DataFrame, least: int = 20) -> go.Figure:
    """Share accepted of the drafts reached, by slot and prompt set, where at least `least` were."""
    import plotly.graph_objects as go

    title = "Chance that a draft is accepted, if all before it were"
    figure = plots.empty_figure(title, "slot in the draft", "share accepted", height=380)
    enough = by_slot[by_slot.reached >= least]
    for (name, part), (colour, dash, symbol) in zip(enough.groupby("prompts", sort=False), STYLES, strict=False):
        error = 1.96 * np.sqrt(part.accepted * (1 - part.accepted) / part.reached)
        line = go.Scatter(
            name=name,
            x=part.index.get_level_values("slot"),
            y=part.accepted,
            error_y={"type": "data", "array": error},
            customdata=part.reached,
            mode="lines+markers",
            line={"color": colour, "dash": dash},
            marker={"symbol": symbol, "size": 9},
            hovertemplate="slot %{x}: %{y:.2f} of %{customdata}",
        )
        figure.add_trace(line)
    figure.update_xaxes(dtick=1)
    figure.update_yaxes(range=[0, 1.02], tickformat=".0%")
    figure.update_layout(legend={"x": 0.98, "xanchor": "right", "y": 0.05, "yanchor": "bottom"})
    return figure


def speed_figure(table: pd.DataFrame) -> go.Figure:
    """Speed over regular decoding against k: expected (lines) and measured (symbols with intervals), per prompt set."""
    import plotly.graph_objects as go

    title = "Speed over regular decoding, one row, on this machine"
    figure = plots.empty_figure(title, "k, drafted tokens", "times as fast", height=430)
    for (name, part), (colour, dash, symbol) in zip(table.groupby("prompts", sort=False), STYLES, strict=False):
        line = {"color": colour, "dash": dash}
        figure.add_trace(go.Scatter(name=f"{name}, expected", x=part.k, y=part.expected, mode="lines", line=line))
        spread = {"type": "data", "symmetric": False, "array": part.high - part.measured}
        measured = go.Scatter(
            name=f"{name}, measured",
            x=part.k,
            y=part.measured,
            error_y=spread | {"arrayminus": part.measured - part.low},
            mode="markers",
            marker={"color": colour, "symbol": symbol, "size": 10},
        )
        figure.add_trace(measured)
    figure.update_traces(hovertemplate="k = %{x}: %{y:.2f}×")
    figure.add_hline(1, line={"color": "black", "width": 1})
    figure.update_xaxes(dtick=1)
    figure.update_yaxes(rangemode="tozero")
    figure.update_layout(legend={"orientation": "h", "y": 0.02, "yanchor": "bottom", "x": 0.01})
    return figure
