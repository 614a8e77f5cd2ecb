import copy

import pytest
import torch
from decoded import by_transformers, greedy
from test_loading import draft, save, target  # noqa: F401, pytest finds fixtures by name
from tiny import BYTES, assert_greedy, feature_head, ragged_prompts, tiny_model, with_adapter

import bass_core as bass
from bass_core.loading import model_pair
from bass_core.loading.model_pair import ASSETS, fingerprint
from bass_core.loading.quantization import GROUP, KINDS, QuantizedLinear, dequantized, kind_of, parameter_count
from bass_core.model import fused_projections
from bass_lab.checks.drafter_checks import check_drafter
from bass_lab.checks.exactness import verify
from bass_lab.named_pairs import named_pair
from bass_lab.texts.prompt_sets import prompt_set


def weights(rows: int, columns: int, dtype: str = "float32") -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(getattr(torch, dtype))


@pytest.mark.parametrize("shape", [(5, 32), (3, 560), (7, 33), (1, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_within_half_a_step_of_each_weight(kind, shape):
    """INT4: a whole step at the end with one code less."""
    weight = weights(*shape)
    error = (dequantized(*KINDS[kind](weight), shape[1]) - weight).abs()
    if kind == "int8":
        assert (error <= weight.abs().amax(1, keepdim=True) / 127 * 0.501).all()
        return
    for group, off in zip(weight.split(GROUP, 1), error.split(GROUP, 1), strict=True):
        largest = group.abs().argmax(1, keepdim=True)
        extreme = group.gather(1, largest)
        step = extreme.abs() / 8
        assert (off <= step * torch.where(group / extreme < -7 / 8, 1.001, 0.501)).all()
        assert (off.gather(1, largest) <= 1e-6 * step).all()  # the largest weight is exact


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_zeros_stay_zeros_and_scales_have_the_models_dtype(kind, dtype):
    weight = weights(4, 70, dtype)
    weight[1] = 0
    codes = KINDS[kind](weight)
    found = dequantized(*codes, 70)
    assert found.dtype == weight.dtype and (found[1] == 0).all() and found[0].any() and found.isfinite().all()


def test_two_int4_codes_share_a_byte():
    for kind, columns, size in (("int8", 64, 6 * 64), ("int4", 64, 6 * 32), ("int4", 65, 6 * 48)):  # with padding
        assert KINDS[kind](weights(6, columns)).weight.nbytes == size


@pytest.mark.parametrize(
    ("architecture", "kind", "draft_length"),
    [("llama", "int8", 3), ("gpt2", "int4", 0), ("opt", "int8", 3), ("deepseek_v3", "int4", 3), ("mixtral", "int8", 0)],
)
def test_batched_text_equals_the_quantized_models_text(architecture, kind, draft_length):
    model = bass.quantized(tiny_model(architecture, seed=3), kind)
    prompts = ragged_prompts(3, 9, 12)
    options = {"max_new_tokens": 8, "draft_length": draft_length, "eos_token_id": ()}
    out = bass.generate(bass.ModelPair(model, tiny_model(seed=1)), prompts, **options)
    assert_greedy(out, model, prompts, 8)


def test_model_computes_with_the_values_of_its_codes():
    full = tiny_model("gpt2", tie_word_embeddings=True)
    for kind in KINDS:
        model, plain = bass.quantized(full, kind), copy.deepcopy(full)
        for name, each in model.named_modules():
            if isinstance(each, QuantizedLinear):
                weight = dequantized(each.weight, each.scale, each.in_features)
                plain.get_submodule(name).weight.data = weight.T
        ids = ragged_prompts(17)[0][None]
        assert torch.allclose(model(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(model(ids).logits, full(ids).logits, rtol=1e-4, atol=1e-4)


def test_quantized_copy_shares_all_other_weights():
    full = tiny_model(tie_word_embeddings=True)
    before, model = fingerprint(full), bass.quantized(full, "int4")
    there = bass.quantized(full, "int4", "meta")
    assert fingerprint(full) == before != fingerprint(model)
    assert (kind_of(full), kind_of(model), kind_of(there)) == (None, "int4", "int4")
    assert model.get_input_embeddings().weight is full.get_input_embeddings().weight
    for each in (model, there):
        assert each.get_output_embeddings().weight is each.get_input_embeddings().weight
    assert model.config is not full.config
    assert parameter_count(model) == full.num_parameters()
    assert model.get_memory_footprint() < full.get_memory_footprint() / 2
    for each, device in ((there, "meta"), (full, "cpu")):
        assert {tensor.device.type for tensor in (*each.parameters(), *each.buffers())} == {device}


def test_quantized_copy_keeps_its_biases_in_place():
    """A captured pass of the copy reads the biases at their old address."""
    full = copy.deepcopy(tiny_model("qwen2"))
    copied = bass.quantized(full, "int8")
    biases = [each for name, each in copied.named_parameters() if name.endswith("proj.bias")]
    before, moved = [each.data_ptr() for each in biases], [each.data_ptr() for each in full.parameters()]
    assert len(biases) > 2 and set(before) <= set(moved)
    fused_projections.arrange(full)
    assert [each.data_ptr() for each in full.parameters()] != moved
    assert [each.data_ptr() for each in biases] == before


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_quantized_models_are_verified_in_half_precision_too(kind):
    pair = bass.load_pair(quantize=kind)
    report = verify(pair, samples=1000, max_new_tokens=6, compile="off")
    assert report.passed and len(report.checks) == 4


@pytest.mark.ci
def test_quantized_draft_keeps_the_distribution():
    small = tiny_model(vocab_size=3, dtype="float64", pad_token_id=None, bos_token_id=None, eos_token_id=None)
    report = check_drafter(
        bass.ModelDrafter(bass.load_pair(quantize={"draft": "int4"}).draft),
        small=bass.ModelPair(small, bass.quantized(small, "int4")),
    )
    assert report.passed, report


def test_models_are_quantized_by_role(target, draft):  # noqa: F811
    def kinds(**options):
        pair = bass.load_pair(target, draft, **options)
        return kind_of(pair.target), kind_of(pair.draft)

    assert kinds() == (None, None)
    assert kinds(quantize="int8") == ("int8", "int8")
    assert kinds(quantize={"draft": "int4"}) == (None, "int4")
    assert kinds(quantize={"draft": "int4", "target": "int8"}) == ("int8", "int4")
    pair = bass.load_pair(target, draft="suffix", quantize="int8")
    assert kind_of(pair.target) == "int8" and isinstance(pair.draft, bass.SuffixDrafter)


def test_held_pair_is_quantized_as_a_loaded_one(target, draft):  # noqa: F811
    held = bass.load_pair(target, draft)
    for pair in (held.quantized("int4"), bass.load_pair(target, draft, quantize="int4")):
        assert greedy(pair) == by_transformers(pair.target) != by_transformers(held.target)
    assert held.quantized({"draft": "int8"}).target is held.target
    assert "int4 weights" in repr(pair) and "int4" not in repr(held)
    assert greedy(bass.load_pair(target, draft, quantize={"draft": "int4"})) == greedy(held)


def test_weights_to_be_quantized_are_read_to_the_host(monkeypatch, target, draft):  # noqa: F811
    read, load_model = {}, model_pair.load_model

    def reading(name, *args, **options):
        read[name] = options["device"].type
        return load_model(name, *args, **options)

    monkeypatch.setattr(model_pair, "load_model", reading)
    monkeypatch.setattr(model_pair, "ModelPair", lambda **parts: parts)
    pair = bass.load_pair(target, draft, device="meta", quantize={"target": "int8"})
    assert read == {target: "cpu", draft: "meta"}
    assert {each.device.type for role in ("target", "draft") for each in pair[role].parameters()} == {"meta"}


def test_quantized_copy_drafts_for_its_target(target):  # noqa: F811
    pair = bass.load_pair(target, draft="target:int8")
    assert kind_of(pair.target) is None and kind_of(pair.draft) == "int8"
    assert pair.draft.get_input_embeddings().weight is pair.target.get_input_embeddings().weight
    assert greedy(pair) == by_transformers(pair.target)


@pytest.mark.ci
def test_drafts_of_a_quantized_copy_are_nearly_always_accepted():
    pair = bass.load_pair(draft="target:int4")
    out = bass.generate(pair, prompt_set("mini", 4), max_new_tokens=16, draft_length=4, temperature=0.2)
    assert out.trace.summary()["alpha"] > 0.9


def test_dummy_weights_are_quantized():
    pair = named_pair(ASSETS / "target", weights="dummy", draft="target:int4", quantize={"target": "int8"})
    assert (kind_of(pair.target), kind_of(pair.draft), pair.synthetic) == ("int8", "int4", True)


NOWHERE, MODEL = "no-owner/no-model", tiny_model(vocab_size=BYTES)
WITH_HEAD = bass.ModelPair(MODEL, bass.FeatureDrafter(feature_head(MODEL)))
REFUSED = [  # a call for the target's folder, words of the error
    *(
        (lambda _, wrong=wrong: bass.load_pair(NOWHERE, quantize=wrong), "must be one of int8, int4, or by role")
        for wrong in ("int3", "", {}, {"draft": ["int4"]}, {"drafts": "int4"}, {"draft": None}, 8, True)
    ),
    (lambda _: bass.quantized(MODEL, "fp8"), "must be one of int8, int4; got 'fp8'"),
    (lambda _: bass.quantized(bass.quantized(MODEL, "int8"), "int8"), r"LlamaForCausalLM is quantized already \(int8"),
    (lambda folder: bass.load_pair(folder, quantize="int8", quantization_config=object()), "both apply to the target"),
    (lambda folder: bass.load_pair(folder, draft="target:int4", quantize="int8"), "'target:int4' is quantized already"),
    (lambda folder: bass.load_pair(folder, quantize={"draft": "int4"}), "a NgramDrafter cannot be quantized"),
    (lambda _: bass.load_pair(NOWHERE, "suffix", quantize={"draft": "int4"}), "a SuffixDrafter cannot be quantized"),
    (lambda _: WITH_HEAD.quantized({"draft": "int4"}), "a FeatureDrafter cannot be quantized"),
    (lambda _: bass.quantized(with_adapter().get_base_model(), "int8"), "has an adapter; merge it first"),
    (
        lambda folder: bass.load_pair(save(folder, bass.quantized(MODEL, "int8"))),
        "weight is stored as I8; weights must be floating-point",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_unfit_quantization_is_refused(target, call, message):  # noqa: F811
    with pytest.raises(ValueError, match=message):
        call(target)


def test_gguf_model_is_quantized_like_a_full_model():
    """transformers marks the model as quantized, but the weights are dequantized."""
    model = tiny_model.__wrapped__()
    model.is_quantized, model.quantization_method = True, "gguf"
    assert bass.quantized(model, "int8") is not model
    model.quantization_method = "bitsandbytes"
    with pytest.raises(ValueError, match="quantized already"):
        bass.quantized(model, "int8")
