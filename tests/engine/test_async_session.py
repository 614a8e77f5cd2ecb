"""`AsyncSession`: coroutines share an engine in a thread."""

import asyncio
import itertools
import threading

import pytest
from recovery import limit_memory
from tiny import BYTES, byte_tokenizer, tiny_model
from waiting import until

import bass_core as bass
from bass_core.model.patching import InUse, path_of

PAIR = bass.ModelPair(
    tiny_model(vocab_size=BYTES, max_position_embeddings=2048),
    tiny_model(vocab_size=BYTES, max_position_embeddings=2048, noise=0.1),
    byte_tokenizer(),
)
OPTIONS = {"eos_token_id": (), "draft_length": 3}
TEXTS = ["one", "and two", "3"]
NEW = 20


def texts_alone(prompts, **options) -> list[str]:
    return [bass.generate(PAIR, each, max_new_tokens=NEW, **OPTIONS | options).texts[0] for each in prompts]


async def joined(pieces) -> str:
    return "".join([piece async for piece in pieces])


def in_session(program, pair=PAIR, **options):
    """Run `program(session)` in an event loop. Afterwards no thread of an engine is left."""

    async def main():
        async with bass.AsyncSession(pair, **OPTIONS | options) as session:
            return await program(session)

    found = asyncio.run(asyncio.wait_for(main(), 30))
    until(lambda: not any(each.name.startswith("bass engine") for each in threading.enumerate()))
    assert path_of(PAIR.target) is None
    return found


def test_consumers_of_a_session_receive_the_texts_of_generate():
    async def program(session):
        streams = [joined(session.stream(text, max_new_tokens=NEW)) for text in TEXTS]
        *texts, result = await asyncio.gather(*streams, session.generate(TEXTS[0], max_new_tokens=NEW))
        assert len(result.logprobs) == NEW and result.finish_reason == "length"
        return [*texts, result.text]

    assert in_session(program, max_batch_size=2) == texts_alone([*TEXTS, TEXTS[0]])


def test_streams_of_one_pair_run_at_the_same_time(monkeypatch):
    order, step = [], bass.Session.step
    monkeypatch.setattr(bass.Session, "step", lambda session: (order.append(id(session)), step(session))[1])

    async def pieces(text, **options):
        return "".join([piece async for _, piece in bass.astream(PAIR, text, max_new_tokens=NEW, **OPTIONS | options)])

    async def both():
        return await asyncio.gather(pieces(TEXTS[0]), pieces(TEXTS[1], temperature=0.8, seed=5, attention="eager"))

    found = asyncio.run(both())
    changes = sum(one != other for one, other in itertools.pairwise(order))
    assert changes > 3  # steps are interleaved
    assert found == [*texts_alone(TEXTS[:1]), *texts_alone(TEXTS[1:2], temperature=0.8, seed=5, attention="eager")]


def test_job_reports_tokens_and_log_probabilities_of_its_rows():
    async def program(session):
        requests = [("a", {"max_new_tokens": NEW, "sample": sample}) for sample in range(2)]
        job = session.start(requests, logprobs=True)
        tokens, logprobs, results = [[], []], [[], []], [None, None]
        async for update in job:
            tokens[update.index] += update.tokens
            logprobs[update.index] += update.logprobs
            results[update.index] = update.result
        for row, result in enumerate(results):
            assert tokens[row] == result.sequence.tolist() and logprobs[row] == result.logprobs.tolist()
        return [result.text for result in results]

    found = in_session(program, temperature=0.9, seed=4)
    samples = bass.generate(PAIR, "a", num_return_sequences=2, temperature=0.9, seed=4, max_new_tokens=NEW, **OPTIONS)
    assert found == samples.texts


async def reached(holds) -> None:
    while not holds():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("leaves", ["closed stream", "cancelled task", "timeout"])
def test_row_of_a_consumer_that_left_frees_its_batch_slot(leaves):
    async def program(session):
        if leaves == "closed stream":
            stream = session.stream(TEXTS[0], max_new_tokens=1500)
            await anext(stream)
            await stream.aclose()
        elif leaves == "timeout":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await session.generate(TEXTS[0], max_new_tokens=1500)
        else:
            task = asyncio.create_task(session.generate(TEXTS[0], max_new_tokens=1500))
            await reached(lambda: session.session.rows.live)
            task.cancel()
        await reached(lambda: session.session.idle)
        return (await session.generate(TEXTS[1], max_new_tokens=NEW)).text

    assert in_session(program, max_batch_size=1) == texts_alone(TEXTS[1:2])[0]


def test_invalid_request_fails_alone():
    async def program(session):
        running = asyncio.create_task(session.generate(TEXTS[0], max_new_tokens=NEW))
        for arguments, error, said in (
            ({"temperature": -1}, ValueError, "temperature"),
            ({"max_new_tokens": 5000}, ValueError, "max_new_tokens"),
            ({"max_tokens": 5}, TypeError, "max_tokens"),
        ):
            with pytest.raises(error, match=said):
                await session.generate(TEXTS[0], **arguments)
            with pytest.raises(error, match=said):
                await joined(session.stream(TEXTS[0], **arguments))
        job = session.start([(TEXTS[0], {"max_new_tokens": 1500}), ([], {})])
        with pytest.raises(ValueError, match="a prompt is empty"):
            await anext(aiter(job))
        assert job.rows[0].finish_reason == "cancelled"
        return (await running).text

    assert in_session(program) == texts_alone(TEXTS[:1])[0]


def test_job_may_be_read_in_parts_and_notify_may_fail():
    async def program(session):
        def notify(update):
            raise ValueError("a fault of the caller")

        asyncio.get_running_loop().set_exception_handler(lambda loop, context: heard.append(context["exception"]))
        heard, texts = [], {}
        job = session.start(
            [(text, {"max_new_tokens": new}) for text, new in zip(TEXTS, (1, 9, 9), strict=True)], notify=notify
        )
        other = asyncio.create_task(session.generate(TEXTS[0], max_new_tokens=NEW))
        for _ in range(50):
            async for index, piece in job.texts():
                texts[index] = texts.get(index, "") + piece
                break
        async for update in job:
            assert update.handle.max_new_tokens in (1, 9)
        assert [update async for update in job] == [] and all(isinstance(each, ValueError) for each in heard) and heard
        with pytest.raises(ValueError, match="requests is empty"):
            session.start([])
        return (await other).text

    assert in_session(program) == texts_alone(TEXTS[:1])[0]


def test_close_ends_running_and_waiting_rows():
    async def program(session):
        running = [asyncio.create_task(session.generate(text, max_new_tokens=1500)) for text in TEXTS]
        await reached(lambda: session.session.rows.live and session.session.rows.waiting)
        with pytest.raises(InUse):
            bass.generate(PAIR, TEXTS[0], max_new_tokens=1, **OPTIONS)
        await session.close()
        await session.close()
        results = await asyncio.gather(*running)
        assert [result.finish_reason for result in results] == ["cancelled"] * 3
        assert len(results[0].sequence) > len(results[2].sequence) == 0
        with pytest.raises(RuntimeError, match="the session is closed"):
            await session.generate(TEXTS[0])
        with pytest.raises(RuntimeError, match="closed"):
            session.session.step()

    in_session(program, max_batch_size=2)


def test_error_of_a_step_reaches_all_consumers_and_no_other_session():
    async def program(session):
        async with bass.AsyncSession(PAIR, **OPTIONS) as other:
            unaffected = asyncio.create_task(other.generate(TEXTS[0], max_new_tokens=NEW))
            running = [asyncio.create_task(session.generate(text, max_new_tokens=1500)) for text in TEXTS]
            await reached(lambda: session.session.rows.live)
            session.session.device_step.verify = lambda *arguments: 1 / 0
            found = await asyncio.gather(*running, return_exceptions=True)
            assert [type(each) for each in found] == [ZeroDivisionError] * 3 and session.error is found[0]
            with pytest.raises(RuntimeError, match="the session ended after ZeroDivisionError"):
                await session.generate(TEXTS[0])
            return (await unaffected).text

    assert in_session(program, max_batch_size=1) == texts_alone(TEXTS[:1])[0]


def test_full_memory_fails_only_the_largest_waiting_request(monkeypatch):
    limit_memory(monkeypatch, 700)

    async def program(session):
        small = [session.generate(text, max_new_tokens=NEW) for text in TEXTS[:2]]
        found = await asyncio.gather(*small, session.generate("x", max_new_tokens=1500), return_exceptions=True)
        assert "out of memory" in str(found[2])
        return [result.text for result in found[:2]]

    assert in_session(program) == texts_alone(TEXTS[:2])


def test_session_is_refused_outside_its_context_and_its_event_loop():
    session = bass.AsyncSession(PAIR, **OPTIONS)

    async def uses():
        await session.generate(TEXTS[0], max_new_tokens=1)

    with pytest.raises(RuntimeError, match="the session is not open"):
        asyncio.run(uses())

    async def program():
        async with session:
            with pytest.raises(RuntimeError, match="belongs to another event loop"):
                await asyncio.to_thread(asyncio.run, uses())
            with pytest.raises(RuntimeError, match="entered only once"):
                await session.__aenter__()
            await uses()

    asyncio.run(program())
    with pytest.raises(ValueError, match="top_p"):
        in_session(lambda session: None, top_p=2.0)
    with pytest.raises(TypeError, match="max_tokens"):
        in_session(lambda session: None, max_tokens=2)


def test_closed_event_loop_ends_its_sessions():
    async def begin():
        await session.__aenter__()
        session.start([(TEXTS[0], {"max_new_tokens": 1500})])

    session = bass.AsyncSession(PAIR, **OPTIONS)
    asyncio.run(begin())
    until(lambda: session._over and path_of(PAIR.target) is None)
    until(lambda: not any(each.name.startswith("bass engine") for each in threading.enumerate()))
