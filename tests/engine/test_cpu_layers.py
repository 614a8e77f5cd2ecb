"""What layers do on a CPU in fewer operators is what they do, and their owner sees no difference."""

import pytest
import torch
from cpu_models import PROMPTS, Operators, logits, model, texts
from torch import nn
from torch.nn.utils import parametrize, prune
from transformers.models.t5.modeling_t5 import T5LayerNorm

import bass_core as bass
from bass_core import cpu_layers
from bass_core.attention import changed
from bass_core.cpu_layers import changes, product


@pytest.fixture
def of_any_size(monkeypatch):
    """Models of few weights count as such that are read anew in each pass, by a processor whose `linear` is slow."""
    monkeypatch.setattr(cpu_layers, "FASTER", True)
    monkeypatch.setattr(cpu_layers, "STREAMED", 0)
    monkeypatch.setattr(cpu_layers, "SMALL", 0)


# --- products ---


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("large", [0, 2**60], ids=["oneDNN", "MKL"])
@pytest.mark.parametrize("shape", [(1,), (2,), (5,), (1, 1), (3, 1), (2, 7), (1, 48), (0,), (2, 0)], ids=str)
def test_products_of_few_rows_are_products(monkeypatch, shape, large, bias):
    monkeypatch.setattr(cpu_layers, "LARGE", large)
    monkeypatch.setattr(cpu_layers, "SMALL", 0)
    part = nn.Linear(24, 15, bias=bias)  # an odd number
    x = torch.randn(*shape, 24)
    found = product(x, part.weight, part.bias)
    assert found.shape == (*shape, 15) and found.is_contiguous()
    torch.testing.assert_close(found, part(x))


@torch.no_grad()
@pytest.mark.parametrize("large", [0, 2**60], ids=["oneDNN", "MKL"])
@pytest.mark.parametrize("rows", [1, 4])
def test_products_of_what_lies_scattered_are_products(monkeypatch, rows, large):
    monkeypatch.setattr(cpu_layers, "LARGE", large)
    monkeypatch.setattr(cpu_layers, "SMALL", 0)
    x = torch.randn(24, rows).T
    part = nn.Linear(24, 16)
    torch.testing.assert_close(product(x, part.weight, part.bias), part(x))


@torch.no_grad()
def test_one_dnn_which_keeps_code_for_every_shape_meets_few(monkeypatch):
    monkeypatch.setattr(cpu_layers, "LARGE", 0)
    part = nn.Linear(16, 16)
    with Operators() as operators:
        for rows in range(1, 1201):
            assert len(product(torch.randn(rows, 16), part.weight)) == rows
    assert 10 < len(operators.shapes("_linear_pointwise")) < 50


def test_products_have_gradients_where_these_are_wanted(monkeypatch):
    monkeypatch.setattr(cpu_layers, "LARGE", 0)
    part = nn.Linear(24, 16)
    product(torch.randn(3, 24), part.weight, part.bias).sum().backward()
    assert part.weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_products_of_other_types_are_torchs_own(dtype):
    part, x = nn.Linear(24, 16, dtype=dtype), torch.randn(3, 24, dtype=dtype)
    assert torch.equal(product(x, part.weight, part.bias), part(x))


@torch.no_grad()
@pytest.mark.parametrize("large", [0, 2**60], ids=["oneDNN", "MKL"])
def test_under_autocast_products_are_torchs_own(monkeypatch, large):
    monkeypatch.setattr(cpu_layers, "LARGE", large)
    part, x = nn.Linear(24, 16), torch.randn(3, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(product(x, part.weight, part.bias), part(x))


@torch.no_grad()
def test_a_layer_without_inputs_gives_its_bias():
    bias = torch.randn(3)
    assert torch.equal(product(torch.randn(2, 0), torch.randn(3, 0), bias), bias.expand(2, 3))


@pytest.mark.usefixtures("of_any_size")
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma2", "phi3", "gpt_neox", "opt", "mixtral"])
def test_texts_are_those_of_the_layers_as_they_are(monkeypatch, architecture):
    models = bass.ModelPair(model(architecture), model(noise=0.1))
    found = texts(models), texts(models, draft_length=0), texts(models, temperature=0.7, draft_length=0)
    monkeypatch.setattr(cpu_layers, "changes", lambda model: [])
    assert found == (texts(models), texts(models, draft_length=0), texts(models, temperature=0.7, draft_length=0))


def test_a_model_that_stays_in_a_cpus_cache_keeps_torchs_products(monkeypatch):
    monkeypatch.setattr(cpu_layers, "FASTER", True)
    monkeypatch.setattr(cpu_layers, "product", pytest.fail)
    texts(bass.ModelPair(model(), model(noise=0.1)))


@pytest.mark.usefixtures("of_any_size")
def test_a_processor_whose_linear_is_fast_keeps_torchs_products(monkeypatch):
    monkeypatch.setattr(cpu_layers, "FASTER", False)
    monkeypatch.setattr(cpu_layers, "product", pytest.fail)
    texts(bass.ModelPair(model(), model(noise=0.1)))


@pytest.mark.parametrize(
    ("processor", "faster"),
    [
        ("AMD EPYC 9B14", True),
        ("AMD64 Family 25 Model 97 Stepping 2, AuthenticAMD", True),
        ("Intel(R) Xeon(R) Processor", False),
        ("Intel64 Family 6 Model 154 Stepping 3, GenuineIntel", False),
    ],
)
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")
def test_mkl_is_fast_on_its_makers_processors(processor, faster):
    assert cpu_layers.faster_than_linear(processor) is faster


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_norms_and_products_of_other_types_are_left_as_they_are(dtype):
    own = model(dtype=str(dtype).removeprefix("torch."))
    replaced = {id(table) for table, _, _ in changes(own)}
    products = [module for module in own.modules() if type(module) is nn.Linear]
    assert not any(id(vars(module)) in replaced for module in [*norms_of(own), *products])


# --- the owner's model ---


@pytest.mark.usefixtures("of_any_size")
@pytest.mark.parametrize("name", ["self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "input_layernorm"])
@pytest.mark.parametrize("how", ["in place", "data", "parameter"])
def test_weights_that_change_between_two_steps_count_at_once(monkeypatch, name, how):
    def decoded():
        own = model()
        part = own.model.layers[1].get_submodule(name)
        with bass.Session(bass.ModelPair(own, model(noise=0.1)), draft_length=2, eos_token_id=()) as session:
            handle = session.submit(PROMPTS[1], max_new_tokens=24)
            for _ in range(3):
                session.step()
            other = torch.randn(part.weight.shape, generator=torch.Generator().manual_seed(1))
            if how == "in place":
                part.weight.data.copy_(other)
            elif how == "data":
                part.weight.data = other
            else:
                part.weight = nn.Parameter(other)
            while not session.idle:
                session.step()
            return session.result(handle).sequence.tolist()

    found = decoded()
    monkeypatch.setattr(cpu_layers, "changes", lambda model: [])
    assert found == decoded()


def test_the_product_of_a_class_that_is_changed_is_asked(monkeypatch):
    own, before, forward = model(), logits(model()), nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 2 * forward(self, x))
    expected = logits(own)
    with changed(changes(own)):
        assert torch.equal(logits(own), expected) and not torch.equal(expected, before)


def test_weights_that_somebody_computes_meanwhile_count():
    own = model()
    with changed(changes(own)), torch.no_grad():
        prune.l1_unstructured(own.model.layers[0].mlp.up_proj, "weight", 0.5)
        parametrize.register_parametrization(own.model.layers[0].mlp.down_proj, "weight", Doubled())
        found = logits(own)
    assert torch.equal(found, logits(own)) and not torch.equal(found, logits(model()))


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_weights_that_are_no_parameters_count(name):
    own = model("qwen2")
    part = own.model.layers[0].self_attn.q_proj
    kept = getattr(part, name).data
    delattr(part, name)
    part.register_buffer(name, kept)
    expected = logits(own)
    with changed(changes(own)):
        assert torch.equal(logits(own), expected)


# --- norms ---


def norms_of(own):
    return [module for module in own.modules() if "Norm" in type(module).__name__]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral", "phi3", "mixtral", "olmo2"])
def test_norms_have_the_bits_that_they_had(architecture):
    own = model(architecture)
    before = [norm.forward for norm in norms_of(own)]
    with changed(changes(own)):
        for norm, forward in zip(norms_of(own), before, strict=True):
            x = torch.randn(2, 3, *norm.weight.shape) * 10 ** torch.randn(2, 3, 1)
            assert torch.equal(norm(x), forward(x))
            assert torch.equal(norm(x.double()), forward(x.double()))


def test_norms_are_one_operator():
    own = model()
    with changed(changes(own)):
        assert all("forward" in vars(norm) for norm in norms_of(own))


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3"])
def test_norms_of_other_arithmetic_are_left_alone(architecture):
    own = model(architecture)
    with changed(changes(own)):
        assert not any("forward" in vars(norm) for norm in norms_of(own))


class Gated(T5LayerNorm):
    def forward(self, hidden_states, gate=None):
        normed = super().forward(hidden_states)
        return normed if gate is None else normed * gate


class OfTwo(T5LayerNorm):
    def forward(self, hidden_states, gate):
        return super().forward(hidden_states) * gate


class Shifted(T5LayerNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states + 1e-3)


@pytest.mark.parametrize("kind", [Gated, OfTwo, Shifted])
def test_norms_that_take_or_do_more_do_it(kind):
    norm = kind(32)
    x, gate = torch.randn(3, 32), torch.randn(3, 32)
    arguments = (x,) if kind is Shifted else (x, gate)
    expected = norm(*arguments)
    with changed(changes(nn.ModuleList([norm]))):
        assert torch.equal(norm(*arguments), expected)


# --- afterwards ---


@pytest.mark.usefixtures("of_any_size")
def test_a_session_leaves_nothing_of_it_in_the_modules():
    models = bass.ModelPair(model(), model(noise=0.1))
    before = [set(vars(module)) for part in (models.target, models.draft) for module in part.modules()]
    texts(models)
    assert [set(vars(module)) for part in (models.target, models.draft) for module in part.modules()] == before


@pytest.mark.usefixtures("of_any_size")
def test_hooks_run_whenever_they_were_set():
    own, seen = model(), []
    layer = own.model.layers[0]
    parts = {layer.input_layernorm, layer.self_attn, layer.self_attn.k_proj, layer.mlp.down_proj}
    for part in parts:
        part.register_forward_hook(lambda module, args, out: seen.append(module))
    texts(bass.ModelPair(own, model(noise=0.1)), max_new_tokens=1)
    assert set(seen) == parts


@pytest.mark.usefixtures("of_any_size")
@pytest.mark.parametrize("name", ["self_attn", "self_attn.q_proj", "self_attn.o_proj", "input_layernorm"])
def test_what_stands_in_for_a_module_is_asked(name):
    own = model()
    part = own.model.layers[0].get_submodule(name)
    forward, asked = part.forward, []

    def stand_in(*args, **options):
        asked.append(args)
        return forward(*args, **options)

    part.forward = stand_in
    texts(bass.ModelPair(own, model(noise=0.1)), max_new_tokens=1)
    assert asked and part.forward is stand_in
