"""Tabular models whose code of the text is a recurrent state, after a convolution over two tokens.

All numbers are integers in float64, so that results are exact. The functions have the names of transformers' functions
for the gated delta rule, and a simpler recurrence: each token multiplies the state by exp(g) and adds its value.
"""

import functools
import math

import torch
from torch import nn
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from bass_core.model.transformers_internals import CACHE
from bass_lab.checks.tabular import ENTRIES, TabularConfig, TabularModel

BEFORE = 7  # weight of the previous token in the convolution


def torch_chunk_gated_delta_rule(query, key, value, g, beta, initial_state=None, **kwargs):
    state = torch.zeros_like(value[:, 0]) if initial_state is None else initial_state  # [B, H, D]
    outputs = []
    for q in range(value.shape[1]):
        state = (state * g[:, q].exp()[..., None] + value[:, q]).round()
        outputs.append(state)
    return torch.stack(outputs, 1), state


torch_recurrent_gated_delta_rule = torch_chunk_gated_delta_rule


class Recurrence(nn.Module):
    layer_idx = 0

    def forward(self, hidden_states, base, cache=None):
        seen = hidden_states.transpose(1, 2)
        if cache is not None:
            seen = cache.update_conv_state(seen, self.layer_idx, conv_kernel_size=2)
        seen = nn.functional.pad(seen, (1, 0))
        mixed = (seen[..., 1:] + BEFORE * seen[..., :-1])[..., -hidden_states.shape[1] :].transpose(1, 2)[..., None]
        g = torch.full_like(mixed[..., 0], math.log(base))
        before = None
        if hasattr(cache, "get_recurrent_state"):
            before = cache.get_recurrent_state(self.layer_idx)
        elif cache is not None:  # transformers before 5.24
            before = cache.layers[self.layer_idx].recurrent_states[0]
        if before is not None and hidden_states.shape[1] == 1:
            out, state = torch_recurrent_gated_delta_rule(mixed, mixed, mixed, g, g, initial_state=before)
        else:
            out, state = torch_chunk_gated_delta_rule(mixed, mixed, mixed, g, g, initial_state=before)
        if cache is not None:
            cache.update_recurrent_state(state, self.layer_idx)
        return out[..., 0]


class StateConfig(TabularConfig):
    model_type = "tabular_state"

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.layer_types = ["linear_attention"]


class TabularStateModel(TabularModel):
    config_class = StateConfig
    _is_stateful = True

    def __init__(self, config: StateConfig):
        super().__init__(config)
        self.recurrence = Recurrence()

    def code(self, prefix: list[int]) -> int:
        before, code = 0, 0
        for token in prefix:
            code = code * (self.config.vocab_size + 1) + token + 1 + BEFORE * before
            before = token + 1
        return code

    def forward(self, input_ids, cache=None, attention_mask=None, use_cache=True, past_key_values=None):
        cache = past_key_values if cache is None else cache  # transformers before 5.24
        if cache is None and use_cache:
            cache = DynamicCache(config=self.config)
        states = self.recurrence((input_ids + 1).double()[..., None], self.config.vocab_size + 1, cache)
        logits = self.table[states[..., 0].round().long() % ENTRIES]
        return CausalLMOutputWithPast(logits=logits, **{CACHE: cache})


@functools.cache
def tabular_state(vocabulary: int, seed: int) -> TabularStateModel:
    return TabularStateModel(StateConfig(vocab_size=vocabulary, seed=seed)).eval()
