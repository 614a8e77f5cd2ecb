"""A forward pass over the ragged cache: its rows, its positions, and the keys that each query may see.

transformers passes neither the cache nor the rows to a registered attention function. The current pass is therefore
state of the thread, set by `Runner` around each call of a model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bass_core.interrupts import always
from bass_core.model import kernel_ops


class Phase(NamedTuple):
    """Consecutive passes over growing rows, none with more queries than the first. ends: int64 [B], the maximum number
    of keys per row. span: the number of positions in all passes. lists: the shared work lists."""

    ends: Tensor
    span: int
    lists: dict[tuple, Any]


@dataclass
class Pass:
    """A forward pass over some rows of the cache: the KV slots of its tokens and the keys that each token may see.

    positions: int64 [B, Q], the position of every query token. Padding queries repeat a valid position of their row.
    kv_slots: int64 [B, Q], the KV slots for keys and values; padding queries write to the scratch slot.
    starts: int64 [B], the position of each row's first query token. Tokens at negative positions are padding.
    ends: int64 [B], the number of keys of each row after this pass.
    batch_slots: the range of batch slots that the rows occupy.
    max_kv_length: KV slots 0..max_kv_length-1 hold every key that any query of this pass may see.
    row_kv_slots: number of KV slots per row, including the scratch slot at the end.
    kv_lengths: `ends` as host integers (for per-row launches), or None if the host does not know the lengths.
    starts_host: `starts` as host integers, or None.
    committed_until: host integers, the position before which no token of the row can be rejected any more, or None.
    Layers with a recurrent state advance the state to this position.
    packed: None if the models see ids [B, Q]. Otherwise int64 [T], flat indices into [B, Q] of the tokens without
    padding; the models see ids [1, T]. The index B · Q stands for a token of no row.
    last_only: compute only the logits after each row's last token (prefill, passes of a draft).
    phase: the phase of this pass, or None.
    features: [B, Q, H], hidden states that a drafter's model reads with each token.
    prompt: the length of the prompt if this pass reads a chunk of a prompt, else None.
    whole: the pass over several tokens per row of which this pass is column `at`, or None.
    foreign_mask: function of this pass and a dtype, set before attention to a source. Returns the additive mask over
    the source's keys, or None if nothing is hidden.
    """

    positions: Tensor
    kv_slots: Tensor
    starts: Tensor
    ends: Tensor
    batch_slots: range
    max_kv_length: int
    row_kv_slots: int
    kv_lengths: list[int] | None = None
    packed: Tensor | None = None
    last_only: bool = False
    phase: Phase | None = None
    features: Tensor | None = None
    prompt: int | None = None
    starts_host: list[int] | None = None
    committed_until: list[int] | None = None
    whole: Pass | None = None
    at: int = 0
    foreign_mask: Callable[[Pass, torch.dtype], Tensor | None] | None = None
    first_batch_slot: int = field(init=False)
    kernels: bool = field(init=False)  # True if the Triton kernels run on the rows' device
    shared: dict[tuple, Any] = field(default_factory=dict)  # results of `once` by function and arguments

    def __post_init__(self):
        self.first_batch_slot, self.kernels = self.batch_slots.start, kernel_ops.run_on(self.kv_slots.device)

    @property
    def settles(self) -> bool:
        """True if no token of the pass can be rejected, as in a prefill."""
        return self.committed_until == self.kv_lengths

    def once(self, make: Callable, *arguments) -> Any:
        """Return make(this pass, *arguments), computed once for all layers (masks, work lists)."""
        kind = (make, *arguments)
        if kind not in self.shared:
            self.shared[kind] = make(self, *arguments)
        return self.shared[kind]

    def columns(self) -> Iterator[Pass]:
        """Return the passes over one token per row that together have the tokens of this pass. The host knows starts
        and ends. The columns share work by `once_for_columns`."""
        for at in range(self.positions.shape[1]):
            column, begins = slice(at, at + 1), [start + at for start in self.starts_host]
            kv_lengths = [min(begin + 1, end) for begin, end in zip(begins, self.kv_lengths, strict=True)]
            where = self.positions[:, column], self.kv_slots[:, column]
            starts = self.starts + at
            ends = torch.minimum(starts + 1, self.ends)
            found = Pass(*where, starts, ends, self.batch_slots, max(kv_lengths), self.row_kv_slots, kv_lengths)
            found.starts_host, found.whole, found.at = begins, self, at
            yield found

    def once_for_columns(self, make: Callable, *arguments) -> tuple[Tensor, ...]:
        """Return the tensors [B, Q, …] of `once`. The columns of a pass slice the tensors of the whole pass."""
        if self.whole is None:
            return self.once(make, *arguments)
        return tuple(each[:, self.at : self.at + 1] for each in self.whole.once(make, *arguments))

    def pack(self, rows: Tensor) -> Tensor:
        """Convert [B, Q, ...] to [1, T, ...], the tokens that the model sees. Without packing, return the input."""
        if self.packed is None:
            return rows
        flat = rows.flatten(0, 1)
        return flat[self.packed.clamp(max=len(flat) - 1)][None]

    def unpack(self, states: Tensor) -> Tensor:
        """Convert [1, T, ...] to [B, Q, ...], with zeros for padding. Without packing, return the input."""
        if self.packed is None:
            return states
        rows, width = self.positions.shape
        flat = states.new_zeros(rows * width + 1, *states.shape[2:])
        return flat.index_copy_(0, self.packed, states[0])[:-1].view(rows, width, *states.shape[2:])

    def write(self, states: Tensor, buffer: Tensor) -> None:
        """Write keys or values [B, H, Q, D] (packed: [1, H, T, D]) to a buffer [batch slots, H, KV slots, D]."""
        _, heads, _, size = states.shape  # `scatter_` takes time for the whole buffer in half precision
        buffer.view(-1, size).index_copy_(0, self.once(Pass.written, heads), states.reshape(-1, size))

    def written(self, heads: int) -> Tensor:
        """Return the keys' flat indices in a buffer [batch slots, H, KV slots]: int64 [B · H · Q] (packed: [H · T])."""
        batch_slots = torch.arange(self.batch_slots.start, self.batch_slots.stop, device=self.kv_slots.device)
        first = batch_slots[:, None] * (heads * self.row_kv_slots) + self.kv_slots  # [B, Q], for the first head
        if self.packed is not None:
            first = F.pad(first.flatten(), (0, 1), value=self.row_kv_slots - 1)[self.packed][None]  # [1, T]
        return (first[:, None] + torch.arange(heads, device=first.device)[:, None] * self.row_kv_slots).flatten()

    def visible(self, window: int | None = None, chunk: int | None = None) -> Tensor:
        """Return the KV slots that each query sees, bool [B, Q, max_kv_length]: none later, in its window or chunk."""
        kv_slots = torch.arange(self.max_kv_length, device=self.positions.device)
        query = self.positions[..., None]
        seen = kv_slots <= query
        if window is not None:
            seen &= kv_slots > query - window
        if chunk is not None:
            seen &= kv_slots // chunk == query // chunk
        return seen


class _Thread(threading.local):
    def __init__(self):  # torch 2.11 would compile a class attribute into layers
        self.current: Pass | None = None


_thread = _Thread()


def current_pass() -> Pass | None:
    """Return the pass that runs in this thread, or None."""
    return _thread.current


@contextmanager
def running(current: Pass) -> Iterator[None]:
    """Set the current pass of this thread inside the context."""

    def clear() -> None:
        _thread.current = None

    with always(clear):
        _thread.current = current
        yield
