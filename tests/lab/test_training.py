import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from bass_core.generation import generate
from bass_core.loading.model_pair import load_pair
from bass_lab.evaluation import load_problems
from bass_lab.pair import data_card, fitting, training
from bass_lab.pair.windows import Windows, train_tokenizer
from bass_lab.texts import corpus
from bass_lab.texts.prompt_sets import prompt_set

SIZES = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64}
DRAFT = SIZES | {"hidden_size": 32, "num_hidden_layers": 1}
TINY = training.Recipe(
    vocab_size=400,
    context=512,
    generated=400,
    batch_tokens=512,
    lengths=((0.0, 64),),
    target=SIZES | {"hidden_size": 32, "num_hidden_layers": 2},
    drafts={"draft": DRAFT, "deep_draft": SIZES | {"hidden_size": 16, "num_hidden_layers": 3}},
    feature_head=SIZES,
    target_tokens=40 * 512,
    target_texts=8,
    text_tokens=64,
    **dict.fromkeys(("draft_tokens", "aligning_tokens", "feature_tokens"), 10 * 512),
)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return corpus.generated_functions(200, seed=3)


@pytest.fixture(scope="module")
def tokenizer(texts):
    return train_tokenizer(texts, TINY.vocab_size, TINY.context)


TOKENS = 40 * 128


def test_tokenizer_decodes_any_text(tokenizer, texts):
    for text in [*texts[:50], "déjà vu → 測試\t\n\n   x  , y .\r\n", ""]:
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert tokenizer.eos_token_id not in ids
    assert len(tokenizer) == TINY.vocab_size
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 0


def test_prompt_tokens_are_a_prefix_of_the_function(tokenizer, texts):
    for text in texts:
        begin = tokenizer(text[: text.index('"""\n') + 4])["input_ids"]
        assert tokenizer(text)["input_ids"][: len(begin)] == begin


def test_windows_are_pieces_of_the_stream(tokenizer, texts):
    windows = Windows(texts[:100], tokenizer)
    taken = windows.take(8, 32, torch.Generator().manual_seed(0))
    assert taken.shape == (8, 32)
    assert torch.equal(taken, windows.take(8, 32, torch.Generator().manual_seed(0)))
    assert (windows.stream == tokenizer.eos_token_id).sum() == 100
    pieces = windows.stream.unfold(0, 32, 1)
    assert all((pieces == row).all(1).any() for row in taken)
    with pytest.raises(ValueError, match="does not fit"):
        windows.take(1, len(windows.stream) + 1, torch.Generator())


def test_windows_stay_unpadded_after_a_padded_batch(tokenizer, texts):
    before = Windows(texts[:100], tokenizer).stream
    tokenizer(texts[:2], padding=True)
    assert torch.equal(Windows(texts[:100], tokenizer).stream, before)


def test_training_attention_and_norm_equal_transformers(tokenizer):
    torch.manual_seed(0)
    model = fitting.new_model(TINY.target, tokenizer)
    plain = LlamaForCausalLM(model.config)
    plain.load_state_dict(model.state_dict())
    windows = torch.randint(0, TINY.vocab_size, (2, 40))
    ours = model(windows, use_cache=False).logits
    torch.testing.assert_close(ours, plain(windows).logits, rtol=1e-4, atol=1e-5)
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(ours, model(windows, use_cache=False).logits, rtol=1e-4, atol=1e-5)


def fitted(tokenizer, windows, folder, tokens=TOKENS):
    torch.manual_seed(0)
    model = fitting.new_model(TINY.target, tokenizer)
    how = {"lr": 1e-2, "name": "tiny", "data": TINY.data, "seed": TINY.seed, "threads": TINY.threads, "save_every": 0.0}
    return model, fitting.fit(
        model,
        lambda rows: fitting.next_token_loss(model, rows),
        lambda progress, generator: windows.take(4, 32, generator),
        tokens=tokens,
        folder=folder,
        **how,
    )


def test_interrupted_training_ends_as_the_whole_one(tokenizer, texts, tmp_path, monkeypatch):
    windows = Windows(texts, tokenizer)
    whole, report = fitted(tokenizer, windows, tmp_path / "whole")
    assert report["tokens"] == TOKENS and report["steps"] == 40
    assert report["last_loss"] < report["first_loss"] - 0.1
    steps = []

    def cut(*args):
        steps.append(1)
        if len(steps) == 25:
            raise KeyboardInterrupt
        return Windows.take(windows, *args)

    monkeypatch.setattr(windows, "take", cut)
    with pytest.raises(KeyboardInterrupt):
        fitted(tokenizer, windows, tmp_path / "cut")
    resumed, report = fitted(tokenizer, windows, tmp_path / "cut")
    assert report["steps"] == 40 and len(steps) == 41  # only the interrupted step is repeated
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    windows.take = None  # a finished training takes no more windows
    again, report = fitted(tokenizer, windows, tmp_path / "whole")
    assert report["steps"] == 40
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))
    with pytest.raises(ValueError, match="another recipe"):
        fitted(tokenizer, windows, tmp_path / "whole", tokens=2 * TOKENS)


@pytest.mark.ci
def test_recipe_writes_models_and_a_data_card(tmp_path, monkeypatch):
    monkeypatch.setattr(data_card, "MAX_NEW_TOKENS", 4)
    monkeypatch.setattr(data_card, "prompt_set", lambda name: prompt_set(name, 2))
    monkeypatch.setattr(data_card, "load_problems", lambda: load_problems()[:2])
    trained = training.train_pair(TINY, tmp_path / "out", tmp_path / "work")
    for name in ("target", *TINY.drafts, *(f"unaligned_{draft}" for draft in TINY.drafts)):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / name)
        assert model.dtype == torch.bfloat16 and model.generation_config.eos_token_id == 0
        AutoTokenizer.from_pretrained(tmp_path / "out" / name)
    figures = data_card.measure(tmp_path / "out", TINY)
    card = data_card.data_card(figures, trained, TINY)
    for name in ("target", *TINY.drafts, "feature_head"):
        assert f"{trained[name]['parameters']:,}" in card
    for name in (*TINY.drafts, "feature_head", "unaligned_draft"):
        assert f"{figures[name]['mini']['alpha']:.3f}" in card and f"{figures[name]['library']['alpha']:.3f}" in card


@pytest.mark.slow
def test_drafts_are_trained_for_an_existing_target(tokenizer, tmp_path):
    torch.manual_seed(0)
    target = fitting.new_model(TINY.target, tokenizer)
    fitting.save(target, tokenizer, tmp_path / "target")
    report = training.train_pair(TINY, tmp_path / "out", tmp_path / "work", tmp_path / "target")
    assert "steps" not in report["target"] and report["drafts"]["steps"] == 10
    pair = load_pair(tmp_path / "out" / "target", tmp_path / "out" / "feature_head", dtype="bfloat16", device="cpu")
    assert pair.tokenizer.get_vocab() == tokenizer.get_vocab()
    for name, tensor in target.state_dict().items():
        assert torch.equal(pair.target.state_dict()[name], tensor.bfloat16())
    assert generate(pair, ["def f(x):\n"], max_new_tokens=8).trace.steps.drafted.sum() > 0


def test_alignment_lowers_the_distance_to_the_target(tokenizer):
    torch.manual_seed(0)
    target, draft = (fitting.new_model(sizes, tokenizer) for sizes in (TINY.target, DRAFT))
    teacher, windows = fitting.Teacher(target), torch.randint(0, TINY.vocab_size, (2, 40))
    assert fitting.distillation_loss([target], teacher, windows, (1.0, 0.4)).item() == pytest.approx(0, abs=1e-5)
    assert fitting.distillation_loss([draft], teacher, windows, (1.0, 0.4)) > 0


def test_recipe_refuses_empty_budgets():
    for budget in ("target_tokens", "feature_tokens", "threads"):
        with pytest.raises(ValueError, match=f"{budget} must be positive, got 0"):
            training.Recipe(**{budget: 0})
