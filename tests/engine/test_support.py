"""What docs/SUPPORT.md says of loading: every row is shown by the test that it names."""

import ast
import copy
import os
import shutil
import subprocess
import sys
from pathlib import Path

import models_page
import peft
import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from decoded import PROMPTS, by_transformers, greedy
from test_loading import draft, save, target  # noqa: F401, pytest finds fixtures by name
from tiny import BYTES, tiny_model, with_adapter

import bass_core as bass
from bass_core import checkpoints, probe
from bass_core.models import place
from bass_lab import pairs
from bass_lab.named_pairs import named_pair


def prompt_tuning():
    return peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)


# --- the table ---


def shown_in(folder: Path) -> dict[str, ast.FunctionDef]:
    """The tests in a folder's files, by name."""
    trees = [ast.parse(path.read_text("utf-8")) for path in folder.glob("test_*.py")]
    functions = [each for tree in trees for each in tree.body if isinstance(each, ast.FunctionDef)]
    return {each.name: each for each in functions if each.name.startswith("test_")}


ROWS = models_page.rows("support", models_page.SUPPORT)


@pytest.mark.parametrize(("line", "outcome", "how", "test"), ROWS, ids=[row[0] for row in ROWS])
def test_row_of_the_table_is_what_its_test_shows(line, outcome, how, test):
    shown = shown_in(Path(__file__).parent)[test.strip("`")]
    refuses = any(ast.unparse(each.func) == "pytest.raises" for each in ast.walk(shown) if isinstance(each, ast.Call))
    assert outcome == ("refused" if refuses else "works")


# --- devices ---


@pytest.mark.parametrize(
    "device_map", ["cpu", torch.device("cpu"), {"": "cpu"}, {"model": "cpu", "lm_head": torch.device("cpu")}], ids=str
)
@pytest.mark.parametrize("weights", ["hub", "dummy"])
def test_device_map_of_one_device_is_that_device(target, device_map, weights, monkeypatch):  # noqa: F811
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # where no device would be the GPU
    assert named_pair(target, device_map=device_map, weights=weights, dtype="float32").device == torch.device("cpu")


@pytest.mark.parametrize("device_map", ["auto", "balanced", "sequential"])
def test_device_map_auto_is_the_one_device(target, device_map):  # noqa: F811
    assert bass.load_pair(target, device_map=device_map).device == bass.load_pair(target).device


def test_device_map_auto_of_several_gpus_is_refused(target, monkeypatch):  # noqa: F811
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"'auto' spreads a model over 2 GPUs, .* write device_map='cuda:0'"):
        bass.load_pair(target, device_map="auto")


@pytest.mark.parametrize("device_map", [{"model": 0, "lm_head": 1}, {"model": "cuda:0", "lm_head": "cuda:1"}, {}])
def test_device_map_of_several_devices_is_refused(target, device_map):  # noqa: F811
    with pytest.raises(ValueError, match=r"device_map=.* names (2|0) devices, and a pair is on one: write device_map="):
        bass.load_pair(target, device_map=device_map)


@pytest.mark.parametrize("device_map", ["disk", {"model": "cpu", "lm_head": "disk"}, {"model": 0, "lm_head": "cpu"}])
def test_device_map_that_offloads_is_refused(target, device_map):  # noqa: F811
    with pytest.raises(ValueError, match=r"offloads weights.*write device_map='cuda:0'.*quantization_config"):
        bass.load_pair(target, device_map=device_map)


@pytest.mark.parametrize("where", [{"device": "cpu", "device_map": 0}, {"device": "cuda:1", "device_map": {"": "cpu"}}])
def test_device_and_device_map_that_differ_are_refused(target, where):  # noqa: F811
    with pytest.raises(ValueError, match=r"device=.* and device_map=.* name the same thing and differ"):
        bass.load_pair(target, **where)


@pytest.mark.parametrize("where", [{"device": "gpu0"}, {"device_map": "gpu0"}, {"device_map": {"": None}}])
def test_device_that_torch_does_not_know_is_refused(target, where):  # noqa: F811
    with pytest.raises(ValueError, match=r"device(_map)? must be a device such as 'cuda:0', 'cpu' or 0; got"):
        bass.load_pair(target, **where)


@pytest.mark.parametrize("where", [{"device": "cuda"}, {"device": 0}, {"device_map": {"": 1}}])
def test_gpu_that_is_not_there_is_refused(target, where, monkeypatch):  # noqa: F811
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"device is cuda(:\d)?, and torch finds no GPU here"):
        bass.load_pair(target, **where)


@pytest.mark.parametrize("where", [{"device": "cuda:2"}, {"device": 2}, {"device_map": {"": 2}}])
def test_gpu_that_is_one_too_many_is_refused(target, where, monkeypatch):  # noqa: F811
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"device is cuda:2, and torch finds 2 here, from cuda:0 on"):
        bass.load_pair(target, **where)


def test_a_gpu_is_the_same_by_its_number(target, monkeypatch):  # noqa: F811
    for name, found in (("is_available", True), ("device_count", 2), ("current_device", 1)):
        monkeypatch.setattr(torch.cuda, name, lambda found=found: found)
    assert place("cuda", None, {"": 1})[0] == place("cuda", None)[0] == torch.device("cuda:1")
    with pytest.raises(ValueError, match="device=cuda:1 and device_map=cuda:0 name the same thing and differ"):
        place("cuda", None, 0)


WAYS = (
    {}, {"draft_length": 0}, {"temperature": 0.8}, {"temperature": 0.8, "verification": "coupled"}, {"trace": "tokens"},
    {"acceptance": "synthetic:0.8"}, {"attention": "eager"}, {"attention": "split"},
    {"draft_length": bass.BassHeuristic()},
    {"temperature": 1.0, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2},
)  # fmt: skip


@pytest.mark.parametrize("name", [None, "ngram", "suffix", "layers:2", "target:int4", "feature_head"])
def test_the_default_device_is_none_of_ours(name):
    """A notebook may have set it to a GPU, and models may be on a CPU all the same, as ids are."""
    ways = WAYS[:3] if name else WAYS
    with torch.device("meta"):
        pair = bass.load_pair(draft=name, device="cpu")
        found = [bass.generate(pair, PROMPTS, max_new_tokens=6, **way).texts for way in ways]
    assert found[:3] == [bass.generate(pair, PROMPTS, max_new_tokens=6, **way).texts for way in ways[:3]]


def test_the_default_device_is_none_of_what_reads_sources():
    with torch.device("meta"):
        pair = bass.load_pair("encoder_decoder", device="cpu")
        found = bass.generate(pair, PROMPTS, max_new_tokens=6).texts
        encoding = {"input_ids": [[5, 6, 7], [8, 9, 0]], "attention_mask": [[1, 1, 1], [1, 1, 0]]}
        bass.generate(pair, encoding, max_new_tokens=6)
    assert found == bass.generate(pair, PROMPTS, max_new_tokens=6).texts


@pytest.mark.parametrize("where", [{"device": "mps"}, {"device": torch.device("mps")}, {"device_map": {"": "mps"}}])
@pytest.mark.parametrize("weights", ["hub", "dummy"])
def test_mps_is_refused_before_anything_is_read(where, weights):
    with pytest.raises(ValueError, match=r"device is mps, which has no float64; verification needs it.*device='cpu'"):
        named_pair("nowhere/at-all", **where, weights=weights)


def placed(model, **devices):
    """A copy of the model whose weights say that they are elsewhere, by name of the module; "" of all others."""

    def elsewhere(device):
        return type("Elsewhere", (torch.nn.Parameter,), {"device": torch.device(device)})

    model = copy.deepcopy(model)
    for module_name, module in model.named_modules():
        device = devices.get(module_name, devices["rest"])
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = elsewhere(device)(parameter.data)
    return model


def test_model_on_several_devices_is_refused():
    model = placed(tiny_model(vocab_size=BYTES), lm_head="cuda:1", rest="cuda:0")
    with pytest.raises(ValueError, match=r"target LlamaForCausalLM is on several devices \(cuda:0, cuda:1\)"):
        bass.ModelPair(model)


def test_model_on_mps_is_refused():
    with pytest.raises(ValueError, match="the device of target LlamaForCausalLM is mps, which has no float64"):
        bass.ModelPair(placed(tiny_model(vocab_size=BYTES), rest="mps"))


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("to", ["memory", "disk"])
def test_model_that_accelerate_offloads_is_refused(role, to, tmp_path):
    model = copy.deepcopy(tiny_model(vocab_size=BYTES))
    if to == "memory":
        model = cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        model = dispatch_model(model, {"model": "cpu", "lm_head": "disk"}, main_device="cpu", offload_dir=tmp_path)
    with pytest.raises(ValueError, match=f"{role} LlamaForCausalLM is offloaded by accelerate; .*device_map='cuda:0'"):
        bass.ModelPair(**{"target": tiny_model(vocab_size=BYTES), role: model})


# --- dtypes, revisions, folders ---


def test_torch_dtype_is_dtype(target, draft):  # noqa: F811
    for given in ({"torch_dtype": "bfloat16"}, {"torch_dtype": torch.bfloat16, "dtype": "bfloat16"}):
        assert {model.dtype for model in bass.load_pair(target, draft, **given).models} == {torch.bfloat16}


def test_dtype_and_torch_dtype_that_differ_are_refused(target):  # noqa: F811
    with pytest.raises(ValueError, match="dtype=float32 and torch_dtype=bfloat16 name the same thing and differ"):
        bass.load_pair(target, dtype="float32", torch_dtype="bfloat16")


def test_revision_is_that_of_the_model_it_is_given_for(target, draft, tmp_path):  # noqa: F811
    """Without network: two revisions of each of two models lie in the hub's cache."""
    hub, main, other = tmp_path / "hub", "a" * 40, "b" * 40
    for name, folders in (("target", (target, draft)), ("draft", (draft, target))):
        for commit, folder in zip((main, other), folders, strict=True):
            shutil.copytree(folder, hub / f"models--owner--{name}/snapshots/{commit}")
        (hub / f"models--owner--{name}/refs").mkdir()
        (hub / f"models--owner--{name}/refs/main").write_text(main)
    load = f"""
import bass_core as bass
for given in ({{}}, {{"revision": "{other}"}}, {{"draft_revision": "{other}"}}):
    pair = bass.load_pair("owner/target", "owner/draft", **given)
    print(*[model.lm_head.weight.sum().item() for model in pair.models])
"""
    environment = os.environ | {"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run([sys.executable, "-c", load], env=environment, capture_output=True, text=True)
    first, second = (bass.load_pair(each).target.lm_head.weight.sum().item() for each in (target, draft))
    assert ran.stdout == f"{first} {second}\n{second} {second}\n{first} {first}\n", ran.stderr


def test_revision_of_a_folder_is_refused(target, draft):  # noqa: F811
    for given in ({"revision": "v1"}, {"draft_revision": "v1"}):
        with pytest.raises(ValueError, match="is a folder, which has no revisions; leave out revision='v1'"):
            bass.load_pair(target, draft, **given)
    with pytest.raises(ValueError, match="draft_revision='v1' is of a draft on the hub; got draft=None"):
        bass.load_pair(target, draft_revision="v1")
    with pytest.raises(ValueError, match="weights='dummy' are made, not read: leave out revision"):
        named_pair(target, weights="dummy", revision="v1")


@pytest.mark.parametrize("name", ["/nope", "./nope", "../nope", "~/nope", "no/such/folder", "nope/", Path("nope")])
def test_path_that_is_not_there_is_refused_as_that(name, monkeypatch):
    monkeypatch.setattr("bass_core.checkpoints.cached_file", lambda *args, **kwargs: pytest.fail("the hub was asked"))
    with pytest.raises(ValueError, match=f"cannot load '{name}': no such folder"):
        bass.load_pair(name)


def test_file_instead_of_its_folder_is_refused(target):  # noqa: F811
    with pytest.raises(ValueError, match=r"model\.safetensors': it is a file; name the folder"):
        bass.load_pair(target / "model.safetensors")


def test_name_that_is_nowhere_is_refused_in_one_line_that_says_both():
    with pytest.raises(ValueError, match=r"'no-owner/no-model': there is no such folder here, and from the hub: .+\Z"):
        bass.load_pair("no-owner/no-model")


def test_a_copy_in_full_precision_has_no_flash_attention():
    """Which takes half precision alone."""
    model = copy.deepcopy(tiny_model(vocab_size=BYTES))
    model.config._attn_implementation = "flash_attention_2"
    assert checkpoints.in_dtype(model, torch.bfloat16).config._attn_implementation == "flash_attention_2"
    pair = bass.ModelPair(model)
    assert probe._in_full_precision(model).config._attn_implementation == "sdpa"
    assert pairs.in_dtype(pair, torch.float32).target.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "flash_attention_2" and model.dtype == torch.bfloat16


@pytest.mark.parametrize(("number", "fine"), [(1.5, True), (float("nan"), False)])
def test_numbers_of_eight_bits_are_looked_at_too(number, fine):
    assert checkpoints._is_finite(torch.tensor([2.0, number]).to(torch.float8_e4m3fn)) == fine


# --- adapters ---


def test_peft_model_is_decoded_with_its_adapter():
    adapted, plain = with_adapter(), tiny_model(vocab_size=BYTES)
    for pair in (bass.ModelPair(adapted, plain), bass.ModelPair(adapted, adapted)):
        assert greedy(pair) == by_transformers(adapted.get_base_model()) != by_transformers(plain)
    with adapted.disable_adapter():
        assert greedy(bass.ModelPair(adapted)) == by_transformers(plain)


def test_loaded_adapter_is_decoded(tmp_path):
    adapted, model = with_adapter(), copy.deepcopy(tiny_model(vocab_size=BYTES))
    adapted.save_pretrained(tmp_path)
    model.load_adapter(tmp_path)
    assert greedy(bass.ModelPair(model)) == by_transformers(adapted.get_base_model())


@pytest.mark.parametrize("role", ["target", "draft"])
def test_adapter_outside_of_the_layers_is_refused(role):
    pair = {"target": tiny_model(vocab_size=BYTES), role: with_adapter(prompt_tuning())}
    with pytest.raises(ValueError, match=f"{role} is a PeftModelForCausalLM with a PROMPT_TUNING adapter"):
        bass.ModelPair(**pair)


def test_adapter_outside_of_the_layers_is_refused_in_generate():
    model, ids = with_adapter(prompt_tuning()), PROMPTS[0][None]
    with pytest.raises(ValueError, match="gets its inputs from a PeftModelForCausalLM"):
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            custom_generate=bass.bass_generate,
            draft_model="ngram",
        )


def test_folder_of_an_adapter_is_refused(tmp_path):
    with_adapter().save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"it holds an adapter \(adapter_config\.json\); load the model that it is for"
    ):
        bass.load_pair(tmp_path)
