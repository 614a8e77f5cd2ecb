"""Counter-based random numbers: each number is a hash of (seed, row id, counter, purpose, slot).

With one generator for the batch, a row's text would depend on the other rows. With hashes, a row draws the same numbers
alone, in a batch, after a restart and on every device. For token and block verification the counter is the row's step
number. For coupled verification the counter is the position, so that regular decoding uses the same noise.

Decoding takes all random numbers from `draw`, `accept` and `noise`; fused kernels compute the same hashes. Tests
replace these functions by an oracle that walks every branch (bass_lab/checks/oracle.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import torch
from torch import Tensor

_GOLDEN = (
    -7046029254386353131
)  # 0x9E3779B97F4A7C15 as a signed 64-bit integer: 2^64 / golden ratio, SplitMix's increment
_WORD = 2**64 - 1
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


class Purpose(IntEnum):
    """Purpose of a random number. Numbers for different purposes are independent."""

    DRAFT = 1  # x_j ~ q_j
    ACCEPT = 2  # u_j < h_j
    TARGET = 3  # the step's last token: recovered, bonus or regular
    NOISE = 4  # Gumbel noise shared by draft and target (coupled verification)


@dataclass(frozen=True)
class Key:
    """Key of random numbers, one number per row (or J per row, with J slots).

    stream: int64 [B], see `stream`. counter: int64 [B], the row's step number or position.
    slot: an int, or an int64 tensor [J].
    """

    stream: Tensor
    counter: Tensor
    purpose: Purpose
    slot: int | Tensor = 0
    together: StepKeys | None = None  # computes the numbers of all keys of a step at once


def as_it_is(function: Callable) -> Callable:
    """Return the function uncompiled."""
    return function


@dataclass(frozen=True)
class StepKeys:
    """Keys of one step: draft tokens, acceptances and the target's token, for `slots` slots each.

    The first access computes the numbers of all keys together. They equal the numbers of the separate keys.
    """

    stream: Tensor  # int64 [B]
    counter: Tensor  # int64 [B]
    slots: int
    fused: Callable[[Callable], Callable] = as_it_is  # compiles a function of small tensors, or returns the function

    def draft(self, slot: int) -> Key:
        """Key of x_{slot + 1} of each row."""
        return Key(self.stream, self.counter, Purpose.DRAFT, slot, self)

    def accept(self, slots: Tensor) -> Key:
        """Key of the acceptance of x_1 … x_J. slots must be 0 … J - 1."""
        return Key(self.stream, self.counter, Purpose.ACCEPT, slots, self)

    def target(self) -> Key:
        """Key of the step's last token."""
        return Key(self.stream, self.counter, Purpose.TARGET, 0, self)

    @cached_property
    def _numbers(self) -> Tensor:
        """Uniform numbers by row, slot and purpose, float64 [B, slots, 5]."""
        return self.fused(_step_numbers)(self.stream, self.counter, _words(self.slots, self.stream.device))

    def numbers(self, purpose: Purpose, slot: int | Tensor) -> Tensor:
        """Return float64 [B] for one slot, [B, J] for slots 0 … J - 1."""
        return self._numbers[:, slot if isinstance(slot, int) else slice(len(slot)), int(purpose)]


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift. torch's `>>` copies the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64 finalizer on int64 with wrap-around (Steele, Lea & Flood 2014; Stafford's variant 13)."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


@functools.cache  # unbounded, since captured CUDA graphs read this memory
def _words(slots: int, device: torch.device) -> Tensor:
    """Return the hash input of each slot and purpose, int64 [slots, 5]. Computed outside compiled code: the compiler
    would treat the products as memory offsets, which must not wrap around."""
    with torch.inference_mode(False):
        slot, purpose = torch.arange(slots, device=device)[:, None], torch.arange(len(Purpose) + 1, device=device)
        return (slot * 8 + purpose) * _GOLDEN


def _step_numbers(stream: Tensor, counter: Tensor, words: Tensor) -> Tensor:
    return _unit(_mix(_mix(stream + counter * _GOLDEN)[:, None, None] + words))


def stream(seed: int, row: int) -> int:
    """Return an int64 hash of (seed, row id). Seeds count modulo 2^64."""
    return _signed(_mix_word(_mix_word(seed + _GOLDEN) + row * _GOLDEN))


def _mix_word(x: int) -> int:
    """`_mix` of a Python integer, modulo 2^64. Faster than a tensor of one element."""
    x &= _WORD
    x = (x ^ x >> 30) * _MIX_1 & _WORD
    x = (x ^ x >> 27) * _MIX_2 & _WORD
    return x ^ x >> 31


def _bits(key: Key) -> Tensor:
    """Return 64 random bits per number, int64 [B] or [B, J]."""
    base = _mix(key.stream + key.counter * _GOLDEN)  # [B]
    if isinstance(key.slot, int):
        return _mix(base + _signed((key.slot * 8 + int(key.purpose)) * _GOLDEN))
    return _mix(base[:, None] + (key.slot * 8 + int(key.purpose)) * _GOLDEN)


def _signed(number: int) -> int:
    """Wrap an integer into the range of int64, like tensor arithmetic."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _unit(bits: Tensor) -> Tensor:
    """Convert 64 random bits to float64 in [0, 1), a multiple of 2^-52."""
    return _shift_right(bits, 12).double() * 2.0**-52


def uniform(key: Key) -> Tensor:
    """Return uniform numbers in [0, 1), float64 [B] or [B, J], multiples of 2^-52."""
    if key.together is not None:
        return key.together.numbers(key.purpose, key.slot)
    return _unit(_bits(key))


def inverse_cdf(probs: Tensor, u: Tensor, fused: Callable[[Callable], Callable] = as_it_is) -> Tensor:
    """Return the first id with cumsum > u * total, int64 [B]. Never returns an id of probability zero.

    probs: [B, V], non-negative, not necessarily normalized. u: [B], from `uniform`.
    """
    # float64, since a float32 cumsum returns an impossible id in 27% of top-50 rows at the largest u. u is at most
    # 1 - 2^-52, so that u * total rounds below the total. The cumsum stays outside the fused function: the result of a
    # compiled cumsum depends on the order in which its blocks run.
    return fused(_first_beyond)(added_up(probs), probs, u)


def added_up(probs: Tensor) -> Tensor:
    """Return cumulative sums along the last dimension, in float64."""
    if probs.is_cuda and torch.are_deterministic_algorithms_enabled():
        return _by_doubling(probs.double())  # torch's cumsum raises here, since its order of summation varies
    return probs.cumsum(-1, dtype=torch.float64)


def _by_doubling(sums: Tensor) -> Tensor:
    """Cumulative sums by Hillis & Steele 1986. After the pass of width w, each element is the sum of the last 2w."""
    width = 1
    while width < sums.shape[-1]:
        sums = torch.cat([sums[..., :width], sums[..., width:] + sums[..., :-width]], -1)
        width *= 2
    return sums


def _first_beyond(cumulative: Tensor, probs: Tensor, u: Tensor) -> Tensor:
    ids = torch.searchsorted(cumulative, u[:, None] * cumulative[:, -1:], right=True)  # [B, 1]
    ids = ids.clamp(max=probs.shape[-1] - 1)  # NaN sorts last; rows with NaN fail later, but ids index memory now
    if probs.is_cuda:  # a parallel scan may be non-monotone in the last bit, and select an id of probability 0
        ids = torch.where(probs.gather(1, ids) > 0, ids, probs.argmax(-1, keepdim=True))
    return ids[:, 0]


def draw(probs: Tensor, key: Key) -> Tensor:
    """Draw one id per row by inverse CDF over ascending ids. probs [B, V] -> int64 [B]."""
    return inverse_cdf(probs, uniform(key), as_it_is if key.together is None else key.together.fused)


def accept(probability: Tensor, key: Key) -> Tensor:
    """Return u < probability, bool [B, J]. probability: [B, J]; the key has slots [J]."""
    return uniform(key) < probability


def noise(key: Key, size: int) -> Tensor:
    """Return standard Gumbel noise, float64 [B, J, size], by row, position (counter + slot) and token id.

    `argmax(log p + noise)` is a draw from p (Gumbel-max trick). Target and draft use the same noise.
    """
    positions = key.counter[:, None] + key.slot  # [B, J]
    base = _mix(key.stream[:, None] + positions * _GOLDEN)  # [B, J]
    ids = torch.arange(size, device=base.device) * 8 + int(key.purpose)  # [size]
    bits = _shift_right(_mix(base[..., None] + ids * _GOLDEN), 12)  # [B, J, size]
    return -torch.log(-torch.log((bits.double() + 0.5) * 2.0**-52))
