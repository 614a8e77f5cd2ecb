"""The kernels on a CUDA device: `pytest -m gpu`. The interpreter's cases, and CUDA graphs."""

import itertools

import pytest
import torch
from kernel_cases import TOLERANCE, Case, case, error, fuzz, poisoned_memory
from kernel_steps import committing, differing
from test_kernel_draw import drawn, is_right, largest_is_right
from test_kernel_skinny import FORMS, SHAPES, activations, codes
from test_kernel_skinny import error as product_error
from test_kernel_verification import COMMITS, assert_same_bits, disagreements

import bass_core as bass
import bass_kernels
from bass_kernels import Codes, draft_draw, plan, ragged_attention, reference, verify
from bass_kernels.fused_verification import BLOCK
from bass_lab.texts.prompt_sets import prompt_set

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def sdpa_error(arguments: Case) -> float:
    """Return the error of torch's attention on live queries: the rounding of this precision."""
    query, key, value, starts, kv_lengths, flags = arguments.filled(0.0)
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    positions = (starts[:, None] + torch.arange(query.shape[2], device="cuda"))[..., None]
    slots = torch.arange(key.shape[2], device="cuda")
    live = (positions >= 0) & (positions < kv_lengths[:, None, None])
    visible = (slots <= positions) & (slots > positions - flags.get("sliding_window", 1 << 30))
    visible |= ~live  # padding queries see all keys, not none
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
        assert torch.equal(found, ragged_attention(*arguments.arguments))  # a race would change the result


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
def test_last_program_of_a_row_sees_all_stores(dtype):
    """Many pieces per row and many replays of a plan's counters reveal a wrong memory order."""
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
    """Like a captured draft phase of five tokens: two queries, then one query per pass, for all lengths."""
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


def assert_multiplied_as_by_the_reference(shape, splits, dtype, form):
    rows, columns, inputs = shape
    x = activations(rows, inputs, dtype)
    weight, scale, group = codes(columns, inputs, dtype=dtype, **FORMS[form])
    on_gpu = Codes(weight.cuda(), scale.cuda(), group)
    found = bass_kernels.skinny_linear(x.cuda(), on_gpu, splits=splits)
    again = bass_kernels.skinny_linear(x.cuda(), on_gpu, splits=splits)
    assert torch.equal(found, again)
    assert product_error(found.cpu(), reference.skinny_linear(x, Codes(weight, scale, group))) < TOLERANCE[dtype]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_products_equal_the_reference(dtype, form):
    for shape, splits in itertools.product([*SHAPES, (16, 1024, 4096)], (None, 1, 3)):
        assert_multiplied_as_by_the_reference(shape, splits, dtype, form)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantized_drafts_change_no_text_on_a_gpu(kind):
    pair = bass.load_pair(device="cuda", dtype="float32")
    prompts, options = prompt_set("mini", 8), {"max_new_tokens": 32, "draft_length": 4}
    assert bass.generate(pair.quantized({"draft": kind}), prompts, **options).texts == (
        bass.generate(pair, prompts, **options).texts
    )
    half = bass.load_pair(device="cuda", dtype="bfloat16", quantize=kind)
    assert all(bass.generate(half, prompts, **options).texts)


def step(rows, drafts, vocabulary, dtype, temperature, certain, seed):
    """Return arguments of `verify`; rows submit 0 … K tokens. `certain`: no draft distributions."""
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
    """Decisions must be equal, except for a uniform number within 1e-6 of the boundary."""
    found, expected = (type(x)(*(field.cpu() for field in x)) for x in (found, expected))
    arguments = [x.cpu() if isinstance(x, torch.Tensor) else x for x in arguments]
    if disagreements(found, expected, arguments) == 0:
        for name in ("accepted", "next_token", "tokens", "finite", "lengths"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name
        torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("temperature", [0, 0.2, 1, 1.7, 1e-7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gpu_decisions_equal_the_reference(dtype, temperature, certain):
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


def test_random_numbers_equal_bass_core_bit_for_bit():
    assert_same_bits("cuda")


@pytest.mark.parametrize("changes", COMMITS, ids=str)
def test_a_captured_commit_moves_the_rows_as_bass_core_does(changes):
    """The graph is captured once and replayed with other rows, drafts and logits in the same memory."""
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
def test_gpu_draw_follows_q(dtype, temperature):
    block = draft_draw.BLOCK
    for rows, vocabulary in ((1, 1), (3, block - 1), (5, block + 1), (8, 50257), (32, 128256)):
        generator = torch.Generator("cuda").manual_seed(vocabulary)
        logits = (3 * torch.randn(rows, vocabulary, generator=generator, device="cuda")).to(dtype)
        found = [each.cpu() for each in drawn(logits, temperature, width=vocabulary + 7)]
        assert is_right(logits.cpu(), temperature, 1, found)
        assert largest_is_right(logits)
