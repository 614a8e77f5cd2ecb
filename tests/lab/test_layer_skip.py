import functools

import pytest
import torch
from sessions import run_to_the_end
from tiny import forward_passes, ragged_prompts, tiny_model

import bass_core as bass
from bass_lab import drafters
from bass_lab.drafters.layer_skip import LayerSkipDrafter, first_layers


def test_first_layers_share_weights_and_leave_the_target_unchanged():
    target = tiny_model(dtype="float64")
    ids = ragged_prompts(9)[0][None]
    before, short = target(ids).logits, first_layers(target, 1)
    assert short.config.num_hidden_layers == 1 and target.config.num_hidden_layers == 2
    assert {id(p) for p in short.parameters()} < {id(p) for p in target.parameters()}
    assert not torch.equal(short(ids).logits, before) and torch.equal(target(ids).logits, before)
    with bass.Session(bass.ModelPair(target, LayerSkipDrafter(1)), draft_length=3, eos_token_id=()) as session:
        with forward_passes(target) as passes:  # hooks see the target's passes
            session.submit(ragged_prompts(5)[0], max_new_tokens=9)
            run_to_the_end(session)
        assert len(passes) == session.trace.steps.step.nunique() and session.trace.steps.drafted.sum() > 0
    with pytest.raises(ValueError, match="has only 2 layers; draft with fewer, got 2"):
        bass.Session(bass.ModelPair(tiny_model(), LayerSkipDrafter(2)))


def test_models_that_cannot_be_cut_are_refused():
    target = tiny_model.__wrapped__()
    pair = bass.ModelPair(target, LayerSkipDrafter(1))
    decoding = pytest.raises(ValueError, match="is decoding at this moment")
    with bass.Session(bass.ModelPair(target)) as running, running.prepared(), decoding:
        bass.Session(pair)
    bass.generate(pair, ragged_prompts(5), max_new_tokens=3)  # the target is restored
    target.forward = functools.partial(target.forward)
    with pytest.raises(ValueError, match="LlamaForCausalLM has a forward of its own"):
        bass.Session(pair)


def test_layers_are_named():
    assert drafters.named("layers:2").layers == 2 and drafters.named("suffix") and drafters.named("layers:many") is None
    with pytest.raises(ValueError, match=">= 1"):
        drafters.named("layers:0")
