import pytest
import torch

from bass_core.exactness.sampling import SamplingParams, probabilities
from bass_lab.checks.tabular import transformers_law

CASES = [
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 1000},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1.0, "min_p": 1.0},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_probabilities_equal_transformers(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 31, generator=generator, dtype=dtype) * 3
    history = torch.randint(0, 31, (40, 9), generator=generator)
    for case in CASES:
        found, expected = probabilities(logits, SamplingParams(**case)), transformers_law(logits, history, **case)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7, msg=str(case))
        assert torch.equal(found > 0, expected > 0), case


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_temperature_above_zero_gives_a_distribution(dtype):
    logits = torch.tensor([[1.0, 3.0, 3.0, -2.0], [0.0, -1e30, 1e30, -torch.inf]], dtype=dtype)
    for temperature in (1e-3, 1e-7, 1e-40, 5e-324):
        found = probabilities(logits, SamplingParams(temperature=temperature))
        assert found.tolist() == [[0, 0.5, 0.5, 0], [0, 0, 1, 0]] and found.dtype == dtype


def test_half_precision_logits_are_processed_in_float32():
    logits = torch.randn(3, 11).bfloat16()
    assert probabilities(logits, SamplingParams(1.0)).dtype == torch.float32
