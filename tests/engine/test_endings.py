import copy

import pytest
import torch
from sessions import DRAFT, PERFECT, PROMPTS, TARGET, generate, run_to_the_end
from test_outputs import saying
from tiny import assert_greedy, byte_tokenizer, forward_passes, greedy_alone

import bass_core as bass
from bass_core.model import probe


@pytest.mark.parametrize(("new", "draft_length"), [(1, 4), (2, 1), (3, 7), (5, 0), (8, 4), (13, 7)])
def test_row_has_exactly_the_requested_tokens(new, draft_length):
    out = generate(pair=PERFECT, max_new_tokens=new, draft_length=draft_length)
    assert_greedy(out, TARGET, PROMPTS, new)


@pytest.mark.parametrize("at", range(8))
def test_eos_ends_a_row_anywhere_in_a_draft(at):
    text = greedy_alone(TARGET, PROMPTS[0], 12).tolist()
    until = text.index(text[at]) + 1
    for draft_length, new in ((0, 12), (5, 12), (5, until)):  # EOS also as the last token of the limit
        options = {"draft_length": draft_length, "max_new_tokens": new}
        out = generate(PROMPTS[:1], PERFECT, eos_token_id=text[at], **options)
        assert (out.sequences[0].tolist(), len(out.logprobs[0]), out.finish_reasons) == (text[:until], until, ["eos"])


def test_first_of_several_eos_ids_ends_a_row():
    text = greedy_alone(TARGET, PROMPTS[0], 12).tolist()
    for eos in ([text[6], text[3]], torch.tensor([text[6], text[3]]), {text[3], text[6]}):
        out = generate(PROMPTS[:1], PERFECT, eos_token_id=eos, draft_length=5)
        assert out.sequences[0].tolist() == text[: text.index(text[3]) + 1]


def test_eos_of_the_model_is_the_default():
    model = copy.deepcopy(TARGET)
    text = greedy_alone(TARGET, PROMPTS[0], 12).tolist()
    model.generation_config.eos_token_id = [text[4], text[9]]
    pair = bass.ModelPair(model, DRAFT)
    assert generate(PROMPTS[:1], pair, eos_token_id=None).sequences[0].tolist() == text[: text.index(text[4]) + 1]
    assert generate(PROMPTS[:1], pair, eos_token_id=()).sequences[0].tolist() == text
    model.generation_config.eos_token_id = None
    assert generate(PROMPTS[:1], pair, eos_token_id=None).sequences[0].tolist() == text


@pytest.mark.parametrize("draft_length", [0, 5])
def test_row_ignoring_eos_continues(draft_length):
    text = greedy_alone(TARGET, PROMPTS[0], 12).tolist()
    with bass.Session(PERFECT, eos_token_id=text[4], draft_length=draft_length) as session:
        rows = [session.submit(PROMPTS[0], max_new_tokens=12, ignore_eos=ignores) for ignores in (True, False)]
        run_to_the_end(session)
        goes_on, ends = map(session.result, rows)
    assert (goes_on.sequence.tolist(), goes_on.finish_reason) == (text, "length")
    assert (ends.sequence.tolist(), ends.finish_reason) == (text[: text.index(text[4]) + 1], "eos")


SPELLED = "!the né€g😀xyzw"  # characters of one to four bytes
MODEL, TOKENIZER = saying(SPELLED[1:])[0].target, byte_tokenizer()
SPELLING = bass.ModelPair(MODEL, MODEL, TOKENIZER)


def spell(stop, draft_length=5, new=18, **options) -> bass.Generation:
    options = {"stop": stop, "draft_length": draft_length, "max_new_tokens": new, "eos_token_id": (), **options}
    return bass.generate(SPELLING, ["!"], **options)


def tokens_of(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


def test_speller_spells():
    out = spell((), new=len(tokens_of(SPELLED)) - 1)
    assert out.texts == [SPELLED[1:]]
    assert out.trace.summary()["acceptance_rate"] == 1


@pytest.mark.parametrize("draft_length", [0, 3, 8])
def test_stop_string_ends_a_row_at_its_last_token(draft_length):
    for stop in ("t", "he", "e n", "é", "né", "€", "€g", "😀", "😀x", "the né€g😀", "z"):
        out = spell([stop], draft_length)
        before = SPELLED[1 : SPELLED.index(stop)]
        assert out.texts == [before], stop
        assert out.sequences[0].tolist() == tokens_of(before + stop)
        assert len(out.logprobs[0]) == len(out.sequences[0])
        assert out.finish_reasons == ["stop"]
    out = spell(["z", "€g", "absent", "né€"], draft_length)
    assert out.texts == ["the "]  # the first completed stop string ends the row
    assert out.sequences[0].tolist() == tokens_of("the né€")


def test_stop_string_is_found_in_new_text_alone():
    for stop, new in (("!t", 12), ("!", 12), ("absent", 12), ("€", len(tokens_of("the né")) + 1)):
        out = spell(stop, new=new)
        assert out.finish_reasons == ["length"]
        assert out.sequences[0].tolist() == tokens_of(SPELLED)[1 : new + 1]


def test_first_end_decides_the_reason():
    n, e = tokens_of("n")[0], tokens_of("e")[0]
    assert spell(["né"], eos_token_id=n).finish_reasons == ["eos"]
    assert spell(["he"], eos_token_id=n).finish_reasons == ["stop"]
    assert spell(["né"], eos_token_id=e).texts == ["the"]
    out = spell(["né"], new=len(tokens_of("the né")))  # the last token of the limit completes the stop string
    assert (out.finish_reasons, out.texts) == (["stop"], ["the "])


def test_special_token_as_stop_string_ends_a_row():
    """Texts skip special tokens, so a text search would miss the stop string."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["!"]})
    assert tokenizer.decode(tokens_of("a!b"), skip_special_tokens=True) == "ab"
    pair, options = saying("he!né€g", tokenizer)
    out = bass.generate(pair, [tokens_of("t")], stop=["absent", "!"], **options)
    assert (out.texts, out.finish_reasons) == (["he"], ["stop"])
    assert out.sequences[0].tolist() == tokens_of("he!")


def test_texts_skip_special_tokens_and_are_none_without_a_tokenizer():
    pair, options = saying("ab</s>c")
    out = bass.generate(pair, "a", **options | {"eos_token_id": TOKENIZER.eos_token_id})
    assert out.sequences[0].tolist() == tokens_of("ab</s>")
    assert (out.texts, out.finish_reasons) == (["ab"], ["eos"])
    without = generate(PROMPTS)
    assert without.decoded == without.to_pandas().text.tolist() == [None] * 4
    for read in (lambda: without.texts, lambda: without[0].text):
        with pytest.raises(ValueError, match=r"no tokenizer, so rows have no text; use ModelPair\(\.\.\., tokenizer="):
            read()


def test_results_of_a_running_session_end_before_the_stop_string():
    session = bass.Session(SPELLING, stop="€g", draft_length=3, eos_token_id=())
    other, handle = session.submit("g", max_new_tokens=6), session.submit("!", max_new_tokens=18)
    texts = []
    while not session.idle:
        session.step()
        texts.append(session.result(handle).text)
    assert texts[-1] == "the né"
    assert all("g" not in text for text in texts)
    assert (session.result(handle).finish_reason, session.result(other).finish_reason) == ("stop", "length")
    assert session.result(other).sequence.tolist() == tokens_of(SPELLED)[1:7]


def spell_rows(stops, session_stop=(), **options) -> list[bass.Result]:
    options = {"draft_length": 5, "eos_token_id": (), "max_batch_size": len(stops)} | options
    session = bass.Session(SPELLING, stop=session_stop, **options)
    handles = [session.submit("!", max_new_tokens=18, stop=stop) for stop in stops]
    run_to_the_end(session)
    return [session.result(handle) for handle in handles]


@pytest.mark.parametrize(("draft_length", "session_stop"), [(0, "y"), (1, ()), (8, "y")])
def test_each_row_ends_at_its_own_stop_strings(draft_length, session_stop):
    stops = [None, (), "é", ["€g", "absent"], "he", ["z", "😀"]]
    for stop, row in zip(stops, spell_rows(stops, session_stop, draft_length=draft_length), strict=True):
        out = spell(session_stop if stop is None else stop, draft_length)
        assert row.sequence.tolist() == out.sequences[0].tolist()
        assert (row.text, row.finish_reason) == (out.texts[0], out.finish_reasons[0])


def test_rows_with_different_stop_strings_share_steps():
    probe.resolve(MODEL)
    with forward_passes(MODEL) as passes:
        spell_rows([None, "e n", "é", ()], draft_length=0)
    assert [rows for rows, _ in passes[:2]] == [1, 4]  # the prompt, then all rows
    assert len(passes) == 1 + 17  # one token from the prefill, one per step
