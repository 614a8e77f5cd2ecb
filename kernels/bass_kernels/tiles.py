"""Choice of the tile of a launch: packed query rows and keys that a program holds at a time.

A tile needs enough bytes in flight to keep memory busy (several programs per multiprocessor, several stages of keys and
values each), no register spills, and at least 16 rows for matrix instructions. tests/kernels/test_kernel_compile.py
checks the figures per tile. Blocks at head dimension 128 were timed on an H200.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
HEAD_DIMS = range(1, 257)


class Tile(NamedTuple):
    """Rows and keys of a block, head dimension rounded up for the matrix units, and launch options."""

    block_m: int
    block_n: int
    block_d: int
    warps: int
    stages: int
    programs: int  # per multiprocessor, as registers and shared memory allow (sm_90)

    @property
    def launch(self) -> dict[str, int]:
        """Return Triton's launch options."""
        return {"num_warps": self.warps, "num_stages": self.stages}


def power_of_two(number: int, least: int = 1) -> int:
    """Return the smallest power of two >= number and >= least."""
    return max(least, 1 << max(number - 1, 0).bit_length())


@functools.cache
def choose(rows: int, head_dim: int, dtype: torch.dtype, deterministic: bool) -> Tile:
    """Return the tile for `rows` packed query rows (query length x group) of one KV head.

    deterministic: one tile for any number of rows, so the bits of a query do not depend on the number of queries.
    """
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"the head dimension must be at most {HEAD_DIMS[-1]}, got {head_dim}")
    block_d = power_of_two(head_dim, least=16)
    if dtype.itemsize > 2:
        # Full precision, without rounded inputs: plain multiply-adds and small tiles.
        warps = 8 if block_d == 256 and dtype.itemsize == 8 else 4  # with 4 warps adding up pieces spills
        return Tile(16, 16, block_d, warps, 2, _PROGRAMS_WIDE[max(block_d, 64), dtype.itemsize])
    # 64 rows fill a warpgroup's matrix instruction (wgmma). Longer queries take several blocks, neighbours on the grid
    # that read their common keys from L2. At head dimension 256, 64 rows would spill.
    most = 32 if block_d == 256 else 64
    block_m = most if deterministic else min(power_of_two(rows, least=16), most)
    # 64 keys in three stages, with few programs counted on, were fastest on a GPU (kernels/LABBOOK.md, change 17).
    # Tiles of 64 rows have too few registers for 64 keys.
    block_n = 16 if block_d == 256 else 64 if block_d == 128 and block_m < 64 else 32
    return Tile(block_m, block_n, block_d, 4, 3, _PROGRAMS[max(block_d, 64), block_m])


# Programs per multiprocessor by (head dimension rounded up, rows); _WIDE: by (…, bytes of a float32 or float64).
_PROGRAMS = {
    (64, 16): 7,  # eight fit, except with a softcap under triton 3.6
    (64, 32): 5,
    (64, 64): 4,
    (128, 16): 2,  # three fit; counting on two cuts rows into fewer pieces, which is faster
    (128, 32): 2,
    (128, 64): 2,
    (256, 16): 3,
    (256, 32): 2,
}
_PROGRAMS_WIDE = {(64, 4): 7, (128, 4): 4, (256, 4): 2, (64, 8): 3, (128, 8): 2, (256, 8): 1}
