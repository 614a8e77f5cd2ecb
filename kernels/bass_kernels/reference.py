"""The functions of the kernels in plain torch and float64: reference for tests and readable definition."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bass_kernels.fused_verification import VerifyOutput


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    kv_lengths: Tensor,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return `ragged_attention`, computed row by row: float64 [B, Q, H, D]."""
    batch, heads, query_length, head_dim = query.shape
    group = heads // key.shape[1]
    scaling = head_dim**-0.5 if scaling is None else scaling
    out = torch.zeros(batch, query_length, heads, head_dim, dtype=torch.float64, device=query.device)
    for b in range(batch):
        kv_length = int(kv_lengths[b])
        positions = int(starts[b]) + torch.arange(query_length, device=query.device)
        live = (positions >= 0) & (positions < kv_length)
        if not live.any():
            continue
        q = query[b, :, live].double()  # [H, live, D]
        k, v = (x[b, :, :kv_length].double().repeat_interleave(group, dim=0) for x in (key, value))
        scores = q @ k.mT * scaling  # [H, live, kv_length]
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        slots = torch.arange(kv_length, device=query.device)
        hidden = slots > positions[live, None]
        if sliding_window is not None:
            hidden |= slots <= positions[live, None] - sliding_window
        scores = scores.masked_fill(hidden, -math.inf)
        if sinks is not None:
            sink = sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat([scores, sink], dim=-1)
        out[b, live] = (scores.softmax(-1)[..., :kv_length] @ v).transpose(0, 1)
    return out


def write_kv(
    key_states: Tensor, value_states: Tensor, keys: Tensor, values: Tensor, slots: Tensor, first_place: int = 0
) -> None:
    """Write token t of row b to keys[first_place + b, :, slots[b, t]], as `bass_kernels.write_kv`."""
    rows = first_place + torch.arange(len(slots), device=slots.device)[:, None]
    keys.transpose(1, 2)[rows, slots] = key_states.transpose(1, 2)
    values.transpose(1, 2)[rows, slots] = value_states.transpose(1, 2)


def verify(
    logits: Tensor,
    drafted: Tensor,
    submitted: Tensor,
    q: Tensor | None,
    accept_uniform: Tensor,
    draw_uniform: Tensor,
    committed: Tensor,
    temperature: float,
) -> VerifyOutput:
    """Return the result of `bass_kernels.verify`, computed in float64."""
    x = logits.double()  # [B, K + 1, V]
    slots = torch.arange(x.shape[1], device=x.device)
    sent = slots <= submitted[:, None]  # [B, K + 1]
    rows = torch.arange(len(x), device=x.device)
    if temperature == 0:
        choices = x.argmax(-1)  # [B, K + 1]
        kept = drafted == choices[:, :-1]
    else:
        p = ((x - x.amax(-1, keepdim=True)) / temperature).softmax(-1)
        q = (F.one_hot(drafted, x.shape[-1]) if q is None else q).double()
        p_x, q_x = (law[:, : drafted.shape[1]].gather(-1, drafted[..., None])[..., 0] for law in (p, q))  # [B, K]
        kept = accept_uniform < p_x / q_x
    accepted = (kept & sent[:, 1:]).long().cumprod(1).sum(1)
    if temperature == 0:
        next_token = choices[rows, accepted]
    else:
        law = p[rows, accepted]  # [B, V]
        q_next = F.pad(q, (0, 0, 0, 1))[rows, accepted]
        residual = torch.where((accepted < submitted)[:, None], (law - q_next).clamp(min=0), law)
        cumulative = torch.where(residual.sum(-1, keepdim=True) > 0, residual, law).cumsum(-1)
        target = draw_uniform[:, None] * cumulative[:, -1:]
        next_token = (cumulative <= target).sum(-1).clamp(max=x.shape[-1] - 1)
    tokens = torch.cat([drafted, next_token[:, None]], 1).scatter(1, accepted[:, None], next_token[:, None])
    log_sum = x.logsumexp(-1)
    logprobs = (x.gather(-1, tokens[..., None])[..., 0] - log_sum).where(sent, 0.0)
    finite = (log_sum.isfinite() | ~sent).all(1)
    return VerifyOutput(accepted, next_token, tokens, logprobs.float(), finite, committed + accepted + 1)


def dequantized(weight: Tensor, scale: Tensor, group: int | None, inputs: int) -> Tensor:
    """Return the weights that `skinny.Codes` encode: float64 [N, inputs]."""
    codes = weight.double()
    if weight.dtype == torch.uint8:
        units = weight.view(torch.int8).unflatten(1, (-1, 16))
        codes = torch.cat([units << 4 >> 4, units >> 4], 2).flatten(1)[:, :inputs].double()
    return codes * scale.double().repeat_interleave(group or inputs, 1)[:, :inputs]


def skinny_linear(x: Tensor, codes, bias: Tensor | None = None, *, activation: str = "none", gate=None) -> Tensor:
    """Return the result of `bass_kernels.skinny_linear`, computed in float64."""
    products = [x.double() @ dequantized(*each, x.shape[1]).T for each in (codes, gate) if each is not None]
    activate = {
        "none": lambda y: y,
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    }
    if gate is not None:
        return activate[activation](products[1]) * products[0]
    return activate[activation](products[0] + (0 if bias is None else bias.double()))
