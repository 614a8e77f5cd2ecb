"""A model bound to its ragged cache: one forward pass at a time, for target and draft alike.

`feed` appends tokens to rows, each row its own number of them; `feed_last` picks these from the ends of rows (prefill,
a draft catching up). Positions, write slots and the lengths that attention needs are worked out here, so that nobody
else thinks about padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

BUCKET = 8  # packed tokens on CUDA are rounded up to a multiple of it
EXTENT = 128  # slots to which the reach of a fixed pass is rounded up, on paths whose work grows with it
PACKED_BELOW = 0.6  # share of [B, Q] that is submitted, below which packing repays its copies (two CPU cores)


def packs(query_lengths: Sequence[int], width: int) -> bool:
    """Whether a pass over rows that submit so many tokens each, of `width` at most, is worth packing."""
    return 0 < sum(query_lengths) < PACKED_BELOW * len(query_lengths) * width


def _places(ids: Tensor, starts: Tensor, counts: Tensor, scratch_kv_slot: int) -> tuple[Tensor, Tensor, Tensor]:
    """Positions and slots [B, Q] of tokens, and the rows' ends [B], where row b submits its first counts[b]."""
    ends = starts + counts
    wanted = starts[:, None] + torch.arange(ids.shape[1], device=ids.device)
    return *_within(wanted, ends, scratch_kv_slot), ends


def _following(starts: Tensor, width: int) -> Tensor:
    """start, start + 1, … of each row: [B, width]."""
    first = starts[:, None]
    return first if width == 1 else first + torch.arange(width, device=starts.device)


def _within(wanted: Tensor, ends: Tensor, scratch_kv_slot: int) -> tuple[Tensor, Tensor]:
    """Positions and slots [B, Q] of tokens at the wanted positions, of which those from `ends` [B] on are padding."""
    # A padding query repeats its row's last valid position: at the end of the context there is no next one.
    positions = torch.minimum(wanted, ends[:, None] - 1).clamp(min=0)
    return positions, wanted.where((wanted >= 0) & (wanted < ends[:, None]), scratch_kv_slot)


class Layers:
    """How a model's layers run: operator by operator here. `gpu.compiled_layers` has another strategy."""

    def __init__(self, model: PreTrainedModel, cache: RaggedCache):
        """model's passes go over `cache`."""
        self.changes: list[Change] = cpu_layers.changes(model) if model.device.type == "cpu" else []  # while switched

    def fixed(self) -> AbstractContextManager[None]:
        """Hold around a pass of fixed shape."""
        return nullcontext()

    def fused(self, function: Callable) -> Callable:
        """Return a function of tensors that does the same, as one region where there is a compiler."""
        return function


class Runner:
    """`model` on an attention path, with a cache for `max_rows` rows of `capacity` positions.

    A context manager: leaving it (or `release`) frees the cache. The model is changed (attention implementation,
    evaluation mode) only inside `prepared` or a single pass, and left as it was found.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        path: str,
        max_rows: int,
        capacity: int = 0,
        layers: Callable[[PreTrainedModel, RaggedCache], Layers] = Layers,
        keeps_hidden: bool = False,
        suppressed: Sequence[int] = (),
    ):
        """layers: how they run. keeps_hidden: the cache also keeps the hidden states of the model's last layer.
        suppressed: ids whose logits are -inf."""
        self.model = model
        self.path = path
        reads = model.config.is_encoder_decoder
        config = model.config.get_text_config()
        depth = len(architectures.layers_of(model)) if reads else config.num_hidden_layers
        self.cache = RaggedCache(depth, max_rows, capacity, path == "eager")
        self.sources = Sources(self.cache, config.hidden_size) if reads else None
        self._hidden: TokenStates | None = self.cache.token_states("hidden") if keeps_hidden else None
        self.layers = layers(model, self.cache)
        self.bucket = BUCKET if model.device.type == "cuda" else 1
        self._adapters: tuple[str, ...] = ()  # by name, and peft's layers that have them
        self._adapted: list[torch.nn.Module] = []
        self._suppressed = torch.tensor(suppressed, device=model.device) if suppressed else None
        self.context = architectures.context_length(model)  # positions; None: it does not say
        self._switch = architectures.switch(model, path, self._hidden, self.layers.changes)
        self._shared: tuple[tuple, ...] = ()  # what the layers of this model share of a pass

    @property
    def adapters(self) -> list[tuple]:
        """Which adapters apply now, layer by layer, and how much: recorded passes have those of their recording."""
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
        """Keep the model switched to this runner's path for many passes; nests."""
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
    ) -> Tensor:
        """Logits [B, Q, V] of each row's tokens at positions start, start + 1, … (last_only: of the last, [B, 1, V]).

        ids: int64 [B, Q], of which row b submits the first query_lengths[b], less those at negative positions. Logits
        beyond a row's query length are meaningless. starts: int64 [B], and the same numbers on the host. batch_slots:
        where the rows live, from batch slot 0 on if None. packed: whether the model sees the submitted tokens alone, as
        one row;
        None: where that saves enough (`packs`; the path `eager` cannot). features: [B, Q, H], for models
        that read such. prompt: how long the prompt is of which this is a chunk.

        starts_host=None: nothing is known on the host (query_lengths is a tensor), the shapes are all that such a pass
        depends on, and it can be compiled and recorded. It then looks at `max_kv_length` slots. An ordinary pass has to
        come
        first: it makes the cache's buffers, and shows what the layers share.
        """
        known, (rows, width) = starts_host is not None, ids.shape
        batch_slots = range(rows) if batch_slots is None else batch_slots
        kv_lengths, flat = None, None
        if known:
            wanted = positions = kv_slots = _following(starts, width)
            full = min(query_lengths) == width
            ends = starts + (width if full else torch.tensor(query_lengths, device=ids.device))  # [B]
            kv_lengths = [int(start + length) for start, length in zip(starts_host, query_lengths, strict=True)]
            max_kv_length = max(kv_lengths)
            if packed is None:
                packed = self.path != "eager" and not last_only and packs(query_lengths, width)
            flat = self._submitted(query_lengths, width) if packed else None
            if not full or min(starts_host) < 0:
                positions, kv_slots = _within(wanted, ends, self.cache.scratch_kv_slot)
        else:
            positions, kv_slots, ends = self.layers.fused(_places)(
                ids, starts, query_lengths, self.cache.scratch_kv_slot
            )
        where, seen = (positions, kv_slots, starts, ends), (batch_slots, max_kv_length, self.cache.kv_slots)
        return self._forward(ids, Pass(*where, *seen, kv_lengths, flat, last_only, phase, features, prompt))

    def feed_last(
        self,
        tokens: Tensor,
        lengths: Sequence[int],
        count: int,
        batch_slots: range | None = None,
        features: Tensor | None = None,
        prompt: int | None = None,
    ) -> Tensor:
        """Logits [B, V] after each row's last token, having fed its last `count` tokens (all, if it has fewer).

        tokens: int64 [B, >= max length], each row's tokens from position 0; lengths: how many each row has. Rewriting
        positions that the cache already holds writes the same values again. features [B, count, H], prompt: as in
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
        }
        return self.feed(ids, starts, [count] * len(ids), **options)[:, -1]

    def read(self, sources: Sequence[Source] | Encoded, batch_slots: range) -> Encoded:
        """Encode what the rows in these batch slots read; their next pass, which has to be theirs alone, writes it into
        the cache. sources: of each row, or what an encoder has made of them."""
        with self.cache.explaining(), self.prepared():
            encoded = sources if isinstance(sources, Encoded) else encode(self.model, sources)
        self.sources.read(encoded, batch_slots)
        return encoded

    def hidden(self, batch_slots: range) -> Tensor | None:
        """What the last layer has left of each token [B, slots, H], where it is kept."""
        return None if self._hidden is None else self._hidden.of(batch_slots)

    @property
    def capacity(self) -> int:
        """How many positions a row can have: those that the cache holds, as far as the model's context goes."""
        return min(self.cache.kv_slots - 1, self.context or self.cache.kv_slots)

    def max_kv_length(self, longest: int) -> int:
        """How many slots a pass of fixed shape looks at where rows hold `longest` tokens at most: the whole cache for
        the kernel that goes by the rows' own lengths, else few sizes, since each is another pass to record."""
        return self.capacity if self.path == "ragged" else min(self.capacity, -(-longest // EXTENT) * EXTENT)

    def _submitted(self, query_lengths: Sequence[int], width: int) -> Tensor:
        """Flat indices [T] into [B, Q] of the tokens that rows submit. On CUDA T is rounded up: shapes repeat."""
        flat = [row * width + offset for row, length in enumerate(query_lengths) for offset in range(length)]
        flat += [len(query_lengths) * width] * (-len(flat) % self.bucket)
        return torch.tensor(flat, dtype=torch.int64, device=self.model.device)

    def _forward(self, ids: Tensor, current: Pass) -> Tensor:
        fixed = current.kv_lengths is None
        with self.cache.explaining(), self.prepared(), self.layers.fixed() if fixed else nullcontext():
            for kind in self._shared if fixed else ():
                current.once(*kind)  # before the layers, of which compiled code sees one at a time
            logits = self.run_model(ids, current)
        if self._suppressed is not None:
            logits = logits.index_fill(-1, self._suppressed, -torch.inf)
        if not fixed:
            self._shared = tuple(current.shared)
        return logits

    def run_model(self, ids: Tensor, current: Pass) -> Tensor:
        """Return the model's logits of one pass: [B, Q, V], or [B, 1, V] of the last query token. At padding they are
        meaningless. ids: int64 [B, Q]."""
        with running(current):
            self.cache.current = current
            logits = self.model(**self._inputs(ids, current), use_cache=True).logits
        return logits[:, -1:] if current.last_only else current.unpack(logits)

    def _inputs(self, ids: Tensor, current: Pass) -> dict:
        """Return what the model's forward takes in this pass. A packed pass gives the model ids [1, T]."""
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
    """Additive 4-D mask [B, 1, Q, max_kv_length]; one per layer type for models that mix them.

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
