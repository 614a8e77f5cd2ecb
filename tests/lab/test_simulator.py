from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from replays import Linear, trace_of
from tiny import ragged_prompts
from trial_policies import Alternating, PerRow, StopWhenUnsure

import bass_core as bass
import bass_lab as lab
from bass_core.model.runner import PACKED_BELOW
from bass_lab.measure.modelled_costs import measured_cpu, modelled_costs, predict
from bass_lab.measure.roofline import DRAFT_310M, H100, TARGET_8B, Roofline
from bass_lab.show import plots
from bass_lab.study import hindsight, recording
from bass_lab.study.recorded_acceptance import AcceptanceTrace
from bass_lab.study.replay import Replay, decode
from bass_lab.study.simulator import compare_with_real, regret, simulate, simulate_trace
from bass_lab.texts.prompt_sets import prompt_set

COUNTS = ["step", "row", "kind", "k", "drafted", "accepted", "emitted", "kv_length"]


def steps_of(trace, policy, batch=(0,), cost=None, **options):
    steps = simulate_trace(trace, policy, cost or Linear(), batch=list(batch), **options).steps
    return steps[steps.kind == "decode"]


@pytest.mark.parametrize(
    ("pattern", "drafted", "accepted", "emitted"),
    [
        # 11 tokens after the prefill's: 4 + 4 + 3; a row with 3 remaining tokens drafts 2
        ("1" * 11, [3, 3, 2], [3, 3, 2], [4, 4, 3]),
        ("0" * 5, [3, 3, 2, 1, 0], [0] * 5, [1] * 5),
        # positions 1…9: step 1 takes 1, 1 and the replaced 0; step 2 the replaced 0; step 3 1, 1, 1 and a bonus
        ("110011111", [3, 3, 3, 0], [2, 0, 3, 0], [3, 1, 4, 1]),
    ],
)
def test_steps_worked_by_hand(pattern, drafted, accepted, emitted):
    steps = steps_of(trace_of(pattern), 3)
    assert steps.drafted.tolist() == drafted and steps.accepted.tolist() == accepted
    assert steps.emitted.tolist() == emitted
    assert steps.kv_length.tolist() == [11 + sum(emitted[:step]) for step in range(len(emitted))]


def test_replay_reports_counts_and_times():
    runs = simulate(trace_of("110011111"), 3, Linear(other=0.5), batch=[0], repeats=2)
    seconds = 4 * 1.5 + 0.9
    by_hand = {"steps": 4, "tokens": 9, "tokens_per_step": 9 / 4, "k": 3, "acceptance_rate": 5 / 9}
    by_hand |= {"seconds_per_token": seconds / 9} | dict.fromkeys(("seconds", "first_s", "mean_s", "last_s"), seconds)
    for line in runs.to_dict("records"):
        assert {name: line[name] for name in by_hand} == pytest.approx(by_hand)
    assert runs.policy.tolist() == ["FixedLength(k=3)"] * 2


def test_fewer_rows_cost_less():
    # row 0 ends after one step (all accepted), row 1 needs four steps
    trace = trace_of("1111", "0000")
    cost = Linear(per_token=0.01, per_draft=0)
    runs = simulate(trace, 3, cost, batch=[0, 1], repeats=1).iloc[0]
    times = [1 + 2 * 0.04, 1 + 0.03, 1 + 0.02, 1 + 0.01]
    assert runs.first_s == pytest.approx(times[0])
    assert runs.last_s == runs.seconds == pytest.approx(sum(times))
    assert runs.mean_s == pytest.approx((times[0] + sum(times)) / 2)


def test_rows_of_different_length_cost_what_the_model_says():
    trace = replace(trace_of("11", "11"), prompt_lengths=np.array([10, 20]))
    for kv_of_rows, kv in (("mean", 15.0), ("max", 20.0)):
        steps = steps_of(trace, 1, (0, 1), Linear(per_key=0.1, kv_of_rows=kv_of_rows))
        assert steps.verify_ms.iloc[0] == pytest.approx(1e3 * (1 + 2 * 0.1 * kv))


def test_texts_end_at_eos_and_at_the_limit():
    # EOS is the fourth token; later draft tokens are verified like others
    steps = steps_of(trace_of("11111110", lengths=[4]), 5)
    assert steps.accepted.tolist() == [5] and steps.emitted.tolist() == [3]
    assert steps_of(trace_of("1" * 11), 3, max_new_tokens=6).emitted.sum() == 5
    trace = trace_of("111", "111", lengths=[1, 4])  # a text of one token needs no step
    assert steps_of(trace, 3, (0,)).empty and steps_of(trace, 3, (0, 1)).row.tolist() == [1]
    assert simulate(trace, 3, Linear(), batch=[0], repeats=1).seconds.item() == 0
    assert hindsight.bound(Replay.draw(trace, [0, 0]), Linear()) == 0


def test_stopped_step_pays_for_its_draft_passes():
    trace = trace_of("1111111")
    trace = replace(trace, maximum=np.array([[0, 0.9, 0.9, 0.1, 0.9, 0.1, 0.1, 0.1]], np.float32))
    steps = steps_of(trace, StopWhenUnsure(most=4))
    assert steps.kv_length.tolist() == [11, 14, 16, 17]
    assert steps.drafted.tolist() == [2, 1, 0, 0]
    assert steps.draft_ms.tolist() == pytest.approx([300, 200, 100, 0])  # the target decides the last token


class Lengths(bass.DraftLengthPolicy):
    """Draft a length per row, and record the signals of the first row."""

    def __init__(self, *lengths):
        self.lengths, self.maxima = torch.tensor(lengths), []

    def plan(self, rows):
        return self.lengths[: len(rows.ids)]

    def keep_drafting(self, signals):
        self.maxima.append(float(signals.maximum[0]))
        return torch.ones_like(signals.drafting)


def test_last_signals_of_the_rollout_repeat():
    made = AcceptanceTrace.synthetic(alpha=0.5, length=12, sequences=1, rollout=2)
    after = np.broadcast_to(np.array([0.25, 0.125], np.float16), (1, 12, 2))
    policy = Lengths(6)
    decode(Replay.draw(replace(made, q=np.zeros_like(made.q), rollout_maximum=after), [0]), policy)
    assert policy.maxima[:6] == [0.5, 0.25, 0.125, 0.125, 0.125, 0.125]


def test_packed_step_costs_its_tokens_and_another_step_its_longest_row():
    rows = trace_of(*["1" * 20] * 4)
    for attention, lengths, tokens in (
        ("ragged", (8, 0, 1, 3), 9 + 1 + 2 + 4),
        ("pad", (8, 0, 1, 3), 9 + 1 + 2 + 4),
        ("eager", (8, 0, 1, 3), 4 * 9),
        ("ragged", (8, 7, 8, 8), 4 * 9),  # too few are saved
    ):
        steps = steps_of(rows, Lengths(*lengths), range(4), Linear(per_token=0.1, attention=attention))
        assert steps.verify_ms.iloc[0] == pytest.approx(1e3 * (1 + 0.1 * tokens))
    first = steps_of(rows, PerRow(most=5), range(4), Linear(per_token=0.1, attention="pad")).iloc[:4]  # unequal plans
    assert (first.drafted + 1).sum() < PACKED_BELOW * 4 * (first.drafted.max() + 1)
    assert first.verify_ms.iloc[0] == pytest.approx(1e3 * (1 + 0.1 * (first.drafted + 1).sum()))


def test_measured_packing_saves_less_than_ideal_packing():
    measured, ragged = measured_cpu(), Lengths(8, 0, 1, 3)
    ideal = replace(measured, is_synthetic=True)
    recorded = replace(measured, measured=measured.measured | {"compile": "graphs"})  # passes of fixed shapes
    plans = {"whole": (measured, 8), "packed": (measured, ragged), "ideal": (ideal, ragged)}
    plans["fixed"] = recorded, ragged
    four = trace_of(*["1" * 20] * 4)
    ms = {name: steps_of(four, plan, range(4), cost).verify_ms.iloc[0] for name, (cost, plan) in plans.items()}
    assert ms["ideal"] < ms["packed"] < ms["whole"] == ms["fixed"]


@pytest.fixture(scope="module")
def greedy(tiny_pair):
    return recording.record(tiny_pair, ragged_prompts(4, 9, 6, 13), max_new_tokens=40, temperature=0.0, rollout=8)


@pytest.mark.parametrize(
    ("policy", "batch"),
    [
        (bass.FixedLength(0), 4),
        (bass.FixedLength(3), 1),
        (bass.BassHeuristic(), 4),
        (lab.HuggingFaceHeuristic(), 4),
        (Alternating(), 1),
        (PerRow(most=4), 4),
        (StopWhenUnsure(most=6, at_least=0.085), 4),  # the tiny models are never sure
    ],
    ids=lambda value: type(value).__name__,
)
def test_greedy_replay_is_the_engines_run(tiny_pair, greedy, policy, batch):
    prompts = ragged_prompts(4, 9, 6, 13)[:batch]
    real = bass.generate(tiny_pair, prompts, max_new_tokens=40, draft_length=policy, eos_token_id=()).trace.steps
    found = simulate_trace(replace(greedy, lengths=np.full(4, 40)), policy, Linear(), batch=range(batch)).steps
    pd.testing.assert_frame_equal(found[COUNTS], real[COUNTS], check_dtype=False)
    assert (real.accepted.sum() > 0) == (policy != bass.FixedLength(0))


@pytest.mark.ci
def test_greedy_replay_with_eos_is_the_engines_run():
    pair, prompts = bass.load_pair(dtype="float32"), prompt_set("mini", 4)
    trace = recording.record(pair, prompts, max_new_tokens=48, temperature=0.0, rollout=16)
    assert len(set(trace.lengths)) > 1
    for policy in (bass.BassHeuristic(), StopWhenUnsure(most=8)):
        real = bass.generate(pair, prompts, max_new_tokens=48, draft_length=policy).trace.steps
        found = simulate_trace(trace, policy, Linear(), batch=range(4)).steps
        pd.testing.assert_frame_equal(found[COUNTS], real[COUNTS], check_dtype=False)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [bass.FixedLength(3), PerRow(most=6)], ids=repr)
def test_sampled_replay_accepts_as_much_as_the_engine(tiny_pair, policy):
    """Paired by seed, the mean difference is zero within four small standard errors."""
    prompts = ragged_prompts(*range(4, 36))
    runs = compare_with_real(
        tiny_pair, prompts, policy, max_new_tokens=48, temperature=0.5, seeds=range(6), repeats=24, rollout=6
    )
    assert runs.difference.sem() < 0.02
    assert abs(runs.difference.mean()) < 4 * runs.difference.sem()
    assert runs.real.mean() > 1.3


def test_position_has_one_outcome_under_every_policy():
    trace = AcceptanceTrace.synthetic(alpha=0.7, length=60, sequences=6)
    fates = {}
    for policy in (1, 4, bass.BassHeuristic(), PerRow(most=5)):
        for line in steps_of(trace, policy, range(6), seed=3).itertuples():
            at = line.kv_length - 128
            decided = [(at + slot, slot < line.accepted) for slot in range(min(line.accepted + 1, line.drafted))]
            for position, kept in decided:
                assert fates.setdefault((line.row, position), kept) == kept
    assert len(set(fates.values())) == 2


def test_larger_batch_holds_the_rows_of_a_smaller_one():
    trace = AcceptanceTrace.synthetic(alpha=0.7, length=30, sequences=5)
    small, large = (Replay.draw(trace, batch, None, 2, 1) for batch in (3, 12))
    assert (large.sequences[:3] == small.sequences).all() and (large.run[:3] == small.run).all()
    assert sorted(large.sequences[:5]) == sorted(large.sequences[5:10]) == list(range(5))
    same_text = [np.flatnonzero(large.sequences[:10] == number) for number in range(5)]
    assert any((large.run[first] != large.run[second]).any() for first, second in same_text)


def test_repeats_and_seeds_differ_and_policies_stay_unchanged():
    trace = AcceptanceTrace.synthetic(alpha=0.7, length=60, sequences=8)
    runs, again, other = (simulate(trace, 4, Linear(), batch=4, repeats=5, seed=seed) for seed in (0, 0, 1))
    pd.testing.assert_frame_equal(runs, again)
    assert runs.seconds.nunique() > 1 and not runs.seconds.equals(other.seconds)
    policy = bass.BassHeuristic()
    assert simulate(trace_of("1" * 30), policy, Linear(), batch=1, repeats=3).steps.nunique() == 1
    assert vars(policy) == vars(bass.BassHeuristic())


@pytest.mark.parametrize(("alpha", "k"), [(0.5, 3), (0.8, 5), (0.95, 10)])
def test_tokens_per_step_at_constant_alpha(alpha, k):
    trace = AcceptanceTrace.synthetic(alpha=alpha, length=400, sequences=64)
    runs = simulate(trace, k, Linear(), batch=64, repeats=8)
    wanted = (1 - alpha ** (k + 1)) / (1 - alpha)
    # the last steps draft less than k: at most k + 1 of 400 tokens, and the mean moves by less than this share
    assert abs(runs.tokens_per_step.mean() - wanted) < 4 * runs.tokens_per_step.sem() + wanted * (k + 1) / 400 / 4


def test_summaries_take_simulated_traces():
    trace = AcceptanceTrace.synthetic(alpha=0.8, length=40, sequences=4)
    found = simulate_trace(trace, 4, Linear(), batch=4)
    runs = simulate(trace, 4, Linear(), batch=4, repeats=1).iloc[0]
    summary = found.summary()
    for name in ("steps", "tokens_per_step", "k", "acceptance_rate"):
        assert summary[name] == pytest.approx(runs[name])
    assert summary["draft_s"] + summary["verify_s"] + summary["other_s"] == pytest.approx(runs.seconds)
    assert summary["tokens"] == runs.tokens + 4
    assert len(plots.raster_matrix(found)) == 4


def test_replay_and_run_have_the_same_price():
    target, draft = (Roofline(work, H100) for work in (TARGET_8B, DRAFT_310M))
    cost = modelled_costs(target, draft, target_launch=1e-4, draft_launch=2e-5, overhead=1e-3)
    never_packed = {"target": cost.models["target"] | {"attention": "eager"}}  # `predict` uses the longest draft
    cost = replace(cost, models=cost.models | never_packed)
    trace = AcceptanceTrace.synthetic(alpha=0.8, length=40, sequences=4, prompt_length=500)
    trace = replace(trace, lengths=np.array([40, 20, 33, 40]))
    for policy in (0, 5, bass.BassHeuristic()):
        found = simulate_trace(trace, policy, cost, batch=4)
        assert simulate(trace, policy, cost, batch=4, repeats=1).seconds.item() == pytest.approx(predict(cost, found))
    table = regret(trace, {"regular": 0, "five": 5}, cost, batches=[1, 4], repeats=3)
    assert (table.regret > 0).all() and (table.schedule_s >= table.bound_s).all()


def test_wrong_arguments_are_refused():
    for options, error in (({"batch": 0}, "batch"), ({"repeats": 0}, "repeats"), ({"seed": -1}, "seed")):
        with pytest.raises(ValueError, match=error):
            simulate(trace_of("111"), 2, Linear(), **{"batch": 2} | options)
    with pytest.raises(ValueError, match="max_new_tokens=13"):
        steps_of(trace_of("1" * 11), 3, max_new_tokens=13)
