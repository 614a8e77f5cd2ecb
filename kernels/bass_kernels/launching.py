"""Shared parts of all launches: argument checks, flags, and supported devices."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
from torch import Tensor

from bass_kernels.online_softmax import LOG2_E
from bass_kernels.tiles import DTYPES, HEAD_DIMS

LOGITS = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of logits


def interpreted() -> bool:
    """Return True if Triton interprets kernels on the CPU: TRITON_INTERPRET=1 was set before triton was imported."""
    return triton.knobs.runtime.interpret


def runs_on(device: torch.device) -> bool:
    """Return True if the kernels can run on tensors of this device."""
    return device.type == "cuda" or (device.type == "cpu" and interpreted())


def on(device: torch.device) -> AbstractContextManager:
    """Make this GPU the current device. Triton launches on the current device and ignores the tensors' device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class Flags:
    """Options of a launch as compile-time `constants` (exact at any precision), and the `accumulator` dtype."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        sliding_window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ):
        require(softcap is None or softcap > 0, f"softcap must be above 0, or None, got {softcap}")
        has_window = sliding_window is None or sliding_window >= 1
        require(has_window, f"sliding_window must be at least 1, or None, got {sliding_window}")
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        self.accumulator = torch.float64 if query.dtype == torch.float64 else torch.float32
        self.constants = {
            "ACC": triton.language.float64 if query.dtype == torch.float64 else triton.language.float32,
            # 2^x needs scores in units of log 2. A softcap applies to natural units, before the conversion.
            "SCALE": float(scaling if softcap is not None else scaling * LOG2_E.value),
            "SOFTCAP": float(softcap or 0),
            "WINDOW": sliding_window or 0,
            "SINKS": sinks is not None,
            "FAR": any(tensor.shape[2] * tensor.stride(2) >= 2**31 for tensor in (key, value)),
            "WIDEN": query.dtype == torch.bfloat16 and interpreted(),
        }


def check_device(device: torch.device) -> None:
    """Raise ValueError if kernels cannot run on this device."""
    require(runs_on(device), f"the Triton kernels need a CUDA GPU, got tensors on {device}. "
            "To interpret kernels on a CPU, set TRITON_INTERPRET=1 before Python starts")  # fmt: skip


def check_logits(logits: Tensor) -> None:
    """Raise ValueError for logits of an unsupported device, dtype or layout."""
    check_device(logits.device)
    is_laid_out = logits.dtype in LOGITS and logits.stride(-1) == 1
    require(is_laid_out, "logits must be float32, bfloat16 or float16 with stride 1 along the vocabulary, got "
            f"{logits.dtype} with strides {logits.stride()}")  # fmt: skip


def check(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, kv_lengths: Tensor, sinks: Tensor | None = None
) -> None:
    """Raise ValueError if arguments of an attention kernel do not fit each other or the device."""
    check_device(query.device)
    batch, heads, _, head_dim = query.shape
    kv_heads = key.shape[1]
    require(query.dtype in DTYPES, f"dtype must be one of {', '.join(map(str, DTYPES))}, got {query.dtype}")
    require(head_dim in HEAD_DIMS, f"the head dimension must be at most {HEAD_DIMS[-1]}, got {head_dim}")
    require(key.shape == value.shape == (batch, kv_heads, key.shape[2], head_dim), "key and value must be "
             f"[{batch}, H_kv, S, {head_dim}], got {list(key.shape)} and {list(value.shape)}")  # fmt: skip
    require(heads % kv_heads == 0, f"{heads} query heads cannot share {kv_heads} KV heads evenly")
    require(starts.shape == kv_lengths.shape == (batch,), "starts and kv_lengths must be "
             f"[{batch}], got {list(starts.shape)} and {list(kv_lengths.shape)}")  # fmt: skip
    for tensor in (key, value):
        require(tensor.dtype == query.dtype, f"keys and values must be {query.dtype}, got {tensor.dtype}")
    require(query.stride(-1) == key.stride(-1) == value.stride(-1) == 1, "the head dimension must be contiguous")
    for name, tensor in (("starts", starts), ("kv_lengths", kv_lengths)):
        require(tensor.dtype in (torch.int32, torch.int64), f"{name} must be int32 or int64, got {tensor.dtype}")
        require(tensor.is_contiguous(), f"{name} must be contiguous")
    tensors = [query, key, value, starts, kv_lengths]
    if sinks is not None:
        require(sinks.shape == (heads,) and sinks.is_contiguous(), f"sinks must be [{heads}], one per query head")
        tensors.append(sinks)
    devices = {tensor.device for tensor in tensors}
    require(len(devices) == 1, f"all tensors must be on one device, got {sorted(map(str, devices))}")


def require(holds: bool, otherwise: str) -> None:
    """Raise ValueError(otherwise) unless `holds`."""
    if not holds:
        raise ValueError(otherwise)
