"""Calls of a session inside a step and from other threads, and the numbers of rows."""

import threading

import pytest
import torch
from sessions import PROMPTS, TARGET, alone, assert_same_result, generate, run_to_the_end, session_over
from tiny import greedy_alone, tiny_model

import bass_core as bass
from bass_core.model.patching import path_of


class Calling(bass.DraftLengthPolicy):
    def __init__(self, call):
        self.call = call

    def plan(self, rows):
        self.call()
        return 3


def in_threads(*calls) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


HOW = pytest.mark.parametrize("how", [lambda call: call(), in_threads], ids=["same thread", "another thread"])


@HOW
def test_row_cancelled_inside_a_step_ends_with_it(how):
    def cancel():
        if not handles[1].finish_reason:
            how(lambda: session.cancel(handles[1]))

    session = session_over(draft_length=Calling(cancel))
    handles = [session.submit(prompt, max_new_tokens=12) for prompt in PROMPTS]
    run_to_the_end(session)
    for row, (handle, prompt) in enumerate(zip(handles, PROMPTS, strict=True)):
        expected = alone(row, prompt, 12)
        if row == 1:
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
def test_step_and_close_inside_a_step_are_refused(how):
    def meddle():
        for call in (session.step, session.close):
            with pytest.raises(RuntimeError, match="a step of this session is running"):
                call()
        refused.append(True)

    session = session_over(draft_length=Calling(lambda: how(meddle)))
    handle, refused = session.submit(PROMPTS[0], max_new_tokens=12), []
    run_to_the_end(session)
    assert len(refused) == session.trace.steps.query("kind == 'decode'").step.nunique()
    assert_same_result(session.result(handle), alone(0, PROMPTS[0], 12))


def test_row_numbers_are_unique_among_live_rows():
    session = session_over(temperature=1.0)
    handles = [session.submit(PROMPTS[0], max_new_tokens=12, row=1)]
    handles += [session.submit(PROMPTS[0], max_new_tokens=12) for _ in range(3)]
    assert len({handle.row for handle in handles}) == 4
    with pytest.raises(ValueError, match="row 1 has not ended yet"):
        session.submit(PROMPTS[0], max_new_tokens=12, row=1)
    run_to_the_end(session)
    found = [session.result(handle).sequence.tolist() for handle in handles]
    assert len(set(map(tuple, found))) == 4
    again = session.submit(PROMPTS[0], max_new_tokens=12, row=1)
    run_to_the_end(session)
    assert session.result(again).sequence.tolist() == found[0]


def test_rows_of_many_threads_have_unique_numbers():
    session, rows = session_over(), []

    def submit():
        rows.extend(session.submit(PROMPTS[0], max_new_tokens=12).row for _ in range(50))

    in_threads(*[submit] * 8)
    assert sorted(rows) == list(range(400)) and len(session.rows.waiting) == 400


def test_four_threads_with_separate_pairs_decode_independently():
    pairs = [
        bass.ModelPair(tiny_model(name, dtype="float64"), tiny_model(name, dtype="float64", noise=0.02))
        for name in ("llama", "gpt2", "mistral", "codegen")
    ]
    expected = [[row.tolist() for row in generate(pair=pair, temperature=0.8).sequences] for pair in pairs]
    found, start = {}, threading.Barrier(len(pairs))

    def decode(index: int) -> None:
        start.wait()
        found[index] = [
            [row.tolist() for row in generate(pair=pairs[index], temperature=0.8).sequences] for _ in range(3)
        ]

    in_threads(*(lambda index=index: decode(index) for index in range(len(pairs))))
    assert found == {index: [texts] * 3 for index, texts in enumerate(expected)}


def test_model_in_use_by_another_thread_is_refused():
    errors = []

    def decode():
        with pytest.raises(RuntimeError, match="is decoding in another thread") as caught:
            generate()
        errors.append(caught.value)

    with session_over() as session, session.prepared():
        in_threads(decode)
    assert errors and path_of(TARGET) is None


def test_on_step_may_decode_with_the_same_models():
    alone, texts, found = greedy_alone(TARGET, PROMPTS[1], 8), generate().sequences, []

    def on_step(event):
        found.append(torch.equal(greedy_alone(TARGET, PROMPTS[1], 8), alone))
        found.append(all(map(torch.equal, generate().sequences, texts)))

    assert all(map(torch.equal, generate(on_step=on_step).sequences, texts))
    assert found and all(found)


def test_answer_of_keep_drafting_is_checked():
    class Answering(bass.FixedLength):
        def keep_drafting(self, signals):
            return next(answers)(len(signals.drafting))

    answers = iter((lambda b: torch.ones(b + 1, dtype=torch.bool), lambda b: torch.tensor(True), torch.ones, bool))
    for _ in range(4):
        with pytest.raises(ValueError, match="keep_drafting must return one bool or integer for each of 4 rows"):
            generate(draft_length=Answering(3))
