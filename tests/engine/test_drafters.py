"""n-gram drafting, and drafts whose vocabulary is not the target's."""

import numpy as np
import pytest
import torch
from tiny import ragged_prompts, tiny_model

import bass_core as bass
from bass_core.drafters import Context
from bass_core.randomness import StepKeys


def lookup(rows, k, longest=3, shortest=1):
    """What an NgramDrafter proposes for these rows of tokens."""
    lengths = np.array([len(row) for row in rows])
    tokens = torch.full((len(rows), lengths.max() + 4), 7)  # 7s beyond a row's end must not be found
    for line, row in zip(tokens, rows, strict=True):
        line[: len(row)] = torch.tensor(row)
    nothing = torch.zeros(len(rows), dtype=torch.int64)
    keys, params = StepKeys(nothing, nothing, k), bass.SamplingParams()
    context = Context(range(len(rows)), tokens, torch.from_numpy(lengths), lengths, keys, params, seen=None)
    draft = bass.NgramDrafter(longest, shortest).draft(context, np.full(len(rows), k), bass.FixedLength(k))
    return [t[:n].tolist() for t, n in zip(draft.tokens, draft.lengths_host, strict=True)]


@pytest.mark.parametrize(
    ("row", "k", "expected"),
    [
        ([1, 2, 3, 4, 1, 2, 3], 2, [4, 1]),  # what followed 1 2 3
        ([1, 2, 3, 4, 1, 2, 3], 9, [4, 1, 2, 3]),  # no more than there is
        ([5, 3, 8, 3, 9, 3], 1, [9]),  # the most recent occurrence
        ([1, 2, 9, 3, 2, 8, 1, 2], 1, [9]),  # the longer ending wins over the more recent shorter one
        ([1, 2, 3, 4], 3, []),  # nothing repeats
        ([6, 6, 6], 2, [6]),
        ([4], 3, []),
        ([7, 1], 3, []),
    ],
)
def test_what_followed_last_time_is_drafted(row, k, expected):
    assert lookup([row], k) == [expected]


def test_rows_are_looked_up_independently():
    rows = [[1, 2, 3, 4, 1, 2, 3], [4], [5, 3, 8, 3, 9, 3]]
    assert lookup(rows, 2) == [lookup([row], 2)[0] for row in rows]


def test_shortest_ending_is_respected():
    assert lookup([[5, 3, 8, 3]], 2, longest=3, shortest=2) == [[]]
    with pytest.raises(ValueError, match="shortest"):
        bass.NgramDrafter(longest=1, shortest=2)


def test_ngram_drafts_are_accepted_where_the_text_repeats():
    model = tiny_model("llama", seed=3)
    out = bass.generate(bass.ModelPair(model), ragged_prompts(6, 9), max_new_tokens=60, eos_token_id=())
    assert 0 < out.trace.summary()["alpha"] < 1


def test_draft_knows_what_was_committed_while_it_did_not_draft():
    """Rows that draft nothing for a while feed the draft every token it missed."""
    target = tiny_model(dtype="float64")
    with bass.Session(bass.ModelPair(target, target), draft_length=3, eos_token_id=()) as session:
        session.submit(ragged_prompts(5)[0], max_new_tokens=40)
        session.step()
        session.policy = bass.FixedLength(0)
        for _ in range(9):
            session.step()
        assert session.rows.lengths_host[0] - session.drafter.cached[0] == 10
        session.policy = bass.FixedLength(3)
        event = session.step()
        assert len(event.new_tokens[0]) == 4  # a perfect draft is accepted whole
        assert session.rows.lengths_host[0] - session.drafter.cached[0] <= 2
