"""Lesson 01: costs of a step, the story of a run, exact distributions, figures and widgets."""

import re

import numpy as np
import pandas as pd
import pytest
import torch

import bass_core as bass
from bass_core.policies.protocol import expected_tokens
from bass_lab.lessons import l01_demonstrations, l01_figures, l01_rules
from bass_lab.measure.roofline import TARGET_8B
from bass_lab.texts.prompt_sets import prompt_set


@pytest.fixture(scope="module")
def story(pair):
    prompt = prompt_set("library", 1)[0]
    return l01_demonstrations.story(pair, prompt, draft_length=5, max_new_tokens=32, temperature=0.8)


def law(*chances):
    return torch.tensor(chances, dtype=torch.float64)


def costs(target_ms, draft_ms):
    n = range(1, len(target_ms) + 1)
    return pd.DataFrame({"n": n, "target_ms": target_ms, "draft_ms": [(i - 1) * draft_ms for i in n]})


def test_measured_costs_have_a_line_per_number_of_tokens(pair):
    found = l01_demonstrations.measured_costs(pair, prompt_set("mini", 2), temperature=0.8, most=2, repeats=1)
    assert found.n.tolist() == [1, 2, 3]
    assert (found.target_ms > 0).all() and found.draft_ms[0] == 0 and (found.draft_ms[1:] > 0).all()


def test_missing_draft_and_temperature_are_refused(pair):
    alone = bass.ModelPair(target=pair.target, tokenizer=pair.tokenizer)
    with pytest.raises(ValueError, match="needs a draft model"):
        l01_demonstrations.measured_costs(alone, ["def f():"], temperature=0.8)
    with pytest.raises(ValueError, match="needs temperature > 0"):
        l01_demonstrations.story(pair, "def f():", draft_length=2, max_new_tokens=4, temperature=0.0)


def test_roofline_waits_for_memory_until_the_batch_is_large():
    weights = 2 * 7.8e9 / 3.35e12
    cache = 2 * 2 * 512 * 32 * 32 * 128 / 3.35e12
    assert l01_demonstrations.roofline_ms(TARGET_8B, 1, 1, 512) == pytest.approx(1e3 * (weights + cache))
    assert l01_demonstrations.h100_costs(rows=8).target_ms.nunique() == 1
    one, nine = (l01_demonstrations.roofline_ms(TARGET_8B, 256, n, context=1) for n in (1, 9))
    assert nine == pytest.approx(1e3 * 2 * 9 * 256 * 7.8e9 / 989e12, rel=1e-3) and one < nine / 4


def test_speed_up_is_tokens_per_step_over_step_cost():
    table = l01_demonstrations.predicted({"flat": costs([10, 10, 10], 1), "steep": costs([10, 20, 30], 1)}, 2, 2.4)
    assert table["step cost"].tolist() == pytest.approx([1.2, 3.2])
    assert table["speed-up"].tolist() == pytest.approx([2, 0.75])
    with pytest.raises(ValueError, match="k must be from 0 to 2"):
        l01_demonstrations.predicted({"flat": costs([10, 10, 10], 1)}, 3, 2.4)


def test_expected_tokens_follow_the_closed_form_and_average_over_an_uncertain_alpha():
    assert expected_tokens(0.8, 5)[5] == pytest.approx((1 - 0.8**6) / 0.2)
    assert expected_tokens(1.0, 5)[5] == 6 and expected_tokens(0.0, 5)[5] == 1
    alphas = np.random.default_rng(0).beta(3 * 0.8, 3 * 0.2, 20_000)
    mean = np.mean([expected_tokens(alpha, 5) for alpha in alphas], axis=0)
    assert expected_tokens(0.8, 5, seen=3) == pytest.approx(mean, rel=0.01)
    assert (expected_tokens(0.8, 5, seen=3)[2:] > expected_tokens(0.8, 5)[2:]).all()


def test_story_decides_as_the_engine(story):
    read = story.lines[story.lines.verdict.isin(["accepted", "rejected"])]
    assert {"accepted", "rejected"} == set(read.verdict)
    assert ((read.u < read.accept) == (read.verdict == "accepted")).all()
    assert read.accept.to_numpy() == pytest.approx(np.minimum(1, read.p / read.q).to_numpy())
    # at most one rejection per step
    for _, lines in story.lines[story.lines.step > 0].groupby("step"):
        verdicts = "".join(verdict[0] if verdict != "recovered" else "R" for verdict in lines.verdict)
        assert re.fullmatch(r"a*(rn*R|b)|a+", verdicts)  # a text may end with an accepted draft
        assert lines["slot"].tolist() == list(range(1, len(lines) + 1))


def test_story_equals_generate(pair, story):
    prompt = prompt_set("library", 1)[0]
    out = bass.generate(pair, [prompt], draft_length=5, max_new_tokens=32, temperature=0.8)
    assert story.before(10**6)[len(story.prompt) :].tolist() == out.sequences[0].tolist()


def test_probabilities_of_the_story_equal_plain_forward_passes(pair, story):
    place = story.disagreement
    assert place.verdict == "rejected"
    p, q = l01_demonstrations.laws(l01_demonstrations.next_logits(pair, story.before(place.position)), 0.8)
    assert p.sum() == pytest.approx(1) and q.sum() == pytest.approx(1)
    assert (p[place.token], q[place.token]) == pytest.approx((place.p, place.q), abs=1e-4)


def test_tokens_of_the_target_alone_have_no_draft_probability(pair):
    wide = bass.load_pair(dtype="float32")
    wide.target.resize_token_embeddings(1032, mean_resizing=False)
    p, q = l01_demonstrations.laws(l01_demonstrations.next_logits(wide, torch.tensor([5, 6, 7])), 1.0)
    assert p.shape == q.shape == (1032,) and (q[1024:] == 0).all() and q.sum() == pytest.approx(1)


def test_rule_keeps_the_target_distribution_and_wrong_rules_do_not():
    found = l01_rules.distances(count=30, seed=3)
    assert len(found) == 5 and (found["the rule"] < 1e-12).all()
    assert (found["redraw from p"].drop("one token, q = p") > 1e-3).all()
    assert found["redraw from p"]["one token, q = p"] < 1e-12  # a perfect draft hides this mistake
    assert (found["accept the likely"] > 1e-3).all()


def test_distribution_of_texts():
    laws_after = {(): (law(0.5, 0.5), law(1.0, 0.0)), (0,): (law(1.0, 0.0), law(0.0, 1.0))}
    laws_after[(1,)] = (law(0.25, 0.75),) * 2
    target, draft = (lambda text, i=i: laws_after[text][i] for i in (0, 1))
    wanted = {(0, 0): 0.5, (0, 1): 0.0, (1, 0): 0.125, (1, 1): 0.375}
    assert l01_rules.regular(target, 2) == pytest.approx(wanted)
    assert l01_rules.text_law(target, draft, 1, l01_rules.exact) == pytest.approx(wanted)
    redrawn = l01_rules.text_law(target, draft, 1, l01_rules.redraw_from_p)
    assert redrawn[0, 0] == pytest.approx(0.75)  # 0 is drafted and kept half the time, then redrawn half the time


def test_tokens_table_counts_by_definition():
    lines = [("easy", 1, 1), ("easy", 1, 1), ("easy", 2, 2), ("easy", 2, 0), ("hard", 1, 0), ("hard", 2, 1)]
    runs = pd.DataFrame(lines, columns=["prompts", "k", "accepted"]).assign(row=0, step=1)
    table = l01_demonstrations.tokens_table(runs)
    assert table.columns.tolist() == ["acceptance rate", "α", "measured", "error", "formula"]
    assert table.loc["easy", "α"].tolist() == pytest.approx([1, 2 / 3])
    assert table.loc["easy", "acceptance rate"].tolist() == pytest.approx([1, 0.5])
    assert table.loc["easy", "measured"].tolist() == pytest.approx([2, 2])
    assert table.loc["easy", "formula"].tolist() == pytest.approx([1.8, 1 + 0.8 + 0.64])  # 4 of 5 tries, pooled


def drawn_step(data):
    """Return the slots by verdict in the bars of one panel, and the positions of the marks of u."""
    bars = {bar.name.partition(":")[0]: list(bar.x) for bar in data if bar.type == "bar" and bar.x[0] is not None}
    (marks,) = [list(zip(mark.x, mark.y, strict=True)) for mark in data if mark.type == "scatter"]
    return bars, marks


def told_step(story, step):
    lines = story.lines[story.lines.step == step]
    read = lines[lines.verdict.isin(["accepted", "rejected"])]
    bars = {verdict: part["slot"].tolist() for verdict, part in lines.groupby("verdict")}
    return bars, list(zip(read["slot"], read.u, strict=True))


def test_step_slider_redraws_text_and_bars(pair, story):
    slider, text, figure, _ = l01_figures.step_slider(story, pair.tokenizer).children
    for step in (1, 5, 3):
        slider.value = step
        assert drawn_step(figure.data) == told_step(story, step)
        last = story.lines[story.lines.step == step].position.min()
        last += (~story.lines[story.lines.step == step].verdict.isin(["rejected", "not reached"])).sum()
        assert text.value.count("<span") == len(story.before(last)) - len(story.prompt)


def test_overlap_adds_up_to_both_distributions():
    p, q = law(0.5, 0.3, 0.1, 0.1), law(0.2, 0.3, 0.4, 0.1)
    parts = l01_figures.overlap(p, q, {0: "a", 2: "c"})
    assert parts.index.tolist() == ["a", "c", "others"]
    assert parts.both.tolist() == pytest.approx([0.2, 0.1, 0.4])
    assert parts.target.tolist() == pytest.approx([0.3, 0, 0]) and parts.draft.tolist() == pytest.approx([0, 0.3, 0])
    both, target, draft = l01_figures.overlap_figure({"T": parts}).data
    assert list(both.y) == parts.both.tolist() and list(draft.y) == parts.draft.tolist()
    assert not both.marker.pattern.shape and target.marker.pattern.shape != draft.marker.pattern.shape


def test_temperature_slider_redraws_the_overlap():
    logits = (torch.tensor([2.0, 1.0, 0.0]), torch.tensor([1.0, 2.0, 0.0]))
    slider, figure, _ = l01_figures.overlap_slider(logits, {0: "a", 1: "b"}, 1.0).children
    shared = [sum(figure.data[0].y)]
    for temperature in (0.1, 2.0):
        slider.value = temperature
        p, q = l01_demonstrations.laws(logits, temperature)
        shared.append(sum(figure.data[0].y))
        assert shared[-1] == pytest.approx(1 - l01_rules.total_variation(p, q))
        assert f"temperature {temperature}" in figure.layout.annotations[0].text
    assert shared[1] < shared[0] < shared[2]  # two favourites: heat helps
