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

from bass_core import attention
from bass_core.cache import Pass, RaggedCache

BUCKET = 8  # packed tokens on CUDA are rounded up to a multiple of it
PACKED_BELOW = 0.85  # share of [B, Q] that is submitted, below which packing repays its copies


def packs(query_lengths: Sequence[int], width: int) -> bool:
    """Whether a pass over rows that submit so many tokens each, of `width` at most, is worth packing."""
    return 0 < sum(query_lengths) < PACKED_BELOW * len(query_lengths) * width


class Runner:
    """`model` on an attention path, with a cache for `max_rows` rows of `capacity` positions.

    A context manager: leaving it (or `release`) frees the cache. The model is changed (attention implementation,
    evaluation mode) only inside `prepared` or a single pass, and left as it was found.
    """

    def __init__(self, model: PreTrainedModel, path: str, max_rows: int, capacity: int = 0):
        self.model = model
        self.path = path
        self.cache = RaggedCache(model.config.get_text_config().num_hidden_layers, max_rows, capacity)
        self._is_prepared = False

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
        offsets = torch.arange(ids.shape[1], device=ids.device)
        positions, slots, ends = starts[:, None] + offsets, None, starts + ids.shape[1]
        if min(query_lengths) < ids.shape[1]:
            ends = starts + torch.tensor(query_lengths, device=ids.device)  # [B]
            slots = positions.where(positions < ends[:, None], self.cache.scratch_slot)
            # A padding query repeats its row's last valid position: at the end of the context there is no next one.
            positions = torch.minimum(positions, ends[:, None] - 1).clamp(min=0)
        kv_lengths = [start + length for start, length in zip(starts_host, query_lengths, strict=True)]
        if packed is None:
            packed = self.path != "eager" and packs(query_lengths, ids.shape[1])
        submitted = self._submitted(query_lengths, ids.shape[1]) if packed else None
        return self._run(ids, positions, slots, starts, ends, kv_lengths, places, last_only=False, packed=submitted)

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

    def _run(self, ids, positions, slots, starts, ends, kv_lengths, places, last_only, packed=None) -> Tensor:
        slots = positions if slots is None else slots
        places = range(len(ids)) if places is None else places
        kv_lengths = [int(length) for length in kv_lengths]  # may be numpy's, which a kernel does not take
        current = Pass(positions, slots, starts, ends, places, max(kv_lengths), kv_lengths, packed)
        switched = nullcontext() if self._is_prepared else attention.using(self.model, self.path)
        with self.cache.explaining(), switched:
            return attention.forward(self.model, self.path, ids, current, self.cache, last_only)

    def grow(self, capacity: int) -> None:
        """Room for rows of `capacity` positions."""
        self.cache.grow(capacity)

    def release(self) -> None:
        """Free the cache's memory."""
        self.cache.release()
