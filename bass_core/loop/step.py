"""What a decode step does on the device: draft, one pass of the target, verification, the rows' new ends.

`EagerStep` works it out operation by operation, with what the host knows of the rows: it packs ragged passes and feeds
only rows that draft. `gpu.graph_step` has the same step as functions of fixed shapes, for CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bass_core.drafters import Context, Draft, Drafter, ModelDrafter
from bass_core.drafters.protocol import checked
from bass_core.exactness import randomness, sampling, verification
from bass_core.exactness.randomness import Key, Purpose
from bass_core.exactness.sampling import MixedParams, SamplingParams
from bass_core.loop.rows import Rows
from bass_core.model import kernel_ops
from bass_core.model.runner import Runner
from bass_core.policies.protocol import DraftLengthPolicy

if TYPE_CHECKING:
    from bass_core.loop.trace import Stopwatch
    from bass_core.synthetic import SyntheticAcceptance


@dataclass(frozen=True)
class StepOptions:
    """How a session's steps decide.

    rule: "token", "block" or "coupled". synthetic: draws accepted counts (None: they are earned). wants_p: steps return
    the target's distributions. all_or_none: where one row's logits are not numbers, no row moves (else only that one
    stays). begin: told the names of the phases that begin inside a step. watch: the session's, where steps may be
    launched ahead.
    """

    rule: str
    synthetic: SyntheticAcceptance | None
    wants_p: bool
    all_or_none: bool
    begin: Callable[[str], None]
    watch: Callable[[], Stopwatch | None] = lambda: None

    def is_fused(self, params: SamplingParams | MixedParams) -> bool:
        """Whether the fused kernels know this decision: greedy, or token verification of the models' own laws."""
        if not params.only_temperature or self.wants_p:
            return False
        return params.greedy or (self.rule == "token" and not params.is_cold)


class Decided(NamedTuple):
    """What a step decided, still on the device. block: int64 [B, K + 4], per row the tokens, how many drafts it
    accepted, and whether the target's and the draft's logits were numbers. p: the target's distributions
    [B, K + 1, V], where there are and the trace wants them. fetched: waits for the block and returns it, where its
    copy to the host is under way (then it may be None itself)."""

    block: Tensor | None
    p: Tensor | None = None
    fetched: Callable[[], np.ndarray] | None = None

    def on_host(self) -> np.ndarray:
        """The block, on the host: the step's one wait."""
        return self.block.cpu().numpy() if self.fetched is None else self.fetched()


class EagerStep:
    """Steps of `rows`, operation by operation."""

    records = False  # whether steps are recorded and replayed
    is_ahead = False  # whether a step is under way that the host has not asked for
    recordings = 0  # what was met for the first time or recorded so far: while it grows, steps take longer than later

    def __init__(self, rows: Rows, target: Runner, drafter: Drafter, options: StepOptions):
        self.rows, self.target, self.drafter, self.options = rows, target, drafter, options
        self.vocabulary = target.model.config.get_text_config().vocab_size

    def context(self, places: range, most: int) -> Context:
        """The rows in `places`, with the noise of their next `most` + 1 positions if verification is coupled."""
        context = self.seen(places, most)
        if self.options.rule != "coupled" or context.params.greedy:
            return context
        slots = torch.arange(most + 1, device=context.lengths.device)
        noise = randomness.noise(Key(context.keys.stream, context.lengths, Purpose.NOISE, slots), self.vocabulary)
        return context._replace(noise=noise)

    def seen(self, places: range, most: int) -> Context:
        """The rows in `places`, and what drafters want to see of the target."""
        return self.rows.context(places, most)._replace(hidden=self.target.hidden(places))

    def begin_decode(self, rows: int, most: int) -> Context:
        """The live rows at the beginning of a step that drafts up to `most` tokens."""
        return self.context(range(rows), most)

    def draft(self, context: Context, planned: np.ndarray, lengths: np.ndarray, policy: DraftLengthPolicy) -> Draft:
        """Up to lengths[b] tokens for row b: tokens [B, K], probabilities [B, K, V]. planned: the lengths before they
        were cut to what rows may still emit."""
        return self.drafted(context, lengths, policy) if lengths.any() else Draft.none(context)

    def drafted(self, context: Context, lengths: np.ndarray, policy: DraftLengthPolicy) -> Draft:
        """What the drafter returns, checked."""
        shown = context._replace(lengths_host=context.lengths_host.copy())
        draft = self.drafter.draft(shown, lengths.copy(), policy)  # whatever a drafter writes into its arrays
        draft = checked(draft, self.drafter, lengths, self.vocabulary, context.tokens.device)
        most = int(draft.lengths_host.max())  # padding beyond it would be verified for nothing
        probs = None if draft.probs is None else draft.probs[:, :most]
        draft = draft._replace(tokens=draft.tokens[:, :most], probs=probs)
        seen = draft.tokens.device.type == "cpu" or isinstance(self.drafter, ModelDrafter)  # that these are ids
        return draft if seen else draft.within(self.vocabulary)

    def target_pass(self, context: Context, draft: Draft) -> Tensor:
        """Target logits [B, K + 1, V] after the last committed token and after each drafted one."""
        ids = context.last_tokens()
        if draft.tokens.shape[1]:
            ids = torch.cat([ids, draft.tokens], dim=1)
        starts, starts_host = context.lengths - 1, context.lengths_host - 1
        return self.target.feed(ids, starts, draft.lengths_host + 1, starts_host=starts_host)

    def verify(self, context: Context, draft: Draft, logits: Tensor | None = None) -> Decided:
        """The target's pass over what was drafted, which drafts stay and which token follows; the rows' ends move.

        logits: the target's [B, K + 1, V], where they are known.
        """
        if logits is None:
            logits = self.target_pass(context, draft)
            self.options.begin("commit")
        params, p, forced = context.params, None, self.options.synthetic
        if kernel_ops.can_fuse(logits, draft.probs) and self.options.is_fused(params):
            drafted = draft.tokens, draft.lengths, draft.probs, draft.finite
            memory, chances = self.rows.memory(context.places), None if forced is None else forced.chances
            options = params.temperature, self.options.all_or_none
            return Decided(kernel_ops.commit(logits, *drafted, *memory, chances, *options))
        seen = None if context.seen is None else sampling.seen_after(context.seen, draft.tokens)
        if params.greedy:
            choices = sampling.penalise(logits, params, seen).argmax(-1)  # [B, K + 1]
            outcome = verification.matching(draft.tokens, draft.lengths, choices)
            p = sampling.probabilities(logits, params.at_temperature_one, seen) if self.options.wants_p else None
        else:
            p = sampling.probabilities(logits, params, seen)  # [B, K + 1, V]
            if self.options.rule == "coupled":
                choices = verification.perturbed_choice(p, context.noise[:, : p.shape[1]])
                outcome = verification.matching(draft.tokens, draft.lengths, choices)
            else:
                rule, q = verification.RULES[self.options.rule], draft.distributions(self.vocabulary)
                outcome = rule(draft.tokens, draft.lengths, q, p, context.keys)
        verified = verification.verified(outcome, draft.tokens, draft.lengths, logits)
        if forced is not None:
            verified = forced.impose(verified, draft, context)
        return Decided(self._advance(context, verified, draft), p)

    def _advance(self, context: Context, verified: verification.Verified, draft: Draft) -> Tensor:
        """Move the rows' ends; what the host is told of the step: int64 [B, K + 4], see `Decided`."""
        fine, live = verified.finite & draft.finite, None
        if self.records:  # some places may have no row
            live = draft.lengths >= 0
        if self.options.all_or_none:
            fine = (fine if live is None else fine | ~live).all().expand_as(fine)
        self.rows.advance(context.places, verified, fine if live is None else fine & live)
        flags = verified.accepted, verified.finite, draft.finite
        return torch.cat([verified.tokens, *(each[:, None] for each in flags)], 1)

    def take_back(self) -> None:
        """Set the device's rows to what the host knows of them: what a step did that will not be committed, or is
        interrupted, is as if it had not been."""
        self.rows.rewind()

    def release(self) -> None:
        """Let go of memory of its own."""
