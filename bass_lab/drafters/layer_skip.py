"""Self-speculation: the first layers and the head of the target model draft, without a second model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Self

from torch import nn
from transformers import PreTrainedModel

from bass_core.drafters.draft_model import ModelDrafter
from bass_core.drafters.protocol import Setting
from bass_core.model.architectures import layers_of
from bass_core.model.encoder_decoder import Encoded, Source


class LayerSkipDrafter(ModelDrafter):
    """Draft with the target's first `layers` layers and its head (Zhang et al. 2023; LayerSkip: Elhoushi et al. 2024).

    The drafter adds only a KV cache. The method pays for target models with early-exit training.
    """

    def __init__(self, layers: int):
        if not isinstance(layers, int) or layers < 1:
            raise ValueError(f"layers must be an integer >= 1, got {layers!r}")
        self.layers = layers

    def begin(self, setting: Setting) -> Self:
        """Return the drafter of one session. Raises ValueError if `first_layers` cannot shorten the target model."""
        return self._over(first_layers(setting.target, self.layers), setting.paths[0], setting)  # a path of the target

    def read_sources(self, sources: Sequence[Source], places: range, encoded: Encoded) -> None:
        self.runner.read(encoded, places)  # the target model's encoder output serves both


def first_layers(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """Return the model with its first `count` layers and shared weights. Raises ValueError if the model has at most
    `count` layers, is decoding, or has a replaced `forward`."""
    if "_bass_path" in vars(model):
        raise ValueError(f"{type(model).__name__} is decoding at this moment; start this drafter before or after")
    layers = layers_of(model)
    if count >= len(layers):
        raise ValueError(f"{type(model).__name__} has only {len(layers)} layers; draft with fewer, got {count}")
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    if not config.is_encoder_decoder:  # else num_hidden_layers may count the encoder, which stays whole
        text.num_hidden_layers = count
        if vars(text).get("layer_types"):  # some configs derive the list from other fields
            text.layer_types = text.layer_types[:count]
    return _shortened(model, layers, count, {id(model.config): config, id(model.config.get_text_config()): text})


def _shortened(module: nn.Module, layers: list[nn.Module], count: int, configs: dict[int, object]) -> nn.Module:
    """Return a copy of the modules on the path to the list of layers, with that list cut. Other modules are shared.
    Hooks of copied modules are dropped, because hooks belong to passes of the whole model."""
    if isinstance(module, nn.ModuleList) and list(module) == layers:
        return nn.ModuleList(layers[:count])
    if layers[0] not in list(module.modules()):
        return module
    if "forward" in vars(module):  # torch.compile(model.forward), functools.partial
        raise ValueError(
            f"{type(module).__name__} has a forward of its own that runs all layers; replace it after the session began"
        )
    short = copy.copy(module)
    vars(short).update((name, configs[id(value)]) for name, value in vars(module).items() if id(value) in configs)
    vars(short).update((name, {}) for name in vars(module) if name.startswith(("_forward_hooks", "_forward_pre_hooks")))
    short._modules = {
        name: child if child is None else _shortened(child, layers, count, configs)
        for name, child in module._modules.items()
    }
    return short
