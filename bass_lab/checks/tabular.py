"""Language models with a table of logits that still use attention and the KV cache.

A code of the whole prefix selects the logits. The code is a sum over the visible keys, so a wrong mask, KV slot or
position changes the distribution.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ENTRIES = 1009  # a prime: prefixes rarely share an entry


class TabularConfig(PreTrainedConfig):
    model_type = "tabular"

    def __init__(self, vocab_size: int = 3, seed: int = 0, spread: float = 1.0, **kwargs):
        super().__init__(**kwargs)
        self.vocab_size, self.seed, self.spread = vocab_size, seed, spread
        self.num_hidden_layers, self.max_position_embeddings = 1, 14


class TabularModel(PreTrainedModel, GenerationMixin):
    config_class = TabularConfig
    _supports_attention_backend = True

    def __init__(self, config: TabularConfig):
        super().__init__(config)
        generator = torch.Generator().manual_seed(config.seed)
        table = torch.randn(ENTRIES, config.vocab_size, generator=generator, dtype=torch.float64) * config.spread
        if config.vocab_size > 2:  # some tokens are impossible, never all
            impossible = torch.rand(ENTRIES, config.vocab_size, generator=generator) < 0.15
            impossible[torch.arange(ENTRIES), torch.randint(config.vocab_size, (ENTRIES,), generator=generator)] = False
            table = table.masked_fill(impossible, -torch.inf)
        self.table = torch.nn.Parameter(table, requires_grad=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.table

    def code(self, prefix: list[int]) -> int:
        """Return the code of a text; the entry code % `ENTRIES` of the table has the logits of the next token."""
        return sum((token + 1) * (self.config.vocab_size + 1) ** position for position, token in enumerate(prefix))

    def forward(
        self, input_ids, cache=None, position_ids=None, attention_mask=None, use_cache=True, past_key_values=None
    ):
        base = self.config.vocab_size + 1
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        values = ((input_ids + 1) * base**position_ids).double()[:, None, :, None]  # [B, 1, Q, 1]
        cache = past_key_values if cache is None else cache  # transformers before 5.24
        if cache is None:
            codes = values.cumsum(2)[:, 0, :, 0]
        else:
            keys, values = cache.update(values, values, 0)
            attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
            queries = torch.zeros_like(keys[:, :, :1]).expand(-1, -1, input_ids.shape[1], -1)  # uniform attention
            mean, _ = attend(self, queries, keys, values, attention_mask, scaling=1.0)
            codes = mean[:, :, 0, 0] * (position_ids + 1)
        return CausalLMOutputWithPast(logits=self.table[codes.round().long() % ENTRIES])


@functools.cache
def tabular(vocabulary: int, seed: int, spread: float = 1.0) -> TabularModel:
    """Return a tabular model. The same arguments give the same object, so the engine probes a model once."""
    return TabularModel(TabularConfig(vocab_size=vocabulary, seed=seed, spread=spread)).eval()


def law(model: TabularModel, prompt: list[int], new: int, **processing) -> dict[tuple[int, ...], float]:
    """Return the exact probability of every continuation of `new` tokens. processing: as in `transformers_law`."""
    laws = {(): 1.0}
    for _ in range(new):
        longer = {}
        for tail, probability in laws.items():
            for token, p in enumerate(next_token_law(model, prompt + list(tail), **processing)):
                longer[(*tail, token)] = probability * p
        laws = longer
    return laws


def next_token_law(model: TabularModel, prefix: list[int], **processing) -> np.ndarray:
    logits = model.table[model.code(prefix) % ENTRIES][None]
    return transformers_law(logits, torch.tensor([prefix]), **processing)[0].numpy()


def transformers_law(
    logits, history, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, processors=()
) -> torch.Tensor:
    """Return probabilities [B, V] from transformers' logits processors in transformers' order."""
    steps = LogitsProcessorList(processors)
    if repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(repetition_penalty))
    steps.append(TemperatureLogitsWarper(float(temperature)))
    if top_k:
        steps.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        steps.append(TopPLogitsWarper(top_p))
    if min_p > 0:
        steps.append(MinPLogitsWarper(min_p))
    return steps(history, logits.clone()).softmax(-1)


def total_variation(a: dict, b: dict) -> float:
    return sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in a.keys() | b.keys()) / 2
