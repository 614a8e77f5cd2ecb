"""Drafts with a smaller causal language model, over a ragged cache of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from bass_core.drafters.protocol import Context, Draft, Drafter, Setting
from bass_core.exactness.sampling import SamplingParams
from bass_core.model import kernel_ops
from bass_core.model.encoder_decoder import Encoded, Source
from bass_core.model.forward_pass import Phase
from bass_core.model.runner import Runner
from bass_core.policies.protocol import DraftLengthPolicy, Signals, cut_lengths

CATCH_UP = 16  # up to so many missed tokens are fed exactly; larger numbers are rounded up to a multiple
RECORDED = 256  # up to so many missed tokens use captured passes, rounded up to a power of two (few shapes)


class ModelDrafter(Drafter):
    """Drafts with a causal language model over a ragged cache of its own.

    A step feeds the last two committed tokens, then single tokens. (After full acceptance, the model has not read its
    last draft token; otherwise the first pass rewrites the same values.) After steps without drafts, a row first
    catches up on all missed tokens, because gaps in the cache would lower the acceptance rate. A model with a recurrent
    state cannot reread a token: the first pass feeds exactly the missed tokens of each row.
    """

    draws_ids = True

    def __init__(self, model: PreTrainedModel):
        self.models = [model]

    def begin(self, setting: Setting) -> Self:
        return self._over(self.models[0], setting.paths[1], setting)

    def _over(self, model: PreTrainedModel, path: str, setting: Setting) -> Self:
        mine = super().begin(setting)
        mine.runner = Runner(model, path, setting.max_rows, layers=setting.layers)
        mine.runners = [mine.runner]
        mine.coupled, mine.show_q = setting.coupled, setting.show_q
        mine.vocabulary = setting.vocabulary  # of the target: larger ids are never drafted
        mine.draft_vocabulary = model.config.get_text_config().vocab_size
        mine.cached = np.zeros(setting.max_rows, dtype=np.int64)  # valid positions per batch slot
        # Of a model with a recurrent state: the position where each row's last draft began.
        mine.began = np.zeros_like(mine.cached)
        # With captured steps: a function of ids, starts, query lengths and host starts that returns logits [B, V].
        mine.captured = None
        return mine

    def read_sources(self, sources: Sequence[Source], batch_slots: range, encoded: Encoded) -> None:
        self.runner.read(sources, batch_slots)

    def prefill(self, tokens: Tensor, lengths: Sequence[int], batch_slots: range, hidden: Tensor | None = None) -> None:
        self.runner.cache.clear(batch_slots)
        self._feed_last(tokens, hidden, lengths, max(lengths), batch_slots)
        self.cached[batch_slots.start : batch_slots.stop] = lengths

    def prefill_chunk(self, tokens: Tensor, chunk: range, batch_slot: int, hidden: Tensor | None = None) -> None:
        batch_slots = range(batch_slot, batch_slot + 1)
        if chunk.start == 0:
            self.runner.cache.clear(batch_slots)
        self._feed_last(tokens, hidden, [chunk.stop], len(chunk), batch_slots, prompt=tokens.shape[1])

    def move_row(self, source: int, batch_slots: range) -> None:
        self.runner.cache.move_row(source, batch_slots)
        for table in (self.cached, self.began):
            table[batch_slots.start : batch_slots.stop] = table[source]

    def save_row(self, batch_slot: int, length: int) -> list[Tensor]:
        return self.runner.cache.save_row(batch_slot, length)

    def load_row(self, batch_slots: range, saved: list[Tensor], length: int) -> None:
        self.runner.cache.load_row(batch_slots, saved)
        self.cached[batch_slots.start : batch_slots.stop] = length

    def capture_passes(self, captured: Callable[[Runner], Callable[..., Tensor]]) -> None:
        self.captured = captured(self.runner)

    def prepared(self) -> AbstractContextManager:
        return self.runner.prepared()

    def grow(self, capacity: int) -> None:
        self.runner.cache.grow(capacity)

    def release(self) -> None:
        self.runner.release()

    # --- drawing k tokens -------------------------------------------------------------------------

    def draft(self, context: Context, lengths: np.ndarray, policy: DraftLengthPolicy) -> Draft:
        rows = int(lengths.nonzero()[0][-1]) + 1  # later rows do not draft, and are not fed
        if self.runner.states is not None:
            return self._draft_with_states(context, lengths, policy, rows)

        most = int(lengths.max())
        later = self.runner.columns(context.lengths, context.lengths_host, most - 1)

        def feed(token: Tensor | None, slot: int, lengths: np.ndarray) -> Tensor:
            if token is None:
                return self._catch_up(context, rows)
            if self.captured is not None:
                return self._feed(token, context, slot)
            current = next(later)
            current.features = self._own()
            return self._comparable(self.runner.run(self._known(token)[:, None], current)[:, -1])

        with self.prepared():
            return self._draw(context, lengths, most, feed, policy)

    def _draft_with_states(self, context: Context, lengths: np.ndarray, policy: DraftLengthPolicy, rows: int) -> Draft:
        """`draft` with a recurrent model. Only the first `rows` rows are fed, since states may not miss tokens."""
        resting = len(lengths) - rows
        first = context._replace(
            tokens=context.tokens[:rows], lengths=context.lengths[:rows], lengths_host=context.lengths_host[:rows]
        )

        def feed(token: Tensor | None, slot: int, lengths: np.ndarray) -> Tensor:
            if token is None:
                logits = self._read_missed(first, begins)
            else:
                logits = self._feed(token[:rows], first, slot, begins)
            return F.pad(logits, (0, 0, 0, resting))

        with self.prepared():
            begins = self._read_surplus(first)
            draft = self._draw(context, lengths, int(lengths.max()), feed, policy)
        # Only now: after an interrupt, the next draft begins where this one began.
        self.cached[:rows], self.began[:rows] = first.lengths_host, begins
        return draft

    def draft_fixed(self, context: Context, lengths: Tensor, most: int, max_kv_length: int) -> Draft:
        """`draft` with fixed shapes and without values on the host: lengths[b] <= most tokens for row b, none for 0 or
        less. The caller runs `catch_up` before."""
        context = context._replace(keys=replace(context.keys, fused=self.runner.layers.fused))
        width, committed = self.first_pass(most), context.lengths
        last, starts, counts, ends = self.runner.layers.fused(_passes)(context.tokens, committed, lengths, most, width)
        phase = Phase(ends, width + most - 1, {})

        def feed(token: Tensor | None, slot: int, lengths: Tensor) -> Tensor:
            ids, options = last if token is None else token[:, None], {"last_only": True, "phase": phase}
            features = self._features(context.hidden, starts[0], width) if token is None else self._own()
            fed = self.runner.feed(
                self._known(ids), starts[slot], counts[slot], max_kv_length=max_kv_length, features=features, **options
            )
            return self._comparable(fed[:, -1])

        with self.prepared():
            return self._draw(context, lengths, most, feed)

    def _draw(
        self,
        context: Context,
        lengths: np.ndarray | Tensor,
        most: int,
        feed: Callable[[Tensor | None, int, np.ndarray | Tensor], Tensor],
        policy: DraftLengthPolicy | None = None,
    ) -> Draft:
        """Draw x_1 … x_most; row b drafts the first lengths[b]. policy: consulted between draws (lengths on the host).

        feed(token, slot, lengths): logits [B, V] for x_{slot + 1}. token: x_slot, or None at first.
        """
        asks = policy is not None and policy.keep_drafting is not None
        drawn: list[Tensor] = []  # per slot: tokens [B], and distributions [B, V]
        distributions: list[Tensor | None] = []
        peaks: list[Tensor] = []  # per slot [B]: the largest logit, NaN or infinite if any logit is
        looked_at = np.zeros_like(lengths) if asks else lengths  # per row: number of slots with logits
        while (slot := len(drawn)) < most:
            logits = feed(drawn[-1] if drawn else None, slot, lengths)
            if asks:
                looked_at += lengths > slot  # counted before the policy, which could mistake NaN for uncertainty
                lengths = self._stop_rows(policy, logits, slot, lengths)
                if (most := int(lengths.max())) <= slot:
                    peaks.append(logits.amax(-1))
                    break
            token, q, peak = self._next_token(logits, context, slot)
            peaks.append(peak)
            drawn.append(token)
            distributions.append(q)
            context = context.after(token)
        device = context.tokens.device
        looked_at = torch.as_tensor(looked_at, device=device)
        finite = self.runner.layers.fused(_finite)(torch.stack(peaks, 1), looked_at)
        if not drawn:
            return Draft.none(context)._replace(finite=finite)
        q = torch.stack(distributions, 1) if self._keeps_q(context) else None  # [B, K, V]
        host = lengths if isinstance(lengths, np.ndarray) else None
        return Draft(torch.stack(drawn, 1), torch.as_tensor(lengths, device=device), host, q, finite)

    def first_pass(self, most: int) -> int:
        """Return the number of committed tokens in the first pass of a draft: the last draft token, which the model has
        not read, and the target's own token."""
        return 2

    def catch_up(self, context: Context, lengths: np.ndarray, most: int) -> None:
        """Feed the missed tokens of the next drafting rows, except those fed by `draft_fixed`."""
        drafting = np.flatnonzero(lengths)
        if self._missed(context, drafting) > self.first_pass(most):
            self._catch_up(context, int(drafting[-1]) + 1)
        self.cached[drafting] = context.lengths_host[drafting]

    def _catch_up(self, context: Context, rows: int) -> Tensor:
        """Return logits [B, V] after the last committed token of the first `rows` rows, and zeros for later rows."""
        missed = self._missed(context, slice(rows))
        lengths = context.lengths_host[:rows]
        if self.captured is not None and missed <= RECORDED:
            count = 1 << max(missed - 1, 1).bit_length()
            fed = self._known(_last_tokens(context.tokens[:rows], context.lengths[:rows], count))
            logits = self.captured(fed, context.lengths[:rows] - count, [count] * rows, lengths - count)
        else:
            # Larger numbers are rounded up, so that shapes repeat.
            count = max(missed, 2) if missed <= CATCH_UP else -(-missed // CATCH_UP) * CATCH_UP
            logits = self._feed_last(context.tokens, context.hidden, lengths, count, range(rows))
        self.cached[:rows] = lengths
        resting = len(context.lengths_host) - rows
        return F.pad(self._comparable(logits), (0, 0, 0, resting)) if resting else self._comparable(logits)

    def _read_surplus(self, context: Context) -> np.ndarray:
        """Read all missed tokens except each row's last two, at most `CATCH_UP` per pass. Return the first position
        that is left: [B]."""
        lengths = context.lengths_host
        cached, began = self.cached[: len(lengths)], self.began[: len(lengths)]
        while True:
            begins = np.where(cached == lengths, began, cached)  # equal: an interrupted step repeats its draft
            counts = (lengths - begins - 2).clip(0, CATCH_UP)  # each pass of the draft replays what is left
            if not counts.any():
                return begins
            self._feed_from(context, begins, counts)
            cached[:] = begins + counts

    def _read_missed(self, context: Context, begins: np.ndarray) -> Tensor:
        """Read the rows' committed tokens from `begins` on. Return the logits [B, V] after the last one."""
        counts = context.lengths_host - begins
        logits = self._feed_from(context, begins, counts)  # [B, Q, V]
        last = torch.as_tensor(counts - 1, device=logits.device)[:, None, None].expand(-1, 1, logits.shape[-1])
        return self._comparable(logits.gather(1, last)[:, 0])

    def _feed_from(self, context: Context, begins: np.ndarray, counts: np.ndarray) -> Tensor:
        """Feed counts[b] tokens of row b from position begins[b] on. Return the logits [B, Q, V]."""
        starts = torch.as_tensor(begins, device=context.tokens.device)
        at = starts[:, None] + torch.arange(int(counts.max()), device=starts.device)
        ids = context.tokens.gather(1, at.clamp(max=context.tokens.shape[1] - 1))
        return self.runner.feed(self._known(ids), starts, counts, starts_host=begins)

    def _feed_last(
        self,
        tokens: Tensor,
        hidden: Tensor | None,
        lengths: Sequence[int],
        count: int,
        batch_slots: range,
        prompt: int | None = None,
    ) -> Tensor:
        """Feed each row's last `count` tokens (`Runner.feed_last`), and return the logits [B, V] after the last."""
        tokens, features = self._known(tokens[: len(lengths)]), None
        if hidden is not None:
            starts = torch.as_tensor(lengths, device=tokens.device) - count
            features = self._features(hidden[: len(lengths)], starts, count)
        return self.runner.feed_last(tokens, lengths, count, batch_slots, features, prompt)

    def _features(self, hidden: Tensor | None, starts: Tensor, width: int) -> Tensor | None:
        """Return the hidden states to feed with committed tokens at starts, starts + 1, …: [B, width, H], or None."""
        return None

    def _own(self) -> Tensor | None:
        """Return the hidden state to feed with the last drawn token: [B, 1, H], or None."""
        return None

    def _missed(self, context: Context, rows: slice | np.ndarray) -> int:
        """Return the largest number of tokens that the draft model has not read in these rows."""
        return int((context.lengths_host[rows] - self.cached[rows]).max())

    def _feed(self, token: Tensor, context: Context, slot: int, begins: np.ndarray | None = None) -> Tensor:
        """Return logits [B, V] after x_slot, by a captured pass or with recurrent states. begins: for states, the
        positions before which no token can be rejected. Rows that have stopped continue up to the capacity."""
        starts_host = np.minimum(context.lengths_host + (slot - 1), self.runner.capacity)
        starts = (context.lengths + (slot - 1)).clamp(max=self.runner.capacity)
        fed = self._known(token)[:, None], starts, (starts_host < self.runner.capacity).astype(np.int64)
        if begins is None:
            return self._comparable(self.captured(*fed, starts_host))
        logits = self.runner.feed(*fed, starts_host=starts_host, committed_until=begins)
        return self._comparable(logits[:, -1])

    def _next_token(self, logits: Tensor, context: Context, slot: int) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the next draft token [B], its distribution over the target's ids [B, V], and the largest logit [B],
        which is NaN or infinite if any logit is."""
        params = context.params
        fuses = kernel_ops.can_fuse(logits, None)
        if fuses and _is_tempered(context):
            keys = context.keys.stream, context.keys.counter
            return kernel_ops.draw(logits, *keys, slot, params.temperature, self.vocabulary)
        if not params.greedy:
            q = self._q(context, logits)
            return context.draw(q, slot), q, kernel_ops.largest(logits)[0] if fuses else logits.amax(-1)
        peak, best = kernel_ops.largest(logits) if fuses else logits.max(-1)
        q = self._q(context._replace(params=SamplingParams(1.0)), logits) if self.show_q else None
        if context.processing is not None:
            best = context.processed(logits[:, None])[0][:, 0].argmax(-1)
        return best, q, peak

    def _keeps_q(self, context: Context) -> bool:
        return self.show_q or not (self.coupled or context.params.greedy)

    def _q(self, context: Context, logits: Tensor) -> Tensor:
        """Return the draft's distribution over the target's ids [B, V]. Ids without draft logits get probability 0."""
        q = context.law(logits)
        missing = self.vocabulary - q.shape[-1]
        return F.pad(q, (0, missing)) if missing else q

    def _stop_rows(self, policy: DraftLengthPolicy, logits: Tensor, slot: int, lengths: np.ndarray) -> np.ndarray:
        """Apply the policy's answer before a draw. Rows that stop keep their first `slot` tokens."""
        log_probs = logits.double().log_softmax(-1)
        probs = log_probs.exp()
        drafting = torch.as_tensor(lengths > slot, device=logits.device)
        entropy = -(probs * log_probs).nan_to_num(0.0).sum(-1)
        return cut_lengths(lengths, policy.keep_drafting(Signals(slot, entropy, probs.amax(-1), drafting)), slot)

    def _known(self, tokens: Tensor) -> Tensor:
        """Replace ids that the draft model lacks by its last id. This affects acceptance, but not exactness."""
        return tokens if self.draft_vocabulary >= self.vocabulary else tokens.clamp(max=self.draft_vocabulary - 1)

    def _comparable(self, logits: Tensor) -> Tensor:
        """Return the logits of the target's ids. Other ids are dropped before the softmax."""
        return logits[:, : self.vocabulary]

    def committed(self, before: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        # All draft tokens except the last were fed; the accepted ones are valid.
        self.cached[: len(before)] += np.minimum(accepted, np.maximum(drafted - 1, 0))


def _is_tempered(context: Context) -> bool:
    """Return True if tokens are drawn with the step's keys, and only the temperature changes the distribution."""
    params, plain = context.params, context.processing is None and context.noise is None
    return plain and params.only_temperature and not params.greedy and not params.is_cold


def _last_tokens(tokens: Tensor, lengths: Tensor, count: int) -> Tensor:
    """Return the last `count` tokens of each row: [B, count]."""
    positions = lengths[:, None] - count + torch.arange(count, device=lengths.device)
    return tokens.gather(1, positions.clamp(min=0))  # batch slots without a row have no tokens


def _passes(
    tokens: Tensor, committed: Tensor, lengths: Tensor, most: int, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the last `width` tokens of each row, and the passes of a draft phase: starts [most, B], submitted tokens
    [most, B], and an upper bound of the number of keys [B]."""
    slots = torch.arange(most, device=lengths.device)[:, None]
    drafting, first = lengths > slots, slots == 0
    # Stopped rows keep their position, because the next one may exceed the context.
    starts = torch.where(first, committed - width, committed + drafting * (slots - 1))
    counts = drafting * (1 + first.long() * (width - 1))
    # Rows without drafts, such as empty batch slots, must not read keys.
    ends = torch.where(lengths > 0, committed + (most - 1), committed - width)
    return _last_tokens(tokens, committed, width), starts, counts, ends


def _finite(peaks: Tensor, looked_at: Tensor) -> Tensor:
    """Return True for rows with finite logits, bool [B]. peaks [B, K]: largest logits; looked_at [B]: slots to use."""
    slots = torch.arange(peaks.shape[1], device=peaks.device)
    return (peaks.isfinite() | (slots >= looked_at[:, None])).all(1)
