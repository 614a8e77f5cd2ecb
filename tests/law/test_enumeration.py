"""The primary gate: the real engine's exact law, by enumeration of every random decision, is the target's law."""

import functools
import itertools
import math

import pytest
import torch
from trial_policies import Alternating, PerRow, StopWhenUnsure, library_policies

import bass_core as bass
from bass_core import randomness
from bass_lab.checks.enumeration import EXACT, PROMPT, exact_law, law_of_engine
from bass_lab.checks.oracle import Oracle, RepeatedKey
from bass_lab.checks.tabular import next_token_law, tabular, total_variation

POLICIES = {
    "regular": lambda: 0,
    "k=1": lambda: 1,
    "k=2": lambda: 2,
    "k=3": lambda: 3,
    **library_policies(limit=3),
    "stop when unsure": lambda: StopWhenUnsure(),
    "per row": lambda: PerRow(),
    "alternating": lambda: Alternating(k=2),
}


OF_ALL_KINDS = "regular", "k=3", "goodput", "ragged budget", "stop when unsure"
CASES = [
    pytest.param(*size, policy, marks=[pytest.mark.slow] * (policy not in quick))
    for size, quick in (((2, 4), POLICIES), ((3, 4), OF_ALL_KINDS), ((2, 5), ()))
    for policy in POLICIES
]


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(("vocabulary", "new", "policy"), CASES)
def test_law_of_a_row_is_the_targets(vocabulary, new, rule, policy):
    target, draft = tabular(vocabulary, seed=1), tabular(vocabulary, seed=2)
    found = law_of_engine(target, draft, new, POLICIES[policy], verification=rule)
    assert total_variation(found, exact_law(target, new)) < EXACT


@pytest.mark.parametrize("rule", ["token", "block"])
def test_law_at_vocabulary_four(rule):
    target, draft = tabular(4, seed=3), tabular(4, seed=4)
    found = law_of_engine(target, draft, 3, lambda: 2, verification=rule)
    assert total_variation(found, exact_law(target, 3)) < EXACT


SECOND_STEP = "k=2 and a second step"
JOINT = {"k=2": (lambda: 2, 3), SECOND_STEP: (lambda: 2, 4), "per row": (lambda: PerRow(most=1), 3)}
JOINT |= {name: (policy, 3) for name, policy in library_policies(limit=2).items()}


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(
    "policy", [pytest.param(name, marks=[pytest.mark.slow] * (name == SECOND_STEP)) for name in JOINT]
)
def test_joint_law_of_a_batch_of_two(rule, policy):
    policy, new = JOINT[policy]
    target, draft = tabular(2, seed=5), tabular(2, seed=6)
    prompts = ([0, 1], [1, 0, 0])
    found = law_of_engine(target, draft, new, policy, prompts, verification=rule)
    assert total_variation(found, exact_law(target, new, prompts)) < EXACT


@pytest.mark.parametrize("rule", ["token", "block"])
def test_law_with_a_waiting_row_and_a_shared_prompt(rule):
    target, draft = tabular(2, seed=5), tabular(2, seed=6)
    found = law_of_engine(target, draft, 3, lambda: 2, num_return_sequences=2, max_batch_size=1, verification=rule)
    assert total_variation(found, exact_law(target, 3, (PROMPT, PROMPT))) < EXACT


@pytest.mark.parametrize("rule", ["token", "block"])
def test_law_when_draft_equals_target(rule):
    target = tabular(3, seed=1)
    found = law_of_engine(target, target, 4, lambda: 2, verification=rule)
    assert total_variation(found, exact_law(target, 4)) < EXACT


@pytest.mark.parametrize("rule", ["token", "block"])
def test_law_with_one_hot_drafts(rule):
    target = tabular(2, seed=7)
    prompts = ([0, 1, 0, 1, 0],)
    found = law_of_engine(target, bass.NgramDrafter(), 4, lambda: 3, prompts, verification=rule)
    assert total_variation(found, exact_law(target, 4, prompts)) < EXACT


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(
    "processing",
    [
        {"temperature": 0.6},
        {"top_k": 2},
        {"top_p": 0.7},
        {"min_p": 0.3},
        {"temperature": 1.4, "repetition_penalty": 1.5},
    ],
    ids=str,
)
def test_law_of_processed_distributions(rule, processing):
    """Target and draft keep different ids: p = 0 < q and q = 0 < p both occur."""
    target, draft = tabular(3, seed=1), tabular(3, seed=2)
    found = law_of_engine(target, draft, 4, lambda: 2, verification=rule, **processing)
    assert total_variation(found, exact_law(target, 4, **processing)) < EXACT


# exact for any policy by construction: the costlier length for those that show every way to stop
COUPLED = dict.fromkeys(POLICIES, 3) | dict.fromkeys(
    ["regular", "k=1", "k=2", "k=3", "algorithm 1", "hugging face", "stop when unsure", "per row", "alternating"], 4
)


@pytest.mark.parametrize("policy", POLICIES)
def test_coupled_law_is_the_targets(policy):
    target, draft, new = tabular(2, seed=8), tabular(2, seed=9), COUPLED[policy]
    thresholds = coupled_thresholds((target, draft), PROMPT)
    found = law_of_engine(target, draft, new, POLICIES[policy], verification="coupled", thresholds=thresholds)
    assert total_variation(found, exact_law(target, new)) < EXACT


def coupled_thresholds(models, prompt):
    """All values of g_0 - g_1 at which a model changes its mind, after any tokens that one model or the other said."""

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
