"""Weight-only INT8 and INT4: linear layers whose weights are integers with scales, computed in the model's own dtype.

Embeddings and the head, which often are one tensor, norms, biases and experts that a model keeps as one stack stay as
they are. What codes mean is in `codes`.

Why this is our own: torchao 0.18, tried with torch 2.13 on a CPU, has no packed INT4 there ("requires mslk"), passes in
silence over layers whose inputs are no multiple of the group (560 of the embedded draft), and prints into every program
that imports transformers. Its INT8 dequantises and multiplies, as this does. Models that it quantized load as ever.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from bass_core import kernel_ops
from bass_core.checkpoints import is_quantized
from bass_core.codes import KINDS, dequantized

SELF_DRAFTS = {f"target:{kind}": kind for kind in KINDS}  # names of drafts that are a target's own copy


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


def quantized(model: PreTrainedModel, kind: str) -> PreTrainedModel:
    """A copy of the model with its linear layers in "int8" or "int4"; all else is shared with it, which stays as it is.

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
    if not linear:
        raise ValueError(f"{name} has no linear layers that could be quantized")
    known: dict[int, object] = {id(each): each for each in (*model.parameters(), *model.buffers())}
    with torch.no_grad():
        for each in linear:
            weight = each.weight.T if isinstance(each, Conv1D) else each.weight
            known[id(each)] = QuantizedLinear(weight, each.bias, kind).train(each.training)
    return copy.deepcopy(model, known)  # what is known is taken, not copied


def kind_of(model: nn.Module) -> str | None:
    """Which of `KINDS` a model's linear layers are; None for one that `quantized` did not make."""
    return next((each.kind for each in model.modules() if isinstance(each, QuantizedLinear)), None)


def parameter_count(model: PreTrainedModel) -> int:
    """How many numbers a model's weights stand for, packed or not."""
    packed = [each for each in model.modules() if isinstance(each, QuantizedLinear)]
    beside = sum(each.weight.numel() + each.scale.numel() for each in packed)
    return model.num_parameters() - beside + sum(each.in_features * each.out_features for each in packed)
