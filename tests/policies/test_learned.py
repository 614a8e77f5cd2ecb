"""`Learned` keeps the best length of each task from one decode to the next."""

import numpy as np
import pytest
import torch
from trial_policies import CHEAP, Line

import bass_core as bass
from bass_core.policies.protocol import RowsView
from bass_lab.measure.modelled_costs import modelled_h100
from bass_lab.study.recorded_acceptance import AcceptanceTrace, shipped
from bass_lab.study.replay import Replay, decode, step_seconds


def synthetic(alpha, seed=0):
    return AcceptanceTrace.synthetic(alpha=alpha, length=400, sequences=8, seed=seed)


def test_best_length_of_each_task():
    favourites = {"sure": [], "doubtful": []}
    for seed in range(5):
        policy = bass.Learned(CHEAP)
        for task, trace in (("sure", synthetic(0.95)), ("doubtful", synthetic(0.2))):
            policy.task = task
            decode(Replay.draw(trace, 4, None, seed, 0), policy)
        for task, found in favourites.items():
            policy.task = task
            found.append(policy.experts[policy.weights().argmax()])
    assert np.median(favourites["sure"]) >= 8 and max(favourites["doubtful"]) <= 2
    assert policy.task == "doubtful" and set(policy.memories) == {"sure", "doubtful"}


@pytest.mark.parametrize(("before", "after", "batch"), [("mini", "library", 8), ("library", "mini", 32)])
def test_change_of_texts_is_learned_within_200_steps(before, after, batch):
    """Texts of the embedded pair on a modelled GPU."""
    cost, traces = modelled_h100(), {name: shipped(name).past_eos() for name in (before, after)}

    def seconds(policy, task, seed, repeat):
        steps = decode(Replay.draw(traces[task], batch, None, seed, repeat), policy)
        return step_seconds(steps, cost).sum(), len(steps)

    best = min(range(1, 13), key=lambda k: sum(seconds(bass.FixedLength(k), after, 99, n)[0] for n in range(8)))
    mine, fixed = 0.0, 0.0
    for seed in range(4):
        policy, repeat, steps = bass.Learned(cost), 0, 0
        for repeat in range(4):
            seconds(policy, before, seed, repeat)
        while steps < 200:
            repeat += 1
            steps += seconds(policy, after, seed, repeat)[1]
        for held_out in range(repeat + 1, repeat + 5):
            mine += seconds(policy, after, seed, held_out)[0]
            fixed += seconds(bass.FixedLength(best), after, seed, held_out)[0]
    assert mine < 1.05 * fixed


def test_drafting_begins_again_when_a_text_turns_easy():
    """Steps without drafts teach nothing, so old observations have to fade."""
    policy, view = bass.Learned(Line(0.45, 0.0)), RowsView(*np.array([[0], [1], [10], [5], [999]]))
    planned = []
    for step in range(600):
        k = np.array([policy.plan(view)])
        accepted = np.minimum(k, 99 if step > 300 else 0)
        policy.update(torch.from_numpy(k), torch.from_numpy(accepted))
        planned.append(k[0])
    assert np.mean(planned[200:300]) < 0.5 and np.mean(planned[-50:]) > 6


@pytest.mark.parametrize(
    "wrong", [{"lengths": ()}, {"lengths": (-1, 2)}, {"lengths": (40,)}, {"rate": 0}, {"decay": 1}]
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=r"must be|needs"):
        bass.Learned(CHEAP, **wrong)
