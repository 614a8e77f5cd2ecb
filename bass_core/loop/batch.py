"""Rows together with the caches that hold them: admitted with one shared prefill per prompt, moved, released.

A prompt is prefilled once, by the first of its samples. Samples that start with it copy its cache row; for samples that
start later, what the prefill left (both models' cache rows and the target's last logits) is kept until the last of them
has started.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from bass_core.drafters import Drafter
from bass_core.environment import is_full
from bass_core.loop.rows import Prompt, Request, Rows
from bass_core.model.cache import free
from bass_core.model.runner import Runner


class Batch:
    """`rows`, and what `target` and `drafter` cache of them, kept in step."""

    def __init__(self, rows: Rows, target: Runner, drafter: Drafter, prefill_chunk: int | None = None):
        self.rows, self.target, self.drafter = rows, target, drafter
        self.long = LongPrompts(prefill_chunk, rows, target, drafter)
        self._prompts: dict[tuple[int, ...], Prompt] = {}  # of rows that wait
        self._runners = [target, *drafter.runners]
        self._filled = False  # whether the caches have all of their memory
        self.admitting = False  # whether the step that runs, or the last one, which failed, gives rows batch slots

    def submit(self, request: Request) -> None:
        """Queue a row; rows that wait for the same text share their prompt. Safe while a step runs elsewhere."""
        request.prompt = self._prompts.setdefault(request.prompt.key, request.prompt)
        self.rows.waiting.append(request)

    def end(self, request: Request, reason: str) -> None:
        """End a waiting or live row, keeping what it has; nothing if it has ended already."""
        self.rows.end(request, reason)
        if not any(each.prompt is request.prompt for each in self._waiting()):
            self._forget(request.prompt)
        self.compact()

    def reserve(self, positions: int) -> None:
        """Make room for rows of that many tokens, prompt included."""
        if positions > self.rows.capacity:
            with self._no_more_than_fits():
                self.target.cache.grow(positions)
                self.drafter.grow(positions)
                self.rows.grow(positions)

    @contextmanager
    def _no_more_than_fits(self) -> Iterator[None]:
        """Where memory is full before the caches have any, there is as little room as at first: later rows would take
        as much as the one that found none."""
        try:
            yield
        except BaseException as error:
            if not self._filled and is_full(error):
                for runner in self._runners:
                    runner.cache.begin_anew()
                self.rows.begin_anew()
            raise

    @contextmanager
    def admission(self) -> Iterator[None]:
        """Rows admitted inside wait again if anything is raised, so that an interrupted step can be repeated."""
        first, self.admitting = len(self.rows.live), True
        try:
            with self._no_more_than_fits():
                yield
        except BaseException:
            del self.rows.live[first:]
            raise
        self.admitting = False
        self.rows.drop_started()

    def starting(self) -> list[Request]:
        """Waiting rows that can start now, in the order in which they came."""
        if not self.rows.free:
            return []  # nor is a prompt being read: a batch slot is kept for it
        return self.long.starting(self._waiting(), self.rows.free)

    def _waiting(self) -> list[Request]:
        live = set(self.rows.live)  # rows that have passed a long prompt stay in the queue behind it
        return [each for each in list(self.rows.waiting) if each.finish_reason is None and each not in live]

    def read_chunk(self) -> tuple[Request, range]:
        """Read the next chunk of a long prompt. Returns a row that waits for it, and the chunk's positions."""
        request = self.long.request
        with self.admission():
            self._make_room([request])
            chunk = self.long.read()
        self._filled = True
        return request, chunk

    def _make_room(self, requests: list[Request]) -> None:
        needed = max(request.limit for request in requests)
        if needed > self.rows.capacity:
            # At least double, so that growing stays rare, but no more than a row can have, or than there is.
            contexts = [runner.context for runner in self._runners if runner.context is not None]
            wanted = max(needed, min([2 * self.rows.capacity, *contexts]))
            for room in dict.fromkeys((wanted, needed)):
                try:
                    self.reserve(room)
                    break
                except (RuntimeError, MemoryError) as error:
                    if room == needed or not is_full(error):
                        raise

    def admit(self, starting: list[Request]) -> tuple[range, Tensor]:
        """Give these rows batch slots. Returns the batch slots and the target's logits after the prompts, [B, V]."""
        rows, first, chosen = self.rows, len(self.rows.live), set(starting)
        later = [request for request in self._waiting() if request not in chosen]
        self._make_room(starting)
        leaders: dict[Prompt, Request] = {}  # the first sample of each prompt that was not prefilled yet
        for request in starting:
            if request.prompt.saved is None:
                leaders.setdefault(request.prompt, request)
        leading = list(leaders.values())
        followers = [request for request in starting if leaders.get(request.prompt) is not request]
        for batch_slot, request in enumerate(leading + followers, first):
            rows.admit(request, batch_slot)
        if leading:
            self._prefill(leading, range(first, first + len(leading)))
        batch_slot_of = {request.prompt: batch_slot for batch_slot, request in enumerate(leading, first)}
        batch_slot = first + len(leading)
        for prompt, samples in itertools.groupby(followers, lambda request: request.prompt):
            batch_slots = range(batch_slot, batch_slot + len(list(samples)))
            self._copy_prompt(prompt, batch_slots, batch_slot_of.get(prompt))
            batch_slot = batch_slots.stop
        logits = torch.stack([request.prompt.logits for request in leading + followers])
        wanted = {request.prompt for request in later}
        for prompt in {request.prompt for request in starting}:
            if prompt not in wanted:
                self._forget(prompt)
            elif prompt.saved is None:
                source, length = batch_slot_of[prompt], len(prompt.ids)
                prompt.saved = self.target.cache.save_row(source, length), self.drafter.save_row(source, length)
        rows.live += leading + followers
        return range(first, len(rows.live)), logits

    def _prefill(self, leading: list[Request], batch_slots: range) -> None:
        """One pass of each model over new prompts; the target's last logits stay with the prompts."""
        tokens = self.rows.tokens[batch_slots.start : batch_slots.stop]
        lengths = [len(request.prompt.ids) for request in leading]
        self.target.cache.clear(batch_slots)
        read_sources(self.target, self.drafter, [request.prompt for request in leading], batch_slots)
        logits = self.target.feed_last(tokens, lengths, max(lengths), batch_slots)  # [B, V]
        self.drafter.prefill(tokens, lengths, batch_slots, self.target.hidden(batch_slots))
        self._filled = True
        for request, row_logits in zip(leading, logits, strict=True):
            request.prompt.logits = row_logits

    def _copy_prompt(self, prompt: Prompt, batch_slots: range, source: int | None) -> None:
        """Write a prompt's cache rows to batch slots: from another batch slot, or from what was saved."""
        if source is not None:
            self._copy(source, batch_slots, len(prompt.ids))
        else:
            self.target.cache.load_row(batch_slots, prompt.saved[0])
            self.drafter.load_row(batch_slots, prompt.saved[1], len(prompt.ids))

    def _forget(self, prompt: Prompt) -> None:
        """Drop what is kept of a prompt that no row waits for."""
        prompt.saved = prompt.logits = None
        if self._prompts.get(prompt.key) is prompt:
            del self._prompts[prompt.key]

    def compact(self) -> None:
        """Let the last live rows take the batch slots of finished ones."""
        self.rows.drop_started()
        if self._prompts and not self.rows.waiting:  # what an interrupt within `end` may have left
            for prompt in list(self._prompts.values()):
                self._forget(prompt)
        for batch_slot, request in enumerate(self.rows.live):
            if request.finish_reason is not None:
                self.drafter.ended(batch_slot, self.rows.tokens_host[batch_slot, : self.rows.lengths_host[batch_slot]])
        self.rows.compact(self._move)

    def _move(self, source: int, destination: int, length: int) -> None:
        self._copy(source, range(destination, destination + 1), length)

    def _copy(self, source: int, batch_slots: range, length: int) -> None:
        self.target.cache.move_row(source, batch_slots)
        self.drafter.move_row(source, batch_slots)

    def release(self) -> None:
        """Free all memory that depends on the models."""
        self.target.release()
        self.drafter.release()
        for prompt in self._prompts.values():
            for saved in prompt.saved or ():
                free(saved)
            prompt.saved = prompt.logits = None
        self._prompts.clear()


def read_sources(target: Runner, drafter: Drafter, prompts: Sequence[Prompt], batch_slots: range) -> None:
    """Target and drafter read the sources of prompts that begin in these batch slots, if their models read any."""
    if target.sources is not None:
        sources = [prompt.source for prompt in prompts]
        drafter.read_sources(sources, batch_slots, target.read(sources, batch_slots))


class LongPrompts:
    """Which prompt is read in chunks, and how far that is."""

    def __init__(self, chunk: int | None, rows: Rows, target: Runner, drafter: Drafter):
        """chunk: tokens of a prompt that are read in one pass at most; None: all of them."""
        self.chunk, self.rows, self.target, self.drafter = chunk, rows, target, drafter
        self.request: Request | None = None  # whose prompt is being read
        # Between two decode steps there is one chunk at most, and one prefill; without chunks, prefills come first.
        self.turn = self.admits = True  # whether the next may be a chunk, or a prefill, while rows run
        self._read = 0  # tokens of the prompt that were read

    def starting(self, waiting: Sequence[Request], free: int) -> list[Request]:
        """Which of the waiting rows can start in `free` batch slots: the first ones, but for those whose prompt is
        still to be read. The first of these has its place kept, and is `request` from now on."""
        prompt = None if self.request is None else self.request.prompt
        same = (each for each in waiting if each.prompt is prompt and self._is_long(each.prompt))
        self.request = next(same, None)  # of its samples one that was not cancelled
        if self.request is None:
            self._read = 0
            self.request = next((each for each in waiting[:free] if self._is_long(each.prompt)), None)
        most = free if self.request is None else free - 1
        return [each for each in waiting if not self._is_long(each.prompt)][:most]

    def _is_long(self, prompt: Prompt) -> bool:
        """Whether this prompt is still to be read in chunks."""
        return self.chunk is not None and len(prompt.ids) > self.chunk and prompt.saved is None

    def read(self) -> range:
        """Read a chunk. Returns its positions. After the last one, the prompt has what its rows start from; an
        interrupted chunk is read again."""
        prompt, batch_slot = self.request.prompt, self.rows.max_rows - 1
        batch_slots, whole = range(batch_slot, batch_slot + 1), len(prompt.ids)
        tokens = prompt.ids.to(self.rows.device)[None]  # [1, P]
        chunk = range(self._read, min(self._read + self.chunk, whole))
        if chunk.start == 0:
            self.target.cache.clear(batch_slots)  # a row that failed leaves NaN, and kernels read whole blocks
            read_sources(self.target, self.drafter, [prompt], batch_slots)
        logits = self.target.feed_last(tokens, [chunk.stop], len(chunk), batch_slots, prompt=whole)
        self.drafter.prefill_chunk(tokens, chunk, batch_slot, self.target.hidden(batch_slots))
        if chunk.stop == whole:
            prompt.logits = logits[0]
            prompt.saved = self.target.cache.save_row(batch_slot, whole), self.drafter.save_row(batch_slot, whole)
            self.request = None
        self._read = chunk.stop
        self.turn = False
        return chunk

    def prefilled(self) -> None:
        """Rows have started."""
        self.admits = self.chunk is None
        self.turn |= not self.rows.live  # all of them have ended, too

    def decoded(self) -> None:
        """Rows that run have had a step."""
        self.turn = self.admits = True
