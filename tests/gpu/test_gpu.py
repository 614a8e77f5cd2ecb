"""The same promises on a CUDA device: `pytest -m gpu`."""

import pytest
import torch
from gpu_rehearsal import DEVICE, HERE, only_there, there_or_rehearsed
from tiny import greedy_alone, ragged_prompts, tiny_model
from trial_policies import TakingTurns

import bass_core as bass
from bass_core.exactness import sampling
from bass_core.model.runner import packs

pytestmark = [pytest.mark.gpu, there_or_rehearsed]
PROMPTS = ragged_prompts(5, 11, 3, 17)


def pair_on_gpu(architecture="llama", dtype="float64"):
    models = (tiny_model.__wrapped__(architecture, dtype=dtype, noise=noise).to(DEVICE) for noise in (0.0, 0.1))
    return bass.ModelPair(*models)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "mistral", "gpt2", "codegen"])
def test_greedy_text_on_the_gpu_equals_transformers(architecture):
    pair = pair_on_gpu(architecture)
    out = bass.generate(pair, PROMPTS, max_new_tokens=24, draft_length=4, eos_token_id=())
    for prompt, sequence in zip(PROMPTS, out.sequences, strict=True):
        assert sequence.tolist() == greedy_alone(pair.target, prompt.to(DEVICE), 24).tolist()
        assert sequence.device.type == "cpu"
    if HERE and architecture != "codegen":  # which has attention code of its own
        assert (out.trace.summary()["attention"], out.trace.summary()["kernels"]) == ("ragged", "triton")


def test_a_nucleus_is_the_same_alone_and_in_a_batch():
    logits = torch.randn(8, 1, 100_000, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    params = bass.SamplingParams(temperature=1.0, top_p=0.9)
    together = sampling.probabilities(logits, params)
    for row in range(8):
        for _ in range(10):
            assert torch.equal(sampling.probabilities(logits[row : row + 1], params)[0] > 0, together[row] > 0)


@pytest.mark.parametrize("draft", ["model", "n-gram"])
def test_coupled_text_on_the_gpu_is_that_of_regular_decoding(draft):
    pair = pair_on_gpu()
    pair = pair if draft == "model" else bass.ModelPair(pair.target)
    options = {"temperature": 0.9, "max_new_tokens": 24, "verification": "coupled", "trace": "tokens"}
    regular = bass.generate(pair, PROMPTS, draft_length=0, **options)
    drafted = bass.generate(pair, PROMPTS, draft_length=4, max_batch_size=3, **options)
    assert all(torch.equal(a, b) for a, b in zip(regular.sequences, drafted.sequences, strict=True))


@only_there
def test_random_numbers_are_the_same_on_both_devices():
    from bass_core.exactness.randomness import Key, Purpose, uniform

    parts = torch.arange(5), torch.arange(5) * 7
    on_cpu = uniform(Key(*parts, Purpose.DRAFT, torch.arange(9)))
    on_gpu = uniform(Key(*(part.cuda() for part in parts), Purpose.DRAFT, torch.arange(9).cuda()))
    assert torch.equal(on_cpu, on_gpu.cpu())


def test_the_embedded_pair_decodes_in_bf16():
    out = bass.generate(bass.load_pair(), ["def add(a, b):\n"] * 4, temperature=0.8, max_new_tokens=48)
    assert out.trace.summary()["alpha"] > 0.3


def test_packed_passes_of_ragged_lengths_give_the_same_text():
    """One row of four drafts in each step: verification is packed, and rounded up on a GPU."""
    pair = pair_on_gpu()
    options = {"max_new_tokens": 24, "eos_token_id": (), "compile": "off"}  # recorded passes have fixed shapes
    out = bass.generate(pair, PROMPTS, draft_length=TakingTurns(5), **options)
    for prompt, sequence in zip(PROMPTS, out.sequences, strict=True):
        assert sequence.tolist() == greedy_alone(pair.target, prompt.to(DEVICE), 24).tolist()
    steps = out.trace.steps[out.trace.steps.kind == "decode"]
    assert any(packs((part.drafted + 1).tolist(), part.drafted.max() + 1) for _, part in steps.groupby("step"))
