"""Views of a trace's tokens: one step with p and q, a row's text with hover text, the outcomes of a whole run.

Functions take a trace with tokens and run no model. A step is given by row and `nth`, the row's step from 1.
"""

from __future__ import annotations

import html
from collections.abc import Mapping

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from transformers import PreTrainedTokenizerBase

from bass_core.loop.trace import Trace
from bass_lab.show import plots
from bass_lab.show.looks import LOOKS, bars, curve, empty_figure, panels, titled

SYMBOLS = {"accepted": "✓", "rejected": "✗", "not reached": "–", "recovered": "↳", "bonus": "+", "regular": "·"}
_INKS = {kind: LOOKS[kind].colour for kind in SYMBOLS} | {"not reached": "#767676"}  # text colours
_CHIP = "border:1px solid;border-radius:4px;padding:0 4px"
_VISIBLE = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥"})
_FEW = 12  # at most so many bars show their values


def outcomes(trace: Trace) -> pd.DataFrame:
    """Return `Trace.tokens` by row and decode step: the draft tokens of a step in order, then the target's own token.

    Added columns: nth (0 is the prefill) and outcome (accepted, rejected, recovered, bonus, regular, or "not reached"
    for draft tokens after a rejection). Block verification has no "not reached".
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
    """Return the lines of `outcomes` for one step; empty if the row has no such step."""
    tokens = outcomes(trace)
    return tokens[(tokens.row == row) & (tokens.nth == nth)].reset_index(drop=True)


def surest_rejection(trace: Trace) -> tuple[int, int]:
    """Return (row, nth) of the step that rejected the token with the largest q - p; (0, 1) without rejections."""
    rejected = outcomes(trace).query("outcome == 'rejected'").dropna(subset=["q"])
    if rejected.empty:
        return 0, 1
    line = rejected.loc[(rejected.q - rejected.p).idxmax()]
    return int(line.row), int(line.nth)


def visible(text: str) -> str:
    """Return a text with visible blanks, cut to 14 characters, or ∅ if the text is empty."""
    text = text.translate(_VISIBLE) or "∅"
    return text if len(text) <= 14 else text[:13] + "…"


def label(token: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the visible text of a token."""
    return visible(tokenizer.decode([token]))


def headline(trace: Trace) -> str:
    """Return one sentence with tokens per step, acceptance rate, k, α and speed of a run."""
    summary = trace.summary()
    seconds = sum(summary[f"{part}_s"] for part in ("prefill", "draft", "verify", "other"))
    sentence = (
        f"{summary['rows']} rows wrote {summary['tokens']:,} tokens in {summary['steps']} target passes, "
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
    """Return HTML sentences that explain the outcome of a step under the verification rule of the run."""
    part = step_tokens(trace, row, nth)
    if part.empty:
        return "The row ended with its first token. The prefill wrote that token, so the row has no decode step."
    count = part.outcome.value_counts()
    own = part[part.outcome.isin(["recovered", "bonus", "regular"])]
    if own.empty:
        return "The row ended with an accepted token. Later draft tokens of the step are dropped."
    own = own.iloc[0]
    written = f"<code>{html.escape(label(own.token, tokenizer))}</code>"
    if own.kind == "regular":
        return f"Nothing was drafted. As in regular decoding, {written} comes from the target."
    if own.kind == "bonus":
        return (
            f"All {count['accepted']} draft tokens were accepted. The target pass that checked them also gave "
            f"the next token: the bonus token {written}."
        )
    accepted = count.get("accepted", 0)
    x = part[part.outcome == "rejected"].iloc[0]
    drafted = f"<code>{html.escape(label(x.token, tokenizer))}</code>"
    place = f"Draft token {accepted + 1}, {drafted}, was rejected. Its probability is p {_about(x.p)} in the target "
    place += "(the drafter gave no q)." if np.isnan(x.q) else f"and q {_about(x.q)} in the draft."
    rule = trace.meta.get("verification")
    if rule == "greedy":
        return f"{place} At temperature 0 only the target's likeliest token is accepted: {written}, p {_about(own.p)}."
    if rule == "coupled":
        return (
            f"{place} Both models choose with the same noise, and the target chose {written} (p {_about(own.p)}). "
            "The closer p and q are, the more often both choose the same token."
        )
    if rule == "block":
        return (
            f"Block verification judges the draft tokens together and accepted the first {accepted}. The next token, "
            f"{written} (p {_about(own.p)}), was drawn from the residual: the excess of the target over the draft."
        )
    chance = f"accepted with probability p/q {_about(x.p / x.q)}" if x.q > 0 else "accepted with probability p"
    return (
        f"{place} Such a token is {chance}; this time it was not accepted. The recovered token {written} "
        f"(p {_about(own.p)}) was drawn from the residual: the excess of p over q."
    )


def legend() -> str:
    """Return HTML: the legend of colours, underlines and symbols in `row_html`, `step_html` and `step_figure`."""
    signs = " &nbsp; ".join(f"{SYMBOLS[kind]} {kind}" for kind in plots.UNDERLINES)
    words = [
        f'<span style="color:{_INKS[kind]}">{SYMBOLS[kind]} {kind}</span> {plots.MEANINGS[kind]}'
        for kind in ("rejected", "not reached")
    ]
    return f"{plots.legend()}<br>{signs} &nbsp; {' &nbsp; '.join(words)}"


def step_html(trace: Trace, row: int, nth: int, tokenizer: PreTrainedTokenizerBase, prompt: str = "") -> str:
    """Return HTML: the end of the row's text before a step, and the step's tokens marked by outcome."""
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
    return f'<pre style="{style}"><span style="color:{plots.GREY}">{tail}</span> {" ".join(chips)}</pre>'


def row_html(
    trace: Trace, row: int, tokenizer: PreTrainedTokenizerBase, prompt: str = "", nth: int | None = None
) -> str:
    """Return HTML of a row's text: grey prompt, tokens coloured by origin. Hover shows p, q, step. nth: marked step."""
    tokens = outcomes(trace)
    mine = tokens[(tokens.row == row) & (tokens.kind != "rejected")]
    about = {"titles": [_hover(line) for line in mine.itertuples()], "marked": (mine.nth == nth).tolist()}
    return plots.coloured_text(mine.token.tolist(), mine.kind.tolist(), tokenizer, prompt=prompt, **about)


def _hover(line) -> str:
    q = "" if np.isnan(line.q) else f", q = {line.q:.3f}"
    return f"{line.outcome} · p = {line.p:.3f}{q} · " + (f"step {line.nth}" if line.nth else "prefill")


def marked_cell(row: int, nth: int) -> dict:
    """Return a frame around one cell of the raster, as a plotly shape."""
    edges = {"x0": nth - 0.5, "x1": nth + 0.5, "y0": row - 0.5, "y1": row + 0.5}
    return {"type": "rect", "line": {"color": LOOKS["recovered"].colour, "width": 3}, **edges}


def step_figure(trace: Trace, row: int, nth: int, tokenizer: PreTrainedTokenizerBase) -> go.Figure:
    """Return p and q of a step's tokens side by side: draft tokens in order, then the target's own token."""
    part = step_tokens(trace, row, nth)
    at = " (at temperature 1)" if trace.meta.get("verification") == "greedy" else ""
    title = titled(f"Row {row}, step {nth}: p and q of its tokens{at}", trace)
    figure = empty_figure(title, "", "probability", height=360)
    places = np.arange(1, len(part) + 1)
    for name, values, hatch in (("p", part.p, ""), ("q", part.q, "/")):
        few = len(part) <= _FEW
        drawn = bars(name, places, values.astype(object).where(values.notna(), None), list(part.outcome))  # no NaN
        drawn.marker.pattern = {"shape": hatch, "fgcolor": "white"}
        drawn.update(
            offsetgroup=name,
            showlegend=False,
            text=[f"{value:.2f}" if few and value >= 0.005 else "" for value in values],
            textposition="outside",
            textangle=0,
            cliponaxis=False,
            customdata=part.outcome,
            hovertemplate=f"{name} = %{{y:.3f}}, %{{customdata}}<extra></extra>",
        )
        figure.add_trace(drawn)
    for name, key, hatch in (("p: the target", "p", ""), ("q: the draft", "q", "/")):  # a grey legend
        figure.add_trace(bars(name, [None], [None], "plan", offsetgroup=key).update(marker_pattern_shape=hatch))
    ticks = [
        f'{html.escape(label(line.token, tokenizer), quote=False)}<br><span style="color:{_INKS[line.outcome]}">'
        f"{SYMBOLS[line.outcome]}</span>"
        for line in part.itertuples()
    ]
    figure.update_xaxes(tickvals=places, ticktext=ticks)
    return figure.update_yaxes(range=[0, 1.2], tickvals=[0, 0.25, 0.5, 0.75, 1])


def policy_figure(traces: Mapping[str, Trace]) -> go.Figure:
    """Return one panel per policy: draft length of each step as a line, accepted tokens as discs."""
    title = titled("Draft length and accepted tokens of each policy", *traces.values())
    stacked = {"shared_xaxes": True, "vertical_spacing": 0.09}
    figure = panels(len(traces), 1, list(traces), title, 160 + 210 * len(traces), **stacked)
    for panel, trace in enumerate(traces.values(), start=1):
        decode = trace.steps.query("kind == 'decode'")
        lengths = decode.groupby("step").k.max()
        rows = decode.groupby(["step", "accepted", decode.drafted > 0]).size().rename("rows").reset_index()
        line = curve("draft length k", lengths.index, lengths, "recovered", "lines", showlegend=panel == 1)
        line.update(line={"shape": "hvh", "dash": "solid"}, hovertemplate="step %{x}: k = %{y}<extra></extra>")
        figure.add_trace(line, panel, 1)
        for name, look, part in (
            ("rows, by accepted tokens", "accepted", rows[rows.drafted]),
            ("rows that drafted nothing", "regular", rows[~rows.drafted]),
        ):
            discs = curve(name, part.step, part.accepted, look, "markers", showlegend=panel == 1)
            hover = f"step %{{x}}: {name}: %{{customdata}} with %{{y}}<extra></extra>"
            discs.update(customdata=part.rows, hovertemplate=hover)
            figure.add_trace(discs.update(marker={"size": 5 * np.sqrt(part.rows), "opacity": 0.7}), panel, 1)
        edge = trace.steps.k.max() + 0.8  # the range starts below 0, so that discs at 0 are whole
        figure.update_yaxes(title="tokens", range=[-0.8, edge], row=panel, col=1)
    return figure.update_xaxes(title="step of the batch", row=len(traces), col=1)
