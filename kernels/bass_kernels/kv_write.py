"""Write new keys and values into the cache, each row at its own positions.

The write is a separate launch before attention, because programs of one launch cannot order a write before a read.
Every program moves the keys and values of one token for all heads, without transposed copies.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from bass_kernels import launching
from bass_kernels.launching import require
from bass_kernels.tiles import power_of_two


def write_kv(
    key_states: Tensor, value_states: Tensor, keys: Tensor, values: Tensor, slots: Tensor, first_place: int = 0
) -> None:
    """Write token t of row b to keys[first_place + b, :, slots[b, t]], and its values likewise.

    key_states, value_states: [B, H_kv, Q, D], the last dimension contiguous. keys, values: the cache, [places, H_kv, S,
    D], contiguous; keys and values may differ in D. slots: int32 or int64 [B, Q] on the device, not checked to be
    below S. Tokens that share a slot (padding, in a scratch slot) leave undefined content. Raises ValueError for
    mismatched shapes, dtypes and devices.
    """
    batch, heads, query_length, _ = key_states.shape
    launching.check_device(keys.device)
    for name, states, cache in (("key", key_states, keys), ("value", value_states, values)):
        expected = (len(keys), heads, keys.shape[2], states.shape[3])
        require(states.shape[:3] == (batch, heads, query_length) and cache.shape == expected, f"{name} states "
                f"{list(states.shape)} do not fit a cache [places, H_kv, S, D] of {list(cache.shape)}")  # fmt: skip
        require(states.dtype == cache.dtype, f"{name} states are {states.dtype}, their cache is {cache.dtype}")
        require(
            cache.is_contiguous() and states.stride(-1) == 1, f"{name}s: cache and head dimension must be contiguous"
        )
        require(states.device == cache.device == slots.device, f"{name}s: all tensors must be on one device")
    require(slots.shape == (batch, query_length), f"slots must be [{batch}, {query_length}], got {list(slots.shape)}")
    require(not slots.is_floating_point(), f"slots must be integers, got {slots.dtype}")
    require(0 <= first_place <= len(keys) - batch, f"first_place must be 0 … {len(keys) - batch}, got {first_place}")
    with launching.on(keys.device):
        _write_token[(query_length, batch)](
            key_states,
            value_states,
            keys,
            values,
            slots,
            first_place,
            keys.shape[2],
            *key_states.stride()[:3],
            *value_states.stride()[:3],
            *slots.stride(),
            HEADS=heads,
            KEY_DIM=keys.shape[3],
            VALUE_DIM=values.shape[3],
            BLOCK_H=power_of_two(heads),
            BLOCK_D=power_of_two(max(keys.shape[3], values.shape[3])),
            num_warps=4,
        )


@triton.jit(do_not_specialize=["first_place", "slots_per_place"])
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
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Move the keys and values of one token for all heads."""
    token, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    h, d = tl.arange(0, BLOCK_H).to(tl.int64)[:, None], tl.arange(0, BLOCK_D)[None, :]
    slot = tl.load(slots + b * slots_stride_b + token * slots_stride_q)
    to = ((first_place + b) * HEADS + h) * slots_per_place + slot  # index of the cache vector
    inside = (h < HEADS) & (d < KEY_DIM)
    k = tl.load(key_states + b * key_stride_b + token * key_stride_q + h * key_stride_h + d, mask=inside)
    tl.store(keys + to * KEY_DIM + d, k, mask=inside)
    inside = (h < HEADS) & (d < VALUE_DIM)
    v = tl.load(value_states + b * value_stride_b + token * value_stride_q + h * value_stride_h + d, mask=inside)
    tl.store(values + to * VALUE_DIM + d, v, mask=inside)
