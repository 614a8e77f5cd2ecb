"""Tokens per second of the embedded pair with each setting of the threads, beside none, two and six busy loops.

    python tests/support/thread_trial.py            # in the repository's root, on an idle machine; some minutes
    python tests/support/thread_trial.py 9 2        # nine turns, beside two busy loops

The settings take turns, each in a process of its own. `settled` is what `bass_lab.threads.settle_threads` makes of the
machine. Wanted: 0.95 of the best other setting on an idle machine, 0.7 beside two and six busy loops.
"""

import os
import statistics
import subprocess
import sys
from contextlib import ExitStack, contextmanager

DECODE = """
import sys, time
import bass_core as bass
from bass_lab.texts.prompt_sets import prompt_set
from bass_lab.threads import settle_threads

pair, prompts = bass.load_pair(dtype="float32"), prompt_set("mini", 8)
if sys.argv[1] == "settled":
    settle_threads(lambda sentence: print(sentence, file=sys.stderr))
for _ in sys.stdin:
    start = time.perf_counter()
    out = bass.generate(pair, prompts, max_new_tokens=64)
    print(sum(map(len, out.sequences)) / (time.perf_counter() - start), flush=True)
"""
SETTINGS = {
    "default": {},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    "one": {"OMP_NUM_THREADS": "1"},
    "settled": {},
}


@contextmanager
def running(*command: str, **options):
    process = subprocess.Popen([sys.executable, "-c", *command], text=True, **options)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def tokens_per_second(worker: subprocess.Popen) -> float:
    worker.stdin.write("\n")
    worker.stdin.flush()
    return float(worker.stdout.readline())


def trial(turns: int, loops: int) -> dict[str, float]:
    """Median tokens per second by setting."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    with ExitStack() as stack:
        for _ in range(loops):
            stack.enter_context(running("while True: pass"))
        found: dict[str, list[float]] = {name: [] for name in SETTINGS}
        workers = {}
        for name, variables in SETTINGS.items():
            options = {"env": own | variables, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            workers[name] = stack.enter_context(running(DECODE, name, **options))
            tokens_per_second(workers[name])  # not counted
        for _ in range(turns):
            for name, worker in workers.items():
                found[name].append(tokens_per_second(worker))
    return {name: statistics.median(values) for name, values in found.items()}


def main(turns: int = 7, *loads: int) -> None:
    for load in loads or (0, 2, 6):
        speeds = trial(turns, load)
        best = max(speed for name, speed in speeds.items() if name != "settled")
        told = ", ".join(f"{name} {speed:.0f}" for name, speed in speeds.items())
        print(f"{load} busy loops: {told} tokens/s; settled {speeds['settled'] / best:.2f} of the best", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
