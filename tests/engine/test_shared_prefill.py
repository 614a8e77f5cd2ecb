import pytest
from sessions import DRAFT, PAIR, SAMPLED, TARGET, alone, assert_same_result, generate, run_to_the_end, session_over
from tiny import forward_passes, ragged_prompts
from torch.multiprocessing.reductions import StorageWeakRef

import bass_core as bass
from bass_core.model.cache import RaggedCache

LONG = ragged_prompts(30, 28, seed=5)


def prefilled_rows(passes) -> int:
    """Count rows in prefill passes. (Decode passes feed fewer than ten tokens.)"""
    return sum(rows for rows, queries in passes if queries >= 10)


@pytest.mark.parametrize(("draft", "max_batch_size"), [(DRAFT, None), (DRAFT, 2), (None, 1), (None, 3)])
def test_samples_of_a_prompt_are_prefilled_once(draft, max_batch_size):
    pair = PAIR if draft else bass.ModelPair(TARGET)
    options = {"num_return_sequences": 5, "max_new_tokens": 8, **SAMPLED}
    expected = [row.sequence.tolist() for row in generate(LONG, pair, **options)]
    with forward_passes(TARGET) as of_target, forward_passes(DRAFT) as of_draft:
        out = generate(LONG, pair, max_batch_size=max_batch_size, **options)
    assert prefilled_rows(of_target) == 2
    assert prefilled_rows(of_draft) == (2 if draft else 0)
    assert [sequence.tolist() for sequence in out.sequences] == expected


def test_later_submissions_share_the_kept_cache():
    session = session_over(max_batch_size=1, **SAMPLED)
    handles = [session.submit(LONG[0], max_new_tokens=4) for _ in range(2)]
    with forward_passes(TARGET) as passes:
        session.step()
        handles.append(session.submit(LONG[0].tolist(), max_new_tokens=4))
        while handles[0].finish_reason is None:
            session.step()
        session.cancel(handles[0])  # an ended row frees nothing
        handles.append(session.submit(LONG[0], max_new_tokens=4))
        run_to_the_end(session)
    assert prefilled_rows(passes) == 1
    for row, handle in enumerate(handles):
        assert_same_result(session.result(handle), alone(row, LONG[0], 4, **SAMPLED))


@pytest.fixture
def saved_caches(monkeypatch):
    saved, save_row = [], RaggedCache.save_row

    def noting(self, place, length):
        made = save_row(self, place, length)
        saved.append(StorageWeakRef(made[0].untyped_storage()))
        return made

    monkeypatch.setattr(RaggedCache, "save_row", noting)
    return lambda: sum(not storage.expired() for storage in saved)


def test_kept_cache_is_dropped_when_the_last_sample_starts(saved_caches):
    session = session_over(bass.ModelPair(TARGET), max_batch_size=2)
    handles = [session.submit(LONG[0], max_new_tokens=new) for new in (3, 6, 9)]
    session.step()
    assert saved_caches() == 1, "a sample still waits"
    while not len(session.result(handles[2]).sequence):
        session.step()
    assert saved_caches() == 0 and not session.idle
    session = session_over(max_batch_size=4)
    for _ in range(4):
        session.submit(LONG[0], max_new_tokens=4)
    session.step()
    assert saved_caches() == 0, "all samples start together"


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_kept_cache_is_dropped_when_the_last_waiting_sample_ends(saved_caches, clock, how):
    session = session_over(bass.ModelPair(TARGET), max_batch_size=1)
    running, *waiting = (session.submit(LONG[0], max_new_tokens=20, deadline=each) for each in (None, 5, 5))
    session.submit(LONG[1], max_new_tokens=2)
    session.step()
    session.cancel(waiting[0])
    assert saved_caches() == 1
    if how == "cancel":
        session.cancel(waiting[1])
    else:
        clock.now += 10
        session.step()
    assert saved_caches() == 0 and session.rows.waiting and running.finish_reason is None
