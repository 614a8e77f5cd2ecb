"""Live comparison of draft-length policies on synthetic acceptance."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go
from IPython.display import display

from bass_core import checks
from bass_core.loop.trace import Trace
from bass_core.policies.costs import CostModel
from bass_core.policies.goodput import Goodput
from bass_core.policies.protocol import BassHeuristic, DraftLengthPolicy
from bass_lab.gpu.recorded import GpuRecord
from bass_lab.measure.modelled_costs import measured_cpu, modelled_h100
from bass_lab.show import token_views
from bass_lab.show.live_figures import live, widgets
from bass_lab.show.looks import bars, empty_figure
from bass_lab.show.trace_explorer import WRAPPED
from bass_lab.study import simulator
from bass_lab.study.published_policies import HuggingFaceHeuristic
from bass_lab.study.recorded_acceptance import AcceptanceTrace

KINDS = {"nothing": "regular", "accepted lengths": "recovered", "costs": "accepted"}  # input of a policy: its look
LOOKS_AT = {"Algorithm 1": "accepted lengths", "transformers": "accepted lengths", "Goodput": "costs"}
REGULAR = "regular"
ALIKE, DRIFTING = "all alike", "easy and hard"
MODELLED, CPU = "H100 (modelled)", "CPU (recorded)"
LENGTH, SEQUENCES, REPEATS = 128, 64, 4  # of the explorer's replays


def policies(cost: CostModel) -> dict[str, int | DraftLengthPolicy]:
    """Return the compared policies by name."""
    return {
        REGULAR: 0,
        **{f"fixed {k}": k for k in (3, 5, 8)},
        "Algorithm 1": BassHeuristic(),
        "transformers": HuggingFaceHeuristic(),
        "Goodput": Goodput(cost),
    }


def contest(trace: AcceptanceTrace, cost: CostModel, batch: int, **options) -> pd.DataFrame:
    """Return mean seconds and k of each of `policies` on the same replays, and `speed` relative to regular decoding.
    options: of `simulator.simulate`."""
    runs = {
        name: simulator.simulate(trace, policy, cost, batch=batch, **options)[["seconds", "k"]].mean()
        for name, policy in policies(cost).items()
    }
    found = pd.DataFrame(runs).T.rename_axis("policy").reset_index()
    return found.assign(speed=found.seconds[0] / found.seconds)


def policy_looks(policies: pd.Series) -> list[str]:
    """Return the look of each policy, by the policy's input."""
    return [KINDS[LOOKS_AT.get(name, "nothing")] for name in policies]


def speed_figure(table: pd.DataFrame, title: str) -> go.Figure:
    """Return bars of `speed` per line of a `contest`, coloured by the policy's input."""
    figure = empty_figure(title, "times as fast as regular decoding", "", height=140 + 30 * len(table))
    drawn = bars("", table.speed, table.policy, policy_looks(table.policy), orientation="h", cliponaxis=False)
    texts = [f"{speed:.2f}×" for speed in table.speed]
    hover = "%{y}: %{x:.2f}×, mean k %{customdata:.1f}<extra></extra>"
    figure.add_trace(drawn.update(text=texts, textposition="outside", customdata=table.k, hovertemplate=hover))
    figure.add_vline(x=1, line={"color": "black", "width": 1})
    figure.update_xaxes(range=[0, 1.15 * max(1.0, table.speed.max())])
    return figure.update_yaxes(autorange="reversed")


class LengthExplorer:
    """Controls above two figures: the speed of every policy, and the path of Algorithm 1.

    controls: "alpha", "variation" ("all alike", or "easy and hard": passages of 32 tokens on average, `spread` above
    and below alpha), "spread", "batch", "costs", "launch" (launch ms of a modelled target pass; a draft pass takes a
    fifth). table: of `contest`. path: trace of Algorithm 1. sentence: summary of both.
    """

    def __init__(
        self,
        *,
        alpha: float = 0.8,
        variation: str = DRIFTING,
        spread: float = 0.15,
        batch: int = 8,
        costs: str = MODELLED,
        launch: float = 0.5,
        seed: int = 0,
        repeats: int = REPEATS,
        recorded: GpuRecord | None = None,
    ):
        """recorded: costs of a GPU, as a further choice. Raises ValueError or TypeError for invalid settings."""
        self.seed, self.repeats = checks.integer("seed", seed), checks.integer("repeats", repeats, least=2)
        values = {"alpha": alpha, "variation": variation, "spread": spread, "batch": batch, "costs": costs}
        self.costs = {CPU: measured_cpu()} | ({} if recorded is None else {recorded.name: recorded.content})
        self.controls = _controls(values | {"launch": launch}, costs=(MODELLED, *self.costs))
        self.widget = live(self._drawn, **self.controls)
        *_, self.sentence, self.bars, self.steps, resizer = self.widget.children
        above = widgets.Box(list(self.controls.values()), layout=WRAPPED)
        self.widget.children = [above, self.sentence, self.bars, self.steps, resizer]

    def _drawn(self, alpha: float, variation: str, spread: float, batch: int, costs: str, launch: float):
        drifting, modelled = variation == DRIFTING, costs == MODELLED
        self.controls["spread"].disabled, self.controls["launch"].disabled = not drifting, not modelled
        spread = min(spread, alpha, 1 - alpha) if drifting else 0.0
        made_up = {"alpha": alpha, "length": LENGTH, "sequences": SEQUENCES, "seed": self.seed}
        trace = AcceptanceTrace.synthetic(**made_up, regimes=(spread, 32.0) if drifting else None)
        cost = modelled_h100(launch) if modelled else self.costs[costs]
        if not modelled:  # larger batches were not measured
            batch = min(batch, int(cost.target_passes.axes["batch"][-1]))
        self.table = contest(trace, cost, batch, repeats=self.repeats, seed=self.seed)
        self.path = simulator.simulate_trace(trace, BassHeuristic(), cost, batch=batch, seed=self.seed)
        sentence = _sentence(self.table, self.path, alpha, spread)
        title = f"Speed relative to regular decoding, batch {batch}"
        path = token_views.policy_figure({"": self.path})
        path.update_layout(title_text="Path of Algorithm 1: draft length and accepted tokens")
        return sentence, speed_figure(self.table, title), path

    def _ipython_display_(self) -> None:
        display(self.widget)


def _sentence(table: pd.DataFrame, path: Trace, alpha: float, spread: float) -> str:
    best = table.loc[table.speed.idxmax()]
    chances = f"between {alpha - spread:.2f} and {alpha + spread:.2f}" if spread else f"{alpha:.2f} everywhere"
    counts = path.summary()
    return (
        f"The acceptance probability is {chances}. Fastest: <b>{best.policy}</b>, {best.speed:.2f} times regular "
        f"decoding. In the replay below, Algorithm 1 planned {counts['k']:.1f} draft tokens on average; "
        f"{counts['acceptance_rate']:.0%} of its draft tokens were accepted."
    )


def _controls(values: dict, costs: Sequence[str]) -> dict[str, widgets.Widget]:
    """Return controls with these values. Raises the errors of `LengthExplorer`: sliders would clip silently."""
    checks.integer("batch", values["batch"], least=1)
    common = {"style": {"description_width": "85px"}}

    def slider(
        kind: type[widgets.Widget], name: str, description: str, least: float, most: float, step: float
    ) -> widgets.Widget:
        if not least <= values[name] <= most:
            raise ValueError(f"{name} must be from {least} to {most}, got {values[name]!r}")
        return kind(value=values[name], min=least, max=most, step=step, description=description, **common)

    def dropdown(name: str, description: str, *options: str) -> widgets.Widget:
        value = checks.one_of(name, values[name], options)
        return widgets.Dropdown(options=options, value=value, description=description, **common)

    return {
        "alpha": slider(widgets.FloatSlider, "alpha", "alpha", 0.3, 0.95, 0.05),
        "variation": dropdown("variation", "passages", ALIKE, DRIFTING),
        "spread": slider(widgets.FloatSlider, "spread", "spread", 0.0, 0.3, 0.05),
        "batch": slider(widgets.IntSlider, "batch", "batch size", 1, 128, 1),
        "costs": dropdown("costs", "costs", *costs),
        "launch": slider(widgets.FloatSlider, "launch", "launch, ms", 0.0, 10.0, 0.5),
    }
