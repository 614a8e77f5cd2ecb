"""What the cells of lessons do with their settings: load the pair, and say what its dtype promises."""

from __future__ import annotations

import torch

from bass_core.loading import model_pair
from bass_core.loading.model_pair import ModelPair
from bass_lab import drafters

EXACT = (torch.float32, torch.float64)  # where greedy text is that of the row alone, token for token


def load_pair(target: str, draft: str, dtype: str | None, device: str | None) -> ModelPair:
    """Return the pair that a lesson's parameters name.

    target, draft: a name on the hub or a folder; empty: the embedded pair, or n-gram drafting; draft also "layers:N".
    dtype: None is float32 for the embedded pairs, else as in `bass_core.load_pair`, as are device and errors.
    """
    dtype = dtype or (None if target and target != model_pair.READER else "float32")
    return model_pair.load_pair(target or None, drafters.named(draft) or draft or None, dtype=dtype, device=device)


def is_exact(pair: ModelPair) -> bool:
    """Return True if greedy and coupled text is promised token for token (float32, float64)."""
    return all(model.dtype in EXACT for model in pair.models)


def identity(identical: int, rows: int, pair: ModelPair, other: str = "transformers.generate for the row alone") -> str:
    """A sentence on how many rows have the tokens of the other text. AssertionError where all must (`is_exact`)."""
    told = f"{identical} of {rows} rows are identical to {other}"
    if is_exact(pair):
        assert identical == rows, f"{told}; in float32 all have to be: this is a fault, please report it"
        return told
    dtype = str(pair.target.dtype).removeprefix("torch.")
    return f"{told} (in {dtype} rounding may tip close calls; `bass verify` tells it from faults)"
