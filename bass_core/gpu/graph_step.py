"""A decode step as two functions of fixed shapes over fixed memory, for CUDA graphs and compiled layers.

The first function is the draft phase, the second is the rest of the step. Both read only device memory, no host values.
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
    """A decode step as two captured functions.

    A shape consists of the batch rounded up to a power of two, the draft length and, if the attention path needs this,
    the maximum KV length rounded up to a multiple of 128. Each shape is captured once (see `graphs`). Batch slots
    without a row submit no tokens, write to the scratch slot and do not advance. During a capture, all batch slots are
    without a row. Rows near their maximum length submit fewer tokens in functions of the planned draft length, since a
    capture of narrower functions would take longer.

    If the policy decides during the draft phase, each draft pass is captured separately. A drafter without a model has
    nothing to capture. If rows have sampling parameters of their own, only the models' passes are captured. The
    decision then runs eagerly, since each mixture of parameters would need another capture.
    """

    records = True
    is_ahead = False

    def __init__(self, eager: EagerStep, graphs: Graphs):
        """eager: the step whose parts are captured."""
        self.eager, self.graphs, self.drafts, self.context = eager, graphs, StagedDrafts(eager.rows), eager.context
        self.rows, self.target, self.drafter = eager.rows, eager.target, eager.drafter
        self.options, self.phases = eager.options, eager.phases
        self.replayed: list[tuple] | None = None  # keys of the last step's functions; None if a part was not captured
        self.switched: tuple = ()  # `_switches()` at the start of this step
        self._memory: tuple = ()
        self._widths: dict[int, set[int]] = defaultdict(set)  # draft lengths so far, by padded batch size
        self.drafter.capture_passes(lambda runner: CapturedPasses(runner, graphs))

    def begin(self, rows: int, most: int) -> Context:
        """Return the live rows. The captured functions compute the noise themselves."""
        self.switched = self._switches()
        return self.eager.context_without_noise(range(rows), most)

    def draft(self, context: Context, planned: np.ndarray, lengths: np.ndarray, policy: DraftLengthPolicy) -> Draft:
        """As `EagerStep.draft`."""
        rows, batch, most = len(lengths), self.padded(len(lengths)), int(lengths.max())
        whole = self.drafter.has_fixed and policy.keep_drafting is None and self._is_uniform(context)
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
            self.drafts.staged = self.replayed = None  # `decide` advances the rows without updating `submitted`
            context = self.eager.context(context.batch_slots, drafted)
            return decide(self.rows, context, draft, logits[:rows], self.options)
        without_probs = draft.probs is None

        def verify_phase() -> Tensor:
            batch = shape[0]
            fixed = self.eager.context(range(batch), drafted)
            drafts = self.drafts.view(batch, drafted, None, without_probs)
            report = decide(self.rows, fixed, drafts, self._target_pass(*shape), self.options)
            left = self.rows.limits[:batch] - self.rows.lengths[:batch] - 1  # [B], without the target's token
            submitted = self.drafts.submitted[:batch]
            submitted.copy_(torch.minimum(submitted, left).clamp(min=NO_ROW))
            return report.packed

        packed = self._run(("verify", *shape, without_probs), verify_phase)
        self.phases.enter("commit")
        return StepReport(packed[:rows])

    def _target_pass(self, batch: int, drafted: int, max_kv_length: int) -> Tensor:
        """Return target logits [B, K + 1, V] without reading host values."""
        starts = self.rows.lengths[:batch] - 1  # [B]
        last = self.rows.tokens[:batch].gather(1, starts[:, None])  # [B, 1]
        ids = torch.cat([last, self.drafts.tokens[:batch, :drafted]], dim=1)  # [B, K + 1]
        return self.target.feed(ids, starts, self.drafts.submitted[:batch] + 1, max_kv_length=max_kv_length)

    def _width(self, batch: int, submitted: int, planned: int) -> int:
        """Return the draft length of the step's functions: the smallest known length between submitted and planned.

        Without a known length in this range, the functions have the submitted length.
        """
        known = self._widths[batch]
        width = min((width for width in known if submitted <= width <= planned), default=submitted)
        known.add(width)
        return width

    @property
    def is_in_place(self) -> bool:
        """Return True if all memory has the addresses of the capture."""
        return self._memory == self._stands_on()

    def _stands_on(self) -> tuple:
        """Key that invalidates captured functions: buffer addresses and attention paths."""
        kv_slots = [runner.cache.kv_slots for runner in (self.target, *self.drafter.runners)]
        return self.rows.capacity, kv_slots, self.switched

    def _switches(self) -> tuple:
        """Return settings that a caller may change between two steps: deterministic kernels and adapters."""
        runners = (self.target, *self.drafter.runners)
        return torch.are_deterministic_algorithms_enabled(), [runner.adapters for runner in runners]

    def _run(self, key: tuple, function: Callable[[], Tensor | None]) -> Tensor | None:
        if self.graphs.due(key):
            with self.drafts.no_rows():  # a capture may call the function, and no row may advance then
                self.graphs.record(key, function)
        if self.replayed is not None:
            self.replayed.append(key)
        return self.graphs.run(key, function)

    def _is_uniform(self, context: Context) -> bool:
        """Return True if all rows have the session's sampling parameters and processors, without limits."""
        lasting, processing = [each for each in self.rows.processors if each.until is None], context.processing
        same = not lasting if processing is None else processing.is_fixed(lasting)
        return same and not context.likeliest and context.params == self.rows.params

    def padded(self, rows: int) -> int:
        """Return the batch size of a fixed pass for this number of rows."""
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
    """The host's copy of `StagedDrafts.submitted`, for live rows in batch slots 0..B-1.

    lengths: [B], draft tokens that each row submits in a step. After the step, the device lowers these numbers to the
    tokens that still fit before each row's end.
    """

    requests: list[Request]
    lengths: np.ndarray


class StagedDrafts:
    """A step's drafts in fixed device memory, as input of the next phase."""

    def __init__(self, rows: Rows):
        slots, device = rows.max_rows, rows.device
        # Draft tokens that each batch slot submits. A step updates these for a next step with the same planned length.
        self.submitted = torch.full((slots,), NO_ROW, dtype=torch.int64, device=device)
        self.staged: Staged | None = None  # None if the host does not know `submitted`
        self.finite = torch.ones(slots, dtype=torch.bool, device=device)
        self.all_finite = True  # False if `finite` may have entries that are False
        self.tokens = torch.zeros(slots, 0, dtype=torch.int64, device=device)  # [slots, K]
        self.probs: Tensor | None = None  # float [slots, K, V], once a draft has distributions

    def reserve(self, most: int) -> bool:
        """Make space for drafts of `most` tokens. Returns True if the memory has moved."""
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
        """Return the drafts of the first `rows` batch slots. lengths: on the host. without_probs: leave out `probs`."""
        probs = None if self.probs is None or most == 0 or without_probs else self.probs[:rows, :most]
        return Draft(self.tokens[:rows, :most], self.submitted[:rows], lengths, probs, self.finite[:rows])

    def stage(self, rows: Rows, lengths: np.ndarray) -> None:
        """Copy the submitted lengths to the device, unless the previous step has already set them. The host does not
        wait for the copy."""
        known, wanted = self.staged, Staged(list(rows.live), lengths.copy())
        if known is not None and known.requests == wanted.requests:
            left = rows.limits_host[: len(lengths)] - rows.lengths_host[: len(lengths)] - 1
            if np.array_equal(np.minimum(known.lengths, left), lengths):
                self.staged = wanted
                return
        self._copy(wanted)

    def _copy(self, staged: Staged) -> None:
        self.staged = None  # unknown if the copy is interrupted
        lengths = torch.full(
            self.submitted.shape, NO_ROW, device="cpu", pin_memory=self.submitted.device.type == "cuda"
        )
        lengths[: len(staged.lengths)] = torch.from_numpy(staged.lengths)
        self.submitted.copy_(lengths, non_blocking=True)  # torch keeps the pinned memory until the copy has ended
        self.staged = staged

    @contextmanager
    def no_rows(self) -> Iterator[None]:
        """Mark all batch slots as without a row, inside the context."""
        staged, self.staged = self.staged, None
        self.submitted.fill_(NO_ROW)
        yield
        self._copy(staged)

    def move(self, batch_slots: Tensor) -> None:
        """Move the entries of these batch slots to the first batch slots."""
        self.submitted[: len(batch_slots)] = self.submitted[batch_slots]
        self.submitted[len(batch_slots) :] = NO_ROW


class CapturedPasses:
    """Passes of a runner over the last tokens of each row. Each shape is captured once."""

    def __init__(self, runner: Runner, graphs: Graphs):
        self.runner, self.graphs = runner, graphs
        self._inputs: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # input buffers of captured passes, by width

    def __call__(self, ids: Tensor, starts: Tensor, query_lengths: Sequence[int], starts_host: Sequence[int]) -> Tensor:
        """Return logits [B, V] after the last of ids [B, Q], like `Runner.feed`. The next pass overwrites them."""
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
    """Return the batch size of a fixed pass. Powers of two limit the number of captures."""
    return min(1 << (rows - 1).bit_length(), most)
