"""NaN and infinite logits raise an error without a commit, or end one row."""

import copy
import itertools
from contextlib import contextmanager

import pytest
import torch
from sessions import DRAFT, PAIR, TARGET, assert_same_result, run_to_the_end, session_over
from tiny import greedy_alone, ragged_prompts

import bass_core as bass

PROMPTS = ragged_prompts(5, 9, 13)
NAN, INFINITY = float("nan"), float("inf")
CASES = [  # model, number of the pass in a step, bad value, temperature
    ("target", 0, NAN, 0.0),
    ("target", 0, INFINITY, 0.8),
    ("target", 0, -INFINITY, 0.0),
    ("draft", 0, INFINITY, 0.0),
    ("draft", 1, -INFINITY, 0.8),
    ("draft", 2, NAN, 0.8),
]


def spoil(logits: torch.Tensor, value: float) -> None:
    """Set one logit of [..., V] to `value`, or all logits to -inf (some -inf are allowed)."""
    logits[..., :] = value if value == -INFINITY else logits
    logits[..., 7] = value


@contextmanager
def spoiled(model, session, row, value, at_pass, tokens=slice(None)):
    """Spoil the model's logits of one row after `tokens`, in pass `at_pass` (from 0)."""
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


def started_session(steps=1, **options) -> tuple[bass.Session, list]:
    session = session_over(**options)
    handles = [session.submit(prompt, max_new_tokens=16) for prompt in PROMPTS]
    for _ in range(steps):
        session.step()
    return session, handles


def test_bad_logits_after_the_last_draft_alone_raise():
    session, _ = started_session()
    with pytest.raises(FloatingPointError, match="row 1"), spoiled(TARGET, session, 1, NAN, 0, slice(-1, None)):
        session.step()


@pytest.mark.parametrize(("role", "at_pass", "value", "temperature"), CASES)
def test_bad_logits_raise_and_commit_nothing(role, at_pass, value, temperature):
    session, handles = started_session(2, temperature=temperature)
    before = [session.result(handle) for handle in handles]
    message = f"{role} model LlamaForCausalLM .* row 1 at step 2.*on_row_error"
    with spoiled(getattr(PAIR, role), session, 1, value, at_pass), pytest.raises(FloatingPointError, match=message):
        session.step()
    for handle, expected in zip(handles, before, strict=True):
        assert_same_result(session.result(handle), expected)


@pytest.fixture
def on_logits():
    hooks = []

    def add(change):
        def hook(module, args, output):
            change(output.logits)

        hooks.extend(model.register_forward_hook(hook) for model in (TARGET, DRAFT))

    yield add
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("value", [NAN, -INFINITY])
def test_bad_logits_of_a_prefill_raise_and_commit_nothing(value, on_logits):
    session, handles = started_session(0)
    on_logits(lambda logits: spoil(logits, value))
    with pytest.raises(FloatingPointError, match=r"target model LlamaForCausalLM .* row [012] at step 0"):
        session.step()
    assert [len(session.result(handle).sequence) for handle in handles] == [0, 0, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_minus_infinity_for_some_ids_is_allowed(temperature, on_logits):
    on_logits(lambda logits: logits[..., 7].fill_(-INFINITY))
    out = bass.generate(PAIR, PROMPTS, max_new_tokens=10, temperature=temperature, eos_token_id=())
    assert out.finish_reasons == ["length"] * 3
    assert 7 not in torch.cat(out.sequences)


@pytest.mark.parametrize(("role", "at_pass", "value", "temperature"), CASES)
def test_bad_row_finishes_and_the_others_are_unchanged(role, at_pass, value, temperature):
    def results(at_pass):
        session, handles = started_session(temperature=temperature, on_row_error="finish")
        with spoiled(getattr(PAIR, role), session, 1, value, at_pass):
            run_to_the_end(session)
        return [session.result(handle) for handle in handles]

    (first, whole, third), found = results(at_pass=None), results(at_pass)
    assert_same_result(found[0], first)
    assert_same_result(found[2], third)
    assert found[1].finish_reason == "error"
    assert 1 <= len(found[1].sequence) < 16
    assert torch.equal(found[1].sequence, whole.sequence[: len(found[1].sequence)])


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
    """Id 0 has a NaN embedding, so keys and values of its row are NaN in every layer."""
    models = [copy.deepcopy(model) for model in (TARGET, DRAFT)]
    for model in models:
        model.get_input_embeddings().weight.data[0] = NAN
    prompts = ragged_prompts(5, 30)
    prompts.insert(bad_row, torch.zeros(20, dtype=torch.int64))
    options = {"max_batch_size": max_batch_size, "attention": path, "eos_token_id": (), "on_row_error": "finish"}
    out = bass.generate(bass.ModelPair(*models), prompts, max_new_tokens=10, **options)
    assert (out.finish_reasons[bad_row], len(out.sequences[bad_row])) == ("error", 0)
    for row in {0, 1, 2} - {bad_row}:
        assert torch.equal(out.sequences[row], greedy_alone(TARGET, prompts[row], 10))
