import pytest
import torch
from tiny import BYTES, byte_tokenizer, tiny_model

import bass_core as bass
from bass_lab.pair import alignment
from bass_lab.pair.fitting import Teacher, distillation_loss, quick, write_texts
from bass_lab.pair.windows import Windows

TEXTS = [f"def f{number}(x):\n    return x + {number}\n" for number in range(400)]
BUDGET = {"tokens": 12 * alignment.BATCH * 64, "own_texts": 4, "seed": 1}


@pytest.fixture(autouse=True)
def short_windows(monkeypatch):
    monkeypatch.setattr(alignment, "LENGTH", 64)
    monkeypatch.setattr(alignment, "AT_ONCE", 2)


@pytest.fixture(scope="module")
def pair() -> bass.ModelPair:
    models = (
        tiny_model(seed=seed, vocab_size=BYTES, max_position_embeddings=512, num_hidden_layers=1) for seed in (0, 1)
    )
    return bass.ModelPair(*models, byte_tokenizer())


def distance(pair: bass.ModelPair) -> float:
    windows = Windows(TEXTS, pair.tokenizer).take(4, 40, torch.Generator().manual_seed(0))
    with torch.no_grad():
        return distillation_loss([pair.draft], Teacher(pair.target), windows, (1.0,)).item()


def test_aligned_draft_is_nearer_and_given_models_are_unchanged(pair):
    before = {role: model.state_dict() for role, model in (("target", pair.target), ("draft", pair.draft))}
    before = {role: {name: tensor.clone() for name, tensor in state.items()} for role, state in before.items()}
    far, reported = distance(pair), []
    aligned = alignment.align(pair, TEXTS, **BUDGET, progress=lambda stage, share: reported.append((stage, share)))
    assert distance(aligned) < 0.98 * far
    assert aligned.target is pair.target and aligned.tokenizer is pair.tokenizer
    assert not aligned.draft.training and not pair.draft.training
    for role, state in before.items():
        assert all(torch.equal(tensor, getattr(pair, role).state_dict()[name]) for name, tensor in state.items())
    assert reported == sorted(reported, key=lambda each: (each[0] == "learning", each[1]))
    assert ("writing", 1.0) in reported and reported[-1] == ("learning", 1.0)


def test_same_seed_aligns_to_the_same_draft(pair):
    options = BUDGET | {"own_texts": 6, "tokens": 2 * alignment.BATCH * 64}
    before = torch.get_rng_state()
    first, second, other = (alignment.align(pair, TEXTS, **options | {"seed": seed}).draft for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))
    assert torch.equal(torch.get_rng_state(), before)


def test_texts_have_the_targets_distribution():
    target, window = tiny_model(vocab_size=BYTES), torch.tensor([[5]])
    with torch.no_grad():
        p = (target(window).logits[0, -1] / 0.7).softmax(-1)
    drawn = write_texts(target, window.expand(20_000, -1), 2, 0.7, seed=3)[:, 1]
    seen = drawn.bincount(minlength=BYTES) / len(drawn)
    assert (seen - p).abs().max() < 5 * (p.max() / len(drawn)).sqrt() and not torch.equal(drawn[:9], drawn[9:18])


def test_pairs_and_texts_that_cannot_be_aligned_are_refused(pair):
    without_draft = bass.ModelPair(pair.target, tokenizer=pair.tokenizer)
    refused = [
        (without_draft, TEXTS, {}, "a draft model to align, got NgramDrafter"),
        (bass.ModelPair(pair.target, pair.draft), TEXTS, {}, "tokenizer"),
        (bass.ModelPair(pair.target, tiny_model(), pair.tokenizer), TEXTS, {}, f"97 .* {BYTES}"),
        (bass.load_pair("encoder_decoder"), TEXTS, {}, "align needs a decoder-only target"),
        (pair, [], {}, "texts must be a non-empty list of texts"),
        (pair, "one text", {}, "texts must be a non-empty list of texts"),
        (pair, ["short"], {}, "does not fit"),
        (pair, TEXTS, {"tokens": -1}, "tokens.*-1"),
        (pair, TEXTS, {"own_texts": -1}, "own_texts.*-1"),
    ]
    for models, texts, options, message in refused:
        with pytest.raises(ValueError, match=message):
            alignment.align(models, texts, **BUDGET | options)


@torch.no_grad()
@pytest.mark.parametrize(("architecture", "whole_windows"), [("llama", True), ("qwen2", False)])
def test_quick_target_has_the_same_logits_and_is_restored(architecture, whole_windows):
    model, windows = tiny_model(architecture), torch.arange(48).view(3, 16)
    before, kept = model(windows).logits, {name: dict(vars(each)) for name, each in model.named_modules()}
    implementation = model.config._attn_implementation
    with quick(model, whole_windows=whole_windows):
        torch.testing.assert_close(model(windows, use_cache=False).logits, before)
    assert {name: dict(vars(each)) for name, each in model.named_modules()} == kept
    assert model.config._attn_implementation == implementation
