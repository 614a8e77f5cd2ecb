"""Where the Triton kernels of `bass_kernels` stand in for plain torch: on a CUDA GPU, where they are installed and run.

They are attention (but for the path "eager"), the write into the KV cache, and verification where nothing but the
temperature changes the distribution. On a CPU they run only in Triton's interpreter (TRITON_INTERPRET=1, set before
Python starts): slow, and the same code.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from types import ModuleType

import torch


def run_on(device: torch.device) -> bool:
    """Whether kernels run on tensors of this device."""
    return obstacle(device) is None


@functools.cache
def obstacle(device: torch.device) -> str | None:
    """Why kernels do not run on this device; None if one did. Triton compiles when called, and that can fail too."""
    if device.type != "cuda" and "TRITON_INTERPRET" not in os.environ:
        return (
            f"they need a CUDA GPU, and the model is on {device} (on a CPU they run slowly, in Triton's interpreter: "
            "set TRITON_INTERPRET=1 before Python starts)"
        )
    for name in ("bass_kernels", "triton"):
        if importlib.util.find_spec(name) is None:
            return f"the package {name} is not installed"
    states, cache = torch.ones(1, 1, 1, 16, device=device), torch.zeros(1, 1, 1, 16, device=device)
    try:
        load().write_kv(states, states, cache, cache, torch.zeros(1, 1, dtype=torch.int64, device=device))
    except Exception as error:  # whatever a compiler or a driver raises is the answer
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return None if bool(cache.all()) else "a first kernel wrote nothing"


def load() -> ModuleType:
    """The package `bass_kernels`, imported when first used."""
    return importlib.import_module("bass_kernels")
