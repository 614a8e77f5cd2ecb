"""Simulated load: a schedule worked by hand, the M/D/1 queue, and the engine's schedule step by step."""

from dataclasses import replace
from importlib import import_module

import numpy as np
import pandas as pd
import pytest
from recording import use_on_cpu
from replays import Linear, trace_of, workload
from tiny import ragged_prompts
from trial_policies import Alternating, PerRow

import bass_core as bass
import bass_lab as lab
from bass_lab.load import LoadRun, Poisson, Workload, in_process, simulate
from bass_lab.load.simulation import _Server
from bass_lab.study import recording
from bass_lab.study.recorded_acceptance import AcceptanceTrace
from bass_lab.study.replay import Replay

COUNTS = ["kind", "rows", "k", "drafted", "accepted", "emitted"]


def test_five_requests_in_two_slots():
    """A prefill takes 2 s, a step with two drafts 1.2 s. Each request: the prefill's token, then 4 more.

    Texts 0, 1, 2 accept all drafts (3 + 1 tokens), texts 3, 4 none (4 steps of one token; the last step: 1 s).
    """
    trace = trace_of("1111", "1111", "1111", "0000", "0000")
    arriving = workload([0.0, 0.5, 0.6, 5.0, 30.0])
    run = simulate(arriving, trace, Linear(), draft_length=2, max_batch_size=2, prefill=lambda rows, tokens: 2.0)
    # 0-2 prefill 0; 2-4 prefill 1 (a slot is free, 2 waits); 4-5.2 both; 5.2-6.2 both, and end
    # 6.2-8.2 prefill 2, 3; 8.2-9.4 both; 9.4-10.6 both, and 2 ends; then 3 alone
    assert run.requests.started.tolist() == pytest.approx([0, 2, 6.2, 6.2, 30])
    assert run.requests["first"].tolist() == pytest.approx([2, 4, 8.2, 8.2, 32])
    # row 3 drafts 2, 2, 1, 0: a step keeps one position for the target's token
    assert run.requests.ended.tolist() == pytest.approx([6.2, 6.2, 10.6, 9.4 + 1.2 + 1.1 + 1, 32 + 1.2 + 1.2 + 1.1 + 1])
    assert run.requests.tokens.tolist() == [5] * 5 and set(run.requests.finish_reason) == {"length"}
    assert run.steps.kind.tolist()[:6] == ["prefill", "prefill", "decode", "decode", "prefill", "decode"]
    assert run.steps.rows.tolist() == [1, 1, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1]
    found = run.latencies
    assert found.queue_ms.tolist() == pytest.approx([0, 1500, 5600, 1200, 0])
    assert found.first_ms.tolist() == pytest.approx([2000, 3500, 7600, 3200, 2000])
    assert found.between_ms.tolist() == pytest.approx([1050, 550, 600, 1125, 1125])


def test_client_that_leaves_ends_before_the_next_step():
    trace = trace_of("0000", "0000", "0000")
    arriving = workload([0.0, 0.1, 0.2], deadline=[3.5, 1.0, np.nan])
    run = simulate(arriving, trace, Linear(), max_batch_size=1, prefill=lambda rows, tokens: 2.0)
    # 0-2 prefill 0; 1 cancelled at 1.1, noticed at 2; 2-4 decode 0, cancelled at 4; 4-6 prefill 2
    assert run.requests.finish_reason.tolist() == ["budget", "budget", "length"]
    assert run.requests.ended.tolist() == pytest.approx([4, 2, 10])
    assert run.requests.tokens.tolist() == [3, 0, 5]
    assert run.latencies.late.tolist() == [True, True, False]
    assert np.isnan(run.requests.started[1]) and np.isnan(run.latencies.first_ms[1])


def test_shared_prompt_is_read_once():
    trace = trace_of("0", "0")
    arriving = workload([0.0] * 4, new=2, numbers=[0, 1, 0, 0], prompts=["a", "b", "a", "a"])
    reads = []
    simulate(
        arriving, trace, Linear(), max_batch_size=3, prefill=lambda rows, tokens: reads.append((rows, tokens)) or 1
    )
    assert reads == [(2, 10), (0, 0)]


def test_a_long_prefill_is_priced_by_its_tokens():
    cost = Linear(per_token=0.1, per_draft=0.0)
    assert lab.load.prefill_seconds(cost, 1, 160) == pytest.approx(1 + 0.1 * 160)
    assert lab.load.prefill_seconds(cost, 4, 40) == pytest.approx(1 + 0.1 * 160)
    assert lab.load.prefill_seconds(cost, 2, 3) == pytest.approx(1 + 0.1 * 6)


def test_single_slot_with_one_token_is_an_md1_queue():
    """The mean wait is load / (2 (1 - load)) service times (Pollaczek 1930, Khinchine 1932)."""
    trace, load = trace_of("0"), 0.6
    waits = []
    for seed in range(4):
        arriving = Workload.draw(Poisson(load), 2000, prompts=["a"], max_new_tokens=1, seed=seed)
        run = simulate(arriving, trace, Linear(), max_batch_size=1, prefill=lambda rows, tokens: 1.0)
        waits.append(run.latencies.queue_ms[400:].mean() / 1e3)
    wanted = load / (2 * (1 - load))
    assert abs(np.mean(waits) - wanted) < 4 * np.std(waits, ddof=1) / np.sqrt(len(waits))
    assert np.mean(waits) == pytest.approx(wanted, rel=0.1)


@pytest.fixture(scope="module")
def prompts():
    return ragged_prompts(4, 9, 6, 13, 5, 7, 11, 8)


@pytest.fixture(scope="module")
def greedy(tiny_pair, prompts):
    trace = recording.record(tiny_pair, prompts, max_new_tokens=24, temperature=0.0, rollout=8)
    return replace(trace, lengths=np.full(len(prompts), 24))


def served_by_the_engine(arriving: Workload, pair, policy, places: int, seconds) -> LoadRun:
    """Serve with a session. Step n of a kind takes `seconds(kind, n)`."""
    requests, now = arriving.requests, 0.0
    handles, ended, pieces = [], {}, []
    with bass.Session(pair, max_batch_size=places, draft_length=policy, eos_token_id=()) as session:
        while len(handles) < len(requests) or not session.idle:
            if session.idle:
                now = max(now, requests.arrived[len(handles)])
            while len(handles) < len(requests) and requests.arrived[len(handles)] <= now:
                line = requests.loc[len(handles)]
                handles.append(session.submit(line.prompt, max_new_tokens=int(line.max_new_tokens)))
            event = session.step()
            kind = session.trace._step_parts[-1]["kind"]
            now += seconds(kind, event.step)
            pieces += [(row, now, len(tokens)) for row, tokens in zip(event.rows, event.new_tokens, strict=True)]
            ended |= {row: now for row in event.rows if handles[row].finish_reason}
    return pd.DataFrame(pieces, columns=["request", "at", "tokens"]), ended, session.trace.steps


@pytest.mark.parametrize(
    ("policy", "places"), [(0, 3), (3, 1), (bass.BassHeuristic(), 8), (Alternating(), 3), (PerRow(most=4), 3)], ids=repr
)
def test_simulator_finishes_when_the_engine_does(tiny_pair, prompts, greedy, policy, places):
    generator = np.random.default_rng(places)
    numbers = generator.integers(len(prompts), size=15)  # waiting rows with equal prompts share a prefill
    arriving = workload(
        np.sort(generator.uniform(0, 40, 15)), new=generator.integers(1, 24, 15), numbers=numbers,
        prompts=[prompts[number].tolist() for number in numbers],
    )  # fmt: skip
    taken = generator.uniform(0.2, 1.5, 2000)
    pieces, ended, steps = served_by_the_engine(arriving, tiny_pair, policy, places, lambda kind, step: taken[step])
    count = iter(taken)
    limits = arriving.requests.max_new_tokens.to_numpy()
    rows = Replay.of_requests(greedy, numbers, limits, [[0, row] for row in range(15)])
    policy = bass.FixedLength(policy) if isinstance(policy, int) else policy
    server = _Server(arriving, rows, policy, places, lambda *_: next(count), lambda step: next(count))
    found = server.served()
    assert found.requests.ended.tolist() == pytest.approx([ended[row] for row in range(15)])
    real = steps.groupby("step").agg(
        kind=("kind", "first"), rows=("row", "size"), k=("k", "mean"), drafted=("drafted", "sum"),
        accepted=("accepted", "sum"), emitted=("emitted", "sum"),
    )  # fmt: skip
    pd.testing.assert_frame_equal(found.steps[COUNTS], real[COUNTS].reset_index(drop=True), check_dtype=False)
    pd.testing.assert_frame_equal(found.pieces, pieces, check_dtype=False)
    assert (real.groupby("kind").rows.max() <= places).all() and set(real.kind) == {"prefill", "decode"}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_under_load_equal_generate(tiny_pair, prompts, temperature):
    arriving = workload([0.0, 0.0, 0.001, 0.01, 0.02, 0.02, 0.03, 0.1], new=12, prompts=[p.tolist() for p in prompts])
    options = {"temperature": temperature, "draft_length": 3, "eos_token_id": ()}
    run = in_process(arriving, tiny_pair, max_batch_size=3, **options)
    wanted = bass.generate(tiny_pair, prompts, max_new_tokens=12, **options)
    assert run.requests.tokens.tolist() == [12] * 8
    assert run.meta["sequences"] == [sequence.tolist() for sequence in wanted.sequences]
    requests = run.requests
    assert (requests.started >= requests.arrived).all() and (requests["first"] > requests.started).all()
    assert (requests.ended >= requests["first"]).all()
    assert run.pieces.groupby("request").tokens.sum().tolist() == [12] * 8
    assert run.steps.emitted.sum() == 96 and (run.steps.rows <= 3).all()


def test_warm_up_does_not_teach_the_drafter(tiny_pair, prompts):
    pair, options = replace(tiny_pair, draft=bass.SuffixDrafter(least=0.01)), {"draft_length": 3, "eos_token_id": ()}
    arriving = workload([0.0], new=6, prompts=[prompts[0].tolist()])
    run = in_process(arriving, pair, max_batch_size=1, **options)
    alone = bass.generate(pair, prompts[:1], max_new_tokens=6, **options).trace.steps
    assert run.steps.accepted.tolist() == alone.accepted.tolist()


def test_client_leaves_a_session(tiny_pair, prompts):
    arriving = workload([0.0, 0.0], new=60, deadline=[1e-4, np.nan], prompts=[p.tolist() for p in prompts[:2]])
    run = in_process(arriving, tiny_pair, draft_length=2, eos_token_id=())
    assert run.requests.finish_reason.tolist() == ["budget", "length"]
    assert run.latencies.late.tolist() == [True, False]


def test_too_long_requests_are_refused(tiny_pair, prompts):
    with pytest.raises(ValueError, match="context"):
        in_process(workload([0.0], new=1000, prompts=[prompts[0].tolist()]), tiny_pair)
    with pytest.raises(ValueError, match="texts have 40 tokens"):
        simulate(workload([0.0], new=41), AcceptanceTrace.synthetic(alpha=0.5, length=40, sequences=2), Linear())


def test_steps_are_recorded_before_the_clock_starts(monkeypatch, tiny_pair):
    use_on_cpu(monkeypatch)
    module, made = import_module("bass_lab.load.in_process"), []  # the package exports the function under this name
    served = module._served

    def watched(workload, prompts, session):
        made.append(session.device_step.recordings)
        run = served(workload, prompts, session)
        made.append(session.device_step.recordings)
        return run

    monkeypatch.setattr(module, "_served", watched)
    prompts = [ids.tolist() for ids in ragged_prompts(9, 5, 7, 6, 8)]
    arriving = workload([0.0, 0.0, 0.1, 0.1, 0.1], new=[9, 12, 10, 20, 11], prompts=prompts)
    module.in_process(arriving, tiny_pair, max_batch_size=4, draft_length=0, eos_token_id=())
    assert made[0] > 0 and made[1] == made[0]
