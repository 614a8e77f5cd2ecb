"""Tables of README.md, docs/BENCHMARKS.md and kernels/README.md equal the records that they name."""

import re
from itertools import groupby

import pandas as pd
import pytest
from documents import ROOT

from bass_lab.gpu import decoding
from bass_lab.measure import benchmark, records
from bass_lab.measure.ratios import Ratio
from bass_lab.synthetic_acceptance import expected_tokens_per_step

RECORDS = ROOT / "bass_lab/assets/records"
BATCHES = (1, 2, 4, 8, 16)
SETTINGS = [(prompts, batch) for prompts in ("mini", "library") for batch in BATCHES]
CARDS = pytest.mark.parametrize(("name", "card"), [("H100", "h100_80gb_hbm3"), ("H200", "h200")])


def text_of(document: str) -> str:
    return " ".join((ROOT / document).read_text(encoding="utf-8").split())


def row(*cells: str) -> str:
    return re.sub(" +", " ", f"| {' | '.join(cells)} |")


def by_setting(name: str) -> dict[tuple[str, int], list[dict]]:
    """Return the lines of a record by prompt set and batch size, with `gain` relative to the faster baseline."""
    lines = records.read(RECORDS / name)
    groups = {key: list(group) for key, group in groupby(lines, key=lambda line: (line["prompt_set"], line["batch"]))}
    for group in groups.values():
        for line, gain in zip(group, benchmark.over_baseline(group)[1], strict=True):
            line["gain"] = gain
    return groups


def one(lines: list[dict], method: str, k: int | None = None) -> dict:
    """Return the line of a method. k: the draft length of "batched"; None: the default policy."""
    (found,) = [line for line in lines if line["method"] == method and (method != "batched" or line["k"] == k)]
    return found


def with_interval(ratio: Ratio, bold: str = "") -> str:
    return f"{bold}{ratio.median:.2f}×{bold} ({ratio.low:.2f}-{ratio.high:.2f})"


def speed(line: dict) -> str:
    return f"{line['tokens_per_second']:,.0f}"


def baselines(lines: list[dict]) -> list[str]:
    return [speed(one(lines, method)) for method in ("regular", "transformers")]


def test_speeds_equal_the_record():
    lines_of, benchmarks = by_setting("embedded_cpu.jsonl"), text_of("docs/BENCHMARKS.md")
    for prompts, batch in SETTINGS:
        lines = lines_of[prompts, batch]
        ours, default = one(lines, "batched", 5), one(lines, "batched")
        cells = [prompts, str(batch), *baselines(lines), speed(ours), with_interval(ours["gain"])]
        cells += [f"{Ratio.of(ours['seconds'], one(lines, 'assisted')['seconds']).median:.1f}×"]
        cells += [f"{ours['alpha']:.2f}", f"{ours['tokens_per_step']:.2f}"]
        cells += [", ".join(f"{ours[name]:.1f}" for name in ("first_ms", "mean_ms", "last_ms"))]
        cells += [speed(default), with_interval(default["gain"], "**")]
        assert row(*cells) in benchmarks
        assert all(line["exactness"]["identical"] == line["exactness"]["rows"] for line in lines)


def test_speeds_of_another_processor_equal_the_record():
    lines_of, benchmarks = by_setting("embedded_intel_cpu.jsonl"), text_of("docs/BENCHMARKS.md")
    for prompts, batch in SETTINGS:
        lines = lines_of[prompts, batch]
        ratios = [with_interval(one(lines, "batched", k)["gain"]) for k in (5, None)]
        assert row(prompts, str(batch), *baselines(lines), *ratios) in benchmarks


def test_speeds_of_the_feature_head_equal_the_record():
    lines_of, readme = by_setting("feature_head_amd_cpu.jsonl"), text_of("README.md")
    for prompts, batch in SETTINGS:
        lines = lines_of[prompts, batch]
        five, default = one(lines, "batched", 5), one(lines, "batched")
        cells = [prompts, str(batch), *baselines(lines)]
        cells += [with_interval(one(lines, "batched", k)["gain"]) for k in (5, 8)]
        cells += [f"{five['alpha']:.2f}", f"{five['tokens_per_step']:.2f}"]
        cells += [", ".join(f"{default[name]:.1f}" for name in ("first_ms", "mean_ms", "last_ms"))]
        cells += [speed(default), with_interval(default["gain"], "**")]
        assert row(*cells) in text_of("docs/BENCHMARKS.md")
        assert all(line["exactness"]["identical"] == line["exactness"]["rows"] for line in lines)
    for batch in BATCHES:
        mini, library = lines_of["mini", batch], lines_of["library", batch]
        regular, ours = one(mini, benchmark.over_baseline(mini)[0]), one(mini, "batched")
        ratios = [ours["gain"], one(library, "batched")["gain"]]
        assert row(str(batch), speed(regular), speed(ours), *(f"{ratio.median:.2f}×" for ratio in ratios)) in readme


def test_speeds_of_the_feature_head_on_another_processor_equal_the_record():
    lines_of, benchmarks = by_setting("feature_head_intel_cpu.jsonl"), text_of("docs/BENCHMARKS.md")
    for batch in BATCHES:
        lines = lines_of["mini", batch]
        ratios = [with_interval(one(lines, "batched", k)["gain"]) for k in (5, 6, 8, None)]
        assert row(str(batch), *baselines(lines), *ratios) in benchmarks
        assert all(line["exactness"]["identical"] == line["exactness"]["rows"] for line in lines)


def test_speeds_of_drafters_equal_the_record():
    lines_of, benchmarks = by_setting("drafters_embedded_cpu.jsonl"), text_of("docs/BENCHMARKS.md")
    for drafter in ("draft", "feature_head", "ngram", "suffix", "layers:4", "target:int4"):
        cells = []
        for lines in lines_of.values():
            own = [line for line in lines if line.get("drafter", {"batched": "draft"}.get(line["method"])) == drafter]
            best = max(own, key=lambda line: line["gain"].median)
            told = f"k {best['k']}, {best['tokens_per_step']:.2f} per pass, α {best['alpha']:.2f}"
            cells.append(f"{with_interval(best['gain'], '**')}, {told}")
        assert row(f"`{drafter}`", *cells) in benchmarks


def test_number_of_models_equals_their_page():
    kinds, works = re.search(r"registers (\d+) kinds: \*\*(\d+) works", text_of("docs/MODELS.md")).groups()
    assert f"Of the {kinds} kinds of decoders in transformers, {works} work" in text_of("README.md")


def test_load_equals_the_record():
    runs = records.read(RECORDS / "load_embedded_cpu.jsonl")
    assert len(runs) == 3
    for run in runs:
        target, highest = run["target"], run["highest"]
        cells = [f"{target['between_ms']:.1f}, {target['first_ms']:.0f}", f"{highest['none']:.1f}"]
        cells += [f"{highest['default']:.1f}", f"{run['ratio']:.2f}×", f"{run['least_over_none']:.2f}×"]
        assert row(*cells) in text_of("docs/LOAD.md")


def over_draws(line: dict) -> str:
    """Return the mean latency at the expected number of tokens per step."""
    steps = expected_tokens_per_step(line["alpha"], int(line["policy"][2:]), line["max_new_tokens"] - 1)
    return f"{line['mean_ms'] * line['tokens_per_step'] / steps:.2f}"


@CARDS
def test_real_sizes_equal_the_record(name, card):
    lines, benchmarks = records.read(RECORDS / f"gpu_{card}.jsonl"), text_of("docs/BENCHMARKS.md")
    scaled = decoding.paper_on(lines[0]["device"]).rpartition(": ")[2]
    assert f"{scaled} on the {name}" in benchmarks
    regular = {line["batch"]: line["mean_ms"] for line in lines if line["method"] == "regular"}
    for line in lines:
        drafts, pads = line["method"] == "batched", line["attention"] == "pad"
        cells = [
            name,
            str(line["batch"]),
            ", ".join(filter(None, (line["method"], line["policy"], "PAD" * pads))),
            f"{line['alpha']:g}" if drafts else "",
            f"{line['mean_ms']:.2f}, {line['last_ms']:.2f}",
            over_draws(line) if line["policy"].startswith("k=") else "",
            f"{regular[line['batch']] / line['mean_ms']:.2f}×" if drafts else "",
            with_interval(Ratio(**line["over_regular"])) if drafts else "",
            f"{line['tokens_per_step']:.2f}",
            f"{line['utilisation']['bandwidth']:.0%}",
        ]
        assert row(*cells) in benchmarks, cells
        assert line["synthetic"] and line["exactness"]["passed"] is (None if pads else True)  # PAD was not checked
    assert len(re.findall(rf"\| {name} \| \d+ \| ", benchmarks)) == len(lines)


@CARDS
def test_best_real_sizes_stand_in_the_readme(name, card):
    lines = [line for line in records.read(RECORDS / f"gpu_{card}.jsonl") if line["attention"] == "ragged"]
    for batch in (8, 32):
        (regular,) = [line for line in lines if line["batch"] == batch and line["method"] == "regular"]
        drafting = [line for line in lines if line["batch"] == batch and line["alpha"] == 0.8]
        best = max(drafting, key=lambda line: line["over_regular"]["median"])
        ratio = f"{best['over_regular']['median']:.2f}×"
        cells = [f"7.8B + 310M, {name}, synthetic α = 0.8", str(batch), speed(regular), speed(best), ratio]
        assert row(*cells) in text_of("README.md")


@CARDS
def test_attention_equals_the_record(name, card):
    by_case = pd.DataFrame(records.read(RECORDS / f"kernels_{card}.jsonl")).dropna(subset="us")
    for (model, batch, queries, keys, lengths), lines in by_case.groupby(
        ["model", "batch", "query_length", "kv_length", "distribution"]
    ):
        ours = lines[lines.kernel == "ragged"].iloc[0]
        peer = lines[~lines.kernel.isin(["ragged", "pad", "split"])].us.min()
        shape = f"{queries} {'query' if queries == 1 else 'queries'}, {keys:,} keys{' ragged' * (lengths == 'ragged')}"
        cells = [name, f"{model}, batch {batch}, {shape}", f"{1e3 * ours.gb:,.0f} MB", f"{ours.us:.1f} µs"]
        cells += [f"{ours.percent_of_copy:.0f}%", f"{peer:.1f} µs"]
        assert row(*cells) in text_of("kernels/README.md"), cells
