"""What a model does by position (rotary factors, windows, scales) is each row's own affair, or refused."""

import pytest
import torch
from tiny import CONTEXT, greedy_alone, ragged_prompts, tiny_model

import bass_core as bass
from bass_core import probe

SWITCH = 16
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": CONTEXT / SWITCH,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 4.0, 8.0, 16.0],
    "original_max_position_embeddings": SWITCH,
}
BEFORE, CROSSING, BEYOND = 3, SWITCH - 5, SWITCH + 4  # lengths of prompts that get 10 more tokens
NEW = 10


def model_with(architecture: str, seed: int = 0, **changes):
    return tiny_model.__wrapped__(architecture, seed=seed, dtype="float64", **changes)


def llama() -> bass.ModelPair:
    changes = {"rope_parameters": LONGROPE}
    return bass.ModelPair(model_with("llama", **changes), model_with("llama", noise=0.02, **changes))


def phi3() -> bass.ModelPair:
    changes = {"rope_parameters": LONGROPE, "original_max_position_embeddings": SWITCH}
    return bass.ModelPair(model_with("phi3", **changes), model_with("phi3", noise=0.02, **changes))


def assert_rows_are_as_alone(pair: bass.ModelPair, *lengths: int, **options) -> None:
    prompts = ragged_prompts(*lengths)
    out = bass.generate(pair, prompts, max_new_tokens=NEW, eos_token_id=(), **options)
    for prompt, sequence in zip(prompts, out.sequences, strict=True):
        assert sequence.tolist() == greedy_alone(pair.target, prompt, NEW).tolist()


@pytest.mark.parametrize("draft_length", [0, 4])
@pytest.mark.parametrize("lengths", [(BEFORE, BEYOND), (BEFORE, CROSSING, BEYOND), (CROSSING,), (BEYOND, 1)], ids=str)
def test_rows_on_both_sides_of_longrope_and_across_it_are_as_alone(lengths, draft_length):
    assert_rows_are_as_alone(llama(), *lengths, draft_length=draft_length)


def test_longrope_changes_these_texts():
    """Else the tests above would show nothing."""
    pair, prompt = llama(), ragged_prompts(BEYOND)[0]
    long = greedy_alone(pair.target, prompt, NEW)
    pair.target.config.rope_parameters["original_max_position_embeddings"] = CONTEXT
    assert long.tolist() != greedy_alone(pair.target, prompt, NEW).tolist()


@pytest.mark.parametrize("draft_length", [0, 4])
def test_rows_of_phi_on_both_sides_of_longrope_are_as_alone(draft_length):
    assert_rows_are_as_alone(phi3(), BEFORE, BEYOND, SWITCH - NEW + 1, draft_length=draft_length)


@pytest.mark.parametrize("length", [SWITCH - NEW + 2, SWITCH])
def test_row_that_phi_would_work_out_anew_when_it_crosses_is_refused(length):
    """transformers drops the whole cache of such a row once it is longer than the switch."""
    with pytest.raises(ValueError, match=rf"beyond {SWITCH} tokens.*longer than {SWITCH} from the start"):
        assert_rows_are_as_alone(phi3(), BEFORE, length)


@pytest.mark.parametrize("path", ["pad", "split", "eager"])
def test_longrope_holds_on_every_path_and_in_packed_passes(path):
    assert_rows_are_as_alone(llama(), BEFORE, CROSSING, BEYOND, draft_length=3, attention=path)


@pytest.mark.parametrize("models", [llama, phi3])
def test_longrope_holds_where_prompts_are_read_in_chunks(models):
    pair, prompts = models(), ragged_prompts(BEFORE, BEYOND, SWITCH - NEW + 1)
    with bass.Session(pair, prefill_chunk=5, draft_length=3, eos_token_id=()) as session:
        handles = [session.submit(prompt, max_new_tokens=NEW) for prompt in prompts]
        while not session.idle:
            session.step()
        for prompt, handle in zip(prompts, handles, strict=True):
            assert session.result(handle).sequence.tolist() == greedy_alone(pair.target, prompt, NEW).tolist()


def test_longrope_holds_where_rows_draft_different_lengths():
    class PerRow(bass.DraftLengthPolicy):
        def plan(self, rows):
            return torch.arange(len(rows.ids)) * 2

    assert_rows_are_as_alone(llama(), BEFORE, CROSSING, BEYOND, draft_length=PerRow())


def test_texts_as_long_as_the_context_have_the_factors_they_have_alone_under_dynamic_ntk():
    changes = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}
    pair = bass.ModelPair(model_with("llama", **changes), model_with("llama", noise=0.02, **changes))
    assert_rows_are_as_alone(pair, BEFORE, CONTEXT - NEW)


def test_scale_by_position_is_each_rows_own():
    changes = {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": CONTEXT / SWITCH,
            "original_max_position_embeddings": SWITCH,
            "llama_4_scaling_beta": 0.5,
        }
    }
    pair = bass.ModelPair(model_with("ministral3", **changes), model_with("ministral3", noise=0.02, **changes))
    assert_rows_are_as_alone(pair, BEFORE, CROSSING, BEYOND, draft_length=4)


def test_scale_that_goes_by_the_caches_length_is_refused():
    """Llama 4 scales queries by position beyond `floor_scale`, and asks the cache where it is."""
    model = model_with("llama4", floor_scale=8192)
    with pytest.raises(ValueError, match="cannot be decoded over a ragged cache"):
        probe.resolve(model)


@pytest.mark.parametrize("window", [8, 256])
def test_gpt_neo_is_refused(window):
    """Its own mask is right only for the longest row, and only if that row submits most."""
    model = model_with("gpt_neo", window_size=window)
    with pytest.raises(ValueError, match="cannot be decoded over a ragged cache"):
        probe.resolve(model)


@pytest.mark.parametrize("window", [16_384, 262_144])
def test_probe_of_a_long_window_is_short(window):
    model = model_with("mistral", sliding_window=window, max_position_embeddings=2**20)
    assert probe.resolve(model) == "pad"
    assert model.config.sliding_window == window
    assert all(
        layer.self_attn.sliding_window == window
        for layer in model.model.layers
        if hasattr(layer.self_attn, "sliding_window")
    )
