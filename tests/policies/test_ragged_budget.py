"""Draft lengths per row: what is submitted, what a policy gets to know, and the packed passes that make it pay."""

import numpy as np
import pytest
import torch
from tiny import SUPPORTED, ragged_prompts, tiny_model
from trial_policies import CHEAP, Line, PerRow

import bass_core as bass
from bass_core import attention, probe
from bass_core.draft_length import HiddenDraft, RowsView
from bass_core.runner import Runner, packs
from bass_lab.checks.enumeration import exact_law, law_of_engine
from bass_lab.checks.tabular import tabular, total_variation

INTERFACE = [name for name in SUPPORTED if name not in ("codegen", "gptj", "falcon")]


def rows(count):
    every = np.arange(count)
    return RowsView(every, every * 0, every + 10, every * 0 + 5, every * 0 + 99)


def chosen(policy, maxima, chances=None):
    """What each row submits of drafts with these probabilities."""
    policy.start(rows(len(maxima)))
    assert policy.plan(rows(len(maxima))) > 0
    maxima = np.array(maxima)
    hidden = HiddenDraft(
        np.full(len(maxima), maxima.shape[1]), maxima, maxima if chances is None else np.array(chances)
    )
    policy.choose(hidden)
    return hidden.submitted.tolist()


# --- what is known, and when ---


def test_a_token_is_known_once_it_is_submitted_and_not_before():
    hidden = HiddenDraft(np.array([2, 1]), np.array([[0.9, 0.8], [0.7, 0.6]]), np.array([[0.1, 0.2], [0.3, 0.4]]))
    assert hidden.maximum(0) == 0.9 and np.isnan(hidden.chances).all()
    assert hidden.submit(0) == 0.1 and hidden.maximum(0) == 0.8
    assert hidden.chances[0, 0] == 0.1 and np.isnan(hidden.chances).sum() == 3
    hidden.submit(0)
    hidden.submit(1)
    for ask in (hidden.maximum, hidden.submit):
        with pytest.raises(IndexError, match="has submitted all of its"):
            ask(1)
    assert hidden.submitted.tolist() == [2, 1]


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_budget_ranked_by_the_tokens_own_probabilities_is_caught(rule):
    class Peeking(bass.DraftLengthPolicy):
        def plan(self, view):
            return 2

        def choose(self, hidden):
            while hidden.submitted[0] < hidden.lengths[0] and hidden._chances[0, hidden.submitted[0]] > 0.5:
                hidden.submit(0)

    target, draft = tabular(2, seed=1), tabular(2, seed=2)
    found = law_of_engine(target, draft, 4, Peeking, verification=rule)
    assert total_variation(found, exact_law(target, 4)) > 1e-3


# --- what is submitted ---


def test_the_likeliest_drafts_of_the_batch_are_submitted():
    policy = bass.RaggedBudget(Line(draft=0.01, verify=0.3), limit=4)
    policy._power = lambda: 1.0
    # falling scores: 0.99, 0.98, 0.97, 0.95, 0.9 …; each costs 0.1 of three rows' regular step, ρ is near 3
    assert chosen(policy, [[0.99, 0.99, 0.98, 0.97], [0.9, 0.2, 0.9, 0.9], [0.1, 0.9, 0.9, 0.9]]) == [4, 1, 0]


def test_an_unlikely_token_ends_its_row_although_the_next_distribution_is_sure():
    policy = bass.RaggedBudget(Line(draft=0.01, verify=0.3), limit=4)
    policy._power = lambda: 1.0
    maxima = [[0.9, 0.99], [0.9, 0.99]]
    assert chosen(policy, maxima, chances=[[0.9, 0.99], [0.05, 0.99]]) == [2, 1]


def test_probabilities_are_raised_to_the_power_that_makes_them_come_true():
    policy = bass.RaggedBudget(CHEAP)
    policy.start(rows(4))
    assert policy._power() == 1
    for _ in range(200):  # told 0.5, accepted always
        policy.plan(rows(4))
        policy.hidden = HiddenDraft(np.full(4, 3), np.full((4, 3), 0.5), np.full((4, 3), 0.5))
        for row in (0, 1, 2, 3) * 3:
            policy.hidden.submit(row)
        policy.update(torch.full((4,), 3), torch.full((4,), 3))
    assert 0.5 ** policy._power() == pytest.approx(1, abs=0.05)


def test_the_same_history_gives_the_same_lengths():
    pair = bass.ModelPair(tiny_model(), tiny_model(noise=0.1))
    options = {"max_new_tokens": 20, "temperature": 0.7, "eos_token_id": ()}
    runs = [
        bass.generate(
            pair, ragged_prompts(3, 9, 5), draft_length=bass.RaggedBudget(CHEAP, reach=0.5), **options
        ).trace.steps
        for _ in range(2)
    ]
    assert runs[0].drafted.tolist() == runs[1].drafted.tolist()
    assert runs[0].groupby("step").drafted.nunique().max() > 1  # rows of one step differ


# --- packed passes ---


@pytest.mark.parametrize("path", ["pad", "split"])
@pytest.mark.parametrize("architecture", INTERFACE)
def test_a_packed_pass_equals_the_rectangular_one(architecture, path):
    model = tiny_model(architecture, dtype="float64")
    lengths, submitted = [7, 12, 5, 9], [3, 1, 4, 0]
    ids = torch.stack(
        [torch.arange(20) % 7 + 1, torch.arange(20) % 5 + 2, torch.arange(20) % 3 + 1, torch.ones(20).long()]
    )
    logits = []
    for packed in (False, True):
        with torch.inference_mode(), Runner(model, path, max_rows=4, capacity=20) as runner:
            runner.feed_last(ids, lengths, 12)
            starts = torch.tensor(lengths)
            following = ids.gather(1, starts[:, None] + torch.arange(4))
            runner.feed(following, starts, submitted, starts_host=lengths, packed=packed)
            # once more, over what the first pass has written
            starts = starts + torch.tensor(submitted)
            found = runner.feed(following, starts, [1, 2, 0, 4], starts_host=starts.tolist(), packed=packed)
            logits.append([found[row, :n] for row, n in enumerate([1, 2, 0, 4])])
    for one, other in zip(*logits, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_the_model_sees_the_submitted_tokens_alone():
    model, seen = tiny_model(), []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    try:
        pair = bass.ModelPair(model, tiny_model(noise=0.1))
        out = bass.generate(
            pair, ragged_prompts(3, 4, 5, 6), max_new_tokens=16, draft_length=PerRow(5), eos_token_id=()
        )
    finally:
        hook.remove()
    steps = out.trace.steps[out.trace.steps.kind == "decode"].groupby("step").drafted
    for shape, drafted in zip(seen[-len(steps) :], (part.to_numpy() for _, part in steps), strict=True):
        packed = packs(drafted + 1, drafted.max() + 1)
        assert tuple(shape) == ((1, (drafted + 1).sum()) if packed else (len(drafted), drafted.max() + 1))
    assert any(shape[0] == 1 and shape[1] > 1 for shape in seen)


def test_passes_are_packed_where_it_saves_enough():
    assert packs([1, 1, 1, 6], 6) and not packs([1, 6, 6, 6], 6) and not packs([6, 6], 6)
    assert not packs([0, 0], 1)  # a pass of nothing


def test_tokens_that_round_a_packed_pass_up_change_nothing(monkeypatch):
    """On CUDA packed passes are rounded up: the tokens that belong to no row are written to the scratch slot."""
    model = tiny_model(dtype="float64")
    lengths, ids = [4, 6], torch.arange(20).view(2, 10) % 9 + 1
    found = []
    for rounded in (False, True):
        with torch.inference_mode(), Runner(model, "pad", max_rows=2, capacity=10) as runner:
            if rounded:
                original, extra = runner._submitted, torch.tensor([6, 6, 6])
                monkeypatch.setattr(
                    runner, "_submitted", lambda *args, own=original, more=extra: torch.cat([own(*args), more])
                )
            runner.feed_last(ids, lengths, 6)
            for _ in range(2):
                logits = runner.feed(ids[:, :3], torch.tensor(lengths), [3, 1], starts_host=lengths, packed=True)
        found.append(logits)
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1, :1], found[1][1, :1])


def test_rows_that_stopped_are_fed_on_while_there_is_room(monkeypatch):
    """That takes fewer operations than to hold them back, and changes no text."""
    pair, resting, original = bass.ModelPair(tiny_model(), tiny_model(noise=0.1)), [], Runner.feed

    def feed(self, ids, starts, query_lengths, **options):
        if self.model is pair.draft:
            resting.append(list(query_lengths).count(0))
        return original(self, ids, starts, query_lengths, **options)

    def texts():
        resting.clear()
        options = {"draft_length": PerRow(5), "eos_token_id": (), "compile": "off"}
        return bass.generate(pair, ragged_prompts(3, 4, 5, 6), max_new_tokens=16, **options).sequences

    monkeypatch.setattr(Runner, "feed", feed)
    with_room = texts()
    assert resting and sum(resting) == 0
    monkeypatch.setattr(Runner, "room", 0)
    without = texts()
    assert sum(resting) > 0
    assert all(torch.equal(a, b) for a, b in zip(with_room, without, strict=True))


def test_passes_of_which_nothing_was_submitted_are_learnt_from():
    """Or they would be paid for for ever."""
    policy = bass.RaggedBudget(CHEAP)
    policy.start(rows(2))
    policy.plan(rows(2))
    before = policy.alphas().copy()
    policy.choose(HiddenDraft(np.array([3, 0]), np.full((2, 3), 0.001), np.full((2, 3), 0.001)))
    policy.update(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    assert policy.alphas()[0] < before[0]
    assert policy.alphas()[1] <= before[1]  # by what the other has shown


def test_the_path_eager_is_never_packed():
    model, seen = tiny_model(), []
    probe.resolve(model, "eager")  # probed: what follows is passes of the engine
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    try:
        pair = bass.ModelPair(model, tiny_model(noise=0.1))
        options = {"max_new_tokens": 12, "draft_length": PerRow(5), "eos_token_id": (), "attention": "eager"}
        bass.generate(pair, ragged_prompts(3, 4, 5), **options)
    finally:
        hook.remove()
    live = [shape[0] for shape in seen]  # as rows end, and never one row of them all
    assert live[:4] == [3] * 4 and live == sorted(live, reverse=True)


def test_the_probe_looks_at_packed_passes(monkeypatch):
    """A model whose packed pass is wrong gets another path."""
    model = tiny_model(seed=77)
    original = attention.Pass.unpack
    monkeypatch.setattr(
        attention.Pass, "unpack", lambda self, x: original(self, x) if self.packed is None else 0 * original(self, x)
    )
    assert "off by" in probe.probe(model, "pad")
    assert probe.resolve(model) == "eager"
