"""An interrupt or an error restores models and memory. A second run gives the same tokens."""

import copy
import gc
import itertools
import weakref

import pytest
import torch.nn.functional as F
from recovery import PROMPTS, assert_same, disturbed_pair, fail_at_call, generate, probed, session_with_rows
from tiny import tiny_model

import bass_core as bass
from bass_core.exactness import randomness, sampling
from bass_core.loop.rows import Rows
from bass_core.model.forward_pass import Pass, current_pass


def states(pair: bass.ModelPair) -> list[dict]:
    return [
        {
            "configuration": copy.deepcopy(model.config.to_dict()),
            "attention": model.config._attn_implementation,
            "generation": copy.deepcopy(model.generation_config.to_dict()),
            "training": [module.training for module in model.modules()],
            "attributes": [sorted(vars(module)) for module in model.modules()],
            "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
            "weights": {name: (tensor.data_ptr(), tensor.sum().item()) for name, tensor in model.state_dict().items()},
        }
        for model in pair.models
    ]


class Interruption(Exception):
    pass


class Caller:
    """The engine calls `on_step` after each step, while samples wait."""

    on_step = staticmethod(lambda event: None)


# The function that raises, and the number of the call.
PHASES = {
    "mask of a pass": (lambda pair: (Pass, "visible"), 3),
    "draft prefill": (lambda pair: (pair.draft, "forward"), 1),
    "verification of a prefill": (lambda pair: (sampling, "probabilities"), 1),
    "later draft pass": (lambda pair: (pair.draft, "forward"), 6),
    "target pass": (lambda pair: (pair.target, "forward"), 3),
    "attention of the target pass": (lambda pair: (F, "scaled_dot_product_attention"), 2 + 2 + 3 * 2 + 2),
    "after attention": (lambda pair: (pair.target.model.layers[1].mlp, "forward"), 3),
    "verification": (lambda pair: (randomness, "accept"), 2),
    "commit": (lambda pair: (Rows, "commit"), 3),
    "compaction": (lambda pair: (Rows, "compact"), 3),
    "caller's function after a prefill": (lambda pair: (Caller, "on_step"), 1),
    "caller's function after a step": (lambda pair: (Caller, "on_step"), 3),
}


@pytest.fixture
def fresh_pair() -> bass.ModelPair:
    return disturbed_pair()


@pytest.fixture
def before(fresh_pair) -> list[dict]:
    return states(fresh_pair)


@pytest.fixture
def pair(fresh_pair, before) -> bass.ModelPair:
    return probed(fresh_pair)


@pytest.mark.parametrize(
    ("phase", "error", "path"),
    [
        *zip(PHASES, itertools.cycle([KeyboardInterrupt(), Interruption()]), itertools.repeat("pad")),
        ("target pass", RuntimeError("of some kind"), "eager"),
        ("commit", KeyboardInterrupt(), "split"),
    ],
    ids=repr,
)
def test_interrupted_call_leaves_everything_as_it_was(monkeypatch, pair, before, cache_memory, phase, error, path):
    options = {"attention": path} | ({"num_return_sequences": 3, "max_batch_size": 4} if "caller" in phase else {})
    expected = generate(pair, **options)
    where, number = PHASES[phase]
    with monkeypatch.context() as patch:
        fail_at_call(patch, *where(pair), number, error)
        with pytest.raises(type(error)) as caught:  # holds the traceback and its frames, as sys.last_traceback does
            generate(pair, on_step=lambda event: Caller.on_step(event), **options)
    assert error in (caught.value, caught.value.__cause__)  # the KeyboardInterrupt is the cause of `Interrupted`
    assert states(pair) == before and current_pass() is None
    assert cache_memory.was_used and cache_memory.held == 0
    assert_same(generate(pair, **options), expected)


def test_finished_and_refused_calls_leave_everything_as_it_was(pair, before, cache_memory):
    sound = bass.ModelPair(tiny_model(dtype="float64"), tiny_model(dtype="float64", noise=0.02))
    assert_same(generate(pair), generate(sound))  # without dropout, although the models are in training mode
    out = generate(pair, num_return_sequences=2, max_batch_size=4, trace="tokens", repetition_penalty=1.1)
    assert len(out.sequences) == 6 and current_pass() is None
    for options in ({"max_new_tokens": 1000}, {"attention": "flash"}, {"top_p": 0}):
        with pytest.raises(ValueError):
            generate(pair, **options)
    assert states(pair) == before
    assert cache_memory.was_used and cache_memory.held == 0


def test_interrupted_probe_leaves_everything_as_it_was(monkeypatch, fresh_pair, before, cache_memory):
    for call in (1, 6):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as caught:
            fail_at_call(patch, fresh_pair.target, "forward", call, KeyboardInterrupt())
            generate(fresh_pair)
        assert caught.traceback
        assert states(fresh_pair) == before
        assert cache_memory.held == 0
    assert generate(fresh_pair).trace.summary()["attention"] == "pad"


def test_closed_session_frees_its_caches_and_refuses_steps(pair, cache_memory):
    session = bass.Session(pair, max_batch_size=2, eos_token_id=())
    for _ in range(3):
        session.submit(PROMPTS[0], max_new_tokens=8)
    session.step()
    session.step()
    assert cache_memory.held > 0
    session.close()
    assert cache_memory.held == 0
    for call in (session.step, lambda: session.submit(PROMPTS[0], max_new_tokens=8)):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_dropped_session_is_gone_without_garbage_collection(pair):
    session, _ = session_with_rows(pair)
    session.step()
    gone = weakref.ref(session)
    gc.disable()
    try:
        del session
        assert gone() is None
    finally:
        gc.enable()
