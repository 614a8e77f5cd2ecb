"""Every causal model type of transformers, in a tiny configuration.

A tiny configuration is the class's default with smaller sizes: two layers (more if layers differ), 97 tokens, windows
of 8, switches at 16 positions, a context of 96. `SPECIAL` holds further changes of single types. docs/MODELS.md has the
outcome of each type; tests/support/models_page.py measures the outcomes.
"""

import functools
import re
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny import greedy_alone, ragged_prompts
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from trial_policies import PerRow

import bass_core as bass
from bass_core.model.transformers_internals import CACHE, forward_names

BASS_CORE = str(Path(bass.__file__).parent)
VOCABULARY, CONTEXT, WINDOW, SWITCH = 97, 96, 8, 16
HIDDEN, HEADS, HEAD = 64, 4, 16
NEW = 12
# On both sides of each window (8) and switch (16), before and during decoding, and one distant row.
PROMPTS = ragged_prompts(WINDOW - 3, WINDOW + 1, SWITCH - 4, SWITCH + 1, 3, 41)

# Names of sizes (regular expressions of whole names), and their values if the default is larger.
SIZES = {
    r"vocab_size|decoder_vocab_size|unpadded_vocab_size|.*_vocab_size|vocab_size_per_layer_input": VOCABULARY,
    r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_(source|target)_positions|model_max_length": CONTEXT,
    r"context_length|seq_length": CONTEXT,
    r"sliding_window(_size)?|attention_chunk_size|(attention_)?window_size|local_attention": WINDOW,
    r"local_attention_window_len|keep_window_size|(local|lsh)_attn_chunk_length|block_size|index_block_size": WINDOW,
    r"attention_context_left|(mamba_)?chunk_size|conv_chunk_size": WINDOW,
    r"original_max_position_embeddings|floor_scale|log_scaling_n_floor|rel_extent|relative_max_distance": SWITCH,
    r"position_bias_max_distance|initial_context_length": SWITCH,
    r"encoder_hash_byte_group_vocab": 100,
    r"hidden_size(_global)?|d_model|n_embd|emb_dim|embedding_dim|embedding_size|attention_hidden_size": HIDDEN,
    r"adapter_(in|out)_dim|adapter_input_size|(input|output)_embedding_size|word_embed_proj_dim|lru_width": HIDDEN,
    r"backbone_hidden_size|dim_model_base": HIDDEN,
    r"(.*_)?intermediate_size(_mlp)?|(.*_)?ffn_dim|dff|dim_ff|d_inner|(.*_)?ffn_hidden_size|feed_forward_size": 96,
    r"num_(.*_)?attention_heads|.*attention_heads|n_heads?|num_heads|linear_num(_value|_key)?_heads": HEADS,
    r"n_mamba_heads|mamba_n(um)?_heads": HEADS,
    r"index_n_heads": 16,  # the index's scores are sums over heads after a ReLU: with few heads, many scores are 0
    r"head_dim|(.*_)?head_dim|d_head|dim_head|attention_head_(dim|size)|kv_channels|mamba_d_head|mamba_headdim": HEAD,
    r"rotary_dim": HEAD // 2,
    r"(n|num|num_hidden|decoder|encoder|num_decoder|num_encoder|num_layers_per)_(layers?|stack)": 2,
    r"num_blocks|max_window_layers": 2,
    r"(moe_)?num_(local_)?experts|n_routed_experts": 4,
    r"num_experts_per_tok(en)?|moe_k|moe_topk|top_k_experts|num_kv_shared_layers|zero_expert_num": 2,
    r"n_group|num_expert_group": 2,
    r"topk_group|moe_num_shared_experts|n_shared_experts|num_shared_experts|first_k_dense_replace|num_dense_layers": 1,
    r"(.*_)?rank": 16,
    r"index_topk(_blocks)?": 4,
    r"(.*_)?(d_state|state_size)|ssm_state_size": 8,
    r"num_buckets|.*_num_buckets": 8,
    r"(mamba_)?n_groups|mamba_ngroups": 1,
    r"num_query_groups": 2,
    r"time_step_rank|mamba_dt_rank|d_rel": 4,
    r"router_hidden_size|ple_embed_dim|altup_.*dim|hidden_size_per_layer_input|laurel_rank": 16,
    r"image_size": 28,
    r"patch_size": 14,
    r"ngram_vocab_size_base": 101,
    r"make_ngram_vocab_size_divisible_by|split_ngram_parts|block_multiple_of|ffn_round_up_to_multiple_of": 4,
    r"(pronunciation|shape)_embed_dim": 16,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}

# Further changes by model type.
_TYPES, _ROPE = ["sliding_attention", "full_attention"], {"rope_type": "default", "rope_theta": 10000.0}
_MAMBA = {"mamba_d_head": 2 * HIDDEN // HEADS}
_ZAMBA = {"attention_hidden_size": 2 * HIDDEN, "attention_head_dim": 2 * HIDDEN // HEADS}
_DOTS = {
    "swa_num_attention_heads": HEADS, "swa_num_key_value_heads": HEADS, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16,
    "swa_head_dim": 2 * HEAD, "swa_qk_nope_head_dim": HEAD, "swa_v_head_dim": HEAD,
}  # fmt: skip
_INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": HEAD}
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "cohere_compass_text": {"layer_types": _TYPES, "rope_parameters": dict.fromkeys(_TYPES, _ROPE)},
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": HIDDEN, "ffn_hidden_size": 96},
    },
    # Windows as wide as the context, as released. Beyond the window, transformers with and without a cache differ:
    # Doge drops keys among equal numbers, and Moshi's forward pass ignores the cache's window.
    "doge": {"keep_window_size": CONTEXT},
    "moshi": {"sliding_window": CONTEXT},
    "dots3_note_text": _DOTS,
    "granitemoehybrid": _MAMBA | {"layer_types": ["linear_attention", "full_attention"]},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},  # stack × H cycles × (L cycles + 1)
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "full_attn_idxs": [1]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"qk_head_dim": 2 * HEAD},
    "mamba2": {"head_dim": 2 * HIDDEN // HEADS},
    "qwen4_exp_text": _INDEXER | {"indexer_budget": 8, "indexer_compress_ratio": 4},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"num_buckets": 4, "axial_pos_embds_dim": (16, 48), "axial_pos_shape": (8, 12)},
    "xmod": {"default_language": "en_XX"},
    "zamba": _ZAMBA,
    "zamba2": _ZAMBA | {"mamba_headdim": 2 * HIDDEN // HEADS},
}
# Types without a small model, and the reason.
NOT_TINY = {
    "gemma3n": "its vision tower needs the packages Pillow and timm; gemma3n_text is the same decoder",
    "gemma4_assistant": "a drafting head that reads another model's keys and values; it decodes nothing alone",
    "musicgen": "transformers registers the whole configuration for a decoder that cannot be built from it",
    "musicgen_melody": "transformers registers the whole configuration for a decoder that cannot be built from it",
}
# Values of sizes without a default.
OPEN = {"head_dim": HEAD, "num_key_value_heads": HEADS}
OPEN |= {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}


@functools.cache
def kinds() -> dict[str, type[PreTrainedConfig]]:
    theirs = (kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING if kind.__module__.startswith("transformers."))
    return {kind.model_type: kind for kind in theirs}


def tiny_config(kind: str, **changes) -> PreTrainedConfig:
    """Return the type's default configuration with smaller sizes. Changes apply to the text configuration."""
    if changes and "text_config" in kinds()[kind].sub_configs:
        changes = {"text_config": changes}
    return shrunk(kinds()[kind], changes)


def shrunk(config_class: type[PreTrainedConfig], special: dict[str, Any]) -> PreTrainedConfig:
    special = SPECIAL.get(config_class.model_type, {}) | special
    default, sizes = config_class(), {}
    for name, value in vars(default).items():
        if name.startswith("_") or name in ("id2label", "label2id", "transformers_version"):
            continue
        if isinstance(value, PreTrainedConfig):
            sizes[name] = shrunk(type(value), special.get(name, {}))
        elif (smaller := _smaller(name, value)) is not value:
            sizes[name] = smaller
    sizes |= _key_value_heads(default)
    sizes |= _kept_layers(default)
    if hasattr(default, "is_decoder"):
        sizes["is_decoder"] = True
    if getattr(default, "tie_word_embeddings", False):
        sizes["tie_word_embeddings"] = False
    special = {name: value for name, value in special.items() if name not in default.sub_configs}
    return config_class(**(sizes | special))


def _smaller(name: str, value: Any) -> Any:
    if value is None:
        return OPEN.get(name)
    if isinstance(value, bool):
        return value
    if name.endswith(("_token_id", "_token_index")) and isinstance(value, int):
        return value if 0 <= value < VOCABULARY else TOKENS.get(name, 3)
    if name.endswith("_token_id") and isinstance(value, list | tuple):
        return TOKENS.get(name, 3)
    if isinstance(value, int):
        return min(value, _size(name) or value)
    if isinstance(value, dict):
        smaller = {key: _smaller(key, inner) if isinstance(key, str) else inner for key, inner in value.items()}
        return smaller if smaller != value else value
    return value


@functools.cache
def _size(name: str) -> int | None:
    return next((size for pattern, size in SIZES.items() if re.fullmatch(pattern, name)), None)


def _key_value_heads(default: PreTrainedConfig) -> dict[str, int]:
    """Return as many key-value heads as heads if the default does, else half as many, or one."""
    found = {}
    for name in ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_global_key_value_heads"):
        heads = vars(default).get(name.replace("key_value", "attention").replace("kv", "attention"))
        if isinstance(count := vars(default).get(name), int):
            found[name] = HEADS if count == heads else min(count, HEADS // 2)
    return found


def _kept_layers(default: PreTrainedConfig) -> dict[str, Any]:
    """Cut lists with one value per layer to the first layers with all values. Return the lists and the new length."""
    for counter in ("num_hidden_layers", "num_layers", "n_layer", "decoder_layers"):
        if isinstance(count := vars(default).get(counter), int) and count > 1:
            break
    else:
        return {}
    lists = {
        name: list(value)
        for name, value in vars(default).items()
        if isinstance(value, list | tuple) and len(value) == count and not name.startswith("_")
    }
    seen: dict[str, int] = {}
    for layer in range(count):
        seen.setdefault(str([values[layer] for values in lists.values()]), layer)
    keep = sorted(seen.values())[:6]
    while len(keep) < 2:
        keep.append(keep[-1] + 1)
    return {counter: len(keep)} | {name: [values[layer] for layer in keep] for name, values in lists.items()}


def tiny(kind: str, noise: float = 0.0, **changes) -> PreTrainedModel:
    """Return a tiny random model in float64, or in float32 if its code cannot compute in float64.

    noise > 0: the same model with disturbed weights, as a draft.
    """
    torch.manual_seed(0)
    config = tiny_config(kind, **changes)
    config._experts_implementation = "eager"  # the grouped kernel has no float64
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in filter(torch.is_floating_point, model.parameters()):
            if parameter.ndim > 1:
                parameter.mul_(10)  # the default scale (0.02) would repeat one token
                parameter.add_(torch.randn_like(parameter), alpha=noise * parameter.std().item())
            else:  # zeros and ones would hide faults
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        model = model.to(torch.float64)
        try:
            greedy_alone(model, PROMPTS[0], 2)
        except RuntimeError:
            model = model.to(torch.float32)
        except Exception:  # transformers fails; the engine tries
            pass
    model.generation_config = GenerationConfig()  # generation defaults are not compared
    return model


@dataclass(frozen=True)
class Finding:
    """The outcome of one model type.

    outcome: "works", "refused", "wrong", "crashes", or "not tiny" without a small model. path: the attention path.
    reason: the error, or the differing rows. longrope: the outcomes with a rope that switches at 16 positions, for rows
    on either side and for rows across; "" if the type has no switching rope.
    """

    kind: str
    outcome: str
    path: str = ""
    reason: str = ""
    longrope: str = ""


def find(kind: str) -> Finding:
    finding = _find(kind, PROMPTS, _generated)
    if finding.outcome != "works" or (rope := switching_rope(tiny(kind))) is None:
        return finding
    beside = [prompt for prompt in PROMPTS if len(prompt) + NEW <= SWITCH or len(prompt) > SWITCH]
    crossing = [prompt for prompt in PROMPTS if len(prompt) <= SWITCH < len(prompt) + NEW - 1]
    # Phi-3 and relatives: `generate` drops the cache of a crossing row and the text before (transformers 5.23).
    ways = (beside, _generated), (crossing, functools.partial(_by_forward, cached=True))
    parts = [_find(kind, prompts, reference, rope_parameters=rope) for prompts, reference in ways]
    longrope = f"{parts[0].outcome}, crossing {parts[1].outcome}"
    reasons = [finding.reason, *(f"longrope: {part.reason}" for part in parts if part.reason)]
    return replace(finding, longrope=longrope, reason="; ".join(dict.fromkeys(filter(None, reasons))))


def switching_rope(model: PreTrainedModel) -> dict[str, Any] | None:
    """Return rope parameters like the model's that switch from short to long factors beyond 16 positions."""
    own = getattr(model.config, "rope_parameters", None)
    sizes = {len(buffer) for name, buffer in model.named_buffers() if name.endswith(".inv_freq")}
    if not isinstance(own, dict) or not isinstance(own.get("rope_type"), str) or len(sizes) != 1:
        return None
    (size,) = sizes
    kept = {name: own[name] for name in ("rope_theta", "partial_rotary_factor", "llama_4_scaling_beta") if name in own}
    if model.config.model_type == "phimoe":
        kept |= {"short_mscale": 1.0, "long_mscale": 1.2}
    factors = {
        "short_factor": [1.0] * size,
        "long_factor": [4.0] * size,
        "factor": CONTEXT / SWITCH,
        "attention_factor": 1.0,
    }
    return kept | factors | {"rope_type": "longrope", "original_max_position_embeddings": SWITCH}


def _find(kind: str, prompts: list[Tensor], reference: Callable, **changes) -> Finding:
    """Decode prompts with drafts of four tokens, per row and without drafts. Compare each row with its reference."""
    try:
        target, draft = (tiny(kind, noise, **changes) for noise in (0.0, 0.1))
    except Exception as error:  # any error of a foreign architecture is the outcome
        return Finding(kind, "not tiny", reason=NOT_TINY.get(kind, said(error)))
    found, finding = decoded(kind, target, ((None, 4), (draft, PerRow(3)), (draft, 4), (None, 0)), prompts)
    if finding.outcome != "works":
        return finding
    alone = [reference(target, prompt) for prompt in prompts]
    if all(texts == alone for texts in found.values()):
        return finding
    ways = [[_by_forward(target, prompt, cached) for prompt in prompts] for cached in (True, False)]
    if all(texts == way for texts in found.values() for way in ways):
        why = "equals the model's forward passes with a cache and without; transformers' generate differs from both"
        return replace(finding, reason=why)
    wrong = [
        f"prompt of {len(prompt)} with draft length {k}"
        for k, texts in found.items()
        for prompt, text, expected in zip(prompts, texts, alone, strict=True)
        if text != expected
    ]
    return replace(finding, outcome="wrong", reason=", ".join(wrong))


def decoded(kind: str, target: PreTrainedModel, ways, prompts: list[Tensor]) -> tuple[dict, Finding]:
    """Return the texts by draft length, decoded with each drafter and draft length, and the outcome."""
    found, path = {}, ""
    for drafter, k in ways:
        options = {"max_new_tokens": NEW, "draft_length": k, "eos_token_id": ()}
        try:
            out = bass.generate(bass.ModelPair(target, drafter), prompts, **options)
        except Exception as error:
            at_once = not found and traceback.extract_tb(error.__traceback__)[-1].filename.startswith(BASS_CORE)
            outcome = "refused" if at_once and type(error) is ValueError else "crashes"
            return found, Finding(kind, outcome, path, said(error))
        path = out.trace.meta["attention"]
        found[k if isinstance(k, int) else "by row"] = [sequence.tolist() for sequence in out.sequences]
    return found, Finding(kind, "works", path)


def _generated(model: PreTrainedModel, prompt: Tensor) -> list[int]:
    return greedy_alone(model, prompt, NEW).tolist()


@torch.inference_mode()
def _by_forward(model: PreTrainedModel, prompt: Tensor, cached: bool) -> list[int]:
    """Return greedy text by forward passes without `generate`, with a growing cache or over the whole text each
    time."""
    ids, fed, cache = prompt[None], 0, DynamicCache(config=model.config) if cached else None
    takes_positions = "position_ids" in forward_names(type(model))
    for _ in range(NEW):
        options = {CACHE: cache}
        if takes_positions:  # as `generate` does; hybrid models count the tokens of a layer without keys
            options["position_ids"] = torch.arange(fed, ids.shape[1])[None]
        logits = model(input_ids=ids[:, fed:], use_cache=cached, **options).logits
        fed = ids.shape[1] if cached else 0
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
    return ids[0, len(prompt) :].tolist()


def said(error: Exception) -> str:
    """Return the error in one line, with the type, except for the engine's ValueError."""
    text = re.sub(r"^prompt \d+: ", "", " ".join(str(error).split()))
    return text if type(error) is ValueError else f"{type(error).__name__}: {text}"


COLUMNS = ("kind", "outcome", "path", "longrope", "reason")


def cells(finding: Finding, columns: Sequence[str] = COLUMNS) -> list[str]:
    return [getattr(finding, name) for name in columns]


def counts(findings: list[Finding]) -> str:
    counts = Counter(finding.outcome for finding in findings)
    outcomes = ", ".join(f"{counts[name]} {name}" for name in ("works", "refused", "wrong", "crashes", "not tiny"))
    return f"transformers {transformers.__version__} registers {len(findings)} kinds: **{outcomes}**."


def summary(findings: list[Finding]) -> str:
    switching = Counter(finding.longrope for finding in findings if finding.longrope).most_common()
    ropes = "; ".join(f"{count} {what}" for what, count in switching)
    reasons = Counter(_group(finding.reason) for finding in findings if finding.outcome == "refused").most_common()
    return (
        f"{counts(findings)}\n\n"
        f"Of {sum(count for _, count in switching)} kinds with a switching rope: {ropes}.\n\n"
        "Reasons of refusals:\n\n" + "\n".join(f"- {reason}: {count}" for reason, count in reasons)
    )


def _group(reason: str) -> str:
    """Return a refusal without the details of the type."""
    if "keeps other state" in reason:
        return "state other than keys and values"
    if "Error" in reason:
        return "an error over a ragged cache, on one attention path or on all"
    return "wrong logits over a ragged cache"
