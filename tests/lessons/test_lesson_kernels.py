"""Lesson 07: counts of reads and launches, figures, the slider, and compilation of the step kernels.

Plans are written by hand. The notebook itself runs the kernels (test_notebooks.py).
"""

import ast
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gpu_box
import nbformat
import pytest
import torch

pytest.importorskip("triton")

from bass_kernels import accounting
from bass_kernels.accounting import Read
from bass_lab.gpu.recorded import gpu_record
from bass_lab.lessons import l07_figures
from bass_lab.measure.roofline import H100, MODELS

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks/07_ragged_attention_kernels.ipynb"
LENGTHS = [5, 12]
# Row 1 in two pieces, row 0 in one piece, and an idle item.
ITEMS = torch.tensor([[1, 0, 8, 0], [1, 8, 12, 1], [0, 0, 5, -1], [-1, 0, 0, 3]], dtype=torch.int32)


def account(lengths):
    return accounting.compare(lengths, accounting.cut(lengths, 8)[0], workers=4)


def test_reads_of_the_three_kernels():
    pad, split, ragged = accounting.pad_reads(LENGTHS), accounting.split_reads(LENGTHS), accounting.ragged_reads(ITEMS)
    assert pad == [Read(0, 0, 12), Read(1, 0, 12)]
    assert split == [Read(0, 0, 5, launch=0), Read(1, 0, 12, launch=1)]
    assert ragged == [Read(1, 0, 8), Read(1, 8, 12), Read(0, 0, 5)]  # no idle item
    assert [accounting.keys_read(reads) for reads in (pad, split, ragged)] == [24, 17, 17]
    assert [accounting.keys_wasted(reads, LENGTHS) for reads in (pad, split, ragged)] == [7, 0, 0]


def test_launches_are_serial_and_programs_take_the_first_free_worker():
    assert accounting.finish([Read(0, 0, 4), Read(1, 0, 3), Read(2, 0, 2)], workers=2) == 5
    assert accounting.finish([Read(0, 0, 4), Read(1, 0, 3, launch=1)], workers=2) == 7
    assert accounting.finish([Read(0, 0, 4)], workers=2, programs=3, overhead=1) == 10


def test_comparison_of_the_three_kernels():
    found = accounting.compare(LENGTHS, ITEMS, workers=3, overhead=1, reduce=2)
    assert found["pad"] == (17, 7, 13) and found["pad"].wasted_share == 7 / 24
    assert found["split"] == (17, 0, 6 + 13)
    assert found["ragged"] == (17, 0, 9 + 2)
    whole = torch.tensor([[1, 0, 12, -1], [0, 0, 5, -1]], dtype=torch.int32)
    assert accounting.compare(LENGTHS, whole, workers=3, reduce=2)["ragged"].finish == 12  # nothing to reduce


def test_cut_lists_pieces_row_by_row():
    items, rows = accounting.cut(LENGTHS, 8)
    assert items.tolist() == [[0, 0, 5, 0], [1, 0, 8, 1], [1, 8, 12, 2]]
    assert rows.tolist() == [[0, 1], [1, 2]]


def test_bytes_and_floor_of_llama_8b():
    llama = MODELS["Llama-8B"]
    assert llama.cache_bytes(8 * 2048) / llama.layers == 67_108_864
    table = l07_figures.floor_table({"Llama-8B": llama}, [2048], batch=8, device=H100)
    assert table["floor µs per layer"].item() == pytest.approx(20.03, abs=0.01)
    assert table["share of a step"].item() == pytest.approx(0.118, abs=0.001)


def test_intensity_and_ridge():
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


def test_slider_redraws_the_bars():
    slider, sentence, figure, _ = l07_figures.spread_slider(account, 4, 100, bytes_per_key=1000, value=0).children
    needed, wasted, done = figure.data
    assert list(needed.y) == ["pad", "split", "ragged"] and list(wasted.x) == [0, 0, 0]
    before = list(done.x)
    slider.value = 1
    assert list(needed.x) == pytest.approx([0.401] * 3) and list(wasted.x) == pytest.approx([0.399, 0, 0])
    assert list(done.x) != before and "wastes 50% of its reads" in sentence.value


def test_only_gpu_times_are_shown(tmp_path):
    assert gpu_record("kernels", tmp_path) is None
    timed, _, absent = gpu_box.kernel_lines(device="H100")[:3]

    def at(percent, gb=0.067, **changes):
        rate = percent / 100 * timed["copy_gb_per_s"]
        times = {"gb": gb, "us": gb / rate * 1e6, "gb_per_s": rate, "percent_of_copy": percent}
        return timed | {"query_length": 5} | times | changes

    lines = [at(81.0), at(83.0), at(81.0, clock="cpu"), absent, at(81.0, gb=0.01)]
    lines = [line | {"distribution": str(number)} for number, line in enumerate(lines)]
    (tmp_path / "kernels_h100.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    records = gpu_record("kernels", tmp_path).content
    assert len(records) == 3
    table = l07_figures.records_table(records)
    assert table.loc[("H100", "ragged", 5)].tolist() == [2, 81, 82, 83]
    (box,) = l07_figures.records_figure(records).data
    assert list(box.x) == [81, 83]


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
def test_step_kernels_compile_without_spilling(tmp_path):
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
