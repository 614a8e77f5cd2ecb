"""Short convolutions (LFM2, LFM3), decoded in a batch in which rows reject drafts.

A layer of this kind keeps a state: the last few inputs of a causal convolution. Moved on token by token, it cannot be
taken back when a token is rejected, and what follows is silently another text. But the state after a token is nothing
but the inputs of that token and the few before it: numbers per position, seen through a window. So they go to the
token's slot of the ragged cache, as keys and values do, and rolling back is again *not writing*.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bass_core.model.cache import Pass, RaggedCache, TokenStates


def by_position(layer: nn.Module) -> Callable:
    """The layer's `forward`, its state by position in passes over a ragged cache."""
    forward = layer.forward

    def at_positions(hidden_states: Tensor, *args, **kwargs) -> Tensor:
        cache = next((each for each in (*args, *kwargs.values()) if isinstance(each, RaggedCache)), None)
        if cache is None:
            return forward(hidden_states, *args, **kwargs)
        current = cache.current
        gate, after, x = layer.in_proj(hidden_states).chunk(3, -1)  # [B, Q, H] each (packed: [1, T, H])
        inputs = cache.windows.setdefault(layer.layer_idx, TokenStates(cache))
        inputs.keep(gate * x)
        weight = layer.conv.weight[:, 0].T  # [L, H], the token's own input last
        convolved = (_window(inputs.of(current.places), current, len(weight)) * weight).sum(2)
        if layer.conv.bias is not None:
            convolved = convolved + layer.conv.bias
        return layer.out_proj(after * current.pack(convolved))

    return at_positions


def _window(inputs: Tensor, current: Pass, width: int) -> Tensor:
    """The inputs [B, slots, H] of each query's last `width` positions, its own last: [B, Q, width, H]."""
    slots = current.positions[..., None] + torch.arange(1 - width, 1, device=inputs.device)  # [B, Q, width]
    rows = torch.arange(len(inputs), device=inputs.device)[:, None, None]
    return inputs[rows, slots.clamp(min=0)].masked_fill((slots < 0)[..., None], 0)
