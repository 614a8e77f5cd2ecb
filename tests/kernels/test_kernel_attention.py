"""The attention kernels equal the reference. Triton's interpreter runs the kernels on the CPU."""

import itertools
from contextlib import contextmanager

import pytest
import torch
from kernel_cases import TOLERANCE, Case, case, error, fuzz, poisoned_memory, shuffled_programs
from kernel_launches import counted

import bass_kernels
from bass_core.model import kernel_ops
from bass_kernels import launching, make_plan, pad_attention, plan, ragged_attention, reference, split_attention, tiles

pytestmark = pytest.mark.interpreted
slow, ci = pytest.mark.slow, pytest.mark.ci


def assert_agrees(found: torch.Tensor, arguments: Case, described: str = "") -> None:
    assert error(found, arguments.expected) <= TOLERANCE[arguments.query.dtype], described


@pytest.mark.parametrize("part", [slice(0, None, 8), pytest.param(slice(24), marks=slow)], ids=["few", "all"])
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, *(pytest.param(each, marks=ci) for each in (torch.float16, torch.float64))],
    ids=str,
)
def test_ragged_attention_equals_the_reference_over_poisoned_memory(dtype, part):
    for described, arguments in list(fuzz(24, dtype))[part]:
        for deterministic in (False, True) if dtype == torch.float32 else (False,):
            with poisoned_memory():
                found = ragged_attention(*arguments.arguments, **arguments.flags, deterministic=deterministic)
            assert_agrees(found, arguments, described)


@pytest.mark.parametrize("part", [slice(0, 12, 4), pytest.param(slice(12), marks=slow)], ids=["few", "all"])
def test_pad_and_split_equal_the_reference(part):
    for described, arguments in list(fuzz(12, torch.float32, seed=100))[part]:
        lengths = arguments.kv_lengths.tolist()
        with poisoned_memory():
            found = split_attention(*arguments.arguments, lengths=lengths, **arguments.flags)
            assert_agrees(found, arguments, described)
            arguments = arguments.filled(1e4)  # pad reads masked keys, and 0 x NaN is NaN
            found = pad_attention(*arguments.arguments, extent=max(lengths), **arguments.flags)
            assert_agrees(found, arguments, described)


# Each case showed a planted bug that the other cases missed (tests/mutants).
CASES = {
    "padding, a row without keys": case([70, 33, 5, 0], 5, query_lengths=[5, 3, 0, 0]),
    "split": case([400, 37], 3, head_dim=80),
    "a block of keys in one query's window only": case([46], 9, group=1, sliding_window=7),
    "window": case([300, 70], 9, group=4, kv_heads=1, sliding_window=40),
    "softcap and sinks": case([40, 130], 2, softcap=2.0, sinks=True),
    "padding in front": case([33, 5], 33, padded_in_front=True),
    "split, several tiles of 64 rows": case([260, 300], 20, group=4, kv_heads=1, dtype=torch.float16),
}


@pytest.mark.parametrize("name", CASES)
def test_layers_share_a_plan_and_programs_run_in_any_order(name):
    arguments = CASES[name]
    window = {key: value for key, value in arguments.flags.items() if key == "sliding_window"}
    with poisoned_memory():
        work = make_plan(*arguments[:2], *arguments[3:5], **window)
        assert not work.counters.any()
        first = ragged_attention(*arguments.arguments, **arguments.flags, plan=work)
    assert_agrees(first, arguments)
    assert not work.counters.any()
    with poisoned_memory(), shuffled_programs() as seen:
        assert torch.equal(ragged_attention(*arguments.arguments, **arguments.flags, plan=work), first)
    assert len(seen) < 3 or seen != sorted(seen)
    assert work.rows[:, 1].max() > 1 or "split" not in name


@pytest.mark.parametrize("strides", ["heads first", "a slice of a wider cache"])
def test_any_strides_will_do(strides):
    arguments = case([70, 33], head_dim=64)
    if strides == "heads first":
        arguments = Case(*(x.contiguous() for x in arguments.arguments), {})
    else:
        wide = [torch.nn.functional.pad(x.transpose(1, 2), (0, 16, 0, 1, 0, 9, 1, 0)) for x in arguments[1:3]]
        key, value = (x[1:, :-9, :-1, :-16].transpose(1, 2) for x in wide)
        arguments = arguments._replace(key=key, value=value)
    assert_agrees(ragged_attention(*arguments.arguments), arguments)


# --- splits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("most_items", "expected"), [(4, [1, 1, 1, 1]), (6, [3, 1, 1, 1]), (40, [13, 2, 5, 1])])
def test_any_split_equals_no_split(monkeypatch, most_items, expected):
    """A plan for fewer pieces than rows have belongs to a CUDA graph captured over a smaller cache."""
    monkeypatch.setattr(plan, "most_items", lambda *_: most_items)
    monkeypatch.setattr(plan, "multiprocessors", lambda device: 1000)  # enough for all pieces: the smallest chunk wins
    arguments = case([400, 37, 130, 0], 3, kv_heads=1)
    assert make_plan(*arguments[:2], *arguments[3:5]).rows[:, 1].tolist() == expected
    for deterministic in (False, True):
        with poisoned_memory():
            assert_agrees(ragged_attention(*arguments.arguments, deterministic=deterministic), arguments)


@pytest.mark.parametrize(
    "flags", [{}, {"sliding_window": 40}, pytest.param({"deterministic": True}, marks=ci)], ids=str
)
def test_one_plan_serves_passes_while_rows_grow(flags, monkeypatch):
    """A draft phase: two tokens, then one per pass. The third row rests after the first pass."""
    monkeypatch.setattr(plan, "CHUNK", 64)
    drafts, lengths, deterministic = 3, [191, 2, 130, 64], "deterministic" in flags
    full = case([length + drafts - 1 for length in lengths], 2)  # the first crosses a chunk's end and fills the cache
    first = torch.tensor(lengths) - 2
    tile = plan.Tile(*make_plan(*full[:2], *full[3:5], deterministic=deterministic).tile)
    options = {"window": flags.get("sliding_window", 0), "deterministic": deterministic, "span": drafts + 1}
    with poisoned_memory():
        ends = first + drafts + 1
        work = plan.make_plan(first, ends, query_length=2, kv_heads=2, width=194, tile=tile, group=2, **options)
    assert (work.rows[:, 1].max() > 1) == ("sliding_window" not in flags)  # few keys are not split
    for slot in range(drafts):
        starts = first + (0 if slot == 0 else slot + 1) * (torch.arange(4) != 2)
        counts = torch.tensor([2, 2, 2, 2] if slot == 0 else [1, 1, 0, 1])
        key, value = full.key.clone(), full.value.clone()
        for row, length in enumerate((starts + counts).tolist()):
            key[row, :, length:] = value[row, :, length:] = torch.nan
        query = full.query[:, :, : 2 - (slot > 0)]
        arguments = Case(query, key, value, starts, starts + counts, {**flags})
        with poisoned_memory():
            found = ragged_attention(*arguments.arguments, **flags, plan=work)
        if arguments.flags.pop("deterministic", False):
            assert torch.equal(found, ragged_attention(*arguments.arguments, **flags))
        assert_agrees(found, arguments)


@pytest.mark.parametrize("window", [None, pytest.param(500, marks=ci)])
def test_a_plan_serves_passes_of_other_tiles(window, monkeypatch):
    """A feature head's first pass has as many queries as a step has tokens, and later passes have one query. Their
    blocks of keys cross the ends of the plan's pieces."""
    monkeypatch.setattr(plan, "multiprocessors", lambda device: 8)
    committed, drafts, group = torch.tensor([600, 590, 600, 580]), 8, 4
    starts, ends = committed - drafts - 1, committed + drafts - 1
    shape = {"heads": group, "kv_heads": 1, "head_dim": 128, "dtype": torch.float16, "deterministic": False}
    work = kernel_ops.plan(starts, ends, queries=drafts + 1, width=640, window=window or 0, span=2 * drafts, **shape)
    assert (work[0][:, 1] % tiles.choose(group, 128, torch.float16, False).block_n).any()
    flags = {} if window is None else {"sliding_window": window}
    asked = {"scaling": None, "softcap": None, "deterministic": False, "sliding_window": window}
    for fed in (drafts + 1, 1, 2):
        lengths = [length + (fed < 9) * drafts // 2 for length in committed.tolist()]
        arguments = case(lengths, fed, kv_heads=1, group=group, head_dim=128, dtype=torch.float16, **flags)
        with poisoned_memory():
            found = kernel_ops.ragged_attention(*arguments.arguments, *work, None, **asked)
        assert_agrees(found, arguments, f"{fed} queries")


def test_cut_rows_are_added_up_in_the_same_launch():
    arguments = case([700, 20])
    with counted() as launches:
        work = make_plan(*arguments[:2], *arguments[3:5])
        ragged_attention(*arguments.arguments, plan=work)
    assert work.rows[:, 1].max() > 1
    assert launches["around"] == {"_plan": 1, "_attend_pieces": 1}


@pytest.mark.parametrize("window", [None, pytest.param(70, marks=ci)])
def test_deterministic_queries_have_the_same_bits_alone_and_together(monkeypatch, window):
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def position_independent_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        """Give bits that depend on the row in the matrix, as on a GPU."""
        product = (a.data[:, :, None] * b.data[None]).sum(1)
        return TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", position_independent_dot)
    monkeypatch.setattr(plan, "CHUNK", 64)
    together = case([150, 31, 66], 3, group=4)
    flags = {"deterministic": True, "sliding_window": window}
    expected = ragged_attention(*together.arguments, **flags)
    for row, token in itertools.product(range(3), range(3)):
        query = together.query[row : row + 1, :, token : token + 1]
        key, value = together.key[row : row + 1], together.value[row : row + 1]
        position = together.starts[row : row + 1] + token
        alone = ragged_attention(query, key, value, position, position + 1, **flags)
        assert torch.equal(alone[0, 0], expected[row, token])


# --- the plan -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "window", "deterministic"),
    [(1, None, False), (4, 50, False), (7, None, True), (13, 50, True), (22, None, False), (22, 50, False)],
)
def test_plan_lists_every_key_once_longest_rows_first(batch, window, deterministic):
    generator = torch.Generator().manual_seed(batch)
    kv_lengths = torch.randint(0, 3000, (batch,), generator=generator)
    starts = kv_lengths - torch.randint(0, 6, (batch,), generator=generator).clamp(max=kv_lengths)
    query, key = torch.empty(batch, 4, 5, 64), torch.empty(batch, 2, 3000, 64)
    with poisoned_memory():
        found = make_plan(query, key, starts, kv_lengths, sliding_window=window, deterministic=deterministic)
    pieces, block, needed = found.items[: int((found.items[:, 0] >= 0).sum())], found.tile.block_n, {}
    assert found.items[len(pieces) :, 0].eq(-1).all()
    for row, (start, length) in enumerate(zip(starts.tolist(), kv_lengths.tolist(), strict=True)):
        first, count = found.rows[row].tolist()
        mine = pieces[first : first + count]
        assert mine[:, 0].eq(row).all() and count == pieces[:, 0].eq(row).sum()
        assert mine[:, 3].tolist() == ([-1] if count == 1 else [*range(first, first + count)])
        begin = 0 if window is None else max(start - window + 1, 0) // block * block
        begin, end = (begin, length) if start < length else (0, 0)
        assert [*mine[:, 1].tolist(), end] == [begin, *mine[:, 2].tolist()]
        assert not (mine[:, 1] % block).any() and not (deterministic and (mine[:-1, 2] % plan.CHUNK).any())
        needed[first] = end - begin
    assert [needed[first] for first in sorted(needed)] == sorted(needed.values(), reverse=True)


@pytest.mark.parametrize(
    ("kv_lengths", "pieces"),
    [
        ([2048] * 8, [7] * 8),
        ([8192, *[512] * 7], [26, *[2] * 7]),
        ([5000, 3000, 1, 0], [16, 10, 1, 1]),
    ],
)
def test_plan_selects_the_cheapest_chunk(kv_lengths, pieces):
    """In waves of programs on the interpreter's eight multiprocessors."""
    kv, (query, key) = torch.tensor(kv_lengths), (torch.empty(len(kv_lengths), heads, 8192, 64) for heads in (8, 2))
    assert make_plan(query[:, :, :5], key, kv - 5, kv).rows[:, 1].tolist() == pieces


@pytest.mark.parametrize(
    ("deterministic", "heads", "queries", "width", "starts", "kv_lengths", "may_split"),
    [
        (False, 8, 600, 4096, [0, -580, -300, -1], [600, 20, 300, 599], False),
        (True, 2, 600, 4096, [3400], [4000], False),  # partial results of a long prompt would fill the memory
        (True, 2, 64, 4096, [3936], [4000], True),
        (True, 2, 64, 300, [200], [260], True),  # the same kernel for every width, since bits depend on the kernel
    ],
)
def test_long_prefill_is_not_split(deterministic, heads, queries, width, starts, kv_lengths, may_split):
    query, key = (torch.empty(len(starts), heads, length, 64) for length in (queries, width))
    starts, kv_lengths = torch.tensor(starts), torch.tensor(kv_lengths)
    assert make_plan(query, key, starts, kv_lengths, deterministic=deterministic).may_split == may_split


def test_every_launch_is_on_the_tensors_device(monkeypatch):
    from triton.runtime.interpreter import GridExecutor

    inside, outside, execute = [], [], GridExecutor.__call__

    @contextmanager
    def on(device):
        inside.append(device)
        yield
        inside.pop()

    def launch(self, *args, **kwargs):
        outside.extend([self.fn.__name__] * (not inside))
        return execute(self, *args, **kwargs)

    monkeypatch.setattr(launching, "on", on)
    monkeypatch.setattr(GridExecutor, "__call__", launch)
    arguments, cache, states = case([300, 20]), torch.zeros(2, 2, 4, 16), torch.ones(2, 2, 1, 16)
    ragged_attention(*arguments.arguments)
    pad_attention(*arguments.filled(0.0).arguments, extent=300)
    split_attention(*arguments.arguments, lengths=[300, 20])
    bass_kernels.write_kv(states, states, cache, cache.clone(), torch.ones(2, 1).long())
    assert not outside


# --- the cache, and arguments that do not fit -----------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "head_dims"), [(torch.bfloat16, (64, 64)), (torch.float32, (80, 80)), (torch.bfloat16, (192, 128))]
)
def test_write_kv_equals_the_reference(dtype, head_dims):
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(3, 4, 3, d, generator=generator).to(dtype).transpose(1, 2) for d in head_dims]
    slots = torch.tensor([[0, 1, 2, 3], [7, 8, 9, 10], [4, 2, 6, 11]])
    found, expected = ([torch.zeros(5, 3, 12, d, dtype=dtype) for d in head_dims] for _ in range(2))
    bass_kernels.write_kv(*states, *found, slots, first_place=1)
    reference.write_kv(*states, *expected, slots, first_place=1)
    assert all(map(torch.equal, found, expected))
    assert all(buffer.any() for buffer in found)


def far_apart(tokens: torch.Tensor, last: int) -> torch.Tensor:
    """Return tokens [1, H, S, D] with token `last` 2^31 numbers away. Untouched memory uses no RAM."""
    heads, count, width = tokens.shape[1:]
    stride = (2**31 // last // 16 + 1) * 16
    room = torch.empty((count - 1) * stride + heads * width, dtype=tokens.dtype)
    apart = room.as_strided(tokens.shape, (0, width, stride, 1))
    apart.copy_(tokens)
    return apart


def test_offsets_may_exceed_32_bits():
    arguments = case([40], 3, dtype=torch.float16)
    for name, last in (("query", 2), ("key", 39), ("value", 39)):
        apart = arguments._replace(**{name: far_apart(getattr(arguments, name), last)})
        assert torch.equal(ragged_attention(*apart.arguments), ragged_attention(*arguments.arguments)), name
    states, slots = arguments.query, torch.tensor([[2, 0, 4]])
    found, expected = ([torch.zeros(1, 4, 6, 64, dtype=torch.float16) for _ in range(2)] for _ in range(2))
    bass_kernels.write_kv(far_apart(states, 2), far_apart(states, 2), *found, slots, first_place=0)
    reference.write_kv(states, states, *expected, slots, first_place=0)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(2, 3, 5, 64)}, "3 query heads cannot share 2 KV heads"),
        ({"key": torch.zeros(2, 2, 9, 32)}, "key and value must be"),
        ({"value": torch.zeros(2, 2, 43, 64, dtype=torch.float16)}, "keys and values must be torch.float32"),
        ({"query": torch.zeros(2, 4, 5, 64, dtype=torch.int32)}, "dtype must be one of"),
        ({"starts": torch.zeros(3, dtype=torch.int64)}, r"starts and kv_lengths must be \[2\]"),
        ({"query": torch.zeros(2, 4, 64, 5).transpose(2, 3)}, "must be contiguous"),
        ({"flags": {"sinks": torch.zeros(3)}}, r"sinks must be \[4\]"),
        ({"starts": torch.zeros(2, 2, dtype=torch.int64)[:, 0]}, "starts must be contiguous"),
        ({"kv_lengths": torch.ones(2)}, "kv_lengths must be int32 or int64"),
        ({"query": torch.zeros(2, 4, 5, 300)}, "the head dimension must be at most 256, got 300"),
        ({"flags": {"softcap": 0.0}}, "softcap must be above 0, or None, got 0.0"),
        ({"flags": {"sliding_window": 0}}, "sliding_window must be at least 1, or None, got 0"),
        ({"flags": {"extent": 44}}, "extent must be at most the 43 slots"),
        ({"flags": {"lengths": [40]}}, "lengths must be the 2 rows' KV lengths"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unfit_arguments_are_refused(change, message):
    arguments = case([40, 9])._replace(**change)
    functions = {"extent": pad_attention, "lengths": split_attention}
    function = functions.get(next(iter(arguments.flags), ""), ragged_attention)
    with pytest.raises(ValueError, match=message):
        function(*arguments.arguments, **arguments.flags)
