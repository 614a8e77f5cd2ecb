"""The Triton kernels of `bass_kernels` as torch operators, used instead of plain torch on supported devices.

On a CUDA GPU the kernels compute attention (except the path `eager`) and write the KV cache. If only the temperature
changes the distribution, they also draw draft tokens and verify them. On a CPU the kernels run only in Triton's
interpreter (TRITON_INTERPRET=1, set before Python starts), which is slow but runs the same code.

Compilers and CUDA graphs see each operator as a single call. An operator takes only tensors and numbers. The operators
inside compiled code also declare the shapes of their results.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from bass_core.environment import is_full

GROUP = 32  # inputs that share a scale in INT4, and are packed together


def run_on(device: torch.device) -> bool:
    """Return True if the kernels run on tensors of this device."""
    return obstacle(device) is None


@functools.cache
def obstacle(device: torch.device) -> str | None:
    """Return the reason why kernels do not run on this device, or None after a successful trial run."""
    if device.type != "cuda" and "TRITON_INTERPRET" not in os.environ:
        return (
            f"they need a CUDA GPU, and the model is on {device} (for Triton's slow interpreter on a CPU, set "
            "TRITON_INTERPRET=1 before Python starts)"
        )
    for name in ("bass_kernels", "triton"):
        if importlib.util.find_spec(name) is None:
            return f"the package {name} is not installed"
    states, cache = torch.ones(1, 1, 1, 16, device=device), torch.zeros(1, 1, 1, 16, device=device)
    try:
        load().write_kv(states, states, cache, cache, torch.zeros(1, 1, dtype=torch.int64, device=device))
    except Exception as error:  # any error of a compiler or a driver is the reason
        if is_full(error):  # raised, because the result is cached
            raise
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return None if bool(cache.all()) else "a first kernel wrote nothing"


def can_fuse(logits: Tensor, q: Tensor | None) -> bool:
    """Return True if `commit` supports these tensors."""
    if not run_on(logits.device) or logits.dtype == torch.float64 or logits.stride(-1) != 1:
        return False
    return q is None or (q.dtype == torch.float32 and q.shape[-1] == logits.shape[-1] and q.stride(-1) == 1)


def load() -> ModuleType:
    """Import `bass_kernels` on first use."""
    return importlib.import_module("bass_kernels")


# --- operators ------------------------------------------------------------------------------------


@torch.library.custom_op("bass::write_kv", mutates_args=("keys", "values"))
def write_kv(
    key_states: Tensor, value_states: Tensor, keys: Tensor, values: Tensor, kv_slots: Tensor, first_batch_slot: int
) -> None:
    """`bass_kernels.write_kv`."""
    load().write_kv(key_states, value_states, keys, values, kv_slots, first_batch_slot)


@write_kv.register_fake
def _(key_states, value_states, keys, values, kv_slots, first_batch_slot) -> None: ...


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
    span: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return items, rows and counters of a `bass_kernels.Plan` for layers of these shapes over `width` KV slots."""
    group = heads // kv_heads
    found = load().plan.make_plan(
        starts,
        ends,
        query_length=queries,
        kv_heads=kv_heads,
        width=width,
        tile=_tile(queries * group, head_dim, dtype, deterministic),
        group=group,
        window=window,
        deterministic=deterministic,
        span=span,
    )
    return found.items, found.rows, found.counters


def _tile(rows: int, head_dim: int, dtype: torch.dtype, deterministic: bool) -> tuple:
    return load().tiles.choose(rows, head_dim, dtype, deterministic)


@torch.library.custom_op("bass::ragged_attention", mutates_args=())
def ragged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    ends: Tensor,
    items: Tensor,
    rows: Tensor,
    counters: Tensor,
    sinks: Tensor | None,
    *,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    deterministic: bool,
) -> Tensor:
    """`bass_kernels.ragged_attention` with a work list of `plan`. The kernel restores the list's counters."""
    kernels, group = load(), query.shape[1] // key.shape[1]
    tile = _tile(query.shape[2] * group, query.shape[3], query.dtype, deterministic)
    options = {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap, "sinks": sinks}
    work = kernels.Plan(items, rows, counters, tile)
    return kernels.ragged_attention(query, key, value, starts, ends, plan=work, deterministic=deterministic, **options)


@ragged_attention.register_fake
def _(
    query, key, value, starts, ends, items, rows, counters, sinks, *, scaling, sliding_window, softcap, deterministic
):
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
    max_kv_length: int,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    """`bass_kernels.pad_attention`."""
    options = {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap, "sinks": sinks}
    return load().pad_attention(query, key, value, starts, ends, extent=max_kv_length, **options)


@pad_attention.register_fake
def _(query, key, value, starts, ends, sinks, *, max_kv_length, scaling, sliding_window, softcap):
    return _rows_first(query)


def _rows_first(query: Tensor) -> Tensor:
    """Return an empty result of attention for queries [B, H, Q, D]: [B, Q, H, D]."""
    batch, heads, queries, head_dim = query.shape
    return query.new_empty(batch, queries, heads, head_dim)


def dequantized(weight: Tensor, scale: Tensor, inputs: int) -> Tensor:
    """Return the weights of quantized codes, in the dtype of their scale: [N, inputs]."""
    if weight.dtype == torch.int8:
        return weight * scale
    packed = weight.view(torch.int8).unflatten(1, (scale.shape[1], -1))  # [N, groups, 16]
    codes = torch.cat([packed << 4 >> 4, packed >> 4], 2)  # shifts of int8 keep the sign
    return (codes * scale[..., None]).flatten(1)[:, :inputs]


@torch.library.custom_op("bass::quantized_linear", mutates_args=())
def quantized_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return x [..., K] times a `quantization.QuantizedWeight`: [..., N]. For few rows in half precision,
    `bass_kernels.skinny_linear` reads the codes directly. Products of more rows are limited by compute, and dequantize
    the weights first."""
    rows = x.reshape(-1, x.shape[-1])
    half = x.dtype in (torch.bfloat16, torch.float16)
    if half and run_on(x.device) and len(rows) <= (kernels := load()).skinny.MOST_ROWS:
        packed = weight.dtype == torch.uint8
        found = kernels.skinny_linear(rows, kernels.Codes(weight, scale, GROUP if packed else None), bias)
        return found.view(*x.shape[:-1], len(weight))
    return F.linear(x, dequantized(weight, scale, x.shape[-1]), bias)


@quantized_linear.register_fake
def _(x, weight, scale, bias):
    return x.new_empty(*x.shape[:-1], len(weight))


@torch.library.custom_op("bass::draw", mutates_args=())
def draw(
    logits: Tensor, streams: Tensor, steps: Tensor, slot: int, temperature: float, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`bass_kernels.draw`: a draft token of each row, the token's distribution, and the row's largest logit."""
    return load().draw(logits, streams, steps, slot, temperature, width)


@torch.library.custom_op("bass::largest", mutates_args=())
def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """`bass_kernels.largest`: the largest logit of each row, in float32, and its id."""
    return load().largest(logits)


@torch.library.custom_op("bass::commit", mutates_args=("row_tokens", "row_logprobs", "row_lengths", "row_steps"))
def commit(
    logits: Tensor,
    drafted: Tensor,
    submitted: Tensor,
    q: Tensor | None,
    draft_finite: Tensor,
    row_tokens: Tensor,
    row_logprobs: Tensor,
    row_lengths: Tensor,
    row_steps: Tensor,
    streams: Tensor,
    chances: Tensor | None,
    temperature: float,
    all_or_none: bool,
) -> Tensor:
    """`bass_kernels.commit`: verify tokens (at temperature 0, match the argmax) and commit the rows. Returns the host's
    results, int64 [B, K + 4]. With the same random numbers, decisions and rows equal the results of `verification` and
    `Rows.advance`, except for numbers within 1e-6 of a boundary."""
    kernels = load()
    rows = kernels.RowMemory(row_tokens, row_logprobs, row_lengths, row_steps, streams)
    options = {"all_or_none": all_or_none, "chances": chances}
    return kernels.commit(logits, drafted, submitted, q, draft_finite, rows, temperature, **options)
