import numpy as np
import pytest
import torch
from trial_policies import CHEAP, Line

import bass_core as bass
import bass_lab as lab
from bass_core.policies.protocol import HiddenDraft, RowsView, Signals
from bass_lab.policies import Objective, RaggedBudget
from bass_lab.policies.objective import first_finished, last_finished
from bass_lab.study.recorded_acceptance import AcceptanceTrace
from bass_lab.study.replay import Replay, decode, step_seconds


def rows(remaining=(99, 99)):
    every = np.arange(len(remaining))
    return RowsView(every, every * 0, every * 0 + 10, every * 0 + 5, np.array(remaining))


ROWS = rows()


def test_drafts_after_a_refused_one_teach_nothing():
    drafted, accepted = torch.tensor([3, 3]), torch.tensor([1, 3])
    policy = RaggedBudget(CHEAP)
    policy.start(ROWS)
    policy.plan(ROWS)
    policy.hidden = HiddenDraft(drafted.numpy(), np.full((2, 3), 0.9), np.full((2, 3), 0.9))
    for row in (0, 1) * 3:
        policy.hidden.submit(row)
    policy.update(drafted, accepted)
    assert policy.count == 5


def test_ragged_budget_needs_a_draft_model():
    line = Line()
    line.draft_phases = None
    with pytest.raises(ValueError, match="RaggedBudget needs a draft model"):
        RaggedBudget(line)


def test_svip_stops_rows_at_its_bound():
    entropy = torch.tensor([0.0, 0.2, 0.6, 0.61, 0.8, 0.81, 3.0], dtype=torch.float64)
    asked = Signals(0, entropy, entropy, torch.ones(7, dtype=torch.bool))
    # sqrt(0.15 H) <= 0.3 up to H = 0.6
    assert lab.SVIP(bound=0.3).keep_drafting(asked).tolist() == [True] * 3 + [False] * 4


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


# --- RaggedBudget -----------------------------------------------------------------------------------


def chosen(policy, maxima, chances=None):
    policy.start(rows([99] * len(maxima)))
    assert policy.plan(rows([99] * len(maxima))) > 0
    maxima = np.array(maxima)
    hidden = HiddenDraft(
        np.full(len(maxima), maxima.shape[1]), maxima, maxima if chances is None else np.array(chances)
    )
    policy.choose(hidden)
    return hidden.submitted.tolist()


def test_likeliest_drafts_of_the_batch_are_submitted():
    policy = RaggedBudget(Line(draft=0.01, verify=0.3), limit=4)
    # falling scores: 0.99, 0.98, 0.97, 0.95, 0.9 …; each costs 0.1 of three rows' regular step, ρ is near 3
    assert chosen(policy, [[0.99, 0.99, 0.98, 0.97], [0.9, 0.2, 0.9, 0.9], [0.1, 0.9, 0.9, 0.9]]) == [4, 1, 0]


def test_unlikely_token_ends_its_row():
    policy = RaggedBudget(Line(draft=0.01, verify=0.3), limit=4)
    maxima = [[0.9, 0.99], [0.9, 0.99]]
    assert chosen(policy, maxima, chances=[[0.9, 0.99], [0.05, 0.99]]) == [2, 1]


def test_probabilities_are_raised_to_a_fitted_power():
    policy = RaggedBudget(CHEAP)
    policy.start(rows([99] * 4))
    for _ in range(200):  # probability 0.5, always accepted
        policy.plan(rows([99] * 4))
        policy.hidden = HiddenDraft(np.full(4, 3), np.full((4, 3), 0.5), np.full((4, 3), 0.5))
        for row in (0, 1, 2, 3) * 3:
            policy.hidden.submit(row)
        policy.update(torch.full((4,), 3), torch.full((4,), 3))
    assert 0.5 ** policy._power() == pytest.approx(1, abs=0.05)


def test_drafts_without_submission_are_refused_ones():
    policy = RaggedBudget(CHEAP)
    policy.start(ROWS)
    policy.plan(ROWS)
    before = policy.alphas().copy()
    policy.choose(HiddenDraft(np.array([3, 0]), np.full((2, 3), 0.001), np.full((2, 3), 0.001)))
    policy.update(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    assert policy.alphas()[0] < before[0]
    assert policy.alphas()[1] <= before[1]  # counts of the first row's drafts


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
