"""Figures and the panel of lesson 11: waiting and writing requests, and percentiles under load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from bass_core import checks
from bass_core.policies.protocol import DraftLengthPolicy
from bass_lab.lessons.l11_demonstrations import answered_in_time, planned, with_deadline
from bass_lab.load import LoadRun, Workload
from bass_lab.show.live_figures import live, slider, widgets
from bass_lab.show.looks import CURVES, bars, curve, empty_figure, panels

POLICY_LOOKS = {"none": "regular", "default": "accepted"}  # other policies use the remaining CURVES
SHOWN = 60  # requests of the panel's timeline

Policies = Mapping[str, int | DraftLengthPolicy]


def timeline_figure(requests: pd.DataFrame, pieces: pd.DataFrame, title: str) -> go.Figure:
    """Return a line per request: waiting from arrival to first token, then writing to the end.

    requests: arrived, first (NaN: none), ended, in seconds; a cross marks finish_reason "budget". pieces: request, at.
    """
    figure = empty_figure(title, "seconds since the start", "request", 190 + 13 * max(len(requests), 8))
    number = np.arange(len(requests))
    first = requests["first"].fillna(requests.ended)
    spans = {
        "waits for first token": ("nothing", requests.arrived, first),
        "writes": ("accepted", first, requests.ended),
    }
    for name, (look, start, end) in spans.items():
        hover = f"request %{{y}} {name}: %{{base:.3f}} to %{{customdata:.3f}} s<extra></extra>"
        drawn = bars(name, end - start, number, look, orientation="h", base=start, customdata=end)
        figure.add_trace(drawn.update(hovertemplate=hover))
    mark = {"symbol": "line-ns", "size": 8, "line": {"color": "white", "width": 1.5}}
    shown = pieces[pieces.request.isin(number)]
    ticks = go.Scatter(x=shown["at"], y=shown.request, mode="markers", marker=mark, showlegend=False, hoverinfo="skip")
    if len(requests) <= 20:  # more ticks would cover the bars
        figure.add_trace(ticks)
    reasons = requests.get("finish_reason", pd.Series("", index=requests.index))
    left = (reasons == "budget").to_numpy()
    gone = curve("client leaves", requests.ended[left], number[left], "recovered", "markers")
    gone.update(marker={"symbol": "x", "size": 8}, hovertemplate="request %{y}: client left after %{x:.2f} s")
    figure.add_trace(gone)
    figure.update_layout(barmode="overlay", bargap=0.25)
    figure.update_xaxes(rangemode="tozero")
    return figure.update_yaxes(autorange="reversed", showgrid=False)


def load_figure(table: pd.DataFrame, title: str) -> go.Figure:
    """Return p99 to the end, p99 between tokens, and speed over none against the rate (`load.over_rates`)."""
    names = {
        "end_p99_ms": "p99 to the end, ms",
        "between_p99_ms": "p99 between tokens, ms",
        "over_none": "time to the end: none ÷ policy",
    }
    figure = panels(1, 3, list(names.values()), title, 420, horizontal_spacing=0.08)
    looks = _looks(table.policy.unique())
    for policy, part in table.groupby("policy", sort=False):
        for column, name in enumerate(names, 1):
            line = curve(policy, part.rate, part[name], looks[policy], legendgroup=policy, showlegend=column == 1)
            figure.add_trace(line.update(hovertemplate=f"{policy}, %{{x:.2f}}/s: %{{y:.3g}}<extra></extra>"), 1, column)
    figure.update_xaxes(title="requests per second", rangemode="tozero")
    ticks = [m * 10**e for e in range(6) for m in (1, 2, 5)]
    figure.update_yaxes(type="log", tickvals=ticks, tickformat=",d", row=1, col=1)
    return figure.update_yaxes(rangemode="tozero", col=2).update_yaxes(rangemode="tozero", col=3)


def _looks(policies: Sequence[str]) -> dict[str, str]:
    rest = iter(look for look in CURVES if look not in POLICY_LOOKS.values())
    return {policy: POLICY_LOOKS.get(policy) or next(rest) for policy in policies}


def deadline_figure(table: pd.DataFrame) -> go.Figure:
    """Return Pass@First and the answered share against the deadline, by method (`within_deadlines`)."""
    figure = empty_figure("Answers within a deadline", "deadline, seconds after the arrival", "share of requests", 420)
    for look, (way, part) in zip(("regular", "accepted"), table.groupby("way", sort=False), strict=False):
        for name, says, dash in (("pass_first", "right", "solid"), ("answered", "answered", "dot")):
            line = curve(f"{way}: {says}", part.deadline, part[name], look, hovertemplate="%{x:.2f} s: %{y:.0%}")
            figure.add_trace(line.update(line_dash=dash))
    figure.update_xaxes(type="log", tickformat=".2~f", tickvals=sorted(set(table.deadline)))
    return figure.update_yaxes(range=[0, 1.02], tickformat=".0%")


def gap_figure(runs: Mapping[str, LoadRun], arrives: float) -> go.Figure:
    """Return the gaps before each piece of the short rows, a panel per run, and the long prompt's arrival."""
    titles = [f"<b>{name}</b>" for name in runs]
    shared = {"shared_xaxes": True, "shared_yaxes": True}
    figure = panels(len(runs), 1, titles, "One long prompt among short prompts", 460, **shared)
    for panel, run in enumerate(runs.values(), 1):
        found = run.gaps.join(run.pieces["at"])
        found = found[found.request < len(run.requests) - 1]  # short prompts only
        points = curve("a gap in a short row's text", found["at"], found.gap_ms, "accepted", "markers")
        points.update(showlegend=panel == 1)
        hover = "%{x:.2f} s: request %{customdata} received no text for %{y:.0f} ms<extra></extra>"
        figure.add_trace(points.update(customdata=found.request, hovertemplate=hover, marker_size=6), panel, 1)
    figure.add_vline(arrives, line={"color": "black", "dash": "dash"})
    figure.update_yaxes(title="gap, ms", rangemode="tozero", matches="y")
    return figure.update_xaxes(title="seconds; the dashed line is the long prompt's arrival", row=len(runs), col=1)


def load_panel(
    asked: Workload,
    serve: Callable[[Workload, int | DraftLengthPolicy], LoadRun],
    policies: Policies,
    *,
    rate: float,
    deadline: float,
    policy: str,
    most: float,
) -> widgets.VBox:
    """Return controls for arrival rate (up to `most`), deadline and policy above a sentence and a timeline.

    serve(workload, policy): simulated run. Raises ValueError for initial values outside the controls.
    """
    checks.one_of("policy", policy, tuple(policies))
    if not (0 < rate <= most and 0.05 <= deadline <= 10):
        raise ValueError(
            f"0 < rate <= {most:.3g} and 0.05 <= deadline <= 10 are required, got {rate} per second, {deadline} s"
        )

    def draw(rate: float, deadline: float, policy: str) -> tuple[str, go.Figure]:
        run = serve(with_deadline(asked.at_rate(rate), deadline), policies[policy])
        title = f"{policy}, {rate:.2g} requests per second: the first requests"
        figure = timeline_figure(run.requests.head(SHOWN), run.pieces, title)
        return _sentence(run, deadline), figure.update_layout(height=190 + 7 * SHOWN)

    step = round(most / 20, 2)
    controls = {
        "rate": slider(rate, step, most, "requests per second", step),
        "deadline": slider(deadline, 0.05, 10.0, "clients leave after, s", 0.05),
        "policy": widgets.Dropdown(options=list(policies), value=policy, description="draft length"),
    }
    return live(draw, **controls)


def _sentence(run: LoadRun, deadline: float) -> str:
    found = run.summary(resamples=2).value
    in_time = answered_in_time(run, deadline)
    return (
        f"<b>{in_time:.0%}</b> of {len(run.requests)} requests were answered within {deadline:g} s, at "
        f"{found['tokens_per_s', 'mean']:.0f} tokens per second, with {found['batch', 'mean']:.1f} live rows "
        f"and a draft length of {planned(run):.1f} on average."
    )
