"""`PYTHONPATH=.:kernels python -m bass_lab.gpu.kernels.tune`: other tiles for `ragged_attention` on a few cases.

`ragged` is today's choice; a name such as `64x3 p1/2` is blocks of 64 keys in three stages, and a plan that counts on
half as many programs. On a GPU they are compiled first, by as many processes as there are cores: that takes most of the
time. kernels/README.md has what came of it (change 17).
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction
from functools import partial
from itertools import product

import torch

import bass_kernels
from bass_kernels import plan, tiles
from bass_lab.gpu.kernels import cases, measure, report, schema, tensors
from bass_lab.gpu.kernels.__main__ import environment
from bass_lab.gpu.kernels.cases import Case
from bass_lab.gpu.kernels.peers import PEERS, Prepared
from bass_lab.gpu.kernels.tensors import Inputs
from bass_lab.gpu.kernels.timing import Timer
from bass_lab.measure.roofline import copy_bandwidth
from bass_lab.provenance import describe_environment

BLOCKS = ((32, 3), (64, 2), (64, 3), (64, 4))  # keys and stages
SHARES = (Fraction(1, 2), Fraction(1), Fraction(3, 2))  # of today's programs


def prepare(block_n: int, stages: int, share: Fraction, inputs: Inputs) -> Prepared:
    """`ragged` with another tile."""
    work, query_length = inputs.case.work, inputs.case.query_length
    tile = tiles.choose(query_length * work.group, work.head_dim, inputs.query.dtype, deterministic=False)
    tile = tile._replace(block_n=block_n, stages=stages, programs=max(1, int(tile.programs * share)))
    shape = {"query_length": query_length, "kv_heads": work.kv_heads, "width": inputs.sets[0][0].shape[2]}
    lengths = (inputs.starts, inputs.kv_lengths)
    make = partial(plan.make_plan, *lengths, tile=tile, group=work.group, **shape)
    made = make()
    calls = [partial(bass_kernels.ragged_attention, inputs.query, *kv, *lengths, plan=made) for kv in inputs.sets]
    return Prepared(calls, shared=make)


VARIANTS = {
    f"{block_n}x{stages} p{share}": (block_n, stages, share) for (block_n, stages), share in product(BLOCKS, SHARES)
}


def chosen() -> list[Case]:
    """The benchmark's quick ones, and rows as long as a decode's: of the target, of the draft, of heads of 64."""
    rows = [Case(model, 8, 1, 576, "ragged") for model in ("MHA-7.8B", "310M", "0.5B")]
    return [*cases.quick_cases(), *rows, Case("0.5B", 8, 5, 4096, "ragged")]


def compile_ahead(case: Case, blocks: tuple[int, int]) -> None:
    """In a process of its own: what is compiled stays in triton's cache."""
    inputs = tensors.make(case, torch.device("cuda"), 0, sets=1)
    prepare(*blocks, Fraction(1), inputs).calls[0]()
    torch.cuda.synchronize()


def main(found: list[Case], device: torch.device) -> None:
    if device.type == "cuda":
        spawned = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(16, os.cpu_count() or 1), mp_context=spawned) as pool:
            for done in [pool.submit(compile_ahead, *each) for each in product(found, BLOCKS)]:
                done.exception()  # told when the variant is timed
    PEERS.update({name: partial(prepare, *variant) for name, variant in VARIANTS.items()})
    timer, here, copy = Timer(device), environment(describe_environment()), copy_bandwidth(device)
    for case in found:
        outcomes = measure.measure(case, ["ragged", *VARIANTS], 0, timer)
        lines = [schema.line(case, outcome, copy, device.type, 0, here) for outcome in outcomes]
        print(report.table(case, lines), flush=True)


if __name__ == "__main__":
    if torch.cuda.is_available():
        main(chosen(), torch.device("cuda"))
    elif bass_kernels.interpreted():
        main([cases.tiny_case()], torch.device("cpu"))
    else:
        sys.exit(
            "bass_lab.gpu.kernels.tune needs a CUDA GPU; with TRITON_INTERPRET=1 it shows what it does, in times of "
            "the interpreter"
        )
