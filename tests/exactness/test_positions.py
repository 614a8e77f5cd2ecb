import pytest
from sessions import run_to_the_end
from tiny import CONTEXT, assert_greedy, greedy_alone, ragged_prompts, tiny_model
from trial_policies import PerRow

import bass_core as bass
from bass_core.model import probe

SWITCH = 16
ROPE = {"rope_theta": 10000.0, "factor": CONTEXT / SWITCH, "original_max_position_embeddings": SWITCH}
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 4.0, 8.0, 16.0]}
LONGROPE = ROPE | FACTORS | {"rope_type": "longrope"}
YARN = ROPE | {"rope_type": "yarn", "llama_4_scaling_beta": 0.5}
BEFORE, CROSSING, BEYOND = 3, SWITCH - 5, SWITCH + 4  # prompt lengths, for 10 new tokens
NEW = 10


def model_with(architecture: str, **changes):
    return tiny_model.__wrapped__(architecture, dtype="float64", **changes)


def pair_with(architecture: str, **changes) -> bass.ModelPair:
    return bass.ModelPair(model_with(architecture, **changes), model_with(architecture, noise=0.02, **changes))


def llama() -> bass.ModelPair:
    return pair_with("llama", rope_parameters=LONGROPE)


def phi3() -> bass.ModelPair:
    return pair_with("phi3", rope_parameters=LONGROPE, original_max_position_embeddings=SWITCH)


def assert_rows_are_as_alone(pair: bass.ModelPair, *lengths: int, **options) -> None:
    prompts = ragged_prompts(*lengths)
    out = bass.generate(pair, prompts, max_new_tokens=NEW, eos_token_id=(), **options)
    assert_greedy(out, pair.target, prompts, NEW)


@pytest.mark.parametrize(
    ("models", "lengths", "draft_length", "path"),
    [
        (llama, (BEFORE, CROSSING, BEYOND), 4, "pad"),
        (llama, (BEFORE, CROSSING, BEYOND), 0, "split"),
        (llama, (CROSSING, BEYOND), 3, "eager"),
        (llama, (BEFORE, CROSSING, BEYOND), PerRow(4), "pad"),  # in packed passes
        (llama, (BEYOND, 1), 4, "pad"),
        (phi3, (BEFORE, BEYOND, SWITCH - NEW + 1), 4, "pad"),
    ],
)
def test_longrope(models, lengths, draft_length, path):
    assert_rows_are_as_alone(models(), *lengths, draft_length=draft_length, attention=path)


def test_longrope_changes_texts():
    """Without a difference the test above would prove nothing."""
    pair, prompt = llama(), ragged_prompts(BEYOND)[0]
    long = greedy_alone(pair.target, prompt, NEW)
    pair.target.config.rope_parameters["original_max_position_embeddings"] = CONTEXT
    assert long.tolist() != greedy_alone(pair.target, prompt, NEW).tolist()


@pytest.mark.parametrize("length", [SWITCH - NEW + 2, SWITCH])
def test_row_that_crosses_the_switch_of_phi_is_refused(length):
    """transformers drops the cache of a row longer than the switch."""
    with pytest.raises(ValueError, match=rf"rotary factors at {SWITCH} tokens.*prompt of more than {SWITCH} tokens"):
        assert_rows_are_as_alone(phi3(), BEFORE, length)


@pytest.mark.parametrize("models", [llama, phi3])
def test_longrope_with_chunked_prompts(models):
    pair, prompts = models(), ragged_prompts(BEFORE, BEYOND, SWITCH - NEW + 1)
    with bass.Session(pair, prefill_chunk=5, draft_length=3, eos_token_id=()) as session:
        handles = [session.submit(prompt, max_new_tokens=NEW) for prompt in prompts]
        run_to_the_end(session)
        for prompt, handle in zip(prompts, handles, strict=True):
            assert session.result(handle).sequence.tolist() == greedy_alone(pair.target, prompt, NEW).tolist()


@pytest.mark.parametrize(
    ("architecture", "rope", "lengths"),
    [
        ("llama", {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}, (BEFORE, CONTEXT - NEW)),
        ("ministral3", YARN, (BEFORE, CROSSING, BEYOND)),
    ],
    ids=["dynamic NTK", "scale by position"],
)
def test_other_ropes(architecture, rope, lengths):
    assert_rows_are_as_alone(pair_with(architecture, rope_parameters=rope), *lengths, draft_length=4)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama4", {"floor_scale": 8192}),  # scales queries by the cache's length
        ("gpt_neo", {"window_size": 8}),  # the model's own mask is right only for the longest row
        ("gpt_neo", {"window_size": 256}),
    ],
)
def test_models_that_follow_the_longest_row_are_refused(architecture, changes):
    with pytest.raises(ValueError, match="cannot be decoded over a ragged cache"):
        probe.resolve(model_with(architecture, **changes))


def test_probe_of_a_long_window_is_short():
    window = 262_144
    model = model_with("mistral", sliding_window=window, max_position_embeddings=2**20)
    assert probe.resolve(model) == "pad"
    windows = [getattr(layer.self_attn, "sliding_window", window) for layer in model.model.layers]
    assert {model.config.sliding_window, *windows} == {window}
