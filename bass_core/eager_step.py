"""What a decode step does on the device: draft, one pass of the target, verification, the rows' new ends.

`EagerStep` works it out operation by operation, with what the host knows of the rows: it packs ragged passes and feeds
only rows that draft. `FixedStep` does the same as two functions of fixed shapes over fixed memory, one for the draft
phase and one for everything after it; nothing in them is known on the host, so that a CUDA graph may hold them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bass_core import inputs, randomness, sampling, verification
from bass_core.draft_length import DraftLengthPolicy
from bass_core.drafters import Context, Draft, Drafter, ModelDrafter
from bass_core.graphs import Graphs, captured, launched_each_time
from bass_core.randomness import Key, Purpose
from bass_core.rows import Rows
from bass_core.runner import Runner, fixed_places
from bass_core.sampling import SamplingParams
from bass_core.synthetic import SyntheticAcceptance
from bass_core.verification import Outcome, Verified

NOBODY = -1


class Execution(NamedTuple):
    """How the work reaches the device: layers through torch.compile or as they are, launched or as CUDA graphs."""

    compiled: bool = False
    recorded: bool = False

    @property
    def name(self) -> str:
        """What `compile=` calls it."""
        return "+".join([name for name, on in (("compiled", self.compiled), ("graphs", self.recorded)) if on]) or "off"


WAYS = {way.name: way for way in (Execution(c, r) for c in (False, True) for r in (False, True))}


def resolve(wanted: str, device: torch.device, paths: Sequence[str | None], trace: str) -> Execution:
    """What `compile=wanted` means for models on these attention paths; "auto" is CUDA graphs where they can be.

    Raises ValueError for what cannot be honoured.
    """
    inputs.one_of("compile", wanted, ("auto", *WAYS))
    obstacles = []
    if "split" in paths:
        obstacles.append("attention='split' launches by lengths that only the host knows: use another path")
    if trace == "tokens":
        obstacles.append("trace='tokens' wants every distribution on the host: use trace='steps'")
    if wanted == "auto":
        return Execution(recorded=device.type == "cuda" and not obstacles)
    way = WAYS[wanted]
    if way.recorded and device.type != "cuda":
        obstacles.append(f"CUDA graphs need a CUDA GPU, and the models are on {device}: use compile='compiled'")
    if obstacles and way != Execution():
        raise ValueError(f"compile={wanted!r} cannot be had here; {obstacles[0]}, or compile='off'")
    return way


class Step(NamedTuple):
    """What a step found, still on the device. block: int64 [B, K + 4], per row the tokens, how many drafts it accepted,
    and whether the target's and the draft's logits were numbers. p: the target's distributions [B, K + 1, V], where
    there are and the trace wants them."""

    block: Tensor
    p: Tensor | None = None


class EagerStep:
    """Steps of `rows`, operation by operation."""

    def __init__(
        self,
        rows: Rows,
        target: Runner,
        drafter: Drafter,
        params: SamplingParams,
        rule: str,
        synthetic: SyntheticAcceptance | None = None,
        *,
        wants_p: bool,
        all_or_none: bool,
        begin: Callable[[str], None],
    ):
        """synthetic: draws accepted counts (None: they are earned). wants_p: return p. all_or_none: where one row's
        logits are not numbers, no row moves (else only that one stays). begin: told the names of the phases that begin
        inside."""
        self.rows, self.target, self.drafter = rows, target, drafter
        self.params, self.rule, self.synthetic = params, rule, synthetic
        self.vocabulary = target.model.config.get_text_config().vocab_size
        self.wants_p, self.all_or_none, self.begin = wants_p, all_or_none, begin

    def context(self, places: range, most: int) -> Context:
        """The rows in `places`, with the noise of their next `most` + 1 positions if verification is coupled."""
        context = self.rows.context(places, most)
        if self.rule != "coupled" or self.params.greedy:
            return context
        slots = torch.arange(most + 1, device=context.lengths.device)
        noise = randomness.noise(Key(context.keys.stream, context.lengths, Purpose.NOISE, slots), self.vocabulary)
        return context._replace(noise=noise)

    def begin_decode(self, rows: int, most: int) -> Context:
        """The live rows at the beginning of a step that drafts up to `most` tokens."""
        return self.context(range(rows), most)

    def draft(self, context: Context, planned: np.ndarray, lengths: np.ndarray, policy: DraftLengthPolicy) -> Draft:
        """Up to lengths[b] tokens for row b: tokens [B, K], probabilities [B, K, V]. planned: the lengths before they
        were cut to what rows may still emit."""
        return self.drafter.draft(context, lengths, policy) if lengths.any() else Draft.none(context)

    def verify(self, context: Context, draft: Draft) -> Step:
        """The target's pass over what was drafted, and what follows from it; the rows' ends have moved."""
        logits = self.target_pass(context, draft)
        self.begin("commit")
        return self.commit(context, draft, logits)

    def target_pass(self, context: Context, draft: Draft) -> Tensor:
        """Target logits [B, K + 1, V] after the last committed token and after each drafted one."""
        ids = torch.cat([context.last_tokens(), draft.tokens], dim=1)
        return self.target.feed(ids, context.lengths - 1, context.lengths_host - 1, draft.lengths_host + 1)

    def commit(self, context: Context, draft: Draft, logits: Tensor, live: Tensor | None = None) -> Step:
        """Verification, and the rows' ends on the device. live: bool [B], rows that stand for one (None: all)."""
        verified, p = self._verified(context, draft, logits)  # accepted [B], tokens [B, K + 1]
        if self.synthetic is not None:
            verified = self.synthetic.impose(verified, draft, context)
        fine = verified.finite & draft.finite
        if self.all_or_none:
            fine = (fine if live is None else fine | ~live).all().expand_as(fine)
        self.rows.advance(context.places, verified, fine if live is None else fine & live)
        flags = torch.stack([verified.accepted, verified.finite.long(), draft.finite.long()], 1)
        return Step(torch.cat([verified.tokens, flags], 1), p)

    def _verified(self, context: Context, draft: Draft, logits: Tensor) -> tuple[Verified, Tensor | None]:
        """What the step adds; with the target's distributions [B, K + 1, V] if there are and the trace wants them."""
        simple = self.params.only_temperature and (self.params.greedy or self.rule == "token")
        if simple and not self.wants_p and verification.can_fuse(logits, draft.probs):
            q = None if draft.probs is None else draft.distributions(self.vocabulary)
            drafted = draft.tokens, draft.lengths, q, logits, context.lengths
            return verification.fused(*drafted, self.params.temperature, context.keys), None
        outcome, p = self._outcome(context, draft, logits)
        return verification.verified(outcome, draft.tokens, draft.lengths, logits, context.lengths), p

    def _outcome(self, context: Context, draft: Draft, logits: Tensor) -> tuple[Outcome, Tensor | None]:
        """Accepted drafts and the target's next token; with the target's distributions [B, K + 1, V] if there are."""
        seen = None if context.seen is None else sampling.seen_after(context.seen, draft.tokens)
        if self.params.greedy:
            choices = sampling.penalise(logits, self.params, seen).argmax(-1)
            p = sampling.probabilities(logits, self.params.at_temperature_one, seen) if self.wants_p else None
            return verification.matching(draft.tokens, draft.lengths, choices), p
        p = sampling.probabilities(logits, self.params, seen)
        if self.rule == "coupled":
            choices = verification.perturbed_choice(p, context.noise[:, : p.shape[1]])
            return verification.matching(draft.tokens, draft.lengths, choices), p
        q = draft.distributions(self.vocabulary)
        return verification.RULES[self.rule](draft.tokens, draft.lengths, q, p, context.keys), p

    records = False  # whether steps are recorded and replayed

    @property
    def recordings(self) -> int:
        """What was met for the first time or recorded so far: a step in which it grows is longer than it will be."""
        return 0

    def release(self) -> None:
        """Let go of memory of its own."""


class FixedStep(EagerStep):
    """Steps as functions of fixed shapes over fixed memory: one for the draft phase, one for what follows it.

    Shapes are the batch rounded up to a power of two, the draft length and, on paths that need it, the extent of the
    keys, rounded up to a multiple of 128. Each is recorded once (module graphs). Places without a row submit nothing,
    write to the scratch slot and do not move; while a function is recorded, all places are such. Rows that near their
    end submit fewer drafts than were planned, in functions that are wide enough for more: new ones would take longer.

    Policies that are asked between draft passes have these recorded one by one, drafters without a model none.
    """

    records = True

    def __init__(self, *arguments, graphs: Graphs, **options):
        super().__init__(*arguments, **options)
        self.graphs = graphs
        places, device = self.rows.max_rows, self.rows.device
        # Drafts that each place submits; -1: no row lives there.
        self.planned = torch.full((places,), NOBODY, dtype=torch.int64, device=device)
        self._staged = torch.empty(places, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._finite = torch.ones(places, dtype=torch.bool, device=device)
        self._drafted = torch.zeros(places, 0, dtype=torch.int64, device=device)
        self._q: Tensor | None = None  # float [places, K, V], once a draft has shown that it has one
        self._memory: tuple[int, ...] = ()
        self._widths: dict[int, set[int]] = defaultdict(set)  # draft lengths met so far, by places
        if isinstance(self.drafter, ModelDrafter):
            self.drafter.graphs = graphs

    def begin_decode(self, rows: int, most: int) -> Context:
        return self.rows.context(range(rows), most)  # noise is made where it is needed: inside the phases

    def draft(self, context: Context, planned: np.ndarray, lengths: np.ndarray, policy: DraftLengthPolicy) -> Draft:
        rows = len(lengths)
        places, most = self._places(rows), int(lengths.max())
        alone = isinstance(self.drafter, ModelDrafter) and not policy.asks_while_drafting
        if alone:
            most = self._width(places, most, int(planned.max()))
        self._settle(most)
        self._announce(lengths)
        if not alone and most > 0:
            draft = self.drafter.draft(self.context(context.places, most), lengths, policy)
            self._store(draft)
            self._announce(draft.lengths_host)
            return draft
        if lengths.any():
            self.drafter.catch_up(context, lengths)
            extent = self.drafter.runner.extent(int((context.lengths_host + lengths).max()))
            self._run(("draft", places, most, extent), lambda: self._draft_phase(places, most, extent))
        else:
            self._finite.fill_(True)
        q = None if self._q is None or most == 0 else self._q[:rows, :most]
        return Draft(self._drafted[:rows, :most], self.planned[:rows], lengths, q, self._finite[:rows])

    def verify(self, context: Context, draft: Draft) -> Step:
        rows, drafted = draft.tokens.shape
        places, extent = self._places(rows), self.target.extent(int((context.lengths_host + draft.lengths_host).max()))
        certain = draft.probs is None
        key = ("verify", places, drafted, extent, certain)
        block = self._run(key, lambda: self._verify_phase(places, drafted, extent, certain))
        self.begin("commit")
        return Step(block[:rows])

    # --- the two phases: nothing in them comes from the host --------------------------------------

    def _draft_phase(self, places: int, most: int, extent: int) -> None:
        context = self.context(range(places), most)
        self._store(self.drafter.draft_fixed(context, self.planned[:places], most, extent))

    def _verify_phase(self, places: int, drafted: int, extent: int, certain: bool) -> Tensor:
        context, planned = self.context(range(places), drafted), self.planned[:places]
        tokens, q = self._drafted[:places, :drafted], None if certain else self._q[:places, :drafted]
        draft = Draft(tokens, planned.clamp(min=0), None, q, self._finite[:places])
        ids = torch.cat([context.last_tokens(), draft.tokens], dim=1)
        logits = self.target.feed_fixed(ids, context.lengths - 1, planned + 1, extent)
        return self.commit(context, draft, logits, live=planned > NOBODY).block

    def _width(self, places: int, submitted: int, planned: int) -> int:
        """For how many drafts a step has room: as many as rows submit, or where these were cut, the least that was met
        before and holds them."""
        known = self._widths[places]
        width = min((width for width in known if submitted <= width <= planned), default=submitted)
        known.add(width)
        return width

    # --- the memory that they stand on ------------------------------------------------------------

    def _settle(self, most: int) -> None:
        """Room for so many drafts, and no recordings of memory that has moved."""
        if most > self._drafted.shape[1]:
            room = max(8, 1 << (most - 1).bit_length())
            self._drafted = self._drafted.new_zeros(self.rows.max_rows, room)
            self._q = None
            self.graphs.clear()
        memory = self.rows.capacity, self.target.cache.slots
        if memory != self._memory:
            self._memory = memory
            self.graphs.clear()

    def _announce(self, lengths: np.ndarray) -> None:
        """Tell the device what each place submits. The copy runs beside the host, which next writes here after the
        step's one copy back."""
        self._staged.fill_(NOBODY)
        self._staged[: len(lengths)] = torch.from_numpy(lengths)
        self.planned.copy_(self._staged, non_blocking=True)

    def _store(self, draft: Draft) -> None:
        """Keep a draft where the next phase finds it."""
        rows, most = draft.tokens.shape
        self._drafted[:rows, :most] = draft.tokens
        self._finite[:rows] = draft.finite
        if draft.probs is not None:
            if self._q is None:
                self._q = draft.probs.new_zeros(self.rows.max_rows, self._drafted.shape[1], self.vocabulary)
            self._q[:rows, :most] = draft.probs

    def _run(self, key: tuple, function: Callable[[], Tensor | None]) -> Tensor | None:
        if self.graphs.due(key):
            self.planned.fill_(NOBODY)  # recording may call the function, and then no row may move
            self.graphs.record(key, function)
            self.planned.copy_(self._staged, non_blocking=True)
        return self.graphs.run(key, function)

    def _places(self, rows: int) -> int:
        return fixed_places(rows, self.rows.max_rows)

    @property
    def recordings(self) -> int:
        return self.graphs.made

    def release(self) -> None:
        self.graphs.clear()


def make(way: Execution, fall_back: Callable[[], None] | None, rows: Rows, *arguments, **options) -> EagerStep:
    """The steps of `rows` in that way. fall_back: called if they cannot be recorded after all (None: that raises)."""
    if way == Execution():
        return EagerStep(rows, *arguments, **options)
    record = captured(rows.device) if way.recorded else launched_each_time
    return FixedStep(rows, *arguments, graphs=Graphs(record, fall_back=fall_back), **options)
