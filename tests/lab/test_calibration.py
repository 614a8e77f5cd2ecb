import json
from collections import Counter
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from commands import invoke
from recording import count_ahead, use_on_cpu
from tiny import tiny_model

import bass_core as bass
from bass_core.drafters import NgramDrafter
from bass_core.loading.measured_costs import check_costs, costs_for
from bass_core.loop.phases import Stopwatch
from bass_core.model.runner import Runner
from bass_core.policies.goodput import Goodput
from bass_lab.drafters import LayerSkipDrafter
from bass_lab.study import calibration, cost_check
from bass_lab.study.calibration import Turn
from bass_lab.study.mixed_model import Sample

SMALL = {"batches": (1, 2), "query_lengths": (1, 2, 6), "kv_lengths": (8, 32), "seconds": 0.0}
LEAST = {"batches": (1, 2), "query_lengths": (1, 2), "kv_lengths": (8,), "seconds": 0.0}


def test_calibration_measures_every_point(tiny_pair, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    before = tiny_pair.target.config._attn_implementation, len(tiny_pair.target._forward_hooks)
    measured = calibration.calibrate(tiny_pair, **SMALL)
    axes = {"batch": SMALL["batches"], "query_length": SMALL["query_lengths"], "kv_length": SMALL["kv_lengths"]}
    assert measured.target_passes.axes == axes
    phases = {"batch": (1, 2), "draft_length": (1, 2, 4), "kv_length": SMALL["kv_lengths"]}
    assert measured.draft_phases.axes == phases
    assert measured.overheads.axes == {"batch": (1, 2), "draft_length": (0, 1, 2, 4)}
    for found in (measured.target_passes, measured.draft_phases, measured.overheads):
        assert (found.seconds > 0).all()
    check_costs(measured, tiny_pair)
    assert measured.measured["dtype"] == "float32" and measured.acceptance is None  # no tokenizer
    assert not measured.is_synthetic and measured.kv_of_rows == "max" and measured.measured["device"] != "a GPU"
    assert measured.models["target"]["attention"] == "pad" and measured.measured["samples"]["least"] >= 1
    assert (tiny_pair.target.config._attn_implementation, len(tiny_pair.target._forward_hooks)) == before


def test_calibration_counts_accepted_drafts(monkeypatch):
    pair = bass.load_pair(dtype="float32")
    monkeypatch.setattr(calibration, "LOOKED_AT", 1)
    kept, lost = calibration._acceptance(pair)
    assert 0.6 < kept / (kept + lost) < 0.9
    perfect = bass.ModelPair(pair.target, pair.target, pair.tokenizer)
    assert calibration._acceptance(perfect) == [2 * calibration.LOOKED_AT * 24, 0]  # 32 tokens: 1, 6 times 5, and 1
    nothing = bass.ModelPair(pair.target, NgramDrafter(longest=60, shortest=50), pair.tokenizer)
    assert calibration._acceptance(nothing) == [0, 2 * calibration.LOOKED_AT * 30]  # all steps except the last
    monkeypatch.setattr(calibration, "context_of", lambda pair: 40)
    assert calibration._acceptance(pair) is None  # the texts do not fit


def test_recorded_steps_are_timed_by_their_phases(tiny_pair, monkeypatch):
    use_on_cpu(monkeypatch)
    shape = {"batches": (1, 2), "query_lengths": (1, 2, 3), "kv_lengths": (24, 48)}
    found = calibration.calibrate(tiny_pair, **shape, seconds=0)
    assert found.measured["compile"] == "graphs"
    assert found.target_passes.axes == {"batch": (1, 2), "query_length": (1, 2, 3), "kv_length": (24, 48)}
    assert found.draft_phases.axes == {"batch": (1, 2), "draft_length": (1, 2), "kv_length": (24, 48)}
    assert all((table.seconds > 0).all() for table in (found.target_passes, found.draft_phases, found.overheads))
    assert found.measured["samples"]["least"] >= calibration.REPLAYS


def test_captured_rows_surround_the_kv_length(tiny_pair, monkeypatch):
    use_on_cpu(monkeypatch)
    ahead, made = count_ahead(monkeypatch), []

    class Kept(bass.Session):
        def __init__(self, *given, **options):
            super().__init__(*given, **options)
            made.append(self)

    monkeypatch.setattr(calibration, "Session", Kept)
    counted = list(calibration._recorded_steps(tiny_pair, 2, 40, [0, 1, 3]))
    steps = made[0].trace.steps.query("kind == 'decode'")
    assert steps.groupby("step").k.unique().map(list).tolist() == 6 * [[0]] + 5 * [[1]] + 5 * [[3]]
    assert (steps.query("row == 0").kv_length - 1).tolist() == list(range(33, 49))  # 40 in the middle
    assert sum(name == "overheads" and k == 0 for name, (_, k, *_), _ in counted) == 3
    assert ahead == {"launched": 4}  # the capturing step launches the first
    costs = calibration.calibrate(tiny_pair, (1, 2), (1, 3), (24,), seconds=0)
    for k in (0, 2):
        ahead.clear()
        cost_check.check(costs, tiny_pair, batches=(2,), draft_lengths=(k,), repeats=1, max_new_tokens=10)
        assert (ahead["launched"] > 0) == (k == 0)


def test_overhead_includes_drafts_without_a_table(monkeypatch):
    use_on_cpu(monkeypatch)
    drafting = bass.ModelPair(tiny_model(), LayerSkipDrafter(1))
    found = pd.DataFrame(calibration._recorded_steps(drafting, 2, 40, [0, 8]), columns=["table", "point", "seconds"])
    assert set(found.table) == {"target_passes", "overheads"}
    rest = found[found.table == "overheads"].groupby("point").seconds.min()
    assert rest[2, 8] > 2 * rest[2, 0]  # eight passes


def test_calibration_separates_passes_from_the_rest_of_a_step(tiny_pair, monkeypatch):
    """Every forward pass advances the clock by its tokens, and every reading advances the clock a little."""
    now = 0.0

    def read() -> float:
        nonlocal now
        now += 1e-6
        return now

    def move(tokens: int) -> None:
        nonlocal now
        now += tokens

    for model, each in ((tiny_pair.target, 1.0), (tiny_pair.draft, 0.01)):
        original = model.forward

        def forward(*args, original=original, each=each, **kwargs):
            move(each * kwargs["input_ids"].numel())
            return original(*args, **kwargs)

        monkeypatch.setattr(model, "forward", forward)
    monkeypatch.setattr("time.perf_counter", read)
    cost = calibration.calibrate(tiny_pair, **SMALL)
    assert cost.target(2, 6, 32) == pytest.approx(12, abs=1e-4)
    assert cost.draft(2, 3, 8) == pytest.approx(0.08, abs=1e-4)  # (2 + 1 + 1) tokens of two rows
    assert cost.overhead(2, 4) < 1e-3


def test_passes_use_a_mask_and_steps_the_default_policy(tiny_pair, monkeypatch):
    met, chosen, feed, goodputs = set(), [], Runner.feed, Goodput.goodputs

    def fed(self, ids, starts, lengths, *, starts_host, **options):
        met.add(tuple(starts_host))
        return feed(self, ids, starts, lengths, starts_host=starts_host, **options)

    def choose(self, rows):
        chosen.append(len(rows.ids))
        return goodputs(self, rows)

    monkeypatch.setattr(Runner, "feed", fed)
    calibration.calibrate(tiny_pair, **LEAST)
    together = {starts for starts in met if len(starts) == 2 and starts[0] > 0}  # a start at 0 reads prompts
    assert (8, 7) in together and all(first != second for first, second in together)
    monkeypatch.setattr(Goodput, "goodputs", choose)
    lengths = [k for _, (_, k), _ in calibration._steps(Stopwatch(tiny_pair.device), tiny_pair, 2, (0, 1, 3))]
    assert lengths == [0, 1, 3] and chosen == [2, 2]


def test_calibration_without_a_separate_draft_model():
    model = tiny_model()
    cost = calibration.calibrate(bass.ModelPair(model), **LEAST)
    assert cost.draft_phases is None and cost.models["draft"]["attention"] is None
    assert (cost.step(2, np.arange(4), 20) > 0).all()
    cost = calibration.calibrate(bass.ModelPair(model, model), **LEAST)
    assert (cost.draft_phases.seconds > 0).all() and (cost.overheads.seconds > 0).all()


def test_impossible_grids_are_refused(tiny_pair):
    for options, reason in (
        ({"kv_lengths": (8, 91)}, "exceed the context of 96"),
        ({"batches": (2, 2)}, "batches must be increasing"),
        ({"query_lengths": ()}, "query_lengths must be increasing"),
        ({"batches": (0, 1)}, "batches must be >= 1"),
    ):
        with pytest.raises(ValueError, match=reason):
            calibration.calibrate(tiny_pair, **SMALL | options)
    options = SMALL | {"kv_lengths": None, "batches": (1,), "query_lengths": (1,)}  # default lengths fit the context
    assert calibration.calibrate(tiny_pair, **options).target_passes.axes["kv_length"] == (64,)


def test_short_turns_and_rare_points_come_more_often(monkeypatch):
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)

    def turn(name, seconds):
        nonlocal now
        now += seconds
        yield name, (seconds,), seconds

    def visits(end):
        turns = [("short", 1.0, 1), ("long", 16.0, 1), ("rare", 16.0, 2)]
        samples = calibration._take_turns([Turn(partial(turn, name, each), often) for name, each, often in turns], end)
        assert [sample.table for sample in samples[:3]] == ["short", "long", "rare"]
        assert all(sample.when > 0 and sample.point == (sample.seconds,) for sample in samples)
        return Counter(sample.table for sample in samples)

    found = visits(end=800.0)
    assert found["short"] == pytest.approx(4 * found["long"], abs=4)
    assert found["rare"] == pytest.approx(2 * found["long"], abs=2)
    assert visits(end=0.0) == {"short": 1, "long": 1, "rare": 1}


def test_spread_needs_four_samples_of_a_point():
    def spread(*taken):
        return calibration._spread([Sample("target_passes", (1,), 0.0, each) for each in taken])

    assert spread(1.0) is spread(1.0, 3.0, 2.0) is None  # the interquartile range of a single sample is 0
    assert spread(1.0, 1.0, 3.0, 3.0) == pytest.approx(1.0)
    once = [Sample("target_passes", (2,), 0.0, 1.0)]
    several = [Sample("overheads", (1,), 0.0, each) for each in (1.0, 1.0, 3.0, 3.0)]
    assert calibration._spread(several + once) == pytest.approx(1.0)


@pytest.fixture
def command(caches, monkeypatch):
    small = partial(cost_check.check, batches=(2,), draft_lengths=(0, 2), repeats=1, max_new_tokens=6)
    monkeypatch.setattr(cost_check, "check", small)
    monkeypatch.setattr(calibration, "LOOKED_AT", 1)
    grid = {"query_lengths": (1, 3, 6), "kv_lengths": (8,)}
    monkeypatch.setattr(calibration, "calibrate", partial(calibration.calibrate, **grid))

    def run(*arguments):
        result = invoke("calibrate", *arguments, "--batch-sizes", 2, "--seconds", 0, "--check", "--json")
        assert result.exit_code == 0, result.output
        return result, json.loads(result.stdout)

    return run


def test_command_measures_saves_and_checks(command, caches, monkeypatch):
    result, document = command()
    cost = costs_for(bass.load_pair())
    assert document["saved"] == str(caches / cost.file_name)
    assert document["models"] == cost.models and document["device"] == cost.device
    assert [line["batch"] for line in document["batches"]] == [2]
    assert {"T(1), ms", "T(6)/T(1)", "best k at α 0.8"} < document["batches"][0].keys()
    assert [(line["batch"], line["k"]) for line in document["check"]] == [(2, 0), (2, 2)]
    assert np.median([line["relative"] for line in document["check"]]) == pytest.approx(1)
    for line in document["check"]:
        assert line["ratio"] == pytest.approx(line["predicted_ms"] / line["real_ms"])
    assert "no step was timed 4 times" in result.stderr and "on an idle machine" in result.stderr


@pytest.mark.ci
def test_command_measures_dummy_weights(command):
    _, document = command("--weights", "dummy")
    assert len(document["check"]) == 2
    assert all(model["name"].endswith("(dummy weights)") for model in document["models"].values())
