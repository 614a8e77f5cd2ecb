"""Exercises of lesson 02: ragged batches."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from bass_lab.lessons.checking import Case, check


def check_positions(positions: Callable) -> bool:
    """Check positions(lengths, drafted) -> int [B, K + 1], the position ids of a target pass, K = max(drafted).

    lengths [B]: committed tokens per row; drafted [B]: draft tokens per row. The pass feeds a row's last committed
    token, then its draft tokens. Padding repeats the row's last valid position.
    """
    return check(positions, _position_cases())


def _position_cases() -> Iterator[Case]:
    chance = random.Random(2)
    drawn = [
        ("one row", [5], [3]),
        ("two rows of different lengths", [5, 9], [3, 3]),
        ("the first row submits fewer", [5, 9], [1, 3]),
        ("a row submits no draft tokens", [7, 4], [0, 2]),
        ("no row submits draft tokens", [7, 4], [0, 0]),
    ]
    for number in range(100):
        rows = chance.randint(1, 8)
        lengths = [chance.randint(2, 60) for _ in range(rows)]
        drawn.append((f"random case {number}", lengths, [chance.randint(0, 6) for _ in range(rows)]))
    for name, lengths, drafted in drawn:
        width = max(drafted) + 1
        wanted = [[n - 1 + min(query, k) for query in range(width)] for n, k in zip(lengths, drafted, strict=True)]
        arguments = torch.tensor(lengths), torch.tensor(drafted)
        yield f"{name}: lengths {lengths}, drafted {drafted}", arguments, partial(_same_positions, wanted, drafted)


def _same_positions(wanted: list[list[int]], drafted: list[int], result: object) -> str:
    found = _as_lists(result)
    shape = [len(wanted), len(wanted[0])]
    if found is None or [len(row) for row in found] != [shape[1]] * shape[0]:
        return f"expected positions of shape {shape}, got {result!r}"
    for row, (ours, theirs) in enumerate(zip(wanted, found, strict=True)):
        for query, (right, value) in enumerate(zip(ours, theirs, strict=True)):
            if value != right:
                what = _query_name(query, drafted[row])
                return f"row {row}, query {query} ({what}) has position {right}, got {value}"
    return ""


def _query_name(query: int, drafted: int) -> str:
    if query == 0:
        return "the last committed token"
    return f"draft token {query}" if query <= drafted else "padding, which repeats the row's last valid position"


def check_keep(keep: Callable) -> bool:
    """Check keep(accepted, k) -> bool [B, k + 1], True for cache entries of a target pass with committed tokens.

    accepted [B]: accepted length of each row. The pass fed the row's last committed token, then k draft tokens.
    """
    return check(keep, _keep_cases())


def _keep_cases() -> Iterator[Case]:
    chance = random.Random(2)
    drawn = [
        ("one row, some accepted", [2], 4),
        ("one row, none accepted", [0], 4),
        ("one row, all accepted", [4], 4),
        ("two rows", [3, 1], 4),
    ]
    for number in range(100):
        k = chance.randint(1, 8)
        drawn.append((f"random case {number}", [chance.randint(0, k) for _ in range(chance.randint(1, 8))], k))
    for name, accepted, k in drawn:
        yield f"{name}: accepted {accepted}, k {k}", (torch.tensor(accepted), k), partial(_same_entries, accepted, k)


def _same_entries(accepted: list[int], k: int, result: object) -> str:
    found = _as_lists(result)
    if found is None or [len(row) for row in found] != [k + 1] * len(accepted):
        return f"expected {len(accepted)} rows of {k + 1} entries, got {result!r}"
    for row, (count, entries) in enumerate(zip(accepted, found, strict=True)):
        for entry, kept in enumerate(entries):
            if bool(kept) == (entry <= count):
                continue
            what = "the last committed token" if entry == 0 else f"draft token {entry}"
            said = "was accepted" if 0 < entry <= count else "was rejected" if entry else "is part of the text"
            told = f"row {row} accepted {count}: entry {entry} ({what}) {said}"
            return f"{told}, but you {'keep' if kept else 'drop'} it"
    return ""


def _as_lists(result: object) -> list[list] | None:
    """Return a tensor [M, N] or nested sequence as lists, or None for anything else."""
    if isinstance(result, Tensor):
        return result.tolist() if result.ndim == 2 else None
    if isinstance(result, list | tuple) and all(isinstance(row, list | tuple) for row in result):
        return [list(row) for row in result]
    return None
