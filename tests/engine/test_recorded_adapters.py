"""Recorded steps have the adapters of when they were recorded: what changes between two steps is recorded anew."""

import copy
from contextlib import contextmanager

import pytest
import torch
from recording import PROMPTS, use_on_cpu
from tiny import BYTES, tiny_model, with_adapter

import bass_core as bass


@pytest.fixture(autouse=True)
def peft(monkeypatch):
    use_on_cpu(monkeypatch)
    return pytest.importorskip("peft")  # a GPU box may be without it


def decoded(pair, way, changed):
    """Texts, drafts and acceptance where some steps in the middle, or all from there on, are taken `changed`."""
    with bass.Session(pair, compile=way, draft_length=3, eos_token_id=()) as running:
        handles = [running.submit(prompt, max_new_tokens=60) for prompt in PROMPTS[:2]]
        for _ in range(6):
            running.step()
        with changed():
            for _ in range(6):
                running.step()
        while not running.idle:
            running.step()
        steps = running.trace.steps[["step", "row", "drafted", "accepted"]]
        return [running.result(handle).sequence.tolist() for handle in handles], steps.to_numpy().tolist()


@pytest.mark.parametrize("role", ["target", "draft"])
def test_adapters_are_switched_between_two_steps(role):
    found, plain = {}, tiny_model(vocab_size=BYTES)
    for way in ("off", "graphs"):
        adapted = with_adapter()
        pair = bass.ModelPair(adapted, plain) if role == "target" else bass.ModelPair(plain, adapted)
        found[way] = decoded(pair, way, adapted.disable_adapter)
    assert found["graphs"] == found["off"]


@contextmanager
def scaled(model):
    for layer in model.modules():
        if hasattr(layer, "scale_layer"):
            layer.scale_layer(-3.0)
    yield


def test_an_adapter_counts_more_from_some_step_on():
    found, plain = {}, tiny_model(vocab_size=BYTES)
    for way in ("off", "graphs"):
        target = with_adapter().get_base_model()
        found[way] = decoded(bass.ModelPair(target, plain), way, lambda target=target: scaled(target))
    assert found["graphs"] == found["off"]


@contextmanager
def with_a_first(model, config):
    torch.manual_seed(1)
    model.add_adapter(config)
    yield


def test_a_first_adapter_is_there_from_some_step_on(peft):
    found, plain = {}, tiny_model(vocab_size=BYTES)
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    for way in ("off", "graphs"):
        target = copy.deepcopy(plain)
        found[way] = decoded(bass.ModelPair(target, plain), way, lambda target=target: with_a_first(target, config))
    assert found["graphs"] == found["off"]
