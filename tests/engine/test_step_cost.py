"""A step's own work must not grow with the batch, nor wait for the device more than once."""

import pytest
import torch
from tiny import ragged_prompts, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

import bass_core as bass
from bass_core.cache import RaggedCache


class CountOperations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.count += 1
        return function(*arguments, **(options or {}))


def running_session(rows, **options):
    pair = bass.ModelPair(tiny_model(), tiny_model(noise=0.1))
    session = bass.Session(pair, max_batch_size=rows, draft_length=4, eos_token_id=(), **options)
    for prompt in ragged_prompts(*range(3, 3 + rows)):
        session.submit(prompt, max_new_tokens=60)
    session.step()
    return session


CASES = [
    {},
    {"temperature": 0.8},
    {"temperature": 0.8, "verification": "block"},
    {"temperature": 0.8, "verification": "coupled"},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.1},
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_a_step_does_the_same_operations_for_any_batch_size(options):
    counts = []
    for rows in (2, 16):
        with running_session(rows, **options) as session, CountOperations() as operations:
            session.step()
        counts.append(operations.count)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_a_step_copies_to_the_host_once(monkeypatch, options):
    copies = []
    for name in ("cpu", "item", "tolist", "__int__", "__float__"):
        original = getattr(torch.Tensor, name)

        def counting(self, *args, _original=original, _name=name, **kwargs):
            copies.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counting)
    with running_session(4, **options) as session:
        copies.clear()
        session.step()
    assert copies == ["cpu"]


def test_the_cache_is_allocated_once(monkeypatch):
    allocations = []
    original = RaggedCache.allocate
    monkeypatch.setattr(RaggedCache, "allocate", lambda self, *args: (allocations.append(1), original(self, *args))[1])
    pair = bass.ModelPair(tiny_model(), tiny_model(noise=0.1))
    bass.generate(pair, ragged_prompts(3, 9, 5), max_new_tokens=40, max_batch_size=2, eos_token_id=())
    assert len(allocations) == 2 * (2 + 2)  # keys and values, two layers of each model
