"""Each run of a sweep is done once, also after kills and full disks, and leaves no process."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import lesson_runs
import nbformat
import pytest
import record_lines
import sweeps
import torch
from commands import invoke
from waiting import until

import bass_lab as lab
from bass_lab.cli.main import app
from bass_lab.show import pages
from bass_lab.sweep import executors, parameters, planning, run_process, store


def started(path):
    return [tuple(map(int, line.split())) for line in path.read_text().splitlines()] if path.exists() else []


def until_all_have_ended(log):
    until(lambda: not any(sweeps.alive(process) for _, *processes in started(log) for process in processes), 2)


def swept(notebook, out, *values, executor=None, **options):
    return planning.run(planning.plan(notebook, values), out, executor or sweeps.Instant(), **options)


def sizes(folder):
    return [result.parameters["size"] for result in store.finished_runs(folder)]


@pytest.mark.ci
def test_kill_at_any_step_of_writing_leaves_whole_results(notebook, tmp_path):
    plan, step, done_before = planning.plan(notebook, ["size=1,2,3"]), 0, set()
    while True:
        folder = tmp_path / f"killed-{step}"
        run = lambda folder=folder: planning.run(plan, folder, sweeps.Instant())  # noqa: E731
        status = sweeps.killed_after(step, run, folder)
        survivors = set(sizes(folder)) if (folder / store.SWEEP).exists() else set()
        done_before.add(len(survivors))
        executor = sweeps.Instant()
        table = planning.run(plan, folder, executor)
        assert executor.started == 3 - len(survivors)  # finished runs stay
        assert list(table.status).count("was done") == len(survivors)
        assert sorted(lab.load_records(folder)["size"]) == [1, 2, 3]  # checks the hashes
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        step += 1
    assert step > 50 and done_before == {0, 1, 2, 3}


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def test_full_disk_ends_the_sweep_and_spoils_nothing(notebook, small_disk):
    out, filler = small_disk / "out", small_disk / "filler"
    plan, done_before = planning.plan(notebook, ["size=1,2,3,4"]), set()
    for free in range(0, 160_000, 16_384):  # from no free page to enough
        filler.write_bytes(bytes(shutil.disk_usage(small_disk).free - free))
        try:
            planning.run(plan, out, sweeps.Instant())
        except planning.SweepStopped as stop:
            assert "disk full: " in str(stop) and "free some space, and the same command continues" in str(stop)
        survivors = sizes(out) if (out / store.SWEEP).exists() else []
        assert not survivors or sorted(lab.load_records(out)["size"]) == sorted(survivors)
        done_before.add(len(survivors))
        filler.unlink()
        executor = sweeps.Instant()
        planning.run(plan, out, executor)
        assert executor.started == 4 - len(survivors)
        assert sorted(lab.load_records(out)["size"]) == [1, 2, 3, 4]
        subprocess.run(["rm", "-r", out], check=True)
    assert done_before >= {0, 1, 4}


@pytest.mark.slow
def test_full_disk_in_a_run_differs_from_a_failing_cell(notebook, small_disk):
    out = small_disk / "out"
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - 10 * 4096))
    done = invoke("sweep", notebook, "-p", "size=1,2,3", "--output", out)
    assert done.exit_code == 1 and "stopped: disk full: " in done.output and "free some space" in done.output
    survivors = sizes(out)
    (small_disk / "filler").unlink()
    done = invoke("sweep", notebook, "-p", "size=1,2,3", "--output", out)
    assert done.exit_code == 0, done.output
    assert sizes(out) == [1, 2, 3] and done.output.count("was done") - 1 == len(survivors)


DAMAGES = {
    "records cut off": lambda place: os.truncate(place / "records.jsonl", 5),
    "records deleted": lambda place: (place / "records.jsonl").unlink(),
    "records are a folder": lambda place: ((place / "records.jsonl").unlink(), (place / "records.jsonl").mkdir()),
    "an empty mark": lambda place: os.truncate(place / "done.json", 0),
    "another mark": lambda place: (place / "done.json").write_text("[]"),
    "notebook cut off": lambda place: os.truncate(place / "notebook.ipynb", 5),
    "notebook deleted": lambda place: (place / "notebook.ipynb").unlink(),
}


def test_damaged_result_is_run_again(notebook, tmp_path):
    whole, plan = tmp_path / "whole", planning.plan(notebook, ["size=1,2"])
    planning.run(plan, whole, sweeps.Instant())
    for damage, do in DAMAGES.items():
        out = tmp_path / damage
        shutil.copytree(whole, out)
        do(out / [*plan.runs][1])
        if "notebook" not in damage:
            with pytest.raises(ValueError, match=r"it was changed or lost afterwards; repeat the run with"):
                lab.load_records(out)
        assert list(plan.table(out).status) == ["done", "to run"], damage
        assert list(planning.run(plan, out, sweeps.Instant()).status) == ["was done", "done"]
        assert sorted(lab.load_records(out)["size"]) == [1, 2]
        assert list(planning.run(plan, out, sweeps.Instant()).status) == ["was done", "was done"]


def test_two_sweeps_do_not_share_a_folder(notebook, tmp_path):
    out = tmp_path / "out"
    with store.Store(out, notebook.name, {"key": {}}) as held:
        scratch = held.scratch("key", 1)
        with pytest.raises(ValueError, match="another sweep is writing"):
            swept(notebook, out, "size=1")
        assert scratch.exists()  # the other sweep writes here
    swept(notebook, out, "size=1")
    with pytest.raises(ValueError, match=r"is a sweep of stub.ipynb, not of other.ipynb; give another folder"):
        swept(sweeps.stub(tmp_path, name="other"), out, "size=1")
    with pytest.raises(ValueError, match="holds other files and no sweep"):
        swept(notebook, tmp_path, "size=1")


@pytest.mark.ci
def test_cell_that_leaves_the_notebook_is_a_failure(tmp_path):
    values = ("word=raise SystemExit(0),raise SystemExit,import os; os._exit(0)",)
    executor = executors.LocalExecutor(3)
    table = swept(sweeps.stub(tmp_path, "exec(word)"), tmp_path / "out", *values, executor=executor, retries=0)
    assert list(table.status) == ["failed", "failed", "died"] and sizes(tmp_path / "out") == []


def test_failing_cell_is_shown_and_other_runs_are_done(tmp_path):
    folder = tmp_path / "{odd} {}"  # braces have no special meaning
    folder.mkdir()
    notebook, out = sweeps.stub(folder), folder / "{out}"
    done = invoke("sweep", notebook, "-p", "size=2", "-p", "fails=true,false", "--jobs", 2, "--output", out)
    assert done.exit_code == 1
    assert "failed: AssertionError: asked to fail" in done.output and "----> " in done.output
    assert "2 runs: 1 failed, 1 done" in done.output or "2 runs: 1 done, 1 failed" in done.output
    assert sizes(out) == [2] and set(lab.load_records(out)["product"]) == {2, 4}
    (report,) = (path for path in out.rglob("error.txt"))
    assert "assert not fails" in report.read_text() and (report.parent / "notebook.ipynb").exists()
    again = invoke("sweep", notebook, "-p", "size=2", "-p", "fails=true,false", "--dry-run", "--output", out)
    assert again.exit_code == 0 and "1 to run" in again.output and "nothing was run" in again.output


def test_late_run_is_killed_with_its_kernel(notebook, tmp_path):
    log, local = tmp_path / "started", executors.LocalExecutor()
    table = swept(notebook, tmp_path / "out", "pause=60", f"started={log}", executor=local, timeout=3)
    assert list(table.status) == ["timeout"] and list(table.attempts) == [1]
    until_all_have_ended(log)


LEAVES_CHILDREN = """
import os, subprocess, time
children = [subprocess.Popen(["sleep", "100"]), subprocess.Popen(["sleep", "100"], start_new_session=True)]
with open(started + ".children", "w") as file:
    file.write(" ".join(str(child.pid) for child in children) + "\\n")
"""


@pytest.fixture
def children(tmp_path, monkeypatch):
    """Return a notebook with child processes, its log, the processes, and a function that waits for their end."""
    place, log = Path(tempfile.mkdtemp(prefix="t", dir="/tmp")), tmp_path / "started"
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    listed = Path(f"{log}.children")

    def all_gone(seconds=2.0):
        found = [int(process) for process in listed.read_text().split()]
        until(lambda: not any(map(sweeps.alive, found)) and not list(place.iterdir()), seconds)
        return len(found) == 2

    yield sweeps.stub(tmp_path, LEAVES_CHILDREN), log, listed, all_gone
    place.rmdir()


@pytest.mark.slow
@pytest.mark.parametrize(("end", "values"), [("done", "pause=0.0"), ("timeout", "pause=60")])
def test_processes_of_a_notebook_end_with_its_run(children, tmp_path, end, values):
    notebook, log, listed, all_gone = children

    def gone_before_the_next_run(key, line):
        until(lambda: not any(sweeps.alive(int(process)) for process in listed.read_text().split()), 1)

    options = {"timeout": 20 if end == "timeout" else None, "progress": gone_before_the_next_run}
    table = swept(notebook, tmp_path / "out", values, f"started={log}", executor=executors.LocalExecutor(), **options)
    assert list(table.status) == [end] and all_gone()


@pytest.mark.ci
def test_killed_sweep_leaves_no_process_and_no_folder(children, tmp_path):
    notebook, log, listed, all_gone = children
    values = ("pause=60", f"started={log}")
    child = sweeps.forked(lambda: swept(notebook, tmp_path / "out", *values, executor=executors.LocalExecutor()))
    until(lambda: started(log) and listed.exists(), 30)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert all_gone()
    until_all_have_ended(log)


def test_temporary_folders_have_short_names(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    short = Path(run_process.short_folder(None))
    assert len(str(short)) < 40
    short.rmdir()


def test_run_that_cannot_start_is_given_up_after_retries(notebook, tmp_path):
    executor = sweeps.Instant("died", "died", "done", "died", "died", "died")
    table = swept(notebook, tmp_path / "out", "size=1,2", executor=executor, retries=2)
    assert list(table.status) == ["done", "died"] and list(table.attempts) == [3, 3]
    assert len(list((tmp_path / "out" / "failed").iterdir())) == 1
    assert list(swept(notebook, tmp_path / "out", "size=1,2").status) == ["was done", "done"]
    assert not list((tmp_path / "out" / "failed").iterdir())  # a result replaces the failed attempt
    taken = OSError(98, "Address already in use")
    assert run_process._obstacle(taken, tmp_path)["status"] == run_process.DIED


def test_changed_code_ends_the_sweep(notebook, tmp_path, monkeypatch):
    monkeypatch.setattr(run_process, "code_version", lambda: "as it was")
    with pytest.raises(planning.SweepStopped, match=r"code changed: .* do not change the code while a sweep runs"):
        swept(notebook, tmp_path / "out", "size=1,2", executor=executors.LocalExecutor())


@pytest.mark.ci
def test_interrupt_ends_all_processes_and_keeps_results(notebook, tmp_path):
    log, out, said = tmp_path / "started", tmp_path / "out", tmp_path / "said"

    def interrupted():
        sys.stderr = said.open("w", buffering=1)
        app(["sweep", str(notebook), "-p", "size=1,2,3", "-p", "pause=0.5", "-p", f"started={log}", f"--output={out}"])

    child = sweeps.forked(interrupted)
    until(lambda: len(started(log)) == 2, 30)
    os.kill(child, signal.SIGINT)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130
    assert "interrupted: 1 of 3 runs are done; the same command continues with the missing runs" in said.read_text()
    until_all_have_ended(log)
    assert sizes(out) == [1] and sorted(path.name for path in out.iterdir())[-1] == "sweep.json"


def test_runs_have_separate_gpus(tmp_path, monkeypatch):
    class Recorded:
        def __init__(self, job, folder):
            self.gpus, self.ended = job["environment"].get("CUDA_VISIBLE_DEVICES"), False

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,3,5")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(executors, "RunProcess", Recorded)
    executor = executors.LocalExecutor(2, 2)
    first, second = (executor.start({"environment": {}}, tmp_path) for _ in range(2))
    assert {first.gpus, second.gpus} == {"0,2", "3,5"}
    second.ended = True
    assert executor.start({"environment": {}}, tmp_path).gpus == second.gpus
    assert executors.LocalExecutor(2).start({"environment": {}}, tmp_path).gpus is None
    with pytest.raises(ValueError, match=r"2 runs at a time with 3 GPU\(s\) each need 6, and there are 4 here"):
        executors.LocalExecutor(2, 3)


def test_records_of_a_sweep_are_one_table_with_its_parameters(notebook, tmp_path):
    out = tmp_path / "out"
    swept(notebook, out, "size=1,2", "length=auto")
    swept(notebook, out, "size=3", "length=4")  # the folder grows
    table = lab.load_records(out)
    assert list(table["size"]) == [1, 2, 3] and list(table.length) == ["auto", "auto", 4]
    assert set(table.factors) == {"[1, 2]"} and (table.found == 2).all() and table.run.is_unique
    (file, *_) = out.glob("*/records.jsonl")
    assert list(lab.load_records(file).columns) == ["size", "found", "source"]
    assert len(lab.load_records(tmp_path)) == 3  # a folder with a sweep inside
    file.write_text(file.read_text().replace("2", "3"))
    with pytest.raises(ValueError, match="is not what the run wrote: it was changed or lost afterwards"):
        lab.load_records(out)


def records_something(path):
    return planning.OUTPUT in parameters.of_notebook(nbformat.read(path, as_version=4), path.name)


RECORDING = filter(records_something, sorted(lesson_runs.NOTEBOOKS.glob("*.ipynb")))


@pytest.mark.slow
@pytest.mark.parametrize("path", [*RECORDING], ids=lambda path: path.stem)
def test_records_of_a_lesson_are_one_table_and_a_report(path, tmp_path):
    out = tmp_path / "out"
    values = [f"{name}={json.dumps(value)}" for name, value in lesson_runs.QUICKER[path.stem].items()]
    table = planning.run(planning.plan(path, [*values, "draft_length=auto,2"]), out, executors.LocalExecutor())
    assert list(table.status) == ["done", "done"], table.error.tolist()
    found = lab.load_records(out)
    assert set(found.run) == set(table.run) and set(found.draft_length) == {"auto", 2}
    for file in out.rglob("*.jsonl"):
        assert all(record_lines.kind_of(json.loads(text)) for text in file.read_text().splitlines())
    report = lesson_runs.execute("12_sweep_report", tmp_path, folder=str(out))
    assert f"{len(found)} records of 2 runs" in "".join(map(str, (cell.get("outputs") for cell in report.cells)))


def test_runs_of_newer_code_or_notebooks_replace_older_ones(notebook, tmp_path, monkeypatch):
    out, later = tmp_path / "out", tmp_path / "later"
    swept(notebook, out, "size=1,2")
    swept(notebook, later, "size=1,2")
    cells = nbformat.read(notebook, as_version=4)
    cells.cells[0].source += "later: float = 0.5\n"
    with monkeypatch.context() as changed:
        changed.setattr(run_process, "code_version", lambda: "newer")
        swept(notebook, out, "size=1")
    nbformat.write(cells, notebook)
    swept(notebook, later, "size=1")
    for folder in (out, later):
        with pytest.warns(UserWarning, match="runs of 2 versions of the notebook and the code; the column `code`"):
            assert sorted(lab.load_records(folder)["size"]) == [1, 2]  # without duplicates
    assert sorted(result.mark["code"] == "newer" for result in store.finished_runs(out)) == [False, True]


@pytest.mark.parametrize(
    ("text", "error"),
    [("", "holds no record"), ("{half\n", "records.jsonl, line 1 is not JSON"), ('{"t": "a\u2028b\x85c"}\n', "")],
)
def test_records_of_a_run_must_be_lines_of_json(notebook, tmp_path, text, error):
    table = swept(notebook, tmp_path / "out", executor=sweeps.Instant(records=text))
    if error:
        assert list(table.status) == ["failed"] and error in table.error[0]
    else:
        assert list(table.status) == ["done"] and lab.load_records(tmp_path / "out").t.tolist() == ["a\u2028b\x85c"]


@pytest.mark.ci
def test_notebooks_and_pages_are_small_and_share_one_script(tmp_path):
    drawing = "import plotly.graph_objects as go\ngo.Figure(go.Scatter(y=[1, 3, 2]))"
    stub, out = sweeps.stub(tmp_path, drawing), tmp_path / "out"
    done = invoke("sweep", stub, "-p", "size=1", "--html", "--output", out)
    assert done.exit_code == 0, done.output
    (executed,), (page,) = out.glob("*/notebook.ipynb"), out.glob("*/notebook.html")
    assert executed.stat().st_size < 50_000 and "widgets" not in json.loads(executed.read_text())["metadata"]
    assert page.stat().st_size < 500_000 and f'src="../{pages.SCRIPT}"' in page.read_text()
    assert '<script src="https:' not in page.read_text()
    assert (out / pages.SCRIPT).stat().st_size > 1_000_000
    assert "Plotly.newPlot" in page.read_text()
