"""Lesson 12: runs, measurements and best settings of any sweep's folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go

from bass_core import checks
from bass_lab.show.looks import CURVES, curve, empty_figure, interval
from bass_lab.sweep.store import FAILED, MARK, in_table, read_sweep

VALUES = {  # values of a sweep, the first recorded value is the default: unit
    "over_regular": "times as fast as regular decoding",
    "tokens_per_second": "tokens per second",
    "tokens_per_step": "tokens per step",
    "alpha": "α",
    "passed": "share of samples that pass",
    "ms": "milliseconds of a decode step, in a phase",
}


def runs(folder: str | Path) -> pd.DataFrame:
    """Return per requested run: varied parameters, status ("done", "failed", "missing"), seconds, attempts, error."""
    folder = Path(folder)
    asked = read_sweep(folder)["runs"]
    varied = varying(folder)
    lines = []
    for key, parameters in asked.items():
        line = {"run": key, **{name: in_table(parameters.get(name)) for name in varied}}
        mark, report = folder / key / MARK, folder / FAILED / key / "error.txt"
        if mark.exists():
            found = json.loads(mark.read_text(encoding="utf-8"))
            line |= {"status": "done", "seconds": found["seconds"], "attempts": found["attempts"]}
        elif report.exists():
            line |= {"status": "failed", "error": report.read_text(encoding="utf-8").splitlines()[0]}
        else:
            line |= {"status": "missing"}
        lines.append(line)
    return pd.DataFrame(lines).set_index("run")


def varying(folder: str | Path) -> list[str]:
    """Return the parameters with several values in a sweep."""
    asked = list(read_sweep(Path(folder))["runs"].values())
    names = dict.fromkeys(name for parameters in asked for name in parameters)
    return [name for name in names if len({json.dumps(parameters.get(name)) for parameters in asked}) > 1]


@dataclass(frozen=True)
class View:
    """value: measured column; across: axis; by: columns, one line per combination; only: query ("": all records)."""

    table: pd.DataFrame
    value: str
    across: str
    by: list[str]
    only: str

    @property
    def title(self) -> str:
        return f"{self.value} against {self.across}" + (f" ({self.only})" if self.only else "")

    @property
    def lines(self) -> pd.Series:
        """Name of the figure's line for each row of the table."""
        if not self.by:
            return pd.Series("all runs", index=self.table.index)
        return self.table[self.by].apply(lambda row: ", ".join(f"{name} {row[name]}" for name in self.by), axis=1)


def view(
    table: pd.DataFrame, varied: Sequence[str], value: str = "", across: str = "", by: str = "", only: str = ""
) -> View:
    """Return a view of a sweep's records. Empty arguments have defaults.

    value: default the first of `VALUES`, or the first number. across: default the first varied parameter. by: names
    with commas, default the other varied parameters. only: a pandas query, default batched decoding. Raises ValueError
    with the available names.
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
    numbers = [name for name in table.select_dtypes(["number", "bool"]) if name not in varied]
    candidates = [*(name for name in VALUES if name in numbers), *numbers]
    value = checks.one_of("value", value, numbers) if value else candidates[0]
    columns = [name for name in table if name != value]
    across = checks.one_of("across", across, columns) if across else [*varied, "run"][0]
    chosen = [checks.one_of("by", name.strip(), columns) for name in by.split(",")] if by else varied
    return View(table, value, across, [name for name in chosen if name != across], only)


def summary(view: View) -> pd.DataFrame:
    """Return means of the value: [point on the axis, line of the figure]."""
    named = view.table.assign(line=view.lines)
    wide = named.pivot_table(view.value, view.across, "line", aggfunc="mean", sort=False)
    return wide.reindex(index=named[view.across].unique(), columns=named.line.unique()).rename_axis(columns=None)


def best(view: View) -> pd.DataFrame:
    """Return the line with the highest value at each point on the axis, and the lead over the second line."""
    wide = summary(view)
    lead = [line.nlargest(2).pipe(lambda top: top.iloc[0] / top.iloc[-1] - 1) for _, line in wide.iterrows()]
    found = {"best": wide.idxmax(axis=1), view.value: wide.max(axis=1), "ahead of the second by": lead}
    return pd.DataFrame(found, index=wide.index)


def figure(view: View) -> go.Figure:
    """Return the value along the axis, a line per combination, with intervals if the records have them."""
    drawn = empty_figure(view.title, view.across, VALUES.get(view.value, view.value), 440)
    wide, named = summary(view), view.table.assign(line=view.lines)
    for place, name in enumerate(wide):
        line = curve(name, wide.index.astype(str), wide[name], CURVES[place % len(CURVES)])
        part = named[named.line == name].set_index(view.across)
        if view.value == "over_regular" and part.index.is_unique:
            part = part.reindex(wide.index)
            line.update(error_y=interval(part.over_regular, part.low, part.high))
        drawn.add_trace(line.update(hovertemplate=f"{view.across} %{{x}}, {name}: %{{y:.3g}}<extra></extra>"))
    if view.value == "over_regular":
        drawn.add_hline(1, line={"color": "#444444", "width": 1})
    return drawn.update_xaxes(type="category").update_yaxes(rangemode="tozero")
