"""A prompt of many samples is prefilled once, and its cache is kept as long as one of them waits."""

import pytest
import torch
from sessions import DRAFT, PAIR, SAMPLED, TARGET, alone, assert_same_result, generate, run_to_the_end, session_over
from tiny import forward_passes, ragged_prompts

import bass_core as bass
from bass_core.cache import RaggedCache

LONG = ragged_prompts(30, 28, seed=5)


def prefilled_rows(passes) -> int:
    """Rows in passes over prompts; those of decoding feed fewer than ten tokens."""
    return sum(rows for rows, queries in passes if queries >= 10)


@pytest.mark.parametrize("pair", [PAIR, bass.ModelPair(TARGET)], ids=["model", "n-gram"])
@pytest.mark.parametrize("max_batch_size", [None, 1, 2, 3, 5])
def test_samples_of_a_prompt_are_prefilled_once_however_late_they_start(pair, max_batch_size):
    generate(LONG, pair)
    options = {"num_return_sequences": 5, "max_new_tokens": 8, **SAMPLED}
    expected = [generate(LONG, pair, **options).sequences[row].tolist() for row in range(10)]
    with forward_passes(TARGET) as of_target, forward_passes(DRAFT) as of_draft:
        out = generate(LONG, pair, max_batch_size=max_batch_size, **options)
    assert prefilled_rows(of_target) == 2
    assert prefilled_rows(of_draft) == (2 if pair is PAIR else 0)
    assert [sequence.tolist() for sequence in out.sequences] == expected


def test_samples_submitted_one_by_one_share_what_is_still_kept():
    session = session_over(max_batch_size=1, **SAMPLED)
    handles = [session.submit(LONG[0], max_new_tokens=4) for _ in range(2)]
    with forward_passes(TARGET) as passes:
        session.step()
        handles.append(session.submit(LONG[0].tolist(), max_new_tokens=4))
        run_to_the_end(session)
    assert prefilled_rows(passes) == 1
    for row, handle in enumerate(handles):
        assert_same_result(session.result(handle), alone(row, LONG[0], 4, **SAMPLED))


@pytest.fixture
def saved_caches(monkeypatch):
    """() -> how many saved prompt caches of the target are alive."""
    saved, save_row = [], RaggedCache.save_row

    def noting(self, place, length):
        made = save_row(self, place, length)
        saved.append(torch.multiprocessing.reductions.StorageWeakRef(made[0].untyped_storage()))
        return made

    monkeypatch.setattr(RaggedCache, "save_row", noting)
    return lambda: sum(not storage.expired() for storage in saved)


def test_kept_cache_of_a_prompt_is_dropped_when_its_last_sample_starts(saved_caches):
    session = session_over(bass.ModelPair(TARGET), max_batch_size=2)
    handles = [session.submit(LONG[0], max_new_tokens=new) for new in (3, 6, 9)]
    session.step()
    assert saved_caches() == 1, "a sample still waits"
    while not len(session.result(handles[2]).sequence):
        session.step()
    assert saved_caches() == 0
    assert not session.idle
    run_to_the_end(session)
    assert saved_caches() == 0


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_kept_cache_of_a_prompt_is_dropped_when_the_last_sample_gives_up(saved_caches, clock, how):
    session = session_over(bass.ModelPair(TARGET), max_batch_size=1)
    session.submit(LONG[0], max_new_tokens=20)
    waiting = [session.submit(LONG[0], max_new_tokens=6, deadline=5) for _ in range(2)]
    session.step()
    session.cancel(waiting[0])
    assert saved_caches() == 1
    if how == "cancel":
        session.cancel(waiting[1])
    clock.now += 10
    session.step()
    assert saved_caches() == 0
    run_to_the_end(session)


def test_a_session_that_never_rests_keeps_no_cache_of_samples_that_were_cancelled(saved_caches):
    session = session_over(bass.ModelPair(TARGET), max_batch_size=1)
    for number in range(6):
        samples = [session.submit([number, *LONG[0].tolist()], max_new_tokens=8) for _ in range(2)]
        session.submit([30 + number, *LONG[0].tolist()], max_new_tokens=2)  # there is always somebody who waits
        while not len(session.result(samples[0]).sequence):
            session.step()
        assert saved_caches() == 1 and session.rows.waiting
        for sample in samples:
            session.cancel(sample)
        assert saved_caches() == 0 and session.rows.waiting
    run_to_the_end(session)


def test_no_cache_is_kept_for_a_prompt_whose_samples_all_start_together(saved_caches):
    session = session_over(max_batch_size=4)
    for _ in range(4):
        session.submit(LONG[0], max_new_tokens=4)
    session.step()
    assert saved_caches() == 0


def test_cancelling_an_ended_row_does_not_forget_the_prompt_for_others_that_wait():
    session = session_over(max_batch_size=1)
    ended = session.submit(LONG[0], max_new_tokens=1)
    session.step()
    with forward_passes(TARGET) as passes:
        session.submit(LONG[0], max_new_tokens=4)
        session.submit(LONG[0], max_new_tokens=4)
        session.step()
        session.cancel(ended)
        session.submit(LONG[0], max_new_tokens=4)
        run_to_the_end(session)
    assert prefilled_rows(passes) == 1
