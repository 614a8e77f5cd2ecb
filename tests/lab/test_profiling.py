import gzip
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pandas as pd
import pytest
import torch
from gpu_profile import OTHER, event, kernel, launch, phase, write_gpu_profile
from tiny import ragged_prompts, tiny_model

import bass_core as bass
from bass_lab.measure import kernel_events
from bass_lab.measure.profiling import PHASES, Profile, profile

PROMPTS = ragged_prompts(5, 11, 3)


def a_pair():
    return bass.ModelPair(tiny_model(), tiny_model(noise=0.1))


def decode(draft_length=3, **options):
    options = {"max_new_tokens": 9, "eos_token_id": ()} | options
    return bass.generate(a_pair(), PROMPTS, draft_length=draft_length, **options)


@pytest.fixture(scope="module")
def recorded():
    decode()
    with profile() as found:
        out = decode()
    return found, out


STEP = [phase(1, "plan", 0, 10), phase(1, "draft", 10, 30), phase(1, "verify", 30, 50), phase(1, "commit", 50, 100)]


GEMM = {"External_id": 44}
JOINED = {
    "a kernel belongs to the phase that launched it": (
        [launch(1, 12), kernel("early", 16, 4, 1), launch(2, 28), kernel("late", 60, 20, 2), launch(3, 32),
         kernel("next", 80, 5, 3)],
        {"early": "draft", "late": "draft", "next": "verify"},
    ),
    "kernels of a CUDA graph belong to the call that replayed it": (
        [launch(5, 14, call="cudaGraphLaunch"), *(kernel(f"node {at}", 20 + 10 * at, 8, 5) for at in range(3))],
        {"node 0": "draft", "node 1": "draft", "node 2": "draft"},
    ),
    "launches through the driver and copies count": (
        [launch(8, 33, call="cuLaunchKernelEx", category="cuda_driver"), kernel("_ragged", 66, 3, 8), launch(9, 55),
         kernel("Memcpy DtoH", 70, 3, 9, category="gpu_memcpy")],
        {"_ragged": "verify", "Memcpy DtoH": "commit"},
    ),
    "an operator replaces a launch that was not recorded": (
        [event("cpu_op", "aten::mm", 12, 6, **GEMM), kernel("gemm", 60, 5, 77, **GEMM)], {"gemm": "draft"}
    ),
    "no launch": ([kernel("gemm", 60, 5, 77)], {"gemm": None}),
    "a launch at the edge": ([launch(1, 30), kernel("at the edge", 31, 1, 1)], {"at the edge": "verify"}),
    "a launch after the step": ([launch(1, 100), kernel("after", 105, 5, 1)], {"after": None}),
    "a launch of another thread": ([launch(1, 12, thread=OTHER), kernel("stranger", 15, 5, 1)], {"stranger": None}),
    "CPU operators that others contain are not counted": (
        [event("cpu_op", "linear", 12, 8), event("cpu_op", "addmm", 13, 6), event("cpu_op", "copy", 14, 1),
         event("cpu_op", "add", 20, 2), event("cpu_op", "worker", 15, 2, thread=OTHER)],
        {"linear": "draft", "add": "draft", "worker": None},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", JOINED)
def test_kernels_and_operators_have_the_phase_of_their_launch(name):
    events, expected = JOINED[name]
    ranges, kernels = kernel_events.join([*STEP, *events], on_gpu="CPU operators" not in name)
    phases = [ranges.phase[place] if place >= 0 else None for place in kernels.owner]
    assert dict(zip(kernels.name, phases, strict=True)) == expected


def test_times_count_from_the_first_phase_in_milliseconds():
    shifted = [dict(one, ts=one["ts"] + 5e12) for one in [*STEP, launch(1, 12), kernel("k", 16, 4, 1)]]
    ranges, kernels = kernel_events.join(shifted, on_gpu=True)
    assert ranges.start_ms.tolist() == [0, 0.01, 0.03, 0.05] and ranges.end_ms.iloc[-1] == 0.1
    assert kernels[["start_ms", "duration_ms", "launch_ms"]].iloc[0].tolist() == [0.016, 0.004, 0.012]
    assert kernels.lane[0] == "GPU 0, stream 7"


@pytest.fixture
def gpu_profile(tmp_path):
    return Profile.load(write_gpu_profile(tmp_path / "gpu.json"))


def test_gpu_phases_follow_each_other_on_the_device(gpu_profile):
    first = gpu_profile.spans[gpu_profile.spans.step == 0].set_index("phase")
    assert first.start_ms.tolist() == [0, 0, 0.05, 0.072]
    assert first.duration_ms.tolist() == pytest.approx([0, 0.05, 0.022, 0.028])  # to the host's end of the step
    assert first.kernels.tolist() == [0, 2, 1, 1]
    assert first.busy_ms.tolist() == pytest.approx([0, 0.025, 0.02, 0.002])
    assert first.gap_ms.tolist() == pytest.approx([0, 0.025, 0.002, 0.026])
    assert first.host_ms.tolist() == pytest.approx([0.01, 0.02, 0.02, 0.05])
    assert gpu_profile.steps.duration_ms.tolist() == pytest.approx([0.1, 0.1])


def test_gpu_totals_by_name_and_phase(gpu_profile):
    table = gpu_profile.totals()
    assert table.index.tolist() == [("draft", "gemm"), ("verify", "attention"), ("commit", "Memcpy DtoH")]
    assert table.loc[("draft", "gemm")].tolist() == pytest.approx([4, 0.05, 50 / 94, 12.5])
    assert gpu_profile.totals(by=["phase"]).share.sum() == pytest.approx(1)


def test_gpu_step_that_ends_late_pushes_the_next_one(tmp_path):
    path = write_gpu_profile(tmp_path / "late.json")
    document = json.loads(path.read_text())
    for one in document["traceEvents"]:
        if one["name"] == "Memcpy DtoH" and one["ts"] < 100:
            one["dur"] = 45  # beyond the next step's start at 120
    path.write_text(json.dumps(document))
    spans = Profile.load(path).spans
    starts = spans.start_ms.to_numpy()
    assert starts[4] == pytest.approx(0.135)
    assert (starts[1:] >= (starts + spans.duration_ms)[:-1] - 1e-9).all()


def test_gpu_without_kernels_is_refused(tmp_path):
    found = Profile.load(write_gpu_profile(tmp_path / "empty.json", kernels=False))
    with pytest.raises(ValueError, match="recorded no kernel there"):
        _ = found.phases


def test_steps_are_the_traces(recorded):
    found, out = recorded
    trace = out.trace.steps
    sums = trace.groupby("step")[["drafted", "accepted", "emitted"]].sum()
    assert found.steps.number.tolist() == sums.index.tolist()
    assert (found.steps[["drafted", "accepted", "emitted"]].to_numpy() == sums.to_numpy()).all()
    assert found.steps.rows.tolist() == trace.groupby("step").size().tolist()
    assert found.steps.kind.tolist() == trace.drop_duplicates("step").kind.tolist()


def test_every_operator_inside_a_step_has_a_phase(recorded):
    found, _ = recorded
    kernels = found.kernels
    for step in found.steps.itertuples():
        end = step.start_ms + step.duration_ms
        inside = kernels[(kernels.start_ms >= step.start_ms) & (kernels.start_ms < end)]
        assert len(inside) > 20 and (inside.step == step.Index).all() and inside.phase.isin(PHASES).all()
    assert kernels.phase.isna().any()  # the session's setup belongs to no step


def test_phases_come_in_order_and_sum_to_no_more_than_the_step(recorded):
    found, _ = recorded
    for step, spans in found.spans.groupby("step"):
        kind = found.steps.kind[step]
        order = ["prefill", "commit"] if kind == "prefill" else ["plan", "draft", "verify", "commit"]
        assert spans.phase.tolist() == order
        assert spans.duration_ms.sum() <= found.steps.duration_ms[step] + 1e-9
    assert (found.spans.gap_ms > 0).all()
    assert (found.spans.busy_ms + found.spans.gap_ms).to_numpy() == pytest.approx(found.spans.duration_ms.to_numpy())
    kernels = found.kernels.dropna(subset="step")
    summed = kernels.groupby(["step", "phase"]).duration_ms.sum()
    spans = found.spans.set_index(["step", "phase"])
    assert spans.busy_ms[summed.index].to_numpy() == pytest.approx(summed.to_numpy(), abs=1e-4)  # one thread
    assert found.phases.share.groupby("kind").sum().to_numpy() == pytest.approx([1, 1])


def test_draft_and_target_run_in_their_own_phases(recorded):
    found, _ = recorded
    step = found.steps.query("kind == 'decode' and k == 3").index[0]
    kernels = found.kernels[found.kernels.step == step]
    counts = kernels[kernels.name == "aten::scaled_dot_product_attention"].phase.value_counts()
    assert counts.to_dict() == {"draft": 3 * 2, "verify": 2}  # passes × layers


def test_profile_changes_no_token():
    plain = decode(temperature=0.8)
    with profile():
        profiled = decode(temperature=0.8)
    assert all(torch.equal(a, b) for a, b in zip(plain.sequences, profiled.sequences, strict=True))


def test_two_runs_in_one_profile_are_kept_apart():
    with profile() as found:
        first = decode(draft_length=0)
        second = decode(draft_length=3)
    lengths = [out.trace.steps.step.nunique() for out in (first, second)]
    assert found.steps.run.tolist() == [0] * lengths[0] + [1] * lengths[1]
    assert found.steps.number.tolist() == [*range(lengths[0]), *range(lengths[1])]
    assert found.steps.index.is_unique
    assert found.steps.drafted[found.steps.run == 0].sum() == 0


def test_steps_of_a_session_that_runs_already():
    with bass.Session(a_pair(), eos_token_id=()) as session:
        for prompt in PROMPTS:
            session.submit(prompt, max_new_tokens=12)
        session.step()
        with profile() as found:
            session.step()
            session.step()
    assert found.steps.number.tolist() == [1, 2] and found.steps.kind.tolist() == ["decode"] * 2


def test_nothing_is_marked_while_no_profile_is_taken(monkeypatch):
    made = []
    original = torch.profiler.record_function.__init__
    monkeypatch.setattr(
        torch.profiler.record_function, "__init__", lambda self, *a: (made.append(a), original(self, *a))[1]
    )
    with profile():
        decode()
    assert len(made) > 8
    made.clear()
    assert bass.Session.on_phase is None
    decode()
    assert made == []


def test_nested_profiles_are_refused():
    with profile() as outer:
        with pytest.raises(RuntimeError, match="profiles do not nest"), profile():
            pass
        decode()
    assert len(outer.steps) > 3
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):  # noqa: SIM117
        with pytest.raises(RuntimeError, match="a profiler is running already"), profile():
            pass


def test_error_inside_passes_through_and_the_next_profile_works():
    with pytest.raises(ZeroDivisionError), profile() as broken:
        bass.generate(a_pair(), PROMPTS, max_new_tokens=12, on_step=lambda event: 1 // 0)
    assert bass.Session.on_phase is None and not torch.autograd._profiler_enabled()
    with pytest.raises(ValueError, match="after its with block has ended"):
        _ = broken.kernels
    with profile() as found:
        pass
    with pytest.raises(ValueError, match="no step ran in this profile"):
        _ = found.phases
    with profile() as found:
        decode(max_new_tokens=3, trace="off")
    assert len(found.steps) > 1 and found.steps.rows.isna().all()


def test_failed_step_keeps_its_own_counts(monkeypatch):
    with bass.Session(a_pair(), eos_token_id=()) as session:
        session.submit(PROMPTS[0], max_new_tokens=8)
        session.step()
        with profile() as found:
            with monkeypatch.context() as patch, pytest.raises(FloatingPointError):
                patch.setattr(session.device_step, "target_pass", lambda *a: torch.full((1, 6, 97), torch.nan))
                session.step()
            session.step()
    assert found.steps.number.tolist() == [1, 1]
    assert found.steps.rows.isna().tolist() == [True, False]


def test_sessions_of_other_threads_are_left_out():
    with profile() as found:
        other = threading.Thread(target=decode)
        other.start()
        other.join()
        decode()
    assert found.steps.run.unique().tolist() == [0]


@pytest.mark.slow
def test_profile_writes_nothing_to_the_terminal():
    code = "import torch, bass_lab.measure.profiling as p\nwith p.profile(): torch.ones(3) + 1"
    environment = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "" and "profiler_start" not in done.stderr


def test_saved_profile_comes_back(recorded, tmp_path):
    found, _ = recorded
    found.save(tmp_path / "timeline.json.gz")
    again = Profile.load(tmp_path / "timeline.json.gz")
    for table in ("kernels", "spans", "steps", "phases"):
        pd.testing.assert_frame_equal(getattr(again, table), getattr(found, table))
    assert again.about == found.about and again.about["dtype"] == "float32"


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


@pytest.mark.parametrize("source", ["cpu", "gpu"])
def test_saved_trace_has_what_viewers_need(recorded, gpu_profile, tmp_path, source):
    found = recorded[0] if source == "cpu" else gpu_profile
    found.save(tmp_path / "t.json.gz")
    document = json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()), parse_constant=refuse)
    events = document["traceEvents"]
    slices = [one for one in events if one["ph"] == "X"]
    assert all({"name", "cat", "pid", "tid", "ts", "dur"} <= set(one) for one in slices)
    named = {(one["name"], one["pid"], one.get("tid", 0)) for one in events if one["ph"] == "M"}
    for one in slices:
        assert ("thread_name", one["pid"], one["tid"]) in named
        for kind in ("process_name", "process_labels", "process_sort_index"):
            assert (kind, one["pid"], 0) in named
    phases = [one["name"] for one in slices if kernel_events.range_name(1, "draft") == one["name"]]
    assert len(phases) == 1
    assert document["distributedInfo"]["rank"] == 0
    assert "host_name" not in document


def test_nan_and_infinity_are_written_as_null(tmp_path):
    path = write_gpu_profile(tmp_path / "gpu.json")
    text = path.read_text().replace('"stream": 7', '"stream": 7, "achieved occupancy": NaN, "blocks per SM": Infinity')
    path.write_text(text)
    Profile.load(path).save(tmp_path / "t.json")
    kept = json.loads((tmp_path / "t.json").read_text(), parse_constant=refuse)
    assert any(one["args"].get("blocks per SM", 0) is None for one in kept["traceEvents"] if one["ph"] == "X")


def test_other_files_are_refused(tmp_path):
    path = Path(tmp_path / "torch.json")
    path.write_text(json.dumps({"traceEvents": []}))
    with pytest.raises(ValueError, match=r"torch\.json was not written by Profile\.save"):
        Profile.load(path)
