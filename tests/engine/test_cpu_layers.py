import pytest
import torch
from cpu_models import PROMPTS, logits, model, texts
from tiny import greedy_alone
from torch import nn
from transformers.models.llama import modeling_llama
from transformers.models.t5.modeling_t5 import T5LayerNorm

import bass_core as bass
from bass_core.model import cpu_layers
from bass_core.model.cpu_layers import changes, product
from bass_core.model.patching import changed


@pytest.fixture
def of_any_size(monkeypatch):
    """Use the products for large models with small models on every processor."""
    monkeypatch.setattr(cpu_layers, "FASTER", True)
    monkeypatch.setattr(cpu_layers, "STREAMED", 0)
    monkeypatch.setattr(cpu_layers, "SMALL", 0)


@pytest.mark.parametrize("large", [0, 2**60], ids=["oneDNN", "MKL"])
def test_products_equal_linear(monkeypatch, large):
    monkeypatch.setattr(cpu_layers, "LARGE", large)
    monkeypatch.setattr(cpu_layers, "SMALL", 0)
    for part in (nn.Linear(24, 15, bias=False), nn.Linear(24, 15)):
        with torch.no_grad():
            for shape in ((1,), (5,), (3, 1), (2, 7), (1, 48), (2, 0)):
                x = torch.randn(*shape, 24)
                found = product(x, part.weight, part.bias)
                assert found.shape == (*shape, 15) and found.is_contiguous()
                torch.testing.assert_close(found, part(x))
            scattered = torch.randn(24, 4).T
            torch.testing.assert_close(product(scattered, part.weight, part.bias), part(scattered))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert torch.equal(product(x, part.weight, part.bias), part(x))
        product(torch.randn(3, 24), part.weight, part.bias).sum().backward()
        assert part.weight.grad is not None
    for dtype in (torch.float64, torch.bfloat16):
        part, x = nn.Linear(24, 16, dtype=dtype), torch.randn(3, 24, dtype=dtype)
        assert torch.equal(product(x, part.weight, part.bias), part(x))


@pytest.mark.usefixtures("of_any_size")
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "opt"])
def test_texts_equal_plain_layers(monkeypatch, architecture):
    models = bass.ModelPair(model(architecture), model(noise=0.1))
    found = texts(models), texts(models, temperature=0.7, draft_length=0)
    monkeypatch.setattr(cpu_layers, "changes", lambda model: [])
    assert found == (texts(models), texts(models, temperature=0.7, draft_length=0))


@pytest.mark.usefixtures("of_any_size")
@pytest.mark.parametrize(("limit", "value"), [("STREAMED", 2**23), ("FASTER", False)])
def test_small_models_and_fast_processors_keep_linear(monkeypatch, limit, value):
    monkeypatch.setattr(cpu_layers, limit, value)
    monkeypatch.setattr(cpu_layers, "product", pytest.fail)
    texts(bass.ModelPair(model()), draft_length=0)


@pytest.mark.usefixtures("of_any_size")
@pytest.mark.parametrize(("name", "replaced"), [("self_attn.q_proj", False), ("input_layernorm", True)])
def test_changed_weights_count_at_once(name, replaced):
    own = model()
    part, other = own.model.layers[1].get_submodule(name), model(seed=1).model.layers[1].get_submodule(name).weight
    with changed(changes(own)):
        before = logits(own)
        if replaced:
            part.weight = nn.Parameter(2 * other)
        else:
            part.weight.data.copy_(other)
        found = logits(own)
    torch.testing.assert_close(found, logits(own))
    assert not torch.equal(found, before)


class Shifted(T5LayerNorm):
    def forward(self, hidden_states, gate):
        return super().forward(hidden_states + 1e-3) * gate


def test_norms_keep_their_bits():
    for own in (model("llama"), model("qwen3")):
        norms = [module for module in own.modules() if "Norm" in type(module).__name__]
        before = [norm.forward for norm in norms]
        with changed(changes(own)):
            for norm, forward in zip(norms, before, strict=True):
                assert "forward" in vars(norm)
                x = torch.randn(2, 3, *norm.weight.shape) * 10 ** torch.randn(2, 3, 1)
                assert torch.equal(norm(x), forward(x)) and torch.equal(norm(x.double()), forward(x.double()))


def test_norms_of_other_arithmetic_are_left_alone():
    norm, x, gate = Shifted(32), torch.randn(3, 32), torch.randn(3, 32)
    expected = norm(x, gate)
    with changed(changes(nn.ModuleList([norm]))):
        assert torch.equal(norm(x, gate), expected)


def rotating(own) -> list[nn.Module]:
    return [module for module in own.modules() if "Attention" in type(module).__name__ and "forward" in vars(module)]


def test_rotations_keep_their_bits(monkeypatch):
    monkeypatch.setattr(cpu_layers, "FASTER", False)
    for own, rotated in (
        (model("llama"), 2),
        (model("gemma2"), 2),
        (model("phi3", partial_rotary_factor=0.5), 2),
        (model("gptj"), 0),
        (model("llama", dtype="bfloat16"), 2),
    ):
        expected = logits(own)
        with changed(changes(own)):
            assert torch.equal(logits(own), expected) and len(rotating(own)) == rotated
        assert not rotating(own) and not any("forward" in vars(module) for module in own.modules())


def test_replaced_rotation_is_called(monkeypatch):
    own, theirs = model(), getattr(modeling_llama, cpu_layers.ROTATE)
    before = logits(own)
    with changed(changes(own)):
        monkeypatch.setattr(modeling_llama, cpu_layers.ROTATE, lambda *args: tuple(2 * x for x in theirs(*args)))
        found = logits(own)
    assert torch.equal(found, logits(own)) and not torch.equal(found, before)


@pytest.mark.usefixtures("of_any_size")
def test_hooks_and_stand_ins_of_the_owner_run():
    own, seen = model(), []
    layer = own.model.layers[0]
    hooked = {layer.input_layernorm, layer.self_attn, layer.self_attn.k_proj}
    for part in hooked:
        part.register_forward_hook(lambda module, args, out: seen.append(module))
    stand_in = layer.mlp.down_proj
    forward = stand_in.forward
    stand_in.forward = lambda x: seen.append(stand_in) or 2 * forward(x)
    assert texts(bass.ModelPair(own), draft_length=0) == [greedy_alone(own, each, 12).tolist() for each in PROMPTS]
    assert set(seen) == {*hooked, stand_in}
