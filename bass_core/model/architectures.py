"""Adapt architectures whose modules assume one cache length for all rows of a batch.

`replacements` gives their modules a `forward` that uses the positions of the current pass. This covers position tables,
relative biases, the two sets of rotary factors of longrope, and recurrent states. Add new architectures here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel

from bass_core.model import transformers_internals as internals
from bass_core.model.cache import TokenStates
from bass_core.model.forward_pass import current_pass
from bass_core.model.patching import Change, Switch
from bass_core.model.recurrent import keeps_state, with_row_states


def switch(
    model: PreTrainedModel, path: str, hidden: TokenStates | None = None, faster: Callable[[], Sequence[Change]] = tuple
) -> Switch:
    """Return a switch of `model` to an attention path, including the changes for a ragged cache.

    hidden: store for the hidden states of the last layer. faster: see `Switch`.
    """
    return Switch(model, path, replacements(model), [] if hidden is None else keeping(model, hidden), faster)


def replacements(model: PreTrainedModel) -> list[Change]:
    """Return the changes (`patching.changed`) for modules to use each row's own positions."""
    beyond, takes_positions = rotary_switch(model), "position_ids" in internals.forward_names(type(model))
    found: list[Change] = []
    for module in model.modules():
        table = vars(module)
        if beyond is not None and getattr(module, "rope_type", None) == "longrope":
            found.append((table, "forward", _by_row(module.forward, beyond)))
        elif not takes_positions and internals.is_position_table(module):
            found.append((table, "forward", _at_positions(module)))
        elif (width := internals.sinusoidal_width(module)) is not None:
            found.append((table, "forward", _at_computed_positions(module, width, model.dtype)))
        elif keeps_state(module):
            found.append((table, "forward", with_row_states(module)))
        elif internals.has_relative_bias(module):
            found.append((table, "compute_bias", _bias_by_row(module)))
    return found


def keeping(model: PreTrainedModel, hidden: TokenStates) -> list[Change]:
    """Return the change for writing the hidden states of the model's last layer to `hidden`."""
    decoder = model.get_decoder()
    forward = decoder.forward

    def keeping_forward(*args, **kwargs) -> Any:
        output = forward(*args, **kwargs)
        if (current := current_pass()) is not None and current is hidden.cache.current:
            hidden.keep(output[0])
        return output

    return [(vars(decoder), "forward", keeping_forward)]


def rotary_switch(model: PreTrainedModel) -> int | None:
    """Return the text length from which longrope uses its long rotary factors, or None without longrope."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    return rope.get("original_max_position_embeddings") if rope.get("rope_type") == "longrope" else None


def recomputed_beyond(model: PreTrainedModel) -> int | None:
    """Return `rotary_switch` if `generate` drops the model's cache for texts beyond that length (Phi-3), else None."""
    theirs = type(model).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation
    known = hasattr(model.config, "original_max_position_embeddings")
    return rotary_switch(model) if theirs and known else None


def _at_positions(table: nn.Embedding) -> Callable:
    """Return the `forward` of a table of learned positions (such as BART), with each row's own positions."""
    forward, offset = table.forward, getattr(table, "offset", 0)

    def at_positions(*args, **kwargs) -> Tensor:
        if (current := current_pass()) is None:
            return forward(*args, **kwargs)
        return F.embedding(current.pack(current.positions) + offset, table.weight)

    return at_positions


def _at_computed_positions(module: nn.Module, width: int, dtype: torch.dtype) -> Callable:
    """Return the `forward` of a module that computes positions, with each row's own ones. Padding has no position."""
    forward, padding = module.forward, getattr(module, "padding_idx", None)

    def at_positions(first: Tensor, *args, **kwargs) -> Tensor:
        if (current := current_pass()) is None:
            return forward(first, *args, **kwargs)
        states = torch.zeros(1, current.max_kv_length, width, dtype=dtype, device=current.positions.device)
        found = forward(inputs_embeds=states)[0][current.pack(current.positions)]
        if padding is None or first.is_floating_point():
            return found
        return found.masked_fill((first == padding)[..., None], 0)

    return at_positions


def _bias_by_row(module: nn.Module) -> Callable:
    """Return the `compute_bias` of a relative position bias (such as T5), with each row's own positions."""
    compute = module.compute_bias

    def by_row(*args, **kwargs) -> Tensor:
        if (current := current_pass()) is None:
            return compute(*args, **kwargs)
        device, max_kv_length = current.positions.device, current.max_kv_length
        of_last = compute(
            1, max_kv_length, device=device, past_seen_tokens=max_kv_length - 1
        )  # [1, H, 1, max_kv_length], nearest last
        by_distance = of_last[0, :, 0].flip(1).T  # [max_kv_length, H]
        distances = current.positions[..., None] - torch.arange(max_kv_length, device=device)  # [B, Q, max_kv_length]
        return by_distance[distances.clamp(min=0)].permute(0, 3, 1, 2)  # later keys are masked

    return by_row


def _by_row(forward: Callable, switch: int) -> Callable:
    """Choose longrope's factors row by row; transformers chooses by the largest position of all rows in the pass.

    A row gets the factors of a batch of its own: a prompt longer than `switch` uses the long factors throughout. Other
    rows use the long factors from position `switch` on, and earlier keys stay unchanged.
    """

    def by_row(x: Tensor, position_ids: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if (current := current_pass()) is None:
            return forward(x, position_ids, *args, **kwargs)
        in_long_prompt = current.prompt is not None and current.prompt > switch
        is_long = current.positions >= (0 if in_long_prompt else switch)
        if current.last_only:
            is_long |= ((current.starts <= 0) & (current.ends > switch))[:, None]
        beyond = torch.cat([position_ids, torch.full_like(position_ids[..., :1], switch)], dim=-1)
        short = forward(x, position_ids.clamp(max=switch - 1), *args, **kwargs)
        long = forward(x, beyond, *args, **kwargs)
        chosen = current.pack(is_long)[..., None]
        return tuple(torch.where(chosen, b[:, :-1], a) for a, b in zip(short, long, strict=True))

    return by_row


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder's layers: the longest of its outermost module lists."""
    return list(max(_outer_lists(model.get_decoder()), key=len, default=[]))


def _outer_lists(module: nn.Module) -> list[nn.ModuleList]:
    if isinstance(module, nn.ModuleList):
        return [module]
    return [each for child in module.children() for each in _outer_lists(child)]


def context_length(model: PreTrainedModel) -> int | None:
    """Return the number of positions of the model, or None if its config does not say."""
    config = model.config.get_text_config()
    if hasattr(config, "relative_attention_num_buckets"):
        return None  # T5: n_positions is the training length
    for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"):
        if isinstance(value := getattr(config, name, None), int) and value > 0:
            return value
    return None
