from typing import NamedTuple

import torch

from bass_core.drafters import Draft
from bass_core.exactness import randomness, sampling
from bass_core.exactness.sampling import SamplingParams
from bass_core.loop.rows import Rows
from bass_core.loop.step import StepOptions, decide
from bass_core.model import kernel_ops
from bass_kernels import RowMemory, commit
from bass_lab.synthetic_acceptance import SyntheticAcceptance


def law(logits, temperature):
    return sampling.probabilities(logits, SamplingParams(temperature or 1.0))


def choose(probs, generator):
    flat = probs.reshape(-1, probs.shape[-1])
    chosen = flat.multinomial(1, generator=generator) if len(flat) else flat.new_empty(0, dtype=torch.int64)
    return chosen.reshape(probs.shape[:-1])


def step(rows, drafts, vocabulary, *, dtype=torch.float32, temperature=1.0, draft="softmax", seed=0):
    """Return arguments of `verify` and the keys of their uniform numbers. Rows submit 0 … K tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(rows, drafts + 1, vocabulary, generator=generator)).to(dtype)
    p = law(logits, temperature)[:, :drafts]
    noise = torch.randn(p.shape, generator=generator)
    q = {"softmax": (p + 1e-6).log().add(noise).softmax(-1), "equal": p, "certain": None}[draft]
    drafted = choose(p if q is None else q, generator)
    if temperature == 0 and drafts > 1:
        drafted[:, 0] = logits[:, 0].argmax(-1)  # some drafts are accepted
    if draft != "equal" and drafts > 0:  # some drafts are rejected, also at very low temperatures
        drafted[1::2, -1] = torch.randint(vocabulary, (rows // 2,), generator=generator)
    submitted = torch.randint(drafts + 1, (rows,), generator=generator)
    submitted[-1], submitted[0] = drafts, submitted[0] if rows == 1 else 0
    streams = torch.tensor([randomness.stream(seed, row) for row in range(rows)])
    keys = randomness.StepKeys(streams, torch.arange(rows), max(drafts, 1))
    u = randomness.uniform(keys.accept(torch.arange(drafts)))
    committed = torch.randint(1, 1000, (rows,), generator=generator)
    return (logits, drafted, submitted, q, u, randomness.uniform(keys.target()), committed, temperature), keys


class Committing(NamedTuple):
    """Rows in the last slots of a batch, and the logits and drafts of a step."""

    rows: Rows
    places: range
    logits: torch.Tensor
    draft: Draft
    options: StepOptions
    forced: bool

    @property
    def memory(self) -> tuple[torch.Tensor, ...]:
        """Row memory of the whole batch, without the scratch column."""
        rows = self.rows
        return rows.tokens[:, :-1], rows.logprobs[:, :-1], rows.lengths, rows.steps, rows.streams

    def by_bass_core(self) -> torch.Tensor:
        """Commit in plain torch. Return the block for the host."""
        run_on, kernel_ops.run_on = kernel_ops.run_on, lambda device: False
        try:
            return self.by_the_step()
        finally:
            kernel_ops.run_on = run_on

    def by_the_step(self) -> torch.Tensor:
        context = self.rows.context(self.places, self.draft.tokens.shape[1])
        return decide(self.rows, context, self.draft, self.logits, self.options).packed

    def by_the_kernels(self, commit=commit, row_memory=RowMemory) -> torch.Tensor:
        drafted = self.draft.tokens, self.draft.lengths, self.draft.probs, self.draft.finite
        chances = self.options.forced.chances if self.options.forced else None
        options = {"all_or_none": self.options.all_or_none, "chances": chances}
        rows = row_memory(*self.rows.memory(self.places))
        return commit(self.logits, *drafted, rows, self.rows.params.temperature, **options)


def committing(
    drafts=3, vocabulary=1100, *, temperature=0.7, draft="softmax", all_or_none=False, forced=False, broken=(),
    broken_draft=(), seed=0, device="cpu",
) -> Committing:  # fmt: skip
    """Return six rows in slots 2 … 7; the fourth slot is empty. broken: rows with NaN logits."""
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
    room = torch.zeros(6, 9, dtype=torch.int64)  # as in captured steps: drafts lie in wider memory
    room[:, :drafts] = drafted
    chances = torch.rand(3, 50, dtype=torch.float64, generator=generator)
    options = StepOptions(
        rule="token",
        forced=SyntheticAcceptance(chances.to(device)) if forced else None,
        wants_p=False,
        all_or_none=all_or_none,
    )
    moved = (x if x is None else x.to(device) for x in (room, submitted, q, finite, logits))
    room, submitted, q, finite, logits = moved
    return Committing(rows, places, logits, Draft(room[:, :drafts], submitted, None, q, finite), options, forced)


def differing(found: Committing, block, expected: Committing, expected_block) -> list[str]:
    live = expected.draft.lengths >= 0
    columns = block.shape[1] - 4
    numbers = live & (expected_block[:, columns + 2] == 1)  # tokens of other rows have no meaning
    memory = zip(RowMemory._fields, found.memory, expected.memory, strict=True)
    names = [name for name, ours, theirs in memory if name != "logprobs" and not torch.equal(ours, theirs)]
    if not torch.allclose(found.memory[1], expected.memory[1], rtol=2e-6, atol=4e-6, equal_nan=True):
        names.append("logprobs")
    if not torch.equal(block[numbers], expected_block[numbers]) or not torch.equal(
        block[live, -2:], expected_block[live, -2:]
    ):
        names.append("block")
    return names
