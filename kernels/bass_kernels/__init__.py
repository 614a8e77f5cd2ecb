"""Triton kernels of batched speculative decoding: ragged attention, cache writes, verification, quantized products."""

from bass_kernels.draft_draw import draw
from bass_kernels.fused_verification import RowMemory, VerifyOutput, commit, verify
from bass_kernels.kv_write import write_kv
from bass_kernels.launching import interpreted, runs_on
from bass_kernels.paper import pad_attention, split_attention
from bass_kernels.peaks import largest
from bass_kernels.plan import Plan
from bass_kernels.ragged import make_plan, ragged_attention
from bass_kernels.skinny import Codes, skinny_linear

__all__ = [
    "Codes",
    "Plan",
    "RowMemory",
    "VerifyOutput",
    "commit",
    "draw",
    "interpreted",
    "largest",
    "make_plan",
    "pad_attention",
    "ragged_attention",
    "runs_on",
    "skinny_linear",
    "split_attention",
    "verify",
    "write_kv",
]
