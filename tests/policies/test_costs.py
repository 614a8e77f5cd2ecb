"""The measured cost model: interpolation, files, predictions, and whose costs are found for a pair."""

import dataclasses
import json
import os

import numpy as np
import pytest
import torch
from tiny import tiny_model

import bass_core as bass
from bass_core.models import fingerprints
from bass_core.policies import costs, policy_for
from bass_core.policies.costs import CostModel, Table, costs_for, costs_like
from bass_core.trace import Trace
from bass_lab.measure.modelled_costs import best_fixed_length, modelled_costs, predict
from bass_lab.measure.roofline import DRAFT_310M, H100, TARGET_8B, Roofline
from bass_lab.study import calibration

GRID = {"batch": (1, 4), "query_length": (1, 2, 5), "kv_length": (10, 30)}
SMALL = {"batches": (1, 2), "query_lengths": (1, 2, 6), "kv_lengths": (8, 32), "seconds": 0.0}


def passes(scale=1.0, **axes) -> Table:
    """scale · batch · (query length + 2) · (KV length + 1): linear in each of them."""
    return Table.of(GRID | axes, lambda b, q, n: scale * b * (q + 2) * (n + 1))


def made_up(attention="pad", **changes) -> CostModel:
    """Costs that can be worked out by hand, of models that do not exist."""
    models = {role: {"name": role, "fingerprint": role, "attention": attention} for role in ("target", "draft")}
    overheads = Table.of({"batch": (1, 4), "draft_length": (0, 8)}, lambda b, k: b + 10.0 * k)
    axes = {"batch": (1, 4), "draft_length": (1, 3, 8), "kv_length": (10, 30)}
    drafts = Table.of(axes, lambda b, k, n: 0.1 * b * (3 * k + 1) * (n + 1))
    return dataclasses.replace(CostModel("abacus", models, passes(), drafts, overheads), **changes)


@pytest.fixture(scope="module")
def pair():
    return bass.ModelPair(tiny_model(), tiny_model(noise=0.1))


@pytest.fixture(scope="module")
def measured(pair):
    return calibration.calibrate(pair, **SMALL)


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
    roof = Roofline(DRAFT_310M, H100)
    cost = modelled_costs(Roofline(TARGET_8B, H100), roof)
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
    flat = Table.of(GRID, lambda *_: 1.0)
    free = made_up(
        target_passes=flat,
        draft_phases=None,
        overheads=Table.of({"batch": (1,), "draft_length": (0,)}, lambda *_: 0.0),
    )
    length, gain = best_fixed_length(free, 1, 0.5, most=4)
    assert length == 4 and gain == pytest.approx(1.9375)  # 1 + 1/2 + 1/4 + 1/8 + 1/16
    dear = made_up()  # k drafts take longer than any tokens they could yield
    assert best_fixed_length(dear, 1, 0.1) == (0, 1.0)


@pytest.mark.parametrize(("alpha", "ms_per_token"), [(0.7, 2.17), (0.8, 1.64), (0.9, 1.06)])
def test_synthetic_costs_of_the_papers_sizes_give_their_bounds(alpha, ms_per_token):
    cost = modelled_costs(Roofline(TARGET_8B, H100), Roofline(DRAFT_310M, H100))
    regular = cost.step(8, 0, 512)
    assert cost.is_synthetic and regular == pytest.approx(5.30e-3, rel=0.005)
    assert 1e3 * regular / best_fixed_length(cost, 8, alpha, 512)[1] == pytest.approx(ms_per_token, abs=0.01)


def test_launches_come_on_top_of_synthetic_passes():
    roofs = Roofline(TARGET_8B, H100), Roofline(DRAFT_310M, H100)
    bare, launched = (
        modelled_costs(*roofs, target_launch=a, draft_launch=b, overhead=c) for a, b, c in ((0, 0, 0), (10, 2, 1))
    )
    assert launched.step(3, 5, 700) - bare.step(3, 5, 700) == pytest.approx(10 + 5 * 2 + 1)
    assert modelled_costs(roofs[0]).draft(3, 5, 700) == 0


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
    synthetic = modelled_costs(Roofline(TARGET_8B, H100))
    for cost in (made_up(), synthetic, measured):
        cost.save(tmp_path / "cost.json")
        assert same(CostModel.load(tmp_path / "cost.json"), cost)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ({"schema": 0}, "schema 2"),
        ({"device": None}, "device must be str"),
        ({"models": {}}, "JSON object"),
        ({"models": {"target": {"name": "a"}}}, "'fingerprint' is missing"),
        ({"measured": {"acceptance": [0, 0]}}, r"acceptance must be .* got \[0, 0\]"),
        ({"measured": {"acceptance": [3, -1]}}, "acceptance must be"),
        ({"measured": {"acceptance": [3, "1"]}}, "acceptance must be"),
        ({"measured": {"acceptance": 0.7}}, "acceptance must be"),
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


def test_a_file_with_more_in_it_is_read(tmp_path):
    """Older files also count accepted drafts."""
    path = tmp_path / "cost.json"
    made_up().save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"accepted": [[3, 0, 1]]}))
    assert same(CostModel.load(path), made_up())


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


@pytest.mark.parametrize("draft", ["draft", "feature_head"])
def test_the_embedded_drafts_costs_ship_and_are_found_on_every_cpu(draft, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where nothing was measured
    own = bass.load_pair(draft=draft, device="cpu")
    cost = costs_like(own)
    assert cost.models["draft"]["fingerprint"] == fingerprints(own)["draft"]
    assert cost.measured["acceptance"] and not cost.is_synthetic
    assert isinstance(policy_for(own, None), bass.Goodput)


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


@pytest.mark.parametrize("damage", ["cut off", "empty", "a folder"])
def test_damaged_costs_of_the_user_are_warned_of_and_those_that_ship_are_taken(pair, measured, caches, damage):
    path = caches / measured.file_name
    caches.mkdir(parents=True)
    measured.save(path)
    whole = path.read_text()
    path.unlink()
    path.mkdir() if damage == "a folder" else path.write_text(whole[: len(whole) // 2 if damage == "cut off" else 0])
    with pytest.warns(UserWarning, match=f"decoding without costs that were measured: .*{path.name}") as said:
        assert costs_for(pair) is None
    assert len(said) == 1 and "\n" not in str(said[0].message)
    with pytest.warns(UserWarning, match="decoding without costs"):
        bass.generate(pair, [[1, 2, 3]], max_new_tokens=4, eos_token_id=())
    costs.SHIPPED.mkdir()
    dataclasses.replace(measured, measured={"shipped": True}).save(costs.SHIPPED / path.name)
    with pytest.warns(UserWarning, match="decoding without costs"):
        assert costs_for(pair).measured == {"shipped": True}


def test_costs_of_another_pair_are_not_compared_with_runs(measured):
    with pytest.raises(ValueError, match="of the draft"):
        calibration.check(measured, bass.ModelPair(tiny_model()))
