"""The text of each token, by tokenizers of both kinds."""

import pytest
import tokenizers
from tiny import byte_tokenizer
from transformers import PreTrainedTokenizerFast

import bass_core as bass
from bass_lab.texts.pieces import bytes_of, pieces_of


def sentence_piece() -> PreTrainedTokenizerFast:
    """Return a tokenizer as Llama 2 has it: byte fallback, and a decoder that strips the first space."""
    names = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581a", "\u2581b"]
    merges = [("\u2581", "a"), ("\u2581", "b")]
    bpe = tokenizers.models.BPE(
        {name: index for index, name in enumerate(names)}, merges, unk_token="<unk>", byte_fallback=True
    )
    made = tokenizers.Tokenizer(bpe)
    made.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")]
    )
    parts = [
        tokenizers.decoders.Replace("\u2581", " "),
        tokenizers.decoders.ByteFallback(),
        tokenizers.decoders.Fuse(),
        tokenizers.decoders.Strip(" ", 1, 0),
    ]
    made.decoder = tokenizers.decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>")


TOKENIZERS = {"bytes": byte_tokenizer(), "sentence piece": sentence_piece(), "embedded": bass.load_pair().tokenizer}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_pieces_join_to_the_text(kind):
    tokenizer = TOKENIZERS[kind]
    for text in ("a b a", "a b 😀 a", "日本 a", "  a  b", "é", ""):
        ids = tokenizer(text)["input_ids"]
        pieces = pieces_of(ids, tokenizer)
        assert "".join(pieces) == tokenizer.decode(ids) and len(pieces) == len(ids)
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_character_comes_with_its_last_token(kind):
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer("a😀a")["input_ids"]
    first = next(index for index, token in enumerate(ids) if "\ufffd" in tokenizer.decode([token]))
    parts = ids[first : first + 4]
    assert pieces_of(ids, tokenizer)[first : first + 5] == ["", "", "", "😀", "a"]
    assert bytes(byte for token in parts for byte in bytes_of(token, tokenizer)).decode() == "😀"


def test_special_tokens_add_nothing():
    tokenizer = TOKENIZERS["bytes"]
    ids = tokenizer("ab")["input_ids"]
    assert pieces_of([ids[0], tokenizer.eos_token_id, ids[1]], tokenizer) == ["a", "", "b"]
