"""Reference results of a model without the engine: transformers' greedy text, exact distributions, numeric noise.

`bass verify` compares with these results. The code shares nothing with the ragged cache, its attention or the loop.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, RepetitionPenaltyLogitsProcessor

from bass_core import options
from bass_core.exactness import sampling
from bass_core.exactness.sampling import SamplingParams
from bass_core.model.encoder_decoder import FEATURES
from bass_core.prompts import first_ids

OTHER = -1  # any token outside the likeliest
# Generation options that `plain` keeps: suppressed ids and the first id.
KEPT = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "decoder_start_token_id", "forced_bos_token_id")


@contextmanager
def plain(model: PreTrainedModel) -> Iterator[None]:
    """Inside, `model` is in evaluation mode, and its generation defaults are only the options of `KEPT`."""
    training = [module for module in model.modules() if module.training]
    before = model.generation_config
    model.generation_config = GenerationConfig(**{name: getattr(before, name) for name in KEPT})
    try:
        for module in training:
            module.training = False
        yield
    finally:
        model.generation_config = before
        for module in training:
            module.training = True


def begins(model: PreTrainedModel, prompt: Tensor) -> Tensor:
    """Return the first ids [P] of a text: the prompt, or an encoder-decoder model's first tokens."""
    if not model.config.is_encoder_decoder:
        return prompt
    return torch.tensor(first_ids(model, model.generation_config or GenerationConfig()))


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: Tensor, new: int) -> tuple[Tensor, Tensor]:
    """Return new ids [T] (on the CPU) and their logits [T, V] from greedy `transformers.generate` of one row."""
    first, given = begins(model, prompt), _given(model, [prompt])
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = first[None].to(model.device)
    output = {"output_logits": True, "return_dict_in_generate": True}
    with plain(model):
        config = copy.deepcopy(model.generation_config)
        config.update(max_new_tokens=new, do_sample=False, pad_token_id=0, **output)
        out = GenerationMixin.generate(model, **given, generation_config=config)  # Whisper overrides generate
    return out.sequences[0, len(first) :].cpu(), torch.cat(out.logits).float().clamp(min=-1e30)


@torch.inference_mode()
def exact_law(
    target: PreTrainedModel, prompt: Tensor, params: SamplingParams, tokens: int, repetition_penalty: float = 1.0
) -> dict[tuple[int, ...], float]:
    """Return the probability of every text of `tokens` tokens after `prompt`, from the target's plain forward pass.
    Needs few outcomes (top_k): all prefixes of a length are rows of one batch."""
    texts = begins(target, prompt)[None].to(target.device)
    first, mass = texts.shape[1], torch.ones(1, dtype=torch.float64, device=target.device)
    for _ in range(tokens):
        logits = _after(target, prompt, texts, first)
        if repetition_penalty != 1:
            logits = RepetitionPenaltyLogitsProcessor(repetition_penalty)(texts, logits)
        p = sampling.probabilities(logits, params)  # [N, V]
        rows, ids = (p > 0).nonzero(as_tuple=True)
        texts, mass = torch.cat([texts[rows], ids[:, None]], 1), mass[rows] * p[rows, ids].double()
    return dict(zip(map(tuple, texts[:, first:].tolist()), mass.tolist(), strict=True))


@torch.inference_mode()
def likely_law(
    target: PreTrainedModel, prompt: Tensor, temperature: float, tokens: int, most: int
) -> dict[tuple[int, ...], float]:
    """Return the probabilities of texts of `tokens` tokens, with the `most` likeliest tokens at each position. A text
    with another token ends there with `OTHER`, so the outcomes cover all texts (`as_likely`)."""
    texts, law = begins(target, prompt)[None].to(target.device), {}
    first, mass = texts.shape[1], torch.ones(1, dtype=torch.float64, device=target.device)
    for _ in range(tokens):
        logits = _after(target, prompt, texts, first).double()
        p, ids = torch.softmax(logits / temperature, -1).topk(min(most, logits.shape[-1]))  # [N, most]
        left = (mass * (1 - p.sum(-1)).clamp(min=0)).tolist()
        law |= {(*text, OTHER): rest for text, rest in zip(texts[:, first:].tolist(), left, strict=True)}
        texts = torch.cat([texts.repeat_interleave(ids.shape[1], 0), ids.flatten()[:, None]], 1)
        mass = (mass[:, None] * p).flatten()
    law |= dict(zip(map(tuple, texts[:, first:].tolist()), mass.tolist(), strict=True))
    return {text: chance for text, chance in law.items() if chance > 0}


def as_likely(texts: Sequence[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> list[tuple[int, ...]]:
    """Map texts to outcomes of `likely_law`."""
    known = {outcome[:size] for outcome in law for size in range(len(outcome) + 1)}
    left = [next((at for at in range(len(text)) if text[: at + 1] not in known), None) for text in texts]
    return [text if at is None else (*text[:at], OTHER) for text, at in zip(texts, left, strict=True)]


def _after(target: PreTrainedModel, prompt: Tensor, texts: Tensor, first: int) -> Tensor:
    """Return next-token logits [N, V] after texts [N, T], -inf for suppressed ids. first: length of the given start."""
    config = target.generation_config or GenerationConfig()
    never, not_first = options.suppressed(config, (), target.config.get_text_config().vocab_size)
    with plain(target):
        logits = _logits(target, [prompt] * len(texts), texts)[:, -1]
    logits[:, never + (not_first if texts.shape[1] == first else [])] = -torch.inf
    if config.forced_bos_token_id is not None and texts.shape[1] == 1:
        logits[:, torch.arange(logits.shape[1]) != config.forced_bos_token_id] = -torch.inf
    return logits


def _logits(model: PreTrainedModel, prompts: Sequence[Tensor], texts: Tensor) -> Tensor:
    """Return logits [N, T, V] of a plain forward pass over texts [N, T] with the start of `begins`."""
    if not model.config.is_encoder_decoder:
        return model(input_ids=texts, use_cache=False).logits
    return model(**_given(model, prompts), decoder_input_ids=texts, use_cache=False).logits


def _given(model: PreTrainedModel, prompts: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return prompts or sources as one right-padded batch of transformers inputs."""
    if model.main_input_name == FEATURES:
        return {FEATURES: torch.stack(list(prompts)).to(model.device, model.dtype)}
    read = pad_sequence(list(prompts), batch_first=True).to(model.device)
    kept = pad_sequence([torch.ones_like(prompt) for prompt in prompts], batch_first=True).to(model.device)
    return {"input_ids": read, "attention_mask": kept}


@torch.inference_mode()
def numeric_noise(model: PreTrainedModel, prompts: Sequence[Tensor], alone: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the largest change of a top-8 logit between decoding, a pass over the row, and a padded batch pass."""
    firsts = [begins(model, prompt) for prompt in prompts]
    texts = [torch.cat([first, ids[:-1]]).to(model.device) for first, (ids, _) in zip(firsts, alone, strict=True)]
    padded = pad_sequence(texts, batch_first=True)  # right padding: causal attention does not see it
    largest = 0.0
    with plain(model):
        together = _logits(model, prompts, padded)
        for row, (prompt, first, text) in enumerate(zip(prompts, firsts, texts, strict=True)):
            ids, logits = alone[row]
            best = logits.topk(min(8, logits.shape[-1]), dim=-1)  # [T, 8]
            positions = slice(len(first) - 1, len(first) - 1 + len(ids))
            for other in (_logits(model, [prompt], text[None])[0], together[row]):
                moved = other[positions].float().gather(-1, best.indices) - best.values
                largest = max(largest, float(moved.abs().max()))
    return largest
