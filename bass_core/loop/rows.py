"""The rows of a batch: admit, commit, finish, cancel and compact.

Device tensors with one entry per batch slot (`tokens`, `lengths`, ...) hold everything that a step needs. The host
mirrors the lengths, so that a step needs only one small copy to the host. Live rows occupy batch slots 0..live-1. When
a row finishes, the last live row moves to the free batch slot.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bass_core import checks
from bass_core.detokenizer import StopFinder, StopStrings
from bass_core.drafters import Context
from bass_core.environment import Fetched
from bass_core.exactness import randomness, sampling
from bass_core.exactness.processors import Processing, Processor
from bass_core.exactness.sampling import SamplingParams
from bass_core.exactness.verification import HostReport, Verified
from bass_core.interrupts import always
from bass_core.model.encoder_decoder import Source
from bass_core.policies.protocol import DraftLengthPolicy, OfEachRow, RowsView


@dataclass(eq=False)
class Prompt:
    """Token ids from which one or more rows start. The prefill result is kept while rows of the prompt wait."""

    ids: Tensor  # int64 [P], on the host
    source: Source | None = None  # encoder input of an encoder-decoder model; `ids` are then decoder ids
    saved: tuple[list[Tensor], list[Tensor]] | None = None  # cache rows of the target and the drafter
    logits: Tensor | None = None  # [V], target logits after the last prompt token

    @property
    def key(self) -> tuple:
        """Equal for equal prompts."""
        return (*self.ids.tolist(), None if self.source is None else self.source.key)


@dataclass(eq=False, repr=False)
class Request:
    """A request: one row from submission to result. `Session.submit` returns this handle."""

    row: int  # row id, orders the output
    prompt: Prompt
    max_new_tokens: int
    seed: int
    sample: int  # selects the random numbers together with the seed
    params: SamplingParams
    processors: tuple[Processor, ...] = ()
    policy: DraftLengthPolicy | None = None  # None: the session's
    stop: StopStrings | None = None
    ends: Mapping[int, str] = field(default_factory=dict)  # ids that end the row, and the finish reasons
    top_logprobs: int = 0
    alternatives: list[dict[int, float]] = field(default_factory=list)  # per token: likeliest ids, log-probabilities
    deadline: float | None = None  # time.monotonic() at which the row ends
    finish_reason: str | None = None
    drafted: int = 0  # draft tokens so far
    accepted: int = 0  # accepted tokens so far
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # generated ids, once finished
    fetched: Fetched | None = None  # log-probabilities of `tokens`

    def __post_init__(self):
        self.stop_finder = StopFinder(self.stop) if self.stop else None

    def __repr__(self) -> str:
        length, state = len(self.prompt.ids), self.finish_reason or "not ended"
        return f"Request(row {self.row}, prompt of {length}, up to {self.max_new_tokens} tokens, {state})"

    @property
    def logprobs(self) -> np.ndarray:
        """Log-probabilities of `tokens`. Waits for the copy to the host."""
        return np.zeros(0, np.float32) if self.fetched is None else self.fetched()

    @property
    def limit(self) -> int:
        """Maximum length of the row, prompt included."""
        return len(self.prompt.ids) + self.max_new_tokens


@dataclass(frozen=True)
class Commit:
    """Result of one step on the host: each row keeps the first emitted [B] of new_tokens [B, K + 1]. accepted: [B]."""

    requests: list[Request]
    new_tokens: np.ndarray
    accepted: np.ndarray
    emitted: np.ndarray


class Result(NamedTuple):
    """Result of one row. decoded: the text, or None without a tokenizer. finish_reason is None while the row runs."""

    sequence: Tensor
    decoded: str | None
    logprobs: Tensor
    finish_reason: str | None

    @property
    def text(self) -> str:
        """The decoded text. Raises ValueError without a tokenizer."""
        if self.decoded is None:
            raise ValueError("the pair has no tokenizer, so rows have no text; use ModelPair(..., tokenizer=...)")
        return self.decoded


class Rows:
    """Waiting and live rows, in `max_rows` batch slots of `capacity` positions. `grow` raises the capacity."""

    def __init__(
        self,
        max_rows: int,
        device: torch.device,
        vocabulary: int,
        params: SamplingParams,
        processors: tuple[Processor, ...] = (),
    ):
        """params, processors: of batch slots without a row; captured steps assume these for all rows."""
        self.max_rows, self.capacity, self.device = max_rows, 0, device
        self.vocabulary, self.params, self.processors = vocabulary, params, processors
        self.waiting: deque[Request] = deque()
        self.live: list[Request] = []
        self._count = itertools.count()
        self._chosen: set[int] = set()  # row ids that callers chose
        self._leaving: list[Request] = []  # rows that ended since the last commit
        # [max_rows, capacity + 1], the last column is scratch
        self.tokens = torch.zeros(max_rows, 1, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(max_rows, 1, dtype=torch.float32, device=device)
        # An empty batch slot has length 1, since steps of fixed shapes also read the last token of empty slots.
        self.lengths = torch.ones(max_rows, dtype=torch.int64, device=device)
        self.steps = torch.zeros_like(self.lengths)
        self.streams = torch.zeros_like(self.lengths)
        self.limits = torch.zeros_like(self.lengths)  # maximum lengths
        self.prompts = torch.zeros_like(self.lengths)  # tokens of the prompts
        self.tokens_host = np.zeros((max_rows, 1), dtype=np.int64)  # host copies of the tensors above
        self.lengths_host = np.zeros(max_rows, dtype=np.int64)
        self.steps_host = np.zeros(max_rows, dtype=np.int64)
        self.prompt_lengths = np.zeros(max_rows, dtype=np.int64)
        self.limits_host = np.zeros(max_rows, dtype=np.int64)

    def number(self, row: int | None) -> int:
        """Return the id of a new row: `row`, or the next free id. Raises ValueError if a live or waiting row has it."""
        if row is None:
            return next(number for number in self._count if number not in self._chosen)
        checks.integer("row", row)
        if any(each.row == row and each.finish_reason is None for each in (*self.live, *self.waiting)):
            raise ValueError(f"row {row} has not ended yet; choose another row id, or None for a new one")
        self._chosen.add(row)
        return row

    # --- looking ----------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        return self.max_rows - len(self.live)

    def view(self) -> RowsView:
        """Return the live rows as a draft-length policy sees them."""
        b = len(self.live)
        lengths = self.lengths_host[:b].copy()
        return RowsView(
            ids=np.array([request.row for request in self.live]),
            steps=self.steps_host[:b] - 1,
            lengths=lengths,
            generated=lengths - self.prompt_lengths[:b],
            remaining=self.limits_host[:b] - lengths,
        )

    def policy(self, default: DraftLengthPolicy) -> DraftLengthPolicy:
        """Return the policy of the live rows. default: of rows without a policy of their own."""
        own = [request.policy for request in self.live]
        return OfEachRow([policy or default for policy in own]) if any(own) else default

    def context(self, batch_slots: range, most: int) -> Context:
        """Return the rows in `batch_slots` as input of a step that drafts up to `most` tokens."""
        rows = slice(batch_slots.start, batch_slots.stop)
        tokens_host = self.tokens_host[rows, : self.capacity]
        tokens_host.flags.writeable = False  # drafters receive this view
        live = self.live[rows]
        params = sampling.of_rows([request.params for request in live] or [self.params], self.device)
        return Context(
            batch_slots,
            self.tokens[rows, : self.capacity],
            tokens_host,
            self.lengths[rows],
            self.lengths_host[rows].copy(),
            randomness.StepKeys(self.streams[rows], self.steps[rows], max(most, 1)),
            params,
            self.prompts[rows],
            self._processing(live, rows),
            max((request.top_logprobs for request in live), default=0),
        )

    def _processing(self, live: list[Request], rows: slice) -> Processing | None:
        """Return the processors of rows, or None if there are none."""
        own = [request.processors for request in live] or [self.processors]
        if not any(own):
            return None
        generated = self.lengths_host[rows] - self.prompt_lengths[rows]
        found = Processing(own, generated, self.vocabulary, self.device)
        return found if found.stages else None

    def memory(self, batch_slots: range) -> tuple[Tensor, ...]:
        """Return the tensors that a commit reads and changes: tokens, log-probabilities, lengths, steps, streams."""
        rows = slice(batch_slots.start, batch_slots.stop)
        return tuple(t[rows] for t in (self.tokens, self.logprobs, self.lengths, self.steps, self.streams))

    # --- admission --------------------------------------------------------------------------------

    def admit(self, request: Request, batch_slot: int) -> None:
        """Write a request's prompt into a batch slot. The caller then adds the request to `live`."""
        ids = request.prompt.ids
        self.tokens[batch_slot, : len(ids)] = ids.to(self.device)
        self.tokens_host[batch_slot, : len(ids)] = ids.numpy()
        self.lengths[batch_slot] = self.lengths_host[batch_slot] = self.prompt_lengths[batch_slot] = len(ids)
        self.steps[batch_slot] = self.steps_host[batch_slot] = 0
        self.streams[batch_slot] = randomness.stream(request.seed, request.sample)
        self.limits[batch_slot] = self.limits_host[batch_slot] = request.limit
        self.prompts[batch_slot] = len(ids)

    def begin_anew(self) -> None:
        """Return to capacity 0 with empty batch slots."""
        self.lengths.fill_(1)
        self.lengths_host[:] = 0
        self.tokens, self.logprobs = self.tokens[:, :1].clone(), self.logprobs[:, :1].clone()
        self.tokens_host, self.capacity = self.tokens_host[:, :1].copy(), 0

    def grow(self, capacity: int) -> None:
        """Increase the capacity to `capacity` positions per row."""
        extra = capacity - self.capacity
        tokens, logprobs = (torch.nn.functional.pad(each, (0, extra)) for each in (self.tokens, self.logprobs))
        host = np.pad(self.tokens_host, ((0, 0), (0, extra)))

        def put() -> None:  # after all allocations have succeeded
            self.tokens, self.logprobs, self.tokens_host, self.capacity = tokens, logprobs, host, capacity

        with always(put):
            pass

    # --- committing -------------------------------------------------------------------------------

    def advance(self, batch_slots: range, verified: Verified, fine: Tensor) -> None:
        """Append the accepted tokens and the target's next token to the rows in `batch_slots`, on the device.

        fine: bool [B]; the other rows do not change. `commit` updates the host.
        """
        rows = slice(batch_slots.start, batch_slots.stop)
        new, lengths = verified.tokens, self.lengths[rows]
        moved = (verified.accepted + 1) * fine  # [B]
        at, kept = lengths[:, None], fine[:, None]
        if new.shape[1] > 1:
            slots = torch.arange(new.shape[1], device=self.device)
            at, kept = at + slots, slots < moved[:, None]
        at = torch.where(kept, at, self.capacity)
        self.tokens[rows].scatter_(1, at, new)
        self.logprobs[rows].scatter_(1, at, verified.logprobs.to(self.logprobs.dtype))
        lengths += moved
        self.steps[rows] += fine

    def rewind(self) -> None:
        """Restore the device's lengths and steps from the host, after an `advance` that will not be committed.

        Later steps overwrite the tokens beyond a row's end.
        """
        live = len(self.live)
        self.lengths[:live] = torch.from_numpy(self.lengths_host[:live])
        self.steps[:live] = torch.from_numpy(self.steps_host[:live])

    def commit(self, batch_slots: range, report: HostReport, drafted: np.ndarray, failed: np.ndarray) -> Commit:
        """Apply `advance` to the host's copies and end finished rows.

        drafted: submitted tokens [B]. failed: bool [B], rows that end with reason "error" and commit no tokens.
        """
        rows, new_host = slice(batch_slots.start, batch_slots.stop), report.tokens
        accepted_host = np.where(failed, 0, report.accepted)
        emitted, reasons = self._ends(rows, new_host, np.where(failed, 0, accepted_host + 1))
        columns = np.arange(new_host.shape[1])
        at_host = np.where(columns < emitted[:, None], self.lengths_host[rows, None] + columns, self.capacity)
        self.tokens_host[np.arange(rows.start, rows.stop)[:, None], at_host] = new_host
        self.lengths_host[rows] += emitted
        self.steps_host[rows] += 1
        reasons |= dict.fromkeys(np.flatnonzero(failed).tolist(), "error")
        commit = Commit(self.live[rows], new_host, accepted_host, emitted)
        for request, tried, kept in zip(commit.requests, drafted.tolist(), accepted_host.tolist(), strict=True):
            request.drafted += tried
            request.accepted += kept
        for index, request in enumerate(commit.requests if report.likeliest else ()):
            if request.top_logprobs == 0:
                continue
            for ids, values in zip(*(part[index, : emitted[index]] for part in report.likeliest), strict=True):
                own = slice(request.top_logprobs)
                request.alternatives.append(dict(zip(ids[own].tolist(), values[own].tolist(), strict=True)))
        for index, reason in reasons.items():
            self._finish(batch_slots[index], reason)
        return commit

    def fetch_ended(self) -> None:
        """Copy the log-probabilities of ended rows to the host, so that a later GPU failure does not lose them. Called
        after a later step's result has arrived, when the copies do not wait."""
        while self._leaving:
            self._leaving.pop().fetched()

    def _ends(self, rows: slice, new: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, dict[int, str]]:
        """Return the number of new tokens that each row keeps, at most `counts` [B]. Also return finish reasons by row
        index, for rows that end."""
        full = self.lengths_host[rows] + counts >= self.limits_host[rows]
        reasons = dict.fromkeys(np.flatnonzero(full).tolist(), "length")
        for index, (request, ids) in enumerate(zip(self.live[rows], new.tolist(), strict=True)):
            if request.ends:
                at = next((at for at in range(counts[index]) if ids[at] in request.ends), None)
                if at is not None:
                    counts[index], reasons[index] = at + 1, request.ends[ids[at]]
            if request.stop_finder is None or counts[index] == 0:
                continue
            batch_slot, count = rows.start + index, int(counts[index])
            generated = self.tokens_host[batch_slot, self.prompt_lengths[batch_slot] : self.lengths_host[batch_slot]]
            kept = request.stop_finder.completed_at(generated, new[index, :count])
            if kept is not None and (kept < count or reasons.get(index) != "eos"):
                counts[index], reasons[index] = kept, "stop"
        return counts, reasons

    # --- results and removal ----------------------------------------------------------------------

    def generated(self, request: Request) -> tuple[np.ndarray, np.ndarray]:
        """Return copies of the row's current generated ids and log-probabilities."""
        if request in self.live and request.finish_reason is None:
            tokens, logprobs = self._generated(self.live.index(request))
            return tokens, logprobs()
        return request.tokens.copy(), request.logprobs.copy()

    def _generated(self, batch_slot: int) -> tuple[np.ndarray, Fetched]:
        start, end = self.prompt_lengths[batch_slot], self.lengths_host[batch_slot]
        return self.tokens_host[batch_slot, start:end].copy(), Fetched(self.logprobs[batch_slot, start:end])

    def _finish(self, batch_slot: int, reason: str) -> None:
        request = self.live[batch_slot]
        request.tokens, request.fetched = self._generated(batch_slot)
        request.finish_reason = reason
        self._leaving.append(request)

    def end(self, request: Request, reason: str) -> None:
        """End a waiting or live row now. The row keeps its tokens."""
        if request.finish_reason is not None:
            return
        if request in self.live:
            self._finish(self.live.index(request), reason)
        else:
            request.finish_reason = reason
            self.drop_started()

    def drop_started(self) -> None:
        """Remove live and ended rows from the front of the queue."""
        while self.waiting and (self.waiting[0] in self.live or self.waiting[0].finish_reason is not None):
            self.waiting.popleft()

    def expired(self) -> list[Request]:
        """Return the live and waiting rows with a passed deadline."""
        with_deadline = [request for request in (*self.live, *self.waiting) if request.deadline is not None]
        now = time.monotonic() if with_deadline else 0.0
        return [request for request in with_deadline if now >= request.deadline]

    def compact(self, move_caches: Callable[[int, int, int], None]) -> None:
        """Move the last live rows into the batch slots of finished rows.

        move_caches: called as move_caches(from, to, committed tokens). An interrupted call may be repeated, since only
        batch slots of finished rows are overwritten.
        """
        if all(request.finish_reason is None for request in self.live):
            return
        for batch_slot in reversed(range(len(self.live))):
            if self.live[batch_slot].finish_reason is None:
                continue
            last = len(self.live) - 1
            if batch_slot != last:
                move_caches(last, batch_slot, int(self.lengths_host[last]))
                self._move(last, batch_slot)
                self.live[batch_slot] = self.live[last]
            self.live.pop()

    def _move(self, source: int, destination: int) -> None:
        tables = [self.tokens, self.logprobs, self.lengths, self.steps, self.streams, self.limits, self.prompts]
        tables += [self.tokens_host, self.lengths_host, self.steps_host, self.prompt_lengths, self.limits_host]
        for table in tables:
            table[destination] = table[source]
