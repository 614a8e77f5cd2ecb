"""What comes back: rows one by one and prompt by prompt, tables, streams, and what a Ctrl-C leaves."""

import asyncio
import time

import pytest
import torch
from tiny import BYTES, byte_tokenizer, ragged_prompts, tiny_model

import bass_core as bass

TOKENIZER = byte_tokenizer()
PAIR = bass.ModelPair(tiny_model(vocab_size=BYTES), tiny_model(vocab_size=BYTES, noise=0.1), TOKENIZER)
TEXTS = ["one", "and two", "3"]
OPTIONS = {"max_new_tokens": 40, "temperature": 1.0, "eos_token_id": (), "draft_length": 3, "seed": 5}


def generate(prompts=TEXTS, pair=PAIR, **options):
    return bass.generate(pair, prompts, **OPTIONS | options)


def saying(text, tokenizer=TOKENIZER):
    """A pair that continues one token by this text: what comes next is a function of the position alone."""
    ids, size = tokenizer(text)["input_ids"], 64
    model = tiny_model("gpt2", vocab_size=BYTES, n_embd=size)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            weights.fill_(1 if ".ln_" in name and name.endswith("weight") else 0)
        model.transformer.wpe.weight[:size] = torch.eye(size)
        model.lm_head.weight[ids, range(len(ids))] = 10
    options = {"max_new_tokens": len(ids), "eos_token_id": (), "draft_length": 0}
    return bass.ModelPair(model, None, tokenizer), options


def joined(pieces, rows):
    texts = [""] * rows
    for row, piece in pieces:
        assert piece
        texts[row] += piece
    return texts


# --- a generation ---------------------------------------------------------------------------------


def test_rows_come_one_by_one_and_prompt_by_prompt():
    out = generate(num_return_sequences=2)
    assert len(out) == 6 and [row.text for row in out] == out.texts
    assert torch.equal(out[5].sequence, out.sequences[5]) and out[-1].text == out.texts[5]
    assert [row.text for row in out[1:3]] == out.texts[1:3]
    assert [[row.text for row in rows] for rows in out.by_prompt] == [out.texts[:2], out.texts[2:4], out.texts[4:]]
    with pytest.raises(IndexError):
        out[6]


def test_a_table_has_a_line_per_row():
    out = generate(num_return_sequences=2)
    table = out.to_pandas()
    assert table["prompt"].tolist() == [0, 0, 1, 1, 2, 2] and table["sample"].tolist() == [0, 1] * 3
    assert table.text.tolist() == out.texts and set(table.tokens) == {40} and set(table.finish_reason) == {"length"}
    assert table.logprob[3] == pytest.approx(float(out.logprobs[3].sum()))


def test_representations_are_short_and_say_what_it_is():
    assert repr(generate()) == "Generation(3 rows of 3 prompts, 120 tokens; ended: 3 length)"
    assert repr(generate(acceptance="synthetic:0.5")).endswith("3 length, synthetic)")
    assert repr(PAIR) == (
        "ModelPair(target=LlamaForCausalLM of 0.0321 M, float32, draft=LlamaForCausalLM of 0.0321 M, float32, "
        f"tokenizer={type(TOKENIZER).__name__}, on cpu)"
    )
    assert repr(bass.ModelPair(PAIR.target, bass.NgramDrafter())).endswith("draft=NgramDrafter, on cpu)")


def test_a_ctrl_c_brings_the_rows_so_far():
    def on_step(event):
        if event.step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=r"\.generation") as caught:
        generate(max_batch_size=2, on_step=on_step)
    out = caught.value.generation
    assert isinstance(caught.value, bass.Interrupted) and out.finish_reasons == [None, None, None]
    whole = generate(max_batch_size=2)
    for some, row in zip(out.sequences, whole.sequences, strict=True):
        assert torch.equal(some, row[: len(some)])
    assert 5 < len(out.sequences[0]) < 40 and len(out.sequences[2]) == 0


# --- streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"num_return_sequences": 2}, {"max_batch_size": 1}, {"draft_length": 0}], ids=str
)
def test_pieces_joined_are_the_texts(options):
    out = generate(**options)
    pieces = list(bass.stream(PAIR, TEXTS, **OPTIONS | options))
    assert joined(pieces, len(out)) == out.texts
    assert len(pieces) > 3 * len(out)  # they came while rows were running


def test_half_a_character_is_held_back():
    pair, options = saying("é🙂")
    assert options["max_new_tokens"] == 6
    assert [text for _, text in bass.stream(pair, "a", **options)] == ["é", "🙂"]


@pytest.mark.parametrize(
    ("told", "stop", "pieces"),
    [
        ("abcSTOP", ("STOP",), ["a", "b", "c"]),
        ("abSTxy", ("STOP",), ["a", "b", "STx", "y"]),  # it might have become one
        ("abST", ("STOP",), ["a", "b", "ST"]),
        ("aababac", ("abab", "bc"), ["a"]),
    ],
)
def test_what_may_become_a_stop_string_is_held_back(told, stop, pieces):
    pair, options = saying(told)
    assert [text for _, text in bass.stream(pair, "a", stop=stop, **options)] == pieces
    assert "".join(pieces) == bass.generate(pair, "a", stop=stop, **options).texts[0]


def test_rows_of_a_session_become_final_each_by_its_own_stop_strings():
    pair, options = saying("abSTxy🙂")
    new = options.pop("max_new_tokens")
    session = bass.Session(pair, **options)
    stops = [(), "STOP", "y"]
    handles = [session.submit("a", max_new_tokens=new, stop=stop) for stop in stops]
    texts = [bass.FinalText(pair.tokenizer, handle.stop) for handle in handles]
    pieces = [[] for _ in stops]
    while not session.idle:
        event = session.step()
        for row, tokens in zip(event.rows, event.new_tokens, strict=True):
            pieces[row].append(texts[row].feed(tokens, ended=handles[row].finish_reason is not None))
    assert [[piece for piece in row if piece] for row in pieces] == [
        ["a", "b", "S", "T", "x", "y", "🙂"],
        ["a", "b", "STx", "y", "🙂"],
        ["a", "b", "S", "T", "x"],
    ]
    assert ["".join(row) for row in pieces] == [session.result(handle).text for handle in handles]


def test_text_that_has_ended_has_nothing_more():
    text = bass.FinalText(TOKENIZER)
    ids = TOKENIZER("né", add_special_tokens=False)["input_ids"]
    assert [text.feed(ids[:2]), text.feed(ended=True), text.feed(ended=True)] == ["n", "\ufffd", ""]


def test_clean_up_of_spaces_takes_nothing_back():
    tokenizer = byte_tokenizer()
    decode = tokenizer.decode
    tokenizer.decode = lambda ids, **options: tokenizer.clean_up_tokenization(decode(ids, **options))
    pair, options = saying("I do n't know , I 'm here .", tokenizer)
    assert bass.generate(pair, "a", **options).texts == ["I don't know, I'm here."]
    assert joined(bass.stream(pair, "a", **options), 1) == ["I don't know, I'm here."]


def test_leaving_the_loop_ends_the_decoding():
    pieces = bass.stream(PAIR, TEXTS, **OPTIONS)
    next(pieces)
    session = pieces.gi_frame.f_locals["session"]
    pieces.close()
    with pytest.raises(RuntimeError, match="closed"):
        session.step()


@pytest.mark.parametrize(
    ("pair", "prompts", "options", "message"),
    [
        (PAIR, [], {}, "prompts is empty"),
        (PAIR, "a", {"top_p": 2.0}, "top_p"),
        (PAIR, "a", {"max_batch_size": 0}, "max_batch_size"),
        (bass.ModelPair(PAIR.target), ragged_prompts(3), {}, "no tokenizer"),
    ],
)
def test_bad_arguments_are_refused_before_the_first_piece_is_asked_for(pair, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        bass.stream(pair, prompts, max_new_tokens=4, **options)


def test_a_time_budget_ends_a_stream_with_what_there_is():
    texts = joined(bass.stream(PAIR, TEXTS, **OPTIONS, time_budget=0.0), 3)
    assert texts == ["", "", ""]


def test_an_asynchronous_stream_lets_others_run():
    async def both():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0)
                ticks += 1

        ticking = asyncio.create_task(tick())
        pieces = [piece async for piece in bass.astream(PAIR, TEXTS, **OPTIONS)]
        ticking.cancel()
        return pieces, ticks

    pieces, ticks = asyncio.run(both())
    assert joined(pieces, 3) == generate().texts and ticks > len(pieces)


def test_an_asynchronous_stream_may_be_left_and_cancelled(monkeypatch):
    step = bass.Session.step
    monkeypatch.setattr(bass.Session, "step", lambda session: (time.sleep(0.02), step(session))[1])

    async def first_piece():
        async for piece in bass.astream(PAIR, TEXTS, **OPTIONS):
            return piece

    async def all_pieces():
        return [piece async for piece in bass.astream(PAIR, TEXTS * 4, **OPTIONS)]

    async def cancelled():
        await asyncio.wait_for(all_pieces(), timeout=0.02)

    assert asyncio.run(first_piece())[1]
    with pytest.raises(TimeoutError):
        asyncio.run(cancelled())
    assert generate().texts  # the models are free again


def test_a_program_that_ends_while_it_streams_ends_without_a_complaint(monkeypatch, caplog):
    step = bass.Session.step
    monkeypatch.setattr(bass.Session, "step", lambda session: (time.sleep(0.1), step(session))[1])

    async def fails_meanwhile():
        async def reading():
            async for _ in bass.astream(PAIR, TEXTS * 4, **OPTIONS):
                pass

        task = asyncio.create_task(reading())
        await asyncio.sleep(0.35)
        assert not task.done()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(fails_meanwhile())
    assert caplog.records == []


def test_options_that_streams_do_not_take_are_named():
    with pytest.raises(TypeError, match=r"stream\(\) got an unexpected keyword argument 'max_tokens'"):
        bass.stream(PAIR, TEXTS, max_tokens=3)


def test_handles_and_policies_are_short_to_print():
    class Mine(bass.DraftLengthPolicy):
        def plan(self, rows):
            return 1

    with bass.Session(PAIR, draft_length=Mine()) as session:
        handle = session.submit(TEXTS[0], max_new_tokens=5)
        assert repr(handle) == "Request(row 0, prompt of 3, up to 5 tokens, not ended)"
        assert session.trace.meta["policy"] == "Mine()"
        session.cancel(handle)
        assert repr(handle).endswith("cancelled)")
