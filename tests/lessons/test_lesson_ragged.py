"""Lesson 02: replays, cache states, the naive implementation with and without bugs, figures."""

import numpy as np
import pandas as pd
import pytest
import torch
from recording import use_on_cpu
from tiny import greedy_alone, ragged_prompts, tiny_model

import bass_core as bass
from bass_lab.lessons import l02_demonstrations, l02_figures, l02_naive_batches
from bass_lab.measure import benchmark
from bass_lab.show import plots
from bass_lab.texts.prompt_sets import prompt_set

PROMPTS = ragged_prompts(5, 11, 3, 17)
NEW = 16


def tiny_pair(architecture="llama", noise=0.1):
    draft = tiny_model(architecture, dtype="float64", noise=noise)
    return bass.ModelPair(tiny_model(architecture, dtype="float64"), draft)


def decode(pair, **options):
    return bass.generate(pair, PROMPTS, draft_length=3, max_new_tokens=NEW, eos_token_id=(), **options)


@pytest.fixture(scope="module")
def run():
    return decode(tiny_pair())


def test_replay_of_hand_made_rows():
    yes, no = True, False
    agreed = [np.array([no, yes, yes, no, yes, yes]), np.array([yes, yes, no, yes, yes, yes])]
    own = l02_demonstrations.replay(agreed, k=2, lock_step=False)
    assert own.to_numpy().tolist() == [[2, 1], [1, 2]]
    together = l02_demonstrations.replay(agreed, k=2, lock_step=True)
    assert together.to_numpy().tolist() == [[1, 0, 1], [1, 0, 1]]
    assert l02_demonstrations.tokens_per_step(own) == 2.5


def test_replay_equals_the_engines_trace(run):
    agreed = l02_demonstrations.agreement(tiny_pair(), PROMPTS, run.sequences)
    own = l02_demonstrations.replay(agreed, 3, lock_step=False)
    assert own.fillna(-1).to_numpy().tolist() == plots.raster_matrix(run.trace).fillna(-1).to_numpy().tolist()
    assert own.nunique().max() > 1  # the batch was ragged


COUNTS = {"kv_length": [4, 9, 5, 10, 6, 14], "drafted": [0, 0, 3, 3, 1, 3], "accepted": [0, 0, 0, 3, 1, 2]}
STEPS = pd.DataFrame({"step": [0, 0, 1, 1, 2, 2], "row": [0, 1] * 3, "kind": ["prefill"] * 2 + ["decode"] * 4} | COUNTS)


def test_cache_states_by_hand():
    states = l02_demonstrations.cache_states(STEPS).set_index(["step", "row"])
    assert states.loc[(1, 0)].tolist() == [4, 5, 8, 8, 0, 8]  # three rejected tokens leave three stale slots
    assert states.loc[(1, 1)].tolist() == [9, 13, 13, 13, 0, 13]
    assert states.loc[(2, 0)].tolist() == [5, 7, 7, 8, 2, 7]  # a short draft overwrites two stale slots: one remains
    assert states.loc[(2, 1)].tolist() == [13, 16, 17, 17, 0, 17]


def test_with_a_fixed_length_no_stale_slot_survives_a_step(run):
    states = l02_demonstrations.cache_states(run.trace.steps).sort_values(["row", "step"])
    left_stale = (states.stale_end - states.kept).groupby(states.row).shift(fill_value=0)
    assert left_stale.sum() > 0 and (states.overwritten == left_stale).all()
    ends = states.groupby("row").kept.last().tolist()
    assert ends == [len(prompt) + NEW - 1 for prompt in PROMPTS]  # all tokens except the last have an entry


def test_slots_read_by_hand():
    table = l02_demonstrations.slots_read(l02_demonstrations.cache_states(STEPS))
    assert table["key slots read"].tolist() == [2 * 13 + 2 * 17, 8 + 13 + 7 + 17, 8 + 13 + 7 + 17]
    assert table["of these wasted"].tolist() == [15, 0, 0]
    assert table["launches per layer and pass"].tolist() == [1, 2, 1]


@pytest.mark.parametrize("path, poison, recorded", [("pad", 1e4, False), ("split", torch.nan, True)])
def test_poison_in_unused_slots_does_no_harm(run, path, poison, recorded, monkeypatch):
    if recorded:  # as on a GPU
        use_on_cpu(monkeypatch)
    found = l02_demonstrations.over_poison(tiny_pair(), PROMPTS, path, poison, NEW, draft_length=3, eos_token_id=())
    assert l02_naive_batches.differing(found, run.sequences) == []


def test_nan_is_fatal_for_padded_attention():
    assert l02_demonstrations.over_poison(tiny_pair(), PROMPTS, "pad", torch.nan, NEW, eos_token_id=()) is None


@pytest.mark.parametrize("architecture, k", [("llama", 4), ("gpt2", 1)])
def test_naive_rows_without_a_bug_equal_transformers(architecture, k):
    pair = tiny_pair(architecture)
    naive = l02_naive_batches.naive_generate(pair, PROMPTS, draft_length=k, max_new_tokens=NEW)
    for prompt, found in zip(PROMPTS, naive.sequences, strict=True):
        assert found.tolist() == greedy_alone(pair.target, prompt, NEW).tolist()
    assert naive.missing == 0


def test_naive_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="bug must be one of positions, mask"):
        l02_naive_batches.naive_generate(tiny_pair(), PROMPTS, "typo")
    with pytest.raises(ValueError, match="needs a draft model"):
        l02_naive_batches.naive_generate(bass.ModelPair(tiny_model()), PROMPTS)
    with pytest.raises(ValueError, match="draft_length"):
        l02_naive_batches.naive_generate(tiny_pair(), PROMPTS, draft_length=0)


@pytest.fixture(scope="module")
def embedded(pair):
    prompts, options = prompt_set("library", 4), {"max_new_tokens": 24}
    bugs = (None, *l02_naive_batches.BUGS)
    runs = {bug: l02_naive_batches.naive_generate(pair, prompts, bug, **options) for bug in bugs}
    return runs, benchmark.greedy_alone(pair, prompts, **options)


@pytest.mark.ci
def test_bugs_change_texts_as_the_lesson_says(embedded):
    runs, alone = embedded
    wrong = {bug: l02_naive_batches.differing(run.sequences, alone) for bug, run in runs.items()}
    assert wrong[None] == wrong["pads"] == wrong["behind"] == []
    assert all(len(wrong[bug]) >= 3 for bug in ("positions", "mask", "cut", "bonus"))
    longest = 2  # padding does no harm to the longest row
    assert longest not in wrong["positions"] and longest not in wrong["mask"]
    assert runs[None].missing == 0 and runs["cut"].missing > 10 and runs["bonus"].missing > 10


@pytest.mark.ci
def test_pads_pile_up_in_the_cache(embedded):
    runs, _ = embedded
    steps = len(runs["pads"].slots)
    assert runs["pads"].slots == [runs["pads"].slots[0] + 5 * step for step in range(steps)]  # k + 1 per step
    assert runs["pads"].slots[-1] > 1.2 * runs[None].slots[-1]


def test_draft_one_token_behind_lowers_acceptance():
    twin = bass.ModelPair(tiny_model(dtype="float64"), tiny_model(dtype="float64"))
    assert l02_naive_batches.naive_generate(twin, PROMPTS, draft_length=3).alpha == 1
    assert l02_naive_batches.naive_generate(twin, PROMPTS, "behind", draft_length=3).alpha < 0.95


@pytest.mark.parametrize("bug", ["positions", "cut"])
def test_draft_that_equals_the_target_hides_a_bug(bug):
    target = tiny_model(dtype="float64")
    options = {"draft_length": 3, "max_new_tokens": NEW}

    def wrong(pair):
        found = l02_naive_batches.naive_generate(pair, PROMPTS, bug, **options).sequences
        return l02_naive_batches.differing(found, benchmark.greedy_alone(pair, PROMPTS, max_new_tokens=NEW))

    assert wrong(bass.ModelPair(target, target)) == [] and wrong(tiny_pair())


def test_right_tokens_are_counted_up_to_the_first_wrong_one():
    right = [torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6])]
    found = [torch.tensor([1, 9, 3]), torch.tensor([4, 5, 6])]
    assert l02_naive_batches.right_tokens(found, right) == [1, 3] and l02_naive_batches.differing(found, right) == [0]


def test_lock_step_sliders_redraw():
    alpha, batch, k, sentence, figure, _ = l02_figures.lock_step_explorer(0.9, 5, 8).children
    assert "<b>4.69</b>" in sentence.value and "<b>1.74</b>" in sentence.value and len(figure.data[0].x) == 5
    k.value, batch.value = 2, 1
    assert list(figure.data[0].y) == list(figure.data[1].y) == pytest.approx([0.9, 0.81])
    alpha.value = 0.5
    assert list(figure.data[0].y) == [0.5, 0.25] and "<b>1.75</b>" in sentence.value


def test_cache_slider_shows_the_step():
    states = l02_demonstrations.cache_states(STEPS)
    slider, sentence, figure, _ = l02_figures.cache_slider(states).children
    parts = {bars.name: bars for bars in figure.data}
    assert list(parts) == list(l02_figures.SLOTS) and "step 1" in sentence.value
    assert list(parts["committed in this step"].x) == [1, 4]
    slider.value = 2
    assert list(parts["committed"].x) == [5, 13] and list(parts["committed in this step"].x) == [2, 3]
    stale, empty = parts["stale: rejected, overwritten next"], parts["unused by the row"]
    assert list(stale.base) == [7, 16] and list(stale.x) == [1, 1]
    assert list(empty.base) == [8, 17] and list(empty.x) == [9, 0]
    assert "5 new entries are kept, 1 are stale. 2 stale entries" in sentence.value
    assert "29% padding" in sentence.value


def test_diff_marks_both_texts_from_the_first_wrong_token(pair):
    tokenizer = pair.tokenizer
    right, found = (torch.tensor(tokenizer(text)["input_ids"]) for text in ("x = 1 < 2", "x = 1 > 2"))
    shown = l02_figures.text_diff(right, found, tokenizer, "a bug")
    assert "&lt; 2</span>" in shown and "&gt; 2</span>" in shown and "a bug" in shown
    assert shown.count("x = 1") == 2 and "tokens are right, then" in shown
    assert "The same text." in l02_figures.text_diff(right, right, tokenizer)
