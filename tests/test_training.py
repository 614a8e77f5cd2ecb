"""The corpus is deterministic, valid and honestly held out; training writes folders that transformers loads."""

import ast
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bass_core import corpus, training

TINY = training.Recipe(
    vocab_size=400,
    context=128,
    batch_tokens=512,
    lengths=((0.0, 64),),
    target={
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 64,
    },
)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return corpus.generated_functions(1500, seed=3)


@pytest.fixture(scope="module")
def tokenizer(texts):
    return training.train_tokenizer(texts, TINY.vocab_size, TINY.context)


def prompt_of(function: str) -> str:
    end = function.index('"""\n') + 4
    return function[:end]


def test_same_seed_gives_the_same_functions(texts):
    assert corpus.generated_functions(1500, seed=3) == texts
    assert corpus.generated_functions(1500, seed=4) != texts


def test_generated_functions_are_valid_python(texts):
    for text in texts:
        (function,) = ast.parse(text).body
        assert ast.get_docstring(function) and len(function.body) > 1


def test_generated_functions_do_what_they_say():
    tests = {
        "even": lambda x: x % 2 == 0,
        "odd": lambda x: x % 2,
        "positive": lambda x: x > 0,
        "negative": lambda x: x < 0,
    }
    sums = re.compile(
        r'"""[A-Z][a-z ]+ (?:sum of|total of|up) the (even|odd|positive|negative) \w+( in (the list )?\w+)?\.'
    )
    numbers = [1, 2, 3, 4, -6, -7, 0]
    found = 0
    for text in corpus.generated_functions(20_000, seed=1):
        if said := sums.search(text):
            scope: dict = {}
            exec(text, scope)
            assert scope[ast.parse(text).body[0].name](numbers) == sum(filter(tests[said[1]], numbers)), text
            found += 1
    assert found > 5


def test_held_out_prompts_never_occur_in_training(texts):
    prompts = corpus.function_prompts(300, seed=3)
    assert len(set(prompts)) == 300
    assert not set(prompts) & {prompt_of(text) for text in texts}
    assert all(prompt.endswith('"""\n') for prompt in prompts)


def test_the_same_thing_is_written_in_several_ways(texts):
    bodies = {}
    for text in corpus.generated_functions(20_000, seed=1):
        prompt = prompt_of(text)
        bodies.setdefault(prompt, set()).add(text[len(prompt) :])
    assert max(map(len, bodies.values())) >= 3


def test_library_prompts_come_from_held_out_modules_only():
    prompts = corpus.library_prompts(40)
    assert prompts == corpus.library_prompts(40)
    assert all(prompt.startswith("def ") and len(prompt) <= 400 for prompt in prompts)
    held_out = corpus.library_functions(held_out=True)
    assert all(any(function.startswith(prompt) for function in held_out) for prompt in prompts)
    with pytest.raises(ValueError, match="library prompts"):
        corpus.library_prompts(100_000)


def test_tokenizer_gives_any_text_back_and_adds_nothing(tokenizer, texts):
    for text in [*texts[:50], "déjà vu → 測試\t\n\n   x  , y .\r\n", ""]:
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert tokenizer.eos_token_id not in ids
    assert len(tokenizer) == TINY.vocab_size
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 0


def test_a_prompt_is_the_beginning_of_the_tokens_of_its_function(tokenizer, texts):
    for text in texts:
        begin = tokenizer(prompt_of(text))["input_ids"]
        assert tokenizer(text)["input_ids"][: len(begin)] == begin


def test_windows_are_pieces_of_the_stream(tokenizer, texts):
    windows = training.Windows(texts[:100], tokenizer)
    taken = windows.take(8, 32, torch.Generator().manual_seed(0))
    assert taken.shape == (8, 32)
    assert torch.equal(taken, windows.take(8, 32, torch.Generator().manual_seed(0)))
    assert (windows.stream == tokenizer.eos_token_id).sum() == 100
    pieces = windows.stream.unfold(0, 32, 1)
    assert all((pieces == row).all(1).any() for row in taken)
    with pytest.raises(ValueError, match="does not fit"):
        windows.take(1, len(windows.stream) + 1, torch.Generator())


def test_windows_stay_unpadded_after_a_padded_batch(tokenizer, texts):
    before = training.Windows(texts[:100], tokenizer).stream
    tokenizer(texts[:2], padding=True)
    assert torch.equal(training.Windows(texts[:100], tokenizer).stream, before)


def test_training_attention_equals_sdpa(tokenizer):
    torch.manual_seed(0)
    model = training.new_model(TINY.target, TINY, tokenizer)
    windows = torch.randint(0, TINY.vocab_size, (2, 40))
    ours = model(windows, use_cache=False).logits
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(ours, model(windows, use_cache=False).logits, rtol=1e-4, atol=1e-5)


def test_a_short_training_lowers_the_loss_and_writes_a_loadable_folder(tokenizer, texts, tmp_path):
    torch.manual_seed(0)
    windows = training.Windows(texts, tokenizer)
    generator = torch.Generator().manual_seed(0)
    model = training.new_model(TINY.target, TINY, tokenizer)
    report = training.fit(
        model,
        lambda rows: training.next_token_loss(model, rows),
        lambda progress: windows.take(8, 64, generator),
        lr=1e-2,
        seconds=1.5,
        name="tiny",
        threads=2,
    )
    assert report["last_loss"] < report["first_loss"] - 0.2
    probe = windows.take(2, 64, generator)
    before = training.next_token_loss(model, probe).item()

    training.save(model, tokenizer, tmp_path)
    loaded, again = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    assert loaded.generation_config.eos_token_id == tokenizer.eos_token_id
    assert again(texts[0])["input_ids"] == tokenizer(texts[0])["input_ids"]
    assert training.next_token_loss(loaded.float(), probe).item() == pytest.approx(before, abs=0.05)


def test_a_model_accepts_its_own_drafts_always(tokenizer):
    torch.manual_seed(0)
    model = training.new_model(TINY.target, TINY, tokenizer).eval()
    model.set_attn_implementation("sdpa")
    measured = training.acceptance(model, model, tokenizer, ["def f(x):\n", "def longer(a, b):\n"], max_new_tokens=8)
    assert measured["alpha"] == pytest.approx(1.0, abs=1e-5)
    assert measured["greedy_agreement"] == 1.0


def test_recipe_says_what_it_accepts():
    with pytest.raises(ValueError, match="minutes"):
        training.Recipe(minutes=0)
    with pytest.raises(ValueError, match="target_share"):
        training.Recipe(target_share=0.9, draft_share=0.3)
