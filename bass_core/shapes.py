"""Named pairs: their ids on the hub, their architectures, and models of these with dummy weights.

How long a pass takes and what it needs in memory depends on shapes, not on what the weights have learnt. So the sizes
that people ask about ship as configs, copied from the hub's config.json files, and are built with random weights where
there is no network. What such models write is noise: their pairs are `synthetic`, and so is all that is made with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Shape:
    """Configs of a target and its draft, as `AutoConfig.for_model` takes them, and their ids on the hub.

    ids: target and draft; None for models that were never published.
    """

    target: dict[str, Any]
    draft: dict[str, Any]
    ids: tuple[str, str] | None = None


_PAPER = {
    "model_type": "llama",
    "vocab_size": 51200,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "dtype": "bfloat16",
}
_OPT = {
    "model_type": "opt",
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "tie_word_embeddings": True,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "dtype": "float16",
}
_CODEGEN = {
    "model_type": "codegen",
    "vocab_size": 51200,
    "n_positions": 2048,
    "n_ctx": 2048,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 50256,
    "dtype": "float16",
}
_LLAMA_3 = {
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "dtype": "bfloat16",
}
_LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_QWEN_2 = {
    "model_type": "qwen2",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "dtype": "bfloat16",
}

SHAPES: dict[str, Shape] = {
    # Reconstructed: that the code models had 7.8B and 310M parameters, the draft 4 wide layers. The rest is chosen to
    # give these numbers.
    "paper-7.8b": Shape(
        target=_PAPER
        | {
            "hidden_size": 4096,
            "intermediate_size": 13312,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "tie_word_embeddings": False,
        },
        draft=_PAPER
        | {
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 4,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "tie_word_embeddings": True,
        },
    ),
    "opt-13b": Shape(
        target=_OPT | {"hidden_size": 5120, "ffn_dim": 20480, "num_hidden_layers": 40, "num_attention_heads": 40},
        draft=_OPT | {"hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
        ids=("facebook/opt-13b", "facebook/opt-125m"),
    ),
    # CodeGen does not call transformers' attention interface: it decodes on the path "eager", without our kernels.
    "codegen-16b": Shape(
        target=_CODEGEN | {"n_embd": 6144, "n_layer": 34, "n_head": 24, "rotary_dim": 64},
        draft=_CODEGEN | {"n_embd": 1024, "n_layer": 20, "n_head": 16, "rotary_dim": 32},
        ids=("Salesforce/codegen-16B-mono", "Salesforce/codegen-350M-mono"),
    ),
    "llama-3.1-8b": Shape(
        target=_LLAMA_3
        | {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "rope_parameters": _LLAMA_3_ROPE | {"factor": 8.0},
            "tie_word_embeddings": False,
        },
        draft=_LLAMA_3
        | {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "rope_parameters": _LLAMA_3_ROPE | {"factor": 32.0},
            "tie_word_embeddings": True,
        },
        ids=("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B"),
    ),
    # One tokenizer, but tables padded to different sizes.
    "qwen2.5-coder-7b": Shape(
        target=_QWEN_2
        | {
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
        },
        draft=_QWEN_2
        | {
            "vocab_size": 151936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
        ids=("Qwen/Qwen2.5-Coder-7B", "Qwen/Qwen2.5-Coder-0.5B"),
    ),
}


def named_config(shape: dict[str, Any], name: str) -> PreTrainedConfig:
    """The config of a model of `SHAPES`, called `name` where models are named."""
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
    """A model with random weights, made on the device in its dtype, in evaluation mode.

    Weights are drawn as for training (normal, with the config's own deviation, mostly 0.02; norms are ones), so that
    activations stay finite through all layers and logits differ. The same seed gives the same weights on one kind of
    device; the caller's random state stays as it was. dtype: "auto" is the config's own.

    The config is marked, and the mark outlives `save_pretrained`: see `has_dummy_weights`. Raises ValueError for a
    dtype that torch does not have and for a config of no causal language model.
    """
    if isinstance(dtype, str):
        found = config.dtype or torch.float32 if dtype == "auto" else getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"dtype must be 'auto' or one of torch's, such as 'bfloat16'; got {dtype!r}")
        dtype = found
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    model.to_empty(device=device)
    model.tie_weights()  # moving has untied them
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        model.init_weights()  # as `from_pretrained` does it: tables of positions, too, are computed in float32
    model.config.dummy_weights = True
    return model.eval()


def has_dummy_weights(model: PreTrainedModel) -> bool:
    """Whether the model was made by `dummy_model`, or loaded from a folder to which such a one was saved."""
    return getattr(model.config, "dummy_weights", False)
