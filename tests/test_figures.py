"""The figures in the README and in docs/BENCHMARKS.md are those of the records that they name."""

import re
from itertools import groupby

import numpy as np
import pandas as pd
import pytest
from documents import ROOT

from bass_lab import evaluation
from bass_lab.measure import benchmark, records
from bass_lab.measure.modelled_costs import measured_cpu
from bass_lab.measure.ratios import Ratio

RECORDS = ROOT / "bass_lab/assets/records"
BATCHES = (1, 2, 4, 8, 16)


def said(document: str) -> str:
    """Its text, on one line."""
    return " ".join((ROOT / document).read_text(encoding="utf-8").split())


def by_setting(name: str) -> dict[tuple[str, int], list[dict]]:
    """The lines of a record by prompt set and batch."""
    lines = records.read(RECORDS / name)
    return {key: list(group) for key, group in groupby(lines, key=lambda line: (line["prompt_set"], line["batch"]))}


@pytest.fixture(scope="module")
def speeds():
    return by_setting("embedded_cpu.jsonl")


@pytest.fixture(scope="module")
def speeds_elsewhere():
    return by_setting("embedded_intel_cpu.jsonl")


@pytest.fixture(scope="module")
def feature_heads():
    return {maker: by_setting(f"feature_head_{maker}_cpu.jsonl") for maker in ("amd", "intel")}


def one(lines: list[dict], method: str, k: int | None = None) -> dict:
    """k: of batched decoding; None: the default policy's."""
    (found,) = [line for line in lines if line["method"] == method and (method != "batched" or line["k"] == k)]
    return found


def with_interval(ratio: Ratio) -> str:
    return f"{ratio.median:.2f}× ({ratio.low:.2f}-{ratio.high:.2f})"


def over_the_faster(lines: list[dict], line: dict) -> Ratio:
    return dict(zip(map(id, lines), benchmark.over_baseline(lines)[1], strict=True))[id(line)]


def speed(line: dict) -> str:
    return f"{line['tokens_per_second']:,.0f}"


def latencies(line: dict) -> str:
    return ", ".join(f"{line[name]:.1f}" for name in ("first_ms", "mean_ms", "last_ms"))


@pytest.mark.parametrize("prompts", ["mini", "library"])
@pytest.mark.parametrize("batch", BATCHES)
def test_the_table_of_speeds_is_the_record(speeds, prompts, batch):
    lines = speeds[prompts, batch]
    ours, default = one(lines, "batched", 5), one(lines, "batched")
    assisted = Ratio.of(ours["seconds"], one(lines, "assisted")["seconds"])
    cells = [
        prompts,
        str(batch),
        *(speed(each) for each in (one(lines, "regular"), one(lines, "transformers"), ours)),
        with_interval(over_the_faster(lines, ours)),
        f"{assisted.median:.1f}×",
        f"{ours['alpha']:.2f}",
        f"{ours['tokens_per_step']:.2f}",
        latencies(ours),
        speed(default),
        re.sub(r"^(\S+)", r"**\1**", with_interval(over_the_faster(lines, default))),
    ]
    assert f"| {' | '.join(cells)} |" in said("docs/BENCHMARKS.md")


@pytest.mark.parametrize("prompts", ["mini", "library"])
@pytest.mark.parametrize("batch", BATCHES)
def test_the_table_of_another_processor_is_its_record(speeds_elsewhere, prompts, batch):
    lines = speeds_elsewhere[prompts, batch]
    ours = [one(lines, "batched", 5), one(lines, "batched")]
    baselines = [speed(one(lines, method)) for method in ("regular", "transformers")]
    cells = [prompts, str(batch), *baselines, *(with_interval(over_the_faster(lines, line)) for line in ours)]
    assert f"| {' | '.join(cells)} |" in said("docs/BENCHMARKS.md")


@pytest.mark.parametrize("maker", ["amd", "intel"])
@pytest.mark.parametrize("batch", BATCHES)
def test_the_table_of_the_feature_head_is_its_record(feature_heads, batch, maker):
    lines = feature_heads[maker]["mini", batch]
    baselines = [speed(one(lines, method)) for method in ("regular", "transformers")]
    ratios = [with_interval(over_the_faster(lines, one(lines, "batched", k))) for k in (5, 6, 8, None)]
    assert f"| {' | '.join([str(batch), *baselines, *ratios])} |" in said("docs/BENCHMARKS.md")
    assert all(line["exactness"]["identical"] == line["exactness"]["rows"] for line in lines)


def test_the_readme_tells_of_the_feature_head_and_of_another_processor(speeds_elsewhere, feature_heads):
    def gained(lines: dict, k: int | None) -> list[str]:
        each = (lines["mini", batch] for batch in (1, 8))
        return [f"{over_the_faster(group, one(group, 'batched', k)).median:.2f}×" for group in each]

    told = said("README.md")
    drafts = "with the pair's feature head and drafts of 8 it gained {} with one row and {} with eight"
    assert drafts.format(*gained(feature_heads["amd"], 8)) in told
    assert "Intel Xeon *mini* gained {} and {}".format(*gained(speeds_elsewhere, None)) in told
    assert "with the feature head {} and {}".format(*gained(feature_heads["intel"], 8)) in told


def test_what_limits_eight_rows_is_told_by_the_costs_that_ship():
    cost = measured_cpu()
    passes = [1e3 * cost.target_passes(8, queries, 160) for queries in (6, 1)]
    drafts, around, alone = 1e3 * cost.draft_phases(8, 5, 160), *(1e3 * cost.overheads(8, k) for k in (5, 0))
    steps = (passes[0] + drafts + around) / (passes[1] + alone)
    without = (passes[0] + around) / (passes[1] + alone)
    assert (
        f"{passes[0]:.1f} ms, where one over 8 takes {passes[1]:.1f}; the five draft passes take {drafts:.1f}, all "
        f"else {around:.1f} ({alone:.1f} without drafts). So 4.7 tokens take as long as {steps:.1f} regular steps: "
        f"{4.7 / steps:.1f} times as fast at most, and {4.7 / without:.1f} times if drafts cost nothing"
    ) in said("docs/BENCHMARKS.md")


@pytest.mark.parametrize("batch", BATCHES)
def test_the_readmes_table_is_the_record(speeds, batch):
    mini, library = speeds["mini", batch], speeds["library", batch]
    ours = one(mini, "batched")
    regular = one(mini, benchmark.over_baseline(mini)[0])
    ratios = [over_the_faster(mini, ours), over_the_faster(library, one(library, "batched"))]
    cells = [str(batch), speed(regular), speed(ours), *(f"{ratio.median:.2f}×" for ratio in ratios)]
    assert f"| {' | '.join(cells)} |" in said("README.md")


@pytest.mark.parametrize("drafter", ["draft", "feature_head", "ngram", "suffix", "layers:4", "target:int4"])
def test_the_table_of_drafters_is_the_record(drafter):
    cells = []
    for lines in by_setting("drafters_embedded_cpu.jsonl").values():
        own = [line for line in lines if line.get("drafter", {"batched": "draft"}.get(line["method"])) == drafter]
        best = max(own, key=lambda line: over_the_faster(lines, line).median)
        speed = re.sub(r"^(\S+)", r"**\1**", with_interval(over_the_faster(lines, best)))
        cells.append(f"{speed}, k {best['k']}, {best['tokens_per_step']:.2f} a step, α {best['alpha']:.2f}")
    assert f"| `{drafter}` | {' | '.join(cells)} |" in said("docs/BENCHMARKS.md")


def test_the_best_draft_lengths_of_library_code_are_the_records(speeds):
    best = []
    for batch in BATCHES:
        lines = speeds["library", batch]
        fastest = max((one(lines, "batched", k) for k in (2, 3, 5)), key=lambda line: line["tokens_per_second"])
        best.append(f"{over_the_faster(lines, fastest).median:.2f}×")
    assert f"BASS is there {', '.join(best[:-1])} and {best[-1]} as fast" in said("docs/BENCHMARKS.md")


def test_what_is_said_of_all_batches_holds_in_the_record(speeds):
    lines = [line for group in speeds.values() for line in group]
    assert all(line["exactness"]["identical"] == line["exactness"]["rows"] for line in lines)
    outside = [line["step_overhead"] for line in lines if line["method"] == "batched" and "step_overhead" in line]
    assert f"passes go {min(outside):.0%} to {max(outside):.0%} of the time of BASS" in said("docs/BENCHMARKS.md")


def test_the_chosen_draft_length_is_as_near_to_the_best_as_is_said():
    near, together, gained = [], [], []
    for lines in by_setting("draft_lengths_embedded_cpu.jsonl").values():
        fixed = [line for line in lines if line["method"] == "batched" and line["k"] is not None]
        (chosen,) = [line for line in lines if line["method"] == "batched" and line["k"] is None]
        best = min(fixed, key=lambda line: np.median(line["seconds"]))
        near.append(Ratio.of(chosen["seconds"], best["seconds"]).median)
        together.append(min(sum(line["seconds"]) for line in fixed) / sum(chosen["seconds"]))
        gained.append(chosen["over_regular"]["median"])
    told = said("docs/BENCHMARKS.md")
    assert f"{min(near):.2f} to {max(near):.2f} times as fast as the fixed length that proves best" in told
    assert f"{min(together):.2f} to {max(together):.2f} times in all texts together" in told
    assert f"{min(gained):.1f} to {max(gained):.1f} times as fast as regular decoding" in told


def test_quality_within_a_budget_is_the_record():
    runs = evaluation.load(RECORDS / "quality_embedded_cpu")

    def share(method: str, metric: str, budget: float) -> float:
        return runs[method].scores([budget]).set_index("metric").value[metric]

    def within(budget: float, method: str) -> list[str]:
        return [f"{share(method, metric, budget):.0%}" for metric in ("Pass@First", "Pass@All")]

    told = said("docs/BENCHMARKS.md")
    assert "solves {} by its most confident answer and {} by any".format(*within(0.28, "batched")) in told
    assert "one sequence after the other {} and {},".format(*within(0.28, "single")) in told
    assert "regular decoding {} and {};".format(*within(0.28, "regular")) in told
    ends = {method: within(1e9, method) for method in runs}
    assert {first for first, _ in ends.values()} == {"74%"} and {every for _, every in ends.values()} == {"93%", "94%"}
    assert share("single", "Pass@First", 0.2) > share("batched", "Pass@First", 0.2)


def test_the_number_of_models_is_that_of_their_page():
    kinds, works = re.search(r"registers (\d+) kinds: \*\*(\d+) works", said("docs/MODELS.md")).groups()
    assert f"Of {kinds} kinds of decoders in transformers {works} work" in said("README.md")


def test_load_that_keeps_its_latencies_is_the_record():
    runs, told = records.read(RECORDS / "load_embedded_cpu.jsonl"), said("docs/LOAD.md")
    for run in runs:
        target, highest = run["target"], run["highest"]
        kept = f"| {target['between_ms']:.1f}, {target['first_ms']:.0f} | {highest['none']:.1f} "
        line = f"{kept}| {highest['default']:.1f} | {run['ratio']:.2f}× | {run['least_over_none']:.2f}× |"
        assert line in told
        assert f"{run['requests']} requests" in told
    rates = [each["rate"] for run in runs for each in run["tried"]]
    assert len(runs) == 3 and f"from {min(rates):.0f} to {max(rates):.0f} requests/s" in told
    ratios = sorted(run["ratio"] for run in runs)
    assert f"{ratios[0]:.2f} to {ratios[-1]:.2f} times as many requests per second" in said("docs/BENCHMARKS.md")


# --- two GPUs -------------------------------------------------------------------------------------

CARDS = pytest.mark.parametrize(("name", "card"), [("H100", "h100_80gb_hbm3"), ("H200", "h200")])


@CARDS
def test_the_table_of_real_sizes_is_the_record(name, card):
    lines = records.read(RECORDS / f"gpu_{card}.jsonl")
    for line in lines:
        drafts, pads = line["method"] == "batched", line["attention"] == "pad"
        cells = [
            name,
            str(line["batch"]),
            ", ".join(filter(None, (line["method"], line["policy"], "PAD" * pads))),
            f"{line['alpha']:g}" if drafts else "",
            f"{line['mean_ms']:.2f}, {line['last_ms']:.2f}",
            with_interval(Ratio(**line["over_regular"])) if drafts else "",
            f"{line['tokens_per_step']:.2f}",
            f"{line['utilisation']['bandwidth']:.0%}",
        ]
        row = re.sub(" +", " ", f"| {' | '.join(cells)} |")
        assert row in said("docs/BENCHMARKS.md"), row
        ahead = name == "H100" and line["batch"] == 8
        assert line["exactness"]["passed"] is (None if pads else True)  # nobody looked at the padded way
        assert line["synthetic"] and line["repeats"] == (3 if ahead else 5)
    if name == "H100":
        eight = next(line for line in lines if (line["batch"], line["alpha"]) == (8, 0.8))
        ours = f"{eight['mean_ms']:.2f} ms per token ({eight['last_ms']:.2f} until the last row is done, "
        assert f"{ours}{eight['over_regular']['median']:.2f}× our regular decoding)" in said("README.md")
    assert len(re.findall(rf"\| {name} \| \d+ \| ", said("docs/BENCHMARKS.md"))) == len(lines)


def test_the_peer_on_a_gpu_is_the_record():
    eight, many = records.read(RECORDS / "peers_h200.jsonl")
    told = (
        f"took {eight['mean_ms']:.2f} ms per token with 8 rows and {many['mean_ms']:.2f} with 32 on the H200, "
        f"{eight['over_regular']['median']:.2f} and {many['over_regular']['median']:.2f} times our speed"
    )
    assert told in said("docs/BENCHMARKS.md")


@CARDS
def test_the_table_of_attention_is_the_record(name, card):
    by_case = pd.DataFrame(records.read(RECORDS / f"kernels_{card}.jsonl")).dropna(subset="us")
    for (model, batch, queries, keys, lengths), lines in by_case.groupby(
        ["model", "batch", "query_length", "kv_length", "distribution"]
    ):
        ours = lines[lines.kernel == "ragged"].iloc[0]
        peer = lines[~lines.kernel.isin(["ragged", "pad", "split"])].us.min()
        shape = f"{queries} {'query' if queries == 1 else 'queries'}, {keys:,} keys{' ragged' * (lengths == 'ragged')}"
        cells = [name, f"{model}, batch {batch}, {shape}", f"{1e3 * ours.gb:,.0f} MB", f"{ours.us:.1f} µs"]
        cells += [f"{ours.percent_of_copy:.0f}%", f"{peer:.1f} µs"]
        assert f"| {' | '.join(cells)} |" in said("docs/BENCHMARKS.md"), cells


def test_the_products_on_a_gpu_are_the_record():
    times = pd.DataFrame(records.read(RECORDS / "products_h100_80gb_hbm3.jsonl")).dropna(subset="us")
    us = times.pivot(index=["rows", "columns"], columns="kernel", values="us")
    faster = us[["int8", "int4"]].rdiv(us.cublas, axis=0)
    wide, square = (faster.xs(columns, level="columns") for columns in (14336, 4096))
    of_8 = [f"{each.int8.min():.2f} to {each.int8.max():.2f}" for each in (wide, square)]
    of_4 = [f"{each.int4.min():.2f} to {each.int4.max():.2f}" for each in (wide, square)]
    int8, int4 = "INT8 {} times as fast at 14,336 × 4,096 and {} at 4,096 × 4,096", "INT4 {} and {}"
    assert f"{int8.format(*of_8)}, with {int4.format(*of_4)}" in said("docs/BENCHMARKS.md")


def test_what_a_step_ahead_brings_is_the_evidence():
    lines = [each for each in evidence("step_ahead_h100") if each["attention"] == "ragged"]
    by = {(each["batch"], each["method"], each["alpha"]): each for each in lines}
    many, one = ([by[rows, "regular", None], by[rows, "batched", 0.8]] for rows in (32, 1))
    (regular, drafted), ratio = many, Ratio(**many[1]["over_regular"])
    shares = [f"{each[0]['utilisation']['bandwidth']:.0%}" for each in (many, one)]
    for told in (
        f"regular {regular['mean_ms']:.2f} ms and {shares[0]} of a copy's bandwidth, batched with k = 6 ",
        f"k = 6 {drafted['mean_ms']:.2f} and {drafted['last_ms']:.2f}, {ratio.median:.2f} times regular ",
        f"({ratio.low:.2f}-{ratio.high:.2f}); with one row {one[0]['mean_ms']:.2f} and {shares[1]}, ",
        f"{one[1]['mean_ms']:.2f} and {one[1]['over_regular']['median']:.2f} times",
    ):
        assert told in said("docs/BENCHMARKS.md")


def evidence(name):
    return records.read(RECORDS.parents[2] / f"kernels/evidence/{name}.jsonl")
