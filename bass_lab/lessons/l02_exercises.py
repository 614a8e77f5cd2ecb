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


def check_commit(commit: Callable) -> bool:
    """Check commit(tokens, lengths, choices, accepted) -> (tokens, lengths) after a greedy step.

    tokens: int64 [B, S]; the first lengths[b] tokens of a row are committed. choices [B, k + 1]: of the target. The
    first accepted[b] choices equal the draft tokens. A row commits these and the next choice. Later tokens are free.
    """
    return check(commit, _commit_cases())


def _commit_cases() -> Iterator[Case]:
    chance = random.Random(3)
    drawn = [("two rows of different lengths", [2, 4], [1, 0], 2), ("one row, all accepted", [3], [2], 2)]
    for number in range(100):
        rows, k = chance.randint(1, 5), chance.randint(1, 4)
        lengths = [chance.randint(2, 9) for _ in range(rows)]
        drawn.append((f"random case {number}", lengths, [chance.randint(0, k) for _ in range(rows)], k))
    for name, lengths, accepted, k in drawn:
        texts = [[chance.randint(10, 99) for _ in range(length)] for length in lengths]
        choices = [[chance.randint(100, 999) for _ in range(k + 1)] for _ in lengths]
        tokens = torch.zeros(len(lengths), max(lengths) + 2 * k + 2, dtype=torch.int64)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = torch.tensor(text)
        arguments = tokens, torch.tensor(lengths), torch.tensor(choices), torch.tensor(accepted)
        told = f"{name}: texts {texts}, choices {choices}, accepted {accepted}"
        wanted = [text + new[: count + 1] for text, new, count in zip(texts, choices, accepted, strict=True)]
        yield told, arguments, partial(_same_texts, wanted, accepted, max(lengths))


def _same_texts(wanted: list[list[int]], accepted: list[int], longest: int, result: object) -> str:
    if not isinstance(result, tuple) or len(result) != 2 or not all(isinstance(each, Tensor) for each in result):
        return f"expected a pair (tokens, lengths) of tensors, got {type(result).__name__}"
    tokens, lengths = _as_lists(result[0]), result[1].tolist()
    if tokens is None or len(tokens) != len(wanted) or len(lengths) != len(wanted):
        return f"expected tokens and lengths of {len(wanted)} rows, got shapes {[list(x.shape) for x in result]}"
    for row, (text, found, length) in enumerate(zip(wanted, tokens, lengths, strict=True)):
        before = len(text) - accepted[row] - 1
        if found[: len(text)] != text:
            far = found[longest : longest + 1] == text[before : before + 1]
            hint = "; its new tokens are behind the longest row" if far else ""
            return f"row {row} should begin with {text}, but begins with {found[: len(text)]}{hint}"
        if length != len(text):
            hint = "; count the target's own token, too" if length == len(text) - 1 else ""
            return f"row {row} had {before} tokens and accepted {accepted[row]}, so its length is not {length}{hint}"
    return ""


def _as_lists(result: object) -> list[list] | None:
    """Return a tensor [M, N] or nested sequence as lists, or None for anything else."""
    if isinstance(result, Tensor):
        return result.tolist() if result.ndim == 2 else None
    if isinstance(result, list | tuple) and all(isinstance(row, list | tuple) for row in result):
        return [list(row) for row in result]
    return None
