"""Key/value storage with one length per row: the ragged KV cache.

A row's position *is* its slot: the key of the token at position t lives in slot t, for ever. Attention from position t
looks at slots 0..t only, so rolling back a rejected draft means not moving the row's length; stale slots are
overwritten when a token arrives there. Nothing is copied, shifted or padded again between steps.

Rows live in consecutive *places* of preallocated buffers. A forward pass runs over a range of places (the live batch,
or the rows being prefilled); when a row finishes, the last live row moves into its place.

What an encoder-decoder model has of its sources is written once, never grows and is never rolled back: module
`encoder_decoder` keeps it, and rows take it along when they move.

Everything that touches transformers' cache classes is in these two modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from bass_core.environment import free_memory, is_full
from bass_core.model import kernel_ops

if TYPE_CHECKING:
    from bass_core.model.encoder_decoder import Sources


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
    slots: int64 [B, Q], where their keys and values are written; padding queries write to the scratch slot.
    starts, ends: int64 [B], the position of each row's first query token (negative: it and others before position 0
    are padding) and the keys the row holds once this pass has written its own.
    places: the range of places that the rows occupy.
    extent: slots 0..extent-1 hold every key that any query of this pass may see.
    room: slots of a place, the last of them the scratch slot.
    kv_lengths: `ends` as host integers (for per-row launches); None where the host does not know them.
    packed: None where the models see ids [B, Q]. Else int64 [T]: they see ids [1, T], the tokens of [B, Q] at these
    flat indices, without the padding; B · Q stands for a token that belongs to no row.
    last_only: whether only what follows each row's last token is wanted (prefill, passes of a draft).
    phase: what this pass is one of.
    features: [B, Q, H], what a drafter's model reads beside each token.
    prompt: how long the prompt is of which this pass reads a chunk; None where it reads none.
    crossing: what the rows read, where the keys handed out last were its (module `encoder_decoder`).
    """

    positions: Tensor
    slots: Tensor
    starts: Tensor
    ends: Tensor
    places: range
    extent: int
    room: int
    kv_lengths: list[int] | None = None
    packed: Tensor | None = None
    last_only: bool = False
    phase: Phase | None = None
    features: Tensor | None = None
    prompt: int | None = None
    crossing: Sources | None = None
    first_place: int = field(init=False)
    kernels: bool = field(init=False)  # whether the Triton kernels run where these rows are
    shared: dict[tuple, Any] = field(default_factory=dict)  # by function and arguments, see `once`

    def __post_init__(self):
        self.first_place, self.kernels = self.places.start, kernel_ops.run_on(self.slots.device)

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
        """Put the pass's keys or values [B, H, Q, D] (packed: [1, H, T, D]) into a buffer [places, H, room, D]."""
        _, heads, tokens, size = states.shape
        eager = self.kv_lengths is not None  # else each case is compiled anew
        if eager and tokens == 1 and self.packed is None and self.first_place == 0:  # the fewest operations
            buffer.scatter_(2, self.once(Pass.written_slots, heads, size), states)
        else:
            buffer.view(-1, size).index_copy_(0, self.once(Pass.written, heads), states.reshape(-1, size))

    def written_slots(self, heads: int, size: int) -> Tensor:
        """The slots of the pass's tokens, for every number of their keys: int64 [B, H, Q, D]."""
        return self.slots[:, None, :, None].expand(-1, heads, -1, size)

    def written(self, heads: int) -> Tensor:
        """Where the pass's keys go, int64 [B · H · Q] (packed: [H · T]), in a buffer [places, H, room] seen flat."""
        places = torch.arange(self.places.start, self.places.stop, device=self.slots.device)
        first = places[:, None] * (heads * self.room) + self.slots  # [B, Q], of the first head
        if self.packed is not None:
            first = F.pad(first.flatten(), (0, 1), value=self.room - 1)[self.packed][None]  # [1, T]
        return (first[:, None] + torch.arange(heads, device=first.device)[:, None] * self.room).flatten()

    def visible(self, window: int | None = None, chunk: int | None = None) -> Tensor:
        """bool [B, Q, extent]: which slots a query attends to: no later than itself, inside its window or chunk."""
        slots = torch.arange(self.extent, device=self.positions.device)
        query = self.positions[..., None]
        seen = slots <= query
        if window is not None:
            seen &= slots > query - window
        if chunk is not None:
            seen &= slots // chunk == query // chunk
        return seen


def free(tensors: Iterable[Tensor]) -> None:
    """Free these tensors' memory now, although frames of a traceback may hold views of them."""
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)


class RaggedLayer(CacheLayerMixin):
    """One layer's keys and values, [places, heads, slots, head dimension]; the last slot is the scratch slot.

    Heads before slots: what one head reads lies in one piece, which CPUs read 1.6 times as fast.
    """

    is_compileable = True
    is_sliding = False
    names = ("keys", "values")  # of its buffers

    def __init__(self, cache: RaggedCache):
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, slots, numbers = self.cache.max_rows, self.cache.slots, key_states.shape[1] * key_states.shape[3]
        self.cache.token_bytes = 2 * len(self.cache.layers) * numbers * key_states.element_size()
        self.keys, self.values = (
            self.cache.allocate(states, (rows, states.shape[1], slots, states.shape[3]))
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write the pass's keys and values [B, H, Q, D] (packed: [1, H, T, D]) to its slots; return what it may see,
        [B, H, extent, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        current = self.cache.current
        if current.kernels:
            key_states, value_states = (
                current.unpack(states.transpose(1, 2)).transpose(1, 2) for states in (key_states, value_states)
            )
            states = key_states, value_states, self.keys, self.values
            kernel_ops.write_kv(*states, current.slots, current.first_place)
        else:
            current.write(key_states, self.keys)
            current.write(value_states, self.values)
        # Numbers that the compiler may leave open: a range, it would take for a constant.
        rows = slice(current.first_place, current.first_place + current.slots.shape[0])
        keys, values = self.keys[rows, :, : current.extent], self.values[rows, :, : current.extent]
        return (keys.contiguous(), values.contiguous()) if self.cache.contiguous else (keys, values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.current.extent, 0

    def get_seq_length(self) -> int:
        # Models ask this only to invent position ids and masks; both are always passed to them.
        return 0

    def get_max_length(self) -> int:
        return self.cache.slots

    def buffers(self) -> tuple[Tensor, Tensor] | tuple[()]:
        return (self.keys, self.values) if self.is_initialized else ()


class TokenStates:
    """Numbers of each token, [places, 1, slots, width], kept like keys and values: what a model's last layer has left,
    for drafters that ask for it, or the inputs of a short convolution."""

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
            self.states = self.cache.allocate(states, (self.cache.max_rows, 1, self.cache.slots, states.shape[-1]))
        self.cache.current.write(states, self.states)

    def of(self, places: range) -> Tensor:
        """[B, slots, width], of which those of a row's committed tokens, but for the last one, are there."""
        return self.states[places.start : places.stop, 0]

    def buffers(self) -> tuple[Tensor, ...]:
        return () if self.states is None else (self.states,)


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

    def __init__(
        self, num_layers: int, max_rows: int, capacity: int, contiguous: bool = False, keeps_hidden: bool = False
    ):
        """contiguous: hand out copies, as models' own code may want them; its products would make these themselves.
        keeps_hidden: the last layer's states, too."""
        super().__init__(layers=[RaggedLayer(self) for _ in range(num_layers)])
        self.hidden = TokenStates(self) if keeps_hidden else None
        self.windows: dict[int, TokenStates] = {}  # of layers that are short convolutions, by number
        self.sources: Sources | None = None  # of an encoder-decoder model
        self.max_rows, self.contiguous = max_rows, contiguous
        self.slots = capacity + 1  # + the scratch slot
        # Keys and values in all layers, of one position and of a row; known once a layer has shown its shape.
        self.token_bytes = self.row_bytes = 0
        self._device: torch.device | None = None  # known then, too
        self.current: Pass | None = None  # whose keys and values come next

    @property
    def scratch_slot(self) -> int:
        return self.slots - 1

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
        per_row, positions = self.row_bytes, self.row_bytes // max(self.token_bytes, 1) or self.slots
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
        if capacity < self.slots:
            return  # there is room: another cache of the batch may have failed to grow with this one
        grown = []  # all of them before any is put in place: running out of memory half-way must leave the cache whole
        for layer in self._kept:
            for name in layer.names if layer.is_initialized else ():
                old = getattr(layer, name)
                new = self.allocate(old, (self.max_rows, old.shape[1], capacity + 1, old.shape[3]))
                new[:, :, : self.slots - 1] = old[:, :, :-1]
                grown.append((layer, name, new))
        try:
            self._put(grown, capacity)
        finally:
            self._put(grown, capacity)  # again: a Ctrl-C may have fallen into the first

    def _put(self, grown: list[tuple[RaggedLayer, str, Tensor]], capacity: int) -> None:
        for layer, name, new in grown:
            setattr(layer, name, new)
        self.slots = capacity + 1

    def move_row(self, source: int, places: range) -> None:
        """Copy a row to other places, all layers at once."""
        if buffers := self.buffers():
            to = [buffer[place] for place in places for buffer in buffers]
            torch._foreach_copy_(to, [buffer[source] for _ in places for buffer in buffers])
        if self.sources is not None:
            self.sources.move_row(source, places)

    def clear(self, places: range) -> None:
        """Forget what rows that lived there have left."""
        if buffers := self.buffers():
            torch._foreach_zero_([buffer[places.start : places.stop] for buffer in buffers])

    def save_row(self, place: int, length: int) -> list[Tensor]:
        """A copy of a row's first `length` positions (a prompt's cache, kept for samples that start later)."""
        own = [buffer[place, :, :length].clone() for buffer in self.buffers()]
        return own if self.sources is None else own + self.sources.save_row(place)

    def load_row(self, places: range, saved: list[Tensor]) -> None:
        """Write what `save_row` returned into places, and nothing behind it."""
        buffers = self.buffers()
        for buffer, row in zip(buffers, saved, strict=self.sources is None):
            rows, length = buffer[places.start : places.stop], row.shape[1]
            rows[:, :, :length] = row
            rows[:, :, length:] = 0  # a row that failed leaves NaN, and 0 x NaN is NaN
        if self.sources is not None:
            self.sources.load_row(places, saved[len(buffers) :])

    def buffers(self) -> list[Tensor]:
        """Keys and values of all layers and numbers of tokens, as far as they are allocated."""
        return [buffer for layer in self._kept for buffer in layer.buffers()]

    @property
    def _kept(self) -> list[RaggedLayer | TokenStates]:
        if self.hidden is None and not self.windows:
            return self.layers
        return [*self.layers, *self.windows.values(), *([] if self.hidden is None else [self.hidden])]

    def begin_anew(self) -> None:
        """As if nothing had been asked for: of a first pass that ran out of memory some layers have theirs already."""
        self.release()
        self.slots = 1

    def release(self) -> None:
        """Free the memory now, even while a traceback still holds this object."""
        self.current = None
        for layer in self._kept:
            free(layer.buffers())
            for name in layer.names:
                setattr(layer, name, None)
        for layer in self.layers:
            layer.is_initialized = False
        if self.sources is not None:
            self.sources.release()
