"""Lesson 06: figures of a profile, the browser of steps, and the model of launches."""

import html
import json

import pytest
import record_lines
from gpu_profile import write_gpu_profile
from tiny import ragged_prompts, tiny_model

import bass_core as bass
from bass_lab.lessons import l06_figures
from bass_lab.measure.profiling import PHASES, Profile, profile

plotly = pytest.importorskip("plotly")


def decode(k):
    pair = bass.ModelPair(tiny_model(), tiny_model(noise=0.1))
    return bass.generate(pair, ragged_prompts(5, 11, 3), draft_length=k, max_new_tokens=16, eos_token_id=())


@pytest.fixture(scope="module")
def speculative():
    decode(3)
    with profile() as found:
        out = decode(3)
    return found, out.trace


@pytest.fixture(scope="module")
def regular():
    with profile() as found:
        decode(0)
    return found


@pytest.fixture(scope="module")
def gpu(tmp_path_factory):
    return Profile.load(write_gpu_profile(tmp_path_factory.mktemp("gpu") / "t.json"))


def bars(figure, lane):
    """Return name → list of (start, length) of the bars in a lane."""
    found = {}
    for trace in figure.data:
        for y, base, x in zip(trace.y, trace.base, trace.x, strict=True):
            if y == lane:
                found.setdefault(trace.name, []).append((base, x))
    return found


def test_timeline_has_every_phase_and_operator(speculative):
    found, _ = speculative
    figure = l06_figures.timeline_figure(found, 2)
    spans = found.spans[found.spans.step == 2].set_index("phase")
    drawn = bars(figure, "phase")
    assert list(drawn) == ["plan", "draft", "verify", "commit"]
    zero = spans.start_ms.min()
    for phase, [(start, length)] in drawn.items():
        assert (start, length) == (spans.start_ms[phase] - zero, spans.duration_ms[phase])
    kernels = found.kernels[(found.kernels.step == 2).fillna(False)]
    below = bars(figure, "CPU, thread 0")
    assert {phase: len(below[phase]) for phase in below} == kernels.phase.value_counts().to_dict()
    for phase, places in below.items():
        start, length = drawn[phase][0]
        assert all(start <= at and at + long <= start + length + 1e-6 for at, long in places)


def test_names_of_kernels_are_escaped(tmp_path):
    name = "kernel<float, 4>(<img src=x onerror=alert(1)>)"
    path = write_gpu_profile(tmp_path / "t.json")
    path.write_text(path.read_text().replace('"gemm"', json.dumps(name)))
    found = Profile.load(path)
    table = l06_figures.totals_table(found).to_html()
    assert html.escape(name) in table and "<img" not in table
    hovers = [about[0] for trace in l06_figures.timeline_figure(found).data for about in trace.customdata or ()]
    assert html.escape(name) in hovers and not any("<" in hover for hover in hovers)


def test_missing_steps_are_refused(speculative):
    found, _ = speculative
    assert l06_figures.timeline_figure(found).layout.title.text.startswith("Step 1:")
    assert l06_figures.timeline_figure(found, 1, 2).layout.title.text.startswith("Steps 1 to 2:")
    assert l06_figures.timeline_figure(found, 1, zoom=(0, 0.5)).layout.xaxis.range == (0, 0.5)
    for asked in ((99, None), (3, 2), (-1, None)):
        with pytest.raises(ValueError, match="the profile has the steps 0"):
            l06_figures.timeline_figure(found, *asked)


def test_browser_moves_with_its_sliders(speculative):
    found, trace = speculative
    step, count, figure, sentence, _ = l06_figures.timeline_browser(found, trace).children
    assert step.value == 1 and "prefill" not in sentence.value
    before = bars(figure, "phase")["draft"]
    step.value = 2
    after = bars(figure, "phase")["draft"]
    assert after != before and after == bars(l06_figures.timeline_figure(found, 2), "phase")["draft"]
    accepted = trace.steps.query("step == 2").accepted
    assert "accepted draft tokens per row" in sentence.value
    assert all(f"<td>{drafts}</td>" in sentence.value for drafts in accepted)
    count.value = 3
    assert len(bars(figure, "phase")["draft"]) == 3
    step.value = len(found.steps) - 1  # the last step
    assert len(bars(figure, "phase")["draft"]) == 1
    step.value = 0
    assert "prefill" in bars(figure, "phase")


def test_step_table_equals_the_trace(speculative):
    found, trace = speculative
    table = l06_figures.step_table(found)
    assert table.emitted.tolist() == trace.steps.groupby("step").emitted.sum().tolist()
    parts = table[[f"{phase} ms" for phase in PHASES]].sum(axis="columns")
    assert parts.to_numpy() == pytest.approx(found.spans.groupby("step").duration_ms.sum().to_numpy())
    assert table.gap_share.between(0, 1).all()


def test_full_steps_have_all_rows_and_the_full_draft(speculative):
    found, _ = speculative
    steps = found.steps.loc[l06_figures.full_steps(found)]
    assert 0 < len(steps) < (found.steps.kind == "decode").sum()
    assert (steps.rows == 3).all() and (steps.drafted == 9).all()
    with profile() as blind:
        pair = bass.ModelPair(tiny_model(), tiny_model(noise=0.1))
        bass.generate(pair, ragged_prompts(5), max_new_tokens=4, trace="off")
    with pytest.raises(ValueError, match="trace='steps'"):
        l06_figures.full_steps(blind)


def test_phases_are_lines_of_a_record(speculative):
    found, _ = speculative
    lines = l06_figures.phase_lines(found, method="batched", batch=3, k=None, max_new_tokens=16)
    assert {record_lines.kind_of(line) for line in lines} == {"phases"}
    assert [line["phase"] for line in lines] == list(PHASES[1:]) and lines[0]["models"] == found.about["models"]
    assert sum(line["share"] for line in lines) == pytest.approx(1)


def test_cost_table_compares_steps(speculative, regular):
    found, _ = speculative
    table = l06_figures.cost_table({"regular": regular, "speculative": found})
    assert table.tokens["regular"] == 1 and table.steps["regular"] == 15
    steps = found.steps.loc[l06_figures.full_steps(found)]
    assert table.tokens["speculative"] == pytest.approx((steps.accepted / 3 + 1).mean())
    assert table.ms["speculative"] == pytest.approx(steps.duration_ms.median())
    assert (table.ms_per_token == table.ms / table.tokens).all()
    assert table.kernels["speculative"] > table.kernels["regular"]


def test_large_kernels_hide_launches():
    large = l06_figures.launch_schedule(20, 6).query("lane == 'GPU'")
    assert large.start.tolist() == [6 + 20 * place for place in range(8)]
    small = l06_figures.launch_schedule(2, 6).query("lane == 'GPU'")
    assert small.start.tolist() == [6 + 6 * place for place in range(8)]
    graph = l06_figures.launch_schedule(2, 6, graph=True)
    assert graph.query("lane == 'GPU'").start.tolist() == [6 + 2 * place for place in range(8)]
    assert (graph.lane == "host").sum() == 1
