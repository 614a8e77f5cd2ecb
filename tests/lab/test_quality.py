"""`compare` and `bass eval`: samples on one clock, stored files that survive a kill, and scores of any budget."""

import json
import shutil
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import record_lines
import torch
from commands import invoke
from recording import use_on_cpu
from tiny import BYTES, byte_tokenizer, forward_passes, greedy_alone, tiny_model

import bass_core as bass
from bass_lab.evaluation import METHODS, Problem, compare, evaluate, load, load_problems, quality, sample_file, sandbox
from bass_lab.evaluation.quality import CODE_STOPS

PROBLEMS = load_problems()[:2]
ROWS, LONG = 2, 16
OPTIONS = {"n": ROWS, "max_new_tokens": 16, "temperature": 0.8, "verification": "coupled"}
BRIEF = OPTIONS | {"max_new_tokens": 8}


def short(jobs) -> list[tuple[bool, str]]:
    return [(len(text) < LONG, f"{len(text)} characters") for _, text in jobs]


def noting(seen: list):
    """Return `short` under the same name, but add the task_id of each graded problem to `seen`."""

    def note(jobs):
        seen.append(jobs[0][0].task_id)
        return short(jobs)

    note.__name__ = "short"
    return note


@pytest.fixture(scope="module")
def pair():
    small = {"vocab_size": BYTES, "num_hidden_layers": 1, "max_position_embeddings": 1024}
    return bass.ModelPair(tiny_model(**small), tiny_model(**small, noise=0.02), byte_tokenizer())


@pytest.fixture(scope="module")
def runs(pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return compare(pair, PROBLEMS, grade=short, folder=folder, **OPTIONS), folder


@pytest.fixture
def stored(runs, tmp_path) -> Path:
    return Path(shutil.copy(runs[1] / "batched.jsonl", tmp_path))


def again(pair, file, problems=PROBLEMS, **changes):
    ran = []
    found = evaluate(pair, problems, grade=noting(ran), folder=file.parent, **OPTIONS | changes)
    return found, ran


def test_log_probability_is_the_targets_with_eos():
    pair = bass.load_pair(dtype="float32")
    prompt = torch.tensor(pair.tokenizer(PROBLEMS[1].prompt)["input_ids"])
    written = greedy_alone(pair.target, prompt, 64, eos=pair.target.generation_config.eos_token_id)
    with torch.no_grad():
        logprobs = pair.target(torch.cat([prompt, written])[None]).logits[0].log_softmax(-1)
    expected = logprobs[len(prompt) - 1 : -1].gather(1, written[:, None]).sum().item()
    for method in ("single", "batched"):
        found = evaluate(pair, PROBLEMS[1:], method=method, n=1, temperature=0.0, max_new_tokens=64, grade=short)
        (sample,) = found.samples.itertuples()
        assert sample.finish_reason == "eos" and sample.tokens == len(written)
        assert sample.text == pair.tokenizer.decode(written, skip_special_tokens=True)
        assert sample.logprob_sum == pytest.approx(expected, abs=1e-3)


def test_coupled_methods_write_equal_texts_and_finish_in_their_order(runs):
    texts = {method: list(run.samples.text) for method, run in runs[0].items()}
    assert texts["regular"] == texts["single"] == texts["batched"]
    assert len(set(texts["batched"])) > len(PROBLEMS)  # samples differ
    for method, run in runs[0].items():
        assert (run.samples.finish_seconds > 0).all() and (run.samples.logprob_sum < 0).all()
        assert list(zip(run.samples.problem, run.samples.row, strict=True)) == [
            (problem.task_id, row) for problem in PROBLEMS for row in range(ROWS)
        ]
        assert list(run.samples.passed) == [len(text) < LONG for text in run.samples.text]
        assert list(run.samples.graded) == [f"{len(text)} characters" for text in run.samples.text]
        for _, rows in run.samples.groupby("problem"):
            if method == "single":
                assert (np.diff(rows.finish_seconds.to_numpy()) > 0).all()
            if method == "regular":  # rows of equal speed finish in order of length
                assert (np.diff(rows.sort_values("tokens").finish_seconds.to_numpy()) >= 0).all()


def test_problems_have_random_numbers_of_their_own(pair):
    twins = [replace(PROBLEMS[0], task_id=name) for name in "ab"]
    found = evaluate(pair, twins, grade=short, **BRIEF | {"temperature": 1.5})
    first, second = (list(found.samples.query("problem == @name").text) for name in "ab")
    assert first != second
    alone = evaluate(pair, twins[1:], grade=short, **BRIEF | {"temperature": 1.5})
    assert list(alone.samples.text) == second  # independent of earlier problems


def test_clock_leaves_grading_out(pair):
    def slow(jobs):
        time.sleep(0.1)
        return short(jobs)

    started = time.perf_counter()
    found = evaluate(pair, PROBLEMS[:2], grade=slow, **BRIEF)
    wall = time.perf_counter() - started
    assert found.samples.groupby("problem").finish_seconds.max().sum() < wall - 0.2


def test_budget_cuts_rows_off_after_a_whole_warm_up(pair):
    with forward_passes(pair.target) as shapes:
        found = evaluate(pair, PROBLEMS[:2], budget=0, grade=short, **BRIEF)
    prefill = (1, len(pair.tokenizer(PROBLEMS[0].prompt)["input_ids"]))
    assert shapes[shapes.index(prefill) + 1][0] == ROWS  # a step of the warm-up
    assert not found.samples.finished.any() and not found.samples.passed.any()
    assert set(found.samples.finish_reason) == {"budget"} and found.samples.finish_seconds.isna().all()
    assert (found.scores([0]).value == 0).all() and list(found.scores().budget.unique()) == [0]
    with pytest.raises(ValueError, match="cut off after 0"):
        found.scores([0.5])


def test_kept_session_writes_the_same_and_keeps_the_budget(pair, monkeypatch):
    expected = evaluate(pair, PROBLEMS, grade=short, **BRIEF).samples
    use_on_cpu(monkeypatch)  # steps are captured as on a GPU
    kept = evaluate(pair, PROBLEMS, grade=short, **BRIEF).samples
    assert kept.text.tolist() == expected.text.tolist()
    assert kept.finish_reason.tolist() == expected.finish_reason.tolist()
    cut = evaluate(pair, PROBLEMS[:1], grade=short, **BRIEF | {"budget": 0.0}).samples
    assert set(cut.finish_reason) == {"budget"}


def test_equal_texts_are_graded_once(pair):
    seen = []

    def note_texts(jobs):
        seen.extend(text for _, text in jobs)
        return short(jobs)

    found = evaluate(pair, PROBLEMS[:2], grade=note_texts, **BRIEF | {"temperature": 0.0})
    assert len(seen) == 2 and len(found.samples) == 2 * ROWS
    for _, rows in found.samples.groupby("problem"):
        assert rows.text.nunique() == 1 and rows.passed.nunique() == 1


def test_code_ends_at_the_usual_strings_except_for_the_mini_set(pair):
    foreign = [replace(PROBLEMS[0], task_id="x", composition="")]
    assert evaluate(pair, PROBLEMS[:1], grade=short, **BRIEF).settings["stop"] == []
    assert evaluate(pair, foreign, grade=short, **BRIEF).settings["stop"] == list(CODE_STOPS)
    tiny = bass.ModelPair(tiny_model(vocab_size=BYTES), tokenizer=byte_tokenizer())
    options = {"n": 2, "max_new_tokens": 30, "temperature": 1.0, "grade": short}
    problem = [Problem("t", "ab", "f", "", "")]
    text = evaluate(tiny, problem, stop=(), **options).samples.text[0]
    cut = evaluate(tiny, problem, stop=text[4:6], **options).samples
    assert cut.text[0] == text[: text.index(text[4:6])] and cut.finish_reason[0] == "stop"


def test_any_budget_is_scored_from_the_folder(runs, tmp_path):
    found, folder = runs
    assert list(load(folder)) == list(METHODS)
    lines = (folder / "batched.jsonl").read_text().splitlines()
    assert [record_lines.kind_of(json.loads(line)) for line in lines] == ["evaluation", "samples", "samples"]
    for method, run in found.items():
        stored = load(folder)[method]
        assert stored.samples.equals(run.samples) and stored.settings == run.settings
        assert stored.environment == run.environment
        budgets = [0, float(run.samples.finish_seconds.median()), 1e9]
        assert stored.scores(budgets).equals(run.scores(budgets))
        every = stored.scores(budgets).query("metric == 'Pass@All'").value
        assert every.is_monotonic_increasing and every.iloc[0] == 0
    with pytest.raises(FileNotFoundError, match=r"holds none of regular\.jsonl"):
        load(tmp_path)


def test_scores_need_neither_texts_nor_reasons(pair, tmp_path):
    found = compare(pair, PROBLEMS[:1], methods=["batched"], texts=False, grade=short, folder=tmp_path, **BRIEF)
    (stored,) = load(tmp_path).values()
    assert stored.samples[["text", "graded"]].isna().all(axis=None)
    kept = found["batched"].samples.drop(columns=["text", "graded"])
    assert stored.samples.drop(columns=["text", "graded"]).equals(kept)
    line = (tmp_path / "batched.jsonl").read_text().splitlines()[1]
    assert "text" not in line and "characters" not in line
    assert stored.scores([1e9]).value.notna().all()


def test_methods_are_interleaved_and_run_missing_problems(pair, runs, tmp_path):
    seen = []
    compare(pair, PROBLEMS[:2], methods=["batched", "regular"], grade=noting(seen), **BRIEF)
    assert seen == ["mini/0", "mini/0", "mini/1", "mini/1"]
    shutil.copy(runs[1] / "single.jsonl", tmp_path)
    seen.clear()
    compare(pair, PROBLEMS[:1], methods=["single", "batched"], grade=noting(seen), folder=tmp_path, **OPTIONS)
    assert seen == ["mini/0"] and list(load(tmp_path)) == ["single", "batched"]


def test_second_start_runs_missing_problems_only(pair, stored, runs):
    before = stored.read_bytes()
    found, ran = again(pair, stored)
    assert ran == [] and stored.read_bytes() == before
    assert found.samples.equals(runs[0]["batched"].samples)
    more = [*PROBLEMS, load_problems()[2]]
    found, ran = again(pair, stored, more)
    assert ran == ["mini/2"] and stored.read_bytes().startswith(before)
    assert len(found.samples) == 3 * ROWS
    found, ran = again(pair, stored, more[1:])
    assert ran == [] and list(found.samples.problem.unique()) == ["mini/1", "mini/2"]


@pytest.mark.parametrize("lost", [1, 40])
def test_torn_line_is_dropped_and_run_again(pair, stored, runs, lost):
    stored.write_bytes(stored.read_bytes()[:-lost])
    assert list(load(stored).samples.problem.unique()) == ["mini/0"]  # while the line is torn
    found, ran = again(pair, stored)
    assert ran == ["mini/1"]
    assert list(found.samples.text) == list(runs[0]["batched"].samples.text)
    assert load(stored).samples.equals(found.samples)
    stored.write_bytes(stored.read_bytes()[: 100 * (lost > 1)])  # nothing or a part of the first line
    assert again(pair, stored, PROBLEMS[:1])[1] == ["mini/0"] and len(load(stored).samples) == ROWS


def test_file_of_other_settings_is_refused_and_left_alone(pair, stored):
    with stored.open("ab") as file:
        file.write(b'{"torn')
    before = stored.read_bytes()
    for named, changes in {
        "temperature: 0.8 there, 0.5 here": {"temperature": 0.5},
        "n: 2 there, 3 here": {"n": 3},
        "seed": {"seed": 1},
        "draft_length": {"draft_length": 2},
        "budget: None there, 5.0 here": {"budget": 5.0},
        "stop": {"stop": "x"},
    }.items():
        with pytest.raises(ValueError, match="other settings") as error:
            again(pair, stored, **changes)
        assert named in str(error.value) and "give another folder" in str(error.value)
    other = bass.ModelPair(pair.target, tokenizer=pair.tokenizer)
    with pytest.raises(ValueError, match=r"draft: 'Llama.* there, 'NgramDrafter longest=3 shortest=1' here"):
        again(other, stored)
    assert stored.read_bytes() == before


def test_other_threads_are_refused_with_their_number(pair, stored, monkeypatch):
    here = quality.describe_run(pair)
    monkeypatch.setattr(quality, "describe_run", lambda pair: here | {"threads": here["threads"] + 1})
    with pytest.raises(ValueError, match=f"continue with OMP_NUM_THREADS={here['threads']}, or give another folder"):
        again(pair, stored)


def test_changed_code_is_a_warning(pair, stored, monkeypatch):
    here = quality.describe_run(pair) | {"commit": "1" * 12}
    lines = stored.read_text().split("\n")
    header = json.loads(lines[0])
    header["environment"]["commit"] = "2" * 12
    stored.write_text("\n".join([json.dumps(header), *lines[1:]]))
    monkeypatch.setattr(quality, "describe_run", lambda pair: here)
    with pytest.warns(UserWarning, match="begun by commit 222222222222, and new samples are of commit 111111111111"):
        again(pair, stored)


def test_file_of_another_kind_is_left_alone(pair, tmp_path):
    path = tmp_path / "batched.jsonl"
    for content in ("my thesis", "my thesis\n", '{"a": 1}\n', "[1]\n"):
        path.write_text(content)
        for use in (lambda: again(pair, path), lambda: load(path)):
            with pytest.raises(ValueError, match="of `compare`"):
                use()
        assert path.read_text() == content


def test_damaged_repeated_or_changed_problem_is_named(pair, stored):
    changed = [replace(PROBLEMS[0], test="def check(candidate): pass\n"), *PROBLEMS[1:]]
    with pytest.raises(ValueError, match="another problem named mini/0"):
        again(pair, stored, changed)
    lines = stored.read_bytes().splitlines(keepends=True)
    for damaged, reason in ((lines[2][:50] + b"\n", "line 3"), (lines[1], "mini/0 occurs twice")):
        stored.write_bytes(b"".join([*lines[:2], damaged, *lines[2:]]))
        with pytest.raises(ValueError, match=reason):
            again(pair, stored)


def test_two_processes_do_not_write_one_file(pair, stored):
    header, _ = sample_file.read(stored)
    held = sample_file.SampleFile(stored, header["evaluation"], {})
    with held, pytest.raises(ValueError, match="written by another process"):
        again(pair, stored)
    assert again(pair, stored)[1] == []


def test_interrupt_loses_the_problem_in_flight_only(pair, tmp_path):
    def interrupting(jobs):
        if jobs[0][0].task_id == "mini/1":
            raise KeyboardInterrupt
        return short(jobs)

    interrupting.__name__ = "short"
    with pytest.raises(KeyboardInterrupt):
        evaluate(pair, PROBLEMS, grade=interrupting, folder=tmp_path, **BRIEF)
    kept = load(tmp_path / "batched.jsonl").samples
    assert list(kept.problem.unique()) == ["mini/0"]
    found, ran = again(pair, tmp_path / "batched.jsonl", max_new_tokens=BRIEF["max_new_tokens"])
    assert ran == ["mini/1"] and found.samples.iloc[:ROWS].equals(kept)


REFUSED = {
    "method must be one of": {"method": "fast"},
    "n must be >= 1": {"n": 0},
    "max_new_tokens must be >= 1": {"max_new_tokens": 0},
    "problem mini/0: prompt": {"max_new_tokens": 5000},
    "budget must be >= 0": {"budget": -1},
    "temperature must be": {"temperature": -1},
    "verification must be one of": {"verification": "trust"},
    "empty string": {"stop": ""},
    "which `grade` replaces": {"unsafe": True},
}


def test_bad_options_and_problems_are_refused_before_a_file_is_made(pair, tmp_path):
    for reason, changes in REFUSED.items():
        with pytest.raises(ValueError, match=reason):
            evaluate(pair, PROBLEMS, grade=short, folder=tmp_path, **OPTIONS | changes)
    for problems in ([], [PROBLEMS[0]] * 2):
        with pytest.raises(ValueError, match="problems must be"):
            evaluate(pair, problems, grade=short, folder=tmp_path)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        evaluate(bass.ModelPair(tiny_model()), PROBLEMS, grade=short, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_problem_with_a_failing_solution_is_refused_before_decoding(pair, tmp_path):
    prompt, solution = "def f(x):\n", "    return len(x)\n"
    good, many = (
        Problem(f"own/{size}", prompt, "f", solution, f"def check(c): assert c([0] * {size}) == {size}")
        for size in (10, 200_000)
    )
    absent = replace(good, task_id="own/absent", test="import not_there\ndef check(c): pass")
    with forward_passes(pair.target) as shapes:
        for bad, said in ((many, "own/200000 cannot be graded here.*more than 100000 values"), (absent, "own/absent")):
            with pytest.raises(ValueError, match=said):
                evaluate(pair, [good, bad], folder=tmp_path, unsafe=True, **BRIEF)
    assert shapes == []
    assert len(evaluate(pair, [good], unsafe=True, **BRIEF).samples) == ROWS


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
        evaluate(pair, PROBLEMS[:1], folder=tmp_path, **BRIEF)
    assert not list(tmp_path.iterdir()) and graded == []
    found = evaluate(pair, PROBLEMS[:1], folder=tmp_path, unsafe=True, **BRIEF)
    assert graded == [True] and found.settings["grading"] == "unsafe"
    monkeypatch.setattr(sandbox, "require_sandbox", lambda: None)
    with pytest.raises(ValueError, match="grading: 'unsafe' there, 'sandbox' here"):
        evaluate(pair, PROBLEMS[:1], folder=tmp_path, **BRIEF)
    monkeypatch.setattr(sandbox, "require_sandbox", refuse)
    refused = invoke("eval", "--limit=1", "--samples=1")
    assert refused.exit_code == 2 and refused.stderr.count("\n") == 1
    assert "no Landlock here" in refused.stderr and "--unsafe" in refused.stderr


def test_humaneval_comes_from_the_hub_by_its_name(monkeypatch):
    asked = []

    def load_dataset(name, **options):
        asked.append((name, options))
        if len(asked) == 4:
            raise ConnectionError("offline")
        return [asdict(PROBLEMS[0])]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    for name in ("openai_humaneval", "openai/openai_humaneval"):
        assert load_problems(name, trust_problems=True) == [replace(PROBLEMS[0], composition="")]
    assert asked == [("openai/openai_humaneval", {"split": "test", "revision": None})] * 2
    with pytest.raises(ValueError, match="openai_humaneval is neither HumanEval nor"):  # the hub may contain anything
        load_problems("openai_humaneval")
    with pytest.raises(ValueError, match=r"ConnectionError: offline.*path of HumanEval\.jsonl\.gz"):
        load_problems("openai_humaneval")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"needs the package datasets.*path of HumanEval\.jsonl\.gz"):
        load_problems("openai_humaneval")


def test_budget_beyond_the_cut_off_is_refused_before_models_are_read(monkeypatch):
    monkeypatch.setattr("bass_lab.named_pairs.named_pair", lambda *given, **options: pytest.fail("read"))
    refused = invoke("eval", "--cut-off=60", "--budgets=1", "--budgets=100")
    assert refused.exit_code == 2 and "--budgets 100 is beyond --cut-off 60" in refused.stderr


def test_interrupted_command_names_what_is_stored(monkeypatch, tmp_path):
    def interrupted(*given, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("bass_lab.evaluation.compare", interrupted)
    for options, said in (([], "nothing was stored"), ([f"--output={tmp_path / 'out'}"], "repeat the command")):
        ended = invoke("eval", "--limit=1", *options)
        assert ended.exit_code == 130 and said in ended.stderr


def test_command_scores_methods_and_resumes(monkeypatch, tmp_path):
    monkeypatch.setattr(sandbox, "require_sandbox", lambda: None)
    monkeypatch.setattr(sandbox, "grade_all", lambda jobs, *, unsafe: short(jobs))
    problems = tmp_path / "problems.jsonl"
    problems.write_text("".join(json.dumps(asdict(problem)) + "\n" for problem in PROBLEMS))
    arguments = ["eval", f"--problems={problems}", "--limit=2", "--methods=regular", "--methods=batched"]
    arguments += ["--samples=2", "--max-new-tokens=8", f"--output={tmp_path / 'out'}"]
    refused = invoke(*arguments)
    assert refused.exit_code == 2 and refused.stderr.count("\n") == 1 and "--trust-problems" in refused.stderr
    assert not (tmp_path / "out").exists()
    arguments.append("--trust-problems")
    result = invoke(*arguments, "--budgets=0.5", "--budgets=60", "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr == "  mini/0\n  mini/1\n"  # a bar only in a terminal
    document = json.loads(result.stdout)
    assert document["settings"]["regular"]["draft_length"] == "FixedLength(k=0)"
    methods_and_budgets = {(method, budget) for method in ("regular", "batched") for budget in (0.5, 60)}
    assert {(line["method"], line["budget"]) for line in document["scores"]} == methods_and_budgets
    file = tmp_path / "out" / "batched.jsonl"
    before, expected = file.read_bytes(), {line.metric: line.value for line in load(file).scores([60]).itertuples()}
    batched = [line for line in document["scores"] if (line["method"], line["budget"]) == ("batched", 60)]
    assert {line["metric"]: line["value"] for line in batched} == expected
    lines = invoke(*arguments).stdout.splitlines()
    assert lines[0].startswith("2 problems, 2 rows each") and "Pass@First" in lines[1]
    assert file.read_bytes() == before
    other = invoke(*arguments, "--seed=1")
    assert other.exit_code == 2 and other.stderr.startswith("error: ") and "other settings" in other.stderr
