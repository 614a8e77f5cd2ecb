"""How a session's work reaches the device: eager steps, or captured ones through compiled layers (`compile=`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from bass_core.loop.step import EagerStep
from bass_core.model.runner import Layers

if TYPE_CHECKING:
    from bass_core.gpu.graph_step import GraphStep
    from bass_core.gpu.overlap import Overlap


class Execution(NamedTuple):
    """Layers through torch.compile or as they are, launched or as CUDA graphs."""

    compiled: bool = False
    recorded: bool = False

    @property
    def name(self) -> str:
        """The value of `compile=` that asks for it."""
        return "+".join([name for name, on in (("compiled", self.compiled), ("graphs", self.recorded)) if on]) or "off"

    def layers(self, device: torch.device) -> Callable[..., Layers]:
        """Return how the layers of models on this device run."""
        if not self.compiled and device.type != "cuda":
            return Layers
        from bass_core.gpu import compiled_layers  # quick to import without

        return compiled_layers.CompiledLayers if self.compiled else compiled_layers.LaunchedLayers

    def step(self, eager: EagerStep, fall_back: Callable[[], None] | None) -> EagerStep | GraphStep | Overlap:
        """Return what runs this step. fall_back: see `gpu.overlap.make`."""
        if self == Execution():
            return eager
        from bass_core.gpu import overlap  # quick to import without

        return overlap.make(eager, self.recorded, fall_back)


def execution(
    wanted: str, device: torch.device, paths: Sequence[str | None], trace: str, obstacles: Iterable[str] = ()
) -> Execution:
    """Return what `compile=wanted` means for models on these attention paths; "auto" is CUDA graphs where they can be.
    obstacles: what stands against it in the models.

    Raises ValueError for what cannot be honoured.
    """
    obstacles = list(obstacles)
    if "split" in paths:
        obstacles.append("attention='split' launches by lengths that only the host knows: use another path")
    if trace == "tokens":
        obstacles.append("trace='tokens' wants every distribution on the host: use trace='steps'")
    if wanted == "auto":
        return Execution(recorded=device.type == "cuda" and not obstacles)
    found = Execution("compiled" in wanted, "graphs" in wanted)
    if found.recorded and device.type != "cuda":
        obstacles.append(f"CUDA graphs need a CUDA GPU, and the models are on {device}: use compile='compiled'")
    if obstacles and found != Execution():
        raise ValueError(f"compile={wanted!r} cannot be had here; {obstacles[0]}, or compile='off'")
    return found
