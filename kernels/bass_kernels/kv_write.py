"""Write new keys and values into the cache, each row at its own positions.

A launch of its own, before attention: the programs of one launch cannot order one's write before another's read. Every
program moves one token's keys and values of all heads; nothing is transposed or copied in between.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from bass_kernels import launching
from bass_kernels.tiles import power_of_two


def write_kv(
    key_states: Tensor, value_states: Tensor, keys: Tensor, values: Tensor, slots: Tensor, first_place: int = 0
) -> None:
    """Row b's token t goes to keys[first_place + b, slots[b, t]], and likewise its values.

    key_states, value_states: [B, H_kv, Q, D], the last dimension contiguous. keys, values: the cache, [places, S, H_kv,
    D], contiguous. slots: int64 [B, Q]; tokens that share a slot (padding, in a scratch slot) leave it undefined.
    """
    batch, heads, query_length, head_dim = key_states.shape
    if not launching.runs_on(keys.device):
        raise ValueError(f"the Triton kernels need a CUDA GPU, got a cache on {keys.device}")
    dense = keys.is_contiguous() and values.is_contiguous()
    if not dense or key_states.stride(-1) != 1 or value_states.stride(-1) != 1:
        raise ValueError("the cache and the head dimension must be contiguous")
    if keys.shape[2:] != (heads, head_dim) or keys.shape != values.shape or slots.shape != (batch, query_length):
        raise ValueError(
            f"keys, values [places, S, H_kv, D] and slots [B, Q] do not fit states {list(key_states.shape)}: "
            f"got {list(keys.shape)}, {list(values.shape)} and {list(slots.shape)}"
        )
    with launching.on(keys.device):
        _write_token[(query_length, batch)](
            key_states,
            value_states,
            keys,
            values,
            slots,
            first_place,
            keys.shape[1],
            *key_states.stride()[:3],
            *value_states.stride()[:3],
            *slots.stride(),
            HEADS=heads,
            D=head_dim,
            BLOCK_H=power_of_two(heads),
            BLOCK_D=power_of_two(head_dim),
            num_warps=4,
        )


@triton.jit
def _write_token(
    key_states,
    value_states,
    keys,
    values,
    slots,
    first_place,
    slots_per_place,
    key_stride_b,
    key_stride_h,
    key_stride_q,
    value_stride_b,
    value_stride_h,
    value_stride_q,
    slots_stride_b,
    slots_stride_q,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One token's keys and values of all heads."""
    token, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    h, d = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None, :]
    inside = (h < HEADS) & (d < D)
    slot = tl.load(slots + b * slots_stride_b + token * slots_stride_q)
    to = ((first_place + b) * slots_per_place + slot) * (HEADS * D) + h * D + d
    k = tl.load(key_states + b * key_stride_b + token * key_stride_q + h * key_stride_h + d, mask=inside)
    v = tl.load(value_states + b * value_stride_b + token * value_stride_q + h * value_stride_h + d, mask=inside)
    tl.store(keys + to, k, mask=inside)
    tl.store(values + to, v, mask=inside)
