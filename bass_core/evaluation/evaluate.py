"""`evaluate`: many samples of every problem by one way to decode, with the time at which each of them was done.

Quality within a time budget needs three things kept apart: what was written, when it was done, and whether it is right.
Samples hold all three, so that every budget can be scored afterwards (`Evaluation.scores`) from one run.

One clock for all rows of a problem starts with the call that decodes them: tokenizing and prefill count, as in
`generate(time_budget=...)`; loading, a run that warms up, and grading do not. A row is done after the step that emitted
its last token; a step ends with a copy to the host, so its time is the device's too.

| method | what it is |
| --- | --- |
| `regular` | all rows at once, draft length 0 |
| `single` | speculative, one row after the other on the same clock |
| `batched` | speculative, all rows at once: BASS |
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from bass_core import inputs, records
from bass_core.benchmark import Clock, synchronize
from bass_core.draft_length import DraftLengthPolicy, as_policy
from bass_core.drafters import NgramDrafter
from bass_core.evaluation import sample_file, scores
from bass_core.evaluation.problems import Problem
from bass_core.generation import generate
from bass_core.models import ModelPair

METHODS = ("regular", "single", "batched")
CODE_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # HumanEval's (Chen et al. 2021, section 3.2)
FINISHED = ("eos", "stop", "length")
TIMED_BY = ("device", "threads", "torch", "transformers", "bass")  # of the environment: what times depend on

Grader = Callable[[Sequence[tuple[Problem, str]]], Sequence[tuple[bool, str]]]  # (passed, why) of each


@dataclass(frozen=True)
class Evaluation:
    """samples: one line per (problem, row) with the columns of `scores.COLUMNS` and finish_reason, graded (why it
    passed or not) and text (the completion). settings: what the samples depend on. environment: where they were made.
    """

    samples: pd.DataFrame
    settings: dict
    environment: dict

    def scores(self, budgets: Sequence[float] | None = None, *, ks: Sequence[int] = (1,)) -> pd.DataFrame:
        """Pass@First, Pass@All and pass@k at each budget, with 95% intervals over problems (`scores.score`).

        budgets: seconds; None: quartiles of the finish times. Raises ValueError for a budget beyond the one at which
        decoding stopped: what the rows would have become is not known.
        """
        limit = self.settings["budget"]
        budgets = scores.quartiles(self.samples, limit) if budgets is None else list(budgets)
        if limit is not None and any(budget > limit for budget in budgets):
            raise ValueError(f"rows were cut off after {limit} s, so budgets up to that can be scored, got {budgets}")
        return scores.score(self.samples, budgets, ks=ks)


def evaluate(
    pair: ModelPair,
    problems: Sequence[Problem],
    *,
    method: str = "batched",
    n: int = 8,
    budget: float | None = None,
    path: str | Path | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.2,
    top_p: float = 1.0,
    seed: int = 0,
    draft_length: int | DraftLengthPolicy | None = None,
    verification: str = "token",
    stop: str | Sequence[str] | None = None,
    unsafe: bool = False,
    grade: Grader | None = None,
    progress: bool | None = None,
) -> Evaluation:
    """Decode n samples of every problem, one problem at a time, and grade them.

    method: one of the table above. budget: seconds after which a problem's rows are cut off; None lets all end, and
        leaves every budget to be scored later.
    path: a file of JSON lines that gets each problem's samples as soon as they are graded. A second call with the same
        settings decodes only the problems that are not in it; they may be others or more than before.
    seed: a problem's rows depend on it, on their index and on the problem's task_id alone; with
        `verification="coupled"` or temperature 0, not on the method either.
    stop: None for HumanEval's stop strings, or none for the mini set, which the embedded pair ends with EOS.
    unsafe: grade also where the sandbox is not complete; recorded in the settings. grade: another grader than the
        sandbox's; it gets (problem, completion) pairs, and its name is recorded.
    progress: a bar over the problems; None shows it in a terminal only. Other options as in `generate`.

    Raises ValueError or TypeError, before anything is decoded, for options and prompts that cannot be honoured and for
    a file of other settings; `sandbox.SandboxUnavailable` where programs cannot be run safely.
    """
    inputs.one_of("method", method, METHODS)
    if stop is None:
        stop = () if all(problem.composition for problem in problems) else CODE_STOPS
    options = {
        "num_return_sequences": inputs.integer("n", n, least=1),
        "max_batch_size": 1 if method == "single" else n,
        "max_new_tokens": inputs.integer("max_new_tokens", max_new_tokens, least=1),
        "temperature": temperature,
        "top_p": top_p,
        "draft_length": 0 if method == "regular" else draft_length,
        "verification": verification,
        "stop": stop,
        "time_budget": None if budget is None else inputs.seconds("budget", budget),
    }
    _check(pair, problems, options)
    grade, grading = _grader(grade, unsafe)
    environment = records.environment()
    seed = inputs.integer("seed", seed, least=None)
    settings = {"method": method, "n": n, "budget": budget, "seed": seed, "grading": grading}
    settings |= _settings(pair, options) | {name: environment[name] for name in TIMED_BY}
    with _store(path, settings, environment) as file:
        done = {} if file is None else dict(file.lines)
        _check_unchanged(path, problems, done)
        missing = [problem for problem in problems if problem.task_id not in done]
        if missing:
            _decode(pair, missing[0], seed, options)  # warms up: what is compiled or probed once is in no row's time
        hidden = None if progress is None else not progress
        count = {"total": len(problems), "initial": len(problems) - len(missing)}
        for problem in tqdm(missing, desc=method, unit="problem", disable=hidden, **count):
            rows = _graded(problem, _decode(pair, problem, seed, options), grade)
            line = {"task_id": problem.task_id, "problem": _digest(problem), "samples": rows}
            if file is not None:
                file.append(line)
            done[problem.task_id] = line
    return Evaluation(_frame([done[problem.task_id] for problem in problems]), settings, environment)


def load_evaluation(path: str | Path) -> Evaluation:
    """What a call of `evaluate` stored in a file, also while it is still running. Raises ValueError for other files."""
    header, lines = sample_file.read(path)
    if not lines:
        raise ValueError(f"{path} holds no problem's samples yet")
    return Evaluation(_frame(lines.values()), header[sample_file.HEADER], header["environment"])


# ------------------------------------------------------------------------------------------------------------ decoding


def _decode(pair: ModelPair, problem: Problem, seed: int, options: dict) -> list[dict]:
    """The rows of one problem and when each was done, not yet graded."""
    clock = Clock()
    synchronize(pair.device)  # nothing left over from before is counted
    started = time.perf_counter()
    out = generate(
        pair,
        problem.prompt,
        seed=_seed(seed, problem),
        on_step=lambda event: clock.tick(event.rows, emitted=1),
        trace="off",
        **options,
    )
    rows = []
    for row, (sequence, text, logprobs, reason) in enumerate(
        zip(out.sequences, out.texts, out.logprobs, out.finish_reasons, strict=True)
    ):
        finished = reason in FINISHED
        rows.append(
            {
                "row": row,
                "finish_seconds": round(clock.last[row] - started, 6) if finished else None,
                "finished": finished,
                "finish_reason": reason,
                "tokens": len(sequence),
                "logprob_sum": float(logprobs.double().sum()),
                "text": text,
            }
        )
    return rows


def _seed(seed: int, problem: Problem) -> int:
    """The problem's own seed: with one for all, row i of every problem would meet the same random numbers."""
    return int.from_bytes(hashlib.sha256(f"{seed} {problem.task_id}".encode()).digest()[:7])


# ------------------------------------------------------------------------------------------------------------- grading


def _grader(grade: Grader | None, unsafe: bool) -> tuple[Grader, str]:
    """How programs are graded, and the name of it for the record."""
    if grade is not None:
        if unsafe:
            raise ValueError("unsafe=True is about the sandbox, and `grade` replaces it; leave one of them out")
        return grade, getattr(grade, "__name__", repr(grade))
    from bass_core.evaluation import sandbox

    if not unsafe:
        sandbox.require_sandbox()
    return partial(sandbox.grade_all, unsafe=unsafe), "unsafe" if unsafe else "sandbox"


def _graded(problem: Problem, rows: list[dict], grade: Grader) -> list[dict]:
    """The rows with `passed` and `graded`; equal texts are run once, unfinished ones not at all."""
    texts = list(dict.fromkeys(row["text"] for row in rows if row["finished"]))
    found = dict(zip(texts, grade([(problem, text) for text in texts]), strict=True)) if texts else {}
    graded = []
    for row in rows:
        passed, why = found[row["text"]] if row["finished"] else (False, "not finished")
        graded.append({**row, "passed": bool(passed), "graded": str(why)})
    return graded


# ------------------------------------------------------------------------------------------------- settings and checks


def _check(pair: ModelPair, problems: Sequence[Problem], options: dict) -> None:
    """Raises ValueError or TypeError for what some later problem would raise for, before the first is decoded."""
    names = [problem.task_id for problem in problems]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"problems must be at least one, each with a task_id of its own, got {len(names)}")
    if pair.tokenizer is None:
        raise ValueError("problems are texts: the pair needs a tokenizer, ModelPair(..., tokenizer=...)")
    vocabulary = pair.target.config.get_text_config().vocab_size
    for problem in problems:
        ids = inputs.prompt_ids(problem.prompt, pair.tokenizer, vocabulary)
        try:
            inputs.check_context(pair, len(ids), options["max_new_tokens"])
        except ValueError as error:
            raise ValueError(f"problem {problem.task_id}: {error}") from None
    generate(pair, problems[0].prompt, **options | {"max_new_tokens": 0})  # checks the options, decodes nothing


def _settings(pair: ModelPair, options: dict) -> dict:
    """What the samples depend on, as it stands in the file."""
    stop = options["stop"]
    return {
        **{name: options[name] for name in ("max_new_tokens", "temperature", "top_p", "verification")},
        "draft_length": repr(as_policy(options["draft_length"])),
        "stop": [stop] if isinstance(stop, str) else list(stop),
        "target": _fingerprint(pair.target),
        "draft": _fingerprint(pair.draft or NgramDrafter()),
        "runs_on": pair.device.type,
    }


def _fingerprint(model: PreTrainedModel | NgramDrafter) -> str:
    """Tells models apart wherever they were loaded from: names, shapes and the first 64 values of all tensors."""
    if isinstance(model, NgramDrafter):
        return f"n-gram {model.longest}-{model.shortest}"
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1)[:64].float().cpu().numpy().tobytes())
    return f"{type(model).__name__} {str(model.dtype).removeprefix('torch.')} {digest.hexdigest()[:12]}"


def _digest(problem: Problem) -> str:
    parts = (problem.prompt, problem.entry_point, problem.test)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _store(
    path: str | Path | None, settings: dict, environment: dict
) -> AbstractContextManager[sample_file.SampleFile | None]:
    return nullcontext() if path is None else sample_file.SampleFile(path, settings, environment)


def _check_unchanged(path: str | Path | None, problems: Sequence[Problem], done: dict[str, dict]) -> None:
    for problem in problems:
        if problem.task_id in done and done[problem.task_id]["problem"] != _digest(problem):
            raise ValueError(
                f"{path} holds samples of another problem named {problem.task_id} (its prompt or tests have changed); "
                "give another path"
            )


def _frame(lines: Iterable[dict]) -> pd.DataFrame:
    """One line per (problem, row), the columns in the order of `scores.COLUMNS`."""
    rows = [{"problem": line["task_id"], **sample} for line in lines for sample in line["samples"]]
    return pd.DataFrame(rows)[[*scores.COLUMNS, "finish_reason", "graded", "text"]].astype({"finish_seconds": float})
