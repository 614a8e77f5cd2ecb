"""Who reads which keys, counted: keys per program, those read in vain, and when the last program is done.

Decoding is bound by memory, so that a kernel is as good as the bytes it does not read. Numbers here are counts, never
measurements. A program reads the keys and values of one KV head; the counts are per KV head. Several tiles of queries
over the same keys read them from memory once (the others hit the L2 cache).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Read(NamedTuple):
    """One program reads the keys begin … end - 1 of a row. `launch`: launches run one after the other."""

    row: int
    begin: int
    end: int
    launch: int = 0


def pad_reads(lengths: Sequence[int]) -> list[Read]:
    """BASS-PAD: one launch, every row as long as the longest."""
    return [Read(row, 0, max(lengths)) for row in range(len(lengths))]


def split_reads(lengths: Sequence[int]) -> list[Read]:
    """BASS-SPLIT: one launch per row, each with its own length."""
    return [Read(row, 0, length, launch=row) for row, length in enumerate(lengths)]


def ragged_reads(items: Tensor) -> list[Read]:
    """The pieces of a plan (`Plan.items`, int [I, 4]) in the order in which they start; idle items are left out."""
    return [Read(row, begin, end) for row, begin, end, _ in items.tolist() if row >= 0]


def keys_read(reads: Sequence[Read]) -> int:
    """Keys read, of all rows, per KV head."""
    return sum(read.end - read.begin for read in reads)


def keys_wasted(reads: Sequence[Read], lengths: Sequence[int]) -> int:
    """Of these, the ones that are not the row's."""
    return sum(max(0, read.end - max(read.begin, lengths[read.row])) for read in reads)


def cut(lengths: Sequence[int], chunk: int) -> tuple[Tensor, Tensor]:
    """A plan made by hand: every row in pieces of `chunk` keys, in order. Items and rows as in `Plan`."""
    items, rows = [], []
    for row, length in enumerate(lengths):
        begins = range(0, length, chunk)
        rows.append((len(items), len(begins)))
        items += [(row, begin, min(begin + chunk, length), len(items) + i) for i, begin in enumerate(begins)]
    return torch.tensor(items, dtype=torch.int32), torch.tensor(rows, dtype=torch.int32)


def finish(reads: Sequence[Read], workers: int, programs: int = 1, overhead: int = 0) -> int:
    """When the last program is done, in keys: each goes to the first free worker, in order, launch by launch.

    workers: programs that the GPU runs at once. programs: per read (KV heads × tiles of queries). overhead: what
    starting and ending a program costs, in keys.
    """
    time = 0
    for launch in sorted({read.launch for read in reads}):
        free = [0] * workers
        for read in reads:
            if read.launch == launch:
                for _ in range(programs):
                    heapq.heapreplace(free, free[0] + read.end - read.begin + overhead)
        time += max(free)
    return time


class Account(NamedTuple):
    """Keys of one launch or series of launches, per KV head: needed, read in vain, and `finish` of it all."""

    needed: int
    wasted: int
    finish: int

    @property
    def wasted_share(self) -> float:
        """Of the keys read."""
        return self.wasted / (self.needed + self.wasted)


def compare(
    lengths: Sequence[int], items: Tensor, workers: int, programs: int = 1, overhead: int = 0, reduce: int = 0
) -> dict[str, Account]:
    """pad, split and ragged on rows of these lengths. items: of ragged's plan. The rest: as in `finish`.

    reduce: what adding up costs ragged where a row is cut, in keys.
    """
    accounts = {}
    for name, reads in launches(lengths, items).items():
        wasted = keys_wasted(reads, lengths)
        time = finish(reads, workers, programs, overhead)
        if name == "ragged" and len(reads) > len(lengths):
            time += reduce
        accounts[name] = Account(keys_read(reads) - wasted, wasted, time)
    return accounts


def launches(lengths: Sequence[int], items: Tensor) -> dict[str, list[Read]]:
    """What each of the three reads on rows of these lengths, by name. items: of ragged's plan."""
    return {"pad": pad_reads(lengths), "split": split_reads(lengths), "ragged": ragged_reads(items)}


def spread_lengths(batch: int, mean: int, spread: float, least: int = 1) -> list[int]:
    """KV lengths evenly spaced from mean · (1 - spread) to mean · (1 + spread), shortest first; spread is 0 … 1."""
    if not 0 <= spread <= 1:
        raise ValueError(f"spread must be from 0 (all equal) to 1, got {spread}")
    shares = [1 + spread * (2 * row / max(batch - 1, 1) - 1) for row in range(batch)]
    return [max(least, round(mean * share)) for share in shares]
