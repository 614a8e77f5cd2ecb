"""The text that each token adds to a text."""

from __future__ import annotations

from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase


class Pieces:
    """Of the tokens of one text, one after the other. Special tokens add nothing, and a character that is split over
    tokens comes with the last of them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = self._read = 0  # what is added is seen behind some tokens: alone, many would lose their space

    def add(self, token: int) -> str:
        """What this token adds."""
        self._ids.append(int(token))
        before, text = self._text(self._read), self._text(len(self._ids))
        if text.endswith("\ufffd"):  # bytes of a character that is not complete
            return ""
        self._context, self._read = self._read, len(self._ids)
        return text[len(before) :]

    def _text(self, end: int) -> str:
        return self._tokenizer.decode(self._ids[self._context : end], skip_special_tokens=True)


def pieces_of(tokens: Iterable[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What each token adds."""
    pieces = Pieces(tokenizer)
    return [pieces.add(token) for token in tokens]


# Byte-level tokenizers write each byte as a character: printable ones as themselves, the others from 256 on.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + number): byte for number, byte in enumerate(_OTHERS)}


def bytes_of(token: int, tokenizer: PreTrainedTokenizerBase) -> list[int] | None:
    """The bytes of a token that holds part of a character; None where its tokenizer does not say."""
    name = tokenizer.convert_ids_to_tokens(int(token))
    if name.startswith("<0x") and name.endswith(">"):  # as SentencePiece writes a byte
        return [int(name[3:-1], 16)]
    return [BYTES[each] for each in name] if all(each in BYTES for each in name) else None
