"""The tokens of a trace, looked at closely: one step with its p and q, a row's text with hover, a whole run's verdicts.

Functions take a trace with tokens (`trace="tokens"`) and return a figure, a table or HTML; none runs a model. A step is
named by its row and `nth`, the row's own decode step counted from 1, as in `plots.acceptance_raster`.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from bass_core.trace import Trace
from bass_lab.show import plots
from bass_lab.show.plots import COLOURS

if TYPE_CHECKING:  # optional packages; imported where they are used
    import plotly.graph_objects as go
    from transformers import PreTrainedTokenizerBase

SYMBOLS = {"accepted": "✓", "rejected": "✗", "not reached": "–", "recovered": "↳", "bonus": "+", "regular": "·"}
_BARS = COLOURS | {"not reached": "#E3BDD1"}  # the colour of rejected, lighter
_INKS = COLOURS | {"not reached": "#767676"}
_CHIP = "border:1px solid;border-radius:4px;padding:0 4px"
_VISIBLE = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥"})
_FEW = 12  # bars up to which each carries its value as a number


# --- data ---


def outcomes(trace: Trace) -> pd.DataFrame:
    """`Trace.tokens` by row and decode step, the drafts of a step in their order and then the target's own token.

    Columns added: nth (0 is the prefill) and outcome: accepted, rejected, not reached, recovered, bonus or regular.
    Token, coupled and greedy verification end at the first rejection, and drafts behind it are "not reached"; block
    verification judges a step's drafts together, and all that it drops are "rejected".
    """
    steps = trace.steps[["row", "step"]].assign(nth=trace.steps.kind == "decode")
    steps["nth"] = steps.groupby("row")["nth"].cumsum()
    tokens = trace.tokens.merge(steps, on=["row", "step"])
    own = ~tokens.kind.isin(["accepted", "rejected"])
    tokens = tokens.assign(own=own).sort_values(["row", "nth", "own", "position"], ignore_index=True)
    rejected = tokens.kind == "rejected"
    behind = rejected & (rejected.groupby([tokens.row, tokens.nth]).cumsum() > 1)
    if trace.meta.get("verification") == "block":
        behind &= False
    return tokens.assign(outcome=tokens.kind.mask(behind, "not reached")).drop(columns="own")


def step_tokens(trace: Trace, row: int, nth: int) -> pd.DataFrame:
    """The lines of `outcomes` of one step; none where the row has no such step."""
    tokens = outcomes(trace)
    return tokens[(tokens.row == row) & (tokens.nth == nth)].reset_index(drop=True)


def surest_rejection(trace: Trace) -> tuple[int, int]:
    """(row, nth) of the step in which the draft was surest, against the target, of a token that was rejected.

    The first row's first step if nothing was rejected.
    """
    rejected = outcomes(trace).query("outcome == 'rejected'").dropna(subset=["q"])
    if rejected.empty:
        return 0, 1
    line = rejected.loc[(rejected.q - rejected.p).idxmax()]
    return int(line.row), int(line.nth)


# --- words ---


def label(token: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """A token's text in which blanks show, cut to 14 characters."""
    text = tokenizer.decode([token]).translate(_VISIBLE)
    return text if len(text) <= 14 else text[:13] + "…"


def headline(trace: Trace) -> str:
    """One sentence: tokens per step, acceptance rate with its k, α and speed of a run."""
    summary = trace.summary()
    seconds = sum(summary[f"{part}_s"] for part in ("prefill", "draft", "verify", "other"))
    sentence = (
        f"{summary['rows']} rows wrote {summary['tokens']:,} tokens in {summary['steps']} passes of the target, "
        f"{summary['tokens'] / max(seconds, 1e-9):,.0f} tokens/s: "
        f"<b>{summary['tokens_per_step']:.2f} tokens per step</b> and row, "
    )
    if np.isnan(summary["alpha"]):
        return sentence + "nothing drafted."
    lengths = trace.steps[trace.steps.kind == "decode"].k
    mean = "" if lengths.nunique() == 1 else "mean "
    return sentence + (
        f"acceptance rate <b>{summary['acceptance_rate']:.0%} at {mean}k = {summary['k']:.3g}</b>, "
        f"<b>α = {summary['alpha']:.2f}</b>."
    )


def _about(value: float) -> str:
    return f"= {value:.2f}" if value >= 0.01 else "&lt; 0.01"


def why(trace: Trace, row: int, nth: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """HTML, a few sentences: why this step kept what it kept, under the rule that verified it."""
    part = step_tokens(trace, row, nth)
    if part.empty:
        return "The row ended with its first token, which the prefill wrote: it has no step."
    count = part.outcome.value_counts()
    own = part[part.outcome.isin(["recovered", "bonus", "regular"])]
    if own.empty:
        return "The row ended with an accepted token; what was drafted behind it does not count."
    own = own.iloc[0]
    written = f"<code>{html.escape(label(own.token, tokenizer))}</code>"
    if own.kind == "regular":
        return f"Nothing was drafted: {written} is the target's own token, as in regular decoding."
    if own.kind == "bonus":
        return (
            f"All {count['accepted']} drafted tokens were accepted. The pass that checked them has also seen what "
            f"follows: the target's own token {written} comes free."
        )
    accepted = count.get("accepted", 0)
    x = part[part.outcome == "rejected"].iloc[0]
    drafted = f"<code>{html.escape(label(x.token, tokenizer))}</code>"
    place = f"Drafted token {accepted + 1}, {drafted}, was rejected: the target gives it p {_about(x.p)}, the draft "
    place += "proposed it without a probability." if np.isnan(x.q) else f"q {_about(x.q)}."
    rule = trace.meta.get("verification")
    if rule == "greedy":
        return f"{place} At temperature 0 only the target's likeliest token counts: {written}, p {_about(own.p)}."
    if rule == "coupled":
        return (
            f"{place} Both models choose with the same noise, and the target chose {written} (p {_about(own.p)}). "
            "The closer p and q are, the more often the two choose alike."
        )
    if rule == "block":
        return (
            f"Block verification judges the drafted tokens together and kept the first {accepted}. What follows, "
            f"{written}, was drawn from what the target has over the draft there (p {_about(own.p)})."
        )
    chance = f"kept with probability p/q {_about(x.p / x.q)}" if x.q > 0 else "kept with probability p"
    return (
        f"{place} Such a token is {chance}; this time it was not. In its place {written} (p {_about(own.p)}) was drawn "
        "from what the target has over the draft."
    )


# --- HTML ---


def legend() -> str:
    """What colours, underlines and symbols mean in `row_html`, `step_html` and `step_figure`."""
    drafts = {"rejected": "drafted, refused", "not reached": "drafted behind a refusal, never judged"}
    signs = " &nbsp; ".join(f"{SYMBOLS[kind]} {kind}" for kind in ("accepted", "recovered", "bonus", "regular"))
    words = [f'<span style="color:{_INKS[kind]}">{SYMBOLS[kind]} {kind}</span> {drafts[kind]}' for kind in drafts]
    return f"{plots.legend()}<br>{signs} &nbsp; {' &nbsp; '.join(words)}"


def step_html(trace: Trace, row: int, nth: int, tokenizer: PreTrainedTokenizerBase, prompt: str = "") -> str:
    """The end of the row's text before a step, and then the step's tokens, marked by what became of them."""
    tokens = outcomes(trace)
    written = tokens[(tokens.row == row) & (tokens.kind != "rejected") & (tokens.nth < nth)]
    before = prompt + tokenizer.decode(written.token.tolist(), skip_special_tokens=True)
    chips = [
        f'<span title="{_hover(line)}" style="color:{_INKS[line.outcome]};{_CHIP}">'
        f"{SYMBOLS[line.outcome]} {html.escape(label(line.token, tokenizer))}</span>"
        for line in step_tokens(trace, row, nth).itertuples()
    ]
    tail = html.escape("\n".join(before.split("\n")[-4:]).lstrip("\n"))
    style = f"{plots.CODE}line-height:1.9;margin:4px 0"
    return f'<pre style="{style}"><span style="color:#707070">{tail}</span> {" ".join(chips)}</pre>'


def row_html(
    trace: Trace, row: int, tokenizer: PreTrainedTokenizerBase, prompt: str = "", nth: int | None = None
) -> str:
    """A row's text, prompt in grey, generated tokens coloured by origin; hover shows p, q and step.

    nth: the step whose tokens are marked.
    """
    tokens = outcomes(trace)
    mine = tokens[(tokens.row == row) & (tokens.kind != "rejected")]
    about = {"titles": [_hover(line) for line in mine.itertuples()], "marked": (mine.nth == nth).tolist()}
    return plots.coloured_text(mine.token.tolist(), mine.kind.tolist(), tokenizer, prompt=prompt, **about)


def _hover(line) -> str:
    """Plain text for the mouse: what became of a token, p, q, step."""
    q = "" if np.isnan(line.q) else f", q = {line.q:.3f}"
    return f"{line.outcome} · p = {line.p:.3f}{q} · " + (f"step {line.nth}" if line.nth else "prefill")


# --- figures ---


def marked_cell(row: int, nth: int) -> dict:
    """A frame around one cell of the raster, as a shape of plotly's layout."""
    edges = {"x0": nth - 0.5, "x1": nth + 0.5, "y0": row - 0.5, "y1": row + 0.5}
    return {"type": "rect", "line": {"color": COLOURS["recovered"], "width": 3}, **edges}


def step_figure(trace: Trace, row: int, nth: int, tokenizer: PreTrainedTokenizerBase) -> go.Figure:
    """p and q of a step's tokens side by side: the drafted ones in order, last the target's own."""
    import plotly.graph_objects as go

    part = step_tokens(trace, row, nth)
    few = len(part) <= _FEW
    colours = [_BARS[outcome] for outcome in part.outcome]
    at = " (at temperature 1)" if trace.meta.get("verification") == "greedy" else ""
    title = f"Row {row}, step {nth}: p and q of its tokens{at}"
    figure = plots.empty_figure(plots.titled(title, trace), "", "probability", height=330)
    hatched = {"shape": "/", "fgcolor": "white", "size": 6}
    for name, values, pattern in (("p", part.p, {"shape": ""}), ("q", part.q, hatched)):
        bars = go.Bar(
            name=name,
            x=np.arange(1, len(part) + 1),
            y=values.astype(object).where(values.notna(), None),  # NaN is no JSON
            offsetgroup=name,
            marker={"color": colours, "pattern": pattern},
            text=[f"{value:.2f}" if few and value >= 0.005 else "" for value in values],
            textposition="outside",
            textangle=0,
            textfont={"size": 10},
            cliponaxis=False,
            customdata=part.outcome,
            hovertemplate=f"{name} = %{{y:.3f}}, %{{customdata}}<extra></extra>",
            showlegend=False,
        )
        figure.add_trace(bars)
    for name, key, pattern in (("p: the target", "p", {"shape": ""}), ("q: the draft", "q", hatched)):  # a grey legend
        marker = {"color": "#707070", "pattern": pattern}
        figure.add_trace(go.Bar(name=name, x=[None], y=[None], offsetgroup=key, marker=marker))
    ticks = [
        f'{html.escape(label(line.token, tokenizer), quote=False)}<br><span style="color:{_INKS[line.outcome]}">'
        f"{SYMBOLS[line.outcome]}</span>"
        for line in part.itertuples()
    ]
    figure.update_xaxes(tickvals=np.arange(1, len(part) + 1), ticktext=ticks, automargin=True)
    figure.update_yaxes(range=[0, 1.2], tickvals=[0, 0.25, 0.5, 0.75, 1])
    figure.update_layout(legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}, margin={"t": 80, "b": 20})
    return figure


def p_against_q(trace: Trace) -> go.Figure:
    """Every drafted token that was judged: the draft's q, the target's p, and the verdict."""
    import plotly.graph_objects as go

    figure = plots.empty_figure(
        plots.titled("Every verdict of the run", trace), "q: the draft's probability", "p: the target's", 430
    )
    figure.add_trace(
        go.Scatter(
            name="p = q", x=[0, 1], y=[0, 1], mode="lines", line={"color": "black", "dash": "dot"}, hoverinfo="skip"
        )
    )
    tokens = outcomes(trace)
    for outcome, symbol in (("accepted", "circle-open"), ("rejected", "x")):
        part = tokens[tokens.outcome == outcome].dropna(subset=["q"])
        points = go.Scatter(
            name=f"{outcome} ({len(part)})",
            x=part.q,
            y=part.p,
            mode="markers",
            marker={"color": COLOURS[outcome], "symbol": symbol, "size": 7},
            customdata=part[["row", "nth"]],
            hovertemplate="row %{customdata[0]}, step %{customdata[1]}: q = %{x:.2f}, p = %{y:.2f}",
        )
        figure.add_trace(points)
    figure.update_xaxes(range=[-0.03, 1.03])
    figure.update_yaxes(range=[-0.03, 1.03])
    return figure


def policy_figure(traces: Mapping[str, Trace]) -> go.Figure:
    """One panel per policy: the draft length of each step as a line, what the rows accepted as discs.

    A disc's area says how many rows accepted that many tokens.
    """
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    figure = make_subplots(len(traces), 1, shared_xaxes=True, subplot_titles=list(traces), vertical_spacing=0.09)
    for panel, trace in enumerate(traces.values(), start=1):
        decode = trace.steps.query("kind == 'decode'")
        lengths = decode.groupby("step").k.max()
        rows = decode.groupby(["step", "accepted"]).size().rename("rows").reset_index()
        line = go.Scatter(
            name="draft length k", x=lengths.index, y=lengths, mode="lines", showlegend=panel == 1,
            line={"shape": "hvh", "color": COLOURS["recovered"], "width": 2},
            hovertemplate="step %{x}: k = %{y}<extra></extra>",
        )  # fmt: skip
        discs = go.Scatter(
            name="rows, by accepted tokens", x=rows.step, y=rows.accepted, mode="markers", showlegend=panel == 1,
            marker={"color": COLOURS["accepted"], "size": 5 * np.sqrt(rows.rows), "opacity": 0.7},
            customdata=rows.rows, hovertemplate="step %{x}: %{customdata} rows accepted %{y}<extra></extra>",
        )  # fmt: skip
        figure.add_traces([line, discs], rows=[panel] * 2, cols=[1] * 2)
    height = 160 + 210 * len(traces)
    below_title = {"orientation": "h", "x": 0, "yref": "container", "y": 1 - 60 / height, "yanchor": "top"}
    title = plots.titled("What each policy drafted, and what was accepted of it", *traces.values())
    figure.update_layout(plots.house(title, height))
    figure.update_layout(legend=below_title, margin={"t": 105})
    for panel, trace in enumerate(traces.values(), start=1):  # from below 0, so that no disc is cut
        figure.update_yaxes(title="tokens", range=[-0.8, trace.steps.k.max() + 0.8], row=panel, col=1)
    figure.update_xaxes(title="step of the batch", row=len(traces), col=1)
    figure.update_annotations(x=0, xanchor="left", font_size=13)
    return figure


def rates_figure(table: pd.DataFrame) -> go.Figure:
    """Acceptance rate and α against the draft length, a pair of lines per prompt set.

    table: columns "prompt set", "draft length", "acceptance rate" and "α" (as of `explorer.acceptance_table`).
    """
    import plotly.graph_objects as go

    title = "Two rates of the same runs, against the draft length"
    figure = plots.empty_figure(title, "draft length k", "rate", height=380)
    colours = (COLOURS["accepted"], COLOURS["recovered"], COLOURS["bonus"])
    styles = {"α": ("solid", "circle"), "acceptance rate": ("dash", "diamond-open")}
    for number, (name, part) in enumerate(table.groupby("prompt set", sort=False)):
        for column, (dash, symbol) in styles.items():
            line = go.Scatter(
                name=f"{column}, {name}", x=part["draft length"], y=part[column], mode="lines+markers",
                line={"dash": dash, "color": colours[number % 3]}, marker={"symbol": symbol, "size": 9},
                hovertemplate=f"{name}, k = %{{x}}: {column} %{{y:.2f}}<extra></extra>",
            )  # fmt: skip
            figure.add_trace(line)
    figure.update_yaxes(range=[0, 1.05], tickformat=".1f")
    figure.update_xaxes(tickvals=sorted(table["draft length"].unique()))
    return figure
