"""Lessons show what a GPU recorded beside the model, and say so where nothing is recorded.

Records are made up (`gpu_box`), collected as real ones are, and read as lessons read them.
"""

import html
import re

import gpu_box
import lesson_runs
import pytest

from bass_lab.lessons import (
    l01_demonstrations,
    l01_figures,
    l04_figures,
    l06_figures,
    l07_figures,
    l08_demonstrations,
    l08_figures,
)
from bass_lab.lessons.l04_explorer import MODELLED, LengthExplorer
from bass_lab.measure import gpu_benchmark
from bass_lab.measure.gpu_plan import USELESS
from bass_lab.measure.gpu_records import NONE, gpu_record
from bass_lab.measure.roofline import H100, MODELS
from bass_lab.study.recorded_acceptance import AcceptanceTrace

NAME = "X1 Example (recorded)"


@pytest.fixture
def record(recorded):
    return lambda kind: gpu_record(kind, recorded)


# --- lesson 01 ---


def test_the_recorded_curve_stands_beside_the_modelled_one(record):
    curves = {"H100 (model), 8 rows": l01_demonstrations.h100_costs(8)}
    curves |= l01_demonstrations.recorded_costs(record("costs"), 8)
    assert list(curves) == ["H100 (model), 8 rows", f"{NAME}, 8 rows"]
    cost, found = gpu_box.costs(), curves[f"{NAME}, 8 rows"]
    assert found.n.tolist() == list(range(1, 10))
    assert found.target_ms[5] == pytest.approx(1e3 * cost.target(8, 6, 512))
    assert found.draft_ms[0] == 0 and found.draft_ms[5] == pytest.approx(1e3 * cost.draft(8, 5, 512))
    assert [line.name for line in l01_figures.cost_figure(curves).data][1:] == list(curves)
    speeds = l01_demonstrations.predicted(curves, 5, tokens_per_step=4.0)["speed-up"]
    cost_of_a_step = (cost.target(8, 6, 512) + cost.draft(8, 5, 512)) / cost.target(8, 1, 512)
    assert speeds[f"{NAME}, 8 rows"] == pytest.approx(4 / cost_of_a_step)


def test_more_rows_than_were_recorded_are_not_made_up(record):
    (name,) = l01_demonstrations.recorded_costs(record("costs"), 1000)
    assert name == f"{NAME}, 128 rows"
    assert l01_demonstrations.recorded_costs(None, 8) == {}


# --- lesson 04 ---


def test_replays_count_the_recorded_costs_too(record, pair):
    models = l04_figures.cost_models(pair, False, record("costs"))
    assert next(iter(models)) == MODELLED and list(models)[-1] == NAME and len(models) == 3
    assert list(l04_figures.cost_models(pair, False))[-1] != NAME
    traces = {"easy": AcceptanceTrace.synthetic(alpha=0.9, length=64, sequences=8)}
    found = l04_figures.replayed_lengths(
        traces, models, [4], max_new_tokens=24, repeats=2, seed=0, lengths=(0, 2, 4)
    ).set_index(["costs", "k"])
    assert (found.speed.xs(NAME) != found.speed.xs(MODELLED)).any()
    titles = [note.text for note in l04_figures.lengths_figure(found.reset_index(), "").layout.annotations]
    assert f"easy: {NAME}" in titles


def test_the_explorer_offers_the_recorded_costs(record):
    explorer = LengthExplorer(repeats=2, recorded=record("costs"))
    modelled = explorer.table
    explorer.controls["costs"].value = NAME
    assert explorer.controls["launch"].disabled
    assert not modelled.speed.equals(explorer.table.speed)
    assert NAME not in LengthExplorer(repeats=2).controls["costs"].options


# --- lesson 06 ---


def test_a_recorded_timeline_has_the_figures_of_a_live_one(record):
    timeline = record("timeline").content
    figure = l06_figures.timeline_figure(timeline)
    assert list(figure.layout.yaxis.categoryarray) == ["GPU 0, stream 7", "phase", "host"]
    table = l06_figures.phase_table({NAME: timeline})
    phases = timeline.phases.loc["decode"]
    assert table.loc[NAME].equals(phases[["ms", "share", "kernels", "gap_share"]])
    assert l06_figures.gap_figure(timeline).data[0].name == "some kernel runs"


# --- lesson 07 ---


def test_kernels_stand_beside_the_floor_by_shape(record):
    kernels = record("kernels").content
    table = l07_figures.beside_the_floor(kernels)
    line = table.loc[("Llama-8B", 2048, 5)]
    floor = 1e6 * MODELS["Llama-8B"].cache_bytes(8 * 2048) / 32 / gpu_box.COPY
    assert line["floor µs"] == pytest.approx(floor, rel=1e-3)
    assert line["ragged µs"] == pytest.approx(floor / 0.8, rel=1e-3) and line["ragged %"] == pytest.approx(80)
    assert line["fastest peer"] == "flex" and line["peer %"] == pytest.approx(70)
    assert len(table) == 24  # three models: three lengths at two query lengths, two more at one
    ours, peers = l07_figures.shares_figure(kernels).data
    assert set(ours.y.round(6)) == {80} and set(peers.y.round(6)) == {70}
    assert len(ours.x) == len(peers.x) == kernels.kernel.eq("ragged").sum()


def test_a_shape_that_only_peers_were_timed_at_shows_them_alone(record):
    kernels = record("kernels").content
    left = kernels[(kernels.kernel != "ragged") | (kernels.query_length != 5)]
    table = l07_figures.beside_the_floor(left)
    assert table.loc[("Llama-8B", 2048, 5)].isna().to_dict()["ragged µs"]
    assert table.loc[("Llama-8B", 2048, 5), "fastest peer"] == "flex"
    assert len(l07_figures.beside_the_floor(left[left.batch == 1])) == 0


# --- lesson 08 ---


def test_without_a_record_the_roofline_and_the_paper_stand_alone():
    table = l08_demonstrations.at_real_sizes(None)
    assert table.source.tolist() == ["roofline", "roofline", "the paper", "roofline"]
    assert table.device.tolist() == [H100.name, H100.name, "one A100", H100.name]
    figure = l08_figures.real_sizes_figure(table)
    assert "synthetic" not in figure.layout.title.text
    assert {bar.name for bar in figure.data} == {"roofline (model)", "the paper"}


def test_ways_at_real_sizes_stand_between_the_roofline_and_the_paper(record):
    table = l08_demonstrations.at_real_sizes(record("gpu"))
    eight = table[table.batch == 8]
    assert eight.source.tolist()[0] == "roofline" and eight.source.tolist()[-1] == "the paper"
    ways = eight.set_index("way")
    assert ways.ms["regular"] == 8 and ways.ms["batched k=best, α 0.8"] == 3
    assert ways["over regular"]["batched k=goodput, α 0.02"] == pytest.approx(8 / 6)  # a useless draft
    assert ways.ms["transformers, sdpa, static cache"] == 9 and ways.ms["batched k=best, α 0.8, pad"] == 3
    measured = table[table.source == "measured"]
    assert set(measured.device) == {gpu_box.DEVICE} and measured.synthetic.all() and measured.exact.all()
    least = table[table.source == "roofline"].set_index("batch").ms
    assert least[8] == pytest.approx(1e3 * (2 * 7.59e9 + 8 * 577 * 2 * 32 * 32 * 128 * 2) / gpu_box.COPY, rel=1e-3)


def test_the_figure_of_real_sizes_says_that_it_is_synthetic(record):
    table = l08_demonstrations.at_real_sizes(record("gpu"))
    figure = l08_figures.real_sizes_figure(table)
    assert figure.layout.title.text.endswith("(synthetic)")
    drawn = {label: ms for bar in figure.data for label, ms in zip(bar.y, bar.x, strict=True)}
    assert len(drawn) == len(table) and drawn["batch 8: batched (paper)"] == 5.8
    assert drawn["batch 8: batched k=best, α 0.8"] == 3


def test_the_papers_claims_stand_beside_the_recorded_way_that_is_nearest(record):
    line = l08_demonstrations.nearest_to_the_paper(record("gpu"))
    assert (line["shape"], line.batch, line.method, line.device) == ("paper-7.8b", 8, "batched", gpu_box.DEVICE)
    assert line.mean_ms == gpu_box.MS["batched"] and line.alpha != USELESS  # a useless draft takes twice as long
    assert l08_demonstrations.nearest_to_the_paper(None) is None


def test_the_papers_figure_is_scaled_to_the_recorded_gpu(record):
    gpu = l08_demonstrations.gpu_of(record("gpu"))
    assert gpu.bandwidth == gpu_box.COPY and gpu_box.DEVICE in gpu.name
    assert gpu_benchmark.paper_at(gpu.bandwidth)[1] == pytest.approx(5.8)
    assert l08_demonstrations.gpu_of(None) is H100


# --- the lessons themselves ---

SHOWN = {  # what a lesson shows of its records
    "01_speculative_decoding": [f"{NAME}, 4 rows"],
    "04_draft_length": [f"mini: {NAME}", NAME],
    "05_draft_models": ["a drafted token of 8 rows there: "],
    "06_kernel_timelines": ["Kernels and gaps", "GPU 0, stream 7", NAME],
    "07_ragged_attention_kernels": ["fastest peer", "ragged µs"],
    "08_latency_and_utilization": ["batch 8: transformers, sdpa, static cache", "(synthetic)"],
    "10_quantization": [f"full weights: {NAME}"],
    "11_interactive_serving": [f"{NAME}: default: "],
}


@pytest.mark.slow
@pytest.mark.parametrize("lesson", SHOWN)
def test_a_lesson_shows_what_is_recorded_and_says_where_nothing_is(lesson, recorded, unrecorded, tmp_path, monkeypatch):
    quicker = lesson_runs.QUICKER.get(lesson, {})
    monkeypatch.setenv("BASS_RECORDS", str(recorded))
    shown = text_of(lesson_runs.execute(lesson, tmp_path, **quicker))
    assert f"Recorded on {gpu_box.DEVICE}: bfloat16" in shown and NONE not in shown
    monkeypatch.setenv("BASS_RECORDS", str(unrecorded))
    without = text_of(lesson_runs.execute(lesson, tmp_path, **quicker))
    assert NONE in without and gpu_box.DEVICE not in without and NAME not in without
    for text in SHOWN[lesson]:
        assert text in shown and text not in without, text


def text_of(notebook):
    """All that its cells printed and drew."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    written = "\n".join(str(output.get("text", output.get("data", ""))) for output in outputs)
    return re.sub(r"\\u([0-9a-f]{4})", lambda found: chr(int(found[1], 16)), html.unescape(written))
