"""Policies that look at the draft's distributions: MarginalValue, AdaEDL and SVIP."""

import numpy as np
import pytest
import torch
from trial_policies import CHEAP, Line

import bass_core as bass
import bass_lab as lab
from bass_core.policies.draft_signals import Calibration
from bass_core.policies.protocol import HiddenDraft, RowsView, Signals, cut_lengths
from bass_lab.study.recorded_acceptance import AcceptanceTrace
from bass_lab.study.replay import Replay, decode, step_seconds
from bass_lab.study.simulator import simulate

ROWS = RowsView(np.arange(2), np.zeros(2, int), np.full(2, 10), np.full(2, 5), np.full(2, 99))


def signals(slot, maximum, entropy=0.5):
    maximum = torch.tensor(maximum)
    return Signals(slot, torch.full_like(maximum, entropy), maximum, torch.ones(len(maximum), dtype=torch.bool))


def test_calibration_learns_how_often_a_probability_comes_true():
    calibration = Calibration()
    assert calibration.error() == 1
    assert calibration(np.array([0.05, 0.55, 1.0])) == pytest.approx([0.05, 0.55, 0.95])  # the middles of bins
    for _ in range(500):
        said = np.full(4, 0.95)
        calibration.update(said, calibration(said), np.array([True, False, True, False]))
    assert calibration(np.array([0.93]))[0] == pytest.approx(0.5, abs=0.01)
    assert calibration.error() < 0.05
    calibration = Calibration()
    calibration.update(np.full(10, 0.95), np.full(10, 0.95), np.zeros(10, bool))
    assert calibration.error() == pytest.approx(0.95)


def test_drafts_after_a_refused_one_teach_nothing():
    """Of 3 + 3 drafts the first row's third is never decided."""
    drafted, accepted = torch.tensor([3, 3]), torch.tensor([1, 3])
    policy = bass.MarginalValue(CHEAP)
    policy.start(ROWS)
    policy.plan(ROWS)
    for slot in range(3):
        policy.keep_drafting(signals(slot, [0.9, 0.9]))
    policy.update(drafted, accepted)
    assert policy.calibration.reached.sum() == 5
    policy = bass.RaggedBudget(CHEAP)
    policy.start(ROWS)
    policy.plan(ROWS)
    policy.hidden = HiddenDraft(drafted.numpy(), np.full((2, 3), 0.9), np.full((2, 3), 0.9))
    for row in (0, 1) * 3:
        policy.hidden.submit(row)
    policy.update(drafted, accepted)
    assert policy.count == 5


def test_marginal_value_draws_while_a_slot_is_worth_its_time():
    policy = bass.MarginalValue(CHEAP, trusted=1.0)
    policy.start(ROWS)
    assert policy.plan(ROWS) == 16
    rate = policy.goodputs(ROWS)[policy.k]
    assert policy.price[:16] == pytest.approx(np.full(16, rate * 0.15), rel=0.02)
    assert policy.verify_price == pytest.approx(np.full(16, rate * 0.05), rel=0.02)
    # the goodput is 3.9 tokens in the time of a regular step: a slot has to bring 0.58 tokens, its verification 0.19
    assert policy.price[0] == pytest.approx(0.58, abs=0.01) and policy.verify_price[0] == pytest.approx(0.19, abs=0.01)
    policy.calibration = lambda maximum: maximum
    assert policy.keep_drafting(signals(0, [0.9, 0.9])).tolist() == [16, 16]  # slot 2: 2 · 0.9² = 1.62
    assert policy.keep_drafting(signals(1, [0.4, 0.4])).tolist() == [2, 2]  # 2 · 0.36 are drawn; slot 3: 2 · 0.14
    assert policy.keep_drafting(signals(2, [0.1, 0.1])).tolist() == [2, 2]  # 2 · 0.04 would not even be verified


def test_marginal_value_is_goodput_until_its_calibration_is_trusted():
    mine, theirs = bass.MarginalValue(CHEAP), bass.Goodput(CHEAP)
    for policy in (mine, theirs):
        policy.start(ROWS)
    assert mine.plan(ROWS) == theirs.plan(ROWS)
    assert mine.keep_drafting(signals(0, [0.01, 0.01])).tolist() == [True, True]


@pytest.mark.parametrize("policy", [bass.MarginalValue, bass.RaggedBudget])
def test_signals_need_a_draft_model(policy):
    line = Line()
    line.draft_phases = None
    with pytest.raises(ValueError, match=f"{policy.__name__} needs a draft model"):
        policy(line)


def test_marginal_value_in_the_simulator():
    """It stops drafting where drafts are useless, and beats Algorithm 1 where acceptance varies."""
    line, useless = Line(0.1, 0.05), AcceptanceTrace.synthetic(alpha=0.01, length=256, sequences=16)
    policies = (0, bass.MarginalValue(line))
    regular, found = (simulate(useless, each, line, batch=4).seconds.mean() for each in policies)
    assert found <= regular / 0.98
    trace = AcceptanceTrace.synthetic(alpha=0.75, length=256, sequences=64, regimes=(0.2, 8), rollout=16)
    line = Line(0.05, 0.02)
    policies = (bass.MarginalValue(line), bass.BassHeuristic())
    mine, theirs = (simulate(trace, each, line, batch=8, repeats=8).seconds for each in policies)
    assert (mine < theirs).all()


def test_adaedl_and_svip_stop_rows_at_their_bounds():
    entropy = torch.tensor([0.0, 0.2, 0.6, 0.61, 0.8, 0.81, 3.0], dtype=torch.float64)
    asked = Signals(0, entropy, entropy, torch.ones(7, dtype=torch.bool))
    # 1 - sqrt(0.2 H) >= 0.6 up to H = 0.8; sqrt(0.15 H) <= 0.3 up to H = 0.6
    assert lab.AdaEDL(threshold=0.6).keep_drafting(asked).tolist() == [True] * 5 + [False] * 2
    assert lab.SVIP(bound=0.3).keep_drafting(asked).tolist() == [True] * 3 + [False] * 4


def test_adaedl_moves_its_bar_towards_the_wanted_rate():
    for accepted, moves_up in ((0, True), (5, False)):
        policy = lab.AdaEDL()
        for _ in range(20):
            policy.update(torch.tensor([5]), torch.tensor([accepted]))
        assert (policy.bar > policy.threshold) == moves_up
    before = policy.bar
    policy.update(torch.tensor([0]), torch.tensor([0]))
    assert policy.bar == before


def test_answers_within_a_step_never_lengthen_a_draft():
    lengths = np.array([4, 4, 2])
    assert cut_lengths(lengths, torch.tensor([True, False, True]), 1).tolist() == [4, 1, 2]
    assert cut_lengths(lengths, torch.tensor([9, 2, 0]), 1).tolist() == [4, 2, 1]
    assert cut_lengths(np.array([1, 4]), torch.tensor([True, True]), 2).tolist() == [1, 4]


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
