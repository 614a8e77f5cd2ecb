import json
import re
from functools import partial

import numpy as np
import pandas as pd
import pytest
import record_lines
from commands import invoke
from replays import Linear, run_of, workload

import bass_core as bass
from bass_lab import load
from bass_lab.load import Poisson, Target, Workload, simulate
from bass_lab.load.capacity import bearable_rate
from bass_lab.load.compare import side_by_side
from bass_lab.load.measurement import measure, record_line
from bass_lab.study.recorded_acceptance import AcceptanceTrace


@pytest.mark.parametrize("burst", [1.0, 4.0])
def test_arrivals_have_their_rate_and_variance(burst):
    rate, span, runs = 5.0, 100.0, 200
    counts = []
    for seed in range(runs):
        times = Poisson(rate, burst).times(1000, np.random.default_rng(seed))
        assert (np.diff(times) >= 0).all() and len(times) == 1000 and times[-1] > span
        counts.append((times < span).sum())
    error = np.sqrt(rate * span * (2 * burst - 1) / runs)
    assert abs(np.mean(counts) - rate * span) < 4 * error
    # the variance of a sample variance of nearly normal counts is 2 σ⁴ / runs
    assert np.var(counts, ddof=1) / (rate * span) == pytest.approx(2 * burst - 1, rel=4 * np.sqrt(2 / runs))


def test_lengths_are_drawn_from_a_range_or_a_list():
    drawn = Workload.draw(Poisson(1), 4000, max_new_tokens=range(16, 65)).requests.max_new_tokens
    assert (drawn.min(), drawn.max()) == (16, 64) and drawn.mean() == pytest.approx(40, abs=1)
    seen = Workload.draw(Poisson(1), 4000, max_new_tokens=[1, 1, 1, 9]).requests.max_new_tokens
    assert set(seen) == {1, 9} and (seen == 1).mean() == pytest.approx(0.75, abs=0.03)


def test_requests_do_not_depend_on_arrivals():
    slow, fast = (Workload.draw(Poisson(rate, burst), 50, seed=3) for rate, burst in ((1, 1), (9, 4)))
    columns = ["prompt", "number", "max_new_tokens", "seed"]
    pd.testing.assert_frame_equal(slow.requests[columns], fast.requests[columns])
    assert slow.at_rate(7).rate == pytest.approx(7)
    assert not slow.requests.equals(Workload.draw(Poisson(1), 50, seed=4).requests)


def test_a_workload_is_saved_and_loaded(tmp_path):
    whole = Workload.draw(Poisson(3, 2), 20, max_new_tokens=range(1, 9), deadline=2.0, seed=1)
    whole.save(tmp_path / "load.jsonl")
    again = Workload.load(tmp_path / "load.jsonl")
    pd.testing.assert_frame_equal(again.requests, whole.requests)
    assert again.meta == whole.meta
    chat = [{"role": "user", "content": "hello"}]
    Workload.draw(Poisson(3), 3, prompts=[chat]).save(tmp_path / "chat.jsonl")
    assert Workload.load(tmp_path / "chat.jsonl").requests.prompt.tolist() == [chat] * 3


def test_recorded_arrivals_and_lengths_get_prompts(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("arrived,prompt_tokens,max_new_tokens\n2026-01-01 10:00:05,1000,3\n2026-01-01 10:00:03.5,1,7\n")
    found = Workload.load(path, prompts=["a" * 40, "b" * 4000]).requests
    assert found.arrived.tolist() == pytest.approx([0, 1.5]) and found.max_new_tokens.tolist() == [7, 3]
    assert [len(prompt) for prompt in found.prompt] == [40, 4000]
    lines = tmp_path / "log.jsonl"
    lines.write_text('{"arrived": 3.0, "max_new_tokens": 5}\n{"arrived": 4.0, "max_new_tokens": 6}\n')
    assert Workload.load(lines).requests.arrived.tolist() == [0, 1]


def recorded(tmp_path, *lines, **options):
    path = tmp_path / "recorded.jsonl"
    path.write_text("\n".join(json.dumps({"max_new_tokens": 3} | line) for line in lines))
    return Workload.load(path, **options).requests


def test_recorded_times_seeds_and_prompt_numbers_are_kept(tmp_path):
    lines = [{"arrived": number, "seed": 40 + number, "number": 2 - number} for number in range(3)]
    assert recorded(tmp_path, {"arrived": "12:00:01"}, {"arrived": "12:00:03.5"}).arrived.tolist() == [0, 2.5]
    found = recorded(tmp_path, *lines, prompts=["a", "b", "c"])
    assert found.seed.tolist() == [40, 41, 42] and found.prompt.tolist() == ["c", "b", "a"]
    with pytest.raises(ValueError, match="number 2 is out of range for 2 prompts"):
        recorded(tmp_path, *lines, prompts=["a", "b"])


COMMON = '{"arrived": 1.0, "max_new_tokens": '


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("load.jsonl", '{"arrived": 1.0}\n', "max_new_tokens is missing"),
        ("load.jsonl", COMMON + "0}\n", "max_new_tokens must be >= 1"),
        ("load.jsonl", COMMON + '2, "deadline": -1}\n', "deadline must be seconds > 0"),
        ("load.jsonl", "no JSON\n", "holds no workload"),
        ("load.jsonl", "[1]\n", "holds no workload"),
        ("load.jsonl", "", "arrived is missing; the columns are none"),
        ("load.jsonl", '{"arrived": "noon", "max_new_tokens": 2}', "seconds, ISO dates or times of day, got 'noon'"),
        ("load.jsonl", f"{COMMON}2}}\n{COMMON}null}}\n", "request 1 has no max_new_tokens"),
        ("load.csv", "arrived,max_new_tokens,prompt\n0,4,a\n1,4,\n", "request 1 has no prompt"),
        ("load.csv", "arrived,max_new_tokens\n0,8\n1,x\n", "Unable to parse string 'x' at position 1"),
    ],
)
def test_wrong_files_are_refused(tmp_path, name, text, said):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(said)):
        Workload.load(path)


def test_impossible_arguments_are_refused():
    for wrong in (
        lambda: Poisson(0),
        lambda: Poisson(1, 0.5),
        lambda: Workload.draw(Poisson(1), 0),
        lambda: Workload.draw(Poisson(1), 2, prompts=[]),
        lambda: Workload.draw(Poisson(1), 2).at_rate(0),
        lambda: Target(),
        lambda: Target(between_ms=-1),
        lambda: Target(first_ms=1, share=0),
    ):
        with pytest.raises(ValueError):
            wrong()


def test_metrics_of_requests_by_hand():
    pieces = [(0, 0.1, 1), (0, 0.3, 3), (0, 0.9, 1), (1, 1.5, 1)]
    run = run_of([0.9, 1.5], first=[0.1, 1.5], tokens=[5, 1], deadline=[0.8, np.nan], pieces=pieces)
    found = run.latencies
    assert found.queue_ms.tolist() == pytest.approx([50, 50])
    assert found.first_ms.tolist() == pytest.approx([100, 500])
    assert found.between_ms[0] == pytest.approx(800 / 4) and np.isnan(found.between_ms[1])
    assert found.end_ms.tolist() == pytest.approx([900, 500]) and found.late.tolist() == [True, False]
    assert run.gaps.gap_ms.tolist() == pytest.approx([200, 600])
    assert run.met(Target(between_ms=300)).tolist() == [False, True]  # the first was late
    assert run.met(Target(first_ms=499)).tolist() == [False, False]


def test_percentiles_by_hand():
    run = run_of(np.arange(100) + np.arange(1, 101) / 1e3 + 0.1)  # ends 101, 102, … 200 ms after arrival
    assert [run.quantile("end_ms", share, 0) for share in (0.5, 0.95, 0.99, 1)] == pytest.approx([150, 195, 199, 200])
    found = run.summary(warm_up=0).value["end_ms"]
    assert found[["p50", "p95", "p99"]].tolist() == pytest.approx([150, 195, 199])
    assert found["mean"] == pytest.approx(150.5)
    assert run.quantile("end_ms", 0.5, 0.5) == pytest.approx(175)  # without the first half
    assert run.holds(Target(end_ms=199, share=0.99), 0) and not run.holds(Target(end_ms=198, share=0.99), 0)


def test_rates_by_hand():
    steps = [
        (0.0, 1.0, "prefill", 2, 0.0, 0, 0, 2),
        (1.0, 3.0, "decode", 2, 3.0, 6, 3, 4),  # one of five is beyond the end
        (3.0, 5.0, "decode", 1, 1.0, 1, 1, 2),
    ]
    run = run_of([5.0, 10.0], arrived=[0.0, 1.0], first=[1.0, 1.5], steps=steps)
    found = run.summary(Target(end_ms=6000), warm_up=0).value
    assert found["requests_per_s", "mean"] == pytest.approx(2 / 10)
    assert found["tokens_per_s", "mean"] == pytest.approx(10 / 10)
    assert found["goodput_per_s", "mean"] == pytest.approx(1 / 10)  # the second took 9 s
    assert found["batch", "mean"] == pytest.approx((2 * 2 + 1 * 2) / 10)
    assert found["tokens_per_step", "mean"] == pytest.approx((4 + 2) / 3)
    assert found["late", "share"] == 0


def test_failed_request_counts_as_the_slowest():
    run = run_of([1.0, np.nan], first=[0.1, np.nan], reasons=["length", "error"], tokens=[5, 0])
    assert run.quantile("first_ms", 0.5, 0) == pytest.approx(100) and run.quantile("first_ms", 0.99, 0) == np.inf
    assert not run.holds(Target(first_ms=1e6), 0) and run.met(Target(first_ms=1e6)).tolist() == [True, False]
    assert run.summary(warm_up=0).value["first_ms", "p99"] == np.inf


def test_intervals_contain_the_true_mean():
    held = 0
    for seed in range(60):
        drawn = np.random.default_rng(seed).exponential(size=200)
        run = run_of(np.arange(200) + drawn, pieces=[])
        line = run.summary(warm_up=0, resamples=100, seed=seed).loc["end_ms", "mean"]
        held += line.low <= 1000 <= line.high
    assert 51 <= held <= 59


def test_intervals_of_correlated_requests_are_wider():
    drawn = np.repeat(np.random.default_rng(0).exponential(size=20), 10)

    def width(values):
        run = run_of(np.arange(200) + values, pieces=[])
        line = run.summary(warm_up=0, resamples=300).loc["end_ms", "mean"]
        return line.high - line.low

    assert width(drawn) > 2 * width(np.random.default_rng(1).permutation(drawn))


@pytest.mark.parametrize("first", [0.01, 300.0])
def test_highest_load_is_found_by_bisection(first):
    rates = []

    def run(rate):
        rates.append(rate)
        return run_of(np.arange(20) + 0.1 + rate / 1000, pieces=[])  # ends 100 + rate ms after arrival

    found = load.highest_load(run, Target(end_ms=140), first=first, within=0.01)
    assert found.rate <= 40 < found.missed <= 1.01 * found.rate
    assert found.tried.rate.tolist() == sorted(rates) and found.tried.held.tolist() == [
        rate <= 40 for rate in sorted(rates)
    ]
    never = load.highest_load(run, Target(end_ms=50), first=first)
    assert never.rate == 0 and never.run is None
    always = load.highest_load(run, Target(end_ms=1e9), first=first, most=1000)
    assert always.rate == 1000 and always.missed == np.inf


def test_measurement_is_a_valid_record():
    cost = Linear(per_draft=0.02, attention="eager")
    trace = AcceptanceTrace.synthetic(alpha=0.8, length=32, sequences=8)
    drawn = Workload.draw(Poisson(1.0), 20, max_new_tokens=32)
    ways = {"none": 0, "default": bass.Goodput(cost)}
    found = measure(lambda asked, way: load.simulate(asked, trace, cost, draft_length=ways[way]), drawn)
    assert found["ratio"] == found["highest"]["default"] / found["highest"]["none"] > 1.3
    assert found["least_over_none"] == min(line["over_none"] for line in found["tried"]) > 1
    rates = [line["rate"] for line in found["tried"]]
    assert rates == sorted(set(rates)) and set(found["highest"].values()) <= set(rates)
    how = {"served": "simulated", "max_batch_size": 8, "temperature": 0.0, "costs": None}
    assert record_lines.kind_of(record_line(found, drawn, bass.load_pair(), **how)) == "load"


def test_runs_are_compared_metric_by_metric():
    slow, fast = run_of(np.arange(40) + 0.5), run_of(np.arange(40) + 0.3)
    found = {line["metric"]: line for line in side_by_side(slow, fast)}
    assert found["end_ms p99"]["ratio"] == pytest.approx(0.6) and found["first_ms p50"]["ratio"] == pytest.approx(1)
    found = {line["metric"]: line for line in side_by_side(slow, slow, fast)}  # against runs before and after
    assert found["end_ms p99"]["ratio"] == pytest.approx(0.8)


def test_bearable_rate_counts_served_requests():
    """Five rows take a prefill and 4 steps of 1 s each; the first row is prefilled alone: 41 s."""
    trace = AcceptanceTrace.synthetic(alpha=0.0, length=5, sequences=4)
    serve = partial(simulate, trace=trace, cost=Linear(), max_batch_size=5, prefill=lambda rows, tokens: 1.0)
    rates = [
        bearable_rate(serve, Workload.draw(Poisson(1.0), 40, max_new_tokens=5, deadline=seconds))
        for seconds in (None, 8.0, 0.1)
    ]
    assert rates == pytest.approx([40 / 41] * 3, rel=1e-3)
    refusing = run_of(np.arange(40) + 0.5, reasons=["error"] * 40)
    with pytest.raises(ValueError, match="none of 40 simultaneous requests was served; finish reasons: error"):
        bearable_rate(lambda asked: refusing, Workload.draw(Poisson(1.0), 40))


def test_run_without_served_requests_has_a_summary():
    trace = AcceptanceTrace.synthetic(alpha=0.0, length=5, sequences=4)
    drawn = Workload.draw(Poisson(1.0), 10, max_new_tokens=5, deadline=1e-6)
    found = simulate(drawn, trace, Linear(), max_batch_size=1, prefill=lambda rows, tokens: 100.0)
    assert found.latencies.late.all() and found.summary().value["late", "share"] == 1
    assert not found.holds(Target(first_ms=1e5)) and "100.0% late" in repr(found)


def samples(*finish, passed=((True, False), (False, True)), sure=((-1.0, -2.0), (-2.0, -1.0))):
    lines = [
        {
            "problem": f"p{problem}", "row": row, "finish_seconds": finish[problem][row], "finished": True, "tokens": 1,
            "logprob_sum": sure[problem][row], "passed": passed[problem][row],
        }
        for problem in range(len(finish)) for row in range(2)
    ]  # fmt: skip
    return pd.DataFrame(lines)


def test_answers_in_time_by_hand():
    """Problem 0: rows end at 1 s (sure, right) and 3 s. Problem 1: at 2 s (unsure, wrong) and 4 s (sure, right)."""
    ways = {"one": samples((1.0, 3.0), (2.0, 4.0))}
    found = load.front(workload([0.0, 1.0]), ways, [2.0, 10.0])
    assert found.pass_first.tolist() == [0.5, 1.0]  # at 2 s problem 1 has only the wrong row
    assert found.p50_ms.tolist() == pytest.approx([2000, 3000]) and found.p99_ms.tolist() == pytest.approx([3000, 6000])
    assert found.requests_per_s.tolist() == pytest.approx([2 / 4, 2 / 7]) and found.front.tolist() == [True, True]
    late = load.front(workload([0.0, 1.0], deadline=4.5), ways).iloc[0]
    # the second begins at 3 and is cancelled at 5.5: after 2.5 s its first row is done, and wrong
    assert late.pass_first == 0.5 and late.answered == 1 and late.p99_ms == pytest.approx(4500)


def test_cut_off_rows_occupy_the_server_until_the_answer():
    ways = {"cut": samples((1.0, np.nan), (np.nan, np.nan))}
    found = load.front(workload([0.0, 0.0]), ways, [10.0]).iloc[0]
    assert found.p50_ms == pytest.approx(10_000) and found.p99_ms == pytest.approx(20_000) and found.answered == 0.5
    left = load.front(workload([0.0, 0.0], deadline=4.0), ways).iloc[0]
    assert left.p50_ms == pytest.approx(4000)
    with pytest.raises(ValueError, match="rows of cut were cut off; give finite budgets, or all requests deadlines"):
        load.front(workload([0.0]), ways)


def test_another_method_serves_the_tail():
    ways = {"slow": samples((1.0, 3.0), (2.0, 4.0)), "fast": samples((0.1, 0.2), (0.1, 0.2), passed=((True,) * 2,) * 2)}
    found = load.front(workload([0.0, 1.0]), ways, tail="fast")
    assert found[found.way == "slow"].p99_ms.item() == pytest.approx(3000)
    assert not found.front[found.way == "slow"].item() and found.front[found.way == "fast"].item()
    with pytest.raises(ValueError, match="tail must be one of slow, fast"):
        load.front(workload([0.0]), ways, tail="other")


def test_command_simulates_within_80_columns(tmp_path):
    saved = str(tmp_path / "load.jsonl")
    done = invoke("load", "--simulate", "h100", "--rate", "40", "--count", "12", "--between-ms", "9", "--save", saved)
    assert done.exit_code == 0 and "p99" in done.output and "goodput_per_s" in done.output
    assert "simulated with costs of NVIDIA H100" in " ".join(done.output.split())
    assert max(map(len, done.stdout.splitlines())) <= 80
    again = invoke("load", "--simulate", "h100", "--workload", saved, "--json")
    found = json.loads(again.stdout)
    assert found["served"] == "simulated" and len(found["metrics"]) > 20 and "12 requests" in found["workload"]
    best = invoke("load", "--simulate", "h100", "--count", "12", "--highest", "--first-ms", "30", "--json")
    best = json.loads(best.stdout)
    assert f"requests at {best['rate']:.3g}/s" in best["workload"]
    assert best["rate"] > 10 and all(line["held"] == (line["rate"] <= best["rate"]) for line in best["tried"])


def answered(workload, *given, **options):
    asked = workload.requests
    reasons = ["error" if prompt == "no" else "length" for prompt in asked.prompt]
    run = run_of(asked.arrived + 1.0, first=asked.arrived + 0.5, arrived=asked.arrived, reasons=reasons)
    run.meta["errors"] = {number: "429" for number, reason in enumerate(reasons) if reason == "error"}
    return run


@pytest.fixture
def service(monkeypatch):
    served = []

    def over_http(workload, url, *, api_key, **options):
        served.append((len(workload), api_key))
        return answered(workload)

    monkeypatch.setattr(load, "over_http", over_http)
    return served


def test_failed_requests_are_an_exit_code(service, tmp_path):
    arrivals = tmp_path / "asked.jsonl"
    for prompts, code in ((["yes", "yes"], 0), (["yes", "no"], 1)):
        lines = [{"arrived": at, "prompt": prompt, "max_new_tokens": 2} for at, prompt in enumerate(prompts)]
        arrivals.write_text("\n".join(map(json.dumps, lines)))
        done = invoke("load", "--url", "http://x", "--workload", str(arrivals), "--json", "--api-key", "sesame")
        assert done.exit_code == code and json.loads(done.stdout)["errors"] == code
    assert service == [(2, "sesame")] * 2


def test_unreachable_target_is_refused_at_once(service):
    refused = invoke("load", "--url", "http://x", "--highest", "--end-ms", "900")
    assert refused.exit_code == 2 and service == [(1, None)] * 2
    assert "a single request already misses the target: it takes end_ms 1000" in refused.stderr
    assert invoke("load", "--url", "http://x", "--highest", "--end-ms", "1100", "--json").exit_code == 0


def test_workload_is_not_written_over_its_source(tmp_path):
    asked = tmp_path / "asked.jsonl"
    Workload.draw(Poisson(1), 3, prompts=["a"]).save(asked)
    before = asked.read_bytes()
    refused = invoke("load", "--simulate", "h100", "--workload", str(asked), "--save", str(asked))
    assert refused.exit_code == 2 and asked.read_bytes() == before


def test_wrong_record_file_is_refused_before_serving(tmp_path, monkeypatch):
    notes = tmp_path / "notes.txt"
    notes.write_text("my notes")
    monkeypatch.setattr(load, "in_process", lambda *given, **options: pytest.fail("served"))
    refused = invoke("load", "--record", str(notes), "--count", "4")
    assert refused.exit_code == 2 and "was not changed" in refused.stderr and notes.read_text() == "my notes"
