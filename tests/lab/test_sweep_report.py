"""Lesson 12: runs of a sweep and of papermill as a table, records as a view, and the shipped sweep."""

import shutil
from contextlib import nullcontext

import lesson_runs
import nbformat
import pandas as pd
import papermill
import pytest
import sweeps

import bass_lab as lab
from bass_lab.lessons import l12_figures
from bass_lab.measure import records
from bass_lab.sweep import planning

SHIPPED = records.SHIPPED / "latency_sweep"


@pytest.fixture
def folder(tmp_path):
    plan = planning.plan(sweeps.stub(tmp_path), ["size=1,2,3", "length=auto,4"])
    place = tmp_path / "out"
    with pytest.raises(planning.SweepStopped):
        planning.run(plan, place, sweeps.Instant(*["done"] * 3, "failed", "done", "disk full"))
    return place


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """Return the folder of a loop over papermill: two finished runs, a failed run, and a run that was not started."""
    place = tmp_path_factory.mktemp("loop")
    (out := place / "out").mkdir()
    for size in (1, 2, 3, 4):
        told = {"size": size, "output": f"out/{size}.jsonl", "fails": size == 3}
        with pytest.raises(papermill.PapermillExecutionError) if size == 3 else nullcontext():
            lesson_runs.papermill_run(
                sweeps.stub(place), out / f"{size}.ipynb", told, cwd=place, prepare_only=size == 4
            )
    return out


def shipped_view(*chosen, **more):
    return l12_figures.view(lab.load_records(SHIPPED), l12_figures.runs(SHIPPED), *chosen, **more)


def test_shipped_sweep_is_whole_and_exact():
    runs = l12_figures.runs(SHIPPED)
    assert len(runs) == 12 and (runs.status == "done").all()
    assert set(runs.batch_size) == {1, 2, 4, 8} and set(runs.draft_length) == {"auto", 4, 7}
    found = lab.load_records(SHIPPED)
    assert (found.identical == found.rows).all() and (found.rows == found.batch_size).all()
    batched = found[found.method == "batched"]
    assert batched.run.is_unique and set(batched.run) == set(runs.index)
    assert (batched.k.isna() == (batched.draft_length == "auto")).all()


def test_failed_and_missing_runs_are_named(folder):
    runs = l12_figures.runs(folder)
    assert list(runs.status) == ["done", "done", "done", "failed", "done", "failed"]
    assert list(runs.columns[:3]) == ["size", "length", "status"] and runs.error.iloc[3] == "failed: told to"
    for path in (folder / "failed" / runs.index[5]).iterdir():
        path.unlink()
    assert l12_figures.runs(folder).status.iloc[5] == "missing"


def test_notebooks_of_papermill_are_runs(executed, tmp_path):
    runs = l12_figures.runs(executed)
    assert list(runs.index) == ["1", "2", "3", "4"] and list(runs["size"]) == [1, 2, 3, 4]
    assert list(runs.status) == ["done", "done", "failed", "missing"] and runs.seconds.iloc[0] > 0
    assert runs.error.iloc[2] == "AssertionError: asked to fail"
    found = lab.load_records(executed)
    assert list(found.run) == ["1", "1", "2", "2"] and list(found["product"]) == [1, 2, 2, 4]
    assert set(found.source) == {"1.jsonl", "2.jsonl"}
    shutil.copytree(executed, tmp_path / "moved")
    assert lab.load_records(tmp_path / "moved").equals(found)
    for path in (tmp_path / "moved").glob("[12].ipynb"):  # as if both runs had recorded to one file
        path.write_text(path.read_text().replace("out/2.jsonl", "out/1.jsonl"))
    assert "run" not in lab.load_records(tmp_path / "moved")


def test_view_has_defaults():
    view = shipped_view()
    assert (view.value, view.across, view.by) == ("over_regular", "batch_size", ["draft_length"])
    assert view.only == "method == 'batched'" and set(view.table.method) == {"batched"}
    other = shipped_view("mean_ms", "draft_length", "batch_size, method", "batch_size > 1")
    assert l12_figures.summary(other).shape == (3, 3 * 5)
    assert "batch_size 2, method regular" in l12_figures.summary(other)


WRONG = {
    "value must be one of .*over_regular.*; got 'speed'": {"value": "speed"},
    "across must be one of run, .*batch_size.*; got 'batchsize'": {"across": "batchsize"},
    "by must be one of .*; got 'seeed'": {"by": "draft_length, seeed"},
    "only=.* is not a query of the columns run, .*method": {"only": "methods == 'x'"},
    "no record matches method == 'x'": {"only": "method == 'x'"},
}


def test_view_of_an_unknown_name_lists_the_known():
    for said, chosen in WRONG.items():
        with pytest.raises(ValueError, match=said):
            shipped_view(**chosen)


def test_best_follows_the_direction_of_the_metric():
    lesson, names = lesson_runs.NOTEBOOKS / "12_sweep_report.ipynb", {"figures": l12_figures, "pd": pd}
    exec(next(cell.source for cell in nbformat.read(lesson, 4).cells if cell.id == "best"), names)
    for value, better, word in (("mean_ms", "min", "lower"), ("over_regular", "max", "higher")):
        view = shipped_view(value)
        summary, found = l12_figures.summary(view), names["best"](view)
        assert (found[value] == getattr(summary, better)(axis=1)).all()
        assert list(found.best) == list(getattr(summary, f"idx{better}")(axis=1)), value
        drawn = l12_figures.figure(view).layout
        assert f"{word} is better" in drawn.title.text and drawn.yaxis.title.text == records.metrics()[value]["unit"]
        assert found.get("intervals overlap", pd.Series()).all()


@pytest.mark.parametrize("kind", ["acceptance", "phases"])
def test_records_without_goals_are_separated_by_settings(kind):
    line = {"schema": kind, "method": "batched", **dict.fromkeys(records.metrics(kind), 1.0)}
    table = pd.DataFrame([line | {"phase": phase, "batch": batch} for phase in ("draft", "verify") for batch in (1, 8)])
    view = l12_figures.view(table, l12_figures.runs(records.SHIPPED / "embedded_cpu.jsonl"))
    assert view.value == next(iter(records.metrics(kind))) and "better" not in view.metric
    assert view.across == "batch" and view.by == ["phase"] * (kind == "phases")


def test_figure_and_table_agree_with_the_records():
    found, view = lab.load_records(SHIPPED), shipped_view()
    summary, lines = l12_figures.summary(view), {line.name: line for line in l12_figures.figure(view).data}
    assert list(lines) == ["draft_length auto", "draft_length 4", "draft_length 7"] == list(summary)
    four = found.query("method == 'batched' and draft_length == 4 and batch_size == 8").iloc[0]
    line = lines["draft_length 4"]
    assert line.customdata.tolist() == list("1248")
    assert line.y[3] == summary.loc[8, "draft_length 4"] == four.over_regular
    assert line.y[3] + line.error_y.array[3] == pytest.approx(four.high)


def text_of_report(tmp_path, **parameters):
    report = lesson_runs.execute("12_sweep_report", tmp_path, **parameters)
    return "".join(str(output) for cell in report.cells for output in cell.get("outputs", []))


@pytest.mark.ci
def test_report_draws_sweeps_runs_of_papermill_and_files(folder, executed, tmp_path):
    text = text_of_report(tmp_path, folder=str(folder), across="length", value="found")
    assert "4 records of 4 runs" in text and "Found, by length" in text and "size 2" in text
    assert "No setting is best" in text and "the longer draft is ahead" not in text
    assert "4 records of 2 runs" in text_of_report(tmp_path, folder=str(executed), value="product")
    file = records.SHIPPED / "embedded_cpu.jsonl"
    text = text_of_report(tmp_path, folder=str(file), value="mean_ms", only="prompt_set == 'mini'")
    assert f"{len(lab.load_records(file))} records of 0 runs" in text and ", by batch, lower is better" in text
