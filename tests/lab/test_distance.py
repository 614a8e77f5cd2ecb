import math

import pytest
import torch
from tiny import BYTES, byte_tokenizer, ragged_prompts, tiny_model

import bass_core as bass
import bass_lab as lab
from bass_core.exactness import verification
from bass_core.policies.protocol import FixedLength
from bass_lab.checks.enumeration import exact_law, law_of_engine
from bass_lab.checks.tabular import tabular, total_variation
from bass_lab.evaluation import load_problems
from bass_lab.lessons import l10_lossy
from bass_lab.texts.prompt_sets import prompt_set

PROMPTS = ragged_prompts(3, 9, 5)


@pytest.fixture(scope="module")
def pairs():
    return bass.ModelPair(tiny_model()), bass.ModelPair(tiny_model(noise=0.05))


def by_hand(first, second, prompt, text, at, temperature):
    ids = torch.cat([prompt, text[:at]])[None]
    with torch.inference_mode():
        p, q = ((each.target(ids).logits[0, -1].double() / temperature).softmax(-1) for each in (first, second))
    return float((p - q).abs().sum() / 2), float((p * (p / q).log()).sum())


def test_distances_at_each_position(pairs):
    temperature = 0.5
    found = lab.distance(*pairs, PROMPTS, max_new_tokens=6, temperature=temperature)
    texts = bass.generate(pairs[0], PROMPTS, max_new_tokens=6, temperature=temperature).sequences
    assert len(found.positions) == sum(map(len, texts))
    for row, at in ((0, 0), (1, len(texts[1]) - 1), (2, 2)):
        line = found.positions.query("prompt == @row and position == @at").iloc[0]
        assert (line.tv, line.kl) == pytest.approx(by_hand(*pairs, PROMPTS[row], texts[row], at, temperature), rel=1e-4)
    assert found.summary.loc["tv", "value"] == pytest.approx(found.positions.tv.mean())
    assert found.summary.loc["kl", "value"] == pytest.approx(found.positions.kl.mean())
    assert (found.summary.low <= found.summary.value).all() and (found.summary.value <= found.summary.high).all()


def test_a_model_has_no_distance_from_itself(pairs):
    found = lab.distance(pairs[0], pairs[0], PROMPTS, max_new_tokens=6)
    assert (found.summary == 0).all(axis=None) and found.first_difference.isna().all()


def test_first_difference_of_greedy_texts(pairs):
    found = lab.distance(*pairs, PROMPTS, max_new_tokens=12)
    texts = [bass.generate(pair, PROMPTS, max_new_tokens=12).sequences for pair in pairs]
    for first, one, other in zip(found.first_difference, *texts, strict=True):
        if math.isnan(first):
            assert torch.equal(one, other)
        else:
            at = int(first)
            assert torch.equal(one[:at], other[:at]) and not torch.equal(one[: at + 1], other[: at + 1])
    assert 0 < found.summary.loc["greedy texts that differ", "value"] == found.first_difference.notna().mean()


@pytest.mark.ci
def test_int8_is_nearer_than_int4_on_the_embedded_target():
    full = bass.load_pair()
    near, far = (
        lab.distance(full, full.quantized(kind), prompt_set("mini", 2), max_new_tokens=8).summary.value
        for kind in ("int8", "int4")
    )
    assert 0 < near.tv < far.tv / 4 and 0 < near.kl < far.kl / 4


def test_pass_rates_are_compared_on_the_same_problems():
    small = {"vocab_size": BYTES, "num_hidden_layers": 1, "max_position_embeddings": 1024}
    full = bass.ModelPair(tiny_model(**small), tokenizer=byte_tokenizer())
    found = lab.distance(full, full, ["a"], max_new_tokens=4, problems=load_problems()[:2], samples=1)
    assert found.summary.loc["pass@1, difference"].tolist() == [0, 0, 0]
    assert found.summary.loc["pass@1, first", "value"] == found.summary.loc["pass@1, second", "value"]


def test_impossible_comparisons_are_refused(pairs):
    other = pairs[0], bass.ModelPair(tiny_model(vocab_size=50))
    for models, prompts, temperature, message in (
        (pairs, PROMPTS, 0, "temperature must be > 0"),
        (pairs, [], 1.0, "at least one"),
        (other, PROMPTS, 1.0, "97 and 50 ids"),
    ):
        with pytest.raises(ValueError, match=message):
            lab.distance(*models, prompts, max_new_tokens=2, temperature=temperature)


def test_only_the_lossy_rule_changes_the_distribution():
    found = l10_lossy.exact_distances((0.3, 0.0), pairs=2)
    assert found.loc["exact", "largest tv"] < 1e-12
    assert (found.drop("exact")["mean tv"] > 0.01).all()
    assert found.loc["ε = 0.0", "mean tv"] > found.loc["ε = 0.3", "mean tv"]


def test_always_accepting_gives_the_drafts_distribution():
    target, draft = tabular(3, 0), tabular(3, 100)
    with l10_lossy.lossy(0.0):
        law = law_of_engine(target, draft, 3, lambda: FixedLength(2))
    first = {(tokens[0][:1],): 0.0 for tokens in law}  # the prefill's token comes from the target
    for tokens, chance in law.items():
        first[(tokens[0][:1],)] += chance
    assert total_variation(first, exact_law(target, 1)) < 1e-12
    assert total_variation(law, exact_law(target, 3)) > 0.1


def test_exact_rule_is_restored():
    before = verification.RULES["token"]
    with pytest.raises(RuntimeError), l10_lossy.lossy(0.5):
        assert verification.RULES["token"] is not before
        raise RuntimeError
    assert verification.RULES["token"] is before
    with pytest.raises(ValueError, match="from 0 to 1"), l10_lossy.lossy(2):
        pass


def test_smaller_epsilon_accepts_more():
    pair, found = bass.load_pair(), {}
    for epsilon in (None, 1.0, 0.0):
        with l10_lossy.lossy(epsilon):
            out = bass.generate(pair, prompt_set("mini", 2), draft_length=5, max_new_tokens=16, temperature=1.0)
        found[epsilon] = out.trace.summary()["tokens_per_step"]
    assert found[1.0] < found[0.0] > found[None]
