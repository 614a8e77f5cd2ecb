"""What a decode step does on the device: draft, one pass of the target, the acceptance rule, the rows' new ends.

`decide` is the part that every step shares. `EagerStep` runs a step operator by operator, with what the host knows of
the rows: it packs ragged passes and feeds only rows that draft. `gpu.graph_step` has the same step as captured
functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from bass_core.drafters.protocol import Context, Draft, Drafter, checked
from bass_core.exactness import randomness, sampling, verification
from bass_core.exactness.randomness import Key, Purpose
from bass_core.exactness.sampling import MixedParams, SamplingParams
from bass_core.exactness.verification import Verified
from bass_core.loop.phases import Phases
from bass_core.loop.rows import Rows
from bass_core.model import kernel_ops
from bass_core.model.runner import Runner
from bass_core.policies.protocol import DraftLengthPolicy


class ForcedAcceptance(Protocol):
    """Accepted counts that are drawn instead of earned, for benchmarks (`bass_lab.SyntheticAcceptance`).

    chances: float64 [N, T], the chance that a draft is accepted if all before it were, along N texts of T tokens.
    """

    name: str
    chances: Tensor

    def on(self, device: torch.device) -> ForcedAcceptance:
        """Return the same on a device."""

    def impose(self, verified: Verified, draft: Draft, context: Context) -> Verified:
        """Return the outcome of a step with drawn counts."""


@dataclass(frozen=True)
class StepOptions:
    """How a session's steps decide.

    rule: "token", "block" or "coupled". forced: draws accepted counts (None: they are earned). wants_p: reports hold
    the target's distributions. all_or_none: if any row's logits are not finite, no row advances; otherwise only
    that row does not.
    """

    rule: str
    forced: ForcedAcceptance | None = None
    wants_p: bool = False
    all_or_none: bool = True

    def is_fused(self, params: SamplingParams | MixedParams) -> bool:
        """Return True if the fused kernels know this decision: greedy, or token verification at a temperature alone."""
        if not params.only_temperature or self.wants_p:
            return False
        return params.greedy or (self.rule == "token" and not params.is_cold)


class HostReport(NamedTuple):
    """A `StepReport` on the host. tokens int64 [B, K + 1]: accepted drafts, the target's own token, padding. accepted
    int64 [B]. target_finite, draft_finite bool [B]: the model's logits were numbers."""

    tokens: np.ndarray
    accepted: np.ndarray
    target_finite: np.ndarray
    draft_finite: np.ndarray


class StepReport(NamedTuple):
    """What a step decided, still on the device.

    packed: int64 [B, K + 4], the columns of `HostReport`, so that one copy brings all of it to the host. p: the
    target's distributions [B, K + 1, V], where there are and the trace wants them. fetched: waits for the packed
    columns and returns them, where their copy to the host is under way (packed may be None then).
    """

    packed: Tensor | None
    p: Tensor | None = None
    fetched: Callable[[], np.ndarray] | None = None

    @classmethod
    def of(cls, verified: Verified, draft: Draft, p: Tensor | None) -> StepReport:
        flags = verified.accepted, verified.finite, draft.finite
        return cls(torch.cat([verified.tokens, *(each[:, None] for each in flags)], 1), p)

    def on_host(self) -> HostReport:
        """Copy the report to the host: the step's one wait."""
        packed = self.packed.cpu().numpy() if self.fetched is None else self.fetched()
        return HostReport(packed[:, :-3], packed[:, -3], packed[:, -2] != 0, packed[:, -1] != 0)


def decide(rows: Rows, context: Context, draft: Draft, logits: Tensor, options: StepOptions) -> StepReport:
    """Apply the acceptance rule to a step and move the rows' ends, all on the device.

    logits: the target's, [B, K + 1, V], after the last committed token and after each drafted one.
    """
    params, p, forced = context.params, None, options.forced
    if kernel_ops.can_fuse(logits, draft.probs) and options.is_fused(params):
        drafted = draft.tokens, draft.lengths, draft.probs, draft.finite
        memory, chances = rows.memory(context.batch_slots), None if forced is None else forced.chances
        return StepReport(
            kernel_ops.commit(logits, *drafted, *memory, chances, params.temperature, options.all_or_none)
        )
    seen = None if context.seen is None else sampling.seen_after(context.seen, draft.tokens)
    if params.greedy:
        choices = sampling.penalise(logits, params, seen).argmax(-1)  # [B, K + 1]
        outcome = verification.matching(draft.tokens, draft.lengths, choices)
        p = sampling.probabilities(logits, params.at_temperature_one, seen) if options.wants_p else None
    else:
        p = sampling.probabilities(logits, params, seen)  # [B, K + 1, V]
        if options.rule == "coupled":
            choices = verification.perturbed_choice(p, context.noise[:, : p.shape[1]])
            outcome = verification.matching(draft.tokens, draft.lengths, choices)
        else:
            rule, q = verification.RULES[options.rule], draft.distributions(p.shape[-1])
            outcome = rule(draft.tokens, draft.lengths, q, p, context.keys)
    verified = verification.verified(outcome, draft.tokens, draft.lengths, logits)
    if forced is not None:
        verified = forced.impose(verified, draft, context)
    fine, live = verified.finite & draft.finite, None
    if draft.lengths_host is None:  # inside a captured function: some batch slots may have no row
        live = draft.lengths >= 0
    if options.all_or_none:
        fine = (fine if live is None else fine | ~live).all().expand_as(fine)
    rows.advance(context.batch_slots, verified, fine if live is None else fine & live)
    return StepReport.of(verified, draft, p)


class EagerStep:
    """Steps of `rows`, operator by operator."""

    records = False  # whether steps are recorded and replayed
    is_ahead = False  # whether a step is under way that the host has not asked for
    recordings = 0  # functions met or recorded so far: while it grows, steps take longer than later

    def __init__(self, rows: Rows, target: Runner, drafter: Drafter, options: StepOptions, phases: Phases):
        self.rows, self.target, self.drafter, self.options, self.phases = rows, target, drafter, options, phases
        self.vocabulary = target.model.config.get_text_config().vocab_size

    def context(self, batch_slots: range, most: int) -> Context:
        """The rows in `batch_slots`, with the noise of their next `most` + 1 positions if verification is coupled."""
        context = self.context_without_noise(batch_slots, most)
        if self.options.rule != "coupled" or context.params.greedy:
            return context
        slots = torch.arange(most + 1, device=context.lengths.device)
        noise = randomness.noise(Key(context.keys.stream, context.lengths, Purpose.NOISE, slots), self.vocabulary)
        return context._replace(noise=noise)

    def context_without_noise(self, batch_slots: range, most: int) -> Context:
        """The rows in `batch_slots`, and what drafters want to see of the target."""
        return self.rows.context(batch_slots, most)._replace(hidden=self.target.hidden(batch_slots))

    def begin(self, rows: int, most: int) -> Context:
        """The live rows at the beginning of a step that drafts up to `most` tokens."""
        return self.context(range(rows), most)

    def draft(self, context: Context, planned: np.ndarray, lengths: np.ndarray, policy: DraftLengthPolicy) -> Draft:
        """Draft up to lengths[b] tokens for row b: tokens [B, K], probabilities [B, K, V]. planned: the lengths before
        they were cut to what rows may still emit."""
        return self.drafted(context, lengths, policy) if lengths.any() else Draft.none(context)

    def drafted(self, context: Context, lengths: np.ndarray, policy: DraftLengthPolicy) -> Draft:
        """Return what the drafter returns, checked."""
        shown = context._replace(lengths_host=context.lengths_host.copy())
        draft = self.drafter.draft(shown, lengths.copy(), policy)  # copies: a drafter may write into them
        draft = checked(draft, self.drafter, lengths, self.vocabulary, context.tokens.device)
        most = int(draft.lengths_host.max())  # padding beyond it would be verified for nothing
        probs = None if draft.probs is None else draft.probs[:, :most]
        draft = draft._replace(tokens=draft.tokens[:, :most], probs=probs)
        known = draft.tokens.device.type == "cpu" or self.drafter.draws_ids  # `checked` looks at values on a CPU alone
        return draft if known else draft.within(self.vocabulary)

    def target_pass(self, context: Context, draft: Draft) -> Tensor:
        """Return target logits [B, K + 1, V] after the last committed token and after each drafted one."""
        ids = context.last_tokens()
        if draft.tokens.shape[1]:
            ids = torch.cat([ids, draft.tokens], dim=1)
        starts, starts_host = context.lengths - 1, context.lengths_host - 1
        return self.target.feed(ids, starts, draft.lengths_host + 1, starts_host=starts_host)

    def verify(self, context: Context, draft: Draft) -> StepReport:
        """Run the target over the drafts and decide which of them stay and which token follows."""
        logits = self.target_pass(context, draft)
        self.phases.enter("commit")
        return decide(self.rows, context, draft, logits, self.options)

    def take_back(self) -> None:
        """Set the device's rows to what the host knows of them. A step that will not be committed is undone."""
        self.rows.rewind()

    def release(self) -> None:
        """Let go of memory of its own."""
