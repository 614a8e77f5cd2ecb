"""Fuse sibling projections: weights with the same input are adjacent in memory and need only a single matrix product.

The siblings are the query, key and value projections, and the gate and up projections of an MLP. `arrange` moves their
weights into a shared tensor and makes the model's parameters views of this tensor. Parameter objects and values stay
the same, and no second copy remains. Other tensors on the old memory, such as an earlier `state_dict`, are no longer
updated. On a CPU, `load_pair` therefore arranges models, and sessions leave weights where they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bass_core.model.patching import is_plain

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

Group = list[nn.Linear]


def arrange(model: nn.Module) -> list[Group]:
    """Make the weights of sibling projections adjacent and return the adjacent groups. Skips groups with hooks, with
    wrapped, quantized or tied weights, or with different dtypes or devices."""
    users = Counter(_place(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    found = []
    for module in model.modules():
        for names in SIBLINGS:
            group = [getattr(module, name, None) for name in names]
            if all(map(is_plain, group)) and _arranged(group, users):
                found.append(group)
    return found


def joint(group: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None] | None:
    """Return weight and bias of the group as a single product, or None if the parameters are not adjacent."""
    biases = [part.bias for part in group]
    weight, bias = whole([part.weight for part in group]), None if None in biases else whole(biases)
    fits = weight is not None and all((each is None) == (bias is None) for each in biases)
    return (weight, bias) if fits else None


def _arranged(group: Group, users: Counter) -> bool:
    """Make the parameters of a group adjacent if possible. Return True if the parameters are adjacent."""
    if len({(part.in_features, part.bias is None, part.weight.dtype, part.weight.device) for part in group}) > 1:
        return False
    kinds = [[part.weight for part in group]] + [[part.bias for part in group]] * (group[0].bias is not None)
    apart = [parameters for parameters in kinds if whole(parameters) is None]
    if not all(_is_alone(each) and users[_place(each)] == 1 for parameters in apart for each in parameters):
        return False
    for parameters in apart:
        _move(parameters)
    return True


@torch.inference_mode(False)
def _move(parameters: Sequence[nn.Parameter]) -> None:
    one = torch.cat([each.detach() for each in parameters])
    for each, part in zip(parameters, one.split([len(each) for each in parameters]), strict=True):
        each.data = part


def whole(parameters: Sequence[nn.Parameter]) -> Tensor | None:
    """Return adjacent parameters as a single tensor, or None if the parameters are not adjacent."""
    first = parameters[0]
    storage, end = first.untyped_storage(), first.storage_offset()
    for each in parameters:
        if each.untyped_storage()._cdata != storage._cdata or each.storage_offset() != end or not each.is_contiguous():
            return None
        end += each.numel()
    return first.detach().as_strided((sum(map(len, parameters)), *first.shape[1:]), first.stride())


def _is_alone(parameter: nn.Parameter) -> bool:
    """Return True if the parameter is alone in its storage."""
    return parameter.untyped_storage().nbytes() == parameter.nbytes


def _place(parameter: Tensor) -> tuple[int, int]:
    return parameter.untyped_storage()._cdata, parameter.storage_offset()
