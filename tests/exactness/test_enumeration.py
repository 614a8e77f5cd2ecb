"""The engine's exact distribution, with every random decision enumerated, equals the target's distribution.

An enumeration takes seconds. The policies of `make test` cover the interface: fixed lengths, lengths per row and step,
stops within a draft, the choice of submitted tokens. The other policies are slow tests.
"""

import functools
import itertools
import math

import pytest
import torch
from trial_policies import Alternating, PerRow, StopWhenUnsure, library_policies

import bass_core as bass
from bass_core.exactness import randomness
from bass_lab.checks.enumeration import EXACT, PROMPT, exact_law, law_of_engine
from bass_lab.checks.oracle import Oracle, RepeatedKey
from bass_lab.checks.tabular import next_token_law, tabular, total_variation

POLICIES = {
    "regular": lambda: 0,
    "k=2": lambda: 2,
    "k=3": lambda: 3,
    "stop when unsure": StopWhenUnsure,
    "per row": PerRow,
    "alternating": lambda: Alternating(k=2),
    **library_policies(limit=3),
}
CASES = [  # policy, rule
    ("regular", "token"),
    ("k=3", "token"),
    ("k=3", "block"),
    ("alternating", "token"),
    ("per row", "block"),
    ("stop when unsure", "token"),
    ("stop when unsure", "block"),
]
OTHERS = [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in itertools.product(library_policies(limit=3), ("token", "block"))
    if case not in CASES
]


@pytest.mark.parametrize(("policy", "rule"), CASES + OTHERS)
def test_distribution_of_a_row(policy, rule):
    target, draft = tabular(2, seed=1), tabular(2, seed=2)
    found = law_of_engine(target, draft, 4, POLICIES[policy], verification=rule)
    assert total_variation(found, exact_law(target, 4)) < EXACT


@pytest.mark.parametrize(
    ("policy", "rule"),
    [
        ("per row", "block"),
        pytest.param("stops at a count", "block", marks=pytest.mark.ci),
    ],
)
def test_joint_distribution_of_two_rows(policy, rule):
    policies = POLICIES | library_policies(limit=2) | {"per row": lambda: PerRow(most=1)}
    target, draft = tabular(2, seed=5), tabular(2, seed=6)
    prompts = ([0, 1], [1, 0, 0])
    found = law_of_engine(target, draft, 3, policies[policy], prompts, verification=rule)
    assert total_variation(found, exact_law(target, 3, prompts)) < EXACT


@pytest.mark.ci
def test_joint_distribution_with_a_waiting_sample():
    target, draft = tabular(2, seed=5), tabular(2, seed=6)
    found = law_of_engine(target, draft, 3, lambda: 2, num_return_sequences=2, max_batch_size=1, verification="block")
    assert total_variation(found, exact_law(target, 3, (PROMPT, PROMPT))) < EXACT


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("draft", ["target", "one-hot"])
def test_distribution_with_extreme_drafts(rule, draft):
    target, prompt = tabular(2, seed=7), [0, 1, 0, 1, 0]
    drafter = target if draft == "target" else bass.NgramDrafter()
    found = law_of_engine(target, drafter, 4, lambda: 3, (prompt,), verification=rule)
    assert total_variation(found, exact_law(target, 4, (prompt,))) < EXACT


@pytest.mark.parametrize(
    ("rule", "vocabulary", "processing"),
    [
        ("block", 2, {"temperature": 0.6}),
        ("token", 3, {"top_k": 2}),
        ("block", 3, {"top_p": 0.9}),
        ("token", 3, {"min_p": 0.3}),
        ("token", 2, {"temperature": 1.4, "repetition_penalty": 1.5}),
    ],
    ids=str,
)
def test_processed_distributions(rule, vocabulary, processing):
    """Target and draft keep different ids: p = 0 < q and q = 0 < p both occur."""
    target, draft = tabular(vocabulary, seed=1), tabular(vocabulary, seed=2)
    found = law_of_engine(target, draft, 4, lambda: 2, verification=rule, **processing)
    assert total_variation(found, exact_law(target, 4, **processing)) < EXACT


@pytest.mark.parametrize(
    ("policy", "new"),
    [
        ("regular", 3),
        ("stop when unsure", 3),
        ("per row", 3),
        pytest.param("k=2", 4, marks=pytest.mark.ci),
    ],
)
def test_coupled_distribution(policy, new):
    target, draft = tabular(2, seed=8), tabular(2, seed=9)
    thresholds = coupled_thresholds((target, draft), PROMPT)
    found = law_of_engine(target, draft, new, POLICIES[policy], verification="coupled", thresholds=thresholds)
    assert total_variation(found, exact_law(target, new)) < EXACT


def coupled_thresholds(models, prompt):
    """Return the values of g_0 - g_1 at which a model's choice changes, after all texts of the models."""

    @functools.cache
    def threshold(model, prefix):
        p0, p1 = next_token_law(model, list(prefix))
        return math.log(p1) - math.log(p0)

    def thresholds(position, noise):
        prefixes = {tuple(prompt)}
        for earlier in range(len(prompt), position):
            pairs = itertools.product(models, prefixes)
            prefixes = {(*prefix, int(noise[earlier] < threshold(model, prefix))) for model, prefix in pairs}
        return [threshold(model, prefix) for model, prefix in itertools.product(models, prefixes)]

    return thresholds


def test_oracle_refuses_a_repeated_key():
    key = randomness.Key(torch.tensor([5]), torch.tensor([1]), randomness.Purpose.DRAFT, 0)

    def run():
        randomness.draw(torch.tensor([[0.5, 0.5]]), key)
        return int(randomness.draw(torch.tensor([[0.5, 0.5]]), key))

    with pytest.raises(RepeatedKey):
        Oracle().laws(run)
