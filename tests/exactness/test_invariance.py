import pytest
import torch
from sessions import run_to_the_end
from stale import poison_stale_slots
from tiny import ragged_prompts, tiny_model
from trial_policies import Alternating, PerRow, StopWhenUnsure, TakingTurns, library_policies

import bass_core as bass
from bass_core.model.cache import RaggedCache

PROMPTS = ragged_prompts(5, 11, 17, 2)
TARGET = tiny_model(dtype="float64")
PERFECT = bass.ModelPair(TARGET, TARGET)
NO_EOS = {"eos_token_id": ()}


def pair_of(dtype="float32", architecture="llama", noise=0.1):
    return bass.ModelPair(tiny_model(architecture, dtype=dtype), tiny_model(architecture, dtype=dtype, noise=noise))


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("rule", "temperature", "k"), [("token", 0.0, 3), ("token", 0.8, 1), ("block", 0.8, 3), ("coupled", 0.8, 5)]
)
def test_perfect_draft_is_always_accepted(rule, temperature, k):
    options = {"draft_length": k, "verification": rule, "temperature": temperature} | NO_EOS
    summary = bass.generate(PERFECT, PROMPTS, max_new_tokens=1 + 4 * (k + 1), **options).trace.summary()
    assert summary["alpha"] == 1
    assert summary["tokens_per_step"] == k + 1


@pytest.mark.parametrize(
    "policy", [Alternating(k=3, zeros=1), Alternating(k=3, zeros=8), TakingTurns(k=3)], ids=["1", "8", "turns"]
)
def test_perfect_draft_stays_perfect_after_regular_steps(policy):
    options = {"draft_length": policy, "temperature": 0.8, "max_new_tokens": 40} | NO_EOS
    assert bass.generate(PERFECT, PROMPTS[:3], **options).trace.summary()["alpha"] == 1


@pytest.mark.parametrize(("rule", "dtype"), [("token", "float32"), ("block", "float64"), ("coupled", "float32")])
def test_row_alone_equals_row_in_batch(rule, dtype):
    pair = pair_of(dtype)
    options = {"temperature": 0.8, "draft_length": 3, "verification": rule, "seed": 3} | NO_EOS
    together = bass.generate(pair, PROMPTS, max_new_tokens=16, **options)
    for row, prompt in enumerate(PROMPTS):
        with bass.Session(pair, **options) as session:
            handle = session.submit(prompt, max_new_tokens=16, row=row)
            run_to_the_end(session)
            assert torch.equal(session.result(handle).sequence, together.sequences[row])


DRAFTS = {
    "good": tiny_model(dtype="float64", noise=0.1), "useless": tiny_model(dtype="float64", seed=9),
    "perfect": TARGET, "n-gram": None,
}  # fmt: skip
POLICIES = library_policies(limit=8)


@pytest.mark.parametrize(
    ("draft", "policy", "places"),
    [
        ("good", PerRow, 2),
        ("good", StopWhenUnsure, 8),
        ("useless", lambda: 5, 2),
        ("perfect", Alternating, 2),
        ("n-gram", POLICIES["goodput"], 2),
    ],
    ids=["good-per row-2", "good-unsure-8", "useless-k=5-2", "perfect-alternating-2", "n-gram"],
)
def test_coupled_text_equals_regular_decoding(draft, policy, places):
    options = {"temperature": 0.9, "max_new_tokens": 16, "verification": "coupled", "seed": 11, "trace": "off"}
    regular = bass.generate(bass.ModelPair(TARGET), PROMPTS, draft_length=0, **options)
    pair = bass.ModelPair(TARGET, DRAFTS[draft])
    out = bass.generate(pair, PROMPTS, draft_length=policy(), max_batch_size=places, **options)
    assert same(out.sequences, regular.sequences)


def test_seeds_and_samples_give_different_texts():
    options = {"num_return_sequences": 6, "temperature": 0.9, "max_new_tokens": 20} | NO_EOS
    texts = [bass.generate(pair_of(), PROMPTS[0], seed=seed, **options).sequences for seed in (0, 1)]
    assert len({tuple(sequence.tolist()) for sequences in texts for sequence in sequences}) == 12


@pytest.mark.parametrize(
    ("path", "poison", "architecture"),
    [("split", torch.nan, "gemma3"), ("pad", 1e4, "mistral"), ("eager", 1e4, "gemma3")],
)
def test_stale_slots_never_matter(monkeypatch, path, poison, architecture):
    options = {"temperature": 0.8, "max_new_tokens": 14, "draft_length": 3, "attention": path, "max_batch_size": 3}
    pair, step = pair_of(architecture=architecture), bass.Session.step
    clean = bass.generate(pair, PROMPTS, **options)

    def step_over_poison(session):
        event = step(session)
        assert poison_stale_slots(session, poison) > 0
        return event

    monkeypatch.setattr(bass.Session, "step", step_over_poison)
    assert same(clean.sequences, bass.generate(pair, PROMPTS, **options).sequences)


@pytest.mark.parametrize(("path", "garbage"), [("pad", 1e4), ("split", torch.nan), ("eager", 1e4)])
def test_fresh_memory_never_matters(monkeypatch, path, garbage):
    """Prefill and padding queries read nothing of uninitialized buffers."""
    options = {"max_new_tokens": 12, "draft_length": 3, "attention": path, **NO_EOS}
    clean, allocate = bass.generate(pair_of(), PROMPTS, **options), RaggedCache.allocate
    monkeypatch.setattr(RaggedCache, "allocate", lambda *args: allocate(*args).fill_(garbage))
    assert same(clean.sequences, bass.generate(pair_of(), PROMPTS, **options).sequences)


@pytest.mark.parametrize(("temperature", "draft_length"), [(0.0, 4), (0.9, 4), (0.9, 0)])
def test_nothing_follows_eos(temperature, draft_length):
    """The draft is perfect: EOS is accepted in the middle of a block."""
    options = {"temperature": temperature, "draft_length": draft_length, "verification": "coupled"}
    options |= {"max_new_tokens": 16}
    free = bass.generate(PERFECT, PROMPTS, **options, **NO_EOS)
    eos = {int(free.sequences[0][6]), int(free.sequences[3][11])}
    out = bass.generate(PERFECT, PROMPTS, eos_token_id=eos, trace="tokens", **options)
    for row, (sequence, reason) in enumerate(zip(out.sequences, out.finish_reasons, strict=True)):
        whole = free.sequences[row].tolist()
        ends = [i for i, token in enumerate(whole) if token in eos]
        expected = whole[: ends[0] + 1] if ends else whole
        assert sequence.tolist() == expected
        assert reason == ("eos" if ends else "length")
        assert len(out.logprobs[row]) == len(expected)
        of_row = out.trace.tokens.query("row == @row and kind != 'rejected'")
        assert of_row.token.tolist() == expected
        assert out.trace.steps.query("row == @row").emitted.sum() == len(expected)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logprobs_are_the_targets(temperature):
    options = {"temperature": temperature, "top_k": 5, "draft_length": 3, "repetition_penalty": 1.3} | NO_EOS
    out = bass.generate(pair_of("float64"), PROMPTS, max_new_tokens=15, **options)
    for prompt, sequence, logprobs in zip(PROMPTS, out.sequences, out.logprobs, strict=True):
        logits = TARGET(torch.cat([prompt, sequence])[None]).logits[0].log_softmax(-1)
        expected = logits[len(prompt) - 1 : -1].gather(-1, sequence[:, None])[:, 0]
        torch.testing.assert_close(logprobs, expected.float(), rtol=1e-5, atol=1e-5)
