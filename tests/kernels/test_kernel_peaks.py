"""The largest logit of each row and its id, in Triton's interpreter."""

import pytest
import torch
from kernel_cases import poisoned_memory

from bass_kernels import largest, peaks

BLOCK = peaks.BLOCK
pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy's, where NaN is meant
]
VOCABULARIES = [1, 37, BLOCK, BLOCK + 1, 5 * BLOCK + 3]


def found_in(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with poisoned_memory():
        return largest(logits)


def is_right(logits: torch.Tensor, found: tuple[torch.Tensor, torch.Tensor]) -> bool:
    peak, token = found
    return torch.equal(peak, logits.float().amax(-1)) and torch.equal(token, logits.argmax(-1))


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_peak_is_that_of_torch(vocabulary):
    generator = torch.Generator().manual_seed(vocabulary)
    for dtype in (torch.float32, torch.bfloat16):  # in half precision some are equal
        logits = torch.randn(3, vocabulary, generator=generator).to(dtype)
        assert is_right(logits, found_in(logits))


@pytest.mark.parametrize("places", [(0, 1), (5, 5 + BLOCK), (3, BLOCK - 1, 4 * BLOCK + 2), (BLOCK + 7, 4 * BLOCK + 7)])
def test_ties_go_to_the_lowest_id(places):
    logits = torch.full((2, 4 * BLOCK + 10), -1.0)
    logits[:, list(places)] = 2.0
    assert found_in(logits)[1].tolist() == 2 * [places[0]]


def test_rows_may_be_strided():
    logits = torch.randn(6, 2000, generator=torch.Generator().manual_seed(0))[::2, :1300]
    assert is_right(logits, found_in(logits))


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_logits_without_numbers_are_reported_and_harm_no_other_row(broken):
    logits = torch.randn(3, 2 * BLOCK, generator=torch.Generator().manual_seed(0))
    whole = found_in(logits)
    if broken == -torch.inf:
        logits[1] = broken
    else:
        logits[1, BLOCK + 700] = broken
    peak, token = found_in(logits)
    assert peak.isfinite().tolist() == [True, False, True] and 0 <= token[1] < 2 * BLOCK
    assert all(torch.equal(now[[0, 2]], before[[0, 2]]) for now, before in zip((peak, token), whole, strict=True))


def test_unfit_arguments_are_refused():
    with pytest.raises(ValueError, match=r"stride 1 along the vocabulary, got torch\.float64"):
        largest(torch.zeros(2, 8).double())
    with pytest.raises(ValueError, match="with strides \\(1, 2\\)"):
        largest(torch.zeros(8, 2).T)
