"""Train a feature head, the model of `FeatureDrafter`, for a target.

Only the first draft token is predicted from the target's own hidden states. Training therefore unrolls the head over
all positions of a window ("training-time test", EAGLE-3: Li et al. 2025; HASS: Zhang et al. 2024). Step 1 reads the
target's hidden states. At position j, each further step reads the prediction of the previous step at j - 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from bass_core.drafters import FeatureHead, FeatureHeadConfig
from bass_lab.pair.fitting import Teacher, divergence, quick_norms

STEP_WEIGHTS = (1.0, 0.8, 0.64)  # loss weights: a later draft token counts only if all earlier ones are accepted

KeysValues = tuple[Tensor, Tensor]  # keys and values of a step, each [B, KV heads, Q, D]


SETTINGS = "rope_parameters", "rms_norm_eps", "hidden_act", "attention_bias", "mlp_bias"  # taken from the target


def new_head(target: PreTrainedModel, sizes: dict, draft_ids: Tensor | None = None) -> FeatureHead:
    """Return a one-layer feature head with random float32 weights, attached to `target`. sizes: as in
    `FeatureHeadConfig`; other settings are the target's. draft_ids: the ids to draft, all if None."""
    of = target.config.get_text_config()
    config = FeatureHeadConfig(
        **{name: getattr(of, name) for name in SETTINGS if hasattr(of, name)} | sizes,
        hidden_size=of.hidden_size,
        num_hidden_layers=1,
        vocab_size=of.vocab_size,
        max_position_embeddings=of.max_position_embeddings,
        bos_token_id=None,
        eos_token_id=of.eos_token_id,
        draft_vocab_size=None if draft_ids is None else len(draft_ids),
        attn_implementation="bass_unrolled",
    )
    head = FeatureHead(config).to(target.device)
    quick_norms(head)
    if draft_ids is not None:
        head.draft_ids.copy_(draft_ids)
    head.borrow(target)
    return head


def _attention(module, query, key, value, attention_mask, scaling, earlier: list[KeysValues], **kwargs):
    """Attention of the next step s. Position j sees the keys of step 1 up to j - (s - 1), then one key per later step.
    earlier: keys and values of the previous steps; this step's are appended."""
    earlier.append((key, value))
    step, length = len(earlier), query.shape[2]
    groups = query.shape[1] // key.shape[1]
    keys = [each.repeat_interleave(groups, 1) for each, _ in earlier]
    values = [each.repeat_interleave(groups, 1) for _, each in earlier]
    query = query * scaling
    hidden = torch.full((length, length), float("-inf"), dtype=query.dtype, device=query.device).triu(2 - step)
    scores = [query @ keys[0].transpose(2, 3) + hidden]  # [B, H, Q, Q]
    later = range(1, step)
    scores += [(query * _delayed(keys[s], step - 1 - s)).sum(-1, keepdim=True) for s in later]  # [B, H, Q, 1]
    weights = torch.cat(scores, -1).softmax(-1).to(value.dtype)
    mixed = weights[..., :length] @ values[0]
    for s in later:
        mixed = mixed + weights[..., length + s - 1, None] * _delayed(values[s], step - 1 - s)
    return mixed.transpose(1, 2).contiguous(), None


AttentionInterface.register("bass_unrolled", _attention)


def _delayed(states: Tensor, by: int) -> Tensor:
    """Shift states [..., Q, D] by `by` positions, with zeros at the start."""
    return F.pad(states, (0, 0, by, 0))[..., : states.shape[-2], :]


def unrolled_loss(head: FeatureHead, teacher: Teacher, windows: Tensor, temperatures: tuple[float, ...]) -> Tensor:
    """Return KL(target || head) in nats per token of windows [B, Q]: mean over temperatures, weighted over steps."""
    features = teacher.states(windows)  # [B, Q, H]
    with torch.no_grad():
        wanted = head.draft_logits(features)  # [B, Q, M]: the target's logits
    total = torch.zeros((), device=windows.device)
    for step, (weight, logits) in enumerate(zip(STEP_WEIGHTS, unrolled(head, windows, features), strict=False)):
        # the first positions have no draft token of this depth
        total = total + weight * divergence(wanted[:, step:], logits[:, step:], temperatures)
    return total


def unrolled(head: FeatureHead, windows: Tensor, features: Tensor) -> Iterator[Tensor]:
    """Yield the logits [B, Q, M] of each step. At position j, step s treats the last s - 1 tokens as drafted, and reads
    the earlier tokens with the target's hidden states `features` [B, Q, H]."""
    earlier: list[KeysValues] = []
    while True:
        features = head.states(windows, _delayed(features, 1), earlier=earlier, use_cache=False)
        yield head.draft_logits(features)


def save_head(head: FeatureHead, folder: Path) -> None:
    """Write the head's weights in bfloat16 and its config, for `load_pair(target, draft=folder)`."""
    plain = FeatureHead(head.config).to(torch.bfloat16)
    plain.load_state_dict(head.state_dict())
    plain.save_pretrained(folder)
