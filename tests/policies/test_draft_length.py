"""Draft-length policies against cases worked by hand."""

import numpy as np
import pytest
import torch

import bass_core as bass
import bass_lab as lab
from bass_core.draft_length import RowsView, as_policy, planned_lengths


def rows(remaining=(99, 99), steps=None):
    n = len(remaining)
    steps = np.zeros(n, int) if steps is None else np.array(steps)
    return RowsView(np.arange(n), steps, np.full(n, 10), np.full(n, 5), np.array(remaining))


def lengths_after(policy, accepted_per_step):
    """The planned lengths before and after each step in which the rows accepted these numbers (of what was planned)."""
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
        ([], [7]),
        ([(7, 0)], [7, 9]),  # one row took all: + 2
        ([(7, 0), (9, 9), (2, 11)], [7, 9, 11, 13]),
        ([(6, 5)], [7, 6]),  # a miss: 7 - ceil(7 / 10) - 0 = 6, not below 6
        ([(0, 0)], [7, 6]),
        ([(0, 0), (0, 0)], [7, 6, 4]),  # the second miss in a row: one more, 6 - 1 - 1
        ([(0, 0), (0, 0), (0, 0), (0, 0), (0, 0)], [7, 6, 4, 2, 1, 1]),  # never below 1
        ([(0, 0), (5, 0)], [7, 6, 5]),  # never below what a row accepted
        ([(0, 0), (6, 0), (0, 0)], [7, 6, 8, 7]),  # growth forgets the miss: 8 - 1 - 0
        ([(7, 7)] + [(k, 0) for k in range(9, 32, 2)] + [(31, 0)], [7, *range(9, 32, 2), 32, 32 - 4 + 3]),
    ],
)
def test_algorithm_1_reproduces_its_rule(accepted, planned):
    if accepted and accepted[-1] == (31, 0):
        planned = [*range(7, 32, 2), 32, 31]  # capped at 32; then max(1, 31, 32 - 4 - 0) = 31
        accepted = [(k, 0) for k in range(7, 32, 2)] + [(31, 0)]
    assert lengths_after(bass.BassHeuristic(), accepted) == planned


def test_algorithm_1_compares_with_what_was_submitted():
    policy = bass.BassHeuristic()
    policy.start(rows())
    policy.update(torch.tensor([3, 2]), torch.tensor([3, 0]))  # rows near their end submitted fewer than 7
    assert policy.plan(rows()) == 9


def test_steps_without_drafts_teach_nothing():
    for policy in (bass.BassHeuristic(), lab.HuggingFaceHeuristic()):
        policy.start(rows())
        before = policy.plan(rows())
        policy.update(torch.tensor([0, 0]), torch.tensor([0, 0]))
        assert policy.plan(rows()) == before


@pytest.mark.parametrize(
    ("accepted", "planned"),
    [
        ([], [5]),
        ([(5, 5)], [5, 7]),
        ([(5, 4)], [5, 4]),
        ([(0, 0)] * 6, [5, 4, 3, 2, 1, 1, 1]),
        ([(5, 5), (7, 6)], [5, 7, 6]),
    ],
)
def test_hugging_face_heuristic_wants_every_row(accepted, planned):
    assert lengths_after(lab.HuggingFaceHeuristic(), accepted) == planned


@pytest.mark.parametrize("policy", [bass.BassHeuristic(), lab.HuggingFaceHeuristic()])
def test_a_new_decode_starts_afresh_and_joining_rows_do_not(policy):
    policy.start(rows())
    initial = policy.plan(rows())
    policy.update(torch.tensor([initial, initial]), torch.tensor([initial, initial]))
    grown = policy.plan(rows())
    policy.start(rows(steps=[3, 0]))
    assert policy.plan(rows()) == grown > initial
    policy.start(rows(steps=[0, 0]))
    assert policy.plan(rows()) == initial


def test_no_row_drafts_beyond_what_it_may_emit():
    assert planned_lengths(5, rows(remaining=(1, 2, 5, 6, 9)))[1].tolist() == [0, 1, 4, 5, 5]
    assert planned_lengths(torch.tensor([3, 0, 9]), rows(remaining=(9, 9, 3)))[1].tolist() == [3, 0, 2]


@pytest.mark.parametrize("plan", [-1, 2.5, torch.tensor([1, 2, 3]), torch.tensor([1.0, 2.0])])
def test_wrong_plans_are_refused(plan):
    with pytest.raises(ValueError, match="plan must return"):
        planned_lengths(plan, rows())


def test_what_draft_length_may_be():
    assert as_policy(None) == bass.FixedLength(5)
    assert as_policy(3) == bass.FixedLength(3)
    policy = bass.BassHeuristic()
    assert as_policy(policy) is policy
    for wrong in ("5", 2.0, True):
        with pytest.raises(TypeError, match="draft_length"):
            as_policy(wrong)
    with pytest.raises(ValueError, match="-1"):
        as_policy(-1)


def test_a_policy_never_sees_an_unsubmitted_token():
    """Everything a policy is handed, collected: no argument holds token ids of the step."""
    from tiny import ragged_prompts, tiny_model

    seen = set()

    class Spy(bass.DraftLengthPolicy):
        def plan(self, view):
            seen.update(vars(view))
            return 3

        def keep_drafting(self, signals):
            seen.update(vars(signals))
            return torch.ones_like(signals.drafting)

    bass.generate(
        bass.ModelPair(tiny_model(), tiny_model(noise=0.1)), ragged_prompts(4, 6), draft_length=Spy(), max_new_tokens=8
    )
    assert seen == {
        "ids", "steps", "lengths", "generated", "remaining", "slot", "entropy", "maximum", "drafting",
    }  # fmt: skip
