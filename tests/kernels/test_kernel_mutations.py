"""The kernels' tests fail on kernels that are wrong: one bug at a time is written into a copy of the package."""

import importlib
import math
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from kernel_cases import TOLERANCE, case, error, poisoned_memory
from test_kernel_verification import step

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
            "(n < limit)[:, None] & (d < D)[None, :]",
            "(n < limit + 2)[:, None] & (d < D)[None, :]",
        ),
        "the output is not rescaled": ("acc = acc * shrink[:, None]\n        if MASKED", "if MASKED"),
        "the sum is not rescaled": ("mass = mass * shrink + tl.sum(weights, 1)", "mass = mass + tl.sum(weights, 1)"),
        "heads of a group are mixed up": (
            "rows % GROUP) * stride_h + rows // GROUP * stride_q\n    return",
            "(rows + 1) % GROUP) * stride_h + rows // GROUP * stride_q\n    return",
        ),
        "padding is not zero": ("tl.where(live[:, None], acc /", "tl.where(live[:, None] | True, 1e-3 + acc /"),
        "the softcap is skipped": ("capped(scores, SOFTCAP) *", "scores *"),
        "the sink gives no mass": ("mass * shrink + tl.exp2(sink - highest)", "mass * shrink"),
        "positions start one late": ("positions = start + rows", "positions = start + 1 + rows"),
    },
    "ragged": {
        "the tail is one block short": ("end = tl.minimum(end, last + 1)", "end = tl.minimum(end, last)"),
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
        "rows of one piece are reduced too": ("if splits <= 1:", "if splits < 1:"),
    },
    "plan": {
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
    "fused_verification": {
        "the residual is the target's law": ("tl.maximum(p - q_ids, 0.0)", "p"),
        "a row that submitted less has a residual": ("rejected = slot < length", "rejected = slot < drafts"),
        "tokens that were not submitted are kept": ("(slots < length) & (slots < drafts)", "slots < drafts"),
        "a uniform number at the boundary accepts": ("drafted_at) < ratio", "drafted_at) <= ratio"),
        "p of the drafted token has no temperature": ("- shift) * inverse_temperature) / mass", "- shift)) / mass"),
        "the first block has no mass": (
            "tl.sum(residual.to(tl.float64))",
            "tl.sum(residual.to(tl.float64)) * (block > 0)",
        ),
        "NaN counts as a number": ("(total > 0).to(tl.int8)", "(total != 0).to(tl.int8)"),
    },
    "kv_write": {
        "keys go to the first places": ("((first_place + b) *", "(b *"),
        "keys are written for values": ("* VALUE_DIM + d, v, mask", "* VALUE_DIM + d, k, mask"),
    },
}
CASES = [(module, bug) for module, bugs in BUGS.items() for bug in bugs]


def cases():
    yield case([70, 33, 5, 0], 5, query_lengths=[5, 3, 0, 0])
    yield case([400, 37], 3, head_dim=80)  # split
    yield case([46], 9, group=1, sliding_window=7)  # the first block of keys is in one query's window only
    yield case([300, 70], 9, group=4, kv_heads=1, sliding_window=40)
    yield case([40, 130], 2, softcap=2.0, sinks=True)
    yield case([33, 5], 33, padded_in_front=True)


def attention_is_wrong(package) -> bool:
    """Whether any case shows that this package's attention is wrong."""
    for arguments in cases():
        with poisoned_memory():
            found = package.ragged_attention(*arguments.arguments, **arguments.flags)
        if not error(found, arguments.expected) <= TOLERANCE[torch.float32]:
            return True
    return False


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
    return any(not all(map(torch.equal, found[:3], expected[:3])) for found, expected in pairs)


def write_is_wrong(package) -> bool:
    """Whether the cache differs from the reference's."""
    states = [torch.randn(2, 3, 2, 16) for _ in range(2)]
    caches = [[torch.zeros(4, 3, 9, 16) for _ in range(2)] for _ in range(2)]
    for write, cache in zip((package.write_kv, reference.write_kv), caches, strict=True):
        write(*states, *cache, torch.tensor([[1, 4], [0, 8]]), 1)
    return not all(map(torch.equal, *caches))


CHECKS = {"fused_verification": verification_is_wrong, "kv_write": write_is_wrong}


@pytest.mark.parametrize("is_wrong", [attention_is_wrong, *CHECKS.values()])
def test_without_a_bug_nothing_is_caught(is_wrong):
    assert not is_wrong(bass_kernels)


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
