"""Find windows and switches in a model's config, and build prompts on both sides of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bass_core.model.architectures import context_length
from bass_core.model.probe import SWITCHES

LONGEST = 512  # maximum prompt length; longer prompts are too slow
LONG = 160  # length of one extra prompt, for length effects without a config entry


def named_in(model: PreTrainedModel) -> dict[str, int]:
    """Name -> position of every window and switch inside the model's context."""
    context = context_length(model)
    found = _named(model.config.get_text_config().to_dict())
    return {name: at for name, at in found if context is None or at < context}


def _named(values: Mapping) -> Iterator[tuple[str, int]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _named(value)
        elif type(value) is int and value > 1 and SWITCHES.search(str(name)):
            yield name, value


def rows_beside(model: PreTrainedModel, prompts: Sequence[Tensor], new: int, room: float) -> tuple[list[Tensor], str]:
    """Return prompts that cross the model's windows and switches or start beyond, and a description. One long prompt is
    added. The description lists windows and switches out of reach. room: limit for prompt and `new` tokens."""
    named = named_in(model)
    fits = int(min(LONGEST, room - new))
    near = {name: at for name, at in named.items() if at + 2 <= fits}
    lengths = {at - new // 2 for at in near.values()} | {at + 2 for at in near.values()} | {min(LONG, fits)}
    source = torch.cat(list(prompts))
    source = source.repeat(-(-(LONGEST + len(lengths)) // len(source)) + 1)
    rows = [source[shift : shift + length] for shift, length in enumerate(sorted(lengths)) if length > 0]
    far = [f"{name} {at}" for name, at in named.items() if name not in near]
    words = f"prompts on both sides of {', '.join(f'{name} {at}' for name, at in near.items())}" if near else ""
    out_of_reach = f"not reached, too long for this check: {', '.join(far)}" if far else ""
    return rows, "; ".join(filter(None, (words, out_of_reach)))
