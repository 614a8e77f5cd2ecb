"""Is decoding exact for *these* models? Four checks of a pair, each against something outside the engine.

Greedy text is compared with `transformers.generate`, sampled text with the exact law of the target's own forward pass,
coupled text with itself without speculation. In half precision every first divergence must sit on logits closer than
transformers' own numeric noise.
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

FAULTS = (FloatingPointError, ValueError, RuntimeError, MemoryError)  # raised during a check, they fail it
SHARES = (0.0, 0.35, 0.8, 0.9, 1.0)  # of the time, before each check and after the last
PROMPTS = (  # for models that come with a tokenizer
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
    """One check: whether it passed, what was tested in words, seconds it took, and its figures (JSON values)."""

    name: str
    passed: bool
    tested: str
    seconds: float
    details: dict


@dataclass(frozen=True)
class Report:
    """models: what was checked, in words. checks: what was found."""

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
        """Return the verdict and all of the above as one line of JSON."""
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
    """Check that decoding this pair is exact: greedy, sampled, coupled, and in half precision.

    prompts: texts, conversations, token ids or what a target hears; None takes some that suit the pair. Fewer than four
    are joined by shortened ones; all are shortened where the context is short. The greedy check adds one of up to 160
    tokens, and others on both sides of every window and switch that the target's configuration names; the report says
    which lie beyond 512 tokens and were not reached.
    max_new_tokens: per row. samples: rows of each G-test. compile: as in `generate`; attention "split" is checked
    without. progress: gets what is checked, and the share of the work done, 0 to 1.

    The first three checks run in float32 (float64 where the pair is), the last in the pair's half precision or
    bfloat16, on copies where the dtype differs. Quantized models cannot be cast: there the first three checks run, of a
    pair loaded in float32. Raises ValueError / TypeError for input that cannot be decoded; what is raised during a
    check fails it.
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
        subject = replace(subject, dtype=half)  # and the first copy is gone before the second is made
        found.append(_run(f"{name_of_dtype(half)} divergences", four_checks.half, subject, progress, *SHARES[3:]))
    names = ", ".join(f"{role} {name_of(model)}" for role, model in (("target", pair.target), ("draft", pair.draft)))
    return Report(f"{names}, on {pair.device}", found)


def _heard(pair: ModelPair, prompts) -> list[Tensor]:
    """What a target that hears is given: features [channels, frames], noise where there are no prompts."""
    if prompts is None:
        return [made_up(pair.target, 0, seed).inputs for seed in range(4)]
    config = options.generation_config(pair.target, None)
    return [prompt_of(pair, each, config).source.inputs for each in prompt_list(prompts)]


def _run(
    name: str, check: Callable[[Subject], Finding], subject: Subject, progress: Callable, begins: float, ends: float
) -> Check:
    """begins, ends: the share of the work that is done before and after."""

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
    """Return token ids of four prompts or more, and how many tokens to generate, such that the context holds both.
    Lengths differ, so that the batch stays ragged."""
    room = context_of(pair)
    if room < TOKENS + 3:
        raise ValueError(f"a context of {room} positions is too short for the checks; they need {TOKENS + 3}")
    if pair.target.main_input_name == FEATURES:
        return _heard(pair, prompts), int(min(new, room // 2))
    if prompts is None and pair.tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        vocabulary = pair.target.config.get_text_config().vocab_size
        prompts = [torch.randint(vocabulary, (n,), generator=generator) for n in (5, 12, 8, 20, 3, 16, 9, 30)]
    elif prompts is None:
        prompts = list(PROMPTS)
        if pair.target.name_or_path == str(ASSETS / "target"):  # the embedded pair knows little but such functions
            prompts = prompt_set("mini", len(PROMPTS))
    ids = token_ids(pair, prompt_list(prompts))
    new = int(min(new, room // 2))
    ids += [ids[0][: max(1, len(ids[0]) - 2 * index)] for index in range(1, 5 - len(ids))]
    return [row[: max(1, int(min(len(row), room - new - index)))] for index, row in enumerate(ids)], new
