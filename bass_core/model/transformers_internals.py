"""All uses of transformers beyond its documented interface.

Valid for transformers 5.17 to 5.24; `make test` uses the newest release and `make test-oldest` the oldest. If a release
renames something, change this module and the bounds in pyproject.toml together.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from transformers import GenerationConfig, GenerationMixin, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

ATTENTION = "_attn_implementation_internal"  # config field with the attention implementation
ROTATE = "apply_rotary_pos_emb"  # global function in the modules of attention layers
CACHE_NAMES = ("cache", "past_key_values", "cache_params")  # argument and output of a pass: from 5.24 on; before
CACHE = CACHE_NAMES[CACHE_NAMES[0] not in inspect.signature(LlamaForCausalLM.forward).parameters]  # in this release
QUANTIZATION_METHODS = (*AUTO_QUANTIZATION_CONFIG_MAPPING, "bitsandbytes")  # bitsandbytes has two names


# --- forward passes -------------------------------------------------------------------------------


@functools.cache
def forward_names(kind: type) -> frozenset[str]:
    """Return the argument names of a model class's `forward`, including names passed to a base class by `**kwargs`."""
    names: set[str] = set()
    for parameters in _forwards(kind):
        names |= parameters.keys()
        if all(each.kind is not each.VAR_KEYWORD for each in parameters.values()):
            break
    return frozenset(names)


@functools.cache
def cache_argument(kind: type) -> str:
    """Return the name of the cache argument in a model class's most derived `forward`."""
    for parameters in _forwards(kind):
        for name in CACHE_NAMES:
            if name in parameters:
                return name
    return CACHE


def _forwards(kind: type) -> list[dict[str, inspect.Parameter]]:
    classes = (base for base in kind.__mro__ if issubclass(base, PreTrainedModel) and "forward" in vars(base))
    return [dict(inspect.signature(base.forward).parameters) for base in classes]


def takes_mask_per_layer_type(model: PreTrainedModel) -> bool:
    """Return True if the decoder accepts a mapping of masks. Uniform models list layer types and take one mask."""
    source = inspect.getsource(type(model.get_decoder()).forward)
    return re.search(r"isinstance\([^\n]*mask[^\n]*dict\)", source) is not None


# --- kinds of modules -----------------------------------------------------------------------------


def plain_forward(module: nn.Module) -> Callable:
    """Return the `forward` of a module's class, without decorators."""
    return inspect.unwrap(type(module).forward)


def called_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of all functions, methods and attributes that the module's `forward` uses."""
    code = getattr(plain_forward(module), "__code__", None)
    return () if code is None else code.co_names


def is_position_table(module: nn.Module) -> bool:
    """Return True for a table of learned positions (such as BART's)."""
    return isinstance(module, nn.Embedding) and "Positional" in type(module).__name__


def sinusoidal_width(module: nn.Module) -> int | None:
    """Return the width of a module with computed sinusoidal positions (such as M2M-100's), else None."""
    if "Positional" not in type(module).__name__ or isinstance(module, nn.Embedding):
        return None
    takes = "inputs_embeds" in inspect.signature(type(module).forward).parameters
    return getattr(module, "embedding_dim", getattr(module, "embed_dim", None)) if takes else None


def has_relative_bias(module: nn.Module) -> bool:
    """Return True for a decoder's module with a relative position bias (such as T5's)."""
    return hasattr(type(module), "compute_bias") and module.is_decoder


def is_stateful(model: PreTrainedModel) -> bool:
    """Return True if transformers marks the model's state as impossible to crop."""
    return getattr(model, "_is_stateful", False)


def is_offloaded(module: nn.Module) -> bool:
    """Return True if accelerate loads this module's weights for each pass."""
    hook = getattr(module, "_hf_hook", None)
    return any(getattr(each, "offload", False) for each in getattr(hook, "hooks", [hook]))


def ignored_tensors(model: PreTrainedModel) -> list[str]:
    """Return the patterns of checkpoint tensors ignored by the model."""
    return list(model._keys_to_ignore_on_load_unexpected or ())


def attention_implementation(config: PreTrainedConfig) -> str:
    return config._attn_implementation or ""


def in_dtype(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Convert the model in place and return it. Flash attention becomes sdpa in dtypes other than half precision."""
    model.to(dtype)
    if dtype not in (torch.float16, torch.bfloat16) and "flash" in attention_implementation(model.config):
        model.set_attn_implementation("sdpa")
    return model


def is_quantized(model: PreTrainedModel) -> bool:
    """Return True if the model was loaded with quantized weights, which keep their dtype and layout."""
    kept = getattr(model.config, "quantization_config", None)
    dense = getattr(model, "quantization_method", None) == "gguf" and getattr(kept, "dequantize", True)
    return getattr(model, "is_quantized", False) and not dense


def dense_gguf() -> dict[str, Any]:
    """Return arguments of `from_pretrained` for ordinary weights from a GGUF file; 5.17 has no other kind."""
    kind = getattr(transformers, "GgufConfig", None)
    return {} if kind is None else {"quantization_config": kind(dequantize=True)}


# --- generate -------------------------------------------------------------------------------------


def generate_argument(name: str) -> Any:
    """Return a local variable of the `generate` call that runs in this thread, or None outside of `generate`.

    A callable `custom_generate` receives neither `assistant_model` nor `streamer`.
    """
    theirs, frame = inspect.unwrap(GenerationMixin.generate).__code__, sys._getframe()
    while frame is not None and frame.f_code is not theirs:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get(name)


def is_callers_cache(cache: Any) -> bool:
    """Return True if the caller of `generate` passed this cache; `generate` marks the cache."""
    return getattr(cache, "_is_user_defined", False)


def padding_id(config: GenerationConfig) -> int | None:
    """Return the padding id resolved by `generate`."""
    return None if config._pad_token_tensor is None else int(config._pad_token_tensor)


def generation_defaults() -> dict[str, Any]:
    """Return `generate`'s defaults for options without a value in the config."""
    return GenerationConfig._get_default_generation_params()
