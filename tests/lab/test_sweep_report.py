"""Lesson 12: runs of a sweep as a table, records as a view, and the shipped sweep."""

import lesson_runs
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
    assert l12_figures.varying(folder) == ["size", "length"]


def test_view_has_defaults():
    found, varied = lab.load_records(SHIPPED), l12_figures.varying(SHIPPED)
    view = l12_figures.view(found, varied)
    assert (view.value, view.across, view.by) == ("over_regular", "batch_size", ["draft_length"])
    assert view.only == "method == 'batched'" and set(view.table.method) == {"batched"}
    other = l12_figures.view(found, varied, "mean_ms", "draft_length", "batch_size, method", "batch_size > 1")
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
    found, varied = lab.load_records(SHIPPED), l12_figures.varying(SHIPPED)
    for said, chosen in WRONG.items():
        with pytest.raises(ValueError, match=said):
            l12_figures.view(found, varied, **chosen)


def test_figure_and_table_agree_with_the_records():
    found = lab.load_records(SHIPPED)
    view = l12_figures.view(found, l12_figures.varying(SHIPPED))
    summary, lines = l12_figures.summary(view), {line.name: line for line in l12_figures.figure(view).data}
    assert list(lines) == ["draft_length auto", "draft_length 4", "draft_length 7"] == list(summary)
    four = found.query("method == 'batched' and draft_length == 4 and batch_size == 8").iloc[0]
    line = lines["draft_length 4"]
    assert list(line.x) == ["1", "2", "4", "8"] and line.y[3] == summary.loc[8, "draft_length 4"] == four.over_regular
    assert line.y[3] + line.error_y.array[3] == pytest.approx(four.high)
    best = l12_figures.best(view)
    assert (best.over_regular == summary.max(axis=1)).all() and (best["ahead of the second by"] >= 0).all()


@pytest.mark.ci
def test_report_draws_any_sweep(folder, tmp_path):
    executed = lesson_runs.execute("12_sweep_report", tmp_path, folder=str(folder), across="length", value="found")
    text = "".join(str(output) for cell in executed.cells for output in cell.get("outputs", []))
    assert "4 records of 4 runs" in text and "found against length" in text and "size 2" in text
