"""The interface of what drafts: what it is told, what it may look at, what it returns.

A drafter proposes up to K tokens per row and says from which distribution each was drawn; the text keeps the target's
law whatever it proposes, as long as that is true. `ModelPair(target, draft)` takes any. The shortest there can be:

    class Repeat(Drafter):
        def draft(self, context, lengths, policy):
            return Draft.of(context.last_tokens().expand(-1, lengths.max()), lengths)

One drafter serves all sessions of its pair; `begin` makes what each of them works with, and what that keeps of rows.
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
from bass_core.exactness.randomness import StepKeys
from bass_core.exactness.sampling import MixedParams, SamplingParams
from bass_core.exactness.verification import perturbed_choice
from bass_core.model.cache import RaggedCache
from bass_core.model.encoder_decoder import Encoded, Source
from bass_core.model.runner import Layers, Runner
from bass_core.policies.protocol import DraftLengthPolicy


class Setting(NamedTuple):
    """A session, to what drafts for it."""

    target: PreTrainedModel
    paths: list[str]  # attention paths of the target and of the drafter's own models
    max_rows: int  # batch slots; rows live in batch slots 0, 1, …
    vocabulary: int  # the target's
    coupled: bool = False  # coupled verification
    show_q: bool = False  # a trace wants the distributions also where verification does without
    layers: Callable[[PreTrainedModel, RaggedCache], Layers] = Layers  # how the layers of its models run


class Context(NamedTuple):
    """Some rows of the batch as a step meets them (B rows, tokens from position 0)."""

    batch_slots: range  # where the rows live
    tokens: Tensor  # int64 [B, S]
    tokens_host: np.ndarray  # the same on the host, read-only
    lengths: Tensor  # int64 [B], committed tokens
    lengths_host: np.ndarray  # the same on the host
    keys: StepKeys  # the randomness of the rows' own step
    params: SamplingParams | MixedParams  # how tokens are chosen
    seen: Tensor | None  # bool [B, V], ids so far (repetition penalty)
    noise: Tensor | None = None  # [B, K + 1, V], Gumbel noise of the next positions (coupled verification)
    hidden: Tensor | None = None  # [B, S, H], what the target's last layer left of all tokens but the last

    def last_tokens(self) -> Tensor:
        """The last committed token of each row: [B, 1]."""
        return self.tokens.gather(1, self.lengths[:, None] - 1)

    def law(self, logits: Tensor) -> Tensor:
        """What logits [B, V] say of the next token, processed as the rows are sampled: q [B, V]."""
        return sampling.probabilities(
            logits, self.params, None if self.seen is None else self.seen[:, : logits.shape[1]]
        )

    def draw(self, q: Tensor, slot: int) -> Tensor:
        """x_{slot + 1} of each row from q [B, V], by the random numbers of the row's own step: int64 [B]."""
        if self.params.greedy:
            return q.argmax(-1)
        if self.noise is not None:
            return perturbed_choice(q, self.noise[:, slot])
        return randomness.draw(q, self.keys.draft(slot))

    def after(self, token: Tensor) -> Context:
        """The same, to what draws the next token, now that token [B] was drawn."""
        return self if self.seen is None else self._replace(seen=self.seen.scatter(1, token[:, None], True))


class Draft(NamedTuple):
    """tokens int64 [B, K]; lengths int64 [B], how many each row submits (padding follows, of ids that there are; in a
    recorded phase -1 where no row lives), also on the host; probs [B, K, V] or None, what the tokens were drawn from
    (None: chosen with certainty); finite bool [B]: the draft's logits were numbers."""

    tokens: Tensor
    lengths: Tensor
    lengths_host: np.ndarray | None  # None inside a recorded phase
    probs: Tensor | None
    finite: Tensor

    @classmethod
    def of(cls, tokens: Tensor, lengths: np.ndarray | Sequence[int], probs: Tensor | None = None) -> Draft:
        """The first lengths[b] of each row's tokens [B, K], drawn from probs [B, K, V] (None: chosen)."""
        lengths = np.asarray(lengths)
        on_device = torch.as_tensor(lengths, device=tokens.device)
        finite = torch.ones_like(on_device, dtype=torch.bool)
        if probs is not None:  # q of a slot that is not submitted may be anything
            beyond = torch.arange(probs.shape[1], device=probs.device) >= on_device[:, None]
            finite = (probs.sum(-1).isfinite() | beyond).all(1)
        return cls(tokens, on_device, lengths, probs, finite)

    @classmethod
    def none(cls, context: Context) -> Draft:
        """Nothing drafted: regular decoding."""
        lengths = torch.zeros_like(context.lengths)
        return cls(context.tokens[:, :0], lengths, np.zeros_like(context.lengths_host), None, lengths == 0)

    def within(self, vocabulary: int) -> Draft:
        """The same where all ids are below `vocabulary`; a row with others is not finite. A GPU that looks up what a
        table does not have is lost, and to look first would have the host wait."""
        tokens = self.tokens.clamp(0, vocabulary - 1)
        beyond = torch.arange(tokens.shape[1], device=tokens.device) >= self.lengths[:, None]
        return self._replace(tokens=tokens, finite=self.finite & ((tokens == self.tokens) | beyond).all(1))

    def distributions(self, vocabulary: int) -> Tensor:
        """probs, or one-hot where the tokens were certain: [B, K, V]."""
        if self.probs is None and self.tokens.shape[1] == 0:
            return torch.empty(*self.tokens.shape, vocabulary, device=self.tokens.device)
        if self.probs is None:
            return sampling.one_hot(self.tokens, vocabulary).float()
        return self.probs


def checked(draft: object, drafter: Drafter, asked: np.ndarray, vocabulary: int, device: torch.device) -> Draft:
    """The draft that a drafter returned which was asked for these lengths. Raises TypeError for what is no `Draft`,
    ValueError for one that no drafter may return."""
    said = f"{type(drafter).__name__}.draft returned"
    if not isinstance(draft, Draft):
        raise TypeError(f"{said} {type(draft).__name__}; wanted is a Draft, for instance Draft.of(tokens, lengths)")
    tokens, lengths, shape = draft.tokens, draft.lengths_host, list(draft.tokens.shape)
    if len(shape) != 2 or shape[0] != len(asked) or tokens.dtype != torch.int64:
        raise ValueError(f"{said} tokens {shape} of {tokens.dtype}; wanted are ids (torch.int64) [{len(asked)}, K]")
    if not isinstance(lengths, np.ndarray) or lengths.shape != asked.shape or lengths.dtype.kind not in "iu":
        raise ValueError(f"{said} lengths {lengths}; wanted is an array of {len(asked)} integers, one per row")
    for name in ("tokens", "lengths", "probs", "finite"):
        if (part := getattr(draft, name)) is not None and part.device != device:
            raise ValueError(f"{said} {name} on {part.device}, and the rows are on {device}: context.tokens.device")
    most, on_host = shape[1], tokens.device.type == "cpu"  # elsewhere, looking at values would have the host wait
    if (lengths > np.minimum(asked, most)).any() or lengths.min() < 0:
        raise ValueError(
            f"{said} lengths {lengths.tolist()} of {most} tokens, and was asked for {asked.tolist()} at most"
        )
    if on_host and not np.array_equal(draft.lengths.numpy(), lengths):
        raise ValueError(
            f"{said} lengths {draft.lengths.tolist()} and lengths_host {lengths.tolist()}, which say the same where "
            "Draft.of makes them"
        )
    if most and on_host and not 0 <= tokens.numpy().min() <= tokens.numpy().max() < vocabulary:
        raise ValueError(
            f"{said} ids from {tokens.min()} to {tokens.max()}, beyond lengths too, and the target does not have all "
            f"of these; it has {vocabulary}"
        )
    if draft.probs is not None and list(draft.probs.shape) != [*shape, vocabulary]:
        raise ValueError(
            f"{said} probs {list(draft.probs.shape)}; the target chooses among {vocabulary} tokens: "
            f"{[*shape, vocabulary]}"
        )
    if draft.probs is not None and draft.probs.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"{said} probs of {draft.probs.dtype}, in which they are rounded: not what tokens were "
            "drawn from. `Context.law` gives them in torch.float32 or torch.float64"
        )
    return draft


class Drafter(ABC):
    """Interface, with the answers of a drafter that keeps nothing per row."""

    name: ClassVar[str] = "draft"
    models: Sequence[PreTrainedModel] = ()  # its own, that go over a cache of rows
    wants_hidden: ClassVar[bool] = False  # whether the target's last hidden states are to be kept for it
    draws_ids: ClassVar[bool] = False  # its ids come from logits, so that a model has all of them
    runners: Sequence[Runner] = ()  # of one session: its models over their caches

    def begin(self, setting: Setting) -> Self:
        """What drafts for one session: a copy, to which an extension gives what it keeps of rows."""
        return copy.copy(self)

    def read_sources(self, sources: Sequence[Source], batch_slots: range, encoded: Encoded) -> None:
        """Rows that read these sources begin in `batch_slots`; `prefill` follows. Said for encoder-decoder targets
        alone.
        encoded: what the target's encoder made of them."""

    def prefill(self, tokens: Tensor, lengths: Sequence[int], batch_slots: range, hidden: Tensor | None = None) -> None:
        """Rows with these prompts now live in `batch_slots`. tokens int64 [B, S]; hidden [B, S, H]: as in `Context`, of
        all of the prompt."""

    def prefill_chunk(self, tokens: Tensor, chunk: range, batch_slot: int, hidden: Tensor | None = None) -> None:
        """A long prompt is read into `batch_slot` chunk by chunk, here the positions in `chunk`. After the last one
        comes `save_row`, and rows start by `load_row`. An interrupt may have a chunk said again. Unless this is
        overridden, all is read at the last chunk, by `prefill`. tokens int64 [1, P], all of the prompt; hidden [1, S,
        H]: as in `prefill`, up to the chunk's end."""
        if chunk.stop == tokens.shape[1]:
            self.prefill(tokens, [tokens.shape[1]], range(batch_slot, batch_slot + 1), hidden)

    def move_row(self, source: int, batch_slots: range) -> None:
        """The row at one batch slot now (also) lives at others."""

    def save_row(self, batch_slot: int, length: int) -> list[Tensor]:
        """What `load_row` needs to start another sample of this prompt."""
        return []

    def load_row(self, batch_slots: range, saved: list[Tensor], length: int) -> None:
        """A row of `length` saved positions now lives at `batch_slots`."""

    @abstractmethod
    def draft(self, context: Context, lengths: np.ndarray, policy: DraftLengthPolicy) -> Draft:
        """Up to lengths[b] >= 0 tokens for row b; some row wants one. policy: may want to be asked in between."""

    @property
    def has_fixed(self) -> bool:
        """Return True if the drafter has `draft_fixed(context, lengths, most, max_kv_length) -> Draft`: `draft` as a
        function of fixed shapes, for which `ModelDrafter` is the example. A subclass with a `draft` of its own alone
        has none."""
        owner = next(each for each in type(self).__mro__ if {"draft", "draft_fixed"} & vars(each).keys())
        return "draft_fixed" in vars(owner)

    def catch_up(self, context: Context, lengths: np.ndarray, most: int) -> None:
        """Feed what the rows that draft next have missed beyond the tokens that `draft_fixed` feeds."""

    def capture_passes(self, captured: Callable[[Runner], Callable[..., Tensor]]) -> None:
        """Passes of a runner may go through captured(runner) in `draft`, where steps are captured."""

    def committed(self, before: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Rows had `before` tokens, drafted so many and had that many of these accepted: each int [B]."""

    def ended(self, batch_slot: int, tokens: np.ndarray) -> None:
        """The row at that batch slot has ended with these tokens, prompt included. An interrupt may have it said
        again."""

    def forget(self) -> None:
        """No row lives, and those that come are to be drafted as in a new session: forget what others have taught."""

    def prepared(self) -> AbstractContextManager:
        """May be held while many steps run, so that what each would prepare for itself is prepared once."""
        return nullcontext()

    def grow(self, capacity: int) -> None:
        """Rows may now be `capacity` positions long."""

    def release(self) -> None:
        """Free memory."""
