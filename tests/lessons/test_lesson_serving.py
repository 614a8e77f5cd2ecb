"""Lesson 11: who is counted as answered, what its figures and its panel show, the server, the exercise, parameters."""

import json
import math
from http.client import HTTPConnection

import lesson_runs
import numpy as np
import pandas as pd
import pytest

import bass_core as bass
from bass_lab import load
from bass_lab.lessons import l11_demonstrations as demonstrations
from bass_lab.lessons import l11_exercises as exercises
from bass_lab.lessons import l11_figures as figures
from bass_lab.load import LoadRun
from bass_lab.load.result import STEPS
from bass_lab.measure.modelled_costs import measured_cpu
from bass_lab.study.recorded_acceptance import shipped
from bass_lab.texts.prompt_sets import prompt_set

NAN = math.nan


def run_of(requests, pieces=(), steps=()) -> LoadRun:
    """requests: (arrived, first, ended, reason)."""
    lines = [
        {
            "request": number, "arrived": arrived, "started": first, "first": first, "ended": ended, "tokens": 4,
            "max_new_tokens": 4, "deadline": NAN, "finish_reason": reason, "text": None,
        }
        for number, (arrived, first, ended, reason) in enumerate(requests)
    ]  # fmt: skip
    steps = pd.DataFrame([dict.fromkeys(STEPS, 0) | step for step in steps], columns=list(STEPS))
    return LoadRun(pd.DataFrame(lines), pd.DataFrame(pieces, columns=["request", "at", "tokens"]), steps)


@pytest.fixture
def run():
    """Three requests: one is done, one is late, one's client left."""
    requests = [(0.0, 0.5, 1.0, "length"), (0.5, 1.0, 3.0, "eos"), (1.0, NAN, 2.0, "budget")]
    pieces = [(0, 0.5, 1), (0, 0.7, 2), (0, 1.0, 1), (1, 1.0, 1), (1, 3.0, 3)]
    return run_of(requests, pieces)


@pytest.fixture(scope="module")
def asked():
    return load.Workload.draw(load.Poisson(4.0), 30, prompts="mini", max_new_tokens=range(8, 33), seed=3)


def serve(workload, policy):
    return load.simulate(workload, shipped("mini").past_eos(), measured_cpu(), draft_length=policy, max_batch_size=4)


# --- what became of requests ---


def test_only_whole_texts_in_time_count_as_answered(run):
    assert demonstrations.answered_in_time(run, 1.0) == pytest.approx(1 / 3)
    assert demonstrations.answered_in_time(run, 2.5) == pytest.approx(2 / 3)
    assert demonstrations.answered_in_time(run, 0.9) == 0


def test_planned_length_is_a_mean_over_rows_and_passes_over_prefills():
    steps = [{"kind": "prefill", "rows": 9, "k": 7}, {"kind": "decode", "rows": 1, "k": 5}]
    steps += [{"kind": "decode", "rows": 3, "k": 1}]
    assert demonstrations.planned(run_of([(0.0, 0.5, 1.0, "eos")], steps=steps)) == pytest.approx(2.0)
    assert demonstrations.planned(run_of([(0.0, 0.5, 1.0, "eos")])) == 0


def test_deadlines_change_nothing_but_what_the_server_is_told(asked):
    told, silent = demonstrations.with_deadline(asked, 1.5), demonstrations.with_deadline(asked, None)
    assert (told.requests.deadline == 1.5).all() and silent.requests.deadline.isna().all()
    pd.testing.assert_frame_equal(told.requests.drop(columns="deadline"), asked.requests.drop(columns="deadline"))


def test_long_prompt_comes_last_and_has_about_so_many_tokens(pair):
    mixed = demonstrations.late_long_prompt(pair, prompt_set("mini", 2), 300, new=20, arrives=0.5).requests
    assert mixed.arrived.tolist() == [0, 0, 0.5] and mixed.max_new_tokens.tolist() == [20, 20, 4]
    assert len(pair.tokenizer(mixed.prompt.iloc[-1])["input_ids"]) == pytest.approx(300, rel=0.05)


def test_a_shorter_deadline_answers_fewer(asked):
    finish = pd.DataFrame({
        "problem": ["a", "a", "b", "b"], "row": [0, 1, 0, 1], "finish_seconds": [0.1, 0.3, 0.2, 0.4],
        "finished": True, "tokens": 10, "logprob_sum": [-1.0, -2.0, -1.0, -2.0], "passed": [True, False, False, True],
    })  # fmt: skip
    rare = asked.at_rate(0.01)  # nobody waits
    found = demonstrations.within_deadlines(rare, {"way": finish}, [0.05, 0.15, 0.5]).set_index("deadline")
    share = float((rare.requests.number % 2 == 0).mean())  # of problem a, whose first row is the surest, and right
    assert found.answered.tolist() == pytest.approx([0, share, 1])
    assert found.pass_first.tolist() == pytest.approx([0, share, share])


# --- figures ---


def test_timeline_has_a_wait_and_a_text_per_request_and_marks_who_left(run):
    waits, writes, ticks, gone = figures.timeline_figure(run.requests, run.pieces, "title").data
    assert list(waits.base) == [0, 0.5, 1] and list(waits.x) == pytest.approx([0.5, 0.5, 1])
    assert list(writes.base) == [0.5, 1, 2] and list(writes.x) == pytest.approx([0.5, 2, 0])
    assert list(ticks.x) == [0.5, 0.7, 1.0, 1.0, 3.0]
    assert (list(gone.x), list(gone.y)) == ([2.0], [2])
    assert waits.marker.pattern.shape != writes.marker.pattern.shape  # told apart without colour


def test_load_figure_has_a_line_per_policy_and_measure(asked):
    policies = {"none": 0, "k = 3": 3}
    table = load.over_rates(lambda rate, policy: serve(asked.at_rate(rate), policy), policies, [1.0, 4.0])
    lines = {(line.name, line.xaxis): line for line in figures.load_figure(table, "load").data}
    assert len(lines) == 6
    found = table.set_index(["policy", "rate"])
    assert list(lines["k = 3", "x3"].y) == pytest.approx(found.over_none["k = 3"].tolist())
    assert list(lines["none", "x"].y) == pytest.approx(found.end_p99_ms["none"].tolist())
    assert len({line.line.dash for line in lines.values()}) == 2


def test_deadline_figure_shows_right_beside_answered():
    table = pd.DataFrame({"way": "none", "deadline": [0.2, 0.4], "pass_first": [0.1, 0.3], "answered": [0.2, 0.5]})
    right, any_answer = figures.deadline_figure(table).data
    assert list(right.y) == [0.1, 0.3] and list(any_answer.y) == [0.2, 0.5]
    assert right.line.dash != any_answer.line.dash


def test_gap_figure_leaves_out_the_long_prompt(run):
    figure = figures.gap_figure({"one": run, "another": run}, 0.6)
    assert [len(trace.y) for trace in figure.data] == [3, 3]  # of requests 0 and 1; the last is the long one
    assert list(figure.data[0].x) == [0.7, 1.0, 3.0] and list(figure.data[0].y) == pytest.approx([200, 300, 2000])
    assert {shape.x0 for shape in figure.layout.shapes} == {0.6}


def test_panel_serves_the_same_requests_anew(asked):
    panel = figures.load_panel(asked, serve, {"none": 0, "k = 5": 5}, rate=6.0, deadline=1.0, policy="none", most=20.0)
    rate, deadline, policy, sentence, figure, _ = panel.children
    before, text = np.array(figure.data[1].x), sentence.value
    policy.value = "k = 5"
    assert sentence.value != text and not np.array_equal(before, figure.data[1].x)
    expected = serve(demonstrations.with_deadline(asked.at_rate(6.0), 1.0), 5)
    assert f"<b>{demonstrations.answered_in_time(expected, 1.0):.0%}</b> of 30 requests" in sentence.value
    policy.value, rate.value, deadline.value = "none", 20.0, 0.05
    assert "<b>0%</b>" in sentence.value and len(figure.data[3].x)  # clients leave
    deadline.value = 1.25
    assert "within 1.25 s" in sentence.value


@pytest.mark.parametrize("start", [{"rate": 0.0}, {"rate": 21.0}, {"deadline": 0.01}, {"policy": "mine"}])
def test_panel_refuses_a_start_that_no_control_has(asked, start):
    good = {"rate": 6.0, "deadline": 1.0, "policy": "none", "most": 20.0}
    with pytest.raises(ValueError, match=r"0 < rate <= 20|policy must be"):
        figures.load_panel(asked, serve, {"none": 0}, **good | start)


# --- the server ---


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(demonstrations, "NEEDS", ("json", "no_such_package"))
    assert "no_such_package" in demonstrations.server_obstacle() and "json" not in demonstrations.server_obstacle()


def test_server_answers_and_has_ended_afterwards(pair):
    pytest.importorskip("uvicorn")
    prompt = prompt_set("mini", 1)[0]
    with demonstrations.server(pair, 2) as address:
        connection = HTTPConnection(address, timeout=60)
        body = json.dumps({"prompt": prompt, "max_tokens": 8, "temperature": 0})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        text = json.loads(connection.getresponse().read())["choices"][0]["text"]
        connection.close()
    assert text == bass.generate(pair, prompt, max_new_tokens=8).texts[0]
    with pytest.raises(OSError):
        HTTPConnection(address, timeout=5).connect()


# --- the exercise ---


def goodput(requests, first_s, between_s, origin=0, gaps=1, start=None):
    good = [
        each for each in requests
        if each[2] - each[origin] <= first_s and each[3] - each[2] <= between_s * (each[4] - gaps)
    ]  # fmt: skip
    start = requests[0][0] if start is None else start
    return len(good) / (max(each[3] for each in requests if each[3] == each[3]) - start)


def test_exercise_takes_the_solution_and_a_stub_is_not_solved(capsys):
    lesson_runs.accepted_and_stub_is_not(exercises.check_goodput, goodput, capsys)


def unanswered_count(requests, first_s, between_s):
    """As one counts who keeps what is not beyond a limit."""
    bad = sum(each[2] - each[0] > first_s or each[3] - each[2] > between_s * (each[4] - 1) for each in requests)
    return (len(requests) - bad) / (max(each[3] for each in requests if each[3] == each[3]) - requests[0][0])


@pytest.mark.parametrize(
    "attempt, message",
    [
        (lambda *case: goodput(*case, origin=1), "not from the arrival"),
        (lambda *case: goodput(*case, gaps=0), "n tokens have n - 1 gaps"),
        (lambda *case: goodput(*case, start=0.0), "first arrival"),
        (unanswered_count, "served badly or never"),
        (lambda requests, *limits: float(len(requests)), "expected"),
        (lambda requests, *limits: None, "expected a number"),
    ],
)
def test_exercise_names_what_is_wrong(attempt, message, capsys):
    lesson_runs.refused(exercises.check_goodput, attempt, message, capsys)


# --- other parameters ---


@pytest.mark.slow
def test_notebook_runs_with_other_parameters(tmp_path):
    changed = {"batch_size": 3, "request_count": 40, "shares": [0.5, 1.5], "served_count": 6, "draft_length": 2}
    changed |= {"max_new_tokens": 24, "deadline": 0.7, "prefill_chunk": 100, "calibration_seconds": 1.0, "seed": 5}
    executed = lesson_runs.execute("11_interactive_serving", tmp_path, temperature=0.8, **changed)
    text = "".join(str(output) for cell in executed.cells for output in cell.get("outputs", []))
    assert "6 of 6 rows are identical" in text and "7 of 7 rows are identical" in text
    assert text.count("Not solved yet.") == 1
