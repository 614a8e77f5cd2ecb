"""Figures and widgets of lesson 01: cost of a step, decisions, acceptance rules, tokens per step."""

from __future__ import annotations

import html
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from bass_lab.lessons import l01_demonstrations, l01_rules
from bass_lab.lessons.l01_demonstrations import Story
from bass_lab.show import plots, token_views
from bass_lab.show.live_figures import live, slider, widgets
from bass_lab.show.looks import CURVES, FAINT, bars, curve, empty_figure, interval, panels

VERDICTS = ("accepted", "rejected", "not reached", "recovered", "bonus", "regular")
PARTS = {  # parts of p and q, from below: label and look
    "both": ("min(p, q): accepted", "accepted"),
    "target": ("p - q where positive: the residual", "recovered"),
    "draft": ("q - p where positive: rejected", "rejected"),
}
LAWS = ("regular", "nothing", "accepted", "recovered", "rejected")  # looks of the target, the draft, and each rule


def cost_figure(curves: Mapping[str, pd.DataFrame]) -> go.Figure:
    """Return T(n) / T(1) against n, one line per curve (costs of `l01_demonstrations.measured_costs`)."""
    most = max(int(costs.n.max()) for costs in curves.values())
    title = "Cost of a target pass over n new tokens per row"
    figure = empty_figure(title, "n, new tokens per row", "T(n) / T(1)", height=460)
    figure.add_scatter(name="n passes: nothing gained", x=[1, most], y=[1, most], mode="lines", line=FAINT)
    for (name, costs), look in zip(curves.items(), CURVES, strict=False):
        hover = {"customdata": costs.target_ms, "hovertemplate": "n = %{x}: %{y:.2f} T(1), %{customdata:.2f} ms"}
        figure.add_trace(curve(name, costs.n, costs.target_ms / costs.target_ms.iloc[0], look, **hover))
    return figure.update_xaxes(dtick=1).update_yaxes(range=[0, most + 0.3], dtick=1)


def step_cost_figure(predictions: pd.DataFrame, k: int) -> go.Figure:
    """Return bars in T(1): a step's tokens one by one, and the speculative step. predictions: of `predicted`."""
    parts = predictions[[f"T({k + 1}), ms", f"{k} drafts, ms"]].div(predictions["T(1), ms"], axis="index")
    labels = [f"<b>{name}</b>" for name in predictions.index]
    one_by_one, step = ([labels, [name] * len(labels)] for name in ("one by one", "one step"))
    tokens = predictions["tokens per step"]
    title = f"Time for the {tokens.iloc[0]:.1f} tokens of a step"
    figure = empty_figure(title, "in units of T(1)", "", height=170 + 75 * len(labels))
    texts = {"text": [f"{value:.2f}×" for value in predictions["speed-up"]], "textposition": "outside"}
    figure.add_trace(bars("regular passes, one per token", tokens, one_by_one, "regular"))
    figure.add_trace(bars(f"{k} drafts", parts[f"{k} drafts, ms"], step, "draft"))
    figure.add_trace(bars("one verification pass", parts[f"T({k + 1}), ms"], step, "verify", **texts))
    figure.update_traces(orientation="h", hovertemplate="%{x:.2f} T(1)", cliponaxis=False)
    return figure.update_layout(barmode="stack").update_yaxes(autorange="reversed")


def steps_figure(story: Story, steps: Sequence[int]) -> go.Figure:
    """Return one panel per step: acceptance probability (bar) and u (mark) of draft tokens, and the target's token."""
    titles = [f"<b>step {step}</b>: {_headline(story, step)}" for step in steps]
    panel_px, gap_px = 150, 120  # tick labels have four lines
    inner = len(steps) * (panel_px + gap_px) - gap_px
    figure = panels(len(steps), 1, titles, "", inner + 215, vertical_spacing=gap_px / inner)
    shown = story.lines[story.lines.step.isin(steps)]
    for verdict in VERDICTS:  # the same traces in all panels allow a widget to redraw
        for panel, step in enumerate(steps, start=1):
            part = shown[(shown.step == step) & (shown.verdict == verdict)]
            x, y = part["slot"].tolist(), part.accept.fillna(1.0).tolist()  # no data would mean no legend entry
            options = {"legendgroup": verdict, "hovertemplate": "%{y:.3f}", "width": 0.7}
            named = panel == 1 and (verdict != "regular" or "regular" in set(shown.verdict))
            name = f"{verdict}: {plots.MEANINGS[verdict]}"
            figure.add_trace(bars(name, x or [None], y or [None], verdict, showlegend=named, **options), panel, 1)
    marks = {"symbol": "diamond", "size": 11, "color": "#F0E442", "line": {"color": "black", "width": 1.5}}
    for panel, step in enumerate(steps, start=1):
        lines = story.lines[story.lines.step == step]
        read = lines[lines.verdict.isin(["accepted", "rejected"])]
        numbers = go.Scatter(name="u, uniform in [0, 1)", x=read["slot"], y=read.u, mode="markers", marker=marks)
        numbers.update(legendgroup="u", showlegend=panel == 1, hovertemplate="u = %{y:.3f}")
        figure.add_trace(numbers, panel, 1)
        figure.update_xaxes(tickvals=lines["slot"], ticktext=lines.apply(_label, axis=1), row=panel, col=1)
    figure.update_layout(barmode="overlay", margin={"t": 50, "b": 165})
    figure.update_yaxes(range=[0, 1.08], dtick=0.5, title="min(1, p/q)")
    return figure.update_xaxes(range=[0.4, story.lines["slot"].max() + 0.6], showgrid=False, tickangle=0)


def _headline(story: Story, step: int) -> str:
    verdicts = story.lines[story.lines.step == step].verdict.tolist()
    accepted, drafted = verdicts.count("accepted"), len(verdicts) - 1
    if verdicts[-1] == "accepted":
        return f"the text ends with the last of {accepted} accepted tokens"
    return f"{drafted} drafted, {accepted} accepted, {accepted + 1} committed"


def _label(line: pd.Series) -> str:
    parts = [f"<b>{html.escape(token_views.visible(line.text))}</b>", f"p {line.p:.2g}"]
    if np.isnan(line.accept):
        return "<br>".join([*parts, line.verdict])
    parts.append(f"q {line.q:.2g}")
    if line.verdict != "not reached":
        parts.append(f"u {line.u:.2f} {'<' if line.u < line.accept else '≥'} {line.accept:.2f}")
    return "<br>".join(parts)


def step_slider(story: Story, tokenizer: PreTrainedTokenizerBase) -> widgets.VBox:
    """Return a slider over the steps of a story, above the text so far and `steps_figure`."""
    steps = sorted(set(story.lines.step) - {0})

    def draw(step: int):
        text = story.committed[story.committed.step <= step]
        shown = plots.coloured_text(text.token.tolist(), text.verdict.tolist(), tokenizer)
        return shown, steps_figure(story, [step])

    return live(draw, step=slider(steps[0], steps[0], steps[-1], "step"))


def likeliest(
    logits: tuple[Tensor, Tensor], temperature: float, count: int, tokenizer: PreTrainedTokenizerBase
) -> dict[int, str]:
    """Return the `count` ids with the largest p or q at this temperature, and their texts."""
    p, q = l01_demonstrations.laws(logits, temperature)
    return {token: tokenizer.decode([token]) for token in p.maximum(q).topk(count).indices.tolist()}


def overlap(p: Tensor, q: Tensor, names: Mapping[int, str]) -> pd.DataFrame:
    """Return min(p, q) and the excess of p and of q, per named id and for all others: columns both, target, draft."""
    parts = {"both": p.minimum(q), "target": (p - q).clamp(min=0), "draft": (q - p).clamp(min=0)}
    named = pd.DataFrame({part: mass[list(names)].numpy() for part, mass in parts.items()}, index=list(names.values()))
    named.loc["others"] = [float(mass.sum()) - named[part].sum() for part, mass in parts.items()]
    return named


def overlap_figure(tables: Mapping[str, pd.DataFrame]) -> go.Figure:
    """Return one panel per table of `overlap`: stacked bars of min(p, q) and the excess of p or q."""
    titles = [f"{name}<br>α = {parts.both.sum():.2f}" for name, parts in tables.items()]
    figure = panels(1, len(tables), titles, "", 420, shared_yaxes=True, horizontal_spacing=0.03)
    for panel, parts in enumerate(tables.values(), start=1):
        places = list(range(len(parts)))
        for part, (meaning, look) in PARTS.items():
            options = {"legendgroup": part, "showlegend": panel == 1, "hovertemplate": "%{y:.3f}"}
            figure.add_trace(bars(meaning, places, parts[part], look, **options), 1, panel)
        names = [f"<b>{html.escape(token_views.visible(name))}</b>" for name in parts.index[:-1]]
        figure.update_xaxes(tickvals=places, ticktext=[*names, "others"], row=1, col=panel)
    figure.update_layout(barmode="stack", bargap=0.25, margin={"t": 60, "b": 130})
    figure.update_xaxes(showgrid=False, tickangle=-45, title="next token").update_yaxes(range=[0, 1])
    return figure.update_yaxes(title="probability", col=1)


def overlap_slider(logits: tuple[Tensor, Tensor], names: Mapping[int, str], value: float) -> widgets.VBox:
    """Return a slider for the temperature of both models above `overlap_figure` of one position (`next_logits`)."""

    def draw(temperature: float):
        parts = overlap(*l01_demonstrations.laws(logits, temperature), names)
        return [overlap_figure({f"temperature {temperature:.1f}": parts})]

    return live(draw, temperature=slider(value, 0.1, 2, "temperature", step=0.1))


def laws_figure(p: Tensor, q: Tensor) -> go.Figure:
    """Return bars per token: distributions of the target, the draft, and the text under each of `l01_rules.RULES`."""
    figure = empty_figure("Distribution of the text by rule", "token", "probability", height=420)
    laws = {"target p": p, "draft q": q}
    laws |= {name: l01_rules.emitted_law(p, q, rule) for name, rule in l01_rules.RULES.items()}
    letters = [chr(ord("a") + i) for i in range(len(p))]
    for (name, law), look in zip(laws.items(), itertools.cycle(LAWS), strict=False):
        label = name if law is p else f"{name} (TV {l01_rules.total_variation(p, law):.2f})"
        figure.add_trace(bars(label, letters, law.tolist(), look, hovertemplate="%{y:.3f}"))
    return figure.update_layout(barmode="group", bargroupgap=0.1)


def tokens_figure(table: pd.DataFrame) -> go.Figure:
    """Return tokens per step against k per prompt set: measured (symbols, 95% intervals) and by formula (lines)."""
    figure = empty_figure("Tokens per step", "draft length k", "tokens per step", height=460)
    lengths = table.index.get_level_values("k").unique()
    figure.add_scatter(name="k + 1: all accepted", x=lengths, y=lengths + 1, mode="lines", line=FAINT)
    for (name, part), look in zip(table.groupby("prompts", sort=False), CURVES, strict=False):
        k, error = part.index.get_level_values("k"), {"type": "data", "array": part.error}
        figure.add_trace(curve(f"{name}, formula", k, part.formula, look, "lines"))
        figure.add_trace(curve(f"{name}, measured", k, part.measured, look, "markers", error_y=error))
    figure.update_traces(hovertemplate="k = %{x}: %{y:.2f}")
    return figure.update_xaxes(dtick=1).update_yaxes(rangemode="tozero")


def slots_figure(by_slot: pd.DataFrame) -> go.Figure:
    """Return the share of accepted draft tokens by slot and prompt set, for slots reached at least 20 times."""
    title = "Acceptance of a draft token, if all before it were accepted"
    figure = empty_figure(title, "slot in the draft", "share accepted", height=410)
    enough = by_slot[by_slot.reached >= 20]
    for (name, part), look in zip(enough.groupby("prompts", sort=False), CURVES, strict=False):
        error = {"type": "data", "array": 1.96 * np.sqrt(part.accepted * (1 - part.accepted) / part.reached)}
        hover = {"customdata": part.reached, "hovertemplate": "slot %{x}: %{y:.2f} of %{customdata}"}
        slots = part.index.get_level_values("slot")
        figure.add_trace(curve(name, slots, part.accepted, look, error_y=error, **hover))
    return figure.update_xaxes(dtick=1).update_yaxes(range=[0, 1.02], tickformat=".0%")


def speed_figure(table: pd.DataFrame) -> go.Figure:
    """Return speed against k per prompt set: expected (lines) and measured (symbols with intervals)."""
    title = "Speed relative to regular decoding, one row, on this machine"
    figure = empty_figure(title, "draft length k", "times as fast", height=460)
    for (name, part), look in zip(table.groupby("prompts", sort=False), CURVES, strict=False):
        figure.add_trace(curve(f"{name}, expected", part.k, part.expected, look, "lines"))
        whiskers = interval(part.measured, part.low, part.high)
        figure.add_trace(curve(f"{name}, measured", part.k, part.measured, look, "markers", error_y=whiskers))
    figure.update_traces(hovertemplate="k = %{x}: %{y:.2f}×")
    figure.add_hline(1, line={"color": "black", "width": 1})
    return figure.update_xaxes(dtick=1).update_yaxes(rangemode="tozero")
