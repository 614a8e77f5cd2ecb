"""Incremental detokenization: final pieces of text for streams, the text of each token, and stop strings.

Decoding is not prefix-stable. A tokenizer with byte fallback decodes a run of byte tokens as a whole. A byte-level
tokenizer needs all bytes of a character. Some tokenizers remove a space before a full stop. `FinalText` releases the
text of a token when no later token can change the text.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # name of a byte token in a vocabulary with byte fallback
PARTIAL = "\ufffd"  # ends a text that ends within a character
CLEANED = 6  # characters of the longest string that a tokenizer's clean-up changes: " n ' t"
WINDOW, CONTEXT = 32, 8  # tokens decoded together; final tokens that stay when the window moves
LOST = 2  # leading spaces of a text that a tokenizer may remove
LONGEST_GROUP = 256  # tokens; in a longer run of byte tokens, the last token has the whole text

# By tokenizer and special tokens: id -> "text", "byte", or None for tokens without text
_kinds: weakref.WeakKeyDictionary[PreTrainedTokenizerBase, dict[tuple, dict[int, str | None]]]
_kinds = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class StopStrings:
    """Stop strings of a row. special: ids of special tokens among the strings. Texts do not show special tokens."""

    stop: tuple[str, ...]
    tokenizer: PreTrainedTokenizerBase
    special: frozenset[int] = frozenset()

    def find(self, text: str, start: int = 0) -> int | None:
        """Return the index of the first stop string from `start` on, or None."""
        return min((at for string in self.stop if (at := text.find(string, start)) >= 0), default=None)

    def cut(self, text: str) -> str:
        """Return the text before the first stop string."""
        return text[: self.find(text)]

    def held(self, text: str) -> int:
        """Return the length of the longest suffix of a text that is a prefix of a stop string."""
        longest = 0
        for string in self.stop:
            at = text.find(string[0], max(0, len(text) - len(string) + 1))
            while at >= 0 and not string.startswith(text[at:]):
                at = text.find(string[0], at + 1)
            longest = max(longest, len(text) - at if at >= 0 else 0)
        return longest


class FinalText:
    """Detokenizes one row incrementally. The joined pieces are `Result.text`.

    The last characters are held back while later tokens may change them: bytes of an incomplete character, a run of
    byte tokens, spaces that the tokenizer may clean up, or the beginning of a stop string. Takes linear time in the
    number of tokens. For a row of a `Session`:

        text = FinalText(pair.tokenizer, handle.stop)
        piece = text.feed(new_tokens, ended=handle.finish_reason is not None)  # after each step that moved the row
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: StopStrings | None = None):
        self._tokenizer, self._stop = tokenizer, stop
        self._cleans_up = tokenizer.decode(tokenizer("a .", add_special_tokens=False)["input_ids"]) != "a ."
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._hidden = {*tokenizer.all_special_ids, *(index for index, token in added.items() if token.special)}
        self._kinds = _kinds.setdefault(tokenizer, {}).setdefault((len(tokenizer), *sorted(self._hidden)), {})
        self._window: list[int] = []  # the last tokens; later text does not depend on earlier tokens
        self._closed = 0  # tokens of the window up to the last text token, which ends runs of byte tokens
        self._released = 0  # tokens of the window with texts already returned
        self._end = 0  # characters of the window's text already returned
        self._in_run = False  # True if the last token is a byte token
        self.stopped = False  # True if the text contains a stop string

    def feed(self, ids: Sequence[int] = (), ended: bool = False) -> str:
        """Add tokens and return the new final text. ended: no token follows; then all text is final.

        Use either this method or `token_texts` for all tokens of a row.
        """
        grown = self._extend(ids)
        if self.stopped or not (grown or ended):
            return ""
        text, final = self._read(ended)
        piece, self._end = text[self._end : final], max(self._end, final)
        self._released = self._closed
        self._move(text, ended)
        return piece

    def token_texts(self, ids: Sequence[int] = (), ended: bool = False) -> list[str]:
        """Add tokens and return the texts of the next tokens, as far as final. The joined texts are the row's text.

        A character of several tokens belongs to the last token. Special tokens have the text "". Tokens of the stop
        string at the end of the row have no text; the joined lists are then shorter than the row.
        """
        texts: list[str] = []
        for token in ids:
            texts += self._release() if self._extend([token]) else []
        return texts + self._release(ended=True) if ended else texts

    def look_ahead(self) -> bool:
        """Return True if the text contains a stop string under the assumption that no token follows."""
        if not self.stopped and self._stop and self._in_run:
            return self._stop.find(self._decode(len(self._window)), self._end) is not None
        return self.stopped

    def _extend(self, ids: Sequence[int]) -> bool:
        """Add tokens to the window. Return True if text may have become final."""
        before = self._closed
        for token in map(int, ids):
            self._window.append(token)
            if token not in self._kinds:
                name = None if token in self._hidden else self._tokenizer.convert_ids_to_tokens(token)
                self._kinds[token] = name and ("byte" if BYTE.fullmatch(name) else "text")
            self._in_run = self._kinds[token] == "byte"
            if self._kinds[token] == "text":  # ends a run of byte tokens
                self._closed = len(self._window)
        return self._closed > before

    def _decode(self, end: int, start: int = 0) -> str:
        return self._tokenizer.decode(self._window[start:end], skip_special_tokens=True)

    def _read(self, ended: bool) -> tuple[str, int]:
        """Return the window's text and the number of its characters that are final. Sets `stopped`."""
        text = self._decode(len(self._window) if ended else self._closed)
        found = self._stop.find(text, self._end) if self._stop else None
        self.stopped = found is not None
        final = found if found is not None else len(text) if ended else self._final(text)
        return text, final

    def _release(self, ended: bool = False) -> list[str]:
        """Return the final texts of tokens not returned yet."""
        end = len(self._window) if ended else self._closed
        if self.stopped or end == self._released:
            return []
        text, final = self._read(ended)
        texts = []
        for token_end in self._token_ends(text, end):
            if self._end >= final if self.stopped else token_end > final:
                break
            texts.append(text[self._end : min(token_end, final)])
            self._end = token_end
        self._released += len(texts)
        self._move(text, ended)
        return texts

    def _final(self, text: str) -> int:
        """Return the number of characters that no later token can change."""
        end = len(text) - text.endswith(PARTIAL)
        if self._cleans_up and (space := text.find(" ", max(0, end - CLEANED), end)) >= 0:
            end = space
        return end - (self._stop.held(text[:end]) if self._stop else 0)

    def _token_ends(self, text: str, end: int) -> list[int]:
        """Return the end in the text of each token not returned yet, up to token `end`."""
        ends, last, group = [], self._end, range(self._released + 1, end)
        for count in group:
            if len(group) < LONGEST_GROUP:
                last = max(last, _common(self._decode(count), text))
            ends.append(last)
        return [*ends, len(text)]

    def _move(self, text: str, ended: bool) -> None:
        """Drop the first tokens of a long window if the text of the remaining tokens ends like `text`."""
        if ended or len(self._window) < WINDOW:
            return
        waiting = len(text) - self._end
        for start in range(self._released - CONTEXT, max(0, self._released - 2 * CONTEXT), -1):
            rest = self._decode(self._closed, start)
            # A window may lose its first space or begin within a character. Compare only the text after these.
            whole = rest.lstrip(PARTIAL)
            whole = whole[min(LOST, len(whole) - len(whole.lstrip(" "))) :]
            if len(whole) > waiting and text.endswith(whole):
                del self._window[:start]
                self._closed, self._released = self._closed - start, self._released - start
                self._end = len(rest) - waiting
                return


def _common(first: str, second: str) -> int:
    """Return the length of the common prefix of two texts."""
    differ = (index for index, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
    return next(differ, min(len(first), len(second)))


class StopFinder:
    """Finds the token of a row that completes a stop string."""

    def __init__(self, stop: StopStrings):
        self._stop, self._count = stop, -1  # number of tokens in the text; -1 before the first step

    def completed_at(self, before: np.ndarray, new: Sequence[int]) -> int | None:
        """Return the number of `new` tokens up to the completion of a stop string, or None. `new` follows `before`.

        Tokens are checked one by one. The result therefore does not depend on the division into steps. A match ends
        the row even if the next token would undo the match (part of a character, a space before a full stop).
        """
        if len(before) != self._count:  # the first step, or a step repeated after an error
            self._text = FinalText(self._stop.tokenizer, self._stop)
            self._text.feed(before)
        self._count = len(before)
        for count, token in enumerate(new, 1):
            self._text.feed([token])
            self._count += 1
            if int(token) in self._stop.special or self._text.look_ahead():
                return count
        return None
