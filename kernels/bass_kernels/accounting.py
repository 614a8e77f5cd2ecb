"""Counts of the keys that attention programs read, of wasted reads, and of program schedules.

Memory limits decoding, so the bytes read decide a kernel's speed. All numbers are counts per KV head, never
measurements. A program reads the keys and values of one KV head. Several query tiles over the same keys count as one
read, because all but the first read from the L2 cache.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Read(NamedTuple):
    """Keys begin … end - 1 of a row, read by one program. launch: its number; launches run one after the other."""

    row: int
    begin: int
    end: int
    launch: int = 0


def pad_reads(lengths: Sequence[int]) -> list[Read]:
    """Return the reads of BASS-PAD: one launch, every row padded to the longest."""
    return [Read(row, 0, max(lengths)) for row in range(len(lengths))]


def split_reads(lengths: Sequence[int]) -> list[Read]:
    """Return the reads of BASS-SPLIT: one launch per row, each with its own length."""
    return [Read(row, 0, length, launch=row) for row, length in enumerate(lengths)]


def ragged_reads(items: Tensor) -> list[Read]:
    """Return the pieces of a plan (`Plan.items`, int [I, 4]) in start order, without idle items."""
    return [Read(row, begin, end) for row, begin, end, _ in items.tolist() if row >= 0]


def keys_read(reads: Sequence[Read]) -> int:
    """Return the number of keys read per KV head, over all rows."""
    return sum(read.end - read.begin for read in reads)


def keys_wasted(reads: Sequence[Read], lengths: Sequence[int]) -> int:
    """Return the number of keys read beyond the rows' lengths."""
    return sum(max(0, read.end - max(read.begin, lengths[read.row])) for read in reads)


def cut(lengths: Sequence[int], chunk: int) -> tuple[Tensor, Tensor]:
    """Return items and rows of a plan, as in `Plan`, with every row cut into pieces of `chunk` keys."""
    items, rows = [], []
    for row, length in enumerate(lengths):
        begins = range(0, length, chunk)
        rows.append((len(items), len(begins)))
        items += [(row, begin, min(begin + chunk, length), len(items) + i) for i, begin in enumerate(begins)]
    return torch.tensor(items, dtype=torch.int32), torch.tensor(rows, dtype=torch.int32)


def finish(reads: Sequence[Read], workers: int, programs: int = 1, overhead: int = 0) -> int:
    """Return the time until the last program ends, in keys. Programs go to the first free worker, launch by launch.

    workers: programs that the GPU runs at once. programs: per read (KV heads × tiles of queries). overhead: cost of
    starting and ending a program, in keys.
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
    """Needed keys, wasted keys and `finish` time of one or several launches, per KV head."""

    needed: int
    wasted: int
    finish: int

    @property
    def wasted_share(self) -> float:
        """Return the share of wasted keys among the keys read."""
        return self.wasted / (self.needed + self.wasted)


def compare(
    lengths: Sequence[int], items: Tensor, workers: int, programs: int = 1, overhead: int = 0, reduce: int = 0
) -> dict[str, Account]:
    """Return the accounts of pad, split and ragged for rows of these lengths. The other arguments are as in `finish`.

    items: of ragged's plan. reduce: cost of adding up pieces in ragged if a row is cut, in keys.
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
    """Return the reads of pad, split and ragged for rows of these lengths. items: of ragged's plan."""
    return {"pad": pad_reads(lengths), "split": split_reads(lengths), "ragged": ragged_reads(items)}


def spread_lengths(batch: int, mean: int, spread: float, least: int = 1) -> list[int]:
    """Return KV lengths evenly spaced from mean · (1 - spread) to mean · (1 + spread), ascending. spread: 0 … 1."""
    if not 0 <= spread <= 1:
        raise ValueError(f"spread must be from 0 (all equal) to 1, got {spread}")
    shares = [1 + spread * (2 * row / max(batch - 1, 1) - 1) for row in range(batch)]
    return [max(least, round(mean * share)) for share in shares]
