"""The files of a checkpoint -> a model and a tokenizer, checked before memory is taken or a weight is read.

A folder and a name of the hub take exactly the same path: safetensors only, no code from the repository of the model
unless the caller says so, every tensor accounted for and finite.
"""

from __future__ import annotations

import json
import math
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging
from transformers.utils.hub import cached_file, extract_commit_hash

from bass_core.model import transformers_internals as internals

OBSOLETE = {"codegen": re.compile(r"\.attn\.causal_mask$")}  # in checkpoints on the hub; computed nowadays
REPEATS = {  # greatest integer in fields of configs that say how often a list is repeated or a module is made
    re.compile(r"layers?$|^num_blocks$|^attention_types$"): 500,  # no model has more; built within a second
    re.compile(r"^num_labels$"): 100_000,
}
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")  # what is written otherwise is a path
ADAPTER = "adapter_config.json"  # where there is one, and peft, transformers loads what that file names
SHIPPED = ("eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")  # the others may be fetched from the hub
PROBE = " ".join(chr(code) * 64 for code in range(32, 127)) + "é🙂\n\n"  # long runs: where regular expressions give up


def load_model(
    name: str | Path,
    revision: str | None = None,
    quantization_config: Any = None,
    *,
    dtype: str | torch.dtype,
    device: torch.device,
    trust_remote_code: bool,
) -> PreTrainedModel:
    """The language model of a folder, or of that revision on the hub, in evaluation mode; see `load_pair`."""
    check_there(name, revision)
    try:
        with _progress_only_for_people(), torch.device("cpu"):  # whatever the default: a GPU's would ask for accelerate
            config, commit = _checked_config(name, revision, trust_remote_code)
            quantized = quantization_config is not None or bool(getattr(config, "quantization_config", None))
            special: dict[str, Any] = attention_of(config)
            if quantization_config is not None:
                special["quantization_config"] = quantization_config
            if quantized:
                special["device_map"] = {"": device}  # some are packed for the device they are made on
            model, report = _auto_class(config).from_pretrained(
                name,
                config=config,
                revision=commit,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                **special,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name
            )
    except Exception as error:  # whatever the file format or the hub says: one kind of error, with the cause kept
        raise _not_loaded(name, error) from error
    obsolete = OBSOLETE.get(model.config.model_type)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = report.get(kind) or ()
        if obsolete is not None and kind == "unexpected_keys":
            keys = [key for key in keys if not obsolete.search(key)]
        if keys:
            names = ", ".join(map(str, sorted(keys, key=str)[:5]))
            raise ValueError(f"{str(name)!r} has {kind.replace('_keys', '')} tensors: {names}")
    for key, tensor in model.state_dict().items():
        if not all(_is_finite(plain) for plain in plain_tensors(tensor)):
            raise ValueError(f"{str(name)!r} has NaN or infinite values in {key}; the checkpoint is damaged")
    return (model if quantized else model.to(device)).eval()


def _is_finite(tensor: Tensor) -> bool:
    # torch asks this of no float8: those are small enough to be looked at in another dtype.
    wide = tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor
    return bool(wide.isfinite().all())


def _auto_class(config: PreTrainedConfig) -> type:
    """Decoder-only, encoder-decoder, or an encoder-decoder model that hears."""
    if not config.is_encoder_decoder:
        return AutoModelForCausalLM
    return AutoModelForSpeechSeq2Seq if type(config) in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING else AutoModelForSeq2SeqLM


def check_there(name: str | Path, revision: str | None = None) -> None:
    """Raises ValueError for a path that is no folder, and for the revision of a folder, which has none."""
    path = Path(name)
    if path.is_dir():
        if revision is not None:
            raise ValueError(f"{str(name)!r} is a folder, which has no revisions; leave out revision={revision!r}")
    elif path.exists():
        raise ValueError(f"cannot load {str(name)!r}: it is a file; name the folder that has it and its config.json")
    elif isinstance(name, Path) or not HUB_ID.fullmatch(name):
        raise ValueError(f"cannot load {str(name)!r}: no such folder")


def _not_loaded(name: str | Path, error: Exception) -> ValueError:
    if isinstance(error, OSError) and not Path(name).is_dir():  # the hub's, over several lines
        said = " ".join(str(error).split())
        return ValueError(f"cannot load {str(name)!r}: there is no such folder here, and from the hub: {said}")
    return ValueError(f"cannot load {str(name)!r} (safetensors checkpoints only): {error}")


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor, or those that a quantized one is made of."""
    parts = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
    for part in parts:
        yield from plain_tensors(getattr(tensor, part))
    if not parts:
        yield tensor


def attention_of(config: PreTrainedConfig) -> dict[str, str]:
    """What `from_pretrained` and `from_config` have to be told, so that a model computes what its config says."""
    # Gemma 2 caps its scores; sdpa, which transformers 5.17 takes, drops that in silence.
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return {"attn_implementation": "eager"} if capped else {}


def _checked_config(name: str | Path, revision: str | None, trust_remote_code: bool) -> tuple[PreTrainedConfig, str]:
    """The config of a checkpoint and the commit that was read, if its small files bear each other out.

    The headers of the safetensors files say what there is. What a config asks for beyond that, or in words that
    transformers would pass over in silence, is refused before memory is taken or a weight is read.
    """
    if cached_file(name, ADAPTER, revision=revision, _raise_exceptions_for_missing_entries=False):
        raise ValueError(
            f"it holds an adapter ({ADAPTER}); load the model that it is for, and then pair.target.load_adapter(…)"
        )
    written, _ = PreTrainedConfig.get_config_dict(name, revision=revision)
    check_config(written, trust_remote_code)
    tensors, commit = _headers(name, revision, written.get("transformers_weights"))
    config = AutoConfig.from_pretrained(name, revision=commit, trust_remote_code=trust_remote_code)
    quantized = bool(getattr(config, "quantization_config", None))
    held = sum(elements for _, elements in tensors.values())
    most = held * (64 if quantized else 2)  # quantized ones are packed; a few missing ones are named later
    with torch.device("meta"), _bounded(1000 + 16 * len(tensors), 4 * most, 2**26 + 4 * held):
        model = _auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    asked = sum(parameter.numel() for parameter in model.parameters())
    if asked > most:
        raise ValueError(f"config.json describes a model of {asked:,} parameters, and the files hold {held:,}")
    ignored = [*internals.ignored_tensors(model), OBSOLETE.get(config.model_type, r"^$")]
    whole = [key for key, buffer in model.named_buffers() if not buffer.is_floating_point()]
    for key, (dtype, _) in tensors.items():
        known = any(own.endswith(key) or key.endswith(own) for own in whole)  # prefixes come and go
        if not (quantized or known or dtype.startswith(("F", "BF")) or any(re.search(each, key) for each in ignored)):
            raise ValueError(f"{key} is stored as {dtype}; weights are floating-point numbers, or else quantized")
    return config, commit


@contextmanager
def _bounded(modules: int, parameters: int, buffer_bytes: int) -> Iterator[None]:
    """Raise ValueError as soon as this thread has made more modules, parameters before tying, or bytes of buffers."""
    thread, made = threading.get_ident(), Counter()
    most = {"modules": modules, "parameters": parameters, "bytes of buffers": buffer_bytes}

    def count(_module: nn.Module, _name: str, part: nn.Module | Tensor | None) -> None:
        if part is None or threading.get_ident() != thread:
            return
        kind = "modules"
        if isinstance(part, Tensor):
            kind = "parameters" if isinstance(part, nn.Parameter) else "bytes of buffers"
        made[kind] += 1 if kind == "modules" else part.numel() if kind == "parameters" else part.nbytes
        if made[kind] > most[kind]:
            raise ValueError(
                f"config.json describes a model of {made[kind]:,} {kind} or more, and the files justify {most[kind]:,}"
            )

    with ExitStack() as stack:
        for kind in ("module", "parameter", "buffer"):
            hook = getattr(nn.modules.module, f"register_module_{kind}_registration_hook")(count)
            stack.callback(hook.remove)
        yield


def _headers(name: str | Path, revision: str | None, only: str | None) -> tuple[dict[str, tuple[str, int]], str]:
    """Dtype and number of elements of every tensor of a checkpoint, whose files the index or `only` names; commit."""
    optional = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    files = [only or SAFE_WEIGHTS_NAME]
    index = None if only else cached_file(name, SAFE_WEIGHTS_INDEX_NAME, **optional)
    if index and not cached_file(name, SAFE_WEIGHTS_NAME, **optional):
        files = sorted(set(json.loads(Path(index).read_text("utf-8"))["weight_map"].values()))
    tensors = {}
    for file in files:
        if not re.fullmatch(r"[^/\\]+\.safetensors", file):
            raise ValueError(f"it names {file!r} as a file of weights; only *.safetensors beside config.json are read")
        path = cached_file(name, file, revision=revision)
        with safe_open(path, framework="pt") as opened:
            slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
            tensors |= {key: (each.get_dtype(), math.prod(each.get_shape())) for key, each in slices.items()}
    return tensors, extract_commit_hash(path, None) or revision or "main"


def check_config(config: dict[str, Any], trust_remote_code: bool, prefix: str = "") -> None:
    """Raises ValueError naming a field of a config.json that would hang, fetch code or be passed over in silence."""
    for key, value in config.items():
        field = prefix + key
        for repeated, most in REPEATS.items():
            if repeated.search(key) and (asked := max(_integers(value), default=0)) > most:
                raise ValueError(f"config.json asks for {field}={asked}; {most} is the most that is built")
        if key in ("dtype", "torch_dtype") and isinstance(value, str):
            floating(f"{field} in config.json", value)
        if key.endswith("_implementation") and not trust_remote_code:
            for each in value.values() if isinstance(value, dict) else [value]:
                if each not in (None, *SHIPPED):
                    raise ValueError(
                        f"config.json asks for {field}={each!r}, code that may come from the hub; remove it, or allow "
                        "it with trust_remote_code=True"
                    )
        if key == "quantization_config" and value:
            method = value.get("quant_method")
            if method not in internals.QUANTIZATION_METHODS:
                raise ValueError(f"config.json has the unknown {field}.quant_method={method!r}")
        elif isinstance(value, dict) and (key.endswith("_config") or "model_type" in value):
            check_config(value, trust_remote_code, f"{field}.")


def _integers(value: Any) -> Iterator[int]:
    """Yield the integers of a field of a config, which may be nested lists."""
    if isinstance(value, list):
        for each in value:
            yield from _integers(each)
    elif isinstance(value, int):
        yield value


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


def load_tokenizer(name: str | Path, revision: str | None, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer beside a model, tried on a text. Raises ValueError."""
    try:
        with panics_are_errors():
            tokenizer = AutoTokenizer.from_pretrained(
                name, revision=revision or "main", trust_remote_code=trust_remote_code
            )
            tokenizer.decode(tokenizer(PROBE, verbose=False)["input_ids"])
    except Exception as error:
        hint = "without one, ModelPair(target, draft) of models that you hold takes token ids"
        raise ValueError(f"cannot load the tokenizer of {str(name)!r}: {error} ({hint})") from error
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


def floating(field: str, dtype: Any) -> torch.dtype:
    """A dtype of torch by its name. Raises ValueError, saying which field it is of."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"{field} must be a floating-point dtype of torch, such as 'bfloat16'; got {dtype!r}")
    return found


def place(
    device: str | int | torch.device | None, dtype: str | torch.dtype | None
) -> tuple[torch.device, str | torch.dtype]:
    """Return where models go and in which dtype ("auto": their own). None leaves the choice. Raises ValueError."""
    chosen = torch.device("cuda" if torch.cuda.is_available() else "cpu") if device is None else _device(device)
    refuse_mps("device", chosen)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {chosen}, and torch finds no GPU here: leave it out, or device='cpu'")
    if chosen.type == "cuda" and (chosen.index or 0) >= (count := torch.cuda.device_count()):
        raise ValueError(f"device is {chosen}, and torch finds {count} here, from cuda:0 on")
    if dtype is None:
        dtype = "auto" if chosen.type == "cuda" else torch.float32
    return chosen, dtype if dtype == "auto" else floating("dtype", dtype)


def _device(device: Any) -> torch.device:
    try:
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        unnumbered = found.type == "cuda" and found.index is None and torch.cuda.is_available()
        return torch.device("cuda", torch.cuda.current_device()) if unnumbered else found
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be a device such as 'cuda:0', 'cpu' or 0; got {device!r}") from error


def refuse_mps(name: str, device: torch.device) -> None:
    if device.type == "mps":
        raise ValueError(
            f"{name} is mps, which has no float64; verification needs it, or impossible tokens would be drawn now and "
            "then. Use device='cpu'"
        )
