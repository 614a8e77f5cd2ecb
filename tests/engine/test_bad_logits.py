"""Logits that are not numbers: an error that commits nothing, or the end of one row alone."""

import copy
import itertools
from contextlib import contextmanager

import pytest
import torch
from tiny import greedy_alone, ragged_prompts, tiny_model

import bass_core as bass

TARGET = tiny_model(dtype="float64")
DRAFT = tiny_model(dtype="float64", noise=0.02)
PAIR = bass.ModelPair(TARGET, DRAFT)
PROMPTS = ragged_prompts(5, 9, 13)
NAN, INFINITY = float("nan"), float("inf")
NOT_NUMBERS = {"one NaN": NAN, "one +inf": INFINITY, "all -inf": -INFINITY}


def spoil(logits: torch.Tensor, value: float) -> None:
    """Make one logit of [..., V] that value; all of them for -inf, of which a model may have some."""
    logits[..., :] = value if value == -INFINITY else logits
    logits[..., 7] = value


@contextmanager
def spoiled(model, session, row, value, at_pass):
    """The model's logits for that row are spoiled on its pass number `at_pass` (from 0) from now."""
    passes = itertools.count()

    def hook(module, args, output):
        if next(passes) == at_pass:
            place = next(place for place, request in enumerate(session.rows.live) if request.row == row)
            spoil(output.logits[place], value)

    handle = model.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def started_session(**options) -> tuple[bass.Session, list]:
    """A session whose three rows have their first token."""
    session = bass.Session(PAIR, eos_token_id=(), draft_length=3, **options)
    handles = [session.submit(prompt, max_new_tokens=16) for prompt in PROMPTS]
    session.step()
    return session, handles


def run_to_the_end(session: bass.Session) -> None:
    while not session.idle:
        session.step()


def assert_same_results(results, expected):
    for result, other in zip(results, expected, strict=True):
        assert torch.equal(result.sequence, other.sequence)
        assert torch.equal(result.logprobs, other.logprobs)
        assert result.finish_reason == other.finish_reason


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("value", NOT_NUMBERS.values(), ids=NOT_NUMBERS)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_logits_that_are_no_numbers_raise_and_nothing_of_the_step_is_committed(role, value, temperature):
    session, handles = started_session(temperature=temperature)
    session.step()
    before = [session.result(handle) for handle in handles]
    with (
        spoiled(getattr(PAIR, role), session, row=1, value=value, at_pass=0),
        pytest.raises(FloatingPointError, match=f"{role} model LlamaForCausalLM .* row 1 at step 2.*on_row_error"),
    ):
        session.step()
    assert_same_results([session.result(handle) for handle in handles], before)


@pytest.mark.parametrize("later_pass", [1, 2])
def test_later_pass_of_the_draft_is_watched_too(later_pass):
    session, _ = started_session()
    with (
        spoiled(DRAFT, session, row=2, value=NAN, at_pass=later_pass),
        pytest.raises(FloatingPointError, match=r"draft model .* row 2 at step 1"),
    ):
        session.step()


@pytest.mark.parametrize("value", NOT_NUMBERS.values(), ids=NOT_NUMBERS)
def test_spoiled_prefill_raises_and_commits_nothing(value):
    session = bass.Session(PAIR, eos_token_id=())
    handles = [session.submit(prompt, max_new_tokens=8) for prompt in PROMPTS]
    hook = TARGET.register_forward_hook(lambda module, args, output: spoil(output.logits, value))
    try:
        with pytest.raises(FloatingPointError, match=r"target model LlamaForCausalLM .* row [012] at step 0"):
            session.step()
    finally:
        hook.remove()
    assert [len(session.result(handle).sequence) for handle in handles] == [0, 0, 0]


def test_minus_infinity_for_some_ids_is_allowed():
    """Models forbid ids of theirs in this way."""

    def forbid(module, args, output):
        output.logits[..., 7] = -INFINITY

    hooks = [model.register_forward_hook(forbid) for model in (TARGET, DRAFT)]
    try:
        for temperature in (0.0, 1.0):
            out = bass.generate(PAIR, PROMPTS, max_new_tokens=10, temperature=temperature, eos_token_id=())
            assert out.finish_reasons == ["length"] * 3
            assert 7 not in torch.cat(out.sequences)
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("value", NOT_NUMBERS.values(), ids=NOT_NUMBERS)
@pytest.mark.parametrize(("role", "at_pass"), [("target", 0), ("target", 1), ("draft", 0), ("draft", 4)])
def test_bad_row_finishes_with_error_and_the_others_are_unchanged(role, at_pass, value, temperature):
    options = {"temperature": temperature, "on_row_error": "finish"}
    sound, sound_handles = started_session(**options)
    run_to_the_end(sound)
    expected = [sound.result(handle) for handle in sound_handles]

    session, handles = started_session(**options)
    with spoiled(getattr(PAIR, role), session, row=1, value=value, at_pass=at_pass):
        run_to_the_end(session)
    results = [session.result(handle) for handle in handles]
    assert_same_results(results[::2], expected[::2])
    bad = results[1]
    assert bad.finish_reason == "error"
    assert 1 <= len(bad.sequence) < 16
    assert torch.equal(bad.sequence, expected[1].sequence[: len(bad.sequence)])


def test_a_trace_with_a_bad_row_is_saved_and_comes_back(tmp_path):
    session, _ = started_session(trace="tokens", on_row_error="finish")
    with spoiled(PAIR.target, session, row=1, value=NAN, at_pass=1):
        run_to_the_end(session)
    assert session.trace.tokens.p.isna().any()
    session.trace.save(tmp_path / "trace.json")
    assert bass.Trace.load(tmp_path / "trace.json").tokens.equals(session.trace.tokens)


@pytest.mark.parametrize("path", ["pad", "split", "eager"])
@pytest.mark.parametrize("max_batch_size", [2, 3])
@pytest.mark.parametrize("bad_row", [0, 1, 2])
def test_row_whose_cache_holds_nan_does_not_infect_the_row_that_takes_its_place(bad_row, max_batch_size, path):
    """Id 0 has NaN for an embedding, so that keys and values of that row are NaN in every layer."""
    target, draft = (copy.deepcopy(model) for model in (TARGET, DRAFT))
    for model in (target, draft):
        model.get_input_embeddings().weight.data[0] = NAN
    prompts = ragged_prompts(5, 30)
    prompts.insert(bad_row, torch.zeros(20, dtype=torch.int64))
    pair = bass.ModelPair(target, draft)
    options = {"max_batch_size": max_batch_size, "attention": path, "eos_token_id": (), "on_row_error": "finish"}
    out = bass.generate(pair, prompts, max_new_tokens=10, **options)
    for row, prompt in enumerate(prompts):
        if row == bad_row:
            assert (out.finish_reasons[row], len(out.sequences[row])) == ("error", 0)
        else:
            assert torch.equal(out.sequences[row], greedy_alone(TARGET, prompt, 10))
