"""One forward pass over the ragged cache: which rows, which positions, what each query may see.

transformers never hands a registered attention function the cache or the rows. So the current pass is state of the
thread, set by `Runner` around each call of a model.
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
    """Passes that follow one another, none of more queries than the first, while rows grow: the keys that rows have
    at most, int64 [B], how many positions there are from the first to the last, and the work lists that they share."""

    ends: Tensor
    span: int
    lists: dict[tuple, Any]


@dataclass
class Pass:
    """One forward pass over some rows of the cache: where its tokens go and what each may see.

    positions: int64 [B, Q], the position of every query token. Padding queries repeat a valid position of their row.
    kv_slots: int64 [B, Q], where their keys and values are written; padding queries write to the scratch slot.
    starts, ends: int64 [B], the position of each row's first query token (negative: it and others before position 0
    are padding) and the keys the row holds once this pass has written its own.
    batch_slots: the range of batch slots that the rows occupy.
    max_kv_length: KV slots 0..max_kv_length-1 hold every key that any query of this pass may see.
    row_kv_slots: KV slots of a row, the last of them the scratch slot.
    kv_lengths: `ends` as host integers (for per-row launches); None where the host does not know them.
    packed: None where the models see ids [B, Q]. Else int64 [T]: they see ids [1, T], the tokens of [B, Q] at these
    flat indices, without the padding; B · Q stands for a token that belongs to no row.
    last_only: only what follows each row's last token is wanted (prefill, passes of a draft).
    phase: what this pass is one of.
    features: [B, Q, H], what a drafter's model reads beside each token.
    prompt: the length of the prompt of which this pass reads a chunk; None where it reads none.
    foreign_mask: the additive mask over the keys handed out last, as a function of this pass and a dtype, where these
    keys are not the row's own tokens (a source); its result is None where nothing is hidden.
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
    foreign_mask: Callable[[Pass, torch.dtype], Tensor | None] | None = None
    first_batch_slot: int = field(init=False)
    kernels: bool = field(init=False)  # whether the Triton kernels run where these rows are
    shared: dict[tuple, Any] = field(default_factory=dict)  # by function and arguments, see `once`

    def __post_init__(self):
        self.first_batch_slot, self.kernels = self.batch_slots.start, kernel_ops.run_on(self.kv_slots.device)

    def once(self, make: Callable, *arguments) -> Any:
        """make(this pass, *arguments), worked out once for all layers: masks, work lists."""
        kind = (make, *arguments)
        if kind not in self.shared:
            self.shared[kind] = make(self, *arguments)
        return self.shared[kind]

    def pack(self, rows: Tensor) -> Tensor:
        """[B, Q, ...] -> [1, T, ...], what the model sees; the same where nothing is packed."""
        if self.packed is None:
            return rows
        flat = rows.flatten(0, 1)
        return flat[self.packed.clamp(max=len(flat) - 1)][None]

    def unpack(self, states: Tensor) -> Tensor:
        """[1, T, ...] -> [B, Q, ...], zeros where there is padding; the same where nothing is packed."""
        if self.packed is None:
            return states
        rows, width = self.positions.shape
        flat = states.new_zeros(rows * width + 1, *states.shape[2:])
        return flat.index_copy_(0, self.packed, states[0])[:-1].view(rows, width, *states.shape[2:])

    def write(self, states: Tensor, buffer: Tensor) -> None:
        """Put the pass's keys or values [B, H, Q, D] (packed: [1, H, T, D]) into a buffer [batch slots, H, KV slots,
        D]."""
        _, heads, tokens, size = states.shape
        eager = self.kv_lengths is not None  # else each case is compiled anew
        if eager and tokens == 1 and self.packed is None and self.first_batch_slot == 0:  # the fewest operations
            buffer.scatter_(2, self.once(Pass.written_kv_slots, heads, size), states)
        else:
            buffer.view(-1, size).index_copy_(0, self.once(Pass.written, heads), states.reshape(-1, size))

    def written_kv_slots(self, heads: int, size: int) -> Tensor:
        """The KV slots of the pass's tokens, for every number of their keys: int64 [B, H, Q, D]."""
        return self.kv_slots[:, None, :, None].expand(-1, heads, -1, size)

    def written(self, heads: int) -> Tensor:
        """Where the pass's keys go, int64 [B · H · Q] (packed: [H · T]), in a buffer [batch slots, H, KV slots] seen
        flat."""
        batch_slots = torch.arange(self.batch_slots.start, self.batch_slots.stop, device=self.kv_slots.device)
        first = batch_slots[:, None] * (heads * self.row_kv_slots) + self.kv_slots  # [B, Q], of the first head
        if self.packed is not None:
            first = F.pad(first.flatten(), (0, 1), value=self.row_kv_slots - 1)[self.packed][None]  # [1, T]
        return (first[:, None] + torch.arange(heads, device=first.device)[:, None] * self.row_kv_slots).flatten()

    def visible(self, window: int | None = None, chunk: int | None = None) -> Tensor:
        """bool [B, Q, max_kv_length]: which KV slots a query attends to: no later than itself, inside its window or
        chunk."""
        kv_slots = torch.arange(self.max_kv_length, device=self.positions.device)
        query = self.positions[..., None]
        seen = kv_slots <= query
        if window is not None:
            seen &= kv_slots > query - window
        if chunk is not None:
            seen &= kv_slots // chunk == query // chunk
        return seen


class _Thread(threading.local):
    """What the attention functions of this thread are called for."""

    def __init__(self):  # no attribute of the class: torch 2.11 would compile that one into layers
        self.current: Pass | None = None


_thread = _Thread()


def current_pass() -> Pass | None:
    """Return the pass that this thread runs a model for, None outside of one."""
    return _thread.current


@contextmanager
def running(current: Pass) -> Iterator[None]:
    """Make `current` the current pass of this thread inside."""

    def clear() -> None:
        _thread.current = None

    with always(clear):
        _thread.current = current
        yield
