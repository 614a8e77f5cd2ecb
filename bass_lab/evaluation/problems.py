"""Programming problems in HumanEval's format (Chen et al. 2021, arXiv 2107.03374): one JSON object per line."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

MINI_SET = Path(__file__).parents[1] / "assets" / "mini_set.jsonl"
HUB_NAMES = ("openai_humaneval", "openai/openai_humaneval")
Entry = TypeVar("Entry")
FIELDS = ("task_id", "prompt", "entry_point", "canonical_solution", "test")


@dataclass(frozen=True)
class Problem:
    """prompt: what the model continues. prompt + canonical_solution is right. test: source of `check(candidate)`, which
    raises where the function named `entry_point` is wrong. composition: the mini set's only, what is held out."""

    task_id: str
    prompt: str
    entry_point: str
    canonical_solution: str
    test: str
    composition: str = ""


def load_problems(path: str | Path | None = None) -> list[Problem]:
    """The problems of a file of JSON lines, gzipped or not; None: the 164 of the mini set.

    "openai_humaneval" is read from the Hugging Face hub (package `datasets`). Raises ValueError naming the line for one
    that is no problem, or why the hub could not be read; FileNotFoundError where there is no file.
    """
    if str(path) in HUB_NAMES and not Path(path).exists():
        where = "or give the path of HumanEval.jsonl.gz, from https://github.com/openai/human-eval/tree/master/data"
        rows = hub_rows("openai/openai_humaneval", split="test", otherwise=where)
        return [Problem(**{name: row[name] for name in FIELDS}) for row in rows]

    def problem(line: dict) -> Problem:
        return Problem(**{name: line[name] for name in FIELDS}, composition=line.get("composition", ""))

    return file_rows(
        Path(MINI_SET if path is None else path), problem, f"a problem with the fields {', '.join(FIELDS)}"
    )


def file_rows(path: Path, entry: Callable[[dict], Entry], what: str) -> list[Entry]:
    """The entries of a file of JSON lines, gzipped or not. Raises ValueError naming the line that is not `what`."""
    found = []
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                found += [entry(json.loads(line))] if line.strip() else []
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number} is not {what}: {error}") from None
    return found


def hub_rows(name: str, *, split: str, otherwise: str, revision: str | None = None) -> Iterable[dict]:
    """The rows of a data set on the hub. Raises ValueError with the cause and what to do `otherwise`."""
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"reading {name} from the hub needs the package datasets: pip install 'bass-hands-on[eval]', {otherwise}"
        ) from None
    try:
        return datasets.load_dataset(name, split=split, revision=revision)
    except Exception as error:  # no network, no such data set, a full disk: each with exceptions of its own
        raise ValueError(
            f"cannot read {name} from the hub ({type(error).__name__}: {error}). Try again, {otherwise}"
        ) from error
