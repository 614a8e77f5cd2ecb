"""Random arguments for the attention kernels. The cache has NaN wherever no kernel may read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from bass_kernels import reference

# Largest ‖out - ref‖ / ‖ref‖ against float64.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


class Case(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    starts: Tensor
    kv_lengths: Tensor
    flags: dict

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        return self[:5]

    @property
    def expected(self) -> Tensor:
        return reference.attention(*self.arguments, **self.flags)

    def on(self, device: str) -> Case:
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), self)

    def filled(self, value: float) -> Case:
        return self._replace(key=self.key.nan_to_num(nan=value), value=self.value.nan_to_num(nan=value))


def case(
    kv_lengths: list[int],
    query_length: int = 5,
    *,
    group: int = 2,
    kv_heads: int = 2,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    query_lengths: list[int] | None = None,
    padded_in_front: bool = False,
    seed: int = 0,
    device: str = "cpu",
    **flags,
) -> Case:
    """Return rows with the given lengths. query_lengths: live queries per row (None: all), followed by padding."""
    generator = torch.Generator().manual_seed(seed)
    batch, slots, heads = len(kv_lengths), max(kv_lengths) + 3, kv_heads * group
    if query_lengths is None:
        query_lengths = [min(query_length, length) for length in kv_lengths]

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    query = random(batch, query_length, heads, head_dim).transpose(1, 2)
    key, value = random(batch, kv_heads, slots, head_dim), random(batch, kv_heads, slots, head_dim)
    for row, length in enumerate(kv_lengths):
        key[row, :, length:] = value[row, :, length:] = math.nan
    if flags.pop("sinks", False):
        flags["sinks"] = torch.randn(heads, generator=generator).to(dtype).to(device)
    kv = torch.tensor(kv_lengths, device=device)
    starts = kv - (query_length if padded_in_front else torch.tensor(query_lengths, device=device))
    return Case(query, key, value, starts, kv, flags)


def error(found: Tensor, expected: Tensor) -> float:
    """Return ‖found - expected‖ / ‖expected‖; infinite for NaN or a padding query other than 0."""
    if found.shape != expected.shape or not found.isfinite().all() or found[expected == 0].any():
        return math.inf
    norm = expected.norm()
    return float((found.double() - expected).norm() / (norm if norm > 0 else 1))


@contextmanager
def shuffled_programs() -> Iterator[list[tuple[int, ...]]]:
    """Run a grid's programs in a fixed random order in the interpreter. Yield the list of started programs."""
    from triton.runtime.interpreter import InterpreterBuilder

    in_order, seen = InterpreterBuilder.set_grid_idx, []

    def shuffled(self, *index):
        grid = torch.Size(self.grid_dim)
        places = torch.randperm(grid.numel(), generator=torch.Generator().manual_seed(0))
        linear = int((torch.tensor(index) * torch.tensor([grid[1] * grid[2], grid[2], 1])).sum())
        seen.append(tuple(int(i) for i in torch.unravel_index(places[linear], grid)))
        in_order(self, *seen[-1])

    InterpreterBuilder.set_grid_idx = shuffled
    try:
        yield seen
    finally:
        InterpreterBuilder.set_grid_idx = in_order


QUERY_LENGTHS = (1, 2, 4, 5, 9, 17, 33, 130)
GROUPS = (1, 2, 3, 4, 8)
HEAD_DIMS = (64, 80, 96, 128, 256)
EDGES = (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 191, 192, 193)  # of blocks and chunks
FLAGS = ({}, {"sliding_window": 7}, {"sliding_window": 40}, {"softcap": 15.0}, {"sinks": True}, {"scaling": 0.3},
         {"sliding_window": 24, "softcap": 2.0, "sinks": True})  # fmt: skip


def fuzz(count: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Iterator[tuple[str, Case]]:
    """Yield descriptions and cases, with every query length, group, head dimension, edge and flag if count >= 20."""
    generator = torch.Generator().manual_seed(seed)

    def pick(choices, index: int):
        at = index if index < len(choices) else int(torch.randint(len(choices), (1,), generator=generator))
        return choices[at]

    for index in range(count):
        query_length, group, head_dim = pick(QUERY_LENGTHS, index), pick(GROUPS, index), pick(HEAD_DIMS, index)
        rows = index % 5 + 1
        if query_length * group * head_dim > 20_000:  # limits the interpreter's time
            rows, head_dim, group = min(rows, 2), 64, min(group, 3)
        lengths = [pick(EDGES, index)]
        lengths += [pick(EDGES, len(EDGES)) for _ in range(rows - 1)]
        if index % 4 == 3:
            lengths[-1] = query_length  # only the new tokens
        live = [int(torch.randint(min(query_length, n) + 1, (1,), generator=generator)) for n in lengths]
        flags = dict(pick(FLAGS, index))
        options = {"group": group, "kv_heads": 1 + index % 2, "head_dim": head_dim, "query_lengths": live}
        options |= {"padded_in_front": index % 6 == 5, "seed": seed + index}
        described = f"{lengths=} {query_length=} {options} {flags}"
        yield described, case(lengths, query_length, dtype=dtype, device=device, **options, **flags)


@contextmanager
def poisoned_memory(number: float = math.nan, integer: str = "min", truth: bool = True) -> Iterator[None]:
    """Fill memory from torch.empty and new_empty with a number, a limit of integers, or a truth value."""

    def poisoned(allocate):
        def allocation(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            kind = tensor.dtype
            if kind.is_floating_point or kind == torch.bool:
                return tensor.fill_(truth if kind == torch.bool else number)
            return tensor.fill_(getattr(torch.iinfo(kind), integer))

        return allocation

    before = torch.empty, torch.Tensor.new_empty
    torch.empty, torch.Tensor.new_empty = map(poisoned, before)
    try:
        yield
    finally:
        torch.empty, torch.Tensor.new_empty = before
