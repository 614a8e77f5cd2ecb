"""Counter-based randomness: every random number is a pure function of *what it is for*.

A batch that grows, shrinks and reorders its rows cannot share one generator: a row's text would depend on its
neighbours. Here a number is a hash of (seed, row id, counter, purpose, slot), so a row draws the same numbers alone,
in a batch, and after a restart, on every device. Token and block verification count the row's own steps; coupled
verification counts positions, so that regular decoding meets the very same noise (exactness by construction).

All randomness of the project goes through `draw`, `accept` and `noise`; tests replace these three by an oracle that
walks every branch (bass_lab/checks/oracle.py).
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
    """What a random number decides; numbers for different purposes are independent."""

    DRAFT = 1  # x_j ~ q_j
    ACCEPT = 2  # u_j < h_j
    TARGET = 3  # the step's last token: recovered, bonus or regular
    NOISE = 4  # Gumbel noise shared by draft and target (coupled verification)


@dataclass(frozen=True)
class Key:
    """Names random numbers, one per row: (seed and row id) x counter x purpose x slot.

    stream: int64 [B], from `stream`. counter: int64 [B], the row's own step number, or a position.
    slot: an int, or an int64 tensor [J] for J numbers per row.
    """

    stream: Tensor
    counter: Tensor
    purpose: Purpose
    slot: int | Tensor = 0
    together: StepKeys | None = None  # where this key's numbers are worked out with others


def as_it_is(function: Callable) -> Callable:
    """Not compiled."""
    return function


@dataclass(frozen=True)
class StepKeys:
    """The keys of one step of some rows: drafts, acceptances and the target's token, for `slots` slots each.

    All their numbers are hashed together, when the first is asked for; they are those of the keys alone.
    """

    stream: Tensor  # int64 [B]
    counter: Tensor  # int64 [B]
    slots: int
    fused: Callable[[Callable], Callable] = as_it_is  # makes one region of what is done to small tensors

    def draft(self, slot: int) -> Key:
        """For x_{slot + 1} of each row."""
        return Key(self.stream, self.counter, Purpose.DRAFT, slot, self)

    def accept(self, slots: Tensor) -> Key:
        """For the acceptance of x_1 … x_J: slots is 0 … J - 1."""
        return Key(self.stream, self.counter, Purpose.ACCEPT, slots, self)

    def target(self) -> Key:
        """For the step's last token."""
        return Key(self.stream, self.counter, Purpose.TARGET, 0, self)

    @cached_property
    def _numbers(self) -> Tensor:
        """Uniform numbers by (row, slot, purpose): [B, slots, 4]."""
        return self.fused(_step_numbers)(self.stream, self.counter, _words(self.slots, self.stream.device))

    def numbers(self, purpose: Purpose, slot: int | Tensor) -> Tensor:
        """[B] for one slot, [B, J] for slots 0 … J - 1."""
        return self._numbers[:, slot if isinstance(slot, int) else slice(len(slot)), int(purpose)]


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift (torch's `>>` copies the sign bit)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser (Steele, Lea & Flood 2014; Stafford's variant 13), on int64 with wrap-around."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


@functools.cache  # all of them, for ever: recorded steps read this memory
def _words(slots: int, device: torch.device) -> Tensor:
    """What slots and purposes add to a row's counter: [slots, 4]. Made once: a compiler takes products of places for
    places in memory, and those do not wrap around."""
    with torch.inference_mode(False):
        slot, purpose = torch.arange(slots, device=device)[:, None], torch.arange(len(Purpose) + 1, device=device)
        return (slot * 8 + purpose) * _GOLDEN


def _step_numbers(stream: Tensor, counter: Tensor, words: Tensor) -> Tensor:
    return _unit(_mix(_mix(stream + counter * _GOLDEN)[:, None, None] + words))


def stream(seed: int, row: int) -> int:
    """One 64-bit integer for (seed, row id), as int64. Seeds count modulo 2^64."""
    return _signed(_mix_word(_mix_word(seed + _GOLDEN) + row * _GOLDEN))


def _mix_word(x: int) -> int:
    """`_mix` of one number, modulo 2^64: one per row is asked for, and tensors that small are slow."""
    x &= _WORD
    x = (x ^ x >> 30) * _MIX_1 & _WORD
    x = (x ^ x >> 27) * _MIX_2 & _WORD
    return x ^ x >> 31


def _bits(key: Key) -> Tensor:
    """64 random bits per number, int64: [B] or [B, J]."""
    base = _mix(key.stream + key.counter * _GOLDEN)
    if isinstance(key.slot, int):
        return _mix(base + _signed((key.slot * 8 + int(key.purpose)) * _GOLDEN))
    return _mix(base[:, None] + (key.slot * 8 + int(key.purpose)) * _GOLDEN)


def _signed(number: int) -> int:
    """An integer wrapped into int64's range, as tensor arithmetic would."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _unit(bits: Tensor) -> Tensor:
    """float64 in [0, 1), multiples of 2^-52, from 64 random bits."""
    return _shift_right(bits, 12).double() * 2.0**-52


def uniform(key: Key) -> Tensor:
    """float64 in [0, 1), multiples of 2^-52: [B] or [B, J]."""
    if key.together is not None:
        return key.together.numbers(key.purpose, key.slot)
    return _unit(_bits(key))


def inverse_cdf(probs: Tensor, u: Tensor, fused: Callable[[Callable], Callable] = as_it_is) -> Tensor:
    """First id with cumsum > u * total, never an id of probability zero.

    probs: [B, V], non-negative, need not sum to one. u: [B], as `uniform` makes them. Returns int64 [B].
    """
    # In float64: a float32 cumsum returns an impossible id in 27% of top-50 rows at the largest u. And u is at most
    # 1 - 2^-52, so that u * total always rounds below the total. The sum is torch's own in any case: compilers make one
    # that depends on which block comes first.
    return fused(_first_beyond)(added_up(probs), probs, u)


def added_up(probs: Tensor) -> Tensor:
    """Cumulative sums along the last dimension, in float64. (A GPU adds in no fixed order, and torch refuses to have it
    so where everything is to be deterministic: there it takes a pass for each doubling.)"""
    if probs.is_cuda and torch.are_deterministic_algorithms_enabled():
        return _by_doubling(probs.double())
    return probs.cumsum(-1, dtype=torch.float64)


def _by_doubling(sums: Tensor) -> Tensor:
    """Hillis & Steele 1986: after the pass of width w each place holds the sum of the last 2w."""
    width = 1
    while width < sums.shape[-1]:
        sums = torch.cat([sums[..., :width], sums[..., width:] + sums[..., :-width]], -1)
        width *= 2
    return sums


def _first_beyond(cumulative: Tensor, probs: Tensor, u: Tensor) -> Tensor:
    ids = torch.searchsorted(cumulative, u[:, None] * cumulative[:, -1:], right=True)
    ids = ids.clamp(max=probs.shape[-1] - 1)  # NaN sorts last; such rows are refused later, but ids index memory now
    if probs.is_cuda:  # a parallel scan need not be monotone to the last bit, where probability 0 adds nothing
        ids = torch.where(probs.gather(1, ids) > 0, ids, probs.argmax(-1, keepdim=True))
    return ids[:, 0]


def draw(probs: Tensor, key: Key) -> Tensor:
    """One id per row by inverse CDF over ascending ids. probs [B, V] -> int64 [B]."""
    return inverse_cdf(probs, uniform(key), as_it_is if key.together is None else key.together.fused)


def accept(probability: Tensor, key: Key) -> Tensor:
    """True with the given probability: strictly u < h. [B, J] (slots [J] in the key) -> bool [B, J]."""
    return uniform(key) < probability


def noise(key: Key, size: int) -> Tensor:
    """Standard Gumbel noise, float64 [B, J, size]: one number per row, position (counter + slot) and token id.

    `argmax(log p + noise)` is then a draw from p (Gumbel-max), and the same noise serves every model.
    """
    positions = key.counter[:, None] + key.slot  # [B, J]
    base = _mix(key.stream[:, None] + positions * _GOLDEN)
    ids = torch.arange(size, device=base.device) * 8 + int(key.purpose)
    bits = _shift_right(_mix(base[..., None] + ids * _GOLDEN), 12)
    return -torch.log(-torch.log((bits.double() + 0.5) * 2.0**-52))
