"""Drafts with one layer over the target's last hidden states, sharing the target's embeddings and head."""

from __future__ import annotations

import copy
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaModel, LlamaPreTrainedModel

from bass_core.drafters.draft_model import ModelDrafter
from bass_core.drafters.protocol import Context, Setting
from bass_core.model.cache import RaggedCache
from bass_core.model.forward_pass import Pass
from bass_core.model.transformers_internals import CACHE


class FeatureHeadConfig(LlamaConfig):
    """Config of a Llama with the target's width, vocabulary and context. num_hidden_layers is usually 1.
    draft_vocab_size: number of ids that the head drafts; None for all ids."""

    model_type = "bass_feature_head"
    draft_vocab_size: int | None = None


class FeatureHead(LlamaPreTrainedModel):
    """Predicts the target's hidden state after each token, from the token and the target's hidden state before it. The
    target's head computes the logits. During drafting, the head reads its own predicted states.

    Embeddings and head belong to the target (see `attached`) and are not among the weights. With a reduced draft
    vocabulary, only the ids in `draft_ids` are ever drafted, and `forward` gives other ids the logit -inf.
    """

    config_class = FeatureHeadConfig
    base_model_prefix = "model"

    def __init__(self, config: FeatureHeadConfig):
        super().__init__(config)
        self.mix = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.model = LlamaModel(config)
        self.model.embed_tokens = None
        if config.draft_vocab_size is not None:
            self.register_buffer("draft_ids", torch.arange(config.draft_vocab_size))
        self.borrowed: tuple[nn.Module, nn.Module] = ()  # embeddings and head of a target
        self.rows: tuple[Tensor, Tensor | None] | None = None  # weight and bias of the target's head, of `draft_ids`
        self.predicted: Tensor | None = None  # hidden states [B, Q, H] of the last pass
        self.post_init()

    def get_input_embeddings(self) -> nn.Module | None:
        return self.borrowed[0] if self.borrowed else None

    def get_output_embeddings(self) -> nn.Module | None:
        return self.borrowed[1] if self.borrowed else None

    def attached(self, target: PreTrainedModel) -> FeatureHead:
        """Return the feature head with this target's embeddings and head (shared weights). Raises ValueError for a
        target of different width, or without the ids of the draft vocabulary."""
        config, width = target.config.get_text_config(), target.get_input_embeddings().weight.shape[-1]
        if not width == config.hidden_size == self.config.hidden_size:
            raise ValueError(
                f"a feature head of hidden size {self.config.hidden_size} cannot draft for "
                f"{type(target).__name__} with hidden size {config.hidden_size} and "
                f"embeddings of size {width}"
            )
        fits = (self.device, self.dtype) == (target.device, target.dtype)
        mine = copy.copy(self) if fits else copy.deepcopy(self).to(target.device, target.dtype)
        mine.borrow(target)
        return mine

    def borrow(self, target: PreTrainedModel) -> None:
        """Use this target's embeddings and head. Raises ValueError without the ids of the draft vocabulary."""
        out = target.get_output_embeddings()
        vars(self).update(borrowed=(target.get_input_embeddings(), out), predicted=None)
        if self.config.draft_vocab_size is not None:
            if (largest := int(self.draft_ids.max())) >= len(out.weight):
                raise ValueError(f"a feature head that drafts id {largest} does not fit {len(out.weight)} ids")
            self.rows = out.weight.detach()[self.draft_ids], None if out.bias is None else out.bias[self.draft_ids]

    def draft_logits(self, states: Tensor) -> Tensor:
        """Return the logits of the draft vocabulary [..., M] by the target's head, for hidden states [..., H]."""
        return self.get_output_embeddings()(states) if self.rows is None else F.linear(states, *self.rows)

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor,
        position_ids: Tensor | None = None,
        logits_to_keep: int = 0,
        cache: Cache | None = None,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits [B, Q, V] (only of the last token if logits_to_keep is 1). features [B, Q, H]: hidden states
        before each token, zeros before the first."""
        self.predicted = self.states(input_ids, features, position_ids=position_ids, cache=cache, **options)
        logits = self.draft_logits(self.predicted[:, -logits_to_keep:])
        if self.rows is not None:
            every = logits.new_full((*logits.shape[:-1], len(self.borrowed[1].weight)), -torch.inf)
            logits = every.index_copy(-1, self.draft_ids, logits)
        return CausalLMOutputWithPast(logits=logits)

    def states(self, input_ids: Tensor, features: Tensor, cache: Cache | None = None, **options: Any) -> Tensor:
        """Return the predicted hidden states after each token: [B, Q, H]."""
        read = self.mix(torch.cat([self.get_input_embeddings()(input_ids), features], -1))
        options[CACHE] = cache
        if not isinstance(cache, RaggedCache):
            return self.model(inputs_embeds=read, **options).last_hidden_state
        # The layers run without `LlamaModel`, whose own work takes a tenth of the time of a draft on a CPU.
        rotary = cache.current.once_for_columns(_rotary, self.model.rotary_emb, read.dtype)
        options["position_embeddings"] = [cache.current.pack(each) for each in rotary]
        for layer in self.model.layers:
            read = layer(read, **options)
        return self.model.norm(read)


def _rotary(current: Pass, rotary_emb: nn.Module, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    like = torch.empty(0, dtype=dtype, device=current.positions.device)
    return rotary_emb(like, current.positions)  # [B, Q, D] each


class FeatureDrafter(ModelDrafter):
    """Drafts with a `FeatureHead` (after EAGLE: Li et al. 2024). After each verification, the cache is rewritten with
    the target's hidden states instead of the head's predicted ones.

    head: trained for this target. `load_pair(target, draft=folder)` loads the result of `save_pretrained`.
    """

    wants_hidden = True

    def __init__(self, head: FeatureHead):
        if not isinstance(head, FeatureHead):
            raise TypeError(
                f"head must be a FeatureHead, got {type(head).__name__}; load_pair(target, draft=folder) loads one"
            )
        self.head = head

    def begin(self, setting: Setting) -> Self:
        """Return the drafter of a session. Raises ValueError if the head does not fit the target."""
        head = self.head.attached(setting.target)
        mine = self._over(head, setting.paths[0], setting)
        mine.head, mine.draft_vocabulary = head, setting.vocabulary  # because the target's head makes the logits
        return mine

    def first_pass(self, most: int) -> int:
        return most + 1  # a step commits up to so many tokens, all not yet read with the target's hidden states

    def capture_passes(self, captured: object) -> None:
        """Capture no passes, because each pass reads hidden states predicted by the previous pass."""

    def committed(self, before: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Mark nothing as cached: drafted tokens were read with predicted states, and must be read again."""

    def _catch_up(self, context: Context, rows: int) -> Tensor:
        return super()._catch_up(context, len(context.lengths_host))  # all rows, because `predicted` holds the batch

    def _features(self, hidden: Tensor, starts: Tensor, width: int) -> Tensor:
        before = starts[:, None] - 1 + torch.arange(width, device=starts.device)  # [B, width]
        found = hidden.gather(1, before.clamp(min=0)[..., None].expand(-1, -1, hidden.shape[-1]))
        return found * (before >= 0)[..., None]

    def _own(self) -> Tensor:
        return self.head.predicted[:, -1:]


AutoConfig.register(FeatureHeadConfig.model_type, FeatureHeadConfig)
AutoModelForCausalLM.register(FeatureHeadConfig, FeatureHead)
