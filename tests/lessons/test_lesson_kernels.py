"""Lesson 07: what its figures count, its slider, its exercises, and whether a GPU would take its step kernels.

No kernel runs here: plans are written by hand. The notebook itself runs the kernels (test_notebooks.py).
"""

import ast
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import lesson_runs
import nbformat
import pytest
import torch

pytest.importorskip("triton")

from bass_kernels import accounting
from bass_kernels.accounting import Read
from bass_lab.lessons import checking, l07_figures
from bass_lab.lessons import l07_exercises as exercises
from bass_lab.measure.gpu_records import gpu_record
from bass_lab.measure.roofline import H100, MODELS

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks/07_ragged_attention_kernels.ipynb"
LENGTHS = [5, 12]
# Row 1 in two pieces, row 0 in one, and an idle item.
ITEMS = torch.tensor([[1, 0, 8, 0], [1, 8, 12, 1], [0, 0, 5, -1], [-1, 0, 0, 3]], dtype=torch.int32)


def account(lengths):
    """Costs with a plan of chunks of 8."""
    return accounting.compare(lengths, accounting.cut(lengths, 8)[0], workers=4)


# --- what is counted ---


def test_pad_reads_every_row_to_the_longest():
    reads = accounting.pad_reads(LENGTHS)
    assert reads == [Read(0, 0, 12), Read(1, 0, 12)]
    assert accounting.keys_read(reads) == 24 and accounting.keys_wasted(reads, LENGTHS) == 7


def test_split_reads_what_is_needed_in_one_launch_per_row():
    reads = accounting.split_reads(LENGTHS)
    assert reads == [Read(0, 0, 5, launch=0), Read(1, 0, 12, launch=1)]
    assert accounting.keys_read(reads) == 17 and accounting.keys_wasted(reads, LENGTHS) == 0


def test_ragged_reads_the_pieces_of_the_plan_without_idle_items():
    reads = accounting.ragged_reads(ITEMS)
    assert reads == [Read(1, 0, 8), Read(1, 8, 12), Read(0, 0, 5)]
    assert accounting.keys_read(reads) == 17 and accounting.keys_wasted(reads, LENGTHS) == 0


def test_keys_beyond_a_row_are_wasted_also_in_a_piece_of_their_own():
    assert accounting.keys_wasted([Read(0, 0, 4), Read(0, 4, 8), Read(0, 8, 16)], [5]) == 11


def test_launches_follow_each_other_and_programs_take_the_first_free_place():
    assert accounting.finish([Read(0, 0, 4), Read(1, 0, 3), Read(2, 0, 2)], workers=2) == 5
    assert accounting.finish([Read(0, 0, 4), Read(1, 0, 3, launch=1)], workers=2) == 7
    assert accounting.finish([Read(0, 0, 4)], workers=2, programs=3, overhead=1) == 10


def test_three_kernels_compared_on_a_hand_made_plan():
    found = accounting.compare(LENGTHS, ITEMS, workers=3, overhead=1, reduce=2)
    assert found["pad"] == (17, 7, 13) and found["pad"].wasted_share == 7 / 24
    assert found["split"] == (17, 0, 6 + 13)
    assert found["ragged"] == (17, 0, 9 + 2)
    whole = torch.tensor([[1, 0, 12, -1], [0, 0, 5, -1]], dtype=torch.int32)
    assert accounting.compare(LENGTHS, whole, workers=3, reduce=2)["ragged"].finish == 12  # nothing to reduce


def test_cut_by_hand_lists_pieces_row_by_row():
    items, rows = accounting.cut(LENGTHS, 8)
    assert items.tolist() == [[0, 0, 5, 0], [1, 0, 8, 1], [1, 8, 12, 2]]
    assert rows.tolist() == [[0, 1], [1, 2]]


def test_bytes_and_floor_of_llama_8b():
    llama = MODELS["Llama-8B"]
    assert llama.cache_bytes(8 * 2048) / llama.layers == 67_108_864
    table = l07_figures.floor_table({"Llama-8B": llama}, [2048], batch=8, device=H100)
    assert table["floor µs per layer"].item() == pytest.approx(20.03, abs=0.01)
    assert table["share of a step"].item() == pytest.approx(0.118, abs=0.001)


def test_intensity_is_queries_times_group_and_the_roof_bends_at_the_ridge():
    llama = MODELS["Llama-8B"]
    assert llama.attention_intensity(5) == 20 and replace(llama, element=4).attention_intensity(5) == 10
    assert H100.attainable(1) == H100.bandwidth
    assert H100.attainable(H100.ridge) == pytest.approx(H100.flops)
    assert H100.attainable(1e6) == H100.flops


def test_spread_keeps_the_mean():
    assert accounting.spread_lengths(4, 100, 0) == [100] * 4
    assert accounting.spread_lengths(5, 100, 1) == [1, 50, 100, 150, 200]
    assert accounting.spread_lengths(1, 100, 0.7, least=4) == [30]
    with pytest.raises(ValueError, match="spread must be from 0"):
        accounting.spread_lengths(4, 100, 1.5)


# --- what is drawn ---


def test_batch_is_drawn_to_the_longest_row():
    committed, new, empty = l07_figures.batch_figure(LENGTHS, query_length=2).data
    assert list(committed.x) == [3, 10] and list(new.base) == [3, 10] and list(new.x) == [2, 2]
    assert list(empty.base) == [5, 12] and list(empty.x) == [7, 0]


def test_reads_are_drawn_in_blocks_and_wasted_ones_hatched():
    figure = l07_figures.reads_figure(LENGTHS, accounting.launches(LENGTHS, ITEMS), block=4)
    bars = {name: [] for name in ("pad", "split", "ragged", "not the row's")}
    for trace in figure.data:
        if trace.type == "bar":
            bars[trace.name] += zip(trace.y, trace.base, trace.x, trace.customdata, strict=True)
            assert bool(trace.marker.pattern.shape) == (trace.name == "not the row's")
    whole = [(0, 0, 4, 0), (0, 4, 1, 0), (1, 0, 4, 1), (1, 4, 4, 1), (1, 8, 4, 1)]
    assert bars["pad"] == bars["split"] == whole
    assert bars["not the row's"] == [(0, 5, 3, 0), (0, 8, 4, 0)]
    assert bars["ragged"] == [(1, 0, 4, 0), (1, 4, 4, 0), (1, 8, 4, 1), (0, 0, 4, 2), (0, 4, 1, 2)]


def test_slider_redraws_the_bars():
    slider, sentence, figure, _ = l07_figures.spread_slider(account, 4, 100, bytes_per_key=1000, value=0).children
    needed, wasted, done = figure.data
    assert list(needed.y) == ["pad", "split", "ragged"] and list(wasted.x) == [0, 0, 0]
    before = list(done.x)
    slider.value = 1
    assert list(needed.x) == pytest.approx([0.401] * 3) and list(wasted.x) == pytest.approx([0.399, 0, 0])
    assert list(done.x) != before and "50% of what" in sentence.value


def test_static_chart_says_what_the_slider_says():
    lines = {(trace.name, trace.xaxis): trace for trace in l07_figures.spread_chart(account, 4, 100, [0, 1]).data}
    assert list(lines["pad", "x"].y) == pytest.approx([1, 0.8 / 0.401])
    assert list(lines["ragged", "x"].y) == list(lines["split", "x"].y) == [1, 1]
    assert list(lines["split", "x2"].y) == [400, 401]


def test_floor_table_and_its_chart():
    table = l07_figures.floor_table(MODELS, [512, 2048], batch=8, device=H100)
    assert table["floor µs per layer"].round().tolist() == [5, 20, 20, 80, 25, 100]
    shares = l07_figures.share_chart(table).data
    assert [trace.name for trace in shares] == list(MODELS)
    assert list(shares[1].y) == table["share of a step"].loc["MHA-7.8B"].tolist()


def test_roofline_marks_every_query_length_on_the_roof():
    roof, alone, grouped = l07_figures.roofline(MODELS, [1, 5], H100).data
    assert list(alone.x) == [1, 5] and list(grouped.x) == [4, 20]
    assert max(roof.y) == pytest.approx(989) and list(grouped.y) == pytest.approx([13.4, 67])


def test_only_times_of_a_gpu_are_shown(tmp_path):
    assert gpu_record("kernels", tmp_path) is None
    line = {"kernel": "ragged", "clock": "cuda", "us": 25.0, "gb": 0.067, "percent_of_copy": 81.0, "query_length": 5}
    line |= {"device": "H100", "model": "llama-8b", "batch": 8, "reason": None, "kv_length": 2048, "dtype": "bfloat16"}
    others = [{"clock": "fake"}, {"us": None, "percent_of_copy": None, "reason": "does not run"}, {"gb": 0.01}]
    lines = [line, line | {"percent_of_copy": 83.0}, *(line | other for other in others)]
    lines = [line | {"distribution": str(number)} for number, line in enumerate(lines)]
    (tmp_path / "kernels_h100.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    records = gpu_record("kernels", tmp_path).content
    assert len(records) == 3
    table = l07_figures.records_table(records)
    assert table.loc[("H100", "ragged", 5)].tolist() == [2, 81, 82, 83]
    (box,) = l07_figures.records_figure(records).data
    assert list(box.x) == [81, 83]


# --- exercises ---


def merge(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    base = lse.clamp(min=-1e30)
    return (lse_a - base).exp()[:, None] * out_a + (lse_b - base).exp()[:, None] * out_b, lse


def merge_without_guard(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    return (lse_a - lse).exp()[:, None] * out_a + (lse_b - lse).exp()[:, None] * out_b, lse


def merge_that_overflows(out_a, lse_a, out_b, lse_b):
    a, b = lse_a.exp(), lse_b.exp()
    return (a[:, None] * out_a + b[:, None] * out_b) / (a + b).clamp(min=1e-30)[:, None], (a + b).log()


def merge_of_one_row(*parts):
    out, lse = merge(*parts)
    return out[0], lse


def keys_needed(first, last, kv_length, window, block):
    return (max(first - window + 1, 0) // block * block if window else 0), min(last + 1, kv_length)


def window_off_by_one(first, last, kv_length, window, block):
    return (max(first - window, 0) // block * block if window else 0), min(last + 1, kv_length)


def reads_padding(first, last, kv_length, window, block):
    return keys_needed(first, last, last + 1, window, block)


def equal_chunks(lengths, chunk):
    pieces = [(row, at, min(at + chunk, n)) for row, n in enumerate(lengths) for at in range(0, n, chunk)]
    return sorted(pieces, key=lambda piece: piece[1] - piece[2])


def cut(lengths, workers, overhead):
    def time(pieces):
        return accounting.finish([Read(*piece) for piece in pieces], workers, overhead=overhead)

    return min((equal_chunks(lengths, chunk) for chunk in range(16, max(lengths) + 16, 16)), key=time)


def loses_the_last_key(lengths, workers, overhead):
    return [(row, 0, n - 1) for row, n in enumerate(lengths)]


def reads_twice(lengths, workers, overhead):
    return 2 * equal_chunks(lengths, 64)


@pytest.mark.parametrize(
    "check, solution",
    [
        (exercises.check_merge, merge),
        (exercises.check_keys_needed, keys_needed),
        (exercises.check_cut, cut),
    ],
)
def test_right_solution_is_accepted_and_a_stub_is_not_solved(check, solution, capsys):
    lesson_runs.accepted_and_stub_is_not(check, solution, capsys)


@pytest.mark.parametrize(
    "check, solution, message",
    [
        (exercises.check_merge, merge_without_guard, "(nothing in either): out should be [0.0"),
        (exercises.check_merge, merge_that_overflows, "(scores near 1000): lse should be [100"),
        (exercises.check_merge, lambda *parts: parts[0], "expected a pair (out, lse), got Tensor"),
        (
            exercises.check_merge,
            lambda a, b, _, d: (a[0], torch.logaddexp(b, d)),
            "out should be a tensor of shape [2, 3]",
        ),
        (exercises.check_keys_needed, window_off_by_one, "expected (28, 72), got (24, 72)"),
        (exercises.check_keys_needed, reads_padding, "expected ("),
        (exercises.check_keys_needed, lambda *_: 3, "expected a pair (begin, end), got 3"),
        (exercises.check_cut, lambda n, *_: equal_chunks(n, 10**6), "is done after 1032; "),
        (exercises.check_cut, lambda n, *_: equal_chunks(n, 1), "is possible"),
        (exercises.check_cut, loses_the_last_key, "row 0: the pieces end at 999 of 1000"),
        (exercises.check_cut, reads_twice, "row 0: after key 64 comes the piece 0 … 64"),
        (exercises.check_cut, lambda *_: None, "expected a list of (row, begin, end), got None"),
    ],
)
def test_wrong_solution_is_told_the_first_case_and_the_difference(check, solution, message, capsys):
    lesson_runs.refused(check, solution, message, capsys)


def test_error_of_a_solution_passes_through_with_its_case(capsys):
    with pytest.raises(ZeroDivisionError):
        exercises.check_keys_needed(lambda *_: 1 // 0)
    assert capsys.readouterr().out.startswith("Case 1 (first 60, last 63")


class Launched:
    """What stands for a Triton kernel: `kernel[grid](scores, out, cap, N=N)`."""

    def __init__(self, function):
        self.function = function

    def __getitem__(self, grid):
        return lambda scores, out, cap, N: out.copy_(self.function(scores, cap))


def test_softcap_exercise_takes_tanh_and_names_usual_mistakes(capsys):
    assert exercises.check_softcap(Launched(lambda s, cap: cap * (s / cap).tanh()))
    capsys.readouterr()
    for wrong, message in (
        (lambda s, cap: s, "the scores come back unchanged"),
        (lambda s, cap: (s / cap).tanh(), "the cap is missing"),
        (lambda s, cap: cap * s.tanh(), "divided by the cap first"),
        (lambda s, cap: cap * ((2 * s / cap).exp() - 1) / ((2 * s / cap).exp() + 1), "e^x overflowed"),
    ):
        lesson_runs.refused(exercises.check_softcap, Launched(wrong), message, capsys)


def test_relative_error_sees_nan_and_shapes():
    wanted = torch.tensor([3.0, 4.0])
    assert checking.relative_error(torch.tensor([3.0, 4.5]), wanted) == pytest.approx(0.1)
    assert checking.relative_error(torch.tensor([3.0, torch.nan]), wanted) == float("inf")
    assert checking.relative_error(torch.tensor([[3.0, 4.0]]), wanted) == float("inf")


# --- the step kernels ---

COMPILE = """
import kernel_compiler, steps, torch, triton
triton.runtime.driver.set_active(kernel_compiler.StandIn(90))
f = torch.zeros
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    tensors, lengths = [f(2, 8, 4, 32, dtype=dtype), *f(2, 2, 2, 256, 32, dtype=dtype)], f(2, dtype=torch.int32)
    out, part, (tops, masses) = f(2, 4, 8, 32), f(5, 2, 16, 32), f(2, 5, 2, 16)
    items, rows = f(5, 4, dtype=torch.int32), f(2, 2, dtype=torch.int32)
    shape = {"H": 8, "GROUP": 4, "Q": 4, "D": 32}
    tile = shape | {"M": 16, "N": 32}
    def launch():
        steps.whole_row[1](*tensors, out, 0.1, 256, **shape)
        steps.blocks_of_keys[1](*tensors, out, 0.1, 256, **tile)
        steps.packed[1](*tensors, out, 0.1, 256, **tile)
        steps.ragged_rows[1](*tensors, out, lengths, 0.1, 256, **tile)
        steps.pieces[1](*tensors, part, tops, masses, items, lengths, 0.1, 256, **tile)
        steps.reduce[1](part, tops, masses, rows, out, **shape, M=16)
    for kernel in map(kernel_compiler.resources, kernel_compiler.compiled_launches(launch)):
        print(kernel["kernel"], kernel["local"], kernel["shared"])
"""


@pytest.mark.slow
def test_step_kernels_compile_for_a_gpu_without_spilling(tmp_path):
    cells = [cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells if "@triton.jit" in cell.source]
    functions = [part for part in ast.parse("\n".join(cells)).body if isinstance(part, ast.FunctionDef)]
    header = "import triton\nimport triton.language as tl\n"
    (tmp_path / "steps.py").write_text("\n\n\n".join([header, *map(ast.unparse, functions)]))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    places = (tmp_path, ROOT / "tests/support", ROOT / "kernels")
    environment |= {"PYTHONPATH": ":".join(map(str, places)), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [line.split() for line in done.stdout.splitlines()]
    assert len(found) == 3 * 6
    for name, local, shared in found:
        assert local == "0" and int(shared) <= 227 * 1024, name
