"""Weights of products over one input lie side by side, and their owner sees no difference."""

import copy

import pytest
import torch
from cpu_models import PROMPTS, model
from tiny import tiny_model
from torch import nn
from transformers import AutoModelForCausalLM

import bass_core as bass
from bass_core import compiled_layers, side_by_side
from bass_core.side_by_side import SIBLINGS, arrange, together


def storages(model):
    return {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}


def groups_of(layer):
    return [
        [getattr(layer.self_attn, name) for name in SIBLINGS[0]],
        [getattr(layer.mlp, name) for name in SIBLINGS[1]],
    ]


def decode(models, compile):
    options = {"draft_length": 2, "max_new_tokens": 8, "eos_token_id": (), "compile": compile}
    return [s.tolist() for s in bass.generate(models, PROMPTS, **options).sequences]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2"])
def test_parameters_stay_what_they_are_and_no_copy_is_kept(architecture):
    own = model(architecture)
    before = {name: (parameter, parameter.clone()) for name, parameter in own.named_parameters()}
    memory = sum(storages(own).values())
    found = arrange(own)
    assert len(found) == 2 * len(compiled_layers.layers_of(own))
    assert sum(storages(own).values()) == memory
    for name, parameter in own.named_parameters():
        object_before, value = before[name]
        assert parameter is object_before and torch.equal(parameter, value) and parameter.requires_grad


def test_what_lies_side_by_side_is_not_moved_again():
    own = model()
    arrange(own)
    before = storages(own)
    assert len(arrange(own)) == 4 and storages(own) == before


def test_each_share_of_the_product_is_the_modules_own():
    x = torch.randn(3, 32)
    for group in arrange(model("qwen2")):  # its queries, keys and values have biases
        expected = [part(x) for part in group]
        changes = together(group)
        for table, name, value in changes:
            table[name] = value
        for part, own in zip(group, expected, strict=True):
            torch.testing.assert_close(part(x), own)


@pytest.mark.usefixtures("traced_only")
def test_a_session_leaves_nothing_of_it_in_the_modules():
    models = bass.ModelPair(model(), model(noise=0.1))
    before = [set(vars(module)) for module in models.target.modules()]
    expected = decode(models, "off")
    assert decode(models, "compiled") == expected
    assert [set(vars(module)) for module in models.target.modules()] == before


@pytest.mark.usefixtures("traced_only")
def test_the_model_is_saved_copied_and_trained_while_a_session_is_open(tmp_path):
    own = model()
    expected = {name: value.clone() for name, value in own.state_dict().items()}
    with torch.inference_mode(), bass.Session(own_pair(own), compile="compiled") as session:
        session.submit(PROMPTS[0], max_new_tokens=4)
        session.step()
        assert own.model.layers[0].mlp.gate_proj.weight.untyped_storage().nbytes() == 2 * 4 * 32 * 48
        own.save_pretrained(tmp_path / "saved")
        torch.save(own.state_dict(), tmp_path / "weights.pt")
        copied = copy.deepcopy(own)
        with torch.inference_mode(False):
            optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
            own(PROMPTS[0][None]).logits.square().mean().backward()
            optimizer.step()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    for name, value in expected.items():
        for found in (saved, torch.load(tmp_path / "weights.pt"), copied.state_dict()):
            assert torch.equal(found[name], value)
    assert not torch.equal(
        own.state_dict()["model.layers.0.mlp.up_proj.weight"], expected["model.layers.0.mlp.up_proj.weight"]
    )


def own_pair(target):
    return bass.ModelPair(target, tiny_model(noise=0.1))


class Wrapped(nn.Linear):
    """Stands for a quantised or adapted product."""

    def forward(self, x):
        return super().forward(x) * 2


def wrap(layer):
    part = layer.self_attn.k_proj
    layer.self_attn.k_proj = Wrapped(part.in_features, part.out_features, bias=False)


def hook(layer):
    layer.self_attn.k_proj.register_forward_hook(lambda module, args, out: out * 2)


def stand_in(layer):
    part = layer.self_attn.k_proj
    part.forward = lambda x: nn.functional.linear(x, part.weight) * 2


def tie(layer):
    layer.self_attn.k_proj.weight = layer.self_attn.v_proj.weight


def share(layer):
    part = layer.self_attn.k_proj
    part.weight.data = torch.cat([part.weight.data, part.weight.data])[: part.out_features]


def widen(layer):
    layer.self_attn.k_proj.bias = nn.Parameter(torch.ones(layer.self_attn.k_proj.out_features))


def offload(layer):
    layer.self_attn.k_proj.to("meta")


HANDS = [wrap, hook, stand_in, tie, share, widen, offload]


@pytest.mark.parametrize("touch", HANDS, ids=lambda touch: touch.__name__)
def test_what_is_in_somebody_elses_hands_is_left_alone(touch):
    own = model()
    first, second = compiled_layers.layers_of(own)
    touch(first)
    before = [part.weight.untyped_storage()._cdata for part in groups_of(first)[0]]
    found = arrange(own)
    assert [part.weight.untyped_storage()._cdata for part in groups_of(first)[0]] == before
    assert found == [groups_of(first)[1], *groups_of(second)]


@pytest.mark.parametrize("architecture", ["phi3", "gpt2"])
def test_weights_that_are_one_already_are_left_alone(architecture):
    assert arrange(model(architecture)) == []


@pytest.mark.slow
@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize(
    "touch",
    [hook, tie, widen],
    ids=lambda touch: touch.__name__,
)
def test_texts_are_right_whatever_was_left_alone(touch):
    own = model()
    touch(compiled_layers.layers_of(own)[0])
    assert decode(own_pair(own), "compiled") == decode(own_pair(own), "off")


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize("in_place", [True, False])
def test_weights_that_change_while_a_session_is_open_count_at_once(in_place):
    own = model()
    other = torch.randn(32, 32)
    texts = []
    for compile in ("off", "compiled"):
        own.load_state_dict(model().state_dict())
        weight = own.model.layers[1].self_attn.q_proj.weight
        with bass.Session(own_pair(own), compile=compile, draft_length=2, eos_token_id=()) as session:
            handle = session.submit(PROMPTS[1], max_new_tokens=24)
            for _ in range(3):
                session.step()
            if in_place:
                weight.data.copy_(other)
            else:
                weight.data = other.clone()
            while not session.idle:
                session.step()
            texts.append(session.result(handle).sequence.tolist())
    assert texts[0] == texts[1]


def test_models_on_a_gpu_are_arranged_before_any_session_records(monkeypatch):
    """A session that compiles would else move the weights of one that has recorded."""
    arranged = []
    monkeypatch.setattr(side_by_side, "arrange", lambda model: arranged.append(model) or [])
    from bass_core.runner import Runner

    own = model()
    Runner(own, "pad", 1)
    assert arranged == []
    monkeypatch.setattr(type(own), "device", torch.device("cuda"))
    Runner(own, "pad", 1)
    assert arranged == [own]
