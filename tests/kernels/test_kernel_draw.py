"""Draft tokens: the draw from q with the row's random number, and the argmax. Runs in Triton's interpreter."""

import pytest
import torch
import triton.language as tl
from kernel_cases import poisoned_memory

from bass_core.exactness import randomness, sampling
from bass_core.exactness.randomness import Key, Purpose
from bass_core.exactness.sampling import SamplingParams
from bass_kernels import draft_draw, draw, largest, peaks

BLOCK, PEAK_BLOCK = 1024, peaks.BLOCK
pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy's warning, where NaN is intended
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
    """Return True if q is the softmax within rounding, and the token equals torch's draw from q."""
    token, q, peak = found
    law = sampling.probabilities(logits.double(), SamplingParams(temperature))
    inside = q[:, : logits.shape[-1]]
    near = torch.allclose(inside.double(), law, rtol=2e-5, atol=1e-6) and not q[:, logits.shape[-1] :].any()
    expected = randomness.draw(q, keys(len(logits), slot, device=logits.device))
    return near and torch.equal(token, expected) and torch.equal(peak, logits.float().amax(-1))


def largest_is_right(logits) -> bool:
    with poisoned_memory():
        peak, token = (each.cpu() for each in largest(logits))
    return torch.equal(peak, logits.float().amax(-1).cpu()) and torch.equal(token, logits.argmax(-1).cpu())


HALF = torch.float16, torch.bfloat16
CASES = [(torch.float32, 0.2, 1), (HALF[0], 1, 2), (HALF[1], 1.7, 37), (torch.float32, 1.7, BLOCK - 1),
         (HALF[0], 0.2, BLOCK), (HALF[1], 1, BLOCK + 1), (HALF[1], 0.2, 3000), (torch.float32, 1, 3000)]  # fmt: skip


@pytest.mark.parametrize(("dtype", "temperature", "vocabulary"), CASES)
def test_token_is_drawn_from_q_and_q_is_the_softmax(dtype, temperature, vocabulary):
    generator = torch.Generator().manual_seed(vocabulary)
    for slot in (0, 4):
        logits = (3 * torch.randn(6, vocabulary, generator=generator)).to(dtype)
        assert is_right(logits, temperature, slot, drawn(logits, temperature, slot))


@pytest.mark.parametrize("vocabulary", [1, 37, PEAK_BLOCK, PEAK_BLOCK + 1, 5 * PEAK_BLOCK + 3])
def test_peak_equals_torch(vocabulary):
    generator = torch.Generator().manual_seed(vocabulary)
    for dtype in (torch.float32, torch.bfloat16):  # in half precision some logits are equal
        assert largest_is_right(torch.randn(3, vocabulary, generator=generator).to(dtype))


@pytest.mark.parametrize(
    "places",
    [
        (0, 1),
        (5, 5 + PEAK_BLOCK),
        (3, PEAK_BLOCK - 1, 4 * PEAK_BLOCK + 2),
        (PEAK_BLOCK + 7, 4 * PEAK_BLOCK + 7),
    ],
)
def test_ties_go_to_the_lowest_id(places):
    logits = torch.full((2, 4 * PEAK_BLOCK + 10), -1.0)
    logits[:, list(places)] = 2.0
    assert largest(logits)[1].tolist() == 2 * [places[0]]


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
    assert is_right(logits, 1.0, 1, drawn(logits, 1.0)) and largest_is_right(logits)


@pytest.mark.parametrize("number", [0.0, 1 - 2.0**-52])
def test_an_id_of_probability_zero_is_never_drawn(monkeypatch, number):
    """At the smallest and the largest random number, in the first block and after a block of zeros."""
    monkeypatch.setattr(draft_draw, "uniform", lambda *args, **kwargs: tl.full([], number, tl.float64))
    for possible in ([5], [1500], [5, 1500], [0, 2999]):
        logits = torch.full((2, 3000), -torch.inf)
        logits[:, possible] = 0.0
        token, q, _ = drawn(logits, 1.0)
        assert token.tolist() == 2 * [possible[0] if number == 0 else possible[-1]]
        assert q[0, possible].sum() == 1


def test_random_numbers_are_the_rows_own():
    logits = torch.zeros(24, 1000)
    tokens = [drawn(logits, 1.0, slot, seed=seed)[0] for slot, seed in ((0, 0), (1, 0), (0, 1))]
    assert len({tuple(each.tolist()) for each in tokens}) == 3 and len(tokens[0].unique()) > 18
    alone = drawn(logits[5:6], 1.0, 0)[0]  # the first row's numbers
    assert alone[0] == tokens[0][0]


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("function", [largest, lambda logits: drawn(logits, 0.9)], ids=["largest", "draw"])
def test_logits_without_numbers_are_reported_and_harm_no_other_row(function, broken):
    logits = torch.randn(3, 2 * PEAK_BLOCK, generator=torch.Generator().manual_seed(0))
    whole = function(logits)
    logits[1, slice(None) if broken == -torch.inf else PEAK_BLOCK + 700] = broken
    found = function(logits)
    (token,) = (each for each in found if each.dtype == torch.int64)
    assert 0 <= token[1] < 2 * PEAK_BLOCK
    assert any(each.isfinite().tolist() == [True, False, True] for each in found if each.ndim == 1)  # the peak
    for now, before in zip(found, whole, strict=True):
        assert torch.equal(now[[0, 2]], before[[0, 2]])


def test_unfit_arguments_are_refused():
    for function in (largest, lambda logits: drawn(logits, 1.0)):
        with pytest.raises(ValueError, match=r"stride 1 along the vocabulary, got torch\.float64"):
            function(torch.zeros(2, 8).double())
        with pytest.raises(ValueError, match=r"with strides \(1, 2\)"):
            function(torch.zeros(8, 2).T)
    with pytest.raises(ValueError, match="width must be at least the vocabulary's 8, got 7"):
        drawn(torch.zeros(2, 8), 1.0, width=7)
