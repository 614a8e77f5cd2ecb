"""Drafts with one layer over the target's own last hidden states, and the target's embeddings and head."""

from __future__ import annotations

import copy
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaModel, LlamaPreTrainedModel

from bass_core.drafters.draft_model import ModelDrafter
from bass_core.drafters.protocol import Context, Setting
from bass_core.model.cache import RaggedCache
from bass_core.model.transformers_internals import CACHE


class FeatureHeadConfig(LlamaConfig):
    """That of a Llama of the target's width, vocabulary and context; num_hidden_layers is 1 as a rule."""

    model_type = "bass_feature_head"


class FeatureHead(LlamaPreTrainedModel):
    """Reads each token together with the target's last hidden state before it, and predicts the hidden state after it;
    the target's head makes logits of that. Where the target has not been yet, what it predicted itself is read.

    Embeddings and head are a target's, see `attached`, and are not among its weights.
    """

    config_class = FeatureHeadConfig
    base_model_prefix = "model"

    def __init__(self, config: FeatureHeadConfig):
        super().__init__(config)
        self.mix = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.model = LlamaModel(config)
        self.model.embed_tokens = None
        self.borrowed: tuple[nn.Module, nn.Module] = ()  # a target's embeddings and head
        self.predicted: Tensor | None = None  # hidden states [B, Q, H] of the last pass
        self.post_init()

    def get_input_embeddings(self) -> nn.Module | None:
        return self.borrowed[0] if self.borrowed else None

    def get_output_embeddings(self) -> nn.Module | None:
        return self.borrowed[1] if self.borrowed else None

    def attached(self, target: PreTrainedModel) -> FeatureHead:
        """The head, with the embeddings and the head of this target; weights are shared. Raises ValueError for a target
        of another width."""
        config, width = target.config.get_text_config(), target.get_input_embeddings().weight.shape[-1]
        if not width == config.hidden_size == self.config.hidden_size:
            raise ValueError(
                f"a feature head for hidden states of {self.config.hidden_size} cannot draft for "
                f"{type(target).__name__}, whose hidden states have {config.hidden_size} numbers and whose "
                f"embeddings have {width}"
            )
        fits = (self.device, self.dtype) == (target.device, target.dtype)
        mine = copy.copy(self) if fits else copy.deepcopy(self).to(target.device, target.dtype)
        vars(mine).update(borrowed=(target.get_input_embeddings(), target.get_output_embeddings()), predicted=None)
        return mine

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor,
        position_ids: Tensor | None = None,
        logits_to_keep: int = 0,
        cache: Cache | None = None,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [B, Q, V] (of the last token where logits_to_keep is 1). features [B, Q, H]: hidden states before each
        token, zeros before the first."""
        self.predicted = self.states(input_ids, features, position_ids=position_ids, cache=cache, **options)
        return CausalLMOutputWithPast(logits=self.get_output_embeddings()(self.predicted[:, -logits_to_keep:]))

    def states(self, input_ids: Tensor, features: Tensor, cache: Cache | None = None, **options: Any) -> Tensor:
        """The hidden states after each token that are predicted: [B, Q, H]."""
        read = self.mix(torch.cat([self.get_input_embeddings()(input_ids), features], -1))
        options[CACHE] = cache
        if not isinstance(cache, RaggedCache):
            return self.model(inputs_embeds=read, **options).last_hidden_state
        # Over such a cache `LlamaModel` adds nothing to its layers, and takes a tenth of the time of a draft on a CPU.
        options["position_embeddings"] = self.model.rotary_emb(read, options["position_ids"])
        for layer in self.model.layers:
            read = layer(read, **options)
        return self.model.norm(read)


class FeatureDrafter(ModelDrafter):
    """Drafts with a `FeatureHead` (after EAGLE: Li et al. 2024), whose cache holds what it made of the target's hidden
    states: after each verification they take the place of what the head had predicted itself.

    head: trained for this target. `load_pair(target, draft=folder)` takes what its `save_pretrained` has written.
    """

    wants_hidden = True

    def __init__(self, head: FeatureHead):
        if not isinstance(head, FeatureHead):
            raise TypeError(
                f"head must be a FeatureHead, got {type(head).__name__}; load_pair(target, draft=folder) reads one"
            )
        self.head = head

    def begin(self, setting: Setting) -> Self:
        """Raises ValueError for a target that the head does not fit."""
        head = self.head.attached(setting.target)
        mine = self._over(head, setting.paths[0], setting)
        mine.head, mine.draft_vocabulary = head, setting.vocabulary  # its head is the target's
        return mine

    def first_pass(self, most: int) -> int:
        return most + 1  # as many as a step commits: none of them was read with the target's hidden states yet

    def capture_passes(self, captured: object) -> None:
        """A pass reads hidden states that the one before it has predicted: none is captured by itself."""

    def committed(self, before: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """What was drafted was read with predicted states, and is read again."""

    def _catch_up(self, context: Context, rows: int) -> Tensor:
        return super()._catch_up(context, len(context.lengths_host))  # all: states that they predict stand together

    def _features(self, hidden: Tensor, starts: Tensor, width: int) -> Tensor:
        before = starts[:, None] - 1 + torch.arange(width, device=starts.device)  # [B, width]
        found = hidden.gather(1, before.clamp(min=0)[..., None].expand(-1, -1, hidden.shape[-1]))
        return found * (before >= 0)[..., None]

    def _own(self) -> Tensor:
        return self.head.predicted[:, -1:]


AutoConfig.register(FeatureHeadConfig.model_type, FeatureHeadConfig)
AutoModelForCausalLM.register(FeatureHeadConfig, FeatureHead)
