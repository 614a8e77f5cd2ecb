"""`PYTHONPATH=.:kernels python -m bass_lab.gpu.kernels.products`: few rows times INT8 and INT4 weights, against peers.

Each is checked against float64 of its own weights first, then all that are right are timed in turn, by CUDA graph, over
sets of weights that together do not fit the L2 cache, beside a copy's bandwidth in the same run; bytes are those that a
kernel has to read. Lines are written shape by shape, the last line is one JSON document. `--dry-run` goes through all
of it on a CPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from math import ceil

import torch
import torch.nn.functional as F
import triton
from torch import Tensor, nn

import bass_kernels
from bass_core.loading.quantization import GROUP, int4, int8
from bass_kernels import Codes, reference
from bass_lab.gpu import command
from bass_lab.gpu.kernels.tensors import ROTATED_BYTES, TOLERANCES, relative_error
from bass_lab.gpu.kernels.timing import Timer
from bass_lab.measure import record_schema, records
from bass_lab.measure.roofline import copy_bandwidth

SHAPES = [(4096, 4096), (14336, 4096), (4096, 14336), (1024, 4096), (4096, 11008)]  # outputs, inputs
ROWS = (1, 8, 16, 48, 128)
SECONDS = 240.0  # a run ends here
AIM = "aim: up to 16 rows, outputs and inputs from 4096 on: 75% of a copy, and 1.6 times cuBLAS in bfloat16"

FOUND = ("gb", "error", "reason", "us", "percent_of_copy", "captured")  # of a line, null where there is none

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
        line = {"kernel": name, "rows": rows, "columns": columns, "inputs": inputs} | dict.fromkeys(FOUND)
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
            "error": records.text(line["error"], ".1e"),
            "": line["reason"] or ("" if line["captured"] else "not captured"),
        }
        for line in lines
    ]
    return records.text_table(f"\n{first['rows']} rows, {first['columns']} × {first['inputs']}", rows)


def chosen(quick: bool) -> Iterator[tuple[int, int, int]]:
    for rows, (columns, inputs) in product(ROWS[:3] if quick else ROWS, SHAPES[:2] if quick else SHAPES):
        yield rows, columns, inputs


def check(line: dict) -> None:
    """ValueError for a line that lacks a field, or has both a time and a reason why there is none."""
    record_schema.check(line, "product")
    if (line["us"] is None) != bool(line["reason"]):
        raise ValueError(f"either a time or a reason, got us {line['us']!r} and reason {line['reason']!r}")


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    return command.parser(
        "products",
        "Time products with quantized weights.",
        quick="few shapes, about a minute",
        dry_run="one tiny shape on the CPU, in times that mean nothing",
    ).parse_args(given)


def run(options: argparse.Namespace) -> int:
    """Measure and write shape by shape. Returns the exit code."""
    lines = command.Lines("products", options, check, limit=SECONDS)
    device = torch.device("cpu" if options.dry_run else "cuda")
    timer, copy = Timer(device), copy_bandwidth(device)
    about = {name: lines.environment[name] for name in ("device", "torch", "commit")}
    here = {
        "schema": "product",
        "clock": device.type,
        "copy_gb_per_s": copy / 1e9,
        "triton": triton.__version__,
    } | about
    shapes = [(3, 40, 96)] if options.dry_run else list(chosen(options.quick))
    left = [shape for shape in shapes if not lines.has(**dict(zip(("rows", "columns", "inputs"), shape, strict=True)))]
    note = "a dry run, its times mean nothing" if options.dry_run else AIM
    print(f"{here['device']}: a copy moves {copy / 1e9:.0f} GB/s, read and written; {note}", flush=True)
    while left and not lines.out_of_time:
        found = measure(*left.pop(0), timer, copy)
        print(table([lines.add(line | here) for line in found]), flush=True)
    lines.end(here | {"shapes_left_out": len(left), "lines": lines.written})
    return command.verdict(lines.known, ("int8", "int4"))


def main(given: list[str] | None = None) -> int:
    return command.main(run, arguments(given))


if __name__ == "__main__":
    sys.exit(main())
