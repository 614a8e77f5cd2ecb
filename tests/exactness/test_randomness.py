import weakref

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from bass_core.exactness import randomness
from bass_core.exactness.randomness import Key, Purpose


def keys(rows=4, seed=0, counter=3, purpose=Purpose.DRAFT, slots=5):
    streams = torch.tensor([randomness.stream(seed, row) for row in range(rows)])
    return Key(streams, torch.full((rows,), counter), purpose, torch.arange(slots))


def test_numbers_are_a_function_of_the_key_alone():
    base = randomness.uniform(keys())
    assert torch.equal(randomness.uniform(keys()), base)
    assert torch.equal(randomness.uniform(keys(rows=7))[:4], base)
    assert torch.equal(randomness.uniform(keys(slots=9))[:, :5], base)


def test_every_part_of_the_key_changes_the_numbers():
    base = randomness.uniform(keys())
    for other in (keys(seed=1), keys(counter=4), keys(purpose=Purpose.ACCEPT)):
        assert (randomness.uniform(other) != base).all()
    assert len(base.unique()) == base.numel()
    seeds = (-1, 0, 1, 2**63, 2**64 + 7)
    assert len({randomness.stream(seed, row) for seed in seeds for row in range(5)}) == 25


def test_step_keys_give_the_numbers_of_single_keys():
    key = keys()
    step = randomness.StepKeys(key.stream, key.counter, slots=5)
    pairs = [
        (step.accept(torch.arange(3)), Key(key.stream, key.counter, Purpose.ACCEPT, torch.arange(3))),
        (step.target(), Key(key.stream, key.counter, Purpose.TARGET)),
        *((step.draft(slot), Key(key.stream, key.counter, Purpose.DRAFT, slot)) for slot in range(5)),
    ]
    for of_step, alone in pairs:
        assert torch.equal(randomness.uniform(of_step), randomness.uniform(alone))
    drafts = torch.stack([randomness.uniform(step.draft(slot)) for slot in range(5)], 1)
    assert torch.equal(drafts, randomness.uniform(key))


def test_constants_of_recorded_steps_keep_their_address():
    """A CUDA graph stores only the address and keeps no tensor alive."""
    kept = weakref.ref(randomness._words(5, torch.device("cpu")))
    for slots in range(6, 200):
        randomness._words(slots, torch.device("cpu"))
    assert kept() is not None


def test_uniform_numbers_are_uniform_and_uncorrelated():
    numbers = randomness.uniform(keys(rows=200, slots=500))
    assert numbers.min() >= 0 and numbers.max() < 1
    assert kstest(numbers.flatten().numpy(), "uniform").pvalue > 1e-4
    bound = 5 / numbers.numel() ** 0.5
    for a, b in ((numbers[:-1], numbers[1:]), (numbers[:, :-1], numbers[:, 1:])):
        assert abs(np.corrcoef(a.flatten(), b.flatten())[0, 1]) < bound
    counters = torch.stack([randomness.uniform(keys(counter=c, slots=1))[:, 0] for c in range(5000)])
    assert kstest(counters[:, 0].numpy(), "uniform").pvalue > 1e-4


def test_noise_is_gumbel_and_keyed_by_position():
    key = keys(rows=50, purpose=Purpose.NOISE, slots=4)
    noise = randomness.noise(key, 300)
    assert kstest(noise.flatten().numpy(), "gumbel_r").pvalue > 1e-4
    # counter + slot is the position: another step has the same noise at the same position
    later = Key(key.stream, key.counter + 2, Purpose.NOISE, torch.arange(2))
    assert torch.equal(randomness.noise(later, 300), noise[:, 2:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inverse_cdf_never_returns_an_impossible_id(dtype):
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(200, 5000, generator=generator, dtype=dtype)
    probs[torch.rand(200, 5000, generator=generator) < 0.98] = 0
    probs[:, -100:] = 0
    first, last = (probs > 0).int().argmax(1), 4999 - (probs > 0).flip(1).int().argmax(1)
    for u, expected in ((0.0, first), (1 - 2**-52, last)):
        found = randomness.inverse_cdf(probs, torch.full((200,), u, dtype=torch.float64))
        assert torch.equal(found, expected)


def test_inverse_cdf_follows_ascending_ids_and_needs_no_normalisation():
    probs = torch.tensor([[1.0, 0.0, 2.0, 1.0]]).expand(5, 4)
    u = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75], dtype=torch.float64)
    assert randomness.inverse_cdf(probs, u).tolist() == [0, 0, 2, 2, 3]


@pytest.mark.parametrize("size", [1, 1000, 1025])
def test_inverse_cdf_agrees_with_cumulative_sums(size):
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand((64, size), generator=generator, dtype=torch.float64)
    u = torch.rand(64, generator=generator, dtype=torch.float64)
    expected = torch.searchsorted(probs.cumsum(-1), (u * probs.sum(-1))[:, None], right=True)[:, 0]
    assert torch.equal(randomness.inverse_cdf(probs, u), expected)


def test_acceptance_is_strict():
    key = keys(rows=3)
    u = randomness.uniform(key)
    assert not randomness.accept(u, key).any()
    assert randomness.accept(u + 1e-15, key).all()
    assert not randomness.accept(torch.zeros_like(u), key).any()
    assert randomness.accept(torch.ones_like(u), key).all()
