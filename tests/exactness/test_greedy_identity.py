"""Greedy text equals transformers' greedy text of each single row, token for token."""

import functools
from itertools import cycle

import pytest
import torch
from tiny import SUPPORTED, greedy_alone, ragged_prompts, tiny_model
from trial_policies import Alternating, PerRow, StopWhenUnsure, library_policies

import bass_core as bass

PROMPTS = ragged_prompts(5, 17, 1)
NEW = 14


@functools.cache
def alone(target):
    return [greedy_alone(target, prompt, NEW).tolist() for prompt in PROMPTS]


def assert_identical(target, draft, **options):
    options = {"max_new_tokens": NEW, "draft_length": 4, "eos_token_id": ()} | options
    out = bass.generate(bass.ModelPair(target, draft), PROMPTS, **options)
    assert [sequence.tolist() for sequence in out.sequences] == alone(target)
    return out


FEW = ("llama", "gemma3", "phi3", "mixtral", "gpt2", "opt", "ministral3", "falcon")  # families with separate code paths


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        pytest.param(*each, marks=[pytest.mark.ci] * (each[0] not in FEW))
        for each in zip(SUPPORTED, cycle(["float32", "float64"]))
    ],
)
def test_every_architecture(architecture, dtype):
    target, draft = tiny_model(architecture, dtype=dtype), tiny_model(architecture, dtype=dtype, noise=0.1)
    out = assert_identical(target, draft)
    assert 0.1 < out.trace.summary()["alpha"] < 1  # drafts were both accepted and rejected
    assert_identical(target, draft, draft_length=PerRow(3))


# Windows, soft caps, learned positions, and keys wider than values.
FEATURES = [("mistral", "split"), ("gemma2", "eager"), ("gpt2", "split"), ("deepseek_v3", "eager")]


@pytest.mark.parametrize(("architecture", "path"), FEATURES)
def test_every_attention_path(architecture, path):
    target, draft = tiny_model(architecture), tiny_model(architecture, noise=0.1)
    assert assert_identical(target, draft, attention=path).trace.meta["attention"] == path


@pytest.mark.parametrize(
    ("target", "draft"), [("llama", "gpt2"), ("gemma2", "gptj"), ("opt", "mistral"), ("opt", None)]
)
def test_draft_of_another_architecture(target, draft):
    assert_identical(tiny_model(target), None if draft is None else tiny_model(draft))


POLICIES = {
    "k=0": lambda: 0,
    "k=1": lambda: 1,
    "k=20": lambda: 20,
    "per row": lambda: PerRow(5),
    "stop when unsure": lambda: StopWhenUnsure(6, 0.3),
    "alternating": Alternating,
    **library_policies(limit=8),
}


PATHS = zip(POLICIES, cycle(["pad", "split", "eager"]), cycle(["llama", "gemma3"]))


@pytest.mark.parametrize(("policy", "path", "architecture"), PATHS)
def test_every_policy(policy, path, architecture):
    target, draft = tiny_model(architecture), tiny_model(architecture, noise=0.1)
    assert_identical(target, draft, draft_length=POLICIES[policy](), attention=path)


@pytest.mark.parametrize(("rule", "places"), [("token", 2), ("block", None), ("coupled", 2)])
def test_every_rule_is_greedy_at_temperature_zero(rule, places):
    assert_identical(tiny_model(), tiny_model(noise=0.1), verification=rule, max_batch_size=places)


def test_model_in_training_mode_is_decoded_without_dropout():
    target = tiny_model("gpt2", seed=4, attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)
    alone(target)
    target.train()
    try:
        assert_identical(target, None)
        assert target.training
    finally:
        target.eval()


def test_bf16_divergences_sit_on_near_ties():
    """Half precision is not bit-equal between batch shapes. A row may first diverge only where the target's two best
    logits are closer than the rounding of both computations."""
    target, draft = tiny_model(dtype="bfloat16"), tiny_model(dtype="bfloat16", noise=0.1)
    options = {"max_new_tokens": 40, "eos_token_id": (), "trace": "off"}
    plain, drafted = (bass.generate(bass.ModelPair(target, draft), PROMPTS, draft_length=k, **options) for k in (0, 4))
    alone = [greedy_alone(target, prompt, 40) for prompt in PROMPTS]
    for prompt, expected, sequence in zip(2 * PROMPTS, 2 * alone, plain.sequences + drafted.sequences, strict=True):
        differing = (expected != sequence).nonzero()
        if len(differing):
            first = int(differing[0])
            logits = target(torch.cat([prompt, expected[:first]])[None]).logits[0, -1].float()
            best = logits.topk(2).values
            noise = 2**-7 * logits.abs().max()  # bf16 keeps 8 bits; a few roundings of the largest logit
            assert best[0] - best[1] <= 2 * noise
