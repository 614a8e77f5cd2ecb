"""A model bound to its ragged cache: one forward pass at a time, for target and draft alike.

`feed` appends tokens to rows, with a separate number for each row. `feed_last` feeds the last tokens of rows (prefill,
or a draft model that catches up). Only this module computes positions, KV slots and padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bass_core.model import architectures, cpu_layers
from bass_core.model import transformers_internals as internals
from bass_core.model.cache import RaggedCache, TokenStates
from bass_core.model.encoder_decoder import Encoded, Source, Sources, encode
from bass_core.model.forward_pass import Pass, Phase, running
from bass_core.model.patching import Change
from bass_core.model.recurrent import RowStates, has_state

BUCKET = 8  # packed tokens on CUDA are rounded up to a multiple
EXTENT = 128  # KV lengths of fixed passes are rounded up to a multiple, on paths whose work grows with this length
PACKED_BELOW = 0.6  # share of submitted tokens in [B, Q] below which packing repays its copies (two CPU cores)


def packs(query_lengths: Sequence[int], width: int) -> bool:
    """Return True if packing pays for a pass of at most `width` tokens per row."""
    return 0 < sum(query_lengths) < PACKED_BELOW * len(query_lengths) * width


def _places(ids: Tensor, starts: Tensor, counts: Tensor, scratch_kv_slot: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return positions and KV slots [B, Q], and the rows' ends [B]. Row b submits its first counts[b] tokens."""
    ends = starts + counts
    wanted = starts[:, None] + torch.arange(ids.shape[1], device=ids.device)
    return *_within(wanted, ends, scratch_kv_slot), ends


def _following(starts: Tensor, width: int) -> Tensor:
    """Return start, start + 1, … of each row: [B, width]."""
    first = starts[:, None]
    return first if width == 1 else first + torch.arange(width, device=starts.device)


def _within(wanted: Tensor, ends: Tensor, scratch_kv_slot: int) -> tuple[Tensor, Tensor]:
    """Return positions and KV slots [B, Q] of tokens at the wanted positions. Tokens from `ends` [B] on are padding."""
    # A padding query repeats its row's last valid position, because the next one may exceed the context.
    positions = torch.minimum(wanted, ends[:, None] - 1).clamp(min=0)
    return positions, wanted.where((wanted >= 0) & (wanted < ends[:, None]), scratch_kv_slot)


class Layers:
    """Runs a model's layers operator by operator. `gpu.compiled_layers` has another strategy."""

    def __init__(self, model: PreTrainedModel, cache: RaggedCache):
        self.faster = cpu_layers.FasterLayers(model, not cache.contiguous) if model.device.type == "cpu" else None

    def changes(self) -> list[Change]:
        """Return the changes for the time in which the model is switched."""
        return [] if self.faster is None else self.faster.changes()

    def fixed(self) -> AbstractContextManager[None]:
        """Return the context of a pass with fixed shapes."""
        return nullcontext()

    def fused(self, function: Callable) -> Callable:
        """Return a function of tensors with the same result, compiled as one region if there is a compiler."""
        return function


class Runner:
    """Runs `model` on an attention path, with a cache for `max_rows` rows of `capacity` positions.

    A context manager; leaving the context (or `release`) frees the cache. The model is changed (attention
    implementation, evaluation mode) only inside `prepared` or a single pass, and restored afterwards.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        path: str,
        max_rows: int,
        capacity: int = 0,
        layers: Callable[[PreTrainedModel, RaggedCache], Layers] = Layers,
        keeps_hidden: bool = False,
    ):
        """layers: strategy for running the layers. keeps_hidden: store the hidden states of the model's last layer,
        too."""
        self.model = model
        self.path = path
        reads = model.config.is_encoder_decoder
        config = model.config.get_text_config()
        depth = len(architectures.layers_of(model)) if reads else config.num_hidden_layers
        self.cache = RaggedCache(depth, max_rows, capacity, path == "eager")
        self.sources = Sources(self.cache, config.hidden_size) if reads else None
        self.states = RowStates(self.cache) if has_state(model) else None
        self._hidden: TokenStates | None = self.cache.token_states("hidden") if keeps_hidden else None
        self.layers = layers(model, self.cache)
        self.bucket = BUCKET if model.device.type == "cuda" else 1
        self._adapters: tuple[str, ...] = ()  # names of adapters, and the peft layers with adapters
        self._adapted: list[torch.nn.Module] = []
        self.context = architectures.context_length(model)  # positions, or None if the config does not say
        self._switch = architectures.switch(model, path, self._hidden, self.layers.changes)
        self._shared: tuple[tuple, ...] = ()  # values that the layers share within a pass

    @property
    def adapters(self) -> list[tuple]:
        """Return the state of the adapters, layer by layer. A captured pass is valid only for the state at capture."""
        if (named := tuple(getattr(self.model, "peft_config", ()))) != self._adapters:
            inside = (each for each in self.model.modules() if not isinstance(each, PreTrainedModel))
            self._adapters, self._adapted = named, [each for each in inside if hasattr(each, "disable_adapters")]
        return [
            (
                each.disable_adapters,
                tuple(each.active_adapters),
                tuple(getattr(each, "merged_adapters", ())),
                tuple(getattr(each, "scaling", {}).items()),
            )
            for each in self._adapted
        ]

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exc) -> None:
        self.release()

    def prepared(self) -> AbstractContextManager[None]:
        """Keep the model switched to this runner's path for many passes. Contexts may be nested."""
        return nullcontext() if self._switch.is_on else self._switch.on()

    def feed(
        self,
        ids: Tensor,
        starts: Tensor,
        query_lengths: Sequence[int] | Tensor,
        *,
        starts_host: Sequence[int] | None = None,
        max_kv_length: int | None = None,
        batch_slots: range | None = None,
        packed: bool | None = None,
        last_only: bool = False,
        phase: Phase | None = None,
        features: Tensor | None = None,
        prompt: int | None = None,
        committed_until: Sequence[int] | None = None,
    ) -> Tensor:
        """Return the logits [B, Q, V] of each row's tokens at positions start, start + 1, …

        ids: int64 [B, Q]. Row b submits its first query_lengths[b] tokens, except at negative positions. Other logits
        are meaningless. starts: int64 [B]. starts_host: the same numbers on the host. batch_slots: the rows' batch
        slots, from 0 on if None. packed: pass only the submitted tokens to the model, as a single row. None: pack if
        this pays (`packs`). The path `eager` does not support packing. last_only: return only the last logits,
        [B, 1, V]. features: [B, Q, H], for models that read hidden states. prompt: length of the prompt, if the pass
        reads a chunk of a prompt. committed_until: see `Pass`; by default `starts_host`, since drafts may be rejected.

        With starts_host=None, the host knows nothing, query_lengths is a tensor, and the pass reads `max_kv_length` KV
        slots. The pass then depends only on shapes, and can be compiled and captured. An ordinary pass must run before,
        to allocate the cache and to determine the values that layers share.
        """
        known, (rows, width) = starts_host is not None, ids.shape
        batch_slots = range(rows) if batch_slots is None else batch_slots
        kv_lengths, flat, begins = None, None, None
        if known:
            begins = [int(start) for start in starts_host]
            wanted = positions = kv_slots = _following(starts, width)
            full = min(query_lengths) == width
            ends = starts + (width if full else torch.tensor(query_lengths, device=ids.device))  # [B]
            kv_lengths = [start + int(length) for start, length in zip(begins, query_lengths, strict=True)]
            max_kv_length = max(kv_lengths)
            if packed is None:
                packed = self.path != "eager" and not last_only and packs(query_lengths, width)
            flat = self._submitted(query_lengths, width) if packed else None
            if not full or min(begins) < 0:
                positions, kv_slots = _within(wanted, ends, self.cache.scratch_kv_slot)
        else:
            positions, kv_slots, ends = self.layers.fused(_places)(
                ids, starts, query_lengths, self.cache.scratch_kv_slot
            )
        where, seen = (positions, kv_slots, starts, ends), (batch_slots, max_kv_length, self.cache.kv_slots)
        until = begins if committed_until is None else [int(position) for position in committed_until]
        options = (last_only, phase, features, prompt, begins, until)
        return self.run(ids, Pass(*where, *seen, kv_lengths, flat, *options))

    def columns(self, starts: Tensor, starts_host: Sequence[int], count: int) -> Iterator[Pass]:
        """Return `count` passes over one token per row, for `run`. Tokens beyond the capacity are padding."""
        kv_lengths = [min(int(start) + count, self.capacity) for start in starts_host]
        ends = (starts + count).clamp(max=self.capacity)
        positions, kv_slots = _within(_following(starts, count), ends, self.cache.scratch_kv_slot)
        where, seen = (positions, kv_slots, starts, ends), (range(len(starts)), max(kv_lengths), self.cache.kv_slots)
        yield from Pass(*where, *seen, kv_lengths, starts_host=[int(start) for start in starts_host]).columns()

    def feed_last(
        self,
        tokens: Tensor,
        lengths: Sequence[int],
        count: int,
        batch_slots: range | None = None,
        features: Tensor | None = None,
        prompt: int | None = None,
    ) -> Tensor:
        """Feed each row's last `count` tokens (or all, if fewer), and return the logits [B, V] after the last token.
        All are committed tokens.

        tokens: int64 [B, >= max length], each row's tokens from position 0. lengths: number of tokens of each row.
        Positions that the cache already holds are rewritten with the same values. features [B, count, H], prompt: see
        `feed`.
        """
        starts = torch.tensor(lengths, device=tokens.device) - count  # [B]
        ids = tokens.gather(1, (starts[:, None] + torch.arange(count, device=tokens.device)).clamp(min=0))
        starts_host = [length - count for length in lengths]
        options = {
            "starts_host": starts_host,
            "batch_slots": batch_slots,
            "last_only": True,
            "features": features,
            "prompt": prompt,
            "committed_until": lengths,
        }
        return self.feed(ids, starts, [count] * len(ids), **options)[:, -1]

    def read(self, sources: Sequence[Source] | Encoded, batch_slots: range) -> Encoded:
        """Encode and return the sources of the rows in these batch slots. The next pass must run over exactly these
        rows, and writes the keys and values. sources: the rows' sources, or encoder states."""
        with self.cache.explaining(), self.prepared():
            encoded = sources if isinstance(sources, Encoded) else encode(self.model, sources)
        self.sources.read(encoded, batch_slots)
        return encoded

    def hidden(self, batch_slots: range) -> Tensor | None:
        """Return the stored hidden states of the last layer, [B, slots, H], or None."""
        return None if self._hidden is None else self._hidden.of(batch_slots)

    @property
    def capacity(self) -> int:
        """The maximum number of positions per row: the cache's capacity, or a shorter context of the model."""
        return min(self.cache.kv_slots - 1, self.context or self.cache.kv_slots)

    def max_kv_length(self, longest: int) -> int:
        """Return the KV length of a pass with fixed shapes, for rows of at most `longest` tokens. The ragged kernel
        reads each row's own length, so the passes cover the whole cache. Other paths use few lengths, because each
        length requires another capture."""
        return self.capacity if self.path == "ragged" else min(self.capacity, -(-longest // EXTENT) * EXTENT)

    def _submitted(self, query_lengths: Sequence[int], width: int) -> Tensor:
        """Return flat indices [T] into [B, Q] of the submitted tokens. On CUDA, T is rounded up: shapes repeat."""
        flat = [row * width + offset for row, length in enumerate(query_lengths) for offset in range(length)]
        flat += [len(query_lengths) * width] * (-len(flat) % self.bucket)
        return torch.tensor(flat, dtype=torch.int64, device=self.model.device)

    def run(self, ids: Tensor, current: Pass) -> Tensor:
        """Return the logits of a pass: [B, Q, V], as `feed`. ids: int64 [B, Q]."""
        fixed = current.kv_lengths is None
        with self.cache.explaining(), self.prepared(), self.layers.fixed() if fixed else nullcontext():
            for kind in self._shared if fixed else ():
                current.once(*kind)  # before the layers, because compiled code sees one layer at a time
            logits = self.run_model(ids, current)
        if not fixed:
            self._shared = tuple(current.shared)
        return logits

    def run_model(self, ids: Tensor, current: Pass) -> Tensor:
        """Return the logits of a pass: [B, Q, V], or [B, 1, V] for the last query token. Logits of padding are
        meaningless. ids: int64 [B, Q]."""
        with running(current):
            self.cache.current = current
            logits = self.model(**self._inputs(ids, current), use_cache=True).logits
        return logits[:, -1:] if current.last_only else current.unpack(logits)

    def _inputs(self, ids: Tensor, current: Pass) -> dict:
        """Return the arguments of the model's forward for this pass. A packed pass has ids [1, T]."""
        model, kind = self.model, type(self.model)
        mask = _eager_masks(model, current) if self.path == "eager" else None
        if self.sources is None:
            inputs = {
                "input_ids": current.pack(ids),
                "attention_mask": mask,
                internals.cache_argument(kind): self.cache,
            }
        else:
            inputs = {"decoder_input_ids": current.pack(ids), "decoder_attention_mask": mask}
            inputs |= self.sources.inputs(current, model, self.path)
        names = internals.forward_names(kind)
        for name in ("position_ids", "decoder_position_ids"):
            if name in names:
                inputs[name] = current.pack(current.positions)
        if current.last_only and "logits_to_keep" in names:
            inputs["logits_to_keep"] = 1
        if current.features is not None:
            inputs["features"] = current.pack(current.features)
        return inputs

    def release(self) -> None:
        """Free the cache's memory."""
        self.cache.release()


def _eager_masks(model: PreTrainedModel, current: Pass) -> Tensor | dict[str, Tensor]:
    """Return the additive mask [B, 1, Q, max_kv_length], or one per layer type for models with several types."""
    config = model.config.get_text_config()

    def mask(window: int | None = None, chunk: int | None = None) -> Tensor:
        hidden = ~current.visible(window, chunk)[:, None]
        # The smallest finite number, as in transformers: some models add masks, and twice -inf gives NaN.
        lowest = torch.finfo(model.dtype).min
        return torch.zeros(hidden.shape, dtype=model.dtype, device=hidden.device).masked_fill_(hidden, lowest)

    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return mask(window)
    options = {
        "full_attention": {},
        "indexed_attention": {},  # transformers before 5.24: deepseek_sparse_attention
        "deepseek_sparse_attention": {},
        "sliding_attention": {"window": window},
        "chunked_attention": {"chunk": getattr(config, "attention_chunk_size", None)},
    }
    kinds = {*layer_types, "full_attention", "linear_attention"}  # hybrid models ask for these two by name
    masks = {kind: mask(**options[kind]) if kind in options else None for kind in sorted(kinds)}
    first = next((kind for kind in layer_types if kind in options), "full_attention")
    return masks if internals.takes_mask_per_layer_type(model) else masks[first]
