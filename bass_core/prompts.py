"""Prompts in the forms that callers have them -> token ids and sources, checked before any forward pass."""

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

BEGINS = "decoder_input_ids"  # of a mapping: what the text of an encoder-decoder model begins with
# A text, a conversation, token ids [P] or [1, P], or what a tokenizer returns. For models that hear, features.
PromptLike: TypeAlias = str | Sequence[Mapping[str, Any]] | Sequence[int] | Tensor | Mapping[str, Any]


def model_pair(pair: Any) -> ModelPair:
    """`pair`, if it is one. Raises TypeError that says how to make one of a model."""
    if isinstance(pair, ModelPair):
        return pair
    how = (
        "load_pair() loads the embedded one, load_pair('target', draft='draft') another, ModelPair(model, small, "
        "tokenizer=tokenizer) joins models that you hold; prompts come after it"
    )
    if isinstance(pair, PreTrainedModel):
        how = (
            f"of this {type(pair).__name__} make one: ModelPair(model, small, tokenizer=tokenizer), or without "
            "`small`, with drafts looked up in the text"
        )
    raise TypeError(f"pair must be a ModelPair, got {type(pair).__name__}; {how}")


def prompt_list(prompts: Any) -> list:
    """`prompts` as a list: one prompt, a list of them, or rows of token ids with their attention mask, as tokenizers
    return them (see `prompt_ids` for what a prompt may be)."""
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
            "prompts must be a text, a conversation, 1-D token ids, a list of these, or what a tokenizer returns: "
            f"input_ids with their attention_mask; got {_kind(prompts)}"
        )
    if len(prompts) == 0:
        raise ValueError("prompts is empty; give at least one prompt")
    return list(prompts)


def _as_tensor(value: Any) -> Any:
    """Arrays, which tokenizers return too, as tensors; all else as it is."""
    return torch.from_numpy(value) if isinstance(value, np.ndarray) and value.dtype.kind in "iuf" else value


def _are_ids(prompt: Any) -> bool:
    """Whether this is a list of token ids, rather than one of prompts."""
    many = isinstance(prompt, Sequence) and not isinstance(prompt, str) and len(prompt) > 0
    return many and all(isinstance(each, int | np.integer) for each in prompt)


def _each_row(encoding: Mapping) -> list:
    """The rows of what a tokenizer or a feature extractor returned, each with what its text is to begin with."""
    rows = list(torch.as_tensor(encoding[FEATURES])) if FEATURES in encoding else _rows(encoding)
    if (begins := encoding.get(BEGINS)) is None:
        return rows
    if len(begins) != len(rows):
        raise ValueError(f"{BEGINS} has {len(begins)} rows for {len(rows)} sources")
    name = FEATURES if FEATURES in encoding else "input_ids"
    return [{name: row, BEGINS: begin} for row, begin in zip(rows, begins, strict=True)]


def prompt_of(pair: ModelPair, prompt: Any, config: GenerationConfig) -> Prompt:
    """What a row starts from: token ids, as `prompt_ids` takes them; for an encoder-decoder target a source in the same
    forms, or features [channels, frames] of one that hears, and the ids with which every text of it begins.

    A mapping's decoder_input_ids are begun with instead. config: what `generation_config` returned. Raises ValueError
    or TypeError.
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
        raise TypeError("an encoder-decoder model reads a text; a conversation is for decoder-only models")
    source = prompt_ids(prompt, pair.tokenizer, vocabulary)
    for role, most in pair.contexts.items():
        if len(source) > most:
            raise ValueError(
                f"the source has {len(source)} tokens, and the {role} model's encoder {most} positions; shorten it"
            )
    return Prompt(ids, Source(source))


def prompts_of(pair: ModelPair, prompts: Any, max_new_tokens: int, config: GenerationConfig | None) -> list[Prompt]:
    """What the prompts start from, all of them fit to be continued by so many tokens."""
    config = generation_config(model_pair(pair).target, config)
    checked = []
    for index, prompt in enumerate(prompt_list(prompts)):
        with saying_which(index):
            checked.append(prompt_of(pair, prompt, config))
            check_context(pair, len(checked[-1].ids), checks.integer("max_new_tokens", max_new_tokens))
    return checked


def first_ids(model: PreTrainedModel, config: GenerationConfig) -> list[int]:
    """What a text of an encoder-decoder model begins with, as its prompt: the start token, and the one that the model
    is forced to write first (the language, say). Raises ValueError for a model that does not say."""
    for name in ("decoder_start_token_id", "bos_token_id"):
        for each in (config, model.generation_config, model.config):
            if (start := getattr(each, name, None)) is not None:
                forced = config.forced_bos_token_id
                return [start] if forced is None else [start, forced]
    raise ValueError(
        f"{type(model).__name__} does not say what its texts begin with: set decoder_start_token_id in its "
        f"generation_config, or give prompts as mappings with {BEGINS}"
    )


def _features(prompt: Any, model: PreTrainedModel) -> Tensor:
    """A source of a model that hears, [channels, frames]."""
    given = prompt.get(FEATURES) if isinstance(prompt, Mapping) else prompt
    if isinstance(given, Tensor) and given.ndim == 3 and len(given) == 1:
        given = given[0]
    wanted = (model.config.num_mel_bins, 2 * model.config.max_source_positions)
    if not isinstance(given, Tensor) or not given.is_floating_point() or given.shape != wanted:
        raise ValueError(
            f"{type(model).__name__} hears: its sources are features {list(wanted)}, as its feature extractor returns "
            f"them ({FEATURES}, as tensors); got {_kind(prompt if given is None else given)}"
        )
    return given.detach().to("cpu", torch.promote_types(given.dtype, torch.float32), copy=True)


def prompt_ids(prompt: Any, tokenizer: PreTrainedTokenizerBase | None, vocabulary: int) -> Tensor:
    """A prompt as int64 ids [P] on the host, P >= 1, all within the vocabulary.

    prompt: a text; a conversation, [{"role": …, "content": …}, …], which the tokenizer's chat template writes out, the
    assistant's turn next (or going on, where the last message is the assistant's); ids [P] or [1, P]; what a tokenizer
    returns of one text.
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
        raise ValueError("a prompt is empty; give at least one token (for instance the tokenizer's BOS)")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"token ids must be integers, got {ids.dtype}")
    ids = ids.detach().to(torch.int64, copy=True)  # the caller's memory may change until the row begins
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise ValueError(f"token id {wrong} is outside the target's vocabulary (0 … {vocabulary - 1})")
    return ids


def token_ids(pair: ModelPair, prompts: Iterable[Any]) -> list[Tensor]:
    """Every prompt as int64 ids on the host, checked as `prompt_ids` does; an error says which prompt it is about."""
    vocabulary, found = pair.target.config.get_text_config().vocab_size, []
    for index, prompt in enumerate(prompts):
        with saying_which(index):
            found.append(prompt_ids(prompt, pair.tokenizer, vocabulary))
    return found


@contextmanager
def saying_which(index: int) -> Iterator[None]:
    """Errors about a prompt say which of several it is, counted from 0."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"prompt {index}: {error}") from error


def _text_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of a text. One that brings the BOS, as a chat template writes it, gets no second one."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a prompt is not valid UTF-8: half a character stands at place {error.start}") from None
    ids, bos = tokenizer(text)["input_ids"], tokenizer.bos_token
    doubled = bos and text.startswith(bos) and ids[:2] == [tokenizer.bos_token_id] * 2
    return ids[1:] if doubled and not text.startswith(2 * bos) else ids


def _is_conversation(prompt: Any) -> bool:
    """Whether this is a list of messages, rather than one of prompts."""
    many = isinstance(prompt, Sequence) and not isinstance(prompt, str) and len(prompt) > 0
    return many and all(isinstance(each, Mapping) and "role" in each for each in prompt)


def _chat_ids(messages: Sequence[Mapping], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """A conversation's ids, by the tokenizer's chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "a conversation needs a tokenizer with a chat template, as instruction-tuned models have it; this one has "
            "none: give a text"
        )
    if silent := [each for each in messages if not {"content", "tool_calls"} & set(each)]:
        raise ValueError(f'a message of a conversation has a "role" and a "content"; got {silent[0]!r}')
    going_on = messages[-1]["role"] == "assistant"
    turn = {"continue_final_message": going_on, "add_generation_prompt": not going_on}
    try:
        return tokenizer.apply_chat_template(list(messages), return_dict=True, **turn)["input_ids"]
    except Exception as error:  # a template is a program of the model's, which raises whatever it likes
        raise ValueError(f"the tokenizer's chat template refuses this conversation: {error}") from error


def _only_row(encoding: Mapping) -> Tensor:
    """The one row of what a tokenizer returned."""
    rows = _rows(encoding)
    if len(rows) != 1:
        raise ValueError(f"a prompt must be one row of token ids, got {len(rows)} rows")
    return rows[0]


def _rows(encoding: Mapping) -> list[Tensor]:
    """The rows of what a tokenizer returned (lists or a padded batch), each without its padding."""
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
        raise ValueError("several rows of token ids come with their attention_mask, which tells padding from text")
    rows = [torch.as_tensor(row, device="cpu") for row in ids]
    if wrong := [row for row in rows if row.ndim != 1]:
        raise ValueError(f"input_ids must be rows of token ids, got rows of shape {tuple(wrong[0].shape)}")
    kept = [torch.ones_like(row) for row in rows]
    if mask is not None:
        kept = [torch.as_tensor(row, device="cpu") for row in mask]
    if [row.shape for row in rows] != [row.shape for row in kept]:
        raise ValueError("input_ids and attention_mask must have the same shape")
    if any(bool((row.bool().int().diff() != 0).sum() > 1) for row in kept):
        raise ValueError("an attention_mask must be 1 over the text and 0 over the padding before or behind it")
    return [row[mask.bool().to(row.device)] for row, mask in zip(rows, kept, strict=True)]


def check_context(pair: ModelPair, prompt: int, new: int) -> None:
    """Raises ValueError if prompt + new tokens do not fit into the target's or the draft's context."""
    for role, limit in pair.contexts.items():
        if prompt + new > limit:
            lower = f" or lower max_new_tokens to at most {limit - prompt}" if limit > prompt else ""
            raise ValueError(
                f"prompt ({prompt} tokens) + max_new_tokens ({new}) = {prompt + new} is beyond the {role} model's "
                f"context of {limit}; shorten the prompt{lower}"
            )
    switch = recomputed_beyond(pair.target)
    if switch is not None and prompt <= switch < prompt + new - 1:
        raise ValueError(
            f"beyond {switch} tokens the target model has other rotary factors, and transformers works a text out anew "
            "when it gets there, which no row of a batch can do: lower max_new_tokens to at most "
            f"{switch - prompt + 1}, or give a prompt that is longer than {switch} from the start"
        )


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__}: {str(value)[:60]!r}"
