"""Convert prompts of all supported forms to token ids and sources, with checks before any forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from bass_core import checks
from bass_core.loading.checkpoints import panics_are_errors
from bass_core.loading.model_pair import ModelPair
from bass_core.loop.rows import Prompt
from bass_core.model.architectures import recomputed_beyond
from bass_core.model.encoder_decoder import FEATURES, Source
from bass_core.options import generation_config

BEGINS = "decoder_input_ids"  # key of a mapping: first ids of an encoder-decoder model's text
# A text, a conversation, token ids [P] or [1, P], or a tokenizer's output. Features for speech models.
PromptLike: TypeAlias = str | Sequence[Mapping[str, Any]] | Sequence[int] | Tensor | Mapping[str, Any]


def model_pair(pair: Any) -> ModelPair:
    """Return `pair`. Raises TypeError with a hint if `pair` is no `ModelPair`."""
    if isinstance(pair, ModelPair):
        return pair
    how = (
        "load_pair() loads the embedded pair, load_pair('target', draft='draft') another pair, ModelPair(model, small, "
        "tokenizer=tokenizer) combines loaded models; prompts come after the pair"
    )
    if isinstance(pair, PreTrainedModel):
        how = (
            f"use ModelPair(model, small, tokenizer=tokenizer) with this {type(pair).__name__} as model; leave out "
            "`small` to look up drafts in the text"
        )
    raise TypeError(f"pair must be a ModelPair, got {type(pair).__name__}; {how}")


def prompt_list(prompts: Any) -> list:
    """Return `prompts` as a list of prompts (see `prompt_ids`). prompts: one prompt, a list of prompts, or a
    tokenizer's output of several rows with an attention mask."""
    if isinstance(prompts, Mapping):
        return _each_row(prompts)
    prompts = _as_tensor(prompts)
    if isinstance(prompts, Tensor) and prompts.is_floating_point():
        return [prompts] if prompts.ndim == 2 else list(prompts)
    one = isinstance(prompts, str) or _is_conversation(prompts) or _are_ids(prompts)
    if one or (isinstance(prompts, Tensor) and (prompts.ndim == 1 or (prompts.ndim == 2 and len(prompts) == 1))):
        return [prompts]
    if isinstance(prompts, Tensor) or not isinstance(prompts, Sequence):
        raise TypeError(
            "prompts must be a text, a conversation, 1-D token ids, a list of these, or a tokenizer's output "
            f"(input_ids with attention_mask); got {_kind(prompts)}"
        )
    if len(prompts) == 0:
        raise ValueError("prompts is empty; pass at least one prompt")
    return list(prompts)


def _as_tensor(value: Any) -> Any:
    """Return numeric arrays as tensors, and other values unchanged."""
    return torch.from_numpy(value) if isinstance(value, np.ndarray) and value.dtype.kind in "iuf" else value


def _are_ids(prompt: Any) -> bool:
    """Return True for a list of token ids, False for a list of prompts."""
    many = isinstance(prompt, Sequence) and not isinstance(prompt, str) and len(prompt) > 0
    return many and all(isinstance(each, int | np.integer) for each in prompt)


def _each_row(encoding: Mapping) -> list:
    """Return the rows of a tokenizer's or feature extractor's output, with each row's decoder_input_ids if given."""
    rows = list(torch.as_tensor(encoding[FEATURES])) if FEATURES in encoding else _rows(encoding)
    if (begins := encoding.get(BEGINS)) is None:
        return rows
    if len(begins) != len(rows):
        raise ValueError(f"{BEGINS} has {len(begins)} rows for {len(rows)} sources; pass one row per source")
    name = FEATURES if FEATURES in encoding else "input_ids"
    return [{name: row, BEGINS: begin} for row, begin in zip(rows, begins, strict=True)]


def prompt_of(pair: ModelPair, prompt: Any, config: GenerationConfig) -> Prompt:
    """Return the `Prompt` of a row: token ids as in `prompt_ids`. config: the result of `generation_config`.

    For an encoder-decoder target, `prompt` is a source: token ids, or features [channels, frames] of a speech model.
    The ids are then the first ids of the text, or a mapping's decoder_input_ids. Raises ValueError or TypeError.
    """
    vocabulary = pair.target.config.get_text_config().vocab_size
    if not pair.reads_sources:
        return Prompt(prompt_ids(prompt, pair.tokenizer, vocabulary))
    begins = prompt.get(BEGINS) if isinstance(prompt, Mapping) else None
    begins = first_ids(pair.target, config) if begins is None else begins
    ids = prompt_ids(begins, None, vocabulary)
    if pair.target.main_input_name == FEATURES:
        return Prompt(ids, Source(_features(prompt, pair.target)))
    if _is_conversation(prompt):
        raise TypeError("an encoder-decoder model takes no conversation; pass a text")
    source = prompt_ids(prompt, pair.tokenizer, vocabulary)
    for role, most in pair.contexts.items():
        if len(source) > most:
            raise ValueError(
                f"the source has {len(source)} tokens, but the {role} model's encoder has only {most} positions; "
                "shorten the source"
            )
    return Prompt(ids, Source(source))


def prompts_of(pair: ModelPair, prompts: Any, max_new_tokens: int, config: GenerationConfig | None) -> list[Prompt]:
    """Return all prompts as `Prompt`. Raises ValueError if the context has no space for `max_new_tokens` tokens."""
    config = generation_config(model_pair(pair).target, config)
    checked = []
    for index, prompt in enumerate(prompt_list(prompts)):
        with saying_which(index):
            checked.append(prompt_of(pair, prompt, config))
            check_context(pair, len(checked[-1].ids), checks.integer("max_new_tokens", max_new_tokens))
    return checked


def first_ids(model: PreTrainedModel, config: GenerationConfig) -> list[int]:
    """Return the first id of an encoder-decoder model's text. Raises ValueError if the model has no start token."""
    for name in ("decoder_start_token_id", "bos_token_id"):
        for each in (config, model.generation_config, model.config):
            if (start := getattr(each, name, None)) is not None:
                return [start]
    raise ValueError(
        f"{type(model).__name__} has no start token: set decoder_start_token_id in the model's generation_config, or "
        f"pass prompts as mappings with {BEGINS}"
    )


def _features(prompt: Any, model: PreTrainedModel) -> Tensor:
    """Return a speech model's source, float [channels, frames] on the host."""
    given = prompt.get(FEATURES) if isinstance(prompt, Mapping) else prompt
    if isinstance(given, Tensor) and given.ndim == 3 and len(given) == 1:
        given = given[0]
    wanted = (model.config.num_mel_bins, 2 * model.config.max_source_positions)
    if not isinstance(given, Tensor) or not given.is_floating_point() or given.shape != wanted:
        raise ValueError(
            f"{type(model).__name__} is a speech model: pass features {list(wanted)} from its feature extractor "
            f"({FEATURES}, as tensors); got {_kind(prompt if given is None else given)}"
        )
    return given.detach().to("cpu", torch.promote_types(given.dtype, torch.float32), copy=True)


def prompt_ids(prompt: Any, tokenizer: PreTrainedTokenizerBase | None, vocabulary: int) -> Tensor:
    """Return a prompt as int64 ids [P] on the host, P >= 1, all within the vocabulary.

    prompt: a text, ids [P] or [1, P], a tokenizer's output for one text, or a conversation [{"role": …, "content": …},
    …]. The tokenizer's chat template formats a conversation, followed by the assistant's turn. If the last message is
    the assistant's, the text continues this message.
    """
    prompt = _as_tensor(prompt)
    if isinstance(prompt, Mapping):
        prompt = _only_row(prompt)
    elif isinstance(prompt, str) or _is_conversation(prompt):
        if tokenizer is None:
            raise ValueError("text prompts need a tokenizer: ModelPair(..., tokenizer=...), or pass token ids")
        with panics_are_errors():
            prompt = _text_ids(prompt, tokenizer) if isinstance(prompt, str) else _chat_ids(prompt, tokenizer)
    try:
        ids = torch.as_tensor(prompt, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"a prompt must be a text, a conversation or 1-D token ids, got {_kind(prompt)}") from error
    if isinstance(prompt, Tensor) and ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim != 1:
        raise ValueError(f"a prompt must be a 1-D tensor of token ids, got shape {tuple(ids.shape)}")
    if len(ids) == 0:
        raise ValueError("a prompt is empty; pass at least one token (for instance the tokenizer's BOS)")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"token ids must be integers, got {ids.dtype}")
    ids = ids.detach().to(torch.int64, copy=True)  # the caller may change the tensor before the row starts
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise ValueError(f"token id {wrong} is outside the target's vocabulary (0 … {vocabulary - 1})")
    return ids


def token_ids(pair: ModelPair, prompts: Iterable[Any]) -> list[Tensor]:
    """Return every prompt as int64 ids on the host, see `prompt_ids`. Errors contain the index of the prompt."""
    vocabulary, found = pair.target.config.get_text_config().vocab_size, []
    for index, prompt in enumerate(prompts):
        with saying_which(index):
            found.append(prompt_ids(prompt, pair.tokenizer, vocabulary))
    return found


@contextmanager
def saying_which(index: int) -> Iterator[None]:
    """Add the index of the prompt to errors raised inside."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"prompt {index}: {error}") from error


def _text_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of a text. A text that begins with the BOS, as from a chat template, gets no second BOS."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a prompt is not valid Unicode: lone surrogate at index {error.start}") from None
    ids, bos = tokenizer(text)["input_ids"], tokenizer.bos_token
    doubled = bos and text.startswith(bos) and ids[:2] == [tokenizer.bos_token_id] * 2
    return ids[1:] if doubled and not text.startswith(2 * bos) else ids


def _is_conversation(prompt: Any) -> bool:
    """Return True for a list of messages, False for a list of prompts."""
    many = isinstance(prompt, Sequence) and not isinstance(prompt, str) and len(prompt) > 0
    return many and all(isinstance(each, Mapping) and "role" in each for each in prompt)


def _chat_ids(messages: Sequence[Mapping], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return a conversation's ids from the tokenizer's chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "a conversation needs a tokenizer with a chat template, such as that of an instruction-tuned model; pass a "
            "text instead"
        )
    if silent := [each for each in messages if not {"content", "tool_calls"} & set(each)]:
        raise ValueError(f'a message of a conversation has a "role" and a "content"; got {silent[0]!r}')
    going_on = messages[-1]["role"] == "assistant"
    turn = {"continue_final_message": going_on, "add_generation_prompt": not going_on}
    try:
        return tokenizer.apply_chat_template(list(messages), return_dict=True, **turn)["input_ids"]
    except Exception as error:  # a chat template is a program and may raise any exception
        raise ValueError(f"the tokenizer's chat template refuses this conversation: {error}") from error


def _only_row(encoding: Mapping) -> Tensor:
    """Return the only row of a tokenizer's output. Raises ValueError for several rows."""
    rows = _rows(encoding)
    if len(rows) != 1:
        raise ValueError(f"a prompt must be one row of token ids, got {len(rows)} rows")
    return rows[0]


def _rows(encoding: Mapping) -> list[Tensor]:
    """Return the rows of a tokenizer's output (lists or a padded batch) without padding."""
    if "input_ids" not in encoding:
        raise TypeError(
            'prompts must be texts, conversations ([{"role": "user", "content": "…"}]), token ids, or a mapping '
            f"with input_ids (and attention_mask); got a mapping with {', '.join(map(str, encoding)) or 'nothing'}"
        )
    ids, mask = _as_tensor(encoding["input_ids"]), _as_tensor(encoding.get("attention_mask"))
    if not isinstance(ids, Tensor) and len(ids) and not isinstance(ids[0], Sequence):
        ids, mask = [ids], None if mask is None else [mask]  # one text, without return_tensors
    elif isinstance(ids, Tensor) and ids.ndim == 1:
        ids, mask = ids[None], None if mask is None else mask[None]
    if mask is None and len(ids) > 1 and isinstance(ids, Tensor):
        raise ValueError("several rows of token ids need an attention_mask, which marks padding")
    rows = [torch.as_tensor(row, device="cpu") for row in ids]
    if wrong := [row for row in rows if row.ndim != 1]:
        raise ValueError(f"input_ids must be rows of token ids, got rows of shape {tuple(wrong[0].shape)}")
    kept = [torch.ones_like(row) for row in rows]
    if mask is not None:
        kept = [torch.as_tensor(row, device="cpu") for row in mask]
    if [row.shape for row in rows] != [row.shape for row in kept]:
        raise ValueError("input_ids and attention_mask must have the same shape")
    if any(bool((row.bool().int().diff() != 0).sum() > 1) for row in kept):
        raise ValueError("an attention_mask must be 1 over the text and 0 over the padding before or after the text")
    return [row[mask.bool().to(row.device)] for row, mask in zip(rows, kept, strict=True)]


def check_context(pair: ModelPair, prompt: int, new: int) -> None:
    """Raise ValueError if prompt + new tokens do not fit into the target's or the draft's context."""
    for role, limit in pair.contexts.items():
        if prompt + new > limit:
            lower = f" or lower max_new_tokens to at most {limit - prompt}" if limit > prompt else ""
            raise ValueError(
                f"prompt ({prompt} tokens) + max_new_tokens ({new}) = {prompt + new} is beyond the {role} model's "
                f"context of {limit} tokens; shorten the prompt{lower}"
            )
    switch = recomputed_beyond(pair.target)
    if switch is not None and prompt <= switch < prompt + new - 1:
        raise ValueError(
            f"the target model changes its rotary factors at {switch} tokens, where transformers recomputes the whole "
            "text; rows of a batch do not support this. Lower max_new_tokens to at most "
            f"{switch - prompt + 1}, or pass a prompt of more than {switch} tokens"
        )


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__}: {str(value)[:60]!r}"
