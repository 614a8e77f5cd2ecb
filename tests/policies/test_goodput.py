from dataclasses import replace

import numpy as np
import pytest
import torch
from trial_policies import CHEAP, Line, library_policies

import bass_core as bass
from bass_core.policies import goodput
from bass_core.policies.protocol import RowsView, expected_tokens, planned_lengths
from bass_lab.checks.tabular import tabular
from bass_lab.measure.modelled_costs import measured_cpu
from bass_lab.study.recorded_acceptance import AcceptanceTrace
from bass_lab.study.replay import Replay, decode
from bass_lab.study.simulator import simulate

DEAR = Line(0.3, 0.2)


def rows(remaining=(99, 99), steps=0, first=0):
    n = len(remaining)
    return RowsView(np.arange(first, first + n), np.full(n, steps), np.full(n, 10), np.full(n, 5), np.array(remaining))


def taught(policy, accepted, of, steps=50):
    """Return the policy after steps with the given accepted lengths, of `of` drafts each."""
    policy.start(rows([999] * len(accepted)))
    for _ in range(steps):
        policy.plan(rows([999] * len(accepted)))
        policy.wanted = np.full(len(accepted), of)
        policy.update(torch.full((len(accepted),), of), torch.tensor(accepted))
    return policy


def decided(policy, rooms, accept, steps, first=0):
    """Return the planned lengths [steps, B] if all drafts are accepted (1) or rejected (0). first: number of the first
    row."""
    planned = []
    for step in range(steps):
        view = rows(rooms, steps=step, first=first)
        k, _ = planned_lengths(policy.plan(view), view)
        policy.update(torch.from_numpy(k.copy()), torch.from_numpy(k * accept))
        planned.append(k)
    return np.array(planned)


def started(batch=2, **options):
    policy = bass.Goodput(DEAR, **options)
    policy.start(rows([9999] * batch))
    return policy


def after(steps, ids=(0, 1, 2)):
    """Return α of rows after steps of (accepted, rejected) each."""
    alphas = goodput.RowAlphas()
    alphas.follow(np.array(ids))
    for kept, lost in steps:
        alphas.update(np.array(kept), np.array(lost))
    return alphas


def test_alpha_is_the_share_of_accepted_drafts():
    assert after([([4, 4, 4], [1, 1, 1])] * 400)() == pytest.approx([0.8] * 3, abs=0.01)
    assert after([])() == pytest.approx([goodput.PRIOR[0] / sum(goodput.PRIOR)] * 3)


def test_extreme_rows_hardly_change_other_rows():
    repeats, *essays = after([([16, 0, 0], [0, 1, 1])] * 60)()
    assert repeats > 0.97 and max(essays) < 0.4


def test_rows_keep_their_counts_when_others_end_move_or_join():
    alphas = after([([3, 1, 0], [0, 1, 1])] * 20)
    (first, _, last), nothing = alphas.counts.T.tolist(), [0, 0]
    alphas.follow(np.array([2, 9, 0]))
    assert alphas.counts.T.tolist() == [last, nothing, first]


def test_rows_begin_with_the_alpha_of_earlier_rows():
    alphas = after([([3, 0, 0], [0, 1, 1])] * 20)
    shown = alphas.counts[0].sum() / alphas.counts.sum()
    alphas.follow(np.array([3]))
    assert alphas().item() == pytest.approx(shown, abs=0.05) and alphas.former.sum() == pytest.approx(goodput.FORMER)
    alphas.follow(np.array([4]))  # the last row ended in the first step
    assert alphas().item() == pytest.approx(shown, abs=0.05)


def test_counts_of_ended_rows_fade_while_nothing_is_drafted():
    alphas = after([([0, 0, 0], [1, 1, 1])] * 20)
    alphas.follow(np.array([3]))
    assert alphas().item() < 0.1
    for _ in range(200):
        alphas.fade()
    assert alphas().item() == pytest.approx(after([], ids=[3])().item(), abs=0.01)


def test_goodput_has_the_most_expected_tokens_per_second():
    policy = taught(bass.Goodput(CHEAP), [5, 5, 2, 1], of=5)
    tokens, k = expected_tokens(policy.alphas(), 16, goodput.SPREAD), np.arange(17)
    expected = policy.weigh(rows([99] * 4), tokens) @ tokens / CHEAP.step(4, k, 0)
    assert policy.goodputs(rows([99] * 4)) == pytest.approx(expected)
    assert policy.plan(rows([99] * 4)) == expected.argmax()


def test_goodput_counts_no_token_beyond_a_rows_end():
    policy = taught(bass.Goodput(CHEAP, limit=2), [2, 2], of=2)
    policy.k = 1
    found = policy.goodputs(rows([7, 1]))
    longer, ending = expected_tokens(policy.alphas(), 2, goodput.SPREAD)[0], np.ones(3)  # two more drafts, and none
    weights = np.array([1, (1 / (7 / longer[1])) ** goodput.STRAGGLING])  # by the number of remaining steps
    tokens = weights @ [longer, ending] * 2 / weights.sum()
    assert found == pytest.approx(tokens / CHEAP.step(2, np.arange(3), 0), rel=1e-7)


def test_missing_drafts_count_as_refused():
    policy = bass.Goodput(CHEAP)
    policy.start(rows())
    for _ in range(50):
        policy.plan(rows([999, 999]))
        policy.wanted = np.array([4, 4])
        policy.update(torch.tensor([4, 0]), torch.tensor([4, 0]))
    found, missing = policy.alphas()
    assert found > 0.95 and missing < 0.3


@pytest.mark.parametrize(
    ("alpha", "batch", "line"),
    [(0.0, 1, Line(0.2, 0.3)), (0.3, 8, Line(0.2, 0.3)), (0.6, 32, CHEAP), (0.9, 1, CHEAP), (0.9, 32, Line(0.2, 0.3))],
)
def test_goodput_is_near_the_best_fixed_length(alpha, batch, line):
    trace = AcceptanceTrace.synthetic(alpha=alpha, length=384, sequences=64, seed=1)

    def seconds(policy):
        return simulate(trace, policy, line, batch=batch, repeats=2).seconds.mean()

    regular, found = seconds(0), seconds(bass.Goodput(line))
    assert found <= regular / 0.98
    assert found <= min(regular, *(seconds(k) for k in (1, 2, 3, 5, 8, 12, 16))) / 0.95


@pytest.mark.parametrize(("probe", "zeros"), [(32, [32, 64, 128]), (1, [1, 2, 4, 8, 16, 32, 64, 128])])
def test_probes_get_rarer(probe, zeros):
    planned = decided(started(probe=probe), [9999] * 2, accept=0, steps=300)
    drafting = np.flatnonzero(planned.any(1))
    first = int((~planned.any(1)).argmax())
    probes = drafting[drafting > first]
    assert first <= 3 and (np.diff([first - 1, *probes]) - 1).tolist() == zeros


@pytest.mark.parametrize("shrunk", [26, 29, 31, 32])
def test_shrinking_batch_delays_no_probe(shrunk):
    first = int((~decided(started(), [9999] * 2, accept=0, steps=10).any(1)).argmax())
    policy = started()
    decided(policy, [9999] * 2, accept=0, steps=first + shrunk)
    assert np.flatnonzero(decided(policy, [9999], accept=0, steps=40).any(1)).tolist()[:1] == [32 - shrunk]


def test_probe_drafts_one_token_in_one_row_of_four():
    for batch, probed in ((1, 1), (4, 1), (5, 2), (16, 4)):
        last = decided(started(batch), [9999] * batch, accept=0, steps=50)
        (probe,) = [line for line in last[5:] if line.any()]
        assert probe.tolist() == [1] * probed + [0] * (batch - probed)


@pytest.mark.parametrize("remaining", [31, 32])
def test_probe_needs_enough_tokens_to_write(remaining):
    policy = started()
    assert not decided(policy, [9999] * 2, accept=0, steps=33)[5:].any()
    assert decided(policy, [remaining] * 2, accept=0, steps=3).any() == (remaining >= 32)


def test_accepted_probe_begins_drafting_again():
    policy = started(8)
    decided(policy, [9999] * 8, accept=0, steps=150)
    assert policy.alphas().max() < 0.3
    decided(policy, [9999] * 8, accept=1, steps=150)
    assert policy.alphas().min() > 0.8


def test_goodput_begins_with_the_acceptance_of_the_calibration():
    known = measured_cpu()
    views = rows([99])
    first = {}
    for seen in (None, (0, 50), (50, 0), (5000, 0), (2, 0)):
        policy = bass.Goodput(replace(known, measured={"acceptance": seen}))
        policy.start(views)
        first[seen] = policy.plan(views), policy.alphas.former.tolist()
    assert first[(0, 50)] == (0, [0, goodput.FORMER])  # nothing is tried before a probe is due
    assert first[(50, 0)] == first[(5000, 0)] and first[(50, 0)][1] == [goodput.FORMER, 0]
    assert first[(50, 0)][0] > first[None][0] > 0
    assert first[(2, 0)][1] == [2, 0]


def test_session_tries_a_useless_draft_once_per_decode():
    policy = bass.Goodput(Line(0.2, 0.1))
    policy.start(rows([99]))
    assert decided(policy, [99], accept=0, steps=30).any(1).sum() >= 2
    for number in (1, 2):  # rows arrive sequentially
        policy.start(rows([99], first=number))
        assert decided(policy, [99], accept=0, steps=30, first=number)[:, 0].tolist() == [1] + 29 * [0]
    policy.start(rows([99], first=3))
    assert decided(policy, [99], accept=1, steps=4, first=3)[-1, 0] > 1  # accepted drafts restart drafting


def test_new_decode_starts_afresh_and_joining_rows_do_not():
    policy = taught(bass.Goodput(DEAR), [0, 0], of=2, steps=10)
    fresh = bass.Goodput(DEAR).plan(rows())
    policy.start(rows(steps=3))
    assert policy.plan(rows()) == 0 != fresh
    policy.start(rows())
    assert policy.plan(rows()) == fresh


def joined(policy, requests, new=40):
    planned, left, ids = [], np.array([new, new // 2]), np.array([0, 1])
    policy.start(RowsView(ids, ids * 0, ids + 10, ids * 0, left))
    while ids.max() < requests:
        view = RowsView(ids, new - left, ids + 10, new - left, left)
        k, _ = planned_lengths(policy.plan(view), view)
        policy.update(torch.from_numpy(k.copy()), torch.from_numpy(k * 0))
        planned.append(k.max())
        left = left - 1
        for place in np.flatnonzero(left < 2):
            ids, left = ids.copy(), left.copy()
            ids[place], left[place] = ids.max() + 1, new
            policy.start(RowsView(ids, np.where(ids == ids.max(), 0, new - left), ids + 10, new - left, left))
    return np.array(planned)


def test_rows_that_take_the_slots_of_others_are_new():
    policy = bass.Goodput(DEAR)
    joined(policy, requests=9)
    assert policy.predict_next() == 0
    ids = policy.alphas.ids + 20
    view = RowsView(ids, np.array([3, 0]), ids + 10, ids * 0, ids * 0 + 40)
    policy.start(view)
    policy.plan(view)
    assert policy.alphas.ids.tolist() == ids.tolist()


def test_probes_continue_with_short_rows():
    planned = joined(bass.Goodput(DEAR), requests=60)
    probes = np.flatnonzero(planned == 1)
    assert len(planned) > 1000 and 4 < len(probes) < 20 and probes[-1] > 500


@pytest.mark.parametrize("policy", library_policies(limit=3))
def test_policies_of_the_exactness_tests_change_their_lengths(policy):
    pair, drafted = bass.ModelPair(tabular(3, seed=1), tabular(3, seed=2)), set()
    options = {"max_new_tokens": 12, "temperature": 1.0, "eos_token_id": (), "attention": "pad"}
    for seed in range(8):
        length = library_policies(limit=3)[policy]()
        out = bass.generate(pair, [torch.tensor([0, 1])], draft_length=length, seed=seed, **options)
        steps = out.trace.steps[out.trace.steps.kind == "decode"]
        drafted |= set(steps.drafted[12 - (steps.kv_length - 2) > 3])
        if len(drafted) >= 2:
            return
    pytest.fail(f"always {drafted}")


@pytest.mark.parametrize("policy", library_policies(limit=8))
def test_same_history_gives_the_same_lengths(policy):
    trace = AcceptanceTrace.synthetic(alpha=0.7, length=60, sequences=4, regimes=(0.2, 5))
    drawn = Replay.draw(trace, 4, None, 0, 0)
    runs = [[step.drafted.tolist() for step in decode(drawn, library_policies(8)[policy]())] for _ in range(2)]
    assert runs[0] == runs[1]
