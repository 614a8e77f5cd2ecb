"""Load the pair from a lesson's parameters, and compare texts as strictly as the dtype allows."""

from __future__ import annotations

import torch

from bass_core.loading import model_pair
from bass_core.loading.model_pair import ModelPair
from bass_lab import drafters

EXACT = (torch.float32, torch.float64)  # greedy text equals the text of the row alone, token for token


def load_pair(target: str, draft: str, dtype: str | None, device: str | None) -> ModelPair:
    """Return the pair for a lesson's parameters.

    target, draft: a name on the hub or a folder. Empty: the embedded pair, or n-gram drafts. draft may be "layers:N".
    dtype: None is float32 for the embedded pairs. Otherwise dtype, device and errors are as in `bass_core.load_pair`.
    """
    dtype = dtype or (None if target and target != model_pair.READER else "float32")
    return model_pair.load_pair(target or None, drafters.named(draft) or draft or None, dtype=dtype, device=device)


def is_exact(pair: ModelPair) -> bool:
    """Return True if greedy and coupled texts must agree token for token (float32, float64)."""
    return all(model.dtype in EXACT for model in pair.models)


def identity(identical: int, rows: int, pair: ModelPair, other: str = "transformers.generate for the row alone") -> str:
    """Return a sentence with the number of identical rows. Raises AssertionError if all must be equal (`is_exact`)."""
    told = f"{identical} of {rows} rows are identical to {other}"
    if is_exact(pair):
        assert identical == rows, f"{told}; in float32 all rows must be identical. This is a bug, please report it"
        return told
    dtype = str(pair.target.dtype).removeprefix("torch.")
    return f"{told} (in {dtype}, rounding can change close calls; `bass verify` distinguishes rounding from bugs)"
