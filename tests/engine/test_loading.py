import json
import pickle
import shutil
import socket
import time
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from tiny import BYTES, byte_tokenizer, feature_head, tiny_model

import bass_core as bass
from bass_core.loading.model_pair import ASSETS
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
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_json(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_loaded_pair_is_the_saved_one(target, draft):
    pair = bass.load_pair(str(target), draft=draft)
    for loaded, noise in zip(pair.models, (0.0, 0.02), strict=True):
        model = tiny_model(vocab_size=BYTES, noise=noise)
        assert loaded.state_dict().keys() == model.state_dict().keys()
        assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())
        assert not any(module.training for module in loaded.modules())
    assert pair.tokenizer("what is new?").input_ids == byte_tokenizer()("what is new?").input_ids


@torch.inference_mode()
def test_capped_scores_stay_capped(tmp_path):
    """transformers' default attention for Gemma 2 ignores the cap."""
    model, ids = tiny_model("gemma2", vocab_size=BYTES), torch.arange(3, 30)[None]
    loaded = bass.load_pair(save(tmp_path, model)).target
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
    assert model.config._attn_implementation == "eager"


def test_dtype_is_the_requested_one_or_float32_on_a_cpu(tmp_path):
    for stored, requested, given in (
        ("bfloat16", None, torch.float32),
        ("float32", "bfloat16", torch.bfloat16),
        ("bfloat16", torch.float64, torch.float64),
    ):
        folder = save(tmp_path / stored, tiny_model(vocab_size=BYTES, dtype=stored))
        pair = bass.load_pair(folder, draft=folder, dtype=requested, device="cpu")
        assert {p.dtype for model in pair.models for p in model.parameters()} == {given}


def test_draft_without_a_target_fits_the_embedded_target():
    assert bass.load_pair(draft="middle_draft").draft.config.num_hidden_layers == 3
    assert bass.load_pair(draft=ASSETS / "deep_draft").draft.config.num_hidden_layers == 8
    assert isinstance(bass.load_pair(draft=bass.SuffixDrafter()).draft, bass.SuffixDrafter)
    for name in ("gpt2", "target", "/nowhere"):
        with pytest.raises(ValueError, match=r"without a target; name both\. The embedded target takes deep_draft,"):
            bass.load_pair(draft=name)


def test_drafters_have_names(target):
    drafter = bass.NgramDrafter(longest=2)
    assert bass.load_pair(target, draft=drafter).draft is drafter
    for name, kind in (("ngram", bass.NgramDrafter), ("suffix", bass.SuffixDrafter), (None, bass.NgramDrafter)):
        assert type(bass.load_pair(target, draft=name).drafter) is kind


def test_feature_head_is_loaded_from_its_folder(target, tmp_path):
    pair = bass.load_pair(target)
    head = feature_head(pair.target)
    head.save_pretrained(tmp_path)
    loaded = bass.load_pair(target, draft=tmp_path).draft
    assert isinstance(loaded, bass.FeatureDrafter)
    theirs = loaded.head.state_dict()
    assert theirs and all(torch.equal(tensor, theirs[name]) for name, tensor in head.state_dict().items())
    (tmp_path / "model.safetensors").unlink()
    save_file({name: t for name, t in theirs.items() if name != "mix.weight"}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing tensors: mix\.weight"):
        bass.load_pair(target, draft=tmp_path)


def test_tied_embeddings_are_not_missing(tmp_path):
    folder = save(tmp_path, tiny_model(vocab_size=BYTES, tie_word_embeddings=True))
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    pair = bass.load_pair(folder)
    assert pair.target.lm_head.weight is pair.target.model.embed_tokens.weight


def test_shards_are_loaded_and_a_lost_one_is_refused(target):
    (target / "model.safetensors").unlink()
    tiny_model(vocab_size=BYTES).save_pretrained(target, max_shard_size="30kB")
    shards = sorted(target.glob("model-*.safetensors"))
    assert len(shards) > 1
    loaded = bass.load_pair(target).target.state_dict()
    assert all(torch.equal(each, loaded[name]) for name, each in tiny_model(vocab_size=BYTES).state_dict().items())
    shards[-1].unlink()
    with pytest.raises(ValueError, match=str(target)):
        bass.load_pair(target)


class Plant:
    """Unpickling a Plant creates a file."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


@pytest.mark.parametrize(
    ("role", "write"),
    [("target", lambda plant, file: file.write_bytes(pickle.dumps(plant))), ("draft", torch.save)],
    ids=["target", "draft"],
)
def test_pickled_checkpoint_is_refused_and_not_unpickled(target, draft, tmp_path, role, write):
    folder, plant = {"target": target, "draft": draft}[role], Plant(tmp_path / "unpickled")
    write({"lm_head.weight": plant}, folder / "pytorch_model.bin")
    bass.load_pair(target, draft=draft)  # safetensors take precedence
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for _ in ("planted", "harmless"):
        with pytest.raises(ValueError, match="safetensors"):
            bass.load_pair(target, draft=draft)
        torch.save(tensors, folder / "pytorch_model.bin")
    assert not plant.file.exists()
    pickle.loads(pickle.dumps(plant))
    assert plant.file.exists()


def in_shards(folder: Path, shard: str) -> Path:
    tensors = load_file(folder / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, shard)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / shard).parent.mkdir(exist_ok=True)
    return (folder / "model.safetensors").rename(folder / shard)


def put_into_hub(hub: Path, name: str, **revisions: Path) -> Path:
    """Add a model to a hub cache. Return the reference file of `main`, which names the first revision."""
    model = hub / f"models--owner--{name}"
    for commit, folder in revisions.items():
        shutil.copytree(folder, model / "snapshots" / commit)
    (model / "refs").mkdir()
    (model / "refs/main").write_text(next(iter(revisions)))
    return model / "refs/main"


def test_index_names_only_safetensors_of_its_folder(draft, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("a file was unpickled"))
    for number, shard in enumerate(("weights.bin", "../elsewhere.safetensors", "below/s.safetensors", ".safetensors")):
        target = Path(shutil.copytree(draft, tmp_path / f"{number}/target"))
        in_shards(target, shard)
        with pytest.raises(ValueError, match=f"target'.* names '{shard}' as a weights file"):
            bass.load_pair(target)


def test_config_may_name_other_safetensors_of_its_folder(target):
    (target / "model.safetensors").rename(target / "other.safetensors")
    edit_json(target / "config.json", transformers_weights="other.safetensors")
    assert torch.equal(bass.load_pair(target).target.lm_head.weight, tiny_model(vocab_size=BYTES).lm_head.weight)


def test_hub_models_are_checked_and_loaded_from_one_revision(target, tmp_path, monkeypatch):
    """Without network: `main` of a cached model moves to a bad revision after the check."""
    hub, good, bad = tmp_path / "hub", "a" * 40, "b" * 40
    main = put_into_hub(hub, "model", **{good: target, bad: target})
    snapshot = hub / f"models--owner--model/snapshots/{bad}"
    edit_weights(snapshot, lambda tensors: tensors["lm_head.weight"].zero_())
    in_shards(snapshot, "weights.bin")
    read = transformers.AutoConfig.from_pretrained

    def read_and_moved(*arguments, **options):
        main.write_text(bad)
        return read(*arguments, **options)

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", read_and_moved)
    loaded = bass.load_pair("owner/model").target
    assert main.read_text() == bad
    assert torch.equal(loaded.lm_head.weight, tiny_model(vocab_size=BYTES).lm_head.weight)
    with pytest.raises(ValueError, match=r"'owner/model' \(safetensors .* only\): the checkpoint names 'weights.bin'"):
        bass.load_pair("owner/model")


def test_hub_out_of_reach_costs_one_attempt_and_cached_models_load(target, tmp_path, monkeypatch):
    attempts = []

    def refuse(address, *_, **__):
        attempts.append(address)
        raise ConnectionRefusedError("refused")

    for switch, value in {"HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_TELEMETRY": True}.items():
        monkeypatch.setattr(constants, switch, value)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("a request was repeated"))
    put_into_hub(tmp_path / "hub", "model", **{"a" * 40: target})
    assert bass.load_pair("owner/model", "owner/model").tokenizer is not None and len(attempts) == 1
    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights read"))
    for count, names in enumerate([("no/body",), (target, "no/body"), ("owner/model", "no/body")], 2):
        said = r"'no/body': no such folder, not in the hub's cache, and https?://.* cannot be reached \(.*refused"
        with pytest.raises(ValueError, match=said):
            bass.load_pair(*names)
        assert len(attempts) == count and not constants.HF_HUB_OFFLINE


@pytest.mark.parametrize("weights", ["hub", "dummy"])
def test_kernels_of_a_config_are_fetched_only_by_permission(target, weights):
    original = (target / "config.json").read_text()
    for field, wanted in (
        ("experts_implementation", "owner/kernel"),
        ("_attn_implementation", "flash_attention_2"),
        ("attn_implementation", {"": "owner/kernel"}),
        ("attn_implementation", "owner/kernel"),
    ):
        (target / "config.json").write_text(original)
        edit_json(target / "config.json", **{field: wanted})
        with pytest.raises(ValueError, match=rf"{field}='(owner/kernel|flash_attention_2)'.*trust_remote_code=True"):
            named_pair(target, weights=weights)
    with pytest.raises((ValueError, ImportError), match="`kernels` is either not installed"):  # kernels were requested
        named_pair(target, weights=weights, trust_remote_code=True)


@pytest.fixture
def executed(target, tmp_path, monkeypatch) -> Path:
    """Plant code in the target's folder. An import of the code creates the returned file."""
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


@pytest.mark.parametrize("weights", ["hub", "dummy"])
def test_code_in_a_model_folder_runs_only_by_permission(target, executed, weights):
    planted = {"AutoConfig": "planted.PlantedConfig", "AutoModelForCausalLM": "planted.PlantedModel"}
    edit_json(target / "config.json", auto_map=planted)
    assert type(named_pair(target, weights=weights).target).__name__ == "LlamaForCausalLM"  # a known architecture
    edit_json(target / "config.json", model_type="planted")
    with pytest.raises(ValueError, match="trust_remote_code"):
        named_pair(target, weights=weights)
    assert not executed.exists()
    assert type(named_pair(target, weights=weights, trust_remote_code=True).target).__name__ == "PlantedModel"
    assert executed.exists()


@pytest.mark.parametrize("kind", ["PlantedTokenizer", "PreTrainedTokenizerFast"])
def test_code_of_a_tokenizer_is_not_executed(target, executed, kind):
    planted = {"AutoTokenizer": [None, "planted.PlantedTokenizer"]}
    edit_json(target / "tokenizer_config.json", auto_map=planted, tokenizer_class=kind)
    try:
        bass.load_pair(target)
    except ValueError as error:
        assert "trust_remote_code" in str(error)
    assert not executed.exists()


NORM, HEAD = "model.norm.weight", "lm_head.weight"
DAMAGED = {  # role, edit of the checkpoint's tensors, words of the error
    "missing": ("target", lambda tensors: tensors.pop(NORM), f" has missing tensors: {NORM}"),
    "unexpected": ("draft", lambda tensors: tensors.update(stray=torch.ones(2)), " has unexpected tensors: stray"),
    "shape": ("target", lambda tensors: tensors.update({HEAD: torch.ones(9, 32)}), f".*{HEAD}"),
    "NaN": ("target", lambda tensors: tensors[NORM][3].fill_(torch.nan), f" has NaN or infinite values in {NORM}"),
    "infinite": ("draft", lambda tensors: tensors[HEAD][3].fill_(-torch.inf), f" has NaN or infinite values in {HEAD}"),
    "out of float16": ("target", lambda tensors: tensors[HEAD][3].fill_(1e20), "NaN or infinite"),
    "I8": ("target", lambda tensors: tensors.update({HEAD: tensors[HEAD].to(torch.int8)}), f"{HEAD} is stored as I8"),
    "I64": ("target", lambda tensors: tensors.update({HEAD: tensors[HEAD].long()}), f"{HEAD} is stored as I64"),
    "BOOL": ("target", lambda tensors: tensors.update({HEAD: tensors[HEAD].bool()}), f"{HEAD} is stored as BOOL"),
    "NaN in 8 bits": (
        "target",
        lambda tensors: tensors.update({HEAD: tensors[HEAD].fill_(torch.nan).to(torch.float8_e4m3fn)}),
        f" has NaN or infinite values in {HEAD}",
    ),
    "C64": ("target", lambda tensors: tensors.update({HEAD: tensors[HEAD] + 0j}), f"{HEAD} is stored as "),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_tensors_are_refused(target, draft, case):
    role, edit, message = DAMAGED[case]
    edit_weights({"target": target, "draft": draft}[role], edit)
    with pytest.raises(ValueError, match=f"(?s){role}'.*{message}"):
        bass.load_pair(target, draft=draft, dtype="float16" if case == "out of float16" else None)


PANICS = "tokenizer of .*target': the tokenizer failed on a text: "


def gives_up_on(letter: str) -> dict:
    return {"type": "Replace", "pattern": {"Regex": f"(?:{letter}+{letter}+)+\\d"}, "content": ""}


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        *(("model.safetensors", keep, r"cannot load .*target'") for keep in (0, 4, 1000, -100)),
        *(("config.json", text, r"cannot load .*target'") for text in ("", "[]", "{", "{}")),
        ("config.json", {"quantization_config": {"quant_method": "new"}}, r"quantization_config\.quant_method='new'"),
        ("config.json", {"quantization_config": {"bits": 4}}, r"quantization_config\.quant_method=None"),
        ("config.json", {"text_config": {"quantization_config": {"quant_method": "x"}}}, r"text_config\.quantization"),
        ("config.json", {"dtype": "float12"}, "dtype in config.json .* got 'float12'"),
        ("config.json", {"torch_dtype": "nn"}, "torch_dtype in config.json .* got 'nn'"),
        ("config.json", {"dtype": "int8"}, "dtype in config.json .* got 'int8'"),
        *(
            ("config.json", {"transformers_weights": named}, f"target'.* names '{named}' as a weights file")
            for named in ("../other.safetensors", "other.bin", "model.safetensors.index.json")
        ),
        ("tokenizer.json", {"normalizer": gives_up_on("q")}, f"{PANICS}.*retry-limit"),
        ("tokenizer.json", {"decoder": {"type": "Strip", "content": "h", "start": 5, "stop": 5}}, f"{PANICS}index out"),
    ],
    ids=str,
)
def test_damaged_files_are_refused(target, file, changes, message):
    """changes: new fields, the text of the file, or the remaining number of bytes."""
    path = target / file
    if isinstance(changes, dict):
        edit_json(path, **changes)
    else:
        path.write_bytes(path.read_bytes()[:changes] if isinstance(changes, int) else changes.encode())
    for weights in ("hub", "dummy") if "quantization" in message or "dtype" in message else ("hub",):
        with pytest.raises(ValueError, match=message):
            named_pair(target, weights=weights)


def test_ignored_integer_tensors_are_no_weights(tmp_path):
    folder = save(tmp_path, tiny_model("gpt2", vocab_size=BYTES))
    mask = torch.ones(1, 1, 8, 8, dtype=torch.uint8).tril()
    edit_weights(folder, lambda tensors: tensors.update({"transformer.h.0.attn.bias": mask}))
    assert bass.load_pair(folder).target.config.model_type == "gpt2"


ABSURD = {
    "llama": {"num_hidden_layers": 10**7, "vocab_size": 10**8, "hidden_size": 10**6, "head_dim": 10**9},
    "gpt2": {"n_layer": 10**18, "n_positions": 10**8, "num_labels": 10**10},
    "gpt_neo": {"attention_types": [[["global", "local"], 10**10]], "max_position_embeddings": 2**13},  # large buffers
    "gptj": {"n_positions": 10**9},
    "opt": {"num_hidden_layers": 100, "ffn_dim": 10**8},
    "mixtral": {"num_local_experts": 10**7},
    "switch_transformers": {"num_experts": 10**7},  # one module each
}


@pytest.mark.parametrize("architecture", ABSURD)
def test_absurd_sizes_are_refused_at_once(tmp_path, architecture):
    if architecture == "switch_transformers":
        sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2}
        sizes |= {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
        config = transformers.SwitchTransformersConfig(vocab_size=BYTES, num_experts=2, **sizes)
        model = transformers.SwitchTransformersForConditionalGeneration(config)
    else:
        model = tiny_model(architecture, vocab_size=BYTES)
    folder = save(tmp_path, model)
    original = (folder / "config.json").read_text()
    for field, value in ABSURD[architecture].items():
        (folder / "config.json").write_text(original)
        edit_json(folder / "config.json", **{field: value})
        for weights in ("hub", "dummy") if (field, value) == ("num_hidden_layers", 10**7) else ("hub",):
            began = time.process_time()  # excludes the time of other programs
            words = rf"config\.json (has {field}=\d+|describes a model of [0-9,]+ (para|modules|bytes))"
            with pytest.raises(ValueError, match=words):
                named_pair(folder, weights=weights)
            assert time.process_time() - began < 1


def test_dtype_that_no_model_can_have_is_refused(target):
    for dtype in ("int8", "nn", "float12", "complex64", 3, torch.int64):
        for weights in ("hub", "dummy"):
            with pytest.raises(ValueError, match="dtype must be a floating-point dtype of torch"):
                named_pair(target, weights=weights, dtype=dtype)


@pytest.mark.parametrize("architecture", ["gemma3", "gpt2", "codegen", "mixtral"])
def test_check_of_the_files_leaves_the_config_alone(tmp_path, architecture):
    model = tiny_model(architecture, vocab_size=BYTES)
    loaded, plain = bass.load_pair(save(tmp_path, model)).target, type(model).from_pretrained(tmp_path)
    assert loaded.config.to_dict() == plain.config.to_dict()
    assert loaded.config._attn_implementation == plain.config._attn_implementation


def test_absent_tokenizer_is_refused_by_name(tmp_path):
    tiny_model(vocab_size=BYTES).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"tokenizer of '{tmp_path}'"):
        bass.load_pair(tmp_path)


def test_draft_with_another_tokenizer_is_refused(target, draft):
    for role, token in (("bos_token", "<pad>"), ("eos_token", "<new>")):
        edit_json(draft / "tokenizer_config.json", **{role: token})
        with pytest.raises(ValueError, match=f"tokenizers differ: {role} is '</?s>' for the target and '{token}'"):
            bass.load_pair(target, draft=draft)
        edit_json(draft / "tokenizer_config.json", **{role: None})  # many tokenizers have no BOS
        bass.load_pair(target, draft=draft)


def test_tokenizer_that_panics_on_one_prompt_is_a_value_error(target):
    edit_json(target / "tokenizer.json", normalizer=gives_up_on("ж"))
    pair = bass.load_pair(target)
    bass.generate(pair, "ж" * 5, max_new_tokens=2)
    with pytest.raises(ValueError, match=r"the tokenizer failed on a text: .*retry-limit"):
        bass.generate(pair, ["plain", "ж" * 500], max_new_tokens=2)


def test_models_in_place_of_names_are_refused():
    with pytest.raises(TypeError, match=r"load_pair takes names and folders, got LlamaForCausalLM; .*ModelPair"):
        bass.load_pair(tiny_model())
    with pytest.raises(TypeError, match=r"pass the tokenizer by name: ModelPair\(model, tokenizer=tokenizer\)"):
        bass.ModelPair(tiny_model(), byte_tokenizer())
