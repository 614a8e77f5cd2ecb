"""Roofline model: the work of a forward pass, a lower bound on its time, and the utilisation of a device in a run.

`StepWork` counts the bytes and floating-point operations of a pass from a model's shapes. `Device` holds two peaks: the
bandwidth of a copy and the rate of a matrix product. `Roofline` combines both into a lower bound on the time of a pass.
Bounds are not predictions: launches and Python take further time. `utilisation` divides the work of a run by the work
that the device could have done in the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from bass_core.environment import processor
from bass_lab.measure.clocks import best_seconds

Number = float | np.ndarray | pd.Series
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # config fields for the number of experts


@dataclass(frozen=True)
class StepWork:
    """Bytes and operations of a model's passes. Sizes are in elements, `element` in bytes. Arguments may be arrays.

    weights: parameters that every pass reads, without embedding tables, of which a pass reads a few rows. products:
    weights that are factors of matrix products.
    """

    weights: int
    products: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    element: int

    @classmethod
    def of(cls, model: PreTrainedModel | PreTrainedConfig, dtype: torch.dtype | None = None) -> StepWork:
        """Count the work of a model, or of a config without allocating weights. dtype: None for the model's dtype.

        Raises ValueError for mixtures of experts, where the reads of a pass depend on the tokens.
        """
        if isinstance(model, PreTrainedConfig):
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(model, dtype=dtype)
        config = model.config.get_text_config()
        if any((getattr(config, name, None) or 1) > 1 for name in EXPERTS):
            raise ValueError(f"{type(model).__name__} is a mixture of experts and cannot be counted; use a dense model")
        head = model.get_output_embeddings()
        used = set() if head is None else {id(parameter) for parameter in head.parameters()}
        looked_up = {
            id(module.weight)
            for module in model.modules()
            if isinstance(module, nn.Embedding) and id(module.weight) not in used
        }
        read = [parameter for parameter in model.parameters() if id(parameter) not in looked_up]
        heads = config.num_attention_heads
        return cls(
            weights=sum(parameter.numel() for parameter in read),
            products=sum(parameter.numel() for parameter in read if parameter.ndim >= 2),
            layers=config.num_hidden_layers,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            element=(dtype or model.dtype).itemsize,
        )

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    def cache_bytes(self, positions: Number) -> Number:
        """Return the bytes of keys and values of so many positions in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.element * positions

    def attention_intensity(self, query_length: Number) -> Number:
        """Return the flop per byte of attention alone over a long cache: Q · G in bf16.

        A key and value take 2 · D · `element` bytes and serve Q · G queries with 2 · D flop each in QKᵀ and in PV.
        """
        return 2 * query_length * self.group / self.element

    def flops(self, batch: Number, query_length: Number, kv_length: Number) -> Number:
        """Return the multiplications and additions of a pass over `query_length` new tokens of each row.

        kv_length: mean number of keys that a query attends to, including new keys.
        """
        tokens = batch * query_length
        attention = 4 * self.layers * self.heads * self.head_dim * kv_length  # q·k and p·v, two operations each
        return tokens * (2 * self.products + attention)

    def bytes(self, batch: Number, query_length: Number, kv_length: Number) -> Number:
        """Return the minimum bytes of a pass: read the weights and all cached keys and values, write the new ones.

        kv_length: mean number of cached keys of a row. Activations and logits are left out: on a GPU they stay in
        caches, or are small next to the weights.
        """
        return self.element * self.weights + self.cache_bytes(batch * (kv_length + query_length))


@dataclass(frozen=True)
class Device:
    """Peaks of a device: bandwidth of a copy in bytes/s, flops of a matrix product in flop/s."""

    name: str
    bandwidth: float
    flops: float

    @property
    def ridge(self) -> float:
        """Flop per byte above which arithmetic is the limit instead of memory."""
        return self.flops / self.bandwidth

    def attainable(self, intensity: Number) -> Number:
        """Return the maximum flop/s for work with so many flop per byte."""
        return np.minimum(self.flops, intensity * self.bandwidth)


@dataclass(frozen=True)
class Roofline:
    """Lower bound on the time of a model's passes on a device."""

    work: StepWork
    device: Device

    def seconds(self, batch: Number, query_length: Number, kv_length: Number) -> Number:
        """Return the time of the pass's bytes or of its operations, whichever is longer."""
        shape = batch, query_length, kv_length
        return np.maximum(self.work.bytes(*shape) / self.device.bandwidth, self.work.flops(*shape) / self.device.flops)

    def intensity(self, batch: Number, query_length: Number, kv_length: Number) -> Number:
        """Return the flop per byte of a pass. Below the device's ridge, memory is the limit."""
        return self.work.flops(batch, query_length, kv_length) / self.work.bytes(batch, query_length, kv_length)


# Peaks from data sheets, models in bf16. The paper uses the 7.8B target and the 310M draft (4 layers × 2048).
A100_BANDWIDTH = (1.555e12, 2.039e12)  # of the 40 GB and the 80 GB variant; the paper does not name the variant
BANDWIDTHS = {"NVIDIA H100 80GB HBM3": 3.35e12, "NVIDIA H200": 4.8e12}  # by the beginning of a device's name
H100 = Device("NVIDIA H100 80GB HBM3 (data sheet)", bandwidth=3.35e12, flops=989e12)
TARGET_8B = StepWork(int(7.8e9), int(7.8e9), layers=32, heads=32, kv_heads=32, head_dim=128, element=2)
DRAFT_310M = StepWork(int(310e6), int(310e6), layers=4, heads=16, kv_heads=16, head_dim=128, element=2)
MODELS = {  # targets of attention measurements
    "Llama-8B": StepWork(int(8.03e9), int(8.03e9), layers=32, heads=32, kv_heads=8, head_dim=128, element=2),
    "MHA-7.8B": TARGET_8B,
    "OPT-13B": StepWork(int(12.85e9), int(12.85e9), layers=40, heads=40, kv_heads=40, head_dim=128, element=2),
}


@dataclass(frozen=True)
class Utilisation:
    """Shares of a device's peaks used by the decode steps of a run, as `utilisation` defines them."""

    seconds: float
    verified: float
    emitted: float
    draft: float
    bandwidth: float


def utilisation(steps: pd.DataFrame, target: StepWork, draft: StepWork | None, device: Device) -> Utilisation:
    """Return the shares of a device's peaks that the decode steps of a run used. The paper names GPU utilisation; the
    definitions are ours.

    The time is that of the decode steps (draft, verify, other), without prefill and without time between steps. Padding
    does not count as work.

    - `verified`: the target's operations for each row's draft tokens plus one more token, ÷ time ÷ peak;
    - `emitted`: the same for emitted tokens only, one position each. In regular decoding both are equal;
    - `draft`: the draft model's operations, not included in the others;
    - `bandwidth`: minimum bytes of both models' passes ÷ time ÷ copy bandwidth. Every pass reads the weights and the
      rows' cached keys and values once, and writes the new keys and values.

    A draft phase counts as the engine runs it: a pass over two tokens of every drafting row, then a pass over one token
    per further draft token. Drafts that a policy discards, and tokens that the draft model reads after steps without
    drafts, are not in a trace and do not count.

    steps: of a trace. draft: None for drafting without a model. Raises ValueError without a decode step.
    """
    decode = steps[steps.kind == "decode"].reset_index(drop=True)
    seconds = decode.drop_duplicates("step")[["draft_ms", "verify_ms", "other_ms"]].to_numpy().sum() / 1e3
    if not seconds > 0:
        raise ValueError("there are no decode steps to count; use trace='steps' or 'tokens'")
    rows = pd.DataFrame({"step": decode.step, "pass": 0, "tokens": decode.drafted + 1, "cached": decode.kv_length - 1})
    verified, moved = _done(target, rows)
    emitted, _ = _done(target, rows.assign(tokens=decode.emitted))
    drafted = 0.0
    if draft is not None:
        drafted, more = _done(draft, _draft_passes(decode))
        moved += more
    flops, bytes_ = seconds * device.flops, seconds * device.bandwidth
    return Utilisation(seconds, verified / flops, emitted / flops, drafted / flops, moved / bytes_)


def _draft_passes(decode: pd.DataFrame) -> pd.DataFrame:
    """Return a line per pass and row of the draft phases: step, pass, tokens (fed), cached (positions)."""
    rows = decode.loc[decode.index.repeat(decode.drafted)]
    index = rows.groupby(level=0).cumcount()
    tokens = np.where(index == 0, 2, 1)  # the last two committed tokens, then one draft token per pass
    return pd.DataFrame({"step": rows.step, "pass": index, "tokens": tokens, "cached": rows.kv_length + index - tokens})


def _done(work: StepWork, rows: pd.DataFrame) -> tuple[float, float]:
    """Return the operations and bytes of passes in the format of `_draft_passes`."""
    keys = rows.cached + (rows.tokens + 1) / 2  # new token i attends to cached + i keys
    passes = rows.groupby(["step", "pass"]).agg(
        batch=("tokens", "size"), tokens=("tokens", "mean"), cached=("cached", "mean")
    )
    flops = work.flops(1, rows.tokens, keys).sum()
    return float(flops), float(work.bytes(passes.batch, passes.tokens, passes.cached).sum())


def copy_bandwidth(device: torch.device, copied: int | None = None, seconds: float = 0.5) -> float:
    """Return the bytes per second that a copy reads and writes.

    copied: bytes of the copied tensor (None: 1 GB on CUDA, 64 MB elsewhere). If a CPU cache holds the model's weights,
        copy as many bytes as the weights have, to measure the bandwidth of the cache.
    """
    source = torch.ones(copied or (2**30 if device.type == "cuda" else 2**26), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * len(source) / best_seconds(lambda: target.copy_(source), device, seconds)


def measure_device(
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    copied: int | None = None,
    sides: Sequence[int] | None = None,
    seconds: float = 0.5,
) -> Device:
    """Measure the peaks of a device: `copy_bandwidth`, and the rate of square matrix products of 2 n³ operations.

    sides: sizes n, of which the fastest counts (None: 4096 and 8192 on CUDA, 512 and 1024 elsewhere). seconds: per
        measurement.
    """
    device = torch.device(device)
    on_cuda = device.type == "cuda"
    bandwidth = copy_bandwidth(device, copied, seconds)
    rates = []
    for side in sides or ((4096, 8192) if on_cuda else (512, 1024)):
        a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(a)
        rates.append(2 * side**3 / best_seconds(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), device, seconds))
    name = torch.cuda.get_device_name(device) if on_cuda else processor()
    return Device(name, bandwidth, max(rates))
