"""The Triton kernels of `bass_kernels` in place of plain torch: where they run, and as operators of torch.

They run on a CUDA GPU where they are installed: attention (but for the path "eager"), the write into the KV cache, and,
where nothing but the temperature changes the distribution, the draw of a draft and verification. On a CPU they run only
in Triton's interpreter (TRITON_INTERPRET=1, set before Python starts): slow, and the same code.

As operators, compilers and recorders see one call each instead of its inside. An operator takes tensors and numbers
alone. Those that compiled code meets also say what shape comes out.
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

GROUP = 32  # inputs that share a scale in INT4; also how many are packed together


def run_on(device: torch.device) -> bool:
    """Whether kernels run on tensors of this device."""
    return obstacle(device) is None


@functools.cache
def obstacle(device: torch.device) -> str | None:
    """Why kernels do not run on this device; None if one did. Triton compiles when called, and that can fail too."""
    if device.type != "cuda" and "TRITON_INTERPRET" not in os.environ:
        return (
            f"they need a CUDA GPU, and the model is on {device} (on a CPU they run slowly, in Triton's interpreter: "
            "set TRITON_INTERPRET=1 before Python starts)"
        )
    for name in ("bass_kernels", "triton"):
        if importlib.util.find_spec(name) is None:
            return f"the package {name} is not installed"
    states, cache = torch.ones(1, 1, 1, 16, device=device), torch.zeros(1, 1, 1, 16, device=device)
    try:
        load().write_kv(states, states, cache, cache, torch.zeros(1, 1, dtype=torch.int64, device=device))
    except Exception as error:  # whatever a compiler or a driver raises is the answer
        if is_full(error):  # but for this one, which is not kept
            raise
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return None if bool(cache.all()) else "a first kernel wrote nothing"


def can_fuse(logits: Tensor, q: Tensor | None) -> bool:
    """Return True if `commit` can take these tensors."""
    if not run_on(logits.device) or logits.dtype == torch.float64 or logits.stride(-1) != 1:
        return False
    return q is None or (q.dtype == torch.float32 and q.shape[-1] == logits.shape[-1] and q.stride(-1) == 1)


def load() -> ModuleType:
    """The package `bass_kernels`, imported when first used."""
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
    """items, rows and counters of a `bass_kernels.Plan` for layers of these shapes over `width` slots of the cache."""
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
    """`bass_kernels.ragged_attention` with the work list that `plan` made. Its counters are left as they were found."""
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
    """What attention gives for queries [B, H, Q, D]: [B, Q, H, D]."""
    batch, heads, queries, head_dim = query.shape
    return query.new_empty(batch, queries, heads, head_dim)


def dequantized(weight: Tensor, scale: Tensor, inputs: int) -> Tensor:
    """The weights that codes stand for, in the dtype of their scale: [N, inputs]."""
    if weight.dtype == torch.int8:
        return weight * scale
    packed = weight.view(torch.int8).unflatten(1, (scale.shape[1], -1))  # [N, groups, 16]
    codes = torch.cat([packed << 4 >> 4, packed >> 4], 2)  # shifts of int8 keep the sign
    return (codes * scale[..., None]).flatten(1)[:, :inputs]


@torch.library.custom_op("bass::quantized_linear", mutates_args=())
def quantized_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K] times `quantization.QuantizedWeight`: [..., N]. Few rows of half precision go through
    `bass_kernels.skinny_linear`, which reads the codes as they are; for more, whose time is operations, the weights are
    made in full."""
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
    """`bass_kernels.draw`: a drafted token of each row, what it was drawn from, and the row's largest logit."""
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
    """`bass_kernels.commit`: token verification (at temperature 0 matching with the argmax), the rows' ends, and what
    the host is told, int64 [B, K + 4]. The decisions are those of `verification` and the rows those of `Rows.advance`,
    from the same random numbers, but for numbers within 1e-6 of a boundary."""
    kernels = load()
    rows = kernels.RowMemory(row_tokens, row_logprobs, row_lengths, row_steps, streams)
    options = {"all_or_none": all_or_none, "chances": chances}
    return kernels.commit(logits, drafted, submitted, q, draft_finite, rows, temperature, **options)
