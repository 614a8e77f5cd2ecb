"""Lesson 04: tables, figures, and the explorer without a browser."""

import re

import numpy as np
import pytest

import bass_core as bass
from bass_lab.lessons import l04_explorer
from bass_lab.lessons import l04_figures as views
from bass_lab.lessons.l04_explorer import ALIKE, LengthExplorer
from bass_lab.measure.modelled_costs import best_fixed_length, modelled_h100
from bass_lab.study import simulator
from bass_lab.study.recorded_acceptance import AcceptanceTrace

OPTIONS = {"max_new_tokens": 48, "repeats": 3, "seed": 1}


@pytest.fixture(scope="module")
def cost():
    return modelled_h100()


@pytest.fixture(scope="module")
def traces():
    chances = {"easy": 0.9, "hard": 0.5}
    return {name: AcceptanceTrace.synthetic(alpha=alpha, length=64, sequences=12) for name, alpha in chances.items()}


@pytest.fixture(scope="module")
def best(traces, cost):
    table = views.replayed_lengths(traces, {"made up": cost}, [1, 4], lengths=(0, 2, 4, 6), **OPTIONS)
    return views.best_lengths(table)


@pytest.fixture(scope="module")
def found(traces, cost, best):
    return views.contests(traces, cost, best, **OPTIONS)


def test_own_models_without_costs_are_refused(monkeypatch):
    monkeypatch.setattr(views.measured_costs, "costs_like", lambda pair: None)
    with pytest.raises(ValueError, match="bass calibrate"):
        views.cost_models(None, own=True)


def test_shipped_traces_continue_after_eos():
    recorded = views.recordings(None, False, 0.2, 3)
    assert all((trace.lengths == 128).all() for trace in recorded.values())
    assert recorded["mini"].alpha > recorded["library"].alpha + 0.1


def test_predicted_lengths_follow_the_formula(cost):
    table = views.predicted_lengths({"made up": cost}, {"one": 0.8, "two": 0.4}, [1, 8])
    for line in views.best_lengths(table).itertuples():
        alpha = {"one": 0.8, "two": 0.4}[line.set]
        assert (line.k, line.speed) == pytest.approx(best_fixed_length(cost, line.batch, alpha))


def test_batches_beyond_the_measured_grid_are_left_out(traces):
    cpu = l04_explorer.measured_cpu()
    most = int(cpu.target_passes.axes["batch"][-1])
    models = {"cpu": cpu, "gpu": modelled_h100()}
    how = {"max_new_tokens": 4, "repeats": 1, "seed": 0, "lengths": (0, 1)}
    for table in (
        views.predicted_lengths(models, {"easy": 0.9}, [1, 2 * most]),
        views.replayed_lengths(traces, models, [1, 2 * most], **how),
    ):
        assert set(zip(table.costs, table.batch, strict=True)) == {("cpu", 1), ("gpu", 1), ("gpu", 2 * most)}


def test_replayed_lengths_equal_the_simulator(traces, cost):
    table = views.replayed_lengths(traces, {"made up": cost}, [4], lengths=(0, 3), **OPTIONS)
    for name, trace in traces.items():
        seconds = {k: simulator.simulate(trace, k, cost, batch=4, **OPTIONS).seconds.sum() for k in (0, 3)}
        speeds = table[table.set == name].set_index("k").speed
        assert speeds[3] == pytest.approx(seconds[0] / seconds[3]) and speeds[0] == 1


def test_contests_equal_the_simulators_regret(found, traces, cost, best):
    assert set(found.policy) == {*l04_explorer.policies(cost), views.HINDSIGHT}
    assert len(found) == len(best) * found.policy.nunique()
    part = found.query("set == 'hard' and batch == 4").set_index("policy")
    regret = simulator.regret(traces["hard"], {"Algorithm 1": bass.BassHeuristic()}, cost, [4], **OPTIONS).iloc[0]
    assert part.regret["Algorithm 1"] == pytest.approx(regret.regret)
    assert part.speed["regular"] == 1 and part.speed["fixed 3"] > 1
    assert part.k[views.HINDSIGHT] == best.query("set == 'hard' and batch == 4").k.item()


def test_objectives_trade_the_first_row_for_the_batch(cost):
    uneven = AcceptanceTrace.synthetic(alpha=0.75, length=96, sequences=16, regimes=(0.2, 1000))
    table = views.ends(uneven, cost, 8, (0, 8), (2, 5), repeats=4, seed=0)
    lines = table.set_index(["family", "setting"])
    assert lines.first_s["first", 8] < lines.first_s["last", 8]
    assert lines.throughput["first", 8] < lines.throughput["last", 8]
    assert lines.first_s["first", 0] == lines.first_s["last", 0]
    assert (table.best == views.not_dominated(table.first_s, -table.throughput)).all()


@pytest.fixture
def explorer():
    return LengthExplorer(batch=4, repeats=2)


@pytest.mark.parametrize("name, value", [("alpha", 0.5), ("batch", 2), ("costs", "CPU (recorded)")])
def test_setting_replays_and_redraws(explorer, name, value):
    before, steps = np.array(explorer.bars.data[0].x), np.array(explorer.steps.data[1].y)
    explorer.controls[name].value = value
    now = {key: control.value for key, control in explorer.controls.items()}
    assert not np.array_equal(explorer.bars.data[0].x, before)
    assert name == "costs" or not np.array_equal(explorer.steps.data[1].y, steps)
    assert list(explorer.bars.data[0].y) == explorer.table.policy.tolist()
    np.testing.assert_allclose(explorer.bars.data[0].x, explorer.table.speed)
    lengths = explorer.path.steps.query("kind == 'decode'").groupby("step").k.max()
    assert list(explorer.steps.data[0].y) == lengths.tolist()
    assert f"batch {now['batch']}" in explorer.bars.layout.title.text


def test_explorer_equals_the_simulator():
    explorer = LengthExplorer(alpha=0.7, variation=ALIKE, batch=3, repeats=2, seed=4)
    trace = AcceptanceTrace.synthetic(alpha=0.7, length=128, sequences=64, seed=4)
    found, options = explorer.table.set_index("policy"), {"batch": 3, "repeats": 2, "seed": 4}
    regular, three = (simulator.simulate(trace, k, modelled_h100(), **options) for k in (0, 3))
    assert found.seconds["fixed 3"] == pytest.approx(three.seconds.mean()) and found.k["fixed 3"] == three.k.mean()
    assert found.speed["fixed 3"] == pytest.approx(regular.seconds.sum() / three.seconds.sum())
    assert explorer.controls["spread"].disabled and not explorer.controls["launch"].disabled
    assert "0.70 everywhere" in explorer.sentence.value


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"batch": 0}, "batch must be >= 1, got 0"),
        ({"costs": "A100"}, "costs must be one of H100 (modelled), CPU (recorded); got 'A100'"),
        ({"variation": "none"}, "variation must be one of all alike, easy and hard; got 'none'"),
    ],
)
def test_invalid_setting_is_refused(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        LengthExplorer(**settings)
