"""`bass doctor`: report the installation, the devices, and the attention paths of a pair of models.

All facts are measured: dtypes with a matrix product, attention paths with the engine's probe, cache sizes with a
forward pass.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from transformers import PreTrainedModel

from bass_core.drafters import Setting
from bass_core.loading.measured_costs import policy_for
from bass_core.loading.model_pair import ModelPair
from bass_core.loading.quantization import kind_of, parameter_count
from bass_core.model import attention, probe
from bass_core.model.architectures import context_length
from bass_core.model.encoder_decoder import made_up
from bass_core.model.recurrent import explained
from bass_core.model.runner import Runner
from bass_core.policies.goodput import Goodput
from bass_lab.named_pairs import named_pair
from bass_lab.pairs import name_of
from bass_lab.provenance import describe_environment

DTYPES = ("float32", "bfloat16", "float16", "float64")
OPTIONAL = {  # package: the feature that needs the package
    "triton": "Triton kernels (attention 'ragged')",
    "plotly": "figures (bass_lab.show.plots, the lessons)",
    "ipywidgets": "live controls (bass_lab.lessons.l00_figures)",
    "nbconvert": "pages (`make docs`, the end of `bass demo`)",
    "papermill": "lessons run from a shell with parameters of your own",
}


def diagnose(
    target: str | Path | None = None,
    draft: str | Path | None = None,
    *,
    dtype: str | None = None,
    device: str | None = None,
    quantize: str | dict[str, str] | None = None,
) -> dict:
    """Return a description of this installation and a pair (None: the embedded pair) as JSON values.

    Keys: the keys of `describe_environment`; cuda: torch's CUDA version; devices; packages (None: not installed);
    target and draft (None: no model); drafter; tokenizers; draft_length: the default policy; problem: the reason why
    the pair cannot be used, or None.
    """
    environment = describe_environment()
    document = environment | {"cuda": torch.version.cuda, "devices": _devices(environment["device"])}
    document |= {"packages": _packages()}
    unknown = ("target", "draft", "drafter", "tokenizers", "draft_length", "problem")
    document |= dict.fromkeys(unknown)
    try:
        pair = named_pair(target, draft, dtype=dtype, device=device, quantize=quantize)
        models = {"target": pair.target, "draft": pair.draft}
        models = {role: model for role, model in models.items() if isinstance(model, PreTrainedModel)}
        document |= {role: _describe(model) for role, model in models.items()}
        document["drafter"] = None if "draft" in models else name_of(pair.draft)
        document["tokenizers"] = _tokenizers(pair)
        document["draft_length"] = repr(policy_for(pair, None))
        paths = [probe.resolve(model) for model in pair.models]  # raises for a model without an attention path
        vocabulary = pair.target.config.get_text_config().vocab_size
        pair.drafter.begin(Setting(pair.target, paths, 1, vocabulary))  # raises for a drafter that does not fit
    except (ValueError, MemoryError, torch.OutOfMemoryError) as error:
        document["problem"] = _one_line(error)
    return document


def report(document: dict) -> dict[str, dict[str, str]]:
    """Return the findings of `diagnose` as text: section -> name -> fact."""
    versions = {name: document[name] or "unknown" for name in ("python", "torch", "transformers", "bass", "commit")}
    packages = {
        name: found or f"not installed; needed for {OPTIONAL[name]}" for name, found in document["packages"].items()
    }
    devices = {"processor": f"{document['cores']} cores, torch uses {document['threads']} threads"}
    devices |= {name: _device_line(device) for name, device in document["devices"].items()}
    if len(document["devices"]) == 1:
        built = f"for CUDA {document['cuda']}" if document["cuda"] else "without CUDA"
        devices["gpu"] = f"none found; this torch is built {built}"
    found = {"versions": versions, "devices": devices, "optional packages": packages}
    found |= {role: _model_facts(document[role]) for role in ("target", "draft") if document[role] is not None}
    return found if document["tokenizers"] is None else found | {"pair": _pair_facts(document)}


def _pair_facts(document: dict) -> dict[str, str]:
    facts = {"tokenizers": document["tokenizers"]}
    if document["draft"] is None:
        facts["draft"] = document["drafter"]
    known = document["draft_length"].startswith(Goodput.__name__)
    why = "costs are measured" if known else "costs are not measured on this device; run `bass calibrate`"
    return facts | {"draft length": f"{document['draft_length']} by default; {why}"}


def _device_line(device: dict) -> str:
    facts = [device["name"]]
    if "memory_gb" in device:
        facts += [f"{device['memory_gb']:.0f} GB", f"driver {device['driver'] or 'unknown'}"]
    return "; ".join([*facts, ", ".join(f"{dtype} {answer}" for dtype, answer in device["dtypes"].items())])


def _model_facts(model: dict) -> dict[str, str]:
    linear = f", linear layers in {model['weights']}" if model["weights"] else ""
    facts = {
        "model": f"{model['class']}, {model['parameters']:,} parameters, {model['dtype']} on {model['device']}{linear}",
        "weights": f"{model['weight_bytes'] / 1e9:.3g} GB",
        "context": f"{model['context']} positions" if model["context"] else "not given in the model's config",
        "vocabulary": f"{model['vocabulary']} ids",
    }
    if model["kv_bytes_per_position"]:
        row = model["kv_bytes_per_row"]
        full = f", {row / 1e9:.3g} GB per row of full context" if row else ""
        facts["KV cache"] = f"{model['kv_bytes_per_position']:,} bytes per position{full}"
    if model["state_bytes_per_row"]:
        facts["recurrent states"] = f"{model['state_bytes_per_row'] / 1e6:.3g} MB per row"
    if model["path"]:
        facts["keeps"] = model["keeps"]
    facts["attention"] = f"auto selects {model['path']}" if model["path"] else "no path works"
    return facts | {f"  {path}": answer for path, answer in model["attention"].items()}


def _devices(first: str) -> dict[str, dict]:
    """Return name, dtypes, memory (GB) and driver per torch device. first: the name of the first device."""
    on_gpu = torch.cuda.is_available()
    name = (platform.processor() or platform.machine()) if on_gpu else first
    devices = {"cpu": {"name": name, "dtypes": _dtypes("cpu")}}
    for index in range(torch.cuda.device_count() if on_gpu else 0):
        properties = torch.cuda.get_device_properties(index)
        devices[f"cuda:{index}"] = {
            "name": f"{properties.name}, compute capability {properties.major}.{properties.minor}",
            "memory_gb": properties.total_memory / 1e9,
            "driver": _driver(),
            "dtypes": _dtypes(f"cuda:{index}"),
        }
    return devices


def _dtypes(device: str) -> dict[str, str]:
    """Try a matrix product in each dtype and return "ok", "emulated" or "no" by dtype name."""
    answers = {}
    for name in DTYPES:
        try:
            matrix = torch.ones(8, 8, dtype=getattr(torch, name), device=device)
            answers[name] = "ok" if float((matrix @ matrix)[0, 0]) == 8 else "no"
        except RuntimeError:
            answers[name] = "no"
    if device != "cpu" and not torch.cuda.is_bf16_supported(including_emulation=False):
        answers["bfloat16"] = "emulated"
    return answers


def _driver() -> str | None:
    """Return the version of the NVIDIA driver, or None without nvidia-smi."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True).stdout.split()
    return found[0] if found else None


def _packages() -> dict[str, str | None]:
    found = {}
    for name in OPTIONAL:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _describe(model: PreTrainedModel) -> dict:
    """Return sizes, the probe result of every attention path ("ok" or the reason), and KV bytes over all layers."""
    answers = {path: _answer(model, path) for path in attention.PATHS}
    try:
        chosen = probe.resolve(model)
    except ValueError:
        chosen = None
    context = context_length(model)
    position, row = _cache_bytes(model, chosen) if chosen else (None, None)
    return {
        "class": type(model).__name__,
        "parameters": parameter_count(model),
        "weights": kind_of(model),
        "weight_bytes": model.get_memory_footprint(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "context": context,
        "vocabulary": model.config.get_text_config().vocab_size,
        "attention": answers,
        "path": chosen,
        "kv_bytes_per_position": position,
        "kv_bytes_per_row": position * context if position and context else None,
        "state_bytes_per_row": row,
        "keeps": explained(model),
    }


def _answer(model: PreTrainedModel, path: str) -> str:
    try:
        probe.resolve(model, path)
    except ValueError as error:
        return _one_line(error)
    return "ok"


@torch.inference_mode()
def _cache_bytes(model: PreTrainedModel, path: str) -> tuple[int, int]:
    """Return the KV bytes of one position, and the bytes of a row's recurrent states without drafts."""
    with Runner(model, path, max_rows=1, capacity=3) as runner:
        if model.config.is_encoder_decoder:
            runner.read([made_up(model, 1)], range(1))
        runner.feed_last(torch.ones(1, 2, dtype=torch.int64, device=model.device), [2], 2)
        next_token = torch.ones(1, 1, dtype=torch.int64, device=model.device)
        runner.feed(next_token, 2 * next_token[0], [1], starts_host=[2])  # keeps the inputs of a token
        buffers = runner.cache.buffers()
        position = sum(buffer.nbytes for buffer in buffers) // runner.cache.kv_slots
        return position, 0 if runner.states is None else runner.states.row_bytes


def _tokenizers(pair: ModelPair) -> str:
    """Describe the tokenizers. `ModelPair` has checked that shared ids are the same tokens."""
    if pair.draft_tokenizer is None:
        return f"{len(pair.tokenizer)} tokens; one tokenizer for target and draft"
    ids = [set(each.get_vocab().values()) for each in (pair.tokenizer, pair.draft_tokenizer)]
    return f"target and draft share {len(ids[0] & ids[1])} ids with the same tokens"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
