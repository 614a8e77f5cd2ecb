"""Lesson 12: runs, measurements and best settings of a sweep, of papermill's runs, or of a file of records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from bass_core import checks
from bass_lab.measure import records
from bass_lab.show.looks import CURVES, curve, empty_figure, interval
from bass_lab.sweep.store import FAILED, MARK, SWEEP, executed, in_table, read_sweep


def runs(folder: Path) -> pd.DataFrame:
    """Return per requested run: varied parameters, status ("done", "failed", "missing"), seconds, attempts, error.
    Records without runs, such as a file, give no lines."""
    if (folder / SWEEP).exists():
        found = {key: (own, _state(folder, key)) for key, own in read_sweep(folder)["runs"].items()}
    else:
        found = {run.key: (run.parameters, run.mark) for run in executed(folder)}
    asked = pd.DataFrame(
        [{name: in_table(value) for name, value in own.items()} for own, _ in found.values()], [*found]
    )
    varied = [name for name in asked if asked[name].nunique(dropna=False) > 1]
    states = pd.DataFrame([state for _, state in found.values()], [*found], None if found else ["status"])
    return asked[varied].join(states).rename_axis("run")


def _state(folder: Path, key: str) -> dict:
    mark, report = folder / key / MARK, folder / FAILED / key / "error.txt"
    if mark.exists():
        found = json.loads(mark.read_text(encoding="utf-8"))
        return {"status": "done", **{name: found[name] for name in ("seconds", "attempts")}}
    if report.exists():
        return {"status": "failed", "error": report.read_text(encoding="utf-8").splitlines()[0]}
    return {"status": "missing"}


def _settings(table: pd.DataFrame, varied: Sequence[str]) -> list[str]:
    """Return the settings in the records (docs/RECORDS.md) that differ between records with equal parameters."""
    fields = dict.fromkeys(name for kind in _kinds(table) for name in records.kinds()[kind]["properties"])
    found: list[str] = []
    for name in fields:
        if name in table and name not in records.metrics(*_kinds(table)):
            groups = table.assign(all="").groupby(["all", *varied, *found], dropna=False)[name]
            found += [name] * bool((groups.nunique(dropna=False) > 1).any())
    return sorted(found, key=lambda name: not pd.api.types.is_numeric_dtype(table[name]))


def _kinds(table: pd.DataFrame) -> list[str]:
    return [] if "schema" not in table else [*table["schema"].dropna().unique()]


@dataclass(frozen=True)
class View:
    """value: measured column; across: axis; by: columns, one line per combination; only: query ("": all records).

    table: the records, with the name of each line in the column `line`. metric: unit and better direction of the value
    (docs/RECORDS.md), empty if unknown. has_intervals: each point is one record, with an interval of the value.
    """

    table: pd.DataFrame
    value: str
    across: str
    by: list[str]
    only: str
    metric: dict
    has_intervals: bool


def view(
    table: pd.DataFrame, runs: pd.DataFrame, value: str = "", across: str = "", by: str = "", only: str = ""
) -> View:
    """Return a view of the records. Empty arguments have defaults.

    value: default the first goal, else the first metric, else the first number. across: default the first varied name.
    by: names with commas, default the other varied names. Varied names are parameters of `runs`, then settings in the
    records, and no point is a mean over different settings. only: a pandas query, default batched decoding. Raises
    ValueError with the available names.
    """
    if not only and "method" in table and table.method.nunique() > 1 and "batched" in set(table.method):
        only = "method == 'batched'"
    if only:
        try:
            chosen = table.query(only)
        except Exception as error:  # pandas raises many types
            raise ValueError(f"only={only!r} is not a query of the columns {', '.join(table)}: {error}") from None
        if chosen.empty:
            raise ValueError(f"no record matches {only}")
        table = chosen
    table = table.map(lambda each: json.dumps(each) if isinstance(each, dict | list) else each)
    varied = [name for name in runs.columns[: runs.columns.get_loc("status")] if name in table]
    varied = [name for name in varied if table[name].nunique(dropna=False) > 1]
    varied += _settings(table, varied)
    numbers = [name for name in table.select_dtypes(["number", "bool"]).dropna(axis=1, how="all") if name not in varied]
    metrics = {name: metric for name, metric in records.metrics(*_kinds(table)).items() if name in numbers}
    candidates = [*(name for name in metrics if "better" in metrics[name]), *metrics, *numbers]
    value = checks.one_of("value", value or next(iter(candidates), ""), numbers)
    columns = [name for name in table if name != value]
    across = checks.one_of("across", across or [*varied, "run" if "run" in table else "source"][0], columns)
    chosen = [checks.one_of("by", name.strip(), columns) for name in by.split(",")] if by else varied
    chosen = [name for name in chosen if name != across]
    named = table[[across, *chosen]].convert_dtypes().astype(object)
    named = named.where(named.notna(), "null")
    line = named[chosen].apply(lambda row: ", ".join(f"{name} {row[name]}" for name in chosen) or "all runs", axis=1)
    table = table.assign(**named, line=line)
    intervals = value == "over_regular" and not table.duplicated([across, "line"]).any()
    return View(table, value, across, chosen, only, metrics.get(value, {}), intervals)


def summary(view: View, column: str | None = None) -> pd.DataFrame:
    """Return means of the value, or of another column: [point on the axis, line of the figure]."""
    wide = view.table.pivot_table(column or view.value, view.across, "line", aggfunc="mean", sort=False)
    return wide.reindex(index=view.table[view.across].unique(), columns=view.table.line.unique()).rename_axis(
        columns=None
    )


def figure(view: View) -> go.Figure:
    """Return the value along the axis, a line per combination, with intervals if the records have them."""
    better = f", {view.metric['better']} is better" if "better" in view.metric else ""
    value, across = view.metric.get("unit", view.value), view.across.replace("_", " ")
    title = f"{value[:1].upper()}{value[1:]}, by {across}{better}" + (f" ({view.only})" if view.only else "")
    drawn, wide = empty_figure(title, across, value, 440), summary(view)
    points = np.arange(len(wide))
    for place, name in enumerate(wide):
        beside = points + 0.06 * (place - (len(wide.columns) - 1) / 2)  # intervals of several lines stay apart
        line = curve(name, beside, wide[name], CURVES[place % len(CURVES)], customdata=wide.index.astype(str))
        if view.has_intervals:
            line.update(error_y=interval(wide[name], *(summary(view, end)[name] for end in ("low", "high"))))
        drawn.add_trace(line.update(hovertemplate=f"{across} %{{customdata}}, {name}: %{{y:.3g}}<extra></extra>"))
    if view.value == "over_regular":
        drawn.add_hline(1, line={"color": "#444444", "width": 1})
    return drawn.update_xaxes(tickvals=points, ticktext=wide.index.astype(str)).update_yaxes(rangemode="tozero")
