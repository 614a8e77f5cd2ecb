import numpy as np
import pytest
import torch
from trial_policies import CHEAP, Line

import bass_core as bass
import bass_lab as lab
from bass_core.policies.protocol import HiddenDraft, RowsView, Signals
from bass_lab.measure.modelled_costs import modelled_h100
from bass_lab.policies import Learned, MarginalValue, Objective, RaggedBudget
from bass_lab.policies.marginal_value import Calibration
from bass_lab.policies.objective import first_finished, last_finished
from bass_lab.study.recorded_acceptance import AcceptanceTrace, shipped
from bass_lab.study.replay import Replay, decode, step_seconds
from bass_lab.study.simulator import simulate


def rows(remaining=(99, 99)):
    every = np.arange(len(remaining))
    return RowsView(every, every * 0, every * 0 + 10, every * 0 + 5, np.array(remaining))


ROWS = rows()


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
    drafted, accepted = torch.tensor([3, 3]), torch.tensor([1, 3])
    policy = MarginalValue(CHEAP)
    policy.start(ROWS)
    policy.plan(ROWS)
    for slot in range(3):
        policy.keep_drafting(signals(slot, [0.9, 0.9]))
    policy.update(drafted, accepted)
    assert policy.calibration.reached.sum() == 5
    policy = RaggedBudget(CHEAP)
    policy.start(ROWS)
    policy.plan(ROWS)
    policy.hidden = HiddenDraft(drafted.numpy(), np.full((2, 3), 0.9), np.full((2, 3), 0.9))
    for row in (0, 1) * 3:
        policy.hidden.submit(row)
    policy.update(drafted, accepted)
    assert policy.count == 5


def test_marginal_value_draws_while_a_slot_is_worth_its_time():
    policy = MarginalValue(CHEAP, trusted=1.0)
    policy.start(ROWS)
    assert policy.plan(ROWS) == 16
    rate = policy.goodputs(ROWS)[policy.k]
    assert policy.price[:16] == pytest.approx(np.full(16, rate * 0.15), rel=0.02)
    assert policy.verify_price == pytest.approx(np.full(16, rate * 0.05), rel=0.02)
    # the goodput is 3.9 tokens per regular step: a slot has to gain 0.58 tokens, a verification 0.19
    assert policy.price[0] == pytest.approx(0.58, abs=0.01) and policy.verify_price[0] == pytest.approx(0.19, abs=0.01)
    policy.calibration = lambda maximum: maximum
    assert policy.keep_drafting(signals(0, [0.9, 0.9])).tolist() == [16, 16]  # slot 2: 2 · 0.9² = 1.62
    assert policy.keep_drafting(signals(1, [0.4, 0.4])).tolist() == [2, 2]  # 2 · 0.36 are drafted; slot 3: 2 · 0.14
    assert policy.keep_drafting(signals(2, [0.1, 0.1])).tolist() == [2, 2]  # 2 · 0.04 would not even be verified


def test_marginal_value_is_goodput_until_its_calibration_is_trusted():
    mine, theirs = MarginalValue(CHEAP), bass.Goodput(CHEAP)
    for policy in (mine, theirs):
        policy.start(ROWS)
    assert mine.plan(ROWS) == theirs.plan(ROWS)
    assert mine.keep_drafting(signals(0, [0.01, 0.01])).tolist() == [True, True]


@pytest.mark.parametrize("policy", [MarginalValue, RaggedBudget])
def test_signals_need_a_draft_model(policy):
    line = Line()
    line.draft_phases = None
    with pytest.raises(ValueError, match=f"{policy.__name__} needs a draft model"):
        policy(line)


def test_marginal_value_in_the_simulator():
    line, useless = Line(0.1, 0.05), AcceptanceTrace.synthetic(alpha=0.01, length=256, sequences=16)
    policies = (0, MarginalValue(line))
    regular, found = (simulate(useless, each, line, batch=4).seconds.mean() for each in policies)
    assert found <= regular / 0.98
    trace = AcceptanceTrace.synthetic(alpha=0.75, length=256, sequences=64, regimes=(0.2, 8), rollout=16)
    line = Line(0.05, 0.02)
    policies = (MarginalValue(line), bass.BassHeuristic())
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


# --- Learned ---------------------------------------------------------------------------------------


def synthetic(alpha, seed=0):
    return AcceptanceTrace.synthetic(alpha=alpha, length=400, sequences=8, seed=seed)


def test_best_length_of_each_task():
    favourites = {"sure": [], "doubtful": []}
    for seed in range(5):
        policy = Learned(CHEAP)
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
    cost, traces = modelled_h100(), {name: shipped(name).past_eos() for name in (before, after)}

    def seconds(policy, task, seed, repeat):
        steps = decode(Replay.draw(traces[task], batch, None, seed, repeat), policy)
        return step_seconds(steps, cost).sum(), len(steps)

    best = min(range(1, 13), key=lambda k: sum(seconds(bass.FixedLength(k), after, 99, n)[0] for n in range(8)))
    mine, fixed = 0.0, 0.0
    for seed in range(4):
        policy, repeat, steps = Learned(cost), 0, 0
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
    """Old observations must fade, because steps without drafts teach nothing."""
    policy, view = Learned(Line(0.45, 0.0)), RowsView(*np.array([[0], [1], [10], [5], [999]]))
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
        Learned(CHEAP, **wrong)
