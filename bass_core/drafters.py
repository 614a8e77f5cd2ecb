"""Where draft tokens come from: a smaller model, or an n-gram lookup in the row's own text.

A drafter proposes up to K tokens per row and says from which distribution each was drawn. It keeps its own state per
row (a cache) in step with the rows: prefilled with them, moved with them, and never rolled back by copying.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bass_core import randomness, sampling
from bass_core.cache import Phase
from bass_core.draft_length import DraftLengthPolicy, HiddenDraft, Signals, cut_lengths
from bass_core.randomness import StepKeys
from bass_core.runner import Runner
from bass_core.sampling import MixedParams, SamplingParams
from bass_core.verification import perturbed_choice

CATCH_UP = 8  # tokens to which what a row missed is rounded up


class Context(NamedTuple):
    """Some rows of the batch as a step meets them (B rows, tokens from position 0)."""

    places: range  # where the rows live
    tokens: Tensor  # int64 [B, S]
    lengths: Tensor  # int64 [B], committed tokens
    lengths_host: np.ndarray  # the same on the host
    keys: StepKeys  # the randomness of the rows' own step
    params: SamplingParams | MixedParams  # how tokens are chosen
    seen: Tensor | None  # bool [B, V], ids so far (repetition penalty)
    noise: Tensor | None = None  # [B, K + 1, V], Gumbel noise of the next positions (coupled verification)

    def last_tokens(self) -> Tensor:
        """The last committed token of each row: [B, 1]."""
        return self.tokens.gather(1, self.lengths[:, None] - 1)


class Draft(NamedTuple):
    """tokens int64 [B, K]; lengths int64 [B], how many each row submits (padding tokens follow; in a recorded phase -1
    where no row lives), also on the host; probs [B, K, V] or None, what the tokens were drawn from (None: chosen with
    certainty); finite bool [B]: the draft's logits were numbers."""

    tokens: Tensor
    lengths: Tensor
    lengths_host: np.ndarray | None  # None inside a recorded phase
    probs: Tensor | None
    finite: Tensor

    @classmethod
    def none(cls, context: Context) -> Draft:
        """Nothing drafted: regular decoding."""
        rows, device = len(context.lengths_host), context.tokens.device
        return cls(
            context.tokens[:, :0],
            torch.zeros_like(context.lengths),
            np.zeros(rows, np.int64),
            None,
            torch.ones(rows, dtype=torch.bool, device=device),
        )

    def distributions(self, vocabulary: int) -> Tensor:
        """probs, or one-hot where the tokens were certain: [B, K, V]."""
        if self.probs is None:
            return sampling.one_hot(self.tokens, vocabulary).float()
        return self.probs


class Drafter(ABC):
    """Interface, with the answers of a drafter that keeps nothing per row."""

    name = "draft"

    def prefill(self, tokens: Tensor, lengths: Sequence[int], places: range) -> None:
        """Rows with these prompts now live in `places`. tokens int64 [B, S]."""

    def move_row(self, source: int, places: range, length: int) -> None:
        """The row at one place now (also) lives at others."""

    def save_row(self, place: int, length: int) -> list[Tensor]:
        """What `load_row` needs to start another sample of this prompt."""
        return []

    def load_row(self, places: range, saved: list[Tensor], length: int) -> None:
        """A row of `length` saved positions now lives at `places`."""

    @abstractmethod
    def draft(self, context: Context, lengths: np.ndarray, policy: DraftLengthPolicy) -> Draft:
        """Up to lengths[b] >= 0 tokens for row b; some row wants one."""

    def committed(self, before: np.ndarray, draft: Draft, accepted: np.ndarray) -> None:
        """Rows had `before` tokens and accepted that many of the draft."""

    def prepared(self) -> AbstractContextManager:
        """May be held while many steps run, so that what each would prepare for itself is prepared once."""
        return nullcontext()

    def grow(self, capacity: int) -> None:
        """Rows may now be `capacity` positions long."""

    def release(self) -> None:
        """Free memory."""


class ModelDrafter(Drafter):
    """Drafts with a causal language model over a ragged cache of its own.

    A step feeds the last two committed tokens (after full acceptance the draft has not seen its own last token;
    otherwise it rewrites the same values), then one token at a time. After steps without drafting a row first catches
    up on everything it missed: holes in its cache would cost acceptance.
    """

    def __init__(self, runner: Runner, vocabulary: int, coupled: bool, show_q: bool):
        """show_q: return q with every draft. Greedy and coupled verification do without; a trace may want it."""
        self.show_q = show_q
        self.runner = runner
        self.vocabulary = vocabulary  # the target's: ids beyond it are never drafted
        self.coupled = coupled
        self.draft_vocabulary = runner.model.config.get_text_config().vocab_size
        self.cached = np.zeros(runner.cache.max_rows, dtype=np.int64)  # valid positions per place
        # Logits [B, V] of a pass over ids, starts, query lengths and starts on the host, where passes between which a
        # policy is asked are recorded (`recorded_step`).
        self.recorded: Callable[..., Tensor] | None = None

    def prefill(self, tokens: Tensor, lengths: Sequence[int], places: range) -> None:
        self.runner.cache.clear(places)
        self.runner.feed_last(self._known(tokens), lengths, max(lengths), places)
        self.cached[places.start : places.stop] = lengths

    def move_row(self, source: int, places: range, length: int) -> None:
        self.runner.cache.move_row(source, places)
        self.cached[places.start : places.stop] = self.cached[source]

    def save_row(self, place: int, length: int) -> list[Tensor]:
        return self.runner.cache.save_row(place, length)

    def load_row(self, places: range, saved: list[Tensor], length: int) -> None:
        self.runner.cache.load_row(places, saved)
        self.cached[places.start : places.stop] = length

    def prepared(self) -> AbstractContextManager:
        return self.runner.prepared()

    def grow(self, capacity: int) -> None:
        self.runner.cache.grow(capacity)

    def release(self) -> None:
        self.runner.release()

    # --- drawing k tokens -------------------------------------------------------------------------

    def draft(self, context: Context, lengths: np.ndarray, policy: DraftLengthPolicy) -> Draft:
        rows = int(lengths.nonzero()[0][-1]) + 1  # those behind the last that drafts are not fed

        def feed(token: Tensor | None, slot: int, lengths: np.ndarray) -> Tensor:
            return self._catch_up(context, rows) if token is None else self._feed(token, context, slot, lengths)

        with self.prepared():
            return self._draw(context, lengths, int(lengths.max()), feed, policy)

    def draft_fixed(self, context: Context, lengths: Tensor, most: int, extent: int) -> Draft:
        """`draft` as a function of fixed shapes, nothing known on the host: lengths[b] <= most tokens for row b, none
        where it is 0 or less. `catch_up` comes before."""
        context = context._replace(keys=replace(context.keys, fused=self.runner.fused))
        last, starts, counts, ends = self.runner.fused(_passes)(context.tokens, context.lengths, lengths, most)
        phase = Phase(ends, most + 1, {})

        def feed(token: Tensor | None, slot: int, lengths: Tensor) -> Tensor:
            ids, options = last if token is None else token[:, None], {"last_only": True, "phase": phase}
            fed = self.runner.feed(self._known(ids), starts[slot], counts[slot], extent=extent, **options)
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
        """x_1 … x_most, of which row b drafts the first lengths[b]; policy: asked in between (lengths are the host's).

        feed(token, slot, lengths): logits [B, V] from which x_{slot + 1} is drawn. token: x_slot, or None at first.
        """
        asks = policy is not None and policy.keep_drafting is not None
        chooses = policy is not None and policy.choose is not None
        drawn: list[_Drawn] = []
        peaks: list[Tensor] = []  # per slot [B]: the largest logit, NaN or infinite if one of them is
        looked_at = np.zeros_like(lengths) if asks else lengths  # per row: at the logits of how many slots
        seen = context.seen
        while (slot := len(drawn)) < most:
            logits = feed(drawn[-1].token if drawn else None, slot, lengths)
            peak, best = logits.max(-1)
            peaks.append(peak)
            if asks:
                looked_at += lengths > slot  # before a policy can mistake NaN for doubt
                lengths = self._stop_rows(policy, logits, slot, lengths)
                if (most := int(lengths.max())) <= slot:
                    break
            token, q = self._next_token(logits, best, context, seen, slot)
            drawn.append(_Drawn(token, q, _told(logits, token) if chooses else None))
            seen = None if seen is None else seen.scatter(1, token[:, None], True)
        device = context.tokens.device
        looked_at = torch.as_tensor(looked_at, device=device)
        finite = self.runner.fused(_finite)(torch.stack(peaks, 1), looked_at)
        if not drawn:
            return Draft.none(context)._replace(finite=finite)
        tokens = torch.stack([each.token for each in drawn], 1)  # [B, K]
        q = torch.stack([each.q for each in drawn], 1) if self._keeps_q(context) else None  # [B, K, V]
        host = lengths if isinstance(lengths, np.ndarray) else None
        draft = Draft(tokens, torch.as_tensor(lengths, device=device), host, q, finite)
        return _chosen(policy, draft, torch.stack([each.told for each in drawn], -1)) if chooses else draft

    def catch_up(self, context: Context, lengths: np.ndarray) -> None:
        """Feed what the rows that draft next have missed beyond the last two tokens, which `draft_fixed` feeds."""
        drafting = np.flatnonzero(lengths)
        if self._missed(context, drafting) > 2:
            self._catch_up(context, int(drafting[-1]) + 1)
        self.cached[drafting] = context.lengths_host[drafting]

    def _catch_up(self, context: Context, rows: int) -> Tensor:
        """Logits [B, V] after the last committed token of the first `rows` rows; zeros for the others, which do not
        draft: what they missed is not fed."""
        missed = self._missed(context, slice(rows))
        known, lengths = self._known(context.tokens[:rows]), context.lengths_host[:rows]
        if self.recorded is not None and missed <= 2:
            fed, starts = self._last_two(context)
            logits = self.recorded(fed[:rows], starts[:rows], [2] * rows, lengths - 2)
        else:
            # Longer gaps are rounded up, so that shapes repeat.
            count = 2 if missed <= 2 else -(-missed // CATCH_UP) * CATCH_UP
            logits = self.runner.feed_last(known, lengths, count, range(rows))
        self.cached[:rows] = lengths
        resting = len(context.lengths_host) - rows
        return F.pad(self._comparable(logits), (0, 0, 0, resting)) if resting else self._comparable(logits)

    def _missed(self, context: Context, rows: slice | np.ndarray) -> int:
        """How many tokens these rows have at most that the draft model has not seen."""
        return int((context.lengths_host[rows] - self.cached[rows]).max())

    def _last_two(self, context: Context) -> tuple[Tensor, Tensor]:
        """The last two committed tokens of each row [B, 2] and where they begin [B]."""
        return self._known(_last_tokens(context.tokens, context.lengths, 2)), context.lengths - 2

    def _feed(self, token: Tensor, context: Context, slot: int, lengths: np.ndarray) -> Tensor:
        """Logits [B, V] after x_slot, for the rows that draft x_{slot + 1}."""
        # A row that stopped repeats its last committed position, writes to the scratch slot, and is ignored.
        active = lengths > slot
        offset = active * (slot - 1)
        starts = context.lengths + (slot - 1 if active.all() else torch.as_tensor(offset, device=token.device))
        fed = self._known(token)[:, None], starts, active.astype(np.int64)
        if self.recorded is not None:
            return self._comparable(self.recorded(*fed, context.lengths_host + offset))
        return self._comparable(self.runner.feed(*fed, starts_host=context.lengths_host + offset)[:, -1])

    def _next_token(
        self, logits: Tensor, best: Tensor, context: Context, seen: Tensor | None, slot: int
    ) -> tuple[Tensor, Tensor | None]:
        """The next draft token [B] and the distribution it came from [B, V] over the target's ids. best [B]: the ids of
        the largest logits."""
        params, seen = context.params, None if seen is None else seen[:, : logits.shape[-1]]
        if params.greedy:
            q = self._q(logits, params.at_temperature_one, seen) if self.show_q else None
            return best if seen is None else sampling.penalise(logits, params, seen).argmax(-1), q
        q = self._q(logits, params, seen)
        if self.coupled:
            return perturbed_choice(q, context.noise[:, slot]), q
        return randomness.draw(q, context.keys.draft(slot)), q

    def _keeps_q(self, context: Context) -> bool:
        return self.show_q or not (self.coupled or context.params.greedy)

    def _q(self, logits: Tensor, params: SamplingParams | MixedParams, seen: Tensor | None) -> Tensor:
        """The draft's distribution over the target's ids [B, V]; ids that only the target has get probability 0."""
        q = sampling.probabilities(logits, params, seen)
        missing = self.vocabulary - q.shape[-1]
        return F.pad(q, (0, missing)) if missing else q

    def _stop_rows(self, policy: DraftLengthPolicy, logits: Tensor, slot: int, lengths: np.ndarray) -> np.ndarray:
        """The policy's in-step answer: rows that stop now keep the `slot` tokens they have."""
        log_probs = logits.double().log_softmax(-1)
        probs = log_probs.exp()
        drafting = torch.as_tensor(lengths > slot, device=logits.device)
        entropy = -(probs * log_probs).nan_to_num(0.0).sum(-1)
        return cut_lengths(lengths, policy.keep_drafting(Signals(slot, entropy, probs.amax(-1), drafting)), slot)

    def _known(self, tokens: Tensor) -> Tensor:
        """Ids that only the target has are fed as some id of the draft's: this costs acceptance, never exactness."""
        return tokens if self.draft_vocabulary >= self.vocabulary else tokens.clamp(max=self.draft_vocabulary - 1)

    def _comparable(self, logits: Tensor) -> Tensor:
        """Logits over ids that the target has too: the others get probability 0 before the softmax."""
        return logits[:, : self.vocabulary]

    def committed(self, before: np.ndarray, draft: Draft, accepted: np.ndarray) -> None:
        if draft.tokens.shape[1] == 0:
            return  # nothing was fed
        # All drafted tokens but the last were fed; the accepted of these are right.
        self.cached[: len(before)] += np.minimum(accepted, np.maximum(draft.lengths_host - 1, 0))


def _last_tokens(tokens: Tensor, lengths: Tensor, count: int) -> Tensor:
    """The last `count` of each row's tokens: [B, count]."""
    places = lengths[:, None] - count + torch.arange(count, device=lengths.device)
    return tokens.gather(1, places.clamp(min=0))  # places of a fixed batch that nobody lives in have no tokens


def _passes(tokens: Tensor, committed: Tensor, lengths: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The last two tokens of each row [B, 2]; where rows begin in each pass of a draft phase, and how many tokens they
    submit to it: [most, B]; the keys that they have at its end, at most: [B]."""
    slots = torch.arange(most, device=lengths.device)[:, None]
    drafting, first = lengths > slots, slots == 0
    # Rows that rest stay where they are: further on, a context might have ended.
    starts = torch.where(first, committed - 2, committed + drafting * (slots - 1))
    return _last_tokens(tokens, committed, 2), starts, drafting * (1 + first.long()), committed + (most - 1)


def _finite(peaks: Tensor, looked_at: Tensor) -> Tensor:
    """Whether all logits were numbers: bool [B]. peaks [B, K]: the largest of each slot; looked_at [B]: at how many."""
    slots = torch.arange(peaks.shape[1], device=peaks.device)
    return (peaks.isfinite() | (slots >= looked_at[:, None])).all(1)


class _Drawn(NamedTuple):
    """One slot of a draft: tokens [B], what they were drawn from [B, V], what `HiddenDraft` tells of them [2, B]."""

    token: Tensor
    q: Tensor | None
    told: Tensor | None


def _told(logits: Tensor, token: Tensor) -> Tensor:
    """The largest probability and that of the token, at temperature 1: [2, B]."""
    own = logits.double().softmax(-1)
    return torch.stack([own.amax(-1), own.gather(1, token[:, None])[:, 0]])


def _chosen(policy: DraftLengthPolicy, draft: Draft, told: Tensor) -> Draft:
    """What the policy submits of a draft. told: [2, B, K], see `HiddenDraft`."""
    maxima, chances = told.nan_to_num(0.0).cpu().numpy()
    hidden = HiddenDraft(draft.lengths_host, maxima, chances)
    policy.choose(hidden)
    most = int(hidden.submitted.max())
    lengths = torch.as_tensor(hidden.submitted, device=draft.tokens.device)
    q = None if draft.probs is None else draft.probs[:, :most]
    return Draft(draft.tokens[:, :most], lengths, hidden.submitted, q, draft.finite)


class NgramDrafter(Drafter):
    """Drafts without a model: what followed the last time the row's current ending occurred in it.

    The longest of the endings of `longest` … `shortest` tokens with an earlier occurrence decides (the most recent
    occurrence); rows without one draft nothing. (Prompt-lookup decoding, Saxena 2023.) q is one-hot.
    """

    name = "n-gram draft"

    def __init__(self, longest: int = 3, shortest: int = 1):
        if not 1 <= shortest <= longest:
            raise ValueError(f"NgramDrafter needs 1 <= shortest <= longest, got {shortest} and {longest}")
        self.longest, self.shortest = longest, shortest

    def draft(self, context: Context, lengths: np.ndarray, policy: DraftLengthPolicy) -> Draft:
        tokens, n = context.tokens, context.lengths[:, None]  # [B, S], [B, 1]
        start = torch.zeros_like(n)  # where the continuation begins; 0 = no match
        for size in range(self.shortest, min(self.longest, tokens.shape[1] - 1) + 1):  # longer matches overwrite
            windows = tokens.unfold(1, size, 1)  # [B, S - size + 1, size]
            ending = tokens.gather(1, (n - size + torch.arange(size, device=n.device)).clamp(min=0))  # [B, size]
            ends = torch.arange(size, tokens.shape[1] + 1, device=n.device)  # [S - size + 1], one past each window
            found = (windows == ending[:, None]).all(-1) & (ends < n) & (n > size)
            last = (found * ends).amax(1, keepdim=True)
            start = torch.where(last > 0, last, start)
        available = torch.where(start > 0, n - start, 0)[:, 0]
        wanted = torch.minimum(torch.as_tensor(lengths, device=n.device), available)
        lengths_host = wanted.cpu().numpy()
        most = int(lengths_host.max())
        places = (start + torch.arange(most, device=n.device)).clamp(max=tokens.shape[1] - 1)
        return Draft(tokens.gather(1, places), wanted, lengths_host, None, torch.ones_like(wanted, dtype=torch.bool))
