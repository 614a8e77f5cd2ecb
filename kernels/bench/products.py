"""`PYTHONPATH=.:kernels python -m bench.products`: few rows times INT8 and INT4 weights, against peers, on a GPU.

Each is checked against float64 of its own weights first, then all that are right are timed in turn, by CUDA graph, over
sets of weights that together do not fit the L2 cache, beside a copy's bandwidth in the same run; bytes are those that a
kernel has to read. The last line is one JSON document. `--dry-run` goes through all of it on a CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from math import ceil
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bass_kernels
from bass_core.quantization import GROUP, int4, int8
from bass_kernels import Codes, reference
from bass_lab.measure import gpu_command, records
from bass_lab.measure.roofline import copy_bandwidth
from bass_lab.provenance import describe_environment
from bench.tensors import ROTATED_BYTES, TOLERANCES, relative_error
from bench.timing import Timer

SHAPES = [(4096, 4096), (14336, 4096), (4096, 14336), (1024, 4096), (4096, 11008)]  # outputs, inputs
ROWS = (1, 8, 16, 48, 128)
AIM = "aim: up to 16 rows, outputs and inputs from 4096 on: 75% of a copy, and 1.6 times cuBLAS in bfloat16"

Prepared = tuple[list[Callable[[], Tensor]], Tensor, int]  # calls; float64 weights of the first; bytes of one set


def ours(packed: bool, x: Tensor, weights: list[Tensor]) -> Prepared:
    made = [Codes(*(int4 if packed else int8)(weight), GROUP if packed else None) for weight in weights]
    calls = [partial(bass_kernels.skinny_linear, x, codes) for codes in made]
    return calls, reference.dequantized(*made[0], x.shape[1]), made[0].weight.nbytes + made[0].scale.nbytes


def cublas(x: Tensor, weights: list[Tensor]) -> Prepared:
    return [partial(F.linear, x, weight) for weight in weights], weights[0].double(), weights[0].nbytes


def int8pack(x: Tensor, weights: list[Tensor]) -> Prepared:
    made = [int8(weight) for weight in weights]
    calls = [partial(torch._weight_int8pack_mm, x, codes.weight, codes.scale[:, 0]) for codes in made]
    return calls, reference.dequantized(*made[0], None, x.shape[1]), sum(part.nbytes for part in made[0])


def torchao(bits: int, x: Tensor, weights: list[Tensor]) -> Prepared:
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    layers = []
    for weight in weights:
        layer = nn.Linear(*weight.T.shape, bias=False, device=weight.device, dtype=weight.dtype)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        quantize_(layer, Int8WeightOnlyConfig() if bits == 8 else Int4WeightOnlyConfig(group_size=GROUP))
        layers.append(layer)
    wanted = layers[0](torch.eye(x.shape[1], dtype=x.dtype, device=x.device)).T.double()  # its own idea of the weights
    return [partial(layer, x) for layer in layers], wanted, weights[0].nbytes * bits // 16


PEERS: dict[str, Callable[[Tensor, list[Tensor]], Prepared]] = {
    "int8": partial(ours, False),
    "int4": partial(ours, True),
    "cublas": cublas,
    "torch int8pack": int8pack,
    "torchao int8": partial(torchao, 8),
    "torchao int4": partial(torchao, 4),
}


@torch.no_grad()
def measure(rows: int, columns: int, inputs: int, timer: Timer, copy: float) -> list[dict]:
    """A line per kernel: µs, gb (what it has to read), percent_of_copy, error; or the reason why there are no times."""
    generator, dtype = torch.Generator(timer.device).manual_seed(0), torch.bfloat16
    x = torch.randn(rows, inputs, generator=generator, device=timer.device).to(dtype)
    timer.new_case()
    lines, timings = [], []
    for name, prepare in PEERS.items():
        share = {"int8": 2, "int4": 4}.get(name.split()[-1], 1)  # quantized sets are smaller, so there are more
        sets = max(2, ceil(ROTATED_BYTES * share / (2 * columns * inputs))) if timer.device.type == "cuda" else 2
        line = {"kernel": name, "rows": rows, "columns": columns, "inputs": inputs, "us": None, "reason": None}
        lines.append(line)
        try:
            weights = [
                torch.randn(columns, inputs, generator=generator, device=timer.device).to(dtype) / inputs**0.5
                for _ in range(sets)
            ]
            calls, wanted, size = prepare(x, weights)
            line["gb"], line["error"] = size / 1e9, relative_error(calls[0](), x.double() @ wanted.T)
            if line["error"] > TOLERANCES[dtype]:
                line["reason"] = f"wrong: off by {line['error']:.1e}"
                continue
            timings.append((line, timer.prepare(calls)))
        except Exception as error:  # whatever a foreign kernel raises is the answer
            line["reason"] = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:100]
    timer.measure([timing for _, timing in timings])
    for line, timing in timings:
        percent = 100 * line["gb"] * 1e9 / copy / (timing.us * 1e-6)
        line |= {"us": timing.us, "percent_of_copy": percent, "captured": timing.captured}
    return lines


def table(lines: list[dict]) -> str:
    first = lines[0]
    bfloat16 = next((line["us"] for line in lines if line["kernel"] == "cublas"), None)
    rows = [
        {
            "kernel": line["kernel"],
            "µs": records.text(line["us"], ".1f"),
            "% copy": records.text(line["us"] and line["percent_of_copy"], ".1f"),
            "× cuBLAS": records.text(line["us"] and bfloat16 and bfloat16 / line["us"], ".2f"),
            "error": records.text(line.get("error"), ".1e"),
            "": line["reason"] or ("" if line["captured"] else "not captured"),
        }
        for line in lines
    ]
    return records.text_table(f"\n{first['rows']} rows, {first['columns']} × {first['inputs']}", rows)


def chosen(quick: bool) -> Iterator[tuple[int, int, int]]:
    for rows, (columns, inputs) in product(ROWS[:3] if quick else ROWS, SHAPES[:2] if quick else SHAPES):
        yield rows, columns, inputs


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.products", description="Time products with quantized weights.")
    parser.add_argument("--quick", action="store_true", help="few shapes, about a minute")
    parser.add_argument("--dry-run", action="store_true", help="one tiny shape on the CPU, in times that mean nothing")
    parser.add_argument("--output", type=Path, help="the document goes here, too")
    options = parser.parse_args(given)
    if not (options.dry_run or torch.cuda.is_available()):
        print("bench.products needs a CUDA GPU; --dry-run shows what it does on a CPU", file=sys.stderr)
        return gpu_command.NO_GPU
    device = torch.device("cpu" if options.dry_run else "cuda")
    timer, copy, here = Timer(device), copy_bandwidth(device), describe_environment()
    note = "a dry run, its times mean nothing" if options.dry_run else AIM
    print(f"{here['device']}: a copy moves {copy / 1e9:.0f} GB/s, read and written; {note}", flush=True)
    lines = []
    for shape in [(3, 40, 96)] if options.dry_run else chosen(options.quick):
        lines += measure(*shape, timer, copy)
        print(table(lines[-len(PEERS) :]), flush=True)
    about = {name: here[name] for name in ("device", "torch", "commit")} | {"clock": device.type}
    document = json.dumps(about | {"copy_gb_per_s": copy / 1e9, "lines": lines})
    if options.output is not None:
        options.output.write_text(document + "\n", encoding="utf-8")
    print(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
