import itertools
from collections import defaultdict

import numpy as np
import pytest
import torch
from sessions import DRAFT, PROMPTS, SAMPLED, TARGET, alone, assert_same_result, generate, run_to_the_end, session_over
from tiny import forward_passes, greedy_alone, ragged_prompts


@pytest.mark.parametrize("kind", [lambda ids: ids.clone().numpy(), torch.Tensor.clone], ids=["array", "tensor"])
def test_submitted_prompt_is_copied(kind):
    session = session_over(max_batch_size=3)
    memory = kind(PROMPTS[0])
    first = session.submit(memory, max_new_tokens=6)
    memory[:] = 1
    second = session.submit(memory, max_new_tokens=6)
    third = session.submit(PROMPTS[0], max_new_tokens=6)
    memory[:] = 10**6
    run_to_the_end(session)
    alone = [greedy_alone(TARGET, each, 6).tolist() for each in (PROMPTS[0], torch.ones_like(PROMPTS[0]))]
    found = [session.result(each).sequence.tolist() for each in (first, second, third)]
    assert found == [alone[0], alone[1], alone[0]]


def test_result_grows_and_is_a_copy():
    session = session_over()
    handle = session.submit(PROMPTS[0], max_new_tokens=12)
    expected, lengths = greedy_alone(TARGET, PROMPTS[0], 12), []
    while True:
        result = session.result(handle)
        lengths.append(len(result.sequence))
        assert torch.equal(result.sequence, expected[: lengths[-1]]) and len(result.logprobs) == lengths[-1]
        assert result.finish_reason == ("length" if lengths[-1] == 12 else None)
        result.sequence.fill_(7)
        result.logprobs.fill_(7)
        if session.idle:
            break
        session.step()
    assert lengths[:2] == [0, 1] and sorted(set(lengths)) == lengths and lengths[-1] == 12
    result = session.result(handle)
    assert torch.equal(result.sequence, expected) and (result.logprobs < 0).all()


def test_no_model_runs_for_an_idle_session_or_a_spent_budget(clock):
    session = session_over()
    assert session.idle
    session.submit(PROMPTS[0], max_new_tokens=0)
    assert session.idle, "a row without tokens is done at once"
    with forward_passes(TARGET, DRAFT) as passes:
        event = session.step()
        out = generate(time_budget=0)
        late = session.submit(PROMPTS[0], max_new_tokens=4, deadline=0)
        run_to_the_end(session)
    assert (event.rows, event.new_tokens, passes) == ([], [], [])
    assert out.finish_reasons == ["budget"] * 4 and late.finish_reason == "budget"
    assert [len(sequence) for sequence in out.sequences] == [0] * 4
    handle = session.submit(PROMPTS[0], max_new_tokens=4)
    assert not session.idle
    run_to_the_end(session)
    assert torch.equal(session.result(handle).sequence, greedy_alone(TARGET, PROMPTS[0], 4))


@pytest.mark.parametrize(
    ("options", "any_length"),
    # The number of remaining tokens limits the last drafts, and so verification's random numbers. A shorter sampled
    # row is a prefix of the longer row only if random numbers depend on the position.
    [(SAMPLED, False), (SAMPLED | {"verification": "coupled"}, True)],
    ids=["token", "coupled"],
)
def test_rows_equal_rows_alone_in_any_order_of_events(options, any_length):
    prompts, longest, count = ragged_prompts(3, 11, 40), 10, 5
    expected = {
        (row, which): alone(row, prompts[which], longest, **options).sequence.tolist()
        for row, which in itertools.product(range(count), range(len(prompts)))
    }
    for trial in range(4):
        chance = np.random.default_rng(trial)
        places = int(chance.integers(1, 4))
        session = session_over(max_batch_size=places, **options)
        rows = []
        while len(rows) < count or not session.idle:
            if len(rows) < count and chance.random() < 0.5:
                which = int(chance.integers(len(prompts)))
                new = int(chance.integers(longest + 1)) if any_length else longest
                rows.append((session.submit(prompts[which], max_new_tokens=new), which, new))
            if rows and chance.random() < 0.1:
                session.cancel(rows[int(chance.integers(len(rows)))][0])
            assert len(session.step().rows) <= places
        for row, (handle, which, new) in enumerate(rows):
            result = session.result(handle)
            assert result.finish_reason in ("length", "cancelled")
            length = new if result.finish_reason == "length" else len(result.sequence)
            assert result.sequence.tolist() == expected[row, which][:length]


@pytest.mark.parametrize(("cancelled", "options"), [(0, SAMPLED), (1, {}), (2, SAMPLED)], ids=str)
def test_cancelled_row_keeps_its_tokens_and_the_others_are_unchanged(cancelled, options):
    session = session_over(max_batch_size=3, **options)
    handles = [session.submit(prompt, max_new_tokens=20) for prompt in PROMPTS[:3]]
    for _ in range(3):
        session.step()
    before = session.result(handles[cancelled])
    session.cancel(handles[cancelled])
    run_to_the_end(session)
    after = session.result(handles[cancelled])
    assert 0 < len(after.sequence) < 20 and after.finish_reason == "cancelled"
    assert torch.equal(after.sequence, before.sequence) and torch.equal(after.logprobs, before.logprobs)
    for row in {0, 1, 2} - {cancelled}:
        session.cancel(handles[row])  # no effect on an ended row
        assert_same_result(session.result(handles[row]), alone(row, PROMPTS[row], 20, **options))


def test_foreign_handle_is_refused():
    session, foreign = session_over(), session_over().submit(PROMPTS[1], max_new_tokens=8)
    for call in (session.cancel, session.result):
        with pytest.raises(TypeError, match="handle must be a Request returned by submit, got 99"):
            call(99)
        with pytest.raises(ValueError, match=r"Request\(row 0, .* is a row of another session"):
            call(foreign)
    assert foreign.finish_reason is None


def test_cancelled_row_that_waits_never_starts():
    session = session_over(max_batch_size=1)
    first, second, third = (session.submit(prompt, max_new_tokens=6) for prompt in PROMPTS[:3])
    session.step()
    session.cancel(second)
    with forward_passes(TARGET) as passes:
        session.cancel(first)
        assert session.step().rows == [2]
        run_to_the_end(session)
    result = session.result(second)
    assert (len(result.sequence), result.finish_reason) == (0, "cancelled")
    assert not any(length >= len(PROMPTS[1]) and length != len(PROMPTS[2]) for _, length in passes)
    assert_same_result(session.result(third), alone(2, PROMPTS[2], 6))


def test_row_past_its_deadline_ends_with_its_tokens_so_far(clock):
    session = session_over(max_batch_size=2)
    clock.now += 10  # deadlines count from the submission
    hurried, other, waiting = (
        session.submit(prompt, max_new_tokens=20, deadline=deadline)
        for prompt, deadline in zip(PROMPTS, (2.0, None, 1.0), strict=False)
    )
    session.step()
    clock.now += 1.9
    session.step()
    before = session.result(hurried)
    assert before.finish_reason is None
    clock.now += 0.1
    assert session.step().rows == [1]
    after = session.result(hurried)
    assert after.finish_reason == "budget" and torch.equal(after.sequence, before.sequence)
    assert (len(session.result(waiting).sequence), waiting.finish_reason) == (0, "budget")
    run_to_the_end(session)
    assert_same_result(session.result(other), alone(1, PROMPTS[1], 20))


def test_time_budget_ends_live_rows_with_their_tokens_and_waiting_rows_empty(clock):
    def on_step(event):
        clock.now += 1.0

    full = generate(max_new_tokens=20, max_batch_size=2, **SAMPLED)
    out = generate(max_new_tokens=20, max_batch_size=2, time_budget=3.5, on_step=on_step, **SAMPLED)
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
    assert out.finish_reasons == ["budget", "eos"]


@pytest.mark.parametrize("options", [{}, SAMPLED, {"draft_length": 0}], ids=str)
def test_events_handles_and_trace_agree(options):
    eos = greedy_alone(TARGET, PROMPTS[2], 6)[3:5].tolist()
    session = session_over(max_batch_size=3, eos_token_id=eos, **options)
    handles = [session.submit(prompt, max_new_tokens=12) for prompt in PROMPTS for _ in range(2)]
    tokens, counts, numbers = defaultdict(list), [], []
    while not session.idle:
        event = session.step()
        numbers.append(event.step)
        assert session.trace.steps.step.max() == event.step
        assert len(event.rows) == len(set(event.rows)) == len(event.new_tokens)
        for row, new in zip(event.rows, event.new_tokens, strict=True):
            tokens[row] += new
        counts += [(event.step, *row) for row in zip(event.rows, event.drafted, event.accepted, strict=True)]
    assert numbers == list(range(len(numbers)))
    assert [tokens[row] for row in range(8)] == [session.result(handle).sequence.tolist() for handle in handles]
    assert {handle.finish_reason for handle in handles} == {"eos", "length"}
    steps = session.trace.steps
    assert sorted(counts) == sorted(zip(steps.step, steps.row, steps.drafted, steps.accepted, strict=True))
    totals = steps.groupby("row")[["drafted", "accepted", "emitted"]].sum()
    assert [[handle.drafted, handle.accepted] for handle in handles] == totals.to_numpy()[:, :2].tolist()
    assert totals.emitted.tolist() == [len(tokens[row]) for row in range(8)]
    assert (totals.accepted.sum() > 0) == (options.get("draft_length") != 0)
