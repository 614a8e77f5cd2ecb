"""Texts of a target model, and the distributions of models at each token of the texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bass_core.exactness import sampling
from bass_core.exactness.sampling import SamplingParams
from bass_core.generation import generate
from bass_core.loading.model_pair import ModelPair
from bass_core.prompts import token_ids


class Written(NamedTuple):
    """Texts of a target model. tokens: prompt and text, int64 [P + T]; p: target distributions, float64 [T, V]."""

    tokens: list[Tensor]
    p: list[Tensor]
    params: SamplingParams

    @classmethod
    def by(
        cls, pair: ModelPair, prompts: Sequence[str], *, max_new_tokens: int, temperature: float, seed: int = 0
    ) -> Self:
        """Return the texts of the pair's target after each prompt."""
        ids = token_ids(pair, prompts)
        options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed, "trace": "off"}
        texts = generate(pair, ids, **options).sequences
        tokens = [torch.cat(each) for each in zip(ids, texts, strict=True)]
        params = SamplingParams(temperature)
        return cls(tokens, _distributions(pair.target, tokens, list(map(len, texts)), params), params)

    def read_by(self, model: PreTrainedModel) -> list[Tensor]:
        """Return the model's distributions at the same tokens: [T, V] per text."""
        return _distributions(model, self.tokens, list(map(len, self.p)), self.params)


@torch.inference_mode()
def _distributions(
    model: PreTrainedModel, tokens: Sequence[Tensor], own: Sequence[int], params: SamplingParams
) -> list[Tensor]:
    found = []
    for text, count in zip(tokens, own, strict=True):
        logits = model(input_ids=text.to(model.device)[None], use_cache=False).logits[0, -count - 1 : -1]
        found.append(sampling.probabilities(logits.double().cpu(), params))
    return found
