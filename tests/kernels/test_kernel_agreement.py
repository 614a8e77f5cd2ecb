"""Each kernel agrees with the reference on a few hard cases, at which most wrong kernels differ."""

import itertools
import math

import pytest
import test_kernel_peaks
import torch
from kernel_cases import TOLERANCE, case, error, poisoned_memory, shuffled_programs
from test_kernel_draw import drawn, is_right
from test_kernel_skinny import activations, codes
from test_kernel_verification import committing, differing, step

import bass_kernels
from bass_kernels import plan, reference, tiles

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy's, where NaN is meant
]


def cases():
    yield case([70, 33, 5, 0], 5, query_lengths=[5, 3, 0, 0])
    yield case([400, 37], 3, head_dim=80)  # split
    yield case([46], 9, group=1, sliding_window=7)  # the first block of keys is in one query's window only
    yield case([300, 70], 9, group=4, kv_heads=1, sliding_window=40)
    yield case([40, 130], 2, softcap=2.0, sinks=True)
    yield case([33, 5], 33, padded_in_front=True)
    yield case([260, 300], 20, group=4, kv_heads=1, dtype=torch.float16)  # split, several tiles of 64 rows


def test_attention_over_poisoned_memory_and_in_any_order():
    for arguments in cases():
        options = {name: arguments.flags[name] for name in ("sliding_window",) if name in arguments.flags}
        with poisoned_memory():
            work = bass_kernels.make_plan(*arguments[:2], *arguments[3:5], **options)
            found = bass_kernels.ragged_attention(*arguments.arguments, **arguments.flags, plan=work)
        assert error(found, arguments.expected) <= TOLERANCE[arguments.query.dtype]
        with poisoned_memory(), shuffled_programs():  # the next layer of the pass
            again = bass_kernels.ragged_attention(*arguments.arguments, **arguments.flags, plan=work)
        assert torch.equal(again, found)


def test_attention_by_the_plan_of_a_longer_first_pass():
    arguments = case([604, 594, 604, 584], 1, group=4, kv_heads=1, head_dim=128, dtype=torch.float16)
    first = arguments.kv_lengths - 13  # of a draft phase that begins with nine queries: another tile
    sizes = {"query_length": 9, "kv_heads": 1, "group": 4, "width": arguments.key.shape[2], "span": 16}
    work = plan.make_plan(first, first + 16, tile=tiles.choose(36, 128, torch.float16, False), **sizes)
    work = bass_kernels.Plan(*work[:3], tiles.choose(4, 128, torch.float16, False))
    with poisoned_memory():
        found = bass_kernels.ragged_attention(*arguments.arguments, plan=work)
    assert error(found, arguments.expected) <= TOLERANCE[torch.float16]


def test_verification():
    steps = [step(4, 3, 300, temperature=0.7, seed=seed)[0] for seed in range(3)]
    steps.append(step(4, 0, 300, temperature=0.7)[0])  # nothing drafted: from the target's distribution
    tie = torch.zeros(1, 2, 2), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64), None
    steps.append((*tie, torch.tensor([[0.5]]).double(), torch.tensor([0.3]).double(), torch.ones(1).long(), 1.0))
    for arguments in steps:
        found, expected = bass_kernels.verify(*arguments), reference.verify(*arguments)
        assert all(map(torch.equal, found[:3], expected[:3]))


def test_verification_reports_nan():
    broken = list(step(2, 2, 300, temperature=0.7)[0])
    broken[0][1, 0, 7] = math.nan
    assert torch.equal(bass_kernels.verify(*broken).finite, reference.verify(*broken).finite)


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"seed": 1}, {"seed": 2}, {"forced": True}, {"broken": [1]}, {"broken_draft": [2]},
        {"broken": [1], "all_or_none": True}, {"broken_draft": [2], "all_or_none": True},
        {"broken_draft": [3], "all_or_none": True},
    ],
    ids=str,
)  # fmt: skip
def test_commit(changes):
    found, expected = committing(vocabulary=300, **changes), committing(vocabulary=300, **changes)
    assert differing(found, found.by_the_kernels(), expected, expected.by_bass_core()) == []


def test_cache_writes():
    states = [torch.randn(2, 3, 2, 16) for _ in range(2)]
    caches = [[torch.zeros(4, 3, 9, 16) for _ in range(2)] for _ in range(2)]
    for write, cache in zip((bass_kernels.write_kv, reference.write_kv), caches, strict=True):
        write(*states, *cache, torch.tensor([[1, 4], [0, 8]]), 1)
    assert all(map(torch.equal, *caches))


def test_products_write_no_row_beyond_the_last():
    """The output is a tensor of the launcher's own: here it lies in a larger one."""
    room = torch.full((4, 35), 7.0, dtype=torch.float16)

    class Activations(torch.Tensor):
        def new_empty(self, *shape, **options):
            return room[:3] if shape == (3, 35) else torch.empty(*shape, **options)

    x = activations(3, 64).as_subclass(Activations)
    bass_kernels.skinny_linear(x, bass_kernels.Codes(*codes(35, 64)), splits=1)
    assert (room[3] == 7).all()


@pytest.mark.parametrize("form", [{}, {"packed": True, "group": 32}, {"packed": True, "group": 64}], ids=str)
def test_products(form):
    x, weights, gate = activations(5, 290), codes(35, 290, **form), codes(35, 290, seed=2, **form)
    bias = torch.randn(35).half()
    for splits, options in itertools.product(
        (1, 2), ({"bias": bias}, *({"bias": bias, "activation": name} for name in ("silu", "gelu", "gelu_tanh")),
                 {"gate": gate, "activation": "silu"})
    ):  # fmt: skip
        own = {name: bass_kernels.Codes(*each) if isinstance(each, tuple) else each for name, each in options.items()}
        with poisoned_memory():
            found = bass_kernels.skinny_linear(x, bass_kernels.Codes(*weights), splits=splits, **own)
        wanted = reference.skinny_linear(x, weights, **options)
        assert float((found.double() - wanted).norm() / wanted.norm()) < TOLERANCE[torch.float16]


def test_draws_of_drafts():
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(24, 9000, generator=generator))[::2, :8500]
    for slot, wide in ((0, 0), (2, 300)):
        assert is_right(logits, 0.7, slot, drawn(logits, 0.7, slot, logits.shape[1] + wide))
    broken = logits[:1].clone()
    broken[0, 5000] = math.nan
    assert not drawn(broken, 0.7)[2].isfinite()


def test_largest_logits():
    generator = torch.Generator().manual_seed(0)
    for numbers in (torch.randn(6, 9000, generator=generator), torch.randint(3, (6, 9000), generator=generator)):
        logits = numbers.float()[::2, :8500]
        assert test_kernel_peaks.is_right(logits, bass_kernels.largest(logits))
    broken = logits[:1].clone()
    broken[0, 5000] = math.nan
    assert not bass_kernels.largest(broken)[0].isfinite()
