"""NaN and infinite logits: an error that commits nothing, or the end of one row alone."""

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
CASES = [  # model, its pass in a step, value of the bad logits, temperature
    ("target", 0, NAN, 0.0),
    ("target", 0, INFINITY, 0.8),
    ("target", 0, -INFINITY, 0.0),
    ("draft", 0, INFINITY, 0.0),
    ("draft", 1, -INFINITY, 0.8),
    ("draft", 2, NAN, 0.8),
]


def spoil(logits: torch.Tensor, value: float) -> None:
    """Set one logit of [..., V] to a value, or all of them to -inf: a model may have some -inf."""
    logits[..., :] = value if value == -INFINITY else logits
    logits[..., 7] = value


@contextmanager
def spoiled(model, session, row, value, at_pass, tokens=slice(None)):
    """Spoil the model's logits for one row, after some of its tokens, in pass number `at_pass`, counted from 0."""
    passes = itertools.count()

    def hook(module, args, output):
        if next(passes) == at_pass:
            place = next(place for place, request in enumerate(session.rows.live) if request.row == row)
            spoil(output.logits[place, tokens], value)

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


def test_bad_logits_after_the_last_draft_alone_raise():
    session, _ = started_session()
    with pytest.raises(FloatingPointError, match="row 1"), spoiled(TARGET, session, 1, NAN, 0, slice(-1, None)):
        session.step()


@pytest.mark.parametrize(("role", "at_pass", "value", "temperature"), CASES)
def test_bad_logits_raise_and_commit_nothing(role, at_pass, value, temperature):
    session, handles = started_session(temperature=temperature)
    session.step()
    before = [session.result(handle) for handle in handles]
    with (
        spoiled(getattr(PAIR, role), session, row=1, value=value, at_pass=at_pass),
        pytest.raises(FloatingPointError, match=f"{role} model LlamaForCausalLM .* row 1 at step 2.*on_row_error"),
    ):
        session.step()
    assert_same_results([session.result(handle) for handle in handles], before)


@pytest.mark.parametrize("value", [NAN, -INFINITY])
def test_bad_logits_of_a_prefill_raise_and_commit_nothing(value):
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
    """Models forbid ids in this way."""

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


@pytest.mark.parametrize(("role", "at_pass", "value", "temperature"), CASES)
def test_bad_row_finishes_and_the_others_are_unchanged(role, at_pass, value, temperature):
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


def test_trace_with_nan_is_saved_and_loaded(tmp_path):
    session, _ = started_session(trace="tokens", on_row_error="finish")
    with spoiled(PAIR.target, session, row=1, value=NAN, at_pass=1):
        run_to_the_end(session)
    assert session.trace.tokens.p.isna().any()
    session.trace.save(tmp_path / "trace.json")
    assert bass.Trace.load(tmp_path / "trace.json").tokens.equals(session.trace.tokens)


@pytest.mark.parametrize(
    ("path", "max_batch_size", "bad_row"),
    [("pad", 2, 0), ("pad", 3, 1), ("split", 2, 1), ("split", 3, 2), ("eager", 2, 2), ("eager", 3, 0)],
)
def test_nan_in_a_freed_slot_does_not_reach_the_next_row(bad_row, max_batch_size, path):
    """Id 0 has a NaN embedding: keys and values of that row are NaN in every layer."""
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
