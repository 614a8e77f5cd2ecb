"""Attention over the ragged cache, plugged into ordinary transformers models.

`pad`     a single padded launch over all rows, with a mask (the paper's BASS-PAD).
`split`   one launch per row, each with its own KV length (the paper's BASS-SPLIT).
`ragged`  one launch without padding: the Triton kernel of `bass_kernels`.
`eager`   the model's own attention code with our additive mask, for architectures that bypass the interface.

On a CUDA GPU the first three use the Triton kernels of `bass_kernels` if these run (module kernel_ops). `pad` and
`split` also run in plain torch. With `torch.use_deterministic_algorithms(True)`, `ragged` computes the same bits for
a query regardless of the rest of the batch.

transformers calls a registered function as `fn(module, query, key, value, attention_mask, scaling=..., **kwargs)`. Some
architectures silently ignore the interface, and others pass masks of a different kind. Module `probe` detects both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from bass_core.model import kernel_ops
from bass_core.model.forward_pass import Pass, current_pass

PATHS = ("ragged", "pad", "split", "eager")
WIDEST_HEAD = 256  # limit of the Triton kernels: `bass_kernels.tiles.HEAD_DIMS`


def registered_name(name: str) -> str:
    return name if name == "eager" else f"bass_{name}"


# --- the three attention functions ----------------------------------------------------------------


def pad_attention(module, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, **kwargs):
    """Padded attention in one launch. query [B, H, Q, D], key and value [B, H_kv, S, D] -> ([B, Q, H, D], None)."""
    current = current_pass()
    if _kernels_take(current, key, value, kwargs):
        rows = current.starts, current.ends
        return kernel_ops.pad_attention(
            query, key, value, *rows, max_kv_length=current.max_kv_length, **_flags(kwargs)
        ), None
    group = _packed_heads(current, query, key, kwargs)
    out = _attend(query, key, value, _bias(current, query, group, kwargs), group, kwargs)
    return out.transpose(1, 2).contiguous(), None


def foreign_attention(module, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, **kwargs):
    """Padded attention to a source, for all registered paths; see `Pass.foreign_mask`. Shapes as `pad_attention`."""
    current = current_pass()
    mask, current.foreign_mask = current.foreign_mask, None
    if kwargs.get("position_bias") is not None and module.has_relative_attention_bias:
        raise ValueError("its attention to a source has a relative position bias")  # other layers pass zeros
    bias = current.once(mask, query.dtype)
    return _attend(query, key, value, bias, 1, kwargs).transpose(1, 2).contiguous(), None


def split_attention(module, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, **kwargs):
    """Attention with one launch per row, over that row's own keys. Shapes as `pad_attention`."""
    current = current_pass()
    if _kernels_take(current, key, value, kwargs):
        rows, lengths = (current.starts, current.ends), current.kv_lengths
        return kernel_ops.load().split_attention(query, key, value, *rows, lengths=lengths, **_flags(kwargs)), None
    group = _packed_heads(current, query, key, kwargs)
    bias = _bias(current, query, group, kwargs)
    rows = []
    for b, n in enumerate(current.kv_lengths):
        row, hidden = slice(b, b + 1), None if bias is None else bias[b : b + 1, ..., :n]
        rows.append(_attend(query[row], key[row, :, :n], value[row, :, :n], hidden, group, kwargs))
    return torch.cat(rows).transpose(1, 2).contiguous(), None


def ragged_attention(module, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, **kwargs):
    """Triton attention without padding. Layers of equal shape share a work list. Shapes as `pad_attention`."""
    if kwargs.get("position_bias") is not None:
        raise ValueError("the ragged kernel does not support a relative position bias; use attention='pad'")
    current, deterministic = current_pass(), torch.are_deterministic_algorithms_enabled()
    shape = query.shape[1], key.shape[1], query.shape[-1], query.dtype
    work = current.once(_work_list, *shape, kwargs.get("sliding_window"))
    rows = current.starts, current.ends
    return kernel_ops.ragged_attention(
        query, key, value, *rows, *work, **_flags(kwargs), deterministic=deterministic
    ), None


def _work_list(
    current: Pass, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ragged kernel's work list, shared by all layers of these shapes and all passes of a phase."""
    deterministic = torch.are_deterministic_algorithms_enabled()  # the current setting
    queries = current.positions.shape[1]
    layers = heads, kv_heads, head_dim, queries, current.max_kv_length, dtype, window or 0, deterministic
    if current.phase is None:
        return kernel_ops.plan(current.starts, current.ends, *layers, queries)
    ends, span, lists = current.phase
    kind = heads, kv_heads, head_dim, dtype, window, deterministic
    if kind not in lists:
        lists[kind] = kernel_ops.plan(current.starts, ends, *layers, span)
    return lists[kind]


def _kernels_take(current: Pass, key: Tensor, value: Tensor, options: dict) -> bool:
    """Return True if the paper's two kernels support the layer: equal shapes, small heads, no position bias."""
    fit = key.shape == value.shape and key.shape[-1] <= WIDEST_HEAD
    return current.kernels and fit and options.get("position_bias") is None


def _flags(options: dict) -> dict:
    names = {"scaling": "scaling", "sliding_window": "sliding_window", "softcap": "softcap", "sinks": "s_aux"}
    return {ours: options.get(theirs) for ours, theirs in names.items()}


def _needs_scores(options: dict) -> bool:
    """Return True if softcap or sinks require explicit attention scores."""
    return options.get("softcap") is not None or options.get("s_aux") is not None


def _packed_heads(current: Pass, query: Tensor, key: Tensor, options: dict) -> int:
    """Return the number of query heads to pack as additional queries of their shared KV head (GQA packing), or 1.

    Packing slows down a CPU for a single query with up to three heads per KV head.
    """
    group, eager = query.shape[1] // key.shape[1], current.kv_lengths is not None  # avoids a compilation per case
    few = eager and query.shape[0] == query.shape[2] == 1 and group <= 3 and not query.is_cuda
    return 1 if few or _needs_scores(options) or options.get("position_bias") is not None else group


def _bias(current: Pass, query: Tensor, group: int, options: dict) -> Tensor | None:
    """Return the additive mask [B, 1, group * Q, max_kv_length] in the query's dtype, or None if nothing is hidden.

    The mask is built once per pass, window and group. A relative position bias [B, H, Q, max_kv_length] is added.
    """
    mask = _mask, options.get("sliding_window"), group, query.dtype
    by_distance = options.get("position_bias")
    return current.once(*mask) if by_distance is None else current.once(_sum, by_distance, mask)


def _sum(current: Pass, bias: Tensor, mask: tuple) -> Tensor:
    hidden = current.once(*mask)
    return bias if hidden is None else bias + hidden


def _mask(current: Pass, window: int | None, group: int, dtype: torch.dtype) -> Tensor | None:
    alike = current.kv_lengths is not None and min(current.kv_lengths) == current.max_kv_length
    if alike and current.positions.shape[1] == 1 and (window is None or current.max_kv_length <= window):
        return None  # a single query per row and equal KV lengths, as in regular decoding of a single row
    (bias,) = current.once_for_columns(_hidden, window, dtype)
    bias = bias[:, None, :, : current.max_kv_length]
    return bias.expand(-1, -1, group, -1) if bias.shape[2] == 1 else bias.repeat(1, 1, group, 1)


def _hidden(current: Pass, window: int | None, dtype: torch.dtype) -> tuple[Tensor]:
    return (torch.where(current.visible(window), 0.0, -torch.inf).to(dtype),)  # [B, Q, max_kv_length]


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, group: int, options: dict) -> Tensor:
    """Return softmax(QK^T * scaling + bias) V with grouped KV heads: [B, H, Q, D]. group: see `_packed_heads`."""
    scaling, softcap, sinks = options.get("scaling"), options.get("softcap"), options.get("s_aux")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    heads, kv_heads = query.shape[1], key.shape[1]
    if not _needs_scores(options):
        packed = query.reshape(query.shape[0], heads // group, -1, query.shape[-1]) if group > 1 else query
        expands = {"enable_gqa": True} if heads != kv_heads * group else {}  # compilers accept only True
        out = F.scaled_dot_product_attention(packed, key, value, attn_mask=bias, scale=scaling, **expands)
        return out.view(query.shape[0], heads, query.shape[2], -1) if group > 1 else out
    key, value = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores if bias is None else scores + bias
    if sinks is not None:  # a learned logit per head that takes probability mass but has no value
        sink = sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1).to(scores.dtype)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    return weights[..., : key.shape[2]] @ value


def _over_rows(attend: Callable) -> Callable:
    """Return `attend` for models that see packed tokens, too: it works on rows [B, ..., Q, ...]."""

    @functools.wraps(attend)
    def attend_packed(module, query: Tensor, *arguments, **options):
        current = current_pass()
        if current.packed is not None:
            query = current.unpack(query.transpose(1, 2)).transpose(1, 2)
        chosen = attend if current.foreign_mask is None else foreign_attention
        out, weights = chosen(module, query, *arguments, **options)
        return current.pack(out), weights

    return attend_packed


for _name, _function in (("pad", pad_attention), ("split", split_attention), ("ragged", ragged_attention)):
    AttentionInterface.register(registered_name(_name), _over_rows(_function))
