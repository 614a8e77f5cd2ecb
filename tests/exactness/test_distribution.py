"""Sampled text of tiny real models follows the exact distribution: a G-test of the first tokens' joint."""

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from tiny import tiny_model

import bass_core as bass
from bass_core.exactness.sampling import probabilities

VOCABULARY = 5
PROMPT = torch.tensor([3, 1, 4, 1])
SAMPLES, TOKENS = 4000, 3
CASES = [
    pytest.param(rule, draft, sampling, marks=[pytest.mark.slow] * (draft != "near"))
    for rule in ("token", "block", "coupled")
    for draft, sampling in (
        ("near", {"temperature": 1.0}),
        ("far", {"temperature": 0.7, "top_k": 4}),
        (None, {"temperature": 1.0, "top_p": 0.9}),
    )
]
ALPHA = 1e-4 / len(CASES)  # Holm's first, strictest level


def model(**options):
    options = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16} | options
    return tiny_model("llama", vocab_size=VOCABULARY, pad_token_id=None, dtype="float64", **options)


def exact_law(target, sampling):
    """Joint distribution of the first tokens, by teacher forcing and the documented processing."""
    params = bass.SamplingParams(**sampling)
    texts = torch.tensor([*itertools.product(range(VOCABULARY), repeat=TOKENS)])
    logits = target(torch.cat([PROMPT.expand(len(texts), -1), texts], 1)).logits[:, len(PROMPT) - 1 : -1]
    p = probabilities(logits.flatten(0, 1), params).view_as(logits)
    law = p.gather(-1, texts[..., None])[..., 0].prod(-1)
    return dict(zip(map(tuple, texts.tolist()), law.tolist(), strict=True))


def g_test(counts, law):
    """p-value of the counts; cells of expectation < 5 are pooled."""
    total = sum(counts.values())
    assert all(law[tokens] > 0 for tokens in counts), "an impossible text was generated"
    cells = sorted(law, key=law.get)
    expected = np.array([law[tokens] * total for tokens in cells])
    observed = np.array([counts.get(tokens, 0) for tokens in cells], dtype=float)
    small = expected < 5
    expected = np.append(expected[~small], expected[small].sum())
    observed = np.append(observed[~small], observed[small].sum())
    kept = expected > 0
    expected, observed = expected[kept], observed[kept]
    terms = np.where(observed > 0, observed * np.log(np.maximum(observed, 1e-300) / expected), 0.0)
    return chi2.sf(2 * terms.sum(), df=len(expected) - 1)


@torch.no_grad()
@pytest.mark.parametrize(("rule", "draft", "sampling"), CASES)
def test_first_tokens_follow_the_exact_distribution(rule, draft, sampling):
    target = model()
    pair = bass.ModelPair(target, {"near": model(noise=0.2), "far": model(seed=3), None: None}[draft])
    out = bass.generate(
        pair,
        PROMPT,
        num_return_sequences=SAMPLES,
        max_new_tokens=TOKENS,
        draft_length=2,
        verification=rule,
        eos_token_id=(),
        trace="off",
        **sampling,
    )
    tokens, counts = np.unique(torch.stack(out.sequences).numpy(), axis=0, return_counts=True)
    found = {tuple(map(int, row)): int(count) for row, count in zip(tokens, counts, strict=True)}
    assert g_test(found, exact_law(target, sampling)) > ALPHA


@torch.no_grad()
def test_g_test_finds_a_small_bias():
    """A total variation of 0.05 is found at this sample size."""
    law = exact_law(model(), {"temperature": 1.0})
    cells = sorted(law)
    p = np.array([law[tokens] for tokens in cells])
    biased = p.copy()
    biased[p.argmax()] -= 0.05
    biased += 0.05 / len(p)
    counts = np.random.default_rng(0).multinomial(SAMPLES, biased / biased.sum())
    assert g_test({tokens: int(c) for tokens, c in zip(cells, counts, strict=True) if c}, law) < ALPHA
