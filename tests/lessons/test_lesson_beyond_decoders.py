"""Lesson 13: encoder-decoder sources, recurrent states, and four methods with the same text."""

import pytest
import torch
from readers import alone, sources, tiny_reader

import bass_core as bass
from bass_core.prompts import token_ids
from bass_lab.lessons import l13_demonstrations as demonstrations
from bass_lab.lessons import l13_figures as figures


@pytest.fixture(scope="module")
def reading_pair() -> bass.ModelPair:
    return bass.load_pair("encoder_decoder", dtype="float32")


PROMPTS = [
    'def evens(numbers):\n    """Return the even numbers."""\n',
    'def total_length(words):\n    """Return the sum of the lengths of the words."""\n',
]


def test_attention_over_the_source_has_a_row_per_token(reading_pair):
    text = bass.generate(reading_pair, PROMPTS[:1], max_new_tokens=12)[0].sequence.tolist()
    weights = demonstrations.cross_attention(reading_pair, PROMPTS[0], text)
    assert weights.shape == (12, len(token_ids(reading_pair, PROMPTS)[0]))
    assert weights.sum(axis=1).to_numpy() == pytest.approx(1, abs=1e-4)
    assert len(figures.attention_figure(weights).data) == 1


def test_four_methods_are_timed(reading_pair):
    table = demonstrations.timed(reading_pair, PROMPTS, batch_sizes=[1, 2], draft_length=3, most=16, repeats=1)
    assert table.index.tolist() == [(batch, way) for batch in (1, 2) for way in demonstrations.WAYS]
    assert (table["ms per token"] > 0).all() and table.xs(demonstrations.WAYS[-1], level="way").speed.tolist() == [1, 1]
    assert len(figures.speed_figure(table).data) == 4


def test_different_texts_are_an_error(reading_pair, monkeypatch):
    monkeypatch.setattr(demonstrations, "written", lambda pair, way, *rest: [[len(way)]])
    with pytest.raises(AssertionError, match="different texts"):
        demonstrations.timed(reading_pair, PROMPTS, batch_sizes=[1], draft_length=1, most=2, repeats=1)


def test_methods_end_like_generate():
    pair = bass.ModelPair(tiny_reader("pegasus"), tiny_reader("pegasus", noise=0.05))
    read = sources("pegasus", 5, 9, 3)
    expected = [alone(pair.target, each, 8) for each in read]
    for way in demonstrations.WAYS[:2]:
        assert demonstrations.written(pair, way, read, 2, 8) == expected


def test_state_without_rollback_writes_another_text():
    rolled = demonstrations.rolled_back(demonstrations.stateful_model(), torch.tensor([5, 9, 12, 44]), 16, 4)
    assert rolled.loc["one state and inputs", "text"] == rolled.loc["transformers.generate", "text"]
    assert rolled.loc["as it was left", "right tokens"] < 16 == rolled.loc["one state and inputs", "right tokens"]
    again = demonstrations.rolled_back(demonstrations.stateful_model(), torch.tensor([5, 9, 12, 44]), 16, 4)
    assert again.loc["one state and inputs", "right tokens"] == 16  # the demonstration has ended


def test_clamped_rows_keep_the_fewest_accepted_tokens(reading_pair):
    out = bass.generate(reading_pair, PROMPTS, max_new_tokens=16, draft_length=3)
    table = demonstrations.clamped(out, sizes=(1, 2, 9))
    assert table.index.tolist() == [1, 2]  # no step has nine rows
    steps = out.trace.steps.query("kind == 'decode'")
    both = steps[steps.groupby("step").row.transform("size") == 2]
    assert table.loc[2, "own lengths"] == both.accepted.mean() + 1
    assert table.loc[2, "least accepted"] == both.groupby("step").accepted.min().mean() + 1


def test_memory_of_states_is_that_of_the_study():
    table = demonstrations.state_memory(draft_length=7, rows=8)
    assert table["a state per token"].round(1).tolist() == [4.6, 6.1]
    assert table["a state and inputs"].round(2).tolist() == [0.65, 0.82]
