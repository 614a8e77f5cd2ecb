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
        """Return the grammar with a state. Raises ValueError for a wrong grammar, and without tokenizer or EOS id."""
        if row.tokenizer is None or not row.ends:
            missing = "a tokenizer" if row.tokenizer is None else "an EOS id, but the row has none or ignores it"
            raise ValueError(f"a grammar needs {missing}")
        known = _tokenizers.setdefault(row.tokenizer, {})
        if (key := (row.vocabulary, *sorted(row.ends))) not in known:
            made = _llguidance().hf.from_tokenizer(row.tokenizer, n_vocab=row.vocabulary, eos_token=[*key[1:]])
            known[key] = made
        return _OfRow(_compiled(self.source, known[key]).deep_copy(), -(-row.vocabulary // 32))


@functools.lru_cache(maxsize=64)
def _compiled(source: str, tokenizer: Any) -> Any:
    """Return a matcher for the grammar. Large grammars take up to a second."""
    matcher = _llguidance().LLMatcher(tokenizer, source, log_level=0)
    if matcher.is_error():
        raise ValueError(f"the grammar is not valid: {matcher.get_error().strip()[:300]}")
    return matcher


class _OfRow(Processor):
    """A grammar with the state after one text. The state moves to other texts by their common prefix."""

    fixed = False

    def __init__(self, matcher: Any, words: int):
        self.matcher, self.words = matcher, words
        self.consumed: list[int] = []  # the ids before the state

    def __call__(self, logits: Tensor, text: Text) -> Tensor:
        (prefixes,), (prompt,) = text.prefixes(logits.shape[1]), text.prompts.tolist()
        masks = torch.full((len(prefixes), self.words), -1, dtype=torch.int32, device="cpu")
        for mask, prefix in zip(masks, prefixes, strict=True):
            if self._go_to(prefix[prompt:]):
                self.matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.nbytes)
            elif self.matcher.is_error():  # beyond the library's limits
                mask.zero_()
        bits = (masks[..., None] >> torch.arange(32, dtype=torch.int32)) & 1  # [J, words, 32]
        allowed = bits.flatten(1)[:, : logits.shape[-1]].bool().to(logits.device)
        return logits.masked_fill(~allowed, -torch.inf)

    def _go_to(self, ids: list[int]) -> bool:
        """Move the state behind these ids. Return False if they contain an impossible draft token or follow the end of
        the text. Such a position is never used, and all ids stay possible."""
        common = min(len(ids), len(self.consumed))
        while ids[:common] != self.consumed[:common]:
            common -= 1
        if back := len(self.consumed) - common:
            self.matcher.rollback(back)
        taken = self.matcher.try_consume_tokens(ids[common:])
        self.consumed = ids[: common + taken]
        return len(self.consumed) == len(ids)
