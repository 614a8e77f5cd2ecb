"""Model pairs by name, with the weights of their checkpoints or with random (dummy) weights.

The time and memory of a pass depend on shapes alone. Pairs with dummy weights generate noise and are `synthetic`.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from bass_core.drafters import Drafter
from bass_core.loading.checkpoints import attention_of, check_config, place
from bass_core.loading.model_pair import ASSETS, ModelPair, load_pair
from bass_core.loading.quantization import kind_of_copy, quantized
from bass_lab import drafters

WEIGHTS = ("hub", "dummy")


@dataclass(frozen=True)
class Shape:
    """Configs of a target and its draft model for `AutoConfig.for_model`. about: the origin of the sizes. ids: hub ids,
    or None if the weights were never published."""

    about: str
    ids: tuple[str, str] | None
    target: dict[str, Any]
    draft: dict[str, Any]


# Copied from the hub's config.json files.
_FILE = Path(__file__).parent / "assets" / "shapes.json"
SHAPES = {name: Shape(**shape) for name, shape in json.loads(_FILE.read_text("utf-8")).items()}


def named_pair(
    target: str | Path | None = None,
    draft: str | Path | Drafter | None = None,
    *,
    weights: str = "hub",
    dtype: str | torch.dtype | None = None,
    device: str | int | torch.device | None = None,
    quantize: str | dict[str, str] | None = None,
    trust_remote_code: bool = False,
    **files: Any,
) -> ModelPair:
    """Return the pair of `bass_core.load_pair`, a named pair of `SHAPES`, or models with dummy weights.

    target: a name ("paper-7.8b", "opt-13b", "codegen-16b", "llama-3.1-8b", "qwen2.5-coder-7b") or a target of
    `load_pair`. A named pair brings its own draft model unless `draft` is given. "./opt-13b" is a folder, not a name.
    weights: "hub", or "dummy" for random weights made on the device, without download or tokenizer (prompts are ids).
    Other options as in `load_pair`. files (only with "hub"): quantization_config, revision, draft_revision.

    Raises ValueError as `load_pair`, for unpublished weights, and for dummy weights without a config. Raises
    MemoryError if dummy weights do not fit on the device.
    """
    if weights not in WEIGHTS:
        raise ValueError(f"weights must be one of {', '.join(WEIGHTS)}; got {weights!r}")
    draft = drafters.named(draft) or draft
    if weights == "dummy":
        if target is None and draft is None:
            target, draft = ASSETS / "target", ASSETS / "draft"
        if files:
            raise ValueError(f"weights='dummy' reads no checkpoint: leave out {', '.join(files)}")
        device, dtype = place(device, dtype)
        pair = _dummy_pair(target, draft, dtype, device, trust_remote_code)
        return pair if quantize is None else pair.quantized(quantize)
    if target in SHAPES:
        target, draft = _published(target, draft)
    where = {"dtype": dtype, "device": device}
    return load_pair(target, draft, **where, quantize=quantize, trust_remote_code=trust_remote_code, **files)


def _published(name: str, draft: str | Path | Drafter | None) -> tuple[str, str | Path | Drafter]:
    ids = SHAPES[name].ids
    if ids is None:
        raise ValueError(
            f"the weights of {name!r} were never published: use weights='dummy' for random weights, or a pair with "
            f"published weights: {', '.join(other for other in SHAPES if SHAPES[other].ids)}"
        )
    return ids[0], ids[1] if draft is None else draft


def _dummy_pair(
    target: str | Path | None,
    draft: str | Path | Drafter | None,
    dtype: str | torch.dtype,
    device: torch.device,
    trust_remote_code: bool,
) -> ModelPair:
    named = target in SHAPES
    config = named_config(SHAPES[target].target, target) if named else _stored_config(target, trust_remote_code)
    if isinstance(draft, str | Path) and not kind_of_copy(draft):
        draft = _stored_config(draft, trust_remote_code)
    elif draft is None and named:
        draft = named_config(SHAPES[target].draft, f"{target} draft")
    options = {"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
    model = dummy_model(config, seed=0, **options)
    if kind := kind_of_copy(draft):
        draft = quantized(model, kind)
    elif isinstance(draft, PreTrainedConfig):
        draft = dummy_model(draft, seed=1, **options)  # another seed: models of equal shape must differ
    return ModelPair(model, draft)


def _stored_config(folder: str | Path | None, trust_remote_code: bool) -> PreTrainedConfig:
    if folder is None or not (Path(folder) / "config.json").is_file():
        raise ValueError(
            f"weights='dummy' needs a config, and {str(folder)!r} is no folder with a config.json; "
            f"name a folder with a config.json, or one of these pairs as the target: {', '.join(SHAPES)}"
        )
    try:
        check_config(PreTrainedConfig.get_config_dict(folder)[0], trust_remote_code)
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise ValueError(f"cannot read the config of {str(folder)!r}: {error}") from error


def named_config(shape: dict[str, Any], name: str) -> PreTrainedConfig:
    """Return the config of a model of `SHAPES`, with `name` as its `name_or_path`."""
    config = AutoConfig.for_model(**shape)
    config.name_or_path = name
    return config


def dummy_model(
    config: PreTrainedConfig,
    *,
    dtype: str | torch.dtype,
    device: torch.device,
    seed: int,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Return a model in evaluation mode with random weights, made on the device. dtype "auto": the config's dtype.

    Weights are initialized as for training: activations stay finite and logits differ. A seed gives the same weights on
    one kind of device. The caller's random state does not change. The config is marked (`has_dummy_weights`). Raises
    ValueError for an unknown dtype and for a config of no causal language model.
    """
    dtype = (config.dtype or torch.float32) if dtype == "auto" else dtype
    with torch.device("meta"):
        options = {"dtype": dtype, "trust_remote_code": trust_remote_code, **attention_of(config)}
        model = AutoModelForCausalLM.from_config(config, **options)
    _check_memory(model, device)
    model.to_empty(device=device)
    model.tie_weights()  # `to_empty` unties weights
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        model.init_weights()  # as in `from_pretrained`: position tables, too, are computed in float32
    model.config.dummy_weights = True
    return model.eval()


def _check_memory(model: PreTrainedModel, device: torch.device) -> None:
    needed = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    if device.type == "cuda":
        there = torch.cuda.mem_get_info(device)[1]
    else:
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise MemoryError(
            f"{model.config.name_or_path or type(model).__name__} needs {needed / 1e9:,.0f} GB in {model.dtype}, and "
            f"{device} has {there / 1e9:,.0f} GB"
        )
