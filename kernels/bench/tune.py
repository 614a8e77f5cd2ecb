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
from bass_kernels import plan, tiles
from bench import measure, report, shapes
from bench.__main__ import environment
from bench.inputs import Inputs
from bench.peers import PEERS, Prepared
from bench.timing import FakeClock, GraphClock

BLOCKS = ((32, 3), (32, 4), (64, 2), (64, 3), (128, 2))  # keys and stages


def prepare(block_n: int, stages: int, warps: int, programs: int, inputs: Inputs) -> Prepared:
    """`ragged` with another tile."""
    model, query_length = inputs.case.model, inputs.case.query_length
    group = model.heads // model.kv_heads
    tile = tiles.choose(query_length * group, model.head_dim, inputs.query.dtype, deterministic=False)
    tile = tile._replace(block_n=block_n, stages=stages, warps=warps, programs=tile.programs * programs)
    shape = {"query_length": query_length, "kv_heads": model.kv_heads, "width": inputs.sets[0][0].shape[2]}
    lengths = (inputs.starts, inputs.kv_lengths)
    make = partial(plan.make_plan, *lengths, tile=tile, group=group, **shape)
    made = make()
    calls = [partial(bass_kernels.ragged_attention, inputs.query, *kv, *lengths, plan=made) for kv in inputs.sets]
    return Prepared(calls, shared=make)


def main(cases: list[shapes.Case], device: torch.device, clock: measure.Clock) -> None:
    variants = {
        f"{block_n}x{stages} w{warps} p{programs}": partial(prepare, block_n, stages, warps, programs)
        for (block_n, stages), warps, programs in product(BLOCKS, (4, 8), (1, 2))
    }
    PEERS.update(variants)
    here, copy = environment(commit=""), clock.copy_bytes_per_second()
    for case in cases:
        outcomes = measure.measure(case, ["ragged", *variants], device, 0, clock)
        lines = [measure.line(case, outcome, copy, clock, 0, here) for outcome in outcomes]
        print(report.table(case, lines), flush=True)


if __name__ == "__main__":
    if torch.cuda.is_available():
        main(shapes.quick_cases(), torch.device("cuda"), GraphClock())
    elif bass_kernels.interpreted():
        main([shapes.tiny_case()], torch.device("cpu"), FakeClock())
    else:
        sys.exit("bench.tune needs a CUDA GPU; with TRITON_INTERPRET=1 it shows what it does, with made-up times")
