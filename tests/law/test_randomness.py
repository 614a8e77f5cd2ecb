"""Counter-based numbers: what they are a function of, and that they look random."""

import weakref

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from bass_core import randomness
from bass_core.randomness import Key, Purpose


def keys(rows=4, seed=0, counter=3, purpose=Purpose.DRAFT, slots=5):
    streams = torch.tensor([randomness.stream(seed, row) for row in range(rows)])
    return Key(streams, torch.full((rows,), counter), purpose, torch.arange(slots))


def test_numbers_are_a_function_of_the_key_alone():
    assert torch.equal(randomness.uniform(keys()), randomness.uniform(keys()))
    assert torch.equal(randomness.uniform(keys(rows=7))[:4], randomness.uniform(keys()))
    assert torch.equal(randomness.uniform(keys(slots=9))[:, :5], randomness.uniform(keys()))


def test_numbers_of_single_slots_equal_those_worked_out_together():
    key = keys()
    step = randomness.StepKeys(key.stream, key.counter, slots=5)
    accepts = Key(key.stream, key.counter, Purpose.ACCEPT, torch.arange(3))
    assert torch.equal(randomness.uniform(step.accept(torch.arange(3))), randomness.uniform(accepts))
    assert torch.equal(
        randomness.uniform(step.target()), randomness.uniform(Key(key.stream, key.counter, Purpose.TARGET))
    )
    for slot in range(5):
        alone = Key(key.stream, key.counter, Purpose.DRAFT, slot)
        assert torch.equal(randomness.uniform(step.draft(slot)), randomness.uniform(alone))
        assert torch.equal(randomness.uniform(alone), randomness.uniform(key)[:, slot])


def test_constants_that_recorded_steps_read_stay_where_they_are():
    """A CUDA graph holds their addresses, and nothing else of them."""
    kept = weakref.ref(randomness._words(5, torch.device("cpu")))
    for slots in range(6, 200):
        randomness._words(slots, torch.device("cpu"))
    assert kept() is not None


def test_every_part_of_the_key_changes_the_numbers():
    base = randomness.uniform(keys())
    others = [keys(seed=1), keys(counter=4), keys(purpose=Purpose.ACCEPT)]
    for other in others:
        assert (randomness.uniform(other) != base).all()
    assert len(base.unique()) == base.numel()


def test_seeds_beyond_64_bits_and_below_zero_are_seeds_too():
    assert len({randomness.stream(seed, 0) for seed in (-1, 0, 1, 2**63, 2**64 + 7)}) == 5


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
    # counter + slot is the position: the same position met from another step has the same noise
    later = Key(key.stream, key.counter + 2, Purpose.NOISE, torch.arange(2))
    assert torch.equal(randomness.noise(later, 300), noise[:, 2:])


@pytest.mark.parametrize("shape", [(1,), (3, 1000), (2, 3, 1025)])
def test_sums_by_doubling_are_cumulative_sums(shape):
    numbers = torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(randomness._by_doubling(numbers), numbers.cumsum(-1), rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inverse_cdf_never_returns_an_impossible_id(dtype):
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(200, 5000, generator=generator, dtype=dtype)
    probs[torch.rand(200, 5000, generator=generator) < 0.98] = 0
    probs[:, -100:] = 0
    largest = torch.tensor(1 - 2**-52, dtype=torch.float64)
    for u in (torch.zeros(200, dtype=torch.float64), largest.expand(200)):
        ids = randomness.inverse_cdf(probs, u)
        assert (probs.gather(1, ids[:, None]) > 0).all()
    first, last = (probs > 0).int().argmax(1), 4999 - (probs > 0).flip(1).int().argmax(1)
    assert torch.equal(randomness.inverse_cdf(probs, torch.zeros(200, dtype=torch.float64)), first)
    assert torch.equal(randomness.inverse_cdf(probs, largest.expand(200)), last)


def test_inverse_cdf_goes_by_ascending_ids_and_needs_no_normalisation():
    probs = torch.tensor([[1.0, 0.0, 2.0, 1.0]]).expand(5, 4)
    u = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75], dtype=torch.float64)
    assert randomness.inverse_cdf(probs, u).tolist() == [0, 0, 2, 2, 3]


def test_acceptance_is_strict():
    key = keys(rows=3)
    u = randomness.uniform(key)
    assert not randomness.accept(u, key).any()
    assert randomness.accept(u + 1e-15, key).all()
    assert not randomness.accept(torch.zeros_like(u), key).any()
    assert randomness.accept(torch.ones_like(u), key).all()
