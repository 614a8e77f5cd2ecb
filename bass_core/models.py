"""Names and folders -> a `ModelPair`, checked before anything runs.

The embedded pair, a local folder and a hub model take exactly the same path: safetensors only, no code from the
repository of the model unless the caller says so, every tensor accounted for and finite.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from bass_core.attention import context_length
from bass_core.drafters import NgramDrafter

ASSETS = Path(__file__).parent / "assets"
OBSOLETE = {"codegen": re.compile(r"\.attn\.causal_mask$")}  # in checkpoints on the hub; computed nowadays


@dataclass(frozen=True)
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
    code that `trust_remote_code` does not allow; and where the models do not fit (`ModelPair`).
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
    """Where models go and in which dtype ("auto": their own), unless they are told."""
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return device, dtype or ("auto" if device.type == "cuda" else "float32")


def _load_model(
    name: str | Path, dtype: str | torch.dtype, device: torch.device, trust_remote_code: bool
) -> PreTrainedModel:
    try:
        with _progress_only_for_people():
            model, report = AutoModelForCausalLM.from_pretrained(
                name,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
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
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise ValueError(f"cannot load the tokenizer of {str(name)!r}: {error}") from error


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
    """Every id that both tokenizers know must be the same token; sizes alone prove nothing."""
    theirs = {index: token for token, index in draft.get_vocab().items()}
    for token, index in sorted(target.get_vocab().items(), key=lambda item: item[1]):
        if index in theirs and theirs[index] != token:
            raise ValueError(
                f"the tokenizers differ: id {index} is {token!r} for the target and {theirs[index]!r} for the draft. "
                "Use a draft of the same family, or draft=None (n-gram drafting)"
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
