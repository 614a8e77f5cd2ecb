"""Rows come, wait, end and go at any time, and none of it changes another row's tokens."""

import itertools
from collections import defaultdict

import numpy as np
import pytest
import torch
from sessions import DRAFT, PROMPTS, SAMPLED, TARGET, alone, assert_same_result, generate, run_to_the_end, session_over
from tiny import forward_passes, greedy_alone, ragged_prompts

# --- results and idleness -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [lambda ids: ids.clone().numpy(), torch.Tensor.clone], ids=["array", "tensor"])
def test_a_prompt_is_what_it_was_when_it_was_submitted(kind):
    """Its memory is the caller's, who may write the next prompt there."""
    session = session_over(max_batch_size=3)
    memory = kind(PROMPTS[0])
    first = session.submit(memory, max_new_tokens=6)
    memory[:] = 1
    second = session.submit(memory, max_new_tokens=6)
    third = session.submit(PROMPTS[0], max_new_tokens=6)
    memory[:] = 10**6
    run_to_the_end(session)
    alone = [greedy_alone(session.pair.target, each, 6).tolist() for each in (PROMPTS[0], torch.ones_like(PROMPTS[0]))]
    found = [session.result(each).sequence.tolist() for each in (first, second, third)]
    assert found == [alone[0], alone[1], alone[0]]


def test_a_result_is_the_callers_to_change():
    session = session_over()
    row = session.submit(PROMPTS[0], max_new_tokens=4)
    run_to_the_end(session)
    result = session.result(row)
    before = result.sequence.clone(), result.logprobs.clone()
    result.sequence.fill_(7)
    result.logprobs.fill_(0)
    assert all(torch.equal(a, b) for a, b in zip(session.result(row)[::2], before, strict=True))


def test_result_grows_from_nothing_to_the_whole_row():
    session = session_over()
    handle = session.submit(PROMPTS[0], max_new_tokens=12)
    result = session.result(handle)
    assert (len(result.sequence), len(result.logprobs), result.finish_reason) == (0, 0, None)
    expected = greedy_alone(TARGET, PROMPTS[0], 12)
    lengths = []
    while not session.idle:
        session.step()
        result = session.result(handle)
        lengths.append(len(result.sequence))
        assert torch.equal(result.sequence, expected[: lengths[-1]])
        assert len(result.logprobs) == lengths[-1]
        assert result.finish_reason == ("length" if lengths[-1] == 12 else None)
    assert lengths[0] == 1 and lengths[-1] == 12
    assert sorted(set(lengths)) == lengths, "every step adds something"
    session.step()
    assert_same_result(session.result(handle), result)


def test_result_is_a_copy_that_later_steps_do_not_touch():
    session = session_over()
    handle = session.submit(PROMPTS[0], max_new_tokens=12)
    session.step()
    early = session.result(handle)
    token = int(early.sequence[0])
    early.sequence[0] = early.logprobs[0] = 0
    run_to_the_end(session)
    assert int(session.result(handle).sequence[0]) == token
    assert len(early.sequence) == 1


def test_result_is_int64_ids_and_float32_logprobs_of_the_targets_unprocessed_law():
    session = session_over(temperature=0.7, top_k=5, repetition_penalty=1.3)
    handle = session.submit(PROMPTS[1], max_new_tokens=12)
    run_to_the_end(session)
    result = session.result(handle)
    assert (result.sequence.dtype, result.logprobs.dtype) == (torch.int64, torch.float32)
    text = torch.cat([PROMPTS[1], result.sequence])
    law = TARGET(text[None]).logits[0].log_softmax(-1)[len(PROMPTS[1]) - 1 : -1]
    assert torch.allclose(result.logprobs.double(), law.gather(1, result.sequence[:, None])[:, 0], atol=1e-5)


def test_session_is_idle_before_the_first_row_and_after_the_last():
    session = session_over()
    assert session.idle
    session.submit(PROMPTS[0], max_new_tokens=0)
    assert session.idle, "a row without tokens is done at once"
    session.submit(PROMPTS[0], max_new_tokens=2)
    assert not session.idle
    session.step()
    assert not session.idle
    session.step()
    assert session.idle


def test_step_of_an_idle_session_does_nothing():
    session = session_over()
    with forward_passes(TARGET, DRAFT) as passes:
        for _ in range(2):
            event = session.step()
            assert (event.rows, event.new_tokens) == ([], [])
    assert passes == []
    handle = session.submit(PROMPTS[0], max_new_tokens=4)
    run_to_the_end(session)
    assert torch.equal(session.result(handle).sequence, greedy_alone(TARGET, PROMPTS[0], 4))


# --- coming and going -----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, SAMPLED, SAMPLED | {"verification": "coupled"}], ids=str)
def test_row_submitted_between_steps_equals_the_row_alone(options):
    session = session_over(max_batch_size=3, **options)
    handles = []
    for prompt in PROMPTS:
        handles.append(session.submit(prompt, max_new_tokens=12))
        session.step()
        session.step()
    run_to_the_end(session)
    for row, (handle, prompt) in enumerate(zip(handles, PROMPTS, strict=True)):
        assert_same_result(session.result(handle), alone(row, prompt, 12, **options))


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=str)
def test_rows_of_very_different_lengths_equal_each_alone_while_places_are_closed(options):
    news = [1, 30, 4, 17, 2, 24, 9, 3]
    prompts = ragged_prompts(12, 3, 8, 20, 6, 2, 10, 4)
    session = session_over(max_batch_size=8, **options)
    handles = [session.submit(prompt, max_new_tokens=new) for prompt, new in zip(prompts, news, strict=True)]
    run_to_the_end(session)
    for row, (handle, prompt, new) in enumerate(zip(handles, prompts, news, strict=True)):
        assert_same_result(session.result(handle), alone(row, prompt, new, **options))


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=str)
def test_longer_row_that_joins_makes_room_and_leaves_live_rows_as_they_were(options):
    prompts = [*ragged_prompts(4, 6), *ragged_prompts(30, 60, seed=1)]
    session = session_over(**options)
    handles = []
    for prompt in prompts:
        handles.append(session.submit(prompt, max_new_tokens=14))
        for _ in range(2):
            session.step()
    run_to_the_end(session)
    for row, (handle, prompt) in enumerate(zip(handles, prompts, strict=True)):
        assert_same_result(session.result(handle), alone(row, prompt, 14, **options))


def test_seed_of_a_row_is_the_sessions_unless_it_has_its_own():
    def row(session_seed, **own):
        session = session_over(temperature=0.8, seed=session_seed)
        handle = session.submit(PROMPTS[0], max_new_tokens=12, **own)
        run_to_the_end(session)
        return session.result(handle).sequence.tolist()

    assert row(1, seed=7) == row(2, seed=7) == row(7)
    assert row(1) != row(7)


def test_samples_of_one_prompt_differ():
    sequences = generate(PROMPTS[:1], num_return_sequences=4, **SAMPLED).sequences
    assert len({tuple(sequence.tolist()) for sequence in sequences}) == 4


# --- cancelling -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=str)
@pytest.mark.parametrize("cancelled", range(3))
def test_cancelled_row_keeps_its_tokens_and_the_others_are_unchanged(cancelled, options):
    session = session_over(max_batch_size=3, **options)
    handles = [session.submit(prompt, max_new_tokens=20) for prompt in PROMPTS[:3]]
    for _ in range(3):
        session.step()
    before = session.result(handles[cancelled])
    session.cancel(handles[cancelled])
    after = session.result(handles[cancelled])
    assert 0 < len(after.sequence) < 20
    assert after.finish_reason == "cancelled"
    assert torch.equal(after.sequence, before.sequence) and torch.equal(after.logprobs, before.logprobs)
    run_to_the_end(session)
    assert_same_result(session.result(handles[cancelled]), after)
    for row in {0, 1, 2} - {cancelled}:
        assert_same_result(session.result(handles[row]), alone(row, PROMPTS[row], 20, **options))


def test_what_is_no_row_of_the_session_is_refused_and_harms_nothing():
    session, other = session_over(), session_over()
    handle, foreign = session.submit(PROMPTS[0], max_new_tokens=8), other.submit(PROMPTS[1], max_new_tokens=8)
    for call in (session.cancel, session.result):
        with pytest.raises(TypeError, match="the handle that submit returned for it, got 99"):
            call(99)
        with pytest.raises(ValueError, match=r"Request\(row 0, .* is a row of another session"):
            call(foreign)
    run_to_the_end(session)
    run_to_the_end(other)
    assert session.result(handle).finish_reason == other.result(foreign).finish_reason == "length"


def test_cancelled_row_that_waits_never_starts():
    session = session_over(max_batch_size=1)
    first, second, third = (session.submit(prompt, max_new_tokens=6) for prompt in PROMPTS[:3])
    session.step()
    session.cancel(second)
    with forward_passes(TARGET) as passes:
        run_to_the_end(session)
    result = session.result(second)
    assert (len(result.sequence), result.finish_reason) == (0, "cancelled")
    assert not any(length >= len(PROMPTS[1]) and length != len(PROMPTS[2]) for _, length in passes)
    assert_same_result(session.result(first), alone(0, PROMPTS[0], 6))
    assert_same_result(session.result(third), alone(2, PROMPTS[2], 6))


def test_place_of_a_cancelled_row_is_taken_by_a_waiting_one():
    session = session_over(max_batch_size=1)
    first, second = (session.submit(prompt, max_new_tokens=6) for prompt in PROMPTS[:2])
    session.step()
    session.cancel(first)
    assert session.step().rows == [1]
    run_to_the_end(session)
    assert_same_result(session.result(second), alone(1, PROMPTS[1], 6))


def test_cancelling_what_has_ended_changes_nothing():
    session = session_over()
    handle = session.submit(PROMPTS[0], max_new_tokens=4)
    other = session.submit(PROMPTS[1], max_new_tokens=9)
    while session.result(handle).finish_reason is None:
        session.step()
    before = session.result(handle)
    session.cancel(handle)
    session.cancel(handle)
    assert_same_result(session.result(handle), before)
    run_to_the_end(session)
    assert_same_result(session.result(other), alone(1, PROMPTS[1], 9))


def test_session_with_all_rows_cancelled_is_idle():
    session = session_over(max_batch_size=2)
    handles = [session.submit(prompt, max_new_tokens=6) for prompt in PROMPTS]
    session.step()
    for handle in handles:
        session.cancel(handle)
    assert session.idle
    assert [session.result(handle).finish_reason for handle in handles] == ["cancelled"] * 4
    assert [len(session.result(handle).sequence) for handle in handles] == [1, 1, 0, 0]


def test_row_numbers_go_on_after_a_cancelled_row():
    session = session_over(max_batch_size=2)
    first = session.submit(PROMPTS[0], max_new_tokens=6)
    session.cancel(first)
    second = session.submit(PROMPTS[1], max_new_tokens=6)
    assert session.step().rows == [1]
    run_to_the_end(session)
    assert_same_result(session.result(second), alone(1, PROMPTS[1], 6))


# --- deadlines and budgets ------------------------------------------------------------------------


def test_row_past_its_deadline_ends_with_what_it_has(clock):
    session = session_over()
    hurried = session.submit(PROMPTS[0], max_new_tokens=20, deadline=2.0)
    other = session.submit(PROMPTS[1], max_new_tokens=20)
    session.step()
    clock.now += 1.9
    session.step()
    before = session.result(hurried)
    assert before.finish_reason is None
    clock.now += 0.1
    assert session.step().rows == [1]
    after = session.result(hurried)
    assert after.finish_reason == "budget"
    assert torch.equal(after.sequence, before.sequence)
    run_to_the_end(session)
    assert_same_result(session.result(other), alone(1, PROMPTS[1], 20))


def test_deadline_passes_for_a_row_that_still_waits(clock):
    session = session_over(max_batch_size=1)
    first = session.submit(PROMPTS[0], max_new_tokens=6)
    hurried = session.submit(PROMPTS[1], max_new_tokens=6, deadline=1.0)
    session.step()
    clock.now += 1.0
    run_to_the_end(session)
    result = session.result(hurried)
    assert (len(result.sequence), result.finish_reason) == (0, "budget")
    assert session.result(first).finish_reason == "length"


def test_deadline_counts_from_the_submission(clock):
    session = session_over()
    session.submit(PROMPTS[0], max_new_tokens=20)
    clock.now += 10
    handle = session.submit(PROMPTS[1], max_new_tokens=4, deadline=5.0)
    run_to_the_end(session)
    assert session.result(handle).finish_reason == "length"


def test_deadline_of_zero_ends_a_row_before_it_starts(clock):
    session = session_over()
    handle = session.submit(PROMPTS[0], max_new_tokens=4, deadline=0)
    with forward_passes(TARGET, DRAFT) as passes:
        run_to_the_end(session)
    assert passes == []
    assert session.result(handle).finish_reason == "budget"


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=str)
def test_time_budget_ends_live_rows_with_what_they_have_and_waiting_ones_empty(clock, options):
    def on_step(event):
        clock.now += 1.0

    full = generate(max_new_tokens=20, max_batch_size=2, **options)
    out = generate(max_new_tokens=20, max_batch_size=2, time_budget=3.5, on_step=on_step, **options)
    assert out.finish_reasons == ["budget"] * 4
    for sequence, logprobs, whole in zip(out.sequences[:2], out.logprobs, full.sequences, strict=False):
        assert 4 <= len(sequence) < 20
        assert len(logprobs) == len(sequence)
        assert torch.equal(sequence, whole[: len(sequence)])
    assert [len(sequence) for sequence in out.sequences[2:]] == [0, 0]
    assert out.trace.steps.step.max() == 3, "four steps were begun within 3.5 seconds"


def test_row_that_finished_within_the_budget_keeps_its_reason(clock):
    def on_step(event):
        clock.now += 1.0

    texts = [greedy_alone(TARGET, prompt, 40).tolist() for prompt in PROMPTS[:2]]
    stop = next(token for token in texts[1] if token not in texts[0])
    out = generate(PROMPTS[:2], max_new_tokens=40, eos_token_id=stop, time_budget=4, on_step=on_step)
    assert out.finish_reasons[1] == "eos"
    assert out.finish_reasons[0] == "budget"


def test_budget_that_is_spent_at_once_runs_no_model(clock):
    generate()  # the probe is not meant
    with forward_passes(TARGET, DRAFT) as passes:
        out = generate(time_budget=0)
    assert passes == []
    assert out.finish_reasons == ["budget"] * 4
    assert [len(sequence) for sequence in out.sequences] == [0] * 4


# --- places ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("verification", ["token", "block", "coupled"])
@pytest.mark.parametrize("max_batch_size", [1, 2, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_that_wait_for_a_place_equal_those_that_start_at_once(max_batch_size, temperature, verification):
    options = {"num_return_sequences": 2, "temperature": temperature, "verification": verification}
    expected = generate(**options)
    with forward_passes(TARGET, DRAFT) as passes:
        out = generate(max_batch_size=max_batch_size, **options)
    assert max(rows for rows, _ in passes) <= max_batch_size
    for result, other in zip(out.sequences, expected.sequences, strict=True):
        assert result.tolist() == other.tolist()
    for result, other in zip(out.logprobs, expected.logprobs, strict=True):
        assert torch.allclose(result, other)


def test_freed_place_is_taken_before_the_other_rows_end():
    session = session_over(max_batch_size=2)
    for new in (3, 40, 3):
        session.submit(PROMPTS[0], max_new_tokens=new)
    events = []
    while not session.idle:
        events.append(session.step())
    last_of_the_long_row = max(event.step for event in events if 1 in event.rows)
    assert min(event.step for event in events if 2 in event.rows) < last_of_the_long_row


# --- events ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, SAMPLED, {"draft_length": 0}, {"max_batch_size": 2}], ids=str)
def test_events_and_handles_count_what_rows_drafted_and_accepted_as_the_trace_does(options):
    session = session_over(**options)
    handles, events = [session.submit(prompt, max_new_tokens=12) for prompt in PROMPTS], []
    while not session.idle:
        events.append(session.step())
    steps = session.trace.steps
    told = [(e.step, *row) for e in events for row in zip(e.rows, e.drafted, e.accepted, strict=True)]
    assert sorted(told) == sorted(zip(steps.step, steps.row, steps.drafted, steps.accepted, strict=True))
    totals = steps.groupby("row")[["drafted", "accepted"]].sum()
    assert [[handle.drafted, handle.accepted] for handle in handles] == totals.to_numpy().tolist()
    assert (totals.accepted.sum() > 0) == (options.get("draft_length") != 0)


@pytest.mark.parametrize("options", [{}, SAMPLED, {"draft_length": 0}], ids=str)
def test_events_hold_exactly_the_tokens_of_the_rows(options):
    told, steps = defaultdict(list), []

    def on_step(event):
        steps.append(event.step)
        assert len(event.rows) == len(set(event.rows)) == len(event.new_tokens)
        for row, tokens in zip(event.rows, event.new_tokens, strict=True):
            told[row] += tokens

    eos = greedy_alone(TARGET, PROMPTS[2], 6)[3:5].tolist()
    out = generate(num_return_sequences=2, max_batch_size=3, eos_token_id=eos, on_step=on_step, **options)
    assert [told[row] for row in range(8)] == [sequence.tolist() for sequence in out.sequences]
    assert steps == list(range(len(steps)))
    assert "eos" in out.finish_reasons and "length" in out.finish_reasons


def test_trace_counts_the_same_tokens_as_the_events():
    out = generate(max_new_tokens=17)
    assert out.trace.steps.groupby("row").emitted.sum().tolist() == [17] * 4


# --- the same prompt among others, many times -----------------------------------------------------


@pytest.mark.parametrize(
    ("options", "any_length"),
    # How many tokens are left bounds the last drafts, and so which random numbers verification meets: shortening a row
    # need not leave its sampled text a beginning of the longer one, unless these are numbered by position.
    [({}, True), (SAMPLED, False), (SAMPLED | {"verification": "coupled"}, True)],
    ids=["greedy", "token", "coupled"],
)
def test_any_order_of_events_leaves_every_row_as_it_is_alone(options, any_length):
    """Rows are submitted, cancelled and stepped in random orders of our own."""
    prompts, longest = ragged_prompts(3, 11, 6, 19), 15
    expected = {
        (row, which): alone(row, prompts[which], longest, **options).sequence.tolist()
        for row, which in itertools.product(range(8), range(len(prompts)))
    }
    for trial in range(8):
        chance = np.random.default_rng(trial)
        session = session_over(max_batch_size=int(chance.integers(1, 4)), **options)
        rows = []
        while len(rows) < 8 or not session.idle:
            if len(rows) < 8 and chance.random() < 0.5:
                which = int(chance.integers(len(prompts)))
                new = int(chance.integers(longest + 1)) if any_length else longest
                rows.append((session.submit(prompts[which], max_new_tokens=new), which, new))
            if rows and chance.random() < 0.1:
                session.cancel(rows[int(chance.integers(len(rows)))][0])
            session.step()
        for row, (handle, which, new) in enumerate(rows):
            result = session.result(handle)
            assert result.finish_reason in ("length", "cancelled")
            length = new if result.finish_reason == "length" else len(result.sequence)
            assert result.sequence.tolist() == expected[row, which][:length]
