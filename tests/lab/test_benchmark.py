import itertools
import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import record_lines
import torch
from commands import invoke
from recording import use_on_cpu
from scipy import stats
from tiny import BYTES, byte_tokenizer, tiny_model

from bass_core import ModelPair, generate, load_pair
from bass_core.drafters import NgramDrafter, SuffixDrafter
from bass_core.loading.measured_costs import costs_like
from bass_core.prompts import token_ids
from bass_core.session import Session
from bass_lab import kept_session
from bass_lab.kept_session import KeptSession
from bass_lab.measure import benchmark, clocks, records, timed_runs
from bass_lab.measure.ratios import Ratio, half_width
from bass_lab.texts.prompt_sets import prompt_set

PROMPTS = ["def f(x):\n", "class A:", "import os, sys"]


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    small = {"vocab_size": BYTES, "num_hidden_layers": 1}
    return ModelPair(tiny_model(**small), tiny_model(**small, noise=0.3), byte_tokenizer())


@pytest.fixture(scope="module")
def lines(pair) -> list[dict]:
    (found,) = benchmark.bench(
        pair,
        {"three": PROMPTS},
        batches=[3],
        methods=benchmark.METHODS,
        repeats=2,
        max_new_tokens=6,
        draft_length=3,
        other_lengths=[1, None],
    )
    return found


def test_every_method_is_measured(lines):
    named = [(line["method"], line["k"]) for line in lines]
    peers = [("transformers", None), ("assisted", None), ("regular", None)]
    assert named == [*peers, ("single", 3), ("batched", 3), ("batched", 1), ("batched", None)]
    for line in lines:
        assert record_lines.kind_of(line) == "speed"
        assert line["exactness"] == {"dtype": "float32", "rows": 3, "identical": 3}
        assert line["models"] == "LlamaForCausalLM + LlamaForCausalLM"  # the loaded pair's
        assert (line["alpha"] is None) == (line["method"] in ("transformers", "assisted", "regular"))
        assert ("step_overhead" in line) == ((line["method"], line["k"]) in (("regular", None), ("batched", 3)))
        assert 0 < line["first_ms"] <= line["mean_ms"] <= line["last_ms"]
        assert line["first_ms"] * 5 / 1e3 < max(line["seconds"])


def test_other_drafters_are_measured_by_name(pair):
    others = {"ngram": NgramDrafter(longest=1), "ngram 2": NgramDrafter(longest=2)}
    how = {"batches": [2], "methods": ["regular"], "repeats": 1, "max_new_tokens": 6, "draft_length": 3}
    how |= {"other_lengths": [1], "other_drafts": others, "take_turns": True}
    (found,) = benchmark.bench(pair, {"own": PROMPTS[:2]}, **how)
    named = [(line["method"], line.get("drafter"), line["k"]) for line in found]
    drafted = [("other_draft", name, k) for name in others for k in (3, 1)]
    assert named == [("regular", None, None), ("batched", None, 1), *drafted]
    for line in found:
        assert record_lines.kind_of(line) == "speed" and line["exactness"]["identical"] == 2


def test_default_policy_records_its_costs(pair, lines):
    assert [line["k"] for line in lines if "costs" in line] == [None]
    assert lines[-1]["costs"] is None  # no measured costs: a fixed length
    embedded, how = load_pair(dtype="float32"), {"repeats": 1, "max_new_tokens": 4}
    methods = ["regular", "single", "batched"]  # no `single` for one row
    prompts = {"mini": prompt_set("mini", 1)}
    (found,) = benchmark.bench(embedded, prompts, methods=methods, batches=[1], draft_length=None, **how)
    measured = costs_like(embedded).measured
    assert [line["method"] for line in found] == ["regular", "batched"] and "costs" not in found[0]
    assert found[1]["costs"] == {name: measured[name] for name in ("device", "commit", "samples", "spread")}
    assert measured["samples"]["least"] >= 1


def test_wrong_text_is_not_exact(pair, monkeypatch):
    theirs = timed_runs.transformers_generate

    def wrong(*args, **options):
        first, *others = theirs(*args, **options)
        return [first + 1, *others]

    monkeypatch.setattr(timed_runs, "transformers_generate", wrong)
    options = {"methods": ["transformers", "regular", "batched"], "repeats": 1, "max_new_tokens": 4}
    (found,) = benchmark.bench(pair, {"three": PROMPTS}, batches=[3], other_lengths=[1, None], **options)
    assert [line["exactness"]["identical"] for line in found] == [2, 3, 3, 3, 3]
    assert {record_lines.kind_of(line) for line in found} == {"speed"}  # transformers' line is a result, too


def test_prompts_vary_from_repeat_to_repeat(pair, monkeypatch):
    met = []

    def listening(pair, ids, **options):
        met.append([row.tolist() for row in ids])
        return generate(pair, ids, **options)

    monkeypatch.setattr(kept_session, "generate", listening)
    options = {"methods": ("regular", "batched"), "repeats": 2, "max_new_tokens": 4}
    benchmark.compare(pair, PROMPTS, batch=2, **options)
    first, second, third = (ids.tolist() for ids in token_ids(pair, PROMPTS))
    batches = [[first, second], [third, first], [second, third]]  # the first repeat warms up
    assert met == [batch for batch in batches for _ in range(2)]


def test_latency_is_measured_from_a_rows_first_tokens_to_its_last():
    clock = clocks.Clock(first={0: (1.0, 1), 1: (2.0, 3)}, last={0: 3.0, 1: 8.0})
    assert clock.latencies(new=5) == {"first_ms": 500.0, "last_ms": 3000.0, "mean_ms": 1750.0}
    # tokens of one piece have no latency: first row 1 has none, then both rows
    assert clock.latencies(new=3) == {"first_ms": 1000.0, "last_ms": 1000.0, "mean_ms": 1000.0}
    assert all(np.isnan(value) for value in clock.latencies(new=1).values())
    assert clock.decoding_seconds() == 6.0 and clock.decoding_seconds(one_by_one=True) == 8.0


def test_ratio_is_the_median_of_paired_ratios(pair):
    comparison = benchmark.compare(pair, PROMPTS, repeats=3, max_new_tokens=4)
    seconds = comparison.runs.pivot(index="repeat", columns="method", values="seconds")
    middle, low, high = comparison.ratio("batched")
    assert middle == pytest.approx((seconds.regular / seconds.batched).median())
    assert low <= middle <= high
    # the median of a resample of 1 … 17 is at most 4 with probability 0.008, at most 5 with 0.036
    assert Ratio.of(np.ones(17), np.arange(1, 18)) == (9, 5, 13)


def test_interval_of_a_mean_is_students():
    for values in (pd.Series(np.arange(count) ** 2.0) for count in (2, 6, 10, 11, 60)):
        wanted = stats.t.ppf(0.975, len(values) - 1) * values.sem()
        assert half_width(values) == pytest.approx(wanted, rel=2e-3)


OURS = {"methods": ("regular", "single", "batched"), "draft_length": 3, "other_lengths": [1], "max_new_tokens": 6}


def test_method_with_the_fewest_tokens_runs_next(pair, monkeypatch):
    emitted, turns, step = Counter(), [], Session.step

    def watched(session):
        turns.append(session)
        emitted[session] += 0
        assert emitted[session] == min(count for other, count in emitted.items() if not other.idle)
        event = step(session)
        emitted[session] += sum(map(len, event.new_tokens))
        return event

    monkeypatch.setattr(Session, "step", watched)
    benchmark.compare(pair, PROMPTS, repeats=2, take_turns=True, **OURS)
    assert len(emitted) == 3 * 4  # repeats, methods
    assert any(a is not b for a, b in itertools.pairwise(turns[3:10]))
    first = list(emitted)[::4]  # per repeat
    assert [(session.policy.k, session.rows.max_rows) for session in first] == [(0, 3), (3, 1), (3, 3)]


def test_a_method_is_timed_in_its_own_turns_only(pair, monkeypatch):
    # Each clock reading adds a second. The clock is read at both ends of a turn, and when tokens arrive.
    monkeypatch.setattr(clocks, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    runs = benchmark.compare(pair, PROMPTS, repeats=1, take_turns=True, **OURS).runs.set_index("method")
    assert runs.seconds["regular"] == 1 + 2 * 6  # session creation, then two readings per step
    assert (runs.last_ms["regular"], runs.first_ms["regular"]) == (2000, 2000)  # from the prefill's token to the last


def test_impossible_comparisons_are_refused(pair):
    drafted = replace(pair, draft=NgramDrafter())
    assert "assisted" not in benchmark.methods_of(drafted)
    refused = [
        (pair, {"methods": ["transformers", "regular"], "take_turns": True}, r"this engine .* \['transformers'\]"),
        (drafted, {"methods": ["assisted"]}, "assisted"),
        (pair, {"methods": ["fast"]}, "one of"),
        (pair, {"repeats": 0}, "repeats must be"),
    ]
    for models, options, message in refused:
        with pytest.raises(ValueError, match=message):
            benchmark.compare(models, PROMPTS, **options)


def test_baseline_is_the_faster_method(lines):
    seconds = {"transformers": [1.0, 1.0], "regular": [2.0, 2.0], "batched": [0.5, 0.5]}

    def timed(line, seconds):
        return line | {"seconds": seconds, "tokens_per_second": 1 / seconds[0]}

    chosen = [timed(line, seconds[line["method"]]) for line in lines if line["method"] in seconds]
    name, ratios = benchmark.over_baseline(chosen)
    assert (name, [ratio.median for ratio in ratios]) == ("transformers", [1.0, 0.5, 2.0, 2.0, 2.0])
    assert "relative to transformers, the faster baseline" in benchmark.table(chosen)[2]
    slower = [timed(line, [9.0, 9.0]) if line["method"] == "transformers" else line for line in chosen]
    assert benchmark.over_baseline(slower)[0] == "regular" and "which is faster" not in benchmark.table(slower)[2]


def test_peers_ignore_the_models_own_end_tokens(pair):
    for text in benchmark.greedy_alone(pair, PROMPTS, max_new_tokens=40):
        assert len(text) == 40
    assert pair.target.generation_config.eos_token_id == 2


def test_overhead_is_a_share_of_the_steps_unless_they_are_recorded(pair, monkeypatch):
    for draft in (pair.draft, NgramDrafter()):
        some = replace(pair, draft=draft)
        assert 0 < benchmark.step_overhead(some, PROMPTS, max_new_tokens=8, draft_length=2) < 1
    use_on_cpu(monkeypatch)
    assert benchmark.step_overhead(pair, PROMPTS, max_new_tokens=8) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": None}, "method must be str"),
        ({"batch": 0}, "batch must be positive"),
        ({"batch": True}, "batch must be int"),
        ({"repeats": 3}, "seconds must be 3"),
        ({"seconds": [1.0, -1.0]}, "seconds must be 2"),
        ({"alpha": 1.5}, "alpha must be in"),
        ({"tokens_per_second": float("inf")}, "finite"),
        ({"first_ms": 1e9}, "first_ms ≤ mean_ms ≤ last_ms"),
        ({"over_regular": {"median": 2.0}}, "over_regular must hold"),
        ({"over_regular": {"median": 2.0, "low": 2.5, "high": 3.0}}, "low ≤ median ≤ high"),
        ({"exactness": {}}, "exactness must hold"),
        ({"exactness": {"dtype": "float32", "rows": 3, "identical": 2}}, "every row must be identical"),
    ],
)
def test_impossible_record_is_refused(lines, change, message):
    with pytest.raises(ValueError, match=message):
        records.check(lines[-2] | change)


def test_bench_command_writes_a_table_or_json_and_a_record(tmp_path, lines):
    path = tmp_path / "r.jsonl"
    options = ["--batch-sizes=2", "--prompts=mini", "--repeats=1", "--max-new-tokens=3", "--methods", "batched"]
    done = invoke("bench", *options, "--methods", "regular", "--record", path, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["results"] == records.read(path)
    path.write_text(path.read_text() + '{"method": "reg')  # a killed run
    done = invoke("bench", *options[:-1], "regular", "--record", path)
    assert "over regular" in done.stdout and "2/2" in done.stdout
    checked = invoke("bench", "--record", path, "--check-only")
    assert checked.exit_code == 0 and "3 lines" in checked.stderr and checked.stdout == ""
    path.write_text(path.read_text().replace('"batch": 2', '"batch": "two"'))
    refused = invoke("bench", "--record", path, "--check-only")
    assert refused.exit_code == 2 and "batch must be int" in refused.stderr.replace("\n", " ")


def test_inexact_rows_are_an_exit_code_and_no_record(monkeypatch, tmp_path):
    alone = benchmark.greedy_alone
    monkeypatch.setattr(benchmark, "greedy_alone", lambda *given, **how: [row + 1 for row in alone(*given, **how)])
    options = ["--batch-sizes=1", "--prompts=mini", "--methods=regular", "--repeats=1", "--max-new-tokens=4"]
    done = invoke("bench", *options, "--record", tmp_path / "speed.jsonl")
    assert done.exit_code == 1 and "0/1" in done.stdout and not (tmp_path / "speed.jsonl").exists()


def test_nothing_is_recorded_in_a_counted_repeat(pair, monkeypatch):
    use_on_cpu(monkeypatch)
    made, repeats = [], []

    class Kept(KeptSession):
        def __init__(self, *given, **options):
            super().__init__(*given, **options)
            made.append(self)

    monkeypatch.setattr(benchmark, "KeptSession", Kept)
    count = lambda *told: repeats.append(sum(session.recordings for session in made))  # noqa: E731
    runs = benchmark.compare(pair, PROMPTS, repeats=2, take_turns=True, progress=count, **OURS).runs
    count()
    assert len(made) == 4 and all(session.session is not None for session in made)
    counted = sorted(set(runs.repeat))
    assert len(counted) == 2 and counted[0] > 1  # the first repeat after the warm-up captured steps
    assert all(repeats[repeat] == repeats[repeat + 1] for repeat in counted)


def test_repeats_with_constant_captures_are_disturbed(pair, monkeypatch):
    class Restless(KeptSession):
        count = itertools.count()
        recordings = property(lambda self: next(self.count))

    monkeypatch.setattr(benchmark, "KeptSession", Restless)
    comparison = benchmark.compare(pair, PROMPTS, methods=["regular"], repeats=2, max_new_tokens=2)
    assert comparison.runs.disturbed.all() and [line["disturbed"] for line in comparison.lines()] == [2]
    assert comparison.runs.repeat.tolist() == [5, 6]  # after twice as many discarded repeats


@pytest.mark.parametrize("draft", ["draft model", "suffix"])
def test_kept_session_equals_generate(pair, monkeypatch, draft):
    """A drafter that learns from texts starts each run anew."""
    pair = pair if draft == "draft model" else replace(pair, draft=SuffixDrafter(least=0.01))
    options = {"draft_length": 3, "temperature": 0.8, "eos_token_id": ()}
    expected = [generate(pair, PROMPTS, seed=seed, max_new_tokens=8, **options) for seed in range(2)]
    use_on_cpu(monkeypatch)
    kept = KeptSession(pair, len(PROMPTS), **options)
    for seed in (0, 1, 0):
        found = kept.settled(PROMPTS, max_new_tokens=8, seed=seed)
        assert all(map(torch.equal, found.sequences, expected[seed].sequences))
        assert found.trace.steps.accepted.tolist() == expected[seed].trace.steps.accepted.tolist()
        assert found.trace.steps.drafted.tolist() == expected[seed].trace.steps.drafted.tolist()
    before = kept.recordings
    assert kept(PROMPTS, max_new_tokens=8, seed=1).texts == expected[1].texts and kept.recordings == before
    kept.close()


def test_broken_run_leaves_no_rows_to_the_next(pair, monkeypatch):
    use_on_cpu(monkeypatch)
    options = {"draft_length": 3, "eos_token_id": ()}
    expected, reserve = generate(pair, PROMPTS, max_new_tokens=12, **options), Session.reserve

    def interrupt(event):
        raise KeyboardInterrupt

    def full(session, positions):
        monkeypatch.setattr(Session, "reserve", reserve)
        raise torch.OutOfMemoryError("CUDA out of memory")

    with KeptSession(pair, len(PROMPTS), **options) as kept:
        monkeypatch.setattr(Session, "reserve", full)
        with pytest.raises(torch.OutOfMemoryError):
            kept(PROMPTS, max_new_tokens=12)
        assert kept(PROMPTS, max_new_tokens=12).texts == expected.texts
        room = kept.session.rows.capacity
        kept(PROMPTS, max_new_tokens=14)  # a longer run doubles the capacity
        assert room < 2 * room == kept.session.rows.capacity
        with pytest.raises(KeyboardInterrupt):
            kept(PROMPTS, max_new_tokens=12, on_step=interrupt)
        with pytest.raises(TypeError, match="prompt 1"):
            kept([PROMPTS[0], torch.zeros(3)], max_new_tokens=12)
        found = kept(pair.tokenizer(PROMPTS, padding=True), max_new_tokens=12)
        assert found.texts == expected.texts
        assert kept(PROMPTS[0], max_new_tokens=12, num_return_sequences=2).samples == 2
        assert {*kept(PROMPTS, max_new_tokens=12, time_budget=0.0).finish_reasons} == {"budget"}
