"""A session that is called from within its own step, from other threads, or twice for one row number."""

import threading

import pytest
import torch
from sessions import PROMPTS, TARGET, alone, assert_same_result, generate, run_to_the_end, session_over
from tiny import greedy_alone, tiny_model

import bass_core as bass
from bass_core import attention


class Calling(bass.DraftLengthPolicy):
    """Calls something in the midst of every decode step, between planning and drafting."""

    def __init__(self, call):
        self.call = call

    def plan(self, rows):
        self.call()
        return 3


def in_another_thread(call) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


HOW = pytest.mark.parametrize("how", [lambda call: call(), in_another_thread], ids=["itself", "another thread"])


@HOW
@pytest.mark.parametrize("cancelled", range(4))
def test_row_cancelled_inside_a_step_ends_with_it_and_the_others_are_unchanged(how, cancelled):
    def cancel():
        if not handles[cancelled].finish_reason:
            how(lambda: session.cancel(handles[cancelled]))

    session = session_over(draft_length=Calling(cancel))
    handles = [session.submit(prompt, max_new_tokens=12) for prompt in PROMPTS]
    run_to_the_end(session)
    for row, (handle, prompt) in enumerate(zip(handles, PROMPTS, strict=True)):
        expected = alone(row, prompt, 12)
        if row == cancelled:
            kept = session.result(handle).sequence.tolist()
            assert handle.finish_reason == "cancelled" and kept == expected.sequence[: len(kept)].tolist()
            assert 1 < len(kept) < 12
        else:
            assert_same_result(session.result(handle), expected)


@HOW
def test_row_submitted_inside_a_step_starts_after_it(how):
    def submit():
        if len(handles) < 3:
            how(lambda: handles.append(session.submit(PROMPTS[len(handles)], max_new_tokens=12)))

    session, handles = session_over(draft_length=Calling(submit)), []
    handles.append(session.submit(PROMPTS[0], max_new_tokens=12))
    run_to_the_end(session)
    for row, handle in enumerate(handles):
        assert_same_result(session.result(handle), alone(row, PROMPTS[row], 12))


@HOW
@pytest.mark.parametrize("call", ["step", "close"])
def test_step_inside_a_step_and_closing_in_it_are_refused(how, call):
    errors = []

    def meddle():
        try:
            getattr(session, call)()
        except RuntimeError as error:
            errors.append(str(error))

    session = session_over(draft_length=Calling(lambda: how(meddle)))
    handle = session.submit(PROMPTS[0], max_new_tokens=12)
    run_to_the_end(session)
    assert errors and all("a step of this session is running" in error for error in errors)
    assert_same_result(session.result(handle), alone(0, PROMPTS[0], 12))


def test_no_two_rows_of_a_session_have_one_number():
    session = session_over()
    rows = [
        session.submit(PROMPTS[0], max_new_tokens=12, row=1).row,
        *(session.submit(PROMPTS[0], max_new_tokens=12).row for _ in range(3)),
    ]
    assert len(set(rows)) == 4
    with pytest.raises(ValueError, match="row 1 has not ended yet"):
        session.submit(PROMPTS[0], max_new_tokens=12, row=1)


def test_number_of_a_row_that_has_ended_may_be_asked_for_again_and_draws_the_same():
    session = session_over(temperature=1.0)
    texts = []
    for _ in range(2):
        handle = session.submit(PROMPTS[0], max_new_tokens=12, row=1)
        run_to_the_end(session)
        texts.append(session.result(handle).sequence.tolist())
    assert texts[0] == texts[1] and session.submit(PROMPTS[0], max_new_tokens=12).row != 1


def test_samples_with_numbers_of_the_callers_and_of_the_sessions_differ():
    session = session_over(temperature=1.0)
    handles = [
        session.submit(PROMPTS[0], max_new_tokens=12, row=1),
        session.submit(PROMPTS[0], max_new_tokens=12),
        session.submit(PROMPTS[0], max_new_tokens=12),
    ]
    run_to_the_end(session)
    assert len({tuple(session.result(handle).sequence.tolist()) for handle in handles}) == 3


def test_refused_row_takes_no_number():
    session = session_over()
    for wrong in ({"deadline": -1}, {"seed": "x"}, {"max_new_tokens": -1}):
        with pytest.raises((TypeError, ValueError)):
            session.submit(PROMPTS[0], **({"max_new_tokens": 12} | wrong))
    assert session.submit(PROMPTS[0], max_new_tokens=12).row == 0


def test_rows_submitted_by_many_threads_have_numbers_of_their_own():
    session, rows = session_over(), []
    threads = [
        threading.Thread(
            target=lambda: rows.extend(session.submit(PROMPTS[0], max_new_tokens=12).row for _ in range(50))
        )
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(rows) == list(range(400)) and len(session.rows.waiting) == 400


def test_closed_session_takes_no_rows():
    session = session_over()
    session.close()
    with pytest.raises(RuntimeError, match="closed"):
        session.submit(PROMPTS[0], max_new_tokens=12)


# --- threads --------------------------------------------------------------------------------------


def test_four_threads_with_pairs_of_their_own_decode_what_each_decodes_alone():
    pairs = [
        bass.ModelPair(tiny_model(name, dtype="float64"), tiny_model(name, dtype="float64", noise=0.02))
        for name in ("llama", "gpt2", "mistral", "codegen")
    ]
    expected = [generate(pair=pair, temperature=0.8).sequences for pair in pairs]
    found: dict[int, list] = {}
    start = threading.Barrier(len(pairs))

    def decode(index: int) -> None:
        start.wait()
        found[index] = [generate(pair=pairs[index], temperature=0.8).sequences for _ in range(5)]

    threads = [threading.Thread(target=decode, args=(index,)) for index in range(len(pairs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, sequences in enumerate(expected):
        for again in found[index]:
            assert [row.tolist() for row in again] == [row.tolist() for row in sequences]


def test_model_that_another_thread_decodes_with_is_refused():
    errors = []

    def decode():
        try:
            generate()
        except RuntimeError as error:
            errors.append(str(error))

    with session_over() as session, session.prepared():
        in_another_thread(decode)
    assert errors and "is decoding in another thread" in errors[0]
    assert attention.path_of(TARGET) is None


# --- what a callback does with the models ---------------------------------------------------------


def test_models_own_generate_works_inside_on_step():
    expected, found = greedy_alone(TARGET, PROMPTS[1], 8).tolist(), []
    out = generate(on_step=lambda event: found.append(greedy_alone(TARGET, PROMPTS[1], 8).tolist()))
    assert found and all(text == expected for text in found)
    assert [row.tolist() for row in out.sequences] == [row.tolist() for row in generate().sequences]


def test_generate_inside_on_step_is_as_outside():
    expected, found = generate(PROMPTS[:2]).sequences, []
    generate(on_step=lambda event: found.append(generate(PROMPTS[:2]).sequences))
    for sequences in found:
        assert [row.tolist() for row in sequences] == [row.tolist() for row in expected]


# --- policies' answers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        lambda b: torch.ones(b + 1, dtype=torch.bool),
        lambda b: torch.tensor(True),
        lambda b: torch.ones(b),
        lambda b: None,
    ],
    ids=["too many", "one for all", "no integers", "nothing"],
)
def test_answer_of_keep_drafting_is_checked_as_a_plan_is(answer):
    class Answering(bass.FixedLength):
        def keep_drafting(self, signals):
            return answer(len(signals.drafting))

    with pytest.raises(ValueError, match="keep_drafting must return one bool or integer for each of 4 rows"):
        generate(draft_length=Answering(3))
