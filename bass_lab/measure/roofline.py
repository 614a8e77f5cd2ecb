"""What a forward pass has to do, the least time in which a device can do it, and how much of a device a run used.

`StepWork` counts a model's bytes and floating-point operations from its shapes; `Device` holds two peaks measured here,
a copy's bandwidth and a matrix product's rate. `Roofline` puts them together: a pass takes at least the time of its
bytes and at least the time of its operations. Counts and bounds, never predictions: launches and Python come on top.
`utilisation` divides what the passes of a run had to do by what the device could have done meanwhile.
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
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # what configs call the number of experts


@dataclass(frozen=True)
class StepWork:
    """What one pass of a model reads and computes. Sizes in elements, `element` in bytes; arguments may be arrays.

    weights: parameters that every pass reads; tables of which a pass looks up a few lines (embeddings) are left out.
    products: those of them that are factors of matrix products.
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
        """Counted from a model, or from a config (no weights are made). dtype: None for the model's own.

        Raises ValueError for mixtures of experts, of which a pass reads what its tokens are sent to.
        """
        if isinstance(model, PreTrainedConfig):
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(model, dtype=dtype)
        config = model.config.get_text_config()
        if any((getattr(config, name, None) or 1) > 1 for name in EXPERTS):
            raise ValueError(f"{type(model).__name__} is a mixture of experts: what a pass reads depends on its tokens")
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
        """Of the keys and values of so many positions, in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.element * positions

    def attention_intensity(self, query_length: Number) -> Number:
        """Flop per byte of attention alone over a long cache: Q · G in bf16.

        A key and its value take 2 · D · `element` bytes, and serve Q · G queries with 2 · D flop each in QKᵀ and in PV.
        """
        return 2 * query_length * self.group / self.element

    def flops(self, batch: Number, query_length: Number, kv_length: Number) -> Number:
        """Multiplications and additions of a pass over `query_length` new tokens of each row.

        kv_length: mean keys that a query attends to, committed and new.
        """
        tokens = batch * query_length
        attention = 4 * self.layers * self.heads * self.head_dim * kv_length  # q·k and p·v, two operations each
        return tokens * (2 * self.products + attention)

    def bytes(self, batch: Number, query_length: Number, kv_length: Number) -> Number:
        """Read and written at least: weights once, keys and values of every row once, the new ones written.

        kv_length: mean keys of a row that are read from the cache.
        Activations and logits are left out: on a GPU they stay in caches or are small beside the weights.
        """
        return self.element * self.weights + self.cache_bytes(batch * (kv_length + query_length))


@dataclass(frozen=True)
class Device:
    """bandwidth in bytes/s and flops in flop/s: the best that a copy and a matrix product reached here."""

    name: str
    bandwidth: float
    flops: float

    @property
    def ridge(self) -> float:
        """Flop per byte from which on arithmetic, not memory, is the limit."""
        return self.flops / self.bandwidth

    def attainable(self, intensity: Number) -> Number:
        """Flop/s at most of work with so many flop per byte."""
        return np.minimum(self.flops, intensity * self.bandwidth)


@dataclass(frozen=True)
class Roofline:
    """The least time of a model's passes on a device."""

    work: StepWork
    device: Device

    def seconds(self, batch: Number, query_length: Number, kv_length: Number) -> Number:
        """No pass is faster than its bytes, nor than its operations."""
        shape = batch, query_length, kv_length
        return np.maximum(self.work.bytes(*shape) / self.device.bandwidth, self.work.flops(*shape) / self.device.flops)

    def intensity(self, batch: Number, query_length: Number, kv_length: Number) -> Number:
        """Flop per byte of a pass; memory is the limit below the device's ridge."""
        return self.work.flops(batch, query_length, kv_length) / self.work.bytes(batch, query_length, kv_length)


# From data sheets, models in bf16. The paper's are the 7.8B target and its 310M draft (4 layers × 2048).
A100_BANDWIDTH = (1.55e12, 2.0e12)  # of the 40 GB and the 80 GB variant; the paper does not say which it used
H100 = Device("NVIDIA H100 80GB HBM3 (data sheet)", bandwidth=3.35e12, flops=989e12)
TARGET_8B = StepWork(int(7.8e9), int(7.8e9), layers=32, heads=32, kv_heads=32, head_dim=128, element=2)
DRAFT_310M = StepWork(int(310e6), int(310e6), layers=4, heads=16, kv_heads=16, head_dim=128, element=2)
MODELS = {  # the targets whose attention is looked at
    "Llama-8B": StepWork(int(8.03e9), int(8.03e9), layers=32, heads=32, kv_heads=8, head_dim=128, element=2),
    "MHA-7.8B": TARGET_8B,
    "OPT-13B": StepWork(int(12.85e9), int(12.85e9), layers=40, heads=40, kv_heads=40, head_dim=128, element=2),
}


@dataclass(frozen=True)
class Utilisation:
    """Shares of a device's measured peaks that the decode steps of a run used; definitions in `utilisation`."""

    seconds: float
    verified: float
    emitted: float
    draft: float
    bandwidth: float


def utilisation(steps: pd.DataFrame, target: StepWork, draft: StepWork | None, device: Device) -> Utilisation:
    """How much of a device a run used while it decoded. The paper names GPU utilisation; the definitions are ours.

    All are over the time of the decode steps (draft, verify and other; prefill and what happens between steps are left
    out), and count what has to be done, not what padding adds:

    - `verified`: the target's operations for the drafted tokens that each row submitted and one more, ÷ time ÷ peak;
    - `emitted`: the same for the emitted tokens alone, one position each, so that rejected drafts and what is cut off
      after an end do not count. In regular decoding the two are equal;
    - `draft`: the draft's operations, not contained in the others;
    - `bandwidth`: bytes that the passes of both models have to move ÷ time ÷ what a copy reached. Every pass reads its
      weights once and the cached keys and values of its rows, and writes the new ones.

    A draft phase is counted as the engine runs it: a pass over two tokens of every row that drafts, then one over one
    token for each further drafted one. Drafts that a policy discards, and what the draft catches up on after steps
    without drafts, are not in a trace, and left out.

    steps: a trace's. draft: None where drafting takes no model. Raises ValueError where there is no decode step.
    """
    decode = steps[steps.kind == "decode"].reset_index(drop=True)
    seconds = decode.drop_duplicates("step")[["draft_ms", "verify_ms", "other_ms"]].to_numpy().sum() / 1e3
    if not seconds > 0:
        raise ValueError("there are no decode steps to count; trace='steps' or 'tokens' records them")
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
    """The passes of the draft phases, a line per pass and row: step, pass, tokens that are fed, positions cached."""
    rows = decode.loc[decode.index.repeat(decode.drafted)]
    index = rows.groupby(level=0).cumcount()
    tokens = np.where(index == 0, 2, 1)  # the last two committed tokens, then the drafted ones
    return pd.DataFrame({"step": rows.step, "pass": index, "tokens": tokens, "cached": rows.kv_length + index - tokens})


def _done(work: StepWork, rows: pd.DataFrame) -> tuple[float, float]:
    """Operations and bytes of passes that are given as in `_draft_passes`."""
    keys = rows.cached + (rows.tokens + 1) / 2  # the first new token attends to one more than are cached, and so on
    passes = rows.groupby(["step", "pass"]).agg(
        batch=("tokens", "size"), tokens=("tokens", "mean"), cached=("cached", "mean")
    )
    flops = work.flops(1, rows.tokens, keys).sum()
    return float(flops), float(work.bytes(passes.batch, passes.tokens, passes.cached).sum())


def copy_bandwidth(device: torch.device, copied: int | None = None, seconds: float = 0.5) -> float:
    """Bytes read and written by a copy, per second.

    copied: bytes of the tensor that is copied (None: 1 GB on CUDA, 64 MB elsewhere). On a CPU whose cache holds the
        weights, copy as many bytes as they are: the roof then is the cache's.
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
    """The peaks of a device: `copy_bandwidth`, and the rate of square matrix products of 2 n³ operations.

    sides: n of the products, the best counts (None: 4096 and 8192 on CUDA, 512 and 1024 elsewhere). seconds: spent on
        each measurement.
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
