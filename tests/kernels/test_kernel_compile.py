"""Kernels compiled for GPUs that are not here: what each tile costs, and that the right instructions come out."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

SUPPORT = Path(__file__).parents[1] / "support"
ARCHITECTURES = [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90"]
SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024}  # of a multiprocessor, what its programs can share
REGISTERS = 65536
ATTENTION = ("_attend_pieces", "_attend_rows")
# What the compiler of triton 3.6 spills and that of 3.7 does not.
SPILLED = {
    "sm_80": [
        {"head_dim": 64, "query_length": 17, "softcap": 50.0, "sinks": True},
        {"packed": True, "group": 32, "rows": 128, "gated": True},  # 8 bytes
    ]
}
CASE = ("head_dim", "query_length", "softcap", "sinks", "packed", "group", "rows", "gated")
KNOWN = SPILLED if triton.__version__.startswith("3.6.") else {}
# Other GPUs: kB that programs of a multiprocessor share, and what spills (float16 on GPUs before sm_80: slow there).
OTHERS = {75: (64, {"_attend_pieces", "_multiply"}), 89: (99, set()), 100: (227, {"finish"}), 120: (99, set())}


@functools.cache
def compiled(architecture: str, *few: str) -> list[dict]:
    """What kernel_compiler.py prints, in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, SUPPORT / "kernel_compiler.py", architecture.removeprefix("sm_"), *few]
    return [json.loads(line) for line in subprocess.check_output(command, env=environment).splitlines()]


def faulty(kernels: list[dict], right) -> list[dict]:
    return [kernel for kernel in kernels if not right(kernel)]


def in_registers(kernel: dict) -> bool:
    return kernel["stack"] == kernel["local"] == 0


def half_precision(kernel: dict) -> bool:
    return kernel["kernel"] in ATTENTION and kernel.get("dtype", "bfloat16") in ("bfloat16", "float16")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nothing_spills(architecture):
    kernels = compiled(architecture)
    assert {kernel["kernel"] for kernel in kernels} >= {
        *ATTENTION,
        "_plan",
        "_write_token",
        "finish",
        "_draw",
        "_largest",
        "_multiply",
        "_add_up",
    }
    spilled = faulty(kernels, in_registers)
    cases = [{name: kernel[name] for name in CASE if kernel.get(name) is not None} for kernel in spilled]
    assert cases == KNOWN.get(architecture, [])


@pytest.mark.slow
@pytest.mark.parametrize("capability", OTHERS)
def test_kernels_compile_for_other_gpus(capability):
    room, spilling = OTHERS[capability]
    kernels = compiled(f"sm_{capability}", "few")
    assert {kernel["kernel"] for kernel in kernels} >= {"_attend_pieces", "_plan", "_write_token", "finish"}
    assert {kernel["kernel"] for kernel in faulty(kernels, in_registers)} == spilling
    assert faulty(kernels, lambda kernel: kernel["shared"] <= room * 1024) == []


def test_the_plan_counts_on_no_more_programs_than_fit():
    """On sm_90, which the counts in tiles.py are for; they are register caps too."""
    kernels = [kernel for kernel in compiled("sm_90") if kernel["kernel"] == "_attend_pieces"]

    def fit(kernel: dict) -> bool:
        registers = -(-kernel["registers"] // 8) * 8 * kernel["warps"] * 32  # given out in eights
        return kernel["programs"] <= min(REGISTERS // registers, SHARED["sm_90"] // (kernel["shared"] + 1024))

    assert faulty(kernels, fit) == []


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_prompts_of_any_length_share_what_was_compiled(architecture):
    prompts = [kernel for kernel in compiled(architecture) if kernel.get("prompt")]
    assert len({kernel["query_length"] for kernel in prompts}) <= 1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_program_fits_its_multiprocessor(architecture):
    assert faulty(compiled(architecture), lambda kernel: kernel["shared"] <= SHARED[architecture]) == []
    assert faulty(compiled(architecture), lambda kernel: kernel["registers"] <= 255) == []


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_keys_and_values_come_in_loads_of_128_bits(architecture):
    kernels = [kernel for kernel in compiled(architecture) if kernel["kernel"] in ATTENTION]
    assert faulty(kernels, lambda kernel: kernel["wide_loads"] > 0 and kernel["narrow_copies"] == 0) == []


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_pieces_are_stored_by_all_threads_before_they_are_counted(architecture):
    """A barrier, a count that releases what was stored and acquires what others did, a barrier, and loads from L2."""
    kernels = [kernel for kernel in compiled(architecture) if kernel["kernel"] == "_attend_pieces"]
    split = [kernel for kernel in kernels if kernel["count"]]
    assert len(split) > 20
    assert faulty(split, lambda kernel: kernel["count"] == "store barrier acq_rel.gpu barrier load.cg") == []


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_products_are_matrix_instructions(architecture):
    kernels = list(filter(half_precision, compiled(architecture)))
    assert len(kernels) > 20
    assert faulty(kernels, lambda kernel: kernel["matrix"] > 0) == []


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_codes_come_in_loads_of_128_bits_and_are_multiplied_by_matrix_instructions(architecture):
    kernels = [kernel for kernel in compiled(architecture) if kernel["kernel"] == "_multiply"]
    assert len(kernels) > 20
    assert faulty(kernels, lambda kernel: kernel["matrix"] > 0) == []
    assert faulty(kernels, lambda kernel: kernel["wide_loads"] > 0) == []


def test_blocks_of_64_rows_use_warpgroup_instructions():
    wide = [kernel for kernel in filter(half_precision, compiled("sm_90")) if kernel.get("block_m") == 64]
    assert len(wide) >= 4
    assert faulty(wide, lambda kernel: kernel["warpgroup"] == kernel["matrix"] > 0) == []


def test_full_precision_is_not_rounded():
    """Matrix units would round float32 to tf32."""
    kernels = [kernel for kernel in compiled("sm_90") if kernel.get("dtype") == "float32"]
    assert faulty(kernels, lambda kernel: kernel["matrix"] == 0) == []
