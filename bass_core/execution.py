"""Select eager or captured steps and plain or compiled layers (`compile=`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from bass_core.loading.model_pair import ModelPair
from bass_core.loop.step import EagerStep
from bass_core.model import kernel_ops
from bass_core.model.runner import Layers
from bass_core.options import Options
from bass_core.policies.protocol import DraftLengthPolicy

if TYPE_CHECKING:
    from bass_core.gpu.graph_step import GraphStep
    from bass_core.gpu.overlap import Overlap


class Execution(NamedTuple):
    """Execution of a session's steps. compiled: layers through torch.compile. recorded: CUDA graphs."""

    compiled: bool = False
    recorded: bool = False

    @property
    def name(self) -> str:
        """The corresponding value of `compile=`."""
        return "+".join([name for name, on in (("compiled", self.compiled), ("graphs", self.recorded)) if on]) or "off"

    def about(
        self, pair: ModelPair, paths: Sequence[str], options: Options, greedy: bool, policy: DraftLengthPolicy
    ) -> dict[str, object]:
        """Return the metadata of a session's trace. paths: attention paths. greedy: of the session's own rows."""
        acceptance = options.acceptance
        return {
            "attention": paths[0],
            "draft_attention": paths[1] if len(paths) > 1 else None,
            "compile": self.name,
            "kernels": "triton" if kernel_ops.run_on(pair.device) else "torch",
            "synthetic": pair.synthetic or acceptance is not None,
            "acceptance": "earned" if acceptance is None else acceptance.name,
            "verification": "greedy" if greedy else options.verification,
            "policy": repr(policy),
        }

    def layers(self, device: torch.device) -> Callable[..., Layers]:
        """Return the layer class for models on this device."""
        if not self.compiled and device.type != "cuda":
            return Layers
        from bass_core.gpu import compiled_layers  # a slow import

        return compiled_layers.CompiledLayers if self.compiled else compiled_layers.LaunchedLayers

    def step(self, eager: EagerStep, fall_back: Callable[[], None] | None) -> EagerStep | GraphStep | Overlap:
        """Return the step for this execution. fall_back: see `gpu.overlap.make`."""
        if self == Execution():
            return eager
        from bass_core.gpu import overlap  # a slow import

        return overlap.make(eager, self.recorded, fall_back)


def execution(
    wanted: str, device: torch.device, paths: Sequence[str | None], trace: str, obstacles: Iterable[str] = ()
) -> Execution:
    """Return the execution for `compile=wanted` on these attention paths. "auto" selects CUDA graphs if possible.

    obstacles: reasons why the models allow only "off". Raises ValueError if `wanted` is not available.
    """
    obstacles = list(obstacles)
    if "split" in paths:
        obstacles.append("attention='split' depends on lengths on the host; use another path")
    if trace == "tokens":
        obstacles.append("trace='tokens' copies every distribution to the host; use trace='steps'")
    if wanted == "auto":
        return Execution(recorded=device.type == "cuda" and not obstacles)
    found = Execution("compiled" in wanted, "graphs" in wanted)
    if found.recorded and device.type != "cuda":
        obstacles.append(f"CUDA graphs need a CUDA GPU, and the models are on {device}; use compile='compiled'")
    if obstacles and found != Execution():
        raise ValueError(f"compile={wanted!r} is not available: {obstacles[0]}. compile='off' is always available")
    return found
