"""Texts of a grammar, such as JSON by a schema, by the library llguidance (`pip install '.[grammar]'`)."""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from bass_core.exactness.processors import Processor, Row, Text

JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as json.dumps writes
_tokenizers: weakref.WeakKeyDictionary[PreTrainedTokenizerBase, dict] = weakref.WeakKeyDictionary()


@functools.cache
def _llguidance() -> Any:
    try:
        import llguidance.hf
    except ImportError as error:
        raise ImportError("a Grammar needs the package llguidance: pip install '.[grammar]' in the checkout") from error
    return llguidance


@dataclass(frozen=True)
class Grammar(Processor):
    """Allows only ids that continue a text of the grammar, and an EOS id after a whole text. `Grammar.json`,
    `Grammar.regex` and `Grammar.lark` make grammars. The row needs a tokenizer and an EOS id."""

    source: str
    fixed: ClassVar[bool] = False

    @classmethod
    def json(cls, schema: Mapping[str, Any] | None = None) -> Grammar:
        """Return the grammar of JSON by a JSON schema, written as by `json.dumps`. None: any JSON object."""
        schema = json.dumps({"type": "object"} if schema is None else schema)
        return cls(_llguidance().LLMatcher.grammar_from_json_schema(schema, defaults=JSON))

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Return the grammar of the texts that a regular expression (Rust's syntax) matches as a whole."""
        return cls(_llguidance().LLMatcher.grammar_from_regex(pattern))

    @classmethod
    def lark(cls, rules: str) -> Grammar:
        """Return a context-free grammar in Lark's syntax, with the rule `start`."""
        return cls(_llguidance().LLMatcher.grammar_from_lark(rules))

    def begin(self, row: Row) -> Processor:
        """Return the grammar with a state. Raises ValueError for a wrong grammar, for a grammar without texts, and
        without tokenizer or EOS id."""
        eos = tuple(sorted(each for each, reason in row.ends.items() if reason == "eos"))
        if row.tokenizer is None or not eos:
            missing = "a tokenizer" if row.tokenizer is None else "an EOS id, but the row has none or ignores it"
            raise ValueError(f"a grammar needs {missing}")
        known = _tokenizers.setdefault(row.tokenizer, {})
        if (key := (row.vocabulary, eos)) not in known:
            known[key] = _llguidance().hf.from_tokenizer(row.tokenizer, n_vocab=row.vocabulary, eos_token=[*eos])
        return _OfRow(self.source, known[key])


class _OfRow(Processor):
    """A grammar with the state after one text. The state moves to other texts by their common prefix."""

    fixed = False

    def __init__(self, source: str, tokenizer: Any):
        self.source, self.tokenizer, self.words = source, tokenizer, -(-tokenizer.vocab_size // 32)
        self.ends = frozenset(tokenizer.eos_tokens)
        self.consumed: list[int] | None = None  # the ids before the state; None if the state is unknown
        if not self._mask([]).any():
            raise ValueError(f"the grammar is not valid, or has no texts: {self.matcher.get_error().strip()[:300]}")

    def __call__(self, logits: Tensor, text: Text) -> Tensor:
        (texts,), follows = text.prefixes(logits.shape[1], prompt=False), True
        masks: list[Tensor] = []  # int32 [words] each: the ids that may follow, as bits
        for ids in texts:
            follows &= self.ends.isdisjoint(ids) and (not masks or bool(masks[-1][ids[-1] // 32] >> ids[-1] % 32 & 1))
            # No decision depends on positions after an impossible draft token, or after the end of the text.
            masks.append(self._mask(ids) if follows else torch.full((self.words,), -1, dtype=torch.int32, device="cpu"))
        bits = (torch.stack(masks)[..., None] >> torch.arange(32, dtype=torch.int32, device="cpu")) & 1
        allowed = bits.flatten(1)[:, : logits.shape[-1]].bool().to(logits.device)  # [J, V]
        return logits.masked_fill(~allowed, -torch.inf)

    def _mask(self, ids: list[int]) -> Tensor:
        """Return the ids that may follow a text of the grammar, as bits: int32 [words]. Beyond the library's limits, no
        id may follow."""
        mask = torch.zeros(self.words, dtype=torch.int32, device="cpu")
        if self._go_to(ids) or self._go_to(ids):
            self.matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.nbytes)
        if self.matcher.is_error():  # final for this matcher
            self.consumed = None
            mask.zero_()
        return mask

    def _go_to(self, ids: list[int]) -> bool:
        """Move the state behind these ids. Return False if the matcher refuses them: near the limits, its state can be
        wrong after a rollback, and the next call begins anew."""
        consumed, self.consumed = self.consumed, None  # unknown if an interrupt comes between
        if consumed is None:
            self.matcher, consumed = _llguidance().LLMatcher(self.tokenizer, self.source, log_level=0), []
        common = min(len(ids), len(consumed))
        while ids[:common] != consumed[:common]:
            common -= 1
        if back := len(consumed) - common:
            self.matcher.rollback(back)
        taken = self.matcher.try_consume_tokens(ids[common:]) == len(ids) - common
        self.consumed = ids if taken else None
        return taken
