"""Which tile a launch gets: how many packed query rows and keys one program holds at a time.

The choice balances three things on a multiprocessor: enough bytes in flight to keep memory busy (several programs, two
stages of keys and values each), no register spills, and matrix instructions (16 rows at least). Figures per tile come
from compiling (tests/kernels/test_kernel_compile.py holds them); blocks at head dimension 128 were timed on an H200.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
HEAD_DIMS = range(1, 257)


class Tile(NamedTuple):
    """Rows and keys of a block, head dimension rounded up for the matrix units, and how it is launched."""

    block_m: int
    block_n: int
    block_d: int
    warps: int
    stages: int
    programs: int  # per multiprocessor, as its registers and shared memory allow (sm_90)

    @property
    def launch(self) -> dict[str, int]:
        """Triton's launch options."""
        return {"num_warps": self.warps, "num_stages": self.stages}


def power_of_two(number: int, least: int = 1) -> int:
    """The smallest power of two that is >= number and >= least."""
    return max(least, 1 << max(number - 1, 0).bit_length())


@functools.cache
def choose(rows: int, head_dim: int, dtype: torch.dtype, deterministic: bool) -> Tile:
    """The tile for `rows` packed query rows (query length x group) of one KV head.

    deterministic: one tile for any number of rows, so that a query's bits do not depend on how many come with it.
    """
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"the head dimension must be at most {HEAD_DIMS[-1]}, got {head_dim}")
    block_d = power_of_two(head_dim, least=16)
    if dtype.itemsize > 2:
        # Full precision has no matrix instruction that does not round: plain multiply-adds, small tiles.
        warps = 8 if block_d == 256 and dtype.itemsize == 8 else 4  # with 4 it spills where pieces are added up
        return Tile(16, 16, block_d, warps, 2, _PROGRAMS_WIDE[max(block_d, 64), dtype.itemsize])
    # 64 rows are one warpgroup's matrix instruction (wgmma); longer queries take several such blocks, which are
    # neighbours on the grid, so that the keys they share are read from L2. At head dimension 256, 64 rows would spill.
    most = 32 if block_d == 256 else 64
    block_m = most if deterministic else min(power_of_two(rows, least=16), most)
    # 64 keys in three stages, with few programs counted on, were the fastest on a GPU (kernels/README.md, change 17);
    # tiles of 64 rows have no registers for as many.
    block_n = 16 if block_d == 256 else 64 if block_d == 128 and block_m < 64 else 32
    return Tile(block_m, block_n, block_d, 4, 3, _PROGRAMS[max(block_d, 64), block_m])


# Programs per multiprocessor by (head dimension rounded up, rows); in full precision by (…, bytes of a number).
_PROGRAMS = {
    (64, 16): 7,  # eight fit, but for a softcap under triton 3.6
    (64, 32): 5,
    (64, 64): 4,
    (128, 16): 2,  # three fit; with two, rows are cut into fewer pieces, which is faster
    (128, 32): 2,
    (128, 64): 2,
    (256, 16): 3,
    (256, 32): 2,
}
_PROGRAMS_WIDE = {(64, 4): 7, (128, 4): 4, (256, 4): 2, (64, 8): 3, (128, 8): 2, (256, 8): 1}
