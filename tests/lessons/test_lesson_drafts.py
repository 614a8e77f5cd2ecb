"""Lesson 05: what is counted of drafts, costs that are modelled, intervals, figures, the exercise, other parameters."""

import lesson_runs
import numpy as np
import pandas as pd
import pytest
import torch
from tiny import tiny_model

import bass_core as bass
from bass_core.drafters import FeatureHead
from bass_core.models import ASSETS
from bass_lab.lessons import l05_demonstrations as demonstrations
from bass_lab.lessons import l05_exercises as exercises
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


# --- drafts side by side ---


def test_drafts_share_one_target_and_are_called_by_the_end_of_their_names():
    found = demonstrations.pairs(["suffix", str(ASSETS / "deep_draft")], dtype="bfloat16")
    assert list(found) == ["suffix", "deep_draft"]
    assert found["suffix"].target is found["deep_draft"].target and found["suffix"].target.dtype == torch.bfloat16


def test_what_is_no_draft_is_refused(pairs):
    with pytest.raises(ValueError, match="at least one draft"):
        demonstrations.pairs([])
    with pytest.raises(ValueError, match="eagle"):
        demonstrations.pairs(["eagle"])
    with pytest.raises(ValueError, match="needs a draft model"):
        demonstrations.shapes(pairs)


def test_shapes_are_those_of_the_models(pairs):
    line = demonstrations.shapes({"draft": pairs["draft"]}).loc["draft"]
    assert line.tolist() == [1, 224, pairs["draft"].draft.num_parameters()]


def test_all_drafts_take_turns_and_the_first_round_is_not_counted(runs, pairs):
    turns = [demonstrations.REGULAR, *pairs]
    assert runs.draft.tolist() == turns * 4 and set(runs.repeat) == {1, 2}
    assert (runs.tokens == runs.batch * (OPTIONS["max_new_tokens"] - 1)).all()  # the prefill gave the first
    regular = runs[runs.draft == demonstrations.REGULAR]
    assert (regular.judged == 0).all() and regular.draft_ms.isna().all()


def test_what_is_counted_is_what_the_trace_says(pairs):
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


def test_two_drafts_are_compared_within_every_pair_of_runs(runs):
    ratio = demonstrations.over(runs, "draft", "layers:2")
    pairs = runs[runs.draft == "layers:2"].ms.to_numpy() / runs[runs.draft == "draft"].ms.to_numpy()
    assert len(pairs) == 4 and ratio.median == pytest.approx(np.median(pairs))


# --- the ladder ---


def test_a_modelled_draft_of_the_papers_shape_costs_what_lesson_04_says():
    layers = demonstrations.PAPERS_LAYERS
    table = demonstrations.modelled_ladder({layers: 0.8}, 8).set_index("launches")
    for how, launch in demonstrations.LAUNCHES.items():
        cost = modelled_h100(launch)
        assert table["draft ms"][how] == pytest.approx(1e3 * cost.draft(8, 1, 256))
        best = min(cost.step(8, k, 256) / sum(0.8**i for i in range(k + 1)) for k in range(17))
        assert table.ms[how] == pytest.approx(1e3 * best)


def test_depth_costs_launches():
    table = demonstrations.modelled_ladder({1: 0.8, 8: 0.8}, 1).set_index(["launches", "layers"])
    eager, graph = (table.loc[how, "draft ms"] for how in demonstrations.LAUNCHES)
    assert eager[8] > 5 * eager[1] and graph[8] < 2 * graph[1]
    assert (table.ms.xs(1, level="layers") < table.ms.xs(8, level="layers")).all()  # the same α


# --- intervals ---


def counts(accepted, judged):
    return pd.DataFrame({"accepted": accepted, "judged": judged})


def test_drafts_are_accepted_where_texts_say_so(pairs):
    """Greedy, where the chance of each draft is 0 or 1."""
    pair, prompts = pairs["draft"], prompt_set("library", 3)
    texts = Written.by(pair, prompts, max_new_tokens=40, temperature=0.0)
    chances = [torch.minimum(p, q).sum(-1) for p, q in zip(texts.p, texts.read_by(pair.draft), strict=True)]
    tokens = bass.generate(pair, prompts, max_new_tokens=40, draft_length=2, trace="tokens").trace.tokens
    starts = [len(text) - len(p) for text, p in zip(texts.tokens, texts.p, strict=True)]
    judged = tokens[tokens.kind.isin(["accepted", "recovered"])]
    for line in judged.itertuples():
        assert (line.kind == "accepted") == bool(chances[line.row][line.position - starts[line.row]])
    assert set(judged.kind) == {"accepted", "recovered"}
    found = demonstrations.judged(pair.draft, texts)
    assert found.accepted.tolist() == [float(each.sum()) for each in chances]
    assert found.judged.tolist() == list(map(len, texts.p))


def test_gain_that_all_prompts_have_is_sure_and_one_of_chance_is_not():
    generator = np.random.default_rng(0)
    before = counts(generator.integers(10, 30, 40), 40)
    better, other = before.assign(accepted=before.accepted + 4), counts(generator.integers(10, 30, 40), 40)
    sure, chance = demonstrations.alphas(before, better), demonstrations.alphas(before, other)
    assert sure.value["gain"] == pytest.approx(0.1)
    assert sure.low["gain"] == pytest.approx(0.1) and sure.high["gain"] == pytest.approx(0.1)  # the same prompts
    assert sure.low["before"] < sure.value["before"] < sure.high["before"]
    assert chance.low["gain"] < 0 < chance.high["gain"]


# --- what drafters keep ---


def test_what_is_kept_is_counted_for_every_drafter(pairs):
    config = pairs["draft"].target.config
    head = bass.FeatureDrafter(feature_head_for(pairs["draft"].target))
    found = demonstrations.keeps(pairs | {"head": bass.ModelPair(pairs["draft"].target, head)})
    keys_and_values = 2 * config.num_key_value_heads * config.head_dim * 4  # of a layer, in float32
    assert found["bytes per token"].tolist()[:2] == [0, 2 * keys_and_values]
    assert found["bytes per token"]["head"] == 2 * 2 * 16 * 4 + 4 * config.hidden_size
    assert found["own parameters"][["ngram", "layers:2"]].tolist() == [0, 0]
    assert found["own parameters"]["draft"] == pairs["draft"].draft.num_parameters()
    assert found["own parameters"]["head"] == sum(each.numel() for each in head.head.parameters())


def feature_head_for(target):
    """With random weights, of two heads of 16 numbers."""
    config = FeatureHead.config_class(
        hidden_size=target.config.hidden_size, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, intermediate_size=32, vocab_size=target.config.vocab_size, pad_token_id=None,
    )  # fmt: skip
    return FeatureHead(config).eval()


# --- figures ---


def test_ladder_figure_has_three_measures_by_depth(runs, pairs):
    table = demonstrations.compared(runs).query("batch == 2")
    figure = figures.ladder_figure(table, {"draft": 1, "layers:2": 2})
    assert [list(line.x) for line in figure.data] == [[1, 2]] * 3
    found = table.set_index("draft").loc[["draft", "layers:2"]]
    for line, column in zip(figure.data, ("alpha", "draft_ms", "ms"), strict=True):
        np.testing.assert_allclose(line.y, found[column])


def test_lines_of_equal_speed_are_those_of_the_formula():
    costs, chances = np.array([0.0, 0.1]), np.linspace(0, 0.99, 100)
    free, dear = figures._needed(2.0, costs, chances)
    assert free == pytest.approx(0.5, abs=0.011)  # the grid's step; without costs, with many drafts: 1 / (1 - α) = 2
    best = max(sum(dear**i for i in range(k + 1)) / (1 + k / 10) for k in range(figures.LONGEST + 1))
    assert dear > free and best == pytest.approx(2.0, abs=0.05)
    assert np.isnan(figures._needed(2.0, np.array([5.0]), chances)).all()


def test_cost_figure_has_every_draft_at_its_cost_and_acceptance(runs, pairs):
    table = demonstrations.compared(runs).query("batch == 2")
    points = {line.name: line for line in figures.cost_figure(table, "cost").data if line.name}
    found = table.set_index("draft")
    assert list(points) == found.index[1:].tolist()
    for name, point in points.items():
        share = found.draft_ms[name] / found.pass_ms[demonstrations.REGULAR]
        assert (point.x[0], point.y[0]) == pytest.approx((share, found.alpha[name]))
    assert len({point.marker.symbol for point in points.values()}) == len(points)  # told apart without colour


def test_alignment_figure_has_both_alphas_with_their_intervals():
    table = demonstrations.alphas(counts([1, 2, 3], [4, 4, 4]), counts([3, 2, 3], [4, 4, 4]))
    before, after = figures.alignment_figure({"library": table}).data
    assert (before.y[0], after.y[0]) == pytest.approx((0.5, 2 / 3))
    assert after.y[0] + after.error_y.array[0] == pytest.approx(table.high["after"])


def test_menus_choose_what_decodes(pairs):
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


def test_a_start_that_no_menu_has_is_refused(pairs):
    with pytest.raises(ValueError, match="draft must be one of ngram, layers:2, draft; got 'eagle'"):
        figures.drafter_view(pairs, {"mini": []}, "eagle", "mini")
    with pytest.raises(ValueError, match="prompt_set must be one of mini; got 'poems'"):
        figures.drafter_view(pairs, {"mini": []}, "draft", "poems")


# --- the drafter of ten lines ---


class Bigram(demonstrations.BigramTable):
    def draft(self, context, lengths, policy):
        token, drawn = context.last_tokens()[:, 0], []
        for slot in range(int(lengths.max())):
            q = self.law(context, token)
            token = context.draw(q, slot)
            context = context.after(token)
            drawn.append((token, self.claimed(q)))
        tokens, laws = (torch.stack(each, 1) for each in zip(*drawn, strict=True))
        return bass.Draft.of(tokens, lengths, laws)

    def law(self, context, token):
        return context.law(self.logits[token])

    def claimed(self, q):
        return q


class DraftsOne(Bigram):
    def draft(self, context, lengths, policy):
        return super().draft(context, lengths.clip(max=1), policy)


class StaysAtTheLastToken(Bigram):
    def law(self, context, token):
        return context.law(self.logits[context.last_tokens()[:, 0]])


class ForgetsTheTemperature(Bigram):
    def law(self, context, token):
        return self.logits[token].softmax(-1)


class Flatters(Bigram):
    def claimed(self, q):
        return (q + q.mean(-1, keepdim=True)) / 2


class DrawsAgain(Bigram):
    """The right law, and random numbers that are used twice."""

    def draft(self, context, lengths, policy):
        context.draw(context.law(self.logits[context.last_tokens()[:, 0]]), 0)
        return super().draft(context, lengths, policy)


@pytest.mark.slow  # the lesson itself has its solution checked
def test_exercise_takes_the_solution_and_a_stub_is_not_solved(capsys):
    lesson_runs.accepted_and_stub_is_not(exercises.check_bigram, Bigram, capsys)


@pytest.mark.parametrize(
    "attempt, message",
    [
        (DraftsOne, "3 tokens were asked for, and 1 drafted"),
        (StaysAtTheLastToken, "and the likeliest is"),
        (ForgetsTheTemperature, "by `logits`, at that temperature, it is"),
        (Flatters, "it says that it drew"),
        (DrawsAgain, "law, token verification: a random number was used twice"),
    ],
)
def test_exercise_names_what_is_wrong(attempt, message, capsys):
    lesson_runs.refused(exercises.check_bigram, attempt, message, capsys)


def test_bigram_table_is_cut_to_the_targets_tokens():
    small = tiny_model()
    logits = torch.randn(200, 200, generator=torch.Generator().manual_seed(0))
    pair = bass.ModelPair(small, Bigram(logits))
    out = bass.generate(pair, [torch.tensor([5, 6, 7])], max_new_tokens=8, draft_length=2, temperature=1.0)
    assert out.trace.summary()["acceptance_rate"] >= 0 and len(out.sequences[0]) == 8


# --- other parameters ---


@pytest.mark.slow
def test_notebook_runs_with_other_parameters(tmp_path):
    changed = {"ladder": ["deep_draft", "draft"], "drafts": ["suffix"], "batch_sizes": [2], "temperature": 0.8}
    changed |= {"max_new_tokens": 12, "repeats": 1, "aligning_tokens": 10_000, "seed": 3}
    executed = lesson_runs.execute("05_draft_models", tmp_path, **changed)
    text = "".join(str(output) for cell in executed.cells for output in cell.get("outputs", []))
    assert "suffix: 2 of 2 rows are identical" in text and text.count("Not solved yet.") == 1


def test_the_targets_own_copy_shares_what_is_not_quantized():
    pair = demonstrations.pairs(["draft", "target:int4"])["target:int4"]
    assert pair.draft.get_input_embeddings().weight is pair.target.get_input_embeddings().weight
    found = demonstrations.keeps({"target:int4": pair}).loc["target:int4"]
    linear = sum(
        each.in_features * each.out_features
        for each in pair.target.model.layers.modules()
        if hasattr(each, "in_features")
    )
    assert found["own parameters"] == linear
