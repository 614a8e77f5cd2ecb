"""Easily disturbed models, calls that fail at a chosen time, and the memory of caches."""

import copy
import itertools

import torch
from tiny import ragged_prompts, tiny_model
from torch.multiprocessing.reductions import StorageWeakRef

import bass_core as bass
from bass_core.model import probe
from bass_core.model.cache import RaggedCache

PROMPTS = ragged_prompts(5, 9, 13)
CUDA_IS_FULL = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.10 GiB"


def limit_memory(monkeypatch, positions: int, every: int = 1) -> None:
    """Let every n-th buffer of rows with more positions fail, as on a full device."""
    made, allocate = itertools.count(1), RaggedCache.allocate

    def limited(own, like, shape):
        if shape[2] > positions and next(made) % every == 0:
            raise torch.OutOfMemoryError(CUDA_IS_FULL)
        return allocate(own, like, shape)

    monkeypatch.setattr(RaggedCache, "allocate", limited)


def disturbed_pair() -> bass.ModelPair:
    """Return copies of models, partly in training mode. Active dropout would change the text."""
    dropout = {"attention_dropout": 0.5}
    pair = bass.ModelPair(
        copy.deepcopy(tiny_model(dtype="float64", **dropout)),
        copy.deepcopy(tiny_model(dtype="float64", noise=0.02, **dropout)),
    )
    pair.target.train()
    pair.target.model.layers[0].eval()
    pair.draft.model.layers[1].train()
    return pair


def probed(pair: bass.ModelPair) -> bass.ModelPair:
    """Probe the pair's attention, so that the probes' calls are not counted later."""
    for model in pair.models:
        probe.resolve(model)
    return pair


def generate(pair: bass.ModelPair, **options) -> bass.Generation:
    defaults = {"max_new_tokens": 12, "temperature": 0.8, "eos_token_id": (), "draft_length": 3}
    return bass.generate(pair, PROMPTS, **(defaults | options))


def assert_same(out: bass.Generation, other: bass.Generation) -> None:
    assert all(torch.equal(a, b) for a, b in zip(out.sequences, other.sequences, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(out.logprobs, other.logprobs, strict=True))
    assert out.finish_reasons == other.finish_reasons


def session_with_rows(pair, **options) -> tuple[bass.Session, list]:
    session = bass.Session(pair, eos_token_id=(), draft_length=3, **options)
    return session, [session.submit(prompt, max_new_tokens=12) for prompt in PROMPTS]


def assert_same_results(session, handles, other, other_handles) -> None:
    for handle, other_handle in zip(handles, other_handles, strict=True):
        result, expected = session.result(handle), other.result(other_handle)
        assert torch.equal(result.sequence, expected.sequence)
        assert torch.equal(result.logprobs, expected.logprobs)
        assert result.finish_reason == expected.finish_reason


def fail_at_call(monkeypatch, owner, name: str, number: int, error: BaseException) -> None:
    """Let call `number` (from 1) of owner.name raise. For a module's `forward`, a hook raises."""
    original, calls = getattr(owner, name), itertools.count(1)

    def failing(*args, **kwargs):
        if next(calls) == number:
            raise error
        return None if name == "forward" else original(*args, **kwargs)

    if name == "forward":
        monkeypatch.setitem(owner._forward_pre_hooks, 0, failing)
    else:
        monkeypatch.setattr(owner, name, failing)


class CacheMemory:
    """Count the bytes of stored keys and values that are still in memory."""

    def __init__(self, monkeypatch):
        self._storages = []
        for name in ("allocate", "save_row"):
            monkeypatch.setattr(RaggedCache, name, self._noting(getattr(RaggedCache, name)))

    def _noting(self, method):
        def noting(*args, **kwargs):
            made = method(*args, **kwargs)
            tensors = [made] if isinstance(made, torch.Tensor) else made
            self._storages += [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
            return made

        return noting

    @property
    def was_used(self) -> bool:
        return len(self._storages) > 0

    @property
    def held(self) -> int:
        """Return the bytes in memory, without running the garbage collector."""
        storages = [torch.UntypedStorage._new_with_weak_ptr(storage.cdata) for storage in self._storages]
        return sum(storage.nbytes() for storage in storages if storage is not None)
