"""Short convolutions with a state: rows reject drafts, wait, move and share prompts."""

import functools

import kinds
import pytest
import torch
from sessions import run_to_the_end
from stale import texts_over_poison
from tiny import greedy_alone, ragged_prompts
from transformers import GenerationConfig, PreTrainedModel
from trial_policies import PerRow

import bass_core as bass
from bass_lab.drafters import LayerSkipDrafter

NEW = 8
PROMPTS = ragged_prompts(5, 11, 17, 1, 2, 23)
LAYERS = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]}


@functools.cache
def lfm2(dtype: str = "float64", noise: float = 0.0) -> PreTrainedModel:
    return kinds.tiny("lfm2", noise, **LAYERS).to(getattr(torch, dtype))


@functools.cache
def alone(dtype: str = "float64") -> list[list[int]]:
    return [greedy_alone(lfm2(dtype), prompt, NEW).tolist() for prompt in PROMPTS]


DRAFTS = {
    "model": lambda dtype: lfm2(dtype, noise=0.05),
    "first layers": lambda dtype: LayerSkipDrafter(2),
    "n-gram": lambda dtype: None,
}


def decoded(dtype: str = "float64", draft: str = "model", **options) -> bass.Generation:
    pair = bass.ModelPair(lfm2(dtype), DRAFTS[draft](dtype))
    options = {"draft_length": 4, "max_batch_size": 4, "eos_token_id": ()} | options
    return bass.generate(pair, PROMPTS, max_new_tokens=NEW, **options)


def texts(generation: bass.Generation) -> list[list[int]]:
    return [sequence.tolist() for sequence in generation.sequences]


@pytest.mark.parametrize(
    ("dtype", "draft", "length", "path"),
    [
        ("float64", "model", 4, "pad"),
        ("float32", "model", PerRow(3), "split"),
        ("float64", "first layers", 4, "eager"),
        ("float32", "n-gram", PerRow(3), "pad"),
        ("float64", "n-gram", 0, "split"),
    ],
)
def test_greedy_text_equals_the_single_row(dtype, draft, length, path):
    out = decoded(dtype, draft, draft_length=length, attention=path)
    assert texts(out) == alone(dtype)
    if draft == "model":
        assert 0.05 < out.trace.summary()["alpha"] < 1


def test_chunked_prompts_and_joining_rows():
    pair = bass.ModelPair(lfm2(), lfm2(noise=0.05))
    with bass.Session(pair, max_batch_size=3, draft_length=3, prefill_chunk=4, eos_token_id=()) as session:
        handles = [session.submit(prompt, max_new_tokens=NEW) for prompt in PROMPTS[:3]]
        for _ in range(5):
            session.step()
        session.cancel(handles[0])
        handles += [session.submit(prompt, max_new_tokens=NEW) for prompt in PROMPTS[3:] + PROMPTS[:1]]
        run_to_the_end(session)
        found = [session.result(handle).sequence.tolist() for handle in handles]
    assert found[1:] == alone()[1:] + alone()[:1]


def test_coupled_samples_of_shared_prompts_do_not_depend_on_drafts():
    options = {"num_return_sequences": 2, "temperature": 0.8, "verification": "coupled", "seed": 1}
    regular = decoded(draft_length=0, **options)
    for draft, length in (("model", 4), ("first layers", 2)):
        assert texts(decoded(draft=draft, draft_length=length, max_batch_size=3, **options)) == texts(regular)


def test_stale_slots_never_matter():
    assert texts_over_poison(bass.ModelPair(lfm2(), lfm2(noise=0.05)), PROMPTS, NEW) == alone()


def test_compiled_layers_are_refused():
    with pytest.raises(ValueError, match="short convolutions"):
        decoded(compile="compiled")


def test_model_is_left_as_it_was():
    model = lfm2()
    decoded()
    assert all("forward" not in vars(module) for module in model.modules())
    model.generation_config = GenerationConfig()
    assert greedy_alone(model, PROMPTS[0], NEW).tolist() == alone()[0]
