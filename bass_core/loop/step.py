"""A decode step on the device: draft, target pass, verification rule, update of the rows' lengths.

All steps share `decide`. `EagerStep` runs a step operator by operator and uses the row lengths on the host: it packs
ragged passes and feeds only rows that draft. `gpu.graph_step` captures the same step as functions of fixed shapes.
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
from bass_core.exactness.sampling import SamplingParams
from bass_core.exactness.verification import HostReport, Verified
from bass_core.loop.phases import Phases
from bass_core.loop.rows import Rows
from bass_core.model import kernel_ops
from bass_core.model.runner import Runner
from bass_core.policies.protocol import DraftLengthPolicy


class ForcedAcceptance(Protocol):
    """Accepted lengths that are drawn at random, for benchmarks (`bass_lab.SyntheticAcceptance`).

    chances: float64 [N, T], acceptance probability of a draft token after accepted ones, for N texts of T tokens.
    """

    name: str
    chances: Tensor

    def on(self, device: torch.device) -> ForcedAcceptance:
        """Return a copy on a device."""

    def impose(self, verified: Verified, draft: Draft, context: Context) -> Verified:
        """Return the outcome of a step with drawn accepted lengths."""


@dataclass(frozen=True)
class StepOptions:
    """Options of the decision in a session's steps.

    rule: "token", "block" or "coupled". forced: draws accepted lengths (None: the rule decides). wants_p: reports hold
    the target distributions. all_or_none: no row advances if the logits of any row are not finite. Otherwise all rows
    with finite logits advance.
    """

    rule: str
    forced: ForcedAcceptance | None = None
    wants_p: bool = False
    all_or_none: bool = True

    def is_fused(self, context: Context) -> bool:
        """Return True if fused kernels support the decision: greedy, or token verification with only a temperature."""
        params = context.params
        if context.processing is not None or context.likeliest or not params.only_temperature or self.wants_p:
            return False
        return params.greedy or (self.rule == "token" and not params.is_cold)


class StepReport(NamedTuple):
    """The decision of a step, still on the device.

    packed: int64 [B, K + 4], the columns of `HostReport` in one tensor, so that one copy to the host suffices.
    p: [B, K + 1, V], the target distributions, if computed. fetched: if given, waits for a copy of `packed` to the
    host and returns the copy. packed may then be None. likeliest: as in `HostReport`.
    """

    packed: Tensor | None
    p: Tensor | None = None
    fetched: Callable[[], np.ndarray] | None = None
    likeliest: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, verified: Verified, draft: Draft, p: Tensor | None, likeliest: tuple | None) -> StepReport:
        flags = verified.accepted, verified.finite, draft.finite
        packed = torch.cat([verified.tokens, *(each[:, None] for each in flags)], 1)
        return cls(packed, p, likeliest=likeliest)

    def on_host(self) -> HostReport:
        """Copy the report to the host. The host waits for the device only here."""
        packed = self.packed.cpu().numpy() if self.fetched is None else self.fetched()
        likeliest = self.likeliest and tuple(part.cpu().numpy() for part in self.likeliest)
        return HostReport(packed[:, :-3], packed[:, -3], packed[:, -2] != 0, packed[:, -1] != 0, likeliest)


def decide(rows: Rows, context: Context, draft: Draft, logits: Tensor, options: StepOptions) -> StepReport:
    """Apply the verification rule and advance the rows, on the device.

    logits: [B, K + 1, V], target logits after the last committed token and after each draft token.
    """
    params, p, forced = context.params, None, options.forced
    if kernel_ops.can_fuse(logits, draft.probs) and options.is_fused(context):
        drafted = draft.tokens, draft.lengths, draft.probs, draft.finite
        memory, chances = rows.memory(context.batch_slots), None if forced is None else forced.chances
        return StepReport(
            kernel_ops.commit(logits, *drafted, *memory, chances, params.temperature, options.all_or_none)
        )
    lengths = draft.lengths
    processed, possible = context._replace(drafted=draft.tokens).processed(logits)  # [B, K + 1, V], [B, K + 1]
    if possible is not None:  # nothing follows a position without a possible id
        lengths = torch.minimum(lengths, verification.leading(possible))
    if params.greedy:
        choices = processed.argmax(-1)  # [B, K + 1]
        outcome = verification.matching(draft.tokens, lengths, choices)
        p = sampling.probabilities(processed, SamplingParams(1.0)) if options.wants_p else None
    else:
        p = sampling.probabilities(processed, params)  # [B, K + 1, V]
        if options.rule == "coupled":
            choices = verification.perturbed_choice(p, context.noise[:, : p.shape[1]])  # [B, K + 1]
            outcome = verification.matching(draft.tokens, lengths, choices)
        else:
            rule, q = verification.RULES[options.rule], draft.distributions(p.shape[-1])  # q [B, K, V]
            outcome = rule(draft.tokens, lengths, q, p, context.keys)
    verified = verification.verified(outcome, draft.tokens, lengths, logits)  # tokens, logprobs [B, K + 1]
    if possible is not None:
        chosen = possible.gather(1, verified.accepted[:, None])[:, 0]
        verified = verified._replace(finite=verified.finite & chosen)
    if forced is not None:
        verified = forced.impose(verified, draft, context)
    fine, live = verified.finite & draft.finite, None  # [B]
    if draft.lengths_host is None:  # inside a captured function: batch slots without a row have length -1
        live = draft.lengths >= 0
    if options.all_or_none:
        fine = (fine if live is None else fine | ~live).all().expand_as(fine)
    rows.advance(context.batch_slots, verified, fine if live is None else fine & live)
    likeliest = None
    if context.likeliest:
        values, ids = sampling.wide(logits).log_softmax(-1).topk(context.likeliest)
        likeliest = ids, values
    return StepReport.of(verified, draft, p, likeliest)


class EagerStep:
    """Decode steps of `rows`, operator by operator."""

    records = False  # True if steps are captured and replayed
    is_ahead = False  # True if a step is running that the session has not requested yet
    recordings = 0  # functions first called or captured so far; steps that increase this take longer

    def __init__(self, rows: Rows, target: Runner, drafter: Drafter, options: StepOptions, phases: Phases):
        self.rows, self.target, self.drafter, self.options, self.phases = rows, target, drafter, options, phases
        self.vocabulary = target.model.config.get_text_config().vocab_size

    def context(self, batch_slots: range, most: int) -> Context:
        """Return the rows in `batch_slots`. Coupled verification adds the noise of the next `most` + 1 positions."""
        context = self.context_without_noise(batch_slots, most)
        if self.options.rule != "coupled" or context.params.greedy:
            return context
        slots = torch.arange(most + 1, device=context.lengths.device)
        noise = randomness.noise(Key(context.keys.stream, context.lengths, Purpose.NOISE, slots), self.vocabulary)
        return context._replace(noise=noise)  # [B, K + 1, V]

    def context_without_noise(self, batch_slots: range, most: int) -> Context:
        """Return the rows in `batch_slots`, with the target's hidden states if the drafter needs these."""
        return self.rows.context(batch_slots, most)._replace(hidden=self.target.hidden(batch_slots))

    def begin(self, rows: int, most: int) -> Context:
        """Return the live rows at the beginning of a step that drafts up to `most` tokens."""
        return self.context(range(rows), most)

    def draft(self, context: Context, planned: np.ndarray, lengths: np.ndarray, policy: DraftLengthPolicy) -> Draft:
        """Draft up to lengths[b] tokens for row b. planned: the policy's lengths, before the limit by the tokens that
        each row may still emit."""
        return self.drafted(context, lengths, policy) if lengths.any() else Draft.none(context)

    def drafted(self, context: Context, lengths: np.ndarray, policy: DraftLengthPolicy) -> Draft:
        """Return the checked draft of the drafter, without columns beyond the longest row."""
        shown = context._replace(lengths_host=context.lengths_host.copy())
        draft = self.drafter.draft(shown, lengths.copy(), policy)  # copies, since a drafter may write into its input
        draft = checked(draft, self.drafter, lengths, self.vocabulary, context.tokens.device)
        most = int(draft.lengths_host.max())
        probs = None if draft.probs is None else draft.probs[:, :most]
        draft = draft._replace(tokens=draft.tokens[:, :most], probs=probs)
        known = draft.tokens.device.type == "cpu" or self.drafter.draws_ids  # `checked` checks ids on the CPU only
        return draft if known else draft.within(self.vocabulary)

    def target_pass(self, context: Context, draft: Draft) -> Tensor:
        """Return target logits [B, K + 1, V] after the last committed token and after each draft token."""
        ids = context.last_tokens()  # [B, 1]
        if draft.tokens.shape[1]:
            ids = torch.cat([ids, draft.tokens], dim=1)  # [B, K + 1]
        starts, starts_host = context.lengths - 1, context.lengths_host - 1
        return self.target.feed(ids, starts, draft.lengths_host + 1, starts_host=starts_host)

    def verify(self, context: Context, draft: Draft) -> StepReport:
        """Run the target pass and decide the step."""
        logits = self.target_pass(context, draft)  # [B, K + 1, V]
        self.phases.enter("commit")
        return decide(self.rows, context, draft, logits, self.options)

    def take_back(self) -> None:
        """Undo a step that will not be committed: restore the device's row lengths from the host."""
        self.rows.rewind()

    def release(self) -> None:
        """Free memory of the step. `EagerStep` has none."""
