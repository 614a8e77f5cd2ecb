"""Drafts continued from all texts of a session: prompts, the row's own text, the other rows', earlier answers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor

from bass_core.draft_length import DraftLengthPolicy
from bass_core.drafters.protocol import Context, Draft, Drafter, Setting

KNOWN = 500_000  # endings that are known at least, once there were so many; twice as many at most: some 400 MB


class SuffixDrafter(Drafter):
    """What most often followed the longest ending of a row that some text of the session has had (after SuffixDecoding,
    Oliaro et al. 2024). q is one-hot.

    Endings of up to `longest` tokens are counted. A row's draft goes on while the chance that all of it is right, by
    these counts, stays above `least`: long where much text agrees, none where nothing is known. Sampled text depends on
    drafts, and so, here, on what else the session decodes; greedy and coupled text does not. What was counted longest
    ago is forgotten, so that a session may go on for ever.
    """

    name = "suffix draft"

    def __init__(self, longest: int = 8, least: float = 0.3):
        if not isinstance(longest, int) or longest < 1:
            raise ValueError(f"longest must be an integer >= 1, got {longest!r}")
        if not 0 <= least <= 1:
            raise ValueError(f"least must be in [0, 1], got {least!r}")
        self.longest, self.least = longest, least

    def begin(self, setting: Setting) -> Self:
        mine = super().begin(setting)
        # What followed each ending, and how often: lately, and before that.
        mine.followed: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        mine.followed_before: dict[tuple[int, ...], Counter[int]] = {}
        mine.read = np.zeros(setting.max_rows, np.int64)  # tokens of each place that are counted
        return mine

    def prefill(self, tokens: Tensor, lengths: Sequence[int], places: range, hidden: Tensor | None = None) -> None:
        self.read[places.start : places.stop] = 0
        for place, row, length in zip(places, tokens.cpu().numpy(), lengths, strict=True):
            self._count(place, row[:length])  # before rows that share it have copies

    def move_row(self, source: int, places: range) -> None:
        self.read[places.start : places.stop] = self.read[source]

    def load_row(self, places: range, saved: list[Tensor], length: int) -> None:
        self.read[places.start : places.stop] = length  # its prompt is another row's, too

    def ended(self, place: int, tokens: np.ndarray) -> None:
        self._count(place, tokens)

    def release(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.followed.clear()
        self.followed_before.clear()

    def draft(self, context: Context, lengths: np.ndarray, policy: DraftLengthPolicy) -> Draft:
        texts = [row[:length] for row, length in zip(context.tokens_host, context.lengths_host, strict=True)]
        for place, text in zip(context.places, texts, strict=True):
            self._count(place, text)
        found = [self._continuation(text, int(length)) for text, length in zip(texts, lengths, strict=True)]
        counts = np.array([len(tokens) for tokens in found])
        table = np.zeros((len(found), counts.max()), np.int64)
        for line, tokens in zip(table, found, strict=True):
            line[: len(tokens)] = tokens
        return Draft.of(torch.from_numpy(table).to(context.tokens.device), counts)

    def _count(self, place: int, text: np.ndarray) -> None:
        """Count what follows each ending, as far as this row was not read yet."""
        first, tokens = int(self.read[place]), text.tolist()
        for at in range(max(first, 1), len(tokens)):
            for size in range(1, min(self.longest, at) + 1):
                self.followed[tuple(tokens[at - size : at])][tokens[at]] += 1
        self.read[place] = len(tokens)
        if len(self.followed) > KNOWN:
            self.followed, self.followed_before = defaultdict(Counter), self.followed

    def _continuation(self, text: np.ndarray, most: int) -> list[int]:
        ending, chance = text[-self.longest :].tolist(), 1.0
        found: list[int] = []
        while len(found) < most:
            known = next((after for size in range(len(ending)) if (after := self._after(ending[size:]))), None)
            if known is None:
                break
            token, times = known.most_common(1)[0]
            chance *= times / known.total()
            if chance < self.least:
                break
            found.append(token)
            ending = [*ending, token][-self.longest :]
        return found

    def _after(self, ending: list[int]) -> Counter[int] | None:
        known = tuple(ending)
        return self.followed.get(known) or self.followed_before.get(known)
