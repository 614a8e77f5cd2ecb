import json
import re

import lesson_runs
import nbformat
import papermill
import pytest
import sweeps
from commands import invoke

import bass_lab as lab
from bass_core.loading.measured_costs import cache_folder
from bass_lab.sweep import parameters, planning, run_process

LESSONS = sorted(lesson_runs.NOTEBOOKS.glob("*.ipynb"))
LATENCY = lesson_runs.NOTEBOOKS / "08_latency_and_utilization.ipynb"


@pytest.fixture(autouse=True)
def same_code(monkeypatch):
    monkeypatch.setattr(run_process, "code_version", lambda: "same code")


def with_parameters(folder, more):
    stub = sweeps.stub(folder)
    cells = nbformat.read(stub, as_version=4)
    cells.cells[0].source += more
    nbformat.write(cells, stub)
    return stub


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-p", "sizes=1"], "stub.ipynb has no parameter 'sizes'. Did you mean size? It has\n  size "),
        (["-p", "size=1,two"], "size must be an integer; got 'two'"),
        (["-p", "size=1.5"], "size must be an integer; got '1.5'"),
        (["-p", "size=auto"], "size must be an integer; got 'auto'"),
        (["-p", "length=x"], "length must be an integer or auto; got 'x'"),
        (["-p", "share=nan"], "share must be a number; got nan"),
        (["-p", "factors=[1"], "factors must be an integer or a list, as JSON; got '[1'"),
        (["-p", "fails=1"], "fails must be true or false; got '1'"),
        (["-p", "size"], "-p takes NAME=VALUE,VALUE,…; got 'size'"),
        (["-p", "size=1", "-p", "size=2"], "-p size=… was given twice"),
        (["-p", "output=x"], "output is set by the sweep"),
        (["--ray-address", "127.0.0.1:1"], "--ray-address 127.0.0.1:1 needs --executor ray"),
    ],
)
def test_wrong_command_stops_before_the_first_run(notebook, tmp_path, arguments, said):
    done = invoke("sweep", notebook, *arguments, "--output", tmp_path / "out")
    assert done.exit_code == 2 and said in done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("lesson", "values", "said"),
    [
        (
            "08",
            "batchsize=1",
            r"no parameter 'batchsize'. Did you mean batch_size\? It has(?s:.*)max_new_tokens .* >= 2",
        ),
        (
            "08",
            "prompt_set=small",
            r"prompt_set must be one of mini, library, edits, questions, \*.jsonl, \*.jsonl.gz; got 'small'",
        ),
        ("08", "prompt_set=nowhere.jsonl", "the prompt set 'nowhere.jsonl' is no file next to the notebook: No such"),
        ("08", "draft_length=0", "draft_length must be an integer >= 1 or auto; got 0"),
        ("08", "batch_size=[1,0]", r"batch_size must be an integer or a list >= 1; got \[1, 0\]"),
        ("08", "batch_size=[2.5]", r"each of batch_size must be an integer; got 2\.5"),
        ("08", "temperature=-1", r"temperature must be a number >= 0; got -1\.0"),
        (
            "08",
            "target=no/such-model-of-nobody",
            "the model 'no/such-model-of-nobody' is no folder next to the notebook",
        ),
        ("04_", "batch_sizes=[true]", "each of batch_sizes must be an integer; got True"),
        ("05", "drafts=[1,2]", "each of drafts must be a text; got 1"),
        ("09", "problems=nosuch.jsonl", "the problems 'nosuch.jsonl' is no file next to the notebook"),
    ],
)
def test_wrong_value_for_a_lesson_is_refused(lesson, values, said):
    (path,) = (each for each in LESSONS if each.name.startswith(lesson))
    with pytest.raises(ValueError, match=said):
        planning.plan(path, [values])


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_lesson_declares_and_checks_its_parameters(path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (run,) = planning.plan(path).runs.values()
    if run.get("target") == "":
        drafts = "ngram,suffix,layers:2,target:int4,deep_draft"
        assert len(planning.plan(path, [f"draft={drafts}"]).runs) == 5
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    known = parameters.of_notebook(notebook, path.name)
    assert set(papermill.inspect_notebook(path)) == set(known)  # otherwise papermill warns of an unknown parameter
    assert all(parameter.check(parameter.default) == parameter.default for parameter in known.values())
    place = next(i for i, cell in enumerate(code) if "parameters" in cell.metadata.get("tags", []))
    first = next(cell for cell in code[place + 1 :] if re.search(r"^(import|from) bass_lab", cell.source, re.MULTILINE))
    assert re.search(r"^(lab\.)?check_parameters\(", first.source, re.MULTILINE)
    # a name has the same meaning in every lesson
    if "target" in known:
        assert {"draft", "dtype", "device"} <= set(known)
    for name in {"dtype", "device"} & set(known):
        assert known[name].parse("auto") is None and known[name].default is None, name
    if "draft_length" in known and type(None) in known["draft_length"].kinds:
        assert known["draft_length"].parse("auto") is None


def test_values_are_combined_to_runs():
    plan = planning.plan(LATENCY, ["batch_size=1,2,4,8", "draft_length=auto,4,7"])
    assert len(plan.runs) == 12 and plan.varied == ["batch_size", "draft_length"]
    assert {run["draft_length"] for run in plan.runs.values()} == {None, 4, 7}


def run_cells(*cells, **values):
    names = {"In": ["", *cells], "check": lab.check_parameters}
    for cell in cells:
        exec(cell, names)
    names["rules"] = values
    exec("check(**rules)", names)
    return names


OWN = "size: int = 3\nname: str = 'a'\nmode: str = None\nsizes: list = [1, 8]\n"
INJECTED = "# Parameters\n"


@pytest.mark.parametrize(
    ("cells", "rules", "said"),
    [
        ([OWN, INJECTED + "sise = 4\n"], {}, r"has no parameter 'sise'. Did you mean size\? It has\n  size   an"),
        ([OWN, INJECTED + "size = '4'\n"], {}, "size must be an integer; got '4'"),
        ([OWN, "size = True"], {}, "size must be an integer; got True"),
        ([OWN], {"size": range(1, 3)}, "size must be an integer from 1 to 2; got 3"),
        ([OWN, "mode = 'x'"], {"mode": ["y", "z"]}, "mode must be one of y, z or auto; got 'x'"),
        ([OWN, "sizes = 0"], {"sizes": "> 0 or auto"}, "sizes must be an integer or a list > 0 or auto; got 0"),
        ([OWN, "sizes = '[1,2]'"], {}, r"a list; got '\[1,2\]'. With papermill, .* as -y \"sizes: \[1,2\]\""),
        ([OWN, "sizes = '1,2'"], {}, r"got '1,2'. With papermill, give a list as -y \"sizes: \[1,2\]\""),
        ([OWN], {"seize": [1]}, "check_parameters names seize; the parameters are size, name, mode, sizes"),
        (["size: int | None = 3"], {}, "found no cell of annotated literals"),
        (["size = 3"], {}, "found no cell of annotated literals"),
    ],
)
def test_notebook_refuses_unknown_names_and_values(cells, rules, said):
    with pytest.raises(ValueError, match=said):
        run_cells(*cells, **rules)


def test_notebook_takes_known_names_and_values():
    run_cells(OWN)
    assert run_cells(OWN, INJECTED + "mode = 'auto'\n")["mode"] is None  # as set by papermill's -p mode auto
    run_cells(OWN, INJECTED + "size = 4\nmode = None\n", size=">= 4", mode=["x", "y"])
    run_cells(OWN, INJECTED + "size = 4\n", size=range(1, 5))
    assert run_cells(OWN, INJECTED + "size = None\n", size="> 0 or auto")["size"] is None
    assert run_cells(OWN, INJECTED + "sizes = 4\n")["sizes"] == [4]


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
    with pytest.raises(ValueError, match=r"wrong.csv, row 1: the number of fields differs from the first line"):
        planning.plan(notebook, rows=tmp_path / "wrong.csv")
    with pytest.raises(ValueError, match=r"size is given both in .* and with -p"):
        planning.plan(notebook, ["size=3"], tmp_path / "rows.csv")


def test_commas_within_brackets_and_quotes_divide_nothing():
    assert parameters.split('1,[2,3],"a,b",{"c":[4,5]}') == ["1", "[2,3]", '"a,b"', '{"c":[4,5]}']
    assert parameters.split("it's a,don't b,'c,d'") == ["it's a", "don't b", "'c,d'"]


def test_key_depends_on_parameters_cells_and_code(notebook, tmp_path, monkeypatch):
    def keys(*values, path=notebook):
        return list(planning.plan(path, values).runs)

    (own,) = keys("size=2")
    assert keys("size=2", "length=auto") == [own] and keys("size=2,2") == [own]  # an explicit default
    assert own not in keys("size=3") and own not in keys("length=5", "size=2")
    assert own not in keys("size=2", path=sweeps.stub(tmp_path, "changed = 1", name="other"))
    monkeypatch.setattr(run_process, "code_version", lambda: "other code")
    assert own not in keys("size=2")


def test_key_depends_on_the_files_of_models(tmp_path):
    model, stub = tmp_path / "model", with_parameters(tmp_path, 'target: str = ""\ndraft: str = ""\n')
    model.mkdir()
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


def test_key_depends_on_named_files_and_measured_costs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    stub, found = with_parameters(tmp_path, 'problems: str = ""\n'), set()
    for content in ("{}", "[]"):
        (tmp_path / "probs.jsonl").write_text(content)
        found |= set(planning.plan(stub, ["problems=probs.jsonl"]).runs)
    cache_folder().mkdir(parents=True)
    (cache_folder() / "here.json").write_text(json.dumps({}))
    found |= set(planning.plan(stub, ["problems=probs.jsonl"]).runs)
    assert len(found) == 3
