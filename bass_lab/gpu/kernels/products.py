"""Time products of few rows with INT8 and INT4 weights: `PYTHONPATH=.:kernels python -m bass_lab.gpu.kernels.products`.

Each kernel is checked against float64 of its own weights first. The correct kernels are then timed interleaved, as CUDA
graphs over sets of weights that exceed the L2 cache, with a copy's bandwidth in the same run. Bytes are those that a
kernel must read. Lines are written shape by shape, and the last printed line is a JSON document. `--dry-run` runs
everything on a CPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
import triton
from torch import Tensor, nn

import bass_kernels
from bass_core.loading.quantization import GROUP, int4, int8
from bass_kernels import Codes, reference
from bass_lab.gpu import command
from bass_lab.gpu.command import Lines
from bass_lab.gpu.kernels import report
from bass_lab.gpu.kernels.measure import timed
from bass_lab.gpu.kernels.peers import Prepared
from bass_lab.gpu.kernels.tensors import number_of_sets
from bass_lab.gpu.kernels.timing import Timer
from bass_lab.measure import records

SHAPES = [(4096, 4096), (14336, 4096), (4096, 14336), (1024, 4096), (4096, 11008)]  # outputs, inputs
ROWS = (8, 48, 64, 96, 160, 224, 1, 16, 128)  # at verification first
SECONDS = 240.0  # limit of a run
AIM = "aim for up to 16 rows, at least 4096 outputs and inputs: 75% of a copy and 1.6 times cuBLAS in bfloat16"


def ours(packed: bool, x: Tensor, weights: list[Tensor]) -> Prepared:
    made = [Codes(*(int4 if packed else int8)(weight), GROUP if packed else None) for weight in weights]
    calls = [partial(bass_kernels.skinny_linear, x, codes) for codes in made]
    size = made[0].weight.nbytes + made[0].scale.nbytes
    return _prepared(x, calls, reference.dequantized(*made[0], x.shape[1]), size)


def cublas(x: Tensor, weights: list[Tensor]) -> Prepared:
    return _prepared(x, [partial(F.linear, x, weight) for weight in weights], weights[0].double(), weights[0].nbytes)


def int8pack(x: Tensor, weights: list[Tensor]) -> Prepared:
    made = [int8(weight) for weight in weights]
    calls = [partial(torch._weight_int8pack_mm, x, codes.weight, codes.scale[:, 0]) for codes in made]
    size = sum(part.nbytes for part in made[0])
    return _prepared(x, calls, reference.dequantized(*made[0], None, x.shape[1]), size)


def fp8(x: Tensor, weights: list[Tensor]) -> Prepared:
    """Products in FP8 with a scale per row of x and per output, the conversion of x included."""
    largest = torch.finfo(torch.float8_e4m3fn).max

    def quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
        scale = rows.abs().amax(1, keepdim=True).float() / largest
        return (rows / scale).to(torch.float8_e4m3fn), scale

    made = [quantized(weight) for weight in weights]

    def call(codes: Tensor, scale: Tensor) -> Tensor:
        mine, own = quantized(x)
        return torch._scaled_mm(mine, codes.T, own, scale.T, out_dtype=x.dtype)

    calls, (codes, scale) = [partial(call, *each) for each in made], made[0]
    mine, own = quantized(x)
    wanted = (mine.double() * own) @ (codes.double() * scale).T
    return Prepared(calls, wanted=wanted, size=codes.nbytes + scale.nbytes)


def torchao(bits: int, x: Tensor, weights: list[Tensor]) -> Prepared:
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    layers = []
    for weight in weights:
        layer = nn.Linear(*weight.T.shape, bias=False, device=weight.device, dtype=weight.dtype)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        quantize_(layer, Int8WeightOnlyConfig() if bits == 8 else Int4WeightOnlyConfig(group_size=GROUP))
        layers.append(layer)
    own = layers[0](torch.eye(x.shape[1], dtype=x.dtype, device=x.device)).T.double()  # dequantized weights
    return _prepared(x, [partial(layer, x) for layer in layers], own, weights[0].nbytes * bits // 16)


def _prepared(x: Tensor, calls: list[Callable[[], Tensor]], weights: Tensor, size: int) -> Prepared:
    """weights: of the first call, in float64. size: bytes of one set."""
    return Prepared(calls, wanted=x.double() @ weights.T, size=size)


PEERS: dict[str, Callable[[Tensor, list[Tensor]], Prepared]] = {
    "int8": partial(ours, False),
    "int4": partial(ours, True),
    "cublas": cublas,
    "fp8": fp8,
    "torch int8pack": int8pack,
    "torchao int8": partial(torchao, 8),
    "torchao int4": partial(torchao, 4),
}


@torch.no_grad()
def measure(rows: int, columns: int, inputs: int, timer: Timer, copy: float) -> list[dict]:
    """Return a record per kernel. copy: bytes per second."""
    generator, dtype = torch.Generator(timer.device).manual_seed(0), torch.bfloat16

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=timer.device).to(dtype)

    x = random(rows, inputs)

    def prepared(name: str) -> Prepared:
        share = {"int8": 2, "int4": 4}.get(name.split()[-1], 1)  # quantized sets are smaller, so there are more
        sets = number_of_sets(2 * columns * inputs / share, timer.device)
        return PEERS[name](x, [random(columns, inputs) / inputs**0.5 for _ in range(sets)])

    timer.new_case()
    lines = []
    for outcome in timed({name: partial(prepared, name) for name in PEERS}, timer):
        gb = None if outcome.size is None else outcome.size / 1e9
        found = outcome.fields(gb, copy)
        line = {"schema": "product", "kernel": outcome.kernel, "rows": rows, "columns": columns, "inputs": inputs}
        line |= {"gb": gb, "clock": timer.device.type, "copy_gb_per_s": copy / 1e9, "triton": triton.__version__}
        lines.append(line | {name: found[name] for name in ("error", "reason", *records.KERNEL_TIMES["product"])})
    return lines


def chosen(quick: bool) -> Iterator[tuple[int, int, int]]:
    for rows, (columns, inputs) in product(ROWS[:3] if quick else ROWS, SHAPES[:2] if quick else SHAPES):
        yield rows, columns, inputs


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    return command.parser(
        "products",
        "Time products with quantized weights.",
        quick="few shapes, about a minute",
        dry_run="one tiny shape on the CPU, with meaningless times",
    ).parse_args(given)


def run(options: argparse.Namespace) -> int:
    """Measure and write shape by shape. Return the exit code."""
    lines = Lines.of(options, "product", limit=SECONDS)
    timer = Timer(torch.device("cpu" if options.dry_run else "cuda"))
    copy = lines.copy_bandwidth(timer.device, "a dry run with meaningless times" if options.dry_run else AIM)
    shapes = [(3, 40, 96)] if options.dry_run else list(chosen(options.quick))
    left = [shape for shape in shapes if not lines.has(**dict(zip(("rows", "columns", "inputs"), shape, strict=True)))]
    while left and not lines.out_of_time:
        rows, columns, inputs = left.pop(0)
        found = [lines.add(line) for line in measure(rows, columns, inputs, timer, copy)]
        cublas_us = next((line["us"] for line in found if line["kernel"] == "cublas"), None)
        ratio = {"× cuBLAS": lambda us, base=cublas_us: base and base / us}
        print(report.table(f"{rows} rows, {columns} × {inputs}", found, **ratio), flush=True)
    here = {"clock": timer.device.type, "copy_gb_per_s": copy / 1e9, "triton": triton.__version__} | lines.here
    lines.end(here | {"shapes_left_out": len(left), "lines": lines.written})
    return command.verdict(lines.known, ("int8", "int4"))


def main(given: list[str] | None = None) -> int:
    return command.main(run, arguments(given))


if __name__ == "__main__":
    sys.exit(main())
