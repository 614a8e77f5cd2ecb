"""Lesson 13: sources and states shown, four ways that write the same, exercises that name mistakes."""

import lesson_runs
import pytest
import torch
from readers import alone, sources, tiny_reader

import bass_core as bass
from bass_lab.lessons import l13_demonstrations as demonstrations
from bass_lab.lessons import l13_exercises as exercises
from bass_lab.lessons import l13_figures as figures


@pytest.fixture(scope="module")
def reading_pair() -> bass.ModelPair:
    return bass.load_pair("encoder_decoder", dtype="float32")


PROMPTS = [
    'def evens(numbers):\n    """Return the even numbers."""\n',
    'def total_length(words):\n    """Return the sum of the lengths of the words."""\n',
]


def test_weights_over_the_source_are_those_of_each_written_token(reading_pair):
    text = bass.generate(reading_pair, PROMPTS[:1], max_new_tokens=12)[0].sequence.tolist()
    weights = demonstrations.cross_attention(reading_pair, PROMPTS[0], text)
    assert weights.shape == (12, demonstrations.source_lengths(reading_pair, PROMPTS)[0])
    assert weights.sum(axis=1).to_numpy() == pytest.approx(1, abs=1e-4)
    assert len(figures.attention_figure(weights).data) == 1


def test_acceptance_by_source_adds_up_to_that_of_the_batch(reading_pair):
    out = bass.generate(reading_pair, PROMPTS, max_new_tokens=24, draft_length=3)
    table = demonstrations.by_source(out, PROMPTS, [9, 12])
    assert table.source.tolist() == ["Return the even numbers.", "Return the sum of the lengths of the words."]
    assert table.written.tolist() == [len(row.sequence) for row in out]
    assert table.drafted.sum() == out.trace.steps.drafted.sum()
    assert table["α"].between(0, 1).all() and len(figures.sources_figure(table).data) == 1


def test_four_ways_write_the_same_and_are_timed_in_turns(reading_pair):
    table = demonstrations.timed(reading_pair, PROMPTS, batch_sizes=[1, 2], draft_length=3, most=16, repeats=1)
    assert table.index.tolist() == [(batch, way) for batch in (1, 2) for way in demonstrations.WAYS]
    assert (table["ms per token"] > 0).all() and table.xs(demonstrations.WAYS[-1], level="way").speed.tolist() == [1, 1]
    assert demonstrations.over_regular(table, 2) > 0
    assert len(figures.speed_figure(table).data) == 4


def test_ways_that_differ_are_told(reading_pair, monkeypatch):
    monkeypatch.setattr(demonstrations, "written", lambda pair, way, *rest: [[len(way)]])
    with pytest.raises(AssertionError, match="different texts"):
        demonstrations.timed(reading_pair, PROMPTS, batch_sizes=[1], draft_length=1, most=2, repeats=1)


def test_ways_end_where_generate_ends():
    pair = bass.ModelPair(tiny_reader("pegasus"), tiny_reader("pegasus", noise=0.05))
    read = sources("pegasus", 5, 9, 3)
    expected = [alone(pair.target, each, 8) for each in read]
    for way in demonstrations.WAYS[:2]:
        assert demonstrations.written(pair, way, read, 2, 8) == expected


def test_a_state_that_is_not_rolled_back_writes_another_text():
    rolled = demonstrations.rolled_back(demonstrations.stateful_model(), torch.tensor([5, 9, 12, 44]), 16, 4)
    assert rolled.loc["by position", "text"] == rolled.loc["transformers.generate", "text"]
    assert rolled.loc["as it was left", "right tokens"] < 16 == rolled.loc["by position", "right tokens"]
    again = demonstrations.rolled_back(demonstrations.stateful_model(), torch.tensor([5, 9, 12, 44]), 16, 4)
    assert again.loc["by position", "right tokens"] == 16  # the bug is gone with its demonstration


def test_two_caches_are_drawn():
    assert len(figures.caches_figure([3, 5], [8, 2]).data) == 4


# --- exercises ---


def right_mask(lengths):
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def right_state(inputs, start, accepted, width):
    end = start + accepted + 1
    return [inputs[at] if at >= 0 else 0.0 for at in range(end - width + 1, end)]


def right_bytes(sources, texts, layers, numbers, element):
    return len(sources) * (max(sources) + max(texts)) * 2 * layers * numbers * element


@pytest.mark.parametrize(
    ("check", "solution"),
    [
        (exercises.check_source_mask, right_mask),
        (exercises.check_state_after, right_state),
        (exercises.check_cache_bytes, right_bytes),
    ],
)
def test_exercise_takes_the_solution(check, solution, capsys):
    lesson_runs.accepted_and_stub_is_not(check, solution, capsys)


@pytest.mark.parametrize(
    ("check", "wrong", "words"),
    [
        (exercises.check_source_mask, lambda lengths: ~right_mask(lengths), "may *not* look"),
        (
            exercises.check_source_mask,
            lambda lengths: torch.arange(max(lengths)) <= torch.arange(len(lengths))[:, None],
            "causal",
        ),
        (
            exercises.check_state_after,
            lambda inputs, start, accepted, width: right_state(inputs, len(inputs) - 1, 0, width),
            "rejected ones too",
        ),
        (
            exercises.check_state_after,
            lambda inputs, start, accepted, width: right_state(inputs, start - 1, 0, width),
            "before the step",
        ),
        (exercises.check_cache_bytes, lambda *given: right_bytes(*given) // 2, "not both"),
        (
            exercises.check_cache_bytes,
            lambda a, b, layers, n, e: 2 * (sum(a) + sum(b)) * layers * n * e,
            "as long as the longest",
        ),
    ],
)
def test_exercise_names_the_mistake(check, wrong, words, capsys):
    lesson_runs.refused(check, wrong, words, capsys)


@pytest.mark.slow
def test_notebook_runs_with_other_parameters(tmp_path):
    changed = {"batch_size": 3, "draft_length": 2, "max_new_tokens": 24, "source_count": 5, "repeats": 1}
    executed = lesson_runs.execute("13_beyond_decoders", tmp_path, **changed)
    text = "".join(str(output) for cell in executed.cells for output in cell.get("outputs", []))
    assert "3 of 3 rows are identical" in text and text.count("Not solved yet.") == 3
