"""The Triton kernels as operators of torch, so that compilers and recorders see one call each instead of its inside.

An operator takes tensors and numbers alone. Those that compiled code meets also say what shape comes out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bass_core import triton_kernels


@torch.library.custom_op("bass::write_kv", mutates_args=("keys", "values"))
def write_kv(
    key_states: Tensor, value_states: Tensor, keys: Tensor, values: Tensor, slots: Tensor, first_place: int
) -> None:
    """`bass_kernels.write_kv`."""
    triton_kernels.load().write_kv(key_states, value_states, keys, values, slots, first_place)


@write_kv.register_fake
def _(key_states, value_states, keys, values, slots, first_place) -> None:
    return None


@torch.library.custom_op("bass::plan", mutates_args=())
def plan(
    starts: Tensor,
    ends: Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    queries: int,
    width: int,
    dtype: torch.dtype,
    window: int,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """items and rows of a `bass_kernels.Plan` for layers of these shapes over `width` slots of the cache."""
    group = heads // kv_heads
    found = triton_kernels.load().plan.make_plan(
        starts,
        ends,
        query_length=queries,
        kv_heads=kv_heads,
        width=width,
        tile=_tile(queries * group, head_dim, dtype, deterministic),
        group=group,
        window=window,
        deterministic=deterministic,
    )
    return found.items, found.rows


def _tile(rows: int, head_dim: int, dtype: torch.dtype, deterministic: bool) -> tuple:
    return triton_kernels.load().tiles.choose(rows, head_dim, dtype, deterministic)


@torch.library.custom_op("bass::ragged_attention", mutates_args=())
def ragged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    ends: Tensor,
    items: Tensor,
    rows: Tensor,
    sinks: Tensor | None,
    *,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    deterministic: bool,
) -> Tensor:
    """`bass_kernels.ragged_attention` with the work list that `plan` made."""
    kernels, group = triton_kernels.load(), query.shape[1] // key.shape[1]
    tile = _tile(query.shape[2] * group, query.shape[3], query.dtype, deterministic)
    options = {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap, "sinks": sinks}
    work = kernels.Plan(items, rows, tile)
    return kernels.ragged_attention(query, key, value, starts, ends, plan=work, deterministic=deterministic, **options)


@ragged_attention.register_fake
def _(query, key, value, starts, ends, items, rows, sinks, *, scaling, sliding_window, softcap, deterministic):
    return _rows_first(query)


@torch.library.custom_op("bass::pad_attention", mutates_args=())
def pad_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    ends: Tensor,
    sinks: Tensor | None,
    *,
    extent: int,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    """`bass_kernels.pad_attention`."""
    options = {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap, "sinks": sinks}
    return triton_kernels.load().pad_attention(query, key, value, starts, ends, extent=extent, **options)


@pad_attention.register_fake
def _(query, key, value, starts, ends, sinks, *, extent, scaling, sliding_window, softcap):
    return _rows_first(query)


def _rows_first(query: Tensor) -> Tensor:
    """What attention gives for queries [B, H, Q, D]: [B, Q, H, D]."""
    batch, heads, queries, head_dim = query.shape
    return query.new_empty(batch, queries, heads, head_dim)


@torch.library.custom_op("bass::verify", mutates_args=())
def verify(
    logits: Tensor,
    drafted: Tensor,
    submitted: Tensor,
    q: Tensor | None,
    accept_uniform: Tensor,
    draw_uniform: Tensor,
    committed: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`bass_kernels.verify`: accepted, tokens, logprobs, finite, lengths."""
    numbers = accept_uniform, draw_uniform
    found = triton_kernels.load().verify(logits, drafted, submitted, q, *numbers, committed, temperature)
    return found.accepted, found.tokens, found.logprobs, found.finite, found.lengths
