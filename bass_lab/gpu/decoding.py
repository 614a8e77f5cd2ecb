"""`make bench-gpu`: time decoding at real sizes on a GPU, relative to the hardware's limits and to regular decoding.

Models of real shapes with dummy weights decode with forced acceptance (`SyntheticAcceptance`), so nothing is downloaded
and any α is possible. Every line has the field `synthetic`. Everything else is real: passes over all weights, a ragged
cache, verification, the loop. Exactness is checked after the timing: the embedded pair decodes with the same settings
(compiled layers, CUDA graphs), and the verdict is added to every line. Lines are written before this check, so a
failure loses no measurement.

Every repeat of a method is followed by a repeat of regular decoding within a minute. A speed-up is the ratio of the
two. Every repeat draws other accepted lengths; latencies and tokens per second are means over the draws. The limits (a
copy's bandwidth, a matrix product's rate) are measured in the same run. `Clock.latencies` defines latencies, and
`roofline.utilisation` defines utilisation.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from bass_core.environment import synchronize
from bass_core.generation import generate
from bass_core.loading.model_pair import ModelPair, load_pair
from bass_core.policies.costs import CostModel
from bass_core.prompts import token_ids
from bass_lab.gpu import command
from bass_lab.gpu.command import DeviceLost, Lines
from bass_lab.measure import records, roofline
from bass_lab.measure.benchmark import greedy_alone
from bass_lab.measure.modelled_costs import modelled_costs
from bass_lab.measure.plan import DRY, PEER, PEERS, PROBE, REGULAR, Group, PlannedMethod, plan, runnable
from bass_lab.measure.ratios import Ratio, counted_repeats, half_width
from bass_lab.measure.repeated_way import Repeat, RepeatedWay
from bass_lab.measure.roofline import Device, Roofline, StepWork, measure_device, utilisation
from bass_lab.named_pairs import named_pair
from bass_lab.texts.prompt_sets import prompt_set

CONTEXT, SPREAD = 512, 128  # mean tokens of a prompt, and the largest deviation
NEW = 128  # tokens per row
PAPER_MS = 5.8  # mean ms per token of the paper's batched decoding: 7.8B, batch 8, an A100

KINDS = ("gpu_speed", "gpu_failure")
UNCHECKED = {"passed": None}


def beyond(roof: CostModel, steps: pd.DataFrame) -> dict[str, float]:
    """Return the excess of measured steps over these costs: seconds per pass of either model, per verified token and
    per step, as arguments of `modelled_costs`. Medians over steps."""
    times = {name: (name, "first") for name in ("draft_ms", "verify_ms", "other_ms")}
    decode = steps[steps.kind == "decode"].groupby("step").agg(
        batch=("row", "size"), k=("drafted", "max"), keys=("kv_length", "mean"), **times
    )  # fmt: skip
    keys = decode["keys"] - 1  # the last token is not in the cache yet
    verifying = decode.verify_ms / 1e3 - roof.target(decode.batch, decode.k + 1, keys)
    launch = max(float(verifying[decode.k == 0].median()), 0.0)
    drafting = decode[decode.k > 0]
    tokens = (verifying[decode.k > 0] - launch) / drafting.k
    passes = (drafting.draft_ms / 1e3 - roof.draft(drafting.batch, drafting.k, drafting["keys"] - 1)) / drafting.k
    return {
        "target_launch": launch,
        "target_token": max(float(tokens.median()), 0.0),
        "draft_launch": max(float(passes.median()), 0.0),
        "overhead": float(drafting.other_ms.median() / 1e3),
    }


def _one_after_the_other(runs: Sequence[Repeat]) -> pd.DataFrame:
    """Return the steps of several runs with unique step numbers."""
    return pd.concat([run.steps.assign(step=run.steps.step + 10**6 * number) for number, run in enumerate(runs)])


def prompts_of(pair: ModelPair, batch: int, context: int = CONTEXT, spread: int = SPREAD) -> list[Tensor]:
    """Return prompts of random ids with evenly spread lengths around `context`."""
    generator = torch.Generator().manual_seed(batch)
    lengths = np.linspace(context - spread, context + spread, batch).round() if batch > 1 else [context]
    vocabulary = pair.target.config.get_text_config().vocab_size
    return [torch.randint(3, vocabulary, (int(length),), generator=generator) for length in lengths]


@dataclass(frozen=True)
class GpuBenchmark:
    """Settings of all groups. out_of_time is called before each method."""

    device: Device
    repeats: int = 3
    context: int = CONTEXT
    spread: int = SPREAD
    new: int = NEW
    out_of_time: Callable[[], bool] = lambda: False

    def group(self, pair: ModelPair, group: Group) -> Iterator[dict]:
        """Yield a record per method, or a line with the reason of its failure.

        Each repeat is followed by a repeat of regular decoding. Raises DeviceLost if a failure broke the device.
        """
        work = StepWork.of(pair.target), None if pair.draft is None else StepWork.of(pair.draft)
        prompts = prompts_of(pair, group.batch, self.context, self.spread)
        cost = regular = None
        try:
            for way in group.ways:
                if self.out_of_time():
                    return
                runs = None
                try:
                    regular = regular or self._runs(pair, REGULAR, prompts)
                    if isinstance(way.draft, str):
                        cost = cost or self._costs(pair, prompts, work, regular)
                    runs = self._runs(pair, way, prompts, cost)
                    line = self._line(runs, *self._paired(runs, regular), work)
                except Exception as error:  # of memory, compilers or drivers: continue with the next method
                    reason = (str(error).strip() or "no reason given").splitlines()[0][:600]
                    line = {"schema": "gpu_failure", "reason": f"{type(error).__name__}: {reason}"}
                    if regular is not None and regular.session is not None and not regular.session.idle:
                        regular.close()  # its rows have not finished, so the next method needs a new session
                        regular = None
                finally:
                    if runs is not None:
                        runs.close()
                yield line | {"shape": group.shape, "batch": group.batch, "way": str(way)}
                if "reason" in line:
                    try:
                        synchronize(pair.device)
                    except Exception as error:
                        raise DeviceLost(str(way), str(error).strip().splitlines()[0]) from error
        finally:
            if regular is not None:
                regular.close()

    def _costs(
        self, pair: ModelPair, prompts: Sequence[Tensor], work: tuple[StepWork, StepWork | None], regular: RepeatedWay
    ) -> CostModel:
        """Return the roofline's costs plus the measured excess of regular steps and of `PROBE`'s steps. The best draft
        length depends on both."""
        bounds = [each and Roofline(each, self.device) for each in work]
        runs, found = self._runs(pair, PROBE, prompts), []
        try:
            for each in (regular, runs):
                each.warm_up()
                found.append(each.once())
        finally:
            runs.close()
        return modelled_costs(*bounds, **beyond(modelled_costs(*bounds), _one_after_the_other(found)))

    def _runs(
        self, pair: ModelPair, way: PlannedMethod, prompts: Sequence[Tensor], cost: CostModel | None = None
    ) -> RepeatedWay:
        """Return the repeats of a method."""
        return RepeatedWay(pair, runnable(way, pair.device), prompts, cost, self.new)

    def _paired(self, runs: RepeatedWay, regular: RepeatedWay) -> tuple[list[tuple[Repeat, Repeat]], int]:
        """Return paired repeats of the method and of regular decoding, and the number of disturbed pairs."""
        for each in (runs, regular):
            each.warm_up()
        found = counted_repeats(
            lambda _: (runs.once(), regular.once()), self.repeats, lambda: runs.recordings + regular.recordings
        )
        pairs, disturbed = zip(*found, strict=True)
        return list(pairs), sum(disturbed)

    def _line(
        self,
        runs: RepeatedWay,
        pairs: Sequence[tuple[Repeat, Repeat]],
        disturbed: int,
        work: tuple[StepWork, StepWork | None],
    ) -> dict:
        way, batch = runs.way, len(runs.prompts)
        done = [ours for ours, _ in pairs]
        seconds, regular = np.array([(ours.seconds, theirs.seconds) for ours, theirs in pairs]).T
        latencies = pd.DataFrame([run.clock.latencies(self.new) for run in done])
        line = {
            "schema": "gpu_speed",
            "method": way.method,
            "policy": "",
            "alpha": way.alpha,
            "attention": way.attention,
            "compile": way.compile,
            "context": self.context,
            "max_new_tokens": self.new,
            "repeats": len(pairs),
            "disturbed": disturbed,
            "draws": len(pairs),
            "seconds": seconds.tolist(),
            **latencies.mean().to_dict(),
            "mean_ms_margin": None if len(pairs) == 1 else float(half_width(latencies.mean_ms)),
            "tokens_per_second": float(np.mean(batch * (self.new - 1) / seconds)),
            "tokens_per_step": None,
            "k": None,
            "over_regular": Ratio.of(seconds, regular)._asdict(),
            "utilisation": None,
            "host_share": None,
            "copy_gb_per_s": self.device.bandwidth / 1e9,
            "matrix_tflops": self.device.flops / 1e12,
            "dtype": str(runs.pair.target.dtype).removeprefix("torch."),
            "exactness": UNCHECKED,
            "synthetic": True,  # dummy weights
        }
        if runs.session is None:
            return line
        steps = _one_after_the_other(done)
        decode = steps[steps.kind == "decode"]
        used = asdict(utilisation(steps, work[0], None if way.draft == 0 else work[1], self.device))
        return line | {
            "policy": "" if way.draft == 0 else runs.policy,
            "tokens_per_step": float(decode.emitted.mean()),
            "k": float(decode.k.mean()),
            "utilisation": {name: used[name] for name in ("verified", "emitted", "draft", "bandwidth")},
            "host_share": runs.host_share(done),
        }


def checked(device: str, attention: str, compile: str, new: int = 24) -> dict:
    """Return the verdict on the exactness of the embedded pair on this device with these settings.

    Greedy text must equal that of the row alone, and coupled text that of regular decoding. The check also fails if the
    session used other settings. `bass verify` checks more shapes; here each shape is compiled.
    """
    pair, options = load_pair(device=device, dtype="float32"), {"max_new_tokens": new, "eos_token_id": ()}
    prompts = token_ids(pair, prompt_set("mini", 4))
    alone = greedy_alone(pair, prompts, max_new_tokens=new)
    options |= {"attention": attention, "compile": compile}
    greedy = generate(pair, prompts, draft_length=3, **options)
    sampled = options | {"temperature": 0.8, "verification": "coupled"}
    regular, coupled = (generate(pair, prompts, draft_length=k, **sampled).sequences for k in (0, 3))
    same = {
        "greedy": sum(map(torch.equal, greedy.sequences, alone)),
        "coupled": sum(map(torch.equal, coupled, regular)),
    }
    meta = greedy.trace.meta
    return {
        "passed": set(same.values()) == {len(prompts)} and (meta["attention"], meta["compile"]) == (attention, compile),
        **{name: f"{count} of {len(prompts)} rows" for name, count in same.items()},
        "attention": meta["attention"],
        "compile": meta["compile"],
    }


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = command.parser(
        "gpu",
        "Time decoding at real sizes on a CUDA GPU.",
        quick="only the 7.8B shape, about three minutes",
        peers="only transformers' generate, which needs a separate process",
        dry_run="tiny models on the CPU, to try the command",
    )
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args(given)


def run(options: argparse.Namespace) -> int:
    """Measure and write method by method. Return the exit code."""
    dry, limit = options.dry_run, 165 if options.quick or options.peers else 540
    lines, name = Lines.of(options, *KINDS, limit=limit, also=["transformers"]), "cpu" if dry else "cuda"
    peaks = measure_device(name, torch.float32 if dry else torch.bfloat16)
    print(f"{lines.here['device']}: a copy moves {peaks.bandwidth / 1e9:.0f} GB/s, a matrix product "
          f"{peaks.flops / 1e12:.3g} TFLOP/s", flush=True)  # fmt: skip
    small = {"context": 24, "spread": 6, "new": 12} if dry else {}
    benchmark = GpuBenchmark(peaks, repeats=options.repeats, out_of_time=lambda: lines.out_of_time, **small)
    groups, lost = [DRY] if dry else PEERS if options.peers else plan(options.quick), None
    try:
        _measure(benchmark, groups, lines, name)
    except DeviceLost as error:
        lost = str(error)
    failed = sum("reason" in line for line in lines.written)
    if not lost:
        for made in dict.fromkeys(_made(line) for line in lines.known if _is_unchecked(line)):
            _look_at(lines, name, made)
    timed = [line for line in lines.known if "exactness" in line]
    verdicts = {line["exactness"]["passed"] for line in timed if line["method"] != PEER.method}
    passed = None if verdicts <= {None} else verdicts == {True}
    fine = passed or (bool(timed) and not verdicts)  # only transformers' generate
    ways, left = len(lines.written) - failed, sum(len(_left(group, lines)) for group in groups)
    left_out = left - len(lines.written)
    lines.end({"ways": ways, "failed": failed, "left_out": left_out, "lost": lost, "passed": passed})
    return 0 if fine and not failed else 1


def _left(group: Group, lines: Lines) -> tuple[PlannedMethod, ...]:
    """Return the methods that the resumed run has not measured."""
    asked = {"shape": group.shape, "batch": group.batch}
    return tuple(way for way in group.ways if not lines.has(**asked, way=str(way)))


def _is_unchecked(line: dict) -> bool:
    return line.get("exactness") == UNCHECKED and line["method"] != PEER.method


def _made(line: dict) -> tuple[str, str]:
    """Return the attention and the compile mode of a line."""
    return line["attention"], line["compile"]


def _look_at(lines: Lines, device: str, made: tuple[str, str]) -> None:
    """Check the embedded pair with these settings, and add the verdict to the lines with the same settings."""
    verdict = checked(device, *made)
    lines.amend(lambda line: line | {"exactness": verdict} if _is_unchecked(line) and _made(line) == made else line)
    print(f"exactness of the embedded pair with these settings: {'PASS' if verdict['passed'] else 'FAIL'} {verdict}")


def _measure(benchmark: GpuBenchmark, groups: Sequence[Group], lines: Lines, device: str) -> None:
    pair, shape = None, None
    for group in groups:
        if lines.out_of_time:
            break
        group = replace(group, ways=_left(group, lines))
        if not group.ways:
            continue
        if group.shape != shape:
            pair = None
            gc.collect()
            pair, shape = dummy_pair(group.shape, device), group.shape
        found = []
        for line in benchmark.group(pair, group):
            found.append(lines.add(line))
            if "reason" in line:
                print(f"FAILED {line['shape']}, batch {line['batch']}, {line['way']}: {line['reason']}", flush=True)
        if timed := [line for line in found if "reason" not in line]:
            print(f"{table(timed)}{bounds(pair, group, benchmark)}\n", flush=True)


def dummy_pair(shape: str, device: str) -> ModelPair:
    """Return a pair of this shape with dummy weights; the embedded pair's sizes in a dry run."""
    if shape == DRY.shape:
        return named_pair(weights="dummy", device=device)
    return named_pair(shape, weights="dummy", dtype="bfloat16", device=device)


def table(lines: Sequence[dict]) -> str:
    """Return the records of a group as a text table."""
    first, rows = lines[0], []
    shares = {"of bandwidth": ("bandwidth", ".0%"), "verified": ("verified", ".1%"), "emitted": ("emitted", ".1%")}
    for line in lines:
        used = line["utilisation"] or {}
        row = {
            "method": " ".join(filter(None, (line["method"], line["policy"]))),
            "α": records.text(line["alpha"], "g"),
        }
        margin = f" ± {line['mean_ms_margin']:.2f}" if line.get("mean_ms_margin") else ""
        row |= {
            "attention": line["attention"],
            "compile": line["compile"],
            "ms/token": f"{line['mean_ms']:.2f}{margin}",
        }
        row |= {"first-last": f"{line['first_ms']:.2f}-{line['last_ms']:.2f}"}
        row |= {"tokens/s": f"{line['tokens_per_second']:.0f}", "over regular": str(Ratio(**line["over_regular"]))}
        row |= {"tokens/step": records.text(line["tokens_per_step"], ".2f")}
        row |= {title: records.text(used.get(name), form) for title, (name, form) in shares.items()}
        rows.append(row | {"host": records.text(line["host_share"], ".1%")})
    batch = f"{first['shape']}, batch {first['batch']}, {first['context']} tokens of context"
    return records.text_table(f"{batch}; synthetic: dummy weights", rows)


def paper_on(device: str) -> str:
    """Return a sentence with `PAPER_MS` scaled to another GPU by memory bandwidth, from both A100 versions. All
    bandwidths are from data sheets: a copy reaches less, and no copy was timed on the paper's A100."""
    bandwidth = next((found for name, found in roofline.BANDWIDTHS.items() if device.startswith(name)), None)
    if bandwidth is None:
        return f"the paper's {PAPER_MS} ms are not scaled, because the data sheet of {device} is not listed here"
    slow, fast = (PAPER_MS * each / bandwidth for each in roofline.A100_BANDWIDTH)
    return f"the paper's {PAPER_MS} ms (A100) scaled by data-sheet bandwidth: {slow:.1f} to {fast:.1f} ms"


def bounds(pair: ModelPair, group: Group, benchmark: GpuBenchmark) -> str:
    """Return a text with the roofline of regular decoding, and the paper's figure scaled by bandwidth."""
    keys = benchmark.context + benchmark.new / 2
    roof = 1e3 * Roofline(StepWork.of(pair.target), benchmark.device).seconds(group.batch, 1, keys)
    text = f"roofline of regular decoding at the measured bandwidth: {roof:.2f} ms per token"
    if group.shape == "paper-7.8b" and group.batch == 8:
        text += f"; {paper_on(benchmark.device.name)}"
    return text


def main(given: list[str] | None = None) -> int:
    return command.main(run, arguments(given))


if __name__ == "__main__":
    sys.exit(main())
