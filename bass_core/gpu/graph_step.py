"""A decode step as functions of fixed shapes over fixed memory, so that CUDA graphs may hold them.

There are two, one for the draft phase and one for everything after it. Nothing in them is known on the host. The same
functions are what compiled layers run in (`compile=`; `resolve` says which way a session takes).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bass_core.drafters import Context, Draft, Drafter, ModelDrafter, runners_of
from bass_core.gpu.graphs import Graphs
from bass_core.loop.rows import Request, Rows
from bass_core.loop.step import Decided, EagerStep, StepOptions
from bass_core.model.runner import Runner
from bass_core.policies.protocol import DraftLengthPolicy

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


def resolve(
    wanted: str, device: torch.device, paths: Sequence[str | None], trace: str, obstacles: Iterable[str] = ()
) -> Execution:
    """What `compile=wanted` means for models on these attention paths; "auto" is CUDA graphs where they can be.
    obstacles: what stands against it in the models.

    Raises ValueError for what cannot be honoured.
    """
    obstacles = list(obstacles)
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


class RecordedStep(EagerStep):
    """Steps as functions of fixed shapes over fixed memory: one for the draft phase, one for what follows it.

    Shapes are the batch rounded up to a power of two, the draft length and, on paths that need it, the extent of the
    keys, rounded up to a multiple of 128. Each is recorded once (module graphs). Places without a row submit nothing,
    write to the scratch slot and do not move; while a function is recorded, all places are such. Rows that near their
    end submit fewer drafts than were planned, in functions that are wide enough for more: new ones would take longer.

    Policies that are asked between draft passes have these recorded one by one, drafters without a model none. Where
    rows are not sampled as the session says, the models' passes are recorded one by one, and what is decided is not:
    each mixture of rows would be another recording.
    """

    records = True

    def __init__(self, rows: Rows, target: Runner, drafter: Drafter, options: StepOptions, graphs: Graphs):
        super().__init__(rows, target, drafter, options)
        self.graphs, self._runners = graphs, runners_of(target, self.drafter)
        places, device = self.rows.max_rows, self.rows.device
        # Drafts that each place submits; -1: no row lives there. A step leaves there what the next one submits if that
        # plans as many.
        self.planned = torch.full((places,), NOBODY, dtype=torch.int64, device=device)
        self._announced: Announced | None = None  # what stands in `planned`, where the host knows it
        self._finite, self._all_finite = torch.ones(places, dtype=torch.bool, device=device), True
        self._drafted = torch.zeros(places, 0, dtype=torch.int64, device=device)
        self._q: Tensor | None = None  # float [places, K, V], once a draft has shown that it has one
        self._memory: tuple = ()
        self.switched: tuple = ()  # as it was when this step began
        self.replayed: list[tuple] | None = None  # the last step's functions by key; None: they are not all of it
        self._widths: dict[int, set[int]] = defaultdict(set)  # draft lengths met so far, by places
        if isinstance(self.drafter, ModelDrafter) and not self.drafter.wants_hidden:
            self.drafter.recorded = RecordedPasses(self.drafter.runner, graphs)

    def begin_decode(self, rows: int, most: int) -> Context:
        self.switched = self._switches()
        return self.seen(range(rows), most)  # noise is made where it is needed: inside the phases

    def draft(self, context: Context, planned: np.ndarray, lengths: np.ndarray, policy: DraftLengthPolicy) -> Draft:
        rows = len(lengths)
        places, most = self._places(rows), int(lengths.max())
        alone = isinstance(self.drafter, ModelDrafter) and self.drafter.has_fixed
        alone = alone and not policy.asks_while_drafting and self._as_usual(context)
        if alone:
            most = self._width(places, most, int(planned.max()))
        self._settle(most)
        self.replayed = [] if alone or most == 0 else None
        drafts = bool(lengths.any())
        self._all_finite &= not drafts  # as far as the host knows
        if not alone and most > 0:
            draft = self.drafted(self.context(context.places, most), lengths, policy)
            self._store(draft)
            self._announce(draft.lengths_host)
            return draft
        self._announce(lengths)
        if drafts:
            self.drafter.catch_up(context, lengths, most)
            extent = self.drafter.runner.extent(int((context.lengths_host + lengths).max()))
            key = ("draft", places, most, extent)
            self._run(key, lambda: self._draft_phase(places, most, extent))
            self.replayed.append(key)
        elif not self._all_finite:
            self._finite.fill_(True)
            self._all_finite = True
        q = None if self._q is None or most == 0 else self._q[:rows, :most]
        return Draft(self._drafted[:rows, :most], self.planned[:rows], lengths, q, self._finite[:rows])

    def verify(self, context: Context, draft: Draft, logits: Tensor | None = None) -> Decided:
        if logits is not None:
            return super().verify(context, draft, logits)
        rows, drafted = draft.tokens.shape
        places, extent = self._places(rows), self.target.extent(int((context.lengths_host + draft.lengths_host).max()))
        if not self._as_usual(context):
            key = ("target", places, drafted, extent)
            logits = self._run(key, lambda: self._target_phase(places, drafted, extent))
            self.options.begin("commit")
            self._announced = self.replayed = None  # rows' ends move, and `planned` stays
            return super().verify(self.context(context.places, drafted), draft, logits[:rows])
        certain = draft.probs is None
        key = ("verify", places, drafted, extent, certain)
        block = self._run(key, lambda: self._verify_phase(places, drafted, extent, certain))
        self.options.begin("commit")
        if self.replayed is not None:
            self.replayed.append(key)
        return Decided(block[:rows])

    # --- the two phases: nothing in them comes from the host --------------------------------------

    def _draft_phase(self, places: int, most: int, extent: int) -> None:
        context = self.context(range(places), most)
        self._store(self.drafter.draft_fixed(context, self.planned[:places], most, extent))

    def _verify_phase(self, places: int, drafted: int, extent: int, certain: bool) -> Tensor:
        context, planned = self.context(range(places), drafted), self.planned[:places]
        tokens, q = self._drafted[:places, :drafted], None if certain else self._q[:places, :drafted]
        draft = Draft(tokens, planned, None, q, self._finite[:places])
        block = super().verify(context, draft, self._target_phase(places, drafted, extent)).block
        left = self.rows.limits[:places] - self.rows.lengths[:places] - 1  # the last token is the target's own
        planned.copy_(torch.minimum(planned, left).clamp(min=NOBODY))
        return block

    def _target_phase(self, places: int, drafted: int, extent: int) -> Tensor:
        """Target logits [B, K + 1, V]."""
        starts = self.rows.lengths[:places] - 1
        last = self.rows.tokens[:places].gather(1, starts[:, None])
        ids = torch.cat([last, self._drafted[:places, :drafted]], dim=1)
        return self.target.feed(ids, starts, self.planned[:places] + 1, extent=extent)

    def _width(self, places: int, submitted: int, planned: int) -> int:
        """For how many drafts the step's functions have room.

        That is as many as rows submit. Where these are fewer than were planned, it is the smallest room that was met
        before and is enough for them.
        """
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
        if (memory := self._stands_on()) != self._memory:
            self._memory = memory
            self.graphs.clear()

    def _stands_on(self) -> tuple:
        """What is another for other memory, and for passes that are switched."""
        slots = [runner.cache.slots for runner in self._runners]
        return self.rows.capacity, slots, self.rows.seen is None, self.switched

    def _switches(self) -> tuple:
        """What others may switch between two steps: deterministic kernels, and adapters."""
        return torch.are_deterministic_algorithms_enabled(), [runner.adapters for runner in self._runners]

    def _announce(self, lengths: np.ndarray) -> None:
        """Tell the device what each place submits, unless that is what the step before has left there. The copy runs
        beside the host."""
        rows, known, asked = self.rows, self._announced, Announced(list(self.rows.live), lengths.copy())
        if known is not None and known.requests == asked.requests:
            left = rows.limits_host[: len(lengths)] - rows.lengths_host[: len(lengths)] - 1
            if np.array_equal(np.minimum(known.lengths, left), lengths):
                self._announced = asked
                return
        self._tell(asked)

    def _tell(self, announced: Announced) -> None:
        self._announced = None  # an interrupted copy leaves nothing known
        staged = torch.full(self.planned.shape, NOBODY, device="cpu", pin_memory=self.planned.device.type == "cuda")
        staged[: len(announced.lengths)] = torch.from_numpy(announced.lengths)
        self.planned.copy_(staged, non_blocking=True)  # pinned memory is kept until the copy is done
        self._announced = announced

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
            announced, self._announced = self._announced, None
            self.planned.fill_(NOBODY)  # recording may call the function, and then no row may move
            self.graphs.record(key, function)
            self._tell(announced)
        return self.graphs.run(key, function)

    def _as_usual(self, context: Context) -> bool:
        """Whether all rows are sampled as the session says."""
        return context.params == self.rows.params

    def _places(self, rows: int) -> int:
        return fixed_places(rows, self.rows.max_rows)

    def take_back(self) -> None:
        self._announced = None
        super().take_back()

    @property
    def recordings(self) -> int:
        return self.graphs.made

    def release(self) -> None:
        self.graphs.clear()


class Announced(NamedTuple):
    """What `planned` says of these rows, in their places from the first on: how many drafts they submit [B] in a step;
    after it, as many as then fit before their ends."""

    requests: list[Request]
    lengths: np.ndarray


class RecordedPasses:
    """Passes of a runner over the last tokens of each row, recorded once per shape."""

    def __init__(self, runner: Runner, graphs: Graphs):
        self.runner, self.graphs = runner, graphs
        self._inputs: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # by width, the memory that recordings read

    def __call__(self, ids: Tensor, starts: Tensor, query_lengths: Sequence[int], starts_host: Sequence[int]) -> Tensor:
        """Logits [B, V] after the last of ids [B, Q], as `Runner.feed` would give. The next pass overwrites them."""
        rows, width = ids.shape
        most = self.runner.cache.max_rows
        if width not in self._inputs:
            self._inputs[width] = ids.new_zeros(most, width), starts.new_zeros(most), starts.new_zeros(most)
        places, extent = fixed_places(rows, most), self.runner.extent(max(starts_host) + width)
        fed, first, counts = (buffer[:places] for buffer in self._inputs[width])
        fed[:rows], first[:rows] = ids, starts
        counts.zero_()
        counts[:rows] = torch.as_tensor(query_lengths, device=ids.device)
        key = ("pass", places, width, extent)

        def fixed() -> Tensor:
            return self.runner.feed(fed, first, counts, extent=extent, last_only=True)

        if self.graphs.due(key):
            self.graphs.record(key, fixed)
        return self.graphs.run(key, fixed)[:rows, -1]


def fixed_places(rows: int, most: int) -> int:
    """The rows of a fixed pass: rounded up to a power of two, since each number of them is another pass to record."""
    return min(1 << (rows - 1).bit_length(), most)
