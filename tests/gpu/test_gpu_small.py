"""Every kernel on small shapes, with few of torch's kernels, for compute-sanitizer (kernels/README.md).

The slowest test comes last, because a time limit may cut off the last test.
"""

import pytest
import torch
from kernel_cases import TOLERANCE, case, error, fuzz
from kernel_steps import committing
from test_gpu_kernels import (
    assert_agrees,
    assert_multiplied_as_by_the_reference,
    assert_written_as_by_the_reference,
    step,
)
from test_kernel_draw import keys
from test_kernel_skinny import FORMS, activations, codes
from test_kernel_verification import COMMITS
from torch.utils._pytree import tree_map_only

import bass_kernels
from bass_kernels import reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
BF16 = torch.bfloat16


def test_writes():
    assert_written_as_by_the_reference(BF16, 128)


@pytest.mark.parametrize(("temperature", "certain"), [(0, True), (0.7, False)])
def test_verification(temperature, certain):
    arguments = step(5, 3, 9001, BF16, temperature, certain, seed=1)
    assert_agrees(bass_kernels.verify(*arguments), reference.verify(*arguments), arguments)


@pytest.mark.parametrize("changes", [*COMMITS[:4], COMMITS[5], COMMITS[10]], ids=str)
def test_commits(changes):
    assert committing(**changes, device="cuda").by_the_kernels().shape[0] == 6


def test_drafts():
    logits, key = torch.randn(4, 9001, device="cuda").to(BF16), keys(4, 1, device="cuda")
    token, q, _ = bass_kernels.draw(logits, key.stream, key.counter, 1, 0.8, 9005)
    peak, best = bass_kernels.largest(logits)
    assert (q.gather(1, token[:, None]) > 0).all() and torch.equal(logits.gather(1, best[:, None])[:, 0].float(), peak)


@pytest.mark.parametrize("form", FORMS)
def test_products(form):
    for shape, splits in (((3, 100, 320), None), ((17, 130, 512), 3)):
        assert_multiplied_as_by_the_reference(shape, splits, BF16, form)


def test_fused_product_epilogue():
    x, weights, gate = activations(9, 290, BF16), codes(35, 290, dtype=BF16), codes(35, 290, seed=2, dtype=BF16)
    for options in ({"bias": torch.randn(35).to(BF16)}, {"gate": gate}):
        there = tree_map_only(torch.Tensor, torch.Tensor.cuda, {"codes": weights, **options})
        found = bass_kernels.skinny_linear(x.cuda(), **there, activation="silu")
        expected = reference.skinny_linear(x, weights, **options, activation="silu")
        assert error(found.cpu(), expected) <= TOLERANCE[BF16]


def test_attention():
    cases = [arguments for _, arguments in fuzz(4, BF16, "cuda", 7)]
    cases.append(case([1500, 33, 700, 1], 5, group=4, kv_heads=2, head_dim=128, dtype=BF16, device="cuda"))
    for arguments in (each.filled(0.0) for each in cases):
        expected = arguments.on("cpu").expected  # without kernels of cuBLAS
        found = bass_kernels.ragged_attention(*arguments.arguments, **arguments.flags)
        assert error(found.cpu(), expected) <= TOLERANCE[BF16]
        lengths = arguments.kv_lengths.tolist()
        for found in (
            bass_kernels.split_attention(*arguments.arguments, lengths=lengths, **arguments.flags),
            bass_kernels.pad_attention(*arguments.arguments, extent=max(lengths), **arguments.flags),
        ):
            assert error(found.cpu(), expected) <= TOLERANCE[BF16]
    work = bass_kernels.make_plan(*cases[-1][:2], *cases[-1][3:5])
    assert (work.rows[:, 1] > 1).any()  # rows in several pieces
