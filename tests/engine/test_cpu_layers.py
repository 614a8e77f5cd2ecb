"""What layers do on a CPU in fewer operators is what they do, and their owner sees no difference."""

import functools
import threading

import pytest
import torch
from tiny import REFUSED, SUPPORTED, greedy_alone, ragged_prompts, tiny_model
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama import modeling_llama
from transformers.models.t5.modeling_t5 import T5LayerNorm

import bass_core as bass
from bass_core import cpu_layers
from bass_core.attention import changed
from bass_core.cpu_layers import changes, product

PROMPTS = ragged_prompts(5, 11)
THEIRS = modeling_llama.apply_rotary_pos_emb


@pytest.fixture
def of_any_size(monkeypatch):
    """Models of few weights count as such that are read anew in each pass, by a processor whose `linear` is slow."""
    monkeypatch.setattr(cpu_layers, "FASTER", True)
    monkeypatch.setattr(cpu_layers, "STREAMED", 0)
    monkeypatch.setattr(cpu_layers, "SMALL", 0)


def model(architecture="llama", **changes):
    return tiny_model.__wrapped__(architecture, **changes)


def texts(models, **options):
    options = {"draft_length": 2, "max_new_tokens": 12, "eos_token_id": ()} | options
    return [s.tolist() for s in bass.generate(models, PROMPTS, **options).sequences]


@torch.no_grad()
def logits(own):
    return own(torch.stack(ragged_prompts(9, 9))).logits


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


class Operators(TorchDispatchMode):
    """Notes each operator, by name, with the shape of its first tensor."""

    def __init__(self):
        super().__init__()
        self.met = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.met.append((function._schema.name.split("::")[-1], getattr(args[0], "shape", None) if args else None))
        return function(*args, **(kwargs or {}))

    def shapes(self, name):
        return {shape for each, shape in self.met if each == name}

    def count(self, *names):
        return sum(each in names for each, _ in self.met)


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


# --- rotary positions ---


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
