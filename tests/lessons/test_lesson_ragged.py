"""Lesson 02: its replays, the naive implementation with and without bugs, what its figures hold, its exercises."""

import itertools

import lesson_runs
import numpy as np
import pandas as pd
import pytest
import torch
from recording import use_on_cpu
from tiny import greedy_alone, ragged_prompts, tiny_model

import bass_core as bass
from bass_core.draft_length import expected_tokens
from bass_lab.lessons import l02_demonstrations, l02_figures, l02_naive_batches
from bass_lab.lessons import l02_exercises as exercises
from bass_lab.measure import benchmark
from bass_lab.show import plots
from bass_lab.texts.prompt_sets import prompt_set

PROMPTS = ragged_prompts(5, 11, 3, 17)
NEW = 24


def tiny_pair(architecture="llama", noise=0.1):
    draft = tiny_model(architecture, dtype="float64", noise=noise)
    return bass.ModelPair(tiny_model(architecture, dtype="float64"), draft)


def decode(pair, **options):
    return bass.generate(pair, PROMPTS, draft_length=3, max_new_tokens=NEW, eos_token_id=(), **options)


@pytest.fixture(scope="module")
def run():
    return decode(tiny_pair())


# --- lock-step ---


def enumerated_tokens(alpha, k, batch):
    """Expected tokens per step over every pattern of accepted and rejected drafts."""
    total = 0.0
    for pattern in itertools.product((True, False), repeat=batch * k):
        rows = np.array(pattern).reshape(batch, k)
        kept = rows.cumprod(1).sum(1).min()
        total += alpha ** rows.sum() * (1 - alpha) ** (batch * k - rows.sum()) * (kept + 1)
    return total


@pytest.mark.parametrize("batch, k", [(1, 1), (1, 4), (2, 3), (3, 2), (4, 3)])
def test_lock_step_formula_equals_enumeration(batch, k):
    for alpha in (0.3, 0.9):
        assert expected_tokens(alpha**batch, k)[k] == pytest.approx(enumerated_tokens(alpha, k, batch))


def test_speed_divides_tokens_by_the_cost_of_a_step():
    assert l02_demonstrations.expected_speed(1.0, 5, batch=8, draft_cost=0.2) == pytest.approx(6 / 2)
    assert l02_demonstrations.expected_speed(0.0, 5, draft_cost=0.0) == 1


def test_replay_of_hand_made_rows():
    yes, no = True, False
    agreed = [np.array([no, yes, yes, no, yes, yes]), np.array([yes, yes, no, yes, yes, yes])]
    own = l02_demonstrations.replay(agreed, k=2, lock_step=False)
    assert own.to_numpy().tolist() == [[2, 1], [1, 2]]
    together = l02_demonstrations.replay(agreed, k=2, lock_step=True)
    assert together.to_numpy().tolist() == [[1, 0, 1], [1, 0, 1]]
    assert l02_demonstrations.tokens_per_step(own) == 2.5


def test_replay_marks_rows_that_have_ended():
    own = l02_demonstrations.replay(
        [np.array([False, True, True]), np.array([False, False, False])], 2, lock_step=False
    )
    assert own.fillna(-1).to_numpy().tolist() == [[1, -1], [0, 0]]
    assert list(own.columns) == [1, 2]


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_replay_gives_the_engines_trace_back(architecture):
    pair = tiny_pair(architecture)
    out = decode(pair)
    own = l02_demonstrations.replay(l02_demonstrations.agreement(pair, PROMPTS, out.sequences), 3, lock_step=False)
    traced = plots.raster_matrix(out.trace)
    assert own.fillna(-1).to_numpy().tolist() == traced.fillna(-1).to_numpy().tolist()
    assert own.nunique().max() > 1  # the batch was ragged


# --- the cache ---

STEPS = pd.DataFrame(
    {
        "step": [0, 0, 1, 1, 2, 2],
        "row": [0, 1, 0, 1, 0, 1],
        "kind": ["prefill"] * 2 + ["decode"] * 4,
        "kv_length": [4, 9, 5, 10, 6, 14],
        "drafted": [0, 0, 3, 3, 1, 3],
        "accepted": [0, 0, 0, 3, 1, 2],
    }
)


def test_cache_states_by_hand():
    states = l02_demonstrations.cache_states(STEPS).set_index(["step", "row"])
    assert states.loc[(1, 0)].tolist() == [4, 5, 8, 8, 0, 8]  # three rejected tokens leave three stale slots
    assert states.loc[(1, 1)].tolist() == [9, 13, 13, 13, 0, 13]
    assert states.loc[(2, 0)].tolist() == [5, 7, 7, 8, 2, 7]  # a short draft overwrites two of them: one lives on
    assert states.loc[(2, 1)].tolist() == [13, 16, 17, 17, 0, 17]


def test_with_a_fixed_length_no_stale_slot_survives_a_step(run):
    states = l02_demonstrations.cache_states(run.trace.steps).sort_values(["row", "step"])
    left_stale = (states.stale_end - states.kept).groupby(states.row).shift(fill_value=0)
    assert left_stale.sum() > 0 and (states.overwritten == left_stale).all()
    ends = states.groupby("row").kept.last().tolist()
    assert ends == [len(prompt) + NEW - 1 for prompt in PROMPTS]  # all but the last token have an entry


def test_slots_read_by_hand():
    table = l02_demonstrations.slots_read(l02_demonstrations.cache_states(STEPS))
    assert table["key slots read"].tolist() == [2 * 13 + 2 * 17, 8 + 13 + 7 + 17, 8 + 13 + 7 + 17]
    assert table["of these in vain"].tolist() == [15, 0, 0]
    assert table["launches per layer and pass"].tolist() == [1, 2, 1]


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("path, poison", [("pad", 1e4), ("split", 1e4), ("split", torch.nan)])
def test_poison_that_does_no_harm(run, path, poison, recorded, monkeypatch):
    if recorded:  # as on a GPU
        use_on_cpu(monkeypatch)
    found = l02_demonstrations.over_poison(tiny_pair(), PROMPTS, path, poison, NEW, draft_length=3, eos_token_id=())
    assert l02_naive_batches.differing(found, run.sequences) == []


def test_nan_is_fatal_for_padded_attention():
    assert l02_demonstrations.over_poison(tiny_pair(), PROMPTS, "pad", torch.nan, NEW, eos_token_id=()) is None


# --- the naive implementation ---


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3", "gpt_neox"])
@pytest.mark.parametrize("k", [1, 4])
def test_without_a_bug_every_row_equals_transformers(architecture, k):
    pair = tiny_pair(architecture)
    naive = l02_naive_batches.naive_generate(pair, PROMPTS, draft_length=k, max_new_tokens=NEW)
    for prompt, found in zip(PROMPTS, naive.sequences, strict=True):
        assert found.tolist() == greedy_alone(pair.target, prompt, NEW).tolist()
    assert naive.missing == 0
    assert len({count for step in naive.accepted for count in step}) > 2  # some accepted, some rejected, some ended


def test_naive_rows_accept_what_the_engine_accepts(run):
    naive = l02_naive_batches.naive_generate(tiny_pair(), PROMPTS, draft_length=3, max_new_tokens=NEW)
    ours, theirs = plots.raster_matrix(run.trace), pd.DataFrame(naive.accepted).T
    both = min(ours.shape[1], theirs.shape[1]) - 1  # the engine drafts less where a row ends
    assert ours.iloc[:, : both // 2].to_numpy().tolist() == theirs.iloc[:, : both // 2].to_numpy().tolist()


def test_naive_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="bug must be one of positions, mask"):
        l02_naive_batches.naive_generate(tiny_pair(), PROMPTS, "typo")
    with pytest.raises(ValueError, match="needs a draft model"):
        l02_naive_batches.naive_generate(bass.ModelPair(tiny_model()), PROMPTS)
    with pytest.raises(ValueError, match="draft_length"):
        l02_naive_batches.naive_generate(tiny_pair(), PROMPTS, draft_length=0)


@pytest.fixture(scope="module")
def embedded(pair):
    """Runs of the embedded pair with each bug, as the lesson shows them, and the texts of the rows alone."""
    prompts, options = prompt_set("library", 4), {"max_new_tokens": 24}
    runs = {
        bug: l02_naive_batches.naive_generate(pair, prompts, bug, **options) for bug in (None, *l02_naive_batches.BUGS)
    }
    return runs, benchmark.greedy_alone(pair, prompts, **options)


def test_embedded_pair_without_a_bug(embedded):
    runs, alone = embedded
    assert l02_naive_batches.differing(runs[None].sequences, alone) == []
    assert runs[None].missing == 0 and 0.4 < runs[None].alpha < 0.7


@pytest.mark.parametrize("bug", ["positions", "mask", "cut", "bonus"])
def test_bug_changes_most_texts(embedded, bug):
    runs, alone = embedded
    assert len(l02_naive_batches.differing(runs[bug].sequences, alone)) >= 3


def test_longest_row_stays_right_where_padding_is_the_trouble(embedded):
    runs, alone = embedded
    longest = 2  # of 140 tokens; the others have at most 128, and no row gains 12 on it
    for bug in ("positions", "mask"):
        assert longest not in l02_naive_batches.differing(runs[bug].sequences, alone)


@pytest.mark.parametrize("bug", ["cut", "bonus"])
def test_bug_loses_cache_entries(embedded, bug):
    assert embedded[0][bug].missing > 10


def test_pads_pile_up_beside_right_texts(embedded):
    runs, alone = embedded
    assert l02_naive_batches.differing(runs["pads"].sequences, alone) == []
    steps = len(runs["pads"].slots)
    assert runs["pads"].slots == [runs["pads"].slots[0] + 5 * step for step in range(steps)]  # k + 1 per step
    assert runs["pads"].slots[-1] > 1.2 * runs[None].slots[-1]


def test_draft_one_token_behind_costs_acceptance_alone(embedded):
    runs, alone = embedded
    assert l02_naive_batches.differing(runs["behind"].sequences, alone) == []
    twin = bass.ModelPair(tiny_model(dtype="float64"), tiny_model(dtype="float64"))
    assert l02_naive_batches.naive_generate(twin, PROMPTS, draft_length=3).alpha == 1
    assert l02_naive_batches.naive_generate(twin, PROMPTS, "behind", draft_length=3).alpha < 0.95


def test_draft_that_equals_the_target_hides_two_bugs():
    target = tiny_model(dtype="float64")
    twin = bass.ModelPair(target, target)
    alone = benchmark.greedy_alone(twin, PROMPTS, max_new_tokens=NEW)
    for bug in ("positions", "cut"):
        options = {"draft_length": 3, "max_new_tokens": NEW}
        assert (
            l02_naive_batches.differing(
                l02_naive_batches.naive_generate(twin, PROMPTS, bug, **options).sequences, alone
            )
            == []
        )
        assert l02_naive_batches.differing(
            l02_naive_batches.naive_generate(tiny_pair(), PROMPTS, bug, **options).sequences, alone
        )


def test_symptom_table_has_a_line_per_bug(embedded):
    runs, alone = embedded
    table = l02_naive_batches.symptom_table(runs, runs, alone)
    assert list(table.index) == ["none", *l02_naive_batches.BUGS.values()]
    assert table["rows wrong (of 4)"]["none"] == 0 and table["slots per row"]["none"] == runs[None].slots[-1]
    assert table["α, draft = target"]["(d) pads pile up"] == runs["pads"].alpha


def test_right_tokens_are_counted_up_to_the_first_wrong_one():
    right = [torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6])]
    found = [torch.tensor([1, 9, 3]), torch.tensor([4, 5, 6])]
    assert l02_naive_batches.right_tokens(found, right) == [1, 3] and l02_naive_batches.differing(found, right) == [0]


# --- figures and widgets ---


def test_lock_step_figure_draws_both_laws():
    own, together, own_speed, together_speed = l02_figures.lock_step_figure(0.5, 2, 2).data
    assert list(own.y) == [0.5, 0.25] and list(together.y) == [0.25, 0.0625]
    assert set(own_speed.y) == {1.75 / 1.1} and together_speed.y[1] == 1.3125 / 1.1
    assert [rows for rows, size in zip(together_speed.x, together_speed.marker.size, strict=True) if size > 10] == [2]


def test_lock_step_sliders_redraw():
    alpha, batch, k, sentence, figure, _ = l02_figures.lock_step_explorer(0.9, 5, 8).children
    assert "<b>4.69</b>" in sentence.value and "<b>1.74</b>" in sentence.value and len(figure.data[0].x) == 5
    k.value, batch.value = 2, 1
    assert list(figure.data[0].y) == list(figure.data[1].y) == pytest.approx([0.9, 0.81])
    alpha.value = 0.5
    assert list(figure.data[0].y) == [0.5, 0.25] and "<b>1.75</b>" in sentence.value


def test_lock_step_table():
    table = l02_figures.lock_step_table([0.9], 5, [2, 8]).round(2)
    assert table.loc[0.9].tolist() == [4.69, 3.78, 1.74]


def test_kept_figure_has_the_rows_and_their_least():
    table = pd.DataFrame([[3, 0], [1, np.nan]], columns=[1, 2])
    rows, least = l02_figures.kept_figure({"a set": table}).data
    assert rows.z.tolist() == [[3, 0], [1, None]] and rows.text.tolist() == [["3", "0"], ["1", ""]]
    assert least.z.tolist() == [[1, 0]]


def test_progress_figure_counts_tokens():
    own, together = pd.DataFrame([[2, np.nan], [1, 0]], columns=[1, 2]), pd.DataFrame([[1, 0], [1, 0]], columns=[1, 2])
    first, second, lock_step, regular = l02_figures.progress_figure({"a set": (own, together)}).data
    assert list(first.x) == [0, 1] and list(first.y) == [1, 4]
    assert list(second.y) == list(lock_step.y) == [1, 3, 4]
    assert list(regular.x) == [0, 3] and list(regular.y) == [1, 4]


def test_cache_slider_shows_the_step():
    states = l02_demonstrations.cache_states(STEPS)
    slider, sentence, figure, _ = l02_figures.cache_slider(states).children
    parts = {bars.name: bars for bars in figure.data}
    assert list(parts) == list(l02_figures.SLOTS) and "step 1" in sentence.value
    assert list(parts["committed in this step"].x) == [1, 4]
    slider.value = 2
    assert list(parts["committed"].x) == [5, 13] and list(parts["committed in this step"].x) == [2, 3]
    stale, empty = parts["stale: rejected, overwritten next"], parts["none of the row's"]
    assert list(stale.base) == [7, 16] and list(stale.x) == [1, 1]
    assert list(empty.base) == [8, 17] and list(empty.x) == [9, 0]
    assert "5 new ones are kept, 1 are stale, and 2 stale ones" in sentence.value
    assert "29% padding" in sentence.value


def test_static_cache_figure_has_a_panel_per_step():
    figure = l02_figures.cache_figure(l02_demonstrations.cache_states(STEPS), [1, 2])
    assert len(figure.data) == 2 * len(l02_figures.SLOTS)
    assert [note.text for note in figure.layout.annotations] == ["after step 1", "after step 2"]


def test_diff_marks_both_texts_from_the_first_wrong_token(pair):
    tokenizer = pair.tokenizer
    right, found = (torch.tensor(tokenizer(text)["input_ids"]) for text in ("x = 1 < 2", "x = 1 > 2"))
    shown = l02_figures.text_diff(right, found, tokenizer, "a bug")
    assert "&lt; 2</span>" in shown and "&gt; 2</span>" in shown and "a bug" in shown
    assert shown.count("x = 1") == 2 and "tokens are right, then" in shown
    assert "The same text." in l02_figures.text_diff(right, right, tokenizer)


def test_damage_figure_counts_right_tokens():
    right = [torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6])]
    (cells,) = l02_figures.damage_figure({None: right, "mask": [right[0], right[0]]}, right).data
    assert [list(line) for line in cells.z] == [[3, 3], [3, 0]]
    assert [list(line) for line in cells.text] == [["✓", "✓"], ["✓", "0"]]
    assert list(cells.y) == ["none", l02_naive_batches.BUGS["mask"]]


# --- exercises ---


def positions(lengths, drafted):
    return lengths[:, None] - 1 + torch.minimum(torch.arange(int(drafted.max()) + 1), drafted[:, None])


def keep(accepted, k):
    return torch.arange(k + 1) <= accepted[:, None]


def commit(tokens, lengths, choices, accepted, behind=0, more=1):
    slots = lengths[:, None] + behind + torch.arange(choices.shape[1])
    return tokens.scatter(1, slots, choices), lengths + accepted + more


def commit_behind_the_longest(tokens, lengths, choices, accepted):
    slots = (lengths.max() + torch.arange(choices.shape[1])).expand_as(choices)
    return tokens.scatter(1, slots, choices), lengths + accepted + 1


def test_commit_exercise_takes_the_solution_and_a_stub_is_not_solved(capsys):
    lesson_runs.accepted_and_stub_is_not(exercises.check_commit, commit, capsys)


@pytest.mark.parametrize("check, solution", [(exercises.check_positions, positions), (exercises.check_keep, keep)])
def test_right_solution_is_accepted_and_a_stub_is_not_solved(check, solution, capsys):
    lesson_runs.accepted_and_stub_is_not(check, solution, capsys)
    lesson_runs.accepted_and_stub_is_not(check, lambda *arguments: solution(*arguments).tolist(), capsys)


@pytest.mark.parametrize(
    "check, solution, message",
    [
        (
            exercises.check_positions,
            lambda lengths, drafted: positions(lengths, drafted) + 1,
            "row 0, query 0 (the last committed token) stands at 4, got 5",
        ),
        (
            exercises.check_positions,
            lambda lengths, drafted: (lengths.max() - 1 + torch.arange(drafted.max() + 1)).expand(len(lengths), -1),
            "two rows of different lengths: lengths [5, 9], drafted [3, 3]): row 0, query 0",
        ),
        (
            exercises.check_positions,
            lambda lengths, drafted: lengths[:, None] - 1 + torch.arange(drafted.max() + 1),
            "row 0, query 2 (padding, which repeats the row's last valid position) stands at 5, got 6",
        ),
        (
            exercises.check_positions,
            lambda lengths, drafted: lengths[:, None] + torch.arange(drafted.max()),
            "expected positions of shape [1, 4], got tensor",
        ),
        (exercises.check_positions, lambda *_: 7, "expected positions of shape [1, 4], got 7"),
        (
            exercises.check_keep,
            lambda accepted, k: torch.arange(k + 1) < accepted[:, None],
            "row 0 accepted 2: entry 2 (drafted token 2) was accepted, yet it is dropped",
        ),
        (
            exercises.check_keep,
            lambda accepted, k: keep(accepted, k) & (torch.arange(k + 1) > 0),
            "entry 0 (the last committed token) is part of the text, yet it is dropped",
        ),
        (
            exercises.check_keep,
            lambda accepted, k: (torch.arange(k + 1) <= accepted.min()).expand(len(accepted), -1),
            "row 0 accepted 3: entry 2 (drafted token 2) was accepted, yet it is dropped",
        ),
        (
            exercises.check_keep,
            lambda accepted, k: torch.ones(len(accepted), k + 1),
            "entry 3 (drafted token 3) was rejected, yet it is kept",
        ),
        (exercises.check_commit, commit_behind_the_longest, "its new tokens stand behind the longest row"),
        (exercises.check_commit, lambda *given: commit(*given, more=0), "the target's own token counts, too"),
        (exercises.check_commit, lambda *given: commit(*given, behind=1), "row 0 should begin with ["),
        (exercises.check_commit, lambda *given: commit(*given)[0], "a pair (tokens, lengths) of tensors is expected"),
        (exercises.check_keep, lambda accepted, k: accepted, "expected 1 rows of 5 entries, got tensor"),
    ],
)
def test_wrong_solution_is_told_the_first_case_and_the_difference(check, solution, message, capsys):
    lesson_runs.refused(check, solution, message, capsys)
