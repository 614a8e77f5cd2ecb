"""Timelines and costs of steps from a profile (`bass_lab.measure.profiling`)."""

from __future__ import annotations

import html
from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go
from pandas.io.formats.style import Styler

from bass_core.loop.trace import Trace
from bass_lab.measure.profiling import PHASES, Profile
from bass_lab.show.live_figures import live, slider, widgets
from bass_lab.show.looks import LOOKS, bars, empty_figure, panels

MOST = 2500  # largest number of kernels in a figure; the shortest are left out


def timeline_figure(
    profile: Profile, first: int | None = None, last: int | None = None, zoom: tuple[float, float] | None = None
) -> go.Figure:
    """Return the timeline of steps `first` … `last`: lanes of phases, of kernels, and on a GPU of the host.

    first: by default the first decode step; last: by default first; zoom: range in ms. Raises ValueError for unknown
    steps.
    """
    first, last = _shown(profile, first, last)
    spans = profile.spans[profile.spans.step.between(first, last)]
    kernels = profile.kernels[profile.kernels.step.between(first, last).fillna(False)]
    drawn = kernels.nlargest(MOST, "duration_ms")
    name = f"Step {first}" if first == last else f"Steps {first} to {last}"
    left_out = f", the longest {MOST:,} drawn" if len(kernels) > MOST else ""
    title = f"{name}: {len(kernels):,} {'kernels' if profile.on_gpu else 'operators'}{left_out}"
    lanes = [*(["host"] if profile.on_gpu else []), "phase", *sorted(kernels.lane.unique())]
    figure = empty_figure(title, f"ms since step {first} began", "", height=220 + 60 * len(lanes))
    zero, width = spans.start_ms.min(), (spans.start_ms + spans.duration_ms).max() - spans.start_ms.min()
    for phase in PHASES:
        part = spans[spans.phase == phase]
        places = {"phase": (part.start_ms, part.duration_ms), "host": (part.host_start_ms, part.host_ms)}
        for lane in ("phase", "host") if profile.on_gpu else ("phase",):
            starts, times = places[lane]
            named = _phase_bars(phase, times, [lane] * len(part), times > width / 12, "<b>{phase}</b>")
            figure.add_trace(named.update(base=starts - zero, showlegend=lane == "phase" and len(part) > 0))
        figure.add_trace(_kernel_bars(phase, drawn[drawn.phase == phase], zero))
    figure.update_layout(barmode="overlay", bargap=0.15, legend_itemclick=False)
    figure.update_xaxes(range=zoom or [0, width])
    lanes = {"categoryorder": "array", "categoryarray": lanes[::-1]}
    return figure.update_yaxes(**lanes, fixedrange=True, showgrid=False, ticksuffix=" ")


def _shown(profile: Profile, first: int | None, last: int | None) -> tuple[int, int]:
    steps = profile.steps
    first = int(steps.index[steps.kind == "decode"].min()) if first is None else first
    last = first if last is None else last
    if not 0 <= first <= last < len(steps):
        raise ValueError(f"the profile has the steps 0 … {len(steps) - 1}, got {first} … {last}")
    return first, last


def _phase_bars(phase: str, times: pd.Series, lanes: list[str], named: pd.Series, text: str) -> go.Bar:
    """Return a phase's bars along time. Bars with `named` show the text, formatted with phase and time."""
    drawn = bars(phase, times, lanes, phase, orientation="h", legendgroup=phase, insidetextanchor="middle")
    texts = [text.format(phase=phase, time=time) if long else "" for time, long in zip(times, named, strict=True)]
    drawn.update(text=texts, textposition="inside", textfont_color="black")
    return drawn.update(hovertemplate=f"{phase}: %{{x:.2f}} ms<extra></extra>")


def _nearly_opaque(colour: str) -> str:
    """Return a nearly opaque colour. plotly widens opaque bars to a pixel, which would hide gaps between kernels."""
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.99)"


def _kernel_bars(phase: str, kernels: pd.DataFrame, zero: float) -> go.Bar:
    hover = "%{customdata[0]}<br>%{customdata[1]:.1f} µs, " + f"{phase} of step %{{customdata[2]}}<extra></extra>"
    drawn = bars(phase, kernels.duration_ms, kernels.lane, phase, orientation="h", base=kernels.start_ms - zero)
    drawn.marker = {"color": _nearly_opaque(LOOKS[phase].colour)}  # hatching would hide short bars
    about = [*zip(kernels.name.map(html.escape), 1e3 * kernels.duration_ms, kernels.step, strict=True)]
    return drawn.update(customdata=about, hovertemplate=hover, legendgroup=phase, showlegend=False)


def step_table(profile: Profile) -> pd.DataFrame:
    """Return per step: kind, rows, drafted, accepted, emitted, phases in ms, kernels (CPU: operators), gap_share."""
    spans = profile.spans
    wide = spans.pivot(index="step", columns="phase", values="duration_ms")
    wide = wide.reindex(columns=[phase for phase in PHASES if phase in wide]).add_suffix(" ms")
    sums = spans.groupby("step")[["duration_ms", "kernels", "gap_ms"]].sum()
    table = profile.steps[["kind", "rows", "drafted", "accepted", "emitted"]].join(wide)
    counted = "kernels" if profile.on_gpu else "operators"
    return table.assign(**{counted: sums.kernels}, gap_share=sums.gap_ms / sums.duration_ms)


def phase_lines(profile: Profile, **settings: str | int | None) -> list[dict]:
    """Return the phases of the decode steps as records of kind "phases" (docs/RECORDS.md). settings: method, batch, k
    (None: the default policy) and max_new_tokens."""
    about = {name: profile.about[name] for name in ("models", "dtype", "device", "torch", "commit")}
    table = profile.phases.loc["decode"].rename_axis("phase").reset_index()
    measured = table[["phase", "ms", "share", "kernels", "gap_ms"]].to_dict("records")
    return [{"schema": "phases", **settings, **line, **about} for line in measured]


def totals_table(profile: Profile, most: int = 10) -> Styler:
    """Return the kernels with the longest total time in decode steps. Kernel names are escaped for HTML."""
    shown = {"total_ms": "{:.1f}", "share": "{:.1%}", "mean_us": "{:.1f}"}
    return profile.totals().head(most).style.format(shown).format_index(escape="html")


def full_steps(profile: Profile) -> pd.Index:
    """Return the decode steps of the whole batch with the most frequent draft length. Raises ValueError if the profile
    has no counts."""
    decode = profile.steps.query("kind == 'decode'")
    if decode.rows.isna().all():
        raise ValueError("the profile has no counts; profile a run with trace='steps' or 'tokens'")
    whole = decode[(decode.rows == decode.rows.max()).fillna(False)]
    return whole.index[whole.drafted == whole.drafted.mode().max()]


def cost_table(profiles: Mapping[str, Profile]) -> pd.DataFrame:
    """Return per profile, over full steps: steps, ms (median), tokens (accepted + 1), ms_per_token, kernels,
    gap_share."""
    lines = {}
    for name, profile in profiles.items():
        steps = profile.steps.loc[full_steps(profile)]
        spans = profile.spans[profile.spans.step.isin(steps.index)]
        ms, tokens = steps.duration_ms.median(), 1 + steps.accepted.sum() / steps.rows.sum()
        line = {"steps": len(steps), "ms": ms, "tokens": tokens, "ms_per_token": ms / tokens}
        line |= {"kernels": spans.kernels.sum() / len(steps)}
        lines[name] = line | {"gap_share": spans.gap_ms.sum() / spans.duration_ms.sum()}
    return pd.DataFrame(lines).T.astype({"steps": int})


def cost_figure(profiles: Mapping[str, Profile]) -> go.Figure:
    """Return a bar per profile: median ms of each phase over full steps."""
    figure = empty_figure("Time of one decode step", "ms (median over steps)", "", 190 + 60 * len(profiles))
    spans = {name: profile.spans[profile.spans.step.isin(full_steps(profile))] for name, profile in profiles.items()}
    times = pd.DataFrame({name: part.groupby("phase").duration_ms.median() for name, part in spans.items()})
    for phase in PHASES[1:]:
        named = times.loc[phase] > times.sum().max() / 8
        figure.add_trace(_phase_bars(phase, times.loc[phase], list(times), named, "<b>{phase}</b> {time:.1f}"))
    figure.update_layout(barmode="stack", legend_itemclick=False)
    return figure.update_yaxes(autorange="reversed", ticksuffix=" ")


def gap_figure(profile: Profile) -> go.Figure:
    """Return a bar per phase of a decode step (mean): time with a running kernel, and time without (hatched)."""
    table = profile.phases.loc["decode"]
    what = "kernel" if profile.on_gpu else "operator"
    title = f"{what.capitalize()}s and gaps per phase of a decode step"
    figure = empty_figure(title, "ms (mean over steps)", "", height=340)
    figure.add_trace(bars(f"{what} running", table.busy_ms, table.index, "accepted"))
    shares = [f"{share:.0%} gaps" for share in table.gap_share]
    figure.add_trace(bars("gap", table.gap_ms, table.index, "nothing", text=shares, textposition="outside"))
    figure.update_traces(orientation="h", hovertemplate="%{y}, %{fullData.name}: %{x:.2f} ms<extra></extra>")
    figure.update_layout(barmode="stack").update_xaxes(range=[0, 1.15 * table.ms.max()])
    return figure.update_yaxes(autorange="reversed", ticksuffix=" ")


def profiler_cost(plain: Trace, profiled: Trace) -> pd.DataFrame:
    """Return median ms of draft, verify and other over the decode steps of a plain and a profiled run, and the
    ratio."""
    times = []
    for trace in (plain, profiled):
        steps = trace.steps.query("kind == 'decode'").drop_duplicates("step")
        columns = {name: steps[f"{name}_ms"] for name in ("draft", "verify", "other")}
        times.append(pd.DataFrame(columns).assign(step=sum(columns.values())).median())
    table = pd.DataFrame({"plain ms": times[0], "profiled ms": times[1]})
    return table.assign(factor=table["profiled ms"] / table["plain ms"])


def launch_schedule(kernel_us: float, launch_us: float, count: int = 8, graph: bool = False) -> pd.DataFrame:
    """Return a modelled schedule of `count` equal kernels, launched one by one or as one CUDA graph.

    A call takes launch_us on the host. A kernel starts after its launch and after the previous kernel. Columns: lane
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
    """Return three modelled schedules: large kernels, small kernels, and small kernels in a CUDA graph."""
    models = {
        f"large kernels ({large_us:g} µs): the GPU is the bottleneck, the host runs ahead": (large_us, False),
        f"small kernels ({small_us:g} µs): the GPU waits for every launch": (small_us, False),
        "the same small kernels as one CUDA graph: one launch": (small_us, True),
    }
    title = f"Modelled: eight kernels, a launch takes {launch_us:g} µs on the host"
    figure = panels(3, 1, list(models), title, 430, shared_xaxes=True, vertical_spacing=0.12)
    for row, (kernel_us, graph) in enumerate(models.values(), start=1):
        schedule = launch_schedule(kernel_us, launch_us, graph=graph)
        for lane, look in (("host", "baseline"), ("GPU", "accepted")):
            part = schedule[schedule.lane == lane]
            drawn = bars(lane, part.duration, part.lane, look, orientation="h", base=part.start)
            drawn.update(hovertemplate=f"{lane}: %{{x:g}} µs from %{{base:g}} µs<extra></extra>")
            figure.add_trace(drawn.update(marker_line={"color": "white", "width": 1}), row, 1)
    figure.update_layout(barmode="overlay", showlegend=False).update_yaxes(autorange="reversed", showgrid=False)
    return figure.update_xaxes(title="µs", row=3, col=1)


def timeline_browser(
    profile: Profile, trace: Trace | None = None, step: int | None = None, most: int = 4
) -> widgets.VBox:
    """Return sliders for the first step and the number of steps, above timeline and counts. With a trace, accepted
    tokens per row are added. most: largest number of steps."""

    def draw(step: int, count: int):
        last = min(step + count, len(profile.steps)) - 1
        table = step_table(profile).loc[step:last].dropna(axis="columns", how="all")
        counts = table.to_html(border=0, float_format="{:.2f}".format)
        return timeline_figure(profile, step, last), counts + _rows_html(profile, trace, step, last)

    first, _ = _shown(profile, step, None)
    sliders = {"step": slider(first, 0, len(profile.steps) - 1, "step"), "count": slider(1, 1, most, "number of steps")}
    return live(draw, **sliders)


def _rows_html(profile: Profile, trace: Trace | None, first: int, last: int) -> str:
    if trace is None:
        return ""
    steps = trace.steps[trace.steps.step.isin(profile.steps.number.loc[first:last])]
    table = steps.pivot(index="step", columns="row", values="accepted").astype("Int64")
    return f"<p><b>accepted draft tokens per row</b></p>{table.to_html(border=0, na_rep='ended')}"
