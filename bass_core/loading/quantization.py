"""Weight-only INT8 and INT4: linear layers whose weights are integers with scales, computed in the model's own dtype.

INT8 has one scale per output channel, INT4 one per group of 32 inputs: the largest of a group in size becomes -8
(llama.cpp's Q4_0), and two numbers share a byte. Rounding is to the nearest; no data is looked at. Embeddings and the
head, which often are one tensor, norms, biases and experts that a model keeps as one stack stay as they are.

Why this is our own: torchao 0.18, tried with torch 2.13 on a CPU, has no packed INT4 there ("requires mslk"), passes in
silence over layers whose inputs are no multiple of the group (560 of the embedded draft), and prints into every program
that imports transformers. Its INT8 dequantises and multiplies, as this does. Models that it quantized load as ever.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from bass_core.model import kernel_ops
from bass_core.model.kernel_ops import GROUP, dequantized
from bass_core.model.transformers_internals import is_quantized


class QuantizedWeight(NamedTuple):
    """weight: int8 [N, K] with scale [N, 1]; or uint8 [N, 16 · groups] with scale [N, groups], two in a byte: the first
    16 of a group of 32 inputs in the low halves, the other 16 in the high ones."""

    weight: Tensor
    scale: Tensor


def int8(weight: Tensor) -> QuantizedWeight:
    """Weights [N, K] rounded to -127 … 127 times a scale per output."""
    scale = (weight.abs().amax(1, keepdim=True).float() / 127).to(weight.dtype)
    return QuantizedWeight(_rounded(weight, scale, -127, 127), scale)


def int4(weight: Tensor) -> QuantizedWeight:
    """Weights [N, K] rounded to -8 … 7 times a scale per output and group of inputs, packed."""
    groups = F.pad(weight, (0, -weight.shape[1] % GROUP)).unflatten(1, (-1, GROUP))  # [N, groups, 32]
    extreme = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    codes = _rounded(groups, extreme / -8, -8, 7)
    low, high = codes.chunk(2, 2)
    return QuantizedWeight((low & 15 | high << 4).flatten(1).view(torch.uint8), (extreme / -8)[..., 0])


def _rounded(weight: Tensor, scale: Tensor, least: int, most: int) -> Tensor:
    """The nearest multiples of the scale, which is already rounded to its dtype; 0 where it is 0."""
    codes = weight.float() / scale.float().where(scale != 0, 1)
    return codes.round().clamp(least, most).to(torch.int8)


KINDS = {"int8": int8, "int4": int4}
SELF_DRAFTS = {f"target:{kind}": kind for kind in KINDS}  # names of drafts that are a target's own copy


def kind_of_copy(draft: object) -> str | None:
    """The kind of weights that one of `SELF_DRAFTS` names; None for anything else."""
    return SELF_DRAFTS.get(draft) if isinstance(draft, str) else None


class QuantizedLinear(nn.Module):
    """A linear layer over codes. Its parameters take no gradients."""

    def __init__(self, weight: Tensor, bias: nn.Parameter | None, kind: str):
        """weight: [N, K]."""
        super().__init__()
        self.kind, (self.out_features, self.in_features) = kind, weight.shape
        for name, tensor in KINDS[kind](weight.detach())._asdict().items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:  # an operator: compiled code is the same for any number of rows, and holds no weights in full
            return kernel_ops.quantized_linear(x, self.weight, self.scale, self.bias)
        return F.linear(x, dequantized(self.weight, self.scale, self.in_features), self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.kind}"


def quantized(model: PreTrainedModel, kind: str, device: torch.device | str | None = None) -> PreTrainedModel:
    """A copy of the model with its linear layers in "int8" or "int4"; all else is shared with it, which stays as it is.

    device: where the copy is to be; None is the model's. On another one it shares nothing, and what full weights take
        there is one layer's.

    Raises ValueError for another kind, and for a model that is quantized, has an adapter, or has no linear layers.
    """
    if kind not in KINDS:
        raise ValueError(f"quantize must be one of {', '.join(KINDS)}; got {kind!r}")
    name = type(model).__name__
    if is_quantized(model) or kind_of(model) is not None:
        raise ValueError(f"{name} is quantized already ({kind_of(model) or 'as it was loaded'}); quantize a full one")
    if any(hasattr(module, "base_layer") for module in model.modules()):
        raise ValueError(f"{name} has an adapter: merge it first (merge_and_unload), or quantize before it is added")
    linear = [each for each in model.modules() if type(each) in (nn.Linear, Conv1D)]
    linear = [each for each in linear if each is not model.get_output_embeddings()]
    if kind == "int4" and hasattr(model.config, "relative_attention_num_buckets"):
        raise ValueError(f"{name}'s layers go by the dtype of their weights, and know none of int4: quantize to int8")
    if not linear:
        raise ValueError(f"{name} has no linear layers that could be quantized")
    device = torch.empty(0, device=model.device if device is None else device).device  # "cuda" is no tensor's device
    full = {id(part) for each in linear for part in each.parameters()}
    kept = [part for part in (*model.parameters(), *model.buffers()) if part.device == device or id(part) not in full]
    known: dict[int, object] = {id(part): _on(device, part) for part in kept}
    with torch.no_grad():
        for each in linear:
            weight = each.weight.T if isinstance(each, Conv1D) else each.weight
            # The bias in a parameter of its own: a session moves the full model's (fused_projections).
            bias = None if each.bias is None else nn.Parameter(each.bias.detach().to(device), each.bias.requires_grad)
            known[id(each)] = QuantizedLinear(weight.to(device), bias, kind).train(each.training)
    return copy.deepcopy(model, known)  # what is known is taken, not copied


def _on(device: torch.device, part: Tensor) -> Tensor:
    if part.device == device:
        return part
    moved = part.detach().to(device)
    return nn.Parameter(moved, part.requires_grad) if isinstance(part, nn.Parameter) else moved


def kind_of(model: nn.Module) -> str | None:
    """Which of `KINDS` a model's linear layers are; None for one that `quantized` did not make."""
    return next((each.kind for each in model.modules() if isinstance(each, QuantizedLinear)), None)


def parameter_count(model: PreTrainedModel) -> int:
    """How many numbers a model's weights stand for, packed or not."""
    packed = [each for each in model.modules() if isinstance(each, QuantizedLinear)]
    beside = sum(each.weight.numel() + each.scale.numel() for each in packed)
    return model.num_parameters() - beside + sum(each.in_features * each.out_features for each in packed)
