"""Figures and a widget of lesson 09: finished rows and right rows against time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from bass_lab.evaluation import Evaluation
from bass_lab.show.live_figures import live, widgets
from bass_lab.show.looks import LOOKS, bars, curve, interval, panels

BUDGETS = (0.05, 0.07, 0.1, 0.14, 0.2, 0.28, 0.4, 0.56, 0.8, 1.1, 1.6, 2.2, 3.2)  # seconds, fixed in advance
Rule = Callable[[pd.DataFrame, float], object]  # of the rows of a problem and a budget
STATES = {"right, in time": "bonus", "wrong, in time": "rejected", "too late": "nothing"}  # state of a row: look


def budget_figure(scores: pd.DataFrame, metrics: Sequence[str] = ("Pass@First", "Pass@All")) -> go.Figure:
    """Return a panel per metric: share of problems against the budget with 95% band (`scores` with `method`)."""
    figure = _metric_panels("Problems solved within a time budget, with 95% intervals", metrics)
    shown = scores[scores.metric.isin(metrics)]
    for (metric, method), part in shown.groupby(["metric", "method"], sort=False):
        column = metrics.index(metric) + 1
        band = go.Scatter(x=[*part.budget, *part.budget[::-1]], y=[*part.high, *part.low[::-1]], mode="lines")
        band.update(fill="toself", fillcolor=LOOKS[method].colour, opacity=0.15, line_width=0, hoverinfo="skip")
        line = curve(method, part.budget, part.value, method, customdata=part[["low", "high"]], marker_size=7)
        line.update(hovertemplate="%{x:.2f} s: %{y:.1%} (%{customdata[0]:.1%} to %{customdata[1]:.1%})")
        figure.add_trace(band.update(showlegend=False, legendgroup=method), 1, column)
        figure.add_trace(line.update(showlegend=column == 1, legendgroup=method), 1, column)
    return figure.update_yaxes(range=[0, 1], tickformat=".0%")


def difference_figure(differences: pd.DataFrame) -> go.Figure:
    """Return a panel per metric: gain at each budget, with paired 95% intervals. differences: of `scores.difference`,
    with the columns `gain` (in words) and `over` (the baseline method)."""
    shown = differences[differences.metric.isin(["Pass@First", "Pass@All"])]
    metrics, gains = list(shown.metric.unique()), list(shown.gain.unique())
    figure = _metric_panels("Paired gain per problem, with 95% intervals", metrics)
    for (metric, gain), part in shown.groupby(["metric", "gain"], sort=False):
        beside = part.budget * 1.04 ** (2 * gains.index(gain) - len(gains) + 1)  # side by side
        points = curve(gain, beside, part.value, part.over.iloc[0], "markers", legendgroup=gain, marker_size=8)
        points.update(error_y=interval(part.value, part.low, part.high), showlegend=metric == metrics[0])
        hover = "%{customdata[0]:.2f} s: %{y:+.1%} (%{customdata[1]:+.1%} to %{customdata[2]:+.1%})"
        points.update(customdata=part[["budget", "low", "high"]], hovertemplate=hover)
        figure.add_trace(points, 1, metrics.index(metric) + 1)
    return figure.update_yaxes(tickformat="+.0%", zeroline=True, zerolinecolor="#444444")


def _metric_panels(title: str, metrics: Sequence[str]) -> go.Figure:
    figure = panels(1, len(metrics), metrics, title, 470, shared_yaxes=True, horizontal_spacing=0.05)
    figure.update_xaxes(type="log", title="budget, seconds per problem", tickvals=BUDGETS[::2], tickformat=".2~f")
    return figure.update_yaxes(title="share of problems", col=1)


def standing(samples: pd.DataFrame, problem: str, budget: float) -> pd.DataFrame:
    """Return the rows of one problem at a budget: row, start and finish in seconds, state (of `STATES`), chosen (by
    Pass@First)."""
    rows = samples[samples.problem == problem].sort_values("row")
    finish = rows.finish_seconds.fillna(np.inf)
    in_time = finish <= budget
    confidence = (rows.logprob_sum / rows.tokens.clip(1)).where(in_time, -np.inf)
    chosen = in_time & (rows.index == confidence.idxmax())
    state = np.where(in_time, np.where(rows.passed, "right, in time", "wrong, in time"), "too late")
    return pd.DataFrame({"row": rows.row, "start": 0.0, "finish": finish, "state": state, "chosen": chosen})


def finish_figure(runs: Mapping[str, Evaluation], problem: str, budget: float) -> go.Figure:
    """Return a panel per method: a bar per row of the problem until its end, with its state at the budget."""
    standings = {method: standing(run.samples, problem, budget) for method, run in runs.items()}
    titles, height = [f"<b>{method}</b>" for method in runs], 200 + 20 * sum(map(len, standings.values()))
    stacked = {"shared_xaxes": True, "vertical_spacing": 0.07}
    figure = panels(len(runs), 1, titles, "End of each row of one problem", height, **stacked)
    star = {"symbol": "star", "size": 13, "color": "#F0E442", "line": {"color": "black", "width": 1}}
    for panel, (method, rows) in enumerate(standings.items(), start=1):
        if method == "single":
            rows["start"] = rows.finish.shift(fill_value=0.0)
        for state, look in STATES.items():
            part = rows[rows.state == state]
            drawn = bars(state, part.finish - part.start, part.row, look, orientation="h", base=part.start)
            hover = f"{method}, row %{{y}}: done after %{{customdata:.3f}} s, {state}<extra></extra>"
            figure.add_trace(drawn.update(customdata=part.finish, hovertemplate=hover, showlegend=False), panel, 1)
        chosen = rows[rows.chosen]
        mark = go.Scatter(x=chosen.finish, y=chosen.row, mode="markers", marker=star, showlegend=False)
        hover = "row %{y}: graded by Pass@First<extra></extra>"
        figure.add_trace(mark.update(name="most confident, in time", hovertemplate=hover), panel, 1)
    for state, look in STATES.items():  # a legend of all states
        figure.add_trace(bars(state, [None], [None], look), 1, 1)
    figure.add_vline(budget, line={"color": "black", "dash": "dash"})
    figure.update_layout(barmode="overlay", bargap=0.15)
    figure.update_yaxes(autorange="reversed", dtick=1, showgrid=False, title="row")
    longest = max(run.samples[run.samples.problem == problem].finish_seconds.max() for run in runs.values())
    figure.update_xaxes(range=[0, longest * 1.05])
    return figure.update_xaxes(title="seconds since the call; the dashed line is the budget", row=len(runs), col=1)


def budget_explorer(runs: Mapping[str, Evaluation], rules: Mapping[str, Rule], steps: int = 25) -> widgets.VBox:
    """Return controls for problem and budget above `finish_figure` and the results of the rules as HTML.
    `children[1].value` is one of the budget's options, in seconds."""
    samples = pd.concat([run.samples for run in runs.values()])
    seconds = samples.finish_seconds.dropna()
    grid = [(f"{value:.3f} s", float(value)) for value in np.geomspace(seconds.min() * 0.9, seconds.max(), steps)]

    def draw(problem: str, budget: float):
        rows = {method: run.samples[run.samples.problem == problem] for method, run in runs.items()}
        told = {name: [rule(of, budget) for of in rows.values()] for name, rule in rules.items()}
        marks = pd.DataFrame(told, index=list(rows)).replace({True: "✓", False: "✗"})
        return finish_figure(runs, problem, budget), marks.to_html(border=0)

    style = {"description_width": "initial"}
    problem = widgets.Dropdown(options=list(samples.problem.unique()), description="problem", style=style)
    middle = grid[steps // 2][1]
    budget = widgets.SelectionSlider(options=grid, value=middle, description="budget", style=style)
    return live(draw, problem=problem, budget=budget)
