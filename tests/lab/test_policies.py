import numpy as np
import pytest
import torch
from trial_policies import CHEAP

import bass_core as bass
from bass_core.policies.protocol import RowsView
from bass_lab.policies import Objective
from bass_lab.policies.objective import first_finished, last_finished
from bass_lab.study.recorded_acceptance import AcceptanceTrace
from bass_lab.study.replay import Replay, decode, step_seconds


def rows(remaining=(99, 99)):
    every = np.arange(len(remaining))
    return RowsView(every, every * 0, every * 0 + 10, every * 0 + 5, np.array(remaining))


ROWS = rows()


def test_stop_before_the_last_draft_spares_a_pass():
    class Stop(bass.DraftLengthPolicy):
        def __init__(self, spares):
            self.spares = spares

        def plan(self, rows):
            return 8

        def keep_drafting(self, asked):
            return torch.full(asked.drafting.shape, 3 if self.spares else asked.slot < 3)

    drawn = Replay.draw(AcceptanceTrace.synthetic(alpha=0.8, length=400, sequences=8), 2, None, 0, 0)
    spared, asked = (decode(drawn, Stop(spares)) for spares in (True, False))
    assert [step.drafted.tolist() for step in spared] == [step.drafted.tolist() for step in asked]
    passes = np.array([step.passes for step in asked]) - np.array([step.passes for step in spared])
    assert passes.max() == 1 and passes.min() == 0
    assert step_seconds(spared, CHEAP).sum() < step_seconds(asked, CHEAP).sum()


# --- Objective ------------------------------------------------------------------------------------


def test_weights_of_objectives():
    mine, theirs = Objective(CHEAP), bass.Goodput(CHEAP)
    for policy in (mine, theirs):
        policy.start(ROWS)
        policy.plan(ROWS)
        policy.update(*torch.full((2, 2), policy.k))
    assert mine.goodputs(ROWS) == pytest.approx(theirs.goodputs(ROWS))
    view = rows([10, 40])
    assert first_finished(2.0)(view, 0.0) == pytest.approx([1, 1 / 16])
    assert last_finished(1.0)(view, 0.0) == pytest.approx([0.25, 1])


@pytest.mark.parametrize("wrong", [np.ones(3), np.array([1.0, -1.0]), np.zeros(2)], ids=str)
def test_wrong_weights_are_refused(wrong):
    with pytest.raises(ValueError, match="weights must give a number >= 0 per row"):
        Objective(CHEAP, weights=lambda rows, elapsed: wrong).plan(ROWS)


def test_elapsed_time_is_the_cost_models():
    policy = Objective(CHEAP)
    policy.start(ROWS)
    k = [policy.plan(ROWS) for _ in range(3)]
    assert policy.elapsed == pytest.approx(CHEAP.step(2, np.array(k), 0).sum())
