"""Lesson 06: what its figures show of a profile, the browser, the model of launches, and its exercises."""

import html
import itertools
import json

import lesson_runs
import pytest
import record_lines
from gpu_profile import write_gpu_profile
from tiny import ragged_prompts, tiny_model

import bass_core as bass
from bass_lab.lessons import l06_figures
from bass_lab.lessons.l06_exercises import check_gaps, check_owner
from bass_lab.measure.profiling import PHASES, Profile, profile
from bass_lab.show.looks import LOOKS

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
    """name → list of (start, length) of the figure's bars in a lane."""
    found = {}
    for trace in figure.data:
        for y, base, x in zip(trace.y, trace.base, trace.x, strict=True):
            if y == lane:
                found.setdefault(trace.name, []).append((base, x))
    return found


# --- the timeline ---


def test_timeline_has_every_phase_and_operator_of_the_step_in_its_place(speculative):
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


def test_phases_are_told_apart_by_colour_and_by_pattern():
    assert len({LOOKS[phase].colour for phase in PHASES}) == len(PHASES)
    assert len({LOOKS[phase].hatch for phase in PHASES}) == len(PHASES)


def test_gpu_timeline_shows_the_host_ahead_of_the_device(gpu):
    figure = l06_figures.timeline_figure(gpu, 0)
    assert list(figure.layout.yaxis.categoryarray) == ["GPU 0, stream 7", "phase", "host"]
    host, device = bars(figure, "host"), bars(figure, "phase")
    assert host["verify"] == [pytest.approx((0.03, 0.02))] and device["verify"] == [pytest.approx((0.05, 0.022))]
    assert [start for start, _ in bars(figure, "GPU 0, stream 7")["draft"]] == pytest.approx([0.02, 0.04])


def test_only_the_longest_of_many_kernels_are_drawn(speculative, monkeypatch):
    found, _ = speculative
    monkeypatch.setattr(l06_figures, "MOST", 10)
    figure = l06_figures.timeline_figure(found, 2)
    assert "the longest 10 drawn" in figure.layout.title.text
    drawn = [length for places in bars(figure, "CPU, thread 0").values() for _, length in places]
    assert sorted(drawn) == sorted(found.kernels[(found.kernels.step == 2).fillna(False)].duration_ms)[-10:]


def test_names_of_kernels_are_text_wherever_they_stand(tmp_path):
    name = "kernel<float, 4>(<img src=x onerror=alert(1)>)"
    path = write_gpu_profile(tmp_path / "t.json")
    path.write_text(path.read_text().replace('"gemm"', json.dumps(name)))
    found = Profile.load(path)
    table = l06_figures.totals_table(found).to_html()
    assert html.escape(name) in table and "<img" not in table
    hovers = [about[0] for trace in l06_figures.timeline_figure(found).data for about in trace.customdata or ()]
    assert html.escape(name) in hovers and not any("<" in hover for hover in hovers)


def test_first_decode_step_is_shown_unless_asked_and_others_are_refused(speculative):
    found, _ = speculative
    assert l06_figures.timeline_figure(found).layout.title.text.startswith("Step 1:")
    assert l06_figures.timeline_figure(found, 1, 2).layout.title.text.startswith("Steps 1 to 2:")
    assert l06_figures.timeline_figure(found, 1, zoom=(0, 0.5)).layout.xaxis.range == (0, 0.5)
    for asked in ((99, None), (3, 2), (-1, None)):
        with pytest.raises(ValueError, match="the profile has the steps 0"):
            l06_figures.timeline_figure(found, *asked)


def test_browser_moves_with_its_sliders(speculative):
    pytest.importorskip("ipywidgets")
    found, trace = speculative
    step, count, figure, sentence, _ = l06_figures.timeline_browser(found, trace).children
    assert step.value == 1 and "prefill" not in sentence.value
    before = bars(figure, "phase")["draft"]
    step.value = 2
    after = bars(figure, "phase")["draft"]
    assert after != before and after == bars(l06_figures.timeline_figure(found, 2), "phase")["draft"]
    accepted = trace.steps.query("step == 2").accepted
    assert "accepted drafts per row" in sentence.value
    assert all(f"<td>{drafts}</td>" in sentence.value for drafts in accepted)
    count.value = 3
    assert len(bars(figure, "phase")["draft"]) == 3
    step.value = len(found.steps) - 1  # nothing lies beyond the last step
    assert len(bars(figure, "phase")["draft"]) == 1
    step.value = 0
    assert "prefill" in bars(figure, "phase")


def test_browser_of_a_recording_needs_no_trace(gpu):
    pytest.importorskip("ipywidgets")
    browser = l06_figures.timeline_browser(gpu)
    step, _, figure, sentence, _ = browser.children
    step.value = 1
    assert figure.layout.title.text == "Step 1: 4 kernels"
    assert "accepted drafts per row" not in sentence.value
    assert "application/vnd.jupyter.widget-view+json" in browser._repr_mimebundle_()


# --- what a step costs ---


def test_step_table_says_what_the_trace_says(speculative):
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
    assert [line["phase"] for line in lines] == list(PHASES[1:])
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


def test_cost_figure_stacks_the_medians(speculative, regular):
    found, _ = speculative
    figure = l06_figures.cost_figure({"regular": regular, "speculative": found})
    assert [trace.name for trace in figure.data] == ["plan", "draft", "verify", "commit"]
    part = found.spans[found.spans.step.isin(l06_figures.full_steps(found)) & (found.spans.phase == "verify")]
    assert figure.data[2].x[1] == pytest.approx(part.duration_ms.median())


def test_gap_figure_adds_up_to_the_phases(speculative, gpu):
    for found in (speculative[0], gpu):
        running, gap = l06_figures.gap_figure(found).data
        phases = found.phases.loc["decode"]
        assert list(running.y) == list(phases.index)
        assert (running.x + gap.x) == pytest.approx(phases.ms.to_numpy())
        assert gap.marker.pattern.shape and all(text.endswith("% gaps") for text in gap.text)


def test_profiler_cost_is_a_ratio_of_medians(speculative):
    _, trace = speculative
    table = l06_figures.profiler_cost(trace, trace)
    assert list(table.index) == ["draft", "verify", "other", "step"] and (table.factor == 1).all()
    slower = json.loads(json.dumps(trace.steps.to_dict("list")))
    twice = bass.Trace("steps")
    twice.record_step(**slower | {"draft_ms": [2 * ms for ms in slower["draft_ms"]]})
    assert l06_figures.profiler_cost(trace, twice).factor["draft"] == pytest.approx(2)


# --- the model of launches ---


def test_large_kernels_hide_launches_and_small_ones_wait_for_them():
    large = l06_figures.launch_schedule(20, 6).query("lane == 'GPU'")
    assert large.start.tolist() == [6 + 20 * place for place in range(8)]
    small = l06_figures.launch_schedule(2, 6).query("lane == 'GPU'")
    assert small.start.tolist() == [6 + 6 * place for place in range(8)]
    graph = l06_figures.launch_schedule(2, 6, graph=True)
    assert graph.query("lane == 'GPU'").start.tolist() == [6 + 2 * place for place in range(8)]
    assert (graph.lane == "host").sum() == 1


def test_launch_figure_says_that_it_is_a_model():
    figure = l06_figures.launch_figure()
    assert figure.layout.title.text.startswith("Modelled: ") and len(figure.data) == 6


# --- exercises ---


def gaps(intervals):
    idle, reached = 0, None
    for start, end in sorted(intervals):
        idle += max(0, start - reached) if reached is not None else 0
        reached = end if reached is None else max(reached, end)
    return idle


def gaps_forgets_what_reaches_further(intervals):
    ordered = sorted(intervals)
    return sum(max(0, b[0] - a[1]) for a, b in itertools.pairwise(ordered))


def owner(kernels, launches, ranges):
    def phase_at(time):
        return next((phase for phase, a, b in ranges if time is not None and a <= time < b), None)

    return [phase_at(launches.get(number)) for number, _ in kernels]


def owner_by_when_it_ran(kernels, launches, ranges):
    return owner([(at, at) for _, at in kernels], {at: at for _, at in kernels}, ranges)


def owner_with_closed_ends(kernels, launches, ranges):
    return owner(kernels, launches, [(phase, a, b + 0.5) for phase, a, b in ranges])


@pytest.mark.parametrize("check, solution", [(check_gaps, gaps), (check_owner, owner)])
def test_right_solution_is_accepted_and_a_stub_is_not_solved(check, solution, capsys):
    lesson_runs.accepted_and_stub_is_not(check, solution, capsys)


@pytest.mark.parametrize(
    "check, solution, message",
    [
        (check_gaps, gaps_forgets_what_reaches_further, "(a long one contains a short one): expected 1, got 7"),
        (check_gaps, lambda intervals: sum(b - a for a, b in intervals), "(one interval): expected 0, got 5"),
        (check_gaps, lambda intervals: None, "(nothing runs): expected 0, got None"),
        (check_owner, owner_by_when_it_ran, "(it runs during the next phase): expected ['draft'], got ['verify']"),
        (check_owner, owner_with_closed_ends, "got ['draft']"),
        (check_owner, lambda k, launches, r: owner(list(dict(k).items()), launches, r), "(a CUDA graph: three"),
    ],
)
def test_wrong_solution_is_told_the_first_case_and_the_difference(check, solution, message, capsys):
    lesson_runs.refused(check, solution, message, capsys)
