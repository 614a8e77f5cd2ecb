"""Lesson 05: counts per draft, modelled costs, intervals, memory of drafters, figures."""

import numpy as np
import pandas as pd
import pytest
import torch
from tiny import feature_head

import bass_core as bass
from bass_core.loading.model_pair import ASSETS
from bass_lab.lessons import l05_demonstrations as demonstrations
from bass_lab.lessons import l05_figures as figures
from bass_lab.measure.modelled_costs import modelled_h100
from bass_lab.study.written import Written
from bass_lab.texts.prompt_sets import prompt_set

OPTIONS = {"draft_length": 3, "max_new_tokens": 12, "temperature": 0.2}


@pytest.fixture(scope="module")
def pairs():
    return demonstrations.pairs(["ngram", "layers:2", "draft"])


@pytest.fixture(scope="module")
def runs(pairs):
    prompts = {"library": prompt_set("library", 2)}
    return demonstrations.runs(pairs, prompts, [1, 2], repeats=2, **OPTIONS)


def test_drafts_share_one_target():
    found = demonstrations.pairs(["suffix", str(ASSETS / "deep_draft")], dtype="bfloat16")
    assert list(found) == ["suffix", "deep_draft"]
    assert found["suffix"].target is found["deep_draft"].target and found["suffix"].target.dtype == torch.bfloat16


def test_unknown_and_missing_drafts_are_refused(pairs):
    for call, words in (
        (lambda: demonstrations.pairs([]), "at least one draft"),
        (lambda: demonstrations.pairs(["eagle"]), "eagle"),
        (lambda: demonstrations.shapes(pairs), "needs a draft model"),
        (lambda: figures.drafter_view(pairs, {"mini": []}, "eagle", "mini"), "draft must be one of ngram, layers:2"),
        (lambda: figures.drafter_view(pairs, {"mini": []}, "draft", "poems"), "prompt_set must be one of mini"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_drafts_are_interleaved_and_the_first_round_is_dropped(runs, pairs):
    turns = [demonstrations.REGULAR, *pairs]
    assert runs.draft.tolist() == turns * 4 and set(runs.repeat) == {1, 2}
    assert (runs.tokens == runs.batch * (OPTIONS["max_new_tokens"] - 1)).all()  # the prefill produced the first token
    regular = runs[runs.draft == demonstrations.REGULAR]
    assert (regular.judged == 0).all() and regular.draft_ms.isna().all()


def test_counts_equal_the_trace(pairs):
    prompts = {"library": prompt_set("library", 2)}
    options = OPTIONS | {"seed": 4}
    line = demonstrations.runs({"draft": pairs["draft"]}, prompts, [2], repeats=1, **options).iloc[-1]
    same = OPTIONS | {"seed": 5, "eos_token_id": ()}
    trace = bass.generate(pairs["draft"], prompts["library"], **same).trace
    assert line.accepted / line.judged == pytest.approx(trace.summary()["alpha"])
    assert 1 + line.accepted / line.row_steps == pytest.approx(trace.summary()["tokens_per_step"])


def test_comparison_pools_counts_and_pairs_times(runs):
    table = demonstrations.compared(runs).set_index(["batch", "draft"])
    assert (table.over_regular.xs(demonstrations.REGULAR, level="draft") == 1).all()
    part = runs.query("batch == 2 and draft == 'draft'")
    line = table.loc[(2, "draft")]
    assert line.alpha == pytest.approx(part.accepted.sum() / part.judged.sum())
    regular = runs.query("batch == 2 and draft == @demonstrations.REGULAR").ms.to_numpy()
    assert line.over_regular == pytest.approx(np.median(regular / part.ms.to_numpy()))
    assert line.low <= line.over_regular <= line.high


def test_modelled_ladder_equals_the_cost_model():
    layers = demonstrations.PAPERS_LAYERS
    table = demonstrations.modelled_ladder({layers: 0.8}, 8).set_index("launches")
    for how, launch in demonstrations.LAUNCHES.items():
        cost = modelled_h100(launch)
        assert table["draft ms"][how] == pytest.approx(1e3 * cost.draft(8, 1, 256))
        best = min(cost.step(8, k, 256) / sum(0.8**i for i in range(k + 1)) for k in range(17))
        assert table.ms[how] == pytest.approx(1e3 * best)


def counts(accepted, judged):
    return pd.DataFrame({"accepted": accepted, "judged": judged})


def test_judged_drafts_equal_a_run(pairs):
    pair, prompts = pairs["draft"], prompt_set("library", 3)
    texts = Written.by(pair, prompts, max_new_tokens=24, temperature=0.0)
    chances = [torch.minimum(p, q).sum(-1) for p, q in zip(texts.p, texts.read_by(pair.draft), strict=True)]
    tokens = bass.generate(pair, prompts, max_new_tokens=24, draft_length=2, trace="tokens").trace.tokens
    starts = [len(text) - len(p) for text, p in zip(texts.tokens, texts.p, strict=True)]
    judged = tokens[tokens.kind.isin(["accepted", "recovered"])]
    for line in judged.itertuples():
        assert (line.kind == "accepted") == bool(chances[line.row][line.position - starts[line.row]])
    assert set(judged.kind) == {"accepted", "recovered"}
    found = demonstrations.judged(pair.draft, texts)
    assert found.accepted.tolist() == [float(each.sum()) for each in chances]
    assert found.judged.tolist() == list(map(len, texts.p))


def test_gain_interval_is_wider_for_random_gains():
    generator = np.random.default_rng(0)
    before = counts(generator.integers(10, 30, 40), 40)
    better, other = before.assign(accepted=before.accepted + 4), counts(generator.integers(10, 30, 40), 40)
    sure, chance = demonstrations.alphas(before, better), demonstrations.alphas(before, other)
    assert sure.value["gain"] == pytest.approx(0.1)
    assert sure.low["gain"] == pytest.approx(0.1) and sure.high["gain"] == pytest.approx(0.1)  # the same prompts
    assert sure.low["before"] < sure.value["before"] < sure.high["before"]
    assert chance.low["gain"] < 0 < chance.high["gain"]


def test_bytes_and_parameters_are_counted_for_every_drafter(pairs):
    config = pairs["draft"].target.config
    head = bass.FeatureDrafter(feature_head(pairs["draft"].target))
    found = demonstrations.keeps(pairs | {"head": bass.ModelPair(pairs["draft"].target, head)})
    keys_and_values = 2 * config.num_key_value_heads * config.head_dim * 4  # per layer, in float32
    assert found["bytes per token"].tolist()[:2] == [0, 2 * keys_and_values]
    own = head.head.config
    keys_and_values = 2 * own.num_key_value_heads * own.head_dim * 4
    assert found["bytes per token"]["head"] == keys_and_values + 4 * config.hidden_size
    assert found["own parameters"][["ngram", "layers:2"]].tolist() == [0, 0]
    assert found["own parameters"]["draft"] == pairs["draft"].draft.num_parameters()
    assert found["own parameters"]["head"] == sum(each.numel() for each in head.head.parameters())


def test_quantized_copy_shares_the_other_weights():
    pair = demonstrations.pairs(["draft", "target:int4"])["target:int4"]
    assert pair.draft.get_input_embeddings().weight is pair.target.get_input_embeddings().weight
    found = demonstrations.keeps({"target:int4": pair}).loc["target:int4"]
    linear = [each for each in pair.target.model.layers.modules() if hasattr(each, "in_features")]
    assert found["own parameters"] == sum(each.in_features * each.out_features for each in linear)


def test_menus_choose_draft_and_prompts(pairs):
    prompts = {name: prompt_set(name, 2) for name in ("mini", "library")}
    view = figures.drafter_view(pairs, prompts, "ngram", "mini", **OPTIONS)
    draft, prompts_of, sentence, text, raster, _ = view.children
    assert "<b>ngram</b> on <b>mini</b>" in sentence.value
    before = text.value
    draft.value, prompts_of.value = "draft", "library"
    assert "<b>draft</b> on <b>library</b>" in sentence.value and text.value != before
    trace = bass.generate(pairs["draft"], prompts["library"], **OPTIONS).trace
    assert f"{trace.summary()['tokens_per_step']:.2f} tokens per step" in sentence.value
    assert "draft on library" in raster.layout.title.text
