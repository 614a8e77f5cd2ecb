"""`generate` over the kernels gives the text of plain torch. Triton's interpreter runs the kernels on the CPU."""

import math

import pytest
import torch
import transformers
from tiny import greedy_alone, ragged_prompts, tiny_model

import bass_core as bass
from bass_core.model import kernel_ops
from bass_core.model.runner import Runner

pytestmark = pytest.mark.interpreted
PROMPTS = ragged_prompts(5, 11, 3)


def pair(architecture: str = "llama", **changes) -> bass.ModelPair:
    changes = changes or ({"num_hidden_layers": 1} if architecture == "llama" else {})
    return bass.ModelPair(tiny_model(architecture, **changes), tiny_model(architecture, noise=0.1, **changes))


def generate(models=None, prompts=PROMPTS, **options):
    options = {"max_new_tokens": 4, "draft_length": 2, "eos_token_id": ()} | options
    return bass.generate(models or pair(), prompts, **options)


@pytest.fixture
def in_plain_torch(monkeypatch):
    """Until the end of the test, or `.undo()`, nothing runs in the interpreter."""
    monkeypatch.setattr(kernel_ops, "run_on", lambda device: False)
    return monkeypatch


def same(first, second) -> bool:
    return all(map(torch.equal, first.sequences, second.sequences))


def assert_greedy(found, model, prompts=PROMPTS, new=4, **options) -> None:
    """Every sequence is transformers' greedy text."""
    for prompt, sequence in zip(prompts, found.sequences, strict=True):
        assert sequence.tolist() == greedy_alone(model, prompt, new, **options).tolist()


@pytest.mark.parametrize(
    "architecture", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma2", "mistral", "gpt2"))]
)
def test_ragged_text_is_that_of_transformers(architecture):
    models = pair(architecture)
    ragged = generate(models, attention="ragged")
    assert ragged.trace.summary()["attention"] == "ragged"
    assert_greedy(ragged, models.target)


@pytest.mark.ci
def test_keys_wider_than_values_are_written_by_the_kernel_and_read_by_plain_torch():
    models = pair("deepseek_v3")
    out = generate(models)
    assert out.trace.summary()["attention"] == "pad"
    assert_greedy(out, models.target)
    with pytest.raises(ValueError, match="key and value must be"):
        generate(models, attention="ragged")


@pytest.mark.ci
def test_heads_too_wide_for_the_kernels_use_plain_torch():
    models = bass.ModelPair(tiny_model("gemma2", head_dim=320, num_hidden_layers=1))
    assert generate(models, max_new_tokens=2).trace.summary()["attention"] == "pad"
    with pytest.raises(ValueError, match="the head dimension must be at most 256, got 320"):
        generate(models, attention="ragged")


@pytest.mark.ci
def test_layers_that_go_on_with_the_last_token_alone_are_decoded_right():
    """Some layers of Gemma 4 share keys, and compute the last token alone where no other logits are wanted."""
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
    assert_greedy(generate(bass.ModelPair(model), PROMPTS[:2]), model, PROMPTS[:2])


@pytest.mark.ci
@pytest.mark.parametrize("path", ["pad", "split"])
def test_kernels_of_the_paper_replace_plain_torch(path, in_plain_torch):
    expected = generate(attention=path, max_new_tokens=2)
    in_plain_torch.undo()
    assert same(generate(attention=path, max_new_tokens=2), expected)


@pytest.mark.parametrize(
    ("draft", "options", "fused"),
    [
        ("model", {"temperature": 0.8}, True),
        pytest.param("n-gram", {"temperature": 0}, True, marks=pytest.mark.ci),
        pytest.param("model", {"temperature": 0.8, "top_p": 0.9, "verification": "block"}, False, marks=pytest.mark.ci),
        ("model", {"temperature": 0.8, "verification": "coupled"}, False),
    ],
    ids=str,
)
def test_kernels_change_no_token_and_no_log_probability(draft, options, fused, in_plain_torch, monkeypatch):
    """The kernel of fused verification knows the temperature alone."""
    models = pair() if draft == "model" else bass.ModelPair(tiny_model(num_hidden_layers=1))
    expected = generate(models, **options)
    in_plain_torch.undo()
    calls, commit = [], kernel_ops.commit
    monkeypatch.setattr(kernel_ops, "commit", lambda *args: calls.append(1) or commit(*args))
    found = generate(models, attention="ragged", **options)
    assert same(found, expected)
    for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert len(calls) == (found.trace.steps["step"].nunique() if fused else 0)


def test_rows_that_finish_early_leave_and_waiting_rows_come():
    prompts = ragged_prompts(5, 11, 3, 8)
    models = pair()
    out = generate(models, prompts, attention="ragged", max_batch_size=2, eos_token_id=17)
    assert_greedy(out, models.target, prompts, eos=17)


@pytest.mark.ci
def test_nan_ends_its_row_alone(monkeypatch):
    models, broken = pair(), 1
    run_model = Runner.run_model

    def spoiled(runner, ids, current):
        logits = run_model(runner, ids, current)
        is_verification = runner.model is models.target and ids.shape[1] > 1 and len(ids) == len(PROMPTS)
        if is_verification and current.starts[broken] >= 11:
            logits[broken] = math.nan
        return logits

    monkeypatch.setattr(Runner, "run_model", spoiled)
    out = generate(models, attention="ragged", on_row_error="finish")
    assert out.finish_reasons == ["length", "error", "length"]
    for row in (0, 2):
        assert out.sequences[row].tolist() == greedy_alone(models.target, PROMPTS[row], 4).tolist()
    with pytest.raises(FloatingPointError, match="row 1"):
        generate(models, attention="ragged")


def test_deterministic_algorithms_reach_the_kernel(monkeypatch):
    seen, ragged = [], kernel_ops.load().ragged_attention
    monkeypatch.setattr(
        kernel_ops.load(),
        "ragged_attention",
        lambda *args, **kw: seen.append(kw["deterministic"]) or ragged(*args, **kw),
    )
    models = pair()
    generate(models, PROMPTS[:1], attention="ragged", max_new_tokens=2)
    assert seen and not any(seen)
    seen.clear()
    torch.use_deterministic_algorithms(True)
    try:
        out = generate(models, PROMPTS[:1], attention="ragged", max_new_tokens=2)
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen and all(seen)
    assert_greedy(out, models.target, PROMPTS[:1], new=2)
