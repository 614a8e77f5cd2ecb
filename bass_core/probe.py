"""Which attention path does this model get? Each model is asked what it *does*, once.

Some architectures silently ignore transformers' attention interface, others use it with masks of their own. So
`resolve` compares ragged passes over a cache with the model's plain forward pass, and refuses what differs.
"""

from __future__ import annotations

import copy
import math
import re
import weakref
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bass_core import kernel_ops
from bass_core import transformers_internals as internals
from bass_core.attention import (
    PATHS,
    changed,
    configurations,
    context_length,
    evaluating,
    has_short_convolutions,
)
from bass_core.checkpoints import in_dtype, is_quantized
from bass_core.environment import is_full
from bass_core.runner import Runner
from bass_core.sources import FEATURES, Source, made_up

BEFORE, REACH, BEYOND = 5, 16, 24  # tokens of a short text, the longest window while a model is asked, a long text
MORE = 3  # tokens that follow them
SMALL = 2**26  # parameters of a model that is asked in float32
# Names of lengths at which a model changes what it does.
SWITCHES = re.compile(
    r"sliding_window|attention_window|window_size|local_attention|attention_chunk_size|floor_scale"
    r"|original_max_position_embeddings"
)

# A model's answer does not change: (path, error) per model, forgotten with it.
_probed: weakref.WeakKeyDictionary[PreTrainedModel, dict[str, str | None]] = weakref.WeakKeyDictionary()


def resolve(model: PreTrainedModel, wanted: str = "auto") -> str:
    """The attention path that `model` gets: "ragged", "pad", "split" or "eager".

    "auto" takes the fastest path that the model passes the probe with; any other name is taken or refused.
    Raises ValueError where the path does not exist here or the model computes something else with it.
    """
    if wanted not in ("auto", *PATHS):
        raise ValueError(f"attention must be one of auto, {', '.join(PATHS)}; got {wanted!r}")
    if wanted == "ragged" and not kernel_ops.run_on(model.device):
        raise ValueError(
            f"attention='ragged' needs the Triton kernels, and {kernel_ops.obstacle(model.device)}. "
            "Use attention='auto', 'pad', 'split' or 'eager'"
        )
    _refuse_stateful(model)
    if wanted != "auto":
        candidates = [wanted]
    elif model.device.type == "cuda" and kernel_ops.run_on(model.device):
        candidates = ["ragged", "pad", "eager"]
    else:
        candidates = ["pad", "eager"]
    complaints = {}
    for path in candidates:
        complaints[path] = probe(model, path)
        if complaints[path] is None:
            return path
    reasons = "; ".join(f"{path}: {why}" for path, why in complaints.items())
    if wanted != "auto":
        hint = "Try attention='auto'."
    elif is_quantized(model):
        hint = "Quantize weights alone: quantized activations turn differences of rounding into large ones."
    else:
        hint = "Models with ALiBi positions or own masks are refused."
    raise ValueError(f"{type(model).__name__} cannot be decoded over a ragged cache ({reasons}). {hint}")


def _refuse_stateful(model: PreTrainedModel) -> None:
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    unknown = kinds - {"full_attention", "sliding_attention", "chunked_attention"}
    stateful = internals.is_stateful(model)
    if (stateful or unknown) and has_short_convolutions(model):
        stateful, unknown = False, unknown - {"conv"}
    if stateful or unknown:
        detail = f" (layer types {', '.join(sorted(map(str, unknown)))})" if unknown else ""
        raise ValueError(
            f"{type(model).__name__} keeps more of a text than the keys and values of its tokens, such as a recurrent "
            f"state or an index{detail}: a rejected draft cannot be rolled back by not writing. Use a model whose "
            "layers are all plain attention."
        )


def probe(model: PreTrainedModel, path: str) -> str | None:
    """None if the model's ragged passes equal its plain forward pass on this path, else what went wrong.

    Two rows, one beyond every window and switch of the model, one before them, over a cache full of stale values; those
    of an encoder-decoder model read sources of different lengths: prefill, write rejected tokens, overwrite them,
    compare logits. The result is remembered per model.
    """
    known = _probed.setdefault(model, {})
    if path not in known:
        try:
            subject = _in_full_precision(model)
            error, limit = _probe_error(subject, path), _tolerance(subject.dtype)
            known[path] = None if error <= limit else f"its logits are off by {error:.1e} (allowed {limit:.0e})"
        except Exception as exception:  # whatever a foreign architecture raises is the answer
            if is_full(exception):
                raise
            known[path] = f"{type(exception).__name__}: {str(exception).splitlines()[0] if str(exception) else ''}"
    return known[path]


def _in_full_precision(model: PreTrainedModel) -> PreTrainedModel:
    """A small model of half precision as a copy in float32, where faults do not hide behind rounding."""
    parameters = [each for each in model.parameters() if each.is_floating_point()]
    half = all(each.dtype in (torch.bfloat16, torch.float16) for each in parameters)
    if not half or is_quantized(model) or sum(each.numel() for each in parameters) > SMALL:
        return model
    return in_dtype(copy.deepcopy(model), torch.float32)


def _tolerance(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-6, torch.float32: 1e-3}.get(dtype, 6e-2)


def within_reach(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Inside, no window of the model, and no other length at which it changes what it does, is beyond `REACH`.

    So a short text lies beyond them all. They are found by name, in configurations and modules.
    """
    tables = [vars(each) for each in (*configurations(model), *model.modules())]
    tables += [each for table in tables for each in table.values() if type(each) is dict]  # rope_parameters
    return changed(
        [
            (table, name, REACH)
            for table in tables
            for name, value in table.items()
            if type(value) is int and value > REACH and SWITCHES.search(str(name))
        ]
    )


@torch.inference_mode()
def _probe_error(model: PreTrainedModel, path: str) -> float:
    """Largest relative error of the ragged passes' logits, over two rows."""
    vocabulary = model.config.get_text_config().vocab_size
    lengths = [min(BEYOND, (context_length(model) or math.inf) - MORE), BEFORE]
    lengths[1] = min(lengths[1], lengths[0] - 1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, vocabulary, (2, lengths[0] + MORE), generator=generator, device="cpu").to(model.device)
    sources = None
    if model.config.is_encoder_decoder:
        sources, padding = _sources(model), getattr(model.config, "pad_token_id", None)
        if padding is not None:  # some have positions that do not count it
            ids[ids == padding] = 2 if padding != 2 else 3
    with within_reach(model), Runner(model, path, max_rows=2, capacity=lengths[0] + MORE) as runner:
        for _ in range(2):  # the first allocates
            for buffer in runner.cache.buffers():
                buffer.fill_(1e4)  # stale values that no query may see
            if sources is not None:
                runner.read(sources, range(2))
            first = runner.feed_last(ids, lengths, lengths[0])  # [2, V]
        starts = torch.tensor(lengths, device=ids.device)
        following = starts[:, None] + torch.arange(MORE, device=ids.device)  # [2, MORE]
        rejected = ids.flip(0).gather(1, following)
        runner.feed(rejected, starts, [MORE, MORE], starts_host=lengths)
        reads = sources or [None, None]
        expected = [_plain_logits(model, ids[b : b + 1, : n + MORE], reads[b]) for b, n in enumerate(lengths)]
        errors = [_relative_error(first[b], expected[b][n - 1]) for b, n in enumerate(lengths)]
        for submitted in ([MORE, 1], [1, MORE]):  # the longer row submits most, and least
            for packed in (False,) if path == "eager" else (False, True):
                logits = runner.feed(ids.gather(1, following), starts, submitted, starts_host=lengths, packed=packed)
                errors += [
                    _relative_error(logits[b, :q], expected[b][n : n + q])
                    for b, (n, q) in enumerate(zip(lengths, submitted, strict=True))
                ]
    return max(errors)


def _relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference of one token's logits by their size, both as norms over the vocabulary; -inf equals -inf, and
    NaN is an infinite error."""
    difference = torch.where(found == expected, 0.0, (found - expected).double()).norm(dim=-1)
    size = torch.where(expected.isfinite(), expected, 0.0).double().norm(dim=-1)
    return float((difference / size).amax().nan_to_num(nan=math.inf))


def _sources(model: PreTrainedModel) -> list[Source]:
    """Two that differ, the second one shorter where the model takes any length."""
    most = min(BEYOND, context_length(model) or BEYOND)
    return [made_up(model, length, seed) for seed, length in enumerate((most, most // 2))]


def _plain_logits(model: PreTrainedModel, ids: Tensor, source: Source | None) -> Tensor:
    """The model's own forward pass, in evaluation mode: [T, V]."""
    inputs = {"input_ids": ids}
    if source is not None:
        read = source.inputs[None].to(model.device)
        read = {"input_ids": read} if model.main_input_name == "input_ids" else {FEATURES: read.to(model.dtype)}
        inputs = read | {"decoder_input_ids": ids}
    with evaluating(map(vars, model.modules())):
        return model(**inputs, use_cache=False).logits[0]
