import pytest
import torch
from tiny import tiny_model

import bass_core as bass
from bass_core.loading import model_pair
from bass_lab.lessons import settings


def tiny_pair(dtype):
    return bass.ModelPair(tiny_model(dtype=dtype), tiny_model(dtype=dtype, noise=0.1))


def test_embedded_pair_is_float32_by_default():
    pair = settings.load_pair("", "", None, None)
    assert pair.target.dtype == pair.draft.dtype == torch.float32 and settings.is_exact(pair)
    half = settings.load_pair("", "", "bfloat16", "cpu")
    assert half.target.dtype == half.draft.dtype == torch.bfloat16 and not settings.is_exact(half)


@pytest.mark.parametrize(("target", "dtype"), [(model_pair.READER, "float32"), ("somebodys/model", None)])
def test_other_models_keep_the_dtype_of_their_checkpoint(monkeypatch, target, dtype):
    given = []
    monkeypatch.setattr(model_pair, "load_pair", lambda *_, **options: given.append(options["dtype"]))
    settings.load_pair(target, "", None, "cuda")
    assert given == [dtype]


def test_float32_rows_must_be_identical_and_others_are_counted():
    pair = tiny_pair("float32")
    assert settings.identity(3, 3, pair, "that") == "3 of 3 rows are identical to that"
    with pytest.raises(AssertionError, match="2 of 3 rows are identical to that; in float32 all rows must be"):
        settings.identity(2, 3, pair, "that")
    told = settings.identity(2, 3, tiny_pair("bfloat16"), "that")
    assert told.startswith("2 of 3 rows are identical to that (in bfloat16, rounding can change close calls")
