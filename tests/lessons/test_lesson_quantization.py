"""Lesson 10: bytes of a pass, lossy distributions, times and figures."""

import math

import pytest
import torch

import bass_core as bass
from bass_core.loading.quantization import kind_of
from bass_lab.lessons import l10_demonstrations as demonstrations
from bass_lab.lessons import l10_exercises as exercises
from bass_lab.measure.modelled_costs import modelled_h100
from bass_lab.texts.prompt_sets import prompt_set


def test_bytes_of_a_pass_equal_its_weights(pair):
    copies = demonstrations.copies(pair.draft)
    full, int8, int4 = (demonstrations.pass_bytes(copies[kind]) for kind in demonstrations.KINDS)
    assert sum(full.values()) == sum(each.nbytes for each in pair.draft.parameters())  # the table is also the head
    assert full["the rest"] == int8["the rest"] == int4["the rest"]
    linear = [each.weight for each in pair.draft.modules() if type(each) is torch.nn.Linear]
    linear = [each for each in linear if each is not pair.draft.get_output_embeddings().weight]
    assert full["linear layers"] == sum(each.nbytes for each in linear)
    assert int8["linear layers"] == sum(each.numel() + 4 * len(each) for each in linear)
    packed = sum(len(each) * math.ceil(each.shape[1] / 32) * (16 + 4) for each in linear)
    assert int4["linear layers"] == packed


def test_quantized_target_gains_more_than_a_quantized_draft():
    models = {("paper", role): demonstrations.paper_models(role) for role in ("target", "draft")}
    assert all(each.device.type == "meta" for kinds in models.values() for each in kinds.values())
    table = demonstrations.bytes_table(models)
    assert 14_000 < table.loc[("paper", "target", "full"), "a pass, MB"] < 15_600
    steps = demonstrations.step_bytes(table.loc["paper"], 5)
    assert steps.fewer["target in int4"] > steps.fewer["draft in int4"] > 1
    size = table.loc["paper"]["a pass, MB"]
    assert steps.step["both full"] == pytest.approx(size["target", "full"] + 5 * size["draft", "full"])
    cost = demonstrations.h100_costs(table.loc["paper"], "full", "full")
    assert float(cost.target(8, 1, 512)) == pytest.approx(float(modelled_h100().target(8, 1, 512)), rel=0.05)
    copy = demonstrations.h100_costs(table.loc["paper"], "full", "int4", own_copy=True)
    assert float(copy.draft(8, 1, 512)) > 3 * float(cost.draft(8, 1, 512)) and copy.is_synthetic


def test_lossy_distribution_follows_the_rule():
    p, q = torch.tensor([[0.6, 0.3, 0.1]]), torch.tensor([[0.1, 0.1, 0.8]])
    assert demonstrations.lossy_law(p, q, 0.3)[0].tolist() == pytest.approx([0.58, 0.34, 0.08])
    assert demonstrations.lossy_law(p, q, 0.0)[0].tolist() == pytest.approx(q[0].tolist())
    for epsilon in (0.0, 0.3, 1.0):
        by_hand = exercises._law(p[0].tolist(), q[0].tolist(), epsilon)
        assert demonstrations.lossy_law(p, q, epsilon)[0].tolist() == pytest.approx(by_hand)


def test_acceptances_are_means_over_positions():
    p = [torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0, 0.0], [0.5, 0.5]])]
    other = [torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0], [0.5, 0.5]])]
    found = demonstrations.Positions(p, {"same": p, "other": other})
    table = demonstrations.acceptances(found)
    assert table["α"].tolist() == pytest.approx([1, 0.5]) and table.change.tolist() == pytest.approx([0, -0.5])
    rules = demonstrations.lossy_distances(demonstrations.Positions(p, {"other": other}), [0.5])
    assert rules.tv.tolist() == pytest.approx([0, 0.5 / 3]) and rules["α"].tolist() == pytest.approx([0.5, 2 / 3])


def test_positions_are_the_targets_tokens(pair):
    prompts = prompt_set("mini", 2)
    found = demonstrations.positions(pair, {"itself": pair.target}, prompts, max_new_tokens=5, temperature=1.0)
    texts = bass.generate(pair, prompts, max_new_tokens=5, temperature=1.0).sequences
    assert [len(each) for each in found.target] == [len(text) for text in texts]
    assert demonstrations.acceptances(found)["α"].tolist() == pytest.approx([1.0])


def test_methods_are_timed_and_modelled(pair):
    ways = demonstrations.ways(pair, 3, 0.3)
    lossy = [name for name, way in ways.items() if kind_of(way.pair.target) or way.epsilon is not None]
    assert lossy == ["target int8", "target int4", "lossy, ε = 0.3"]
    assert kind_of(ways["own int4 copy drafts"].pair.draft) == "int4" and kind_of(pair.target) is None
    few = {name: ways[name] for name in ("regular", "draft", "lossy, ε = 0.3")}
    times = demonstrations.timed(few, prompt_set("mini", 2), repeats=1, max_new_tokens=8)
    assert times.loc["regular", "tokens per step"] == 1 and times.loc["regular", "speed"] == 1 and (times.ms > 0).all()
