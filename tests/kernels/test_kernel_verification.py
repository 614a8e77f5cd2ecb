"""Fused verification decides as bass_core does. Triton's interpreter runs the kernels here, on the CPU."""

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from kernel_launches import counted

from bass_core import kernel_ops, randomness, sampling, verification
from bass_core.drafters import Draft
from bass_core.eager_step import EagerStep, StepOptions
from bass_core.randomness import Key, Purpose
from bass_core.rows import Rows
from bass_core.sampling import SamplingParams
from bass_core.synthetic import SyntheticAcceptance
from bass_kernels import RowMemory, commit, reference, verify
from bass_kernels import fused_verification as kernels
from bass_kernels.uniform import uniform

LARGEST_UNIFORM = 1 - 2.0**-52
BLOCK = 1024
pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy's, where NaN is meant
]
VOCABULARIES = [1, 2, 37, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK + 1, 3000]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(kernels, "BLOCK", BLOCK)


def law(logits, temperature):
    return sampling.probabilities(logits, SamplingParams(temperature or 1.0))


def choose(probs, generator):
    """One id from each distribution: [B, K, V] -> [B, K]."""
    flat = probs.reshape(-1, probs.shape[-1])
    chosen = flat.multinomial(1, generator=generator) if len(flat) else flat.new_empty(0, dtype=torch.int64)
    return chosen.reshape(probs.shape[:-1])


def step(rows, drafts, vocabulary, *, dtype=torch.float32, temperature=1.0, draft="softmax", seed=0):
    """Arguments of `verify` and the keys that their uniform numbers come from; rows submit 0 … K tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(rows, drafts + 1, vocabulary, generator=generator)).to(dtype)
    p = law(logits, temperature)[:, :drafts]
    noise = torch.randn(p.shape, generator=generator)
    q = {"softmax": (p + 1e-6).log().add(noise).softmax(-1), "equal": p, "certain": None}[draft]
    drafted = choose(p if q is None else q, generator)
    if temperature == 0 and drafts > 1:
        drafted[:, 0] = logits[:, 0].argmax(-1)  # so that some are accepted
    if draft != "equal" and drafts > 0:  # and some are rejected, also at very low temperatures
        drafted[1::2, -1] = torch.randint(vocabulary, (rows // 2,), generator=generator)
    submitted = torch.randint(drafts + 1, (rows,), generator=generator)
    submitted[-1], submitted[0] = drafts, submitted[0] if rows == 1 else 0
    streams = torch.tensor([randomness.stream(seed, row) for row in range(rows)])
    keys = randomness.StepKeys(streams, torch.arange(rows), max(drafts, 1))
    u = randomness.uniform(keys.accept(torch.arange(drafts)))
    committed = torch.randint(1, 1000, (rows,), generator=generator)
    return (logits, drafted, submitted, q, u, randomness.uniform(keys.target()), committed, temperature), keys


def decided_by_bass_core(arguments, keys, precision):
    logits, drafted, submitted, q, *_, temperature = arguments
    if temperature == 0:
        return verification.matching(drafted, submitted, logits.argmax(-1))
    q = torch.nn.functional.one_hot(drafted, logits.shape[-1]).float() if q is None else q
    return verification.token(drafted, submitted, q, law(logits.to(precision), temperature), keys)


def disagreements(found, expected, arguments):
    """In how many rows the decisions differ; where they do, a uniform number must lie within 1e-6 of the boundary."""
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


def assert_same(found, expected):
    for name, ours, theirs in zip(found._fields, found, expected, strict=True):
        assert torch.equal(ours, theirs), name


def rows_of(result, rows):
    return kernels.VerifyOutput(*(field[rows] for field in result))


@pytest.mark.parametrize("draft", ["softmax", "equal", "certain"])
@pytest.mark.parametrize("temperature", [0, 0.2, 1, 1.7, 1e-7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_decisions_are_those_of_bass_core(dtype, temperature, draft):
    generator = torch.Generator().manual_seed(sum(map(ord, f"{dtype}{temperature}{draft}")))
    different = 0
    for seed in range(3):
        rows, drafts = int(torch.randint(1, 6, (), generator=generator)), int(torch.randint(6, (), generator=generator))
        vocabulary = VOCABULARIES[int(torch.randint(len(VOCABULARIES), (), generator=generator))]
        arguments, keys = step(rows, drafts, vocabulary, dtype=dtype, temperature=temperature, draft=draft, seed=seed)
        found = verify(*arguments)
        for precision in (torch.float32, torch.float64):
            different += disagreements(found, decided_by_bass_core(arguments, keys, precision), arguments)
        different += disagreements(found, reference.verify(*arguments), arguments)
    assert different == 0  # none of these seeds comes within 1e-6 of a boundary


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("temperature", [0, 0.7])
def test_decisions_agree_at_the_edges_of_blocks(vocabulary, temperature):
    arguments, keys = step(3, 2, vocabulary, temperature=temperature, seed=vocabulary)
    assert disagreements(verify(*arguments), decided_by_bass_core(arguments, keys, torch.float64), arguments) == 0


def test_decisions_agree_with_blocks_of_the_real_size(monkeypatch):
    monkeypatch.undo()
    arguments, keys = step(2, 2, 2 * kernels.BLOCK + 1, temperature=0.9)
    assert disagreements(verify(*arguments), decided_by_bass_core(arguments, keys, torch.float64), arguments) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0, 0.6, 1])
def test_tokens_log_probabilities_and_lengths_are_what_the_engine_commits(temperature, dtype):
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


@pytest.mark.parametrize("uniform", [0.0, LARGEST_UNIFORM])
@pytest.mark.parametrize("draft", ["softmax", "certain"])
def test_extreme_uniform_numbers_never_return_an_impossible_id(draft, uniform):
    (logits, drafted, submitted, q, u, v, committed, _), _ = step(5, 2, 2500, draft=draft, seed=3)
    # Only ids 1100 … 1149 are possible: neither the first block nor the last has mass.
    logits[..., :1100] = logits[..., 1150:] = -torch.inf
    drafted[1:] = 1100
    if q is not None:
        q[..., :1120] += 0.5  # the residual begins at 1120 at the earliest
    p, rows = law(logits.double(), 1.0), torch.arange(5)
    for acceptance in (0.0, LARGEST_UNIFORM):
        found = verify(logits, drafted, submitted, q, u.fill_(acceptance), v.fill_(uniform), committed, 1.0)
        assert (p[rows, found.accepted, found.next_token] > 0).all()
        rejected = rows[found.accepted < submitted]
        if q is None:
            assert (found.next_token[rejected] != drafted[rejected, found.accepted[rejected]]).all()
        else:
            assert (found.next_token[rejected] >= 1120).all()
    assert len(rejected) > 0  # at the largest number


@pytest.mark.parametrize("draft", ["softmax", "certain"])
def test_a_drafted_token_that_the_target_cannot_say_is_rejected_at_any_uniform_number(draft):
    (logits, drafted, submitted, q, u, *rest), _ = step(3, 2, 1100, draft=draft, seed=12)
    drafted[:] = 7
    logits[..., 7] = -torch.inf
    assert not verify(logits, drafted, submitted.fill_(2), q, u.zero_(), *rest).accepted.any()


def test_a_residual_without_mass_leaves_the_targets_own_law():
    arguments, keys = step(4, 1, 1100, seed=13)
    logits, _, submitted, q, u, *_ = arguments
    q[:] = 2 * law(logits, 1.0)[:, :1]  # above p everywhere, as rounding may leave it
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
    for token, accepted, following in ((5, [1, 0], [5, 1023]), (70, [0, 0], [5, 1023]), (1024, [0, 0], [5, 1023])):
        found = verify(logits, torch.full((2, 1), token), zeros + 1, None, *numbers, zeros, 0)
        assert found.accepted.tolist() == accepted
        assert found.next_token.tolist() == following


@pytest.mark.parametrize("temperature", [1e-7, 1e-40, 5e-324])
def test_very_small_temperatures_choose_the_argmax(temperature):
    (logits, drafted, submitted, q, u, v, committed, _), _ = step(4, 2, 1500)
    logits *= 1e4
    found = verify(logits, drafted, submitted, q, u, v, committed, temperature)
    greedy = verify(logits, drafted, submitted, q, u, v, committed, 0)
    assert_same(found, greedy)


@pytest.mark.parametrize("temperature", [0, 0.7])
@pytest.mark.parametrize("draft", ["softmax", "certain"])
def test_slots_that_a_row_did_not_submit_never_matter(draft, temperature):
    arguments, _ = step(5, 3, 1100, temperature=temperature, draft=draft, seed=5)
    logits, drafted, submitted, q, u, *rest = arguments
    beyond = torch.arange(4) > submitted[:, None]
    assert beyond.any()
    unsubmitted = torch.arange(3) >= submitted[:, None]
    garbage = verify(
        logits.masked_fill(beyond[..., None], torch.nan),
        drafted,
        submitted,
        q if q is None else q.masked_fill(unsubmitted[..., None], torch.nan),
        u.masked_fill(unsubmitted, torch.nan),
        *rest,
    )
    assert_same(garbage, verify(*arguments))


@pytest.mark.parametrize("fault", ["one NaN", "all NaN", "one inf", "all -inf"])
@pytest.mark.parametrize("temperature", [0, 0.7, 1])
def test_a_slot_without_numbers_clears_finite_of_its_row_alone(temperature, fault):
    arguments, _ = step(4, 3, 1500, temperature=temperature, seed=6)
    logits, _, submitted, *_ = arguments
    submitted[:] = torch.tensor([0, 3, 2, 3])
    sound = verify(*arguments)
    value = float(fault.split()[1])
    logits[2, 1, 1200 if fault.startswith("one") else slice(None)] = value
    found = verify(*arguments)
    assert found.finite.tolist() == [True, True, False, True]
    others = [0, 1, 3]
    assert_same(rows_of(found, others), rows_of(sound, others))
    assert 0 <= found.accepted[2] <= 2
    assert 0 <= found.next_token[2] < 1500
    assert torch.equal(found.finite, reference.verify(*arguments).finite)


def test_a_draft_without_numbers_disturbs_no_other_row():
    arguments, _ = step(4, 3, 1500, seed=7)
    sound = verify(*arguments)
    arguments[3][3] = torch.nan
    found = verify(*arguments)
    assert_same(rows_of(found, slice(3)), rows_of(sound, slice(3)))
    assert found.accepted[3] == 0 and 0 <= found.next_token[3] < 1500


@pytest.mark.parametrize("temperature", [0, 0.7, 1])
def test_everything_read_was_written_before(temperature, monkeypatch):
    arguments, _ = step(4, 3, 1100, temperature=temperature, seed=8)
    clean = verify(*arguments)
    empty = torch.empty

    def filled_with(number, integer, truth):
        def poisoned(*args, dtype, **options):
            limits = None if dtype.is_floating_point or dtype == torch.bool else torch.iinfo(dtype)
            value = getattr(limits, integer) if limits else truth if dtype == torch.bool else number
            return empty(*args, dtype=dtype, **options).fill_(value)

        return poisoned

    for poison in ((torch.nan, "min", True), (1e30, "max", False)):
        monkeypatch.setattr(torch, "empty", filled_with(*poison))
        assert_same(verify(*arguments), clean)


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_row_alone_equals_row_in_batch(temperature):
    arguments, _ = step(4, 3, 1100, temperature=temperature, seed=9)
    together = verify(*arguments)
    for row in range(4):
        alone = (x[row : row + 1] if isinstance(x, torch.Tensor) else x for x in arguments)
        assert_same(verify(*alone), rows_of(together, slice(row, row + 1)))


def test_strides_do_not_matter():
    (logits, drafted, submitted, q, u, v, committed, temperature), _ = step(3, 4, 1100, temperature=0.7, seed=10)
    expected = verify(logits, drafted, submitted, q, u, v, committed, temperature)
    wider = torch.full((5, 3, 1200), torch.nan)
    wider[..., 7:1107] = logits.transpose(0, 1)
    found = verify(
        wider[..., 7:1107].transpose(0, 1),
        drafted.t().contiguous().t(),
        submitted.repeat_interleave(2)[::2],
        q.transpose(0, 1).contiguous().transpose(0, 1),
        u.t().contiguous().t(),
        v,
        committed,
        temperature,
    )
    assert_same(found, expected)


def test_nothing_to_draft_is_a_draw_from_the_target():
    arguments, keys = step(5, 0, 1100, draft="certain", seed=11)
    found = verify(*arguments)
    drawn = randomness.draw(law(arguments[0][:, 0].double(), 1.0), keys.target())
    assert torch.equal(found.next_token, drawn)
    assert torch.equal(found.tokens, drawn[:, None])
    assert not found.accepted.any()


def test_unfit_arguments_are_refused():
    (logits, drafted, submitted, q, *rest), _ = step(2, 2, 40)
    with pytest.raises(ValueError, match=r"float32, bfloat16 or float16 .* got torch.float64"):
        verify(logits.double(), drafted, submitted, q, *rest)
    with pytest.raises(ValueError, match="stride 1 along the vocabulary"):
        verify(logits.transpose(1, 2).contiguous().transpose(1, 2), drafted, submitted, q, *rest)
    with pytest.raises(ValueError, match="q must be float32 with 40 ids"):
        verify(logits, drafted, submitted, q[..., :39], *rest)


# --- with the rows ---------------------------------------------------------------------------------


@triton.jit
def _uniform(streams, counters, slots, out, purpose, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, uniform(tl.load(streams + i), tl.load(counters + i), purpose, tl.load(slots + i)))


def assert_same_bits(device):
    edges = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), *(randomness.stream(3, row) for row in range(27))])
    streams, counters = edges.repeat_interleave(32).to(device), edges.repeat(32).to(device)
    slots, found = torch.arange(1024, device=device) % 33, torch.empty(1024, dtype=torch.float64, device=device)
    for purpose in Purpose:
        _uniform[(1,)](streams, counters, slots, found, int(purpose), SIZE=1024)
        keys = zip(streams.tolist(), counters.tolist(), slots.tolist(), strict=True)
        expected = [randomness.uniform(Key(torch.tensor([a]), torch.tensor([b]), purpose, c)) for a, b, c in keys]
        assert torch.equal(found.cpu(), torch.cat(expected))


def test_random_numbers_are_those_of_bass_core_to_the_bit():
    assert_same_bits("cpu")


class Committing(NamedTuple):
    """Rows in the last places of a batch, and what a step decides about them."""

    rows: Rows
    places: range
    logits: torch.Tensor
    draft: Draft
    options: StepOptions
    forced: bool

    @property
    def memory(self) -> tuple[torch.Tensor, ...]:
        """Of the whole batch, without the scratch column."""
        rows = self.rows
        return rows.tokens[:, :-1], rows.logprobs[:, :-1], rows.lengths, rows.steps, rows.streams

    def by_bass_core(self) -> torch.Tensor:
        """What the host is told, and the rows moved, in plain torch."""
        run_on, kernel_ops.run_on = kernel_ops.run_on, lambda device: False
        try:
            return self.by_the_step()
        finally:
            kernel_ops.run_on = run_on

    def by_the_step(self) -> torch.Tensor:
        config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=self.logits.shape[-1]))
        step = EagerStep(self.rows, SimpleNamespace(model=SimpleNamespace(config=config)), None, self.options)
        step.records = True  # places without a row are possible
        context = self.rows.context(self.places, self.draft.tokens.shape[1])
        return step.verify(context, self.draft, self.logits).block

    def by_the_kernels(self, commit=commit, row_memory=RowMemory) -> torch.Tensor:
        drafted = self.draft.tokens, self.draft.lengths, self.draft.probs, self.draft.finite
        chances = self.options.synthetic.chances if self.options.synthetic else None
        options = {"all_or_none": self.options.all_or_none, "chances": chances}
        rows = row_memory(*self.rows.memory(self.places))
        return commit(self.logits, *drafted, rows, self.rows.params.temperature, **options)


def committing(
    drafts=3, vocabulary=1100, *, temperature=0.7, draft="softmax", all_or_none=False, forced=False, broken=(),
    broken_draft=(), seed=0, device="cpu",
) -> Committing:  # fmt: skip
    """Six rows in places 2 … 7, of which the fourth is nobody's. broken: rows whose logits are no numbers."""
    places = range(2, 8)
    (logits, drafted, submitted, q, _, _, lengths, _), keys = step(
        6, drafts, vocabulary, temperature=temperature, draft=draft, seed=seed
    )
    submitted[3], lengths = -1, lengths.clamp(max=60)
    logits[list(broken), 0, 5] = torch.nan
    rows = Rows(8, torch.device(device), vocabulary, SamplingParams(temperature), ())
    rows.grow(80)
    generator = torch.Generator().manual_seed(seed)
    rows.tokens.copy_(torch.randint(vocabulary, rows.tokens.shape, generator=generator))
    rows.logprobs.copy_(torch.randn(rows.logprobs.shape, generator=generator))
    rows.lengths[2:], rows.steps[2:], rows.streams[2:] = (x.to(device) for x in (lengths, keys.counter, keys.stream))
    finite = torch.ones(6, dtype=torch.bool)
    finite[list(broken_draft)] = False
    room = torch.zeros(6, 9, dtype=torch.int64)  # as in recorded steps: drafts lie in wider memory
    room[:, :drafts] = drafted
    chances = torch.rand(3, 50, dtype=torch.float64, generator=generator)
    options = StepOptions(
        rule="token",
        synthetic=SyntheticAcceptance(chances.to(device)) if forced else None,
        wants_p=False,
        all_or_none=all_or_none,
        begin=lambda phase: None,
    )
    moved = (x if x is None else x.to(device) for x in (room, submitted, q, finite, logits))
    room, submitted, q, finite, logits = moved
    return Committing(rows, places, logits, Draft(room[:, :drafts], submitted, None, q, finite), options, forced)


def differing(found: Committing, block, expected: Committing, expected_block) -> list[str]:
    """Where two commits of the same step differ."""
    live = expected.draft.lengths >= 0
    columns = block.shape[1] - 4
    numbers = live & (expected_block[:, columns + 2] == 1)  # tokens of other rows mean nothing
    memory = zip(RowMemory._fields, found.memory, expected.memory, strict=True)
    names = [name for name, ours, theirs in memory if name != "logprobs" and not torch.equal(ours, theirs)]
    if not torch.allclose(found.memory[1], expected.memory[1], rtol=2e-6, atol=4e-6, equal_nan=True):
        names.append("logprobs")
    if not torch.equal(block[numbers], expected_block[numbers]) or not torch.equal(
        block[live, -2:], expected_block[live, -2:]
    ):
        names.append("block")
    return names


COMMITS = [
    {},
    {"temperature": 0},
    {"temperature": 1.0, "draft": "certain"},
    {"drafts": 0, "draft": "certain"},
    {"drafts": 0, "draft": "certain", "temperature": 0},
    {"broken": [1]},
    {"broken": [1], "all_or_none": True},
    {"broken": [5], "temperature": 0, "all_or_none": True},
    {"broken": [3], "all_or_none": True},  # of a place without a row
    {"broken_draft": [2]},
    {"broken_draft": [2], "all_or_none": True},
    {"broken_draft": [3], "all_or_none": True},
    {"all_or_none": True},
    {"forced": True},
    {"forced": True, "temperature": 0, "drafts": 5},
    {"forced": True, "broken": [4], "broken_draft": [0]},
]


@pytest.mark.parametrize("changes", COMMITS, ids=str)
def test_committed_rows_are_those_of_bass_core(changes):
    moved = 0
    for seed in range(3):
        found, expected = committing(**changes, seed=seed), committing(**changes, seed=seed)
        before = found.rows.lengths.clone()
        assert differing(found, found.by_the_kernels(), expected, expected.by_bass_core()) == []
        moved += int((found.rows.lengths != before).sum())
    failed = changes.get("broken", []) + changes.get("broken_draft", [])
    stays = changes.get("all_or_none") and failed not in ([], [3])
    assert moved == (0 if stays else 3 * (5 - len(set(failed) - {3})))


@pytest.mark.parametrize("changes", [{}, {"temperature": 0}, {"forced": True}, {"all_or_none": True}], ids=str)
def test_a_commit_is_these_kernels_and_nothing_else(changes):
    found = committing(**changes)
    kernel_ops.run_on(found.logits.device)  # the first time it asks a kernel
    with counted() as launches:
        found.by_the_step()
    drawn = [] if changes.get("temperature") == 0 else ["block_masses"]
    assert launches["around"] == dict.fromkeys(["block_statistics", "decide", "finish", *drawn], 1)


def test_rows_in_a_wide_batch_wait_for_one_another():
    """More rows than a power of two, the last of them without numbers."""
    (logits, drafted, submitted, q, _, _, lengths, _), keys = step(33, 2, 300, seed=4)
    logits[32, 0] = torch.nan
    for all_or_none, moved in ((True, 0), (False, 32)):
        memory = (
            torch.zeros(33, 1100, dtype=torch.int64),
            torch.zeros(33, 1100),
            lengths.clone(),
            torch.zeros(33).long(),
        )
        rows = RowMemory(*memory, keys.stream)
        commit(logits, drafted, submitted, q, torch.ones(33).bool(), rows, 0.7, all_or_none=all_or_none)
        assert int(rows.steps.sum()) == int((rows.lengths > lengths).sum()) == moved
