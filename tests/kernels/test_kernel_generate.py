"""`generate` over the kernels gives the text of plain torch. Triton's interpreter runs the kernels on the CPU."""

import math

import pytest
import torch
import transformers
from kernel_launches import counted
from recording import use_fixed_steps, use_on_cpu
from tiny import assert_greedy, greedy_alone, ragged_prompts, tiny_model

import bass_core as bass
from bass_core.gpu import compiled_layers
from bass_core.gpu.graph_step import GraphStep
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
    """Run plain torch until the end of the test, or until `.undo()`."""
    monkeypatch.setattr(kernel_ops, "run_on", lambda device: False)
    return monkeypatch


def same(first, second) -> bool:
    return all(map(torch.equal, first.sequences, second.sequences))


@pytest.mark.parametrize(
    "architecture", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma2", "mistral", "gpt2"))]
)
def test_ragged_text_equals_transformers(architecture):
    models = pair(architecture)
    ragged = generate(models, attention="ragged")
    assert ragged.trace.meta["attention"] == "ragged"
    assert_greedy(ragged, models.target, PROMPTS, 4)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("models", "message"),
    [
        (lambda: pair("deepseek_v3"), "key and value must be"),  # keys wider than values
        (lambda: pair("gemma2", head_dim=320, num_hidden_layers=1), "dimension must be at most 256, got 320"),
    ],
    ids=["deepseek_v3", "wide heads"],
)
def test_unsupported_keys_use_plain_torch(models, message):
    models = models()
    out = generate(models)
    assert out.trace.meta["attention"] == "pad"
    assert_greedy(out, models.target, PROMPTS, 4)
    with pytest.raises(ValueError, match=message):
        generate(models, attention="ragged")


@pytest.mark.ci
def test_layers_for_the_last_token_only_are_decoded_exactly():
    """Some layers of Gemma 4 share keys, and compute only the last token if no other logits are needed."""
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
    assert_greedy(generate(bass.ModelPair(model), PROMPTS[:2]), model, PROMPTS[:2], 4)


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
    """The kernel of fused verification supports only a temperature."""
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


def test_finished_rows_leave_and_waiting_rows_start():
    prompts = ragged_prompts(5, 11, 3, 8)
    models = pair()
    out = generate(models, prompts, attention="ragged", max_batch_size=2, eos_token_id=17)
    assert_greedy(out, models.target, prompts, 4, eos=17)


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
    seen, kernels, models = [], kernel_ops.load(), pair()
    ragged = kernels.ragged_attention

    def recorded(*args, **options):
        seen.append(options["deterministic"])
        return ragged(*args, **options)

    monkeypatch.setattr(kernels, "ragged_attention", recorded)
    try:
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic)
            out = generate(models, PROMPTS[:1], attention="ragged", max_new_tokens=2)
            assert set(seen) == {deterministic}
            seen.clear()
    finally:
        torch.use_deterministic_algorithms(False)
    assert_greedy(out, models.target, PROMPTS[:1], 2)


@pytest.mark.parametrize(
    "way", [pytest.param("graphs", marks=pytest.mark.ci), pytest.param("compiled", marks=pytest.mark.slow)]
)
def test_kernels_stay_whole_in_recordings_and_in_compiled_code(monkeypatch, way):
    """Ragged attention with its work list, the cache write and fused verification are one operator each."""
    use_on_cpu(monkeypatch)
    monkeypatch.setattr(compiled_layers, "BACKEND", "aot_eager")
    monkeypatch.setattr(compiled_layers, "_compiled", {})
    options = {"max_new_tokens": 3, "draft_length": 1, "temperature": 0.8, "attention": "ragged"}
    expected, found = (generate(prompts=PROMPTS[:2], compile=how, **options) for how in ("off", way))
    assert same(found, expected)
    assert (found.trace.meta["attention"], found.trace.meta["kernels"]) == ("ragged", "triton")


@pytest.mark.slow
def test_the_passes_of_a_draft_phase_share_a_plan(monkeypatch):
    models, found, run = pair(num_hidden_layers=2), {}, GraphStep._run
    options = {"prompts": ragged_prompts(5, 70), "max_new_tokens": 9, "draft_length": 3, "attention": "ragged"}
    expected = generate(models, **options)

    def counting(self, key, function):
        with counted() as launches:
            result = run(self, key, function)
        found[key[0], key[2]] = launches["around"]["_plan"], launches["model"]["_attend_pieces"]
        return result

    use_fixed_steps(monkeypatch)
    monkeypatch.setattr(GraphStep, "_run", counting)
    assert same(generate(models, **options), expected)
    assert found["draft", 3] == (1, 3 * 2)
    assert found["verify", 3] == (1, 2)
