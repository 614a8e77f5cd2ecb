"""Timelines of a profile: when each kernel of a step ran, what a step costs, and a browser over the steps.

Nothing is measured here: `bass_lab.measure.profiling` does. Phases differ by colour and pattern and have names in their
bars; kernels stand below the phase that launched them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pandas as pd

from bass_core.trace import Trace
from bass_lab.measure.profiling import PHASES, Profile
from bass_lab.show import plots
from bass_lab.show.live_figures import live_figure, redraw, stacked
from bass_lab.show.plots import COLOURS

if TYPE_CHECKING:  # optional packages; imported where they are used
    import plotly.graph_objects as go

STYLES = {  # colour, pattern
    "prefill": (COLOURS["rejected"], "."),
    "plan": ("#8C8C8C", "-"),
    "draft": ("#E69F00", "/"),
    "verify": ("#56B4E9", ""),
    "commit": (COLOURS["bonus"], "x"),
}
GAP = {"color": "#EDEDED", "pattern": {"shape": "\\", "fgcolor": "#999999", "size": 5}}
LEGEND = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal", "itemclick": False}
MOST = 2500  # kernels drawn at once; of more, the shortest are left out


def timeline_figure(
    profile: Profile, first: int | None = None, last: int | None = None, zoom: tuple[float, float] | None = None
) -> go.Figure:
    """Steps `first` … `last` as they ran: a lane of phases and, below it, every kernel in its place.

    first: the first decode step if None; last: the same as first if None; zoom: the milliseconds shown at first. On a
    GPU another lane shows what the host was at meanwhile. Raises ValueError for steps that the profile does not have.
    """
    first, last = _shown(profile, first, last)
    spans = profile.spans[profile.spans.step.between(first, last)]
    kernels = profile.kernels[profile.kernels.step.between(first, last).fillna(False)]
    drawn = kernels.nlargest(MOST, "duration_ms")
    name = f"Step {first}" if first == last else f"Steps {first} to {last}"
    left_out = f", the longest {MOST:,} drawn" if len(kernels) > MOST else ""
    title = f"{name}: {len(kernels):,} {'kernels' if profile.on_gpu else 'operators'}{left_out}"
    lanes = [*(["host"] if profile.on_gpu else []), "phase", *sorted(kernels.lane.unique())]
    figure = plots.empty_figure(title, f"ms since step {first} began", "", height=220 + 60 * len(lanes))
    zero, width = spans.start_ms.min(), (spans.start_ms + spans.duration_ms).max() - spans.start_ms.min()
    for phase in PHASES:
        part = spans[spans.phase == phase]
        figure.add_trace(_phase_bars(phase, "phase", part.start_ms - zero, part.duration_ms, width))
        if profile.on_gpu:
            figure.add_trace(_phase_bars(phase, "host", part.host_start_ms - zero, part.host_ms, width))
        figure.add_trace(_kernel_bars(phase, drawn[drawn.phase == phase], zero))
    figure.update_layout(barmode="overlay", bargap=0.15, margin={"t": 90, "l": 120}, legend=LEGEND)
    figure.update_xaxes(range=zoom or [0, width])
    figure.update_yaxes(categoryorder="array", categoryarray=lanes[::-1], fixedrange=True, showgrid=False)
    figure.update_yaxes(ticksuffix=" ")
    return figure


def _shown(profile: Profile, first: int | None, last: int | None) -> tuple[int, int]:
    steps = profile.steps
    first = int(steps.index[steps.kind == "decode"].min()) if first is None else first
    last = first if last is None else last
    if not 0 <= first <= last < len(steps):
        raise ValueError(f"the profile has the steps 0 … {len(steps) - 1}; {first} … {last} were asked for")
    return first, last


def _marker(phase: str) -> dict:
    colour, pattern = STYLES[phase]
    return {"color": colour, "pattern": {"shape": pattern, "fgcolor": "white", "size": 7}, "line": {"width": 0}}


def _phase_bars(phase: str, lane: str, starts: pd.Series, times: pd.Series, width: float) -> go.Bar:
    """One lane's bars of a phase, with its name where a bar has a twelfth of the width or more."""
    import plotly.graph_objects as go

    return go.Bar(
        name=phase,
        orientation="h",
        y=[lane] * len(starts),
        base=starts.to_numpy(),
        x=times.to_numpy(),
        text=[f"<b>{phase}</b>" if time > width / 12 else "" for time in times],
        textposition="inside",
        insidetextanchor="middle",
        textfont={"color": "black"},
        marker=_marker(phase),
        hovertemplate=f"{phase}: %{{x:.2f}} ms<extra></extra>",
        legendgroup=phase,
        showlegend=lane == "phase" and len(starts) > 0,
    )


def _nearly_opaque(colour: str) -> str:
    """plotly widens opaque bars to a pixel: thousands of short kernels would hide all gaps between them."""
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.99)"


def _kernel_bars(phase: str, kernels: pd.DataFrame, zero: float) -> go.Bar:
    import plotly.graph_objects as go

    return go.Bar(
        name=phase,
        orientation="h",
        y=kernels.lane.to_numpy(),
        base=(kernels.start_ms - zero).to_numpy(),
        x=kernels.duration_ms.to_numpy(),
        marker={"color": _nearly_opaque(STYLES[phase][0]), "line": {"width": 0}},
        customdata=[*zip(kernels.name, 1e3 * kernels.duration_ms, kernels.step, strict=True)],
        hovertemplate="%{customdata[0]}<br>%{customdata[1]:.1f} µs, "
        f"{phase} of step %{{customdata[2]}}<extra></extra>",
        legendgroup=phase,
        showlegend=False,
    )


def step_table(profile: Profile) -> pd.DataFrame:
    """One line per step: kind, rows, drafted, accepted, emitted, milliseconds of each phase, kernels, gap_share."""
    spans = profile.spans
    wide = spans.pivot(index="step", columns="phase", values="duration_ms")
    wide = wide.reindex(columns=[phase for phase in PHASES if phase in wide]).add_suffix(" ms")
    sums = spans.groupby("step")[["duration_ms", "kernels", "gap_ms"]].sum()
    table = profile.steps[["kind", "rows", "drafted", "accepted", "emitted"]].join(wide)
    return table.assign(kernels=sums.kernels, gap_share=sums.gap_ms / sums.duration_ms)


def full_steps(profile: Profile) -> pd.Index:
    """Decode steps of the whole batch with the full draft length: those that can be compared with each other.

    Raises ValueError where the counts are missing (trace="off") and where there is no such step.
    """
    decode = profile.steps.query("kind == 'decode'")
    if decode.rows.isna().all():
        raise ValueError("the profile knows no counts: profile a run with trace='steps' or 'tokens'")
    most = decode.rows.max()
    full = (decode.rows == most) & (decode.drafted == most * decode.k.max())
    found = decode.index[full.fillna(False)]
    if found.empty:
        raise ValueError("no decode step had the whole batch and the full draft length: profile a longer run")
    return found


def cost_table(profiles: Mapping[str, Profile]) -> pd.DataFrame:
    """One line per profile, over its full steps: steps, ms (of a step, median), tokens (of a row in a step, mean:
    accepted + 1), ms_per_token (of a row), kernels (of a step, mean), gap_share."""
    lines = {}
    for name, profile in profiles.items():
        steps = profile.steps.loc[full_steps(profile)]
        spans = profile.spans[profile.spans.step.isin(steps.index)]
        ms, tokens = steps.duration_ms.median(), 1 + steps.accepted.sum() / steps.rows.sum()
        lines[name] = {
            "steps": len(steps),
            "ms": ms,
            "tokens": tokens,
            "ms_per_token": ms / tokens,
            "kernels": spans.kernels.sum() / len(steps),
            "gap_share": spans.gap_ms.sum() / spans.duration_ms.sum(),
        }
    return pd.DataFrame(lines).T.astype({"steps": int})


def cost_figure(profiles: Mapping[str, Profile]) -> go.Figure:
    """A bar per profile: the median milliseconds of each phase of its full steps."""
    import plotly.graph_objects as go

    figure = plots.empty_figure("What one decode step costs", "ms (median over steps)", "", 170 + 60 * len(profiles))
    spans = {name: profile.spans[profile.spans.step.isin(full_steps(profile))] for name, profile in profiles.items()}
    times = pd.DataFrame({name: part.groupby("phase").duration_ms.median() for name, part in spans.items()})
    for phase in PHASES[1:]:
        texts = [f"<b>{phase}</b> {time:.1f}" if time > times.sum().max() / 8 else "" for time in times.loc[phase]]
        bars = go.Bar(
            name=phase,
            orientation="h",
            y=list(times),
            x=times.loc[phase].to_numpy(),
            text=texts,
            textposition="inside",
            insidetextanchor="middle",
            textfont={"color": "black"},
            marker=_marker(phase),
            hovertemplate=f"{phase}: %{{x:.2f}} ms<extra></extra>",
        )
        figure.add_trace(bars)
    figure.update_layout(barmode="stack", margin={"t": 90, "l": 110}, legend=LEGEND)
    figure.update_yaxes(autorange="reversed", ticksuffix=" ")
    return figure


def gap_figure(profile: Profile) -> go.Figure:
    """A bar per phase of a decode step, mean: how long some kernel of it ran, and hatched how long none did."""
    import plotly.graph_objects as go

    table = profile.phases.loc["decode"]
    what = "kernel" if profile.on_gpu else "operator"
    title = f"{what.capitalize()}s and gaps, per phase of a decode step"
    figure = plots.empty_figure(title, "ms (mean over steps)", "", height=320)
    shares = [f"{share:.0%} gaps" for share in table.gap_share]
    for name, values, marker, texts in (
        (f"some {what} runs", table.busy_ms, {"color": COLOURS["accepted"]}, None),
        ("gap", table.gap_ms, GAP, shares),
    ):
        bars = go.Bar(name=name, orientation="h", y=table.index, x=values, marker=marker, text=texts)
        bars.update(textposition="outside", hovertemplate=f"%{{y}}, {name}: %{{x:.2f}} ms<extra></extra>")
        figure.add_trace(bars)
    figure.update_layout(barmode="stack", margin={"t": 90}, legend=LEGEND)
    figure.update_xaxes(range=[0, 1.15 * table.ms.max()])
    figure.update_yaxes(autorange="reversed", ticksuffix=" ")
    return figure


def profiler_cost(plain: Trace, profiled: Trace) -> pd.DataFrame:
    """What recording cost: median milliseconds of draft, verify and other over the decode steps of two runs of the same
    work, without and with a profile, by the engine's own stopwatch; and their ratio."""
    times = []
    for trace in (plain, profiled):
        steps = trace.steps.query("kind == 'decode'").drop_duplicates("step")
        columns = {name: steps[f"{name}_ms"] for name in ("draft", "verify", "other")}
        times.append(pd.DataFrame(columns).assign(step=sum(columns.values())).median())
    table = pd.DataFrame({"plain ms": times[0], "profiled ms": times[1]})
    return table.assign(factor=table["profiled ms"] / table["plain ms"])


def launch_schedule(kernel_us: float, launch_us: float, count: int = 8, graph: bool = False) -> pd.DataFrame:
    """A model, not a measurement: `count` equal kernels, launched one by one or as one CUDA graph.

    The host needs launch_us for a call; a kernel starts when it is launched and its predecessor is done. Returns lane
    ("host" or "GPU"), start and duration in µs.
    """
    calls = [0.0] if graph else [number * launch_us for number in range(count)]
    bars, free = [("host", start, launch_us) for start in calls], 0.0
    for number in range(count):
        start = max(free, calls[min(number, len(calls) - 1)] + launch_us)
        bars.append(("GPU", start, kernel_us))
        free = start + kernel_us
    return pd.DataFrame(bars, columns=["lane", "start", "duration"])


def launch_figure(large_us: float = 20, small_us: float = 2, launch_us: float = 6) -> go.Figure:
    """`launch_schedule` three times: large kernels, small ones, and the small ones as a CUDA graph. A model."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    panels = {
        f"large kernels ({large_us:g} µs): the GPU is the limit, the host runs ahead": (large_us, False),
        f"small kernels ({small_us:g} µs): the GPU waits for every launch": (small_us, False),
        "the same small kernels as one CUDA graph: one launch": (small_us, True),
    }
    figure = make_subplots(3, 1, shared_xaxes=True, subplot_titles=list(panels), vertical_spacing=0.12)
    for row, (kernel_us, graph) in enumerate(panels.values(), start=1):
        schedule = launch_schedule(kernel_us, launch_us, graph=graph)
        for lane, colour, pattern in (("host", "#B0B0B0", "/"), ("GPU", COLOURS["accepted"], "")):
            part = schedule[schedule.lane == lane]
            bars = go.Bar(
                name=lane,
                orientation="h",
                y=part.lane,
                base=part.start,
                x=part.duration,
                marker={"color": colour, "pattern": {"shape": pattern}, "line": {"color": "white", "width": 1}},
                hovertemplate=f"{lane}: %{{x:g}} µs from %{{base:g}} µs<extra></extra>",
            )
            figure.add_trace(bars, row=row, col=1)
    title = f"Modelled: eight kernels, a launch costs the host {launch_us:g} µs"
    figure.update_layout(plots.house(title, 430), barmode="overlay", showlegend=False)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_xaxes(title="µs", row=3, col=1)
    figure.update_annotations(x=0, xanchor="left", font_size=13)
    return figure


class TimelineBrowser:
    """A step to choose, and how many from it on, above their timeline and what the batch made of them.

    step, count: the sliders; setting their `.value` redraws. figure: the timeline. sentence: the counts, as HTML; with
    the trace of the run also row by row. A cell that ends with the browser shows it.
    """

    def __init__(self, profile: Profile, trace: Trace | None = None, step: int | None = None, most: int = 4):
        """trace: of the one run that was profiled. most: steps drawn at once."""
        import ipywidgets

        self.profile, self.trace = profile, trace
        first, _ = _shown(profile, step, None)
        options = {"continuous_update": False, "style": {"description_width": "initial"}}
        self.step = ipywidgets.IntSlider(first, 0, len(profile.steps) - 1, description="step", **options)
        self.count = ipywidgets.IntSlider(1, 1, most, description="how many", **options)
        self.sentence, self.figure = ipywidgets.HTML(), live_figure()
        self._box = stacked(ipywidgets.HBox([self.step, self.count]), self.figure, self.sentence)
        for slider in (self.step, self.count):
            slider.observe(self._redraw, names="value")
        self._redraw()

    def _redraw(self, _=None) -> None:
        first = self.step.value
        last = min(first + self.count.value, len(self.profile.steps)) - 1
        redraw(self.figure, timeline_figure(self.profile, first, last))
        table = step_table(self.profile).loc[first:last].dropna(axis="columns", how="all")
        self.sentence.value = table.to_html(border=0, float_format="{:.2f}".format) + self._rows(first, last)

    def _rows(self, first: int, last: int) -> str:
        """HTML: what each row had accepted, if the trace is there."""
        if self.trace is None:
            return ""
        numbers = self.profile.steps.number.loc[first:last]
        steps = self.trace.steps[self.trace.steps.step.isin(numbers)]
        table = steps.pivot(index="step", columns="row", values="accepted").astype("Int64")
        return f"<p><b>accepted drafts per row</b></p>{table.to_html(border=0, na_rep='ended')}"

    def _repr_mimebundle_(self, **options) -> dict:
        return self._box._repr_mimebundle_(**options)
