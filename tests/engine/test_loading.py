"""Loading a pair: exactly what the checkpoint says, no foreign code, nothing damaged."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny import BYTES, byte_tokenizer, ragged_prompts, tiny_model
from transformers import BertConfig, BertForMaskedLM

import bass_core as bass
from bass_lab.named_pairs import named_pair


def save(folder: Path, model=None, tokenizer=None) -> Path:
    (model or tiny_model(vocab_size=BYTES)).save_pretrained(folder)
    (tokenizer or byte_tokenizer()).save_pretrained(folder)
    return folder


@pytest.fixture
def target(tmp_path) -> Path:
    return save(tmp_path / "target")


@pytest.fixture
def draft(tmp_path) -> Path:
    return save(tmp_path / "draft", tiny_model(vocab_size=BYTES, noise=0.02))


def edit_weights(folder: Path, edit) -> None:
    """Apply `edit` to the checkpoint's {name: tensor}."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_json(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


# --- what is loaded -------------------------------------------------------------------------------


def test_loaded_pair_is_the_saved_one(target, draft):
    pair = bass.load_pair(target, draft=draft)
    saved = bass.ModelPair(tiny_model(vocab_size=BYTES), tiny_model(vocab_size=BYTES, noise=0.02), byte_tokenizer())
    for loaded, model in ((pair.target, saved.target), (pair.draft, saved.draft)):
        assert loaded.state_dict().keys() == model.state_dict().keys()
        assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    outs = [bass.generate(each, "what is new?", max_new_tokens=12, eos_token_id=()) for each in (pair, saved)]
    assert outs[0].sequences[0].tolist() == outs[1].sequences[0].tolist()
    assert outs[0].texts == outs[1].texts


def test_folder_may_be_named_by_a_string(target):
    assert bass.load_pair(str(target)).target.config.vocab_size == BYTES


def test_loaded_models_are_in_evaluation_mode(target, draft):
    pair = bass.load_pair(target, draft=draft)
    assert not any(module.training for model in (pair.target, pair.draft) for module in model.modules())


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("asked", "given"),
    [(None, torch.float32), ("bfloat16", torch.bfloat16), ("float64", torch.float64), (torch.float16, torch.float16)],
    ids=str,
)
def test_dtype_is_the_one_asked_for_and_float32_by_default_on_a_cpu(tmp_path, stored, asked, given):
    folder = save(tmp_path / "model", tiny_model(vocab_size=BYTES, dtype=stored))
    pair = bass.load_pair(folder, draft=folder, dtype=asked, device="cpu")
    assert {p.dtype for model in (pair.target, pair.draft) for p in model.parameters()} == {given}


def test_without_a_draft_drafts_come_from_the_text_itself(target):
    pair = bass.load_pair(target)
    assert pair.draft is None
    out = bass.generate(pair, "abcabcabcabc", max_new_tokens=60, eos_token_id=())
    assert out.trace.steps.drafted.sum() > 0
    drafter = bass.NgramDrafter(longest=2)
    assert bass.load_pair(target, draft=drafter).draft is drafter


def test_draft_without_a_target_is_refused(draft):
    with pytest.raises(ValueError, match="without a target"):
        bass.load_pair(draft=draft)


def test_tied_embeddings_are_not_missing(tmp_path):
    folder = save(tmp_path / "tied", tiny_model(vocab_size=BYTES, tie_word_embeddings=True))
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    pair = bass.load_pair(folder)
    assert pair.target.lm_head.weight is pair.target.model.embed_tokens.weight


def test_checkpoint_in_shards_loads_and_a_lost_shard_is_refused(tmp_path):
    model = tiny_model(vocab_size=BYTES)
    model.save_pretrained(tmp_path, max_shard_size="30kB")
    byte_tokenizer().save_pretrained(tmp_path)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    loaded = bass.load_pair(tmp_path).target.state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in model.state_dict().items())
    shards[-1].unlink()
    with pytest.raises(ValueError, match=str(tmp_path)):
        bass.load_pair(tmp_path)


# --- no foreign code ------------------------------------------------------------------------------


class Plant:
    """Unpickled, it creates a file."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def test_planted_pickle_works(tmp_path):
    pickle.loads(pickle.dumps(Plant(tmp_path / "unpickled")))
    assert (tmp_path / "unpickled").exists()


@pytest.mark.parametrize("write", ["torch", "pickle"])
def test_pickled_checkpoint_is_refused_and_not_unpickled(target, tmp_path, write):
    (target / "model.safetensors").unlink()
    plant = {"lm_head.weight": Plant(tmp_path / "unpickled")}
    with (target / "pytorch_model.bin").open("wb") as file:
        torch.save(plant, file) if write == "torch" else pickle.dump(plant, file)
    with pytest.raises(ValueError, match="safetensors"):
        bass.load_pair(target)
    assert not (tmp_path / "unpickled").exists()


def test_pickled_checkpoint_is_refused_even_if_it_is_harmless(target):
    torch.save(load_file(target / "model.safetensors"), target / "pytorch_model.bin")
    (target / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="safetensors"):
        bass.load_pair(target)


def test_pickled_draft_is_refused_too(target, draft, tmp_path):
    (draft / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Plant(tmp_path / "unpickled")}, draft / "pytorch_model.bin")
    with pytest.raises(ValueError, match="safetensors"):
        bass.load_pair(target, draft=draft)
    assert not (tmp_path / "unpickled").exists()


def test_pickle_beside_safetensors_is_not_unpickled(target, tmp_path):
    torch.save({"lm_head.weight": Plant(tmp_path / "unpickled")}, target / "pytorch_model.bin")
    bass.load_pair(target)
    assert not (tmp_path / "unpickled").exists()


@pytest.fixture
def executed(target, tmp_path, monkeypatch) -> Path:
    """A file that the code planted in the target's folder creates when it is imported."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    file = tmp_path / "executed"
    (target / "planted.py").write_text(
        f"from pathlib import Path\nPath({str(file)!r}).touch()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast\n"
        "class PlantedConfig(LlamaConfig):\n    model_type = 'planted'\n"
        "class PlantedModel(LlamaForCausalLM):\n    config_class = PlantedConfig\n"
        "class PlantedTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    return file


MODEL_MAP = {"AutoConfig": "planted.PlantedConfig", "AutoModelForCausalLM": "planted.PlantedModel"}
TOKENIZER_MAP = {"AutoTokenizer": [None, "planted.PlantedTokenizer"]}


@pytest.mark.parametrize("weights", ["hub", "dummy"])
def test_code_in_a_model_folder_is_not_executed_unless_the_caller_says_so(target, executed, weights):
    edit_json(target / "config.json", model_type="planted", auto_map=MODEL_MAP)
    with pytest.raises(ValueError, match="trust_remote_code"):
        named_pair(target, weights=weights)
    assert not executed.exists()
    assert type(named_pair(target, weights=weights, trust_remote_code=True).target).__name__ == "PlantedModel"
    assert executed.exists()


@pytest.mark.parametrize("weights", ["hub", "dummy"])
def test_code_in_the_folder_of_a_known_architecture_is_not_executed(target, executed, weights):
    edit_json(target / "config.json", auto_map=MODEL_MAP)
    assert type(named_pair(target, weights=weights).target).__name__ == "LlamaForCausalLM"
    assert not executed.exists()


@pytest.mark.parametrize("kind", ["PlantedTokenizer", "PreTrainedTokenizerFast"])
def test_code_of_a_tokenizer_is_not_executed(target, executed, kind):
    edit_json(target / "tokenizer_config.json", auto_map=TOKENIZER_MAP, tokenizer_class=kind)
    try:
        bass.load_pair(target)
    except ValueError as error:
        assert "trust_remote_code" in str(error)
    assert not executed.exists()


# --- damaged or unfit checkpoints -----------------------------------------------------------------


def test_missing_tensor_is_refused(target):
    edit_weights(target, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ValueError, match=r"target' has missing tensors: model\.layers\.1\.mlp\.up_proj\.weight"):
        bass.load_pair(target)


def test_unexpected_tensor_is_refused(target):
    edit_weights(target, lambda tensors: tensors.update({"model.layers.7.stray": torch.ones(2)}))
    with pytest.raises(ValueError, match=r"target' has unexpected tensors: model\.layers\.7\.stray"):
        bass.load_pair(target)


def test_tensor_of_another_shape_is_refused(target):
    edit_weights(target, lambda tensors: tensors.update({"lm_head.weight": torch.ones(BYTES - 1, 32)}))
    with pytest.raises(ValueError, match=r"(?s)target'.*lm_head\.weight"):
        bass.load_pair(target)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_tensor_with_values_that_are_no_numbers_is_refused(target, draft, role, value):
    def spoil(tensors):
        tensors["model.norm.weight"][3] = value

    edit_weights({"target": target, "draft": draft}[role], spoil)
    with pytest.raises(ValueError, match=rf"{role}' has NaN or infinite values in model\.norm\.weight"):
        bass.load_pair(target, draft=draft)


def test_values_beyond_the_range_of_the_dtype_asked_for_are_refused(target):
    def enlarge(tensors):
        tensors["model.norm.weight"][3] = 1e20

    edit_weights(target, enlarge)
    with pytest.raises(ValueError, match="NaN or infinite"):
        bass.load_pair(target, dtype="float16")


@pytest.mark.parametrize("keep", [0, 4, 1000, -100])
def test_truncated_file_is_refused(target, keep):
    file = target / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"cannot load .*target'"):
        bass.load_pair(target)


@pytest.mark.parametrize("config", ["", "[]", "{", "{}"], ids=["empty", "list", "cut off", "no model type"])
def test_damaged_configuration_is_refused(target, config):
    (target / "config.json").write_text(config)
    with pytest.raises(ValueError, match=r"cannot load .*target'"):
        bass.load_pair(target)


def test_folder_or_model_that_is_not_there_is_refused_by_name(tmp_path):
    for name in (tmp_path / "nowhere", "no-such-owner/no-such-model"):
        with pytest.raises(ValueError, match=f"cannot load .*{name}"):
            bass.load_pair(name)


def test_model_without_its_tokenizer_is_refused(tmp_path):
    tiny_model(vocab_size=BYTES).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"tokenizer of '{tmp_path}'"):
        bass.load_pair(tmp_path)


def test_tokenizers_that_differ_are_refused(target, draft):
    byte_tokenizer(swap=(100, 200)).save_pretrained(draft)
    with pytest.raises(ValueError, match="tokenizers differ: id 100"):
        bass.load_pair(target, draft=draft)


def test_encoder_only_checkpoint_is_refused(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = BertConfig(vocab_size=BYTES, initializer_range=0.3, **sizes)
    folder = save(tmp_path / "bert", BertForMaskedLM(config))
    with pytest.raises(ValueError, match="Bert"):
        bass.generate(bass.load_pair(folder), ragged_prompts(5))


def test_refused_load_leaves_nothing_that_a_repaired_checkpoint_would_meet(target, tmp_path):
    shutil.copytree(target, tmp_path / "good")
    edit_weights(target, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ValueError, match="missing"):
        bass.load_pair(target)
    shutil.copy(tmp_path / "good" / "model.safetensors", target)
    assert torch.equal(bass.load_pair(target).target.lm_head.weight, tiny_model(vocab_size=BYTES).lm_head.weight)
