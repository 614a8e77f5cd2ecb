"""The plan of `make bench-gpu`: methods by model shape and batch size, the most important figures first."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from bass_core.policies.costs import CostModel
from bass_core.policies.goodput import Goodput
from bass_core.policies.protocol import BassHeuristic, DraftLengthPolicy
from bass_lab.measure.modelled_costs import best_fixed_length

USELESS = 0.02  # α of a draft model whose tokens are almost never accepted
POLICIES = {"algorithm 1": lambda cost: BassHeuristic(), "goodput": Goodput}


@dataclass(frozen=True)
class PlannedMethod:
    """A decoding method. draft: 0, k, a name of `POLICIES`, or "best", the best fixed length under the costs."""

    method: str
    draft: int | str = 0
    alpha: float | None = None
    attention: str = "ragged"
    compile: str = "compiled+graphs"


def runnable(way: PlannedMethod, device: torch.device) -> PlannedMethod:
    """Return the method for this device: a dry run on a CPU uses neither kernels nor graphs."""
    if device.type == "cuda" or way.method == "transformers":
        return way
    return replace(way, attention="pad" if way.attention == "ragged" else way.attention, compile="off")


@dataclass(frozen=True)
class Group:
    """Methods to time on a pair and batch size."""

    shape: str
    batch: int
    ways: tuple[PlannedMethod, ...]


REGULAR = PlannedMethod("regular")
PEER = PlannedMethod("transformers", attention="sdpa", compile="static cache")


def batched(alpha: float, draft: int | str = "best", **changes) -> PlannedMethod:
    return PlannedMethod("batched", draft, alpha, **changes)


PROBE = batched(0.8, 5)  # the costs come from the steps of this method


def plan(quick: bool) -> list[Group]:
    """Return the groups to measure, the most important first: a run out of time drops the rest."""
    single = PlannedMethod("single", "best", 0.8)
    several = (REGULAR, batched(0.8), batched(USELESS, "goodput"), single)
    few = (REGULAR, batched(0.8))
    also = (
        batched(0.8, "goodput"),
        batched(0.8, attention="pad"),
        batched(0.8, attention="split", compile="off"),
        batched(0.8, compile="off"),
        PlannedMethod("regular", compile="graphs"),
        PlannedMethod("regular", compile="compiled"),
        batched(0.7),
        batched(0.9),
        batched(0.8, "algorithm 1"),
    )
    also_many = (batched(0.7), batched(0.8, attention="pad"))
    first, then = {8: several, 32: several[:3], 1: few, 64: few}, {8: also, 32: also_many}
    groups = [Group("paper-7.8b", batch, ways) for order in (first, then) for batch, ways in order.items()]
    if quick:
        return groups
    middle = (REGULAR, batched(0.8), batched(0.8, "goodput"))
    groups += [Group("paper-7.8b", batch, middle) for batch in (16, 4, 2)]
    groups += [Group("llama-3.1-8b", batch, ways) for batch, ways in first.items()]
    return groups


PEERS = [Group("paper-7.8b", batch, (PEER,)) for batch in (8, 32)]
DRY = Group("embedded", 2, (REGULAR, batched(0.8), PEER, batched(0.8, "goodput"), PlannedMethod("single", "best", 0.8)))


def policy_of(way: PlannedMethod, batch: int, cost: CostModel | None, keys: float) -> int | DraftLengthPolicy:
    """Return the `draft_length` for a session. cost: may be None for a fixed length. keys: mean KV length of a row."""
    if way.draft == "best":
        rows = 1 if way.method == "single" else batch
        return best_fixed_length(cost, rows, way.alpha, keys)[0] or 1
    return POLICIES[way.draft](as_calibrated(cost, way.alpha)) if way.draft in POLICIES else way.draft


def as_calibrated(cost: CostModel, alpha: float) -> CostModel:
    """Return these costs with the acceptance counts that `bass calibrate` would measure at this alpha."""
    return replace(cost, measured=cost.measured | {"acceptance": [round(1000 * alpha), round(1000 * (1 - alpha))]})
