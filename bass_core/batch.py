"""Rows together with the caches that hold them: admitted with one shared prefill per prompt, moved, released.

A prompt is prefilled once, by the first of its samples. Samples that start with it copy its cache row; for samples that
start later, what the prefill left (both models' cache rows and the target's last logits) is kept until the last of them
has started.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from bass_core.cache import free
from bass_core.drafters import Drafter
from bass_core.rows import Prompt, Request, Rows
from bass_core.runner import Runner


class Batch:
    """`rows`, and what `target` and `drafter` cache of them, kept in step."""

    def __init__(self, rows: Rows, target: Runner, drafter: Drafter):
        self.rows, self.target, self.drafter = rows, target, drafter
        self._prompts: dict[tuple[int, ...], Prompt] = {}  # prompts that rows wait for

    def prompt(self, ids: Tensor) -> Prompt:
        """The prompt with these ids, shared with the rows that wait for the same one."""
        return self._prompts.get(tuple(ids.tolist()), Prompt(ids))

    def submit(self, request: Request) -> None:
        """Queue a row."""
        self._prompts[tuple(request.prompt.ids.tolist())] = request.prompt
        request.prompt.waiting += 1
        self.rows.waiting.append(request)

    def end(self, request: Request, reason: str) -> None:
        """End a waiting or live row, keeping what it has; nothing if it has ended already."""
        self.rows.end(request, reason)
        self._forget(request.prompt)
        self.compact()

    def reserve(self, positions: int) -> None:
        """Make room for rows of that many tokens, prompt included."""
        if positions > self.rows.capacity:
            self.target.cache.grow(positions)
            self.drafter.grow(positions)
            self.rows.grow(positions)

    @contextmanager
    def admission(self) -> Iterator[None]:
        """Rows admitted inside wait again if anything is raised, so that an interrupted step can be repeated."""
        first = len(self.rows.live)
        try:
            yield
        except BaseException:
            undone = sorted(self.rows.live[first:], key=lambda request: request.row)
            del self.rows.live[first:]
            self.rows.waiting.extendleft(reversed(undone))
            for request in undone:
                request.prompt.waiting += 1
                self._prompts.setdefault(tuple(request.prompt.ids.tolist()), request.prompt)
            raise

    def admit(self) -> tuple[range, Tensor]:
        """Move waiting rows into the free places. Returns these and the target's logits after the prompts, [B, V]."""
        rows, first = self.rows, len(self.rows.live)
        starting = [rows.waiting[i] for i in range(min(rows.free, len(rows.waiting)))]
        needed = max(request.limit for request in starting)
        if needed > rows.capacity:
            self.reserve(max(needed, 2 * rows.capacity))  # at least double, so that growing stays rare
        leaders: dict[Prompt, Request] = {}  # the first sample of each prompt that was not prefilled yet
        for request in starting:
            if request.prompt.saved is None:
                leaders.setdefault(request.prompt, request)
        leading = list(leaders.values())
        followers = [request for request in starting if leaders.get(request.prompt) is not request]
        for place, request in enumerate(leading + followers, first):
            rows.admit(request, place)
        if leading:
            self._prefill(leading, range(first, first + len(leading)))
        place_of = {request.prompt: place for place, request in enumerate(leading, first)}
        place = first + len(leading)
        for prompt, samples in itertools.groupby(followers, lambda request: request.prompt):
            places = range(place, place + len(list(samples)))
            self._copy_prompt(prompt, places, place_of.get(prompt))
            place = places.stop
        for request in starting:
            rows.waiting.popleft()
            request.prompt.waiting -= 1
        rows.live += leading + followers
        logits = torch.stack([request.prompt.logits for request in leading + followers])
        for request in starting:
            self._keep(request.prompt, place_of.get(request.prompt))
        return range(first, len(rows.live)), logits

    def _prefill(self, leading: list[Request], places: range) -> None:
        """One pass of each model over new prompts; the target's last logits stay with the prompts."""
        tokens = self.rows.tokens[places.start : places.stop]
        lengths = [len(request.prompt.ids) for request in leading]
        self.target.cache.clear(places)
        logits = self.target.feed_last(tokens, lengths, max(lengths), places)  # [B, V]
        self.drafter.prefill(tokens, lengths, places)
        for request, row_logits in zip(leading, logits, strict=True):
            request.prompt.logits = row_logits

    def _copy_prompt(self, prompt: Prompt, places: range, source: int | None) -> None:
        """Write a prompt's cache rows to places: from another place, or from what was saved."""
        if source is not None:
            self._copy(source, places, len(prompt.ids))
        else:
            self.target.cache.load_row(places, prompt.saved[0])
            self.drafter.load_row(places, prompt.saved[1], len(prompt.ids))

    def _keep(self, prompt: Prompt, source: int | None) -> None:
        """Save a prompt's cache rows for samples that start later; forget them once none is left."""
        if prompt.waiting > 0 and prompt.saved is None:
            length = len(prompt.ids)
            prompt.saved = self.target.cache.save_row(source, length), self.drafter.save_row(source, length)
        self._forget(prompt)

    def _forget(self, prompt: Prompt) -> None:
        """Drop what is kept of a prompt, unless a row still waits for it."""
        if prompt.waiting == 0:
            prompt.saved = prompt.logits = None
            key = tuple(prompt.ids.tolist())
            if self._prompts.get(key) is prompt:  # the same text may have been submitted again since
                del self._prompts[key]

    def compact(self) -> None:
        """Let the last live rows take the places of finished ones."""
        self.rows.compact(self._move)

    def _move(self, source: int, destination: int, length: int) -> None:
        self._copy(source, range(destination, destination + 1), length)

    def _copy(self, source: int, places: range, length: int) -> None:
        self.target.cache.move_row(source, places, length)
        self.drafter.move_row(source, places, length)

    def release(self) -> None:
        """Free all memory that depends on the models."""
        self.target.release()
        self.drafter.release()
        for prompt in self._prompts.values():
            for saved in prompt.saved or ():
                free(saved)
            prompt.saved = prompt.logits = None
        self._prompts.clear()
