"""One small tokenizer of each kind: byte-level BPE, byte fallback, WordPiece, Unigram."""

import tokenizers
from tiny import byte_tokenizer
from tokenizers import decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

import bass_core as bass

WORDS = ["\u2581", "a", "b", "\u2581the", "\u2581cat", "\u2581a", ".", "\u2581b", "\n", "é"]


def made(model, decoder, **special) -> PreTrainedTokenizerFast:
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.decoder = decoder
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>", **special)


def byte_fallback() -> PreTrainedTokenizerFast:
    """Return a tokenizer like Llama 2's: it decodes runs of byte tokens as a whole and strips the first space."""
    names = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    model = models.BPE({name: index for index, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True)
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return made(model, decoders.Sequence(parts))


def word_piece() -> PreTrainedTokenizerFast:
    words = ["<unk>", "</s>", "a", "##b", ".", "c", "'", "##'", "s", "n", "t", "n't", "##ing", "the", "##\ufffd", "##é"]
    model = models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    return made(model, decoders.WordPiece(), clean_up_tokenization_spaces=True)


def unigram() -> PreTrainedTokenizerFast:
    words = [("<unk>", 0.0), ("</s>", 0.0), *((word, -1.0) for word in WORDS)]
    return made(models.Unigram(words, unk_id=0), decoders.Metaspace())


KINDS = {
    "byte level": byte_tokenizer(),
    "embedded": bass.load_pair().tokenizer,
    "byte fallback": byte_fallback(),
    "word piece": word_piece(),
    "unigram": unigram(),
}
