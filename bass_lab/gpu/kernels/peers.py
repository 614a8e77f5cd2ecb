"""Our kernels and their peers behind a common interface: `prepare(inputs)` -> `Prepared`.

`prepare` does the work that a forward pass does once for all layers (masks, page tables, FlashInfer's plan). This work
is not timed, in the peers' favour; only our own plan is charged. Work of every layer (expanding or packing heads,
reducing partial results) is part of the call. `prepare` also makes layouts that a cache could have from the start
(packed rows for `varlen`). A peer may return a view; our kernels return contiguous memory.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen

import bass_kernels
from bass_lab.gpu.kernels.cases import PAGE
from bass_lab.gpu.kernels.tensors import Inputs

OURS = ("ragged", "pad", "split")
FLASHINFER_PAGE = 16
FLASHINFER_WORKSPACE = 512 * 2**20


class Unavailable(Exception):
    """The kernel is not installed or does not support this shape. The record gets the message as the reason."""


@dataclass
class Prepared:
    """`calls`: one per KV set, each returning [B, Q, H, D]. `shared`: work that a pass does once for all layers.

    wanted: float64 result of the first call. size: bytes that a call reads. Both only if kernels of a case differ.
    """

    calls: list[Callable[[], Tensor]]
    shared: Callable[[], object] | None = None
    wanted: Tensor | None = None
    size: int | None = None


# --- ours -----------------------------------------------------------------------------------------


def _require_triton(inputs: Inputs) -> None:
    if not bass_kernels.runs_on(inputs.query.device):
        raise Unavailable("Triton kernels run on a GPU, or on a CPU under TRITON_INTERPRET=1")


def ragged(inputs: Inputs) -> Prepared:
    _require_triton(inputs)
    lengths = (inputs.starts, inputs.kv_lengths)
    plan = partial(bass_kernels.make_plan, inputs.query, inputs.sets[0][0], *lengths)
    made = plan()
    return Prepared([partial(bass_kernels.ragged_attention, inputs.query, *kv, *lengths, plan=made)
                     for kv in inputs.sets], shared=plan)  # fmt: skip


def pad(inputs: Inputs) -> Prepared:
    _require_triton(inputs)
    run = partial(bass_kernels.pad_attention, extent=max(inputs.lengths))
    return Prepared([partial(run, inputs.query, *kv, inputs.starts, inputs.kv_lengths) for kv in inputs.sets])


def split(inputs: Inputs) -> Prepared:
    _require_triton(inputs)
    run = partial(bass_kernels.split_attention, lengths=inputs.lengths)
    return Prepared([partial(run, inputs.query, *kv, inputs.starts, inputs.kv_lengths) for kv in inputs.sets])


# --- torch's scaled_dot_product_attention over the padded cache -----------------------------------


def _visible_slots(inputs: Inputs) -> list[tuple[Tensor, Tensor]]:
    return [(key[:, :, : inputs.extent], value[:, :, : inputs.extent]) for key, value in inputs.sets]


def sdpa(backend: SDPBackend, expand: bool, inputs: Inputs) -> Prepared:
    """Prepare a forced backend. `expand`: repeat KV heads in every call, for backends without grouped heads."""
    bias = inputs.bias()
    group = inputs.query.shape[1] // inputs.sets[0][0].shape[1]
    grouped = group > 1 and not expand

    def call(key: Tensor, value: Tensor) -> Tensor:
        if expand and group > 1:
            key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(inputs.query, key, value, bias, enable_gqa=grouped)
        return out.transpose(1, 2)

    return Prepared([partial(call, *kv) for kv in _visible_slots(inputs)])


def sdpa_packed(backend: SDPBackend, inputs: Inputs) -> Prepared:
    """Prepare packed heads without copies: query heads of a KV head become queries (bass_core.model.attention)."""
    batch, heads, query_length, head_dim = inputs.query.shape
    kv_heads = inputs.sets[0][0].shape[1]
    if heads == kv_heads:
        raise Unavailable("no query heads share a KV head: the same as unpacked")
    bias = inputs.bias(heads // kv_heads)

    def call(key: Tensor, value: Tensor) -> Tensor:
        packed = inputs.query.reshape(batch, kv_heads, -1, head_dim)
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(packed, key, value, bias)
        return out.reshape(batch, heads, query_length, head_dim).transpose(1, 2)

    return Prepared([partial(call, *kv) for kv in _visible_slots(inputs)])


# --- FlashAttention as torch carries it -----------------------------------------------------------


def _cumulative(lengths: list[int], device: torch.device) -> Tensor:
    return F.pad(torch.tensor(lengths, device=device).cumsum(0), (1, 0)).int()


def _flat(states: Tensor) -> Tensor:
    """Return [B, heads, T, D] as [B * T, heads, D]: a view of queries, a copy of a cache in the peer's layout."""
    return states.transpose(1, 2).flatten(0, 1)


def varlen_attention(inputs: Inputs) -> Prepared:
    """Prepare torch.nn.attention.varlen.varlen_attn over rows stored without padding."""
    batch, heads, query_length, head_dim = inputs.query.shape
    device = inputs.query.device
    if not inputs.query.is_cuda:
        raise Unavailable("FlashAttention needs a GPU")
    grouped = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters  # torch 2.11 needs no flag for groups
    run = partial(
        varlen.varlen_attn,
        cu_seq_q=_cumulative([query_length] * batch, device),
        cu_seq_k=_cumulative(inputs.lengths, device),
        max_q=query_length,
        max_k=max(inputs.lengths),
        window_size=(-1, 0),  # causal, the last query sees the last key
        **({"enable_gqa": True} if grouped else {}),
    )

    def packed(states: Tensor) -> Tensor:  # [ΣL, H_kv, D]
        return torch.cat([states[b, :, :length].transpose(0, 1) for b, length in enumerate(inputs.lengths)])

    def call(key: Tensor, value: Tensor) -> Tensor:
        return run(_flat(inputs.query), key, value).view(batch, query_length, heads, head_dim)

    return Prepared([partial(call, packed(key), packed(value)) for key, value in inputs.sets])


def flash(paged: bool, inputs: Inputs) -> Prepared:
    """Prepare aten's FlashAttention with per-row lengths over the cache, viewed as one long row or as pages."""
    batch, heads, query_length, head_dim = inputs.query.shape
    device, slots, longest = inputs.query.device, inputs.sets[0][0].shape[2], max(inputs.lengths)
    operator = torch.ops.aten._flash_attention_forward.default
    if not inputs.query.is_cuda:
        raise Unavailable("FlashAttention needs a GPU")
    options = {"seqused_k": inputs.kv_lengths}
    if paged:
        if "block_table" not in {argument.name for argument in operator._schema.arguments}:
            raise Unavailable(f"torch {torch.__version__} has no block_table here")
        pages = batch * slots // PAGE
        options["block_table"] = torch.arange(pages, dtype=torch.int32, device=device).view(batch, -1)
    queries, keys = _cumulative([query_length] * batch, device), _cumulative([slots] * batch, device)

    def call(key: Tensor, value: Tensor) -> Tensor:
        if paged:
            key, value = (x.unflatten(0, (-1, PAGE)) for x in (key, value))
        # dropout 0, causal, no debugging mask
        out = operator(
            _flat(inputs.query), key, value, queries, keys, query_length, longest, 0.0, True, False, **options
        )[0]
        return out.view(batch, query_length, heads, head_dim)

    return Prepared([partial(call, *map(_flat, kv)) for kv in inputs.sets])


# --- FlashInfer -----------------------------------------------------------------------------------


def flashinfer(backend: str, inputs: Inputs) -> Prepared:
    """Prepare BatchPrefillWithPagedKVCacheWrapper over the cache, viewed as pages of 16 slots."""
    if not inputs.query.is_cuda:
        raise Unavailable("FlashInfer needs a GPU")
    if importlib.util.find_spec("flashinfer") is None:
        raise Unavailable("flashinfer is not installed")
    if backend in _flashinfer_failures:
        raise Unavailable(f"failed before: {_flashinfer_failures[backend]}")
    try:
        return _flashinfer(backend, inputs)
    except Exception as error:  # never retried: an import or nvcc may take minutes to fail
        _flashinfer_failures[backend] = f"{type(error).__name__}: {error}".splitlines()[0]
        raise


_flashinfer_failures: dict[str, str] = {}


def _flashinfer(backend: str, inputs: Inputs) -> Prepared:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    batch, heads, query_length, head_dim = inputs.query.shape
    device, (key, _) = inputs.query.device, inputs.sets[0]
    pages_per_row = key.shape[2] // FLASHINFER_PAGE
    used = [-(-length // FLASHINFER_PAGE) for length in inputs.lengths]
    pages = [torch.arange(count, dtype=torch.int32) + b * pages_per_row for b, count in enumerate(used)]
    last = [length - (count - 1) * FLASHINFER_PAGE for length, count in zip(inputs.lengths, used, strict=True)]
    workspace = torch.zeros(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=device)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
    wrapper.plan(
        _cumulative([query_length] * batch, device),
        _cumulative(used, device),
        torch.cat(pages).to(device),
        torch.tensor(last, dtype=torch.int32, device=device),
        heads,
        key.shape[1],
        head_dim,
        FLASHINFER_PAGE,
        causal=True,
        q_data_type=inputs.query.dtype,
        kv_data_type=key.dtype,
    )
    torch.cuda.synchronize(device)  # the plan is copied asynchronously from pinned memory

    def call(key: Tensor, value: Tensor) -> Tensor:
        query, cache = _flat(inputs.query), tuple(x.unflatten(0, (-1, FLASHINFER_PAGE)) for x in (key, value))
        out = wrapper.run(query, cache, out=torch.empty_like(query))  # without `out` the wrapper clears its output
        return out.view(batch, query_length, heads, head_dim)

    return Prepared([partial(call, *map(_flat, kv)) for kv in inputs.sets])


PEERS: dict[str, Callable[[Inputs], Prepared]] = {
    "ragged": ragged,
    "pad": pad,
    "split": split,
    "sdpa-cudnn": partial(sdpa, SDPBackend.CUDNN_ATTENTION, False),
    "sdpa-cudnn-packed": partial(sdpa_packed, SDPBackend.CUDNN_ATTENTION),
    "sdpa-efficient": partial(sdpa, SDPBackend.EFFICIENT_ATTENTION, True),
    "sdpa-efficient-packed": partial(sdpa_packed, SDPBackend.EFFICIENT_ATTENTION),
    "sdpa-flash": partial(sdpa, SDPBackend.FLASH_ATTENTION, False),
    "sdpa-math": partial(sdpa, SDPBackend.MATH, False),
    "sdpa-math-packed": partial(sdpa_packed, SDPBackend.MATH),
    "varlen": varlen_attention,
    "flash-seqused": partial(flash, False),
    "flash-paged": partial(flash, True),
    "flashinfer-fa2": partial(flashinfer, "fa2"),
    "flashinfer-fa3": partial(flashinfer, "fa3"),
}
