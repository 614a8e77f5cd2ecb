"""Lessons show GPU records next to the model, and say if there are no records.

The records are invented (`gpu_box`), and collected and read like real records.
"""

import html
import re

import gpu_box
import lesson_runs
import pytest

from bass_lab.gpu.recorded import NONE, gpu_record
from bass_lab.lessons import (
    l01_demonstrations,
    l01_figures,
    l04_figures,
    l06_figures,
    l07_figures,
    l08_demonstrations,
    l08_figures,
)
from bass_lab.lessons.l04_explorer import MODELLED
from bass_lab.measure.plan import USELESS
from bass_lab.measure.records import SHIPPED
from bass_lab.measure.roofline import MODELS
from bass_lab.study.recorded_acceptance import AcceptanceTrace

NAME = "X1 Example (recorded)"


@pytest.fixture
def record(recorded):
    return lambda kind: gpu_record(kind, recorded)


def test_recorded_costs_are_drawn_with_the_modelled_ones(record):
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


def test_replays_use_the_recorded_costs(record, pair):
    models = l04_figures.cost_models(pair, False, record("costs"))
    assert next(iter(models)) == MODELLED and list(models)[-1] == NAME and len(models) == 3
    assert list(l04_figures.cost_models(pair, False))[-1] != NAME
    traces = {"easy": AcceptanceTrace.synthetic(alpha=0.9, length=64, sequences=8)}
    found = l04_figures.replayed_lengths(
        traces, models, [4], max_new_tokens=24, repeats=2, seed=0, lengths=(0, 2, 4)
    ).set_index(["costs", "k"])
    assert (found.speed.xs(NAME) != found.speed.xs(MODELLED)).any()
    titles = l04_figures.lengths_figure(found.reset_index(), "").layout.annotations
    assert f"easy: {NAME}" in [each.text.replace("<br>", " ") for each in titles]


def test_recorded_timeline_is_drawn_like_a_live_one(record):
    timeline = record("timeline").content
    figure = l06_figures.timeline_figure(timeline)
    assert list(figure.layout.yaxis.categoryarray) == ["GPU 0, stream 7", "phase", "host"]
    assert list(l06_figures.step_table(timeline).columns[-2:]) == ["kernels", "gap_share"]


def test_kernels_are_compared_with_the_floor(record):
    kernels = record("kernels").content
    table = l07_figures.beside_the_floor(kernels)
    line = table.loc[("Llama-8B", 2048, 5)]
    floor = 1e6 * MODELS["Llama-8B"].cache_bytes(8 * 2048) / 32 / gpu_box.COPY
    assert line["floor µs"] == pytest.approx(floor, rel=1e-3)
    assert line["ragged µs"] == pytest.approx(floor / 0.8, rel=1e-3) and line["ragged %"] == pytest.approx(80)
    assert line["fastest peer"] == "flex" and line["peer %"] == pytest.approx(70)


def test_without_a_record_the_roofline_and_the_paper_remain():
    table = l08_demonstrations.at_real_sizes(None)
    assert table.source.tolist() == ["roofline", "roofline", "the paper", "roofline"]
    assert "synthetic" not in l08_figures.real_sizes_figure(table).layout.title.text


def test_recorded_methods_stand_between_roofline_and_paper(record):
    table = l08_demonstrations.at_real_sizes(record("gpu"))
    eight = table[table.batch == 8]
    assert eight.source.tolist()[0] == "roofline" and eight.source.tolist()[-1] == "the paper"
    ways = eight.set_index("way")
    assert ways.ms["regular"] == 8 and ways.ms["batched k=best, α 0.8"] == 3
    assert ways["over_regular"]["batched k=goodput, α 0.02"] == pytest.approx(8 / 6)  # a useless draft
    assert ways.ms["transformers, sdpa, static cache"] == 9 and ways.ms["batched k=best, α 0.8, pad"] == 3
    measured = table[table.source == "recorded"]
    assert set(measured.device) == {gpu_box.DEVICE} and measured.synthetic.all() and measured.exact.all()
    least = table[table.source == "roofline"].set_index("batch").ms
    assert least[8] == pytest.approx(1e3 * (2 * 7.59e9 + 8 * 577 * 2 * 32 * 32 * 128 * 2) / gpu_box.COPY, rel=1e-3)


def test_labels_of_speed_ups_are_quotients_of_bars():
    """In the shipped record rows drift apart, so the ratio of throughputs is smaller than the ratio of means."""
    found = gpu_record("gpu", SHIPPED)
    figure = l08_figures.real_sizes_figure(l08_demonstrations.at_real_sizes(found))
    bars = {bar[0]: bar[1:] for trace in figure.data for bar in zip(trace.y, trace.x, trace.text, strict=True)}
    regular = {batch: bars[f"batch {batch}: regular"][0] for batch in (8, 32)}
    for label, (ms, text) in bars.items():
        if "batched" in label and "paper" not in label:
            assert text == f"{regular[int(label.split(':')[0][6:])] / ms:.2f}×"
    assert (found.content.over_regular_mean > 1.05 * found.content.over_regular).any()


def test_paper_is_compared_with_the_nearest_recorded_method(record):
    line = l08_demonstrations.nearest_to_the_paper(record("gpu"))
    assert (line["shape"], line.batch, line.method, line.device) == ("paper-7.8b", 8, "batched", gpu_box.DEVICE)
    assert line.mean_ms == gpu_box.MS["batched"] and line.alpha != USELESS  # a useless draft takes twice as long
    assert l08_demonstrations.nearest_to_the_paper(None) is None


SHOWN = {  # what a lesson shows of its records
    "01_speculative_decoding": [f"{NAME}, 4 rows"],
    "04_draft_length": [f"mini: {NAME}", NAME],
    "05_draft_models": ["a draft token of 8 rows there: "],
    "06_kernel_timelines": ["Kernels and gaps", "GPU 0, stream 7", NAME],
    "07_ragged_attention_kernels": ["fastest peer", "ragged µs"],
    "08_latency_and_utilization": ["batch 8: transformers, sdpa, static cache", "(synthetic)"],
    "11_interactive_serving": [f"{NAME}: default: "],
}


@pytest.mark.slow
@pytest.mark.parametrize("lesson", SHOWN)
def test_lesson_shows_the_records_or_their_absence(lesson, recorded, unrecorded, tmp_path, monkeypatch):
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
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    written = "\n".join(str(output.get("text", output.get("data", ""))) for output in outputs)
    return re.sub(r"\\u([0-9a-f]{4})", lambda found: chr(int(found[1], 16)), html.unescape(written))
