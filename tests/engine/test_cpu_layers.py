import pytest
import torch
from cpu_models import PROMPTS, logits, model, texts
from safetensors.torch import save_model
from tiny import greedy_alone, ragged_prompts
from torch import nn
from torch.nn.modules import module as module_hooks
from transformers.models.llama import modeling_llama

import bass_core as bass
from bass_core.model import cpu_layers
from bass_core.model.cpu_layers import FasterLayers, product
from bass_core.model.fused_projections import arrange
from bass_core.model.patching import changed
from bass_core.model.runner import Runner


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
    monkeypatch.setattr(FasterLayers, "changes", lambda layers: [])
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
    with changed(FasterLayers(own, whole=False).changes()):
        before = logits(own)
        if replaced:
            part.weight = nn.Parameter(2 * other)
        else:
            part.weight.data.copy_(other)
        found = logits(own)
    torch.testing.assert_close(found, logits(own))
    assert not torch.equal(found, before)


class Shifted(modeling_llama.LlamaRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states + 1e-3)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3"])
def test_norms_keep_their_bits(architecture):
    own = model(architecture)
    norms = [module for module in own.modules() if type(module).__name__ in cpu_layers.RMS_NORMS]
    own.model.norm = other = Shifted(32)
    before = [norm.forward for norm in norms]
    with changed(FasterLayers(own, whole=False).changes()):
        assert "forward" not in vars(other) and len(norms) > 4
        for norm, forward in zip(norms[:-1], before, strict=False):
            assert "forward" in vars(norm)
            x = torch.randn(2, 3, *norm.weight.shape) * 10 ** torch.randn(2, 3, 1)
            assert torch.equal(norm(x), forward(x)) and torch.equal(norm(x.double()), forward(x.double()))


def passes(own, count=3):
    """Return the logits of three passes: a prompt, several tokens per row, one token per row."""
    ids = torch.stack(ragged_prompts(count + 6, count + 6))
    with torch.inference_mode(), Runner(own, "pad", 2, 30) as runner:
        whole = [layer for layer in runner.layers.faster.layers if layer.is_unchanged()]
        first = runner.feed(ids[:, :count], torch.zeros(2, dtype=int), [count, count - 1], starts_host=[0, 0])[0]
        starts = torch.tensor([count, count - 1])
        rows = torch.stack([ids[0, count : count + 5], ids[1, count - 1 : count + 4]])
        more = runner.feed(rows, starts, [5, 5], starts_host=starts.tolist())
        last = torch.stack([ids[0, count + 5], ids[1, count + 4]])[:, None]
        one = runner.feed(last, starts + 5, [1, 1], starts_host=(starts + 5).tolist())
        found = [torch.cat([first, more[0], one[0]]), torch.cat([more[1], one[1]])]
    expected = own(ids).logits
    return len(whole), found, [expected[0], expected[1, count - 1 : -1]]


CASES = {
    "grouped heads": ("llama", {}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "scaled rotation": ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}),
    "window": ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
    "float64": ("qwen2", {"dtype": "float64"}),
    "bfloat16": ("llama", {"dtype": "bfloat16"}),
}


@torch.no_grad()
@pytest.mark.usefixtures("of_any_size")
@pytest.mark.parametrize("case", CASES)
def test_whole_layers_compute_the_same_logits(case):
    architecture, changes = CASES[case]
    own = model(architecture, **changes)
    whole, found, expected = passes(own)
    assert whole == len(own.model.layers) and not any("forward" in vars(module) for module in own.modules())
    for mine, theirs in zip(found, expected, strict=True):
        tolerance = {"rtol": 0.02, "atol": 0.02} if own.dtype == torch.bfloat16 else {}
        torch.testing.assert_close(mine, theirs, **tolerance)


def doubled(own):
    theirs = modeling_llama.apply_rotary_pos_emb
    return (
        modeling_llama,
        cpu_layers.ROTATE,
        lambda *arguments, **more: tuple(2 * x for x in theirs(*arguments, **more)),
    )


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


def halved(module, part):
    nn.utils.parametrize.register_parametrization(module.get_submodule(part), "weight", Halved())
    return module


class Doubled(modeling_llama.LlamaDecoderLayer):
    def forward(self, *args, **kwargs):
        return 2 * super().forward(*args, **kwargs)


class Tripled(modeling_llama.LlamaMLP):
    def forward(self, x):
        return 3 * super().forward(x)


def transposed(own):
    weight = own.model.layers[0].self_attn.q_proj.weight
    return weight, "data", weight.data.t()


def on_every_module(own):
    part = own.model.layers[0].mlp.up_proj
    return module_hooks, "_global_forward_hooks", {0: lambda module, args, out: 2 * out if module is part else None}


OWNERS = {
    "rotation of the file": doubled,
    "class of the file": lambda own: (
        modeling_llama.LlamaMLP,
        "forward",
        lambda self, x: 2 * self.up_proj(x)[..., :32],
    ),
    "class": lambda own: (own.model.layers[0].mlp, "__class__", Tripled),
    "class of a layer": lambda own: (own.model.layers[0], "__class__", Doubled),
    "hook": lambda own: (own.model.layers[0].mlp.up_proj, "_forward_hooks", {0: lambda part, args, out: 2 * out}),
    "global hook": on_every_module,
    "module": lambda own: (own.model.layers[1].mlp, "act_fn", nn.ReLU()),
    "parametrized weight": lambda own: (own.model.layers[0], "mlp", halved(own.model.layers[0].mlp, "down_proj")),
    "parametrized norm": lambda own: (own.model, "layers", halved(own.model.layers, "0.input_layernorm")),
    "parametrized last norm": lambda own: (own, "model", halved(own.model, "norm")),
    "weight": lambda own: (own.model.layers[1].mlp.down_proj, "weight", nn.Parameter(torch.randn(32, 48))),
    "moved weight": lambda own: (own.model.layers[1].self_attn.k_proj.weight, "data", torch.randn(16, 32)),
    "transposed weight": transposed,
}


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("adjacent", [False, True], ids=["apart", "adjacent"])
def test_changes_of_the_owner_count(monkeypatch, owner, adjacent):
    """The owner replaces something while a runner is open. Another runner begins afterwards."""
    own, ids = model(), torch.stack(ragged_prompts(9))
    if adjacent:
        arrange(own)
    feed = [ids, torch.zeros(1, dtype=int), [9]]
    with torch.inference_mode(), Runner(own, "pad", 1, 20) as before:
        assert len(before.layers.faster.layers[0].qkv) == (1 if adjacent else 3)
        first = before.feed(*feed, starts_host=[0])
        monkeypatch.setattr(*OWNERS[owner](own))
        with Runner(own, "pad", 1, 20) as after:
            for runner in (before, after):
                found = runner.feed(*feed, starts_host=[0])
                torch.testing.assert_close(found, own(ids).logits)
                assert not torch.equal(found, first)


def test_sessions_leave_weights_where_they_are(tmp_path):
    own = model()
    kept, before = own.state_dict(), {name: each.data_ptr() for name, each in own.named_parameters()}
    texts(bass.ModelPair(own))
    assert {name: each.data_ptr() for name, each in own.named_parameters()} == before
    with torch.no_grad():
        own.lm_head.weight.mul_(2)
    assert torch.equal(kept["lm_head.weight"], own.lm_head.weight)
    save_model(own, tmp_path / "own.safetensors")


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
