"""A model bound to its ragged cache: one forward pass at a time, for target and draft alike.

`feed` appends tokens to rows, each row its own number of them; `feed_last` picks these from the ends of rows (prefill,
a draft catching up). Positions, write slots and the lengths that attention needs are worked out here, so that nobody
else thinks about padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bass_core.gpu import compiled_layers
from bass_core.model import attention
from bass_core.model.cache import Pass, Phase, RaggedCache
from bass_core.model.encoder_decoder import Encoded, Source, Sources, encode

BUCKET = 8  # packed tokens on CUDA are rounded up to a multiple of it
EXTENT = 128  # slots to which the reach of a fixed pass is rounded up, on paths whose work grows with it
PACKED_BELOW = 0.6  # share of [B, Q] that is submitted, below which packing repays its copies (two CPU cores)


def packs(query_lengths: Sequence[int], width: int) -> bool:
    """Whether a pass over rows that submit so many tokens each, of `width` at most, is worth packing."""
    return 0 < sum(query_lengths) < PACKED_BELOW * len(query_lengths) * width


def _places(ids: Tensor, starts: Tensor, counts: Tensor, scratch_slot: int) -> tuple[Tensor, Tensor, Tensor]:
    """Positions and slots [B, Q] of tokens, and the rows' ends [B], where row b submits its first counts[b]."""
    ends = starts + counts
    wanted = starts[:, None] + torch.arange(ids.shape[1], device=ids.device)
    return *_within(wanted, ends, scratch_slot), ends


def _following(starts: Tensor, width: int) -> Tensor:
    """start, start + 1, … of each row: [B, width]."""
    first = starts[:, None]
    return first if width == 1 else first + torch.arange(width, device=starts.device)


def _within(wanted: Tensor, ends: Tensor, scratch_slot: int) -> tuple[Tensor, Tensor]:
    """Positions and slots [B, Q] of tokens at the wanted positions, of which those from `ends` [B] on are padding."""
    # A padding query repeats its row's last valid position: at the end of the context there is no next one.
    positions = torch.minimum(wanted, ends[:, None] - 1).clamp(min=0)
    return positions, wanted.where((wanted >= 0) & (wanted < ends[:, None]), scratch_slot)


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
        compiled: bool = False,
        keeps_hidden: bool = False,
        suppressed: Sequence[int] = (),
    ):
        """compiled: passes of fixed shape run through compiled layers (module compiled_layers). keeps_hidden: the cache
        also keeps what the model's last layer leaves of each token. suppressed: ids whose logits are -inf."""
        self.model = model
        self.path = path
        reads = model.config.is_encoder_decoder
        config = model.config.get_text_config()
        layers = len(compiled_layers.layers_of(model)) if reads else config.num_hidden_layers
        self.cache = RaggedCache(layers, max_rows, capacity, path == "eager", keeps_hidden)
        if reads:
            self.cache.sources = Sources(self.cache, config.hidden_size)
        self.compiled = compiled
        # On a GPU also where nothing is compiled: a later session would move weights that recordings point at.
        self._siblings, lean = [], []
        if compiled or model.device.type == "cuda":
            from bass_core.gpu import fused_projections

            self._siblings = fused_projections.arrange(model)
        elif model.device.type == "cpu":
            from bass_core.model import cpu_layers

            lean = cpu_layers.changes(model)
        self.bucket = BUCKET if model.device.type == "cuda" else 1
        self._adapters: tuple[str, ...] = ()  # by name, and peft's layers that have them
        self._adapted: list[torch.nn.Module] = []
        self._suppressed = torch.tensor(suppressed, device=model.device) if suppressed else None
        self.context = attention.context_length(model)  # positions; None: it does not say
        self._switch = attention.Switch(model, path, self.cache.hidden, lean)
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

    def fused(self, function: Callable) -> Callable:
        """A function of tensors, compiled as one region if this runner compiles."""
        return compiled_layers.region(function) if self.compiled else function

    def feed(
        self,
        ids: Tensor,
        starts: Tensor,
        query_lengths: Sequence[int] | Tensor,
        *,
        starts_host: Sequence[int] | None = None,
        extent: int | None = None,
        places: range | None = None,
        packed: bool | None = None,
        last_only: bool = False,
        phase: Phase | None = None,
        features: Tensor | None = None,
        prompt: int | None = None,
    ) -> Tensor:
        """Logits [B, Q, V] of each row's tokens at positions start, start + 1, … (last_only: of the last, [B, 1, V]).

        ids: int64 [B, Q], of which row b submits the first query_lengths[b], less those at negative positions. Logits
        beyond a row's query length are meaningless. starts: int64 [B], and the same numbers on the host. places: where
        the rows live, from place 0 on if None. packed: whether the model sees the submitted tokens alone, as one row;
        None: where that saves enough (`packs`; the path `eager` cannot). features: [B, Q, H], for models
        that read such. prompt: how long the prompt is of which this is a chunk.

        starts_host=None: nothing is known on the host (query_lengths is a tensor), the shapes are all that such a pass
        depends on, and it can be compiled and recorded. It then looks at `extent` slots. An ordinary pass has to come
        first: it makes the cache's buffers, and shows what the layers share.
        """
        known, (rows, width) = starts_host is not None, ids.shape
        places = range(rows) if places is None else places
        kv_lengths, flat = None, None
        if known:
            wanted = positions = slots = _following(starts, width)
            full = min(query_lengths) == width
            ends = starts + (width if full else torch.tensor(query_lengths, device=ids.device))  # [B]
            kv_lengths = [int(start + length) for start, length in zip(starts_host, query_lengths, strict=True)]
            extent = max(kv_lengths)
            if packed is None:
                packed = self.path != "eager" and not last_only and packs(query_lengths, width)
            flat = self._submitted(query_lengths, width) if packed else None
            if not full or min(starts_host) < 0:
                positions, slots = _within(wanted, ends, self.cache.scratch_slot)
        else:
            positions, slots, ends = self.fused(_places)(ids, starts, query_lengths, self.cache.scratch_slot)
        where, seen = (positions, slots, starts, ends), (places, extent, self.cache.slots)
        return self._forward(ids, Pass(*where, *seen, kv_lengths, flat, last_only, phase, features, prompt))

    def feed_last(
        self,
        tokens: Tensor,
        lengths: Sequence[int],
        count: int,
        places: range | None = None,
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
            "places": places,
            "last_only": True,
            "features": features,
            "prompt": prompt,
        }
        return self.feed(ids, starts, [count] * len(ids), **options)[:, -1]

    def read(self, sources: Sequence[Source] | Encoded, places: range) -> Encoded:
        """Encode what the rows in these places read; their next pass, which has to be theirs alone, writes it into the
        cache. sources: of each row, or what an encoder has made of them."""
        with self.cache.explaining(), self.prepared():
            encoded = sources if isinstance(sources, Encoded) else encode(self.model, sources)
        self.cache.sources.read(encoded, places)
        return encoded

    def hidden(self, places: range) -> Tensor | None:
        """What the last layer has left of each token [B, slots, H], where it is kept."""
        return None if self.cache.hidden is None else self.cache.hidden.of(places)

    @property
    def room(self) -> int:
        """How many positions a row can have: those that the cache holds, as far as the model's context goes."""
        return min(self.cache.slots - 1, self.context or self.cache.slots)

    def extent(self, longest: int) -> int:
        """How many slots a pass of fixed shape looks at where rows hold `longest` tokens at most: the whole cache for
        the kernel that goes by the rows' own lengths, else few sizes, since each is another pass to record."""
        return self.room if self.path == "ragged" else min(self.room, -(-longest // EXTENT) * EXTENT)

    def _submitted(self, query_lengths: Sequence[int], width: int) -> Tensor:
        """Flat indices [T] into [B, Q] of the tokens that rows submit. On CUDA T is rounded up: shapes repeat."""
        flat = [row * width + offset for row, length in enumerate(query_lengths) for offset in range(length)]
        flat += [len(query_lengths) * width] * (-len(flat) % self.bucket)
        return torch.tensor(flat, dtype=torch.int64, device=self.model.device)

    def _forward(self, ids: Tensor, current: Pass) -> Tensor:
        fixed = current.kv_lengths is None
        layers = self._compiled_layers() if self.compiled and fixed else nullcontext()
        with self.cache.explaining(), self.prepared(), layers:
            for kind in self._shared if fixed else ():
                current.once(*kind)  # before the layers, of which compiled code sees one at a time
            logits = attention.forward(self.model, self.path, ids, current, self.cache)
        if self._suppressed is not None:
            logits = logits.index_fill(-1, self._suppressed, -torch.inf)
        if not fixed:
            self._shared = tuple(current.shared)
        return logits

    @contextmanager
    def _compiled_layers(self) -> Iterator[None]:
        """Layers run compiled inside."""
        from bass_core.gpu import fused_projections

        products = [change for group in self._siblings for change in fused_projections.together(group)]
        with attention.changed(products), compiled_layers.using(self.model, self.cache):
            yield

    def release(self) -> None:
        """Free the cache's memory."""
        self.cache.release()
