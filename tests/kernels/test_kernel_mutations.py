"""The kernels' tests fail on kernels that are wrong: one bug at a time is written into a copy of the package."""

import importlib
import itertools
import math
import re
import shutil
import sys
from pathlib import Path

import pytest
import test_kernel_peaks
import torch
from kernel_cases import TOLERANCE, case, error, poisoned_memory, shuffled_programs
from test_kernel_draw import drawn, is_right
from test_kernel_skinny import activations, codes
from test_kernel_verification import committing, differing, step

import bass_kernels
from bass_kernels import reference

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # wrong kernels make NaN
]
SOURCE = Path(bass_kernels.__file__).parent

BUGS = {  # by module: what is wrong, the right code and the wrong one
    "online_softmax": {
        "a query does not see itself": ("(n[None, :] <= positions", "(n[None, :] < positions"),
        "a query sees the token after it": ("(n[None, :] <= positions", "(n[None, :] <= 1 + positions"),
        "hidden keys are zeroed, not masked": (
            'tl.where(visible, scores, float("-inf"))',
            "tl.where(visible, scores, 0.0)",
        ),
        "no guard for rows that saw no key": (
            'base = tl.where(top_next == float("-inf"), 0.0, top_next)',
            "base = top_next",
        ),
        "the window is one too long": ("positions[:, None] - WINDOW", "positions[:, None] - WINDOW - 1"),
        "values beyond the row are read": (
            "(n < end)[:, None] & (d < D)[None, :]",
            "(n < end + 2)[:, None] & (d < D)[None, :]",
        ),
        "a piece goes on into the next one": (
            "positions[:, None]) & (n < end)[None, :]",
            "positions[:, None])",
        ),
        "the output is not rescaled": ("acc = acc * shrink[:, None]\n        if MASKED", "if MASKED"),
        "the sum is not rescaled": ("mass = mass * shrink + tl.sum(weights, 1)", "mass = mass + tl.sum(weights, 1)"),
        "heads of a group are mixed up": (
            "rows % GROUP).to(tl.int64) * stride_h + (rows // GROUP).to(tl.int64) * stride_q\n    return",
            "(rows + 1) % GROUP).to(tl.int64) * stride_h + (rows // GROUP).to(tl.int64) * stride_q\n    return",
        ),
        "padding is not zero": ("tl.where(live[:, None], acc /", "tl.where(live[:, None] | True, 1e-3 + acc /"),
        "the softcap is skipped": ("capped(scores, SOFTCAP) *", "scores *"),
        "the sink gives no mass": ("mass * shrink + tl.exp2(sink - highest)", "mass * shrink"),
        "positions start one late": ("positions = start + rows", "positions = start + 1 + rows"),
    },
    "ragged": {
        "the tail is one block short": ("tl.minimum(end, last + 1))", "tl.minimum(end, last))"),
        "a block that not all see is not masked": (
            "tl.minimum(end, first + 1) - begin, 0)",
            "tl.minimum(end, first + BLOCK_N) - begin, 0)",
        ),
        "the last piece is not added": ("for _ in range(splits):", "for _ in range(splits - 1):"),
        "pieces are added without their weight": ("part * weight[:, None]", "part"),
        "the partial sum goes to the wrong piece": (
            "at += KV_HEADS * query_length * GROUP",
            "at += query_length * GROUP",
        ),
        "the counter is not reset": ("tl.store(count, 0)", "tl.store(count, splits)"),
        "the last but one adds up": ("== splits - 1:", "== splits - 2:"),
        "all tiles of a row count together": (
            "* tl.num_programs(0) + block\n            splits",
            "* 1\n            splits",
        ),
        "heads count together": ("(row * KV_HEADS + kv_head) * tl", "(row * KV_HEADS) * tl"),
        "a tile's first rows are added up alone": ("range(BLOCK_M // REDUCE_ROWS)", "range(1)"),
        "the program that adds up begins at its own piece": (
            "first_split = tl.load(plan_rows + row * 2)",
            "first_split = split",
        ),
    },
    "plan": {
        "counters are not made zero": ("tl.store(counters + tile, 0", "tl.store(counters + tile, 1"),
        "a piece of each row is left out": (
            "tl.maximum(index * chunk, row_first)",
            "tl.maximum(index * chunk, row_first) + chunk",
        ),
        "rows without keys get no piece": (
            "tl.cdiv(last, chunk) - first // chunk, 1)",
            "tl.cdiv(last, chunk) - first // chunk, 0)",
        ),
        "the window cuts a key too many": (
            "tl.maximum(start - WINDOW + 1, 0) // BLOCK_N",
            "tl.maximum(start - WINDOW + 1 + BLOCK_N, 0) // BLOCK_N",
        ),
    },
    "verification_kernels": {
        "the residual is the target's law": ("tl.maximum(p - q_ids, 0.0)", "p"),
        "a row that submitted less has a residual": ("rejected = slot < length", "rejected = slot < drafts"),
        "tokens that were not submitted are kept": ("(slots < length) & (slots < drafts)", "slots < drafts"),
        "a uniform number at the boundary accepts": ("(number < ratio)", "(number <= ratio)"),
        "p of the drafted token has no temperature": ("- shift) * inverse_temperature) / mass", "- shift)) / mass"),
        "the first block has no mass": (
            "tl.sum(residual.to(tl.float64))",
            "tl.sum(residual.to(tl.float64)) * (block > 0)",
        ),
        "NaN counts as a number": ("(total > 0).to(tl.int8)", "(total != 0).to(tl.int8)"),
        "a row that is not fine moves": ("(slots <= slot) & fine", "slots <= slot"),
        "a row that is not fine grows": ("end + slot + 1, mask=fine", "end + slot + 1"),
        "a row that is not fine counts the step": ("step + 1, mask=fine", "step + 1"),
        "a draft without numbers is committed": ("fine = fine & (is_drafted != 0)", "fine = fine"),
        "other rows' logits are not looked at": ("(tl.min(tl.min(all_sound, 1), 0) != 0)", "fine"),
        "other rows' drafts are not looked at": ("(tl.min(all_drafted, 0) != 0)", "(is_drafted != 0)"),
        "places without a row hold the others up": (
            "mask=submits >= 0, other=1",
            "mask=b < tl.num_programs(0), other=1",
        ),
        "places without a row move": (
            "row = tl.program_id(0).to(tl.int64)\n    length = tl.load(submitted + row)\n    if length < 0:",
            "row = tl.program_id(0).to(tl.int64)\n    length = tl.load(submitted + row)\n    if length < -1:",
        ),
        "tokens that were not accepted are appended": ("moves = (slots <= slot)", "moves = (slots <= length)"),
        "log-probabilities are appended one late": (
            "logprobs + end + slots, logprob",
            "logprobs + end + 1 + slots, logprob",
        ),
        "the target's token has the drafts' number": (
            "uniform(stream, step, TARGET, 0)",
            "uniform(stream, step, ACCEPT, 0)",
        ),
        "all drafts have the first one's number": (
            "tl.load(steps + row), ACCEPT, slot)",
            "tl.load(steps + row), ACCEPT, 0)",
        ),
        "chances are those of another text": ("text * places + (end", "(text + 1) % texts * places + (end"),
        "chances begin with the row": ("(end + slots) % places", "slots % places"),
    },
    "uniform": {
        "signs are copied": ("(x >> BITS) & ((1 << (64 - BITS)) - 1)", "x >> BITS"),
        "the counter is not mixed in": ("stream + counter * GOLDEN", "stream + counter"),
    },
    "kv_write": {
        "keys go to the first places": ("((first_place + b) *", "(b *"),
        "keys are written for values": ("* VALUE_DIM + d, v, mask", "* VALUE_DIM + d, k, mask"),
    },
}
BUGS["skinny"] = {
    "low halves have no sign": ("(both << 28) >> 28", "both & 15"),
    "high halves come first": ("low, high = (both", "high, low = (both"),
    "high halves follow without a gap": ("k += 16", "k += 15"),
    "a block of K is left out": ("(split + 1) * piece, inputs)", "(split + 1) * piece, inputs) - BLOCK_K"),
    "pieces overlap": ("range(split * piece,", "range(split * piece // 2,"),
    "the last piece is not added": ("for split in range(SPLITS):", "for split in range(SPLITS - 1):"),
    "pieces lie on each other": ("at = split * each * (2 if GATED else 1) + n", "at = n"),
    "activations beyond the last input are read": ("(k < inputs)[:, None]", "(k < inputs + 2)[:, None]"),
    "rows beyond the last are written": ("there[:, None] & (m < rows)", "there[:, None] & (m < rows + 1)"),
    "the scale is that of the first group": ("* scales + group[None, :]", "* scales + group[None, :] * 0"),
    "whole channels have no scale": ("if not GROUPED:\n        acc *=", "if not GROUPED:\n        acc += 0 *"),
    "the gate has the other's scale": ("acc_gate *= tl.load(gate_scale", "acc_gate *= tl.load(scale"),
    "both are activated": ("acc *= _activated(acc_gate,", "acc = _activated(acc * acc_gate,"),
    "the bias is another's": ("tl.load(bias + n,", "tl.load(bias + n // 2,"),
    "SiLU is the sigmoid": ("x = x * tl.sigmoid(x)\n", "x = tl.sigmoid(x)\n"),
    "GELU is the normal law": ("x = 0.5 * x * (1.0", "x = 0.5 * (1.0"),
    "tanh has a square for a cube": ("0.044715 * x * x * x", "0.044715 * x * x"),
}
BUGS["draft_draw"] = {
    "q has no temperature": ("q_ids = tl.exp((x - shift) * inverse_temperature)", "q_ids = tl.exp(x - shift)"),
    "the sum is that of the last maximum": ("total *= tl.exp(", "total *= 0.0 * tl.exp("),
    "blocks before the chosen one count": ("target -= tl.sum(", "target -= 0.0 * tl.sum("),
    "all slots have the first one's number": ("DRAFT, slot) * tl", "DRAFT, 0) * tl"),
    "the draft has the target's number": ("tl.constexpr(1)", "tl.constexpr(3)"),
    "q is written within the vocabulary alone": (
        "mask=ids < width)\n        tl.store(masses",
        "mask=ids < vocabulary)\n        tl.store(masses",
    ),
    "NaN counts as a number": ("tl.where(total > 0, top,", "tl.where(total != 0, top,"),
    "rows lie close together": ("logits += row * stride_b", "logits += row * vocabulary"),
}
BUGS["peaks"] = {
    "of equal ones it is the last": ("at = tl.where(x > best,", "at = tl.where(x >= best,"),
    "of equal lanes it is the last": (
        "tl.min(tl.where(best == top, at, vocabulary - 1))",
        "tl.max(tl.where(best == top, at, 0))",
    ),
    "every other block is left out": ("first + part * BLOCK", "first + part * 2 * BLOCK"),
    "NaN counts as a number": ("tl.where(tl.min(numbers) > 0, top,", "tl.where(tl.min(numbers) > -1, top,"),
    "ids lie close together": ("logits += row * stride_b", "logits += row * vocabulary"),
}
CASES = [(module, bug) for module, bugs in BUGS.items() for bug in bugs]


def cases():
    yield case([70, 33, 5, 0], 5, query_lengths=[5, 3, 0, 0])
    yield case([400, 37], 3, head_dim=80)  # split
    yield case([46], 9, group=1, sliding_window=7)  # the first block of keys is in one query's window only
    yield case([300, 70], 9, group=4, kv_heads=1, sliding_window=40)
    yield case([40, 130], 2, softcap=2.0, sinks=True)
    yield case([33, 5], 33, padded_in_front=True)
    yield case([260, 300], 20, group=4, kv_heads=1, dtype=torch.float16)  # split, several tiles of 64 rows


def attention_is_wrong(package) -> bool:
    """Whether any case shows that this package's attention is wrong."""
    for arguments in cases():
        options = {name: arguments.flags[name] for name in ("sliding_window",) if name in arguments.flags}
        with poisoned_memory():
            work = package.make_plan(*arguments[:2], *arguments[3:5], **options)
            found = package.ragged_attention(*arguments.arguments, **arguments.flags, plan=work)
        if not error(found, arguments.expected) <= TOLERANCE[arguments.query.dtype]:
            return True
        with poisoned_memory(), shuffled_programs():  # the next layer of the pass
            again = package.ragged_attention(*arguments.arguments, **arguments.flags, plan=work)
        if not torch.equal(again, found):
            return True
    arguments = case([604, 594, 604, 584], 1, group=4, kv_heads=1, head_dim=128, dtype=torch.float16)
    first = arguments.kv_lengths - 13  # of a draft phase that begins with nine queries: another tile
    sizes = {"query_length": 9, "kv_heads": 1, "group": 4, "width": arguments.key.shape[2], "span": 16}
    work = package.plan.make_plan(first, first + 16, tile=package.tiles.choose(36, 128, torch.float16, False), **sizes)
    work = package.Plan(*work[:3], package.tiles.choose(4, 128, torch.float16, False))
    with poisoned_memory():
        found = package.ragged_attention(*arguments.arguments, plan=work)
    return not error(found, arguments.expected) <= TOLERANCE[torch.float16]


def verification_is_wrong(package) -> bool:
    """Whether its decisions differ from the reference's."""
    steps = [step(4, 3, 300, temperature=0.7, seed=seed)[0] for seed in range(3)]
    steps.append(step(4, 0, 300, temperature=0.7)[0])  # nothing drafted: from the target's law
    tie = torch.zeros(1, 2, 2), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64), None
    steps.append((*tie, torch.tensor([[0.5]]).double(), torch.tensor([0.3]).double(), torch.ones(1).long(), 1.0))
    broken = list(step(2, 2, 300, temperature=0.7)[0])
    broken[0][1, 0, 7] = math.nan
    found = package.verify(*broken)
    if not torch.equal(found.finite, reference.verify(*broken).finite):
        return True
    pairs = [(package.verify(*arguments), reference.verify(*arguments)) for arguments in steps]
    if any(not all(map(torch.equal, found[:3], expected[:3])) for found, expected in pairs):
        return True
    for changes in ({}, {"seed": 1}, {"seed": 2}, {"forced": True}, {"broken": [1]}, {"broken_draft": [2]},
                    {"broken": [1], "all_or_none": True}, {"broken_draft": [2], "all_or_none": True},
                    {"broken_draft": [3], "all_or_none": True}):  # fmt: skip
        found, expected = committing(vocabulary=300, **changes), committing(vocabulary=300, **changes)
        block = found.by_the_kernels(package.commit, package.RowMemory)
        if differing(found, block, expected, expected.by_bass_core()):
            return True
    return False


def write_is_wrong(package) -> bool:
    """Whether the cache differs from the reference's."""
    states = [torch.randn(2, 3, 2, 16) for _ in range(2)]
    caches = [[torch.zeros(4, 3, 9, 16) for _ in range(2)] for _ in range(2)]
    for write, cache in zip((package.write_kv, reference.write_kv), caches, strict=True):
        write(*states, *cache, torch.tensor([[1, 4], [0, 8]]), 1)
    return not all(map(torch.equal, *caches))


def products_are_wrong(package) -> bool:
    """Whether a product differs from the reference's, or writes where nobody asked."""
    if rows_beyond_are_written(package):  # first: what writes beyond its memory breaks the process
        return True
    for form in ({}, {"packed": True, "group": 32}, {"packed": True, "group": 64}):
        x, weights, gate = activations(5, 290), codes(35, 290, **form), codes(35, 290, seed=2, **form)
        bias = torch.randn(35).half()
        for splits, options in itertools.product(
            (1, 2), ({"bias": bias}, *({"bias": bias, "activation": name} for name in ("silu", "gelu", "gelu_tanh")),
                     {"gate": gate, "activation": "silu"})
        ):  # fmt: skip
            own = {name: package.Codes(*each) if isinstance(each, tuple) else each for name, each in options.items()}
            with poisoned_memory():
                found = package.skinny_linear(x, package.Codes(*weights), splits=splits, **own)
            wanted = reference.skinny_linear(x, weights, **options)
            if not float((found.double() - wanted).norm() / wanted.norm()) < TOLERANCE[torch.float16]:
                return True
    return False


def rows_beyond_are_written(package) -> bool:
    """The output is a tensor of the launcher's own: here it lies in a larger one."""
    room = torch.full((4, 35), 7.0, dtype=torch.float16)

    class Activations(torch.Tensor):
        def new_empty(self, *shape, **options):
            return room[:3] if shape == (3, 35) else torch.empty(*shape, **options)

    package.skinny_linear(activations(3, 64).as_subclass(Activations), package.Codes(*codes(35, 64)), splits=1)
    return not (room[3] == 7).all()


def draw_is_wrong(package) -> bool:
    """Whether a draft's q or token is not what torch makes of the logits, or NaN goes unseen."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(24, 9000, generator=generator))[::2, :8500]
    for slot, wide in ((0, 0), (2, 300)):
        found = drawn(logits, 0.7, slot, logits.shape[1] + wide, draw=package.draw)
        if not is_right(logits, 0.7, slot, found):
            return True
    broken = logits[:1].clone()
    broken[0, 5000] = math.nan
    return bool(drawn(broken, 0.7, draw=package.draw)[2].isfinite())


def largest_is_wrong(package) -> bool:
    """Whether the largest logit or its id is not what torch finds, or NaN goes unseen."""
    generator = torch.Generator().manual_seed(0)
    for numbers in (torch.randn(6, 9000, generator=generator), torch.randint(3, (6, 9000), generator=generator)):
        logits = numbers.float()[::2, :8500]
        if not test_kernel_peaks.is_right(logits, package.largest(logits)):
            return True
    broken = logits[:1].clone()
    broken[0, 5000] = math.nan
    return bool(package.largest(broken)[0].isfinite())


CHECKS = {
    "draft_draw": draw_is_wrong,
    "peaks": largest_is_wrong,
    "skinny": products_are_wrong,
    "verification_kernels": verification_is_wrong,
    "uniform": verification_is_wrong,
    "kv_write": write_is_wrong,
}


@pytest.mark.parametrize(
    "is_wrong",
    [
        attention_is_wrong,
        verification_is_wrong,
        write_is_wrong,
        products_are_wrong,
        draw_is_wrong,
        largest_is_wrong,
    ],
)
def test_without_a_bug_nothing_is_caught(is_wrong):
    assert not is_wrong(bass_kernels)


@pytest.mark.slow
@pytest.mark.parametrize(("module", "bug"), CASES, ids=[bug for _, bug in CASES])
def test_bug_is_caught(tmp_path, monkeypatch, module, bug):
    right, wrong = BUGS[module][bug]
    name = "mutant_" + re.sub(r"\W+", "_", bug)
    copy = shutil.copytree(SOURCE, tmp_path / name)
    for file in copy.glob("*.py"):
        file.write_text(file.read_text().replace("bass_kernels", name))
    text = (copy / f"{module}.py").read_text()
    assert text.count(right) == 1, f"{module}.py has changed: {right!r} is there {text.count(right)} times"
    (copy / f"{module}.py").write_text(text.replace(right, wrong))
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert CHECKS.get(module, attention_is_wrong)(importlib.import_module(name))
    finally:
        for loaded in [key for key in sys.modules if key.split(".")[0] == name]:
            del sys.modules[loaded]
