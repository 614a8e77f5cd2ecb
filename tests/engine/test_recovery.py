"""After an interruption or an error: everything is as before, and a re-run gives the same tokens."""

import copy
import gc
import inspect
import sys
import weakref

import pytest
import torch
from recovery import (
    PROMPTS,
    assert_same,
    assert_same_results,
    disturbed_pair,
    fail_at_call,
    generate,
    probed,
    session_with_rows,
)
from sessions import run_to_the_end
from tiny import VOCABULARY, tiny_model

import bass_core as bass
import bass_lab as lab
from bass_core import attention, randomness, sampling
from bass_core.cache import RaggedCache
from bass_core.rows import Rows
from bass_core.trace import Trace


def state(model) -> dict:
    """All that `generate` might change and must not."""
    return {
        "configuration": copy.deepcopy(model.config.to_dict()),
        "attention": model.config._attn_implementation,
        "generation": copy.deepcopy(model.generation_config.to_dict()),
        "training": [module.training for module in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        "weights": {name: (tensor.data_ptr(), tensor.sum().item()) for name, tensor in model.state_dict().items()},
    }


def states(pair: bass.ModelPair) -> list[dict]:
    return [state(model) for model in (pair.target, pair.draft)]


class Interruption(Exception):
    """Not an error that the library knows."""


# Where it happens: what raises (given the pair), and at which of its calls. Every place is met while rows are decoded,
# except for the prefills.
PHASES = {
    "target prefill": (lambda pair: (pair.target, "forward"), 1),
    "draft prefill": (lambda pair: (pair.draft, "forward"), 1),
    "attention of a prefill": (lambda pair: (attention, "_attend"), 2),
    "verification of a prefill": (lambda pair: (sampling, "probabilities"), 1),
    "commit of a prefill": (lambda pair: (Rows, "commit"), 1),
    "first draft pass": (lambda pair: (pair.draft, "forward"), 2),
    "later draft pass": (lambda pair: (pair.draft, "forward"), 6),
    "target pass": (lambda pair: (pair.target, "forward"), 3),
    "attention of the target pass": (lambda pair: (attention, "_attend"), 2 + 2 + 3 * 2 + 2),
    "after attention": (lambda pair: (pair.target.model.layers[1].mlp, "forward"), 3),
    "verification": (lambda pair: (randomness, "accept"), 2),
    "commit": (lambda pair: (Rows, "commit"), 3),
    "compaction": (lambda pair: (Rows, "compact"), 3),
    "recording": (lambda pair: (Trace, "record_step"), 3),
}
BEFORE_A_COMMIT = [name for name in PHASES if name not in ("commit of a prefill", "commit", "compaction", "recording")]


@pytest.fixture
def fresh_pair() -> bass.ModelPair:
    return disturbed_pair()


@pytest.fixture
def before(fresh_pair) -> list[dict]:
    """The models' state before they ever ran."""
    return states(fresh_pair)


@pytest.fixture
def pair(fresh_pair, before) -> bass.ModelPair:
    return probed(fresh_pair)


def interrupt(monkeypatch, pair, phase: str, error: BaseException) -> None:
    where, number = PHASES[phase]
    fail_at_call(monkeypatch, *where(pair), number, error)


def test_phases_of_an_undisturbed_run_are_met_where_they_say(monkeypatch, pair):
    """Else the tests below would prove nothing about, say, the attention of a target pass."""
    seen = []
    for role, model in (("target", pair.target), ("draft", pair.draft)):
        model.register_forward_pre_hook(lambda *args, role=role: seen.append(role))
    with monkeypatch.context() as patch:
        interrupt(patch, pair, "attention of the target pass", Interruption())
        with pytest.raises(Interruption):
            generate(pair)
    assert seen == ["target", "draft", "draft", "draft", "draft", "target"]


# --- generate -------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [Interruption(), RuntimeError("of some kind"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("phase", PHASES)
def test_interrupted_call_leaves_everything_as_it_was(monkeypatch, pair, before, cache_memory, phase, error):
    expected = generate(pair)
    with monkeypatch.context() as patch:
        interrupt(patch, pair, phase, error)
        with pytest.raises(type(error)) as caught:  # holds the traceback and its frames, as sys.last_traceback does
            generate(pair)
    assert error in (caught.value, caught.value.__cause__)  # a Ctrl-C comes as `Interrupted`, with its cause
    assert caught.traceback
    assert states(pair) == before
    assert attention._thread.current is None
    assert cache_memory.was_used
    assert cache_memory.held == 0
    assert_same(generate(pair), expected)


@pytest.mark.parametrize("error", [Interruption(), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("at_step", [0, 1, 3])
def test_call_interrupted_in_on_step_leaves_everything_as_it_was(pair, before, cache_memory, at_step, error):
    def on_step(event):
        if event.step == at_step:
            raise error

    expected = generate(pair)
    with pytest.raises(type(error)) as caught:
        generate(pair, on_step=on_step)
    assert error in (caught.value, caught.value.__cause__)  # a Ctrl-C comes as `Interrupted`, with its cause
    assert states(pair) == before
    assert cache_memory.was_used
    assert cache_memory.held == 0
    assert_same(generate(pair), expected)


def test_a_ctrl_c_before_a_pass_begins_leaves_no_pass_behind(monkeypatch, pair):
    """What is left at hand would tell the next encoder of other positions."""
    monkeypatch.setattr(attention, "_eager_masks", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        bass.generate(pair, PROMPTS, max_new_tokens=2, attention="eager")
    assert attention._thread.current is None


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("line", ["setattr(layer, name, new)", "self.slots = capacity + 1"])
def test_a_ctrl_c_while_caches_grow_leaves_them_whole(pair, line, cancelled):
    lines, first = inspect.getsourcelines(RaggedCache._put)
    at = first + next(index for index, each in enumerate(lines) if line in each)
    with bass.Session(pair, max_batch_size=3, draft_length=3, eos_token_id=()) as session:
        rows = [session.submit(prompt, max_new_tokens=20) for prompt in PROMPTS[:2]]
        session.step()
        long = session.submit(PROMPTS[0], max_new_tokens=60)

        def tracing(frame, event, argument, left=[1]):  # noqa: B006
            if frame.f_code is RaggedCache._put.__code__ and event == "line" and frame.f_lineno == at and left:
                left.clear()
                raise KeyboardInterrupt
            return tracing

        before = sys.gettrace()
        sys.settrace(tracing)
        try:
            with pytest.raises(KeyboardInterrupt):
                session.step()
        finally:
            sys.settrace(before)
        if cancelled:
            session.cancel(long)
        run_to_the_end(session)
        found = [session.result(row).sequence.tolist() for row in rows]
    expected = bass.generate(pair, PROMPTS[:2], max_new_tokens=20, draft_length=3, eos_token_id=())
    assert found == [sequence.tolist() for sequence in expected.sequences]


def test_interrupted_call_frees_the_saved_caches_of_prompts(pair, cache_memory):
    """While samples of a prompt wait for a place, its cache is kept: that is memory of the call's, too."""

    def on_step(event):
        if event.step == 2:
            raise Interruption

    with pytest.raises(Interruption) as caught:
        generate(pair, num_return_sequences=3, max_batch_size=4, on_step=on_step)
    assert caught.traceback
    assert cache_memory.was_used
    assert cache_memory.held == 0


def test_finished_call_leaves_everything_as_it_was(pair, before, cache_memory):
    out = generate(pair, num_return_sequences=2, max_batch_size=4, trace="tokens", repetition_penalty=1.1)
    assert states(pair) == before
    assert attention._thread.current is None
    assert cache_memory.was_used
    assert cache_memory.held == 0
    assert len(out.sequences) == 6


def test_refused_call_leaves_everything_as_it_was(pair, before):
    for options in ({"max_new_tokens": 1000}, {"attention": "flash"}, {"top_p": 0}):
        with pytest.raises(ValueError):
            generate(pair, **options)
    assert states(pair) == before


def test_models_in_training_mode_decode_without_dropout(pair):
    sound = bass.ModelPair(tiny_model(dtype="float64"), tiny_model(dtype="float64", noise=0.02))
    assert_same(generate(pair), generate(sound))


def test_probe_interrupted_in_its_midst_leaves_everything_as_it_was(monkeypatch, fresh_pair, before, cache_memory):
    pair = fresh_pair
    for call in (1, 3, 6):
        with monkeypatch.context() as patch:
            fail_at_call(patch, pair.target, "forward", call, KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt) as caught:
                generate(pair)
        assert caught.traceback
        assert states(pair) == before
        assert cache_memory.held == 0
    assert generate(pair).trace.summary()["attention"] == "pad"


@pytest.mark.parametrize("architecture", ["codegen", "mistral"])
def test_path_with_masks_of_ours_leaves_the_model_as_it_was_too(monkeypatch, architecture, cache_memory):
    model = copy.deepcopy(tiny_model(architecture, dtype="float64"))
    before = state(model)
    pair = bass.ModelPair(model, model)
    expected = generate(pair, attention="eager")
    with monkeypatch.context() as patch:
        fail_at_call(patch, model, "forward", 5, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt) as caught:
            generate(pair, attention="eager")
    assert caught.traceback
    assert state(model) == before
    assert cache_memory.held == 0
    assert_same(generate(pair, attention="eager"), expected)


def test_closing_a_session_frees_its_caches_while_it_is_held(pair, cache_memory):
    session = bass.Session(pair, max_batch_size=2, eos_token_id=())
    for _ in range(3):
        session.submit(PROMPTS[0], max_new_tokens=8)
    session.step()
    session.step()
    assert cache_memory.held > 0
    session.close()
    assert cache_memory.held == 0


# --- a session goes on ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "temperature"),
    [(phase, 0.8) for phase in BEFORE_A_COMMIT]
    + [(phase, 0.0) for phase in BEFORE_A_COMMIT if "verification" not in phase],  # greedy verification draws nothing
)
def test_step_interrupted_before_its_commit_can_be_repeated(monkeypatch, pair, phase, temperature):
    undisturbed = session_with_rows(pair, temperature=temperature)
    run_to_the_end(undisturbed[0])
    session, handles = session_with_rows(pair, temperature=temperature)
    with monkeypatch.context() as patch:
        interrupt(patch, pair, phase, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            run_to_the_end(session)
    run_to_the_end(session)
    assert_same_results(session, handles, *undisturbed)


def test_session_goes_on_with_the_other_rows_after_the_bad_one_is_cancelled(pair):
    """What the error message's reader does: on_row_error="raise", then cancel that row."""
    undisturbed = session_with_rows(pair)
    run_to_the_end(undisturbed[0])
    session, handles = session_with_rows(pair)
    session.step()
    place = [request.row for request in session.rows.live].index(1)

    def spoil(module, args, output):
        output.logits[place] = float("nan")

    hook = pair.target.register_forward_hook(spoil)
    with pytest.raises(FloatingPointError, match="row 1"):
        session.step()
    hook.remove()
    session.cancel(handles[1])
    run_to_the_end(session)
    assert len(session.result(handles[1]).sequence) == 1
    assert_same_results(session, handles[::2], undisturbed[0], undisturbed[1][::2])
    assert len(session.trace.steps) > 0


def test_closed_session_is_not_stepped_on_in_silence(pair):
    """Its caches are gone: its rows' next tokens would come from zeros."""
    session, _ = session_with_rows(pair)
    session.step()
    session.close()
    with pytest.raises((RuntimeError, ValueError), match="clos"):
        session.step()


def test_dropped_session_is_gone_at_once(pair):
    """A circle of references would keep its memory until garbage is next looked for."""
    session, _ = session_with_rows(pair)
    session.step()
    gone = weakref.ref(session)
    gc.disable()
    try:
        del session
        assert gone() is None
    finally:
        gc.enable()


# --- the same again -------------------------------------------------------------------------------


def test_same_seed_gives_the_same_bits_twenty_times():
    pair = bass.ModelPair(tiny_model(), tiny_model(noise=0.02))
    first = generate(pair, max_new_tokens=24, seed=3)
    assert first.sequences[0].tolist() != generate(pair, max_new_tokens=24, seed=4).sequences[0].tolist()
    for _ in range(19):
        assert_same(generate(pair, max_new_tokens=24, seed=3), first)


def test_global_generators_play_no_part(pair):
    torch.manual_seed(1)
    first, before = generate(pair), torch.get_rng_state()
    torch.manual_seed(2)
    assert_same(generate(pair), first)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), before)


class OneMoreEachStep(bass.DraftLengthPolicy):
    """A policy whose state shows at once when it is not reset."""

    def start(self, rows):
        if not rows.steps.any():
            self.k = 0

    def plan(self, rows):
        return self.k

    def update(self, drafted, accepted):
        self.k += 1


@pytest.mark.parametrize("kind", [bass.BassHeuristic, lab.HuggingFaceHeuristic, OneMoreEachStep])
@pytest.mark.parametrize("interrupted_at", [0, 1, 4])
def test_policy_object_used_again_after_an_interrupted_call_starts_afresh(pair, kind, interrupted_at):
    def on_step(event):
        if event.step == interrupted_at:
            raise KeyboardInterrupt

    expected = generate(pair, draft_length=kind(), max_new_tokens=30)
    policy = kind()
    with pytest.raises(KeyboardInterrupt):
        generate(pair, draft_length=policy, max_new_tokens=30, on_step=on_step)
    for _ in range(2):
        out = generate(pair, draft_length=policy, max_new_tokens=30)
        assert_same(out, expected)
        assert out.trace.steps.k.tolist() == expected.trace.steps.k.tolist()


def test_ids_of_the_tiny_models_cover_their_vocabulary():
    """The tests above compare tokens: a model that repeats one of them would hide differences."""
    pair = bass.ModelPair(tiny_model(dtype="float64"), tiny_model(dtype="float64", noise=0.02))
    emitted = torch.cat(generate(pair, max_new_tokens=40).sequences)
    assert len(set(emitted.tolist())) > VOCABULARY / 3
