"""Draft tokens without a model, found in the row's own text or in all texts of a session."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor

from bass_core.drafters.protocol import Context, Draft, Drafter, Setting
from bass_core.policies.protocol import DraftLengthPolicy

KNOWN = 500_000  # endings in a table; two tables are kept, some 400 MB in total


class NgramDrafter(Drafter):
    """Drafts the continuation of the last earlier occurrence of the row's ending (prompt lookup decoding, Saxena 2023).

    The longest ending of `shortest` … `longest` tokens with an earlier occurrence is used. Rows without an earlier
    occurrence draft nothing. q is one-hot.
    """

    name = "n-gram draft"

    def __init__(self, longest: int = 3, shortest: int = 1):
        if not 1 <= shortest <= longest:
            raise ValueError(f"NgramDrafter needs 1 <= shortest <= longest, got {shortest} and {longest}")
        self.longest, self.shortest = longest, shortest

    def draft(self, context: Context, lengths: np.ndarray, policy: DraftLengthPolicy) -> Draft:
        tokens, n = context.tokens, context.lengths[:, None]  # [B, S], [B, 1]
        start = torch.zeros_like(n)  # start of the continuation; 0: no match
        for size in range(self.shortest, min(self.longest, tokens.shape[1] - 1) + 1):  # longer matches overwrite
            windows = tokens.unfold(1, size, 1)  # [B, S - size + 1, size]
            ending = tokens.gather(1, (n - size + torch.arange(size, device=n.device)).clamp(min=0))  # [B, size]
            ends = torch.arange(size, tokens.shape[1] + 1, device=n.device)  # [S - size + 1], one past each window
            found = (windows == ending[:, None]).all(-1) & (ends < n) & (n > size)
            last = (found * ends).amax(1, keepdim=True)
            start = torch.where(last > 0, last, start)
        available = torch.where(start > 0, n - start, 0)[:, 0]
        wanted = torch.minimum(torch.as_tensor(lengths, device=n.device), available)
        lengths_host = wanted.cpu().numpy()
        most = int(lengths_host.max())
        positions = (start + torch.arange(most, device=n.device)).clamp(max=tokens.shape[1] - 1)
        return Draft.of(tokens.gather(1, positions), lengths_host)


class SuffixDrafter(Drafter):
    """Drafts the most frequent continuation of the row's longest ending found in the session's texts (after
    SuffixDecoding, Oliaro et al. 2024). q is one-hot.

    Endings of up to `longest` tokens are counted. A draft continues while its probability by these counts is at least
    `least`: drafts are long if texts agree, and empty for unknown endings. Sampled text depends on drafts, and
    therefore on the session's other texts; greedy and coupled text does not. Old counts are dropped to limit memory.
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
        # Counts of the tokens after each ending, in the current and the previous table.
        mine.followed: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        mine.followed_before: dict[tuple[int, ...], Counter[int]] = {}
        mine.read = np.zeros(setting.max_rows, np.int64)  # counted tokens of each batch slot
        return mine

    def prefill(self, tokens: Tensor, lengths: Sequence[int], batch_slots: range, hidden: Tensor | None = None) -> None:
        self.read[batch_slots.start : batch_slots.stop] = 0
        for batch_slot, row, length in zip(batch_slots, tokens.cpu().numpy(), lengths, strict=True):
            self._count(batch_slot, row[:length])  # counted before other rows copy the prompt

    def move_row(self, source: int, batch_slots: range) -> None:
        self.read[batch_slots.start : batch_slots.stop] = self.read[source]

    def load_row(self, batch_slots: range, saved: list[Tensor], length: int) -> None:
        self.read[batch_slots.start : batch_slots.stop] = length  # the prompt was counted with another row

    def ended(self, batch_slot: int, tokens: np.ndarray) -> None:
        self._count(batch_slot, tokens)

    def release(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.followed.clear()
        self.followed_before.clear()

    def draft(self, context: Context, lengths: np.ndarray, policy: DraftLengthPolicy) -> Draft:
        texts = [row[:length] for row, length in zip(context.tokens_host, context.lengths_host, strict=True)]
        for batch_slot, text in zip(context.batch_slots, texts, strict=True):
            self._count(batch_slot, text)
        found = [self._continuation(text, int(length)) for text, length in zip(texts, lengths, strict=True)]
        counts = np.array([len(tokens) for tokens in found])
        table = np.zeros((len(found), counts.max()), np.int64)
        for line, tokens in zip(table, found, strict=True):
            line[: len(tokens)] = tokens
        return Draft.of(torch.from_numpy(table).to(context.tokens.device), counts)

    def _count(self, batch_slot: int, text: np.ndarray) -> None:
        """Count the tokens after each ending in the part of the row that is not counted yet."""
        first, tokens = int(self.read[batch_slot]), text.tolist()
        for at in range(max(first, 1), len(tokens)):
            for size in range(1, min(self.longest, at) + 1):
                self.followed[tuple(tokens[at - size : at])][tokens[at]] += 1
        self.read[batch_slot] = len(tokens)
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
