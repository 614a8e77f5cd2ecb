"""Lesson 08: the phases of a step, the roof above a pass, its figures, exercises, and runs with other parameters."""

import lesson_runs
import pandas as pd
import pytest

from bass_lab.lessons import l08_demonstrations, l08_figures
from bass_lab.lessons import l08_exercises as exercises
from bass_lab.measure import gpu_benchmark, records
from bass_lab.measure.roofline import Device, Roofline, Workload
from bass_lab.texts.prompt_sets import prompt_set

RECORD = records.SHIPPED / "embedded_cpu.jsonl"
DEVICE = Device("made up", bandwidth=1e9, flops=4e9)


@pytest.fixture(scope="module")
def phases(pair):
    options = {"repeats": 2, "max_new_tokens": 16, "temperature": 0.2}
    return l08_demonstrations.step_phases(pair, prompt_set("mini", 3), [1, 3], [0, 4], **options)


@pytest.fixture(scope="module")
def record():
    return records.frame(records.read(RECORD))


def test_phases_are_those_of_steps_with_all_rows_and_the_whole_draft(phases):
    assert list(zip(phases.batch, phases.k, strict=True)) == [(1, 0), (1, 4), (3, 0), (3, 4)]
    assert (phases[["draft", "verify", "other"]].sum(axis=1) == phases.step).all()
    regular, speculative = phases.query("k == 0"), phases.query("k == 4")
    assert (regular.tokens == 1).all() and speculative.tokens.between(1, 5).all()
    assert (regular.draft.to_numpy() < speculative.draft.to_numpy()).all()


def test_the_roof_stands_above_what_is_measured(pair, phases):
    roofline = Roofline(Workload.of(pair.target), DEVICE)
    bound = l08_demonstrations.bounds(phases, roofline)
    for line, phase in zip(bound.itertuples(), phases.itertuples(), strict=True):
        shape = line.batch, line.k + 1, phase.kv + line.k + 1
        assert line.roof == pytest.approx(1e3 * roofline.seconds(*shape))
        assert line.share == pytest.approx(line.roof / phase.verify)
        assert line.limit == ("arithmetic" if roofline.intensity(*shape) > DEVICE.ridge else "memory")
        for used, tokens in ((line.verified, line.k + 1), (line.emitted, phase.tokens)):
            operations = roofline.work.flops(line.batch, tokens, phase.kv + (tokens - 1) / 2)
            assert used == pytest.approx(operations / DEVICE.flops / phase.step * 1e3)
    assert set(bound.limit) == {"memory", "arithmetic"}  # regular decoding of one row, and the rest
    assert (bound.emitted <= bound.verified).all()
    regular = bound.query("k == 0")
    assert regular.emitted.to_numpy() == pytest.approx(regular.verified.to_numpy())


def test_figures_show_the_record(record):
    mini = record.query("prompt_set == 'mini'")
    throughput = {bar.name: bar for bar in l08_figures.throughput_figure(mini).data}
    assert list(throughput) == ["transformers", "assisted", "regular", "single", "batched"]
    eight = mini.query("batch == 8 and method == 'batched' and k == 5").iloc[0]
    at = list(throughput["batched"].x).index("8")
    assert throughput["batched"].y[at] == eight.tokens_per_second
    gains = {line.name: line for line in l08_figures.gain_figure(mini).data}
    assert "regular" not in gains and gains["batched"].y[at] == eight.over_regular
    assert gains["batched"].y[at] + gains["batched"].error_y.array[at] == pytest.approx(eight.high)
    latency = {marks.name: marks for marks in l08_figures.latency_figure(mini).data}["batched"]
    assert latency.y[at] == eight.mean_ms
    assert latency.y[at] - latency.error_y.arrayminus[at] == pytest.approx(eight.first_ms)
    assert len({bar.marker.pattern.shape for bar in throughput.values()}) == 5  # told apart without colour


def test_phases_and_roofline_figures(pair, phases):
    bars = l08_figures.phases_figure(phases).data
    assert [bar.name for bar in bars] == ["draft", "verify", "other"]
    assert sum(bar.x[3] for bar in bars) == pytest.approx(phases.step[3] / phases.tokens[3])
    roofline = Roofline(Workload.of(pair.target), DEVICE)
    bound = l08_demonstrations.bounds(phases, roofline)
    roof, regular, batched = l08_figures.roofline_figure(bound, roofline).data
    assert max(roof.y) == DEVICE.flops / 1e9 and list(regular.text) == list(batched.text) == ["1", "3"]
    shape = 3, 5, phases.kv[3] + 5
    assert batched.y[1] == pytest.approx(roofline.work.flops(*shape) / phases.verify[3] / 1e6)  # flop/ms in Gflop/s


def test_the_paper_stands_beside_with_its_hardware(record):
    table = l08_demonstrations.beside_the_paper(record)
    assert table.loc["the paper, abstract", "device"] == "one A100"
    assert table.loc["the paper, abstract", "mean ms per token"] == 5.8
    assert len(table) == 9 and table.device.str.contains("EPYC").sum() == 8
    slow, fast = gpu_benchmark.paper_at(3.35e12)
    assert slow == pytest.approx(2.68, abs=0.01) and fast == pytest.approx(3.46, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parameters",
    [
        {"batch_size": [1, 2], "draft_length": 3, "prompt_set": "library", "temperature": 0.0},
        {"batch_size": 3, "draft_length": None, "max_new_tokens": 8},
    ],
    ids=["library", "one batch, the default policy"],
)
def test_the_lesson_takes_parameters_and_writes_a_record(tmp_path, parameters):
    path = tmp_path / "record.jsonl"
    changed = {"max_new_tokens": 12, "repeats": 2, "output": str(path), **parameters}
    lesson_runs.execute("08_latency_and_utilization", tmp_path, **changed)
    lines = records.read(path)  # checks the schema
    found = records.frame(lines)
    sizes = parameters["batch_size"]
    assert sorted(found.batch.unique()) == (sizes if isinstance(sizes, list) else [sizes])
    assert set(found.method) >= {"transformers", "assisted", "regular", "batched"}
    assert (found.identical == found.rows).all() and (found.rows == found.batch).all()
    assert set(found.prompt_set) == {parameters.get("prompt_set", "mini")}
    batched = found.query("method == 'batched'")
    assert [None if pd.isna(k) else k for k in batched.k.unique()] == [parameters["draft_length"]]
    assert (batched.tokens_per_step >= 1).all()
    assert all(len(line["seconds"]) == 2 for line in lines)


def test_exercises_take_the_solutions_and_name_what_is_wrong(capsys):
    def latencies(started, finished, tokens, less=1, scale=1e3):
        each = [scale * (b - a) / (n - less) for a, b, n in zip(started, finished, tokens, strict=True)]
        return min(each), sum(each) / len(each), max(each)

    def floor(weights, per_key, batch, query_length, kv_length, bandwidth, flops, combine=max):
        memory = (2 * weights + per_key * batch * kv_length) / bandwidth
        return combine(memory, 2 * weights * batch * query_length / flops)

    lesson_runs.accepted_and_stub_is_not(exercises.check_latencies, latencies, capsys)
    lesson_runs.accepted_and_stub_is_not(exercises.check_floor, floor, capsys)
    wrong = [
        (exercises.check_latencies, lambda *case: latencies(*case, less=0)),
        (exercises.check_latencies, lambda *case: latencies(*case, scale=1)),
        (exercises.check_latencies, lambda *case: tuple(reversed(latencies(*case)))),
        (exercises.check_latencies, lambda started, finished, tokens: latencies([0] * len(tokens), finished, tokens)),
        (exercises.check_floor, lambda *case: floor(*case, combine=lambda a, b: a + b)),
        (exercises.check_floor, lambda *case: floor(*case, combine=min)),
        (exercises.check_floor, lambda *case: floor(case[0] * case[2], *case[1:])),
    ]
    for check, attempt in wrong:
        lesson_runs.refused(check, attempt, "", capsys)


def test_a_table_of_records_has_a_line_each(record):
    lines = records.read(RECORD)
    assert len(record) == len(lines)
    assert isinstance(record, pd.DataFrame) and record.over_regular[0] == lines[0]["over_regular"]["median"]
