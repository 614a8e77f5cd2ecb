"""A model bound to its ragged cache: one forward pass at a time, for target and draft alike.

`feed` appends tokens to rows, each row its own number of them; `feed_last` feeds the last tokens of rows again or for
the first time (prefill, a draft catching up). Positions, write slots and the lengths that attention needs are worked
out here, so that nobody else thinks about padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bass_core import attention, compiled_layers
from bass_core.cache import Pass, RaggedCache
from bass_core.graphs import Graphs

BUCKET = 8  # packed tokens on CUDA are rounded up to a multiple of it
EXTENT = 128  # slots to which the reach of a fixed pass is rounded up, on paths whose work grows with it
PACKED_BELOW = 0.85  # share of [B, Q] that is submitted, below which packing repays its copies


def fixed_places(rows: int, most: int) -> int:
    """The rows of a fixed pass: rounded up to a power of two, since each number of them is another pass to record."""
    return min(1 << (rows - 1).bit_length(), most)


def packs(query_lengths: Sequence[int], width: int) -> bool:
    """Whether a pass over rows that submit so many tokens each, of `width` at most, is worth packing."""
    return 0 < sum(query_lengths) < PACKED_BELOW * len(query_lengths) * width


class Runner:
    """`model` on an attention path, with a cache for `max_rows` rows of `capacity` positions.

    A context manager: leaving it (or `release`) frees the cache. The model is changed (attention implementation,
    evaluation mode) only inside `prepared` or a single pass, and left as it was found.
    """

    def __init__(self, model: PreTrainedModel, path: str, max_rows: int, capacity: int = 0, compiled: bool = False):
        """compiled: fixed passes run through compiled layers (module compiled_layers)."""
        self.model = model
        self.path = path
        self.cache = RaggedCache(model.config.get_text_config().num_hidden_layers, max_rows, capacity)
        self.compiled = compiled
        self._is_prepared = False
        self._shared: tuple[tuple, ...] = ()  # what the layers of this model share of a pass
        self._inputs: tuple[Tensor, Tensor, Tensor] | None = None  # of recorded passes

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exc) -> None:
        self.release()

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Keep the model switched to this runner's path for many passes; nests."""
        if self._is_prepared:
            yield
            return
        with attention.using(self.model, self.path):
            self._is_prepared = True
            try:
                yield
            finally:
                self._is_prepared = False

    def feed(
        self,
        ids: Tensor,
        starts: Tensor,
        starts_host: Sequence[int],
        query_lengths: Sequence[int],
        places: range | None = None,
        packed: bool | None = None,
    ) -> Tensor:
        """Logits [B, Q, V] of each row's tokens at positions start, start + 1, ...

        ids: int64 [B, Q], of which row b submits the first query_lengths[b]. starts: int64 [B] (and the same numbers on
        the host). Logits beyond a row's query length are meaningless. packed: whether the model sees the submitted
        tokens alone, as one row; None: where it saves enough (`packs`; the path `eager` cannot).
        """
        positions, slots = starts[:, None] + torch.arange(ids.shape[1], device=ids.device), None
        if min(query_lengths) < ids.shape[1]:
            ends = starts + torch.tensor(query_lengths, device=ids.device)  # [B]
            positions, slots = self._padded(positions, ends)
        else:
            ends = starts + ids.shape[1]
        kv_lengths = [start + length for start, length in zip(starts_host, query_lengths, strict=True)]
        if packed is None:
            packed = self.path != "eager" and packs(query_lengths, ids.shape[1])
        submitted = self._submitted(query_lengths, ids.shape[1]) if packed else None
        return self._run(ids, positions, slots, starts, ends, kv_lengths, places, last_only=False, packed=submitted)

    def _padded(self, positions: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        """Positions and write slots [B, Q] where rows submit tokens up to `ends` [B] alone."""
        slots = positions.where(positions < ends[:, None], self.cache.scratch_slot)
        # A padding query repeats its row's last valid position: at the end of the context there is no next one.
        return torch.minimum(positions, ends[:, None] - 1).clamp(min=0), slots

    def _submitted(self, query_lengths: Sequence[int], width: int) -> Tensor:
        """Flat indices [T] into [B, Q] of the tokens that rows submit. On CUDA T is rounded up: shapes repeat."""
        flat = [row * width + offset for row, length in enumerate(query_lengths) for offset in range(length)]
        if self.model.device.type == "cuda":
            flat += [len(query_lengths) * width] * (-len(flat) % BUCKET)
        return torch.tensor(flat, dtype=torch.int64, device=self.model.device)

    def feed_last(self, tokens: Tensor, lengths: Sequence[int], count: int, places: range | None = None) -> Tensor:
        """Logits [B, V] after each row's last token, having fed its last `count` tokens (all, if it has fewer).

        tokens: int64 [B, >= max length], each row's tokens from position 0; lengths: how many each row has. Rewriting
        positions that the cache already holds writes the same values again.
        """
        ends = torch.tensor(lengths, device=tokens.device)  # [B]
        starts = ends - count
        # [B, count]; the last column is the last token
        wanted = starts[:, None] + torch.arange(count, device=tokens.device)
        positions = wanted.clamp(min=0)
        slots = None
        if min(lengths) < count:
            slots = positions.where(wanted >= 0, self.cache.scratch_slot)
        ids = tokens.gather(1, positions)
        return self._run(ids, positions, slots, starts, ends, lengths, places, last_only=True)[:, -1]

    # --- passes that are the same each time, so that they can be compiled and recorded -----------

    def extent(self, longest: int) -> int:
        """How many slots a fixed pass looks at where rows hold `longest` tokens at most: the whole cache for the kernel
        that goes by the rows' own lengths, else few sizes, since each is another pass to record."""
        capacity = self.cache.slots - 1
        return capacity if self.path == "ragged" else min(capacity, -(-longest // EXTENT) * EXTENT)

    def feed_fixed(
        self, ids: Tensor, starts: Tensor, query_lengths: Tensor, extent: int, last_only: bool = False
    ) -> Tensor:
        """`feed` for the rows in places 0 … B - 1 with nothing known on the host: logits [B, Q, V] (or [B, 1, V]).

        query_lengths: int64 [B], 0 for rows that submit nothing. extent: from `extent`. An ordinary pass has to come
        first: it makes the cache's buffers and shows what the layers share.
        """
        ends = starts + query_lengths
        positions, slots = self._padded(starts[:, None] + torch.arange(ids.shape[1], device=ids.device), ends)
        current = Pass(positions, slots, starts, ends, range(len(ids)), extent)
        for kind in self._shared:
            current.once(*kind)  # before the layers, of which compiled code sees one at a time
        switched = nullcontext() if self._is_prepared else attention.using(self.model, self.path)
        layers = compiled_layers.using(self.model, self.cache) if self.compiled else nullcontext()
        with self.cache.explaining(), switched, layers:
            return attention.forward(self.model, self.path, ids, current, self.cache, last_only)

    def feed_recorded(
        self, graphs: Graphs, ids: Tensor, starts: Tensor, starts_host: Sequence[int], query_lengths: Sequence[int]
    ) -> Tensor:
        """Logits [B, V] after the last of ids [B, Q], Q <= 2: `feed_fixed`, recorded once per shape.

        The next pass overwrites them.
        """
        rows, width = ids.shape
        if self._inputs is None:
            shape = self.cache.max_rows
            self._inputs = ids.new_zeros(shape, 2), starts.new_zeros(shape), starts.new_zeros(shape)
        places, extent = fixed_places(rows, self.cache.max_rows), self.extent(max(starts_host) + width)
        fed, first, counts = (buffer[:places] for buffer in self._inputs)
        fed[:rows, :width], first[:rows] = ids, starts
        counts.zero_()
        counts[:rows] = torch.as_tensor(query_lengths, device=ids.device)
        key = ("pass", places, width, extent)

        def fixed() -> Tensor:
            return self.feed_fixed(fed[:, :width], first, counts, extent, last_only=True)

        if graphs.due(key):
            graphs.record(key, fixed)
        return graphs.run(key, fixed)[:rows, -1]

    def _run(self, ids, positions, slots, starts, ends, kv_lengths, places, last_only, packed=None) -> Tensor:
        slots = positions if slots is None else slots
        places = range(len(ids)) if places is None else places
        kv_lengths = [int(length) for length in kv_lengths]  # may be numpy's, which a kernel does not take
        current = Pass(positions, slots, starts, ends, places, max(kv_lengths), kv_lengths, packed)
        switched = nullcontext() if self._is_prepared else attention.using(self.model, self.path)
        with self.cache.explaining(), switched:
            logits = attention.forward(self.model, self.path, ids, current, self.cache, last_only)
        self._shared = tuple(current.shared)
        return logits

    def grow(self, capacity: int) -> None:
        """Room for rows of `capacity` positions."""
        self.cache.grow(capacity)

    def release(self) -> None:
        """Free the cache's memory."""
        self.cache.release()
