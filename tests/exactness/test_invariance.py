"""The batch, the order of rows and stale memory change no text. A perfect draft is accepted always."""

import pytest
import torch
from sessions import run_to_the_end
from tiny import CONTEXT, ragged_prompts, tiny_model
from trial_policies import Alternating, PerRow, StopWhenUnsure, TakingTurns, library_policies

import bass_core as bass
from bass_core.model import cache as cache_module

PROMPTS = ragged_prompts(5, 11, 17, 2)
NO_EOS = {"eos_token_id": ()}


def pair_of(dtype="float32", architecture="llama", noise=0.1):
    return bass.ModelPair(tiny_model(architecture, dtype=dtype), tiny_model(architecture, dtype=dtype, noise=noise))


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# --- draft = target ---


def alpha_when_draft_is_target(draft_length, **options):
    target = tiny_model(dtype="float64")
    options = {"temperature": 0.8, "max_new_tokens": 25} | NO_EOS | options
    out = bass.generate(bass.ModelPair(target, target), PROMPTS[:3], draft_length=draft_length, **options)
    return out.trace.summary()["alpha"]


@pytest.mark.parametrize(
    ("rule", "temperature", "k"), [("token", 0.0, 3), ("token", 0.8, 1), ("block", 0.8, 3), ("coupled", 0.8, 5)]
)
def test_perfect_draft_is_always_accepted(rule, temperature, k):
    target = tiny_model(dtype="float64")
    options = {"draft_length": k, "verification": rule, "temperature": temperature} | NO_EOS
    out = bass.generate(bass.ModelPair(target, target), PROMPTS[:4], max_new_tokens=1 + 4 * (k + 1), **options)
    summary = out.trace.summary()
    assert summary["alpha"] == 1
    assert summary["tokens_per_step"] == k + 1


@pytest.mark.parametrize(
    "policy", [Alternating(k=3, zeros=1), Alternating(k=3, zeros=8), TakingTurns(k=3)], ids=["1", "8", "turns"]
)
def test_perfect_draft_stays_perfect_after_regular_steps(policy):
    assert alpha_when_draft_is_target(policy, max_new_tokens=40) == 1


# --- batch independence ---


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


POLICIES = {"k=5": lambda: 5, "per row": PerRow, "unsure": StopWhenUnsure, "alternating": Alternating}
POLICIES |= library_policies(limit=8)


@pytest.mark.parametrize(
    ("draft", "policy", "places"),
    [
        ("good", "per row", 2),
        ("good", "unsure", 8),
        ("good", "ragged budget", 8),
        ("useless", "k=5", 2),
        ("perfect", "alternating", 2),
        ("n-gram", "goodput", 2),
    ],
)
def test_coupled_text_is_that_of_regular_decoding(draft, policy, places):
    target = tiny_model(dtype="float64")
    drafts = {
        "good": tiny_model(dtype="float64", noise=0.1),
        "useless": tiny_model(dtype="float64", seed=9),
        "perfect": target,
        "n-gram": None,
    }
    options = {"temperature": 0.9, "max_new_tokens": 16, "verification": "coupled", "seed": 11, "trace": "off"}
    regular = bass.generate(bass.ModelPair(target), PROMPTS, draft_length=0, **options)
    pair = bass.ModelPair(target, drafts[draft])
    out = bass.generate(pair, PROMPTS, draft_length=POLICIES[policy](), max_batch_size=places, **options)
    assert same(out.sequences, regular.sequences)


def test_seeds_and_samples_give_different_texts():
    options = {"num_return_sequences": 6, "temperature": 0.9, "max_new_tokens": 20} | NO_EOS
    texts = [bass.generate(pair_of(), PROMPTS[0], seed=seed, **options).sequences for seed in (0, 1)]
    assert len({tuple(sequence.tolist()) for sequences in texts for sequence in sequences}) == 12


# --- stale memory ---


@pytest.mark.parametrize(
    ("path", "poison", "architecture"),
    [("split", torch.nan, "gemma3"), ("pad", 1e4, "mistral"), ("eager", 1e4, "gemma3")],
)
def test_stale_slots_never_matter(monkeypatch, path, poison, architecture):
    options = {"temperature": 0.8, "max_new_tokens": 14, "draft_length": 3, "attention": path, "max_batch_size": 3}
    pair = pair_of(architecture=architecture)
    clean = bass.generate(pair, PROMPTS, **options)
    poisoned, original = [], bass.Session.step

    def step_over_poison(session):
        event = original(session)
        lengths = session.rows.lengths_host
        live = len(session.rows.live)
        for runner, known in ((session.target, lengths - 1), (session.drafter.runner, session.drafter.cached)):
            for buffer in runner.cache.buffers():
                for place in range(session.rows.max_rows):
                    buffer[place, :, known[place] if place < live else 0 :] = poison
                    poisoned.append(place)
        return event

    monkeypatch.setattr(bass.Session, "step", torch.inference_mode()(step_over_poison))
    after = bass.generate(pair, PROMPTS, **options)
    assert poisoned
    assert same(clean.sequences, after.sequences)


@pytest.mark.parametrize("path", ["pad", "split", "eager"])
def test_fresh_memory_never_matters(monkeypatch, path):
    """Prefill and padding queries read nothing of buffers that begin as garbage."""
    options = {"max_new_tokens": 12, "draft_length": 3, "attention": path, **NO_EOS}
    clean = bass.generate(pair_of(), PROMPTS, **options)
    garbage = torch.nan if path == "split" else 1e4
    original = cache_module.RaggedCache.allocate
    monkeypatch.setattr(
        cache_module.RaggedCache, "allocate", lambda self, like, shape: original(self, like, shape).fill_(garbage)
    )
    assert same(clean.sequences, bass.generate(pair_of(), PROMPTS, **options).sequences)


# --- ends of rows ---


@pytest.mark.parametrize(("temperature", "draft_length"), [(0.0, 4), (0.9, 4), (0.9, 0)])
def test_nothing_follows_eos(temperature, draft_length):
    target = tiny_model(dtype="float64")  # perfect draft: EOS is accepted in the middle of a block
    pair = bass.ModelPair(target, target)
    options = {"temperature": temperature, "draft_length": draft_length, "verification": "coupled"}
    options |= {"max_new_tokens": 16}
    free = bass.generate(pair, PROMPTS, **options, **NO_EOS)
    eos = {int(free.sequences[0][6]), int(free.sequences[3][11])}
    out = bass.generate(pair, PROMPTS, eos_token_id=eos, trace="tokens", **options)
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


@pytest.mark.parametrize("architecture", ["opt", "llama"])
def test_row_may_fill_the_context_exactly(architecture):
    pair = pair_of(architecture=architecture)
    prompt = ragged_prompts(CONTEXT - 20)[0]
    for new in (1, 2, 20):
        whole = bass.generate(pair, prompt, max_new_tokens=new, draft_length=6, **NO_EOS)
        regular = bass.generate(pair, prompt, max_new_tokens=new, draft_length=0, **NO_EOS)
        assert len(whole.sequences[0]) == new
        assert same(whole.sequences, regular.sequences)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logprobs_are_the_targets(temperature):
    pair = pair_of("float64")
    out = bass.generate(
        pair,
        PROMPTS,
        max_new_tokens=15,
        temperature=temperature,
        top_k=5,
        draft_length=3,
        repetition_penalty=1.3,
        **NO_EOS,
    )
    for prompt, sequence, logprobs in zip(PROMPTS, out.sequences, out.logprobs, strict=True):
        logits = pair.target(torch.cat([prompt, sequence])[None]).logits[0].log_softmax(-1)
        expected = logits[len(prompt) - 1 : -1].gather(-1, sequence[:, None])[:, 0]
        torch.testing.assert_close(logprobs, expected.float(), rtol=1e-5, atol=1e-5)
