"""docs/SUPPORT.md: each row of the table has a test. Devices, dtypes, revisions and adapters of models."""

import ast
import copy
from pathlib import Path

import huggingface_hub
import models_page
import peft
import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from decoded import PROMPTS, by_transformers, greedy
from test_loading import draft, put_into_hub, save, target  # noqa: F401, pytest finds fixtures by name
from tiny import BYTES, tiny_model, with_adapter

import bass_core as bass
from bass_core.loading.checkpoints import place
from bass_core.model import probe
from bass_core.model.transformers_internals import in_dtype
from bass_lab import pairs
from bass_lab.named_pairs import named_pair
from bass_lab.synthetic_acceptance import SyntheticAcceptance


def test_table_outcomes_equal_the_tests():
    trees = [ast.parse(path.read_text("utf-8")) for path in Path(__file__).parents[1].glob("*/test_*.py")]
    shown = {each.name: each for tree in trees for each in tree.body if isinstance(each, ast.FunctionDef)}
    rows = models_page.rows("support", models_page.SUPPORT)
    assert len(rows) > 30
    for line, outcome, _, test in rows:
        calls = [ast.unparse(each.func) for each in ast.walk(shown[test.strip("`")]) if isinstance(each, ast.Call)]
        assert outcome == ("refused" if "pytest.raises" in calls else "works"), line


def gpus(monkeypatch, count: int) -> None:
    for name, found in (("is_available", count > 0), ("device_count", count), ("current_device", count - 1)):
        monkeypatch.setattr(torch.cuda, name, lambda found=found: found)


@pytest.mark.parametrize(("device", "weights"), [("cpu", "hub"), (torch.device("cpu"), "dummy")], ids=str)
def test_device_is_the_requested_one(target, device, weights, monkeypatch):  # noqa: F811
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # the default device would be the GPU
    assert named_pair(target, device=device, weights=weights, dtype="float32").device == torch.device("cpu")


@pytest.mark.parametrize(
    ("gpu_count", "device", "message"),
    [
        (2, "gpu0", r"device must be a device such as 'cuda:0', 'cpu' or 0; got"),
        (2, {"": 0}, r"device must be a device such as 'cuda:0', 'cpu' or 0; got"),
        (0, "cuda", r"device is cuda, but torch finds no GPU"),
        (2, 2, r"device is cuda:2, but torch finds 2 GPUs, numbered from cuda:0"),
        (0, "mps", r"device is mps, which has no float64; verification needs float64.*device='cpu'"),
    ],
    ids=str,
)
@pytest.mark.parametrize("weights", ["hub", "dummy"])
def test_device_is_refused_before_anything_is_read(gpu_count, device, message, weights, monkeypatch):
    gpus(monkeypatch, gpu_count)
    with pytest.raises(ValueError, match=message):
        named_pair("nowhere/at-all", device=device, weights=weights)


def test_current_gpu_is_the_same_by_its_number(monkeypatch):
    gpus(monkeypatch, 2)
    assert place(1, None)[0] == place("cuda", None)[0] == torch.device("cuda:1")


WAYS = (
    {}, {"draft_length": 0}, {"temperature": 0.8}, {"acceptance": SyntheticAcceptance.named("synthetic:0.8")},
    {"temperature": 0.8, "verification": "coupled", "trace": "tokens", "attention": "eager"},
    {"draft_length": bass.BassHeuristic(), "attention": "split"}
    | {"temperature": 1.0, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2},
)  # fmt: skip


OTHERS = [pytest.param(name, marks=pytest.mark.ci) for name in ("ngram", "suffix", "target:int4", "encoder_decoder")]


@pytest.mark.parametrize("name", [None, "feature_head", *OTHERS])
def test_default_device_of_torch_is_not_used(name):
    """A notebook may set torch's default device to a GPU while models and ids are on a CPU."""
    options = [{"max_new_tokens": 4} | way for way in (WAYS[1:3] if name else WAYS)]
    role = "target" if name == "encoder_decoder" else "draft"
    with torch.device("meta"):
        pair = bass.load_pair(**{role: name}, device="cpu")
        found = [bass.generate(pair, PROMPTS, **each).texts for each in options]
        padded = {"input_ids": [[5, 6, 7], [8, 9, 0]], "attention_mask": [[1, 1, 1], [1, 1, 0]]}
        bass.generate(pair, padded, max_new_tokens=4)
    assert found[:2] == [bass.generate(pair, PROMPTS, **each).texts for each in options[:2]]


def placed(model, **devices):
    """Return a copy with weights that report these devices, by module name. "rest": all other modules."""

    def elsewhere(device):
        return type("Elsewhere", (torch.nn.Parameter,), {"device": torch.device(device)})

    model = copy.deepcopy(model)
    for module_name, module in model.named_modules():
        device = devices.get(module_name, devices["rest"])
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = elsewhere(device)(parameter.data)
    return model


def test_model_on_a_device_of_its_own_is_refused():
    model = tiny_model(vocab_size=BYTES)
    with pytest.raises(ValueError, match=r"target LlamaForCausalLM is on several devices \(cuda:0, cuda:1\)"):
        bass.ModelPair(placed(model, lm_head="cuda:1", rest="cuda:0"))
    with pytest.raises(ValueError, match="the device of target LlamaForCausalLM is mps, which has no float64"):
        bass.ModelPair(placed(model, rest="mps"))


@pytest.mark.parametrize(("role", "to"), [("target", "memory"), ("draft", "disk")])
def test_offloaded_model_is_refused(role, to, tmp_path):
    model = copy.deepcopy(tiny_model(vocab_size=BYTES))
    if to == "memory":
        model = cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        model = dispatch_model(model, {"model": "cpu", "lm_head": "disk"}, main_device="cpu", offload_dir=tmp_path)
    with pytest.raises(ValueError, match=f"{role} LlamaForCausalLM is offloaded by accelerate; .*device='cuda:0'"):
        bass.ModelPair(**{"target": tiny_model(vocab_size=BYTES), role: model})


def test_each_model_has_its_own_revision(target, draft, tmp_path, monkeypatch):  # noqa: F811
    other = "b" * 40
    put_into_hub(tmp_path / "hub", "target", **{"a" * 40: target, other: draft})
    put_into_hub(tmp_path / "hub", "draft", **{"a" * 40: draft, other: target})
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    first, second = (bass.load_pair(each).target.lm_head.weight.sum().item() for each in (target, draft))
    for given, sums in (
        ({}, [first, second]),
        ({"revision": other}, [second, second]),
        ({"draft_revision": other}, [first, first]),
    ):
        pair = bass.load_pair("owner/target", "owner/draft", **given)
        assert [model.lm_head.weight.sum().item() for model in pair.models] == sums


UNREADABLE = [
    ("no-owner/no-model", {}, r"'no-owner/no-model': no such folder, not in the hub's cache, and HF_.+ set\Z"),
    *((name, {}, f"'{name}': no such folder") for name in ("/nope", "../nope", "~/nope", "no/such/folder", "nope/")),
    (Path("nope"), {}, "cannot load 'nope': no such folder"),
    ("model.safetensors", {}, r"model\.safetensors': it is a file; pass the folder"),
    ("", {"revision": "v1"}, "is a folder, which has no revisions; leave out revision='v1'"),
    ("", {"draft": "", "draft_revision": "v1"}, "is a folder, which has no revisions; leave out revision='v1'"),
    ("", {"draft_revision": "v1"}, "draft_revision='v1' needs a draft on the hub; got draft=None"),
    ("", {"weights": "dummy", "revision": "v1"}, "weights='dummy' reads no checkpoint: leave out revision"),
]


@pytest.mark.parametrize(("name", "options", "message"), UNREADABLE, ids=str)
def test_unreadable_name_is_refused(target, name, options, message, monkeypatch):  # noqa: F811
    if name in ("", "model.safetensors"):
        name = target / name
    if "draft" in options:
        options = options | {"draft": target}
    if name != "no-owner/no-model":
        asks = "bass_core.loading.checkpoints.cached_file"
        monkeypatch.setattr(asks, lambda *args, **options: pytest.fail("the hub was asked"))
    with pytest.raises(ValueError, match=message):
        named_pair(name, **options)


def test_copy_in_full_precision_has_no_flash_attention():
    model = copy.deepcopy(tiny_model(vocab_size=BYTES))
    model.config._attn_implementation = "flash_attention_2"
    assert in_dtype(model, torch.bfloat16).config._attn_implementation == "flash_attention_2"
    assert pairs.in_dtype(bass.ModelPair(model), torch.float32).target.config._attn_implementation == "sdpa"
    assert probe.resolve(model) == "pad"
    assert model.config._attn_implementation == "flash_attention_2" and model.dtype == torch.bfloat16


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


def test_adapter_outside_of_the_layers_is_refused():
    ids, config = PROMPTS[0][None], peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(ValueError, match="draft is a PeftModelForCausalLM with a PROMPT_TUNING adapter"):
        bass.ModelPair(tiny_model(vocab_size=BYTES), with_adapter(config))
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "draft_model": "ngram"}
    with pytest.raises(ValueError, match="gets its inputs from a PeftModelForCausalLM"):
        with_adapter(config).generate(input_ids=ids, custom_generate=bass.bass_generate, **options)


def test_folder_of_an_adapter_is_refused(tmp_path):
    with_adapter().save_pretrained(tmp_path)
    words = r"the checkpoint is an adapter \(adapter_config\.json\); load its base model"
    with pytest.raises(ValueError, match=words):
        bass.load_pair(tmp_path)
