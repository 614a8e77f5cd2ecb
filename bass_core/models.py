"""Names and folders -> a `ModelPair`, checked before anything runs.

The embedded pair, a local folder and a hub model take exactly the same path: safetensors only, no code from the
repository of the model unless the caller says so, every tensor accounted for and finite.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging
from transformers.utils.hub import cached_file, extract_commit_hash

from bass_core.attention import context_length
from bass_core.drafters import NgramDrafter

ASSETS = Path(__file__).parent / "assets"
OBSOLETE = {"codegen": re.compile(r"\.attn\.causal_mask$")}  # in checkpoints on the hub; computed nowadays
DEPTH = re.compile(r"layers?$|^num_blocks$")  # fields of configs that say how many modules are made
DEEPEST = 500  # of them: no model has more, and as many are built within a second
SHIPPED = ("eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")  # the others may be fetched from the hub
PROBE = " ".join(chr(code) * 64 for code in range(32, 127)) + "é🙂\n\n"  # long runs: where regular expressions give up


@dataclass(frozen=True, repr=False)
class ModelPair:
    """A target model, where its drafts come from, and a tokenizer.

    draft: a smaller causal language model, an `NgramDrafter`, or None for n-gram drafting with its defaults.
    tokenizer: needed for text prompts, texts and stop strings. draft_tokenizer: compared with it where given.

    Raises ValueError where the two do not fit: different devices, meta tensors, not a decoder-only language model,
    tokenizers that disagree about an id.
    """

    target: PreTrainedModel
    draft: PreTrainedModel | NgramDrafter | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    draft_tokenizer: PreTrainedTokenizerBase | None = None

    def __post_init__(self):
        _check_decoder("target", self.target)
        if isinstance(self.draft, PreTrainedModel):
            _check_decoder("draft", self.draft)
            if self.draft.device != self.target.device:
                raise ValueError(
                    f"target is on {self.target.device} and draft on {self.draft.device}; move both to one device"
                )
        elif not isinstance(self.draft, NgramDrafter | None):
            raise TypeError(f"draft must be a transformers model, an NgramDrafter or None, got {type(self.draft)}")
        if self.tokenizer is not None and self.draft_tokenizer is not None:
            _check_same_tokens(self.tokenizer, self.draft_tokenizer)

    def __repr__(self) -> str:
        def short(part: object) -> str:
            name = type(part).__name__
            if not isinstance(part, PreTrainedModel):
                return name
            return f"{name} of {part.num_parameters() / 1e6:.3g} M, {str(part.dtype).removeprefix('torch.')}"

        parts = {"target": self.target, "draft": self.draft, "tokenizer": self.tokenizer}
        named = (f"{role}={short(part)}" for role, part in parts.items() if part is not None)
        return f"ModelPair({', '.join(named)}, on {self.device})"

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def models(self) -> list[PreTrainedModel]:
        """The target, and the draft if it is a model."""
        return [model for model in (self.target, self.draft) if isinstance(model, PreTrainedModel)]

    @cached_property
    def contexts(self) -> dict[str, int]:
        """How many positions the target and the draft have, by role; a model that does not say is left out."""
        roles = {"target": self.target, "draft": self.draft}
        limits = {role: context_length(model) for role, model in roles.items() if isinstance(model, PreTrainedModel)}
        return {role: limit for role, limit in limits.items() if limit is not None}

    @property
    def synthetic(self) -> bool:
        """Whether a model has dummy weights (`bass_lab.named_pairs` makes such): what it writes is noise, and every
        result made with it is to say so."""
        return any(has_dummy_weights(model) for model in self.models)


def load_pair(
    target: str | Path | None = None,
    draft: str | Path | NgramDrafter | None = None,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
) -> ModelPair:
    """A pair from the hub or from local folders; without arguments the embedded one (no network).

    target: a folder or an id on the hub. draft: likewise, or an `NgramDrafter`; None: n-gram drafting.
    dtype: a name such as "bfloat16"; None is float32 on a CPU and the checkpoint's own on a GPU. device: None is the
    GPU where there is one. Models come in evaluation mode.

    Raises ValueError for a checkpoint that is not safetensors, has missing, unexpected or non-finite tensors, or needs
    code that `trust_remote_code` does not allow; for a config that its tensors do not bear out, before a model is
    built; for a tokenizer that fails on plain text; and where the models do not fit (`ModelPair`).
    """
    if target is None:
        if draft is not None:
            raise ValueError(f"draft={draft!r} was given without a target; name both, or neither for the embedded pair")
        target, draft = ASSETS / "target", ASSETS / "draft"
    device, dtype = place(device, dtype)
    options = {"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
    by_name = isinstance(draft, str | Path)
    return ModelPair(
        target=_load_model(target, **options),
        draft=_load_model(draft, **options) if by_name else draft,
        tokenizer=_load_tokenizer(target, trust_remote_code),
        draft_tokenizer=_load_tokenizer(draft, trust_remote_code) if by_name else None,
    )


def place(device: str | torch.device | None, dtype: str | torch.dtype | None) -> tuple[torch.device, str | torch.dtype]:
    """Where models go and in which dtype ("auto": their own), unless they are told. Raises ValueError for others."""
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = dtype or ("auto" if device.type == "cuda" else "float32")
    return device, dtype if dtype == "auto" else _floating("dtype", dtype)


def _floating(field: str, dtype: Any) -> torch.dtype:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"{field} must be a floating-point dtype of torch, such as 'bfloat16'; got {dtype!r}")
    return found


def _load_model(
    name: str | Path, dtype: str | torch.dtype, device: torch.device, trust_remote_code: bool
) -> PreTrainedModel:
    try:
        with _progress_only_for_people():
            config, revision = _checked_config(name, trust_remote_code)
            model, report = AutoModelForCausalLM.from_pretrained(
                name,
                config=config,
                revision=revision,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                **attention_of(config),
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name
            )
    except Exception as error:  # whatever the file format or the hub says: one kind of error, with the cause kept
        raise ValueError(f"cannot load {str(name)!r} (safetensors checkpoints only): {error}") from error
    obsolete = OBSOLETE.get(model.config.model_type)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = report.get(kind) or ()
        if obsolete is not None and kind == "unexpected_keys":
            keys = [key for key in keys if not obsolete.search(key)]
        if keys:
            names = ", ".join(map(str, sorted(keys, key=str)[:5]))
            raise ValueError(f"{str(name)!r} has {kind.replace('_keys', '')} tensors: {names}")
    for key, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(f"{str(name)!r} has NaN or infinite values in {key}; the checkpoint is damaged")
    return model.to(device).eval()


def attention_of(config: PreTrainedConfig) -> dict[str, str]:
    """What `from_pretrained` and `from_config` have to be told, so that a model computes what its config says."""
    # Gemma 2 caps its scores; sdpa, which transformers 5.17 takes, drops that in silence.
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return {"attn_implementation": "eager"} if capped else {}


def _checked_config(name: str | Path, trust_remote_code: bool) -> tuple[PreTrainedConfig, str]:
    """The config of a checkpoint and the revision that was read, if its small files bear each other out.

    The headers of the safetensors files say what there is. What a config asks for beyond that, or in words that
    transformers would pass over in silence, is refused before memory is taken or a weight is read.
    """
    written, _ = PreTrainedConfig.get_config_dict(name)
    check_config(written, trust_remote_code)
    tensors, revision = _headers(name, written.get("transformers_weights"))
    config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    quantized = bool(getattr(config, "quantization_config", None))
    asked = sum(parameter.numel() for parameter in model.parameters())
    held = sum(elements for _, elements in tensors.values())
    if asked > held * (64 if quantized else 2):  # quantized ones are packed; a few missing ones are named later
        raise ValueError(f"config.json describes a model of {asked:,} parameters, and the files hold {held:,}")
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), OBSOLETE.get(config.model_type, r"^$")]
    whole = [key for key, buffer in model.named_buffers() if not buffer.is_floating_point()]
    for key, (dtype, _) in tensors.items():
        known = any(own.endswith(key) or key.endswith(own) for own in whole)  # prefixes come and go
        if not (quantized or known or dtype.startswith(("F", "BF")) or any(re.search(each, key) for each in ignored)):
            raise ValueError(f"{key} is stored as {dtype}; weights are floating-point numbers, or else quantized")
    return config, revision


def _headers(name: str | Path, only: str | None) -> tuple[dict[str, tuple[str, int]], str]:
    """Dtype and number of elements of every tensor of a checkpoint, whose files the index or `only` names; revision."""
    files = [only or SAFE_WEIGHTS_NAME]
    index = None if only else cached_file(name, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
    if index and not cached_file(name, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False):
        files = sorted(set(json.loads(Path(index).read_text("utf-8"))["weight_map"].values()))
    tensors = {}
    for file in files:
        if not re.fullmatch(r"[^/\\]+\.safetensors", file):
            raise ValueError(f"it names {file!r} as a file of weights; only *.safetensors beside config.json are read")
        path = cached_file(name, file)
        with safe_open(path, framework="pt") as opened:
            slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
            tensors |= {key: (each.get_dtype(), math.prod(each.get_shape())) for key, each in slices.items()}
    return tensors, extract_commit_hash(path, None) or "main"


def check_config(config: dict[str, Any], trust_remote_code: bool, prefix: str = "") -> None:
    """Raises ValueError naming a field of a config.json that would hang, fetch code or be passed over in silence."""
    for key, value in config.items():
        field = prefix + key
        if DEPTH.search(key) and isinstance(value, int) and value > DEEPEST:
            raise ValueError(f"config.json asks for {field}={value}; {DEEPEST} is the most that is built")
        if key in ("dtype", "torch_dtype") and isinstance(value, str):
            _floating(f"{field} in config.json", value)
        if key.endswith("_implementation") and not trust_remote_code:
            for each in value.values() if isinstance(value, dict) else [value]:
                if each not in (None, *SHIPPED):
                    raise ValueError(
                        f"config.json asks for {field}={each!r}, code that may come from the hub; remove it, or allow "
                        "it with trust_remote_code=True"
                    )
        if key == "quantization_config" and value:
            method = value.get("quant_method")  # bitsandbytes goes by two names
            if method not in (*AUTO_QUANTIZATION_CONFIG_MAPPING, "bitsandbytes"):
                raise ValueError(f"config.json has the unknown {field}.quant_method={method!r}")
        elif key.endswith("_config") and isinstance(value, dict):
            check_config(value, trust_remote_code, f"{field}.")


@contextmanager
def _progress_only_for_people() -> Iterator[None]:
    """transformers' progress bars in a terminal; none in notebooks' pages, logs and pipes."""
    shown = logging.is_progress_bar_enabled()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _load_tokenizer(name: str | Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    try:
        with panics_are_errors():
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
            tokenizer.decode(tokenizer(PROBE, verbose=False)["input_ids"])
    except Exception as error:
        raise ValueError(f"cannot load the tokenizer of {str(name)!r}: {error}") from error
    return tokenizer


@contextmanager
def panics_are_errors() -> Iterator[None]:
    """A tokenizer's panic, such as of a regular expression that gives up on a text, is a ValueError: by itself it is
    no Exception, and passes through whatever catches those."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3 has no name for it that can be imported
            raise
        raise ValueError(f"the tokenizer failed on a text: {error}") from error


def _check_decoder(role: str, model: PreTrainedModel) -> None:
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"{role} must be a transformers model, got {name}")
    if model.config.is_encoder_decoder:
        raise ValueError(f"{role} {name} is an encoder-decoder model; decoder-only models are supported")
    if not model.can_generate() or model.get_output_embeddings() is None:
        raise ValueError(f"{role} {name} is not a causal language model; load it with AutoModelForCausalLM")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(f"{role} {name} has parameters on the meta device; load its weights first")


def _check_same_tokens(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
    """Every id that both tokenizers know must be the same token, also as the first and the last of a text; sizes
    alone prove nothing."""
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
                f"the tokenizers differ: {role} is {ours!r} for the target and {other!r} for the draft, which never "
                "learnt what it is to propose there. If that is meant, load the models apart and join them: "
                "ModelPair(target, draft, tokenizer)"
            )


def fingerprints(pair: ModelPair) -> dict[str, str]:
    """What tells the pair's models apart from others, wherever they were loaded from, under "target" and "draft"."""
    return {"target": fingerprint(pair.target), "draft": fingerprint(pair.draft or NgramDrafter())}


def fingerprint(model: PreTrainedModel | NgramDrafter) -> str:
    """What tells a model apart: names, shapes and the first 64 values of all tensors."""
    if isinstance(model, NgramDrafter):
        return f"n-gram {model.longest}-{model.shortest}"
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1)[:64].float().cpu().numpy().tobytes())
    return f"{type(model).__name__} {str(model.dtype).removeprefix('torch.')} {digest.hexdigest()[:12]}"


def has_dummy_weights(model: PreTrainedModel) -> bool:
    """Whether the model's config is marked so, by who made it or in the folder it was loaded from."""
    return getattr(model.config, "dummy_weights", False)
