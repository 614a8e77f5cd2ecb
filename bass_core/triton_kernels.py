"""Where the Triton kernels of `bass_kernels` stand in for plain torch: on a CUDA GPU, wherever they are installed.

On a CPU they run only in Triton's interpreter (TRITON_INTERPRET=1, set before Python starts): slow, and the same code.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from types import ModuleType

import torch


@functools.cache
def installed() -> bool:
    """Whether there are kernels, and Triton to compile them."""
    return all(importlib.util.find_spec(name) is not None for name in ("bass_kernels", "triton"))


def run_on(device: torch.device) -> bool:
    """Whether kernels can run on tensors of this device."""
    wanted = device.type == "cuda" or "TRITON_INTERPRET" in os.environ  # triton takes a second to import
    return wanted and installed() and load().runs_on(device)


def load() -> ModuleType:
    """The package `bass_kernels`, imported when first used."""
    return importlib.import_module("bass_kernels")
