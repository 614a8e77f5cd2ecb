"""Incremental text with four kinds of tokenizers: byte-level BPE, byte fallback, WordPiece, Unigram."""

import random

import pytest
from kinds_of_tokenizers import KINDS

from bass_core.detokenizer import FinalText, StopFinder, StopStrings
from bass_core.options import stop_strings

WORDS = ["a", " the cat", "日本 é😀", "."]


def random_ids(tokenizer, generator: random.Random, length: int) -> list[int]:
    ids, bytes_of = [], {}
    words = [tokenizer(word, add_special_tokens=False)["input_ids"] for word in WORDS]
    for index in range(len(tokenizer)):
        name = tokenizer.convert_ids_to_tokens(index)
        if name and name.startswith("<0x"):
            bytes_of[int(name[3:5], 16)] = index
    while len(ids) < length:
        kind = generator.randrange(4)
        if kind == 0:
            ids.append(generator.randrange(len(tokenizer) + 2))  # also beyond the vocabulary
        elif kind == 1:
            ids.append(tokenizer.eos_token_id)
        elif kind == 2:
            ids += generator.choice(words)
        elif bytes_of:
            run = "é日😀\n".encode()[: generator.randrange(10)]
            ids += [bytes_of[each] for each in run]
    return ids[:length]


def decoded(tokenizer, ids) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_and_token_texts_join_to_the_text(kind):
    tokenizer, generator = KINDS[kind], random.Random(0)
    pieces = 0
    for length in [1, 2, 3, 5, 9] * 40 + [150] * 8:
        ids = random_ids(tokenizer, generator, length)
        text, streamed = FinalText(tokenizer), []
        for index, token in enumerate(ids, 1):
            streamed.append(text.feed([token]))
            assert decoded(tokenizer, ids).startswith("".join(streamed)), (ids, index)
        pieces += sum(map(bool, streamed))
        assert "".join(streamed) + text.feed(ended=True) == decoded(tokenizer, ids), ids
        texts = FinalText(tokenizer).token_texts(ids, ended=True)
        assert (len(texts), "".join(texts)) == (len(ids), decoded(tokenizer, ids)), ids
    assert pieces > 100  # text arrives before the end of the row


@pytest.mark.parametrize("kind", KINDS)
def test_row_ends_at_the_first_token_with_a_stop_string(kind):
    """The result does not depend on step sizes. A match counts even if the next token would change the text."""
    tokenizer, generator = KINDS[kind], random.Random(1)
    found = 0
    for _ in range(60):
        ids = random_ids(tokenizer, generator, 60)
        whole = decoded(tokenizer, ids)
        begin = generator.randrange(max(1, len(whole) - 3))
        stops = (whole[begin : begin + generator.randrange(1, 5)] or "x", "the c", "\ufffd\ufffd")
        stop = StopStrings(stops, tokenizer)
        counts = range(1, len(ids) + 1)
        expected = next((n for n in counts if any(each in decoded(tokenizer, ids[:n]) for each in stops)), None)
        finder = StopFinder(stop)
        for sizes in ([1] * 60, [60], [3] * 20, [5, 1, 7, 2, 9, 4, 32]):
            at, end = 0, None
            for size in sizes:
                if (end := finder.completed_at(ids[:at], ids[at : at + size])) is not None:
                    end += at
                    break
                at += size
            assert end == expected, (ids, stops, sizes)
        row, text = ids[:expected], FinalText(tokenizer, stop)
        streamed = [text.feed([token]) for token in row[:-1]] + [text.feed(row[-1:], ended=True)]
        texts = FinalText(tokenizer, stop).token_texts(row, ended=True)
        assert "".join(streamed) == "".join(texts) == stop.cut(decoded(tokenizer, row)), (row, stops)
        found += expected is not None
    assert found > 20


def test_characters_belong_to_their_last_token():
    tokenizer = KINDS["byte fallback"]
    ids = tokenizer.convert_tokens_to_ids(["\u2581a", "<0xC3>", "<0xA9>", "</s>", "\u2581the", "\u2581cat"])

    def texts(ids, *stops):
        return FinalText(tokenizer, StopStrings(stops, tokenizer)).token_texts(ids, ended=True)

    assert texts(ids) == ["a", "", "é", "", " the", " cat"]
    assert texts(ids[:2]) == ["a", "\ufffd"]
    assert texts(ids[:5], " th") == ["a", "", "é"]
    assert texts(ids, "ca")[-2:] == [" the", " "]


@pytest.mark.parametrize("kind", KINDS)
def test_work_per_token_does_not_grow_with_the_row(kind, monkeypatch):
    tokenizer = KINDS[kind]
    ids = random_ids(tokenizer, random.Random(2), 1500) + [tokenizer.eos_token_id] * 1500
    ids += tokenizer(" " * 500 + "a", add_special_tokens=False)["input_ids"]
    decode, lengths = tokenizer.decode, []
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **options: lengths.append(len(ids)) or decode(ids, **options))
    finder = StopFinder(stop_strings("absent", tokenizer))
    for index, token in enumerate(ids):
        finder.completed_at(ids[:index], [token])
    assert sum(lengths) < 150 * len(ids)
