"""Names and folders -> a `ModelPair`, and what two models have to be to decode together."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bass_core import drafters
from bass_core.drafters import Drafter, FeatureDrafter, FeatureHead, ModelDrafter, NgramDrafter
from bass_core.loading.checkpoints import check_there, load_model, load_tokenizer, place, plain_tensors
from bass_core.loading.compatibility import check_decoder, check_same_kind, check_same_tokens, transformers_model
from bass_core.loading.quantization import KINDS, SELF_DRAFTS, kind_of, kind_of_copy, parameter_count, quantized
from bass_core.model.architectures import context_length, has_short_convolutions

ASSETS = Path(__file__).parents[1] / "assets"
READER = "encoder_decoder"  # the embedded pair of that kind
ROLES = ("target", "draft")
HOST = torch.device("cpu")


@dataclass(frozen=True, repr=False)
class ModelPair:
    """A target model, where its drafts come from, and a tokenizer.

    draft: a smaller causal language model, any `Drafter`, or None for n-gram drafting with its defaults.
    tokenizer: needed for text prompts, texts and stop strings. draft_tokenizer: compared with it where given.
    A `PeftModel` of the package peft stands for the transformers model in it, with the adapter in that one's layers.

    Raises ValueError where the two do not fit: different devices, several, offloaded weights, meta tensors, not a
    decoder-only language model, tokenizers that disagree about an id.
    """

    target: PreTrainedModel
    draft: PreTrainedModel | Drafter | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    draft_tokenizer: PreTrainedTokenizerBase | None = None

    def __post_init__(self):
        for role in ROLES:
            object.__setattr__(self, role, transformers_model(role, getattr(self, role)))
        check_decoder("target", self.target)
        if not isinstance(self.draft, PreTrainedModel | Drafter | None):
            is_tokenizer = isinstance(self.draft, PreTrainedTokenizerBase)
            named = "; name the tokenizer: ModelPair(model, tokenizer=tokenizer)" if is_tokenizer else ""
            raise TypeError(f"draft must be a transformers model, a Drafter or None, got {type(self.draft)}{named}")
        if isinstance(self.draft, FeatureHead):
            raise ValueError("draft is a feature head, which reads a target's hidden states: FeatureDrafter(head)")
        for model in self.drafter.models:
            check_decoder("draft", model)
            check_same_kind(self.target, model)
            if model.device != self.target.device:
                raise ValueError(
                    f"target is on {self.target.device} and draft on {model.device}; move both to one device"
                )
        if self.reads_sources and self.drafter.wants_hidden:
            raise ValueError(f"a {type(self.drafter).__name__} is for decoder-only targets")
        if self.tokenizer is not None and self.draft_tokenizer is not None:
            check_same_tokens(self.tokenizer, self.draft_tokenizer)

    def __repr__(self) -> str:
        def short(part: object) -> str:
            name = type(part).__name__
            if not isinstance(part, PreTrainedModel):
                return name
            weights = f", {kind} weights" if (kind := kind_of(part)) else ""
            return f"{name} of {parameter_count(part) / 1e6:.3g} M, {str(part.dtype).removeprefix('torch.')}{weights}"

        parts = {"target": self.target, "draft": self.draft, "tokenizer": self.tokenizer}
        named = (f"{role}={short(part)}" for role, part in parts.items() if part is not None)
        return f"ModelPair({', '.join(named)}, on {self.device})"

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def reads_sources(self) -> bool:
        """Whether the target is an encoder-decoder model: its rows read a source, and write a text of it."""
        return self.target.config.is_encoder_decoder

    @cached_property
    def launched_because(self) -> list[str]:
        """Why passes of these models are launched operation by operation; empty where they need not be."""
        reasons = {
            "an encoder-decoder model's passes go by the lengths of its sources, known to the host alone": (
                self.reads_sources
            ),
            "short convolutions have not been recorded yet": any(map(has_short_convolutions, self.models)),
        }
        return [reason for reason, holds in reasons.items() if holds]

    @cached_property
    def drafter(self) -> Drafter:
        """What drafts."""
        if self.draft is None:
            return NgramDrafter()
        return ModelDrafter(self.draft) if isinstance(self.draft, PreTrainedModel) else self.draft

    @property
    def models(self) -> list[PreTrainedModel]:
        """The target, and those that draft."""
        return [self.target, *self.drafter.models]

    @cached_property
    def contexts(self) -> dict[str, int]:
        """How many positions the target and the draft have, by role; a model that does not say is left out."""
        limits = dict(zip(ROLES, map(context_length, self.models), strict=False))
        return {role: limit for role, limit in limits.items() if limit is not None}

    def quantized(self, kind: str | dict[str, str]) -> ModelPair:
        """The pair with its models' linear layers in "int8" or "int4" (`quantized`); this one stays as it is.

        kind: of the target and, where a model drafts, of the draft; or by role, such as {"draft": "int4"}. What a
        quantized draft proposes changes no law; a quantized target is another distribution (`bass_lab.distance`).

        Raises ValueError for other kinds and roles, and for models that cannot be quantized.
        """
        return replace(self, **_quantized({role: getattr(self, role) for role in ROLES}, kind, self.device))

    @property
    def synthetic(self) -> bool:
        """Whether a model has dummy weights (`bass_lab.named_pairs` makes such): what it writes is noise, and every
        result made with it is to say so."""
        return any(has_dummy_weights(model) for model in self.models)


def load_pair(
    target: str | Path | None = None,
    draft: str | Path | Drafter | None = None,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | int | torch.device | None = None,
    quantization_config: Any = None,
    quantize: str | dict[str, str] | None = None,
    revision: str | None = None,
    draft_revision: str | None = None,
    trust_remote_code: bool = False,
) -> ModelPair:
    """A pair from the hub or from local folders; without arguments the embedded one (no network).

    target: a folder or an id on the hub; None: the embedded one; "encoder_decoder": the embedded one that reads a
        function's docstring and writes the function, with its draft.
    draft: a folder or an id of a model or of a `FeatureHead`; "ngram" or "suffix";
        "target:int8" or "target:int4", the target's own copy with such weights; any `Drafter`; for the embedded target
        also "middle_draft", "deep_draft", "unaligned_draft" and "feature_head". None: n-gram drafting, and for the
        embedded target its own draft.
    dtype: a name such as "bfloat16"; None is float32 on a CPU and the checkpoint's own ("auto") on a GPU.
    device: None is the GPU where there is one.
    quantize: "int8" or "int4" linear layers of both models, or by role (`ModelPair.quantized`). Full weights are read
        into the host's memory, and the device gets their codes.
    quantization_config: transformers' own, such as `TorchAoConfig`, for the target; the draft, which is small and runs
        more often, stays as its files have it. Checkpoints that are quantized already need none.
    revision, draft_revision: branch, tag or commit on the hub, of the model and its tokenizer; None is "main".

    Models come in evaluation mode. docs/SUPPORT.md has what works and what does not.

    Raises ValueError for a folder that is not there; for a checkpoint that is not safetensors, has missing, unexpected
    or non-finite tensors, or needs code that `trust_remote_code` does not allow; for a config that its tensors do not
    bear out, before a model is built; for several devices, offloaded weights, and MPS; for a tokenizer that fails on
    plain text; and where the models do not fit (`ModelPair`).
    """
    for held in (target, draft):
        if isinstance(held, torch.nn.Module):
            raise TypeError(
                f"load_pair takes names and folders, got {type(held).__name__}; for models that you hold write "
                "ModelPair(target, draft, tokenizer=tokenizer)"
            )
    if quantize is not None:
        _check_quantize(quantize, quantization_config, draft)
    draft = drafters.named(draft) or draft
    if target == READER:
        target, draft = ASSETS / READER / "target", draft or ASSETS / READER / "draft"
    if target is None:
        target, draft = ASSETS / "target", embedded_draft(draft)
    by_name = isinstance(draft, str | Path)
    if draft_revision is not None and not by_name:
        raise ValueError(f"draft_revision={draft_revision!r} is of a draft on the hub; got draft={draft!r}")
    device, dtype = place(device, dtype)
    kinds = {} if quantize is None else _kinds_for(quantize, draft)
    at = {role: HOST if role in kinds else device for role in ROLES}  # the device need not hold full ones, only codes
    options = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    own_copy = kind_of_copy(draft)
    check_there(target, revision)
    small = load_draft(draft, draft_revision, **options, device=at["draft"]) if by_name and not own_copy else draft
    reads = by_name and isinstance(small, PreTrainedModel)
    model = load_model(target, revision, quantization_config, **options, device=at["target"])
    models = {"target": model, "draft": quantized(model, own_copy, device) if own_copy else small}
    if kinds:
        models |= _quantized(models, quantize, device)
        if by_name and isinstance(small, Drafter):  # a feature head, which stays full
            for each in small.models:
                each.to(device)
    return ModelPair(
        **models,
        tokenizer=load_tokenizer(target, revision, trust_remote_code),
        draft_tokenizer=load_tokenizer(draft, draft_revision, trust_remote_code) if reads else None,
    )


def _quantized(models: dict[str, Any], kind: str | dict[str, str], device: torch.device) -> dict[str, PreTrainedModel]:
    """Those of the models, by role, that the kind quantizes, on the device. Raises as `ModelPair.quantized`."""
    return {role: quantized(models[role], each, device) for role, each in _kinds_for(kind, models["draft"]).items()}


def _kinds_for(kind: str | dict[str, str], draft: object) -> dict[str, str]:
    """What is quantized how, by role: the draft where it is a model, or a name that may be one's. Raises ValueError."""
    kinds = _kinds(kind)
    if isinstance(draft, PreTrainedModel | str | Path):
        return kinds
    if not isinstance(kind, str) and "draft" in kinds:
        name = "NgramDrafter" if draft is None else type(draft).__name__
        raise ValueError(f"quantize names the draft, and what drafts is a {name}")
    return {role: each for role, each in kinds.items() if role != "draft"}


def _kinds(quantize: Any) -> dict[str, str]:
    """What is quantized how, by role. Raises ValueError."""
    kinds = dict.fromkeys(ROLES, quantize) if isinstance(quantize, str) else quantize
    known = isinstance(kinds, dict) and kinds and all(role in ROLES for role in kinds)
    if not known or not all(kind in tuple(KINDS) for kind in kinds.values()):
        raise ValueError(
            f"quantize must be one of {', '.join(KINDS)}, or by role: {{'draft': 'int4', 'target': 'int8'}}; got "
            f"{quantize!r}"
        )
    return kinds


def _check_quantize(quantize: Any, quantization_config: Any, draft: object) -> None:
    """Raises ValueError, before anything is read, where a model would be quantized twice."""
    kinds = _kinds(quantize)
    if quantization_config is not None and "target" in kinds:
        raise ValueError("quantize and quantization_config both say how the target is quantized; give one of them")
    if kind_of_copy(draft) and "draft" in kinds:
        raise ValueError(f"draft={draft!r} is quantized already; quantize={{'target': …}} is for the target alone")


def load_draft(
    name: str | Path,
    revision: str | None = None,
    *,
    dtype: str | torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
) -> PreTrainedModel | Drafter:
    """What drafts, alone: one of the drafters' names, or the model or feature head of a folder or an id on the hub.
    Raises as `load_pair`."""
    if (drafter := drafters.named(name)) is not None:
        return drafter
    model = load_model(name, revision, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    return FeatureDrafter(model) if isinstance(model, FeatureHead) else model


def embedded_draft(draft: str | Path | Drafter | None) -> str | Path | Drafter:
    """What drafts for the embedded target. Raises ValueError for what is not embedded, no folder and no drafter."""
    known = sorted(folder.parent.name for folder in ASSETS.glob("*/config.json") if folder.parent.name != "target")
    if draft is None or draft in known:
        return ASSETS / (draft or "draft")
    if isinstance(draft, Drafter) or drafters.named(draft) or kind_of_copy(draft) or Path(draft).is_dir():
        return draft
    raise ValueError(
        f"draft={str(draft)!r} was given without a target; name both. The embedded target takes {', '.join(known)}, "
        f"{drafters.NAMES}, {', '.join(SELF_DRAFTS)}, a folder or a Drafter"
    )


def fingerprints(pair: ModelPair) -> dict[str, str]:
    """What tells the pair's models apart from others, wherever they were loaded from, under "target" and "draft"."""
    draft = pair.drafter if pair.draft is None else pair.draft
    return {"target": fingerprint(pair.target), "draft": fingerprint(draft)}


def fingerprint(model: PreTrainedModel | Drafter) -> str:
    """What tells a model apart: names, shapes and the first 64 values of all tensors; of a drafter its settings."""
    if isinstance(model, Drafter):
        settings = [f"{name}={value}" for name, value in vars(model).items() if isinstance(value, int | float | str)]
        inside = [value for value in vars(model).values() if isinstance(value, PreTrainedModel | Drafter)]
        return " ".join([type(model).__name__, *settings, *map(fingerprint, (*inside, *model.models))])
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        for plain in plain_tensors(tensor):
            digest.update(plain.reshape(-1)[:64].float().cpu().numpy().tobytes())
    return f"{type(model).__name__} {str(model.dtype).removeprefix('torch.')} {digest.hexdigest()[:12]}"


def has_dummy_weights(model: PreTrainedModel) -> bool:
    """Whether the model's config is marked so, by who made it or in the folder it was loaded from."""
    return getattr(model.config, "dummy_weights", False)
