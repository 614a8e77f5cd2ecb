"""Weights as small integers with scales: what INT8 and INT4 codes are, and which numbers they stand for.

INT8 has one scale per output channel, INT4 one per group of 32 inputs: the largest of a group in size becomes -8
(llama.cpp's Q4_0), and two numbers share a byte. Rounding is to the nearest; no data is looked at.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32  # inputs that share a scale in INT4; also how many are packed together


class Codes(NamedTuple):
    """weight: int8 [N, K] with scale [N, 1]; or uint8 [N, 16 · groups] with scale [N, groups], two in a byte: the first
    16 of a group of 32 inputs in the low halves, the other 16 in the high ones."""

    weight: Tensor
    scale: Tensor


def int8(weight: Tensor) -> Codes:
    """Weights [N, K] rounded to -127 … 127 times a scale per output."""
    scale = (weight.abs().amax(1, keepdim=True).float() / 127).to(weight.dtype)
    return Codes(_rounded(weight, scale, -127, 127), scale)


def int4(weight: Tensor) -> Codes:
    """Weights [N, K] rounded to -8 … 7 times a scale per output and group of inputs, packed."""
    groups = F.pad(weight, (0, -weight.shape[1] % GROUP)).unflatten(1, (-1, GROUP))  # [N, groups, 32]
    extreme = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    codes = _rounded(groups, extreme / -8, -8, 7)
    low, high = codes.chunk(2, 2)
    return Codes((low & 15 | high << 4).flatten(1).view(torch.uint8), (extreme / -8)[..., 0])


def dequantized(weight: Tensor, scale: Tensor, inputs: int) -> Tensor:
    """The weights that codes stand for, in the dtype of their scale: [N, inputs]."""
    if weight.dtype == torch.int8:
        return weight * scale
    packed = weight.view(torch.int8).unflatten(1, (scale.shape[1], -1))  # [N, groups, 16]
    codes = torch.cat([packed << 4 >> 4, packed >> 4], 2)  # shifts of int8 keep the sign
    return (codes * scale[..., None]).flatten(1)[:, :inputs]


def _rounded(weight: Tensor, scale: Tensor, least: int, most: int) -> Tensor:
    """The nearest multiples of the scale, which is already rounded to its dtype; 0 where it is 0."""
    codes = weight.float() / scale.float().where(scale != 0, 1)
    return codes.round().clamp(least, most).to(torch.int8)


KINDS = {"int8": int8, "int4": int4}
