"""Soak test of a server: python -m bass_lab.serve.soak --seconds 600 --load 0.8 (needs httpx).

Sends greedy requests to `bass serve` at random times, at a share of the measured capacity. Some clients disconnect
early. Checks that every answer is correct, no answer is lost, the queue stays bounded, and memory grows by less than 1%
after the first third. The last line is a JSON document. Exit code 1: a check failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np

from bass_lab.texts.prompt_sets import prompt_set

PLACES, QUEUE, NEW = 8, 32, 48
VANISHING = 0.15  # share of clients that disconnect early
FLAT = 0.01  # permitted relative change of memory after the first third


@dataclass
class Log:
    """Measurements: requests by outcome, seconds of answered requests, memory (seconds, pages), maximum rows."""

    outcomes: Counter = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    most_rows: int = 0


async def ask(client: httpx.AsyncClient, prompt: str) -> httpx.Response:
    return await client.post("/completions", json={"prompt": prompt, "max_tokens": NEW, "temperature": 0})


async def request(client: httpx.AsyncClient, prompt: str, text: str, leaves: float | None, log: Log) -> None:
    """Send a request and log the outcome. leaves: seconds until the client disconnects (None: never)."""
    began = time.monotonic()
    try:
        answer = await asyncio.wait_for(ask(client, prompt), leaves)
    except TimeoutError:
        log.outcomes["vanished"] += 1
    except httpx.HTTPError:
        log.outcomes["lost"] += 1
    else:
        if answer.status_code == 429:
            log.outcomes["refused"] += 1
        elif answer.status_code != 200:
            log.outcomes["failed"] += 1
        else:
            log.outcomes["right" if answer.json()["choices"][0]["text"] == text else "wrong"] += 1
            log.seconds.append(time.monotonic() - began)


async def watch(client: httpx.AsyncClient, process: int, began: float, log: Log) -> None:
    while True:
        log.most_rows = max(log.most_rows, (await client.get("../health")).json()["rows"])
        resident = int(Path(f"/proc/{process}/statm").read_text().split()[1])
        log.memory.append((time.monotonic() - began, resident))
        await asyncio.sleep(0.5)


async def capacity(client: httpx.AsyncClient, prompts: list[str], seconds: float) -> float:
    """Return the requests per second with all batch slots occupied."""
    done, ends = 0, time.monotonic() + seconds

    async def work(number: int) -> None:
        nonlocal done
        while time.monotonic() < ends:
            await ask(client, prompts[(number + done) % len(prompts)])
            done += 1

    began = time.monotonic()
    await asyncio.gather(*(work(number) for number in range(PLACES)))
    return done / (time.monotonic() - began)


async def soak(address: str, process: int, seconds: float, load: float, seed: int) -> dict:
    generator, prompts, log = random.Random(seed), prompt_set("mini", 64), Log()
    async with httpx.AsyncClient(base_url=address, timeout=120, trust_env=False, limits=httpx.Limits()) as client:
        texts = {each: (await ask(client, each)).json()["choices"][0]["text"] for each in prompts}  # alone
        most = await capacity(client, prompts, min(20.0, seconds / 6))
        began, clients = time.monotonic(), set()
        watching = asyncio.create_task(watch(client, process, began, log))
        while time.monotonic() - began < seconds:
            await asyncio.sleep(generator.expovariate(load * most))
            prompt = generator.choice(prompts)
            leaves = generator.uniform(0, PLACES / most) if generator.random() < VANISHING else None
            task = asyncio.create_task(request(client, prompt, texts[prompt], leaves, log))
            clients.add(task)
            task.add_done_callback(clients.discard)
        await asyncio.gather(*clients)
        await asyncio.sleep(1)
        watching.cancel()
        left = (await client.get("../health")).json()["rows"]
    return report(log, seconds, most, left)


def report(log: Log, seconds: float, most: float, left: int) -> dict:
    settled = np.array([size for at, size in log.memory if at > seconds / 3], dtype=float)
    half = len(settled) // 2
    growth = float(np.median(settled[half:]) / np.median(settled[:half]) - 1)
    checks = {
        "every answer is right": not {"wrong", "failed", "lost"} & log.outcomes.keys() and log.outcomes["right"] > 0,
        "no row is left": left == 0,
        "the queue is bounded": log.most_rows <= PLACES + QUEUE,
        "memory is flat": abs(growth) < FLAT,
    }
    p50, p99 = (round(float(each), 3) for each in np.percentile(log.seconds, [50, 99]))
    found = {"seconds": seconds, "capacity_per_s": round(most, 2), "outcomes": dict(log.outcomes)}
    found |= {"p50_s": p50, "p99_s": p99, "most_rows": log.most_rows, "memory_growth": round(growth, 4)}
    return found | {"checks": checks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--load", type=float, default=0.8, help="share of the measured capacity")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("soak: stopped by SIGTERM"))  # ends the server, too
    command = [sys.executable, "-m", "bass_lab.cli", "serve", "--port", "0", "--json"]
    command += ["--batch-size", str(PLACES), "--queue", str(QUEUE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            address = json.loads(server.stdout.readline())["address"]
            found = asyncio.run(soak(f"{address}/", server.pid, asked.seconds, asked.load, asked.seed))
        finally:
            server.terminate()
        found["checks"]["it ends with code 0"] = server.wait(60) == 0
    print(f"p50 {found['p50_s']} s, p99 {found['p99_s']} s at {asked.load:g} of {found['capacity_per_s']} requests/s")
    print(json.dumps(found))
    sys.exit(not all(found["checks"].values()))


if __name__ == "__main__":
    main()
