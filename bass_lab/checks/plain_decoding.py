"""What a model says without the engine: transformers' greedy text, exact laws, and how far its own logits move.

`bass verify` compares with these; they share nothing with the ragged cache, its attention or the loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from bass_core import sampling
from bass_core.sampling import SamplingParams


@contextmanager
def plain(model: PreTrainedModel) -> Iterator[None]:
    """`model` in evaluation mode, without generation defaults (its EOS would end rows); left as it was found."""
    training = [module for module in model.modules() if module.training]
    before, model.generation_config = model.generation_config, GenerationConfig()
    try:
        for module in training:
            module.training = False
        yield
    finally:
        model.generation_config = before
        for module in training:
            module.training = True


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: Tensor, new: int) -> tuple[Tensor, Tensor]:
    """`transformers.generate` of one row, greedy: its ids [T] on the host, and the logits [T, V] they came from."""
    ids = prompt[None].to(model.device)
    output = {"output_logits": True, "return_dict_in_generate": True}
    config = GenerationConfig(max_new_tokens=new, do_sample=False, pad_token_id=0, **output)
    with plain(model):
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return out.sequences[0, len(prompt) :].cpu(), torch.cat(out.logits).float().clamp(min=-1e30)


@torch.inference_mode()
def exact_law(
    target: PreTrainedModel, prompt: Tensor, params: SamplingParams, tokens: int
) -> dict[tuple[int, ...], float]:
    """Probability of every text of `tokens` tokens after `prompt` that has one, from the target's plain forward pass.

    Meant for laws of few outcomes (top_k): all prefixes of a length are rows of one batch.
    """
    texts, mass = prompt[None].to(target.device), torch.ones(1, dtype=torch.float64, device=target.device)
    with plain(target):
        for _ in range(tokens):
            logits = target(input_ids=texts, use_cache=False).logits[:, -1]
            seen = sampling.one_hot(texts, logits.shape[-1]).any(1) if params.needs_history else None
            p = sampling.probabilities(logits, params, seen)  # [N, V]
            rows, ids = (p > 0).nonzero(as_tuple=True)
            texts, mass = torch.cat([texts[rows], ids[:, None]], 1), mass[rows] * p[rows, ids].double()
    return dict(zip(map(tuple, texts[:, len(prompt) :].tolist()), mass.tolist(), strict=True))


@torch.inference_mode()
def numeric_noise(model: PreTrainedModel, prompts: Sequence[Tensor], alone: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Largest move of one of a position's eight best logits between transformers' ways to compute it."""
    texts = [torch.cat([prompt, ids[:-1]]).to(model.device) for prompt, (ids, _) in zip(prompts, alone, strict=True)]
    padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)  # padding comes last: causal rows do not see it
    largest = 0.0
    with plain(model):
        together = model(input_ids=padded, use_cache=False).logits
        for row, (prompt, text, (ids, logits)) in enumerate(zip(prompts, texts, alone, strict=True)):
            best = logits.topk(min(8, logits.shape[-1]), dim=-1)  # [T, 8]
            positions = slice(len(prompt) - 1, len(prompt) - 1 + len(ids))
            for other in (model(input_ids=text[None], use_cache=False).logits[0], together[row]):
                moved = other[positions].float().gather(-1, best.indices) - best.values
                largest = max(largest, float(moved.abs().max()))
    return largest
