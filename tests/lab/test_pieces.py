import pytest
from kinds_of_tokenizers import KINDS

from bass_lab.texts.pieces import bytes_of, pieces_of


@pytest.mark.parametrize("kind", ["byte level", "byte fallback", "embedded"])
def test_character_comes_with_its_last_token(kind):
    tokenizer = KINDS[kind]
    ids = tokenizer("a😀a")["input_ids"]
    first = next(index for index, token in enumerate(ids) if "\ufffd" in tokenizer.decode([token]))
    parts = ids[first : first + 4]
    assert pieces_of(ids, tokenizer)[first : first + 5] == ["", "", "", "😀", "a"]
    assert bytes(byte for token in parts for byte in bytes_of(token, tokenizer)).decode() == "😀"
