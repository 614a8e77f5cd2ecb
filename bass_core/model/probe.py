"""Choose a model's attention path by comparing logits, once for each structure of the model.

Some architectures silently ignore transformers' attention interface, and others pass masks of a different kind.
`resolve` therefore compares ragged passes over a cache with the model's plain forward pass, and refuses models with
different logits. Models with a recurrent state are compared with their own decoding, token by token, because the two
forms of some recurrences differ. The probe leaves the model unchanged.
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
from bass_core.model.architectures import context_length, switch
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
from bass_core.model.recurrent import has_index, has_state
from bass_core.model.runner import Runner
from bass_core.model.transformers_internals import in_dtype, is_quantized

# Lengths in tokens: a short text, the longest window during a probe, and two texts beyond this window.
BEFORE, REACH, BETWEEN, BEYOND = 5, 16, 20, 24
# Tokens that the three rows submit in each step, and how many of these stay. A short context has fewer steps.
STEPS = (
    ((4, 1, 2), (1, 1, 2)),
    ((1, 4, 4), (1, 3, 1)),
    ((4, 2, 1), (4, 1, 1)),
    ((2, 1, 4), (1, 1, 3)),
    ((1, 1, 1), (1, 1, 1)),
)
MORE = 8  # positions after each text
WIDEST = 4  # tokens that a row submits at most
HALF = 6e-2  # tolerance in half precision, relative to the logits
# Some tokens amplify rounding. Below this error, the rounding of the model's own decoding counts, too.
ROUNDING = 0.25
SMALL = 2**26  # up to so many parameters, a model is probed in float32
# Names of lengths at which a model changes its computation.
SWITCHES = re.compile(
    r"sliding_window|attention_window|window_size|local_attention|attention_chunk_size|floor_scale"
    r"|original_max_position_embeddings"
)

KINDS_OF_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}  # layer types with keys and values
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
        hint = "Models with ALiBi positions, their own masks or another kind of state are not supported."
    raise ValueError(f"{type(model).__name__} cannot be decoded over a ragged cache ({reasons}). {hint}")


def _refuse_stateful(model: PreTrainedModel) -> None:
    if not keeps_more(model) or has_state(model) or has_index(model):
        return
    config = model.config.get_text_config()
    unknown = set(getattr(config, "layer_types", None) or ()) - KINDS_OF_ATTENTION
    detail = f" (layer types {', '.join(sorted(map(str, unknown)))})" if unknown else ""
    raise ValueError(
        f"{type(model).__name__} keeps other state than keys and values{detail}, and does not use transformers' "
        "functions for this state. The state could not be rolled back after a rejected draft. docs/MODELS.md lists "
        "supported models."
    )


def keeps_more(model: PreTrainedModel) -> bool:
    """Return True if the model keeps more of a text than keys and values per token."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    return internals.is_stateful(model) or bool(kinds - KINDS_OF_ATTENTION)


def probe(model: PreTrainedModel, path: str) -> str | None:
    """Return None if the model's ragged passes equal its plain forward pass on this path, else the difference.

    Three rows run over a cache full of stale values: two beyond every window and switch of the model, one before. Rows
    of an encoder-decoder model read sources of different lengths. The probe runs the prefill, saves, loads and moves
    rows, and runs the steps of `STEPS`, which accept and reject different numbers of tokens. The model's own decoding
    with a cache must equal the plain pass, too. Results are cached by `signature`, except refusals under
    `torch.autocast` and results while the model is decoding.
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
        # Recurrences compute in float32 even in float64 models.
        inside = torch.float32 if has_state(subject) and subject.dtype == torch.float64 else subject.dtype
        limit = max(_tolerance(dtype) for dtype in (inside, autocast) if dtype is not None)
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
    # Many models compute softmax and norms in float32, even with float64 weights.
    return {torch.float64: 1e-5, torch.float32: 1e-3}.get(dtype, HALF)


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
    context = context_length(model) or math.inf
    more = min(MORE, context - 2)
    longest = min(BEYOND, context - more)
    lengths = [longest, min(BEFORE, longest - 1), min(BETWEEN, longest)]
    rows = len(lengths)
    generator = torch.Generator().manual_seed(0)
    size = (rows, longest + more)
    ids = torch.randint(1, vocabulary, size, generator=generator, device="cpu").to(model.device)
    sources = None
    if model.config.is_encoder_decoder:
        sources, padding = _sources(model), getattr(model.config, "pad_token_id", None)
        if padding is not None:  # some models compute positions without padding tokens
            ids[ids == padding] = 2 if padding != 2 else 3
    with ExitStack() as stack:
        stack.enter_context(switch(model, path).on())  # held until the end, so that no other thread uses the model
        stack.enter_context(within_reach(model))
        runner = stack.enter_context(Runner(model, path, max_rows=rows + 2, capacity=size[1]))
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
    """Return the errors of ragged passes, and of the model's own decoding, relative to the reference.

    The rows live in batch slots 1 to 3, and in 0 to 2 from the fourth step on.
    """
    model, rows, cache, batch_slots = runner.model, len(lengths), runner.cache, range(1, len(lengths) + 1)
    for _ in range(2):  # the first iteration allocates
        for buffer in [*cache.buffers(), *(() if runner.states is None else runner.states.buffers())]:
            buffer.fill_(1e4)  # stale values, masked for every query
        if cache.by_row is not None:
            cache.by_row.clear(range(rows + 2))
        if sources is not None:
            runner.read(sources, batch_slots)
        first = runner.feed_last(ids, lengths, max(lengths), batch_slots)  # [B, V]
    last, spare, more = rows, rows + 1, ids.shape[1] - max(lengths)
    cache.load_row(range(spare, spare + 1), cache.save_row(last, lengths[-1]))
    cache.clear(range(last, spare))
    cache.move_row(spare, range(last, spare))
    reads = sources or [None] * rows
    reference = _own_logits if runner.states is not None else _plain_logits
    expected = [reference(model, ids[b : b + 1, : n + more], n, reads[b]) for b, n in enumerate(lengths)]
    if any((each.isnan() | (each == torch.inf)).any() for each in expected):
        raise NotNumbers(f"the forward pass of {type(model).__name__} gives NaN or infinite logits; check its weights")
    errors = [_relative_error(first[b], expected[b][0]) for b in range(rows)]
    done = [0] * rows  # accepted tokens
    for step, (submitted, accepted) in enumerate(STEPS):
        if max(count + q for count, q in zip(done, submitted, strict=True)) > more:
            break
        if step == 3:
            for batch_slot in batch_slots:
                cache.move_row(batch_slot, range(batch_slot - 1, batch_slot))
            cache.clear(range(rows, rows + 2))
            batch_slots = range(rows)
        starts_host = [n + count for n, count in zip(lengths, done, strict=True)]
        starts = torch.tensor(starts_host, device=ids.device)
        following = (starts[:, None] + torch.arange(WIDEST, device=ids.device)).clamp(max=ids.shape[1] - 1)  # [B, Q]
        stays = torch.arange(WIDEST, device=ids.device) < torch.tensor(accepted, device=ids.device)[:, None]
        tokens = torch.where(stays, ids.gather(1, following), ids.flip(0).gather(1, following))[:, : max(submitted)]
        for packed in (False,) if runner.path == "eager" else (False, True):
            place = {"starts_host": starts_host, "batch_slots": batch_slots, "packed": packed}
            logits = runner.feed(tokens, starts, submitted, **place)
            errors += [_relative_error(logits[b, :q], expected[b][done[b] + 1 :][:q]) for b, q in enumerate(accepted)]
        done = [count + q for count, q in zip(done, accepted, strict=True)]
    if sources is not None:
        return errors
    try:
        own = _own_logits(model, ids[:1, : lengths[0] + 3], lengths[0])
        errors.append(_relative_error(own, expected[0][:4]))
        if HALF < max(errors) < ROUNDING and model.dtype in (torch.float16, torch.bfloat16):
            texts = [(ids[b : b + 1, : n + more], n) for b, n in enumerate(lengths)]
            noise = (_relative_error(_own_logits(model, *each), _plain_logits(model, *each)) for each in texts)
            return [max(0.0, max(errors) - 3 * max(noise))]
    except Exception as error:  # this model needs inputs that `generate` prepares
        if is_full(error):
            raise
    return errors


def _own_logits(model: PreTrainedModel, ids: Tensor, length: int, source: Source | None = None) -> Tensor:
    """Return the logits after the first `length` tokens, and after each later token, by the model's own decoding with a
    cache: [T - length + 1, V]. Some models apply a window only there, and recurrences run token by token."""
    name, positions = internals.cache_argument(type(model)), "position_ids" in internals.forward_names(type(model))
    with as_found(model), evaluating(map(vars, model.modules())):
        out = model(input_ids=ids[:, :length], use_cache=True)
        found = [out.logits[0, -1]]
        for at in range(length, ids.shape[1]):
            own = {name: out[name if name in out else internals.CACHE]}
            own |= {"position_ids": torch.tensor([[at]], device=ids.device)} if positions else {}
            out = model(input_ids=ids[:, at : at + 1], use_cache=True, **own)
            found.append(out.logits[0, -1])
    return torch.stack(found)


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


def _plain_logits(model: PreTrainedModel, ids: Tensor, length: int, source: Source | None = None) -> Tensor:
    """Return the logits after the first `length` tokens, and after each later token, by the model's own forward pass in
    evaluation mode: [T - length + 1, V]."""
    inputs = {"input_ids": ids}
    if source is not None:
        read = source.inputs[None].to(model.device)
        read = {"input_ids": read} if model.main_input_name == "input_ids" else {FEATURES: read.to(model.dtype)}
        inputs = read | {"decoder_input_ids": ids}
    with as_found(model), evaluating(map(vars, model.modules())):
        return model(**inputs, use_cache=False).logits[0, length - 1 :]
