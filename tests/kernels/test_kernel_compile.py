"""Kernels compiled for other GPUs: registers, shared memory and generated instructions."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

SUPPORT = Path(__file__).parents[1] / "support"
# `make test-ci` compiles one launch of each kind. All launches take minutes.
TARGETS = [pytest.param(("sm_90", "few"), marks=pytest.mark.ci), pytest.param(("sm_90",), marks=pytest.mark.slow),
           pytest.param(("sm_80",), marks=pytest.mark.slow)]  # fmt: skip
SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024}  # bytes per multiprocessor
REGISTERS = 65536
ATTENTION = ("_attend_pieces", "_attend_rows")
VERIFICATION = ("block_statistics", "decide", "block_masses", "finish")
KERNELS = {"_attend_pieces", "_plan", "_write_token", "_draw", "_largest", "_multiply", "_add_up", *VERIFICATION}
# Launches that spill with triton 3.6, but not with 3.7.
SPILLED = {
    "sm_80": [
        {"head_dim": 64, "query_length": 17, "softcap": 50.0, "sinks": True},
        {"packed": True, "group": 32, "rows": 128, "gated": True},  # 8 bytes
    ]
}
CASE = ("head_dim", "query_length", "softcap", "sinks", "packed", "group", "rows", "gated")
KNOWN = SPILLED if triton.__version__.startswith("3.6.") else {}
# Shared memory in kB, and kernels that spill (before sm_80: with float16, slow there).
OTHERS = {75: (64, {"_attend_pieces", "_multiply"}), 89: (99, set()), 100: (227, {"finish"}), 120: (99, set())}


@functools.cache
def compiled(architecture: str, *few: str) -> list[dict]:
    """Run kernel_compiler.py in a separate process, and return its lines."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, SUPPORT / "kernel_compiler.py", architecture.removeprefix("sm_"), *few]
    return [json.loads(line) for line in subprocess.check_output(command, env=environment).splitlines()]


def faulty(kernels: list[dict], right) -> list[dict]:
    assert kernels
    return [kernel for kernel in kernels if not right(kernel)]


def in_registers(kernel: dict) -> bool:
    return kernel["stack"] == kernel["local"] == 0


def half_precision(kernel: dict) -> bool:
    return kernel["kernel"] in ATTENTION and kernel.get("dtype", "bfloat16") in ("bfloat16", "float16")


@pytest.fixture(params=TARGETS, ids=" ".join)
def target(request) -> tuple[str, ...]:
    return request.param


def test_nothing_spills(target):
    kernels = compiled(*target)
    assert {kernel["kernel"] for kernel in kernels} >= KERNELS
    spilled = faulty(kernels, in_registers)
    cases = [{name: kernel[name] for name in CASE if kernel.get(name) is not None} for kernel in spilled]
    assert cases == KNOWN.get(target[0], [])


@pytest.mark.slow
@pytest.mark.parametrize("capability", OTHERS)
def test_kernels_compile_for_other_gpus(capability):
    room, spilling = OTHERS[capability]
    kernels = compiled(f"sm_{capability}", "few")
    assert {kernel["kernel"] for kernel in kernels} >= KERNELS
    assert {kernel["kernel"] for kernel in faulty(kernels, in_registers)} == spilling
    assert faulty(kernels, lambda kernel: kernel["shared"] <= room * 1024) == []


def test_program_fits_its_multiprocessor(target):

    def fits(kernel: dict) -> bool:
        return kernel["shared"] <= SHARED[target[0]] and kernel["registers"] <= 255

    def counted_programs_fit(kernel: dict) -> bool:
        registers = -(-kernel["registers"] // 8) * 8 * kernel["warps"] * 32  # allocated in eights
        return kernel["programs"] <= min(REGISTERS // registers, SHARED["sm_90"] // (kernel["shared"] + 1024))

    kernels = compiled(*target)
    assert faulty(kernels, fits) == []
    if target[0] == "sm_90":
        pieces = [kernel for kernel in kernels if kernel["kernel"] == "_attend_pieces"]
        assert faulty(pieces, counted_programs_fit) == []


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_prompts_of_any_length_share_one_compilation(architecture):
    prompts = [kernel for kernel in compiled(architecture) if kernel.get("prompt")]
    assert len({kernel["query_length"] for kernel in prompts}) <= 1


def test_keys_and_values_are_loaded_128_bits_at_a_time(target):
    kernels = [kernel for kernel in compiled(*target) if kernel["kernel"] in ATTENTION]
    assert faulty(kernels, lambda kernel: kernel["wide_loads"] > 0 and kernel["narrow_copies"] == 0) == []


def test_pieces_are_stored_before_they_are_counted(target):
    """A barrier; a count that releases own stores and acquires other programs' stores; a barrier; loads from L2."""
    split = [kernel for kernel in compiled(*target) if kernel["kernel"] == "_attend_pieces" and kernel["count"]]
    assert faulty(split, lambda kernel: kernel["count"] == "store barrier acq_rel.gpu barrier load.cg") == []


def test_products_are_matrix_instructions(target):
    kernels = compiled(*target)
    attention = list(filter(half_precision, kernels))
    products = [kernel for kernel in kernels if kernel["kernel"] == "_multiply"]
    assert faulty(attention + products, lambda kernel: kernel["matrix"] > 0) == []
    assert faulty(products, lambda kernel: kernel["wide_loads"] > 0) == []
    full = [kernel for kernel in kernels if kernel.get("dtype") == "float32"]  # matrix units would round to tf32
    assert faulty(full, lambda kernel: kernel["matrix"] == 0) == []
    if target[0] == "sm_90":
        wide = [kernel for kernel in attention if kernel.get("block_m") == 64]
        assert faulty(wide, lambda kernel: kernel["warpgroup"] == kernel["matrix"] > 0) == []
