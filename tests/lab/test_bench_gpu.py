"""`make bench-gpu` without a GPU: the plan, the arithmetic, and a dry run on the CPU."""

import json
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial

import pandas as pd
import pytest
import torch
from recording import use_on_cpu
from tiny import greedy_alone, ragged_prompts, tiny_model

import bass_core as bass
from bass_core.policies.goodput import Goodput
from bass_core.policies.protocol import BassHeuristic
from bass_core.session import Session
from bass_lab.checks import plain_decoding
from bass_lab.gpu import decoding
from bass_lab.measure import records, repeated_way
from bass_lab.measure.modelled_costs import modelled_costs
from bass_lab.measure.plan import DRY, PEER, PEERS, REGULAR, USELESS, PlannedMethod, batched, plan, policy_of
from bass_lab.measure.roofline import H100, Roofline, StepWork
from bass_lab.named_pairs import SHAPES, named_config

METHODS = ["regular", "batched", "transformers", "batched", "single"]  # methods of the dry run


def make_small(monkeypatch):
    monkeypatch.setattr(repeated_way, "WARM_UPS", 0)
    monkeypatch.setattr(decoding, "checked", partial(decoding.checked, new=4))
    monkeypatch.setattr(decoding, "load_pair", bass.load_pair)
    monkeypatch.setattr(decoding, "named_pair", lambda *_, **__: tiny_pair())


def tiny_pair():
    return bass.ModelPair(tiny_model(num_hidden_layers=1), tiny_model(num_hidden_layers=1, noise=0.1))


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    output = tmp_path_factory.mktemp("bench") / "gpu.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        patch.setattr(decoding, "measure_device", partial(decoding.measure_device, seconds=0.02))
        code = decoding.main(["--dry-run", "--repeats", "2", "--output", str(output)])
    return code, records.read(output), output.parent


def test_dry_run_writes_a_record_per_method(dry_run):
    code, lines, folder = dry_run
    assert code == 0
    assert [line["method"] for line in lines] == METHODS
    for line in lines:
        assert line["synthetic"] and line["shape"] == "embedded"
        if line["method"] == "transformers":
            assert line["exactness"] == {"passed": None}  # not our decoding
        else:
            assert line["exactness"]["passed"]
            assert line["exactness"]["greedy"] == line["exactness"]["coupled"] == "4 of 4 rows"
            assert all(line["exactness"][name] == line[name] for name in ("attention", "compile"))
        assert len(line["seconds"]) == 2
        if line["method"] != "transformers":
            assert 0 < line["utilisation"]["emitted"] <= line["utilisation"]["verified"] < 1
            assert 0 < line["host_share"] < 1
    text = decoding.table(lines).splitlines()
    assert "synthetic: dummy weights" in text[0] and [line.split()[0] for line in text[2:]] == METHODS
    assert len(records.load_records(folder)) == len(lines)
    regular, fixed, *_ = lines
    assert (regular["policy"], regular["alpha"], regular["tokens_per_step"]) == ("", None, 1.0)
    assert fixed["policy"].startswith("k=") and fixed["alpha"] == 0.8 and fixed["tokens_per_step"] > 1


def test_run_out_of_time_reports_missing_methods_and_fails(quick, capsys):
    assert decoding.main(["--dry-run", "--seconds", "0.001"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["left_out"] == len(METHODS)


@pytest.fixture
def quick(monkeypatch):
    make_small(monkeypatch)
    monkeypatch.setattr(decoding, "checked", lambda *_: {"passed": True})
    monkeypatch.setattr(decoding, "measure_device", lambda *_: H100)


@pytest.fixture
def one_way(monkeypatch, quick):
    monkeypatch.setattr(decoding, "DRY", replace(DRY, ways=(REGULAR, batched(0.8, 3))))


def test_timing_comes_first_and_a_failed_check_is_an_exit_code(one_way, monkeypatch, tmp_path):
    output = tmp_path / "gpu.jsonl"

    def failing(*_):
        assert [line["exactness"] for line in records.read(output)] == [{"passed": None}] * 2
        return {"passed": False}

    monkeypatch.setattr(decoding, "checked", failing)
    assert decoding.main(["--dry-run", "--repeats", "1", "--output", str(output)]) == 1
    assert [line["exactness"] for line in records.read(output)] == [{"passed": False}] * 2


def test_resumed_run_completes_missing_checks(one_way, monkeypatch, capsys, tmp_path):
    output = tmp_path / "gpu.jsonl"
    given = ["--dry-run", "--resume", "--repeats", "1", "--output", str(output)]

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(decoding, "checked", killed)
    with pytest.raises(KeyboardInterrupt):
        decoding.main(given)
    monkeypatch.setattr(decoding, "checked", lambda *_: {"passed": True})
    assert decoding.main(given) == 0
    assert [line["exactness"] for line in records.read(output)] == [{"passed": True}] * 2
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["ways"], summary["left_out"], summary["passed"]) == (0, 0, True)
    monkeypatch.setattr(decoding, "checked", killed)  # no check is left
    assert decoding.main(given) == 0


def test_broken_regular_session_is_replaced(one_way, monkeypatch, tmp_path):
    step, steps = bass.Session.step, Counter()

    def failing(session):
        steps[session] += 1
        if len(steps) == 2 and steps[session] == 3:
            raise RuntimeError("out of memory")
        return step(session)

    monkeypatch.setattr(bass.Session, "step", failing)
    assert decoding.main(["--dry-run", "--repeats", "1", "--output", str(tmp_path / "gpu.jsonl")]) == 1
    lines = records.read(tmp_path / "gpu.jsonl")
    assert [line.get("reason") for line in lines] == ["RuntimeError: out of memory", None]


@pytest.mark.parametrize("quick", [True, False])
def test_plan_has_every_method_of_the_records(quick):
    groups = defaultdict(tuple)
    for group in plan(quick) + PEERS:
        groups[group.shape, group.batch] += group.ways
    eight, many = groups["paper-7.8b", 8], groups["paper-7.8b", 32]
    assert {way.attention for way in eight if way.method == "batched"} == {"ragged", "pad", "split"}
    assert {way.compile for way in eight if way.method == "regular"} == {"compiled+graphs", "compiled", "graphs"}
    assert {way.method for way in eight} == {"regular", "single", "batched", "transformers"}
    assert {way.alpha for way in eight} >= {0.7, 0.8, 0.9}
    assert {way.draft for way in eight} >= {"best", "goodput", "algorithm 1"}
    assert {0.7, 0.8, USELESS} <= {way.alpha for way in many}
    batches = {batch for shape, batch in groups if shape == "paper-7.8b"}
    assert batches == ({1, 8, 32, 64} if quick else {1, 2, 4, 8, 16, 32, 64})
    assert ("llama-3.1-8b", 8) in groups or quick
    assert all(ways[0] == REGULAR for ways in groups.values())


def roofline_costs(**launches):
    work = [StepWork.of(named_config(shape, "")) for shape in (SHAPES["paper-7.8b"].target, SHAPES["paper-7.8b"].draft)]
    return modelled_costs(*(Roofline(each, H100) for each in work), **launches)


def test_draft_length_policy_of_a_method():
    cost = roofline_costs()
    assert policy_of(REGULAR, 8, cost, 576) == 0
    assert policy_of(PlannedMethod("batched", 3, 0.8), 8, cost, 576) == 3
    useless, right = (policy_of(batched(alpha, "goodput"), 8, cost, 576) for alpha in (USELESS, 0.8))
    assert isinstance(right, Goodput)
    assert useless.alphas.expected[0] < 0.2 < 5 < right.alphas.expected[0]  # as calibrated
    assert isinstance(policy_of(batched(0.8, "algorithm 1"), 8, cost, 576), BassHeuristic)
    best = [policy_of(batched(alpha), 8, cost, 576) for alpha in (0.7, 0.8, 0.9)]
    assert best == sorted(best) and len(set(best)) == 3
    assert policy_of(PlannedMethod("single", "best", 0.8), 32, cost, 576) == policy_of(batched(0.8), 1, cost, 576)


def test_costs_include_time_beyond_the_roofline():
    launches = {"target_launch": 1.5e-3, "target_token": 1e-4, "draft_launch": 5e-4, "overhead": 3e-4}
    roof, real = roofline_costs(), roofline_costs(**launches)
    lines = []
    for step, (kind, k) in enumerate([("prefill", 0), ("decode", 5), ("decode", 5), ("decode", 3), ("decode", 0)]):
        kv = 576 + 8 * step
        seconds = {"draft": real.draft(8, k, kv), "verify": real.target(8, k + 1, kv), "other": real.overhead(8, k)}
        times = {f"{part}_ms": 1e3 * each for part, each in seconds.items()}
        own = {"step": step, "kind": kind, "drafted": k, "kv_length": kv + 1} | times
        lines += [own | {"row": row} for row in range(8)]
    assert decoding.beyond(roof, pd.DataFrame(lines)) == pytest.approx(launches)
    assert policy_of(batched(0.8), 8, real, 576) < policy_of(batched(0.8), 8, roof, 576) == 8


def test_transformers_decodes_over_one_cache(monkeypatch):
    written = []
    generate = repeated_way.transformers_generate
    monkeypatch.setattr(
        repeated_way, "transformers_generate", lambda *given, **options: written.append(generate(*given, **options))
    )
    runs = repeated_way.RepeatedWay(tiny_pair(), PEER, ragged_prompts(9, 5), roofline_costs(), new=8)
    runs.once()
    first = runs.cache.layers[0].keys.data_ptr()
    runs.once()
    assert runs.cache.layers[0].keys.data_ptr() == first
    for texts in written:
        for prompt, text in zip(runs.prompts, texts, strict=True):
            assert text.tolist() == greedy_alone(runs.pair.target, prompt, 8).tolist()


def test_device_rests_once_per_decode_step_of_a_rested_run(monkeypatch):
    use_on_cpu(monkeypatch)
    pair = tiny_pair()
    way = replace(batched(0.8, 3), attention="pad", compile="graphs")
    runs = repeated_way.RepeatedWay(pair, way, ragged_prompts(9, 5), roofline_costs(), new=8)
    runs.warm_up()
    announced, seconds = [], 60.0  # more than passes take on any machine
    counted = [runs.once()._replace(seconds=seconds)]
    monkeypatch.setattr(torch.cuda, "_sleep", announced.append)
    monkeypatch.setattr(type(pair), "device", torch.device("cuda"))
    try:
        assert 0 < runs.host_share(counted) < 1
        runs.way = replace(way, compile="off")
        assert runs.host_share(counted) is None  # passes wait inside
    finally:
        runs.close()
    steps, runs_with_rests = counted[0].steps, repeated_way.WARM_UPS + repeated_way.RESTED
    assert len(announced) == runs_with_rests * steps[steps.kind == "decode"].step.nunique()
    assert announced[0] * steps.step.nunique() == pytest.approx(2 * seconds * repeated_way.CYCLES, rel=0.01)
    assert Session.on_phase is None


class CompilationError(Exception):
    pass


@pytest.fixture
def second_of_three_fails(monkeypatch, quick):
    ways = (REGULAR, batched(0.8, "goodput"), batched(0.8, 3))
    monkeypatch.setattr(decoding, "DRY", replace(DRY, ways=ways))
    once = repeated_way.RepeatedWay.once

    def failing(self):
        if self.way.draft == "goodput":
            raise CompilationError("no room in registers\nand more")
        return once(self)

    monkeypatch.setattr(repeated_way.RepeatedWay, "once", failing)


def test_failing_method_leaves_its_reason_and_other_results(second_of_three_fails, capsys, tmp_path):
    assert decoding.main(["--dry-run", "--repeats", "1", "--output", str(tmp_path / "gpu.jsonl")]) == 1
    out = capsys.readouterr().out
    assert "FAILED embedded, batch 2" in out and "no room in registers" in out
    summary = json.loads(out.splitlines()[-1])
    assert (summary["ways"], summary["failed"], summary["left_out"]) == (2, 1, 0)
    failed = [line for line in records.read(tmp_path / "gpu.jsonl") if "reason" in line]
    assert [line["reason"] for line in failed] == ["CompilationError: no room in registers"]


def test_lost_device_ends_the_run_and_keeps_results(second_of_three_fails, capsys, monkeypatch):
    def lost(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(decoding, "synchronize", lost)
    assert decoding.main(["--dry-run", "--repeats", "1"]) == 1
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["ways"] == 1 and "illegal memory" in summary["lost"]
    assert summary["left_out"] == 1 and summary["passed"] is None


def test_pair_that_decodes_another_text_fails_the_check(monkeypatch):
    greedy = plain_decoding.greedy
    monkeypatch.setattr(plain_decoding, "greedy", lambda *given: (greedy(*given)[0] + 1, None))
    monkeypatch.setattr(decoding, "load_pair", bass.load_pair)
    assert not decoding.checked("cpu", "pad", "off", new=3)["passed"]
