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
from bass_core.loading.checkpoints import check_there, floating, load_model, load_tokenizer, plain_tensors
from bass_core.loading.quantization import KINDS, SELF_DRAFTS, kind_of, kind_of_copy, parameter_count, quantized
from bass_core.model.architectures import context_length, has_short_convolutions
from bass_core.model.encoder_decoder import FEATURES
from bass_core.model.transformers_internals import is_offloaded

ASSETS = Path(__file__).parents[1] / "assets"
READER = "encoder_decoder"  # the embedded pair of that kind
ROLES = ("target", "draft")
HOST = torch.device("cpu")
SPREAD = ("auto", "balanced", "balanced_low_0", "sequential")  # a device_map of all devices there are
NOT_IN_LAYERS = ("XLORA", "POLY")  # adapters of which a PeftModel computes something around the model


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
            object.__setattr__(self, role, _transformers_model(role, getattr(self, role)))
        _check_decoder("target", self.target)
        if not isinstance(self.draft, PreTrainedModel | Drafter | None):
            is_tokenizer = isinstance(self.draft, PreTrainedTokenizerBase)
            named = "; name the tokenizer: ModelPair(model, tokenizer=tokenizer)" if is_tokenizer else ""
            raise TypeError(f"draft must be a transformers model, a Drafter or None, got {type(self.draft)}{named}")
        if isinstance(self.draft, FeatureHead):
            raise ValueError("draft is a feature head, which reads a target's hidden states: FeatureDrafter(head)")
        for model in self.drafter.models:
            _check_decoder("draft", model)
            _check_same_kind(self.target, model)
            if model.device != self.target.device:
                raise ValueError(
                    f"target is on {self.target.device} and draft on {model.device}; move both to one device"
                )
        if self.reads_sources and self.drafter.wants_hidden:
            raise ValueError(f"a {type(self.drafter).__name__} is for decoder-only targets")
        if self.tokenizer is not None and self.draft_tokenizer is not None:
            _check_same_tokens(self.tokenizer, self.draft_tokenizer)

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
    torch_dtype: str | torch.dtype | None = None,
    device: str | int | torch.device | None = None,
    device_map: str | int | torch.device | dict[str, Any] | None = None,
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
    dtype: a name such as "bfloat16"; None is float32 on a CPU and the checkpoint's own ("auto") on a GPU. torch_dtype:
        its older name.
    device: None is the GPU where there is one. device_map: the same in transformers' words, for one device: "cuda:0",
        0, {"": 0}; "auto" is that one device where there are not several GPUs to spread over.
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
    device, dtype = place(device, dtype, device_map, torch_dtype)
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


def place(
    device: str | int | torch.device | None,
    dtype: str | torch.dtype | None,
    device_map: str | int | torch.device | dict[str, Any] | None = None,
    torch_dtype: str | torch.dtype | None = None,
) -> tuple[torch.device, str | torch.dtype]:
    """Where models go and in which dtype ("auto": their own), unless they are told. Raises ValueError for others."""
    told = {"device": None if device is None else _device("device", device), "device_map": _device_of(device_map)}
    chosen = _agreed(told) or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _refuse_mps("device", chosen)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {chosen}, and torch finds no GPU here: leave it out, or device='cpu'")
    if chosen.type == "cuda" and (chosen.index or 0) >= (count := torch.cuda.device_count()):
        raise ValueError(f"device is {chosen}, and torch finds {count} here, from cuda:0 on")
    given = {"dtype": dtype, "torch_dtype": torch_dtype}
    dtypes = {name: each if each in (None, "auto") else floating(name, each) for name, each in given.items()}
    return chosen, _agreed(dtypes) or ("auto" if chosen.type == "cuda" else torch.float32)


def _agreed(values: dict[str, Any]) -> Any:
    """What two names for one thing say, None where neither says anything. Raises ValueError where they differ."""
    found = {name: value for name, value in values.items() if value is not None}
    if len(set(found.values())) > 1:
        said = " and ".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in found.items())
        raise ValueError(f"{said} name the same thing and differ; give one of them")
    return next(iter(found.values()), None)


def _device(name: str, device: Any) -> torch.device:
    try:
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        unnumbered = found.type == "cuda" and found.index is None and torch.cuda.is_available()
        return torch.device("cuda", torch.cuda.current_device()) if unnumbered else found
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{name} must be a device such as 'cuda:0', 'cpu' or 0; got {device!r}") from error


def _device_of(device_map: Any) -> torch.device | None:
    """The one device of a `device_map` of transformers'; None where it leaves the choice. Raises ValueError for more
    than one device, and for weights that would stay elsewhere."""
    if device_map is None:
        return None
    one = "write device_map='cuda:0', or whichever device holds both models"
    if device_map in SPREAD:
        if (count := torch.cuda.device_count()) > 1:
            raise ValueError(
                f"device_map={device_map!r} spreads a model over {count} GPUs, and a pair is on one: {one}"
            )
        return None
    places = list(device_map.values()) if isinstance(device_map, dict) else [device_map]
    devices = {_device("device_map", place) for place in places if place != "disk"}
    if "disk" in places or len({device.type for device in devices}) > 1:
        raise ValueError(
            f"device_map={device_map!r} offloads weights, which every step would wait for; a pair is on one device: "
            f"{one}, with a smaller dtype or a quantization_config where they do not fit"
        )
    if len(devices) != 1:
        raise ValueError(f"device_map={device_map!r} names {len(devices)} devices, and a pair is on one: {one}")
    return devices.pop()


def _refuse_mps(name: str, device: torch.device) -> None:
    if device.type == "mps":
        raise ValueError(
            f"{name} is mps, which has no float64; verification needs it, or impossible tokens would be drawn now and "
            "then. Use device='cpu'"
        )


def _transformers_model(role: str, model: Any) -> Any:
    """The model within a PEFT model, whose layers hold the adapter; others as they are."""
    if isinstance(model, PreTrainedModel) or not hasattr(model, "get_base_model"):
        return model
    config = model.active_peft_config
    kind = getattr(config.peft_type, "value", config.peft_type)
    if config.is_prompt_learning or kind in NOT_IN_LAYERS or getattr(config, "alora_invocation_tokens", None):
        raise ValueError(
            f"{role} is a {type(model).__name__} with a {kind} adapter, which is not in the model's layers alone and "
            "cannot be decoded. Adapters such as LoRA can, or the model without: model.get_base_model()"
        )
    return model.get_base_model()


def _check_decoder(role: str, model: PreTrainedModel) -> None:
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"{role} must be a transformers model, got {name}")
    if model.config.is_encoder_decoder:
        _check_reads(role, model)
    if not model.can_generate() or model.get_output_embeddings() is None:
        raise ValueError(f"{role} {name} is not a causal language model; load it with AutoModelForCausalLM")
    prepares = vars(model).get("prepare_inputs_for_generation")  # a PeftModel's, while it generates
    if getattr(prepares, "__self__", model) is not model:
        raise ValueError(
            f"{role} {name} gets its inputs from a {type(prepares.__self__).__name__}, whose adapter is not in the "
            "model's layers alone and cannot be decoded; adapters such as LoRA can"
        )
    if any(is_offloaded(module) for module in model.modules()):
        raise ValueError(
            f"{role} {name} is offloaded by accelerate; load it whole onto one device: device_map='cuda:0'"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(f"{role} {name} has parameters on the meta device; load its weights first")
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1:
        raise ValueError(
            f"{role} {name} is on several devices ({', '.join(devices)}); load it onto one: device_map='cuda:0'"
        )
    _refuse_mps(f"the device of {role} {name}", model.device)


def _check_same_kind(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Raises ValueError unless the draft reads what the target reads."""
    kinds = {True: "an encoder-decoder model", False: "a decoder-only model"}
    ours, theirs = target.config.is_encoder_decoder, draft.config.is_encoder_decoder
    if ours != theirs or (ours and target.main_input_name != draft.main_input_name):
        raise ValueError(
            f"target {type(target).__name__} is {kinds[ours]} that reads {target.main_input_name}, and draft "
            f"{type(draft).__name__} {kinds[theirs]} that reads {draft.main_input_name}: take a draft of the target's "
            "kind, 'ngram' or 'suffix'"
        )


def _check_reads(role: str, model: PreTrainedModel) -> None:
    """Raises ValueError for an encoder-decoder model whose sources are of a kind that is not known."""
    name, config = type(model).__name__, model.config
    known = model.main_input_name == "input_ids" or (model.main_input_name == FEATURES and "Whisper" in name)
    if not known:
        raise ValueError(f"{role} {name} reads {model.main_input_name}; sources are token ids, or what Whisper hears")
    if (writes := getattr(config, "decoder_vocab_size", None)) is not None and writes != config.vocab_size:
        raise ValueError(f"{role} {name} reads in one vocabulary and writes in another, which is not supported")


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
