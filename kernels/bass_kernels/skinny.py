"""Products of few rows with weights of 8 or 4 bits: every weight is read as stored, once per 128 rows.

Decoding multiplies 1 to 256 rows by each weight (2 · rows flops per weight). Up to about 40 rows the bytes of the
weights determine the time, and beyond that the conversion of codes and the matrix instructions. Verification has 40 to
224 rows (batch 8 to 32). Codes are converted to the activations' dtype in registers, right before the matrix
instruction. Scales of whole channels, bias and activation are applied to float32 sums. The result is transposed,
[BLOCK_N, BLOCK_M], because weights are the operand with many rows. Outputs too narrow to fill the GPU are cut along K,
and a second small launch adds up the pieces in order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bass_kernels import launching
from bass_kernels.launching import require
from bass_kernels.tiles import power_of_two

MOST_ROWS = 256
MOST_AT_ONCE = 128  # rows of a block; a further block reads the weights again, mostly from the L2 cache
UNIT = 32  # inputs that are packed into 16 bytes, the first 16 numbers in the low halves
WARPS = 132 * 8  # warps that should run: eight on each multiprocessor
ACTIVATIONS = ("none", "silu", "gelu", "gelu_tanh")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _unpacking(kind: str, one: int, top: int) -> tl.constexpr:
    """Return PTX for four bytes: their codes times their scales, in half precision, two at a time.

    A code with its first bit inverted, appended to the bits `top`, is a float: 136 + code in bfloat16, 1032 + code in
    float16. Subtracting 136 or 1032 is exact. Converting integers would take longer than loading the bytes. kind: PTX
    type; one, top: bits of 1, and of 136 or 1032.
    """
    pairs = "a", "b", "c", "d"  # bytes 0 and 1, 2 and 3; their high halves
    turned = [f"lop3.b32 {p}, {p}, 0x000f000f, {top:#06x}{top:04x}, 0x6a;" for p in pairs]  # (p & 15) ^ top
    # fused multiply-adds, because GPUs before Hopper have no other arithmetic on pairs
    less = [f"fma.rn.{kind} {p}, {p}, one, minus;" for p in pairs]
    scaled = [f"fma.rn.{kind} ${at}, {p}, ${5 + at % 2}, nothing;" for at, p in enumerate(pairs)]
    constants = {"one": one, "minus": top | 1 << 15, "nothing": 1 << 15}  # -0, which changes no sum
    moved = [f"mov.b32 {name}, {bits:#06x}{bits:04x};" for name, bits in constants.items()]
    apart = "prmt.b32 a, $4, 0, 0x4140; prmt.b32 b, $4, 0, 0x4342; shr.u32 c, a, 4; shr.u32 d, b, 4;"
    lines = f"{{ .reg .b32 {', '.join([*pairs, *constants])};", *moved, apart, *turned, *less, *scaled, "}"
    return tl.constexpr("\n".join(lines))


BFLOAT16, FLOAT16 = _unpacking("bf16x2", one=0x3F80, top=0x4308), _unpacking("f16x2", one=0x3C00, top=0x6408)
OPERANDS = tl.constexpr("=r,=r,=r,=r,r,r,r")  # out: numbers of the low and high halves; in: bytes, four scales


class Codes(NamedTuple):
    """Quantized weights. weight: int8 [N, K], or uint8 [N, 16 · ceil(K / 32)] with two codes per byte. scale:
    [N, ceil(K / group)]. group: inputs per scale, a multiple of 32, or None for all inputs (scale [N, 1])."""

    weight: Tensor
    scale: Tensor
    group: int | None = None


class ProductTile(NamedTuple):
    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


def choose(rows: int, packed: bool) -> ProductTile:
    """Return the tile for this number of rows: wide in K for few rows, limited by registers for many rows."""
    block_m = min(power_of_two(rows, least=16), MOST_AT_ONCE)
    if block_m <= 32:
        return ProductTile(block_m, 32, 256 if packed else 128, 2, 4)
    return ProductTile(block_m, 64, 128 if packed else 64, 8, 3)  # with four warps 128 rows spill on sm_80


def pieces(columns: int, inputs: int, tile: ProductTile) -> int:
    """Return the number of pieces of K that gives enough warps to hide memory latency."""
    programs, blocks = triton.cdiv(columns, tile.block_n), triton.cdiv(inputs, tile.block_k)
    return max(1, min(WARPS // (programs * tile.warps), blocks // 4))


def skinny_linear(
    x: Tensor,
    codes: Codes,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    gate: Codes | None = None,
    splits: int | None = None,
) -> Tensor:
    """Return activation(x Wᵀ + bias): [M, N] in x's dtype. x [M, K], M <= 256, the last dimension contiguous.

    activation: "none", "silu", "gelu" or "gelu_tanh". gate: codes of the same form; the result is then
    activation(x gateᵀ) · (x Wᵀ), a gated MLP without bias in one launch. splits: pieces of K (None: `pieces`). Equal
    arguments give equal bits.

    Raises ValueError for mismatched shapes, dtypes and devices.
    """
    launching.check_device(x.device)
    require(x.ndim == 2 and x.stride(1) == 1, f"x must be [M, K] with K contiguous, got {list(x.shape)}")
    (rows, inputs), columns = x.shape, len(codes.weight)
    require(rows <= MOST_ROWS, f"x may have at most {MOST_ROWS} rows, got {rows}")
    require(x.dtype in DTYPES, f"x must be one of {', '.join(map(str, DTYPES))}, got {x.dtype}")
    require(activation in ACTIVATIONS, f"activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}")
    require(gate is None or bias is None, "a gated product takes no bias; pass bias=None")
    for each in (codes, gate or codes):
        _check(each, codes, inputs, x.device)
    if bias is not None:
        require(
            bias.shape == (columns,) and bias.is_contiguous() and bias.device == x.device, f"bias must be [{columns}]"
        )
    packed, out = codes.weight.dtype == torch.uint8, x.new_empty(rows, columns)
    if rows == 0 or columns == 0:
        return out
    tile = choose(rows, packed)
    blocks = triton.cdiv(rows, tile.block_m)
    splits = pieces(columns, inputs, tile) if splits is None else splits
    second = gate or codes
    halves = x.dtype in (torch.bfloat16, torch.float16) and codes.scale.dtype == x.dtype
    by_bits = packed and codes.group is not None and halves and not launching.interpreted()
    sums = (
        x.new_empty(splits, 2 if gate else 1, columns, blocks * tile.block_m, dtype=torch.float32)
        if splits > 1
        else out
    )
    flags = {
        "GATED": gate is not None, "BIAS": bias is not None, "ACTIVATION": activation,
        "GROUPED": codes.group is not None, "SPLITS": splits, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
    }  # fmt: skip
    bias = codes.scale if bias is None else bias
    with launching.on(x.device):
        _multiply[(triton.cdiv(columns, tile.block_n), splits, blocks)](
            x,
            codes.weight,
            codes.scale,
            second.weight,
            second.scale,
            bias,
            out,
            sums,
            rows,
            columns,
            inputs,
            x.stride(0),
            codes.weight.shape[1],
            codes.scale.shape[1],
            **flags,
            PACKED=packed,
            GROUP=codes.group or 1,
            BLOCK_K=tile.block_k,
            WIDEN=launching.interpreted(),
            BY_BITS=by_bits,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        if splits > 1:
            _add_up[(triton.cdiv(columns, tile.block_n), blocks)](
                sums, codes.scale, second.scale, bias, out, rows, columns, **flags, num_warps=4
            )
    return out


def _check(codes: Codes, first: Codes, inputs: int, device: torch.device) -> None:
    weight, scale, group = codes
    packed = weight.dtype == torch.uint8
    require(weight.dtype in (torch.int8, torch.uint8), f"weights must be int8, or uint8 (packed), got {weight.dtype}")
    width = UNIT // 2 * triton.cdiv(inputs, UNIT) if packed else inputs
    require(group is None or (group > 0 and group % UNIT == 0), f"group must be a multiple of {UNIT}, got {group}")
    scales = 1 if group is None else triton.cdiv(inputs, group)
    for name, tensor, shape in (("weight", weight, (len(weight), width)), ("scale", scale, (len(weight), scales))):
        require(tensor.shape == shape and tensor.is_contiguous(), f"{name} must be {list(shape)} and contiguous for "
                f"{inputs} inputs, got {list(tensor.shape)}")  # fmt: skip
        require(tensor.device == device, f"all tensors must be on one device, got {name} on {tensor.device}")
    same = weight.shape == first.weight.shape and weight.dtype == first.weight.dtype and group == first.group
    require(same, "gate must have the shape, dtype and group of codes")


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return x


@triton.jit
def _store(
    acc, acc_gate, scale, gate_scale, bias, out, n, m, rows, columns,
    GATED: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Apply channel scales, bias and activation to the sums [BLOCK_N, BLOCK_M] and store the result."""
    there = n < columns
    if not GROUPED:
        acc *= tl.load(scale + n, mask=there, other=0.0).to(tl.float32)[:, None]
        if GATED:
            acc_gate *= tl.load(gate_scale + n, mask=there, other=0.0).to(tl.float32)[:, None]
    if BIAS:
        acc += tl.load(bias + n, mask=there, other=0.0).to(tl.float32)[:, None]
    if GATED:
        acc *= _activated(acc_gate, ACTIVATION)
    else:
        acc = _activated(acc, ACTIVATION)
    at = m.to(tl.int64)[None, :] * columns + n[:, None]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=there[:, None] & (m < rows)[None, :])


@triton.jit
def _scales(scale, n, first, there, inputs, scales, GROUP: tl.constexpr, WIDTH: tl.constexpr, EACH: tl.constexpr):
    """Return the scales of WIDTH · EACH inputs from `first` on, [BLOCK_N, WIDTH · EACH]; EACH successive inputs share
    a scale."""
    unit = first // 32 + tl.arange(0, WIDTH)
    group = unit if GROUP == 32 else unit // (GROUP // 32)  # the compiler prefetches only provably contiguous loads
    at = n.to(tl.int64)[:, None] * scales + group[None, :]
    s = tl.load(scale + at, mask=there[:, None] & (group < scales)[None, :], other=0.0)
    s = tl.broadcast_to(s[:, :, None], (n.shape[0], WIDTH, EACH))
    return tl.reshape(s, (n.shape[0], WIDTH * EACH))


@triton.jit
def _unpacked(both, s, x):
    """Return the numbers in the low and high halves of these bytes times their scales, in x's dtype."""
    if x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(BFLOAT16, OPERANDS, [both, s], (tl.bfloat16, tl.bfloat16), True, 4)
    else:
        return tl.inline_asm_elementwise(FLOAT16, OPERANDS, [both, s], (tl.float16, tl.float16), True, 4)


@triton.jit
def _inputs(x_rows, k, m, rows, inputs):
    """Return x transposed, [BLOCK_K, BLOCK_M], padded with 0."""
    return tl.load(x_rows + k[:, None], mask=(k < inputs)[:, None] & (m < rows)[None, :], other=0.0)


@triton.jit
def _add_product(
    acc, weight, scale, x_low, x_high, n, first, columns, inputs, width, scales,
    PACKED: tl.constexpr, GROUPED: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr, WIDEN: tl.constexpr,
    BY_BITS: tl.constexpr,
):  # fmt: skip
    """Return acc plus the product of the block of K from input `first` on. x_high: for packed weights only."""
    there = n < columns
    if PACKED:
        j = first // 2 + tl.arange(0, BLOCK_K // 2)
        at = n.to(tl.int64)[:, None] * width + j[None, :]
        both = tl.load(weight + at, mask=there[:, None] & (j < width)[None, :], other=0)
        if BY_BITS:
            s = _scales(scale, n, first, there, inputs, scales, GROUP, BLOCK_K // 32, 16)
            low, high = _unpacked(both, s, x_low)
        else:
            both = both.to(tl.int32)
            low, high = (both << 28) >> 28, (both << 24) >> 28  # sign-extended
            if GROUPED:
                s = _scales(scale, n, first, there, inputs, scales, GROUP, BLOCK_K // 32, 16).to(tl.float32)
                low, high = low.to(tl.float32) * s, high.to(tl.float32) * s
            low, high = low.to(tl.float32).to(x_low.dtype), high.to(tl.float32).to(x_low.dtype)
        if WIDEN:  # the interpreter's dot multiplies bit patterns of bfloat16
            low, high, x_low, x_high = (
                low.to(tl.float32),
                high.to(tl.float32),
                x_low.to(tl.float32),
                x_high.to(tl.float32),
            )
        acc = tl.dot(low, x_low, acc, input_precision="ieee")
        acc = tl.dot(high, x_high, acc, input_precision="ieee")
    else:
        k = first + tl.arange(0, BLOCK_K)
        at = n.to(tl.int64)[:, None] * width + k[None, :]
        codes = tl.load(weight + at, mask=there[:, None] & (k < inputs)[None, :], other=0)
        if GROUPED:
            s = _scales(scale, n, first, there, inputs, scales, GROUP, BLOCK_K // 32, 32)
            codes = codes.to(tl.float32) * s.to(tl.float32)
        codes = codes.to(tl.float32).to(x_low.dtype)  # the interpreter cannot convert integers to bfloat16
        if WIDEN:
            codes, x_low = codes.to(tl.float32), x_low.to(tl.float32)
        acc = tl.dot(codes, x_low, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["rows"])
def _multiply(
    x, weight, scale, gate, gate_scale, bias, out, sums, rows, columns, inputs, stride_x, width, scales,
    GATED: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, GROUPED: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr, BY_BITS: tl.constexpr,
):  # fmt: skip
    """Multiply a block of rows by a block of columns, over a piece of K."""
    split = tl.program_id(1)
    n, m = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    acc, acc_gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32), tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    piece = tl.cdiv(tl.cdiv(inputs, BLOCK_K), SPLITS) * BLOCK_K
    x_rows = x + m.to(tl.int64)[None, :] * stride_x
    for first in range(split * piece, tl.minimum((split + 1) * piece, inputs), BLOCK_K):
        if PACKED:
            half = tl.arange(0, BLOCK_K // 2)
            k = first + half // 16 * 32 + half % 16
            x_low = _inputs(x_rows, k, m, rows, inputs)
            k += 16
            x_high = _inputs(x_rows, k, m, rows, inputs)
        else:
            k = first + tl.arange(0, BLOCK_K)
            x_low = _inputs(x_rows, k, m, rows, inputs)
            x_high = x_low
        acc = _add_product(
            acc, weight, scale, x_low, x_high, n, first, columns, inputs, width, scales,
            PACKED, GROUPED, GROUP, BLOCK_K, WIDEN, BY_BITS,
        )  # fmt: skip
        if GATED:
            acc_gate = _add_product(
                acc_gate, gate, gate_scale, x_low, x_high, n, first, columns, inputs, width, scales,
                PACKED, GROUPED, GROUP, BLOCK_K, WIDEN, BY_BITS,
            )  # fmt: skip
    if SPLITS == 1:
        _store(acc, acc_gate, scale, gate_scale, bias, out, n, m, rows, columns, GATED, BIAS, ACTIVATION, GROUPED)
    else:
        padded = tl.num_programs(2) * BLOCK_M
        each = tl.cast(columns, tl.int64) * padded
        at = split * each * (2 if GATED else 1) + n[:, None] * padded + m[None, :]
        tl.store(sums + at, acc, mask=(n < columns)[:, None])
        if GATED:
            tl.store(sums + at + each, acc_gate, mask=(n < columns)[:, None])


@triton.jit(do_not_specialize=["rows"])
def _add_up(
    sums, scale, gate_scale, bias, out, rows, columns,
    GATED: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, GROUPED: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add up the pieces of a block of rows and columns, in order."""
    n, m = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    acc, acc_gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32), tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    padded = tl.num_programs(1) * BLOCK_M
    each = tl.cast(columns, tl.int64) * padded
    for split in range(SPLITS):
        at = split * (2 if GATED else 1) * each + n[:, None] * padded + m[None, :]
        acc += tl.load(sums + at, mask=(n < columns)[:, None], other=0.0)
        if GATED:
            acc_gate += tl.load(sums + at + each, mask=(n < columns)[:, None], other=0.0)
    _store(acc, acc_gate, scale, gate_scale, bias, out, n, m, rows, columns, GATED, BIAS, ACTIVATION, GROUPED)
