"""`PYTHONPATH=.:kernels python -m bench.tune`: other tiles for `ragged_attention`, timed in turn on a few cases.

What `bass_kernels.tiles` chooses comes from compiling alone; this asks a GPU. `ragged` is today's choice; a name such
as `64x2 w8 p2` is blocks of 64 keys in two stages, eight warps, and a plan that counts on twice as many programs.
"""

from __future__ import annotations

import sys
from functools import partial
from itertools import product

import torch

import bass_kernels
from bass_core.environment import describe_environment
from bass_kernels import plan, tiles
from bass_lab.measure.roofline import copy_bandwidth
from bench import cases, measure, report, schema
from bench.__main__ import environment
from bench.peers import PEERS, Prepared
from bench.tensors import Inputs
from bench.timing import Timer

BLOCKS = ((32, 3), (32, 4), (64, 2), (64, 3), (128, 2))  # keys and stages


def prepare(block_n: int, stages: int, warps: int, programs: int, inputs: Inputs) -> Prepared:
    """`ragged` with another tile."""
    work, query_length = inputs.case.work, inputs.case.query_length
    tile = tiles.choose(query_length * work.group, work.head_dim, inputs.query.dtype, deterministic=False)
    tile = tile._replace(block_n=block_n, stages=stages, warps=warps, programs=tile.programs * programs)
    shape = {"query_length": query_length, "kv_heads": work.kv_heads, "width": inputs.sets[0][0].shape[2]}
    lengths = (inputs.starts, inputs.kv_lengths)
    make = partial(plan.make_plan, *lengths, tile=tile, group=work.group, **shape)
    made = make()
    calls = [partial(bass_kernels.ragged_attention, inputs.query, *kv, *lengths, plan=made) for kv in inputs.sets]
    return Prepared(calls, shared=make)


def main(chosen: list[cases.Case], device: torch.device) -> None:
    variants = {
        f"{block_n}x{stages} w{warps} p{programs}": partial(prepare, block_n, stages, warps, programs)
        for (block_n, stages), warps, programs in product(BLOCKS, (4, 8), (1, 2))
    }
    PEERS.update(variants)
    timer, here, copy = Timer(device), environment(describe_environment()), copy_bandwidth(device)
    for case in chosen:
        outcomes = measure.measure(case, ["ragged", *variants], 0, timer)
        lines = [schema.line(case, outcome, copy, device.type, 0, here) for outcome in outcomes]
        print(report.table(case, lines), flush=True)


if __name__ == "__main__":
    if torch.cuda.is_available():
        main(cases.quick_cases(), torch.device("cuda"))
    elif bass_kernels.interpreted():
        main([cases.tiny_case()], torch.device("cpu"))
    else:
        sys.exit(
            "bench.tune needs a CUDA GPU; with TRITON_INTERPRET=1 it shows what it does, in times of the interpreter"
        )
