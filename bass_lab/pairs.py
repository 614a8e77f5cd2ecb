"""What the laboratory asks of a pair: what to call it, what it can hold, the same pair in another dtype."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from bass_core.checkpoints import is_quantized
from bass_core.drafters import NgramDrafter
from bass_core.models import ModelPair, has_dummy_weights


def require_draft_model(pair: ModelPair) -> None:
    """Raises ValueError for a pair without a draft model."""
    if not isinstance(pair.draft, PreTrainedModel):
        raise ValueError(f"this needs a draft model, got draft={pair.draft!r}: name one, or use the embedded pair")


def context_of(pair: ModelPair) -> float:
    """Tokens that fit into the shorter of the models' contexts; infinite where neither has an end."""
    return min(pair.contexts.values(), default=math.inf)


def in_dtype(pair: ModelPair, dtype: torch.dtype) -> ModelPair:
    """The pair with its models in that dtype: itself, or a pair of copies. Raises ValueError for quantized ones."""
    models = pair.models
    if all(model.dtype == dtype for model in models):
        return pair
    if any(map(is_quantized, models)):
        wanted = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"this needs {wanted}, and quantized models cannot be cast: load {pair!r} with dtype={wanted!r}"
        )
    target, draft = deepcopy((pair.target, pair.draft))  # together: one model may be both
    for model in (target, draft):
        if isinstance(model, PreTrainedModel):
            model.to(dtype)
    return replace(pair, target=target, draft=draft)


def name_of(model: PreTrainedModel | NgramDrafter | None) -> str:
    """For people: the class, the hub name or the last part of the folder that it was loaded from, and whether its
    weights are dummies."""
    if not isinstance(model, PreTrainedModel):
        return "n-gram lookup"
    path = Path(model.name_or_path)
    name = f"{type(model).__name__} {path.name if path.is_absolute() else path}".removesuffix(" .")
    return f"{name} (dummy weights)" if has_dummy_weights(model) else name
