"""Key/value storage with one length per row: the ragged KV cache.

A row's position *is* its slot: the key of the token at position t always lives in slot t. Attention from position t
reads slots 0..t only. Rolling back a rejected draft therefore means not advancing the row's length, and later tokens
overwrite the stale slots. Nothing is copied, shifted or padded again between steps.

Rows live in consecutive batch slots of preallocated buffers. A forward pass runs over a range of batch slots (the live
batch, or the rows in prefill). When a row finishes, the last live row moves into its batch slot.

Data is stored by position (keys and values of each layer, and `TokenStates` by name) or by row (`RowStore`, such as an
encoded source). Only this module and `encoder_decoder` use transformers' cache classes.
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
    """Free the memory of these tensors now, even if frames of a traceback hold views of them."""
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)


class RaggedLayer(CacheLayerMixin):
    """Keys and values of a layer, [batch slots, heads, KV slots, head dimension]; the last KV slot is the scratch slot.

    Heads come before slots because CPUs read the contiguous data of a single head 1.6 times as fast.
    """

    is_compileable = True
    is_sliding = False
    names = ("keys", "values")  # attributes with buffers

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
        """Write the pass's keys and values [B, H, Q, D] (packed: [1, H, T, D]) to their KV slots. Return the visible
        keys and values, [B, H, max_kv_length, D]."""
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
        # Compiled code keeps these integers dynamic; it would treat a range as a constant.
        rows = slice(current.first_batch_slot, current.first_batch_slot + current.kv_slots.shape[0])
        keys, values = self.keys[rows, :, : current.max_kv_length], self.values[rows, :, : current.max_kv_length]
        return (keys.contiguous(), values.contiguous()) if self.cache.contiguous else (keys, values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.current.max_kv_length, 0

    def get_seq_length(self) -> int:
        # Models use this only for default position ids and masks; both are always passed.
        return 0

    def get_max_length(self) -> int:
        return self.cache.kv_slots

    def buffers(self) -> tuple[Tensor, Tensor] | tuple[()]:
        return (self.keys, self.values) if self.is_initialized else ()


class TokenStates:
    """States of tokens, [batch slots, 1, KV slots, width]: hidden states of the last layer, or an index's keys."""

    names = ("states",)

    def __init__(self, cache: RaggedCache):
        self.cache = cache
        self.states: Tensor | None = None

    @property
    def is_initialized(self) -> bool:
        return self.states is not None

    def keep(self, states: Tensor) -> None:
        """Write the pass's states [B, Q, H] (packed: [1, T, H]) to their KV slots."""
        states = states[:, None]
        if self.states is None:
            self.states = self.cache.allocate(states, (self.cache.max_rows, 1, self.cache.kv_slots, states.shape[-1]))
        self.cache.current.write(states, self.states)

    def of(self, batch_slots: range) -> Tensor:
        """Return the states of these batch slots, [B, slots, width], valid for all committed tokens except the last."""
        return self.states[batch_slots.start : batch_slots.stop, 0]

    def buffers(self) -> tuple[Tensor, ...]:
        return () if self.states is None else (self.states,)


class RowStore(Protocol):
    """Data that a model keeps once per row, such as a source or a recurrent state. The data moves with the row."""

    def buffers(self) -> list[Tensor]: ...

    def clear(self, batch_slots: range) -> None: ...

    def move_row(self, source: int, batch_slots: range) -> None: ...

    def save_row(self, batch_slot: int) -> list[Tensor]: ...

    def load_row(self, batch_slots: range, saved: list[Tensor]) -> None: ...

    def release(self) -> None: ...


class _Explaining(NamedTuple):
    """Context manager of `RaggedCache.explaining`. A generator would take five times as long to enter."""

    cache: RaggedCache

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError | MemoryError) and (explained := self.cache.explain(error)) is not error:
            try:
                raise explained from error
            finally:  # a reference cycle would keep the pass's tensors until garbage collection
                del explained, error, trace


class RaggedCache(Cache):
    """The KV cache of one model for up to `max_rows` rows of up to `capacity` positions each.

    The first forward pass allocates the buffers, by the shape and dtype of its keys and values.
    """

    def __init__(self, num_layers: int, max_rows: int, capacity: int, contiguous: bool = False):
        """contiguous: return contiguous copies, for the path `eager`."""
        super().__init__(layers=[RaggedLayer(self) for _ in range(num_layers)])
        self.by_position: dict[str, TokenStates] = {}
        self.by_row: RowStore | None = None
        self.max_rows, self.contiguous = max_rows, contiguous
        self.kv_slots = capacity + 1  # plus the scratch slot
        # Bytes of keys and values in all layers, per position and per row; known after the first pass.
        self.token_bytes = self.row_bytes = 0
        self._device: torch.device | None = None  # known after the first pass
        self.current: Pass | None = None  # the pass that writes next

    @property
    def scratch_kv_slot(self) -> int:
        return self.kv_slots - 1

    def allocate(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return a zeroed buffer, because a masked product reads masked values and 0 x NaN is NaN."""
        self.row_bytes = self.token_bytes * shape[2]
        self._device = like.device
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def explain(self, error: Exception) -> Exception:
        """Return an allocator's or a device's error with advice for the user, and any other error unchanged."""
        text = str(error)
        if error.__cause__ is not None:
            return error  # explained already
        if "device-side assert" in text or "illegal memory access" in text:
            return RuntimeError(f"this process lost the GPU; restart the process or the notebook kernel ({text})")
        if not is_full(error):
            return error
        by_row = [] if self.by_row is None else self.by_row.buffers()
        positions = self.row_bytes // max(self.token_bytes, 1) or self.kv_slots
        per_row = self.row_bytes + sum(buffer.nbytes for buffer in by_row) // self.max_rows
        message = f"out of memory: the KV cache takes {per_row / 1e9:.3g} GB per row of {positions} positions"
        message += f" and {self.max_rows} rows were requested"
        if self.row_bytes and (unused := free_memory(self._device)) is not None:
            own = sum(buffer.nbytes for buffer in (*self.buffers(), *by_row))
            if (fitting := (unused + own) // per_row) < self.max_rows:
                message += f"; about {fitting} would fit"
        kind = MemoryError if isinstance(error, MemoryError) else torch.OutOfMemoryError
        return kind(message + ". Lower max_batch_size or max_new_tokens; the next call starts from a clean state")

    def explaining(self) -> _Explaining:
        """Replace errors raised inside by the results of `explain`."""
        return _Explaining(self)

    def grow(self, capacity: int) -> None:
        """Extend all rows to `capacity` positions and keep the stored data."""
        if capacity < self.kv_slots:
            return  # a retry, after another cache of the batch failed to grow
        grown = []  # allocate all before assigning any, so that running out of memory leaves the cache intact
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
        """Return the store of this name by position, created on first use."""
        if name not in self.by_position:
            self.by_position[name] = TokenStates(self)
        return self.by_position[name]

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        """Write an index's keys [B, Q, D] to their KV slots. Return the visible keys [B, max_kv_length, D]."""
        index = self.token_states(f"index {layer_idx}")
        index.keep(keys)
        return index.of(self.current.batch_slots)[:, : self.current.max_kv_length]

    def move_row(self, source: int, batch_slots: range) -> None:
        """Copy a row to other batch slots, all layers at once."""
        if buffers := self.buffers():
            to = [buffer[batch_slot] for batch_slot in batch_slots for buffer in buffers]
            torch._foreach_copy_(to, [buffer[source] for _ in batch_slots for buffer in buffers])
        if self.by_row is not None:
            self.by_row.move_row(source, batch_slots)

    def clear(self, batch_slots: range) -> None:
        """Zero the data of these batch slots."""
        if buffers := self.buffers():
            torch._foreach_zero_([buffer[batch_slots.start : batch_slots.stop] for buffer in buffers])
        if self.by_row is not None:
            self.by_row.clear(batch_slots)

    def save_row(self, batch_slot: int, length: int) -> list[Tensor]:
        """Return a copy of a row's first `length` positions, used for samples that start later."""
        own = [buffer[batch_slot, :, :length].clone() for buffer in self.buffers()]
        return own if self.by_row is None else own + self.by_row.save_row(batch_slot)

    def load_row(self, batch_slots: range, saved: list[Tensor]) -> None:
        """Write the result of `save_row` into batch slots and clear the later positions."""
        buffers = self.buffers()
        for buffer, row in zip(buffers, saved, strict=self.by_row is None):
            rows, length = buffer[batch_slots.start : batch_slots.stop], row.shape[1]
            rows[:, :, :length] = row
            rows[:, :, length:] = 0  # a failed row leaves NaN, and 0 x NaN is NaN
        if self.by_row is not None:
            self.by_row.load_row(batch_slots, saved[len(buffers) :])

    def buffers(self) -> list[Tensor]:
        """Return all allocated buffers: keys and values of all layers, and token states."""
        return [buffer for layer in (*self.layers, *self.by_position.values()) for buffer in layer.buffers()]

    def begin_anew(self) -> None:
        """Reset to the initial state; a first pass that ran out of memory leaves only some layers allocated."""
        self.release()
        self.kv_slots = 1

    def release(self) -> None:
        """Free the memory now, even while a traceback holds this object."""
        self.current = None
        for layer in (*self.layers, *self.by_position.values()):
            free(layer.buffers())
            for name in layer.names:
                setattr(layer, name, None)
        for layer in self.layers:
            layer.is_initialized = False
        if self.by_row is not None:
            self.by_row.release()
