"""Drawing a draft token: its distribution q, and the token of the row's random number. Runs in Triton's interpreter."""

import pytest
import torch
from kernel_cases import poisoned_memory

from bass_core.exactness import randomness, sampling
from bass_core.exactness.randomness import Key, Purpose
from bass_core.exactness.sampling import SamplingParams
from bass_kernels import draft_draw, draw

BLOCK = 1024
pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy's, where NaN is meant
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(draft_draw, "BLOCK", BLOCK)


def keys(rows, slot, seed=0, device="cpu"):
    streams = torch.tensor([randomness.stream(seed, row) for row in range(rows)], device=device)
    return Key(streams, torch.arange(rows, device=device) + 3, Purpose.DRAFT, slot)


def drawn(logits, temperature, slot=1, width=None, seed=0, draw=draw):
    key = keys(len(logits), slot, seed, logits.device)
    with poisoned_memory():
        return draw(logits, key.stream, key.counter, slot, temperature, width or logits.shape[-1])


def is_right(logits, temperature, slot, found) -> bool:
    """True if q is the softmax within rounding, and the token is drawn from q as torch draws it."""
    token, q, peak = found
    law = sampling.probabilities(logits.double(), SamplingParams(temperature))
    inside = q[:, : logits.shape[-1]]
    near = torch.allclose(inside.double(), law, rtol=2e-5, atol=1e-6) and not q[:, logits.shape[-1] :].any()
    expected = randomness.draw(q, keys(len(logits), slot, device=logits.device))
    return near and torch.equal(token, expected) and torch.equal(peak, logits.float().amax(-1))


HALF = torch.float16, torch.bfloat16
CASES = [(torch.float32, 0.2, 1), (HALF[0], 1, 2), (HALF[1], 1.7, 37), (torch.float32, 1.7, BLOCK - 1),
         (HALF[0], 0.2, BLOCK), (HALF[1], 1, BLOCK + 1), (HALF[1], 0.2, 3000), (torch.float32, 1, 3000)]  # fmt: skip


@pytest.mark.parametrize(("dtype", "temperature", "vocabulary"), CASES)
def test_token_is_drawn_from_q_and_q_is_the_softmax(dtype, temperature, vocabulary):
    generator = torch.Generator().manual_seed(vocabulary)
    for slot in (0, 4):
        logits = (3 * torch.randn(6, vocabulary, generator=generator)).to(dtype)
        assert is_right(logits, temperature, slot, drawn(logits, temperature, slot))


def test_blocks_of_the_real_size(monkeypatch):
    monkeypatch.undo()
    logits = 3 * torch.randn(2, 2 * draft_draw.BLOCK + 1, generator=torch.Generator().manual_seed(0))
    assert is_right(logits, 0.8, 1, drawn(logits, 0.8))


def test_ids_that_only_the_target_has_have_probability_zero():
    logits = torch.randn(4, 1500, generator=torch.Generator().manual_seed(0))
    found = drawn(logits, 0.7, width=2 * BLOCK + 5)
    assert found[1].shape == (4, 2 * BLOCK + 5) and is_right(logits, 0.7, 1, found)


def test_rows_may_be_strided():
    logits = torch.randn(6, 2000, generator=torch.Generator().manual_seed(0))[::2, :1300]
    assert is_right(logits, 1.0, 1, drawn(logits, 1.0))


@pytest.mark.parametrize("number", [0.0, 1 - 2.0**-52])
def test_an_id_of_probability_zero_is_never_drawn(monkeypatch, number):
    """Neither at the smallest random number nor at the largest, in the first block or behind a block of zeros."""
    monkeypatch.setattr(draft_draw, "uniform", FixedUniform(number))
    for possible in ([5], [1500], [5, 1500], [0, 2999]):
        logits = torch.full((2, 3000), -torch.inf)
        logits[:, possible] = 0.0
        token, q, _ = drawn(logits, 1.0)
        assert token.tolist() == 2 * [possible[0] if number == 0 else possible[-1]]
        assert q[0, possible].sum() == 1


class FixedUniform:
    """Replaces the kernels' `uniform`."""

    def __init__(self, number):
        self.number = number

    def __call__(self, *args, **kwargs):
        return torch_number(self.number)


def torch_number(number):
    import triton.language as tl

    return tl.full([], number, tl.float64)


def test_random_numbers_are_the_rows_own():
    logits = torch.zeros(24, 1000)
    tokens = [drawn(logits, 1.0, slot, seed=seed)[0] for slot, seed in ((0, 0), (1, 0), (0, 1))]
    assert len({tuple(each.tolist()) for each in tokens}) == 3 and len(tokens[0].unique()) > 18
    alone = drawn(logits[5:6], 1.0, 0)[0]  # the first row's numbers
    assert alone[0] == tokens[0][0]


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_logits_without_numbers_are_reported_and_harm_no_other_row(broken):
    logits = torch.randn(3, 2500, generator=torch.Generator().manual_seed(0))
    whole = drawn(logits, 0.9)
    if broken == -torch.inf:
        logits[1] = broken
    else:
        logits[1, 1700] = broken
    token, q, peak = drawn(logits, 0.9)
    assert peak.isfinite().tolist() == [True, False, True] and 0 <= token[1] < 2500
    for row in (0, 2):
        assert token[row] == whole[0][row] and torch.equal(q[row], whole[1][row])


def test_unfit_arguments_are_refused():
    with pytest.raises(ValueError, match=r"stride 1 along the vocabulary, got torch\.float64"):
        drawn(torch.zeros(2, 8).double(), 1.0)
    with pytest.raises(ValueError, match="width must be at least the vocabulary's 8, got 7"):
        drawn(torch.zeros(2, 8), 1.0, width=7)
