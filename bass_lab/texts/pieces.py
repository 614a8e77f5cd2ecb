"""Convert tokens to the pieces of text that they add."""

from __future__ import annotations

from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase

from bass_core.detokenizer import FinalText


def pieces_of(tokens: Iterable[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the text that each token adds. The joined pieces equal the decoded text."""
    return FinalText(tokenizer).token_texts(list(tokens), ended=True)


# Byte-level tokenizers write each byte as a character: printable bytes unchanged, other bytes from 256 on.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + number): byte for number, byte in enumerate(_OTHERS)}


def bytes_of(token: int, tokenizer: PreTrainedTokenizerBase) -> list[int] | None:
    """Return the bytes of a token with part of a character, or None for an unknown kind of token."""
    name = tokenizer.convert_ids_to_tokens(int(token))
    if name.startswith("<0x") and name.endswith(">"):  # a byte in SentencePiece
        return [int(name[3:-1], 16)]
    return [BYTES[each] for each in name] if all(each in BYTES for each in name) else None
