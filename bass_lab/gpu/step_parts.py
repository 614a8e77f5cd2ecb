"""Two stages of `make gpu` at real sizes: the price of a pass by its number of tokens, and a step kernel by kernel.

*passes*: captured passes of draft and target over 1 to 16 tokens of each row. A draft pass over many tokens is the
price of drafting k tokens in one pass (PARD: An et al. 2025) instead of k passes. *trace*: the kernels of regular and
speculative steps, with launches and milliseconds per step.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from bass_core.execution import Execution
from bass_core.gpu.graphs import captured
from bass_core.loading.model_pair import ModelPair
from bass_core.model.runner import Runner
from bass_lab.gpu.command import PartFile
from bass_lab.gpu.decoding import CONTEXT, NEW, dummy_pair, prompts_of
from bass_lab.measure.plan import DRY, REGULAR, PlannedMethod, batched, runnable
from bass_lab.measure.profiling import profile
from bass_lab.measure.repeated_way import WARM_UPS, RepeatedWay

TOKENS = {"draft": (1, 2, 4, 8, 16), "target": (1, 5, 6, 7, 8, 9, 13, 17)}  # of each row
TIMED = 50  # replays of a pass
LARGEST = 20  # kernels of a phase that a line lists
STEPS = {8: 7, 32: 6, 2: 3}  # draft length by batch size; 2 is for rehearsals


def passes(folder: Path, rehearse: bool) -> PartFile:
    """Time a pass of each model by the number of tokens, for batch 8 and 32."""
    pair, part = _pair(rehearse), PartFile(folder / "passes.jsonl")
    for batch in (2,) if rehearse else (8, 32):
        for name, model in (("draft", pair.draft), ("target", pair.target)):
            with torch.inference_mode(), _filled(model, batch, rehearse) as runner:
                for tokens in TOKENS[name][: 2 if rehearse else None]:

                    def timed(runner: Runner = runner, batch: int = batch, tokens: int = tokens) -> dict:
                        found = list(_seconds(runner, batch, tokens, rehearse))
                        return {"rows": batch, "tokens": tokens, "ms": 1e3 * statistics.median(found)}

                    part.case(f"{name}, {batch} rows, {tokens} tokens", timed)
    return part


def _pair(rehearse: bool) -> ModelPair:
    return dummy_pair(DRY.shape, "cpu") if rehearse else dummy_pair("paper-7.8b", "cuda")


def _filled(model, batch: int, rehearse: bool) -> Runner:
    """Return a runner with `batch` rows of a prompt's length in its cache."""
    how = Execution(compiled=not rehearse, recorded=not rehearse)
    runner = Runner(model, "pad" if rehearse else "ragged", batch, layers=how.layers(model.device))
    runner.cache.grow(_keys(rehearse) + max(map(max, TOKENS.values())))
    prompt = torch.randint(3, model.config.vocab_size, (batch, _keys(rehearse)), device=model.device)
    runner.feed_last(prompt, [prompt.shape[1]] * batch, prompt.shape[1])
    return runner


def _keys(rehearse: bool) -> int:
    return 16 if rehearse else CONTEXT + NEW // 2


def _seconds(runner: Runner, batch: int, tokens: int, rehearse: bool) -> Iterator[float]:
    """Yield the seconds of replays of a pass over `tokens` tokens of each row."""
    device, keys = runner.model.device, _keys(rehearse)
    ids = torch.randint(3, runner.model.config.vocab_size, (batch, tokens), device=device)
    starts, counts = torch.full((batch,), keys, device=device), torch.full((batch,), tokens, device=device)
    longest = runner.max_kv_length(keys + tokens)
    with runner.prepared():
        if rehearse:
            runner.feed(ids, starts, counts, max_kv_length=longest)
            yield 0.0
            return
        call = captured(device)(lambda: runner.feed(ids, starts, counts, max_kv_length=longest))
        for _ in range(TIMED):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            yield begin.elapsed_time(end) / 1e3


def trace(folder: Path, rehearse: bool) -> PartFile:
    """List the kernels of a regular and of a speculative step, for batch 8 and 32."""
    pair, part = _pair(rehearse), PartFile(folder / "trace.jsonl")
    for batch in (2,) if rehearse else (8, 32):
        prompts = prompts_of(pair, batch, *((24, 6) if rehearse else ()))
        for way in (batched(0.8, STEPS[batch]), REGULAR):

            def listed(way: PlannedMethod = way, prompts: Sequence[torch.Tensor] = prompts) -> dict:
                return _kernels(pair, way, prompts, 12 if rehearse else 64)

            part.case(f"{way.method}, {batch} rows", listed)
    return part


def _kernels(pair: ModelPair, way: PlannedMethod, prompts: Sequence[torch.Tensor], new: int) -> dict:
    """Return the milliseconds per step by phase, and the largest kernels of each phase, for steps of all rows."""
    runs = RepeatedWay(pair, runnable(way, pair.device), prompts, None, new)
    try:
        runs.warm_up()
        for _ in range(WARM_UPS):  # the first run under a profiler captures the graphs that it needs
            with profile() as found:
                runs.once()
    finally:
        runs.close()
    steps = found.steps[(found.steps.kind == "decode") & (found.steps.rows == len(prompts))]
    steps = steps[steps.k == steps.k.max()]
    kernels = found.kernels[found.kernels.step.isin(steps.index)]
    sums = kernels.groupby(["phase", "name"]).duration_ms.agg(["size", "sum"]) / len(steps)
    largest = sums.sort_values("sum", ascending=False).groupby("phase").head(LARGEST).reset_index()
    spans = found.spans[found.spans.step.isin(steps.index)].groupby("phase")
    phases = spans[["duration_ms", "busy_ms", "gap_ms"]].mean().to_dict("index")
    lines = [
        {"phase": phase, "kernel": name[:90], "launches": round(size, 2), "ms": round(taken, 4)}
        for phase, name, size, taken in largest.itertuples(index=False)
    ]
    return {"rows": len(prompts), "k": int(steps.k.max()), "steps": len(steps), "phases": phases, "kernels": lines}
