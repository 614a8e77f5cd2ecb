"""The number of operations per step does not depend on the batch size, and the host waits once per step."""

import pytest
import torch
from cpu_models import Operators
from tiny import ragged_prompts, tiny_model

import bass_core as bass
from bass_core.model.cache import RaggedCache


def running_session(rows, **options):
    pair = bass.ModelPair(tiny_model(), tiny_model(noise=0.1))
    session = bass.Session(pair, max_batch_size=rows, draft_length=4, eos_token_id=(), **options)
    for prompt in ragged_prompts(*range(3, 3 + rows)):
        session.submit(prompt, max_new_tokens=60)
    session.step()
    return session


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.8, "verification": "block"},
        {"temperature": 0.8, "verification": "coupled"},
        {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.1},
    ],
    ids=str,
)
def test_step_operations_do_not_depend_on_the_batch_size(monkeypatch, options):
    counts, copies = [], []
    for name in ("cpu", "item", "tolist", "__int__", "__float__"):
        original = getattr(torch.Tensor, name)

        def counting(self, *args, _original=original, _name=name, **kwargs):
            copies.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counting)
    for rows in (2, 2, 16):  # the first session fills the caches of the process
        with running_session(rows, **options) as session, Operators() as operators:
            copies.clear()
            session.step()
        counts.append(len(operators.met))
        assert copies == ["cpu"]
    assert counts[1] == counts[2]


def test_cache_is_allocated_once(monkeypatch):
    allocations, original = [], RaggedCache.allocate
    monkeypatch.setattr(RaggedCache, "allocate", lambda self, *args: (allocations.append(1), original(self, *args))[1])
    pair = bass.ModelPair(tiny_model(), tiny_model(noise=0.1))
    bass.generate(pair, ragged_prompts(3, 9, 5), max_new_tokens=40, max_batch_size=2, eos_token_id=())
    assert len(allocations) == 2 * (2 + 2)  # keys and values, two layers per model


@torch.inference_mode()
def test_row_of_all_layers_is_moved_or_cleared_by_one_operation():
    """A deep model has a hundred buffers, and each operation is a launch on a GPU."""
    with running_session(3) as session:
        cache = session.target.cache
        before = [buffer[2].clone() for buffer in cache.buffers()]
        assert len(before) > 2 and all(row.any() for row in before)
        with Operators() as operators:
            cache.move_row(2, range(0, 2))
        assert operators.count("_foreach_copy_") == 1 and operators.count("copy_") == 0
        for buffer, row in zip(cache.buffers(), before, strict=True):
            assert all(torch.equal(buffer[place], row) for place in range(3))
        with Operators() as operators:
            cache.clear(range(1, 3))
        assert operators.count("_foreach_zero_") == 1 and operators.count("zero_") == 0
        assert all(buffer[0].any() and not buffer[1:].any() for buffer in cache.buffers())
