"""A draft learns from its target in a moment; what was given stays as it was."""

import pytest
import torch
from tiny import BYTES, byte_tokenizer, tiny_model

import bass_core as bass
from bass_lab.pair import alignment
from bass_lab.pair.fitting import Teacher, distillation_loss, quick, write_texts
from bass_lab.pair.windows import Windows

TEXTS = [f"def f{number}(x):\n    return x + {number}\n" for number in range(400)]
BUDGET = {"tokens": 12 * alignment.BATCH * alignment.LENGTH, "own_texts": 4, "seed": 1}


@pytest.fixture(scope="module")
def pair() -> bass.ModelPair:
    models = (tiny_model(seed=seed, vocab_size=BYTES, max_position_embeddings=512) for seed in (0, 1))
    return bass.ModelPair(*models, byte_tokenizer())


def distance(pair: bass.ModelPair) -> float:
    windows = Windows(TEXTS, pair.tokenizer).take(4, 40, torch.Generator().manual_seed(0))
    with torch.no_grad():
        return distillation_loss([pair.draft], Teacher(pair.target), windows, (1.0,)).item()


def test_an_aligned_draft_is_nearer_to_the_target_and_nothing_given_has_changed(pair):
    before = {role: model.state_dict() for role, model in (("target", pair.target), ("draft", pair.draft))}
    before = {role: {name: tensor.clone() for name, tensor in state.items()} for role, state in before.items()}
    far, told = distance(pair), []
    aligned = alignment.align(pair, TEXTS, **BUDGET, progress=lambda stage, share: told.append((stage, share)))
    assert distance(aligned) < 0.98 * far
    assert aligned.target is pair.target and aligned.tokenizer is pair.tokenizer
    assert not aligned.draft.training and not pair.draft.training
    for role, state in before.items():
        assert all(torch.equal(tensor, getattr(pair, role).state_dict()[name]) for name, tensor in state.items())
    assert told == sorted(told, key=lambda each: (each[0] == "learning", each[1]))
    assert ("writing", 1.0) in told and told[-1] == ("learning", 1.0)


def test_alignment_repeats(pair):
    """Texts of the target's own, which threads write, and many steps on them."""
    options = BUDGET | {"own_texts": 2 * alignment.AT_ONCE + 2}
    before = torch.get_rng_state()
    first, second, other = (alignment.align(pair, TEXTS, **options | {"seed": seed}).draft for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))
    assert torch.equal(torch.get_rng_state(), before)


def test_texts_are_drawn_from_the_targets_law():
    """By numbers of their own: the frequencies of the second token, in a law of a temperature."""
    target, window = tiny_model(vocab_size=BYTES), torch.tensor([[5]])
    with torch.no_grad():
        p = (target(window).logits[0, -1] / 0.7).softmax(-1)
    drawn = write_texts(target, window.expand(20_000, -1), 2, 0.7, seed=3)[:, 1]
    seen = drawn.bincount(minlength=BYTES) / len(drawn)
    assert (seen - p).abs().max() < 5 * (p.max() / len(drawn)).sqrt() and not torch.equal(drawn[:9], drawn[9:18])


def test_a_pair_that_cannot_be_aligned_is_told_why(pair):
    with pytest.raises(ValueError, match="a draft model to align, got NgramDrafter"):
        alignment.align(bass.ModelPair(pair.target, tokenizer=pair.tokenizer))
    with pytest.raises(ValueError, match="tokenizer"):
        alignment.align(bass.ModelPair(pair.target, pair.draft))
    with pytest.raises(ValueError, match=f"97 .* {BYTES}"):
        alignment.align(bass.ModelPair(pair.target, tiny_model(), pair.tokenizer))
    with pytest.raises(ValueError, match="this pair's target reads sources"):
        alignment.align(bass.load_pair("encoder_decoder"), TEXTS)
    for texts in ([], "one text", ()):
        with pytest.raises(ValueError, match="texts must be a list of texts, one at least"):
            alignment.align(pair, texts)
    with pytest.raises(ValueError, match="does not fit"):
        alignment.align(pair, ["short"])
    for name in ("tokens", "own_texts"):
        with pytest.raises(ValueError, match=f"{name}.*-1"):
            alignment.align(pair, TEXTS, **BUDGET | {name: -1})


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("whole_windows", [True, False])
def test_a_target_that_computes_quickly_says_the_same_and_is_left_as_it_was(architecture, whole_windows):
    model, windows = tiny_model(architecture), torch.arange(48).view(3, 16)
    before, kept = model(windows).logits, {name: dict(vars(each)) for name, each in model.named_modules()}
    implementation = model.config._attn_implementation
    with quick(model, whole_windows=whole_windows):
        torch.testing.assert_close(model(windows, use_cache=False).logits, before)
    assert {name: dict(vars(each)) for name, each in model.named_modules()} == kept
    assert model.config._attn_implementation == implementation
