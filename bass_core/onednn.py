"""Linear layers by oneDNN on processors of AMD, where torch's own choice, MKL, leaves AVX-512 unused.

Passes over many tokens (prefill, verification of many rows) then spend half the time in products; over few tokens MKL
is as fast, and starts faster. Both round in float32, in another order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bass_core.environment import processor

FEW = 4_000_000  # multiplications of a product: MKL is not slower below half of it; a new shape takes 0.3 ms to compile


@functools.cache
def is_faster() -> bool:
    """Whether it is on this processor."""
    both = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
    return both and "AMD" in processor() and torch.backends.cpu.get_cpu_capability() == "AVX512"


def products(model: nn.Module) -> list[tuple[dict, str, Any]]:
    """The changes (`attention.changed`) under which the model's float32 linear layers go this way where it is faster.
    Layers of another class, or with a `forward` of their own, are left alone."""
    if model.device.type != "cpu" or not is_faster():
        return []
    found = [each for each in model.modules() if type(each) is nn.Linear and each.weight.dtype == torch.float32]
    return [(vars(each), "forward", _forward(each)) for each in found if "forward" not in vars(each)]


def _forward(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    outputs, own, product = layer.out_features, layer._parameters, torch.ops.mkldnn._linear_pointwise

    def forward(x: Tensor) -> Tensor:
        weight, bias = own["weight"], own["bias"]  # as attributes of a module they take longer to find
        if x.numel() * outputs < FEW:
            return F.linear(x, weight, bias)
        return product(x, weight, bias, "none", [], "")

    return forward
