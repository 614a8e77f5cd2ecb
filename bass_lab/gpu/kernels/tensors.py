"""Tensors of a case, its expected result, and the error of a result."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf

import torch
from torch import Tensor

from bass_kernels import reference
from bass_lab.gpu.kernels.cases import Case

ROTATED_BYTES = 256e6  # total size of the sets, several times the L2 cache (50 MB on an H100)
# Allowed ‖out − ref‖ / ‖ref‖ against float64: the error of rounding inputs and weights to the dtype.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


@dataclass
class Inputs:
    """A query and enough KV sets to exceed the L2 cache.

    query: [B, H, Q, D], a view of [B, Q, H, D] as in models. sets: (key, value), each [B, H_kv, S, D], as in a cache.
    starts, kv_lengths: int32 [B]. lengths: kv_lengths on the host.
    """

    case: Case
    query: Tensor
    sets: list[tuple[Tensor, Tensor]]
    starts: Tensor
    kv_lengths: Tensor
    lengths: list[int]

    @property
    def extent(self) -> int:
        """Return the number of slots that a padded kernel reads, a multiple of 16 for aligned masks."""
        return min(ceil(max(self.lengths) / 16) * 16, self.sets[0][0].shape[2])

    def bias(self, group: int = 1) -> Tensor:
        """Return an additive mask [B, 1, group * Q, extent] in the query's dtype; cuDNN silently misreads others."""
        slots = torch.arange(self.extent, device=self.query.device)
        positions = self.starts[:, None] + torch.arange(self.case.query_length, device=self.query.device)
        hidden = (slots > positions[..., None])[:, None].repeat(1, 1, group, 1)
        return torch.zeros(hidden.shape, dtype=self.query.dtype, device=hidden.device).masked_fill_(hidden, -inf)


def number_of_sets(size: float, device: torch.device) -> int:
    """Return the number of sets of this size in bytes: at least two, so successive calls use different sets."""
    return max(2, ceil(ROTATED_BYTES / size)) if device.type == "cuda" else 2


def make(case: Case, device: torch.device, seed: int, sets: int) -> Inputs:
    """Return random inputs. Slots beyond a row's length hold finite stale values, as in a real cache."""
    work, lengths = case.work, case.lengths(seed)
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> Tensor:
        numbers = torch.empty(shape, dtype=getattr(torch, case.dtype), device=device)
        return numbers.normal_(generator=generator)

    cache = (case.batch, work.kv_heads, case.slots(seed), work.head_dim)
    kv_lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
    return Inputs(
        case=case,
        query=random(case.batch, case.query_length, work.heads, work.head_dim).transpose(1, 2),
        sets=[(random(*cache), random(*cache)) for _ in range(sets)],
        starts=kv_lengths - case.query_length,  # every query token is live
        kv_lengths=kv_lengths,
        lengths=lengths,
    )


def expected(inputs: Inputs) -> Tensor:
    """Return attention over the first KV set: float64 [B, Q, H, D]."""
    return reference.attention(inputs.query, *inputs.sets[0], inputs.starts, inputs.kv_lengths)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Return ‖found − wanted‖ / ‖wanted‖, or infinity for NaN or another shape."""
    if found.shape != wanted.shape:
        return inf
    error = float((found.double() - wanted).norm() / wanted.norm())
    return error if error == error else inf
