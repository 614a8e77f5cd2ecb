"""α of each row, from its own drafts, from those of other rows and of earlier rows."""

import numpy as np
import pytest

from bass_core.policies import goodput


def after(steps, ids=(0, 1, 2)):
    """α of rows after steps of (kept, lost) each."""
    alphas = goodput.RowAlphas()
    alphas.follow(np.array(ids))
    for kept, lost in steps:
        alphas.update(np.array(kept), np.array(lost))
    return alphas


def test_alpha_is_the_share_of_drafts_that_were_accepted():
    assert after([([4, 4, 4], [1, 1, 1])] * 400)() == pytest.approx([0.8] * 3, abs=0.01)
    kept, lost = goodput.PRIOR
    assert after([])() == pytest.approx([kept / (kept + lost)] * 3)


def test_older_steps_count_less():
    alphas = after([([4, 4, 4], [0, 0, 0])] * 20 + [([0, 0, 0], [1, 1, 1])] * 100)
    assert (alphas() < 0.1).all()
    alphas.update(np.full(3, 5), np.zeros(3))
    assert alphas.kept == pytest.approx(goodput.DECAY * after([([4] * 3, [0] * 3)] * 20).kept * goodput.DECAY**100 + 5)


def test_new_row_has_the_alpha_of_the_others():
    alphas = after([([9, 9, 9], [0, 0, 0])] * 30)
    alphas.follow(np.array([0, 1, 2, 7]))
    assert alphas()[3] == pytest.approx(alphas()[:3].mean(), abs=0.02)


def test_extreme_rows_hardly_change_rows_that_have_drafted():
    repeats, *essays = after([([16, 0, 0], [0, 1, 1])] * 60)()
    assert repeats > 0.97 and max(essays) < 0.4


def test_rows_keep_their_counts_when_others_end_move_or_join():
    alphas = after([([3, 1, 0], [0, 1, 1])] * 20)
    kept, lost = alphas.kept, alphas.lost
    alphas.follow(np.array([2, 9, 0]))
    assert alphas.kept.tolist() == [kept[2], 0, kept[0]] and alphas.lost.tolist() == [lost[2], 0, lost[0]]


def test_rows_begin_with_the_alpha_of_earlier_rows():
    alphas = after([([3, 0, 0], [0, 1, 1])] * 20)
    shown = alphas.kept.sum() / (alphas.kept.sum() + alphas.lost.sum())
    alphas.follow(np.array([3]))
    assert alphas().item() == pytest.approx(shown, abs=0.05) and alphas.former.sum() == pytest.approx(goodput.FORMER)
    alphas.follow(np.array([4]))  # the last row ended at once
    assert alphas().item() == pytest.approx(shown, abs=0.05)


def test_rows_of_one_number_do_not_add_up():
    alphas = after([([3, 3], [1, 1])] * 9, ids=(0, 0))
    kept = alphas.kept[0]
    alphas.follow(np.array([0, 0, 5]))
    assert alphas.kept.tolist() == [kept, kept, 0]


def test_counts_of_ended_rows_fade_while_nothing_is_drafted():
    alphas = after([([0, 0, 0], [1, 1, 1])] * 20)
    alphas.follow(np.array([3]))
    assert alphas().item() < 0.1
    for _ in range(200):
        alphas.fade()
    assert alphas().item() == pytest.approx(after([], ids=[3])().item(), abs=0.01)
