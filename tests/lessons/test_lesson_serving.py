"""Lesson 11: answered requests, figures, the panel, and the server."""

import json
import math
from http.client import HTTPConnection

import numpy as np
import pandas as pd
import pytest
from replays import run_of

import bass_core as bass
from bass_lab import load
from bass_lab.lessons import l11_demonstrations as demonstrations
from bass_lab.lessons import l11_figures as figures
from bass_lab.measure.modelled_costs import measured_cpu
from bass_lab.study.recorded_acceptance import shipped
from bass_lab.texts.prompt_sets import prompt_set


@pytest.fixture
def run():
    reasons = ["length", "eos", "budget"]
    return run_of([1.0, 3.0, 2.0], first=[0.5, 1.0, math.nan], arrived=[0.0, 0.5, 1.0], tokens=4, reasons=reasons)


@pytest.fixture(scope="module")
def asked():
    return load.Workload.draw(load.Poisson(4.0), 30, prompts="mini", max_new_tokens=range(8, 33), seed=3)


def serve(workload, policy):
    return load.simulate(workload, shipped("mini").past_eos(), measured_cpu(), draft_length=policy, max_batch_size=4)


def test_only_complete_texts_in_time_count(run):
    assert demonstrations.answered_in_time(run, 1.0) == pytest.approx(1 / 3)
    assert demonstrations.answered_in_time(run, 2.5) == pytest.approx(2 / 3)
    assert demonstrations.answered_in_time(run, 0.9) == 0


def test_planned_length_is_a_mean_over_decoding_rows():
    steps = [
        (0, 0, kind, rows, k, 0, 0, 0) for kind, rows, k in (("prefill", 9, 7), ("decode", 1, 5), ("decode", 3, 1))
    ]
    assert demonstrations.planned(run_of([1.0], steps=steps)) == pytest.approx(2.0)
    assert demonstrations.planned(run_of([1.0])) == 0


def test_deadline_changes_only_the_deadline_column(asked):
    told, silent = demonstrations.with_deadline(asked, 1.5), demonstrations.with_deadline(asked, None)
    assert (told.requests.deadline == 1.5).all() and silent.requests.deadline.isna().all()
    pd.testing.assert_frame_equal(told.requests.drop(columns="deadline"), asked.requests.drop(columns="deadline"))


def test_long_prompt_comes_last(pair):
    mixed = demonstrations.late_long_prompt(pair, prompt_set("mini", 2), 300, new=20, arrives=0.5).requests
    assert mixed.arrived.tolist() == [0, 0, 0.5] and mixed.max_new_tokens.tolist() == [20, 20, 4]
    assert len(pair.tokenizer(mixed.prompt.iloc[-1])["input_ids"]) == pytest.approx(300, rel=0.05)


def test_a_shorter_deadline_answers_fewer(asked):
    finish = pd.DataFrame({
        "problem": ["a", "a", "b", "b"], "row": [0, 1, 0, 1], "finish_seconds": [0.1, 0.3, 0.2, 0.4],
        "finished": True, "tokens": 10, "logprob_sum": [-1.0, -2.0, -1.0, -2.0], "passed": [True, False, False, True],
    })  # fmt: skip
    rare = asked.at_rate(0.01)  # no request waits
    found = demonstrations.within_deadlines(rare, {"way": finish}, [0.05, 0.15, 0.5]).set_index("deadline")
    share = float((rare.requests.number % 2 == 0).mean())  # share of problem a, with the surest first row
    assert found.answered.tolist() == pytest.approx([0, share, 1])
    assert found.pass_first.tolist() == pytest.approx([0, share, share])


def test_panel_serves_the_same_requests_again(asked):
    panel = figures.load_panel(asked, serve, {"none": 0, "k = 5": 5}, rate=6.0, deadline=1.0, policy="none", most=20.0)
    rate, deadline, policy, sentence, figure, _ = panel.children
    before, text = np.array(figure.data[1].x), sentence.value
    policy.value = "k = 5"
    assert sentence.value != text and not np.array_equal(before, figure.data[1].x)
    expected = serve(demonstrations.with_deadline(asked.at_rate(6.0), 1.0), 5)
    assert f"<b>{demonstrations.answered_in_time(expected, 1.0):.0%}</b> of 30 requests" in sentence.value
    policy.value, rate.value, deadline.value = "none", 20.0, 0.05
    expected = serve(demonstrations.with_deadline(asked.at_rate(20.0), 0.05), 0)
    assert (share := demonstrations.answered_in_time(expected, 0.05)) < 0.5
    assert f"<b>{share:.0%}</b>" in sentence.value and len(figure.data[-1].x)  # clients leave
    deadline.value = 1.25
    assert "within 1.25 s" in sentence.value


def test_panel_refuses_values_outside_its_controls(asked):
    good = {"rate": 6.0, "deadline": 1.0, "policy": "none", "most": 20.0}
    for wrong in ({"rate": 0.0}, {"rate": 21.0}, {"deadline": 0.01}, {"policy": "mine"}):
        with pytest.raises(ValueError, match=r"0 < rate <= 20|policy must be"):
            figures.load_panel(asked, serve, {"none": 0}, **good | wrong)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(demonstrations, "NEEDS", ("json", "no_such_package"))
    assert "no_such_package" in demonstrations.server_obstacle() and "json" not in demonstrations.server_obstacle()


def test_server_answers_and_shuts_down(pair):
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
