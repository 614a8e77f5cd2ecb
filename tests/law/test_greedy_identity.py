"""Greedy text equals transformers' greedy decoding of each row alone, token for token."""

import functools

import pytest
import torch
from tiny import SUPPORTED, greedy_alone, ragged_prompts, tiny_model
from trial_policies import Alternating, PerRow, StopWhenUnsure, library_policies

import bass_core as bass

PROMPTS = ragged_prompts(5, 11, 3, 17, 1)
NEW = 24


@functools.cache
def alone(target, eos):
    """Each prompt's ids as transformers decodes it: once for all that is compared with them."""
    return [greedy_alone(target, prompt, NEW, eos).tolist() for prompt in PROMPTS]


def assert_identical(target, draft, eos=None, **options):
    out = bass.generate(
        bass.ModelPair(target, draft),
        PROMPTS,
        max_new_tokens=NEW,
        eos_token_id=() if eos is None else eos,
        **({"draft_length": 4} | options),
    )
    assert [sequence.tolist() for sequence in out.sequences] == alone(target, eos)
    return out


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("architecture", SUPPORTED)
def test_every_architecture(architecture, dtype):
    target = tiny_model(architecture, dtype=dtype)
    draft = tiny_model(architecture, dtype=dtype, noise=0.1)
    out = assert_identical(target, draft)
    assert 0.1 < out.trace.summary()["alpha"] < 1  # drafts were both accepted and rejected
    regular = assert_identical(target, draft, draft_length=0)
    assert all(torch.equal(a, b) for a, b in zip(out.sequences, regular.sequences, strict=True))


@pytest.mark.parametrize("architecture", SUPPORTED)
def test_every_architecture_with_eos(architecture):
    target, draft = tiny_model(architecture), tiny_model(architecture, noise=0.1)
    eos = int(greedy_alone(target, PROMPTS[1], NEW)[NEW // 2])
    out = assert_identical(target, draft, eos=eos)
    assert "eos" in out.finish_reasons


@pytest.mark.parametrize("architecture", SUPPORTED)
@pytest.mark.parametrize("path", ["pad", "split", "eager"])
def test_every_attention_path_that_the_architecture_takes(architecture, path):
    target, draft = tiny_model(architecture), tiny_model(architecture, noise=0.1)
    if path != "eager" and architecture in ("codegen", "gptj", "falcon"):  # these bypass the attention interface
        with pytest.raises(ValueError, match="cannot be decoded over a ragged cache"):
            assert_identical(target, draft, attention=path)
    else:
        assert assert_identical(target, draft, attention=path).trace.meta["attention"] == path


@pytest.mark.parametrize(
    "draft",
    ["gpt2", "mistral", "gptj", "codegen", "mixtral", None],
)
@pytest.mark.parametrize("target", ["llama", "gemma2", "opt"])
def test_draft_of_another_architecture(target, draft):
    assert_identical(tiny_model(target), None if draft is None else tiny_model(draft))


@pytest.mark.parametrize("path", ["pad", "split", "eager"])
@pytest.mark.parametrize(
    "policy",
    [0, 1, 7, 20, PerRow(5), StopWhenUnsure(6, 0.3), Alternating(), *library_policies(limit=8)],
    ids=lambda policy: (
        policy if isinstance(policy, str) else str(policy) if isinstance(policy, int) else type(policy).__name__
    ),
)
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_every_policy_on_every_path(architecture, policy, path):
    policy = library_policies(limit=8)[policy]() if isinstance(policy, str) else policy
    assert_identical(tiny_model(architecture), tiny_model(architecture, noise=0.1), draft_length=policy, attention=path)


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
@pytest.mark.parametrize("places", [2, None])
def test_every_rule_is_greedy_at_temperature_zero(rule, places):
    assert_identical(tiny_model(), tiny_model(noise=0.1), verification=rule, max_batch_size=places)


def test_model_in_training_mode_is_decoded_without_dropout():
    target = tiny_model("gpt2", seed=4, attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)
    expected = [greedy_alone(target, prompt, NEW).tolist() for prompt in PROMPTS]
    target.train()
    try:
        out = bass.generate(bass.ModelPair(target), PROMPTS, max_new_tokens=NEW, eos_token_id=())
        assert [sequence.tolist() for sequence in out.sequences] == expected
        assert target.training
    finally:
        target.eval()


def test_bf16_divergences_sit_on_near_ties():
    """Half precision is not bit-equal between batch shapes, with or without speculation: every first divergence must
    sit where the target's two best logits are closer than the numeric noise between the two computations."""
    target, draft = tiny_model(dtype="bfloat16"), tiny_model(dtype="bfloat16", noise=0.1)
    speculative, control = (
        bass.generate(
            bass.ModelPair(target, draft), PROMPTS, max_new_tokens=60, draft_length=k, eos_token_id=(), trace="off"
        )
        for k in (4, 0)
    )
    for out in (speculative, control):
        for prompt, sequence in zip(PROMPTS, out.sequences, strict=True):
            alone = greedy_alone(target, prompt, 60)
            differing = (alone != sequence).nonzero()
            if len(differing):
                first = int(differing[0])
                logits = target(torch.cat([prompt, alone[:first]])[None]).logits[0, -1].float()
                best = logits.topk(2).values
                noise = 2**-7 * logits.abs().max()  # bf16 keeps 8 bits; a few roundings of the largest logit
                assert best[0] - best[1] <= 2 * noise
