"""Key/value storage with one length per row: the ragged KV cache.

A row's position *is* its slot: the key of the token at position t lives in slot t, for ever. Attention from position t
looks at slots 0..t only, so rolling back a rejected draft means not moving the row's length; stale slots are
overwritten when a token arrives there. Nothing is copied, shifted or padded again between steps.

Rows live in consecutive batch slots of preallocated buffers. A forward pass runs over a range of them (the live batch,
or the rows being prefilled); when a row finishes, the last live row moves into its batch slot.

Data is stored by position (keys and values of each layer, and `TokenStates` by name) or by row (`RowStore`: what a row
has once and never rolls back, such as an encoded source). Everything that touches transformers' cache classes is here
and in `encoder_decoder`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from bass_core.environment import free_memory, is_full
from bass_core.interrupts import always
from bass_core.model import kernel_ops
from bass_core.model.forward_pass import Pass


def free(tensors: Iterable[Tensor]) -> None:
    """Free these tensors' memory now, although frames of a traceback may hold views of them."""
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)


class RaggedLayer(CacheLayerMixin):
    """One layer's keys and values, [batch slots, heads, KV slots, head dimension]; the last KV slot is the scratch
    slot.

    Heads before slots: what one head reads lies in one piece, which CPUs read 1.6 times as fast.
    """

    is_compileable = True
    is_sliding = False
    names = ("keys", "values")  # of its buffers

    def __init__(self, cache: RaggedCache):
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, kv_slots, numbers = self.cache.max_rows, self.cache.kv_slots, key_states.shape[1] * key_states.shape[3]
        self.cache.token_bytes = 2 * len(self.cache.layers) * numbers * key_states.element_size()
        self.keys, self.values = (
            self.cache.allocate(states, (rows, states.shape[1], kv_slots, states.shape[3]))
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write the pass's keys and values [B, H, Q, D] (packed: [1, H, T, D]) to its slots; return what it may see,
        [B, H, max_kv_length, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        current = self.cache.current
        if current.kernels:
            key_states, value_states = (
                current.unpack(states.transpose(1, 2)).transpose(1, 2) for states in (key_states, value_states)
            )
            states = key_states, value_states, self.keys, self.values
            kernel_ops.write_kv(*states, current.kv_slots, current.first_batch_slot)
        else:
            current.write(key_states, self.keys)
            current.write(value_states, self.values)
        # Numbers that the compiler may leave open: a range, it would take for a constant.
        rows = slice(current.first_batch_slot, current.first_batch_slot + current.kv_slots.shape[0])
        keys, values = self.keys[rows, :, : current.max_kv_length], self.values[rows, :, : current.max_kv_length]
        return (keys.contiguous(), values.contiguous()) if self.cache.contiguous else (keys, values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.current.max_kv_length, 0

    def get_seq_length(self) -> int:
        # Models ask this only to invent position ids and masks; both are always passed to them.
        return 0

    def get_max_length(self) -> int:
        return self.cache.kv_slots

    def buffers(self) -> tuple[Tensor, Tensor] | tuple[()]:
        return (self.keys, self.values) if self.is_initialized else ()


class TokenStates:
    """Numbers of each token, [batch slots, 1, KV slots, width], kept like keys and values: what a model's last layer
    has left, for drafters that ask for it, or the inputs of a short convolution."""

    names = ("states",)

    def __init__(self, cache: RaggedCache):
        self.cache = cache
        self.states: Tensor | None = None

    @property
    def is_initialized(self) -> bool:
        return self.states is not None

    def keep(self, states: Tensor) -> None:
        """Write the pass's numbers [B, Q, H] (packed: [1, T, H]) to its slots."""
        states = states[:, None]
        if self.states is None:
            self.states = self.cache.allocate(states, (self.cache.max_rows, 1, self.cache.kv_slots, states.shape[-1]))
        self.cache.current.write(states, self.states)

    def of(self, batch_slots: range) -> Tensor:
        """[B, slots, width], of which those of a row's committed tokens, but for the last one, are there."""
        return self.states[batch_slots.start : batch_slots.stop, 0]

    def buffers(self) -> tuple[Tensor, ...]:
        return () if self.states is None else (self.states,)


class RowStore(Protocol):
    """What a model keeps of each row once, beside its tokens. Rows take it along when they move."""

    def move_row(self, source: int, batch_slots: range) -> None: ...

    def save_row(self, batch_slot: int) -> list[Tensor]: ...

    def load_row(self, batch_slots: range, saved: list[Tensor]) -> None: ...

    def release(self) -> None: ...


class _Explaining(NamedTuple):
    """A context manager, since entering a function that yields takes five times as long, at each pass."""

    cache: RaggedCache

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError | MemoryError) and (explained := self.cache.explain(error)) is not error:
            try:
                raise explained from error
            finally:  # a circle would keep what the pass has left until garbage is looked for
                del explained, error, trace


class RaggedCache(Cache):
    """The KV cache of one model for up to `max_rows` rows of up to `capacity` positions each.

    Buffers are allocated at the first forward pass, when the model shows its heads, head dimensions and dtype.
    """

    def __init__(self, num_layers: int, max_rows: int, capacity: int, contiguous: bool = False):
        """contiguous: hand out copies, as models' own code may want them; its products would make these themselves."""
        super().__init__(layers=[RaggedLayer(self) for _ in range(num_layers)])
        self.by_position: dict[str, TokenStates] = {}
        self.by_row: RowStore | None = None
        self.max_rows, self.contiguous = max_rows, contiguous
        self.kv_slots = capacity + 1  # + the scratch slot
        # Keys and values in all layers, of one position and of a row; known once a layer has shown its shape.
        self.token_bytes = self.row_bytes = 0
        self._device: torch.device | None = None  # known then, too
        self.current: Pass | None = None  # whose keys and values come next

    @property
    def scratch_kv_slot(self) -> int:
        return self.kv_slots - 1

    def allocate(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Zeroed buffer: a masked product reads masked values, and 0 x NaN from fresh memory would be NaN."""
        self.row_bytes = self.token_bytes * shape[2]
        self._device = like.device
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def explain(self, error: Exception) -> Exception:
        """An allocator's or a device's error, retold with what the user can do; any other error as it is."""
        text = str(error)
        if error.__cause__ is not None:
            return error  # explained already
        if "device-side assert" in text or "illegal memory access" in text:
            return RuntimeError(f"the GPU cannot be used again by this process: restart the kernel ({text})")
        if not is_full(error):
            return error
        per_row, positions = self.row_bytes, self.row_bytes // max(self.token_bytes, 1) or self.kv_slots
        message = f"out of memory: the KV cache takes {per_row / 1e9:.3g} GB per row of {positions} positions"
        message += f" and {self.max_rows} rows were wanted"
        if per_row and (unused := free_memory(self._device)) is not None:
            own = sum(buffer.nbytes for buffer in self.buffers())
            if (fitting := (unused + own) // per_row) < self.max_rows:
                message += f"; about {fitting} would fit"
        kind = MemoryError if isinstance(error, MemoryError) else torch.OutOfMemoryError
        return kind(message + ". Lower max_batch_size or max_new_tokens; the next call starts from a clean state")

    def explaining(self) -> _Explaining:
        """Errors raised inside are retold by `explain`."""
        return _Explaining(self)

    def grow(self, capacity: int) -> None:
        """Make room for rows of `capacity` positions; what is stored stays where it is."""
        if capacity < self.kv_slots:
            return  # there is room: another cache of the batch may have failed to grow with this one
        grown = []  # all of them before any is put in place: running out of memory half-way must leave the cache whole
        for layer in (*self.layers, *self.by_position.values()):
            for name in layer.names if layer.is_initialized else ():
                old = getattr(layer, name)
                new = self.allocate(old, (self.max_rows, old.shape[1], capacity + 1, old.shape[3]))
                new[:, :, : self.kv_slots - 1] = old[:, :, :-1]
                grown.append((layer, name, new))

        def put() -> None:
            for layer, name, new in grown:
                setattr(layer, name, new)
            self.kv_slots = capacity + 1

        with always(put):
            pass

    def token_states(self, name: str) -> TokenStates:
        """Return the store of this name by position; it is made when first asked for."""
        if name not in self.by_position:
            self.by_position[name] = TokenStates(self)
        return self.by_position[name]

    def move_row(self, source: int, batch_slots: range) -> None:
        """Copy a row to other batch slots, all layers at once."""
        if buffers := self.buffers():
            to = [buffer[batch_slot] for batch_slot in batch_slots for buffer in buffers]
            torch._foreach_copy_(to, [buffer[source] for _ in batch_slots for buffer in buffers])
        if self.by_row is not None:
            self.by_row.move_row(source, batch_slots)

    def clear(self, batch_slots: range) -> None:
        """Forget what rows that lived there have left."""
        if buffers := self.buffers():
            torch._foreach_zero_([buffer[batch_slots.start : batch_slots.stop] for buffer in buffers])

    def save_row(self, batch_slot: int, length: int) -> list[Tensor]:
        """A copy of a row's first `length` positions (a prompt's cache, kept for samples that start later)."""
        own = [buffer[batch_slot, :, :length].clone() for buffer in self.buffers()]
        return own if self.by_row is None else own + self.by_row.save_row(batch_slot)

    def load_row(self, batch_slots: range, saved: list[Tensor]) -> None:
        """Write what `save_row` returned into batch slots, and nothing behind it."""
        buffers = self.buffers()
        for buffer, row in zip(buffers, saved, strict=self.by_row is None):
            rows, length = buffer[batch_slots.start : batch_slots.stop], row.shape[1]
            rows[:, :, :length] = row
            rows[:, :, length:] = 0  # a row that failed leaves NaN, and 0 x NaN is NaN
        if self.by_row is not None:
            self.by_row.load_row(batch_slots, saved[len(buffers) :])

    def buffers(self) -> list[Tensor]:
        """Keys and values of all layers and numbers of tokens, as far as they are allocated."""
        return [buffer for layer in (*self.layers, *self.by_position.values()) for buffer in layer.buffers()]

    def begin_anew(self) -> None:
        """As if nothing had been asked for: of a first pass that ran out of memory some layers have theirs already."""
        self.release()
        self.kv_slots = 1

    def release(self) -> None:
        """Free the memory now, even while a traceback still holds this object."""
        self.current = None
        for layer in (*self.layers, *self.by_position.values()):
            free(layer.buffers())
            for name in layer.names:
                setattr(layer, name, None)
        for layer in self.layers:
            layer.is_initialized = False
        if self.by_row is not None:
            self.by_row.release()
