"""Processors: deterministic functions of a row's own tokens that change the logits of the next token.

Target and draft logits are processed alike, at every committed and drafted position, before temperature, top-k, top-p
and min-p. Exactness refers to the processed target distribution. A processor computes from the tokens before a position
alone, so a rejected draft token leaves no trace.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from bass_core.checks import integer
from bass_core.exactness.sampling import one_hot, require_number, wide

# Beginnings of the names of transformers' processors that depend on other rows, run models, or keep state.
BY_BATCH = (
    "AlternatingCodebooks", "ClassifierFree", "Dia", "Encoder", "HammingDiversity", "PrefixConstrained", "SynthID",
    "UnbatchedClassifierFree", "WhisperNoSpeech",
)  # fmt: skip
LARGEST = 1e30  # of a penalty or bias; sums stay within float32


class Text(NamedTuple):
    """The texts of n rows before J positions. The first D + 1 - J + j draft tokens precede position j."""

    tokens: Tensor  # int64 [n, S], committed tokens from position 0
    lengths: Tensor  # int64 [n], committed tokens, prompt included
    prompts: Tensor  # int64 [n], tokens of the prompt
    drafted: Tensor  # int64 [n, D]

    def of(self, rows: Tensor) -> Text:
        """Return the texts of the rows with these indices, int64 [m]."""
        return Text(*(part[rows] for part in self))

    def generated(self, positions: int) -> Tensor:
        """Return the number of tokens after the prompt before each of J positions: int64 [n, J]."""
        last = (self.lengths - self.prompts)[:, None] + self.drafted.shape[1]
        return last + torch.arange(1 - positions, 1, device=last.device)

    def counts(self, positions: int, vocabulary: int, first: Tensor | int, once: bool = False) -> Tensor:
        """Return the occurrences of each id before each of J positions, from token `first` on: int64 [n, J, V]. once:
        committed tokens count at most once, by an operator that is deterministic on GPUs."""
        at = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        ids = self.tokens.where((at >= first) & (at < self.lengths[:, None]), vocabulary)  # [n, S]
        counts = torch.zeros(len(ids), vocabulary + 1, dtype=torch.int64, device=at.device)
        counts = counts.scatter(1, ids, 1) if once else counts.scatter_add(1, ids, torch.ones_like(ids))
        counts = counts[:, None, :-1]  # [n, 1, V]
        if self.drafted.shape[1] == 0:
            return counts
        drafted = one_hot(self.drafted, vocabulary).long().cumsum(1)  # [n, D, V]
        return counts + F.pad(drafted, (0, 0, 1, 0))[:, -positions:]

    def prefixes(self, positions: int, prompt: bool = True) -> list[list[list[int]]]:
        """Return the ids before each of J positions of each row, with or without the prompt, on the host."""
        found, first, tokens = [], self.drafted.shape[1] + 1 - positions, self.tokens.cpu()
        parts = (tokens, self.prompts.tolist(), self.lengths.tolist(), self.drafted.tolist())
        for row, start, length, drafted in zip(*parts, strict=True):
            ids = row[0 if prompt else start : length].tolist()
            found.append([ids + drafted[:count] for count in range(first, first + positions)])
        return found


class Row(NamedTuple):
    """The request that `Processor.begin` receives. prompt: number of tokens. ends: ids that end the row, and the finish
    reasons."""

    prompt: int
    ends: Mapping[int, str]
    vocabulary: int
    tokenizer: PreTrainedTokenizerBase | None


class Processor:
    """Changes the logits of a row by the row's tokens. Equal processors of several rows are called once for all.

    until: the processor has no effect from so many generated tokens on. None: no limit.
    fixed: True if the result depends only on tensors, so that a CUDA graph may capture the call.
    """

    until: int | None = None
    fixed: ClassVar[bool] = True

    def begin(self, row: Row) -> Processor:
        """Return the processor of a request. Raises ValueError if the processor does not fit the request."""
        return self

    def __call__(self, logits: Tensor, text: Text) -> Tensor:
        """Return the changed logits of the text's J positions. logits: float [n, J, V], not to be written into."""
        return logits


@dataclass(frozen=True)
class Penalties(Processor):
    """Penalties for repeated ids. repetition > 1 lowers the logits of all ids in prompt and text (Keskar et al. 2019).
    presence and frequency are subtracted from the logits of the ids in the text without the prompt, once and per
    occurrence. Raises TypeError or ValueError for other values than numbers in range."""

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    def __post_init__(self):
        accepted = f"> 0 (1 = off), and from {1 / LARGEST} to {LARGEST}"
        require_number("repetition_penalty", self.repetition, lambda by: 1 / LARGEST <= by <= LARGEST, accepted)
        for name in ("presence", "frequency"):
            accepted = f"from {-LARGEST} to {LARGEST} (0 = off)"
            require_number(f"{name}_penalty", getattr(self, name), lambda by: abs(by) <= LARGEST, accepted)

    def __call__(self, logits: Tensor, text: Text) -> Tensor:
        if self.repetition != 1:
            seen = text.counts(*logits.shape[1:], first=0, once=True) > 0
            penalised = torch.where(logits < 0, logits * self.repetition, logits / self.repetition)
            logits = torch.where(seen, penalised, logits)
        if self.presence or self.frequency:
            counts = text.counts(*logits.shape[1:], first=text.prompts[:, None])
            logits = logits - self.frequency * counts - self.presence * (counts > 0)
        return logits


class Bias(Processor):
    """Adds values to the logits of ids; -inf suppresses an id. until: only the text's first tokens are changed. Raises
    TypeError or ValueError for other values, and ValueError for ids outside the vocabulary."""

    def __init__(self, values: Mapping[int, float], until: int | None = None):
        for each, value in values.items():
            integer("a token id of a bias", each)
            if value != -math.inf:
                require_number(
                    f"the bias of id {each}", value, lambda by: abs(by) <= LARGEST, f"-inf or within ±{LARGEST}"
                )
        self.values, self.until = tuple(sorted((each, float(value)) for each, value in values.items())), until
        self._added: dict[tuple, Tensor] = {}  # kept, since a captured CUDA graph reads this memory

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bias) and (self.values, self.until) == (other.values, other.until)

    def __hash__(self) -> int:
        return hash((self.values, self.until))

    def begin(self, row: Row) -> Processor:
        if wrong := [each for each, _ in self.values if each >= row.vocabulary]:
            raise ValueError(
                f"a bias has the token id {wrong[0]}, outside the target's vocabulary (0 … {row.vocabulary - 1})"
            )
        return self

    def __call__(self, logits: Tensor, text: Text) -> Tensor:
        if not self.values:
            return logits
        key = logits.device, logits.shape[-1]
        if key not in self._added:
            ids, values = (torch.tensor(each, device=key[0]) for each in zip(*self.values, strict=True))
            self._added[key] = torch.zeros(key[1], dtype=torch.float32, device=key[0]).index_put((ids,), values.float())
        changed = logits + self._added[key]
        if self.until is None:
            return changed
        return torch.where((text.generated(logits.shape[1]) < self.until)[..., None], changed, logits)


@dataclass(frozen=True)
class MinTokens(Processor):
    """Suppresses the ids that end a row until `n` tokens are generated."""

    n: int

    def __post_init__(self):
        integer("MinTokens", self.n)

    def begin(self, row: Row) -> Processor:
        return suppressing(row.ends, until=self.n)


def suppressing(ids: Iterable[int], until: int | None = None) -> Bias:
    """Return the processor that suppresses ids, in the first `until` tokens or in the whole text."""
    return Bias(dict.fromkeys(ids, -math.inf), until)


@dataclass(frozen=True)
class ForceFirst(Processor):
    """Forces the token after a prompt of a single token, as transformers forces a first token."""

    token: int
    until: int = 1

    def begin(self, row: Row) -> Processor:
        return self if row.prompt == 1 else Bias({})

    def __call__(self, logits: Tensor, text: Text) -> Tensor:
        forced = one_hot(torch.tensor(self.token, device=logits.device), logits.shape[-1]).to(logits.dtype).log()
        return torch.where((text.generated(logits.shape[1]) < 1)[..., None], forced, logits)


@dataclass(frozen=True)
class OwnRow(Processor):
    """A `LogitsProcessor` of transformers, called with ids [1, T] and logits [1, V] of one row and position at a time.
    The result must depend on these alone. padding: id that fills prompts on the left up to `width` tokens."""

    processor: LogitsProcessor
    padding: int = 0
    width: int = 0
    fixed = False

    def __post_init__(self):
        if (kind := type(self.processor).__name__).startswith(BY_BATCH):
            raise ValueError(f"the logits processor {kind} depends on the batch or keeps state; leave it out")

    def __call__(self, logits: Tensor, text: Text) -> Tensor:
        rows = []
        for row, prefixes, prompt in zip(logits, text.prefixes(logits.shape[1]), text.prompts.tolist(), strict=True):
            left = [self.padding] * (self.width - prompt)
            ids = (torch.tensor([left + prefix], device=logits.device) for prefix in prefixes)
            rows.append(
                torch.cat([self.processor(each, one[None].clone()) for each, one in zip(ids, row, strict=True)])
            )
        return torch.stack(rows).to(logits.dtype)


def as_processors(given: Iterable[Processor | LogitsProcessor]) -> tuple[Processor, ...]:
    """Return processors of transformers as `OwnRow`, and others unchanged. Raises TypeError for other objects."""
    if isinstance(given, Processor | LogitsProcessor):
        raise TypeError(f"processors must be a list, got {given!r}; write processors=[…]")
    found = []
    for each in given:
        if not isinstance(each, Processor | LogitsProcessor):
            raise TypeError(
                f"processors must be a list of bass.Processor or transformers.LogitsProcessor objects, got {each!r}"
            )
        if type(each).__hash__ is None:
            raise TypeError(f"a processor must be hashable, got {each!r}; write @dataclass(frozen=True)")
        found.append(each if isinstance(each, Processor) else OwnRow(each))
    return tuple(found)


class Processing:
    """The processors of a batch."""

    def __init__(
        self, own: Sequence[Sequence[Processor]], generated: np.ndarray, vocabulary: int, device: torch.device
    ):
        """own: the processors of each row. generated: int [B], generated tokens of each row."""
        stages: dict[tuple[int, Processor], list[int]] = {}
        for row, each in enumerate(own):
            active = (one for one in each if one.until is None or generated[row] < one.until)
            for stage, processor in enumerate(active):
                stages.setdefault((stage, processor), []).append(row)
        self.vocabulary = vocabulary
        self.stages = [  # processors in order, and the indices of their rows, None for all rows
            (processor, None if len(rows) == len(own) else torch.tensor(rows, device=device))
            for (_, processor), rows in sorted(stages.items(), key=lambda each: each[0][0])
        ]

    def is_fixed(self, processors: Sequence[Processor]) -> bool:
        """Return True if exactly these processors apply to all rows, and may be captured in a CUDA graph."""
        whole = all(rows is None and each.fixed for each, rows in self.stages)
        return whole and [each for each, _ in self.stages] == processors

    def __call__(self, logits: Tensor, text: Text) -> tuple[Tensor, Tensor]:
        """Return the processed logits [B, J, V], and bool [B, J], False where no id is possible. Logits are unchanged
        there. logits: [B, J, W <= V]; missing ids are impossible."""
        given = F.pad(wide(logits), (0, self.vocabulary - logits.shape[-1]), value=-torch.inf)
        found = given
        for processor, rows in self.stages:
            if rows is None:
                found = processor(found, text)
            else:
                found = found.index_copy(0, rows, processor(found[rows], text.of(rows)).to(found.dtype))
        possible = found.amax(-1) > -torch.inf  # [B, J]
        return torch.where(possible[..., None], found, given), possible
