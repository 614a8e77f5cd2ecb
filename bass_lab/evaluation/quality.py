"""`compare`: many samples of every problem by three decoding methods, with the finish time of each sample.

A sample holds the text, the finish time and the grade. Every time budget can therefore be scored afterwards from a
single run (`Evaluation.scores`).

All rows of a problem share a clock, which starts with the decoding call. Tokenizing and prefill count, as in
`generate(time_budget=...)`; loading, warm-up and grading do not. A row finishes with the step that emitted the last
token. A step ends with a copy to the host, so the device has finished, too.

| method | decoding |
| --- | --- |
| `regular` | all rows at once, draft length 0 |
| `single` | speculative, one row after the other on the same clock |
| `batched` | speculative, all rows at once: BASS |
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd
from tqdm.auto import tqdm

from bass_core import checks
from bass_core.generation import generate
from bass_core.loading.measured_costs import policy_for
from bass_core.loading.model_pair import ModelPair, fingerprints
from bass_core.policies.protocol import DraftLengthPolicy
from bass_core.prompts import check_context, token_ids
from bass_lab.evaluation import sample_file, sandbox, scores
from bass_lab.evaluation.problems import Problem
from bass_lab.kept_session import KeptSession
from bass_lab.provenance import describe_run

OF_A_CALL = ("num_return_sequences", "max_new_tokens", "time_budget", "seed")  # options of a call, not of a session
METHODS = ("regular", "single", "batched")
CODE_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # HumanEval's (Chen et al. 2021, section 3.2)
FINISHED = ("eos", "stop", "length")
TIMED_BY = ("device", "threads", "torch", "transformers", "bass")  # environment fields that affect times

Grader = Callable[[Sequence[tuple[Problem, str]]], Sequence[tuple[bool, str]]]  # (passed, reason) of each


@dataclass(frozen=True)
class Evaluation:
    """samples: a line per (problem, row) with `scores.COLUMNS`, finish_reason, graded (the reason) and text (the
    completion); NaN if not stored. settings: of the samples. environment: machine and versions."""

    samples: pd.DataFrame
    settings: dict
    environment: dict

    def scores(self, budgets: Sequence[float] | None = None, *, ks: Sequence[int] = (1,)) -> pd.DataFrame:
        """Return Pass@First, Pass@All and pass@k at each budget, with 95% intervals over problems (`scores.score`).

        budgets: seconds; None: quartiles of the finish times. Raises ValueError for a budget above the budget of the
        run, which cut rows off.
        """
        limit = self.settings["budget"]
        budgets = scores.quartiles(self.samples, limit) if budgets is None else list(budgets)
        if limit is not None and any(budget > limit for budget in budgets):
            raise ValueError(f"rows were cut off after {limit} s, so budgets must be at most {limit}, got {budgets}")
        return scores.score(self.samples, budgets, ks=ks)


def compare(
    pair: ModelPair,
    problems: Sequence[Problem],
    *,
    methods: Sequence[str] = METHODS,
    n: int = 8,
    budget: float | None = None,
    folder: str | Path | None = None,
    texts: bool = True,
    max_new_tokens: int = 128,
    temperature: float = 0.2,
    top_p: float = 1.0,
    seed: int = 0,
    draft_length: int | DraftLengthPolicy | None = None,
    verification: str = "token",
    stop: str | Sequence[str] | None = None,
    unsafe: bool = False,
    grade: Grader | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> dict[str, Evaluation]:
    """Decode and grade n samples of every problem with every method. Return an `Evaluation` per method.

    The methods are interleaved problem by problem.

    methods: of the table above. budget: seconds until a problem's rows are cut off; None: no limit.
    folder: receives METHOD.jsonl with each problem's samples. A second call decodes only missing problems. texts: also
    store completions and reasons.
    seed: random numbers depend on seed, task_id and row index. With `verification="coupled"` or temperature 0, texts do
    not depend on the method.
    stop: None for HumanEval's stop strings, or for no stop strings with the mini set.
    unsafe: grade even if the sandbox is incomplete. grade: another grader of (problem, completion) pairs. The choice is
    recorded.
    progress: receives each problem's task_id and the share done; None: a progress bar in a terminal. Other options as
    in `generate`.

    Raises ValueError or TypeError, before decoding, for invalid options and prompts, and for files with other settings.
    `sandbox.SandboxUnavailable` if programs cannot run safely.
    """
    methods = [checks.one_of("method", method, METHODS) for method in dict.fromkeys(methods)]
    if stop is None:
        stop = () if all(problem.composition for problem in problems) else CODE_STOPS
    options = {
        "num_return_sequences": checks.integer("n", n, least=1),
        "max_new_tokens": checks.integer("max_new_tokens", max_new_tokens, least=1),
        "temperature": temperature,
        "top_p": top_p,
        "draft_length": draft_length,
        "verification": verification,
        "stop": stop,
        "time_budget": None if budget is None else checks.seconds("budget", budget),
        "seed": checks.integer("seed", seed, least=None),
    }
    _check(pair, problems, options)
    ours, (grade, grading) = grade is None, _grader(grade, unsafe)
    environment = describe_run(pair)
    timed_by = [name for name in TIMED_BY if pair.device.type == "cpu" or name != "threads"]
    common = {**fingerprints(pair), "runs_on": pair.device.type, **{name: environment[name] for name in timed_by}}
    with ExitStack() as files:
        runs = [_Run(pair, method, options, grading, common, environment, folder, files) for method in methods]
        for run in runs:
            run.check_unchanged(problems)
        missing = [problem for problem in problems if any(problem.task_id not in run.lines for run in runs)]
        if ours:
            _check_gradable(missing, grade)
        for run in runs if missing else ():
            run.warm_up(missing)  # keeps compilation, probing and capture out of the rows' times
        before = len(problems) - len(missing)
        look = {"desc": ", ".join(methods), "unit": "problem", "total": len(problems), "initial": before}
        bar = tqdm(missing, disable=True if progress else None, **look)
        for done, problem in enumerate(bar, before):
            if progress:
                progress(problem.task_id, done / len(problems))
            for run in runs:
                if problem.task_id not in run.lines:
                    run.add(problem, grade, texts)
    return {run.method: run.result(problems) for run in runs}


def evaluate(pair: ModelPair, problems: Sequence[Problem], *, method: str = "batched", **options) -> Evaluation:
    """Run `compare` with a single method and return the `Evaluation`. Options as in `compare`."""
    return compare(pair, problems, methods=[method], **options)[method]


def load(path: str | Path) -> Evaluation | dict[str, Evaluation]:
    """Load the samples of `compare`, finished or running: an `Evaluation` for a file, one per method for a folder.

    Raises FileNotFoundError, and ValueError for other files and for files without samples.
    """
    path = Path(path)
    if path.is_dir():
        found = {method: path / f"{method}.jsonl" for method in METHODS if (path / f"{method}.jsonl").exists()}
        if not found:
            raise FileNotFoundError(f"{path} holds none of {', '.join(f'{method}.jsonl' for method in METHODS)}")
        return {method: load(file) for method, file in found.items()}
    header, lines = sample_file.read(path)
    if not lines:
        raise ValueError(f"{path} holds no samples yet; the first problem is not finished")
    return Evaluation(_frame(lines.values()), header[sample_file.HEADER], header["environment"])


class _Run:
    """A method's run over the problems. lines: finished problems by task_id. common: settings of models and machine."""

    def __init__(
        self,
        pair: ModelPair,
        method: str,
        options: dict,
        grading: str,
        common: dict,
        environment: dict,
        folder: str | Path | None,
        files: ExitStack,
    ):
        self.pair, self.method = pair, method
        n = options["num_return_sequences"]
        self._options = options | {"max_batch_size": 1 if method == "single" else n}
        if method == "regular":
            self._options["draft_length"] = 0
        self.environment = environment
        self.settings = {"method": method, "n": n, "budget": options["time_budget"], "grading": grading}
        self.settings |= _settings(pair, self._options) | common
        self._file = None
        if folder is not None:
            path = Path(folder) / f"{method}.jsonl"
            self._file = files.enter_context(sample_file.SampleFile(path, self.settings, self.environment))
        self.lines = {} if self._file is None else dict(self._file.lines)
        of_session = {
            name: value for name, value in self._options.items() if name not in (*OF_A_CALL, "max_batch_size")
        }
        self._decode = KeptSession(pair, self._options["max_batch_size"], trace="off", **of_session)
        files.callback(self._decode.close)

    def check_unchanged(self, problems: Sequence[Problem]) -> None:
        """Raise ValueError if the file holds samples of a problem that has changed."""
        for problem in problems:
            if problem.task_id in self.lines and self.lines[problem.task_id]["problem"] != _digest(problem):
                raise ValueError(
                    f"{self._file.path} holds samples of another problem named {problem.task_id} (its prompt or tests "
                    "have changed); give another folder"
                )

    def warm_up(self, problems: Sequence[Problem]) -> None:
        """Decode the first problem, after reserving KV cache for all problems if steps are captured."""
        self._decode.reserve([problem.prompt for problem in problems], self._options["max_new_tokens"])
        self.decode(problems[0], time_budget=None)  # the budget may be too short to capture the CUDA graphs

    def decode(self, problem: Problem, **changes: object) -> list[dict]:
        """Return the ungraded rows of a problem with their finish times. changes: to the options."""
        done: dict[int, float] = {}  # time of each row's last emission
        how = {name: self._options[name] for name in OF_A_CALL} | {"seed": _seed(self._options["seed"], problem)}
        how |= changes
        out = self._decode.settled(
            [problem.prompt],
            on_step=lambda event: done.update(dict.fromkeys(event.rows, time.perf_counter())),
            **how,
        )
        started, rows = self._decode.started, []
        for row, (sequence, text, logprobs, reason) in enumerate(
            zip(out.sequences, out.texts, out.logprobs, out.finish_reasons, strict=True)
        ):
            finished = reason in FINISHED
            seconds, total = round(done[row] - started, 6) if finished else None, logprobs.double().sum().item()
            line = {"row": row, "finish_seconds": seconds, "finished": finished, "finish_reason": reason}
            rows.append(line | {"tokens": len(sequence), "logprob_sum": round(total, 6), "text": text})
        return rows

    def add(self, problem: Problem, grade: Grader, texts: bool) -> None:
        """Decode a problem, and grade and store the rows as columns."""
        rows = _graded(problem, self.decode(problem), grade)
        columns = {name: [row[name] for row in rows] for name in rows[0] if texts or name not in ("graded", "text")}
        line = {"schema": "samples", "task_id": problem.task_id, "problem": _digest(problem), "samples": columns}
        if self._file is not None:
            self._file.append(line)
        self.lines[problem.task_id] = line

    def result(self, problems: Sequence[Problem]) -> Evaluation:
        samples = _frame([self.lines[problem.task_id] for problem in problems])
        return Evaluation(samples, self.settings, self.environment)


def _seed(seed: int, problem: Problem) -> int:
    """Return a seed per problem. With a shared seed, row i of every problem would draw the same random numbers."""
    return int.from_bytes(hashlib.sha256(f"{seed} {problem.task_id}".encode()).digest()[:7])


def _grader(grade: Grader | None, unsafe: bool) -> tuple[Grader, str]:
    """Return the grader and a name for the record."""
    if grade is not None:
        if unsafe:
            raise ValueError("unsafe=True concerns the sandbox, which `grade` replaces; give only one of the two")
        return grade, getattr(grade, "__name__", repr(grade))
    if not unsafe:
        sandbox.require_sandbox()
    return partial(sandbox.grade_all, unsafe=unsafe), "unsafe" if unsafe else "sandbox"


def _graded(problem: Problem, rows: list[dict], grade: Grader) -> list[dict]:
    """Return the rows with `passed` and `graded`. Equal texts are run once, unfinished texts are not run."""
    texts = list(dict.fromkeys(row["text"] for row in rows if row["finished"]))
    found = dict(zip(texts, grade([(problem, text) for text in texts]), strict=True)) if texts else {}
    graded = []
    for row in rows:
        passed, why = found[row["text"]] if row["finished"] else (False, "not finished")
        graded.append({**row, "passed": bool(passed), "graded": str(why)})
    return graded


def _check(pair: ModelPair, problems: Sequence[Problem], options: dict) -> None:
    """Raise ValueError or TypeError for invalid options and problems before the first problem is decoded."""
    names = [problem.task_id for problem in problems]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"problems must be at least one, with distinct values of task_id, got {len(names)}")
    if pair.tokenizer is None:
        raise ValueError("problems are texts, so the pair needs a tokenizer: ModelPair(..., tokenizer=...)")
    for problem in problems:
        ids = token_ids(pair, [problem.prompt])[0]
        try:
            check_context(pair, len(ids), options["max_new_tokens"])
        except ValueError as error:
            raise ValueError(f"problem {problem.task_id}: {error}") from None
    generate(pair, problems[0].prompt, **options | {"max_new_tokens": 0})  # checks the options, decodes nothing


def _check_gradable(problems: Sequence[Problem], grade: Grader) -> None:
    """Raise ValueError if a problem's canonical solution fails: the check is wrong, or the sandbox too restrictive."""
    solved = [(each, each.canonical_solution) for each in problems if each.canonical_solution and not each.composition]
    for (problem, _), (passed, why) in zip(solved, grade(solved) if solved else (), strict=True):
        if not passed:
            raise ValueError(
                f"problem {problem.task_id} cannot be graded here: its own canonical_solution does not pass ({why})"
            )


def _settings(pair: ModelPair, options: dict) -> dict:
    """Return the options that the samples depend on, in the format of the file."""
    stop = options["stop"]
    return {
        **{name: options[name] for name in ("seed", "max_new_tokens", "temperature", "top_p", "verification")},
        "draft_length": repr(policy_for(pair, options["draft_length"])),
        "stop": [stop] if isinstance(stop, str) else list(stop),
    }


def _digest(problem: Problem) -> str:
    parts = (problem.prompt, problem.entry_point, problem.test)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _frame(lines: Iterable[dict]) -> pd.DataFrame:
    """Return a line per (problem, row), with the columns in the order of `scores.COLUMNS`."""
    parts = [pd.DataFrame(line["samples"]).assign(problem=line["task_id"]) for line in lines]
    columns = [*scores.COLUMNS, "finish_reason", "graded", "text"]
    return pd.concat(parts, ignore_index=True).reindex(columns=columns).astype({"finish_seconds": float})
