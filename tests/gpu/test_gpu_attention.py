"""The attention kernels on a CUDA device: `pytest -m gpu`. The same cases as in the interpreter, and CUDA graphs."""

import itertools

import pytest
import torch
from kernel_cases import TOLERANCE, Case, case, error, fuzz, poisoned_memory

import bass_kernels
from bass_kernels import plan, ragged_attention, reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def sdpa_error(arguments: Case) -> float:
    """Of torch's own attention, on the rows' live queries: what this precision allows."""
    query, key, value, starts, kv_lengths, flags = arguments.filled(0.0)
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    positions = (starts[:, None] + torch.arange(query.shape[2], device="cuda"))[..., None]
    slots = torch.arange(key.shape[2], device="cuda")
    live = (positions >= 0) & (positions < kv_lengths[:, None, None])
    visible = (slots <= positions) & (slots > positions - flags.get("sliding_window", 1 << 30))
    visible |= ~live  # padding queries see everything, rather than nothing
    attend = torch.nn.functional.scaled_dot_product_attention
    out = attend(query, key, value, attn_mask=visible[:, None], scale=flags.get("scaling"))
    return error(torch.where(live[..., None], out.transpose(1, 2), 0), arguments.expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", [0, 1000])
def test_ragged_attention_equals_the_reference_over_poisoned_memory(dtype, seed):
    for described, arguments in fuzz(60, dtype, "cuda", seed):
        with poisoned_memory():
            found = ragged_attention(*arguments.arguments, **arguments.flags)
        ours = error(found, arguments.expected)
        assert ours <= TOLERANCE[dtype], described
        if dtype.itemsize == 2 and not arguments.flags.keys() & {"softcap", "sinks"}:
            assert ours <= 2 * sdpa_error(arguments) + 1e-6, described


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_rows_of_many_lengths(dtype):
    for lengths, query_length in (([8192, 700, 5000, 33, 8191, 1, 0, 2048], 6), ([4097] * 3, 1), ([300, 5000], 200)):
        arguments = case(lengths, query_length, group=4, kv_heads=8, head_dim=128, dtype=dtype, device="cuda")
        found = ragged_attention(*arguments.arguments)
        assert error(found, arguments.expected) <= TOLERANCE[dtype]
        assert torch.equal(found, ragged_attention(*arguments.arguments))  # a moving result would be a race


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_captured_graph_replays_for_other_lengths(dtype, deterministic):
    arguments = case([4000] * 6, 5, group=4, kv_heads=8, head_dim=128, dtype=dtype, device="cuda").filled(0.0)
    ragged_attention(*arguments.arguments, deterministic=deterministic)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ragged_attention(*arguments.arguments, deterministic=deterministic)
    for lengths, live in (([4000, 3, 1000, 0, 77, 2049], [5, 3, 1, 0, 5, 2]), ([16] * 6, [5] * 6), ([1] * 6, [1] * 6)):
        arguments.kv_lengths.copy_(torch.tensor(lengths))
        arguments.starts.copy_(torch.tensor(lengths) - torch.tensor(live))
        out.fill_(torch.nan)
        graph.replay()
        assert error(out, arguments.expected) <= TOLERANCE[dtype], lengths


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_last_program_of_a_row_sees_the_stores_of_the_others(dtype):
    """Many pieces per row and many replays over one plan's counters show a wrong memory order."""
    arguments = case([8000, 30, 4001, 8000], 5, group=4, kv_heads=8, head_dim=128, dtype=dtype, device="cuda")
    arguments = arguments.filled(0.0)
    work = bass_kernels.make_plan(*arguments[:2], *arguments[3:5])
    expected = ragged_attention(*arguments.arguments, plan=work)
    assert work.rows[:, 1].max() > 4 and error(expected, arguments.expected) <= TOLERANCE[dtype]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [ragged_attention(*arguments.arguments, plan=work) for _ in range(20)]
    for _ in range(50):
        for out in outputs:
            out.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(out, expected) for out in outputs)
    assert not work.counters.any()


@pytest.mark.parametrize("deterministic", [False, True])
def test_one_captured_plan_serves_passes_while_rows_grow(deterministic):
    """As in a recorded draft phase of five tokens: two queries, then one at a time, for any lengths."""
    shape = {"group": 4, "kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16, "device": "cuda"}
    arguments = case([4000] * 4, 2, **shape).filled(0.0)
    ends = arguments.kv_lengths
    tile = bass_kernels.make_plan(*arguments[:2], *arguments[3:5], deterministic=deterministic).tile
    sizes = {"query_length": 2, "kv_heads": 8, "width": arguments.key.shape[2], "tile": tile, "group": 4}

    def phase() -> list[tuple[Case, torch.Tensor]]:
        work = plan.make_plan(ends - 2, ends + 4, **sizes, span=6, deterministic=deterministic)
        passes = [arguments._replace(starts=ends - 2)]
        passes += [
            arguments._replace(starts=ends + slot, kv_lengths=ends + slot + 1, query=arguments.query[:, :, :1])
            for slot in range(4)
        ]
        return [(each, ragged_attention(*each.arguments, plan=work, deterministic=deterministic)) for each in passes]

    ends -= 10
    phase()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = phase()
    for lengths in ([3000, 2, 510, 1023], [2, 2, 2, 2], [3999, 31, 32, 3900], [511, 512, 513, 514]):
        ends.copy_(torch.tensor(lengths))
        graph.replay()
        for each, out in found:
            assert error(out, each.expected) <= TOLERANCE[torch.bfloat16], lengths
            if deterministic:
                assert torch.equal(out, ragged_attention(*each.arguments, deterministic=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_deterministic_queries_have_the_same_bits_alone_and_together(dtype):
    together = case([3000, 31, 513, 1024], 5, dtype=dtype, group=4, kv_heads=8, head_dim=128, device="cuda")
    expected = ragged_attention(*together.arguments, deterministic=True)
    for row, token in itertools.product(range(4), range(5)):
        query = together.query[row : row + 1, :, token : token + 1]
        key, value = together.key[row : row + 1], together.value[row : row + 1]
        position = together.starts[row : row + 1] + token
        alone = ragged_attention(query, key, value, position, position + 1, deterministic=True)
        assert torch.equal(alone[0, 0], expected[row, token])


def assert_written_as_by_the_reference(dtype, head_dim):
    states = [torch.randn(4, 6, 8, head_dim, device="cuda").to(dtype).transpose(1, 2) for _ in range(2)]
    found, expected = ([torch.zeros(9, 8, 50, head_dim, device="cuda", dtype=dtype) for _ in range(2)] for _ in "ab")
    slots = torch.stack([torch.randperm(50, device="cuda")[:6] for _ in range(4)])
    bass_kernels.write_kv(*states, *found, slots, first_place=3)
    reference.write_kv(*states, *expected, slots, first_place=3)
    assert all(map(torch.equal, found, expected))


def test_write_kv_equals_the_reference():
    for dtype, head_dim in itertools.product(DTYPES, (64, 80, 128, 256)):
        assert_written_as_by_the_reference(dtype, head_dim)
