"""Programming problems in HumanEval's format (Chen et al. 2021, arXiv 2107.03374): one JSON object per line.

Model-written code runs in the sandbox. A problem's own code does not: `test`, and `prompt` for its helpers, run outside
the sandbox with all rights of the user. Problems from a file or the hub are therefore loaded only if they equal
HumanEval or the mini set, or if the caller trusts the author (trust_problems).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

MINI_SET = Path(__file__).parents[1] / "assets" / "mini_set.jsonl"
HUB_NAMES = ("openai_humaneval", "openai/openai_humaneval")
HUMAN_EVAL = "728df9bbd02970875e3666f897a030c8162a21531aee9e5a253ea57e732e5b5a"  # `_digest` of its 164 problems
Entry = TypeVar("Entry")
FIELDS = ("task_id", "prompt", "entry_point", "canonical_solution", "test")


@dataclass(frozen=True)
class Problem:
    """prompt: text that the model continues. prompt + canonical_solution is a correct program. test: source of
    `check(candidate)`, which raises if the function `entry_point` is wrong. composition: held-out composition, in the
    mini set only. Grading executes prompt and test outside the sandbox, with the caller's rights."""

    task_id: str
    prompt: str
    entry_point: str
    canonical_solution: str
    test: str
    composition: str = ""


def load_problems(path: str | Path | None = None, *, trust_problems: bool = False) -> list[Problem]:
    """Load the problems of a file of JSON lines, gzipped or not. None: the 164 problems of the mini set.

    "openai_humaneval" is read from the Hugging Face hub (package `datasets`). trust_problems: also load problems that
    are neither HumanEval nor the mini set. Grading runs their code outside the sandbox, with the caller's rights.

    Raises ValueError for untrusted problems, for an invalid line, and if the hub cannot be read; FileNotFoundError
    without a file.
    """
    if path is None:
        return _problems(MINI_SET)
    problems = _from_hub() if str(path) in HUB_NAMES and not Path(path).exists() else _problems(Path(path))
    if not trust_problems and _digest(problems) not in (HUMAN_EVAL, _digest(_problems(MINI_SET))):
        raise ValueError(
            f"{path} is neither HumanEval nor the mini set: grading would run the code in the fields prompt and test "
            "outside the sandbox, with your rights. If you trust the author, use trust_problems=True (--trust-problems)"
        )
    return problems


def _problems(path: Path) -> list[Problem]:
    def problem(line: dict) -> Problem:
        found = Problem(**{name: line[name] for name in FIELDS}, composition=line.get("composition", ""))
        if wrong := [name for name, value in asdict(found).items() if not isinstance(value, str)]:
            raise ValueError(f"{wrong[0]} must be a text, got {getattr(found, wrong[0])!r}")
        return found

    return file_rows(path, problem, f"a problem with the fields {', '.join(FIELDS)}")


def _from_hub() -> list[Problem]:
    where = "or give the path of HumanEval.jsonl.gz, from https://github.com/openai/human-eval/tree/master/data"
    rows = hub_rows("openai/openai_humaneval", split="test", otherwise=where)
    return [Problem(**{name: row[name] for name in FIELDS}) for row in rows]


def _digest(problems: list[Problem]) -> str:
    """Return the SHA-256 of all text that runs outside the sandbox, independent of source and file format."""
    executed = [[problem.task_id, problem.prompt, problem.entry_point, problem.test] for problem in problems]
    return hashlib.sha256(json.dumps(executed).encode()).hexdigest()


def file_rows(path: Path, entry: Callable[[dict], Entry], what: str) -> list[Entry]:
    """Return the entries of a file of JSON lines, gzipped or not. Raises ValueError naming an invalid line."""
    found = []
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig") as file:
            lines = list(file)
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is no file of JSON lines: {error}") from None
    for number, line in enumerate(lines, 1):
        try:
            found += [entry(json.loads(line))] if line.strip() else []
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is no JSON: {error}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number} is not {what}: {error}") from None
    return found


def hub_rows(name: str, *, split: str, otherwise: str, revision: str | None = None) -> Iterable[dict]:
    """Return the rows of a data set on the hub. Raises ValueError with the cause and the advice `otherwise`."""
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"reading {name} from the hub needs the package datasets: pip install '.[eval]' in the checkout, "
            f"{otherwise}"
        ) from None
    try:
        return datasets.load_dataset(name, split=split, revision=revision)
    except Exception as error:  # no network, no such data set, a full disk: many exception types
        raise ValueError(
            f"cannot read {name} from the hub ({type(error).__name__}: {error}). Try again, {otherwise}"
        ) from error
