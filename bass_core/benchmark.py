"""How fast is it here? Interleaved repeats of regular and speculative decoding, with paired ratios and intervals.

Every repeat runs all methods one after the other on the same prompts with the same limits, so that a slow moment of the
machine slows all of them; a speed-up is the ratio within a repeat. The baseline is this engine with draft length 0;
`transformers.generate` is quoted beside it.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig

from bass_core import inputs
from bass_core.engine import Session
from bass_core.generation import generate
from bass_core.models import ModelPair

METHODS = ("transformers", "regular", "speculative")


@dataclass(frozen=True)
class Comparison:
    """runs: one line per (repeat, method): repeat, method, seconds, tokens, tokens_per_second, alpha, acceptance_rate,
    tokens_per_step."""

    runs: pd.DataFrame

    def ratio(self, method: str = "speculative", to: str = "regular") -> tuple[float, float, float]:
        """Speed of one method over another: median of the paired ratios, and its 95% interval (bootstrap)."""
        seconds = self.runs.pivot(index="repeat", columns="method", values="seconds")
        ratios = (seconds[to] / seconds[method]).to_numpy()
        resamples = np.random.default_rng(0).choice(ratios, (10_000, len(ratios)))
        low, high = np.quantile(np.median(resamples, axis=1), [0.025, 0.975])
        return float(np.median(ratios)), float(low), float(high)

    def summary(self) -> pd.DataFrame:
        """One line per method: medians of tokens/s, alpha, tokens per step; speed over regular decoding, interval."""
        lines = []
        for method, runs in self.runs.groupby("method", sort=False):
            middle, low, high = self.ratio(method)
            lines.append(
                {
                    "method": method,
                    "tokens_per_second": runs.tokens_per_second.median(),
                    "over_regular": middle,
                    "low": low,
                    "high": high,
                    "alpha": runs.alpha.median(),
                    "tokens_per_step": runs.tokens_per_step.median(),
                }
            )
        return pd.DataFrame(lines)


def compare(
    pair: ModelPair,
    prompts: Sequence[str],
    *,
    methods: Sequence[str] = METHODS,
    repeats: int = 7,
    max_new_tokens: int = 96,
    temperature: float = 0.0,
    draft_length: int = 5,
    verification: str = "token",
    progress: Callable[[str], None] = lambda message: None,
) -> Comparison:
    """Time the methods on the same prompts, one batch, EOS switched off so that all emit the same number of tokens.

    repeats: interleaved, after one that warms up and is not counted.
    """
    for method in methods:
        inputs.one_of("methods", method, METHODS)
    ids = _token_ids(pair, prompts)
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "eos_token_id": ()}
    decode = {
        "transformers": lambda seed: _transformers(pair, ids, max_new_tokens, temperature, seed),
        "regular": lambda seed: generate(pair, ids, draft_length=0, seed=seed, **options),
        "speculative": lambda seed: generate(
            pair, ids, draft_length=draft_length, verification=verification, seed=seed, **options
        ),
    }
    lines = []
    for repeat in range(repeats + 1):
        for method in methods:
            progress(f"repeat {repeat} of {repeats}: {method}")
            seconds, out = _timed(pair.device, decode[method], repeat)
            line = {"repeat": repeat, "method": method, "seconds": seconds, "tokens": len(ids) * max_new_tokens}
            names = ("alpha", "acceptance_rate", "tokens_per_step")
            summary = {} if method == "transformers" else out.trace.summary()
            lines.append(line | {name: summary.get(name, float("nan")) for name in names})
    runs = pd.DataFrame(lines).query("repeat > 0")
    runs = runs.assign(tokens_per_second=runs.tokens / runs.seconds)
    return Comparison(runs)


def identical_rows(pair: ModelPair, prompts: Sequence[str], *, max_new_tokens: int = 96, draft_length: int = 5) -> int:
    """Rows of a greedy speculative batch whose every token equals `transformers.generate`'s for the row alone."""
    ids = _token_ids(pair, prompts)
    found = generate(pair, ids, max_new_tokens=max_new_tokens, draft_length=draft_length, eos_token_id=()).sequences
    alone = [_transformers(pair, [row], max_new_tokens, 0.0, 0)[0] for row in ids]
    return sum(torch.equal(a, b) for a, b in zip(found, alone, strict=True))


def _token_ids(pair: ModelPair, prompts: Sequence[str]) -> list[Tensor]:
    vocabulary = pair.target.config.get_text_config().vocab_size
    return [inputs.prompt_ids(prompt, pair.tokenizer, vocabulary) for prompt in prompts]


def _timed(device: torch.device, decode: Callable, seed: int) -> tuple[float, object]:
    _synchronize(device)
    started = time.perf_counter()
    out = decode(seed)
    _synchronize(device)
    return time.perf_counter() - started, out


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.inference_mode()
def _transformers(pair: ModelPair, ids: Sequence[Tensor], new: int, temperature: float, seed: int) -> list[Tensor]:
    """`transformers.generate` on the left-padded batch: the generated ids per row."""
    width = max(map(len, ids))
    padded = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in ids]).to(pair.device)
    mask = torch.stack([torch.arange(width) >= width - len(row) for row in ids]).long().to(pair.device)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    config = GenerationConfig(max_new_tokens=new, pad_token_id=0, **sampling)
    before, pair.target.generation_config = pair.target.generation_config, GenerationConfig()  # its EOS would fill in
    try:
        torch.manual_seed(seed)
        out = pair.target.generate(padded, attention_mask=mask, generation_config=config)
    finally:
        pair.target.generation_config = before
    return list(out[:, width:].cpu())


def environment() -> dict[str, str | int]:
    """Where a figure was measured: device, processor, cores, versions, commit."""
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else _processor(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "bass": version("bass-hands-on") if _installed() else "not installed",
        "commit": _commit(),
    }


def _processor() -> str:
    """The processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _installed() -> bool:
    try:
        version("bass-hands-on")
    except ModuleNotFoundError:
        return False
    return True


def _commit() -> str:
    """The repository's commit, with + if the tree differs from it; empty outside a repository."""
    run = {"capture_output": True, "text": True, "cwd": Path(__file__).parent}
    try:
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], **run).stdout.strip()
        changed = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], **run).stdout.strip()
    except OSError:
        return ""
    return head + ("+" if head and changed else "")


def step_overhead(pair: ModelPair, prompts: Sequence[str], *, max_new_tokens: int = 96, **options) -> float:
    """Share of the decode steps' time that is spent outside the two models' forward passes (on a CPU: wall time).

    options: as in `generate`. Prefill is left out of both.
    """
    started, inside, steps = [], [], []
    models = [pair.target, pair.draft]
    hooks = [model.register_forward_pre_hook(lambda *_: started.append(time.perf_counter())) for model in models]
    hooks += [
        model.register_forward_hook(lambda *_: inside.append(time.perf_counter() - started[-1])) for model in models
    ]
    try:
        with Session(pair, max_batch_size=len(prompts), eos_token_id=(), **options) as session, session.prepared():
            for prompt in prompts:
                session.submit(prompt, max_new_tokens=max_new_tokens)
            session.step()  # prefill
            inside.clear()
            while not session.idle:
                before = time.perf_counter()
                session.step()
                steps.append(time.perf_counter() - before)
    finally:
        for hook in hooks:
            hook.remove()
    return 1 - sum(inside) / sum(steps)
