"""A decode step as functions of fixed shapes over fixed memory, so that CUDA graphs can hold them.

There are two, one for the draft phase and one for everything after it. They read device memory alone, never a value
from the host. Compiled layers run in the same functions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bass_core.drafters.protocol import Context, Draft
from bass_core.gpu.graphs import Graphs
from bass_core.loop.rows import Request, Rows
from bass_core.loop.step import EagerStep, StepReport, decide
from bass_core.model.runner import Runner
from bass_core.policies.protocol import DraftLengthPolicy

NO_ROW = -1  # draft length of a batch slot without a row


class GraphStep:
    """Steps as two captured functions.

    Shapes are the batch rounded up to a power of two, the draft length and, on paths that need it, the maximum KV
    length rounded up to a multiple of 128. Each is captured once (module graphs). Batch slots without a row submit
    nothing, write to the scratch slot and do not move; while a function is captured, all batch slots are such. Rows
    that near their end submit fewer drafts than were planned, in functions that are wide enough for more: new ones
    would take longer.

    If the policy is asked between draft passes, each pass is captured by itself; a drafter without a model has nothing
    to capture. Where rows are not sampled as the session says, the models' passes are captured and the decision is not:
    each mixture of rows would be another capture.
    """

    records = True
    is_ahead = False

    def __init__(self, eager: EagerStep, graphs: Graphs):
        """eager: the step whose parts are captured."""
        self.eager, self.graphs, self.drafts, self.context = eager, graphs, StagedDrafts(eager.rows), eager.context
        self.rows, self.target, self.drafter = eager.rows, eager.target, eager.drafter
        self.options, self.phases = eager.options, eager.phases
        self.replayed: list[tuple] | None = None  # keys of the last step's functions; None: part of it ran uncaptured
        self.switched: tuple = ()  # `_switches()` at the start of this step
        self._memory: tuple = ()
        self._widths: dict[int, set[int]] = defaultdict(set)  # draft lengths met so far, by batch slots
        self.drafter.capture_passes(lambda runner: CapturedPasses(runner, graphs))

    def begin(self, rows: int, most: int) -> Context:
        """The live rows; noise is made where it is needed: inside the phases."""
        self.switched = self._switches()
        return self.eager.context_without_noise(range(rows), most)

    def draft(self, context: Context, planned: np.ndarray, lengths: np.ndarray, policy: DraftLengthPolicy) -> Draft:
        """As `EagerStep.draft`."""
        rows, batch, most = len(lengths), self.padded(len(lengths)), int(lengths.max())
        whole = self.drafter.has_fixed and not policy.asks_while_drafting and self._is_uniform(context)
        if whole:
            most = self._width(batch, most, int(planned.max()))
        if self.drafts.reserve(most):
            self.graphs.clear()
        if not self.is_in_place:
            self._memory = self._stands_on()
            self.graphs.clear()
        self.replayed = [] if whole or most == 0 else None
        if lengths.any():
            self.drafts.all_finite = False
        if not whole and most > 0:
            draft = self.eager.drafted(self.eager.context(context.batch_slots, most), lengths, policy)
            self.drafts.store(draft)
            self.drafts.stage(self.rows, draft.lengths_host)
            return draft
        self.drafts.stage(self.rows, lengths)
        if lengths.any():
            self.drafter.catch_up(context, lengths, most)
            max_kv_length = self.drafter.runners[0].max_kv_length(int((context.lengths_host + lengths).max()))

            def draft_phase() -> None:
                fixed, submitted = self.eager.context(range(batch), most), self.drafts.submitted[:batch]
                self.drafts.store(self.drafter.draft_fixed(fixed, submitted, most, max_kv_length))

            self._run(("draft", batch, most, max_kv_length), draft_phase)
        else:
            self.drafts.nothing_drafted()
        return self.drafts.view(rows, most, lengths)

    def verify(self, context: Context, draft: Draft) -> StepReport:
        """As `EagerStep.verify`."""
        rows, drafted = draft.tokens.shape
        longest = int((context.lengths_host + draft.lengths_host).max())
        shape = self.padded(rows), drafted, self.target.max_kv_length(longest)
        if not self._is_uniform(context):
            logits = self._run(("target", *shape), lambda: self._target_pass(*shape))
            self.phases.enter("commit")
            self.drafts.staged = self.replayed = None  # rows' ends move, and `submitted` stays
            context = self.eager.context(context.batch_slots, drafted)
            return decide(self.rows, context, draft, logits[:rows], self.options)
        without_probs = draft.probs is None

        def verify_phase() -> Tensor:
            batch = shape[0]
            fixed = self.eager.context(range(batch), drafted)
            drafts = self.drafts.view(batch, drafted, None, without_probs)
            report = decide(self.rows, fixed, drafts, self._target_pass(*shape), self.options)
            left = self.rows.limits[:batch] - self.rows.lengths[:batch] - 1  # the last token is the target's own
            submitted = self.drafts.submitted[:batch]
            submitted.copy_(torch.minimum(submitted, left).clamp(min=NO_ROW))
            return report.packed

        packed = self._run(("verify", *shape, without_probs), verify_phase)
        self.phases.enter("commit")
        return StepReport(packed[:rows])

    def _target_pass(self, batch: int, drafted: int, max_kv_length: int) -> Tensor:
        """Target logits [B, K + 1, V]; nothing comes from the host."""
        starts = self.rows.lengths[:batch] - 1
        last = self.rows.tokens[:batch].gather(1, starts[:, None])
        ids = torch.cat([last, self.drafts.tokens[:batch, :drafted]], dim=1)
        return self.target.feed(ids, starts, self.drafts.submitted[:batch] + 1, max_kv_length=max_kv_length)

    def _width(self, batch: int, submitted: int, planned: int) -> int:
        """Return the draft length that the step's functions have room for.

        That is what rows submit. Where these are fewer than were planned, it is the smallest width that was met before
        and is enough for them.
        """
        known = self._widths[batch]
        width = min((width for width in known if submitted <= width <= planned), default=submitted)
        known.add(width)
        return width

    @property
    def is_in_place(self) -> bool:
        """Return True if all memory is where it was when functions were captured."""
        return self._memory == self._stands_on()

    def _stands_on(self) -> tuple:
        """Key that invalidates captured functions: buffer addresses and attention paths."""
        kv_slots = [runner.cache.kv_slots for runner in (self.target, *self.drafter.runners)]
        return self.rows.capacity, kv_slots, self.rows.seen is None, self.switched

    def _switches(self) -> tuple:
        """What others may switch between two steps: deterministic kernels, and adapters."""
        runners = (self.target, *self.drafter.runners)
        return torch.are_deterministic_algorithms_enabled(), [runner.adapters for runner in runners]

    def _run(self, key: tuple, function: Callable[[], Tensor | None]) -> Tensor | None:
        if self.graphs.due(key):
            with self.drafts.no_rows():  # capturing may call the function, and then no row may move
                self.graphs.record(key, function)
        if self.replayed is not None:
            self.replayed.append(key)
        return self.graphs.run(key, function)

    def _is_uniform(self, context: Context) -> bool:
        """Return True if all rows are sampled as the session says."""
        return context.params == self.rows.params

    def padded(self, rows: int) -> int:
        """Return the rows of a fixed pass that serves so many."""
        return padded(rows, self.rows.max_rows)

    def take_back(self) -> None:
        self.drafts.staged = None
        self.eager.take_back()

    @property
    def recordings(self) -> int:
        return self.graphs.made

    def release(self) -> None:
        self.graphs.clear()


class Staged(NamedTuple):
    """What `StagedDrafts.submitted` says of these rows, in their batch slots from the first on: how many drafts they
    submit [B] in a step; after it, as many as then fit before their ends."""

    requests: list[Request]
    lengths: np.ndarray


class StagedDrafts:
    """A step's drafts in fixed device memory, where the next phase finds them."""

    def __init__(self, rows: Rows):
        slots, device = rows.max_rows, rows.device
        # Drafts that each batch slot submits. A step leaves there what the next one submits if that plans as many.
        self.submitted = torch.full((slots,), NO_ROW, dtype=torch.int64, device=device)
        self.staged: Staged | None = None  # what stands in `submitted`, where the host knows it
        self.finite = torch.ones(slots, dtype=torch.bool, device=device)
        self.all_finite = True  # as far as the host knows
        self.tokens = torch.zeros(slots, 0, dtype=torch.int64, device=device)
        self.probs: Tensor | None = None  # float [slots, K, V], once a draft has shown that it has such

    def reserve(self, most: int) -> bool:
        """Make room for drafts of `most` tokens. Returns True if memory has moved."""
        if most <= self.tokens.shape[1]:
            return False
        self.tokens = self.tokens.new_zeros(len(self.tokens), max(8, 1 << (most - 1).bit_length()))
        self.probs = None
        return True

    def store(self, draft: Draft) -> None:
        rows, most = draft.tokens.shape
        self.tokens[:rows, :most] = draft.tokens
        self.finite[:rows] = draft.finite
        if draft.probs is not None:
            if self.probs is None:
                self.probs = draft.probs.new_zeros(*self.tokens.shape, draft.probs.shape[-1])
            self.probs[:rows, :most] = draft.probs

    def nothing_drafted(self) -> None:
        if not self.all_finite:
            self.finite.fill_(True)
            self.all_finite = True

    def view(self, rows: int, most: int, lengths: np.ndarray | None, without_probs: bool = False) -> Draft:
        """The drafts of the first `rows` batch slots. lengths: on the host. without_probs: they were chosen, not
        drawn."""
        probs = None if self.probs is None or most == 0 or without_probs else self.probs[:rows, :most]
        return Draft(self.tokens[:rows, :most], self.submitted[:rows], lengths, probs, self.finite[:rows])

    def stage(self, rows: Rows, lengths: np.ndarray) -> None:
        """Tell the device what each batch slot submits, unless that is what the step before has left there. The copy
        runs beside the host."""
        known, wanted = self.staged, Staged(list(rows.live), lengths.copy())
        if known is not None and known.requests == wanted.requests:
            left = rows.limits_host[: len(lengths)] - rows.lengths_host[: len(lengths)] - 1
            if np.array_equal(np.minimum(known.lengths, left), lengths):
                self.staged = wanted
                return
        self._copy(wanted)

    def _copy(self, staged: Staged) -> None:
        self.staged = None  # an interrupted copy leaves nothing known
        lengths = torch.full(
            self.submitted.shape, NO_ROW, device="cpu", pin_memory=self.submitted.device.type == "cuda"
        )
        lengths[: len(staged.lengths)] = torch.from_numpy(staged.lengths)
        self.submitted.copy_(lengths, non_blocking=True)  # pinned memory is kept until the copy is done
        self.staged = staged

    @contextmanager
    def no_rows(self) -> Iterator[None]:
        """Inside, all batch slots are without a row."""
        staged, self.staged = self.staged, None
        self.submitted.fill_(NO_ROW)
        yield
        self._copy(staged)

    def move(self, batch_slots: Tensor) -> None:
        """Rows have moved from these batch slots to the first ones."""
        self.submitted[: len(batch_slots)] = self.submitted[batch_slots]
        self.submitted[len(batch_slots) :] = NO_ROW


class CapturedPasses:
    """Passes of a runner over the last tokens of each row, captured once per shape."""

    def __init__(self, runner: Runner, graphs: Graphs):
        self.runner, self.graphs = runner, graphs
        self._inputs: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # by width, the memory that captured passes read

    def __call__(self, ids: Tensor, starts: Tensor, query_lengths: Sequence[int], starts_host: Sequence[int]) -> Tensor:
        """Logits [B, V] after the last of ids [B, Q], as `Runner.feed` would give. The next pass overwrites them."""
        rows, width = ids.shape
        most = self.runner.cache.max_rows
        if width not in self._inputs:
            self._inputs[width] = ids.new_zeros(most, width), starts.new_zeros(most), starts.new_zeros(most)
        batch, max_kv_length = padded(rows, most), self.runner.max_kv_length(max(starts_host) + width)
        fed, first, counts = (buffer[:batch] for buffer in self._inputs[width])
        fed[:rows], first[:rows] = ids, starts
        counts.zero_()
        counts[:rows] = torch.as_tensor(query_lengths, device=ids.device)
        key = ("pass", batch, width, max_kv_length)

        def fixed() -> Tensor:
            return self.runner.feed(fed, first, counts, max_kv_length=max_kv_length, last_only=True)

        if self.graphs.due(key):
            self.graphs.record(key, fixed)
        return self.graphs.run(key, fixed)[:rows, -1]


def padded(rows: int, most: int) -> int:
    """Return the rows of a fixed pass: a power of two, since each number of them is another pass to capture."""
    return min(1 << (rows - 1).bit_length(), most)
