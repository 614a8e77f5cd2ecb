import itertools
import json
from contextlib import nullcontext
from dataclasses import replace
from math import inf, nan
from types import SimpleNamespace

import pytest
import torch

from bass_lab.gpu import decoding, stages
from bass_lab.gpu.command import NO_GPU, verdict
from bass_lab.gpu.kernels import __main__ as command
from bass_lab.gpu.kernels import cases, measure, peers, products, report, tensors, timing
from bass_lab.measure import records

CPU = torch.device("cpu")
ON_CPU = ("sdpa-flash", "sdpa-math", "sdpa-math-packed")


def ragged_case(**changes):
    return cases.Case(**{"model": "tiny", "batch": 4, "query_length": 3, "kv_length": 300,
                          "distribution": "ragged", "dtype": "float32"} | changes)  # fmt: skip


def timed_line(ms=2.0, **changes):
    outcome = measure.KernelOutcome("sdpa-math", error=1e-7, timing=timing.Timing([print] * 20, print, samples=[ms]))
    here = {"device": "a", "driver": "", "torch": "2", "triton": "3", "flashinfer": None, "commit": ""}
    return report.line(cases.tiny_case(), outcome, 1e9, "cpu", 0, here) | changes


def test_bytes_and_mean_lengths_equal_hand_counts():
    case = cases.Case("Llama-8B", 8, 5, 2048, "uniform")
    assert case.kv_bytes(0) == 2 * 8 * 128 * 2 * 8 * 2048  # keys and values, heads, dimension, bytes, rows, length
    assert case.cache_bytes(0) == case.kv_bytes(0)
    for batch, distribution in itertools.product(cases.BATCHES, cases.DISTRIBUTIONS):
        lengths = cases.Case("OPT-13B", batch, 5, 2048, distribution).lengths(1)
        assert len(lengths) == batch and sum(lengths) == pytest.approx(batch * 2048, abs=batch)
    assert sorted(ragged_case(batch=4, kv_length=400).lengths(0)) == [100, 300, 500, 700]


def test_default_cases_are_a_subset_without_duplicates():
    default, everything = cases.default_cases(cases.MODELS), cases.all_cases(cases.MODELS)
    assert len(set(default)) == len(default) and len(set(everything)) == len(everything)
    assert set(default) | set(cases.quick_cases()) <= set(everything)
    for case in everything:  # the KV sets together exceed a GPU's cache
        sets = tensors.number_of_sets(case.kv_bytes(0), torch.device("cuda"))
        assert sets >= 2 and sets * case.kv_bytes(0) >= 200e6


@pytest.mark.parametrize("kernel", ON_CPU)
def test_peer_equals_the_reference_on_every_kv_set(kernel):
    inputs = tensors.make(ragged_case(query_length=5), CPU, 0, sets=2)
    for call, kv in zip(peers.PEERS[kernel](inputs).calls, inputs.sets, strict=True):
        assert tensors.relative_error(call(), tensors.expected(replace(inputs, sets=[kv]))) < 1e-6


def test_packed_rows_without_groups_are_not_timed_twice(monkeypatch):
    monkeypatch.setitem(cases.WORK, "ungrouped", replace(cases.WORK["tiny"], heads=2))
    with pytest.raises(peers.Unavailable, match="same as unpacked"):
        peers.PEERS["sdpa-math-packed"](tensors.make(ragged_case(model="ungrouped"), CPU, 0, sets=2))


def test_error_of_nan_and_of_another_shape_is_infinite():
    wanted = torch.ones(2, 3, dtype=torch.float64)
    assert tensors.relative_error(torch.tensor([[1.0, nan, 1.0]] * 2), wanted) == inf
    assert tensors.relative_error(torch.ones(3, 2), wanted) == inf
    assert tensors.relative_error(torch.ones(2, 3), wanted) == 0


def test_wrong_or_failing_kernel_is_recorded_and_not_timed(monkeypatch):
    def refuses(inputs):
        raise RuntimeError("no kernel\nfor this")

    wrong = lambda inputs: peers.Prepared([lambda: torch.zeros(4, 3, 4, 16)])  # noqa: E731
    monkeypatch.setattr(measure, "PEERS", {"wrong": wrong, "refuses": refuses} | peers.PEERS)
    found = measure.measure(ragged_case(), ["wrong", "refuses", "sdpa-math"], 0, timing.Timer(CPU))
    assert [outcome.timing is None for outcome in found] == [True, True, False]
    assert found[0].reason.startswith("wrong: off by 1.0e+00")
    assert found[1].reason == "RuntimeError: no kernel"


def test_run_fails_if_our_kernel_is_wrong_or_nothing_was_timed():
    timed, wrong = {"kernel": "sdpa", "us": 2.0, "reason": None}, {"us": None, "reason": "wrong: off by 1"}
    absent = {"kernel": "pad", "us": None, "reason": "it needs a GPU"}
    assert verdict([timed, absent, wrong | {"kernel": "flash"}], peers.OURS) == 0
    assert verdict([timed, wrong | {"kernel": "ragged"}], peers.OURS) == 1
    assert verdict([absent], peers.OURS) == 1


def test_runs_are_captured_replayed_interleaved_and_released(monkeypatch):
    def nothing(*args):
        pass

    event = SimpleNamespace(record=nothing, synchronize=nothing, elapsed_time=lambda other: 1.0)
    stand_ins = dict.fromkeys(("set_stream", "synchronize", "empty_cache", "current_stream"), nothing)
    stand_ins |= {"Event": lambda enable_timing: event, "graph": lambda graph, pool: nullcontext()}
    stand_ins |= {"CUDAGraph": lambda: SimpleNamespace(replay=nothing), "graph_pool_handle": object}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    timer = timing.Timer(torch.device("cuda"))
    timer.new_case()
    out, wayward = torch.ones(3), []

    def fails_in_a_graph():
        wayward.append(0)
        if len(wayward) == 3:  # called, timed, captured
            raise RuntimeError("operation not permitted when stream is capturing")

    runs = [timer.prepare([lambda: out, lambda: out]), timer.prepare([fails_in_a_graph])]
    assert runs[0].replayed().isnan().all()  # this graph writes nothing
    assert runs[1].replayed() is None
    assert [run.captured for run in runs] == [True, False]
    assert [run.calls for run in runs] == [6, 3]  # 1 ms each limits a graph to 3 rounds
    timer.measure(runs)
    assert [run.us for run in runs] == [pytest.approx(1000 / 6), pytest.approx(1000 / 3)]
    assert [run.replays for run in runs] == [len(run.samples) for run in runs] == [timing.REPLAYS] * 2
    assert runs[0].replay is None and runs[0].held == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@torch.no_grad()
def test_kernels_are_right_and_captured_on_a_gpu():
    case = cases.Case("Llama-8B", 3, 5, 512, "ragged")
    names = [name for name in peers.PEERS if not name.startswith("flashinfer")]
    found = {o.kernel: o for o in measure.measure(case, names, 0, timing.Timer(torch.device("cuda")))}
    assert [name for name, outcome in found.items() if (outcome.reason or "").startswith("wrong")] == []
    for name in ("ragged", "pad", "split", "sdpa-efficient", "sdpa-math", "varlen", "flash-seqused"):
        assert found[name].timing is not None, found[name].reason
        assert found[name].timing.captured and found[name].timing.us > 0
    assert found["ragged"].shared.captured


def test_timed_line_and_line_with_a_reason_pass():
    records.check(timed_line())
    records.check(timed_line(reason="no kernel", error=None) | dict.fromkeys(measure.TIMES))
    assert timed_line()["us"] == pytest.approx(100)
    fast = timed_line(ms=1e-6)  # faster than memory
    records.check(fast)
    assert fast["reason"].startswith("implausible") and fast["us"] is None


def test_contradictory_line_is_refused_and_nothing_written(tmp_path):
    for changes, complaint in (
        ({"us": None}, "us must be given"),
        ({"reason": "slow"}, "either a time or a reason"),
        ({"gb": -1.0}, "gb must be positive"),
        ({"us": nan}, "us must be finite"),
        ({"us": 1.0}, "gb_per_s is not"),
        ({"copy_gb_per_s": 3.0}, "percent_of_copy is not"),
        ({"us_plan_share": 1e6}, "at least us_plan_share"),
        ({"colour": "red"}, "unknown fields: colour"),
    ):
        with pytest.raises(ValueError, match=complaint):
            records.append(tmp_path / "lines.jsonl", [timed_line(), timed_line(**changes)])
    assert not (tmp_path / "lines.jsonl").exists()


def test_summary_names_the_peer_that_is_faster():
    faster = timed_line(kernel="flex", us=50.0)
    found = report.summary([timed_line(kernel="ragged"), faster, timed_line(kernel="pad", us=10.0)])
    assert found["ragged_slower_than_a_peer"] == [["tiny B3 Q3 L40 ragged", "flex", 2.0]]


@pytest.mark.parametrize("program", [command, products, decoding, stages])
def test_without_a_gpu_it_exits_with_2(program, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert program.main([str(tmp_path)] if program is stages else []) == NO_GPU == 2
    assert ("--rehearse" if program is stages else "--dry-run") in capsys.readouterr().err


def test_dry_run_writes_valid_lines_for_every_kernel_and_ends_in_one_document(tmp_path, capsys):
    path = tmp_path / "lines.jsonl"
    assert command.main(["--dry-run", "--output", str(path)]) == 0
    lines = records.read(path)
    assert {line["clock"] for line in lines} == {"cpu"}
    assert {line["kernel"] for line in lines} == set(peers.PEERS)
    assert set(ON_CPU) <= {line["kernel"] for line in lines if line["us"] is not None}
    *before, last = capsys.readouterr().out.splitlines()
    assert any("dry run" in text for text in before)
    document = json.loads(last)
    assert document["cases"] == 1 and document["wrong"] == [] and document["output"] == str(path)


def test_dry_run_without_output_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BASS_RECORDS", str(tmp_path))
    assert command.main(["--dry-run", "--kernels", "sdpa-math"]) == 0
    assert list(tmp_path.iterdir()) == []


def test_products_dry_run_writes_a_time_or_a_reason_per_kernel(tmp_path, capsys):
    output = tmp_path / "products.jsonl"
    assert products.main(["--dry-run", "--output", str(output)]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    lines = records.read(output)
    assert document["lines"] == lines and document["clock"] == "cpu" and document["shapes_left_out"] == 0
    found = {line["kernel"]: line for line in lines}
    assert list(found) == list(products.PEERS)
    assert found["cublas"]["error"] < 1e-2 and found["torch int8pack"]["us"] > 0
    assert "need a CUDA GPU" in found["int8"]["reason"]
    assert products.main(["--dry-run", "--resume", "--output", str(output)]) == 0
    assert len(output.read_text().splitlines()) == len(products.PEERS)  # nothing is measured again


def test_wrong_products_are_not_timed(monkeypatch):
    wrong = lambda x, weights: peers.Prepared([lambda: x], wanted=x + 1.0, size=1)  # noqa: E731
    monkeypatch.setattr(products, "PEERS", {"wrong": wrong})
    (line,) = products.measure(2, 8, 32, timing.Timer(CPU), 1e9)
    assert line["us"] is None and line["reason"].startswith("wrong: off by")
