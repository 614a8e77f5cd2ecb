"""Checks of a target and a draft before they decode together."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bass_core.loading.checkpoints import refuse_mps
from bass_core.model.encoder_decoder import FEATURES
from bass_core.model.transformers_internals import is_offloaded

NOT_IN_LAYERS = ("XLORA", "POLY")  # adapters with computations outside the model


def transformers_model(role: str, model: Any) -> Any:
    """Return the model inside a PEFT model, and other models unchanged. Raises ValueError for unsupported adapters."""
    if isinstance(model, PreTrainedModel) or not hasattr(model, "get_base_model"):
        return model
    config = model.active_peft_config
    kind = getattr(config.peft_type, "value", config.peft_type)
    if config.is_prompt_learning or kind in NOT_IN_LAYERS or getattr(config, "alora_invocation_tokens", None):
        raise ValueError(
            f"{role} is a {type(model).__name__} with a {kind} adapter, which also computes outside the model's layers "
            "and is not supported. Use an adapter such as LoRA, or decode without it: model.get_base_model()"
        )
    return model.get_base_model()


def check_decoder(role: str, model: PreTrainedModel) -> None:
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"{role} must be a transformers model, got {name}")
    if model.config.is_encoder_decoder:
        _check_reads(role, model)
    if not model.can_generate() or model.get_output_embeddings() is None:
        raise ValueError(f"{role} {name} is not a causal language model; load it with AutoModelForCausalLM")
    prepares = vars(model).get("prepare_inputs_for_generation")  # replaced by a PeftModel during `generate`
    if getattr(prepares, "__self__", model) is not model:
        raise ValueError(
            f"{role} {name} gets its inputs from a {type(prepares.__self__).__name__}, whose adapter also computes "
            "outside the model's layers and is not supported; use an adapter such as LoRA"
        )
    if any(is_offloaded(module) for module in model.modules()):
        raise ValueError(f"{role} {name} is offloaded by accelerate; load it whole onto one device: device='cuda:0'")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(f"{role} {name} has parameters on the meta device; load its weights first")
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1:
        raise ValueError(
            f"{role} {name} is on several devices ({', '.join(devices)}); load it onto one: device='cuda:0'"
        )
    refuse_mps(f"the device of {role} {name}", model.device)


def check_same_kind(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Raise ValueError unless the draft model reads the same kind of input as the target model."""
    kinds = {True: "an encoder-decoder model", False: "a decoder-only model"}
    ours, theirs = target.config.is_encoder_decoder, draft.config.is_encoder_decoder
    if ours != theirs or (ours and target.main_input_name != draft.main_input_name):
        raise ValueError(
            f"target {type(target).__name__} is {kinds[ours]} that reads {target.main_input_name}, and draft "
            f"{type(draft).__name__} {kinds[theirs]} that reads {draft.main_input_name}; use a draft of the target's "
            "kind, 'ngram' or 'suffix'"
        )


def _check_reads(role: str, model: PreTrainedModel) -> None:
    """Raise ValueError for an encoder-decoder model with an unsupported kind of source."""
    name, config = type(model).__name__, model.config
    known = model.main_input_name == "input_ids" or (model.main_input_name == FEATURES and "Whisper" in name)
    if not known:
        raise ValueError(f"{role} {name} reads {model.main_input_name}; supported are token ids and Whisper's features")
    if (writes := getattr(config, "decoder_vocab_size", None)) is not None and writes != config.vocab_size:
        raise ValueError(f"{role} {name} has a separate decoder vocabulary, which is not supported")


def check_same_tokens(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
    """Raise ValueError unless the tokenizers agree on every common id, and on the first and last token of a text."""
    theirs = {index: token for token, index in draft.get_vocab().items()}
    for token, index in sorted(target.get_vocab().items(), key=lambda item: item[1]):
        if index in theirs and theirs[index] != token:
            raise ValueError(
                f"the tokenizers differ: id {index} is {token!r} for the target and {theirs[index]!r} for the draft. "
                "Use a draft of the same family, or draft=None (n-gram drafting)"
            )
    for role in ("bos_token", "eos_token"):
        ours, other = getattr(target, role), getattr(draft, role)
        if None not in (ours, other) and ours != other:
            raise ValueError(
                f"the tokenizers differ: {role} is {ours!r} for the target and {other!r} for the draft, which was not "
                "trained to propose this token. If this is intended, load the models separately and combine them: "
                "ModelPair(target, draft, tokenizer)"
            )
