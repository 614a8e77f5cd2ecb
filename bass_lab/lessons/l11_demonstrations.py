"""Lesson 11: requests under load: planned draft lengths, answers in time, and a running server."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import pandas as pd

from bass_core.loading.model_pair import ModelPair
from bass_lab.load import LoadRun, Workload
from bass_lab.load.accuracy import front
from bass_lab.load.result import FINISHED
from bass_lab.serve import NEEDS
from bass_lab.texts.prompt_sets import prompt_set

START = 30.0  # seconds for a server to start


def planned(run: LoadRun) -> float:
    """Return the policy's mean planned draft length over rows and decode steps; 0.0 without a step."""
    decode = run.steps[run.steps.kind == "decode"]
    return float((decode.k * decode.rows).sum() / decode.rows.sum()) if len(decode) else 0.0


def with_deadline(asked: Workload, deadline: float | None) -> Workload:
    """Return the same requests with a deadline in seconds after arrival. None: the server knows no deadline."""
    return Workload(asked.requests.assign(deadline=np.nan if deadline is None else deadline), asked.meta)


def answered_in_time(run: LoadRun, seconds: float) -> float:
    """Return the share of requests with a complete text within `seconds` after arrival."""
    requests = run.requests
    complete = requests.finish_reason.isin(FINISHED)
    return float((complete & (requests.ended - requests.arrived <= seconds)).mean())


def late_long_prompt(pair: ModelPair, short: Sequence[str], tokens: int, new: int, arrives: float) -> Workload:
    """Return a workload: short prompts with `new` new tokens at time 0, and after `arrives` seconds a prompt of about
    `tokens` tokens with four new tokens."""
    ids = [token for text in pair.tokenizer(prompt_set("library"))["input_ids"] for token in text]
    prompts = [*short, pair.tokenizer.decode(ids[:tokens], skip_special_tokens=True)]
    arrived, asked = [0.0] * len(short) + [arrives], [new] * len(short) + [4]
    columns = {"arrived": arrived, "prompt": prompts, "number": range(len(prompts)), "max_new_tokens": asked}
    return Workload(pd.DataFrame(columns | {"deadline": np.nan, "seed": 0}), {"long": tokens})


def within_deadlines(asked: Workload, samples: Mapping[str, pd.DataFrame], deadlines: Sequence[float]) -> pd.DataFrame:
    """Return `front` of the same requests under each deadline (seconds), with a column deadline."""
    parts = [front(with_deadline(asked, seconds), samples).assign(deadline=seconds) for seconds in deadlines]
    return pd.concat(parts, ignore_index=True)


def server_obstacle() -> str | None:
    """Return the reason if a server cannot start here, else None."""
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    return f"Skipped: `bass serve` needs {', '.join(missing)} (pip install '.[serve]')." if missing else None


@contextmanager
def server(pair: ModelPair, places: int) -> Iterator[str]:
    """Run `bass serve` in a thread on a free loopback port, and yield `host:port`. Raises RuntimeError if the server
    does not start."""
    from bass_lab.serve.server import Server, Settings, bound

    listens, where = threading.Event(), {}

    def say(told: dict[str, str]) -> None:
        where.update(told)
        listens.set()

    with bound("127.0.0.1", 0, None) as listening:
        running = Server(pair, Settings("embedded", places), say)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            if not listens.wait(START):
                raise RuntimeError(f"the server did not listen within {START:.0f} s")
            yield where["address"].removeprefix("http://").removesuffix("/v1")
        finally:
            running.should_exit = True
            thread.join(START)
