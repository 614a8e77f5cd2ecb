"""Sources of encoder-decoder models, and the fixed cache of their keys and values.

A row of such a model has two texts. The decoder's text lives in the ragged cache as usual. The source is encoded once,
and the row's prefill writes the cross-attention keys and values of every decoder layer. The cached source never grows
and is never rolled back. Rows whose sources differ in length fill different parts of their batch slots.

The models' own layers do the work, as with transformers' `EncoderDecoderCache`. If `is_updated` is False, a layer
computes the keys and values and passes them to `Sources.update`; otherwise the layer reads the cached ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from bass_core.model.cache import RaggedCache, free
from bass_core.model.forward_pass import Pass
from bass_core.model.patching import as_found
from bass_core.model.transformers_internals import cache_argument

FEATURES = "input_features"  # the input of speech models, instead of ids


@dataclass(frozen=True, eq=False)
class Source:
    """The source of a row, on the host: int64 ids [S], or features such as a spectrogram [channels, frames]."""

    inputs: Tensor

    @cached_property
    def key(self) -> bytes:
        """Return bytes that are equal for equal sources."""
        return f"{tuple(self.inputs.shape)}".encode() + self.inputs.numpy().tobytes()


def made_up(model: PreTrainedModel, length: int, seed: int = 0) -> Source:
    """Return a source of `length` random ids, or random features (of fixed length), for probes and timing."""
    generator = torch.Generator().manual_seed(seed)
    if model.main_input_name == FEATURES:
        shape = model.config.num_mel_bins, 2 * model.config.max_source_positions
        return Source(torch.randn(shape, generator=generator, device="cpu"))
    vocabulary = model.config.get_text_config().vocab_size
    return Source(torch.randint(1, vocabulary, (length,), generator=generator, device="cpu"))


class Encoded(NamedTuple):
    """Encoder states of some rows' sources, [B, S, H]. The first lengths[b] states belong to row b."""

    states: Tensor
    lengths: list[int]


@torch.inference_mode()
def encode(model: PreTrainedModel, sources: Sequence[Source]) -> Encoded:
    """Run the model's encoder once, in evaluation mode and with the model's own configuration. Padding follows shorter
    sources."""
    encoder, inputs = model.get_encoder(), [source.inputs.to(model.device) for source in sources]
    with as_found(model):
        if model.main_input_name == FEATURES:
            states = encoder(torch.stack(inputs).to(model.dtype), return_dict=True).last_hidden_state
            return Encoded(states, [states.shape[1]] * len(sources))
        lengths = [len(ids) for ids in inputs]
        kept = torch.arange(max(lengths), device=model.device) < torch.tensor(lengths, device=model.device)[:, None]
        ids = pad_sequence(inputs, batch_first=True, padding_value=0)
        return Encoded(encoder(input_ids=ids, attention_mask=kept.long(), return_dict=True).last_hidden_state, lengths)


class SourceLayer:
    """One decoder layer's keys and values of the sources, [batch slots, heads, KV slots, head dimension]."""

    def __init__(self, sources: Sources):
        self.sources = sources
        self.buffers: list[Tensor] = []

    @property
    def keys(self) -> Tensor:
        """Return the keys for the rows of the current pass: [B, H, longest source, D]."""
        return self.sources.handed_out(self.buffers[0])

    @property
    def values(self) -> Tensor:
        return self.sources.handed_out(self.buffers[1])


class Sources:
    """The fixed cache of one model's rows. `read` stages sources; the next pass of the rows writes them."""

    def __init__(self, cache: RaggedCache, hidden_size: int):
        self.cache = cache
        cache.by_row = self
        self.layers = [SourceLayer(self) for _ in cache.layers]
        self.lengths = np.zeros(cache.max_rows, np.int64)  # of the source in each batch slot
        self._on_device: Tensor | None = None
        self._unread: tuple[range, Encoded] | None = None  # encoded, but not yet written
        self._hidden_size = hidden_size
        self._both = EncoderDecoderCache(cache, cache)
        self._both.cross_attention_cache = self  # replaces a cache that grows

    def clear(self, batch_slots: range) -> None:
        """Do nothing: `read` replaces the sources."""

    def read(self, encoded: Encoded, batch_slots: range) -> None:
        """Stage the sources of the rows in these batch slots. The next pass must run over exactly these batch slots."""
        self._unread = batch_slots, encoded

    def inputs(self, current: Pass, model: PreTrainedModel, path: str) -> dict:
        """Return the model's inputs of this pass, except the tokens."""
        batch_slots, encoded = self._unread or (None, None)
        reads, self._unread = batch_slots == current.batch_slots, None
        if reads:
            self.lengths[batch_slots.start : batch_slots.stop] = encoded.lengths
            self._on_device = torch.from_numpy(self.lengths).to(encoded.states.device)
            states = encoded.states
        else:  # layers check only that states exist, and do not read the values
            nothing = torch.zeros(1, 1, 1, dtype=model.dtype, device=model.device)
            states = nothing.expand(len(current.batch_slots), self.max_kv_length(current), self._hidden_size)
        self._both.is_updated = dict.fromkeys(range(len(self.layers)), not reads)
        inputs = {"encoder_outputs": BaseModelOutput(last_hidden_state=states), cache_argument(type(model)): self._both}
        if path == "eager":  # on the other paths, attention applies the mask
            inputs["attention_mask"] = (~self.hidden(current)).long()
        return inputs

    def update(self, keys: Tensor, values: Tensor, layer: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write and return a layer's keys and values of the staged sources, [B, H, S, D]."""
        mine, rows = self.layers[layer], self._rows(self.cache.current)
        if not mine.buffers:
            mine.buffers = [self._room_for(states, None) for states in (keys, values)]
        elif mine.buffers[0].shape[2] < keys.shape[2]:
            mine.buffers = [self._room_for(*each) for each in zip((keys, values), mine.buffers, strict=True)]
        for buffer, states in zip(mine.buffers, (keys, values), strict=True):
            buffer[rows, :, : states.shape[2]] = states
            buffer[rows, :, states.shape[2] :] = 0  # a failed row leaves NaN, and 0 x NaN is NaN
        self.cache.current.foreign_mask = self.bias
        return keys, values

    def _room_for(self, states: Tensor, old: Tensor | None) -> Tensor:
        """Return a buffer with capacity for the length of `states`, including the contents of the old buffer."""
        room = states.shape[2] if old is None else max(states.shape[2], 2 * old.shape[2])
        new = states.new_zeros(self.cache.max_rows, states.shape[1], room, states.shape[3])
        if old is not None:
            new[:, :, : old.shape[2]] = old
        return new

    def handed_out(self, buffer: Tensor) -> Tensor:
        """Return the part of a buffer that the rows of the current pass may read."""
        current = self.cache.current
        current.foreign_mask = self.bias
        return buffer[self._rows(current), :, : self.max_kv_length(current)]

    def max_kv_length(self, current: Pass) -> int:
        """Return the length of the longest source in the pass."""
        return int(self.lengths[self._rows(current)].max())

    def hidden(self, current: Pass) -> Tensor:
        """Return the padding mask of the sources: bool [B, longest source]."""
        slots = torch.arange(self.max_kv_length(current), device=current.positions.device)
        return slots >= self._on_device[self._rows(current), None]

    def bias(self, current: Pass, dtype: torch.dtype) -> Tensor | None:
        """Return the additive mask [B, 1, 1, longest source], or None if all sources have this length."""
        if (self.lengths[self._rows(current)] == self.max_kv_length(current)).all():
            return None
        hidden = self.hidden(current)[:, None, None]
        return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)

    @staticmethod
    def _rows(current: Pass) -> slice:
        return slice(current.batch_slots.start, current.batch_slots.stop)

    # --- moving, saving and restoring rows ------------------------------------------------------------

    def buffers(self) -> list[Tensor]:
        """Return the allocated keys and values of all layers."""
        return [buffer for layer in self.layers for buffer in layer.buffers]

    def move_row(self, source: int, batch_slots: range) -> None:
        """Copy a row's source to other batch slots."""
        for buffer in self.buffers():
            buffer[batch_slots.start : batch_slots.stop] = buffer[source].clone()
        self._has_length(int(self.lengths[source]), batch_slots)

    def save_row(self, batch_slot: int) -> list[Tensor]:
        """Return a copy of a row's source."""
        return [buffer[batch_slot, :, : self.lengths[batch_slot]].clone() for buffer in self.buffers()]

    def load_row(self, batch_slots: range, saved: Sequence[Tensor]) -> None:
        """Write the result of `save_row` into batch slots."""
        for buffer, row in zip(self.buffers(), saved, strict=True):
            rows, length = buffer[batch_slots.start : batch_slots.stop], row.shape[1]
            rows[:, :, :length] = row
            rows[:, :, length:] = 0
        self._has_length(saved[0].shape[1], batch_slots)

    def _has_length(self, length: int, batch_slots: range) -> None:
        self.lengths[batch_slots.start : batch_slots.stop] = length
        self._on_device[batch_slots.start : batch_slots.stop] = length

    def release(self) -> None:
        """Free the memory now."""
        free(self.buffers())
        for layer in self.layers:
            layer.buffers = []
        self._unread = None
