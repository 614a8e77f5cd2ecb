import copy
import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import BYTES, SUPPORTED, byte_tokenizer, ragged_prompts, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedModel

import bass_core as bass
from bass_core.loading.model_pair import ASSETS
from bass_lab.measure.roofline import StepWork
from bass_lab.named_pairs import SHAPES, named_config, named_pair
from bass_lab.pairs import in_dtype, name_of

PUBLISHED = [name for name, shape in SHAPES.items() if shape.ids]
ROLES = ("target", "draft")
NO_CONFIG = ("opt-12b", "facebook/opt-13b", "empty")
CONTEXT = 64
TINY = {"vocab_size": 97, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": CONTEXT}
LLAMA = TINY | {"hidden_size": 32, "intermediate_size": 48, "num_key_value_heads": 2}
LLAMA |= {"bos_token_id": 1, "eos_token_id": 2}
CODEGEN = {"n_embd": 32, "n_layer": 3, "n_head": 4, "rotary_dim": 4, "n_positions": CONTEXT, "eos_token_id": 2}
SMALL = {  # changes for tiny models
    "llama": LLAMA,
    "qwen2": LLAMA,
    "opt": TINY | {"hidden_size": 32, "ffn_dim": 48},
    "codegen": CODEGEN | {"vocab_size": 97},
}


def small(config: dict) -> dict:
    return config | SMALL[config["model_type"]]


@pytest.fixture
def small_shapes(monkeypatch) -> None:
    for name, shape in SHAPES.items():
        tiny = dataclasses.replace(shape, target=small(shape.target), draft=small(shape.draft) | {"vocab_size": 93})
        monkeypatch.setitem(SHAPES, name, tiny)


def logits(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


@pytest.mark.parametrize(
    ("name", "role", "parameters", "layers", "heads", "kv_heads", "head_dim", "context"),
    [
        ("opt-13b", "target", 12_853_473_280, 40, 40, 40, 128, 2048),
        ("opt-13b", "draft", 125_239_296, 12, 12, 12, 64, 2048),
        ("codegen-16b", "target", 16_032_155_648, 34, 24, 24, 256, 2048),
        ("codegen-16b", "draft", 356_712_448, 20, 16, 16, 64, 2048),
        ("llama-3.1-8b", "target", 8_030_261_248, 32, 32, 8, 128, 131072),
        ("llama-3.1-8b", "draft", 1_235_814_400, 16, 32, 8, 64, 131072),
        ("qwen2.5-coder-7b", "target", 7_615_616_512, 28, 28, 4, 128, 32768),
        ("qwen2.5-coder-7b", "draft", 494_032_768, 24, 14, 2, 64, 32768),
        ("paper-7.8b", "target", 7_801_671_680, 32, 32, 32, 128, 4096),
        ("paper-7.8b", "draft", 310_396_928, 4, 16, 16, 128, 4096),
    ],
)
def test_sizes_are_the_published_ones(name, role, parameters, layers, heads, kv_heads, head_dim, context):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(named_config(getattr(SHAPES[name], role), name))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    work = StepWork.of(model)
    assert (work.layers, work.heads, work.kv_heads, work.head_dim) == (layers, heads, kv_heads, head_dim)
    assert model.config.max_position_embeddings == context and work.element == 2


def test_every_named_pair_has_a_published_size():
    counted = test_sizes_are_the_published_ones.pytestmark[0].args[1]
    assert {(name, role) for name, role, *_ in counted} == {(name, role) for name in SHAPES for role in ROLES}


@pytest.mark.parametrize("name", SHAPES)
def test_pair_with_dummy_weights_decodes_as_its_target_alone(small_shapes, name):
    pair = named_pair(name, weights="dummy", device="cpu")
    assert pair.tokenizer is None and pair.draft.config.vocab_size == 93
    prompts = ragged_prompts(5, 9)
    drafted, regular = (bass.generate(pair, prompts, max_new_tokens=6, draft_length=k, eos_token_id=()) for k in (3, 0))
    assert [row.tolist() for row in drafted.sequences] == [row.tolist() for row in regular.sequences]
    if name != "codegen-16b":  # codegen bypasses the attention interface before transformers 5.24
        assert drafted.trace.summary()["attention"] == "pad"


DTYPES = ("float32", "bfloat16", "float16", "bfloat16", "float32")


@pytest.mark.parametrize(("name", "dtype"), [*zip(SHAPES, DTYPES, strict=True)])
def test_saved_dummy_model_computes_the_same(small_shapes, tmp_path, name, dtype):
    pair = named_pair(name, weights="dummy", dtype=dtype, device="cpu")
    ids = torch.arange(3, 51).view(2, 24)
    for role, model in zip(ROLES, pair.models, strict=True):
        model.save_pretrained(tmp_path / role)
        stored = AutoModelForCausalLM.from_pretrained(tmp_path / role, dtype=dtype)
        found = logits(model, ids)
        assert torch.equal(found, logits(stored, ids))
        assert found.isfinite().all() and found.dtype == getattr(torch, dtype)
        assert found.float().std() > 0.05  # ids are distinguishable
        assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("architecture", SUPPORTED)
def test_dummy_model_is_initialised_in_full(architecture, tmp_path):
    tiny_model(architecture).config.save_pretrained(tmp_path)
    dummy = named_pair(tmp_path, weights="dummy", device="cpu").target
    made_in_full = copy.deepcopy(tiny_model(architecture))
    made_in_full.load_state_dict(dummy.state_dict())
    ids = torch.arange(3, 51).view(2, 24)
    assert logits(dummy, ids).isfinite().all()
    torch.testing.assert_close(logits(dummy, ids), logits(made_in_full, ids))


def test_activations_of_forty_layers_are_finite_in_half_precision(small_shapes, monkeypatch):
    for name, dtype in (("paper-7.8b", "bfloat16"), ("opt-13b", "float16")):
        deep = SHAPES[name].target | {"num_hidden_layers": 40}
        monkeypatch.setitem(SHAPES, name, dataclasses.replace(SHAPES[name], target=deep))
        pair = named_pair(name, weights="dummy", dtype=dtype, device="cpu")
        assert logits(pair.target, torch.arange(3, 51).view(2, 24)).isfinite().all()


def test_dtype_is_the_given_dtype_or_the_configs(small_shapes):
    def dtypes(**options):
        pair = named_pair("opt-13b", weights="dummy", device="cpu", **options)
        return {parameter.dtype for model in pair.models for parameter in model.parameters()}

    assert dtypes() == {torch.float32}
    assert dtypes(dtype=torch.bfloat16) == dtypes(dtype="bfloat16") == {torch.bfloat16}
    assert dtypes(dtype="auto") == {torch.float16}


class Made(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.kinds = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.ndim >= 2 and out.is_floating_point() and not out.is_meta:
            self.kinds.add((out.dtype, out.device.type))
        return out


def test_weights_are_made_in_their_dtype_only(small_shapes):
    with Made() as made:
        named_pair("llama-3.1-8b", weights="dummy", dtype="bfloat16", device="cpu")
    assert made.kinds == {(torch.bfloat16, "cpu")}


def test_dummy_weights_repeat_and_leave_the_random_state(small_shapes):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = named_pair("paper-7.8b", weights="dummy", device="cpu")
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    again = named_pair("paper-7.8b", weights="dummy", device="cpu")
    for one, other in zip(first.models, again.models, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_two_dummy_models_of_one_shape_differ():
    pair = named_pair(ASSETS / "draft", draft=ASSETS / "draft", weights="dummy", device="cpu")
    assert not torch.equal(pair.target.lm_head.weight, pair.draft.lm_head.weight)


def test_folders_and_drafters_replace_named_models(small_shapes, tmp_path):
    tiny_model("opt").config.save_pretrained(tmp_path)
    pair = named_pair(tmp_path, weights="dummy", device="cpu")
    assert type(pair.target) is type(tiny_model("opt")) and pair.draft is None and pair.synthetic
    drafter = bass.NgramDrafter()
    assert named_pair("opt-13b", drafter, weights="dummy", device="cpu").draft is drafter
    tiny_model("gpt2").config.save_pretrained(tmp_path)
    pair = named_pair("opt-13b", tmp_path, weights="dummy", device="cpu")
    assert type(pair.draft) is type(tiny_model("gpt2"))


def test_dummy_weights_are_synthetic_also_after_they_were_saved(small_shapes, tmp_path):
    pair = named_pair("paper-7.8b", weights="dummy", device="cpu")
    assert pair.synthetic and in_dtype(pair, torch.bfloat16).synthetic
    assert bass.ModelPair(pair.target).synthetic and bass.ModelPair(tiny_model(), pair.draft).synthetic
    assert name_of(pair.target) == "LlamaForCausalLM paper-7.8b (dummy weights)"
    assert name_of(pair.draft) == "LlamaForCausalLM paper-7.8b draft (dummy weights)"
    pair.target.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    loaded = bass.load_pair(tmp_path / "model")
    assert loaded.synthetic and name_of(loaded.target) == "LlamaForCausalLM model (dummy weights)"
    assert not bass.load_pair().synthetic and not bass.ModelPair(tiny_model()).synthetic


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    for name in PUBLISHED:
        for role, identifier in zip(ROLES, SHAPES[name].ids, strict=True):
            stand_in(name, role).save_pretrained(folder / identifier)
            byte_tokenizer().save_pretrained(folder / identifier)
            as_on_the_hub(folder / identifier / "model.safetensors", SHAPES[name].target["model_type"])
    return folder


@pytest.fixture
def hub(checkpoints, tmp_path, monkeypatch) -> Path:
    """Work in a copy of `checkpoints`, so that hub ids are folders."""
    shutil.copytree(checkpoints, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def stand_in(name: str, role: str) -> PreTrainedModel:
    shape = getattr(SHAPES[name], role)
    changes = {"vocab_size": BYTES, "tie_word_embeddings": shape["tie_word_embeddings"]}
    return tiny_model(shape["model_type"], seed=ROLES.index(role), **changes)


def as_on_the_hub(file: Path, architecture: str) -> None:
    """Change a checkpoint to the format at the time of the model's release."""
    tensors = load_file(file)
    if architecture == "opt":  # the model without its head
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    if architecture == "codegen":  # a mask in every layer
        mask = torch.ones(1, 1, CONTEXT, CONTEXT, dtype=torch.uint8).tril()
        tensors |= {f"transformer.h.{layer}.attn.causal_mask": mask.clone() for layer in range(2)}
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("name", PUBLISHED)
def test_named_pair_is_loaded_from_its_ids_with_its_own_draft(hub, name):
    pair = named_pair(name, dtype="float64", device="cpu")
    for role, model in zip(ROLES, pair.models, strict=True):
        saved = stand_in(name, role).parameters()
        assert all(torch.equal(a, b.double()) for a, b in zip(model.parameters(), saved, strict=True))
    assert not pair.synthetic
    out = bass.generate(pair, "what is new?", max_new_tokens=3, eos_token_id=())
    assert len(out.sequences[0]) == 3 and out.texts[0] is not None


def test_pair_name_precedes_a_folder_name(hub):
    tiny_model("gpt2", vocab_size=BYTES).save_pretrained("opt-13b")
    byte_tokenizer().save_pretrained("opt-13b")
    assert named_pair("opt-13b", device="cpu").target.config.model_type == "opt"
    for folder in ("./opt-13b", Path("opt-13b")):
        assert named_pair(folder, device="cpu").target.config.model_type == "gpt2"


def test_only_masks_of_codegen_are_ignored(hub):
    file = hub / "Salesforce/codegen-16B-mono/model.safetensors"
    save_file(load_file(file) | {"transformer.h.7.attn.bias": torch.ones(2)}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"unexpected tensors: transformer\.h\.7\.attn\.bias$"):
        named_pair("codegen-16b", device="cpu")
    file = hub / "meta-llama/Llama-3.1-8B/model.safetensors"
    save_file(load_file(file) | {"model.layers.0.attn.causal_mask": torch.ones(2)}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"unexpected tensors: model\.layers\.0\.attn\.causal_mask$"):
        named_pair("llama-3.1-8b", device="cpu")


@pytest.mark.parametrize(
    ("name", "weights", "said"),
    [
        ("paper-7.8b", "hub", r"never published: use weights='dummy'.*opt-13b"),
        ("opt-13b", "Dummy", r"weights must be one of hub, dummy; got "),
        ("opt-13b", None, r"weights must be one of hub, dummy; got "),
        ("damaged", "dummy", "cannot read the config of 'damaged'"),
        *((name, "dummy", f"' is no folder with a config.json; .*{', '.join(SHAPES)}") for name in NO_CONFIG),
    ],
)
def test_impossible_pair_is_refused(name, weights, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("damaged", "empty"):
        Path(folder).mkdir()
    Path("damaged/config.json").write_text("{")
    for pair in ((name,), ("opt-13b", name)) if said.startswith(r"' is no folder") else ((name,),):
        with pytest.raises(ValueError, match=said):
            named_pair(*pair, weights=weights)
