import asyncio
import logging
import time

import pytest
import torch
from tiny import BYTES, byte_tokenizer, ragged_prompts, tiny_model

import bass_core as bass
from bass_lab.synthetic_acceptance import SyntheticAcceptance

TOKENIZER = byte_tokenizer()
PAIR = bass.ModelPair(tiny_model(vocab_size=BYTES), tiny_model(vocab_size=BYTES, noise=0.1), TOKENIZER)
TEXTS = ["one", "and two", "3"]
OPTIONS = {"max_new_tokens": 20, "temperature": 1.0, "eos_token_id": (), "draft_length": 3, "seed": 5}


def generate(prompts=TEXTS, pair=PAIR, **options):
    return bass.generate(pair, prompts, **OPTIONS | options)


def saying(text, tokenizer=TOKENIZER):
    """Return a pair with a next token that depends on the position alone: it continues any token with `text`."""
    ids, size = tokenizer(text)["input_ids"], 64
    model = tiny_model.__wrapped__("gpt2", vocab_size=BYTES, n_embd=size)
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


def test_generation_is_indexed_by_row_and_by_prompt():
    out = generate(num_return_sequences=2)
    assert len(out) == 6 and [row.text for row in out] == out.texts
    assert torch.equal(out[5].sequence, out.sequences[5]) and out[-1].text == out.texts[5]
    assert [row.text for row in out[1:3]] == out.texts[1:3]
    assert [[row.text for row in rows] for rows in out.by_prompt] == [out.texts[:2], out.texts[2:4], out.texts[4:]]
    with pytest.raises(IndexError):
        out[6]
    greedy = [generate(temperature=0.0, num_return_sequences=samples).texts for samples in (1, 2)]
    assert greedy[1] == [text for text in greedy[0] for _ in range(2)]
    table = out.to_pandas()
    assert table["prompt"].tolist() == [0, 0, 1, 1, 2, 2] and table["sample"].tolist() == [0, 1] * 3
    assert table.text.tolist() == out.texts and set(table.tokens) == {20} and set(table.finish_reason) == {"length"}
    assert table.logprob[3] == pytest.approx(float(out.logprobs[3].sum()))


def test_representations():
    assert repr(generate()) == "Generation(3 rows of 3 prompts, 60 tokens; ended: 3 length)"
    assert repr(generate(acceptance=SyntheticAcceptance.named("synthetic:0.5"))).endswith("3 length, synthetic)")
    assert repr(PAIR).startswith("ModelPair(target=LlamaForCausalLM of 0.0321 M, float32, draft=LlamaForCausalLM")
    assert repr(bass.ModelPair(PAIR.target, bass.NgramDrafter())).endswith("draft=NgramDrafter, on cpu)")
    with bass.Session(PAIR) as session:
        handle = session.submit(TEXTS[0], max_new_tokens=5)
        assert repr(handle) == "Request(row 0, prompt of 3, up to 5 tokens, not ended)"
        session.cancel(handle)
        assert repr(handle).endswith("cancelled)")


def test_ctrl_c_returns_the_rows_so_far():
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


@pytest.mark.parametrize("options", [{"num_return_sequences": 2}, {"max_batch_size": 1, "draft_length": 0}], ids=str)
def test_streamed_pieces_joined_are_the_texts(options):
    out = generate(**options)
    pieces = list(bass.stream(PAIR, TEXTS, **OPTIONS | options))
    assert joined(pieces, len(out)) == out.texts
    assert len(pieces) > 3 * len(out)  # pieces arrive while rows run


@pytest.mark.parametrize(
    ("text", "stop", "pieces"),
    [
        ("é🙂", (), ["é", "🙂"]),
        ("abcSTOP", ("STOP",), ["a", "b", "c"]),
        ("abSTxy", ("STOP",), ["a", "b", "STx", "y"]),
        ("abST", ("STOP",), ["a", "b", "ST"]),
        ("aababac", ("abab", "bc"), ["a"]),
    ],
)
def test_parts_of_characters_and_of_stop_strings_are_held_back(text, stop, pieces):
    pair, options = saying(text)
    assert [text for _, text in bass.stream(pair, "a", stop=stop, **options)] == pieces
    assert "".join(pieces) == bass.generate(pair, "a", stop=stop, **options).texts[0]


def test_final_text_of_session_rows_follows_their_own_stop_strings():
    pair, options = saying("abSTxy🙂")
    new, stops = options.pop("max_new_tokens"), [(), "STOP", "y"]
    session = bass.Session(pair, **options)
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


def test_closed_stream_frees_its_models():
    pieces = bass.stream(PAIR, TEXTS, **OPTIONS)
    next(pieces)
    session = pieces.gi_frame.f_locals["session"]
    pieces.close()
    with pytest.raises(RuntimeError, match="closed"):
        session.step()


@pytest.mark.parametrize(
    ("pair", "prompts", "options", "error", "message"),
    [
        (PAIR, [], {}, ValueError, "prompts is empty"),
        (PAIR, "a", {"top_p": 2.0}, ValueError, "top_p"),
        (PAIR, "a", {"max_batch_size": 0}, ValueError, "max_batch_size"),
        (bass.ModelPair(PAIR.target), ragged_prompts(3), {}, ValueError, "no tokenizer"),
        (PAIR, "a", {"max_tokens": 3}, TypeError, r"stream\(\) has no argument 'max_tokens'; set max_new_tokens=…"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_bad_arguments_are_refused_before_the_first_piece(pair, prompts, options, error, message):
    with pytest.raises(error, match=message):
        bass.stream(pair, prompts, **{"max_new_tokens": 4} | options)


async def all_pieces(prompts):
    return [piece async for piece in bass.astream(PAIR, prompts, **OPTIONS)]


@pytest.fixture
def slow_steps(monkeypatch):
    step = bass.Session.step
    monkeypatch.setattr(bass.Session, "step", lambda session: (time.sleep(0.05), step(session))[1])


def test_asynchronous_stream_lets_other_tasks_run():
    ticks = []

    async def tick():
        while True:
            await asyncio.sleep(0)
            ticks.append(1)

    async def both():
        ticking = asyncio.create_task(tick())
        try:
            return await all_pieces(TEXTS)
        finally:
            ticking.cancel()

    pieces = asyncio.run(both())
    assert joined(pieces, 3) == generate().texts and len(ticks) > len(pieces)


def test_asynchronous_stream_may_be_cancelled(slow_steps):
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(all_pieces(TEXTS * 4), timeout=0.02))
    assert generate(max_new_tokens=1).texts


def test_log_names_the_session_and_its_steps(caplog):
    caplog.set_level(logging.DEBUG, "bass_core")
    generate(max_new_tokens=2)
    session, *steps = [record for record in caplog.records if record.name == "bass_core.session"]
    assert session.levelname == "INFO" and "3 batch slots, {'attention': 'pad'" in session.message
    assert [step.message.split()[0] for step in steps] == ["prefill:", "decode:"]


def test_program_may_end_while_it_streams(slow_steps, caplog):
    async def fails():
        task = asyncio.create_task(all_pieces(TEXTS * 4))
        await asyncio.sleep(0.2)
        assert not task.done()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(fails())
    assert caplog.records == []
