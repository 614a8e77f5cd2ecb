"""Draft-length policies against each other on made-up acceptance, live, beside the best in hindsight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
import plotly.graph_objects as go
from ipywidgets import Box, Dropdown, FloatSlider, IntSlider, Widget

from bass_core import checks
from bass_core.loop.trace import Trace
from bass_core.policies.costs import CostModel
from bass_core.policies.goodput import Goodput
from bass_core.policies.protocol import BassHeuristic, DraftLengthPolicy
from bass_lab.gpu.recorded import GpuRecord
from bass_lab.measure.modelled_costs import measured_cpu, modelled_h100
from bass_lab.policies import Learned, MarginalValue, RaggedBudget
from bass_lab.show import live_figures, token_views
from bass_lab.show.live_figures import live
from bass_lab.show.looks import bars, empty_figure
from bass_lab.show.trace_explorer import WRAPPED
from bass_lab.study import simulator
from bass_lab.study.published_policies import SVIP, AdaEDL, HuggingFaceHeuristic
from bass_lab.study.recorded_acceptance import AcceptanceTrace

KINDS = {  # what a policy looks at, and the look of such policies
    "nothing": "regular",
    "what was accepted": "recovered",
    "the draft's distributions": "rejected",
    "costs": "accepted",
}
LOOKS_AT = {
    **dict.fromkeys(("Algorithm 1", "transformers"), "what was accepted"),
    **dict.fromkeys(("AdaEDL", "SVIP"), "the draft's distributions"),
    **dict.fromkeys(("Learned", "Goodput", "MarginalValue", "RaggedBudget"), "costs"),
}
REGULAR = "regular"
ALIKE, DRIFTING = "all alike", "easy and hard"
MODELLED, CPU = "H100 (modelled)", "CPU (measured)"
LENGTH, SEQUENCES, REPEATS = 128, 64, 8  # of what the explorer replays


def policies(cost: CostModel) -> dict[str, int | DraftLengthPolicy]:
    """The policies to compare, by name."""
    return {
        REGULAR: 0,
        **{f"fixed {k}": k for k in (3, 5, 8)},
        "Algorithm 1": BassHeuristic(),
        "transformers": HuggingFaceHeuristic(),
        "AdaEDL": AdaEDL(),
        "SVIP": SVIP(),
        "Learned": Learned(cost),
        "Goodput": Goodput(cost),
        "MarginalValue": MarginalValue(cost),
        "RaggedBudget": RaggedBudget(cost),
    }


def contest(
    trace: AcceptanceTrace,
    cost: CostModel,
    batch: int,
    *,
    others: Mapping[str, int | DraftLengthPolicy] | None = None,
    **options,
) -> pd.DataFrame:
    """`simulator.regret` of `policies` and others at one batch size, with `speed` over regular decoding. options: its
    own."""
    found = simulator.regret(trace, policies(cost) | dict(others or {}), cost, [batch], **options)
    regular = found.set_index("policy").seconds_per_token[REGULAR]
    return found.assign(speed=regular / found.seconds_per_token)


def policy_looks(policies: pd.Series) -> list[str]:
    """The look of each of these policies, by what it looks at."""
    return [KINDS[LOOKS_AT.get(name, "nothing")] for name in policies]


def speed_figure(table: pd.DataFrame, title: str) -> go.Figure:
    """Bars of `speed` per line of a `contest`, coloured by what the policy looks at, labelled with its regret."""
    figure = empty_figure(title, "times as fast as regular decoding", "", height=140 + 30 * len(table))
    drawn = bars("", table.speed, table.policy, policy_looks(table.policy), orientation="h", cliponaxis=False)
    texts = [f"{line.speed:.2f}×, regret {line.regret:.0%}" for line in table.itertuples()]
    hover = "%{y}: %{x:.2f}×, k planned on average %{customdata:.1f}<extra></extra>"
    figure.add_trace(drawn.update(text=texts, textposition="outside", customdata=table.k, hovertemplate=hover))
    figure.add_vline(x=1, line={"color": "black", "width": 1})
    figure.update_xaxes(range=[0, 1.4 * max(1.0, table.speed.max())])
    return figure.update_yaxes(autorange="reversed")


class LengthExplorer:
    """Controls above two figures: the speed of every policy over regular decoding, and the path of Algorithm 1.

    controls: "alpha", "variation" ("all alike", or "easy and hard": passages of 32 tokens on average, `spread` above
    and below alpha), "spread", "batch", "costs", "launch" (ms of a pass of the modelled target; a draft's takes a
    fifth). `table` is of `contest`, `path` the trace of Algorithm 1, `sentence` says both.
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
        """recorded: costs of a GPU, to choose among the others.

        Raises ValueError or TypeError for a setting that no control could take.
        """
        self.seed, self.repeats = checks.integer("seed", seed), checks.integer("repeats", repeats, least=2)
        values = {"alpha": alpha, "variation": variation, "spread": spread, "batch": batch, "costs": costs}
        self.costs = {CPU: measured_cpu()} | ({} if recorded is None else {recorded.name: recorded.content})
        self.controls = _controls(values | {"launch": launch}, costs=(MODELLED, *self.costs))
        self.widget = live(self._drawn, **self.controls)
        *_, self.sentence, self.bars, self.steps, resizer = self.widget.children
        above = Box(list(self.controls.values()), layout=WRAPPED)
        self.widget.children = [above, self.sentence, self.bars, self.steps, resizer]

    def _drawn(self, alpha: float, variation: str, spread: float, batch: int, costs: str, launch: float):
        """Replays with the controls' values: the sentence and both figures."""
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
        title = f"Speed over regular decoding, batch {batch}"
        path = token_views.policy_figure({"": self.path})
        path.update_layout(title_text="The path of Algorithm 1: what it drafted, what was accepted")
        return sentence, speed_figure(self.table, title), path

    def static(self) -> tuple:
        """What is seen now without widgets: the settings and the sentence, and both figures."""
        shown = ", ".join(f"{name} {control.value}" for name, control in self.controls.items() if not control.disabled)
        return live_figures.static(f"{shown}.<br>{self.sentence.value}", self.bars, self.steps)

    def _repr_mimebundle_(self, **options):
        return self.widget._repr_mimebundle_(**options)


def _sentence(table: pd.DataFrame, path: Trace, alpha: float, spread: float) -> str:
    best = table.loc[table.speed.idxmax()]
    chances = f"between {alpha - spread:.2f} and {alpha + spread:.2f}" if spread else f"{alpha:.2f} everywhere"
    counts = path.summary()
    return (
        f"The chance of acceptance is {chances}. Fastest here: <b>{best.policy}</b>, {best.speed:.2f} times regular "
        f"decoding. Algorithm 1, in the replay below, planned {counts['k']:.1f} tokens on average; "
        f"{counts['acceptance_rate']:.0%} of what it drafted was accepted."
    )


def _controls(values: dict, costs: Sequence[str]) -> dict[str, Widget]:
    """The controls with these values. Raises as `LengthExplorer` does: a slider would cut in silence."""
    checks.integer("batch", values["batch"], least=1)
    common = {"style": {"description_width": "85px"}, "layout": {"width": "270px"}}

    def slider(kind: type[Widget], name: str, description: str, least: float, most: float, step: float) -> Widget:
        if not least <= values[name] <= most:
            raise ValueError(f"{name} must be from {least} to {most}, got {values[name]!r}")
        return kind(value=values[name], min=least, max=most, step=step, description=description, **common)

    def dropdown(name: str, description: str, *options: str) -> Widget:
        value = checks.one_of(name, values[name], options)
        return Dropdown(options=options, value=value, description=description, **common)

    return {
        "alpha": slider(FloatSlider, "alpha", "alpha", 0.3, 0.95, 0.05),
        "variation": dropdown("variation", "passages", ALIKE, DRIFTING),
        "spread": slider(FloatSlider, "spread", "spread", 0.0, 0.3, 0.05),
        "batch": slider(IntSlider, "batch", "batch size", 1, 128, 1),
        "costs": dropdown("costs", "costs", *costs),
        "launch": slider(FloatSlider, "launch", "launch, ms", 0.0, 10.0, 0.5),
    }
