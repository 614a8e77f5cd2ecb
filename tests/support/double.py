"""Compute in float64 what models compute in float32: rounding errors vanish, and faults stay."""

import torch
from torch.overrides import TorchFunctionMode


class Double(TorchFunctionMode):
    """Inside this context, `.float()` and `torch.float32` mean float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = [torch.float64 if each is torch.float32 else each for each in args]
        kwargs = {name: torch.float64 if each is torch.float32 else each for name, each in (kwargs or {}).items()}
        return func(*args, **kwargs)
