"""Lesson 09: what its figures and its widget show, its exercise, and its runs with other parameters."""

import json
import math
from dataclasses import asdict

import lesson_runs
import numpy as np
import pandas as pd
import pytest

from bass_lab import evaluation
from bass_lab.evaluation import Evaluation, scores
from bass_lab.lessons import l09_exercises as exercises
from bass_lab.lessons import l09_figures
from bass_lab.measure import records

RECORD = records.SHIPPED / "quality_embedded_cpu"


def samples(finish, passed, logprob_sum, problem="a") -> pd.DataFrame:
    """Rows of one problem with ten tokens each; NaN: did not finish."""
    finish = np.array(finish, dtype=float)
    return pd.DataFrame(
        {
            "problem": problem,
            "row": range(len(finish)),
            "finish_seconds": finish,
            "finished": ~np.isnan(finish),
            "tokens": 10,
            "logprob_sum": logprob_sum,
            "passed": passed,
        }
    )


@pytest.fixture
def runs():
    regular = samples([4.0, 4.0, math.nan], [True, True, False], [-1, -2, -3])
    single = samples([1.0, 2.0, 3.0], [False, True, True], [-5, -1, -9])
    batched = samples([1.5, 1.0, 2.0], [True, False, True], [-4, -3, -1])
    return {
        name: Evaluation(frame, {"budget": None}, {})
        for name, frame in {"regular": regular, "single": single, "batched": batched}.items()
    }


# --- figures ---


def test_standing_tells_right_wrong_and_late_rows_and_the_most_confident_in_time(runs):
    rows = l09_figures.standing(runs["batched"].samples, "a", 1.5)
    assert list(rows.state) == ["right, in time", "wrong, in time", "too late"]
    assert list(rows.chosen) == [False, True, False]
    assert not l09_figures.standing(runs["batched"].samples, "a", 0.5).chosen.any()


def test_verdicts_are_the_scores_of_the_problem(runs):
    for budget in (0.5, 1.0, 1.5, 2.0, 3.0, 4.0):
        table = l09_figures.verdicts(runs, "a", budget)
        for method, run in runs.items():
            value = run.scores([budget]).set_index("metric").value
            assert table.First[method] == value["Pass@First"] and table.All[method] == value["Pass@All"]
            assert table.done[method] == (run.samples.finish_seconds <= budget).sum()


def test_finish_figure_has_a_bar_per_row_and_rows_of_single_take_turns(runs):
    figure = l09_figures.finish_figure(runs, "a", 2.0)
    bars = [trace for trace in figure.data if trace.type == "bar" and trace.base is not None]
    assert sum(len(trace.y) for trace in bars) == 3 * 3
    single = [
        (base, base + x) for trace in bars if trace.yaxis == "y2" for base, x in zip(trace.base, trace.x, strict=True)
    ]
    assert sorted(single) == [(0, 1), (1, 2), (2, 3)]
    stars = {trace.yaxis: list(trace.y) for trace in figure.data if trace.type == "scatter"}
    assert stars == {"y": [], "y2": [1], "y3": [2]}  # the most confident in time


def test_budget_figure_has_a_line_with_its_band_per_method_and_score(runs):
    curve = pd.concat(run.scores([1, 2, 4]).assign(method=method) for method, run in runs.items())
    figure = l09_figures.budget_figure(curve)
    lines = {(trace.name, trace.xaxis): trace for trace in figure.data if trace.name}
    assert len(lines) == 6 and len(figure.data) == 12
    assert list(lines["batched", "x"].y) == [0, 1, 1] and list(lines["batched", "x2"].y) == [0, 1, 1]
    assert list(lines["single", "x2"].y) == [0, 1, 1] and list(lines["regular", "x2"].y) == [0, 0, 1]
    styles = {(t.line.color, t.line.dash, t.marker.symbol) for t in lines.values()}
    assert len(styles) == 3 and len({dash for _, dash, _ in styles}) == 3


def test_difference_figure_shows_the_intervals(runs):
    gained = scores.difference(runs["batched"].samples, runs["regular"].samples, [2.0])
    gained = gained.assign(gain="speculation", over="regular")
    first, every = l09_figures.difference_figure(gained).data
    assert first.y[0] == every.y[0] == 1 and first.error_y.array[0] == 0


def test_moving_the_budget_redraws(runs):
    explorer = l09_figures.budget_explorer(runs, steps=5)
    problem, budget, figure, sentence, _ = explorer.children
    budget.value = budget.options[0][1]
    assert "✓" not in sentence.value
    early = [len(trace.y) for trace in figure.data]
    budget.value = budget.options[-1][1]
    assert sentence.value.count("✓") >= 3
    assert [len(trace.y) for trace in figure.data] != early
    assert figure.layout.shapes[0].x0 == budget.value and problem.value == "a"


# --- the record ---


def test_the_record_is_whole_and_scores_as_the_lesson_says():
    record = evaluation.load(RECORD)
    assert list(record) == list(evaluation.METHODS)
    tasks = [problem.task_id for problem in evaluation.load_problems()]
    for run in record.values():
        assert list(run.samples.problem.unique()) == tasks and len(run.samples) == 8 * 164
        assert run.settings["grading"] == "sandbox" and run.samples.finished.all()
    higher = [
        scores.difference(record["batched"].samples, record[other].samples, [0.28, 0.4, 0.56], ks=())
        for other in ("regular", "single")
    ]
    assert all((found.value > 0).all() for found in higher)


# --- other parameters ---


def execute(tmp_path, **parameters):
    changed = {"output": str(tmp_path / "samples"), "max_new_tokens": 64, **parameters}
    return lesson_runs.execute("09_quality_within_a_time_budget", tmp_path, **changed)


@pytest.mark.slow
def test_the_lesson_takes_parameters_and_keeps_its_samples(tmp_path):
    execute(tmp_path, problem_count=2, batch_size=3, draft_length=3, temperature=0.2, seed=4)
    stored = evaluation.load(tmp_path / "samples")
    assert list(stored) == list(evaluation.METHODS)
    for run in stored.values():
        assert run.samples.problem.nunique() == 2 and len(run.samples) == 2 * 3
        assert (run.settings["seed"], run.settings["temperature"]) == (4, 0.2)
        assert run.samples.text.notna().all()
    assert [run.settings["draft_length"] for run in stored.values()] == [f"FixedLength(k={n})" for n in (0, 3, 3)]


@pytest.mark.slow
def test_other_problems_drop_in_by_a_path(tmp_path):
    """As HumanEval does, in its format, and a single one will do; its stop strings end the texts."""
    path = tmp_path / "problems.jsonl"
    fields = asdict(evaluation.load_problems()[0]) | {"composition": ""}
    path.write_text(json.dumps(fields | {"task_id": "Other/0"}) + "\n")
    execute(tmp_path, problems=str(path), trust_problems=True, problem_count=164, batch_size=2)
    stored = evaluation.load(tmp_path / "samples")["batched"]
    assert list(stored.samples.problem) == ["Other/0"] * 2 and "\ndef" in stored.settings["stop"]


# --- the exercise ---


def test_exercise_takes_the_solution_and_names_what_is_wrong(capsys):
    def solution(finish, confidence, passed, budget):
        in_time = [row for row, seconds in enumerate(finish) if seconds <= budget]
        return bool(in_time) and passed[max(in_time, key=lambda row: confidence[row])]

    lesson_runs.accepted_and_stub_is_not(exercises.check_pass_at_first, solution, capsys)
    wrong = [
        lambda finish, confidence, passed, budget: any(f <= budget and p for f, p in zip(finish, passed, strict=True)),
        lambda finish, confidence, passed, budget: passed[max(range(len(finish)), key=lambda row: confidence[row])],
        lambda finish, confidence, passed, budget: solution(finish, [-c for c in confidence], passed, budget),
        lambda finish, confidence, passed, budget: solution(finish, confidence, passed, budget - 0.01),
        lambda finish, confidence, passed, budget: solution(finish[::-1], confidence[::-1], passed[::-1], budget),
    ]
    for attempt in wrong:
        lesson_runs.refused(exercises.check_pass_at_first, attempt, "", capsys)
