"""Lesson 01: what it costs, tells, enumerates, measures and draws; its widgets and exercises.

The notebook itself runs in test_notebooks.py. Nothing here depends on how long anything takes.
"""

import re

import lesson_runs
import numpy as np
import pandas as pd
import pytest
import torch

import bass_core as bass
from bass_core import randomness, verification
from bass_core.draft_length import expected_tokens
from bass_lab.lessons import l01_demonstrations, l01_figures, l01_rules, l07_figures
from bass_lab.lessons import l01_exercises as exercises
from bass_lab.measure.roofline import H100, MODELS, TARGET_8B
from bass_lab.show import looks, token_views
from bass_lab.texts.prompt_sets import prompt_set


@pytest.fixture(scope="module")
def story(pair):
    prompt = prompt_set("library", 1)[0]
    return l01_demonstrations.story(pair, prompt, draft_length=5, max_new_tokens=48, temperature=0.8)


def law(*chances):
    return torch.tensor(chances, dtype=torch.float64)


def costs(target_ms, draft_ms):
    n = range(1, len(target_ms) + 1)
    return pd.DataFrame({"n": n, "target_ms": target_ms, "draft_ms": [(i - 1) * draft_ms for i in n]})


# --- what a step costs ---


def test_measured_costs_have_a_line_per_number_of_tokens(pair):
    found = l01_demonstrations.measured_costs(pair, prompt_set("mini", 2), temperature=0.8, most=3, repeats=1)
    assert found.n.tolist() == [1, 2, 3, 4]
    assert (found.target_ms > 0).all()
    assert found.draft_ms[0] == 0 and (found.draft_ms[1:] > 0).all()


def test_costs_need_a_draft_model(pair):
    alone = bass.ModelPair(target=pair.target, tokenizer=pair.tokenizer)
    with pytest.raises(ValueError, match="needs a draft model"):
        l01_demonstrations.measured_costs(alone, ["def f():"], temperature=0.8)


def test_roofline_waits_for_memory_until_the_batch_is_large():
    weights = 2 * 7.8e9 / 3.35e12
    cache = 2 * 2 * 512 * 32 * 32 * 128 / 3.35e12
    assert l01_demonstrations.roofline_ms(TARGET_8B, 1, 1, 512) == pytest.approx(1e3 * (weights + cache))
    assert l01_demonstrations.h100_costs(rows=8).target_ms.nunique() == 1
    one, nine = (l01_demonstrations.roofline_ms(TARGET_8B, 256, n, context=1) for n in (1, 9))
    assert nine == pytest.approx(1e3 * 2 * 9 * 256 * 7.8e9 / 989e12, rel=1e-3) and one < nine / 4


def test_modelled_gpu_is_that_of_lesson_07():
    assert MODELS["MHA-7.8B"] == TARGET_8B and TARGET_8B.heads == TARGET_8B.kv_heads
    pass_ms = l01_demonstrations.roofline_ms(TARGET_8B, 8, 1, 512)
    table = l07_figures.floor_table(MODELS, [512], batch=8, device=H100).loc["MHA-7.8B", 512]
    attention_ms = TARGET_8B.layers * table["floor µs per layer"] / 1e3
    assert attention_ms / pass_ms == pytest.approx(table["share of a step"])


def test_speed_up_is_tokens_per_step_over_step_cost():
    table = l01_demonstrations.predicted({"flat": costs([10, 10, 10], 1), "steep": costs([10, 20, 30], 1)}, 2, 2.4)
    assert table["step cost"].tolist() == pytest.approx([1.2, 3.2])
    assert table["speed-up"].tolist() == pytest.approx([2, 0.75])
    with pytest.raises(ValueError, match="k must be from 0 to 2"):
        l01_demonstrations.predicted({"flat": costs([10, 10, 10], 1)}, 3, 2.4)


def test_expected_tokens_are_the_closed_form():
    assert expected_tokens(0.8, 5)[5] == pytest.approx((1 - 0.8**6) / 0.2)
    assert expected_tokens(1.0, 5)[5] == 6 and expected_tokens(0.0, 5)[5] == 1


def test_expected_tokens_where_alpha_is_known_of_few_drafts_are_the_mean_over_what_it_may_be():
    alphas = np.random.default_rng(0).beta(3 * 0.8, 3 * 0.2, 200_000)
    mean = np.mean([expected_tokens(alpha, 5) for alpha in alphas[:20_000]], axis=0)
    assert expected_tokens(0.8, 5, seen=3) == pytest.approx(mean, rel=0.01)
    assert (expected_tokens(0.8, 5, seen=3)[2:] > expected_tokens(0.8, 5)[2:]).all()


# --- what a step decides ---


def test_story_decides_as_the_engine_did(story):
    read = story.lines[story.lines.verdict.isin(["accepted", "rejected"])]
    assert {"accepted", "rejected"} == set(read.verdict)
    assert ((read.u < read.accept) == (read.verdict == "accepted")).all()
    assert read.accept.to_numpy() == pytest.approx(np.minimum(1, read.p / read.q).to_numpy())


def test_every_step_ends_with_the_targets_own_token_after_one_rejection_at_most(story):
    for _, lines in story.lines[story.lines.step > 0].groupby("step"):
        verdicts = "".join(verdict[0] if verdict != "recovered" else "R" for verdict in lines.verdict)
        assert re.fullmatch(r"a*(rn*R|b)|a+", verdicts)  # a text may end with an accepted draft
        assert lines["slot"].tolist() == list(range(1, len(lines) + 1))


def test_story_writes_what_generate_writes(pair, story):
    prompt = prompt_set("library", 1)[0]
    out = bass.generate(pair, [prompt], draft_length=5, max_new_tokens=48, temperature=0.8)
    assert story.before(10**6)[len(story.prompt) :].tolist() == out.sequences[0].tolist()


def test_p_and_q_of_the_story_are_those_of_plain_forward_passes(pair, story):
    place = story.disagreement
    assert place.verdict == "rejected"
    p, q = l01_demonstrations.laws(l01_demonstrations.next_logits(pair, story.before(place.position)), 0.8)
    assert p.sum() == pytest.approx(1) and q.sum() == pytest.approx(1)
    assert (p[place.token], q[place.token]) == pytest.approx((place.p, place.q), abs=1e-4)


def test_ids_that_only_the_target_has_get_no_draft_probability(pair):
    wide = bass.load_pair(dtype="float32")
    wide.target.resize_token_embeddings(1032, mean_resizing=False)
    p, q = l01_demonstrations.laws(l01_demonstrations.next_logits(wide, torch.tensor([5, 6, 7])), 1.0)
    assert p.shape == q.shape == (1032,) and (q[1024:] == 0).all() and q.sum() == pytest.approx(1)


def test_greedy_decoding_has_no_story(pair):
    with pytest.raises(ValueError, match="needs temperature > 0"):
        l01_demonstrations.story(pair, "def f():", draft_length=2, max_new_tokens=4, temperature=0.0)


def test_perfect_draft_is_never_rejected(pair):
    same = bass.ModelPair(target=pair.target, draft=pair.target, tokenizer=pair.tokenizer)
    told = l01_demonstrations.story(same, "def f(x):\n", draft_length=3, max_new_tokens=20, temperature=0.8)
    assert "rejected" not in set(told.lines.verdict) and told.disagreement.verdict == "accepted"
    assert told.telling_steps() == [1]


# --- what a rule emits ---


def test_rule_gives_the_targets_law_and_wrong_rules_do_not():
    found = l01_rules.distances(count=100, seed=3)
    assert len(found) == 5 and (found["the rule"] < 1e-12).all()
    assert (found["redraw from p"].drop("one token, q = p") > 1e-3).all()
    assert found["redraw from p"]["one token, q = p"] < 1e-12  # a perfect draft hides this mistake
    assert (found["accept the likely"] > 1e-3).all()


def test_emitted_laws_by_hand():
    p, q = law(0.5, 0.3, 0.2), law(0.8, 0.1, 0.1)
    by_rule = {name: l01_rules.emitted_law(p, q, rule).tolist() for name, rule in l01_rules.RULES.items()}
    assert by_rule["the rule"] == pytest.approx([0.5, 0.3, 0.2])
    assert by_rule["redraw from p"] == pytest.approx([0.65, 0.19, 0.16])
    assert by_rule["accept the likely"] == pytest.approx([0.8, 0.1, 0.1])


def test_rule_accepts_what_both_laws_share():
    p, q = law(0.5, 0.3, 0.2, 0.0), law(0.8, 0.0, 0.1, 0.1)
    accept, redraw = l01_rules.exact(p, q)
    assert float((q * accept).sum()) == pytest.approx(1 - l01_rules.total_variation(p, q))
    assert redraw.tolist() == pytest.approx([0, 0.75, 0.25, 0])


def test_text_law_by_hand():
    laws_after = {
        (): (law(0.5, 0.5), law(1.0, 0.0)),
        (0,): (law(1.0, 0.0), law(0.0, 1.0)),
        (1,): (law(0.25, 0.75),) * 2,
    }
    target, draft = (lambda text, i=i: laws_after[text][i] for i in (0, 1))
    wanted = {(0, 0): 0.5, (0, 1): 0.0, (1, 0): 0.125, (1, 1): 0.375}
    assert l01_rules.regular(target, 2) == pytest.approx(wanted)
    assert l01_rules.text_law(target, draft, 1, l01_rules.exact) == pytest.approx(wanted)
    redrawn = l01_rules.text_law(target, draft, 1, l01_rules.redraw_from_p)
    assert redrawn[0, 0] == pytest.approx(0.75)  # 0 drafted and kept half the time, then redrawn half the time


# --- what a step yields ---


def runs_by_hand():
    lines = [("easy", 1, 1), ("easy", 1, 1), ("easy", 2, 2), ("easy", 2, 0), ("hard", 1, 0), ("hard", 2, 1)]
    return pd.DataFrame(lines, columns=["prompts", "k", "accepted"]).assign(row=0, step=1)


def test_tokens_table_counts_by_definition():
    table = l01_demonstrations.tokens_table(runs_by_hand())
    assert table.columns.tolist() == ["acceptance rate", "α", "measured", "error", "formula"]
    assert table.loc["easy", "α"].tolist() == pytest.approx([1, 2 / 3])
    assert table.loc["easy", "acceptance rate"].tolist() == pytest.approx([1, 0.5])
    assert table.loc["easy", "measured"].tolist() == pytest.approx([2, 2])
    assert table.loc["easy", "formula"].tolist() == pytest.approx([1.8, 1 + 0.8 + 0.64])  # 4 of 5 tries, all together


def test_acceptance_by_slot_counts_who_got_there():
    by_slot = l01_demonstrations.acceptance_by_slot(runs_by_hand())
    assert by_slot.loc["easy"].values.tolist() == [[4, 0.75], [1, 1.0]]
    assert by_slot.loc["hard"].values.tolist() == [[2, 0.5], [1, 0.0]]


def test_runs_keep_the_steps_that_drafted_all_they_were_to(pair):
    sets = {name: prompt_set(name, 2) for name in ("mini", "library")}
    runs = l01_demonstrations.acceptance_runs(pair, sets, [1, 3], max_new_tokens=16, temperature=0.8)
    assert set(zip(runs.prompts, runs.k, strict=True)) == {(name, k) for name in sets for k in (1, 3)}
    assert ((runs.accepted >= 0) & (runs.accepted <= runs.k)).all()


def test_speed_table_has_expected_and_measured_side_by_side(pair):
    sets = {"mini": prompt_set("mini", 1)}
    options = {"repeats": 1, "max_new_tokens": 8, "temperature": 0.8}
    table = l01_demonstrations.speed_table(pair, sets, [1, 2], costs([10, 10, 10], 1), **options)
    columns = ["prompts", "k", "tokens per step", "step cost", "expected", "measured", "low", "high"]
    assert table.columns.tolist() == columns and table.k.tolist() == [1, 2]
    assert table["step cost"].tolist() == pytest.approx([1.1, 1.2])
    assert table.expected.tolist() == pytest.approx((table["tokens per step"] / table["step cost"]).tolist())
    assert (table.low <= table.measured).all() and (table.measured <= table.high).all()


# --- what is drawn ---


def named(figure):
    return {trace.name: trace for trace in figure.data}


def test_costs_are_drawn_relative_to_one_token():
    lines = named(l01_figures.cost_figure({"here": costs([10, 20, 30], 1), "there": costs([4, 4, 4], 1)}))
    assert list(lines["here"].y) == [1, 2, 3] and list(lines["there"].y) == [1, 1, 1]
    assert lines["here"].line.dash != lines["there"].line.dash
    assert lines["here"].marker.symbol != lines["there"].marker.symbol


def test_step_is_drawn_beside_its_tokens_one_by_one():
    bars = named(l01_figures.step_cost_figure(l01_demonstrations.predicted({"a": costs([10, 12, 15], 1)}, 2, 3.4), 2))
    assert list(bars["regular passes, one per token"].x) == pytest.approx([3.4])
    assert list(bars["2 drafts"].x) == pytest.approx([0.2]) and list(bars["one verifying pass"].x) == pytest.approx(
        [1.5]
    )
    assert bars["one verifying pass"].text == ("2.00×",)


def drawn_step(data):
    """Slots by verdict in the bars of one panel, and where the marks of u stand."""
    bars = {bar.name.partition(":")[0]: list(bar.x) for bar in data if bar.type == "bar" and bar.x[0] is not None}
    (marks,) = [list(zip(mark.x, mark.y, strict=True)) for mark in data if mark.type == "scatter"]
    return bars, marks


def told_step(story, step):
    """What `drawn_step` should be."""
    lines = story.lines[story.lines.step == step]
    read = lines[lines.verdict.isin(["accepted", "rejected"])]
    bars = {verdict: part["slot"].tolist() for verdict, part in lines.groupby("verdict")}
    return bars, list(zip(read["slot"], read.u, strict=True))


def test_static_steps_are_the_story(story):
    steps = story.telling_steps()
    figure = l01_figures.steps_figure(story, steps)
    for step, axis in zip(steps, ["x", "x2", "x3"], strict=True):
        assert drawn_step([trace for trace in figure.data if trace.xaxis == axis]) == told_step(story, step)
    assert len({looks.LOOKS[verdict].hatch for verdict in l01_figures.VERDICTS[:5]}) == 5  # told apart without colours


def test_step_slider_redraws_text_and_bars(pair, story):
    slider, text, figure, _ = l01_figures.step_slider(story, pair.tokenizer).children
    for step in (1, 5, 3):
        slider.value = step
        assert drawn_step(figure.data) == told_step(story, step)
        last = story.lines[story.lines.step == step].position.min()
        last += (~story.lines[story.lines.step == step].verdict.isin(["rejected", "not reached"])).sum()
        assert text.value.count("<span") == len(story.before(last)) - len(story.prompt)


def test_blanks_and_line_ends_are_visible():
    assert token_views.visible("  <a\n") == "␣␣<a↵" and token_views.visible("") == "∅"


def test_overlap_adds_up_to_both_laws():
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


def test_laws_are_drawn_beside_the_targets():
    p, q = law(0.5, 0.3, 0.2), law(0.8, 0.1, 0.1)
    bars = l01_figures.laws_figure(p, q).data
    assert [bar.name for bar in bars] == [
        "target p", "draft q (TV 0.30)", "the rule (TV 0.00)", "redraw from p (TV 0.15)", "accept the likely (TV 0.30)",
    ]  # fmt: skip
    assert list(bars[2].y) == pytest.approx([0.5, 0.3, 0.2]) and list(bars[3].y) == pytest.approx([0.65, 0.19, 0.16])


def test_tokens_are_drawn_as_counted_and_as_expected():
    table = l01_demonstrations.tokens_table(runs_by_hand())
    traces = named(l01_figures.tokens_figure(table))
    assert list(traces["easy, measured"].y) == table.loc["easy", "measured"].tolist()
    assert list(traces["hard, formula"].y) == table.loc["hard", "formula"].tolist()
    assert list(traces["k + 1: all accepted"].y) == [2, 3]


def test_slots_that_few_steps_reach_are_not_drawn():
    by_slot = l01_demonstrations.acceptance_by_slot(runs_by_hand())
    traces = named(l01_figures.slots_figure(by_slot, least=2))
    assert list(traces["easy"].x) == [1] and list(traces["easy"].y) == [0.75] and list(traces["hard"].x) == [1]


def test_speeds_are_drawn_with_their_intervals():
    line = {"prompts": "mini", "k": 2, "expected": 1.8, "measured": 1.7, "low": 1.5, "high": 1.75}
    traces = named(l01_figures.speed_figure(pd.DataFrame([line])))
    assert list(traces["mini, expected"].y) == [1.8] and list(traces["mini, measured"].y) == [1.7]
    error = traces["mini, measured"].error_y
    assert (error.array[0], error.arrayminus[0]) == pytest.approx((0.05, 0.2))


# --- exercises ---


def accept_or_recover(p, q, drafted):
    left = (p - q).clamp(min=0)
    return min(1.0, float(p[drafted] / q[drafted])), left / left.sum() if left.sum() > 0 else p


def with_chance(chance):
    return lambda p, q, drafted: (chance(p[drafted], q[drafted]), accept_or_recover(p, q, drafted)[1])


def with_law(redraw):
    return lambda p, q, drafted: (accept_or_recover(p, q, drafted)[0], redraw(p, q))


def summed_tokens(alpha, k):
    return sum(alpha**i for i in range(k + 1))


def by_token(drafted, q, p, u):
    for i, x in enumerate(drafted):
        if u[i] >= p[i][x] / q[i][x]:
            return i, (p[i] - q[i]).clamp(min=0)
    return len(drafted), p[-1]


def by_block(left_over):
    """Block verification with this weight of the next token."""

    def judge(drafted, q, p, u):
        k, w, accepted, weight = len(drafted), 1.0, 0, 1.0
        for i, x in enumerate(drafted, start=1):
            w = min(1.0, w * float(p[i - 1][x] / q[i - 1][x]))
            z = float((w * p[i] - q[i]).clamp(min=0).sum()) if i < k else 0.0
            h = w if i == k else z / (z + 1 - w) if z + 1 - w > 0 else 0.0
            if u[i - 1] < h:
                accepted, weight = i, w
        left = p[k] if accepted == k else left_over(weight, p[accepted], q[accepted]).clamp(min=0)
        return accepted, left if left.sum() > 0 else p[accepted]

    return judge


def test_block_exercise_wants_what_the_engine_does(monkeypatch, capsys):
    def engine(drafted, q, p, u):
        source = []
        monkeypatch.setattr(randomness, "accept", lambda h, key: u[None] < h)
        monkeypatch.setattr(randomness, "draw", lambda probs, key: source.append(probs[0]) or torch.zeros(1).long())
        keys = randomness.StepKeys(torch.zeros(1).long(), torch.zeros(1).long(), len(drafted))
        outcome = verification.block(drafted[None], torch.tensor([len(drafted)]), q[None], p[None], keys)
        return int(outcome.accepted), source[0]

    assert exercises.check_by_block(engine), capsys.readouterr().out


@pytest.mark.parametrize(
    "check, solution",
    [
        (exercises.check_accept_or_recover, accept_or_recover),
        (exercises.check_accept_or_recover, with_chance(lambda p, q: (p / q).clamp(max=1))),  # a tensor of one number
        (exercises.check_accept_or_recover, with_law(lambda p, q: (p - q).clamp(min=0) / (p - q).clamp(min=0).sum())),
        (exercises.check_by_block, by_block(lambda w, p, q: w * p - q)),
        (exercises.check_expected_tokens, summed_tokens),
        (exercises.check_expected_tokens, lambda a, k: (1 - a ** (k + 1)) / (1 - a) if a < 1 else k + 1),
    ],
)
def test_right_solution_is_accepted_and_a_stub_is_not_solved(check, solution, capsys):
    lesson_runs.accepted_and_stub_is_not(check, solution, capsys)


@pytest.mark.parametrize(
    "check, solution, message",
    [
        (
            exercises.check_accept_or_recover,
            with_law(lambda p, q: p),
            "the text gets the distribution [0.65, 0.19, 0.16]",
        ),
        (
            exercises.check_accept_or_recover,
            with_law(lambda p, q: (p - q).clamp(min=0)),
            "a distribution is >= 0 and sums to 1",
        ),
        (
            exercises.check_accept_or_recover,
            with_chance(lambda p, q: p / q),
            "the chance is 3; a chance is from 0 to 1",
        ),
        (exercises.check_accept_or_recover, with_chance(lambda p, q: p), "the text gets the distribution"),
        (exercises.check_accept_or_recover, lambda p, q, x: (0.0, p), "0 of the drafts stay and 0.7 is"),
        (exercises.check_accept_or_recover, lambda p, q, x: p, "a pair (chance, distribution) is expected, not Tensor"),
        (exercises.check_accept_or_recover, lambda p, q, x: (p, p), "the chance should be one number, not [3]"),
        (
            exercises.check_accept_or_recover,
            lambda p, q, x: (0.5, p[:2]),
            "the distribution should have shape [3], not [2]",
        ),
        (exercises.check_by_block, by_token, "you stop at the first draft that fails, and a later one may still pass"),
        (exercises.check_by_block, by_block(lambda w, p, q: p - q), "p is to be multiplied by the weight"),
        (exercises.check_by_block, lambda drafted, q, p, u: 0, "a pair (accepted, weights) is expected, not int"),
        (exercises.check_by_block, lambda drafted, q, p, u: (len(drafted), p[-1]), "drafts stay, not"),
        (exercises.check_expected_tokens, lambda a, k: 1 + a * k, "a draft counts only if all before it"),
        (exercises.check_expected_tokens, lambda a, k: sum(a**i for i in range(1, k + 1)), "the target adds itself"),
        (exercises.check_expected_tokens, lambda a, k: sum(a**i for i in range(k)), "one term too few"),
        (exercises.check_expected_tokens, lambda a, k: None, "expected a number, got None"),
    ],
)
def test_wrong_solution_is_told_the_first_case_and_the_difference(check, solution, message, capsys):
    lesson_runs.refused(check, solution, message, capsys)


def test_closed_form_alone_divides_by_zero(capsys):
    with pytest.raises(ZeroDivisionError):
        exercises.check_expected_tokens(lambda alpha, k: (1 - alpha ** (k + 1)) / (1 - alpha))
    assert "(alpha 1.0, k 5) raises:" in capsys.readouterr().out
