"""Fused verification on a CUDA device, and inside a CUDA graph: `pytest -m gpu`."""

import pytest
import torch
from kernel_steps import committing, differing
from test_kernel_draw import drawn, is_right, largest_is_right
from test_kernel_verification import COMMITS, assert_same_bits, disagreements

from bass_kernels import draft_draw, reference, verify
from bass_kernels.fused_verification import BLOCK

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def step(rows, drafts, vocabulary, dtype, temperature, certain, seed):
    """Arguments of `verify`; rows submit 0 … K tokens. `certain`: no draft distributions."""
    generator = torch.Generator("cuda").manual_seed(seed)
    on_gpu = {"generator": generator, "device": "cuda"}
    logits = (3 * torch.randn(rows, drafts + 1, vocabulary, **on_gpu)).to(dtype)
    noise = torch.randn(rows, drafts, vocabulary, **on_gpu)
    q = (logits[:, :drafts].float() / (temperature or 1.0) + noise).softmax(-1)
    drafted = q.reshape(-1, vocabulary).argmax(-1).reshape(rows, drafts)
    submitted = torch.randint(drafts + 1, (rows,), **on_gpu)
    u = torch.rand(rows, drafts, dtype=torch.float64, **on_gpu)
    v = torch.rand(rows, dtype=torch.float64, **on_gpu)
    committed = torch.randint(1, 1000, (rows,), **on_gpu)
    return logits, drafted, submitted, None if certain else q, u, v, committed, temperature


def assert_agrees(found, expected, arguments):
    """Decisions are equal, unless a uniform number lies within 1e-6 of the boundary."""
    found, expected = (type(x)(*(field.cpu() for field in x)) for x in (found, expected))
    arguments = [x.cpu() if isinstance(x, torch.Tensor) else x for x in arguments]
    if disagreements(found, expected, arguments) == 0:
        for name in ("accepted", "next_token", "tokens", "finite", "lengths"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name
        torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("temperature", [0, 0.2, 1, 1.7, 1e-7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_decisions_on_the_gpu_are_those_of_the_reference(dtype, temperature, certain):
    for rows, drafts, vocabulary in ((1, 0, 1), (3, 5, BLOCK - 1), (5, 1, BLOCK), (2, 3, BLOCK + 1), (8, 7, 50257)):
        arguments = step(rows, drafts, vocabulary, dtype, temperature, certain, seed=vocabulary)
        assert_agrees(verify(*arguments), reference.verify(*arguments), arguments)


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("temperature", [0, 0.7, 1])
def test_a_captured_graph_replays_for_other_inputs(temperature, certain):
    shape = (4, 3, 10_007, torch.bfloat16, temperature, certain)
    arguments = step(*shape, seed=0)
    verify(*arguments)  # compiles; a capture cannot
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = verify(*arguments)
    for seed in range(1, 6):
        for buffer, values in zip(arguments, step(*shape, seed=seed), strict=True):
            if isinstance(buffer, torch.Tensor):
                buffer.copy_(values)
        graph.replay()
        assert_agrees(found, reference.verify(*arguments), arguments)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-52])
def test_extreme_uniform_numbers_never_return_an_impossible_id(uniform):
    logits, drafted, submitted, _, u, v, *rest = step(64, 2, 50257, torch.float32, 1.0, True, seed=1)
    logits[..., :20_000] = logits[..., 20_050:] = -torch.inf
    drafted[:] = 20_000
    found = verify(logits, drafted, submitted, None, u.fill_(1 - 2.0**-52), v.fill_(uniform), *rest)
    assert ((found.next_token >= 20_000) & (found.next_token < 20_050)).all()
    assert (found.next_token[found.accepted < submitted] != 20_000).all()


def test_the_same_inputs_give_the_same_bits():
    arguments = step(8, 7, 128_256, torch.bfloat16, 0.7, False, seed=3)
    first = verify(*arguments)
    for _ in range(3):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(verify(*arguments), first, strict=True))


def test_random_numbers_are_those_of_bass_core_to_the_bit():
    assert_same_bits("cuda")


@pytest.mark.parametrize("changes", COMMITS, ids=str)
def test_a_captured_commit_moves_the_rows_as_bass_core_does(changes):
    """Captured once, replayed over other rows, drafts and logits in the same memory."""
    found = committing(**changes, device="cuda")
    found.by_the_kernels()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        block = found.by_the_kernels()
    for seed in range(5):
        expected = committing(**changes, seed=seed, device="cuda")
        for ours, theirs in zip((found.logits, *found.memory), (expected.logits, *expected.memory), strict=True):
            ours.copy_(theirs)
        for name in ("tokens", "lengths", "probs", "finite"):
            if (tensor := getattr(found.draft, name)) is not None:
                tensor.copy_(getattr(expected.draft, name))
        if changes.get("forced"):
            found.options.synthetic.chances.copy_(expected.options.synthetic.chances)
        graph.replay()
        assert differing(found, block, expected, expected.by_bass_core()) == []


@pytest.mark.parametrize("temperature", [0.2, 1, 1.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_draw_on_the_gpu_is_that_of_its_q(dtype, temperature):
    block = draft_draw.BLOCK
    for rows, vocabulary in ((1, 1), (3, block - 1), (5, block + 1), (8, 50257), (32, 128256)):
        generator = torch.Generator("cuda").manual_seed(vocabulary)
        logits = (3 * torch.randn(rows, vocabulary, generator=generator, device="cuda")).to(dtype)
        found = [each.cpu() for each in drawn(logits, temperature, width=vocabulary + 7)]
        assert is_right(logits.cpu(), temperature, 1, found)
        assert largest_is_right(logits)
