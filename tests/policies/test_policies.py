"""The policies that adapt: each rule against cases worked by hand, and what each is for against the simulator."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import ragged_prompts, tiny_model
from trial_policies import CHEAP, Line, library_policies

import bass_core as bass
import bass_lab as lab
from bass_core.draft_length import HiddenDraft, RowsView, Signals, cut_lengths, expected_tokens, planned_lengths
from bass_core.models import fingerprints
from bass_core.policies import costs, goodput, policy_for
from bass_core.policies.costs import CostModel
from bass_core.policies.draft_signals import Calibration
from bass_core.policies.goodput import deadlines, first_finished, last_finished
from bass_lab.checks.tabular import tabular
from bass_lab.measure.modelled_costs import measured_cpu, modelled_costs
from bass_lab.measure.roofline import DRAFT_310M, H100, TARGET_8B, Roofline
from bass_lab.study.recorded_acceptance import AcceptanceTrace
from bass_lab.study.replay import Replay, decode, step_seconds
from bass_lab.study.simulator import simulate


def rows(remaining=(99, 99), steps=0, first=0):
    n = len(remaining)
    return RowsView(np.arange(first, first + n), np.full(n, steps), np.full(n, 10), np.full(n, 5), np.array(remaining))


def taught(policy, accepted, of, steps=50):
    """The policy after steps in which the rows accepted these numbers of `of` drafts, whatever it had planned."""
    policy.start(rows([999] * len(accepted)))
    for _ in range(steps):
        policy.plan(rows([999] * len(accepted)))
        if isinstance(policy, bass.Goodput):
            policy.wanted = np.full(len(accepted), of)
        policy.update(torch.full((len(accepted),), of), torch.tensor(accepted))
    return policy


# --- Goodput ---


def test_goodput_takes_the_length_of_most_expected_tokens_per_second():
    policy = taught(bass.Goodput(CHEAP), [5, 5, 2, 1], of=5)
    tokens, k = expected_tokens(policy.alphas(), 16, goodput.SPREAD), np.arange(17)
    expected = policy.weigh(rows([99] * 4), tokens) @ tokens / CHEAP.step(4, k, 0)
    assert policy.goodputs(rows([99] * 4)) == pytest.approx(expected)
    assert policy.plan(rows([99] * 4)) == expected.argmax()


def test_policies_on_the_same_costs_look_them_up_together(monkeypatch):
    cost = modelled_costs(Roofline(TARGET_8B, H100), Roofline(DRAFT_310M, H100))
    looked, step = [], CostModel.step
    monkeypatch.setattr(CostModel, "step", lambda self, *point: looked.append(1) or step(self, *point))
    for policy in (bass.Goodput(cost), bass.Goodput(cost), deepcopy(bass.Goodput(cost))):
        policy.plan(rows())
    assert len(looked) == 1


def test_goodput_counts_no_token_beyond_a_rows_end():
    policy = taught(bass.Goodput(CHEAP, limit=2), [2, 2], of=2)
    policy.k = 1
    found = policy.goodputs(rows([7, 1]))
    longer, ending = expected_tokens(policy.alphas(), 2, goodput.SPREAD)[0], np.ones(3)  # two more drafts, and none
    weights = np.array([1, (1 / (7 / longer[1])) ** goodput.STRAGGLING])  # by the steps that they still need
    tokens = weights @ [longer, ending] * 2 / weights.sum()
    assert found == pytest.approx(tokens / CHEAP.step(2, np.arange(3), 0), rel=1e-7)


def decided(policy, rooms, accept, steps, first=0):
    """What it planned, [steps, B], when drafts are all accepted or all refused. first: number of the first row."""
    planned = []
    for step in range(steps):
        view = rows(rooms, steps=step, first=first)
        k, _ = planned_lengths(policy.plan(view), view)
        policy.update(torch.from_numpy(k.copy()), torch.from_numpy(k * accept))
        planned.append(k)
    return np.array(planned)


@pytest.mark.parametrize(
    ("probe", "zeros"), [(32, [32, 64, 128]), (5, [5, 10, 20, 40, 80]), (1, [1, 2, 4, 8, 16, 32, 64, 128])]
)
def test_goodput_falls_back_to_regular_decoding_and_probes(probe, zeros):
    policy = bass.Goodput(Line(0.3, 0.2), probe=probe)
    policy.start(rows([9999] * 2))
    planned = decided(policy, [9999] * 2, accept=0, steps=300)
    drafting = np.flatnonzero(planned.any(1))
    first = int((~planned.any(1)).argmax())
    probes = drafting[drafting > first]
    assert first <= 3 and (np.diff([first - 1, *probes]) - 1).tolist() == zeros


@pytest.mark.parametrize("shrunk", range(26, 33))
def test_a_batch_that_shrinks_puts_no_probe_off(shrunk):
    policy = bass.Goodput(Line(0.3, 0.2))
    policy.start(rows([9999] * 2))
    first = int((~decided(policy, [9999] * 2, accept=0, steps=10).any(1)).argmax())
    policy = bass.Goodput(Line(0.3, 0.2))
    policy.start(rows([9999] * 2))
    decided(policy, [9999] * 2, accept=0, steps=first + shrunk)
    assert np.flatnonzero(decided(policy, [9999], accept=0, steps=40).any(1)).tolist()[:1] == [32 - shrunk]


def test_a_probe_drafts_one_token_in_one_row_of_four():
    for batch, probed in ((1, 1), (4, 1), (5, 2), (16, 4)):
        policy = bass.Goodput(Line(0.3, 0.2))
        policy.start(rows([9999] * batch))
        last = decided(policy, [9999] * batch, accept=0, steps=50)
        (probe,) = [line for line in last[5:] if line.any()]
        assert probe.tolist() == [1] * probed + [0] * (batch - probed)


@pytest.mark.parametrize("remaining", [31, 32])
def test_a_probe_is_due_while_as_much_is_to_be_written(remaining):
    policy = bass.Goodput(Line(0.3, 0.2))
    policy.start(rows([9999] * 2))
    assert not decided(policy, [9999] * 2, accept=0, steps=33)[5:].any()
    assert decided(policy, [remaining] * 2, accept=0, steps=3).any() == (remaining >= 32)


@pytest.mark.parametrize("policy", [bass.Goodput, bass.MarginalValue, bass.RaggedBudget, bass.Objective])
def test_a_probe_that_is_accepted_makes_what_was_known_before_count_little(policy):
    """Hard steps, then easy ones: drafting begins again with the first probe."""
    policy = policy(Line(0.3, 0.2))
    policy.start(rows([9999] * 8))
    for step in range(300):
        view = rows([9999] * 8, steps=step)
        k, _ = planned_lengths(policy.plan(view), view)
        if policy.keep_drafting is not None and k.any():
            for slot in range(k.max()):
                answer = policy.keep_drafting(signals(slot, [0.8] * 8))
                k = cut_lengths(k, answer, slot)
        if policy.choose is not None and k.any():
            hidden = HiddenDraft(k, np.full((8, k.max()), 0.8), np.full((8, k.max()), 0.8))
            policy.choose(hidden)
            k = hidden.submitted
        if step == 150:
            assert policy.alphas().max() < 0.3
        policy.update(torch.from_numpy(k.copy()), torch.from_numpy(k * (step > 150)))
    assert policy.alphas().min() > 0.8


def test_rows_count_by_the_steps_that_they_still_need():
    """Of rows with as much to write, one accepts all and one little: the batch is done when the second is."""
    policy = taught(bass.Goodput(CHEAP), [6, 1], of=6)
    policy.k = 6
    sure, doubtful = policy.weigh(rows([900, 900]), expected_tokens(policy.alphas(), 16))
    assert doubtful > 1.9 and sure + doubtful == pytest.approx(2)
    # now it has little left to write
    sure, doubtful = policy.weigh(rows([900, 9]), expected_tokens(policy.alphas(), 16))
    assert sure > 1.9 and sure + doubtful == pytest.approx(2)


def test_goodput_drafts_as_the_rows_that_end_last_want_it():
    policy = taught(bass.Goodput(Line(0.3, 0.2)), [6, 6, 0, 0], of=6)
    best = [policy.goodputs(rows(rooms)).argmax() for rooms in ([100, 100, 900, 900], [900, 900, 100, 100])]
    assert best[0] == 0 and best[1] >= 8


def test_goodput_learns_that_a_lookup_finds_nothing():
    """One of two rows never drafts: what was wanted and not drafted is as good as refused."""
    policy = bass.Goodput(CHEAP)
    policy.start(rows())
    for _ in range(50):
        policy.plan(rows([999, 999]))
        policy.wanted = np.array([4, 4])
        policy.update(torch.tensor([4, 0]), torch.tensor([4, 0]))
    found, missing = policy.alphas()
    assert found > 0.95 and missing < 0.3


def test_goodput_begins_with_what_the_pairs_calibration_has_seen():
    known = measured_cpu()
    views = rows([99])
    first = {}
    for seen in (None, (0, 50), (50, 0), (5000, 0), (2, 0)):
        policy = bass.Goodput(replace(known, measured={"acceptance": seen}))
        policy.start(views)
        first[seen] = policy.plan(views), policy.alphas.former.tolist()
    assert first[(0, 50)] == (0, [0, goodput.FORMER])  # nothing is tried, until a probe is due
    assert first[(50, 0)] == first[(5000, 0)] and first[(50, 0)][1] == [goodput.FORMER, 0]
    assert first[(50, 0)][0] > first[None][0] > 0
    assert first[(2, 0)][1] == [2, 0]


def test_a_session_remembers_a_useless_draft_and_asks_it_once_per_decode():
    policy = bass.Goodput(Line(0.2, 0.1))
    policy.start(rows([99]))
    assert decided(policy, [99], accept=0, steps=30).any(1).sum() >= 2
    for number in (1, 2):  # rows come one after the other
        policy.start(rows([99], first=number))
        assert decided(policy, [99], accept=0, steps=30, first=number)[:, 0].tolist() == [1] + 29 * [0]
    policy.start(rows([99], first=3))
    assert decided(policy, [99], accept=1, steps=4, first=3)[-1, 0] > 1  # what is accepted is asked for again


def test_a_new_decode_starts_afresh_and_joining_rows_do_not():
    policy = taught(bass.Goodput(Line(0.3, 0.2)), [0, 0], of=2, steps=10)
    fresh = bass.Goodput(Line(0.3, 0.2)).plan(rows())
    policy.start(rows(steps=3))
    assert policy.plan(rows()) == 0 != fresh
    policy.start(rows())
    assert policy.plan(rows()) == fresh


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("line", [CHEAP, Line(0.2, 0.3)], ids=["cheap", "verification dear"])
def test_goodput_is_near_the_best_fixed_length_and_never_below_regular_decoding(alpha, batch, line):
    trace = AcceptanceTrace.synthetic(alpha=alpha, length=384, sequences=64, seed=1)

    def seconds(policy):
        return simulate(trace, policy, line, batch=batch, repeats=8).seconds.mean()

    regular, found = seconds(0), seconds(bass.Goodput(line))
    assert found <= regular / 0.98
    assert found <= min(regular, *(seconds(k) for k in (1, 2, 3, 5, 8, 12, 16))) / 0.95


def joined(policy, requests, accept, new=40):
    """What was planned while `requests` rows of `new` tokens came and went at two places, one every `new` / 2 steps."""
    planned, left, ids = [], np.array([new, new // 2]), np.array([0, 1])
    policy.start(RowsView(ids, ids * 0, ids + 10, ids * 0, left))
    while ids.max() < requests:
        view = RowsView(ids, new - left, ids + 10, new - left, left)
        k, _ = planned_lengths(policy.plan(view), view)
        kept = k * accept
        policy.update(torch.from_numpy(k.copy()), torch.from_numpy(kept))
        planned.append(k.max())
        left = left - 1 - kept
        for place in np.flatnonzero(left < 2):
            ids, left = ids.copy(), left.copy()
            ids[place], left[place] = ids.max() + 1, new
            policy.start(RowsView(ids, np.where(ids == ids.max(), 0, new - left), ids + 10, new - left, left))
    return np.array(planned)


def test_where_rows_come_and_go_each_that_comes_is_looked_at():
    """Places stay full, and their number says nothing of who lives there."""
    policy = bass.Goodput(Line(0.3, 0.2))
    joined(policy, requests=9, accept=0)
    assert policy.foretell() == 0
    ids = policy.alphas.ids + 20
    policy.start(RowsView(ids, np.array([3, 0]), ids + 10, ids * 0, ids * 0 + 40))
    policy.plan(RowsView(ids, np.array([3, 0]), ids + 10, ids * 0, ids * 0 + 40))
    assert policy.alphas.ids.tolist() == ids.tolist()


def test_where_rows_come_and_go_probes_go_on():
    """However short they are: what is left of those that live is not all that is left."""
    planned = joined(bass.Goodput(Line(0.3, 0.2)), requests=60, accept=0)
    probes = np.flatnonzero(planned == 1)
    assert len(planned) > 1000 and len(probes) > 4 and probes[-1] > 500
    assert len(probes) < 20


# --- what generate takes ---


def test_the_default_is_goodput_where_the_pairs_costs_are_known(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pair = bass.ModelPair(tiny_model(), tiny_model(noise=0.1))
    options = {"max_new_tokens": 8, "eos_token_id": ()}
    assert policy_for(pair, None) == bass.FixedLength(5)
    assert bass.generate(pair, ragged_prompts(4), **options).trace.meta["policy"] == "FixedLength(k=5)"
    cost = modelled_costs(Roofline(TARGET_8B, H100), Roofline(DRAFT_310M, H100))
    for role, mark in fingerprints(pair).items():
        cost.models[role]["fingerprint"] = mark
    object.__setattr__(cost, "device", costs.device_name(pair.device))
    costs.cache_folder().mkdir(parents=True)
    cost.save(costs.cache_folder() / cost.file_name)
    assert isinstance(policy_for(pair, None), bass.Goodput)
    assert bass.generate(pair, ragged_prompts(4), **options).trace.meta["policy"].startswith("Goodput(")


def test_the_embedded_pairs_default_is_goodput_on_every_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(costs, "device_name", lambda device: "Somebody's processor, 7 threads")
    assert isinstance(policy_for(bass.load_pair(), None), bass.Goodput)


# --- Objective ---


def test_equal_weights_and_equal_rows_are_goodput():
    mine, theirs = (taught(policy, [5, 5], of=5) for policy in (bass.Objective(CHEAP), bass.Goodput(CHEAP)))
    assert mine.goodputs(rows()) == pytest.approx(theirs.goodputs(rows()))


def test_leaders_stragglers_and_deadlines_are_weighted():
    view = rows([10, 40])
    assert first_finished(2.0)(view, 0.0) == pytest.approx([1, 1 / 16])
    assert last_finished(1.0)(view, 0.0) == pytest.approx([0.25, 1])
    assert deadlines({0: 3.0, 1: 3.0})(view, 1.0) == pytest.approx([0.25, 1])  # 5 and 20 tokens a second
    assert deadlines({0: 3.0, 1: 3.0})(view, 2.9) == pytest.approx([0.25, 1])
    assert deadlines({0: 3.0})(view, 1.0) == pytest.approx([1, 0.01])
    assert deadlines({})(view, 1.0) == pytest.approx([1, 1])
    assert deadlines({0: 3.0})(view, 5.0) == pytest.approx([1, 1])


def test_wrong_weights_are_refused():
    for wrong in (
        lambda rows, elapsed: np.ones(3),
        lambda rows, elapsed: np.array([1.0, -1.0]),
        lambda r, e: np.zeros(2),
    ):
        with pytest.raises(ValueError, match="weights must give a number >= 0 per row"):
            bass.Objective(CHEAP, weights=wrong).plan(rows())


def test_elapsed_time_is_the_cost_models():
    policy = bass.Objective(CHEAP)
    policy.start(rows())
    k = [policy.plan(rows()) for _ in range(3)]
    assert policy.elapsed == pytest.approx(CHEAP.step(2, np.array(k), 0).sum())


# --- MarginalValue ---


def signals(slot, maximum, entropy=0.5):
    maximum = torch.tensor(maximum)
    return Signals(slot, torch.full_like(maximum, entropy), maximum, torch.ones(len(maximum), dtype=torch.bool))


def test_calibration_takes_the_draft_at_its_word_and_then_learns():
    calibration = Calibration()
    assert calibration(np.array([0.05, 0.55, 1.0])) == pytest.approx([0.05, 0.55, 0.95])  # the middles of bins
    for _ in range(500):
        told = np.full(4, 0.95)
        calibration.update(told, calibration(told), np.array([True, False, True, False]))
    assert calibration(np.array([0.93]))[0] == pytest.approx(0.5, abs=0.01)
    assert calibration.error() < 0.05  # what it says now is what happens


def test_calibration_error_is_large_while_it_is_wrong():
    calibration = Calibration()
    assert calibration.error() == 1
    calibration.update(np.full(10, 0.95), np.full(10, 0.95), np.zeros(10, bool))
    assert calibration.error() == pytest.approx(0.95)


def test_marginal_value_draws_while_a_slot_is_worth_its_time():
    policy = bass.MarginalValue(CHEAP, trusted=1.0)
    policy.start(rows())
    assert policy.plan(rows()) == 16
    rate = policy.goodputs(rows())[policy.k]
    assert policy.price[:16] == pytest.approx(np.full(16, rate * 0.15), rel=0.02)
    assert policy.verify_price == pytest.approx(np.full(16, rate * 0.05), rel=0.02)
    # two sure rows: on; then one draft in ten: less than its verification
    assert policy.keep_drafting(signals(0, [0.99, 0.99])).tolist() == [16, 16]
    assert policy.keep_drafting(signals(1, [0.01, 0.01])).tolist() == [1, 1]


def test_marginal_value_draws_what_its_pass_has_paid_for_and_stops_there():
    policy = bass.MarginalValue(CHEAP, trusted=1.0)
    policy.start(rows())
    policy.plan(rows())
    # the goodput is 3.9 tokens in the time of a regular step: a slot has to bring 0.58 tokens, its verification 0.19
    assert policy.price[0] == pytest.approx(0.58, abs=0.01) and policy.verify_price[0] == pytest.approx(0.19, abs=0.01)
    policy.calibration = lambda maximum: maximum  # at its word
    assert policy.keep_drafting(signals(0, [0.9, 0.9])).tolist() == [16, 16]  # slot 2: 2 · 0.9² = 1.62
    assert policy.keep_drafting(signals(1, [0.4, 0.4])).tolist() == [2, 2]  # 2 · 0.36 are drawn; slot 3: 2 · 0.14
    assert policy.keep_drafting(signals(2, [0.1, 0.1])).tolist() == [2, 2]  # 2 · 0.04 would not even be verified


@pytest.mark.parametrize("policy", [bass.Goodput, bass.MarginalValue])
@pytest.mark.parametrize("batch", [1, 4])
def test_a_useless_draft_is_not_asked_for_ever(policy, batch):
    useless = AcceptanceTrace.synthetic(alpha=0.01, length=256, sequences=16)
    line = Line(0.1, 0.05)
    regular, found = (simulate(useless, each, line, batch=batch).seconds.mean() for each in (0, policy(line)))
    assert found <= regular / 0.98


def test_drafts_that_could_gain_little_are_never_tried():
    """Five drafts and their verification take as long as five tokens: nothing to gain, even if all are accepted."""
    policy = bass.Goodput(Line(0.75, 0.25))
    policy.start(rows([9999]))
    assert not decided(policy, [9999], accept=1, steps=300).any()


def test_marginal_value_is_goodput_until_its_calibration_is_trusted():
    mine, theirs = bass.MarginalValue(CHEAP), bass.Goodput(CHEAP)
    for policy in (mine, theirs):
        policy.start(rows())
    assert mine.plan(rows()) == theirs.plan(rows())
    assert mine.keep_drafting(signals(0, [0.01, 0.01])).tolist() == [True, True]


@pytest.mark.parametrize("policy", [bass.MarginalValue, bass.RaggedBudget])
def test_policies_that_look_at_distributions_need_a_draft_model(policy):
    line = Line()
    line.draft_phases = None
    with pytest.raises(ValueError, match=f"{policy.__name__} needs a draft model"):
        policy(line)


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_marginal_value_beats_algorithm_1_where_acceptance_varies(batch):
    trace = AcceptanceTrace.synthetic(alpha=0.75, length=256, sequences=64, regimes=(0.2, 8), rollout=16)
    cost = Line(0.05, 0.02)
    mine = simulate(trace, bass.MarginalValue(cost), cost, batch=batch, repeats=8).seconds
    theirs = simulate(trace, bass.BassHeuristic(), cost, batch=batch, repeats=8).seconds
    assert (mine < theirs).all()


# --- AdaEDL and SVIP ---


def test_adaedl_and_svip_stop_rows_at_their_bounds():
    entropy = torch.tensor([0.0, 0.2, 0.6, 0.61, 0.8, 0.81, 3.0], dtype=torch.float64)
    asked = Signals(0, entropy, entropy, torch.ones(7, dtype=torch.bool))
    # 1 - sqrt(0.2 H) >= 0.6 up to H = 0.8; sqrt(0.15 H) <= 0.3 up to H = 0.6
    assert lab.AdaEDL(threshold=0.6).keep_drafting(asked).tolist() == [True] * 5 + [False] * 2
    assert lab.SVIP(bound=0.3).keep_drafting(asked).tolist() == [True] * 3 + [False] * 4


def test_adaedl_moves_its_bar_towards_the_wanted_rate():
    for accepted, moves_up in ((0, True), (5, False)):
        policy = taught(lab.AdaEDL(), [accepted], of=5, steps=20)
        assert (policy.bar > policy.threshold) == moves_up
    before = policy.bar
    policy.update(torch.tensor([0]), torch.tensor([0]))
    assert policy.bar == before


# --- all of them ---


@pytest.mark.parametrize("limit", [2, 3])
@pytest.mark.parametrize("policy", library_policies(limit=3))
def test_the_policies_of_the_exactness_tests_do_change_their_lengths(policy, limit):
    pair, drafted = bass.ModelPair(tabular(3, seed=1), tabular(3, seed=2)), set()
    for seed in range(20):
        out = bass.generate(
            pair,
            [torch.tensor([0, 1])],
            max_new_tokens=12,
            draft_length=library_policies(limit)[policy](),
            temperature=1.0,
            eos_token_id=(),
            attention="pad",
            seed=seed,
        )
        steps = out.trace.steps[out.trace.steps.kind == "decode"]
        drafted |= set(steps.drafted[12 - (steps.kv_length - 2) > limit])
    assert len(drafted) >= 2


def test_answers_within_a_step_never_lengthen_a_draft():
    lengths = np.array([4, 4, 2])
    assert cut_lengths(lengths, torch.tensor([True, False, True]), 1).tolist() == [4, 1, 2]
    assert cut_lengths(lengths, torch.tensor([9, 2, 0]), 1).tolist() == [4, 2, 1]
    assert cut_lengths(np.array([1, 4]), torch.tensor([True, True]), 2).tolist() == [1, 4]


@pytest.mark.parametrize("policy", library_policies(limit=8))
def test_no_policy_waits_for_a_clock_or_draws_random_numbers(policy, monkeypatch):
    """The same history, the same lengths."""
    trace = AcceptanceTrace.synthetic(alpha=0.7, length=60, sequences=4, regimes=(0.2, 5))
    drawn = Replay.draw(trace, 4, None, 0, 0)
    runs = [[step.drafted.tolist() for step in decode(drawn, library_policies(8)[policy]())] for _ in range(2)]
    assert runs[0] == runs[1]


def test_a_stop_that_spares_the_next_pass_costs_less_in_simulation():
    class LastOne(bass.DraftLengthPolicy):
        def __init__(self, spares):
            self.spares = spares

        def plan(self, rows):
            return 8

        def keep_drafting(self, asked):
            if self.spares:
                return torch.full(asked.drafting.shape, 3)
            return torch.full(asked.drafting.shape, asked.slot < 3)

    drawn = Replay.draw(AcceptanceTrace.synthetic(alpha=0.8, length=400, sequences=8), 2, None, 0, 0)
    spared, asked = (decode(drawn, LastOne(spares)) for spares in (True, False))
    assert [step.drafted.tolist() for step in spared] == [step.drafted.tolist() for step in asked]
    passes = np.array([step.passes for step in asked]) - np.array([step.passes for step in spared])
    assert passes.max() == 1 and passes.min() == 0
    assert step_seconds(spared, CHEAP).sum() < step_seconds(asked, CHEAP).sum()
