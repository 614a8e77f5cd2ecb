"""Full memory and lost devices raise errors with a remedy, and the other rows continue."""

import copy

import pytest
import torch
from recording import use_on_cpu
from recovery import (
    CUDA_IS_FULL,
    PROMPTS,
    assert_same,
    assert_same_results,
    disturbed_pair,
    fail_at_call,
    generate,
    limit_memory,
    probed,
    session_with_rows,
)
from sessions import run_to_the_end
from tiny import CONTEXT, ragged_prompts, tiny_model

import bass_core as bass
from bass_core import environment
from bass_core.exactness import sampling
from bass_core.model import cache, kernel_ops
from bass_core.model.cache import RaggedCache


@pytest.fixture
def pair() -> bass.ModelPair:
    return probed(disturbed_pair())


FULL = {  # allocator: its error, the type of error for callers
    "cuBLAS": (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), torch.OutOfMemoryError),
    "CUDA": (torch.OutOfMemoryError(CUDA_IS_FULL), torch.OutOfMemoryError),
    "CPU": (RuntimeError("DefaultCPUAllocator: can't allocate memory"), torch.OutOfMemoryError),
    "Python": (MemoryError(), MemoryError),
}


@pytest.mark.parametrize("allocator", FULL)
def test_cache_that_does_not_fit_names_its_size_and_remedies(monkeypatch, pair, cache_memory, allocator):
    expected = generate(pair)
    error, kind = FULL[allocator]
    elements = (13 + 12 + 1) * 2 * 8  # keys of a row in one layer: KV slots, KV heads, dimensions
    row, zeros = 2 * 2 * elements * 8, torch.zeros  # bytes: keys and values, 2 layers, float64

    def limited(*shape, **options):
        made = zeros(*shape, **options)
        if made.numel() >= 3 * elements:
            raise error
        return made

    for free, rows in (
        (2.5 * row, "3 rows were requested; about 2 would fit. Lower"),
        (None, "3 rows were requested. Lower"),
    ):
        with monkeypatch.context() as context:
            context.setattr(cache, "free_memory", lambda device, free=free: free and int(free))
            context.setattr(torch, "zeros", limited)
            with pytest.raises(kind, match=r"^out of memory") as caught:
                generate(pair)
        assert caught.value.__cause__ is error
        for word in (rows, f"{row / 1e9:.3g} GB per row", "max_batch_size", "max_new_tokens"):
            assert word in str(caught.value)
        assert cache_memory.held == 0
    assert_same(generate(pair), expected)
    assert environment.free_memory(torch.device("cpu")) > 1e6


def test_shorter_row_fits_after_one_without_memory(monkeypatch, pair):
    expected = bass.generate(pair, PROMPTS[:1], max_new_tokens=12, draft_length=3, eos_token_id=()).sequences[0]
    with bass.Session(pair, max_batch_size=3, draft_length=3, eos_token_id=()) as session:
        with monkeypatch.context() as context:
            fail_at_call(context, RaggedCache, "allocate", 3, torch.OutOfMemoryError(CUDA_IS_FULL))
            long = session.submit(PROMPTS[0], max_new_tokens=60)
            with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
                session.step()
        assert session.target.cache.buffers() == []
        session.cancel(long)
        short = session.submit(PROMPTS[0], max_new_tokens=12)
        run_to_the_end(session)
        assert session.result(short).sequence.tolist() == expected.tolist()
        assert session.target.cache.kv_slots == session.drafter.runner.cache.kv_slots == len(PROMPTS[0]) + 12 + 1


def test_full_memory_is_no_lasting_obstacle_to_kernels(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = iter([torch.OutOfMemoryError(CUDA_IS_FULL), ImportError("no such symbol")])

    class Kernels:
        def write_kv(self, *_):
            raise next(found)

    monkeypatch.setattr(kernel_ops, "load", Kernels)
    device = torch.device("cpu:0")  # no other test uses this device
    with pytest.raises(torch.OutOfMemoryError):
        kernel_ops.obstacle(device)
    assert kernel_ops.obstacle(device) == "ImportError: no such symbol"
    kernel_ops.obstacle.cache_clear()


@pytest.mark.parametrize("chunk", [None, 4])
def test_rows_without_memory_leave_nothing_on_the_device(monkeypatch, pair, chunk):
    use_on_cpu(monkeypatch)
    expected = bass.generate(pair, PROMPTS, max_new_tokens=8, draft_length=3, eos_token_id=()).sequences
    limit_memory(monkeypatch, 40, every=3)
    long = [torch.arange(30) + row for row in range(4)]
    with bass.Session(pair, max_batch_size=4, draft_length=3, eos_token_id=(), prefill_chunk=chunk) as session:
        for _ in range(2):
            handles = [session.submit(prompt, max_new_tokens=20) for prompt in long]
            with pytest.raises(torch.OutOfMemoryError):
                session.step()
            for handle in handles:
                session.cancel(handle)
        handles = [session.submit(prompt, max_new_tokens=8) for prompt in PROMPTS]
        run_to_the_end(session)
        found = [session.result(handle).sequence for handle in handles]
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(("slots", "longer", "capacity"), [(None, 56, CONTEXT), (40, 30, 35)])
def test_capacity_doubles_within_context_and_memory(monkeypatch, pair, slots, longer, capacity):
    with bass.Session(pair, max_batch_size=2, draft_length=3, eos_token_id=()) as session:
        session.submit(PROMPTS[0], max_new_tokens=48 if slots is None else 20)
        run_to_the_end(session)
        if slots is not None:
            limit_memory(monkeypatch, slots, every=3)
        handle = session.submit(PROMPTS[0], max_new_tokens=longer)
        run_to_the_end(session)
        assert (handle.finish_reason, session.rows.capacity) == ("length", capacity)


@pytest.mark.parametrize(
    ("owner", "name", "number"),
    [
        (lambda pair: pair.draft, "forward", 3),
        (lambda pair: pair.target, "forward", 3),
        (lambda pair: sampling, "probabilities", 3),
        (lambda pair: RaggedCache, "move_row", 1),
        (lambda pair: RaggedCache, "save_row", 1),
    ],
    ids=["draft pass", "target pass", "probabilities", "moving a row", "saving a prompt"],
)
def test_full_memory_in_a_step_is_explained_and_the_next_call_works(
    monkeypatch, pair, cache_memory, owner, name, number
):
    options = {"num_return_sequences": 2, "max_batch_size": 3}
    expected = generate(pair, **options)
    with monkeypatch.context() as patch:
        fail_at_call(patch, owner(pair), name, number, torch.OutOfMemoryError(CUDA_IS_FULL))
        with pytest.raises(torch.OutOfMemoryError, match=r"GB per row.*max_batch_size") as caught:
            generate(pair, **options)
    assert caught.traceback
    assert cache_memory.held == 0
    assert_same(generate(pair, **options), expected)


def test_cache_that_cannot_grow_leaves_the_live_rows_unharmed(monkeypatch, pair):
    undisturbed = session_with_rows(pair)
    run_to_the_end(undisturbed[0])
    session, handles = session_with_rows(pair)
    session.step()
    session.step()
    longer = session.submit(ragged_prompts(60)[0], max_new_tokens=12)
    with monkeypatch.context() as patch:
        fail_at_call(patch, RaggedCache, "allocate", 3, torch.OutOfMemoryError(CUDA_IS_FULL))
        with pytest.raises(torch.OutOfMemoryError, match=r"GB per row.*max_batch_size"):
            session.step()
    session.cancel(longer)
    run_to_the_end(session)
    assert_same_results(session, handles, *undisturbed)


def test_full_memory_during_the_probe_is_no_refusal(monkeypatch):
    pair = bass.ModelPair(copy.deepcopy(tiny_model(dtype="float64")))
    with monkeypatch.context() as patch:
        fail_at_call(patch, RaggedCache, "allocate", 2, FULL["CPU"][0])
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            generate(pair)
    assert generate(pair).trace.summary()["attention"] == "pad"


ASSERTION = "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"
ILLEGAL_ACCESS = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously"


@pytest.mark.parametrize(
    ("owner", "name", "text"),
    [
        (lambda pair: pair.target, "forward", ASSERTION),
        (lambda pair: pair.draft, "forward", ILLEGAL_ACCESS),
        (lambda pair: torch.Tensor, "cpu", ASSERTION),  # kernels are asynchronous: most errors surface in copies
        (lambda pair: pair.target, "forward", "required rank 4 tensor to use channels_last memory format"),
        (lambda pair: pair.target, "forward", "unsupported operation: more than one"),
    ],
    ids=["target", "draft", "copy to the host", "bad format", "unsupported"],
)
def test_lost_device_says_to_restart_the_kernel_and_other_errors_pass(monkeypatch, pair, owner, name, text):
    error = RuntimeError(text)
    fail_at_call(monkeypatch, owner(pair), name, 2, error)
    with pytest.raises(RuntimeError) as caught:
        generate(pair)
    if text in (ASSERTION, ILLEGAL_ACCESS):
        assert not isinstance(caught.value, torch.OutOfMemoryError)
        assert "restart the process" in str(caught.value) and text in str(caught.value)
    else:
        assert caught.value is error and error.__cause__ is None
