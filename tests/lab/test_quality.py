"""`compare` and `bass eval`: samples on one clock, stored so that a kill loses nothing and budgets can be scored."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import record_lines
import torch
from recording import use_on_cpu
from tiny import BYTES, byte_tokenizer, greedy_alone, tiny_model
from typer.testing import CliRunner

import bass_core as bass
from bass_lab.cli import main
from bass_lab.evaluation import METHODS, Problem, compare, evaluate, load, load_problems, quality, sample_file, sandbox
from bass_lab.evaluation.quality import CODE_STOPS

PROBLEMS = load_problems()[:3]
ROWS = 3
OPTIONS = {"n": ROWS, "max_new_tokens": 40, "temperature": 0.8, "verification": "coupled"}


def short(jobs) -> list[tuple[bool, str]]:
    """A grader for tests: short texts pass."""
    return [(len(text) < 90, f"{len(text)} characters") for _, text in jobs]


def noting(seen: list):
    """`short`, under its name, that notes the task_id of each problem it grades."""

    def note(jobs):
        seen.append(jobs[0][0].task_id)
        return short(jobs)

    note.__name__ = "short"
    return note


@pytest.fixture(scope="module")
def pair():
    return bass.load_pair(dtype="float32")


@pytest.fixture(scope="module")
def runs(pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return compare(pair, PROBLEMS, grade=short, folder=folder, **OPTIONS), folder


@pytest.fixture
def stored(runs, tmp_path) -> Path:
    """A copy of a finished file."""
    return Path(shutil.copy(runs[1] / "batched.jsonl", tmp_path))


def again(pair, file, problems=PROBLEMS, **changes):
    """A second start beside the file, and the task_ids that it decoded and graded."""
    ran = []
    found = evaluate(pair, problems, grade=noting(ran), folder=file.parent, **OPTIONS | changes)
    return found, ran


# --- what samples hold ----------------------------------------------------------------------------


def test_samples_are_what_generate_writes(pair, runs):
    for problem in PROBLEMS:
        samples = runs[0]["batched"].samples.query("problem == @problem.task_id")
        assert list(samples.row) == list(range(ROWS))
        for sample in samples.itertuples():
            ids = pair.tokenizer(problem.prompt)["input_ids"]
            assert len(ids) > 1 and 0 < sample.tokens <= OPTIONS["max_new_tokens"]
            assert sample.finished and sample.finish_reason in ("eos", "length")
            assert (sample.finish_reason == "length") <= (sample.tokens == OPTIONS["max_new_tokens"])
            assert sample.passed == (len(sample.text) < 90) and sample.graded == f"{len(sample.text)} characters"
            assert sample.logprob_sum < 0


@pytest.mark.parametrize("method", METHODS)
def test_log_probability_is_the_targets_at_temperature_one_with_eos(pair, method):
    found = evaluate(pair, PROBLEMS[:1], method=method, n=1, temperature=0.0, max_new_tokens=64, grade=short)
    (sample,) = found.samples.itertuples()
    prompt = torch.tensor(pair.tokenizer(PROBLEMS[0].prompt)["input_ids"])
    written = greedy_alone(pair.target, prompt, 64, eos=pair.target.generation_config.eos_token_id)
    with torch.no_grad():
        law = pair.target(torch.cat([prompt, written])[None]).logits[0].log_softmax(-1)
    expected = law[len(prompt) - 1 : -1].gather(1, written[:, None]).sum().item()
    assert sample.finish_reason == "eos" and sample.tokens == len(written)
    assert sample.text == pair.tokenizer.decode(written, skip_special_tokens=True)
    assert sample.logprob_sum == pytest.approx(expected, abs=1e-3)


def test_coupled_methods_write_the_same_texts(runs):
    texts = {method: list(run.samples.text) for method, run in runs[0].items()}
    assert texts["regular"] == texts["single"] == texts["batched"]
    assert len(set(texts["batched"])) > len(PROBLEMS)  # samples differ


def test_problems_have_random_numbers_of_their_own(pair):
    twins = [replace(PROBLEMS[0], task_id=name) for name in "ab"]
    found = evaluate(pair, twins, grade=short, **OPTIONS | {"temperature": 1.5})
    first, second = (list(found.samples.query("problem == @name").text) for name in "ab")
    assert first != second
    alone = evaluate(pair, twins[1:], grade=short, **OPTIONS | {"temperature": 1.5})
    assert list(alone.samples.text) == second  # whatever was decoded before


def test_single_rows_finish_one_after_the_other_and_batched_rows_together(runs):
    for method, run in runs[0].items():
        assert (run.samples.finish_seconds > 0).all()
        for _, rows in run.samples.groupby("problem"):
            seconds = rows.finish_seconds.to_numpy()
            if method == "single":
                assert (np.diff(seconds) > 0).all()
            else:  # a row with more tokens than another cannot be done before it in lock step
                ordered = rows.sort_values("tokens").finish_seconds.to_numpy()
                assert method == "batched" or (np.diff(ordered) >= 0).all()


def test_the_clock_starts_with_the_call_and_leaves_grading_out(pair):
    def slow(jobs):
        time.sleep(1.0)
        return short(jobs)

    started = time.perf_counter()
    found = evaluate(pair, PROBLEMS[:2], grade=slow, **OPTIONS)
    wall = time.perf_counter() - started
    assert found.samples.groupby("problem").finish_seconds.max().sum() < wall - 2.0


def test_rows_are_cut_off_at_the_budget(pair):
    found = evaluate(pair, PROBLEMS[:2], budget=0, grade=short, **OPTIONS)
    assert not found.samples.finished.any() and not found.samples.passed.any()
    assert set(found.samples.finish_reason) == {"budget"} and found.samples.finish_seconds.isna().all()
    assert (found.scores([0]).value == 0).all() and list(found.scores().budget.unique()) == [0]
    with pytest.raises(ValueError, match="cut off after 0"):
        found.scores([0.5])


def test_equal_texts_are_graded_once(pair):
    seen = []

    def note_texts(jobs):
        seen.extend(text for _, text in jobs)
        return short(jobs)

    found = evaluate(pair, PROBLEMS[:2], grade=note_texts, **OPTIONS | {"temperature": 0.0})
    assert len(seen) == 2 and len(found.samples) == 2 * ROWS
    for _, rows in found.samples.groupby("problem"):
        assert rows.text.nunique() == 1 and rows.passed.nunique() == 1


def test_code_ends_at_the_usual_strings_but_for_the_mini_set(pair):
    foreign = [replace(PROBLEMS[0], task_id="x", composition="")]
    assert evaluate(pair, PROBLEMS[:1], grade=short, **OPTIONS).settings["stop"] == []
    assert evaluate(pair, foreign, grade=short, **OPTIONS).settings["stop"] == list(CODE_STOPS)
    # a tiny model that writes anything, with a stop that comes
    tiny = bass.ModelPair(tiny_model(vocab_size=BYTES), tokenizer=byte_tokenizer())
    options = {"n": 2, "max_new_tokens": 30, "temperature": 1.0, "grade": short}
    problem = [Problem("t", "ab", "f", "", "")]
    text = evaluate(tiny, problem, stop=(), **options).samples.text[0]
    cut = evaluate(tiny, problem, stop=text[4:6], **options).samples
    assert cut.text[0] == text[: text.index(text[4:6])] and cut.finish_reason[0] == "stop"


# --- stored samples -------------------------------------------------------------------------------


def test_a_session_that_is_kept_writes_the_same_and_keeps_the_budget(pair, runs, monkeypatch):
    """Where steps are recorded, as on a GPU: otherwise each problem would record them all."""
    use_on_cpu(monkeypatch)
    kept = evaluate(pair, PROBLEMS, grade=short, **OPTIONS).samples
    expected = runs[0]["batched"].samples
    assert (
        kept.text.tolist() == expected.text.tolist() and kept.finish_reason.tolist() == expected.finish_reason.tolist()
    )
    cut = evaluate(pair, PROBLEMS[:1], grade=short, **OPTIONS | {"budget": 0.0}).samples
    assert set(cut.finish_reason) == {"budget"}


def test_what_warms_up_has_all_the_time_it_needs(pair, monkeypatch):
    use_on_cpu(monkeypatch)
    recorded, decode = [], quality._Run.decode

    def decoding(run, problem, **changes):
        recorded.append(run._decode.recordings)
        return decode(run, problem, **changes)

    monkeypatch.setattr(quality._Run, "decode", decoding)
    evaluate(pair, PROBLEMS[:1], grade=short, **OPTIONS | {"budget": 0.0})
    assert recorded[0] == 0 < recorded[1]


def test_any_budget_is_scored_from_the_file(runs):
    found, folder = runs
    for method, run in found.items():
        stored = load(folder / f"{method}.jsonl")
        assert stored.samples.equals(run.samples) and stored.settings == run.settings
        budgets = [0, float(run.samples.finish_seconds.median()), 1e9]
        assert stored.scores(budgets).equals(run.scores(budgets))
        every = stored.scores(budgets).query("metric == 'Pass@All'").value
        assert every.is_monotonic_increasing and every.iloc[0] == 0


def test_a_folder_holds_the_methods_in_their_order(runs, tmp_path):
    stored = load(runs[1])
    assert list(stored) == list(METHODS)
    for method, run in stored.items():
        assert run.samples.equals(runs[0][method].samples) and run.environment == runs[0][method].environment
    with pytest.raises(FileNotFoundError, match=r"holds none of regular\.jsonl"):
        load(tmp_path)


def test_scores_need_neither_texts_nor_reasons(pair, runs, tmp_path):
    found = compare(pair, PROBLEMS[:1], methods=["batched"], texts=False, grade=short, folder=tmp_path, **OPTIONS)
    (stored,) = load(tmp_path).values()
    assert stored.samples[["text", "graded"]].isna().all(axis=None)
    assert stored.samples.drop(columns=["text", "graded"]).equals(
        found["batched"].samples.drop(columns=["text", "graded"])
    )
    line = (tmp_path / "batched.jsonl").read_text().splitlines()[1]
    assert "text" not in line and "characters" not in line
    assert stored.scores([1e9]).value.notna().all()


def test_methods_take_turns_problem_by_problem(pair):
    seen = []
    compare(pair, PROBLEMS[:2], methods=["batched", "regular"], grade=noting(seen), **OPTIONS)
    assert seen == ["mini/0", "mini/0", "mini/1", "mini/1"]


def test_one_method_that_lacks_a_problem_runs_it_alone(pair, runs, tmp_path):
    for method in ("single", "batched"):
        shutil.copy(runs[1] / f"{method}.jsonl", tmp_path)
    seen = []
    compare(pair, PROBLEMS[:2], grade=noting(seen), folder=tmp_path, **OPTIONS)
    assert seen == ["mini/0", "mini/1"]
    assert list(load(tmp_path)) == list(METHODS)


def test_a_second_start_runs_what_is_missing_only(pair, stored, runs):
    before = stored.read_bytes()
    found, ran = again(pair, stored)
    assert ran == [] and stored.read_bytes() == before
    assert found.samples.equals(runs[0]["batched"].samples)
    more = [*PROBLEMS, load_problems()[3]]
    found, ran = again(pair, stored, more)
    assert ran == ["mini/3"] and stored.read_bytes().startswith(before)
    assert len(found.samples) == 4 * ROWS
    found, ran = again(pair, stored, more[2:])
    assert ran == [] and list(found.samples.problem.unique()) == ["mini/2", "mini/3"]


@pytest.mark.parametrize("lost", [1, 40, 400])
def test_a_torn_last_line_is_dropped_and_run_again(pair, stored, runs, lost):
    stored.write_bytes(stored.read_bytes()[:-lost])
    assert list(load(stored).samples.problem.unique()) == ["mini/0", "mini/1"]  # while it is torn
    found, ran = again(pair, stored)
    assert ran == ["mini/2"]
    assert list(found.samples.text) == list(runs[0]["batched"].samples.text)
    assert load(stored).samples.equals(found.samples)


@pytest.mark.parametrize("kept", [0, 5, 100])
def test_a_torn_first_line_begins_anew(pair, stored, kept):
    stored.write_bytes(stored.read_bytes()[:kept])
    _, ran = again(pair, stored)
    assert ran == [problem.task_id for problem in PROBLEMS]
    assert len(load(stored).samples) == 3 * ROWS


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"temperature": 0.5}, "temperature: 0.8 there, 0.5 here"),
        ({"n": 2}, "n: 3 there, 2 here"),
        ({"seed": 1}, "seed"),
        ({"draft_length": 2}, "draft_length"),
        ({"budget": 5.0}, "budget: None there, 5.0 here"),
        ({"stop": "x"}, "stop"),
    ],
)
def test_a_file_of_other_settings_is_refused_and_left_alone(pair, stored, changes, named):
    with stored.open("ab") as file:
        file.write(b'{"torn')
    before = stored.read_bytes()
    with pytest.raises(ValueError, match="other settings") as error:
        again(pair, stored, **changes)
    assert named in str(error.value) and "give another folder" in str(error.value)
    assert stored.read_bytes() == before


def test_other_threads_are_told_how_to_go_on(pair, stored, monkeypatch):
    here = quality.describe_environment(pair.device)
    monkeypatch.setattr(quality, "describe_environment", lambda device: here | {"threads": here["threads"] + 1})
    with pytest.raises(ValueError, match=f"go on with OMP_NUM_THREADS={here['threads']}, or give another folder"):
        again(pair, stored)


def test_code_that_has_changed_is_said(pair, stored, monkeypatch):
    here = quality.describe_environment(pair.device) | {"commit": "1" * 12}
    lines = stored.read_text().split("\n")
    header = json.loads(lines[0])
    header["environment"]["commit"] = "2" * 12
    stored.write_text("\n".join([json.dumps(header), *lines[1:]]))
    monkeypatch.setattr(quality, "describe_environment", lambda device: here)
    with pytest.warns(UserWarning, match="begun by commit 222222222222, and what is added to it is of 111111111111"):
        again(pair, stored)


def test_other_models_are_other_settings(pair, stored):
    other = bass.ModelPair(pair.target, tokenizer=pair.tokenizer)
    with pytest.raises(ValueError, match=r"draft: 'Llama.* there, 'NgramDrafter longest=3 shortest=1' here"):
        again(other, stored)


@pytest.mark.parametrize("content", ["my thesis", "my thesis\n", '{"a": 1}\n', "[1]\n"])
def test_a_file_of_another_kind_is_left_alone(pair, tmp_path, content):
    path = tmp_path / "batched.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match="of `compare`"):
        again(pair, path)
    with pytest.raises(ValueError, match="of `compare`"):
        load(path)
    assert path.read_text() == content


def test_a_damaged_or_repeated_line_is_named(pair, stored):
    lines = stored.read_bytes().splitlines(keepends=True)
    for damaged, reason in ((lines[2][:50] + b"\n", "line 3"), (lines[1], "mini/0 stands there twice")):
        stored.write_bytes(b"".join([*lines[:2], damaged, *lines[3:]]))
        with pytest.raises(ValueError, match=reason):
            again(pair, stored)


def test_a_problem_that_changed_is_refused(pair, stored):
    changed = [replace(PROBLEMS[0], test="def check(candidate): pass\n"), *PROBLEMS[1:]]
    with pytest.raises(ValueError, match="another problem named mini/0"):
        again(pair, stored, changed)


def test_stored_samples_are_lines_of_a_record(stored):
    kinds = [record_lines.kind_of(json.loads(text)) for text in stored.read_text().splitlines()]
    assert kinds == ["evaluation", *["samples"] * (len(kinds) - 1)] and len(kinds) > 1


def test_two_processes_do_not_write_one_file(pair, stored):
    header, _ = sample_file.read(stored)
    with (
        sample_file.SampleFile(stored, header["evaluation"], {}),
        pytest.raises(ValueError, match="written by another process"),
    ):
        again(pair, stored)
    assert again(pair, stored)[1] == []


RUN = """
import sys, time, torch
torch.set_num_threads(1)
import bass_core as bass
from bass_lab.evaluation import evaluate, load_problems
def short(jobs):
    print("graded", jobs[0][0].task_id, flush=True)
    return [(True, "") for _ in jobs]
pair = bass.load_pair(dtype="float32")
evaluate(pair, load_problems()[:8], n=2, max_new_tokens=24, folder=sys.argv[1], grade=short)
"""


@pytest.mark.slow
def test_a_kill_loses_at_most_the_problem_in_flight(pair, tmp_path):
    path, ran = tmp_path / "batched.jsonl", []
    with subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        seen = [process.stdout.readline() for _ in range(3)]  # the third may or may not be written yet
        os.kill(process.pid, signal.SIGKILL)
    assert seen == [f"graded mini/{i}\n" for i in range(3)]
    kept = load(path).samples
    assert kept.problem.nunique() >= 2
    evaluate(pair, load_problems()[:8], n=2, max_new_tokens=24, folder=tmp_path, grade=noting(ran))
    assert ran == [f"mini/{i}" for i in range(kept.problem.nunique(), 8)]
    samples = load(path).samples
    assert samples.iloc[: len(kept)].equals(kept)  # nothing lost, nothing twice
    assert [(p, r) for p, r in zip(samples.problem, samples.row, strict=True)] == [
        (f"mini/{i}", row) for i in range(8) for row in range(2)
    ]


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"method": "fast"}, "method must be one of"),
        ({"n": 0}, "n must be >= 1"),
        ({"max_new_tokens": 0}, "max_new_tokens must be >= 1"),
        ({"max_new_tokens": 5000}, "problem mini/0: prompt"),
        ({"budget": -1}, "budget must be >= 0"),
        ({"temperature": -1}, "temperature must be"),
        ({"verification": "trust"}, "verification must be one of"),
        ({"stop": ""}, "empty string"),
        ({"unsafe": True}, "`grade` replaces it"),
    ],
)
def test_bad_options_are_refused_before_a_file_is_made(pair, tmp_path, changes, reason):
    with pytest.raises(ValueError, match=reason):
        evaluate(pair, PROBLEMS, grade=short, folder=tmp_path, **OPTIONS | changes)
    assert not list(tmp_path.iterdir())


def test_bad_problems_are_refused(pair):
    for problems in ([], [PROBLEMS[0]] * 2):
        with pytest.raises(ValueError, match="problems must be"):
            evaluate(pair, problems, grade=short)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        evaluate(bass.ModelPair(tiny_model()), PROBLEMS, grade=short)


def test_a_problem_whose_own_solution_fails_is_refused_before_anything_is_decoded(pair, monkeypatch, tmp_path):
    """Its check wants what the sandbox has not, or more than the harness passes on: no text could be right."""
    good, many = (
        Problem(
            f"own/{size}", "def f(x):\n", "f", "    return len(x)\n", f"def check(c): assert c([0] * {size}) == {size}"
        )
        for size in (10, 200_000)
    )
    absent = replace(good, task_id="own/absent", test="import not_there\ndef check(c): pass")
    monkeypatch.setattr(quality._Run, "decode", lambda *arguments, **options: pytest.fail("decoded"))
    for problem, said in ((many, "own/200000 cannot be graded here.*more than 100000 values"), (absent, "own/absent")):
        with pytest.raises(ValueError, match=said):
            evaluate(pair, [good, problem], folder=tmp_path, unsafe=True, **OPTIONS)
    monkeypatch.undo()
    assert len(evaluate(pair, [good], unsafe=True, **OPTIONS).samples) == ROWS


def test_programs_run_in_the_sandbox_or_not_at_all(pair, monkeypatch, tmp_path):
    graded = []

    def grade_all(jobs, *, unsafe):
        graded.append(unsafe)
        return [sandbox.Grade(True, "passed") for _ in jobs]

    def refuse():
        raise sandbox.SandboxUnavailable("no Landlock here")

    monkeypatch.setattr(sandbox, "grade_all", grade_all)
    monkeypatch.setattr(sandbox, "require_sandbox", refuse)
    with pytest.raises(sandbox.SandboxUnavailable, match="no Landlock"):
        evaluate(pair, PROBLEMS[:1], folder=tmp_path, **OPTIONS)
    assert not list(tmp_path.iterdir()) and graded == []
    found = evaluate(pair, PROBLEMS[:1], folder=tmp_path, unsafe=True, **OPTIONS)
    assert graded == [True] and found.settings["grading"] == "unsafe"
    monkeypatch.setattr(sandbox, "require_sandbox", lambda: None)
    with pytest.raises(ValueError, match="grading: 'unsafe' there, 'sandbox' here"):
        evaluate(pair, PROBLEMS[:1], folder=tmp_path, **OPTIONS)
    monkeypatch.setattr(sandbox, "require_sandbox", refuse)
    refused = CliRunner().invoke(main.app, ["eval", "--limit=1", "--samples=1"])
    assert refused.exit_code == 2 and refused.stderr.count("\n") == 1
    assert "no Landlock here" in refused.stderr and "--unsafe" in refused.stderr


# --- the hub --------------------------------------------------------------------------------------


def test_humaneval_comes_from_the_hub_by_its_name(monkeypatch):
    asked = []

    def load_dataset(name, **options):
        asked.append((name, options))
        return [asdict(PROBLEMS[0])]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    for name in ("openai_humaneval", "openai/openai_humaneval"):
        assert load_problems(name, trust_problems=True) == [replace(PROBLEMS[0], composition="")]
    assert asked == [("openai/openai_humaneval", {"split": "test", "revision": None})] * 2
    with pytest.raises(ValueError, match="openai_humaneval is neither HumanEval nor"):  # the hub may hold anything
        load_problems("openai_humaneval")


def test_no_hub_names_the_file_to_use_instead(monkeypatch):
    def load_dataset(name, **options):
        raise ConnectionError("offline")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(ValueError, match=r"ConnectionError: offline.*path of HumanEval\.jsonl\.gz"):
        load_problems("openai_humaneval")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"needs the package datasets.*path of HumanEval\.jsonl\.gz"):
        load_problems("openai_humaneval")


# --- the command ----------------------------------------------------------------------------------


def test_a_budget_beyond_the_cut_off_is_refused_before_models_are_read(monkeypatch):
    monkeypatch.setattr("bass_lab.named_pairs.named_pair", lambda *given, **options: pytest.fail("read"))
    refused = CliRunner().invoke(main.app, ["eval", "--cut-off=60", "--budgets=1", "--budgets=100"])
    assert refused.exit_code == 2 and "--budgets 100 is beyond --cut-off 60" in refused.stderr


@pytest.mark.parametrize("output", [None, "folder"])
def test_a_ctrl_c_in_bass_eval_says_what_is_stored(monkeypatch, tmp_path, output):
    def interrupted(*given, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("bass_lab.evaluation.compare", interrupted)
    stored = [] if output is None else ["--output", str(tmp_path / output)]
    ended = CliRunner().invoke(main.app, ["eval", "--limit=1", *stored])
    assert ended.exit_code == 130
    assert ("nothing was stored" if output is None else "goes on with what") in ended.stderr


def test_bass_eval_scores_methods_and_goes_on_from_its_files(monkeypatch, tmp_path):
    monkeypatch.setattr(sandbox, "require_sandbox", lambda: None)
    monkeypatch.setattr(sandbox, "grade_all", lambda jobs, *, unsafe: short(jobs))
    problems = tmp_path / "problems.jsonl"
    problems.write_text("".join(json.dumps(asdict(problem)) + "\n" for problem in PROBLEMS))
    arguments = ["eval", f"--problems={problems}", "--limit=2", "--methods=regular", "--methods=batched"]
    arguments += ["--samples=2", "--max-new-tokens=40", f"--output={tmp_path / 'out'}"]
    refused = CliRunner().invoke(main.app, arguments)
    assert refused.exit_code == 2 and refused.stderr.count("\n") == 1 and "--trust-problems" in refused.stderr
    assert not (tmp_path / "out").exists()
    arguments.append("--trust-problems")
    result = CliRunner().invoke(main.app, [*arguments, "--budgets=0.5", "--budgets=60", "--json"])
    assert result.exit_code == 0, result.output
    assert result.stderr == "  mini/0\n  mini/1\n"  # a bar only in a terminal
    document = json.loads(result.stdout)
    assert document["settings"]["regular"]["draft_length"] == "FixedLength(k=0)"
    assert {(s["method"], s["budget"]) for s in document["scores"]} == {
        (method, budget) for method in ("regular", "batched") for budget in (0.5, 60)
    }
    stored = load(tmp_path / "out" / "batched.jsonl")
    expected = {line.metric: line.value for line in stored.scores([60]).itertuples()}
    found = {s["metric"]: s["value"] for s in document["scores"] if (s["method"], s["budget"]) == ("batched", 60)}
    assert found == expected

    before = (tmp_path / "out" / "batched.jsonl").read_bytes()
    rescored = CliRunner().invoke(main.app, [*arguments, "--json"])
    assert rescored.exit_code == 0 and (tmp_path / "out" / "batched.jsonl").read_bytes() == before
    assert len({s["budget"] for s in json.loads(rescored.stdout)["scores"]}) <= 4
    lines = CliRunner().invoke(main.app, arguments).stdout.splitlines()
    assert lines[0].startswith("2 problems, 2 rows each") and "Pass@First" in lines[1]
    other = CliRunner().invoke(main.app, [*arguments, "--seed=1"])
    assert other.exit_code == 2 and other.stderr.startswith("error: ") and "other settings" in other.stderr
