"""Compile launches for a GPU on a machine without a GPU, and read the result.

A fake driver names the GPU. The launchers get tensors with shapes, but without memory, and every launch is a
compilation. triton's tools read registers, shared memory and machine code. Run in a separate process without
TRITON_INTERPRET, because the interpreter compiles nothing: `python tests/support/kernel_compiler.py 90` prints one JSON
line per kernel. `few` compiles one launch of each kind. GPUs other than sm_90 compile the kernels around attention in
float16, which older GPUs also support.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


class StandIn:
    """A fake driver with the parts needed for compilation."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compiled_launches(call: Callable[[], object]) -> list:
    found = []

    def compile_only(kernel, grid):
        def launch(*args, **kwargs):
            found.append(kernel.run(*args, grid=grid, warmup=True, **kwargs))

        return launch

    before, JITFunction.__getitem__ = JITFunction.__getitem__, compile_only
    try:
        call()
    finally:
        JITFunction.__getitem__ = before
    return found


def resources(kernel) -> dict:
    """Return name, registers per thread, spilled and stack bytes, shared memory, and instruction counts."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.check_output([TOOLS / "cuobjdump", "-res-usage", file.name], text=True)
        disassemble = [TOOLS / "nvdisasm", "--print-code", "--no-dataflow", file.name]  # without branch targets
        code = subprocess.check_output(disassemble, text=True, stderr=subprocess.DEVNULL)
    return {
        "kernel": kernel.metadata.name,
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "stack": int(re.search(r"STACK:(\d+)", usage)[1]),
        "local": len(re.findall(r"\b(?:LDL|STL)\b", code)),
        "shared": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
        "matrix": len(re.findall(r"\b(?:HMMA|HGMMA|DMMA)\b", code)),
        "warpgroup": len(re.findall(r"\bHGMMA\b", code)),
        "wide_loads": len(re.findall(r"\b(?:LDG|LDGSTS)\.E\.(?:\w+\.)*128", code)),
        "count": around_count(kernel.asm["ptx"]),
        "narrow_copies": len(re.findall(r"\bLDGSTS\b(?!\.E\.(?:\w+\.)*128)", code)),
    }


def around_count(ptx: str) -> str:
    """Return the operations around a program's atomic addition, with "load.cg" if the program loads past the L1 cache,
    or "" without an atomic addition. The order of lines is the order of execution only without branches in between."""
    kinds = {
        r"st\.global": "store",
        r"ld\.global[\w.]*\.cg": "load.cg",
        r"bar\.sync": "barrier",
        r"atom\.global\.(?:gpu\.acq_rel|acq_rel\.gpu)\.": "acq_rel.gpu",
    }
    done = [kind for line in ptx.splitlines() for pattern, kind in kinds.items() if re.search(pattern, line)]
    done = [kind for kind, before in zip(done, [None, *done], strict=False) if kind != before]
    if "acq_rel.gpu" not in done:
        return ""
    at = done.index("acq_rel.gpu")
    after = [kind for kind in done[at:] if kind != "store"]  # the counter, back to 0
    return " ".join([*done[at - 2 : at], *after[:2], *["load.cg"] * ("load.cg" in done)])


HEAD_DIMS = (64, 80, 96, 128, 256)


def cases() -> Iterator[dict]:
    """Yield arguments of every tile that a launcher can choose, and of every flag."""
    for head_dim, query_length in itertools.product(HEAD_DIMS, (1, 5, 17)):  # 4, 20 and 68 packed rows
        yield {"head_dim": head_dim, "query_length": query_length}
    for head_dim in (64, 128, 256):
        yield {"head_dim": head_dim, "query_length": 5, "dtype": "float16"}
    for head_dim in HEAD_DIMS:
        yield {"head_dim": head_dim, "query_length": 5, "dtype": "float32"}
    for head_dim in (64, 128, 256):
        yield {"head_dim": head_dim, "query_length": 5, "dtype": "float64"}
    yield {"head_dim": 128, "query_length": 1, "deterministic": True}
    for flag in ({"sliding_window": 512}, {"softcap": 50.0}, {"sinks": True}):
        yield {"head_dim": 128, "query_length": 5} | flag
    for head_dim, query_length in ((64, 1), (64, 17), (128, 1), (128, 17), (256, 5)):  # the other tiles
        yield {"head_dim": head_dim, "query_length": query_length, "softcap": 50.0, "sinks": True}
    for query_length in range(500, 506):  # a prompt's length adds no compilation
        yield {"head_dim": 128, "query_length": query_length, "prompt": True}
    for function in ("pad", "split"):
        yield {"head_dim": 128, "query_length": 5, "function": function}


def few_cases(half: str) -> Iterator[dict]:
    """Yield a launch of each kind: 32 and 64 rows of queries, the widest heads, full precision."""
    for head_dim, query_length in ((128, 5), (64, 17), (256, 5)):
        yield {"head_dim": head_dim, "query_length": query_length, "dtype": half}
    yield {"head_dim": 128, "query_length": 5, "dtype": "float32"}


def attend(
    head_dim, query_length, dtype="bfloat16", batch=8, group=4, kv_heads=8, function="ragged", sinks=False,
    prompt=False, **flags,
):  # fmt: skip
    """Call a launcher with tensors of these shapes on the device "meta". prompt: a prefill batch without splits."""
    import bass_kernels

    batch = 64 if prompt else batch
    make = functools.partial(torch.empty, device="meta", dtype=getattr(torch, dtype))
    query = make(batch, query_length, kv_heads * group, head_dim).transpose(1, 2)
    key, value = (make(batch, kv_heads, 4096, head_dim) for _ in range(2))
    starts = kv_lengths = torch.empty(batch, device="meta", dtype=torch.int64)
    extra = {"pad": {"extent": 4096}, "split": {"lengths": [4096] * batch}}.get(function, {})
    if sinks:
        flags["sinks"] = make(kv_heads * group)
    getattr(bass_kernels, f"{function}_attention")(query, key, value, starts, kv_lengths, **extra, **flags)


def others(half: torch.dtype, few: bool) -> None:
    """Launch the kernels around attention: cache, draft and fused verification."""
    import bass_kernels

    make = functools.partial(torch.empty, device="meta")
    states, cache = make(8, 8, 5, 128, dtype=half), make(8, 8, 4096, 128, dtype=half)
    bass_kernels.write_kv(states, states, cache, cache, make(8, 5, dtype=torch.int64))
    streams = make(8, dtype=torch.int64)
    for dtype in (half,) if few else (half, torch.float32):
        logits = make(8, 128256, dtype=dtype)
        bass_kernels.draw(logits, streams, streams, 1, 0.8, 128256)
        bass_kernels.largest(logits)
    for temperature, dtype in ((0.8, half),) if few else ((0.0, half), (0.8, half), (1.0, torch.float32)):
        logits, q = make(8, 6, 128256, dtype=dtype), make(8, 5, 128256)
        drafted, lengths = make(8, 5, dtype=torch.int64), make(8, dtype=torch.int64)
        if not few:
            numbers = make(8, 5, dtype=torch.float64), make(8, dtype=torch.float64)
            bass_kernels.verify(logits, drafted, lengths, q, *numbers, lengths, temperature)
        memory = bass_kernels.RowMemory(make(8, 2049, dtype=torch.int64), make(8, 2049), lengths, lengths, lengths)
        finite = make(8, dtype=torch.bool)
        for chances in (None,) if few else (None, make(1, 1, dtype=torch.float64)):
            options = {"all_or_none": temperature != 1.0, "chances": chances}
            bass_kernels.commit(logits, drafted, lengths, q, finite, memory, temperature, **options)


def products() -> Iterator[dict]:
    """Yield every tile of the skinny product, every format of weights, and every fused operation."""
    for packed, group, rows in itertools.product((False, True), (None, 32, 128), (1, 17, 64, 224)):
        yield {"packed": packed, "group": group, "rows": rows}
    for packed, rows in itertools.product((False, True), (8, 128)):
        yield {"packed": packed, "group": 32 if packed else None, "rows": rows, "gated": True}
        yield {"packed": packed, "group": 32 if packed else None, "rows": rows, "columns": 1024}  # split along K
    yield {"packed": False, "group": None, "rows": 8, "half": "float16"}
    yield {"packed": True, "group": 32, "rows": 8, "half": "float16"}
    yield {"packed": False, "group": None, "rows": 8, "columns": 1}  # triton treats 1 as a constant


def few_products(half: str) -> Iterator[dict]:
    yield {"packed": False, "group": None, "rows": 8, "columns": 1024, "half": half}
    yield {"packed": True, "group": 32, "rows": 8, "gated": True, "half": half}


def multiply(packed, group, rows, gated=False, columns=4096, inputs=4096, half="bfloat16") -> None:
    """Call `skinny_linear` with tensors of these shapes on the device "meta"."""
    import bass_kernels

    make = functools.partial(torch.empty, device="meta")
    weight = make(columns, inputs // 2, dtype=torch.uint8) if packed else make(columns, inputs, dtype=torch.int8)
    dtype = getattr(torch, half)
    codes = bass_kernels.Codes(weight, make(columns, inputs // group if group else 1, dtype=dtype), group)
    follows = {"gate": codes, "activation": "silu"} if gated else {"bias": make(columns, dtype=dtype)}
    bass_kernels.skinny_linear(make(rows, inputs, dtype=dtype), codes, **follows)


def tile_of(head_dim, query_length, dtype="bfloat16", group=4, deterministic=False, **_) -> dict:
    from bass_kernels import tiles

    return tiles.choose(query_length * group, head_dim, getattr(torch, dtype), deterministic)._asdict()


def main(capability: int, few: bool) -> None:
    from bass_kernels import launching

    triton.runtime.driver.set_active(StandIn(capability))
    launching.runs_on = lambda device: True
    seen = set()

    def show(kernel, about: dict) -> None:
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            print(json.dumps(about | resources(kernel)), flush=True)

    half = "bfloat16" if capability == 90 or not few else "float16"
    for case in few_cases(half) if few else cases():
        for kernel in compiled_launches(functools.partial(attend, **case)):
            show(kernel, case | tile_of(**case))
    for product in few_products(half) if few else products():
        for kernel in compiled_launches(functools.partial(multiply, **product)):
            show(kernel, product)
    for kernel in compiled_launches(functools.partial(others, getattr(torch, half), few and capability == 90)):
        show(kernel, {})


if __name__ == "__main__":
    main(int(sys.argv[1]), few="few" in sys.argv[2:])
