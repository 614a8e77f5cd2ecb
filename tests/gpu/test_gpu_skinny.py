"""Products with INT8 and INT4 weights as a GPU computes them."""

import itertools

import pytest
import torch
from kernel_cases import TOLERANCE
from test_kernel_skinny import FORMS, SHAPES, activations, codes, error

import bass_core as bass
import bass_kernels
from bass_kernels import Codes, reference
from bass_lab.texts.prompt_sets import prompt_set

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
DTYPES = [torch.bfloat16, torch.float16]


def assert_multiplied_as_by_the_reference(shape, splits, dtype, form):
    rows, columns, inputs = shape
    x = activations(rows, inputs, dtype)
    weight, scale, group = codes(columns, inputs, dtype=dtype, **FORMS[form])
    on_gpu = Codes(weight.cuda(), scale.cuda(), group)
    found = bass_kernels.skinny_linear(x.cuda(), on_gpu, splits=splits)
    again = bass_kernels.skinny_linear(x.cuda(), on_gpu, splits=splits)
    assert torch.equal(found, again)
    assert error(found.cpu(), reference.skinny_linear(x, Codes(weight, scale, group))) < TOLERANCE[dtype]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_are_those_of_the_reference(dtype, form):
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
