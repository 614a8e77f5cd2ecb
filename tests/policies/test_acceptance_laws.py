"""What is learnt of drafts: the laws, the posterior of all rows in common, and that of each row."""

from copy import deepcopy

import numpy as np
import pytest
from scipy import stats

from bass_core.policies import acceptance_laws
from bass_core.policies.acceptance_laws import Acceptance, AcceptanceByRow, laws

HARD, EASY = (9, 1, 0, 0, 0), (0, 0, 0, 1, 9)  # of ten steps with four drafts, how many had 0, 1, … 4 accepted


def seen(acceptance, tried, accepted, steps=1):
    """The posterior after steps in which the rows had so many of their drafts accepted."""
    tried, accepted = np.array(tried), np.array(accepted)
    weights = (np.ones(len(tried)),) if isinstance(acceptance, Acceptance) else ()
    for _ in range(steps):
        acceptance.update(tried, accepted, *weights)
    return acceptance


def by_row(ids=(0,), before=None, slots=16):
    acceptance = AcceptanceByRow(slots, before)
    acceptance.follow(np.array(ids))
    return acceptance


# --- laws ---


def test_a_law_is_a_chance_of_acceptance_that_each_step_draws_from_a_beta_distribution():
    m, c = np.meshgrid(acceptance_laws.MEANS, acceptance_laws.CONCENTRATIONS)
    for law, mean, concentration in zip(laws(6).survival, m.ravel(), c.ravel(), strict=True):
        chance = stats.beta(mean * concentration, (1 - mean) * concentration)
        assert law == pytest.approx([chance.moment(j) if j else 1.0 for j in range(7)], rel=1e-3)


def test_the_likelihoods_of_what_may_become_of_a_step_sum_to_one():
    accepted = np.arange(5)
    assert np.exp(laws(6).likelihood(np.full(5, 4), accepted)).sum(0) == pytest.approx(1.0)
    assert laws(6).prior.sum() == pytest.approx(1.0) and (laws(6).prior > 0).all()


@pytest.mark.parametrize("posterior", [lambda: Acceptance(6), lambda: by_row(slots=6)], ids=["in common", "by row"])
def test_tokens_are_the_targets_and_those_of_drafts_that_survive(posterior):
    learnt = seen(posterior(), [5], [3])
    weights = laws(6).prior * np.exp(learnt.evidence).ravel()
    survival = weights @ laws(6).survival / weights.sum()
    assert learnt.survival().ravel() == pytest.approx(survival)
    assert learnt.tokens().ravel() == pytest.approx(survival.cumsum())


# --- all rows in common ---


@pytest.mark.parametrize("alpha", [0.2, 0.5, 0.8, 0.95])
def test_chances_become_those_of_the_drafts(alpha):
    common, row, generator = Acceptance(16), by_row(), np.random.default_rng(0)
    for _ in range(200):
        accepted = np.minimum(generator.geometric(1 - alpha, 8) - 1, 5)
        seen(common, np.full(8, 5), accepted)
        for each in accepted:  # a row takes eight steps in the same time
            seen(row, [5], [each])
    assert common.survival()[:9] == pytest.approx(alpha ** np.arange(9), abs=0.06)
    assert row.survival()[0, :9] == pytest.approx(alpha ** np.arange(9), abs=0.12)


def test_what_was_drafted_says_what_to_expect_of_longer_drafts():
    before, after = Acceptance(16), seen(Acceptance(16), [3], [3])
    assert (after.survival()[1:] > before.survival()[1:]).all()
    assert after.survival()[9] > 1.5 * before.survival()[9]


def test_rows_count_by_their_weights():
    half, once = Acceptance(16), Acceptance(16)
    half.update(np.array([4, 4, 4]), np.array([2, 2, 0]), np.array([0.5, 0.5, 0.0]))
    once.update(np.array([4]), np.array([2]), np.ones(1))
    assert half.survival() == pytest.approx(once.survival())


def test_older_steps_count_less():
    assert seen(seen(Acceptance(16), [4], [0], 40), [4], [4], 40).survival()[4] > 0.5
    assert seen(seen(by_row(), [4], [0], 40), [4], [4], 40).survival()[0, 4] > 0.5


def test_one_step_of_a_batch_is_enough_to_find_a_useless_draft_out():
    nothing = [0] * 8
    assert seen(Acceptance(16), [5] * 8, nothing).survival()[1] < 0.1


def test_three_steps_of_a_batch_are_enough_for_each_row():
    assert (seen(by_row(range(8)), [5] * 8, [0] * 8, steps=3).survival()[:, 1] < 0.2).all()


# --- by row ---


def test_a_row_is_judged_by_its_own_steps_first_and_by_the_others_where_it_has_shown_nothing():
    acceptance = seen(by_row([4, 7, 9]), [4, 4, 0], [4, 0, 0], steps=12)
    sure, doubtful, unknown = acceptance.survival()[:, 1]
    assert doubtful < 0.15 < 0.5 < unknown < 0.8 < 0.9 < sure

    alone = by_row([9]).survival()[0, 3]
    for accepted, likelier in ((4, True), (0, False)):
        unknown = seen(by_row([4, 7, 9]), [4, 4, 0], [accepted, accepted, 0]).survival()[2, 3]
        assert (unknown > alone) == likelier


def test_all_other_rows_together_count_as_two_at_most():
    """A row's own steps are not outvoted by those of a large batch, as long as they are all alike."""
    few, many = (
        seen(by_row(range(others + 1)), [0] + [4] * others, [0] + [3] * others).survival()[0] for others in (2, 50)
    )
    assert many == pytest.approx(few)


def test_a_row_that_accepts_all_says_nothing_to_rows_that_accept_nothing():
    """As one that repeats itself for ever may do beside others."""
    survival = seen(by_row(range(4)), [6] * 4, [6, 6, 0, 0], steps=50).survival()
    assert (survival[:2, 6] > 0.9).all() and (survival[2:, 1] < 0.05).all()


def test_rows_keep_what_they_showed_when_others_end_move_or_join():
    acceptance = seen(by_row([0, 1, 2]), [4] * 3, [4, 2, 0])
    own = dict(zip(range(3), acceptance.evidence, strict=True))
    acceptance.follow(np.array([2, 5, 0]))
    assert acceptance.evidence.tolist() == [own[2].tolist(), [0.0] * len(own[0]), own[0].tolist()]


def test_a_text_may_be_like_any_of_those_that_calibration_has_met():
    """Half of them are hard and half easy: one step shows which kind this one is."""
    known, ignorant = by_row(before=(HARD, EASY)), by_row()
    assert known.survival()[0, 1] == pytest.approx(0.5, abs=0.1)
    for accepted in (0, 4):
        know, guess = (seen(deepcopy(each), [4], [accepted]).survival()[0, 4] for each in (known, ignorant))
        assert abs(know - accepted / 4) < 0.6 * abs(guess - accepted / 4)


def test_texts_that_are_met_again_and_again_are_expected_more():
    rarely, often = (by_row(before=(HARD,) * (8 - easy) + (EASY,) * easy).survival()[0, 4] for easy in (1, 7))
    assert rarely == pytest.approx(0.2, abs=0.1) and often == pytest.approx(0.75, abs=0.1)


def test_what_was_met_before_does_not_outweigh_what_is_seen():
    known = by_row(range(4), before=(HARD,) * 16)
    assert (known.survival()[:, 1] < 0.25).all()
    assert (seen(known, [4] * 4, [4] * 4, steps=5).survival()[:, 4] > 0.9).all()


def test_of_longer_drafts_than_the_policys_their_beginning_counts():
    longer, cut = by_row(before=((1, 2, 3, 4, 5),), slots=2), by_row(before=((1, 2, 12),), slots=2)
    assert longer.survival() == pytest.approx(cut.survival())


def test_drafts_whose_fate_is_known_are_counted_and_forgotten():
    acceptance = seen(by_row([0, 1]), [4, 4], [4, 1])
    assert acceptance.seen == 4 + 2  # of the second row the refused one is known, too
    seen(acceptance, [4, 0], [0, 0])
    assert acceptance.seen == pytest.approx(acceptance_laws.DECAY * 6 + 1)
    evidence = acceptance.evidence
    acceptance.forget(2.0)
    assert acceptance.seen == 2 and acceptance.evidence == pytest.approx(evidence * 2 / (acceptance_laws.DECAY * 6 + 1))
