import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from replays import Linear, Stairs, trace_of
from trial_policies import PerRow

import bass_core as bass
import bass_lab as lab
from bass_lab.study import hindsight
from bass_lab.study.recorded_acceptance import AcceptanceTrace
from bass_lab.study.replay import Replay
from bass_lab.study.simulator import regret, simulate


def brute_force(replay, cost):

    def least(at):
        live = [row for row in range(len(at)) if at[row] < replay.ends[row]]
        if not live:
            return 0.0
        tokens = np.array([replay.trace.prompt_lengths[replay.sequences[row]] + at[row] for row in live])
        best = np.inf
        for k in range(max(replay.limit - at[row] - 1 for row in live) + 1):
            reached = list(at)
            for row in live:
                drafted = min(k, replay.limit - at[row] - 1)
                reached[row] = at[row] + min(drafted, replay.run[row, at[row]]) + 1
            best = min(best, float(cost.step(len(live), k, tokens.mean() - 1)) + least(tuple(reached)))
        return best

    return least((1,) * len(replay.ends))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("cost", [Linear(per_token=0.05, per_key=0.02), Stairs(0)])
def test_bound_of_a_row_is_the_best_schedule(cost, seed):
    trace = AcceptanceTrace.synthetic(alpha=0.6, length=9, sequences=3)
    trace = replace(trace, lengths=np.array([9, 7, 8]))
    drawn = Replay.draw(trace, 1, seed=seed)
    assert hindsight.bound(drawn, cost) == pytest.approx(brute_force(drawn, cost), rel=1e-12)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("cost", [Linear(per_token=0.2, per_key=0.001), Stairs(1)])
def test_bound_of_a_batch_is_below_all_schedules(cost, seed):
    trace = AcceptanceTrace.synthetic(alpha=0.6, length=7, sequences=3)
    trace = replace(trace, lengths=np.array([7, 5, 6]), prompt_lengths=np.array([9, 30, 12]))
    drawn = Replay.draw(trace, 3, seed=seed)
    best = brute_force(drawn, cost)
    assert 0.5 * best < hindsight.bound(drawn, cost) <= best * (1 + 1e-12)
    assert best * (1 + 1e-12) <= hindsight.schedule(drawn, cost) * (1 + 2e-12)


def test_bound_of_equal_rows_is_reached():
    drawn, cost = Replay.draw(trace_of("110111011"), [0, 0, 0]), Linear(per_token=0.05)
    assert hindsight.bound(drawn, cost) == pytest.approx(brute_force(drawn, cost))


class Whim(bass.DraftLengthPolicy):
    def __init__(self, seed):
        self.seed = seed

    def start(self, rows):
        self.random = np.random.default_rng(self.seed)

    def plan(self, rows):
        return torch.from_numpy(self.random.integers(0, 9, len(rows.ids)))

    def keep_drafting(self, signals):
        return torch.from_numpy(self.random.random(len(signals.drafting)) < 0.9)


@pytest.mark.parametrize("seed", range(2))
def test_no_policy_is_faster_than_the_bound(seed):
    random = np.random.default_rng(seed)
    trace = AcceptanceTrace.synthetic(
        alpha=random.uniform(0.3, 0.9), length=40, sequences=7, seed=seed, regimes=(0.1, 6), prompt_length=20
    )
    trace = replace(trace, lengths=random.integers(1, 41, 7), prompt_lengths=random.integers(5, 60, 7))
    policies = [0, 3, 8, bass.BassHeuristic(), lab.HuggingFaceHeuristic(), PerRow(most=6), Whim(seed)]
    costs = [Linear(per_token=random.uniform(0, 0.3), per_key=random.uniform(0, 0.01)), Stairs(seed)]
    for cost, batch in itertools.product(costs, (1, 12)):
        options = {"batch": batch, "seed": seed, "repeats": 3}
        drawn = Replay.draws(trace, **options)
        bound = np.array([hindsight.bound(each, cost) for each in drawn])
        for policy in policies:
            assert (simulate(trace, policy, cost, **options).seconds >= bound * (1 - 1e-12)).all()
        assert ([hindsight.schedule(each, cost) for each in drawn] >= bound * (1 - 1e-12)).all()


def test_regret_compares_with_the_bound_on_the_same_replays():
    trace = AcceptanceTrace.synthetic(alpha=0.8, length=60, sequences=16)
    policies = {"two": 2, "paper": bass.BassHeuristic()}
    table = regret(trace, policies, Linear(), batches=[1, 8], repeats=6, seed=4)
    assert table[["batch", "policy"]].values.tolist() == [[1, "two"], [1, "paper"], [8, "two"], [8, "paper"]]
    runs = simulate(trace, 2, Linear(), batch=8, repeats=6, seed=4)
    bound = np.array([hindsight.bound(drawn, Linear()) for drawn in Replay.draws(trace, batch=8, repeats=6, seed=4)])
    line = table.iloc[2]
    assert line.regret == pytest.approx((runs.seconds / bound - 1).mean())
    assert line.low < line.regret < line.high
    assert line.seconds == pytest.approx(runs.seconds.mean()) and line.bound_s == pytest.approx(bound.mean())
    assert (table.schedule_s >= table.bound_s * (1 - 1e-12)).all()
