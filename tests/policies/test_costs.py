import dataclasses
import json
import os

import numpy as np
import pytest
from tiny import tiny_model

import bass_core as bass
from bass_core.loading import measured_costs
from bass_core.loading.measured_costs import costs_for, costs_like, policy_for
from bass_core.loading.model_pair import fingerprints
from bass_core.loop.trace import Trace
from bass_core.policies.costs import CostModel, Table, step_seconds
from bass_core.policies.protocol import RowsView
from bass_lab.measure.modelled_costs import best_fixed_length, modelled_costs, predict
from bass_lab.measure.roofline import DRAFT_310M, H100, TARGET_8B, Roofline
from bass_lab.study import calibration, cost_check

GRID = {"batch": (1, 4), "query_length": (1, 2, 5), "kv_length": (10, 30)}
SMALL = {"batches": (1, 2), "query_lengths": (1, 2, 6), "kv_lengths": (8, 32), "seconds": 0.0}


def passes(scale=1.0, **axes) -> Table:
    return Table.of(GRID | axes, lambda b, q, n: scale * b * (q + 2) * (n + 1))


def made_up(attention="pad", **changes) -> CostModel:
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


def test_table_is_multilinear_inside_the_grid_and_beyond_it():
    for point in [(2, 3, 17.5), (1, 4.5, 30), (6, 3, 20), (8, 9, 50)]:
        b, q, n = point
        assert passes()(*point) == pytest.approx(b * (q + 2) * (n + 1))
    assert passes()(2, 3, 0) == passes()(2, 3, 10)
    stairs = np.random.default_rng(0).uniform(1, 2, (2, 3, 2))
    assert Table(GRID, stairs)(*np.meshgrid(*GRID.values(), indexing="ij")) == pytest.approx(stairs, rel=1e-12)
    found = passes()(np.array([[1], [3]]), np.array([1, 2, 4]), 20)  # arguments broadcast
    assert found.shape == (2, 3)
    assert found[1, 2] == pytest.approx(passes()(3, 4, 20)) and np.ndim(passes()(3, 4, 20)) == 0


@pytest.mark.parametrize(
    ("axis", "seconds", "batch", "expected"),
    [
        ((1, 2, 4), [3.0, 5.0, 4.0], [3, 6, 100], [4.5, 4, 4]),  # never below the edge beyond the last point
        ((1, 2, 4), [3.0, 4.0, 5.0], [6], [6]),
        ((2, 3, 4), [5.0, 4.0, 3.0], [1], [5]),  # constant below the first point
        ((1, 8, 9, 16), [1.0, 1.0, 2.0, 2.0], [4, 8, 9, 12], [1, 1, 2, 2]),
        ((4,), [2.0], [1, 4, 9], [2, 2, 2]),
    ],
)
def test_table_of_one_axis(axis, seconds, batch, expected):
    assert Table({"batch": axis}, np.array(seconds))(np.array(batch)) == pytest.approx(expected)


def test_wrong_grids_are_refused():
    for axis, seconds, reason in (
        ((2, 1), [1, 1], "increasing"),
        ((), [], "increasing"),
        ((1, float("nan")), [1, 1], "increasing"),
        ((1, 2), [1, 1, 1], "shape"),
        ((1, 2), [1, -1], "negative"),
        ((1, 2), [1, float("inf")], "finite"),
    ):
        with pytest.raises(ValueError, match=reason):
            Table({"batch": axis}, np.array(seconds))


def test_step_is_the_sum_of_its_parts():
    cost, lengths = made_up(), np.arange(6)
    for batch, n in ((1, 10), (3, 22.5), (8, 100)):
        parts = cost.target(batch, lengths + 1, n) + cost.draft(batch, lengths, n) + cost.overhead(batch, lengths)
        assert cost.step(batch, lengths, n) == pytest.approx(parts)
        assert cost.step(batch, 3, n) == pytest.approx(parts[3])


def test_draft_phases():
    assert made_up().draft(2, np.array([0, 1, 2, 8]), 20) == pytest.approx(0.1 * 2 * 21 * np.array([0, 4, 7, 25]))
    cost = made_up(draft_phases=None)  # drafts without a model need no pass
    assert cost.draft(2, np.arange(3), 20).tolist() == [0, 0, 0]
    assert cost.step(2, 4, 20) == pytest.approx(cost.target(2, 5, 20) + cost.overhead(2, 4))


@pytest.mark.parametrize(("attention", "kv_length"), [("pad", 640), ("ragged", 384)])
def test_policies_look_up_the_kv_length_of_their_rows(attention, kv_length):
    cost, ones = made_up(attention), np.ones(2, int)
    for scale in (1, 2):
        rows = RowsView(np.arange(2), ones, scale * np.array([128, 640]), ones, 99 * ones)
        assert step_seconds(cost, 4, rows) == pytest.approx(cost.step(2, np.arange(5), scale * kv_length))


def record(*steps) -> Trace:
    trace = Trace()
    for index, (kind, drafted, kv_length) in enumerate(steps):
        counts = {"k": 5, "drafted": np.array(drafted), "accepted": 0, "emitted": 1, "kv_length": np.array(kv_length)}
        times = {"draft_ms": 1.0, "verify_ms": 1.0, "other_ms": 1.0}
        trace.record_step(step=index, row=np.arange(len(drafted)), kind=kind, **counts, **times)
    return trace


@pytest.mark.parametrize(("attention", "first", "second"), [("pad", 25, 12), ("eager", 25, 12), ("ragged", 20, 12)])
def test_prediction_adds_the_decode_steps(attention, first, second):
    cost = made_up(attention)
    trace = record(("prefill", [0, 0], [15, 25]), ("decode", [4, 2], [16, 26]), ("decode", [0], [13]))
    assert predict(cost, trace) == pytest.approx(cost.step(2, 4, first) + cost.step(1, 0, second))
    assert predict(cost, record(("prefill", [0], [15]))) == 0
    with pytest.raises(ValueError, match="not recorded"):
        predict(cost, Trace("off"))


def test_best_fixed_length():
    overheads = Table.of({"batch": (1,), "draft_length": (0,)}, lambda *_: 0.0)
    free = made_up(target_passes=Table.of(GRID, lambda *_: 1.0), draft_phases=None, overheads=overheads)
    length, gain = best_fixed_length(free, 1, 0.5, most=4)
    assert length == 4 and gain == pytest.approx(1.9375)
    assert best_fixed_length(made_up(), 1, 0.1) == (0, 1.0)  # drafts take longer than regular steps


def test_modelled_costs():
    roofs = Roofline(TARGET_8B, H100), Roofline(DRAFT_310M, H100)
    cost = modelled_costs(*roofs)
    first, later = roofs[1].seconds(8, 2, 512), roofs[1].seconds(8, 1, 514)  # two tokens are fed, then one per pass
    assert cost.draft(8, 4, 512) == pytest.approx(first + 3 * later)
    assert cost.is_synthetic and cost.step(8, 0, 512) == pytest.approx(5.30e-3, rel=0.005)
    gain = best_fixed_length(cost, 8, 0.8, 512)[1]
    assert 1e3 * cost.step(8, 0, 512) / gain == pytest.approx(1.64, abs=0.01)  # ms per token, as in the paper
    launched = modelled_costs(*roofs, target_launch=10, draft_launch=2, overhead=1)
    assert launched.step(3, 5, 700) - cost.step(3, 5, 700) == pytest.approx(10 + 5 * 2 + 1)
    assert modelled_costs(roofs[0]).draft(3, 5, 700) == 0


def saved(cost: CostModel, folder, **changes):
    cost = dataclasses.replace(cost, **changes)
    folder.mkdir(parents=True, exist_ok=True)
    cost.save(folder / cost.file_name)
    return folder / cost.file_name


def same(a: CostModel, b: CostModel) -> bool:
    tables = ("target_passes", "draft_phases", "overheads")
    fields = [field.name for field in dataclasses.fields(CostModel) if field.name not in tables]
    return all(getattr(a, name) == getattr(b, name) for name in fields) and all(
        one is other or (one.axes == other.axes and (one.seconds == other.seconds).all())
        for one, other in ((getattr(a, name), getattr(b, name)) for name in tables)
    )


def test_saved_costs_are_loaded(tmp_path, measured):
    synthetic = modelled_costs(Roofline(TARGET_8B, H100))
    for cost in (made_up(), synthetic, measured):
        cost.save(tmp_path / "cost.json")
        assert same(CostModel.load(tmp_path / "cost.json"), cost)
        unknown = json.loads((tmp_path / "cost.json").read_text()) | {"accepted": [[3, 0, 1]]}
        (tmp_path / "cost.json").write_text(json.dumps(unknown))
        assert same(CostModel.load(tmp_path / "cost.json"), cost)


def test_damaged_file_is_refused(tmp_path):
    path = tmp_path / "cost.json"
    made_up().save(path)
    whole = json.loads(path.read_text())
    for damage, reason in (
        ("", ""),
        ("[]", ""),
        ("\xff", ""),
        ({"schema": 0}, "schema 2"),
        ({"device": None}, "device must be str"),
        ({"models": {}}, "JSON object"),
        ({"models": {"target": {"name": "a"}}}, "'fingerprint' is missing"),
        ({"measured": {"acceptance": [0, 0]}}, r"acceptance must be .* got \[0, 0\]"),
        ({"measured": {"acceptance": [3, -1]}}, "acceptance must be"),
        ({"measured": {"acceptance": 0.7}}, "acceptance must be"),
        ({"overheads": {"batch": [1]}}, "lacks draft_length, seconds"),
        ({"overheads": {"batch": [1], "draft_length": [0], "seconds": [[None]]}}, "finite"),
        ({"overheads": {"batch": 1, "draft_length": [0], "seconds": [[1]]}}, "no number"),
        ({"target_passes": {"batch": [1], "query_length": [1, 2], "kv_length": [1], "seconds": [[[1]]]}}, "shape"),
    ):
        path.write_bytes((damage if isinstance(damage, str) else json.dumps(whole | damage)).encode("latin-1"))
        with pytest.raises(ValueError, match=rf"cost\.json holds no costs.*{reason}.*bass calibrate"):
            CostModel.load(path)


def test_costs_are_found_by_pair_and_device(pair, measured, caches, monkeypatch):
    def policy():
        return bass.generate(pair, [[1, 2, 3]], max_new_tokens=4, eos_token_id=()).trace.meta["policy"]

    assert costs_for(pair) is None and policy() == "FixedLength(k=5)"
    saved(measured, caches)
    assert same(costs_for(pair), measured) and policy().startswith("Goodput(")
    assert costs_for(bass.ModelPair(pair.draft, pair.target)) is None
    assert costs_for(bass.ModelPair(pair.target)) is None
    monkeypatch.setattr(measured_costs, "device_name", lambda device: "another")
    assert costs_for(pair) is None


def test_shipped_costs_of_another_device_of_the_kind(pair, measured, caches):
    assert costs_like(pair) is None
    for device, kind in (("A GPU", "cuda"), ("Some CPU", "cpu")):
        saved(measured, measured_costs.SHIPPED, device=device, measured={"device_type": kind})
    assert costs_for(pair) is None and costs_like(pair).device == "Some CPU"
    assert costs_like(bass.ModelPair(pair.target)) is None
    saved(measured, caches)
    assert same(costs_like(pair), measured)


@pytest.mark.parametrize("draft", ["draft", "feature_head"])
def test_costs_of_the_embedded_drafts_ship(draft, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # a folder without measured costs
    own = bass.load_pair(draft=draft, device="cpu")
    cost = costs_like(own)
    assert cost.models["draft"]["fingerprint"] == fingerprints(own)["draft"]
    assert cost.measured["acceptance"] and not cost.is_synthetic
    assert isinstance(policy_for(own, None), bass.Goodput)


def test_latest_measured_costs_precede_shipped_ones(pair, measured, caches):
    saved(measured, measured_costs.SHIPPED, measured={"shipped": True})
    assert costs_for(pair).measured == {"shipped": True}
    for seconds, changed in ((1, 10**9), (2, 2 * 10**9)):
        os.utime(saved(measured, caches, measured={"seconds": seconds}), ns=(changed, changed))
        assert costs_for(pair).measured == {"seconds": seconds}


def test_costs_of_another_pair_are_refused(pair, measured, caches):
    caches.mkdir(parents=True)
    made_up().save(caches / measured.file_name)
    with pytest.raises(ValueError, match="belong to the device 'abacus', not to"):
        costs_for(pair)
    with pytest.raises(ValueError, match="belong to the draft"):
        cost_check.check(measured, bass.ModelPair(tiny_model()))


@pytest.mark.parametrize("damage", ["cut off", "a folder"])
def test_damaged_costs_give_a_warning_and_the_shipped_costs(pair, measured, caches, damage):
    path = saved(measured, caches)
    whole = path.read_text()
    path.unlink()
    path.mkdir() if damage == "a folder" else path.write_text(whole[: len(whole) // 2])
    with pytest.warns(UserWarning, match=f"decoding without measured costs: .*{path.name}") as said:
        assert costs_for(pair) is None
    assert len(said) == 1 and "\n" not in str(said[0].message)
    with pytest.warns(UserWarning, match="decoding without measured costs"):
        bass.generate(pair, [[1, 2, 3]], max_new_tokens=4, eos_token_id=())
    saved(measured, measured_costs.SHIPPED, measured={"shipped": True})
    with pytest.warns(UserWarning, match="decoding without measured costs"):
        assert costs_for(pair).measured == {"shipped": True}
