import numpy as np
import pytest
import torch
from tiny import tiny_model

import bass_core as bass
from bass_lab.checks import plain_decoding
from bass_lab.checks.goodness_of_fit import g_test

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
ALPHA = 1e-4 / len(CASES)  # the first, strictest level of Holm's correction


def model(**options):
    options |= {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16}
    return tiny_model("llama", vocab_size=5, pad_token_id=None, dtype="float64", **options)


@pytest.mark.parametrize(("rule", "draft", "sampling"), CASES)
def test_first_tokens_follow_the_exact_distribution(rule, draft, sampling):
    pair = bass.ModelPair(model(), {"near": model(noise=0.2), "far": model(seed=3), None: None}[draft])
    options = {"max_new_tokens": TOKENS, "draft_length": 2, "verification": rule, "eos_token_id": (), "trace": "off"}
    out = bass.generate(pair, PROMPT, num_return_sequences=SAMPLES, **options, **sampling)
    law = plain_decoding.exact_law(pair.target, PROMPT, bass.SamplingParams(**sampling), TOKENS)
    assert g_test([tuple(sequence.tolist()) for sequence in out.sequences], law)["p_value"] > ALPHA


def test_g_test_finds_a_total_variation_of_a_twentieth():
    law = plain_decoding.exact_law(model(), PROMPT, bass.SamplingParams(temperature=1.0), TOKENS)
    texts, biased = [*law], np.array([*law.values()]) + 0.05 / len(law)
    biased[biased.argmax()] -= 0.05
    found = np.random.default_rng(0).choice(len(texts), SAMPLES, p=biased / biased.sum())
    assert g_test([texts[each] for each in found], law)["p_value"] < ALPHA
