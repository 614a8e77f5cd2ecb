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
        self.count, self.writing = 0, 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.count += 1
        self.writing += function._schema.is_mutable
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
    for rows in (2, 2, 16):  # the first makes what the process keeps
        with running_session(rows, **options) as session, CountOperations() as operations:
            session.step()
        counts.append(operations.count)
    assert counts[1] == counts[2]


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


@torch.inference_mode()
def test_a_row_of_all_layers_is_moved_or_cleared_by_one_operation():
    """On a GPU each would be a launch, and a deep model has a hundred buffers."""
    with running_session(3) as session:
        cache = session.target.cache
        assert len(cache.buffers()) > 2
        for change in (lambda: cache.move_row(2, range(0, 2)), lambda: cache.clear(range(1, 3))):
            with CountOperations() as operations:
                change()
            assert operations.writing == 1
        assert all(buffer[0].any() and not buffer[1:].any() for buffer in cache.buffers())


@torch.inference_mode()
def test_a_moved_row_is_the_row():
    with running_session(3) as session:
        cache = session.target.cache
        before = [buffer[2].clone() for buffer in cache.buffers()]
        cache.move_row(2, range(0, 2))
        for buffer, row in zip(cache.buffers(), before, strict=True):
            assert row.any() and all(torch.equal(buffer[place], row) for place in range(3))
