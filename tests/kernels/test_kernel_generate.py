"""`generate` over the kernels is `generate` over plain torch. Triton's interpreter runs them here, on the CPU."""

import math

import pytest
import torch
import transformers
from tiny import greedy_alone, ragged_prompts, tiny_model

import bass_core as bass
from bass_core import attention, kernel_ops

pytestmark = pytest.mark.interpreted
PROMPTS = ragged_prompts(5, 11, 3)


def pair(architecture: str = "llama") -> bass.ModelPair:
    return bass.ModelPair(tiny_model(architecture), tiny_model(architecture, noise=0.1))


def generate(models=None, prompts=PROMPTS, **options):
    options = {"max_new_tokens": 6, "draft_length": 3, "eos_token_id": ()} | options
    return bass.generate(models or pair(), prompts, **options)


@pytest.fixture
def in_plain_torch(monkeypatch):
    """Until the end of the test, or `.undo()`: nothing runs in the interpreter."""
    monkeypatch.setattr(kernel_ops, "run_on", lambda device: False)
    return monkeypatch


def same(first, second) -> bool:
    return all(map(torch.equal, first.sequences, second.sequences))


@pytest.mark.parametrize(
    "architecture", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma2", "mistral", "gpt2"))]
)
def test_ragged_text_is_that_of_pad_and_of_transformers(architecture, in_plain_torch):
    models = pair(architecture)
    padded = generate(models, attention="pad")
    in_plain_torch.undo()
    ragged = generate(models, attention="ragged")
    assert ragged.trace.summary()["attention"] == "ragged"
    assert same(ragged, padded)
    for prompt, sequence in zip(PROMPTS, ragged.sequences, strict=True):
        assert sequence.tolist() == greedy_alone(models.target, prompt, 6).tolist()


def test_keys_wider_than_values_are_written_by_the_kernel_and_read_by_plain_torch():
    models = pair("deepseek_v3")
    out = generate(models)
    assert out.trace.summary()["attention"] == "pad"
    for prompt, sequence in zip(PROMPTS, out.sequences, strict=True):
        assert sequence.tolist() == greedy_alone(models.target, prompt, 6).tolist()
    with pytest.raises(ValueError, match="key and value must be"):
        generate(models, attention="ragged")


def test_heads_too_wide_for_the_kernels_are_left_to_plain_torch():
    models = bass.ModelPair(tiny_model("gemma2", head_dim=320, num_hidden_layers=1))
    assert generate(models, max_new_tokens=2).trace.summary()["attention"] == "pad"
    with pytest.raises(ValueError, match="the head dimension must be at most 256, got 320"):
        generate(models, attention="ragged")


def test_layers_that_go_on_with_the_last_token_alone_are_decoded_right():
    """Some layers of Gemma 4 share keys and go on with the last token where no other's logits are wanted: the kernels
    took it for the first one of the pass."""
    if not hasattr(transformers, "Gemma4TextConfig"):
        pytest.skip("this version of transformers has no Gemma 4")
    config = transformers.Gemma4TextConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, global_head_dim=16, max_position_embeddings=96, sliding_window=8,
        vocab_size_per_layer_input=97, hidden_size_per_layer_input=8, num_kv_shared_layers=2,
        layer_types=2 * ["sliding_attention", "full_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Gemma4ForCausalLM(config).eval()
    out = generate(
        bass.ModelPair(model)
    )  # by a path that is right: older versions feed all tokens to these layers, too
    for prompt, sequence in zip(PROMPTS, out.sequences, strict=True):
        assert sequence.tolist() == greedy_alone(model, prompt, 6).tolist()


@pytest.mark.parametrize("path", ["pad", "split"])
def test_the_papers_kernels_stand_in_for_plain_torch(path, in_plain_torch):
    expected = generate(attention=path)
    in_plain_torch.undo()
    assert same(generate(attention=path), expected)


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.8}, {"temperature": 0.8, "draft_length": 0}, {"temperature": 0.8, "verification": "block"},
     {"temperature": 1.0, "top_k": 5}, {"temperature": 0.8, "verification": "coupled"}],
    ids=str,
)  # fmt: skip
def test_kernels_change_no_token_and_no_log_probability(options, in_plain_torch):
    expected = generate(**options)
    in_plain_torch.undo()
    found = generate(attention="ragged", **options)
    assert same(found, expected)
    for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("draft", ["model", "n-gram"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_verification_is_fused(draft, temperature, monkeypatch):
    calls, commit = [], kernel_ops.commit
    monkeypatch.setattr(kernel_ops, "commit", lambda *args: calls.append(1) or commit(*args))
    models = pair() if draft == "model" else bass.ModelPair(tiny_model())
    out = generate(models, temperature=temperature, attention="ragged")
    assert len(calls) == out.trace.steps["step"].nunique()


def test_verification_after_more_processing_than_the_temperature_is_not_fused(monkeypatch):
    monkeypatch.setattr(kernel_ops, "commit", lambda *args: pytest.fail("the kernel knows the temperature alone"))
    for models in (pair(), bass.ModelPair(tiny_model())):
        generate(models, temperature=0.8, attention="ragged", top_p=0.9, max_new_tokens=2)


def test_rows_that_finish_early_leave_and_waiting_rows_come():
    prompts = ragged_prompts(5, 11, 3, 8, 6)
    out = generate(prompts=prompts, attention="ragged", max_batch_size=2, eos_token_id=17)
    for prompt, sequence in zip(prompts, out.sequences, strict=True):
        assert sequence.tolist() == greedy_alone(tiny_model(), prompt, 6, eos=17).tolist()


def test_nan_ends_its_row_alone(in_plain_torch, monkeypatch):
    models, broken = pair(), 1
    expected = generate(models, attention="pad")
    in_plain_torch.undo()
    forward = attention.forward

    def spoiled(model, path, ids, current, *args):
        logits = forward(model, path, ids, current, *args)
        if model is models.target and ids.shape[1] > 1 and len(ids) == len(PROMPTS) and current.starts[broken] > 12:
            logits[broken] = math.nan
        return logits

    monkeypatch.setattr(attention, "forward", spoiled)
    out = generate(models, attention="ragged", on_row_error="finish")
    assert out.finish_reasons == ["length", "error", "length"]
    assert [torch.equal(a, b) for a, b in zip(out.sequences, expected.sequences, strict=True)] == [True, False, True]
    with pytest.raises(FloatingPointError, match="row 1"):
        generate(models, attention="ragged")


def test_deterministic_algorithms_reach_the_kernel(monkeypatch):
    seen, ragged = [], kernel_ops.load().ragged_attention
    monkeypatch.setattr(
        kernel_ops.load(),
        "ragged_attention",
        lambda *args, **kw: seen.append(kw["deterministic"]) or ragged(*args, **kw),
    )
    expected = generate(attention="ragged", max_new_tokens=3)
    assert not any(seen)
    torch.use_deterministic_algorithms(True)
    try:
        assert same(generate(attention="ragged", max_new_tokens=3), expected)
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen[-1]
