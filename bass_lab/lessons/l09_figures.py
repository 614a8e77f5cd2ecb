"""Figures and a widget of lesson 09: what is done, and what is right, at which moment.

Samples come from `bass_lab.evaluation`; nothing is scored here. Methods differ by colour, dash and symbol, and the
states of a row by colour and hatching.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from bass_lab.show import plots
from bass_lab.show.live_figures import live_figure, redraw, stacked
from bass_lab.show.plots import COLOURS

if TYPE_CHECKING:  # optional packages; imported where they are used
    import ipywidgets
    import plotly.graph_objects as go

    from bass_lab.evaluation import Evaluation

BUDGETS = (0.05, 0.07, 0.1, 0.14, 0.2, 0.28, 0.4, 0.56, 0.8, 1.1, 1.6, 2.2, 3.2)  # seconds, fixed before the record
STATES = {
    "right, in time": {"color": COLOURS["bonus"]},
    "wrong, in time": {"color": COLOURS["rejected"], "pattern": {"shape": "x", "fgcolor": "white", "size": 6}},
    "too late": {"color": "#E4E4E4", "pattern": {"shape": "/", "fgcolor": "#9A9A9A", "size": 6}},
}


def budget_figure(scores: pd.DataFrame, metrics: Sequence[str] = ("Pass@First", "Pass@All")) -> go.Figure:
    """One panel per metric: share of problems against the budget, a line with its 95% band per method.

    scores: as of `Evaluation.scores`, with a column `method`.
    """
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    figure = make_subplots(1, len(metrics), shared_yaxes=True, subplot_titles=metrics, horizontal_spacing=0.05)
    for (metric, method), part in scores.groupby(["metric", "method"], sort=False):
        if metric not in metrics:
            continue
        colour, dash, symbol, _ = plots.METHODS[method]
        panel = {"row": 1, "col": metrics.index(metric) + 1}
        band = go.Scatter(
            x=[*part.budget, *part.budget[::-1]],
            y=[*part.high, *part.low[::-1]],
            mode="lines",
            fill="toself",
            fillcolor=colour,
            opacity=0.15,
            line_width=0,
            hoverinfo="skip",
            showlegend=False,
            legendgroup=method,
        )
        line = go.Scatter(
            name=method,
            x=part.budget,
            y=part.value,
            mode="lines+markers",
            line={"color": colour, "dash": dash},
            marker={"symbol": symbol, "size": 7},
            legendgroup=method,
            showlegend=metric == metrics[0],
            customdata=np.stack([part.low, part.high], axis=1),
            hovertemplate="%{x:.2f} s: %{y:.1%} (%{customdata[0]:.1%} to %{customdata[1]:.1%})",
        )
        figure.add_traces([band, line], rows=[1, 1], cols=[panel["col"]] * 2)
    figure.update_layout(plots.house("Problems solved within a time budget, with 95% intervals", 470))
    figure.update_layout(plots.LEGEND_BELOW)
    figure.update_xaxes(type="log", title="budget, seconds per problem", tickformat=".2~f")
    figure.update_yaxes(range=[0, 1], tickformat=".0%")
    figure.update_yaxes(title="share of problems", col=1)
    return figure


def difference_figure(differences: pd.DataFrame) -> go.Figure:
    """One panel per metric: what is gained at each budget, with paired 95% intervals.

    differences: as of `scores.difference`, with the columns `gain` (what is gained, in words) and `over` (the
    method that is left behind).
    """
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    metrics = [metric for metric in differences.metric.unique() if metric in ("Pass@First", "Pass@All")]
    gains = list(differences.gain.unique())
    figure = make_subplots(1, len(metrics), shared_yaxes=True, subplot_titles=metrics, horizontal_spacing=0.05)
    for (metric, gain), part in differences.groupby(["metric", "gain"], sort=False):
        if metric not in metrics:
            continue
        place = gains.index(gain)
        colour, _, symbol, _ = plots.METHODS[part.over.iloc[0]]
        points = go.Scatter(
            name=gain,
            x=part.budget * 1.04 ** (2 * place - len(gains) + 1),  # beside each other, not over each other
            y=part.value,
            mode="markers",
            marker={"color": colour, "symbol": symbol, "size": 8},
            error_y={
                "type": "data",
                "symmetric": False,
                "array": part.high - part.value,
                "arrayminus": part.value - part.low,
            },
            legendgroup=gain,
            showlegend=metric == metrics[0],
            customdata=np.stack([part.budget, part.low, part.high], axis=1),
            hovertemplate="%{customdata[0]:.2f} s: %{y:+.1%} (%{customdata[1]:+.1%} to %{customdata[2]:+.1%})",
        )
        figure.add_trace(points, row=1, col=metrics.index(metric) + 1)
    figure.update_layout(plots.house("What is gained, problem by problem, with 95% intervals", 470))
    figure.update_layout(plots.LEGEND_BELOW)
    figure.update_xaxes(type="log", title="budget, seconds per problem", tickformat=".2~f")
    figure.update_yaxes(tickformat="+.0%", zeroline=True, zerolinecolor="#444444")
    figure.update_yaxes(title="share of problems", col=1)
    return figure


def standing(samples: pd.DataFrame, problem: str, budget: float) -> pd.DataFrame:
    """The rows of one problem at a moment: row, start and finish in seconds, state (of `STATES`), and chosen.

    start: 0, or the end of the row before where rows take turns. chosen: the row that Pass@First looks at, if any.
    """
    rows = samples[samples.problem == problem].sort_values("row")
    finish = rows.finish_seconds.fillna(np.inf)
    in_time = finish <= budget
    confidence = (rows.logprob_sum / rows.tokens.clip(1)).where(in_time, -np.inf)
    chosen = in_time & (rows.index == confidence.idxmax())
    state = np.where(in_time, np.where(rows.passed, "right, in time", "wrong, in time"), "too late")
    return pd.DataFrame({"row": rows.row, "start": 0.0, "finish": finish, "state": state, "chosen": chosen})


def finish_figure(runs: Mapping[str, Evaluation], problem: str, budget: float) -> go.Figure:
    """One panel per method: a bar per row of the problem until it was done, and what it is worth at the budget."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    titles = [f"<b>{method}</b>" for method in runs]
    figure = make_subplots(len(runs), 1, shared_xaxes=True, subplot_titles=titles, vertical_spacing=0.07)
    rows_in_all = 0
    for panel, (method, run) in enumerate(runs.items(), start=1):
        rows = standing(run.samples, problem, budget)
        if method == "single":
            rows["start"] = rows.finish.shift(fill_value=0.0)
        rows_in_all += len(rows)
        for state, marker in STATES.items():
            part = rows[rows.state == state]
            bars = go.Bar(
                name=state,
                orientation="h",
                y=part.row,
                base=part.start,
                x=part.finish - part.start,
                marker=marker,
                showlegend=False,
                hovertemplate=f"{method}, row %{{y}}: done after %{{customdata:.3f}} s, {state}<extra></extra>",
                customdata=part.finish,
            )
            figure.add_trace(bars, row=panel, col=1)
        chosen = rows[rows.chosen]
        star = go.Scatter(
            name="most confident, in time",
            x=chosen.finish,
            y=chosen.row,
            mode="markers",
            marker={"symbol": "star", "size": 13, "color": "#F0E442", "line": {"color": "black", "width": 1}},
            showlegend=False,
            hovertemplate="row %{y}: the one that Pass@First grades<extra></extra>",
        )
        figure.add_trace(star, row=panel, col=1)
    for name, marker in STATES.items():  # a legend that does not depend on which states there are
        figure.add_trace(go.Bar(name=name, x=[None], y=[None], marker=marker), row=1, col=1)
    figure.add_vline(budget, line={"color": "black", "dash": "dash"})
    figure.update_layout(plots.house("When the rows of one problem are done", 200 + 20 * rows_in_all))
    figure.update_layout(plots.LEGEND_BELOW, barmode="overlay", bargap=0.15)
    figure.update_yaxes(autorange="reversed", dtick=1, showgrid=False, title="row")
    longest = max(run.samples[run.samples.problem == problem].finish_seconds.max() for run in runs.values())
    figure.update_xaxes(range=[0, longest * 1.05])
    figure.update_xaxes(title="seconds since the call; the dashed line is the budget", row=len(runs), col=1)
    figure.update_annotations(x=0, xanchor="left", font_size=13)
    return figure


def verdicts(runs: Mapping[str, Evaluation], problem: str, budget: float) -> pd.DataFrame:
    """One line per method: rows done within the budget, right ones among them, and whether First and All pass."""
    lines = []
    for method, run in runs.items():
        rows = standing(run.samples, problem, budget)
        right = rows.state == "right, in time"
        done = int((rows.state != "too late").sum())
        verdict = {"done": done, "right": int(right.sum()), "First": bool((right & rows.chosen).any())}
        lines.append({"method": method, **verdict, "All": bool(right.any())})
    return pd.DataFrame(lines).set_index("method")


def budget_explorer(runs: Mapping[str, Evaluation], steps: int = 25) -> ipywidgets.VBox:
    """A problem and a budget to choose above `finish_figure` and the verdicts.

    Its children are the two controls, the figure and the verdicts as HTML; setting `children[1].value`, seconds of
    `children[1].options`, redraws.
    """
    import ipywidgets

    samples = pd.concat([run.samples for run in runs.values()])
    seconds = samples.finish_seconds.dropna()
    grid = np.geomspace(seconds.min() * 0.9, seconds.max(), steps)
    style = {"description_width": "initial"}
    problem = ipywidgets.Dropdown(options=list(samples.problem.unique()), description="problem", style=style)
    budget = ipywidgets.SelectionSlider(
        options=[(f"{value:.3f} s", float(value)) for value in grid],
        value=float(grid[steps // 2]),
        description="budget",
        continuous_update=False,
        style=style,
    )
    sentence, figure = ipywidgets.HTML(), live_figure()

    def draw(_=None) -> None:
        redraw(figure, finish_figure(runs, problem.value, budget.value))
        marks = verdicts(runs, problem.value, budget.value).replace({True: "✓", False: "✗"})
        sentence.value = marks.to_html(border=0)

    for control in (problem, budget):
        control.observe(draw, names="value")
    draw()
    return stacked(problem, budget, figure, sentence)
