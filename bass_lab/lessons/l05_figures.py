"""Figures of lesson 05: drafts by depth, alignment, acceptance against cost, and one drafter's text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from bass_core import checks
from bass_core.generation import generate
from bass_core.loading.model_pair import ModelPair
from bass_core.policies.protocol import expected_tokens
from bass_lab.lessons.l05_demonstrations import REGULAR
from bass_lab.show import plots, token_views
from bass_lab.show.live_figures import live, widgets
from bass_lab.show.looks import CURVES, LOOKS, bars, curve, empty_figure, interval, panels

LONGEST = 16  # longest draft length; the best length counts
SPEEDS = (1.5, 2, 2.5, 3, 4)  # speeds with lines


def ladder_figure(table: pd.DataFrame, layers: Mapping[str, int]) -> go.Figure:
    """Return α and times per draft and committed token against layers, per prompt set (`compared`, one batch)."""
    names = {"alpha": "α", "draft_ms": "ms per draft token", "ms": "ms per committed token"}
    figure = panels(1, 3, list(names.values()), "Draft models of equal size, by depth", 360, horizontal_spacing=0.08)
    drafts = table[table.draft.isin(layers.keys())]
    drafts = drafts.assign(layers=drafts.draft.map(layers)).sort_values("layers")
    for look, (prompts, part) in zip(CURVES, drafts.groupby("prompts", sort=False), strict=False):
        for column, name in enumerate(names, 1):
            line = curve(prompts, part.layers, part[name], look, legendgroup=prompts, showlegend=column == 1)
            line.update(hovertemplate=f"{prompts}, %{{x}} layers: %{{y:.2f}}<extra></extra>")
            figure.add_trace(line, 1, column)
    figure.update_xaxes(title="layers", tickvals=sorted(set(drafts.layers)))
    return figure.update_yaxes(rangemode="tozero")


def alignment_figure(tables: Mapping[str, pd.DataFrame]) -> go.Figure:
    """Return α before and after alignment with 95% intervals, by prompt set. tables: of `l05_demonstrations.alphas`."""
    figure = empty_figure("A minute of alignment", "", "α", 380)
    for name, look in (("before", "baseline"), ("after", "accepted")):
        found = pd.DataFrame({prompts: table.loc[name] for prompts, table in tables.items()}).T
        drawn = bars(name, found.index, found.value, look, error_y=interval(found.value, found.low, found.high))
        texts = [f"{value:.2f}" for value in found.value]
        figure.add_trace(drawn.update(text=texts, textposition="inside", insidetextanchor="start"))
    return figure.update_yaxes(range=[0, 1])


def cost_figure(table: pd.DataFrame, title: str) -> go.Figure:
    """Return α against draft token time ÷ regular step, one point per draft. Grey lines connect equal speeds at the
    best draft length. table: of `l05_demonstrations.compared`, for one prompt set and batch."""
    step = table.set_index("draft").pass_ms[REGULAR]
    drafts = table[table.draft != REGULAR].dropna(subset="draft_ms")
    shares = drafts.draft_ms / step
    figure = empty_figure(title, "time of a draft token ÷ time of a target pass (logarithmic)", "α", 480)
    lowest, highest = min(1e-3, shares.min() / 2), max(1.0, shares.max() * 2)
    costs, chances = np.geomspace(lowest, highest, 80), np.linspace(0.0, 0.99, 1000)
    for speed in SPEEDS:
        needed = _needed(speed, costs, chances)
        line = go.Scatter(x=costs, y=needed, mode="lines", line={"color": LOOKS["baseline"].colour, "width": 1})
        shown = np.flatnonzero(~np.isnan(needed))
        if len(shown):
            figure.add_trace(line.update(showlegend=False, hoverinfo="skip"))
            at = shown[len(shown) // 8]
            label = {"x": np.log10(costs[at]), "y": needed[at], "text": f"{speed:g}×", "showarrow": False}
            figure.add_annotation(label | {"bgcolor": "white", "font": {"color": "#707070"}})
    for look, symbol, (line, share) in zip(
        (*CURVES, "regular"), _SYMBOLS, zip(drafts.itertuples(), shares, strict=True), strict=False
    ):
        hover = f"{line.draft}: α %{{y:.2f}}, a draft token costs %{{x:.3f}} passes<extra></extra>"
        point = curve(line.draft, [share], [line.alpha], look, "markers", hovertemplate=hover)
        figure.add_trace(point.update(marker={"size": 14, "symbol": symbol}))
    figure.update_xaxes(type="log", range=np.log10([lowest, highest]).tolist(), dtick=1)
    return figure.update_yaxes(range=[0, 1])


_SYMBOLS = ("circle", "diamond", "square", "cross", "triangle-up", "star")


def _needed(speed: float, costs: np.ndarray, chances: np.ndarray) -> np.ndarray:
    """Return the least α that reaches this speed at each cost, or NaN."""
    seconds = 1 + np.arange(LONGEST + 1) * costs[:, None, None]  # [costs, 1, k]
    reached = (expected_tokens(chances, LONGEST) / seconds).max(-1) >= speed  # [costs, chances]
    return np.where(reached.any(1), chances[reached.argmax(1)], np.nan)


def drafter_view(
    pairs: Mapping[str, ModelPair], prompts: Mapping[str, Sequence[str]], draft: str, prompt_set: str, **options
) -> widgets.VBox:
    """Return menus for drafter and prompts above a sentence, the first row's text by origin, and the raster. options:
    as in `generate`. Raises ValueError if draft or prompt_set is not in the menus."""
    start = {"draft": checks.one_of("draft", draft, tuple(pairs))}
    start["prompts"] = checks.one_of("prompt_set", prompt_set, tuple(prompts))

    def draw(draft: str, prompts_of: str) -> tuple[str, str, go.Figure]:
        pair, texts = pairs[draft], prompts[prompts_of]
        trace = generate(pair, texts, trace="tokens", **options).trace
        text = token_views.row_html(trace, 0, pair.tokenizer, texts[0])
        title = f"{draft} on {prompts_of}: accepted draft tokens per row and step"
        sentence = f"<b>{draft}</b> on <b>{prompts_of}</b>: {token_views.headline(trace)}"
        return sentence, f"{plots.legend()}<br>{text}", plots.acceptance_raster(trace, title)

    menus = {
        "draft": widgets.Dropdown(options=list(pairs), value=start["draft"], description="drafter"),
        "prompts_of": widgets.Dropdown(options=list(prompts), value=start["prompts"], description="prompts"),
    }
    return live(draw, **menus)
