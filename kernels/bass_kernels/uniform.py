"""The random numbers of `bass_core.exactness.randomness`, hashed inside kernels with the same bits.

SplitMix64's finalizer hashes (stream, counter, purpose, slot) to 64 bits. The upper 52 bits give a float64 in [0, 1).
Products of int64 wrap around.
"""

from __future__ import annotations

import triton
import triton.language as tl

GOLDEN = tl.constexpr(-7046029254386353131)  # 0x9E3779B97F4A7C15 as a signed integer
MIX_1 = tl.constexpr(-4658895280553007687)  # 0xBF58476D1CE4E5B9
MIX_2 = tl.constexpr(-7723592293110705685)  # 0x94D049BB133111EB


@triton.jit
def uniform(stream, counter, purpose, slot):
    """Return float64 in [0, 1), a multiple of 2^-52, in the shape of slot. stream, counter: int64; slot: integers."""
    word = tl.cast(slot * 8 + purpose, tl.int64) * GOLDEN
    return _shift_right(_mix(_mix(stream + counter * GOLDEN) + word), 12).to(tl.float64) * 2.0**-52


@triton.jit
def _mix(x):
    x = (x ^ _shift_right(x, 30)) * MIX_1
    x = (x ^ _shift_right(x, 27)) * MIX_2
    return x ^ _shift_right(x, 31)


@triton.jit
def _shift_right(x, BITS: tl.constexpr):
    """Return the logical shift of x. `>>` alone would copy the sign bit."""
    return (x >> BITS) & ((1 << (64 - BITS)) - 1)
