"""Rotary positions, which a CPU applies in fewer operators: to the bit, and as their owner would have it."""

import functools
import threading

import pytest
import torch
from cpu_models import PROMPTS, Operators, logits, model, texts
from tiny import REFUSED, SUPPORTED, greedy_alone
from transformers.models.llama import modeling_llama

import bass_core as bass
from bass_core import cpu_layers
from bass_core.attention import changed
from bass_core.cpu_layers import changes

THEIRS = modeling_llama.apply_rotary_pos_emb


def rotating(own):
    return [module for module in own.modules() if "Attention" in type(module).__name__ and "forward" in vars(module)]


@pytest.mark.parametrize("architecture", [*SUPPORTED, *REFUSED])
def test_layers_have_the_bits_that_they_had(monkeypatch, architecture):
    monkeypatch.setattr(cpu_layers, "FASTER", False)
    own = model(architecture)
    expected = logits(own)
    with changed(changes(own)):
        assert torch.equal(logits(own), expected)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma2", "mistral", "olmo2", "falcon"])
def test_queries_and_keys_are_rolled_and_the_sign_is_given_once_a_pass(architecture):
    models, layers = bass.ModelPair(model(architecture)), 2
    texts(models, draft_length=0)  # the path is tried now
    with Operators() as operators:
        texts(models, draft_length=0)
    assert operators.count("roll") == 2 * layers * operators.count("neg") > 0


@pytest.mark.parametrize("architecture", ["gptj", "codegen"])  # they rotate neighbours
def test_rotations_of_other_arithmetic_are_left_alone(architecture):
    own = model(architecture)
    with changed(changes(own)):
        assert not rotating(own)


@pytest.mark.parametrize(
    ("architecture", "share"), [("phi3", {"partial_rotary_factor": 0.5}), ("gpt_neox", {"rotary_pct": 0.5})]
)
def test_heads_that_are_rotated_in_part_are(architecture, share):
    own = model(architecture, **share)
    expected = logits(own)
    with changed(changes(own)):
        assert len(rotating(own)) == 2
        assert torch.equal(logits(own), expected)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_rotations_of_other_types_are_those_of_the_model(dtype):
    own = model(dtype=dtype)
    expected = logits(own)
    with changed(changes(own)), Operators() as operators:
        assert torch.equal(logits(own), expected)
    assert not operators.count("roll")


def twice(q, k, cos, sin, unsqueeze_dim=1):
    return tuple(2 * each for each in THEIRS(q, k, cos, sin, unsqueeze_dim))


def agreeing(q, k, cos, sin, unsqueeze_dim=1):
    return THEIRS(q, k, cos, sin, unsqueeze_dim)


@pytest.mark.parametrize("function", [twice, agreeing, functools.wraps(THEIRS)(agreeing)])
def test_a_rotation_that_its_owner_has_put_in_place_is_asked(monkeypatch, function):
    asked = []
    monkeypatch.setattr(modeling_llama, cpu_layers.ROTATE, lambda *args: asked.append(args) or function(*args))
    own = model()
    expected = logits(own)
    asked.clear()
    with changed(changes(own)):
        assert torch.equal(logits(own), expected)
    assert len(asked) == 2  # layers


def test_a_rotation_that_is_put_in_place_meanwhile_is_asked(monkeypatch):
    own, before = model(), logits(model())
    with changed(changes(own)):
        assert torch.equal(logits(own), before)
        monkeypatch.setattr(modeling_llama, cpu_layers.ROTATE, twice)
        found = logits(own)
    assert torch.equal(found, logits(own)) and not torch.equal(found, before)


STATES = torch.randn(2, 4, 3, 16), torch.randn(2, 2, 3, 16), torch.randn(2, 3, 16), torch.randn(2, 3, 16)


@pytest.mark.parametrize(
    "states",
    [
        STATES,
        [each.double() for each in STATES],
        (*STATES[:3], STATES[3].double()),
        (*STATES[:2], *(each[:1] for each in STATES[2:])),
        [each[:1] if each.ndim == 4 else each for each in STATES],
        (*STATES[:2], *(each[:, None] for each in STATES[2:])),
        [each[..., :1, :] if each.ndim == 4 else each for each in STATES],
    ],
    ids=["usual", "double", "mixed", "one for all", "many for one", "four dimensions", "of one"],
)
def test_rotations_of_all_shapes_are_those_of_the_model(states):
    rotate = cpu_layers._rotation(modeling_llama.LlamaAttention.forward)
    try:
        expected = THEIRS(*states)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            rotate(*states)
    else:
        assert all(map(torch.equal, rotate(*states), expected))
    q, k, cos, sin = STATES
    for found in rotate(q=q, k=k, cos=cos, sin=sin), rotate(q, k, cos, sin, unsqueeze_dim=1), rotate(q, k, cos, sin, 1):
        assert all(map(torch.equal, found, THEIRS(*STATES)))


def test_attention_that_somebody_hooks_sees_what_he_does_to_its_factors():
    def halve(module, args, options):
        for each in options["position_embeddings"]:
            each.mul_(0.5)

    own = model()
    own.model.layers[1].self_attn.register_forward_pre_hook(halve, with_kwargs=True)
    found = texts(bass.ModelPair(own), draft_length=0)
    with torch.no_grad():
        assert found == [greedy_alone(own, prompt, 12).tolist() for prompt in PROMPTS]


def test_factors_that_come_in_the_same_tensors_count_anew_in_every_pass(monkeypatch):
    own = model()
    rotary, kept = own.model.rotary_emb.forward, {}

    def in_place(x, position_ids):
        found = rotary(x, position_ids)
        own = kept.setdefault(position_ids.shape, tuple(each.clone() for each in found))
        return tuple(to.copy_(each) for to, each in zip(own, found, strict=True))

    own.model.rotary_emb.forward = in_place
    found = texts(bass.ModelPair(own, model(noise=0.1)))
    monkeypatch.setattr(cpu_layers, "changes", lambda model: [])
    assert found == texts(bass.ModelPair(model(), model(noise=0.1)))


def test_positions_count_anew_in_every_pass():
    own = model()
    positions = torch.arange(9), torch.arange(9) + 30, torch.arange(9)
    with torch.no_grad():
        expected = [own(PROMPTS[1][None, :9], position_ids=each[None]).logits for each in positions]
        with changed(changes(own)):
            found = [own(PROMPTS[1][None, :9], position_ids=each[None]).logits for each in positions]
    assert all(map(torch.equal, found, expected)) and not torch.equal(found[0], found[1])


def test_layers_that_their_owner_compiles_have_the_bits_that_they_had():
    own = model()
    for layer in own.model.layers:
        layer.compile(backend="eager")
    expected = logits(own)
    with changed(changes(own)):
        assert torch.equal(logits(own), expected) and len(rotating(own)) == 2


def test_layers_that_rotate_so_can_be_trained():
    own = model()
    expected = torch.autograd.grad(own(PROMPTS[0][None]).logits.logsumexp(-1).sum(), list(own.parameters()))
    with changed(changes(own)):
        found = torch.autograd.grad(own(PROMPTS[0][None]).logits.logsumexp(-1).sum(), list(own.parameters()))
    torch.testing.assert_close(found, expected)


def test_other_threads_find_the_module_as_it_was():
    own, seen = model(), []
    before = getattr(modeling_llama, cpu_layers.ROTATE)
    with changed(changes(own)):
        thread = threading.Thread(target=lambda: seen.append(getattr(modeling_llama, cpu_layers.ROTATE)))
        thread.start()
        thread.join()
        assert len(rotating(own)) == 2
    assert seen == [before] and not rotating(own)
