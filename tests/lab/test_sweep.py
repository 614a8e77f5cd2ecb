"""Sweeps: what they refuse, what they are keyed by, that a run is done once, and that nothing survives its maker."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import lesson_runs
import nbformat
import pytest
import record_lines
import sweeps
from typer.testing import CliRunner

import bass_lab as lab
from bass_core.policies.costs import cache_folder
from bass_lab.cli.main import app
from bass_lab.measure import records
from bass_lab.show import pages
from bass_lab.sweep import executors, parameters, planning, run_process, store

LESSONS = sorted(lesson_runs.NOTEBOOKS.glob("*.ipynb"))
LATENCY = lesson_runs.NOTEBOOKS / "08_latency_and_utilization.ipynb"


@pytest.fixture
def notebook(tmp_path):
    return sweeps.stub(tmp_path)


def command(*arguments):
    return CliRunner().invoke(app, ["sweep", *map(str, arguments)])


def started(path):
    """What the runs said when they started: size, process of the kernel, process of the run."""
    return [tuple(map(int, line.split())) for line in path.read_text().splitlines()] if path.exists() else []


def until_all_have_ended(log):
    until(lambda: not any(sweeps.alive(process) for _, *processes in started(log) for process in processes), 2)


def swept(notebook, out, *values, executor=None, **options):
    """What became of the runs of these values, done at once where no executor is named."""
    return planning.run(planning.plan(notebook, values), out, executor or sweeps.Instant(), **options)


def sizes(folder):
    return [result.parameters["size"] for result in store.finished_runs(folder)]


def until(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.01)


# --- names and values ---


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-p", "sizes=1"], "stub.ipynb has no parameter 'sizes'. Did you mean size? It has\n  size "),
        (["-p", "size=1,two"], "size must be an integer; got 'two'"),
        (["-p", "size=1.5"], "size must be an integer; got '1.5'"),
        (["-p", "size=auto"], "size must be an integer; got 'auto'"),
        (["-p", "length=x"], "length must be an integer or auto; got 'x'"),
        (["-p", "share=nan"], "share must be a number; got nan"),
        (["-p", "factors=[1"], "factors must be a list, as JSON; got '[1'"),
        (["-p", "fails=1"], "fails must be true or false; got '1'"),
        (["-p", "size"], "-p takes NAME=VALUE,VALUE,…; got 'size'"),
        (["-p", "size=1", "-p", "size=2"], "-p size=… was given twice"),
        (["-p", "output=x"], "output is set by the sweep"),
        (["--ray-address", "127.0.0.1:1"], "--ray-address 127.0.0.1:1 needs --executor ray"),
    ],
)
def test_what_is_wrong_stops_before_the_first_run_and_says_what_is_valid(notebook, tmp_path, arguments, said):
    done = command(notebook, *arguments, "--out", tmp_path / "out")
    assert done.exit_code == 2 and said in done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("batchsize=1", r"no parameter 'batchsize'. Did you mean batch_size\? It has(?s:.*)max_new_tokens .* >= 2"),
        ("prompt_set=mini,small", r"prompt_set must be one of mini, library, \*.jsonl, \*.jsonl.gz; got 'small'"),
        ("prompt_set=nowhere.jsonl", "the prompt set 'nowhere.jsonl' is no file beside the notebook: No such file"),
        ("draft_length=0", "draft_length must be an integer >= 1 or auto; got 0"),
        ("batch_size=[1,0]", r"batch_size must be an integer or a list >= 1; got \[1, 0\]"),
        ("temperature=-1", r"temperature must be a number >= 0; got -1\.0"),
        ("target=no/such-model-of-nobody", "the model 'no/such-model-of-nobody' is no folder beside the notebook"),
    ],
)
def test_a_lesson_says_what_it_takes(values, said):
    with pytest.raises(ValueError, match=said):
        planning.plan(LATENCY, [values])


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_every_lesson_can_be_planned_as_it_is(path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (run,) = planning.plan(path).runs.values()
    if run.get("target") == "":
        names = ["ngram", "suffix", "layers:2", "target:int4", "deep_draft"]
        assert len(planning.plan(path, [f"draft={','.join(names)}"]).runs) == len(names)


@pytest.mark.parametrize(
    ("lesson", "value", "said"),
    [
        ("08*", "batch_size=[2.5]", r"each of batch_size must be an integer; got 2\.5"),
        ("04_*", "batch_sizes=[true]", "each of batch_sizes must be an integer; got True"),
        ("05*", "drafts=[1,2]", "each of drafts must be a text; got 1"),
        ("09*", "problems=nosuch.jsonl", "the problems 'nosuch.jsonl' is no file beside the notebook"),
    ],
)
def test_elements_of_lists_and_files_of_any_parameter_are_looked_at(lesson, value, said):
    (path,) = (each for each in LESSONS if each.match(lesson))
    with pytest.raises(ValueError, match=said):
        planning.plan(path, [value])


def test_the_readmes_command_is_a_plan_of_twelve_runs():
    plan = planning.plan(LATENCY, ["batch_size=1,2,4,8", "draft_length=auto,4,7"])
    assert len(plan.runs) == 12 and plan.varied == ["batch_size", "draft_length"]
    assert {run["draft_length"] for run in plan.runs.values()} == {None, 4, 7}


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_every_lesson_checks_its_parameters_as_soon_as_it_can(path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    known = parameters.of_notebook(notebook, path.name)
    assert all(parameter.check(parameter.default) == parameter.default for parameter in known.values())
    place = next(i for i, cell in enumerate(code) if "parameters" in cell.metadata.get("tags", []))
    first = next(cell for cell in code[place + 1 :] if re.search(r"^(import|from) bass_lab", cell.source, re.MULTILINE))
    assert re.search(r"^(lab\.)?check_parameters\(", first.source, re.MULTILINE)


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_the_same_name_means_the_same_in_every_lesson(path):
    known = parameters.of_notebook(nbformat.read(path, as_version=4), path.name)
    if "target" in known:
        assert {"draft", "dtype", "device"} <= set(known)
    for name in {"dtype", "device"} & set(known):
        assert known[name].parse("auto") is None and known[name].default is None, name
    if "draft_length" in known and type(None) in known["draft_length"].kinds:
        assert known["draft_length"].parse("auto") is None


def run_cells(*cells, **values):
    """What `check_parameters` makes of a kernel that has run these cells: its names."""
    names = {"In": ["", *cells], "check": lab.check_parameters}
    for cell in cells:
        exec(cell, names)
    names["rules"] = values
    exec("check(**rules)", names)
    return names


OWN = "size: int = 3\nname: str = 'a'\nmode: str | None = 'x'\n"


def test_a_notebook_refuses_names_and_values_that_it_does_not_know():
    run_cells(OWN)
    assert run_cells(OWN, "# Parameters\nmode = 'auto'\n")["mode"] is None  # as papermill's -p mode auto sets it
    run_cells(OWN, "# Parameters\nsize = 4\nmode = None\n", size=">= 4", mode=["x", "y"])
    run_cells(OWN, "# Parameters\nsize = 4\n", size=range(1, 5))
    with pytest.raises(
        ValueError, match=r"this notebook has no parameter 'sise'. Did you mean size\? It has\n  size  an"
    ):
        run_cells(OWN, "# Parameters\nsise = 4\n")
    with pytest.raises(ValueError, match="size must be an integer; got '4'"):
        run_cells(OWN, "# Parameters\nsize = '4'\n")
    with pytest.raises(ValueError, match="size must be an integer; got True"):
        run_cells(OWN, "size = True")
    with pytest.raises(ValueError, match="size must be an integer from 1 to 2; got 3"):
        run_cells(OWN, size=range(1, 3))
    with pytest.raises(ValueError, match="mode must be one of y, z or auto; got 'x'"):
        run_cells(OWN, mode=["y", "z"])
    with pytest.raises(ValueError, match="check_parameters names seize; the parameters are size, name, mode"):
        run_cells(OWN, seize=[1])
    with pytest.raises(ValueError, match="found no cell of annotated literals"):
        run_cells("size = 3")


@pytest.mark.slow
def test_papermill_alone_cannot_set_a_name_that_is_not_there(tmp_path):
    import papermill

    stub = sweeps.stub(tmp_path, "import bass_lab as lab\nlab.check_parameters()")
    with pytest.raises(papermill.PapermillExecutionError, match=r"has no parameter 'sise'\. Did you mean size"):
        papermill.execute_notebook(stub, tmp_path / "out.ipynb", {"sise": 2}, progress_bar=False)


def test_rows_of_a_file_are_runs(notebook, tmp_path):
    (tmp_path / "rows.csv").write_text('size,length,factors\n1,auto,[1]\n2,4,"[1, 2]"\n')
    (tmp_path / "rows.yaml").write_text("- {size: 1, length: null, factors: [1]}\n- {size: 2, length: 4}\n")
    for name in ("rows.csv", "rows.yaml"):
        plan = planning.plan(notebook, ["word=a,b"], tmp_path / name)
        found = [(run["size"], run["length"], run["word"], run["factors"]) for run in plan.runs.values()]
        assert found == [(1, None, "a", [1]), (1, None, "b", [1]), (2, 4, "a", [1, 2]), (2, 4, "b", [1, 2])]
    (tmp_path / "wrong.yaml").write_text("- {size: 1}\n- {size: 1.5}\n")
    with pytest.raises(ValueError, match=r"wrong.yaml, row 2: size must be an integer; got 1.5"):
        planning.plan(notebook, rows=tmp_path / "wrong.yaml")
    (tmp_path / "wrong.csv").write_text("size,length\n1\n")
    with pytest.raises(ValueError, match=r"wrong.csv, row 1: it has not as many fields as the first line"):
        planning.plan(notebook, rows=tmp_path / "wrong.csv")
    with pytest.raises(ValueError, match=r"size stands both in .* and after -p"):
        planning.plan(notebook, ["size=3"], tmp_path / "rows.csv")


def test_commas_within_brackets_and_quotes_divide_nothing():
    assert parameters.split('1,[2,3],"a,b",{"c":[4,5]}') == ["1", "[2,3]", '"a,b"', '{"c":[4,5]}']
    assert parameters.split("it's a,don't b,'c,d'") == ["it's a", "don't b", "'c,d'"]


# --- keys ---


def test_a_run_is_known_by_all_that_its_result_depends_on(notebook, tmp_path, monkeypatch):
    def keys(*values, path=notebook):
        return list(planning.plan(path, values).runs)

    (own,) = keys("size=2")
    assert keys("size=2", "length=5") == [own] and keys("size=2,2") == [own]  # a default that is written out
    assert own not in keys("size=3") and own not in keys("length=auto", "size=2")
    assert own not in keys("size=2", path=sweeps.stub(tmp_path, "changed = 1", name="other"))
    monkeypatch.setattr(run_process, "code_version", lambda: "other code")
    assert own not in keys("size=2")


def test_models_are_known_by_their_files(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    stub = sweeps.stub(tmp_path)
    cells = nbformat.read(stub, as_version=4)
    cells.cells[0].source += 'target: str = ""\ndraft: str = ""\n'
    nbformat.write(cells, stub)
    found = set()
    for content in (b"a", b"b", b"b" * 3_000_000, b"b" * 2_999_999 + b"c"):
        (model / "weights").write_bytes(content)
        found |= set(planning.plan(stub, ["target=model"]).runs)
    assert len(found) == 4
    assert len(planning.plan(stub, ["target=,model"]).runs) == 2
    weights = bytearray(2**24)
    for content in (weights, weights[: 2**23] + b"c" * 100_000 + weights[2**23 + 100_000 :]):  # a hundredth, inside
        (model / "weights").write_bytes(content)
        for values in (["target=model"], ["draft=model"], ["target=model", "draft=layers:2"]):
            found |= set(planning.plan(stub, values).runs)
    assert len(found) == 10


def test_files_and_measured_costs_make_runs_others(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    stub = sweeps.stub(tmp_path)
    cells = nbformat.read(stub, as_version=4)
    cells.cells[0].source += 'problems: str = ""\n'
    nbformat.write(cells, stub)
    found = set()
    for content in ("{}", "[]"):
        (tmp_path / "probs.jsonl").write_text(content)
        found |= set(planning.plan(stub, ["problems=probs.jsonl"]).runs)
    cache_folder().mkdir(parents=True)
    (cache_folder() / "here.json").write_text("{}")
    found |= set(planning.plan(stub, ["problems=probs.jsonl"]).runs)
    assert len(found) == 3


# --- done once, whatever happens ---


@pytest.mark.slow
def test_a_kill_at_any_step_of_writing_leaves_whole_results_and_the_rest_to_do(notebook, tmp_path):
    """Killed before its first operation on the folder, then before its second, until a sweep gets through."""
    plan, step, done_before = planning.plan(notebook, ["size=1,2,3"]), 0, set()

    def killed_at(step, folder):
        left = step

        def count(event, arguments):
            nonlocal left
            if event.split(".")[0] in ("open", "os", "shutil") and str(folder) in str(arguments):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        planning.run(plan, folder, sweeps.Instant())

    while True:
        folder = tmp_path / f"killed-{step}"
        _, status = os.waitpid(sweeps.forked(lambda folder=folder, step=step: killed_at(step, folder)), 0)
        survivors = set(sizes(folder)) if (folder / store.SWEEP).exists() else set()
        done_before.add(len(survivors))
        executor = sweeps.Instant()
        table = planning.run(plan, folder, executor)
        assert executor.started == 3 - len(survivors)  # what was done stays done
        assert list(table.status).count("was done") == len(survivors)
        assert sorted(lab.load_records(folder)["size"]) == [1, 2, 3]  # hashes are checked here
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        step += 1
    assert step > 50 and done_before == {0, 1, 2, 3}


@pytest.mark.slow
def test_twenty_kills_at_random_moments_of_real_runs(notebook, tmp_path):
    draw, kills, round_number = random.Random(0), 0, 0
    while kills < 20:
        round_number += 1
        out, log = tmp_path / f"out{round_number}", tmp_path / f"started{round_number}"
        plan = planning.plan(notebook, ["size=1,2,3,4", f"started={log}"])
        while True:
            before, already = set(sizes(out)) if out.exists() and any(out.glob("sweep.json")) else set(), started(log)
            child = sweeps.forked(lambda plan=plan, out=out: planning.run(plan, out, executors.LocalExecutor(2)))
            if kills < 20:
                time.sleep(draw.uniform(0, 1.8))
            else:
                os.waitpid(child, 0)
                break
            ended, _ = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            kills += 1
            again = {size for size, _, _ in started(log)[len(already) :]}
            assert not again & before  # only unfinished runs are run again
        assert sorted(sizes(out)) == [1, 2, 3, 4]
        table = lab.load_records(out)
        assert sorted(table["product"]) == sorted(size * factor for size in range(1, 5) for factor in (1, 2))
        until(lambda log=log: not any(sweeps.alive(kernel) for _, kernel, _ in started(log)), 2)
        assert not [path for path in out.iterdir() if path.name.startswith(".scratch")]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 kB."""
    place = tmp_path / "small"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def test_a_full_disk_ends_the_sweep_and_spoils_nothing(notebook, small_disk):
    out, filler = small_disk / "out", small_disk / "filler"
    plan, done_before = planning.plan(notebook, ["size=1,2,3,4"]), set()
    for free in range(0, 160_000, 4096):  # from no page that is free to enough
        filler.write_bytes(bytes(small_disk_free(small_disk) - free))
        executor = sweeps.Instant()
        try:
            planning.run(plan, out, executor)
        except planning.SweepStopped as stop:
            assert "disk full: " in str(stop) and "free some space, and the same command goes on" in str(stop)
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


def small_disk_free(place):
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


@pytest.mark.slow
def test_a_full_disk_met_by_a_run_is_told_from_a_failing_cell(notebook, small_disk):
    out = small_disk / "out"
    (small_disk / "filler").write_bytes(bytes(small_disk_free(small_disk) - 10 * 4096))
    done = command(notebook, "-p", "size=1,2,3", "--out", out)
    assert done.exit_code == 1 and "stopped: disk full: " in done.output and "free some space" in done.output
    survivors = sizes(out)
    (small_disk / "filler").unlink()
    done = command(notebook, "-p", "size=1,2,3", "--out", out)
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


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_result_is_run_again(notebook, tmp_path, damage):
    out = tmp_path / "out"
    swept(notebook, out, "size=1,2")
    DAMAGES[damage](out / next(iter(planning.plan(notebook, ["size=2"]).runs)))
    if "notebook" not in damage:
        with pytest.raises(ValueError, match=r"it was changed or lost afterwards; the sweep's own command runs it"):
            lab.load_records(out)
    assert list(planning.plan(notebook, ["size=1,2"]).table(out).status) == ["done", "to run"]
    assert list(swept(notebook, out, "size=1,2").status) == ["was done", "done"]
    assert sorted(lab.load_records(out)["size"]) == [1, 2]
    assert list(swept(notebook, out, "size=1,2").status) == ["was done", "was done"]


@pytest.mark.slow
def test_two_sweeps_of_one_folder_at_once_each_killed_at_random_lose_and_double_nothing(notebook, tmp_path):
    out, draw, refused = tmp_path / "out", random.Random(1), []
    plan = planning.plan(notebook, ["size=1,2,3,4,5,6,7,8"])

    def sweep_slowly():
        try:
            planning.run(plan, out, sweeps.Instant(pause=0.02))
        except ValueError as error:
            os._exit(7 if "another sweep is writing" in str(error) else 99)

    before = set()
    for _ in range(12):
        children = [sweeps.forked(sweep_slowly) for _ in range(2)]
        time.sleep(draw.uniform(0.02, 0.15))
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            refused.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        found = set(sizes(out)) if (out / store.SWEEP).exists() else set()
        assert found >= before  # nothing that was done is lost
        before = found
    planning.run(plan, out, sweeps.Instant())
    assert sorted(lab.load_records(out)["size"]) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert 7 in refused and -signal.SIGKILL in refused and 99 not in refused


def test_a_folder_that_cannot_be_written_keeps_its_results(notebook):
    def refused(out):
        if os.geteuid() == 0:  # who writes everywhere
            os.setgroups([])
            os.setresuid(65534, 65534, 65534)
        with pytest.raises(PermissionError):
            planning.run(plan, out, sweeps.Instant())

    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "out"
        swept(notebook, out, "size=1")
        plan = planning.plan(notebook, ["size=1,2"])
        for folder in (out, out.parent):
            folder.chmod(0o555)
        assert os.waitpid(sweeps.forked(lambda: refused(out)), 0)[1] == 0
        for folder in (out, out.parent):
            folder.chmod(0o755)
        assert sizes(out) == [1] and list(lab.load_records(out)["size"]) == [1]


# --- runs that end badly ---


@pytest.mark.parametrize("leave", ["raise SystemExit(0)", "raise SystemExit", "import os; os._exit(0)"])
def test_a_cell_that_leaves_the_notebook_is_a_failure(tmp_path, leave):
    stub = sweeps.stub(tmp_path, leave)
    table = swept(stub, tmp_path / "out", executor=executors.LocalExecutor(), retries=0)
    assert list(table.status) != ["done"] and sizes(tmp_path / "out") == []


def test_braces_in_a_path_are_nothing_special(tmp_path):
    folder = tmp_path / "{odd} {}"
    folder.mkdir()
    table = swept(sweeps.stub(folder), folder / "{out}", "size=2", executor=executors.LocalExecutor())
    assert list(table.status) == ["done"] and set(lab.load_records(folder / "{out}")["size"]) == {2}


def test_a_failing_cell_is_shown_and_the_other_runs_are_done(notebook, tmp_path):
    out = tmp_path / "out"
    done = command(notebook, "-p", "size=1,2", "-p", "fails=true,false", "--jobs", 2, "--out", out)
    assert done.exit_code == 1
    assert "failed: AssertionError: asked to fail" in done.output and "----> " in done.output
    assert "4 runs: 2 failed, 2 done" in done.output or "4 runs: 2 done, 2 failed" in done.output
    assert sizes(out) == [1, 2]
    (report, _) = (out / "failed").glob("*/error.txt")
    assert "assert not fails" in report.read_text() and (report.parent / "notebook.ipynb").exists()
    again = command(notebook, "-p", "size=1,2", "-p", "fails=true,false", "--dry-run", "--out", out)
    assert again.exit_code == 0 and "2 to run" in again.output and "nothing was run" in again.output


def test_a_run_that_takes_too_long_is_killed_with_its_kernel(notebook, tmp_path):
    log = tmp_path / "started"
    local = executors.LocalExecutor()
    table = swept(notebook, tmp_path / "out", "pause=60", f"started={log}", executor=local, timeout=4)
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
    """A notebook that leaves processes behind, the temporary folder that its runs use, and how to wait for its end."""
    place, log = Path(tempfile.mkdtemp(prefix="t", dir="/tmp")), tmp_path / "started"
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    told = Path(f"{log}.children")

    def all_gone(seconds=2.0):
        found = [int(process) for process in told.read_text().split()]
        until(lambda: not any(map(sweeps.alive, found)) and not list(place.iterdir()), seconds)
        return len(found) == 2

    yield sweeps.stub(tmp_path, LEAVES_CHILDREN), log, told, all_gone
    place.rmdir()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["done", "timeout", "failed"])
def test_processes_that_a_notebook_leaves_end_with_its_run(children, tmp_path, end):
    notebook, log, told, all_gone = children
    values = {"done": "pause=0.0", "timeout": "pause=60", "failed": "fails=true"}[end]

    def gone_before_the_next_run(key, line):
        until(lambda: not any(sweeps.alive(int(process)) for process in told.read_text().split()), 1)

    options = {"timeout": 20 if end == "timeout" else None, "progress": gone_before_the_next_run}
    table = swept(notebook, tmp_path / "out", values, f"started={log}", executor=executors.LocalExecutor(), **options)
    assert list(table.status) == [end] and all_gone()


@pytest.mark.slow
def test_a_killed_sweep_leaves_no_process_and_no_folder(children, tmp_path):
    notebook, log, told, all_gone = children
    values = ("pause=60", f"started={log}")
    child = sweeps.forked(lambda: swept(notebook, tmp_path / "out", *values, executor=executors.LocalExecutor()))
    until(lambda: started(log) and told.exists())
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert all_gone()
    until_all_have_ended(log)


def test_folders_have_short_names_where_the_temporary_folder_has_a_long_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    short = Path(run_process.short_folder(None))
    assert len(str(short)) < 40
    short.rmdir()


@pytest.mark.slow
def test_a_run_whose_process_was_killed_is_started_again(notebook, tmp_path):
    log, out = tmp_path / "started", tmp_path / "out"
    values, local = ("size=1,2", "pause=1.0", f"started={log}"), executors.LocalExecutor()
    child = sweeps.forked(lambda: swept(notebook, out, *values, executor=local))
    until(lambda: started(log))
    ((_, kernel, run),) = started(log)
    os.kill(run, signal.SIGKILL)
    until(lambda: not sweeps.alive(kernel), 1)  # it dies with the process that started it
    assert os.waitpid(child, 0)[1] == 0
    assert [size for size, _, _ in started(log)] == [1, 1, 2] and sizes(out) == [1, 2]
    assert [result.mark["attempts"] for result in store.finished_runs(out)] == [2, 1]


def test_a_run_that_cannot_start_is_tried_again_and_then_given_up(notebook, tmp_path):
    executor = sweeps.Instant("died", "died", "done", "died", "died", "died")
    table = swept(notebook, tmp_path / "out", "size=1,2", executor=executor, retries=2)
    assert list(table.status) == ["done", "died"] and list(table.attempts) == [3, 3]
    taken = OSError(98, "Address already in use")
    assert run_process._obstacle(taken, tmp_path)["status"] == run_process.DIED


def test_code_that_changes_while_a_sweep_runs_ends_it(notebook, tmp_path, monkeypatch):
    monkeypatch.setattr(run_process, "code_version", lambda: "as it was")
    with pytest.raises(planning.SweepStopped, match=r"code changed: .* do not change the code while a sweep runs"):
        swept(notebook, tmp_path / "out", "size=1,2", executor=executors.LocalExecutor())


def test_ctrl_c_ends_all_and_says_how_to_go_on(notebook, tmp_path):
    log, out, said = tmp_path / "started", tmp_path / "out", tmp_path / "said"

    def interrupted():
        sys.stderr = said.open("w", buffering=1)
        app(["sweep", str(notebook), "-p", "size=1,2,3", "-p", "pause=0.5", "-p", f"started={log}", "--out", str(out)])

    child = sweeps.forked(interrupted)
    until(lambda: len(started(log)) == 2)
    os.kill(child, signal.SIGINT)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130
    assert "interrupted: 1 of 3 runs are done; the same command goes on with what is missing" in said.read_text()
    until_all_have_ended(log)
    assert sizes(out) == [1] and sorted(path.name for path in out.iterdir())[-1] == "sweep.json"


def test_two_sweeps_do_not_share_a_folder(notebook, tmp_path):
    out = tmp_path / "out"
    with store.Store(out, notebook.name, {"key": {}}) as held:
        scratch = held.scratch("key", 1)
        with pytest.raises(ValueError, match="another sweep is writing"):
            swept(notebook, out, "size=1")
        assert scratch.exists()  # what the other one is writing
    swept(notebook, out, "size=1")
    with pytest.raises(ValueError, match=r"is a sweep of stub.ipynb, not of other.ipynb; give another folder"):
        swept(sweeps.stub(tmp_path, name="other"), out, "size=1")
    with pytest.raises(ValueError, match="holds other files and no sweep"):
        swept(notebook, tmp_path, "size=1")


def test_gpus_that_are_not_there_are_an_error(notebook, tmp_path, monkeypatch):
    monkeypatch.setattr(executors, "_visible_gpus", lambda: ["0", "1"])
    assert executors.LocalExecutor(2, 1).jobs == 2
    with pytest.raises(ValueError, match=r"2 runs at a time with 2 GPU\(s\) each need 4, and there are 2 here"):
        executors.LocalExecutor(2, 2)


def test_runs_at_a_time_have_gpus_of_their_own(tmp_path, monkeypatch):
    class Recorded:
        def __init__(self, job, folder):
            self.gpus, self.ended = job["environment"].get("CUDA_VISIBLE_DEVICES"), False

    monkeypatch.setattr(executors, "_visible_gpus", lambda: ["0", "2", "3", "5"])
    monkeypatch.setattr(executors, "RunProcess", Recorded)
    executor = executors.LocalExecutor(2, 2)
    first, second = (executor.start({"environment": {}}, tmp_path) for _ in range(2))
    assert {first.gpus, second.gpus} == {"0,2", "3,5"}
    second.ended = True
    assert executor.start({"environment": {}}, tmp_path).gpus == second.gpus
    assert executors.LocalExecutor(2).start({"environment": {}}, tmp_path).gpus is None


# --- what is kept ---


def test_records_of_a_sweep_are_one_table_with_its_parameters(notebook, tmp_path):
    out = tmp_path / "out"
    swept(notebook, out, "size=1,2", "length=auto")
    swept(notebook, out, "size=3", "length=4")  # the folder grows
    table = lab.load_records(out)
    assert list(table["size"]) == [1, 2, 3] and list(table.length) == ["auto", "auto", 4]
    assert set(table.factors) == {"[1, 2]"} and (table.found == 2).all() and table.run.is_unique
    (file, *_) = out.glob("*/records.jsonl")
    assert list(lab.load_records(file).columns) == ["size", "found", "source"]
    assert len(lab.load_records(tmp_path)) == 3  # a folder with a sweep in it
    file.write_text(file.read_text().replace("2", "3"))
    with pytest.raises(ValueError, match="is not what the run wrote: it was changed or lost afterwards"):
        lab.load_records(out)


def records_something(path):
    return planning.OUTPUT in parameters.of_notebook(nbformat.read(path, as_version=4), path.name)


@pytest.mark.slow
@pytest.mark.parametrize("path", [*filter(records_something, LESSONS)], ids=lambda path: path.stem)
def test_what_a_lesson_records_is_one_table_and_a_report(path, tmp_path):
    """As `bass sweep` runs it, read back by `load_records` and drawn by lesson 12."""
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


def test_a_new_version_of_the_code_replaces_the_runs_of_the_old_one(notebook, tmp_path, monkeypatch):
    out = tmp_path / "out"
    swept(notebook, out, "size=1,2")
    monkeypatch.setattr(run_process, "code_version", lambda: "newer")
    swept(notebook, out, "size=1")
    with pytest.warns(UserWarning, match="runs of 2 versions of the notebook and the code; the column `code`"):
        found = lab.load_records(out)
    assert sorted(found["size"]) == [1, 2]  # none twice
    assert found.code.nunique() == 2
    assert sorted(result.mark["code"] == "newer" for result in store.finished_runs(out)) == [False, True]


def test_a_parameter_that_came_later_leaves_no_run_twice(tmp_path):
    out, older = tmp_path / "out", sweeps.stub(tmp_path)
    swept(older, out, "size=1,2")
    cells = nbformat.read(older, as_version=4)
    cells.cells[0].source += "later: float = 0.5\n"
    nbformat.write(cells, older)
    swept(older, out, "size=1")
    with pytest.warns(UserWarning, match="runs of 2 versions"):
        assert sorted(lab.load_records(out)["size"]) == [1, 2]


def test_a_record_of_nothing_is_a_failure_and_any_character_is_none(tmp_path):
    def writing(text):
        stub = sweeps.stub(tmp_path)
        notebook = nbformat.read(stub, as_version=4)
        notebook.cells[-1].source = f'open(output, "w", encoding="utf-8").write({text!r})'
        nbformat.write(notebook, stub)
        return swept(stub, tmp_path / f"out{len(text)}", executor=executors.LocalExecutor())

    table = writing("")
    assert list(table.status) == ["failed"] and "holds no record" in table.error[0]
    line = '{"t": "a\u2028b\x85c"}\n'
    assert list(writing(line).status) == ["done"]
    assert lab.load_records(tmp_path / f"out{len(line)}").t.tolist() == ["a\u2028b\x85c"]


def test_all_records_that_ship_are_one_table():
    table = lab.load_records()
    assert {"embedded_cpu.jsonl", "quality_embedded_cpu/single.jsonl"} <= set(table.source)
    speeds = table[table.source == "embedded_cpu.jsonl"]
    assert len(speeds) == len((records.SHIPPED / "embedded_cpu.jsonl").read_text().splitlines())
    assert (speeds.identical == speeds.rows).all() and speeds.over_regular.notna().all()
    with pytest.raises(FileNotFoundError):
        lab.load_records("nowhere")


def test_records_that_are_no_json_make_a_run_fail(tmp_path):
    stub = sweeps.stub(tmp_path, 'if output:\n    open(output, "w").write("{half\\n")')
    table = swept(stub, tmp_path / "out", executor=executors.LocalExecutor())
    assert list(table.status) == ["failed"] and table.error[0].startswith("records.jsonl, line 1 is not JSON")


def test_notebooks_and_pages_are_small_and_share_one_script(tmp_path):
    drawing = "import plotly.graph_objects as go\ngo.Figure(go.Scatter(y=[1, 3, 2]))"
    stub, out = sweeps.stub(tmp_path, drawing), tmp_path / "out"
    done = command(stub, "-p", "size=1", "--html", "--out", out)
    assert done.exit_code == 0, done.output
    (executed,), (page,) = out.glob("*/notebook.ipynb"), out.glob("*/notebook.html")
    assert executed.stat().st_size < 50_000 and "widgets" not in json.loads(executed.read_text())["metadata"]
    assert page.stat().st_size < 500_000 and f'src="../{pages.SCRIPT}"' in page.read_text()
    assert '<script src="https:' not in page.read_text()
    assert (out / pages.SCRIPT).stat().st_size > 1_000_000
    assert "Plotly.newPlot" in page.read_text()
