"""Helpers for model pairs: display names, context length, available drafters, conversion to another dtype."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from bass_core.drafters import Drafter, NgramDrafter, SuffixDrafter
from bass_core.loading.model_pair import ASSETS, ModelPair, fingerprint, has_dummy_weights, load_draft
from bass_core.loading.quantization import kind_of, quantized
from bass_core.model import transformers_internals
from bass_core.model.transformers_internals import is_quantized
from bass_lab.drafters.layer_skip import LayerSkipDrafter


def require_decoder(pair: ModelPair) -> None:
    """Raise ValueError if the target is an encoder-decoder model."""
    if pair.reads_sources:
        raise ValueError(f"this needs a decoder-only target, and {name_of(pair.target)} is an encoder-decoder model")


def require_draft_model(pair: ModelPair) -> None:
    """Raise ValueError for a pair without a decoder-only draft model."""
    require_decoder(pair)
    if not isinstance(pair.draft, PreTrainedModel):
        raise ValueError(f"this needs a draft model, got {name_of(pair.draft)}: name one, or use the embedded pair")


def context_of(pair: ModelPair) -> float:
    """Return the shorter context length of the two models in tokens, or infinity if neither has a limit."""
    return min(pair.contexts.values(), default=math.inf)


def in_dtype(pair: ModelPair, dtype: torch.dtype) -> ModelPair:
    """Return the pair, or a copy of the pair in `dtype`. Raises ValueError for quantized models of another dtype."""
    if all(model.dtype == dtype for model in pair.models):
        return pair
    if any(map(is_quantized, pair.models)):
        wanted = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"this needs {wanted}, and quantized models cannot be cast: load {pair!r} with dtype={wanted!r}"
        )
    target, draft = deepcopy((pair.target, pair.draft))  # together: target and draft may be the same model
    copies = replace(pair, target=target, draft=draft)
    for model in copies.models:
        transformers_internals.in_dtype(model, dtype)
    return copies


def drafters_for(pair: ModelPair) -> dict[str, PreTrainedModel | Drafter]:
    """Return the available drafters of the pair's target by name: its own draft, then drafters without training. For
    the embedded target, the trained drafts and its INT4 copy follow."""
    layers = pair.target.config.get_text_config().num_hidden_layers
    own = pair.drafter if pair.draft is None else pair.draft
    found = {"its own draft": own, "n-gram": NgramDrafter(), "suffix": SuffixDrafter()}
    if layers > 1:
        found["first layers"] = LayerSkipDrafter(max(1, layers // 4))
    if Path(pair.target.name_or_path) == ASSETS / "target":
        where = {"dtype": pair.target.dtype, "device": pair.device}
        for name in ("middle_draft", "deep_draft", "feature_head"):
            found[name.replace("_", " ")] = load_draft(ASSETS / name, **where)
        if kind_of(pair.target) is None:
            found["target in INT4"] = quantized(pair.target, "int4")
    return found


def models_named(pair: ModelPair) -> str:
    """Return the names of the loaded target and draft for records. Embedded models have short names."""

    def short(model: PreTrainedModel | Drafter | None) -> str:
        own = isinstance(model, PreTrainedModel) and Path(model.name_or_path).parent == ASSETS
        return name_of(model).replace(type(model).__name__, "embedded", 1) if own else name_of(model)

    names = " + ".join(map(short, (pair.target, getattr(pair.draft, "head", pair.draft))))
    return "embedded pair" if names == "embedded target + embedded draft" else names


def name_of(model: PreTrainedModel | Drafter | None) -> str:
    """Return a display name: class, hub name or folder, quantization, dummy weights; a drafter's fingerprint."""
    if not isinstance(model, PreTrainedModel):
        return "n-gram lookup" if isinstance(model, NgramDrafter | None) else fingerprint(model)
    path = Path(model.name_or_path)
    name = f"{type(model).__name__} {path.name if path.is_absolute() else path}".removesuffix(" .")
    about = ", ".join(filter(None, (kind_of(model), "dummy weights" if has_dummy_weights(model) else None)))
    return f"{name} ({about})" if about else name
