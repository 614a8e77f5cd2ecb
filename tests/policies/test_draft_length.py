import contextlib

import numpy as np
import pytest
import torch
from tiny import ragged_prompts, tiny_model

import bass_core as bass
import bass_lab as lab
from bass_core.policies.protocol import RowsView, as_policy, cut_lengths, planned_lengths


def rows(remaining=(99, 99), steps=None):
    n = len(remaining)
    steps = np.zeros(n, int) if steps is None else np.array(steps)
    return RowsView(np.arange(n), steps, np.full(n, 10), np.full(n, 5), np.array(remaining))


def lengths_after(policy, accepted_per_step):
    """Return the planned lengths before and after steps with the given accepted lengths."""
    policy.start(rows())
    planned = [policy.plan(rows())]
    for accepted in accepted_per_step:
        drafted = torch.full((len(accepted),), planned[-1])
        policy.update(drafted, torch.tensor(accepted))
        planned.append(policy.plan(rows()))
    return planned


@pytest.mark.parametrize(
    ("accepted", "planned"),
    [
        ([(7, 0), (9, 9), (2, 11)], [7, 9, 11, 13]),  # a row accepted all: + 2
        ([(6, 5)], [7, 6]),  # a rejection: 7 - ceil(7 / 10) - 0 = 6, not below 6
        ([(0, 0), (0, 0), (0, 0), (0, 0), (0, 0)], [7, 6, 4, 2, 1, 1]),  # more from the second rejection; at least 1
        ([(0, 0), (5, 0)], [7, 6, 5]),  # never below an accepted length
        ([(0, 0), (6, 0), (0, 0)], [7, 6, 8, 7]),  # growth resets the rejections: 8 - 1 - 0
        ([(k, 0) for k in range(7, 32, 2)] + [(31, 0)], [*range(7, 32, 2), 32, 31]),  # at most 32; then max(31, 28)
    ],
)
def test_algorithm_1(accepted, planned):
    assert lengths_after(bass.BassHeuristic(), accepted) == planned


def test_algorithm_1_compares_with_submitted_drafts():
    policy = bass.BassHeuristic()
    policy.start(rows())
    policy.update(torch.tensor([3, 2]), torch.tensor([3, 0]))  # rows near the end submit fewer than 7
    assert policy.plan(rows()) == 9


def test_hugging_face_heuristic():
    for accepted, planned in (([(5, 4)], [5, 4]), ([(0, 0)] * 6, [5, 4, 3, 2, 1, 1, 1]), ([(5, 5), (7, 6)], [5, 7, 6])):
        assert lengths_after(lab.HuggingFaceHeuristic(), accepted) == planned


@pytest.mark.parametrize("policy", [bass.BassHeuristic(), lab.HuggingFaceHeuristic()])
def test_new_decode_starts_afresh_and_other_steps_do_not(policy):
    policy.start(rows())
    initial = policy.plan(rows())
    policy.update(torch.tensor([0, 0]), torch.tensor([0, 0]))  # no drafts
    assert policy.plan(rows()) == initial
    policy.update(torch.tensor([initial, initial]), torch.tensor([initial, initial]))
    grown = policy.plan(rows())
    policy.start(rows(steps=[3, 0]))
    assert policy.plan(rows()) == grown > initial
    policy.start(rows(steps=[0, 0]))
    assert policy.plan(rows()) == initial


def test_no_row_drafts_beyond_its_end():
    assert planned_lengths(5, rows(remaining=(1, 2, 5, 6, 9)))[1].tolist() == [0, 1, 4, 5, 5]
    assert planned_lengths(torch.tensor([3, 0, 9]), rows(remaining=(9, 9, 3)))[1].tolist() == [3, 0, 2]


def test_wrong_plans_are_refused():
    for plan in (-1, 2.5, torch.tensor([1, 2, 3]), torch.tensor([1.0, 2.0])):
        with pytest.raises(ValueError, match="plan must return"):
            planned_lengths(plan, rows())


def test_values_of_draft_length():
    assert as_policy(None) == bass.FixedLength(5)
    assert as_policy(3) == bass.FixedLength(3)
    policy = bass.BassHeuristic()
    assert as_policy(policy) is policy
    for wrong in ("5", 2.0, True):
        with pytest.raises(TypeError, match="draft_length"):
            as_policy(wrong)
    with pytest.raises(ValueError, match="-1"):
        as_policy(-1)


def test_answers_within_a_step_never_lengthen_a_draft():
    lengths = np.array([4, 4, 2])
    assert cut_lengths(lengths, torch.tensor([True, False, True]), 1).tolist() == [4, 1, 2]
    assert cut_lengths(lengths, torch.tensor([9, 2, 0]), 1).tolist() == [4, 2, 1]
    assert cut_lengths(np.array([1, 4]), torch.tensor([True, True]), 2).tolist() == [1, 4]


def test_policy_never_sees_an_unsubmitted_token():
    seen = set()

    class Spy(bass.DraftLengthPolicy):
        def plan(self, view):
            seen.update(vars(view))
            return 3

        def keep_drafting(self, signals):
            seen.update(vars(signals))
            return torch.ones_like(signals.drafting)

    pair = bass.ModelPair(tiny_model(), tiny_model(noise=0.1))
    bass.generate(pair, ragged_prompts(4, 6), draft_length=Spy(), max_new_tokens=8)
    of_rows = {"ids", "steps", "lengths", "generated", "remaining"}
    assert seen == of_rows | {"slot", "entropy", "maximum", "drafting"}


def test_policy_of_a_request_sees_only_its_own_row():
    class Own(bass.DraftLengthPolicy):
        def __init__(self, k, asks):
            self.k, self.heard = k, []
            self.keep_drafting = self.stop_at_two if asks else None

        def start(self, view):
            self.heard.append(view.ids.tolist())

        def plan(self, view):
            self.heard.append(view.ids.tolist())
            return self.k

        def stop_at_two(self, signals):
            self.heard.append([row] * len(signals.entropy) if len(signals.drafting) == 1 else signals)
            return torch.full((1,), signals.slot < 2)

        def update(self, drafted, accepted):
            assert len(drafted) == len(accepted) == 1 and int(drafted) <= (2 if self.keep_drafting else self.k)

    pair = bass.ModelPair(tiny_model(), tiny_model(noise=0.1))
    with bass.Session(pair, draft_length=3, eos_token_id=()) as session:
        session.submit(ragged_prompts(4)[0], max_new_tokens=12)
        row, own = 7, Own(4, True)
        session.submit(ragged_prompts(4)[0], max_new_tokens=12, draft_length=own, row=row)
        session.submit(ragged_prompts(5)[0], max_new_tokens=12, draft_length=(late := Own(1, False)), row=9)
        while not session.idle:
            session.step()
    assert {tuple(each) for each in own.heard} == {(7,)} and {tuple(each) for each in late.heard} == {(9,)}
    assert session.trace.steps.groupby("row").drafted.max().to_dict() == {0: 3, 7: 2, 9: 1}


class Policy(bass.DraftLengthPolicy):
    """overwrites: write into all received arrays and tensors."""

    def __init__(self, overwrites: bool):
        self.overwrites = overwrites

    def overwrite(self, *given):
        for each in given if self.overwrites else ():
            with contextlib.suppress(ValueError):  # read-only arrays
                each[:] = 2

    def start(self, view):
        self.overwrite(*vars(view).values())

    def plan(self, view):
        self.overwrite(*vars(view).values())
        return 3

    def keep_drafting(self, signals):
        self.overwrite(signals.entropy, signals.maximum, signals.drafting)
        return torch.ones(len(signals.entropy), dtype=torch.bool)

    def update(self, drafted, accepted):
        self.overwrite(drafted, accepted)


class OverwritingDrafter(bass.NgramDrafter):
    def draft(self, context, lengths, policy):
        draft = super().draft(context, lengths, policy)
        context.lengths_host[:] = lengths[:] = 2
        with pytest.raises(ValueError, match="read-only"):
            context.tokens_host[:] = 2
        return draft

    def committed(self, before, drafted, accepted):
        before[:] = drafted[:] = accepted[:] = 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_overwritten_policy_inputs_change_nothing(temperature):
    target = tiny_model(dtype="float64")
    pairs = [bass.ModelPair(target, draft) for draft in (tiny_model(dtype="float64", noise=0.1), bass.NgramDrafter())]
    meddling = [pairs[0], bass.ModelPair(target, OverwritingDrafter())]
    for pair, other in zip(pairs, meddling, strict=True):
        outs = [
            bass.generate(
                each, ragged_prompts(4, 6, 9), draft_length=policy, max_new_tokens=12, temperature=temperature
            )
            for each, policy in ((pair, Policy(False)), (other, Policy(True)))
        ]
        assert [row.tolist() for row in outs[0].sequences] == [row.tolist() for row in outs[1].sequences]
        columns = ["step", "row", "k", "drafted", "accepted", "emitted", "kv_length"]
        assert outs[0].trace.steps[columns].equals(outs[1].trace.steps[columns])
