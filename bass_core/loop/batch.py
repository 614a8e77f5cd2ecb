"""Rows together with their caches: admit rows with one shared prefill per prompt, move rows, release memory.

The first sample of a prompt prefills the prompt. Samples that start in the same step copy this sample's cache row. For
later samples, the batch saves both models' cache rows and the target's last logits until the last sample has started.
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
    """Keeps `rows` and the caches of `target` and `drafter` consistent."""

    def __init__(self, rows: Rows, target: Runner, drafter: Drafter, prefill_chunk: int | None = None):
        self.rows, self.target, self.drafter = rows, target, drafter
        self.long = LongPrompts(prefill_chunk, rows, target, drafter)
        self._prompts: dict[tuple[int, ...], Prompt] = {}  # prompts of waiting rows
        self._runners = [target, *drafter.runners]
        self._filled = False  # True once a prefill has allocated all cache memory
        self.admitting = False  # True while a step admits rows, and after such a step has failed

    def submit(self, request: Request) -> None:
        """Queue a row. Waiting rows with equal prompts share one. Safe while a step runs in another thread."""
        request.prompt = self._prompts.setdefault(request.prompt.key, request.prompt)
        self.rows.waiting.append(request)

    def end(self, request: Request, reason: str) -> None:
        """End a waiting or live row. The row keeps its tokens. No effect if the row has already ended."""
        self.rows.end(request, reason)
        if not any(each.prompt is request.prompt for each in self._waiting()):
            self._forget(request.prompt)
        self.compact()

    def reserve(self, positions: int) -> None:
        """Increase the capacity to rows of `positions` tokens, prompt included."""
        if positions > self.rows.capacity:
            with self._no_more_than_fits():
                self.target.cache.grow(positions)
                self.drafter.grow(positions)
                self.rows.grow(positions)

    @contextmanager
    def _no_more_than_fits(self) -> Iterator[None]:
        """Reset the capacity to 0 if memory is full before the first prefill has succeeded. Otherwise all later rows
        would allocate the capacity that did not fit."""
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
        """After an exception, put the rows admitted inside back into the queue, so that the step can be repeated."""
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
        """Return the waiting rows that can start now, in order of arrival."""
        if not self.rows.free:
            return []  # no prompt is being read either, since this would reserve a batch slot
        return self.long.starting(self._waiting(), self.rows.free)

    def _waiting(self) -> list[Request]:
        live = set(self.rows.live)  # live rows that overtook a long prompt are still in the queue
        return [each for each in list(self.rows.waiting) if each.finish_reason is None and each not in live]

    def read_chunk(self) -> tuple[Request, range]:
        """Read the next chunk of a long prompt. Returns a waiting row of this prompt and the chunk's positions."""
        request = self.long.request
        with self.admission():
            self._make_room([request])
            chunk = self.long.read()
        self._filled = True
        return request, chunk

    def _make_room(self, requests: list[Request]) -> None:
        needed = max(request.limit for request in requests)
        if needed > self.rows.capacity:
            # Double the capacity, up to the context, so that growing is rare. If memory is full, grow only as needed.
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
        """Give these rows batch slots. Returns the batch slots and the target logits after the prompts, [B, V]."""
        rows, first, chosen = self.rows, len(self.rows.live), set(starting)
        later = [request for request in self._waiting() if request not in chosen]
        self._make_room(starting)
        leaders: dict[Prompt, Request] = {}  # first sample of each prompt without a prefill
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
        logits = torch.stack([request.prompt.logits for request in leading + followers])  # [B, V]
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
        """Run one pass of each model over new prompts. Stores the target's last logits in the prompts."""
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
        """Write a prompt's cache rows to batch slots, from the batch slot `source` or from the saved cache rows."""
        if source is not None:
            self._copy(source, batch_slots, len(prompt.ids))
        else:
            self.target.cache.load_row(batch_slots, prompt.saved[0])
            self.drafter.load_row(batch_slots, prompt.saved[1], len(prompt.ids))

    def _forget(self, prompt: Prompt) -> None:
        """Drop the saved prefill of a prompt without waiting rows."""
        prompt.saved = prompt.logits = None
        if self._prompts.get(prompt.key) is prompt:
            del self._prompts[prompt.key]

    def compact(self) -> None:
        """Move the last live rows into the batch slots of finished rows."""
        self.rows.drop_started()
        if self._prompts and not self.rows.waiting:  # possible after an interrupt within `end`
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
    """Encode the sources of encoder-decoder models for target and drafter. No effect on decoder-only models."""
    if target.sources is not None:
        sources = [prompt.source for prompt in prompts]
        drafter.read_sources(sources, batch_slots, target.read(sources, batch_slots))


class LongPrompts:
    """Chunked prefill: reads one long prompt at a time, chunk by chunk."""

    def __init__(self, chunk: int | None, rows: Rows, target: Runner, drafter: Drafter):
        """chunk: maximum number of prompt tokens per pass; None means no limit."""
        self.chunk, self.rows, self.target, self.drafter = chunk, rows, target, drafter
        self.request: Request | None = None  # a waiting row of the prompt that is being read
        # At most one chunk and one prefill run between two decode steps. Without chunks, all prefills run first.
        self.turn = self.admits = True  # True if the next step may be a chunk, or a prefill, while rows are live
        self._read = 0  # tokens of the prompt read so far

    def starting(self, waiting: Sequence[Request], free: int) -> list[Request]:
        """Return the waiting rows that can start in `free` batch slots. Rows of unread long prompts are passed over.
        The first of these rows becomes `request`, and one batch slot stays reserved."""
        prompt = None if self.request is None else self.request.prompt
        same = (each for each in waiting if each.prompt is prompt and self._is_long(each.prompt))
        self.request = next(same, None)  # a sample that is not cancelled
        if self.request is None:
            self._read = 0
            self.request = next((each for each in waiting[:free] if self._is_long(each.prompt)), None)
        most = free if self.request is None else free - 1
        return [each for each in waiting if not self._is_long(each.prompt)][:most]

    def _is_long(self, prompt: Prompt) -> bool:
        """Return True if the prompt must still be read in chunks."""
        return self.chunk is not None and len(prompt.ids) > self.chunk and prompt.saved is None

    def read(self) -> range:
        """Read a chunk and return its positions. The last chunk saves the prefill in the prompt. After an interrupt,
        the prompt is read again from its beginning, because some layers' recurrent states may have advanced."""
        prompt, batch_slot = self.request.prompt, self.rows.max_rows - 1
        batch_slots, whole = range(batch_slot, batch_slot + 1), len(prompt.ids)
        tokens = prompt.ids.to(self.rows.device)[None]  # [1, P]
        chunk, self._read = range(self._read, min(self._read + self.chunk, whole)), 0
        if chunk.start == 0:
            self.target.cache.clear(batch_slots)  # a failed row may have left NaN, and kernels read whole blocks
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
        """Update the schedule after rows have started."""
        self.admits = self.chunk is None
        self.turn |= not self.rows.live  # all rows have ended already

    def decoded(self) -> None:
        """Update the schedule after a decode step."""
        self.turn = self.admits = True
