"""Lesson 09: figures, the widget, the shipped record, and runs with other parameters."""

import json
import math
from dataclasses import asdict

import lesson_runs
import numpy as np
import pandas as pd
import pytest

from bass_lab import evaluation
from bass_lab.evaluation import Evaluation
from bass_lab.lessons import l09_figures


def samples(finish, passed, logprob_sum, problem="a") -> pd.DataFrame:
    """Return rows of one problem with ten tokens each; NaN: unfinished."""
    finish = np.array(finish, dtype=float)
    times = {"finish_seconds": finish, "finished": ~np.isnan(finish), "tokens": 10}
    grades = {"logprob_sum": logprob_sum, "passed": passed}
    return pd.DataFrame({"problem": problem, "row": range(len(finish))} | times | grades)


@pytest.fixture
def runs():
    regular = samples([4.0, 4.0, math.nan], [True, True, False], [-1, -2, -3])
    single = samples([1.0, 2.0, 3.0], [False, True, True], [-5, -1, -9])
    batched = samples([1.5, 1.0, 2.0], [True, False, True], [-4, -3, -1])
    return {
        name: Evaluation(frame, {"budget": None}, {})
        for name, frame in {"regular": regular, "single": single, "batched": batched}.items()
    }


def test_standing_of_right_wrong_and_late_rows(runs):
    rows = l09_figures.standing(runs["batched"].samples, "a", 1.5)
    assert list(rows.state) == ["right, in time", "wrong, in time", "too late"]
    assert list(rows.chosen) == [False, True, False]
    assert not l09_figures.standing(runs["batched"].samples, "a", 0.5).chosen.any()


def test_budget_slider_redraws(runs):
    explorer = l09_figures.budget_explorer(
        runs, {"done": lambda rows, budget: (rows.finish_seconds <= budget).any()}, 5
    )
    problem, budget, figure, sentence, _ = explorer.children
    budget.value = budget.options[0][1]
    assert "✓" not in sentence.value
    early = [len(trace.y) for trace in figure.data]
    budget.value = budget.options[-1][1]
    assert sentence.value.count("✓") == 3
    assert [len(trace.y) for trace in figure.data] != early
    assert figure.layout.shapes[0].x0 == budget.value and problem.value == "a"


def execute(tmp_path, **parameters):
    changed = {"output": str(tmp_path / "samples"), "max_new_tokens": 64, **parameters}
    return lesson_runs.execute("09_quality_within_a_time_budget", tmp_path, **changed)


@pytest.mark.slow
def test_other_problems_are_read_from_a_path(tmp_path):
    path = tmp_path / "problems.jsonl"
    fields = asdict(evaluation.load_problems()[0]) | {"composition": ""}
    path.write_text(json.dumps(fields | {"task_id": "Other/0"}) + "\n")
    execute(tmp_path, problems=str(path), trust_problems=True, problem_count=164, batch_size=2)
    stored = evaluation.load(tmp_path / "samples")["batched"]
    assert list(stored.samples.problem) == ["Other/0"] * 2 and "\ndef" in stored.settings["stop"]
