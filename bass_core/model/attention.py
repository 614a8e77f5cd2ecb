"""Attention over the ragged cache, plugged into ordinary transformers models.

`pad`     one padded launch over all rows; keys a row may not see are masked (the paper's BASS-PAD).
`split`   one launch per row, each with its own KV length (the paper's BASS-SPLIT).
`ragged`  one launch without padding: the Triton kernel of `bass_kernels`.
`eager`   the model's own attention code with our additive mask, for architectures that bypass the interface.

On a CUDA GPU the first three are the Triton kernels of `bass_kernels`, where they run (module kernel_ops); `pad`
and `split` are here in plain torch too. With `torch.use_deterministic_algorithms(True)`, `ragged` gives a query
the same bits whatever else is in its batch.

transformers calls a registered function as `fn(module, query, key, value, attention_mask, scaling=..., **kwargs)` and
never hands it the cache, so the pass at hand is state of the thread, set by `forward` around each call. Some
architectures silently ignore the interface, others use it with masks of their own: module `probe` finds out which.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, GenerationMixin, PreTrainedConfig, PreTrainedModel

from bass_core.model import kernel_ops
from bass_core.model import transformers_internals as internals
from bass_core.model.cache import Pass, RaggedCache, TokenStates

PATHS = ("ragged", "pad", "split", "eager")


WIDEST_HEAD = 256  # of the Triton kernels: `bass_kernels.tiles.HEAD_DIMS`


class _Thread(threading.local):
    """What the attention functions of this thread are called for."""

    def __init__(self):  # no attribute of the class: torch 2.11 would compile that one into layers
        self.current: Pass | None = None  # the pass at hand; see the module's docstring


_thread = _Thread()


def pass_at_hand() -> Pass | None:
    """The pass over a ragged cache that this thread runs a model for; None outside of one."""
    return _thread.current


def _prefixed(name: str) -> str:
    return name if name == "eager" else f"bass_{name}"


# --- the three attention functions ----------------------------------------------------------------


def pad_attention(module, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, **kwargs):
    """Padded attention in one launch. query [B, H, Q, D], key and value [B, H_kv, S, D] -> ([B, Q, H, D], None)."""
    if _kernels_take(key, value, kwargs):
        rows = _thread.current.starts, _thread.current.ends
        out = kernel_ops.pad_attention(query, key, value, *rows, extent=_thread.current.extent, **_flags(kwargs))
        return out, None
    group = _packed_heads(_thread.current, query, key, kwargs)
    out = _attend(query, key, value, _bias(_thread.current, query, group, kwargs), group, kwargs)
    return out.transpose(1, 2).contiguous(), None


def source_attention(module, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, **kwargs):
    """Attention over what the rows read, on every path: one padded launch; a query sees all of its row's source.
    query [B, H, Q, D], key and value [B, H_kv, S, D] -> ([B, Q, H, D], None)."""
    current = _thread.current
    sources, current.crossing = current.crossing, None
    if kwargs.get("position_bias") is not None and module.has_relative_attention_bias:
        raise ValueError("its attention to a source has a relative position bias")  # else that is zeros
    bias = current.once(sources.bias, query.dtype)
    return _attend(query, key, value, bias, 1, kwargs).transpose(1, 2).contiguous(), None


def split_attention(module, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, **kwargs):
    """One launch per row over that row's own keys. Shapes as `pad_attention`."""
    if _kernels_take(key, value, kwargs):
        rows, lengths = (_thread.current.starts, _thread.current.ends), _thread.current.kv_lengths
        return kernel_ops.load().split_attention(query, key, value, *rows, lengths=lengths, **_flags(kwargs)), None
    group = _packed_heads(_thread.current, query, key, kwargs)
    bias = _bias(_thread.current, query, group, kwargs)
    rows = []
    for b, n in enumerate(_thread.current.kv_lengths):
        row, hidden = slice(b, b + 1), None if bias is None else bias[b : b + 1, ..., :n]
        rows.append(_attend(query[row], key[row, :, :n], value[row, :, :n], hidden, group, kwargs))
    return torch.cat(rows).transpose(1, 2).contiguous(), None


def ragged_attention(module, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, **kwargs):
    """The Triton kernel without padding; layers of one shape share a work list. Shapes as `pad_attention`."""
    if kwargs.get("position_bias") is not None:
        raise ValueError("the ragged kernel knows no relative position bias: use attention='pad'")
    deterministic = torch.are_deterministic_algorithms_enabled()
    shape = query.shape[1], key.shape[1], query.shape[-1], query.dtype
    work = _thread.current.once(_work_list, *shape, kwargs.get("sliding_window"))
    rows = _thread.current.starts, _thread.current.ends
    return kernel_ops.ragged_attention(
        query, key, value, *rows, *work, **_flags(kwargs), deterministic=deterministic
    ), None


def _work_list(
    current: Pass, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The ragged kernel's work list, for all layers of these shapes, and for all passes of a phase."""
    deterministic = torch.are_deterministic_algorithms_enabled()  # now, and not when the last pass was launched
    queries = current.positions.shape[1]
    layers = heads, kv_heads, head_dim, queries, current.extent, dtype, window or 0, deterministic
    if current.phase is None:
        return kernel_ops.plan(current.starts, current.ends, *layers, queries)
    ends, span, lists = current.phase
    kind = heads, kv_heads, head_dim, dtype, window, deterministic
    if kind not in lists:
        lists[kind] = kernel_ops.plan(current.starts, ends, *layers, span)
    return lists[kind]


def _kernels_take(key: Tensor, value: Tensor, options: dict) -> bool:
    """Whether the paper's two kernels can stand in for plain torch: they want keys and values of one size that is not
    too large, and know no bias."""
    fit = key.shape == value.shape and key.shape[-1] <= WIDEST_HEAD
    return _thread.current.kernels and fit and options.get("position_bias") is None


def _flags(options: dict) -> dict:
    """What transformers calls the options of an attention layer, under the kernels' names."""
    names = {"scaling": "scaling", "sliding_window": "sliding_window", "softcap": "softcap", "sinks": "s_aux"}
    return {ours: options.get(theirs) for ours, theirs in names.items()}


def _needs_scores(options: dict) -> bool:
    """Whether scores need more than a bias (softcap, sinks), so that the product is written out."""
    return options.get("softcap") is not None or options.get("s_aux") is not None


def _packed_heads(current: Pass, query: Tensor, key: Tensor, options: dict) -> int:
    """How many query heads become more queries of the KV head that they share, so that nothing is expanded (GQA
    packing). For one query of one row and up to three heads, a CPU is faster without."""
    group, eager = query.shape[1] // key.shape[1], current.kv_lengths is not None  # else each case is compiled anew
    few = eager and query.shape[0] == query.shape[2] == 1 and group <= 3 and not query.is_cuda
    return 1 if few or _needs_scores(options) or options.get("position_bias") is not None else group


def _bias(current: Pass, query: Tensor, group: int, options: dict) -> Tensor | None:
    """Additive mask [B, 1, group * Q, extent] in the query's dtype, built once per pass, window and group; None where
    nothing is hidden. With the bias [B, H, Q, extent] of a model that has one by distance."""
    mask = _mask, options.get("sliding_window"), group, query.dtype
    by_distance = options.get("position_bias")
    return current.once(*mask) if by_distance is None else current.once(_sum, by_distance, mask)


def _sum(current: Pass, bias: Tensor, mask: tuple) -> Tensor:
    hidden = current.once(*mask)
    return bias if hidden is None else bias + hidden


def _mask(current: Pass, window: int | None, group: int, dtype: torch.dtype) -> Tensor | None:
    alike = current.kv_lengths is not None and min(current.kv_lengths) == current.extent
    if alike and current.positions.shape[1] == 1 and (window is None or current.extent <= window):
        return None  # one token each, after texts of one length: regular decoding of a single row, above all
    bias = torch.where(current.visible(window), 0.0, -torch.inf).to(dtype)[:, None]
    return bias.expand(-1, -1, group, -1) if bias.shape[2] == 1 else bias.repeat(1, 1, group, 1)


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, group: int, options: dict) -> Tensor:
    """softmax(QK^T * scaling + bias) V with grouped KV heads: [B, H, Q, D]. group: see `_packed_heads`."""
    scaling, softcap, sinks = options.get("scaling"), options.get("softcap"), options.get("s_aux")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    heads, kv_heads = query.shape[1], key.shape[1]
    if not _needs_scores(options):
        packed = query.reshape(query.shape[0], heads // group, -1, query.shape[-1]) if group > 1 else query
        expands = {"enable_gqa": True} if heads != kv_heads * group else {}  # a compiler takes nothing but True
        out = F.scaled_dot_product_attention(packed, key, value, attn_mask=bias, scale=scaling, **expands)
        return out.view(query.shape[0], heads, query.shape[2], -1) if group > 1 else out
    key, value = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores if bias is None else scores + bias
    if sinks is not None:  # a learned extra logit per head that takes mass and gives no value
        sink = sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1).to(scores.dtype)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    return weights[..., : key.shape[2]] @ value


def _over_rows(attend: Callable) -> Callable:
    """`attend` over rows [B, ..., Q, ...], for models that see packed tokens, too."""

    @functools.wraps(attend)
    def attend_packed(module, query: Tensor, *arguments, **options):
        if _thread.current.packed is not None:
            query = _thread.current.unpack(query.transpose(1, 2)).transpose(1, 2)
        chosen = attend if _thread.current.crossing is None else source_attention
        out, weights = chosen(module, query, *arguments, **options)
        return _thread.current.pack(out), weights

    return attend_packed


for _name, _function in (("pad", pad_attention), ("split", split_attention), ("ragged", ragged_attention)):
    AttentionInterface.register(_prefixed(_name), _over_rows(_function))


# --- one forward pass -----------------------------------------------------------------------------


MISSING = object()
SWITCHED = (internals.ATTENTION, "pad_token_id")  # entries of configs that `Switch` changes
OWN = "_bass_own"  # entry of a switched config: the thread that switched it, and what its owner has for these

Change = tuple[dict, str, Any]  # a table, the name of an entry, and what it is to be


@contextmanager
def changed(changes: Sequence[Change]) -> Iterator[None]:
    """Inside, these tables have these entries. Afterwards they are as they were, also if a Ctrl-C falls into that."""
    before = [(table, name, table.get(name, MISSING)) for table, name, _ in changes]

    def restore() -> None:
        for table, name, value in before:
            if value is MISSING:
                table.pop(name, None)
            else:
                table[name] = value

    try:
        try:
            for table, name, value in changes:
                table[name] = value
            yield
        finally:
            restore()
    finally:
        restore()


_switching = threading.RLock()  # held while a model is switched, and back


class InUse(RuntimeError):
    """Another thread decodes with a model at this moment."""


def path_of(model: PreTrainedModel) -> str | None:
    """The path that `model` is switched to by this thread; None if it is as its owner left it."""
    thread, path, _ = vars(model).get("_bass_path", (None, None, None))
    return path if thread == threading.get_ident() else None


def as_found(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Inside, a model that is switched to a path has its owner's configuration, as its encoder wants it."""
    return changed(vars(model).get("_bass_path", (None, None, ()))[2])


class Switch:
    """Switches `model` to an attention path and back. Its modules are looked through once, for many times; modules that
    it is given later keep their mode."""

    def __init__(
        self, model: PreTrainedModel, path: str, hidden: TokenStates | None = None, lean: Sequence[Change] = ()
    ):
        """hidden: where what the last layer leaves is kept (None: it is not). lean: see `cpu_layers.changes`."""
        self._lean = lean
        self.model, self.path, self._modules = model, path, [vars(module) for module in model.modules()]
        self._configs = [vars(each) for each in configurations(model)]
        self._forwards: list[Change] = []
        beyond, takes_positions = rotary_switch(model), "position_ids" in internals.forward_names(type(model))
        for module in model.modules():
            if beyond is not None and getattr(module, "rope_type", None) == "longrope":
                self._forwards.append((vars(module), "forward", _by_row(module.forward, beyond)))
            elif not takes_positions and internals.is_position_table(module):
                self._forwards.append((vars(module), "forward", _at_positions(module)))
            elif (width := internals.sinusoidal_width(module)) is not None:
                self._forwards.append((vars(module), "forward", _at_computed_positions(module, width, model.dtype)))
            elif internals.is_short_convolution(module):
                from bass_core.model import short_convolution

                self._forwards.append((vars(module), "forward", short_convolution.by_position(module)))
            elif internals.has_relative_bias(module):
                self._forwards.append((vars(module), "compute_bias", _bias_by_row(module)))
        self._kept = [] if hidden is None else [(vars(model.get_decoder()), "forward", _keeping(model, hidden))]

    @property
    def is_on(self) -> bool:
        """Whether the model is switched so, by this switch or by another that does the same."""
        kept = all(table.get(name) is value for table, name, value in self._kept)
        return kept and path_of(self.model) == self.path

    @contextmanager
    def on(self) -> Iterator[None]:
        """Run the model with the path, in evaluation mode; leave it exactly as it was found.

        Raises InUse while another thread runs it, or a model that has a config object in common with it: each would
        find it changed, and back again.
        """
        with ExitStack() as stack:
            with _switching:
                stack.enter_context(changed(self._changes()))
                stack.enter_context(evaluating(self._modules))
            try:
                yield
            finally:
                with _switching:
                    stack.close()

    def _changes(self) -> list[Change]:
        """Return what `on` changes. Raises InUse."""
        paths, thread = self._configs, threading.get_ident()
        if any(config[OWN][0] != thread for config in paths if OWN in config):
            raise InUse(
                f"{type(self.model).__name__}, or a model that shares its config object, is decoding in another thread "
                "at this moment; give each thread models of its own, or one Session to all"
            )
        # A draft may share the config of a target that is switched already.
        own = [
            config[OWN][1] if OWN in config else {name: config[name] for name in SWITCHED if name in config}
            for config in paths
        ]
        found = [(config, *entry) for config, kept in zip(paths, own, strict=True) for entry in kept.items()]
        changes = [(vars(self.model), "_bass_path", (thread, self.path, found))]
        changes += [*self._forwards, *self._kept]
        changes += [change for change in self._lean if "forward" not in change[0]]  # nobody stands in for it
        changes += [(config, internals.ATTENTION, _prefixed(self.path)) for config in paths]
        changes += [(config, OWN, (thread, kept)) for config, kept in zip(paths, own, strict=True)]
        # GPT-2 looks for this id in every pass, and has the host wait, to warn of padding that there is not.
        return changes + [(paths[0], "pad_token_id", None)] * ("pad_token_id" in paths[0])


def evaluating(modules: Iterable[dict]) -> AbstractContextManager[None]:
    """Evaluation mode for the modules that these are the `vars` of; those that were training train again afterwards."""
    return changed([(module, "training", False) for module in modules if module["training"]])


def configurations(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Return the model's configuration, all below it, and those of its modules.

    Parts of T5 have copies. A layer that was taken from another model has that model's.
    """
    found = [config for module in model.modules() if isinstance(config := vars(module).get("config"), PreTrainedConfig)]
    found.insert(0, model.config)
    for config in found:
        found += [sub for name in config.sub_configs if (sub := getattr(config, name, None)) is not None]
    return list({id(config): config for config in found}.values())


def has_short_convolutions(model: PreTrainedModel) -> bool:
    """Whether some layers have a state that is kept by position."""
    return any(map(internals.is_short_convolution, model.modules()))


def rotary_switch(model: PreTrainedModel) -> int | None:
    """The length beyond which a text's rotary factors are others (longrope); None where they are always the same."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    return rope.get("original_max_position_embeddings") if rope.get("rope_type") == "longrope" else None


def recomputed_beyond(model: PreTrainedModel) -> int | None:
    """`rotary_switch` of a model whose `generate` drops what it has of a text that grows longer (Phi-3), else None."""
    theirs = type(model).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation
    known = hasattr(model.config, "original_max_position_embeddings")
    return rotary_switch(model) if theirs and known else None


def _keeping(model: PreTrainedModel, hidden: TokenStates) -> Callable:
    """The model's layers, whose hidden states are kept in the passes of the cache that keeps them."""
    forward = model.get_decoder().forward

    def keeping(*args, **kwargs) -> Any:
        output = forward(*args, **kwargs)
        if _thread.current is not None and _thread.current is hidden.cache.current:
            hidden.keep(output[0])
        return output

    return keeping


def _at_positions(table: nn.Embedding) -> Callable:
    """A table of learned positions (BART and its relatives) that would go by the cache's length, which rows share."""
    forward, offset = table.forward, getattr(table, "offset", 0)

    def at_positions(*args, **kwargs) -> Tensor:
        if (current := _thread.current) is None:
            return forward(*args, **kwargs)
        return F.embedding(current.pack(current.positions) + offset, table.weight)

    return at_positions


def _at_computed_positions(module: nn.Module, width: int, dtype: torch.dtype) -> Callable:
    """Such a module, as `_at_positions`; padding has no position."""
    forward, padding = module.forward, getattr(module, "padding_idx", None)

    def at_positions(first: Tensor, *args, **kwargs) -> Tensor:
        if (current := _thread.current) is None:
            return forward(first, *args, **kwargs)
        states = torch.zeros(1, current.extent, width, dtype=dtype, device=current.positions.device)
        found = forward(inputs_embeds=states)[0][current.pack(current.positions)]
        if padding is None or first.is_floating_point():
            return found
        return found.masked_fill((first == padding)[..., None], 0)

    return at_positions


def _bias_by_row(module: nn.Module) -> Callable:
    """A relative position bias (T5 and its relatives) that would go by the cache's length, which rows share."""
    compute = module.compute_bias

    def by_row(*args, **kwargs) -> Tensor:
        if (current := _thread.current) is None:
            return compute(*args, **kwargs)
        device, extent = current.positions.device, current.extent
        of_last = compute(1, extent, device=device, past_seen_tokens=extent - 1)  # [1, H, 1, extent], nearest last
        by_distance = of_last[0, :, 0].flip(1).T  # [extent, H]
        distances = current.positions[..., None] - torch.arange(extent, device=device)  # [B, Q, extent]
        return by_distance[distances.clamp(min=0)].permute(0, 3, 1, 2)  # a mask hides what is later

    return by_row


def _by_row(forward: Callable, switch: int) -> Callable:
    """longrope, each row by itself: transformers goes by the largest position of all rows in the pass.

    As for a row alone, a prompt longer than the switch has the factors of long texts throughout; of other rows the
    tokens from position `switch` on, while earlier ones keep the keys that they have.
    """

    def by_row(x: Tensor, position_ids: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if (current := _thread.current) is None:
            return forward(x, position_ids, *args, **kwargs)
        in_long_prompt = current.prompt is not None and current.prompt > switch
        is_long = current.positions >= (0 if in_long_prompt else switch)
        if current.last_only:
            is_long |= ((current.starts <= 0) & (current.ends > switch))[:, None]
        beyond = torch.cat([position_ids, torch.full_like(position_ids[:, :1], switch)], dim=1)
        short = forward(x, position_ids.clamp(max=switch - 1), *args, **kwargs)
        long = forward(x, beyond, *args, **kwargs)
        chosen = current.pack(is_long)[..., None]
        return tuple(torch.where(chosen, b[:, :-1], a) for a, b in zip(short, long, strict=True))

    return by_row


def forward(model: PreTrainedModel, path: str, ids: Tensor, current: Pass, cache: RaggedCache) -> Tensor:
    """Logits of one pass inside `Switch(model, path).on()`: [B, Q, V], or [B, 1, V] of the last query token.

    ids: int64 [B, Q]. Where `current` is packed, the model sees [1, T]; logits at padding are 0 then.
    """
    try:
        try:
            cache.current = _thread.current = current
            mask = _eager_masks(model, current) if path == "eager" else None
            if cache.sources is None:
                inputs = {"input_ids": current.pack(ids), "attention_mask": mask}
                inputs[internals.cache_argument(type(model))] = cache
            else:
                inputs = {"decoder_input_ids": current.pack(ids), "decoder_attention_mask": mask}
                inputs |= cache.sources.inputs(current, model, path)
            logits = model(**inputs, use_cache=True, **_extra_inputs(model, current)).logits
        finally:
            _thread.current = None
    finally:
        _thread.current = None  # again: a Ctrl-C may have fallen into the first
    return logits[:, -1:] if current.last_only else current.unpack(logits)


def _extra_inputs(model: PreTrainedModel, current: Pass) -> dict:
    """Position ids, and the request for the last logits alone, for models whose forward has them."""
    names = internals.forward_names(type(model))
    inputs = {
        name: current.pack(current.positions) for name in ("position_ids", "decoder_position_ids") if name in names
    }
    if current.last_only and "logits_to_keep" in names:
        inputs["logits_to_keep"] = 1
    if current.features is not None:
        inputs["features"] = current.pack(current.features)
    return inputs


def _eager_masks(model: PreTrainedModel, current: Pass) -> Tensor | dict[str, Tensor]:
    """Additive 4-D mask [B, 1, Q, extent]; one per layer type for models that mix them.

    A single plain mask would be silently wrong for sliding-window models.
    """
    config = model.config.get_text_config()

    def mask(window: int | None = None, chunk: int | None = None) -> Tensor:
        hidden = ~current.visible(window, chunk)[:, None]
        # The smallest finite number, as transformers does: some models add masks up, and -inf twice is NaN.
        lowest = torch.finfo(model.dtype).min
        return torch.zeros(hidden.shape, dtype=model.dtype, device=hidden.device).masked_fill_(hidden, lowest)

    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return mask(window)
    options = {
        "full_attention": {},
        "sliding_attention": {"window": window},
        "chunked_attention": {"chunk": getattr(config, "attention_chunk_size", None)},
    }
    masks = {kind: mask(**options[kind]) for kind in sorted(set(layer_types)) if kind in options}
    masks |= {"conv": None} if "conv" in layer_types else {}
    return masks if internals.takes_mask_per_layer_type(model) else masks[layer_types[0]]


def context_length(model: PreTrainedModel) -> int | None:
    """How many positions the model has, None if it does not say."""
    config = model.config.get_text_config()
    if hasattr(config, "relative_attention_num_buckets"):
        return None  # T5: n_positions is what it was trained with
    for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"):
        if isinstance(value := getattr(config, name, None), int) and value > 0:
            return value
    return None
