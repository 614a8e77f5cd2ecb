"""Weight-only INT8 and INT4: linear layers with integer weights and scales, computed in the model's own dtype.

INT8 has one scale per output channel. INT4 has one per group of 32 inputs: the largest absolute value of a group
becomes -8 (llama.cpp's Q4_0), and two numbers share a byte. Rounding is to the nearest integer, without calibration
data. Embeddings, the head (often tied to the embeddings), norms, biases and stacked experts stay unchanged.

torchao 0.18 with torch 2.13 on a CPU does not replace this module: packed INT4 is missing ("requires mslk"), layers
with other input sizes than multiples of the group are silently skipped (560 in the embedded draft), and every program
that imports transformers prints a message. Models quantized by torchao load as usual.
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
    """weight: int8 [N, K] with scale [N, 1]; or uint8 [N, 16 · groups] with scale [N, groups], two values per byte. The
    low halves hold the first 16 of a group of 32 inputs, the high halves the other 16."""

    weight: Tensor
    scale: Tensor


def int8(weight: Tensor) -> QuantizedWeight:
    """Return weights [N, K] rounded to -127 … 127 times a scale per output."""
    scale = (weight.abs().amax(1, keepdim=True).float() / 127).to(weight.dtype)
    return QuantizedWeight(_rounded(weight, scale, -127, 127), scale)


def int4(weight: Tensor) -> QuantizedWeight:
    """Return weights [N, K] rounded to -8 … 7 times a scale per output and group of inputs, packed."""
    groups = F.pad(weight, (0, -weight.shape[1] % GROUP)).unflatten(1, (-1, GROUP))  # [N, groups, 32]
    extreme = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    codes = _rounded(groups, extreme / -8, -8, 7)
    low, high = codes.chunk(2, 2)
    return QuantizedWeight((low & 15 | high << 4).flatten(1).view(torch.uint8), (extreme / -8)[..., 0])


def _rounded(weight: Tensor, scale: Tensor, least: int, most: int) -> Tensor:
    """Return the nearest multiples of the scale, which is already rounded to its dtype, or 0 for scale 0."""
    codes = weight.float() / scale.float().where(scale != 0, 1)
    return codes.round().clamp(least, most).to(torch.int8)


KINDS = {"int8": int8, "int4": int4}
SELF_DRAFTS = {f"target:{kind}": kind for kind in KINDS}  # names of drafts that are quantized copies of the target


def kind_of_copy(draft: object) -> str | None:
    """Return the kind of weights for one of `SELF_DRAFTS`, or None."""
    return SELF_DRAFTS.get(draft) if isinstance(draft, str) else None


class QuantizedLinear(nn.Module):
    """A linear layer with quantized weights. Its parameters take no gradients."""

    def __init__(self, weight: Tensor, bias: nn.Parameter | None, kind: str):
        """weight: [N, K]."""
        super().__init__()
        self.kind, (self.out_features, self.in_features) = kind, weight.shape
        for name, tensor in KINDS[kind](weight.detach())._asdict().items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:  # the operator compiles once for any number of rows, and does not keep full weights
            return kernel_ops.quantized_linear(x, self.weight, self.scale, self.bias)
        return F.linear(x, dequantized(self.weight, self.scale, self.in_features), self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.kind}"


def quantized(model: PreTrainedModel, kind: str, device: torch.device | str | None = None) -> PreTrainedModel:
    """Return a copy of the model with its linear layers in "int8" or "int4"; the model itself stays unchanged.

    device: device of the copy; None is the model's device. On the same device the copy shares all other parts with the
    model. On another device it shares nothing, and full weights take memory for a single layer at a time.

    Raises ValueError for other kinds, and for models that are quantized, have an adapter, or have no linear layers.
    """
    if kind not in KINDS:
        raise ValueError(f"quantize must be one of {', '.join(KINDS)}; got {kind!r}")
    name = type(model).__name__
    if is_quantized(model) or kind_of(model) is not None:
        raise ValueError(f"{name} is quantized already ({kind_of(model) or 'when loaded'}); pass one with full weights")
    if any(hasattr(module, "base_layer") for module in model.modules()):
        raise ValueError(f"{name} has an adapter; merge it first (merge_and_unload), or quantize before adding it")
    linear = [each for each in model.modules() if type(each) in (nn.Linear, Conv1D)]
    linear = [each for each in linear if each is not model.get_output_embeddings()]
    if kind == "int4" and hasattr(model.config, "relative_attention_num_buckets"):
        raise ValueError(f"the layers of {name} use the dtype of their weights and do not support int4; use int8")
    if not linear:
        raise ValueError(f"{name} has no linear layers to quantize")
    device = torch.empty(0, device=model.device if device is None else device).device  # adds the index to "cuda"
    full = {id(part) for each in linear for part in each.parameters()}
    kept = [part for part in (*model.parameters(), *model.buffers()) if part.device == device or id(part) not in full]
    known: dict[int, object] = {id(part): _on(device, part) for part in kept}
    with torch.no_grad():
        for each in linear:
            weight = each.weight.T if isinstance(each, Conv1D) else each.weight
            # A separate bias parameter, because a session moves the full model's biases (fused_projections).
            bias = None if each.bias is None else nn.Parameter(each.bias.detach().to(device), each.bias.requires_grad)
            known[id(each)] = QuantizedLinear(weight.to(device), bias, kind).train(each.training)
    return copy.deepcopy(model, known)  # deepcopy reuses the parts in `known`


def _on(device: torch.device, part: Tensor) -> Tensor:
    if part.device == device:
        return part
    moved = part.detach().to(device)
    return nn.Parameter(moved, part.requires_grad) if isinstance(part, nn.Parameter) else moved


def kind_of(model: nn.Module) -> str | None:
    """Return the kind of a model's linear layers (see `KINDS`), or None if not made by `quantized`."""
    return next((each.kind for each in model.modules() if isinstance(each, QuantizedLinear)), None)


def parameter_count(model: PreTrainedModel) -> int:
    """Return the number of weights in a model, counting packed weights individually."""
    packed = [each for each in model.modules() if isinstance(each, QuantizedLinear)]
    beside = sum(each.weight.numel() + each.scale.numel() for each in packed)
    return model.num_parameters() - beside + sum(each.in_features * each.out_features for each in packed)
