"""Check that decoding with a pair of models is exact. Four checks compare the pair with references.

The references: `transformers.generate` for greedy text; the exact distribution from the target's plain forward pass for
sampled text; draft length 0 for coupled text. In half precision, rows may first diverge only at logits closer than the
numeric noise of transformers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import pandas as pd
import torch
from torch import Tensor

from bass_core import checks, options
from bass_core.loading.model_pair import ASSETS, ModelPair
from bass_core.model.encoder_decoder import FEATURES, made_up
from bass_core.model.transformers_internals import is_quantized
from bass_core.prompts import PromptLike, prompt_list, prompt_of, token_ids
from bass_lab.checks import four_checks
from bass_lab.checks.four_checks import TOKENS, Finding, Subject, name_of_dtype
from bass_lab.checks.switches import rows_beside
from bass_lab.pairs import context_of, in_dtype, name_of
from bass_lab.texts.prompt_sets import prompt_set

FAULTS = (FloatingPointError, ValueError, RuntimeError, MemoryError)  # a check fails if one is raised
SHARES = (0.0, 0.35, 0.8, 0.9, 1.0)  # share of the work done before each check, and at the end
PROMPTS = (  # for models with a tokenizer
    "def quicksort(items):\n",
    "The first thing to know about the history of the city is that",
    "import json\n\n\ndef read_lines(path):\n    with open(path) as file:\n",
    "Q: Why is the sky blue?\nA:",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "Once upon a time, in a small village by the sea,",
    "SELECT name, count(*) FROM",
    "for i in range(10):\n    if i % 2 == 0:\n",
)


@dataclass(frozen=True)
class Check:
    """Result of one check. tested: a description; seconds: duration; details: figures (JSON values)."""

    name: str
    passed: bool
    tested: str
    seconds: float
    details: dict


@dataclass(frozen=True)
class Report:
    """Results of all checks. models: a description of the models."""

    models: str
    checks: list[Check]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def table(self) -> pd.DataFrame:
        """One line per check: check, passed, tested, seconds."""
        frame = pd.DataFrame([asdict(check) for check in self.checks])
        return frame.rename(columns={"name": "check"})[["check", "passed", "tested", "seconds"]]

    def to_json(self) -> str:
        """Return the verdict, the models and the checks as one line of JSON."""
        return json.dumps({"verdict": "PASS" if self.passed else "FAIL"} | asdict(self), allow_nan=False)


def verify(
    pair: ModelPair,
    prompts: str | Sequence[PromptLike] | None = None,
    *,
    max_new_tokens: int = 48,
    samples: int = 6144,
    seed: int = 0,
    compile: str = "auto",
    progress: Callable[[str, float], None] = lambda doing, share: None,
) -> Report:
    """Check that decoding with this pair is exact: greedy, sampled, coupled, and in half precision.

    prompts: texts, conversations, token ids or audio; None takes prompts that fit the pair. With fewer than four,
    shortened copies are added. All are shortened if the context is short. The greedy check adds a prompt of up to 160
    tokens, and prompts on both sides of every window and switch in the target's config. The report lists windows and
    switches beyond 512 tokens as not reached.
    max_new_tokens: per row. samples: rows of each G-test. compile: as in `generate`, and "off" for attention "split".
    progress: receives the current check and the share of the work done, 0 to 1.

    The first three checks run in float32 (a float64 pair: float64). The last check runs in the pair's half precision or
    in bfloat16. A pair of another dtype is copied. Quantized models cannot be cast: load the pair in float32, and the
    first three checks run. Raises ValueError / TypeError for invalid input. An error during a check fails the check.
    """
    prompts, new = _prompts(pair, prompts, checks.integer("max_new_tokens", max_new_tokens, least=1))
    hears = pair.target.main_input_name == FEATURES
    beside, switches = ([], "") if hears else rows_beside(pair.target, prompts, new, context_of(pair))
    checks.integer("samples", samples, least=1000)
    dtype = pair.target.dtype
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    half = dtype if dtype == torch.float16 else torch.bfloat16
    seed = checks.integer("seed", seed, least=None)
    quantized = any(map(is_quantized, pair.models))
    if quantized:
        in_dtype(pair, precise)  # raises before anything runs
    subject = Subject(pair, precise, prompts, new, samples, seed, compile, beside, switches)
    found = []
    for name, check, begins, ends in (
        ("greedy identity", four_checks.greedy, *SHARES[:2]),
        ("sampled law", four_checks.sampled, *SHARES[1:3]),
        ("coupled identity", four_checks.coupled, *SHARES[2:4]),
    ):
        found.append(_run(name, check, subject, progress, begins, ends))
    if not quantized:
        subject = replace(subject, dtype=half)  # frees the first copy before the second is made
        found.append(_run(f"{name_of_dtype(half)} divergences", four_checks.half, subject, progress, *SHARES[3:]))
    names = ", ".join(f"{role} {name_of(model)}" for role, model in (("target", pair.target), ("draft", pair.draft)))
    return Report(f"{names}, on {pair.device}", found)


def _heard(pair: ModelPair, prompts) -> list[Tensor]:
    """Return audio features [channels, frames] per row, noise if `prompts` is None."""
    if prompts is None:
        return [made_up(pair.target, 0, seed).inputs for seed in range(4)]
    config = options.generation_config(pair.target, None)
    return [prompt_of(pair, each, config).source.inputs for each in prompt_list(prompts)]


def _run(
    name: str, check: Callable[[Subject], Finding], subject: Subject, progress: Callable, begins: float, ends: float
) -> Check:
    """Run one check. begins, ends: share of the work done before and after the check."""

    def tell(share: float) -> None:
        progress(f"checking {name}", begins + share * (ends - begins))

    tell(0.0)
    started = time.perf_counter()
    try:
        passed, tested, details = check(replace(subject, tell=tell))
    except FAULTS as error:
        passed, tested, details = False, f"{type(error).__name__}: {error}", {}
    return Check(name, passed, tested, round(time.perf_counter() - started, 3), details)


def _prompts(pair: ModelPair, prompts, new: int) -> tuple[list[Tensor], int]:
    """Return token ids of at least four prompts of different lengths, and the number of new tokens. Prompt and new
    tokens fit into the context."""
    room = context_of(pair)
    if room < TOKENS + 3:
        raise ValueError(f"a context of {room} positions is too short; the checks need {TOKENS + 3}")
    if pair.target.main_input_name == FEATURES:
        return _heard(pair, prompts), int(min(new, room // 2))
    if prompts is None and pair.tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        vocabulary = pair.target.config.get_text_config().vocab_size
        prompts = [torch.randint(vocabulary, (n,), generator=generator) for n in (5, 12, 8, 20, 3, 16, 9, 30)]
    elif prompts is None:
        prompts = list(PROMPTS)
        if pair.target.name_or_path == str(ASSETS / "target"):  # the embedded pair was trained on these functions
            prompts = prompt_set("mini", len(PROMPTS))
    ids = token_ids(pair, prompt_list(prompts))
    new = int(min(new, room // 2))
    ids += [ids[0][: max(1, len(ids[0]) - 2 * index)] for index in range(1, 5 - len(ids))]
    return [row[: max(1, int(min(len(row), room - new - index)))] for index, row in enumerate(ids)], new
