"""Weights of products with the same input share memory, without a visible change for the model's owner."""

import copy

import pytest
import torch
from cpu_models import PROMPTS, model
from recording import submitted, texts
from torch import nn
from transformers import AutoModelForCausalLM

import bass_core as bass
from bass_core.execution import Execution
from bass_core.model.architectures import layers_of
from bass_core.model.fused_projections import SIBLINGS, arrange
from bass_core.model.runner import Runner


def storages(model):
    return {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}


def groups_of(layer):
    return [
        [getattr(part, name) for name in names]
        for part, names in zip((layer.self_attn, layer.mlp), SIBLINGS, strict=False)
    ]


@pytest.mark.parametrize("architecture", ["qwen2", "gemma2"])
def test_parameters_stay_the_same_objects_and_no_copy_is_kept(architecture):
    own = model(architecture)
    before = {name: (parameter, parameter.clone()) for name, parameter in own.named_parameters()}
    memory = sum(storages(own).values())
    assert len(arrange(own)) == 2 * len(layers_of(own))
    after = storages(own)
    assert sum(after.values()) == memory
    for name, parameter in own.named_parameters():
        object_before, value = before[name]
        assert parameter is object_before and torch.equal(parameter, value) and parameter.requires_grad
    assert len(arrange(own)) == 2 * len(layers_of(own)) and storages(own) == after, "weights are moved once"


@pytest.mark.usefixtures("traced_only")
def test_model_of_an_open_session_is_saved_copied_and_trained(tmp_path):
    own = model()
    expected = {name: value.clone() for name, value in own.state_dict().items()}
    with torch.inference_mode(), bass.Session(bass.ModelPair(own), compile="compiled") as session:
        session.submit(PROMPTS[0], max_new_tokens=4)
        session.step()
        assert own.model.layers[0].mlp.gate_proj.weight.untyped_storage().nbytes() == 2 * 4 * 32 * 48
        own.save_pretrained(tmp_path / "saved")
        torch.save(own.state_dict(), tmp_path / "weights.pt")
        copied = copy.deepcopy(own)
        with torch.inference_mode(False):
            own(PROMPTS[0][None]).logits.square().mean().backward()
            torch.optim.SGD(own.parameters(), lr=0.1).step()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    for name, value in expected.items():
        for found in (saved, torch.load(tmp_path / "weights.pt"), copied.state_dict()):
            assert torch.equal(found[name], value)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(own.state_dict()[name], expected[name])


class Wrapped(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def overridden(part):
    part.forward = lambda x: nn.functional.linear(x, part.weight) * 2


def shared(part):
    part.weight.data = torch.cat([part.weight.data, part.weight.data])[: part.out_features]


CHANGES = {
    "wrapped": lambda of: setattr(of, "k_proj", Wrapped(of.k_proj.in_features, of.k_proj.out_features, bias=False)),
    "hooked": lambda of: of.k_proj.register_forward_hook(lambda module, args, out: out * 2),
    "overridden": lambda of: overridden(of.k_proj),
    "tied": lambda of: setattr(of.k_proj, "weight", of.v_proj.weight),
    "shared": lambda of: shared(of.k_proj),
    "with bias": lambda of: setattr(of.k_proj, "bias", nn.Parameter(torch.ones(of.k_proj.out_features))),
    "offloaded": lambda of: of.k_proj.to("meta"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_products_are_left_alone(change):
    own = model()
    first, second = layers_of(own)
    CHANGES[change](first.self_attn)
    before = [part.weight.untyped_storage()._cdata for part in groups_of(first)[0]]
    found = arrange(own)
    assert [part.weight.untyped_storage()._cdata for part in groups_of(first)[0]] == before
    assert found == [groups_of(first)[1], *groups_of(second)]


def test_joint_weights_of_an_architecture_are_left_alone():
    assert arrange(model("phi3")) == arrange(model("gpt2")) == []


@pytest.mark.usefixtures("traced_only")
def test_weights_that_change_in_an_open_session_apply_at_once():
    found, (first, second) = {}, torch.randn(2, 32, 32)
    for compile in ("off", "compiled"):
        own = model()
        before = [set(vars(module)) for module in own.modules()]
        with bass.Session(bass.ModelPair(own), compile=compile, draft_length=0, eos_token_id=()) as session:
            handles = submitted(session, PROMPTS[1:], 16)
            for _ in range(3):
                session.step()
            own.model.layers[0].self_attn.q_proj.weight.data.copy_(first)
            session.step()
            own.model.layers[1].self_attn.q_proj.weight.data = second.clone()
            found[compile] = texts(session, handles)
        assert [set(vars(module)) for module in own.modules()] == before
    assert found["off"] == found["compiled"]


def test_models_on_a_gpu_are_arranged_before_a_session_records():
    """A session that compiles later would otherwise move the weights of a captured graph."""
    own = model()
    before = storages(own)
    Runner(own, "pad", 1, layers=Execution().layers(torch.device("cpu")))
    assert storages(own) == before
    Runner(own, "pad", 1, layers=Execution().layers(torch.device("cuda")))
    assert storages(own) != before
