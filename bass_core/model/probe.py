"""Choose a model's attention path by comparing logits, once for each structure of the model.

Some architectures silently ignore transformers' attention interface, and others pass masks of a different kind.
`resolve` therefore compares ragged passes over a cache with the model's plain forward pass, and refuses models with
different logits. The probe leaves the model unchanged.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
import weakref
from contextlib import AbstractContextManager, ExitStack

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from bass_core.environment import is_full
from bass_core.model import kernel_ops
from bass_core.model import transformers_internals as internals
from bass_core.model.architectures import context_length, has_short_convolutions, switch
from bass_core.model.attention import PATHS
from bass_core.model.encoder_decoder import FEATURES, Source, made_up
from bass_core.model.patching import (
    OWN,
    SWITCHED,
    InUse,
    as_found,
    changed,
    configurations,
    evaluating,
    path_of,
)
from bass_core.model.runner import Runner
from bass_core.model.transformers_internals import in_dtype, is_quantized

# Lengths in tokens: a short text, the longest window during a probe, and two texts beyond this window.
BEFORE, REACH, BETWEEN, BEYOND = 5, 16, 20, 24
MORE = 3  # tokens after each text
SMALL = 2**26  # up to so many parameters, a model is probed in float32
# Names of lengths at which a model changes its computation.
SWITCHES = re.compile(
    r"sliding_window|attention_window|window_size|local_attention|attention_chunk_size|floor_scale"
    r"|original_max_position_embeddings"
)

SMALL_BUFFER = 2**20  # elements; larger buffers hold weights, and are not restored after a probe

PLAIN = (bool, int, float, str)  # types of the attributes in a signature
_numbers = itertools.count()  # of functions in signatures

# Results of probes by model: (path, signature) -> reason for refusal, or None.
_probed: weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple[str, int], str | None]] = weakref.WeakKeyDictionary()


class NotNumbers(ValueError):
    """The model's own forward pass gives NaN or infinite logits."""


def resolve(model: PreTrainedModel, wanted: str = "auto") -> str:
    """Return the attention path for `model`: "ragged", "pad", "split" or "eager".

    "auto" selects the fastest path that passes the probe; any other path is accepted or refused. Raises ValueError if
    the path is not available here, if its logits differ from the model's own logits, or if these are NaN or infinite.
    """
    if wanted not in ("auto", *PATHS):
        raise ValueError(f"attention must be one of auto, {', '.join(PATHS)}; got {wanted!r}")
    if wanted == "ragged" and not kernel_ops.run_on(model.device):
        raise ValueError(
            f"attention='ragged' needs the Triton kernels: {kernel_ops.obstacle(model.device)}. "
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
        hint = "Quantize only the weights; quantized activations amplify rounding differences."
    else:
        hint = "Models with ALiBi positions or their own masks are not supported."
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
            f"{type(model).__name__} keeps other state than keys and values, such as a recurrent state or an "
            f"index{detail}, and cannot roll this state back after a rejected draft. Use a model with attention "
            "layers only."
        )


def probe(model: PreTrainedModel, path: str) -> str | None:
    """Return None if the model's ragged passes equal its plain forward pass on this path, else the difference.

    Three rows run over a cache full of stale values: two beyond every window and switch of the model, one before. Rows
    of an encoder-decoder model read sources of different lengths. The probe runs the prefill, writes rejected tokens,
    overwrites them and compares logits. The model's own decoding with a cache must equal the plain pass, too. Results
    are cached by `signature`, except refusals under `torch.autocast` and results while the model is decoding.
    """
    known, key = _probed.setdefault(model, {}), (path, signature(model))
    if key not in known:
        kind = model.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        complaint = _complaint(model, path, autocast)
        if complaint is not None and autocast is not None:
            return f"under torch.autocast({autocast}) {complaint}"
        if path_of(model) is not None:
            return complaint
        known[key] = complaint
    return known[key]


def signature(model: PreTrainedModel) -> int:
    """Return a hash of a model's modules, their plain attributes, configurations, dtypes, devices, and autocast. Values
    of weights and changes by `Switch` do not count."""
    kind = model.device.type
    parts = [torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)]
    for name, module in model.named_modules():
        table = vars(module)
        tensors = [*table["_parameters"].items(), *table["_buffers"].items()]
        own = [table.get("forward"), *table["_forward_hooks"].values()]
        own = [each for each in own if not str(getattr(each, "__module__", "")).startswith("bass_core.")]
        parts += [name, type(module), id(type(module).forward), *map(_number, own)]
        parts += [(key, value) for key, value in table.items() if isinstance(value, PLAIN) and key != "training"]
        parts += [(key, each.dtype, each.device, each.shape) for key, each in tensors if each is not None]
    for config in configurations(model):
        values = [(key, value) for key, value in vars(config).items() if not isinstance(value, PreTrainedConfig)]
        parts += [f"{key}={value}" for key, value in values if key not in (*SWITCHED, OWN)]
    return hash(tuple(parts))


def _number(function: object) -> int:
    """Return a unique number of a function; its `id` could be reused after the function is deleted."""
    function = getattr(function, "__func__", function)
    try:
        return vars(function).setdefault("_bass_number", next(_numbers))
    except TypeError:
        return id(function)  # None and built-in functions


def _complaint(model: PreTrainedModel, path: str, autocast: torch.dtype | None) -> str | None:
    """Return the reason against a path, or None. Raises NotNumbers, InUse and errors of a full memory."""
    try:
        subject = _in_full_precision(model)
        error = _probe_error(subject, path)
        limit = max(_tolerance(dtype) for dtype in (subject.dtype, autocast) if dtype is not None)
        return None if error <= limit else f"its logits are off by {error:.1e} (allowed {limit:.0e})"
    except Exception as exception:  # any error of an unknown architecture is a reason
        if is_full(exception) or isinstance(exception, NotNumbers | InUse):
            raise
        return f"{type(exception).__name__}: {str(exception).splitlines()[0] if str(exception) else ''}"


class _Snapshot:
    """Attributes, submodules, buffers and configurations of a model at some time."""

    def __init__(self, model: PreTrainedModel):
        owners = [*model.modules(), *configurations(model)]
        self._tables = [(type(owner).__name__, vars(owner)) for owner in owners]
        # Nested tables, such as _modules, _parameters, _buffers and rope_parameters.
        self._tables += [(name, each) for name, table in self._tables for each in table.values() if type(each) is dict]
        self._found = [dict(table) for _, table in self._tables]
        self._buffers = [(each, each.clone()) for each in model.buffers() if each.numel() <= SMALL_BUFFER]

    @torch.inference_mode()
    def restore(self) -> list[str]:
        """Restore everything, and return a description of each changed mode and submodule."""
        modes = []
        for (name, table), found in zip(self._tables, self._found, strict=True):
            for key in found.keys() & table.keys():
                new, old = table[key], found[key]
                if new is not old and isinstance(new, str | nn.Module) and new != old:
                    modes.append(f"{name}.{key} from {_shown(old)} to {_shown(new)}")
            if table.keys() != found.keys() or any(table[key] is not old for key, old in found.items()):
                table.clear()
                table.update(found)
        for buffer, values in self._buffers:
            if not torch.equal(buffer, values):
                buffer.copy_(values)
        return modes


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, str) else type(value).__name__


def _in_full_precision(model: PreTrainedModel) -> PreTrainedModel:
    """Return a float32 copy of a small half-precision model, because rounding hides faults; else return the model."""
    parameters = [each for each in model.parameters() if each.is_floating_point()]
    half = all(each.dtype in (torch.bfloat16, torch.float16) for each in parameters)
    decoding = path_of(model) is not None  # a copy would share patched methods with the original
    if not half or decoding or is_quantized(model) or sum(each.numel() for each in parameters) > SMALL:
        return model
    return in_dtype(copy.deepcopy(model), torch.float32)


def _tolerance(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-6, torch.float32: 1e-3}.get(dtype, 6e-2)


def within_reach(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Limit the model's windows and other switching lengths to `REACH` inside the context.

    A short text then exceeds all these lengths. The function finds them by name, in configurations and modules.
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
    """Return the largest relative error of the ragged passes' logits."""
    vocabulary = model.config.get_text_config().vocab_size
    longest = min(BEYOND, (context_length(model) or math.inf) - MORE)
    lengths = [longest, min(BEFORE, longest - 1), min(BETWEEN, longest)]
    rows = len(lengths)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, vocabulary, (rows, longest + MORE), generator=generator, device="cpu").to(model.device)
    sources = None
    if model.config.is_encoder_decoder:
        sources, padding = _sources(model), getattr(model.config, "pad_token_id", None)
        if padding is not None:  # some models compute positions without padding tokens
            ids[ids == padding] = 2 if padding != 2 else 3
    with ExitStack() as stack:
        stack.enter_context(switch(model, path).on())  # held until the end, so that no other thread uses the model
        stack.enter_context(within_reach(model))
        runner = stack.enter_context(Runner(model, path, max_rows=rows, capacity=longest + MORE))
        stack.enter_context(runner.prepared())
        before = _Snapshot(model)
        try:
            errors = _errors(runner, ids, lengths, sources)
        finally:
            modes = before.restore()
    if modes:
        raise ValueError(f"the length of a text changes {modes[0]}; set it before decoding")
    return max(errors)


def _errors(runner: Runner, ids: Tensor, lengths: list[int], sources: list[Source] | None) -> list[float]:
    """Return the errors of ragged passes, and of the model's own decoding, relative to the model's plain passes."""
    model, rows = runner.model, len(lengths)
    for _ in range(2):  # the first iteration allocates
        for buffer in runner.cache.buffers():
            buffer.fill_(1e4)  # stale values, masked for every query
        if sources is not None:
            runner.read(sources, range(rows))
        first = runner.feed_last(ids, lengths, max(lengths))  # [B, V]
    starts = torch.tensor(lengths, device=ids.device)
    following = starts[:, None] + torch.arange(MORE, device=ids.device)  # [B, MORE]
    rejected = ids.flip(0).gather(1, following)
    runner.feed(rejected, starts, [MORE] * rows, starts_host=lengths)
    reads = sources or [None] * rows
    expected = [_plain_logits(model, ids[b : b + 1, : n + MORE], reads[b]) for b, n in enumerate(lengths)]
    if any((each.isnan() | (each == torch.inf)).any() for each in expected):
        raise NotNumbers(f"the forward pass of {type(model).__name__} gives NaN or infinite logits; check its weights")
    errors = [_relative_error(first[b], expected[b][n - 1]) for b, n in enumerate(lengths)]
    for submitted in ([MORE, 1, 2], [1, MORE, MORE]):  # the longest row submits most tokens, then fewest
        for packed in (False,) if runner.path == "eager" else (False, True):
            logits = runner.feed(ids.gather(1, following), starts, submitted, starts_host=lengths, packed=packed)
            errors += [
                _relative_error(logits[b, :q], expected[b][n : n + q])
                for b, (n, q) in enumerate(zip(lengths, submitted, strict=True))
            ]
    return errors + (_own_errors(model, ids[:1], lengths[0], expected[0]) if sources is None else [])


def _own_errors(model: PreTrainedModel, ids: Tensor, length: int, expected: Tensor) -> list[float]:
    """Return the errors of the model's own decoding with a cache, because some models apply a window only there."""
    name, errors = internals.cache_argument(type(model)), []
    with as_found(model), evaluating(map(vars, model.modules())):
        try:
            out = model(input_ids=ids[:, :length], use_cache=True)
            for at in range(length, length + MORE):
                out = model(input_ids=ids[:, at : at + 1], use_cache=True, **{name: out[internals.CACHE]})
                errors.append(_relative_error(out.logits[0, -1], expected[at]))
        except Exception as error:  # this model needs inputs that `generate` prepares
            if is_full(error):
                raise
    return errors


def _relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference between two tokens' logits, relative to the norm of `expected`. Equal
    infinities do not differ, and NaN is an infinite error."""
    difference = torch.where(found == expected, 0.0, (found - expected).double()).norm(dim=-1)
    size = torch.where(expected.isfinite(), expected, 0.0).double().norm(dim=-1)
    errors = torch.where(difference == 0, 0.0, difference / size)
    return float(errors.amax().nan_to_num(nan=math.inf))


def _sources(model: PreTrainedModel) -> list[Source]:
    """Return three different sources, of different lengths if the model allows."""
    most = min(BEYOND, context_length(model) or BEYOND)
    return [made_up(model, length, seed) for seed, length in enumerate((most, most // 2, most // 2 + 1))]


def _plain_logits(model: PreTrainedModel, ids: Tensor, source: Source | None) -> Tensor:
    """Return the logits of the model's own forward pass in evaluation mode: [T, V]."""
    inputs = {"input_ids": ids}
    if source is not None:
        read = source.inputs[None].to(model.device)
        read = {"input_ids": read} if model.main_input_name == "input_ids" else {FEATURES: read.to(model.dtype)}
        inputs = read | {"decoder_input_ids": ids}
    with as_found(model), evaluating(map(vars, model.modules())):
        return model(**inputs, use_cache=False).logits[0]
