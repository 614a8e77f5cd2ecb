"""Lesson 04: tables and figures of replays with different draft lengths and policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from bass_core.loading import measured_costs
from bass_core.loading.model_pair import ModelPair
from bass_core.policies.costs import CostModel
from bass_core.policies.protocol import FixedLength, expected_tokens
from bass_lab.gpu.recorded import GpuRecord
from bass_lab.lessons.l04_explorer import KINDS, MODELLED, REGULAR, policies, policy_looks
from bass_lab.measure.modelled_costs import measured_cpu, modelled_h100
from bass_lab.policies.objective import Objective, first_finished, last_finished
from bass_lab.show.looks import CURVES, LOOKS, bars, curve, empty_figure, interval, panels
from bass_lab.study import recorded_acceptance, recording, simulator
from bass_lab.study.recorded_acceptance import AcceptanceTrace
from bass_lab.study.replay import Replay, decode, step_seconds
from bass_lab.texts.prompt_sets import PROMPT_SETS, prompt_set

HINDSIGHT = "best fixed k"
SWEPT = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)


def recordings(pair: ModelPair, own: bool, temperature: float, seed: int) -> dict[str, AcceptanceTrace]:
    """Return the traces of both prompt sets past EOS: shipped, or 32 new texts for another pair or temperature."""
    shipped = {name: recorded_acceptance.shipped(name) for name in PROMPT_SETS}
    if not own and all(trace.meta["temperature"] == temperature for trace in shipped.values()):
        return {name: trace.past_eos() for name, trace in shipped.items()}
    options = {"max_new_tokens": 128, "temperature": temperature, "seed": seed}
    return {name: recording.record(pair, prompt_set(name, 32), **options).past_eos() for name in PROMPT_SETS}


def cost_models(pair: ModelPair, own: bool, recorded: GpuRecord | None = None) -> dict[str, CostModel]:
    """Return costs by name: of a modelled GPU, of the embedded pair as shipped or (own) of this pair, and of a recorded
    GPU. Raises ValueError if the costs of this pair are unknown."""
    measured = measured_costs.costs_like(pair) if own else measured_cpu()
    if measured is None:
        raise ValueError("the costs of these models on this device are unknown; measure with `bass calibrate`")
    known = {MODELLED: modelled_h100(), f"{measured.device} (recorded)": measured}
    return known if recorded is None else known | {recorded.name: recorded.content}


def predicted_lengths(
    models: Mapping[str, CostModel], alphas: Mapping[str, float], batches: Sequence[int], kv_length: float = 256
) -> pd.DataFrame:
    """Return the relative speed at a constant acceptance probability alpha: one line per costs, set, batch and k."""
    lengths = np.arange(17)
    lines = []
    for name, cost in models.items():
        for batch in _within(cost, batches):
            seconds = cost.step(batch, lengths, kv_length)
            for prompts, alpha in alphas.items():
                speed = expected_tokens(alpha, lengths[-1]) * seconds[0] / seconds
                part = {"costs": name, "set": prompts, "batch": batch, "k": lengths, "speed": speed}
                lines.append(pd.DataFrame(part))
    return pd.concat(lines, ignore_index=True)


def replayed_lengths(
    traces: Mapping[str, AcceptanceTrace],
    models: Mapping[str, CostModel],
    batches: Sequence[int],
    *,
    max_new_tokens: int,
    repeats: int,
    seed: int,
    lengths: Sequence[int] = SWEPT,
) -> pd.DataFrame:
    """Return the table of `predicted_lengths` from replays of recorded texts to the end. lengths must contain 0."""
    lines = []
    for prompts, trace in traces.items():
        for batch in batches:
            drawn = [Replay.draw(trace, batch, max_new_tokens, seed, repeat) for repeat in range(repeats)]
            runs = {k: [decode(each, FixedLength(k)) for each in drawn] for k in lengths}
            for name, cost in models.items():
                if batch not in _within(cost, batches):
                    continue
                seconds = {k: sum(step_seconds(steps, cost).sum() for steps in found) for k, found in runs.items()}
                line = {"costs": name, "set": prompts, "batch": batch}
                lines += [line | {"k": k, "speed": seconds[0] / seconds[k]} for k in lengths]
    return pd.DataFrame(lines)


def best_lengths(table: pd.DataFrame) -> pd.DataFrame:
    """Return the fastest k and its speed per costs, set and batch of one of the tables above."""
    return table.loc[table.groupby(["costs", "set", "batch"], sort=False).speed.idxmax()].reset_index(drop=True)


def contests(traces: Mapping[str, AcceptanceTrace], cost: CostModel, best: pd.DataFrame, **options) -> pd.DataFrame:
    """Return `simulator.regret` of `policies` for every set and batch of `best` (`best_lengths` under these costs), and
    `speed` relative to regular decoding. The k of `best` joins as `HINDSIGHT`, the best fixed length on these replays.
    """
    lines = []
    for line in best.itertuples():
        compared = policies(cost) | {HINDSIGHT: int(line.k)}
        found = simulator.regret(traces[line.set], compared, cost, [line.batch], **options)
        lines.append(found.assign(set=line.set, speed=found.seconds[0] / found.seconds))
    return pd.concat(lines, ignore_index=True)


def ends(
    trace: AcceptanceTrace, cost: CostModel, batch: int, sharpnesses: Sequence[float], lengths: Sequence[int], **options
) -> pd.DataFrame:
    """Return first_s (mean), throughput and `best` for `first_finished`, `last_finished` and fixed lengths."""
    tried = [("fixed", k, k) for k in lengths]
    for family, weights in (("first", first_finished), ("last", last_finished)):
        tried += [(family, sharpness, Objective(cost, weights=weights(sharpness))) for sharpness in sharpnesses]
    lines = []
    for family, setting, policy in tried:
        runs = simulator.simulate(trace, policy, cost, batch=batch, **options)
        throughput = runs.tokens.sum() / runs.seconds.sum()
        line = {"family": family, "setting": setting, "first_s": runs.first_s.mean(), "throughput": throughput}
        lines.append(line | {"last_s": runs.last_s.mean(), "k": runs.k.mean()})
    found = pd.DataFrame(lines)
    return found.assign(best=not_dominated(found.first_s, -found.throughput))


def not_dominated(*costs: Sequence[float]) -> np.ndarray:
    """Return True for Pareto-optimal points, bool [N]: no other point is <= in every coordinate and < in one."""
    points = np.stack([np.asarray(each, dtype=float) for each in costs], axis=1)  # [N, C]
    at_most = (points[:, None] <= points[None]).all(-1)
    smaller = (points[:, None] < points[None]).any(-1)
    return ~(at_most & smaller).any(0)


def _within(cost: CostModel, batches: Sequence[int]) -> list[int]:
    return [batch for batch in batches if batch <= cost.target_passes.axes["batch"][-1]]


def lengths_figure(table: pd.DataFrame, title: str) -> go.Figure:
    """Return relative speed against k: a column of panels per costs, a line of panels per set, the best k marked."""
    names, sets, batches = (list(table[column].unique()) for column in ("costs", "set", "batch"))
    titles = [f"{prompts}: {name}" for prompts in sets for name in names]
    shared = {"shared_xaxes": True, "shared_yaxes": True, "vertical_spacing": 0.1, "horizontal_spacing": 0.04}
    figure = panels(len(sets), len(names), titles, title, 130 + 260 * len(sets), **shared)
    for (prompts, name, batch), part in table.groupby(["set", "costs", "batch"], sort=False):
        line = curve(f"batch {batch}", part.k, part.speed, CURVES[batches.index(batch) % len(CURVES)])
        sizes = np.where(part.speed == part.speed.max(), 11, 0.1)
        hover = f"{prompts}, batch {batch}, k = %{{x}}: %{{y:.2f}}×<extra></extra>"
        line.update(legendgroup=str(batch), showlegend=(prompts, name) == (sets[0], names[0]))
        line.update(marker_size=sizes, hovertemplate=hover)
        figure.add_trace(line, sets.index(prompts) + 1, names.index(name) + 1)
    figure.add_hline(1, line={"color": "#444444", "width": 1})
    figure.update_xaxes(title="draft length k", row=len(sets)).update_xaxes(dtick=2)
    return figure.update_yaxes(title="times as fast", col=1).update_yaxes(rangemode="tozero")


def regret_figure(table: pd.DataFrame, title: str) -> go.Figure:
    """Return the regret of every policy with interval, a panel per batch size. Dashed: schedule with known coins."""
    batches = list(table.batch.unique())
    titles = [f"batch {batch}" for batch in batches]
    shared = {"shared_yaxes": True, "horizontal_spacing": 0.04}
    figure = panels(1, len(batches), titles, title, 190 + 26 * table.policy.nunique(), **shared)
    for column, batch in enumerate(batches, 1):
        part = table[(table.batch == batch) & (table.policy != REGULAR)]
        drawn = bars("", part.regret, part.policy, policy_looks(part.policy), orientation="h", showlegend=False)
        hover = f"batch {batch}, %{{y}}: regret %{{x:.0%}}, %{{customdata[0]:.2f}} times regular decoding, "
        drawn.update(error_x=interval(part.regret, part.low, part.high, thickness=1.2, width=3))
        drawn.update(customdata=part[["speed", "k"]], hovertemplate=hover + "k %{customdata[1]:.1f}<extra></extra>")
        figure.add_trace(drawn, 1, column)
        reached = float((part.schedule_s / part.bound_s).iloc[0]) - 1
        known = {"line": {"color": "black", "dash": "dash", "width": 1.5}, "name": "schedule that knew all coins"}
        figure.add_vline(reached, **known, showlegend=column == 1, row=1, col=column)
    for kind, look in KINDS.items():
        figure.add_trace(bars(f"uses {kind}", [None], [None], look))
    figure.update_xaxes(tickformat=".0%", rangemode="tozero", title="regret", nticks=4)
    return figure.update_yaxes(autorange="reversed")


def ends_figure(found: pd.DataFrame, title: str) -> go.Figure:
    """Return throughput against the first row's end. Pareto-optimal points are filled, other points hollow."""
    figure = empty_figure(title, "end of the first row, ms", "tokens per second", 460)
    families = {"fixed": ("fixed k", "regular"), "first": ("first row counts: sharpness", "recovered")}
    families |= {"last": ("last row counts: sharpness", "accepted")}
    for family, (name, look) in families.items():
        part = found[found.family == family]
        points = curve(name, 1e3 * part.first_s, part.throughput, look, "lines+markers+text", line_dash="dot")
        symbols = [LOOKS[look].symbol + ("" if best else "-open") for best in part.best]
        points.update(marker={"symbol": symbols, "size": 10}, line_width=1)
        points.update(textposition="bottom right" if family == "fixed" else "top left")
        points.update(text=[f"{setting:g}" for setting in part.setting])
        points.update(
            customdata=np.stack([part.k, 1e3 * part.last_s], axis=1),
            hovertemplate=f"{name}, %{{text}}: first %{{x:.0f}} ms, last %{{customdata[1]:.0f}} ms, "
            "%{y:,.0f} tokens/s, k %{customdata[0]:.1f}<extra></extra>",
        )
        figure.add_trace(points)
    return figure
