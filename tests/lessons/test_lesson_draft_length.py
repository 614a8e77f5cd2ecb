"""Lesson 04: tables and figures hold what they say, the explorer without a browser, exercises, other parameters."""

import math
import re

import lesson_runs
import numpy as np
import pandas as pd
import pytest
import torch

import bass_core as bass
from bass_core.policies.learned import Learned
from bass_lab.lessons import l04_exercises as exercises
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


# --- costs ---


def test_modelled_costs_say_so_and_grow_with_the_launches(cost):
    slow = modelled_h100(10.0)
    assert cost.is_synthetic and not l04_explorer.measured_cpu().is_synthetic
    assert slow.target(8, 1, 256) - cost.target(8, 1, 256) == pytest.approx(9.5e-3)
    assert slow.draft(8, 3, 256) - cost.draft(8, 3, 256) == pytest.approx(3 * 1.9e-3)


def test_own_models_without_costs_are_refused(monkeypatch):
    monkeypatch.setattr(views.costs, "costs_like", lambda pair: None)
    with pytest.raises(ValueError, match="bass calibrate"):
        views.cost_models(None, own=True)


def test_own_models_are_recorded(monkeypatch, traces):
    asked = []

    def record(pair, prompts, **options):
        asked.append((pair, len(prompts), options))
        return traces["easy"]

    monkeypatch.setattr(views.recording, "record", record)
    recorded = views.recordings("a pair", True, 0.2, 3)
    assert asked == [("a pair", 32, {"max_new_tokens": 128, "temperature": 0.2, "seed": 3})] * 2
    assert list(recorded) == ["mini", "library"]
    views.recordings("the embedded pair", False, 0.8, 3)  # not the temperature of what ships
    assert [options["temperature"] for _, _, options in asked[2:]] == [0.8, 0.8]


def test_shipped_recordings_go_on_after_eos():
    recorded = views.recordings(None, False, 0.2, 3)
    assert all((trace.lengths == 128).all() for trace in recorded.values())
    assert recorded["mini"].alpha > recorded["library"].alpha + 0.1


# --- tables ---


def test_computed_lengths_are_those_of_the_formula(cost):
    table = views.predicted_lengths({"made up": cost}, {"one": 0.8, "two": 0.4}, [1, 8])
    for line in views.best_lengths(table).itertuples():
        alpha = {"one": 0.8, "two": 0.4}[line.set]
        assert (line.k, line.speed) == pytest.approx(best_fixed_length(cost, line.batch, alpha))


def test_batches_beyond_the_measured_grid_are_left_out(traces):
    cpu = l04_explorer.measured_cpu()
    most = int(cpu.target_passes.axes["batch"][-1])
    models = {"cpu": cpu, "gpu": modelled_h100()}
    tables = [views.predicted_lengths(models, {"easy": 0.9}, [1, 2 * most])]
    tables += [
        views.replayed_lengths(traces, models, [1, 2 * most], max_new_tokens=4, repeats=1, seed=0, lengths=(0, 1))
    ]
    for table in tables:
        assert set(zip(table.costs, table.batch, strict=True)) == {("cpu", 1), ("gpu", 1), ("gpu", 2 * most)}


def test_replayed_lengths_are_those_of_the_simulator(traces, cost):
    table = views.replayed_lengths(traces, {"made up": cost}, [4], lengths=(0, 3), **OPTIONS)
    for name, trace in traces.items():
        seconds = {k: simulator.simulate(trace, k, cost, batch=4, **OPTIONS).seconds.sum() for k in (0, 3)}
        speeds = table[table.set == name].set_index("k").speed
        assert speeds[3] == pytest.approx(seconds[0] / seconds[3]) and speeds[0] == 1


def test_a_contest_is_the_simulators_regret_with_speeds(found, traces, cost, best):
    assert set(found.policy) == {*l04_explorer.policies(cost), views.HINDSIGHT}
    assert len(found) == len(best) * found.policy.nunique()
    part = found.query("set == 'hard' and batch == 4").set_index("policy")
    regret = simulator.regret(traces["hard"], {"Algorithm 1": bass.BassHeuristic()}, cost, [4], **OPTIONS).iloc[0]
    assert part.regret["Algorithm 1"] == pytest.approx(regret.regret)
    assert part.speed["regular"] == 1 and part.speed["fixed 3"] > 1
    assert part.k[views.HINDSIGHT] == best.query("set == 'hard' and batch == 4").k.item()


def test_some_row_accepts_all_more_often_in_a_larger_batch():
    table = views.some_row_accepts_all(0.5, (1, 2), (1, 2))
    np.testing.assert_allclose(table, [[0.5, 0.75], [0.25, 1 - 0.75**2]])


def test_paired_times_are_sure_where_the_same_coins_count(traces, cost):
    lines = views.paired(traces, cost, (0, 4), [1, 4], **OPTIONS)
    assert (lines.times > 1).all() and (lines.low < lines.times).all() and (lines.times < lines.high).all()
    same = views.paired(traces, cost, (4, 4), [2], **OPTIONS)
    np.testing.assert_allclose(same[["times", "low", "high"]], 1)
    assert (same.alone > same["half width"]).all()


def test_not_dominated_keeps_the_front():
    assert views.not_dominated([1, 2, 3, 2], [3, 2, 1, 3]).tolist() == [True, True, True, False]
    assert views.not_dominated([1, 1, 1], [2, 2, 3]).tolist() == [True, True, False]


def test_ends_pull_apart_the_first_row_and_the_batch(cost):
    uneven = AcceptanceTrace.synthetic(alpha=0.75, length=96, sequences=16, regimes=(0.2, 1000))
    table = views.ends(uneven, cost, 8, (0, 8), (2, 5), repeats=4, seed=0)
    lines = table.set_index(["family", "setting"])
    assert lines.first_s["first", 8] < lines.first_s["last", 8]
    assert lines.throughput["first", 8] < lines.throughput["last", 8]
    assert lines.first_s["first", 0] == lines.first_s["last", 0]
    assert (table.best == views.not_dominated(table.first_s, -table.throughput)).all()
    figure = views.ends_figure(table, "ends")
    for trace, (_, part) in zip(figure.data, table.groupby("family", sort=False), strict=True):
        np.testing.assert_allclose(trace.x, 1e3 * part.first_s)
        np.testing.assert_allclose(trace.y, part.throughput)
        assert [not symbol.endswith("-open") for symbol in trace.marker.symbol] == part.best.tolist()


def test_halves_share_no_sequence(traces):
    even, odd = views.halves(traces["easy"])
    np.testing.assert_array_equal(even.q, traces["easy"].q[::2])
    np.testing.assert_array_equal(odd.lengths, traces["easy"].lengths[1::2])


def test_a_learner_that_is_told_the_task_begins_where_it_ended(traces, cost):
    stages = [("easy", traces["easy"]), ("hard", traces["hard"])] * 2
    learners = {"Learned": Learned(cost), "told": Learned(cost, task="easy"), "fixed": bass.FixedLength(3)}
    table = views.switches(learners, stages, cost, batch=4, repeats=6)
    assert not learners["Learned"].memories and not learners["told"].memories  # copies were used
    first = table[table.step == 1].pivot_table(index="policy", columns="stage", values="k")
    assert (first.loc["fixed"] == 3).all()
    assert first.loc["told", 2] > first.loc["told", 3]  # easy again, hard again: remembered
    assert first.loc["Learned", 3] > first.loc["told", 3]  # not told, it goes on as on easy text
    pd.testing.assert_series_equal(
        table.query("policy == 'told' and stage == 0").ms, table.query("policy == 'Learned' and stage == 0").ms,
        check_index=False,
    )  # fmt: skip


def test_recovery_counts_steps_until_a_tenth_above():
    times = [9.0, 9.0, 9.0, 9.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    lines = [
        {"policy": policy, "stage": 0, "set": "a", "step": step, "k": 1, "ms": ms}
        for policy, factor in (("slow", 1), ("lost", 3))
        for step, ms in enumerate(times, 1)
        for ms in [ms * factor]
    ]
    table = views.recovery(pd.DataFrame(lines), {"a": 1.0})
    assert table["1: a"].to_dict() == {"slow": 8, "lost": "never"}


# --- figures ---


def test_lengths_figure_marks_the_best_k(best, traces, cost):
    table = views.predicted_lengths({"one": cost, "two": cost}, {"easy": 0.9, "hard": 0.5}, [1, 8])
    figure = views.lengths_figure(table, "lengths")
    assert len(figure.data) == 8 and sum(bool(trace.showlegend) for trace in figure.data) == 2
    wanted = views.best_lengths(table).set_index(["set", "costs", "batch"]).k.sort_index().tolist()
    parts = table.groupby(["set", "costs", "batch"], sort=False)
    marked = {
        key: int(trace.x[np.argmax(trace.marker.size)]) for (key, _), trace in zip(parts, figure.data, strict=True)
    }
    assert [marked[key] for key in sorted(marked)] == wanted


def test_regret_figure_has_a_panel_per_batch_with_intervals(found):
    part = found[found.set == "easy"]
    figure = views.regret_figure(part, "regret")
    bars = [trace for trace in figure.data if trace.x[0] is not None]
    for bar, (_, panel) in zip(bars, part[part.policy != "regular"].groupby("batch"), strict=True):
        assert list(bar.y) == panel.policy.tolist()
        np.testing.assert_allclose(bar.x, panel.regret)
        np.testing.assert_allclose(bar.x + bar.error_x.array, panel.high)
        np.testing.assert_allclose(bar.x - bar.error_x.arrayminus, panel.low)
    lines = [shape.x0 for shape in figure.layout.shapes]
    np.testing.assert_allclose(lines, part.groupby("batch").apply(lambda g: (g.schedule_s / g.bound_s).iloc[0] - 1))


def test_switch_figure_has_lengths_and_times_per_stage(traces, cost):
    stages = [("easy", traces["easy"]), ("hard", traces["hard"])]
    table = views.switches({"fixed": bass.FixedLength(3)}, stages, cost, batch=2, repeats=2)
    figure = views.switch_figure(table, {"easy": 1.0, "hard": 2.0}, "switch")
    assert len(figure.data) == 4 and set(figure.data[0].y) == {3.0}
    assert [shape.y0 for shape in figure.layout.shapes] == [1.0, 2.0]
    np.testing.assert_allclose(figure.data[1].y[-1], table[table.stage == 0].ms.iloc[-4:].mean())


# --- the explorer ---


@pytest.fixture
def explorer():
    return LengthExplorer(batch=4, repeats=2)


@pytest.mark.parametrize(
    "name, value",
    [
        ("alpha", 0.5),
        ("variation", ALIKE),
        ("spread", 0.05),
        ("batch", 2),
        ("launch", 4.0),
        ("costs", "CPU (measured)"),
    ],
)
def test_setting_replays_and_redraws(explorer, name, value):
    before, steps = np.array(explorer.bars.data[0].x), np.array(explorer.steps.data[1].y)
    explorer.controls[name].value = value
    now = {key: control.value for key, control in explorer.controls.items()}
    assert not np.array_equal(explorer.bars.data[0].x, before)
    assert name in ("launch", "costs") or not np.array_equal(explorer.steps.data[1].y, steps)
    assert list(explorer.bars.data[0].y) == explorer.table.policy.tolist()
    np.testing.assert_allclose(explorer.bars.data[0].x, explorer.table.speed)
    lengths = explorer.path.steps.query("kind == 'decode'").groupby("step").k.max()
    assert list(explorer.steps.data[0].y) == lengths.tolist()
    assert f"batch {now['batch']}" in explorer.bars.layout.title.text
    regret = explorer.table.set_index("policy").regret["Goodput"]
    assert f"regret {regret:.0%}" in explorer.bars.data[0].text[list(explorer.table.policy).index("Goodput")]


def test_explorer_shows_what_the_simulator_finds():
    explorer = LengthExplorer(alpha=0.7, variation=ALIKE, batch=3, repeats=2, seed=4)
    trace = AcceptanceTrace.synthetic(alpha=0.7, length=128, sequences=64, seed=4)
    wanted = l04_explorer.contest(trace, modelled_h100(), 3, repeats=2, seed=4)
    pd.testing.assert_frame_equal(explorer.table, wanted)
    assert explorer.controls["spread"].disabled and not explorer.controls["launch"].disabled
    assert "0.70 everywhere" in explorer.sentence.value


def test_spread_is_cut_where_a_chance_would_pass_one_and_said():
    explorer = LengthExplorer(alpha=0.95, spread=0.3, batch=1, repeats=2)
    assert "between 0.90 and 1.00" in explorer.sentence.value


def test_value_as_a_browser_sends_it_is_taken(explorer):
    explorer.controls["alpha"].value = 0.8500000000000001  # with the spread a hair above 1
    assert "between 0.70 and 1.00" in explorer.sentence.value


def test_controls_wait_for_the_mouse_to_let_go(explorer):
    sliders = [control for control in explorer.controls.values() if hasattr(control, "continuous_update")]
    assert len(sliders) == 4 and not any(slider.continuous_update for slider in sliders)


def test_static_view_is_what_is_drawn(explorer):
    text, bars, steps = explorer.static()
    assert "Algorithm 1" in text.data and f"batch {explorer.controls['batch'].value}" in text.data
    np.testing.assert_array_equal(bars.data[0].x, explorer.bars.data[0].x)
    np.testing.assert_array_equal(steps.data[0].y, explorer.steps.data[0].y)
    assert type(bars).__name__ == "Figure"


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"alpha": 0.99}, "alpha must be from 0.3 to 0.95, got 0.99"),
        ({"batch": 0}, "batch must be >= 1, got 0"),
        ({"costs": "A100"}, "costs must be one of H100 (modelled), CPU (measured); got 'A100'"),
        ({"variation": "none"}, "variation must be one of all alike, easy and hard; got 'none'"),
        ({"repeats": 1}, "repeats must be >= 2, got 1"),
    ],
)
def test_setting_that_no_control_takes_is_refused(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        LengthExplorer(**settings)


# --- exercises ---


def algorithm_1(length, s, accepted, round_up=math.ceil, once_more=1, least=1):
    if max(accepted) == length:
        return min(length + 2, 32), 0
    return max(least, *accepted, length - round_up(length / 10) - once_more * s), 1


def best_length(chances, seconds, first=1.0, least=0):
    tokens, survival = [first], 1.0
    for chance in chances:
        survival *= chance
        tokens.append(tokens[-1] + survival)
    speeds = [count / time for count, time in zip(tokens, seconds, strict=True)][least:]
    return least + speeds.index(max(speeds))


def test_exercises_take_the_solutions(capsys):
    lesson_runs.accepted_and_stub_is_not(exercises.check_algorithm_1, algorithm_1, capsys)
    lesson_runs.accepted_and_stub_is_not(exercises.check_best_length, best_length, capsys)


def test_algorithm_1_of_the_exercise_is_the_engines():
    policy = bass.BassHeuristic()
    generator = np.random.default_rng(0)
    length, s = policy.length, policy.shrinking
    for _ in range(100):
        accepted = generator.binomial(length, 0.9, size=2)
        policy.update(*map(torch.as_tensor, ([length] * 2, accepted)))
        length, s = algorithm_1(length, s, accepted.tolist())
        assert (length, s) == (policy.length, policy.shrinking)


@pytest.mark.parametrize(
    "check, attempt, hint",
    [
        ("check_algorithm_1", lambda *case: algorithm_1(*case, round_up=math.floor), "rounded up"),
        ("check_algorithm_1", lambda *case: algorithm_1(*case, once_more=0), "s shortens it once more"),
        ("check_algorithm_1", lambda *case: algorithm_1(*case, least=0), "expected (1, 1)"),
        ("check_algorithm_1", lambda length, s, accepted: (min(length + 2, 32), 0), "some row accepted the whole"),
        ("check_algorithm_1", lambda length, s, accepted: length, "a pair (length, s) is expected"),
        ("check_algorithm_1", lambda length, s, accepted: (length + 2, 0), "the limit is 32"),
        ("check_best_length", lambda *case: best_length(*case, first=0.0), "expected"),
        ("check_best_length", lambda *case: best_length(*case, least=1), "drafts are never accepted"),
        ("check_best_length", lambda chances, seconds: len(chances), "expected"),
        ("check_best_length", lambda chances, seconds: None, "got None"),
    ],
)
def test_exercises_name_what_is_wrong(check, attempt, hint, capsys):
    lesson_runs.refused(getattr(exercises, check), attempt, hint, capsys)


# --- other parameters ---


@pytest.mark.slow
def test_notebook_runs_with_other_parameters(tmp_path):
    changed = {"batch_sizes": [1, 4], "max_new_tokens": 32, "temperature": 0.5, "repeats": 2, "seed": 3}
    core, appendix = (
        "".join(
            str(output)
            for cell in lesson_runs.execute(name, tmp_path, **changed).cells
            for output in cell.get("outputs", [])
        )
        for name in ("04_draft_length", "04b_draft_length_further")
    )
    assert "batch 4" in core and core.count("Not solved yet.") == 2
    assert "points are not dominated" in appendix and "batch 4" in appendix
