"""The drafter interface: inputs, visible state and results.

A drafter proposes up to K tokens per row and reports the distribution of each. If the reported distributions are true,
the text keeps the target's distribution for any proposal. `ModelPair(target, draft)` accepts any drafter, such as:

    class Repeat(Drafter):
        def draft(self, context, lengths, policy):
            return Draft.of(context.last_tokens().expand(-1, lengths.max()), lengths)

One drafter serves all sessions of its pair. `begin` returns a copy for a session, with the session's state of rows.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from bass_core.exactness import randomness, sampling
from bass_core.exactness.processors import Processing, Text
from bass_core.exactness.randomness import StepKeys
from bass_core.exactness.sampling import MixedParams, SamplingParams
from bass_core.exactness.verification import perturbed_choice
from bass_core.model.cache import RaggedCache
from bass_core.model.encoder_decoder import Encoded, Source
from bass_core.model.runner import Layers, Runner
from bass_core.policies.protocol import DraftLengthPolicy


class Setting(NamedTuple):
    """A session's properties, passed to `Drafter.begin`."""

    target: PreTrainedModel
    paths: list[str]  # attention paths of the target and of the drafter's own models
    max_rows: int  # batch slots; rows live in batch slots 0, 1, …
    vocabulary: int  # of the target
    coupled: bool = False  # coupled verification
    show_q: bool = False  # return distributions even if verification does not need them (for traces)
    layers: Callable[[PreTrainedModel, RaggedCache], Layers] = Layers  # strategy for the layers of the drafter's models


class Context(NamedTuple):
    """Some rows of the batch before a step (B rows, tokens from position 0)."""

    batch_slots: range  # of the rows
    tokens: Tensor  # int64 [B, S]
    tokens_host: np.ndarray  # copy on the host, read-only
    lengths: Tensor  # int64 [B], committed tokens
    lengths_host: np.ndarray  # copy on the host
    keys: StepKeys  # random keys of the rows' current step
    params: SamplingParams | MixedParams  # sampling parameters
    prompts: Tensor  # int64 [B], tokens of the prompts
    processing: Processing | None = None  # the rows' processors
    likeliest: int = 0  # number of likeliest ids per token that a row asks for
    drafted: Tensor | None = None  # int64 [B, D], draft tokens so far, if there are processors
    noise: Tensor | None = None  # [B, K + 1, V], Gumbel noise of the next positions (coupled verification)
    hidden: Tensor | None = None  # [B, S, H], last hidden states of the target for all tokens except the last

    def last_tokens(self) -> Tensor:
        """Return the last committed token of each row: [B, 1]."""
        return self.tokens.gather(1, self.lengths[:, None] - 1)

    def law(self, logits: Tensor) -> Tensor:
        """Return the distribution of the next token, q [B, V], from logits [B, V] by the rows' processors and sampling
        parameters. With processors, V is the target's vocabulary, and missing ids have probability 0."""
        return sampling.probabilities(self.processed(logits[:, None])[0][:, 0], self.params)

    def processed(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return logits [B, J, V] after the rows' processors, and bool [B, J], False where no id is possible (None
        without processors). Position J follows all draft tokens."""
        if self.processing is None:
            return logits, None
        drafted = self.tokens[:, :0] if self.drafted is None else self.drafted
        return self.processing(logits, Text(self.tokens, self.lengths, self.prompts, drafted))

    def draw(self, q: Tensor, slot: int) -> Tensor:
        """Draw x_{slot + 1} of each row from q [B, V] with the random keys of the row's step: int64 [B]."""
        if self.params.greedy:
            return q.argmax(-1)
        if self.noise is not None:
            return perturbed_choice(q, self.noise[:, slot])
        return randomness.draw(q, self.keys.draft(slot))

    def after(self, token: Tensor) -> Context:
        """Return the context for the next draw, after token [B] was drawn."""
        if self.processing is None:
            return self
        token = token[:, None]
        return self._replace(drafted=token if self.drafted is None else torch.cat([self.drafted, token], 1))


class Draft(NamedTuple):
    """Draft tokens of a step. tokens: int64 [B, K], valid ids also in padding. lengths: int64 [B], submitted tokens per
    row (-1 for batch slots without a row in a captured phase). probs: [B, K, V], distributions of the tokens, or None
    for tokens chosen with certainty. finite: bool [B], True if the draft model's logits were finite."""

    tokens: Tensor
    lengths: Tensor
    lengths_host: np.ndarray | None  # copy on the host, None in a captured phase
    probs: Tensor | None
    finite: Tensor

    @classmethod
    def of(cls, tokens: Tensor, lengths: np.ndarray | Sequence[int], probs: Tensor | None = None) -> Draft:
        """Return a draft of each row's first lengths[b] tokens. tokens [B, K]; probs [B, K, V], or None if certain."""
        lengths = np.asarray(lengths)
        on_device = torch.as_tensor(lengths, device=tokens.device)
        finite = torch.ones_like(on_device, dtype=torch.bool)
        if probs is not None:  # distributions beyond the submitted tokens may hold anything
            beyond = torch.arange(probs.shape[1], device=probs.device) >= on_device[:, None]
            finite = (probs.sum(-1).isfinite() | beyond).all(1)
        return cls(tokens, on_device, lengths, probs, finite)

    @classmethod
    def none(cls, context: Context) -> Draft:
        """Return an empty draft: regular decoding."""
        lengths = torch.zeros_like(context.lengths)
        return cls(context.tokens[:, :0], lengths, np.zeros_like(context.lengths_host), None, lengths == 0)

    def within(self, vocabulary: int) -> Draft:
        """Return the draft with all ids below `vocabulary`; rows with larger ids are not finite. A lookup of invalid
        ids would break the GPU context, and a check beforehand would block the host."""
        tokens = self.tokens.clamp(0, vocabulary - 1)
        beyond = torch.arange(tokens.shape[1], device=tokens.device) >= self.lengths[:, None]
        return self._replace(tokens=tokens, finite=self.finite & ((tokens == self.tokens) | beyond).all(1))

    def distributions(self, vocabulary: int) -> Tensor:
        """Return the distributions of the tokens, one-hot if certain: [B, K, V]."""
        if self.probs is None and self.tokens.shape[1] == 0:
            return torch.empty(*self.tokens.shape, vocabulary, device=self.tokens.device)
        if self.probs is None:
            return sampling.one_hot(self.tokens, vocabulary).float()
        return self.probs


def checked(draft: object, drafter: Drafter, asked: np.ndarray, vocabulary: int, device: torch.device) -> Draft:
    """Return a drafter's result after checks. asked: the requested lengths. Raises TypeError for anything but a
    `Draft`, and ValueError for an invalid draft."""
    said = f"{type(drafter).__name__}.draft returned"
    if not isinstance(draft, Draft):
        raise TypeError(f"{said} {type(draft).__name__}; expected a Draft, for instance Draft.of(tokens, lengths)")
    tokens, lengths, shape = draft.tokens, draft.lengths_host, list(draft.tokens.shape)
    if len(shape) != 2 or shape[0] != len(asked) or tokens.dtype != torch.int64:
        raise ValueError(f"{said} tokens {shape} of {tokens.dtype}; expected ids (torch.int64) [{len(asked)}, K]")
    if not isinstance(lengths, np.ndarray) or lengths.shape != asked.shape or lengths.dtype.kind not in "iu":
        raise ValueError(f"{said} lengths {lengths}; expected an array of {len(asked)} integers, one per row")
    for name in ("tokens", "lengths", "probs", "finite"):
        if (part := getattr(draft, name)) is not None and part.device != device:
            raise ValueError(f"{said} {name} on {part.device}, but the rows are on {device}; use context.tokens.device")
    most, on_host = shape[1], tokens.device.type == "cpu"  # on other devices, reading values blocks the host
    if (lengths > np.minimum(asked, most)).any() or lengths.min() < 0:
        raise ValueError(
            f"{said} lengths {lengths.tolist()} of {most} tokens, but at most {asked.tolist()} were requested"
        )
    if on_host and not np.array_equal(draft.lengths.numpy(), lengths):
        raise ValueError(
            f"{said} lengths {draft.lengths.tolist()} and lengths_host {lengths.tolist()}, which differ; "
            "create drafts with Draft.of"
        )
    if most and on_host and not 0 <= tokens.numpy().min() <= tokens.numpy().max() < vocabulary:
        raise ValueError(
            f"{said} ids from {tokens.min()} to {tokens.max()} (including padding), but the target's vocabulary "
            f"has {vocabulary} ids"
        )
    if draft.probs is not None and list(draft.probs.shape) != [*shape, vocabulary]:
        raise ValueError(
            f"{said} probs {list(draft.probs.shape)}; expected one probability per token of the target: "
            f"{[*shape, vocabulary]}"
        )
    if draft.probs is not None and draft.probs.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"{said} probs of {draft.probs.dtype}, which rounds the probabilities of the draws; use "
            "torch.float32 or torch.float64, as returned by `Context.law`"
        )
    return draft


class Drafter(ABC):
    """Interface of drafters, with defaults for drafters without state per row."""

    name: ClassVar[str] = "draft"
    models: Sequence[PreTrainedModel] = ()  # own models that run over a cache of rows
    wants_hidden: ClassVar[bool] = False  # True to receive the target's last hidden states
    draws_ids: ClassVar[bool] = False  # True if the ids come from logits, and are always valid
    runners: Sequence[Runner] = ()  # of a session: the models over their caches

    def begin(self, setting: Setting) -> Self:
        """Return the drafter of a session: a copy. Subclasses add their state of rows to the copy."""
        return copy.copy(self)

    def read_sources(self, sources: Sequence[Source], batch_slots: range, encoded: Encoded) -> None:
        """Receive the sources of rows that begin in `batch_slots`, before `prefill`. Called for encoder-decoder targets
        only. encoded: the result of the target's encoder."""

    def prefill(self, tokens: Tensor, lengths: Sequence[int], batch_slots: range, hidden: Tensor | None = None) -> None:
        """Receive the prompts of rows that begin in `batch_slots`. tokens int64 [B, S]; hidden [B, S, H]: as in
        `Context`, for the whole prompt."""

    def prefill_chunk(self, tokens: Tensor, chunk: range, batch_slot: int, hidden: Tensor | None = None) -> None:
        """Receive the positions in `chunk` of a long prompt in `batch_slot`. After the last chunk, the session calls
        `save_row`, and rows start by `load_row`. An interrupt may repeat a chunk. By default, the last chunk calls
        `prefill` with the whole prompt. tokens int64 [1, P]: the prompt; hidden [1, S, H]: up to the chunk's end."""
        if chunk.stop == tokens.shape[1]:
            self.prefill(tokens, [tokens.shape[1]], range(batch_slot, batch_slot + 1), hidden)

    def move_row(self, source: int, batch_slots: range) -> None:
        """Copy the state of a row to other batch slots."""

    def save_row(self, batch_slot: int, length: int) -> list[Tensor]:
        """Return the data that `load_row` needs to start another sample of this prompt."""
        return []

    def load_row(self, batch_slots: range, saved: list[Tensor], length: int) -> None:
        """Start a row of `length` saved positions in `batch_slots`."""

    @abstractmethod
    def draft(self, context: Context, lengths: np.ndarray, policy: DraftLengthPolicy) -> Draft:
        """Return up to lengths[b] >= 0 tokens for row b; some length is positive. policy: to consult between draws."""

    @property
    def has_fixed(self) -> bool:
        """True if the drafter has `draft_fixed(context, lengths, most, max_kv_length) -> Draft`, a `draft` with fixed
        shapes (see `ModelDrafter`). False for subclasses that override only `draft`."""
        owner = next(each for each in type(self).__mro__ if {"draft", "draft_fixed"} & vars(each).keys())
        return "draft_fixed" in vars(owner)

    def catch_up(self, context: Context, lengths: np.ndarray, most: int) -> None:
        """Feed the missed tokens of the next drafting rows, except those fed by `draft_fixed`."""

    def capture_passes(self, captured: Callable[[Runner], Callable[..., Tensor]]) -> None:
        """Receive captured(runner), a function that runs a runner's captured passes in `draft`."""

    def committed(self, before: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Receive each row's tokens before the step, draft tokens and accepted tokens: int [B] each."""

    def ended(self, batch_slot: int, tokens: np.ndarray) -> None:
        """Receive the tokens of an ended row, including the prompt. An interrupt may repeat the call."""

    def forget(self) -> None:
        """Forget everything learned from earlier rows. No row is live, and new rows are drafted as in a new session."""

    def prepared(self) -> AbstractContextManager:
        """Return a context for many steps, with preparations that would otherwise repeat in each step."""
        return nullcontext()

    def grow(self, capacity: int) -> None:
        """Extend all rows to `capacity` positions."""

    def release(self) -> None:
        """Free the memory."""
