"""The measured cost model: interpolation, files, predictions, and that calibrating it gives all it has."""

import dataclasses
import json
import os
from functools import partial

import numpy as np
import pytest
import torch
from recording import use_on_cpu
from tiny import tiny_model
from typer.testing import CliRunner

import bass_core as bass
from bass_core import calibration, cli, costs
from bass_core.cost_model import Roofline
from bass_core.costs import CostModel, Table, best_fixed_length, costs_for, costs_like, predict
from bass_core.prompt_sets import prompt_set
from bass_core.trace import Trace

GRID = {"batch": (1, 4), "query_length": (1, 2, 5), "kv_length": (10, 30)}
SMALL = {"batches": (1, 2), "query_lengths": (1, 2, 6), "kv_lengths": (8, 32), "seconds": 0.0}


def passes(scale=1.0, **axes) -> Table:
    """scale · batch · (query length + 2) · (KV length + 1): linear in each of them."""
    return costs.table(GRID | axes, lambda b, q, n: scale * b * (q + 2) * (n + 1))


def made_up(attention="pad", **changes) -> CostModel:
    """Costs that can be worked out by hand, of models that do not exist."""
    models = {role: {"name": role, "fingerprint": role, "attention": attention} for role in ("target", "draft")}
    overheads = costs.table({"batch": (1, 4), "draft_length": (0, 8)}, lambda b, k: b + 10.0 * k)
    axes = {"batch": (1, 4), "draft_length": (1, 3, 8), "kv_length": (10, 30)}
    drafts = costs.table(axes, lambda b, k, n: 0.1 * b * (3 * k + 1) * (n + 1))
    return dataclasses.replace(CostModel("abacus", models, passes(), drafts, overheads), **changes)


@pytest.fixture(scope="module")
def pair():
    return bass.ModelPair(tiny_model(), tiny_model(noise=0.1))


@pytest.fixture(scope="module")
def measured(pair):
    return calibration.calibrate(pair, **SMALL)


@pytest.fixture
def caches(tmp_path, monkeypatch):
    """Nothing measured here before, and nothing shipped."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(costs, "SHIPPED", tmp_path / "shipped")
    return costs.cache_folder()


# --- tables ---------------------------------------------------------------------------------------


def test_a_table_has_its_values_at_the_grid_points():
    stairs = np.random.default_rng(0).uniform(1, 2, (2, 3, 2))
    found = Table(GRID, stairs)(*np.meshgrid(*GRID.values(), indexing="ij"))
    assert found == pytest.approx(stairs, rel=1e-12)


def test_a_table_follows_a_multilinear_function_inside_the_grid_and_beyond_it():
    for point in [(2, 3, 17.5), (1, 4.5, 30), (6, 3, 20), (8, 9, 50)]:
        b, q, n = point
        assert passes()(*point) == pytest.approx(b * (q + 2) * (n + 1))


def test_arguments_may_be_arrays_that_broadcast():
    found = passes()(np.array([[1], [3]]), np.array([1, 2, 4]), 20)
    assert found.shape == (2, 3)
    assert found[1, 2] == pytest.approx(passes()(3, 4, 20)) and np.ndim(passes()(3, 4, 20)) == 0


def test_beyond_the_last_point_a_table_never_falls_below_its_edge():
    falling = Table({"batch": (1, 2, 4)}, np.array([3.0, 5.0, 4.0]))
    assert falling(3) == pytest.approx(4.5)
    assert falling(np.array([6, 100])).tolist() == [4, 4]
    rising = Table({"batch": (1, 2, 4)}, np.array([3.0, 4.0, 5.0]))
    assert rising(6) == pytest.approx(6)


def test_below_the_first_point_a_table_keeps_its_value():
    assert passes()(2, 3, 0) == passes()(2, 3, 10)
    assert Table({"batch": (2, 3, 4)}, np.array([5.0, 4.0, 3.0]))(1) == 5


def test_stairs_are_kept():
    stairs = Table({"batch": (1, 8, 9, 16)}, np.array([1.0, 1.0, 2.0, 2.0]))
    assert stairs(np.array([4, 8, 9, 12])).tolist() == [1, 1, 2, 2]


def test_one_point_is_a_constant():
    assert Table({"batch": (4,)}, np.array([2.0]))(np.array([1, 4, 9])).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("axis", "seconds", "reason"),
    [
        ((2, 1), [1, 1], "increasing"),
        ((), [], "increasing"),
        ((1, float("nan")), [1, 1], "increasing"),
        ((1, 2), [1, 1, 1], "shape"),
        ((1, 2), [1, -1], "negative"),
        ((1, 2), [1, float("inf")], "finite"),
    ],
)
def test_a_table_refuses_what_is_no_grid(axis, seconds, reason):
    with pytest.raises(ValueError, match=reason):
        Table({"batch": axis}, np.array(seconds))


# --- the parts of a step --------------------------------------------------------------------------


def test_a_step_is_the_sum_of_its_parts():
    cost, lengths = made_up(), np.arange(6)
    for batch, n in ((1, 10), (3, 22.5), (8, 100)):
        parts = cost.target(batch, lengths + 1, n) + cost.draft(batch, lengths, n) + cost.overhead(batch, lengths)
        assert cost.step(batch, lengths, n) == pytest.approx(parts)
        assert cost.step(batch, 3, n) == pytest.approx(parts[3])


def test_a_draft_phase_is_looked_up_as_a_whole():
    cost = made_up()
    assert cost.draft(2, np.array([0, 1, 2, 8]), 20) == pytest.approx(0.1 * 2 * 21 * np.array([0, 4, 7, 25]))


def test_a_synthetic_draft_phase_feeds_two_tokens_and_then_one_at_a_time():
    roof = Roofline(costs.DRAFT_310M, costs.H100)
    cost = CostModel.synthetic(Roofline(costs.TARGET_8B, costs.H100), roof)
    assert cost.draft(8, 1, 512) == pytest.approx(roof.seconds(8, 2, 512))
    later = roof.seconds(8, 1, 514)  # 2 more are cached on the whole
    assert cost.draft(8, 4, 512) == pytest.approx(roof.seconds(8, 2, 512) + 3 * later)


def test_drafts_without_a_model_cost_no_pass():
    cost = made_up(draft_phases=None)
    assert cost.draft(2, np.arange(3), 20).tolist() == [0, 0, 0]
    assert cost.step(2, 4, 20) == pytest.approx(cost.target(2, 5, 20) + cost.overhead(2, 4))


# --- predictions ----------------------------------------------------------------------------------


def record(*steps) -> Trace:
    trace = Trace()
    for index, (kind, drafted, kv_length) in enumerate(steps):
        counts = {"k": 5, "drafted": np.array(drafted), "accepted": 0, "emitted": 1, "kv_length": np.array(kv_length)}
        times = {"draft_ms": 1.0, "verify_ms": 1.0, "other_ms": 1.0}
        trace.record_step(step=index, row=np.arange(len(drafted)), kind=kind, **counts, **times)
    return trace


@pytest.mark.parametrize(("attention", "first", "second"), [("pad", 25, 12), ("eager", 25, 12), ("ragged", 20, 12)])
def test_prediction_adds_up_the_decode_steps(attention, first, second):
    cost = made_up(attention)
    trace = record(("prefill", [0, 0], [15, 25]), ("decode", [4, 2], [16, 26]), ("decode", [0], [13]))
    assert predict(cost, trace) == pytest.approx(cost.step(2, 4, first) + cost.step(1, 0, second))


def test_prediction_of_nothing():
    assert predict(made_up(), record(("prefill", [0], [15]))) == 0
    with pytest.raises(ValueError, match="not recorded"):
        predict(made_up(), Trace("off"))


def test_prediction_takes_the_trace_of_a_real_run(pair, measured):
    ids = [torch.arange(3, 9), torch.arange(3, 15)]
    out = bass.generate(pair, ids, max_new_tokens=12, draft_length=3, eos_token_id=())
    assert predict(measured, out.trace) > 0


def test_the_best_length_weighs_tokens_against_time():
    flat = costs.table(GRID, lambda *_: 1.0)
    free = made_up(
        target_passes=flat,
        draft_phases=None,
        overheads=costs.table({"batch": (1,), "draft_length": (0,)}, lambda *_: 0.0),
    )
    length, gain = best_fixed_length(free, 1, 0.5, most=4)
    assert length == 4 and gain == pytest.approx(1.9375)  # 1 + 1/2 + 1/4 + 1/8 + 1/16
    dear = made_up()  # k drafts take longer than any tokens they could yield
    assert best_fixed_length(dear, 1, 0.1) == (0, 1.0)


@pytest.mark.parametrize(("alpha", "ms_per_token"), [(0.7, 2.17), (0.8, 1.64), (0.9, 1.06)])
def test_synthetic_costs_of_the_papers_sizes_give_their_bounds(alpha, ms_per_token):
    cost = CostModel.synthetic(Roofline(costs.TARGET_8B, costs.H100), Roofline(costs.DRAFT_310M, costs.H100))
    regular = cost.step(8, 0, 512)
    assert cost.is_synthetic and regular == pytest.approx(5.30e-3, rel=0.005)
    assert 1e3 * regular / best_fixed_length(cost, 8, alpha, 512)[1] == pytest.approx(ms_per_token, abs=0.01)


def test_launches_come_on_top_of_synthetic_passes():
    roofs = Roofline(costs.TARGET_8B, costs.H100), Roofline(costs.DRAFT_310M, costs.H100)
    bare, launched = (
        CostModel.synthetic(*roofs, target_launch=a, draft_launch=b, overhead=c) for a, b, c in ((0, 0, 0), (10, 2, 1))
    )
    assert launched.step(3, 5, 700) - bare.step(3, 5, 700) == pytest.approx(10 + 5 * 2 + 1)
    assert CostModel.synthetic(roofs[0]).draft(3, 5, 700) == 0


# --- files ----------------------------------------------------------------------------------------


def same(a: CostModel, b: CostModel) -> bool:
    tables = ("target_passes", "draft_phases", "overheads")
    plain = all(
        getattr(a, name.name) == getattr(b, name.name)
        for name in dataclasses.fields(CostModel)
        if name.name not in tables
    )
    return plain and all(
        (getattr(a, name) is None and getattr(b, name) is None)
        or (
            getattr(a, name).axes == getattr(b, name).axes
            and (getattr(a, name).seconds == getattr(b, name).seconds).all()
        )
        for name in tables
    )


def test_costs_come_back_from_a_file_as_they_were(tmp_path, measured):
    synthetic = CostModel.synthetic(Roofline(costs.TARGET_8B, costs.H100))
    for cost in (made_up(), made_up(accepted=((3, 0, 1), (2, 2, 2))), synthetic, measured):
        cost.save(tmp_path / "cost.json")
        assert same(CostModel.load(tmp_path / "cost.json"), cost)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ({"schema": 0}, "schema 2"),
        ({"device": None}, "device must be str"),
        ({"models": {}}, "JSON object"),
        ({"models": {"target": {"name": "a"}}}, "'fingerprint' is missing"),
        ({"accepted": [[1, -1]]}, "accepted must be counts"),
        ({"accepted": [[1, 2], [3]]}, "two or more for each text"),
        ({"accepted": [1, 2]}, "two or more for each text"),
        ({"overheads": {"batch": [1]}}, "lacks draft_length, seconds"),
        ({"overheads": {"batch": [1], "draft_length": [0], "seconds": [[None]]}}, "finite"),
        ({"overheads": {"batch": 1, "draft_length": [0], "seconds": [[1]]}}, "no number"),
        ({"overheads": {"batch": ["1", "x"], "draft_length": [0], "seconds": [[1], [1]]}}, "no number"),
        ({"target_passes": {"batch": [1], "query_length": [1, 2], "kv_length": [1], "seconds": [[[1]]]}}, "shape"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_holds_no_costs_is_refused_by_name(tmp_path, damage, reason):
    path = tmp_path / "cost.json"
    made_up().save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    with pytest.raises(ValueError, match=rf"cost\.json holds no costs.*{reason}.*bass calibrate"):
        CostModel.load(path)


def test_a_file_of_before_acceptance_was_counted_is_read(tmp_path):
    path = tmp_path / "cost.json"
    made_up().save(path)
    document = json.loads(path.read_text())
    del document["accepted"]
    path.write_text(json.dumps(document))
    assert CostModel.load(path).accepted is None


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 1}', "\xff"])
def test_a_file_that_is_no_document_is_refused(tmp_path, text):
    path = tmp_path / "cost.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"cost\.json holds no costs"):
        CostModel.load(path)


def test_costs_are_found_by_pair_and_device(pair, measured, caches, monkeypatch):
    assert costs_for(pair) is None
    caches.mkdir(parents=True)
    measured.save(caches / measured.file_name)
    assert same(costs_for(pair), measured)
    assert costs_for(bass.ModelPair(pair.draft, pair.target)) is None
    assert costs_for(bass.ModelPair(pair.target)) is None
    monkeypatch.setattr(costs, "device_name", lambda device: "another")
    assert costs_for(pair) is None


def test_costs_measured_here_go_before_those_that_ship(pair, measured, caches):
    costs.SHIPPED.mkdir()
    dataclasses.replace(measured, measured={"shipped": True}).save(costs.SHIPPED / measured.file_name)
    assert costs_for(pair).measured == {"shipped": True}
    caches.mkdir(parents=True)
    measured.save(caches / measured.file_name)
    assert costs_for(pair).measured == measured.measured


def test_shipped_costs_of_the_pair_on_another_device_of_its_kind_are_better_than_none(pair, measured, caches):
    assert costs_like(pair) is None
    costs.SHIPPED.mkdir()
    for device, kind in (("A GPU", "cuda"), ("Some CPU", "cpu")):
        elsewhere = dataclasses.replace(measured, device=device, measured={"device_type": kind})
        elsewhere.save(costs.SHIPPED / elsewhere.file_name)
    assert costs_for(pair) is None and costs_like(pair).device == "Some CPU"
    assert costs_like(bass.ModelPair(pair.target)) is None
    caches.mkdir(parents=True)
    measured.save(caches / measured.file_name)
    assert same(costs_like(pair), measured)


def test_costs_that_were_measured_again_are_found_at_once(pair, measured, caches):
    caches.mkdir(parents=True)
    path = caches / measured.file_name
    for seconds, changed in ((1, 10**9), (2, 2 * 10**9)):
        dataclasses.replace(measured, measured={"seconds": seconds}).save(path)
        os.utime(path, ns=(changed, changed))
        assert costs_for(pair).measured == {"seconds": seconds}


def test_costs_under_the_name_of_another_pair_are_refused(pair, measured, caches):
    caches.mkdir(parents=True)
    made_up().save(caches / measured.file_name)
    with pytest.raises(ValueError, match="of the device 'abacus', not of"):
        costs_for(pair)


def test_costs_of_another_pair_are_not_compared_with_runs(measured):
    with pytest.raises(ValueError, match="of the draft"):
        calibration.check(measured, bass.ModelPair(tiny_model()))


# --- measuring ------------------------------------------------------------------------------------


def test_calibration_measures_every_point(pair, measured):
    axes = {"batch": SMALL["batches"], "query_length": SMALL["query_lengths"], "kv_length": SMALL["kv_lengths"]}
    assert measured.target_passes.axes == axes
    phases = {"batch": (1, 2), "draft_length": (1, 2, 4), "kv_length": SMALL["kv_lengths"]}
    assert measured.draft_phases.axes == phases
    assert measured.overheads.axes == {"batch": (1, 2), "draft_length": (0, 1, 2, 4)}
    for found in (measured.target_passes, measured.draft_phases, measured.overheads):
        assert (found.seconds > 0).all()
    measured.check_pair(pair)
    assert not measured.is_synthetic and measured.kv_of_rows == "max"
    assert measured.models["target"]["attention"] == "pad" and measured.measured["samples"]["least"] >= 1


def test_where_steps_are_recorded_their_phases_are_timed(pair, monkeypatch):
    """Passes inside a recording show no beginning: a table of passes would be empty, and overheads all of a step."""
    use_on_cpu(monkeypatch)
    shape = {"batches": (1, 2), "query_lengths": (1, 2, 3), "kv_lengths": (24, 48)}
    found = calibration.calibrate(pair, **shape, seconds=0)
    assert found.measured["compile"] == "graphs"
    assert found.target_passes.axes == {"batch": (1, 2), "query_length": (1, 2, 3), "kv_length": (24, 48)}
    assert found.draft_phases.axes == {"batch": (1, 2), "draft_length": (1, 2), "kv_length": (24, 48)}
    for table in (found.target_passes, found.draft_phases, found.overheads):
        assert (table.seconds > 0).all()
    assert found.measured["samples"]["least"] >= calibration.REPLAYS


def test_recorded_rows_stand_about_where_the_table_says(pair, monkeypatch):
    use_on_cpu(monkeypatch)
    seen, original = [], bass.Session._record

    def note(self, kind, planned, context, *rest):
        seen.append((planned.tolist(), context.lengths_host.tolist()))
        return original(self, kind, planned, context, *rest)

    monkeypatch.setattr(bass.Session, "_record", note)
    list(calibration._recorded_steps(pair, 2, 40, [0, 1, 3], 0.0))
    decoded = seen[1:]
    assert [planned for planned, _ in decoded] == [[k, k] for k in (0, 1, 3) for _ in range(5)]
    assert [rows[0] - 1 for _, rows in decoded] == list(range(34, 49))  # cached positions, 40 in the middle


def test_calibration_times_the_passes_and_the_rest_of_a_step(pair, monkeypatch):
    """A clock that every forward pass moves by its tokens, and reading it by a little."""
    now = 0.0

    def read() -> float:
        nonlocal now
        now += 1e-6
        return now

    def move(tokens: int) -> None:
        nonlocal now
        now += tokens

    for model, each in ((pair.target, 1.0), (pair.draft, 0.01)):
        original = model.forward

        def forward(*args, original=original, each=each, **kwargs):
            move(each * kwargs["input_ids"].numel())
            return original(*args, **kwargs)

        monkeypatch.setattr(model, "forward", forward)
    monkeypatch.setattr("time.perf_counter", read)
    cost = calibration.calibrate(pair, **SMALL)
    assert cost.target(2, 6, 32) == pytest.approx(12, abs=1e-4)
    assert cost.draft(2, 3, 8) == pytest.approx(0.08, abs=1e-4)  # (2 + 1 + 1) tokens of two rows
    assert cost.overhead(2, 4) < 1e-3


def test_calibration_leaves_the_models_as_they_were(pair):
    before = pair.target.config._attn_implementation, len(pair.target._forward_hooks)
    calibration.calibrate(pair, **SMALL)
    assert (pair.target.config._attn_implementation, len(pair.target._forward_hooks)) == before


def test_calibration_without_a_draft_model():
    cost = calibration.calibrate(bass.ModelPair(tiny_model()), **SMALL)
    assert cost.draft_phases is None and cost.models["draft"]["attention"] is None
    assert (cost.step(2, np.arange(4), 20) > 0).all()


def test_one_model_may_be_both():
    model = tiny_model()
    cost = calibration.calibrate(bass.ModelPair(model, model), **SMALL)
    assert (cost.draft_phases.seconds > 0).all() and (cost.overheads.seconds > 0).all()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kv_lengths": (8, 91)}, "beyond the context of 96"),
        ({"batches": (2, 2)}, "batches must be increasing"),
        ({"query_lengths": ()}, "query_lengths must be increasing"),
        ({"batches": (0, 1)}, "batches must be >= 1"),
    ],
)
def test_calibration_refuses_a_grid_that_does_not_fit(pair, options, reason):
    with pytest.raises(ValueError, match=reason):
        calibration.calibrate(pair, **SMALL | options)


def test_lengths_that_fit_the_context_are_the_default(pair):
    options = SMALL | {"kv_lengths": None, "batches": (1,), "query_lengths": (1,)}
    assert calibration.calibrate(pair, **options).target_passes.axes["kv_length"] == (64,)


def test_short_turns_come_more_often_than_long_ones(monkeypatch):
    now, taken = 0.0, []
    monkeypatch.setattr("time.perf_counter", lambda: now)

    def turn(seconds):
        nonlocal now
        now += seconds
        taken.append(seconds)
        yield seconds, seconds

    samples = calibration._take_turns([partial(turn, 1.0), partial(turn, 16.0)], end=400.0)
    assert len(samples[1.0]) == pytest.approx(4 * len(samples[16.0]), abs=4)
    assert taken[:2] == [1.0, 16.0]
    samples = calibration._take_turns([partial(turn, 1.0), partial(turn, 16.0)], end=0.0)
    assert {key: len(values) for key, values in samples.items()} == {1.0: 1, 16.0: 1}


def test_accepted_drafts_are_counted_where_nothing_cuts_them(monkeypatch):
    monkeypatch.setattr(calibration, "TEXTS", 2)
    embedded = bass.load_pair(dtype="float32")
    found = calibration.accepted(embedded)
    texts = [text for name in ("mini", "library") for text in prompt_set(name)[-2:]]
    steps = bass.generate(embedded, texts, draft_length=8, max_new_tokens=48, eos_token_id=()).trace.steps
    whole = steps.query("kind == 'decode' and drafted == 8")
    assert found == tuple(tuple(np.bincount(part.accepted, minlength=9)) for _, part in whole.groupby("row"))
    assert len(found) == 4 and sum(map(sum, found)) > 20
    assert calibration.accepted(bass.ModelPair(tiny_model(), tiny_model(noise=0.1))) is None


def test_the_command_measures_saves_and_checks(caches, monkeypatch):
    small = partial(calibration.check, batches=(2,), draft_lengths=(0, 2), repeats=1, max_new_tokens=6)
    monkeypatch.setattr(calibration, "check", small)
    monkeypatch.setattr(calibration, "QUIET", -1.0)
    result = CliRunner().invoke(cli.app, ["calibrate", "--rows", "2", "--seconds", "0", "--check"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout.splitlines()[-1])
    cost = costs_for(bass.load_pair())
    assert document["saved"] == str(caches / cost.file_name)
    assert document["models"] == cost.models and document["device"] == cost.device
    assert [line["batch"] for line in document["batches"]] == [2]
    assert {"T(1), ms", "T(6)/T(1)", "best k at α 0.8"} < document["batches"][0].keys()
    assert [(line["batch"], line["k"]) for line in document["check"]] == [(2, 0), (2, 2)]
    assert np.median([line["relative"] for line in document["check"]]) == pytest.approx(1)
    for line in document["check"]:
        assert line["ratio"] == pytest.approx(line["predicted_ms"] / line["real_ms"])
    assert "T(6)/T(1)" in result.stdout and "measure again when the machine is idle" in result.stderr


def test_the_command_measures_pairs_with_dummy_weights(caches, monkeypatch):
    """They have no tokenizer: prompts are ids."""
    grid = {"query_lengths": (1, 3), "kv_lengths": (8,)}
    monkeypatch.setattr(calibration, "calibrate", partial(calibration.calibrate, **grid))
    small = partial(calibration.check, batches=(2,), draft_lengths=(0, 2), repeats=1, max_new_tokens=6)
    monkeypatch.setattr(calibration, "check", small)
    result = CliRunner().invoke(
        cli.app, ["calibrate", "--weights", "dummy", "--rows", "2", "--seconds", "0", "--check"]
    )
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout.splitlines()[-1])
    assert len(document["check"]) == 2
    assert all(model["name"].endswith("(dummy weights)") for model in document["models"].values())


def test_the_command_refuses_in_one_line(tmp_path):
    result = CliRunner().invoke(cli.app, ["calibrate", str(tmp_path / "nothing")])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: cannot load") and result.stderr.count("\n") == 1
