"""A memory that is full or a device that is lost: the error says what to do, and what can go on goes on."""

import copy
import weakref

import pytest
import torch
from recording import use_on_cpu
from recovery import (
    PROMPTS,
    assert_same,
    assert_same_results,
    disturbed_pair,
    fail_at_call,
    generate,
    probed,
    session_with_rows,
)
from sessions import run_to_the_end
from tiny import CONTEXT, ragged_prompts, tiny_model

import bass_core as bass
from bass_core import cache, environment, kernel_ops, probe, sampling
from bass_core.cache import RaggedCache


@pytest.fixture
def pair() -> bass.ModelPair:
    return probed(disturbed_pair())


# --- memory that is full --------------------------------------------------------------------------


@pytest.fixture
def small_memory(monkeypatch):
    """small_memory(error, elements): an allocator that refuses zeroed tensors of more elements than that."""
    zeros = torch.zeros

    def install(error: BaseException, elements: int) -> None:
        def limited(*shape, **options):
            made = zeros(*shape, **options)
            if made.numel() > elements:
                raise error
            return made

        monkeypatch.setattr(torch, "zeros", limited)

    yield install
    monkeypatch.setattr(torch, "zeros", zeros)


CUDA_IS_FULL = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.10 GiB"
FULL = {
    "cuBLAS": (
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        torch.OutOfMemoryError,
    ),
    "CUDA": (torch.OutOfMemoryError(CUDA_IS_FULL), torch.OutOfMemoryError),
    "CPU": (
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        torch.OutOfMemoryError,
    ),
    "Python": (MemoryError(), MemoryError),
}


def elements_of_a_cache(rows: int, slots: int) -> int:
    """Keys of one layer of the tiny llama: 2 KV heads of 8 dimensions."""
    return rows * slots * 2 * 8


@pytest.mark.parametrize("allocator", FULL)
def test_cache_that_does_not_fit_says_how_large_a_row_is_and_what_to_lower(
    monkeypatch, pair, cache_memory, small_memory, allocator
):
    expected = generate(pair)
    error, kind = FULL[allocator]
    slots = 13 + 12 + 1
    with monkeypatch.context():
        small_memory(error, elements_of_a_cache(3, slots) - 1)
        with pytest.raises(kind) as caught:
            generate(pair)
    gigabytes = 2 * 2 * elements_of_a_cache(1, slots) * 8 / 1e9  # keys and values, 2 layers, float64
    text = str(caught.value)
    assert text.startswith("out of memory")
    assert f"{gigabytes:.3g} GB per row" in text
    assert "3 rows" in text
    assert "max_batch_size" in text and "max_new_tokens" in text
    assert caught.value.__cause__ is error
    assert cache_memory.held == 0
    monkeypatch.undo()
    assert_same(generate(pair), expected)


def test_a_session_whose_first_row_found_no_memory_takes_a_shorter_one(monkeypatch, pair, small_memory, cache_memory):
    """Some layers had theirs already, for rows of that length."""
    expected = bass.generate(pair, PROMPTS[:1], max_new_tokens=12, draft_length=3, eos_token_id=()).sequences[0]
    with bass.Session(pair, max_batch_size=3, draft_length=3, eos_token_id=()) as session:
        made, slots = [], 60 + len(PROMPTS[0]) + 1
        with monkeypatch.context() as context:
            allocate = cache.RaggedCache.allocate

            def limited(self, like, shape):
                made.append(shape)
                if len(made) == 3:  # the second layer's
                    raise torch.OutOfMemoryError(CUDA_IS_FULL)
                return allocate(self, like, shape)

            context.setattr(cache.RaggedCache, "allocate", limited)
            long = session.submit(PROMPTS[0], max_new_tokens=60)
            with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
                session.step()
        assert made[0][2] == slots and session.target.cache.buffers() == []
        session.cancel(long)
        short = session.submit(PROMPTS[0], max_new_tokens=12)
        while not session.idle:
            session.step()
        assert session.result(short).sequence.tolist() == expected.tolist()
        assert session.target.cache.slots == session.drafter.runner.cache.slots == len(PROMPTS[0]) + 12 + 1


def test_room_that_was_not_there_is_not_asked_for_again(monkeypatch, pair):
    pad = torch.nn.functional.pad
    with bass.Session(pair, max_batch_size=3, draft_length=3, eos_token_id=()) as session:

        def limited(tensor, extra, *rest):
            if tensor is session.rows.logprobs:  # those of the tokens found room
                raise torch.OutOfMemoryError(CUDA_IS_FULL)
            return pad(tensor, extra, *rest)

        with monkeypatch.context() as context:
            context.setattr(torch.nn.functional, "pad", limited)
            with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
                session.reserve(400)
        short = session.submit(PROMPTS[0], max_new_tokens=12)
        while not session.idle:
            session.step()
        assert session.target.cache.slots == session.drafter.runner.cache.slots == len(PROMPTS[0]) + 12 + 1
        assert session.rows.tokens.shape == session.rows.logprobs.shape == session.rows.tokens_host.shape
        expected = bass.generate(pair, PROMPTS[:1], max_new_tokens=12, draft_length=3, eos_token_id=()).sequences[0]
        assert session.result(short).sequence.tolist() == expected.tolist()


def test_memory_that_is_full_says_nothing_of_the_kernels(monkeypatch):
    """Not for good: it may be free at the next call."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = iter([torch.OutOfMemoryError(CUDA_IS_FULL), ImportError("no such symbol")])

    class Kernels:
        def write_kv(self, *_):
            raise next(found)

    monkeypatch.setattr(kernel_ops, "load", Kernels)
    device = torch.device("cpu:0")  # asked for by nobody else
    with pytest.raises(torch.OutOfMemoryError):
        kernel_ops.obstacle(device)
    assert kernel_ops.obstacle(device) == "ImportError: no such symbol"
    kernel_ops.obstacle.cache_clear()


class Small:
    """A memory in which the third buffer of its size finds no place, until `.is_full` is False."""

    def __init__(self, monkeypatch, slots: int):
        self.is_full, self.made, self.slots, allocate = True, 0, slots, cache.RaggedCache.allocate

        def limited(own, like, shape):
            self.made += shape[2] > self.slots
            if self.is_full and shape[2] > self.slots and self.made % 3 == 0:
                raise torch.OutOfMemoryError(CUDA_IS_FULL)
            return allocate(own, like, shape)

        monkeypatch.setattr(cache.RaggedCache, "allocate", limited)


@pytest.mark.parametrize("chunk", [None, 4])
def test_rows_that_found_no_memory_leave_nothing_on_the_device(monkeypatch, pair, chunk):
    """Steps of fixed shapes pass over places without a row, too."""
    use_on_cpu(monkeypatch)
    expected = bass.generate(pair, PROMPTS, max_new_tokens=8, draft_length=3, eos_token_id=()).sequences
    Small(monkeypatch, slots=40)
    long = [torch.arange(30) + row for row in range(4)]
    with bass.Session(pair, max_batch_size=4, draft_length=3, eos_token_id=(), prefill_chunk=chunk) as session:
        for _ in range(2):
            handles = [session.submit(prompt, max_new_tokens=20) for prompt in long]
            with pytest.raises(torch.OutOfMemoryError):
                session.step()
            for handle in handles:
                session.cancel(handle)
        handles = [session.submit(prompt, max_new_tokens=8) for prompt in PROMPTS]
        while not session.idle:
            session.step()
        found = [session.result(handle).sequence for handle in handles]
    assert all(map(torch.equal, found, expected))


def test_rows_that_fit_have_no_room_doubled_for_them(monkeypatch, pair):
    with bass.Session(pair, max_batch_size=2, draft_length=3, eos_token_id=()) as session:
        session.submit(PROMPTS[0], max_new_tokens=20)
        while not session.idle:
            session.step()
        Small(monkeypatch, slots=40)
        handle = session.submit(PROMPTS[0], max_new_tokens=30)
        while not session.idle:
            session.step()
        assert handle.finish_reason == "length" and session.rows.capacity == len(PROMPTS[0]) + 30


def test_room_is_doubled_within_the_context(pair):
    with bass.Session(pair, max_batch_size=2, draft_length=3, eos_token_id=()) as session:
        for new in (CONTEXT // 2, CONTEXT // 2 + 8):
            session.submit(PROMPTS[0], max_new_tokens=new)
            while not session.idle:
                session.step()
        assert session.rows.capacity == CONTEXT


@pytest.mark.parametrize("allocator", FULL)
def test_the_rows_that_would_fit_are_named_where_the_free_memory_is_known(monkeypatch, pair, small_memory, allocator):
    slots = 13 + 12 + 1
    row = 2 * 2 * elements_of_a_cache(1, slots) * 8
    for free, said in (
        (2.5 * row, "3 rows were wanted; about 2 would fit. Lower"),
        (None, "3 rows were wanted. Lower"),
    ):
        monkeypatch.setattr(cache, "free_memory", lambda device, free=free: free and int(free))
        with monkeypatch.context():
            small_memory(FULL[allocator][0], elements_of_a_cache(3, slots) - 1)
            with pytest.raises((MemoryError, torch.OutOfMemoryError)) as caught:
                generate(pair)
        assert said in str(caught.value)
    monkeypatch.undo()
    assert environment.free_memory(torch.device("cpu")) > 1e6


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
def test_memory_that_fills_up_anywhere_in_a_step_is_explained_and_the_next_call_works(
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


@pytest.mark.parametrize("allocator", FULL)
def test_cache_that_cannot_grow_is_explained_and_the_live_rows_go_on_unharmed(monkeypatch, pair, allocator):
    undisturbed = session_with_rows(pair)
    run_to_the_end(undisturbed[0])
    session, handles = session_with_rows(pair)
    session.step()
    session.step()
    longer = session.submit(ragged_prompts(60)[0], max_new_tokens=12)
    error, kind = FULL[allocator]
    with monkeypatch.context() as patch:
        fail_at_call(patch, RaggedCache, "allocate", 3, error)
        with pytest.raises(kind, match=r"GB per row.*max_batch_size"):
            session.step()
    session.cancel(longer)
    run_to_the_end(session)
    assert_same_results(session, handles, *undisturbed)


@pytest.mark.parametrize("allocator", FULL)
def test_memory_that_is_full_during_the_probe_does_not_condemn_the_model(monkeypatch, allocator):
    monkeypatch.setattr(probe, "_probed", weakref.WeakKeyDictionary())
    pair = bass.ModelPair(copy.deepcopy(tiny_model(dtype="float64")))
    error, kind = FULL[allocator]
    with monkeypatch.context() as patch:
        fail_at_call(patch, RaggedCache, "allocate", 2, error)
        with pytest.raises(kind, match="out of memory"):
            generate(pair)
    assert generate(pair).trace.summary()["attention"] == "pad"


# --- devices that are lost ------------------------------------------------------------------------

ASSERTION = "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"
ILLEGAL_ACCESS = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously"


@pytest.mark.parametrize("text", [ASSERTION, ILLEGAL_ACCESS], ids=["assertion", "illegal access"])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_lost_device_says_to_restart_the_kernel(monkeypatch, pair, role, text):
    fail_at_call(monkeypatch, getattr(pair, role), "forward", 2, RuntimeError(text))
    with pytest.raises(RuntimeError, match="restart the kernel") as caught:
        generate(pair)
    assert not isinstance(caught.value, torch.OutOfMemoryError)
    assert text in str(caught.value)  # or nobody could look it up


def test_lost_device_that_shows_at_the_copy_to_the_host_says_to_restart_the_kernel(monkeypatch, pair):
    """Kernels run asynchronously: most assertions surface there."""
    fail_at_call(monkeypatch, torch.Tensor, "cpu", 2, RuntimeError(ASSERTION))
    with pytest.raises(RuntimeError, match="restart the kernel"):
        generate(pair)


@pytest.mark.parametrize(
    "text", ["required rank 4 tensor to use channels_last memory format", "unsupported operation: more than one"]
)
def test_error_of_another_kind_is_passed_on_as_it_is(monkeypatch, pair, text):
    error = RuntimeError(text)
    fail_at_call(monkeypatch, pair.target, "forward", 2, error)
    with pytest.raises(RuntimeError) as caught:
        generate(pair)
    assert caught.value is error
    assert error.__cause__ is None
