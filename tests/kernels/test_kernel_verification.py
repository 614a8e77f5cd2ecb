"""Fused verification decides as bass_core does. Triton's interpreter runs the kernels on the CPU."""

import pytest
import torch
import triton
import triton.language as tl
from kernel_cases import poisoned_memory
from kernel_launches import counted
from kernel_steps import committing, differing, law, step

from bass_core.exactness import randomness, verification
from bass_core.exactness.randomness import Key, Purpose
from bass_core.model import kernel_ops
from bass_kernels import RowMemory, commit, reference, verify
from bass_kernels import fused_verification as kernels
from bass_kernels.uniform import uniform

BLOCK = 1024
pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy's warning, where NaN is intended
]
VOCABULARIES, REAL = [1, 37, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1], 2 * kernels.BLOCK


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(kernels, "BLOCK", BLOCK)


def decided_by_bass_core(arguments, keys, precision):
    logits, drafted, submitted, q, *_, temperature = arguments
    if temperature == 0:
        return verification.matching(drafted, submitted, logits.argmax(-1))
    q = torch.nn.functional.one_hot(drafted, logits.shape[-1]).float() if q is None else q
    return verification.token(drafted, submitted, q, law(logits.to(precision), temperature), keys)


def disagreements(found, expected, arguments):
    """Count rows with different decisions, which need a uniform number within 1e-6 of the boundary."""
    logits, drafted, submitted, q, accept_uniform, draw_uniform, _, temperature = arguments
    p = law(logits.double(), temperature)
    differing = (found.accepted != expected.accepted) | (found.next_token != expected.next_token)
    for row in differing.nonzero()[:, 0].tolist():
        assert temperature > 0, "greedy decisions have no boundary"
        ours, theirs = int(found.accepted[row]), int(expected.accepted[row])
        slot = min(ours, theirs)
        if ours != theirs:
            token = drafted[row, slot]
            boundary = p[row, slot, token] / (1.0 if q is None else q[row, slot, token].double())
            assert abs(accept_uniform[row, slot] - boundary) < 1e-6
            continue
        weights = p[row, slot]
        if slot < submitted[row]:
            q_next = torch.eye(len(weights))[drafted[row, slot]] if q is None else q[row, slot]
            weights = (weights - q_next).clamp(min=0)
        cumulative = weights.cumsum(0)
        low, high = sorted((int(found.next_token[row]), int(expected.next_token[row])))
        target = draw_uniform[row] * cumulative[-1]
        assert (cumulative[low] - target).abs() < 1e-6 and (cumulative[high - 1] - target).abs() < 1e-6
    return int(differing.sum())


def assert_same(found, expected, rows=slice(None)):
    for name, ours, theirs in zip(found._fields, found, expected, strict=True):
        assert torch.equal(ours[rows], theirs[rows]), name


DTYPES, DRAFTS = [torch.float32, torch.float16, torch.bfloat16], ["softmax", "equal", "certain"]
TEMPERATURES = [0, 0.2, 1, 1.7, 1e-7]
# Every dtype and every draft at every temperature, and every dtype with every draft.
PAIRS = [(DTYPES[at % 3], TEMPERATURES[at % 5], DRAFTS[(at + at // 5) % 3]) for at in range(15)]


@pytest.mark.parametrize(("dtype", "temperature", "draft"), PAIRS)
def test_decisions_equal_bass_core(dtype, temperature, draft):
    generator = torch.Generator().manual_seed(sum(map(ord, f"{dtype}{temperature}{draft}")))
    different = 0
    for seed in range(2):
        rows, drafts = int(torch.randint(1, 4, (), generator=generator)), int(torch.randint(4, (), generator=generator))
        vocabulary = VOCABULARIES[int(torch.randint(len(VOCABULARIES), (), generator=generator))]
        arguments, keys = step(rows, drafts, vocabulary, dtype=dtype, temperature=temperature, draft=draft, seed=seed)
        found = verify(*arguments)
        for precision in (torch.float32, torch.float64):
            different += disagreements(found, decided_by_bass_core(arguments, keys, precision), arguments)
        different += disagreements(found, reference.verify(*arguments), arguments)
    assert different == 0  # no seed comes within 1e-6 of a boundary


@pytest.mark.parametrize(("vocabulary", "block"), [*((each, BLOCK) for each in VOCABULARIES), (REAL + 1, REAL // 2)])
def test_decisions_agree_at_the_edges_of_blocks(vocabulary, block, monkeypatch):
    monkeypatch.setattr(kernels, "BLOCK", block)
    arguments, keys = step(3, 2, vocabulary, temperature=0.7, seed=vocabulary)
    assert disagreements(verify(*arguments), decided_by_bass_core(arguments, keys, torch.float64), arguments) == 0


@pytest.mark.parametrize(("temperature", "dtype"), [(0, torch.float32), (0.6, torch.bfloat16), (1, torch.float32)])
def test_tokens_log_probabilities_and_lengths(temperature, dtype):
    arguments, _ = step(5, 4, 1500, temperature=temperature, dtype=dtype)
    logits, drafted, submitted, *_, committed, _ = arguments
    found = verify(*arguments)
    at, next_token = found.accepted[:, None], found.next_token[:, None]
    new = torch.cat([drafted, next_token], 1).scatter(1, at, next_token)
    assert torch.equal(found.tokens, new)
    assert torch.equal(found.lengths, committed + found.accepted + 1)
    assert found.finite.all()
    sent = torch.arange(5) <= submitted[:, None]
    logprobs = logits.double().log_softmax(-1).gather(-1, new[..., None])[..., 0].where(sent, 0.0)
    torch.testing.assert_close(found.logprobs.double(), logprobs, rtol=1e-6, atol=2e-6)
    assert [field.dtype for field in found] == [torch.int64] * 3 + [torch.float32, torch.bool, torch.int64]


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-52])
@pytest.mark.parametrize("draft", ["softmax", pytest.param("certain", marks=pytest.mark.ci)])
def test_extreme_uniform_numbers_never_return_an_impossible_id(draft, uniform):
    (logits, drafted, submitted, q, u, v, committed, _), _ = step(5, 2, 2500, draft=draft, seed=3)
    # Only ids 1100 … 1149 are possible: the first block and the last block have no mass.
    logits[..., :1100] = logits[..., 1150:] = -torch.inf
    drafted[1:] = 1100
    if q is not None:
        q[..., :1120] += 0.5  # the residual begins at 1120 or later
    p, rows = law(logits.double(), 1.0), torch.arange(5)
    for acceptance in (0.0, 1 - 2.0**-52):
        found = verify(logits, drafted, submitted, q, u.fill_(acceptance), v.fill_(uniform), committed, 1.0)
        assert (p[rows, found.accepted, found.next_token] > 0).all()
        rejected = rows[found.accepted < submitted]
        if q is None:
            assert (found.next_token[rejected] != drafted[rejected, found.accepted[rejected]]).all()
        else:
            assert (found.next_token[rejected] >= 1120).all()
    assert len(rejected) > 0  # at the largest number


@pytest.mark.parametrize("draft", ["softmax", "certain"])
def test_impossible_draft_token_is_rejected_at_any_uniform_number(draft):
    (logits, drafted, submitted, q, u, *rest), _ = step(3, 2, 1100, draft=draft, seed=12)
    drafted[:] = 7
    logits[..., 7] = -torch.inf
    assert not verify(logits, drafted, submitted.fill_(2), q, u.zero_(), *rest).accepted.any()


def test_residual_without_mass_draws_from_the_target():
    arguments, keys = step(4, 1, 1100, seed=13)
    logits, _, submitted, q, u, *_ = arguments
    q[:] = 2 * law(logits, 1.0)[:, :1]  # above p everywhere, as rounding may leave q
    submitted[:], u[:] = 1, 0.9
    found = verify(*arguments)
    assert not found.accepted.any()
    assert torch.equal(found.next_token, randomness.draw(law(logits.double(), 1.0)[:, 0], keys.target()))


def test_ties_go_to_the_lowest_id():
    logits = torch.zeros(2, 2, 2500)
    logits[0, :, [70, 5, 1030, 2499]] = 1.0
    logits[1, :, [1023, 1024]] = 1.0
    numbers = torch.zeros(2, 1, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    zeros = torch.zeros(2, dtype=torch.int64)
    for token, accepted in ((5, [1, 0]), (70, [0, 0]), (1024, [0, 0])):
        found = verify(logits, torch.full((2, 1), token), zeros + 1, None, *numbers, zeros, 0)
        assert found.accepted.tolist() == accepted
        assert found.next_token.tolist() == [5, 1023]


def test_uniform_number_at_the_boundary_rejects():
    logits, one = torch.zeros(1, 2, 2), torch.ones(1, dtype=torch.int64)
    numbers = torch.tensor([[0.5]]).double(), torch.tensor([0.3]).double()
    assert verify(logits, torch.zeros(1, 1, dtype=torch.int64), one, None, *numbers, one, 1.0).accepted.tolist() == [0]


@pytest.mark.parametrize("temperature", [1e-7, 5e-324])
def test_very_small_temperatures_choose_the_argmax(temperature):
    (logits, *arguments, _), _ = step(4, 2, 1500)
    assert_same(verify(1e4 * logits, *arguments, temperature), verify(1e4 * logits, *arguments, 0))


@pytest.mark.parametrize(("temperature", "draft"), [(0, "certain"), (0.7, "softmax")])
def test_slots_that_a_row_did_not_submit_never_matter(draft, temperature):
    arguments, _ = step(5, 3, 1100, temperature=temperature, draft=draft, seed=5)
    logits, drafted, submitted, q, u, *rest = arguments
    beyond = torch.arange(4) > submitted[:, None]
    assert beyond.any()
    unsubmitted, expected = torch.arange(3) >= submitted[:, None], verify(*arguments)
    logits, u = logits.masked_fill(beyond[..., None], torch.nan), u.masked_fill(unsubmitted, torch.nan)
    q = q if q is None else q.masked_fill(unsubmitted[..., None], torch.nan)
    assert_same(verify(logits, drafted, submitted, q, u, *rest), expected)


@pytest.mark.parametrize(("temperature", "fault"), [(0, "one NaN"), (0.7, "all NaN"), (1, "one inf"), (0, "all -inf")])
def test_slot_without_numbers_clears_finite_of_its_row_alone(temperature, fault):
    arguments, _ = step(4, 3, 1500, temperature=temperature, seed=6)
    logits, _, submitted, *_ = arguments
    submitted[:] = torch.tensor([0, 3, 2, 3])
    sound = verify(*arguments)
    value = float(fault.split()[1])
    logits[2, 1, 1200 if fault.startswith("one") else slice(None)] = value
    found = verify(*arguments)
    assert found.finite.tolist() == [True, True, False, True]
    assert_same(found, sound, rows=[0, 1, 3])
    assert 0 <= found.accepted[2] <= 2
    assert 0 <= found.next_token[2] < 1500
    assert torch.equal(found.finite, reference.verify(*arguments).finite)


def test_draft_without_numbers_disturbs_no_other_row():
    arguments, _ = step(4, 3, 1500, seed=7)
    sound = verify(*arguments)
    arguments[3][3] = torch.nan
    found = verify(*arguments)
    assert_same(found, sound, rows=slice(3))
    assert found.accepted[3] == 0 and 0 <= found.next_token[3] < 1500


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_everything_read_was_written_before(temperature):
    arguments, _ = step(4, 3, 1100, temperature=temperature, seed=8)
    clean = verify(*arguments)
    for poison in ((torch.nan, "min", True), (1e30, "max", False)):
        with poisoned_memory(*poison):
            assert_same(verify(*arguments), clean)


def test_strides_do_not_matter():
    arguments, _ = step(3, 4, 1100, temperature=0.7, seed=10)
    logits, drafted, submitted, q, u, *rest = arguments
    wider = torch.full((5, 3, 1200), torch.nan)
    wider[..., 7:1107] = logits.transpose(0, 1)
    q, drafted, u = (each.transpose(0, 1).contiguous().transpose(0, 1) for each in (q, drafted, u))
    logits, submitted = wider[..., 7:1107].transpose(0, 1), submitted.repeat_interleave(2)[::2]
    assert_same(verify(logits, drafted, submitted, q, u, *rest), verify(*arguments))


def test_unfit_arguments_are_refused():
    (logits, drafted, submitted, q, *rest), _ = step(2, 2, 40)
    with pytest.raises(ValueError, match=r"float32, bfloat16 or float16 .* got torch.float64"):
        verify(logits.double(), drafted, submitted, q, *rest)
    with pytest.raises(ValueError, match="stride 1 along the vocabulary"):
        verify(logits.transpose(1, 2).contiguous().transpose(1, 2), drafted, submitted, q, *rest)
    with pytest.raises(ValueError, match="q must be float32 with 40 ids"):
        verify(logits, drafted, submitted, q[..., :39], *rest)


@triton.jit
def _uniform(streams, counters, slots, out, purpose, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, uniform(tl.load(streams + i), tl.load(counters + i), purpose, tl.load(slots + i)))


def assert_same_bits(device):
    edges = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), *(randomness.stream(3, row) for row in range(11))])
    streams, counters = edges.repeat_interleave(16).to(device), edges.repeat(16).to(device)
    slots, found = torch.arange(256, device=device) % 33, torch.empty(256, dtype=torch.float64, device=device)
    for purpose in Purpose:
        _uniform[(1,)](streams, counters, slots, found, int(purpose), SIZE=256)
        keys = zip(streams.tolist(), counters.tolist(), slots.tolist(), strict=True)
        expected = [randomness.uniform(Key(torch.tensor([a]), torch.tensor([b]), purpose, c)) for a, b, c in keys]
        assert torch.equal(found.cpu(), torch.cat(expected))


def test_random_numbers_equal_bass_core_bit_for_bit():
    assert_same_bits("cpu")


COMMITS = [
    {},
    {"temperature": 0},
    pytest.param({"temperature": 1.0, "draft": "certain"}, marks=pytest.mark.ci),
    {"drafts": 0, "draft": "certain"},
    {"broken": [1]},
    {"broken": [5], "temperature": 0, "all_or_none": True},
    pytest.param({"broken": [3], "all_or_none": True}, marks=pytest.mark.ci),  # the empty batch slot
    {"broken_draft": [2]},
    {"broken_draft": [2], "all_or_none": True},
    {"broken_draft": [3], "all_or_none": True},
    {"forced": True},
    {"forced": True, "temperature": 0, "drafts": 5, "broken": [4], "broken_draft": [0]},
]


@pytest.mark.parametrize("changes", COMMITS, ids=str)
def test_committed_rows_equal_bass_core(changes):
    moved = 0
    for seed in range(2):
        found, expected = committing(**changes, seed=seed), committing(**changes, seed=seed)
        before = found.rows.lengths.clone()
        assert differing(found, found.by_the_kernels(), expected, expected.by_bass_core()) == []
        moved += int((found.rows.lengths != before).sum())
    failed = changes.get("broken", []) + changes.get("broken_draft", [])
    stays = changes.get("all_or_none") and failed not in ([], [3])
    assert moved == (0 if stays else 2 * (5 - len(set(failed) - {3})))


@pytest.mark.parametrize("changes", [{}, {"temperature": 0}, {"forced": True}], ids=str)
def test_commit_launches_these_kernels_and_nothing_else(changes):
    found = committing(**changes)
    kernel_ops.run_on(found.logits.device)  # the first call runs a kernel
    with counted() as launches:
        found.by_the_step()
    drawn = [] if changes.get("temperature") == 0 else ["block_masses"]
    assert launches["around"] == dict.fromkeys(["block_statistics", "decide", "finish", *drawn], 1)


def test_rows_in_a_wide_batch_wait_for_one_another():
    (logits, drafted, submitted, q, _, _, lengths, _), keys = step(9, 1, 40, seed=4)
    logits[8, 0] = torch.nan
    for all_or_none, moved in ((True, 0), (False, 8)):
        tokens, steps = torch.zeros(9, 1100, dtype=torch.int64), torch.zeros(9, dtype=torch.int64)
        rows = RowMemory(tokens, torch.zeros(9, 1100), lengths.clone(), steps, keys.stream)
        commit(logits, drafted, submitted, q, torch.ones(9).bool(), rows, 0.7, all_or_none=all_or_none)
        assert int(rows.steps.sum()) == int((rows.lengths > lengths).sum()) == moved
