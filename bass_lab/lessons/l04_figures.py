"""Lesson 04: tables and figures of replays with different draft lengths and policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import fields, replace

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from bass_core.loading import measured_costs
from bass_core.loading.model_pair import ModelPair
from bass_core.policies.costs import CostModel
from bass_core.policies.protocol import DraftLengthPolicy, FixedLength, expected_tokens
from bass_lab.gpu.recorded import GpuRecord
from bass_lab.lessons.l04_explorer import KINDS, MODELLED, REGULAR, contest, policy_looks
from bass_lab.measure.modelled_costs import measured_cpu, modelled_h100
from bass_lab.policies.objective import Objective, first_finished, last_finished
from bass_lab.show.looks import CURVES, LOOKS, bars, curve, empty_figure, interval, panels
from bass_lab.study import recorded_acceptance, recording, simulator
from bass_lab.study.recorded_acceptance import AcceptanceTrace
from bass_lab.study.replay import Replay, decode, step_seconds
from bass_lab.texts.prompt_sets import PROMPT_SETS, prompt_set

HINDSIGHT = "best fixed k"
SWEPT = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
CLOSE = 1.1  # recovered: at most this multiple of the best fixed length's time
WINDOW = 4  # steps in a moving mean


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
    known = {MODELLED: modelled_h100(), f"{measured.device} (measured)": measured}
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


def some_row_accepts_all(alpha: float, lengths: Sequence[int], batches: Sequence[int]) -> pd.DataFrame:
    """Return the probability of full acceptance in some row of a batch, 1 - (1 - alpha^k)^b: one line per k."""
    chances = {f"batch {batch}": [1 - (1 - alpha**k) ** batch for k in lengths] for batch in batches}
    return pd.DataFrame(chances, index=pd.Index(lengths, name="k"))


def contests(traces: Mapping[str, AcceptanceTrace], cost: CostModel, best: pd.DataFrame, **options) -> pd.DataFrame:
    """Return `contest` for every set and batch of `best` (`best_lengths` under these costs). The k of `best` joins as
    `HINDSIGHT`, the best fixed length on the same replays."""
    lines = []
    for line in best.itertuples():
        found = contest(traces[line.set], cost, line.batch, others={HINDSIGHT: int(line.k)}, **options)
        lines.append(found.assign(set=line.set))
    return pd.concat(lines, ignore_index=True)


def paired(
    traces: Mapping[str, AcceptanceTrace],
    cost: CostModel,
    policies: tuple[int | DraftLengthPolicy, int | DraftLengthPolicy],
    batches: Sequence[int],
    **options,
) -> pd.DataFrame:
    """Return the time of the first policy divided by that of the second on the same replays, per set and batch:
    geometric mean and 95% interval (normal). alone: half width with independent coins."""
    lines = []
    for prompts, trace in traces.items():
        for batch in batches:
            first, second = (
                np.log(simulator.simulate(trace, policy, cost, batch=batch, **options).seconds) for policy in policies
            )
            mean, error = (first - second).mean(), 1.96 * (first - second).sem()
            alone = 1.96 * np.hypot(first.sem(), second.sem())
            low, high = np.exp(mean - error), np.exp(mean + error)
            line = {"set": prompts, "batch": batch, "times": np.exp(mean), "low": low, "high": high}
            lines.append(line | {"half width": (high - low) / 2, "alone": np.exp(mean) * np.sinh(alone)})
    return pd.DataFrame(lines)


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


def halves(trace: AcceptanceTrace) -> tuple[AcceptanceTrace, AcceptanceTrace]:
    """Return the even sequences (to choose a policy) and the odd sequences (to evaluate the choice)."""

    def part(first: int) -> AcceptanceTrace:
        arrays = {each.name: getattr(trace, each.name)[first::2] for each in fields(trace) if each.name != "meta"}
        return replace(trace, **arrays)

    return part(0), part(1)


def switches(
    policies: Mapping[str, DraftLengthPolicy],
    stages: Sequence[tuple[str, AcceptanceTrace]],
    cost: CostModel,
    *,
    batch: int,
    seed: int = 0,
    repeats: int = 8,
) -> pd.DataFrame:
    """Return one line per policy, stage and step while all rows are live in all repeats. A policy decodes one batch per
    stage and keeps its state between stages.

    stages: labels and traces. A policy with a non-empty `task` receives the label as `task`. Columns: policy, stage
    (number), set (label), step; k and ms (a row's time per token): means over the repeats.
    """
    lines = []
    for name, policy in policies.items():
        for repeat in range(repeats):
            used = deepcopy(policy, {id(cost): cost})
            told = bool(getattr(used, "task", ""))
            for stage, (label, trace) in enumerate(stages):
                if told:
                    used.task = label
                steps = decode(Replay.draw(trace, batch, None, seed + stage, repeat), used)
                milliseconds = 1e3 * step_seconds(steps, cost).sum(0)
                for number, (step, time) in enumerate(zip(steps, milliseconds, strict=True), 1):
                    if len(step.rows) == batch:
                        line = {"policy": name, "stage": stage, "set": label, "repeat": repeat, "step": number}
                        lines.append(line | {"k": step.planned.mean(), "time": time, "tokens": step.emitted.sum()})
    runs = pd.DataFrame(lines)
    by_step = runs.groupby(["policy", "stage", "set", "step"], sort=False)
    found = by_step.agg(k=("k", "mean"), time=("time", "sum"), tokens=("tokens", "sum"), replays=("repeat", "size"))
    found = found.assign(ms=batch * found.time / found.tokens).query("replays == @repeats")
    return found.drop(columns=["time", "tokens", "replays"]).reset_index()


def recovery(found: pd.DataFrame, least: Mapping[str, float]) -> pd.DataFrame:
    """Return the steps until a row's time per token (mean over `WINDOW` steps) is within a tenth of `least` (ms, by
    set), or "never"."""
    columns: dict[str, dict[str, int | str]] = {}
    for (policy, stage, label), part in found.groupby(["policy", "stage", "set"], sort=False):
        close = part.ms.rolling(WINDOW).mean() <= CLOSE * least[label]
        columns.setdefault(f"{stage + 1}: {label}", {})[policy] = (
            int(part.step[close].min()) if close.any() else "never"
        )
    return pd.DataFrame(columns)


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
        figure.add_vline(reached, line={"color": "black", "dash": "dash", "width": 1.5}, row=1, col=column)
    for kind, look in KINDS.items():
        figure.add_trace(bars(f"uses {kind}", [None], [None], look))
    figure.update_xaxes(tickformat=".0%", rangemode="tozero", title="regret", nticks=4)
    return figure.update_yaxes(autorange="reversed")


def ends_figure(found: pd.DataFrame, title: str) -> go.Figure:
    """Return throughput against the first row's end. Pareto-optimal points are filled, other points hollow."""
    figure = empty_figure(title, "end of the first row, ms", "tokens per second", 460)
    families = {"fixed": ("fixed k", "regular"), "first": ("first_finished(sharpness)", "recovered")}
    families |= {"last": ("last_finished(sharpness)", "accepted")}
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


def switch_figure(found: pd.DataFrame, least: Mapping[str, float], title: str) -> go.Figure:
    """Return draft length (above) and a row's time per token (below) over the steps, a column per stage. The grey line
    is the best fixed length of each set: `least` in ms."""
    stages = found.drop_duplicates("stage")[["stage", "set"]].to_numpy().tolist()
    titles = [f"{stage + 1}: {label}" for stage, label in stages]
    shared = {"shared_xaxes": True, "shared_yaxes": True, "vertical_spacing": 0.06, "horizontal_spacing": 0.03}
    figure = panels(2, len(stages), titles, title, 520, **shared)
    for (policy, runs), look in zip(found.groupby("policy", sort=False), CURVES, strict=False):
        for stage, part in runs.groupby("stage"):
            for row, values in ((1, part.k), (2, part.ms.rolling(WINDOW, min_periods=1).mean())):
                line = curve(policy, part.step, values, look, legendgroup=policy, marker_size=5)
                line.update(hovertemplate=f"{policy}, step %{{x}}: %{{y:.2f}}<extra></extra>")
                figure.add_trace(line.update(showlegend=row == 1 and stage == 0), row, stage + 1)
    for stage, label in stages:
        figure.add_hline(least[label], line={"color": "#444444", "width": 1.5, "dash": "dash"}, row=2, col=stage + 1)
    figure.update_xaxes(title="step of the decode", row=2).update_yaxes(rangemode="tozero")
    return figure.update_yaxes(title="planned k", row=1, col=1).update_yaxes(title="ms per token", row=2, col=1)
