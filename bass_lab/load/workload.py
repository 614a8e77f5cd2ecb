"""Workloads: tables of requests, drawn from an arrival process or loaded from a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from bass_core import checks
from bass_core.environment import write_whole
from bass_lab.texts.prompt_sets import Prompt, label, prompt_set

HEADER = "workload"  # field of a file's first line, with the workload's meta
CHARACTERS = 4  # approximate characters per token, for files with prompt_tokens only
SEEDS = 2**31


@dataclass(frozen=True)
class Poisson:
    """Bursts of requests at the times of a Poisson process. rate: requests per second. burst: mean burst size of a
    geometric distribution; 1 gives Poisson arrivals."""

    rate: float
    burst: float = 1.0

    def __post_init__(self):
        if not (0 < self.rate < np.inf and 1 <= self.burst < np.inf):
            raise ValueError(f"needs rate > 0 requests per second and burst >= 1, got {self}")

    def times(self, count: int, generator: np.random.Generator) -> np.ndarray:
        """Return the arrival times of the first `count` requests in seconds, in order: [count]."""
        sizes = generator.geometric(1 / self.burst, size=count)  # `count` bursts are at least enough
        moments = generator.exponential(self.burst / self.rate, size=count).cumsum()
        return np.repeat(moments, sizes)[:count]


@dataclass(frozen=True, eq=False)
class Workload:
    """requests: a line per request, ordered by arrival: arrived (seconds), prompt (text or conversation), number (of
    the prompt in the set), max_new_tokens, deadline (seconds after arrival; NaN: none), seed. meta: the source."""

    requests: pd.DataFrame
    meta: dict = field(default_factory=dict)

    def __post_init__(self):
        requests = self.requests.reset_index(drop=True)
        if requests.empty:
            raise ValueError("a workload needs at least one request; the table is empty")
        arrived = requests.arrived.to_numpy(dtype=float)
        if not (np.isfinite(arrived).all() and arrived[0] >= 0 and (np.diff(arrived) >= 0).all()):
            raise ValueError("arrived must be seconds >= 0 in increasing order")
        for name, least in (("max_new_tokens", 1), ("number", 0), ("seed", None)):
            for value in requests[name]:
                checks.integer(name, value, least=least)
        if (requests.deadline.to_numpy(dtype=float) <= 0).any():
            raise ValueError("deadline must be seconds > 0, or empty for requests without a deadline")
        object.__setattr__(self, "requests", requests.astype({"arrived": float, "deadline": float}))

    @classmethod
    def draw(
        cls,
        arrivals: Poisson,
        count: int,
        *,
        prompts: str | Path | Sequence[Prompt] = "mini",
        max_new_tokens: int | Sequence[int] = 128,
        deadline: float | None = None,
        seed: int = 0,
    ) -> Workload:
        """Draw `count` requests. prompts: the name of a prompt set, a file, or prompts. Each request draws a prompt.

        max_new_tokens: an integer, or values to draw from. deadline: seconds after each arrival. The same seed draws
        the same requests at every rate.
        """
        checks.integer("count", count, least=1)
        asked, arriving = (np.random.default_rng([checks.integer("seed", seed), part]) for part in (0, 1))
        texts, named = _prompts(prompts)
        numbers = asked.integers(len(texts), size=count)
        lengths = [max_new_tokens] if np.ndim(max_new_tokens) == 0 else list(max_new_tokens)
        requests = {
            "arrived": arrivals.times(count, arriving),
            "prompt": [texts[number] for number in numbers],
            "number": numbers,
            "max_new_tokens": np.asarray(lengths)[asked.integers(len(lengths), size=count)],
            "deadline": np.nan if deadline is None else checks.seconds("deadline", deadline),
            "seed": asked.integers(SEEDS, size=count),
        }
        return cls(pd.DataFrame(requests), {"arrivals": repr(arrivals), "prompts": named, "seed": seed})

    @property
    def rate(self) -> float:
        """Mean requests per second; infinite if all arrive at once."""
        last = self.requests.arrived.iloc[-1]
        return len(self) / last if last else np.inf

    def at_rate(self, rate: float) -> Workload:
        """Return the same requests at another arrival rate. Raises ValueError if all arrive at once."""
        if not (0 < rate < np.inf and self.rate < np.inf):
            raise ValueError(f"needs a rate > 0 and arrivals at different times, got {rate} for {self!r}")
        arrived = self.requests.arrived * (self.rate / rate)
        return Workload(self.requests.assign(arrived=arrived), self.meta | {"rate": rate})

    def __len__(self) -> int:
        return len(self.requests)

    def __repr__(self) -> str:
        tokens = self.requests.max_new_tokens.mean()
        return f"Workload({len(self)} requests at {self.rate:.3g}/s, up to {tokens:.4g} tokens each on average)"

    def save(self, path: str | Path) -> None:
        """Write as JSON lines: meta, then a request per line."""
        lines = [{HEADER: self.meta}, *self.requests.to_dict("records")]
        plain = [{name: _plain(value) for name, value in line.items()} for line in lines]
        write_whole(path, "".join(json.dumps(line, allow_nan=False) + "\n" for line in plain))

    @classmethod
    def load(cls, path: str | Path, *, prompts: str | Path | Sequence[Prompt] = "mini", seed: int = 0) -> Workload:
        """Load a file of `save`, or a recorded list of arrivals as JSON lines or .csv.

        Required columns: arrived (seconds, dates or times of day, in any order) and max_new_tokens. Without the column
        `prompt`, the prompt is taken from `prompts` by the column `number`, or else by the length nearest to
        prompt_tokens (at four characters per token), or else drawn. Raises ValueError naming the file and the fault.
        """
        path = Path(path)
        try:
            if path.suffix == ".csv":
                meta, found = None, pd.read_csv(path)
                if "max_new_tokens" in found:
                    found["max_new_tokens"] = pd.to_numeric(found.max_new_tokens)  # strings if a value is no number
            else:
                lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
                own = bool(lines) and isinstance(lines[0], dict) and HEADER in lines[0]
                meta, found = (lines[0][HEADER], pd.DataFrame(lines[1:])) if own else (None, pd.DataFrame(lines))
            for name in ("arrived", "max_new_tokens", *{"prompt"}.intersection(found)):
                if name not in found:
                    raise ValueError(f"{name} is missing; the columns are {', '.join(map(str, found)) or 'none'}")
                if (missing := found[name].isna().to_numpy()).any():
                    raise ValueError(f"request {missing.argmax()} has no {name} (requests count from 0)")
            if meta is None:
                found, meta = _from_the_first(found), {"recorded": path.name}
            return cls(_completed(found, prompts, seed), meta)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} holds no workload: {error}") from error


def _prompts(prompts: str | Path | Sequence[Prompt]) -> tuple[list[Prompt], str]:
    """Return the prompts and their name."""
    if isinstance(prompts, str | Path):
        return prompt_set(prompts), label(prompts)
    if not len(prompts):
        raise ValueError("prompts is empty; give at least one prompt")
    return list(prompts), f"{len(prompts)} prompts"


def _from_the_first(found: pd.DataFrame) -> pd.DataFrame:
    """Return a recorded list sorted by arrival, with arrival times in seconds since the first."""
    arrived = found.arrived
    if not pd.api.types.is_numeric_dtype(arrived):
        dated = arrived.astype(str).str.contains("-").any()
        try:
            moments = pd.to_datetime(arrived, format="ISO8601") if dated else pd.to_timedelta(arrived)
        except (ValueError, TypeError) as error:
            said = f"arrived must be seconds, ISO dates or times of day, got {arrived.iloc[0]!r} in the first line"
            raise ValueError(said) from error
        arrived = (moments - moments.min()).dt.total_seconds()
    found = found.assign(arrived=arrived - arrived.min())
    return found.sort_values("arrived", kind="stable", ignore_index=True)


def _completed(found: pd.DataFrame, prompts: str | Path | Sequence[Prompt], seed: int) -> pd.DataFrame:
    """Return the table of a workload, with the columns missing from a file filled in."""
    generator, drawn = np.random.default_rng(seed), {"deadline": np.nan, "seed": 0}
    if "prompt" not in found:
        texts, _ = _prompts(prompts)
        numbers = generator.integers(len(texts), size=len(found))
        drawn["seed"] = generator.integers(SEEDS, size=len(found))
        if "number" in found:
            numbers = [checks.integer("number", number) for number in found.number]
            if max(numbers) >= len(texts):
                raise ValueError(f"number {max(numbers)} is out of range for {len(texts)} prompts (counted from 0)")
        elif "prompt_tokens" in found:
            sizes = np.array([len(json.dumps(text)) for text in texts]) / CHARACTERS
            numbers = [int(np.abs(sizes - wanted).argmin()) for wanted in found.prompt_tokens]
        found = found.assign(number=numbers, prompt=[texts[number] for number in numbers])
    if "number" not in found:
        found = found.assign(number=pd.factorize(found.prompt.map(json.dumps))[0])
    found = found.assign(**{name: value for name, value in drawn.items() if name not in found})
    return found[["arrived", "prompt", "number", "max_new_tokens", "deadline", "seed"]]


def _plain(value: object) -> object:
    """Return a value for JSON: numpy numbers as Python numbers, NaN as None."""
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and np.isnan(value) else value
