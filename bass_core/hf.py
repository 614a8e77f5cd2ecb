"""`bass_generate`: the engine as `custom_generate` of transformers' `generate`.

    model.generate(**inputs, custom_generate=bass_generate, draft_model=draft, do_sample=True, num_return_sequences=8)

transformers prepares the inputs as for its own decoding and calls `bass_generate` instead of its loop. Unsupported
inputs that would change the text raise an error. Four arguments of `generate` never reach a callable (transformers
5.17 to 5.24). `bass_generate` reads the first two from the frame of `generate`:

* `assistant_model` is the draft model. `generate` accepts it only for a single sequence. Without `assistant_model` and
  `draft_model`, `bass_generate` raises ValueError.
* `streamer` receives the committed tokens of a single sequence, and the end, also after an error.
* `tokenizer` is missing, so `generate` always raises for `stop_strings`. Use `bass_core.generate(..., stop=...)`.
* `assistant_tokenizer` is missing: draft and target must share a vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput

from bass_core.drafters import NAMES, Drafter, named
from bass_core.exactness.processors import OwnRow, Penalties, Processor, suppressing
from bass_core.generation import Generation, generate
from bass_core.loading.model_pair import ModelPair
from bass_core.loop.trace import StepEvent
from bass_core.model import transformers_internals as internals
from bass_core.model.encoder_decoder import FEATURES
from bass_core.options import Attention, Compile, TraceLevel, Verification, among, asked_for
from bass_core.policies.protocol import DraftLengthPolicy
from bass_core.prompts import BEGINS

# Fields of a GenerationConfig that are supported or do not affect decoding.
HONOURED = {
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "do_sample", "num_return_sequences",
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "eos_token_id", "pad_token_id", "bos_token_id",
    "return_dict_in_generate", "transformers_version", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids",
    "no_repeat_ngram_size", "sequence_bias", "exponential_decay_length_penalty", "forced_bos_token_id",
    "forced_eos_token_id",
}  # fmt: skip
# Fields that do not change the text: caches, compilation, drafts of other systems, beam options without beams.
NEUTRAL = {
    "assistant_confidence_threshold", "assistant_lookbehind", "cache_config", "cache_implementation", "compile_config",
    "continuous_batching_config", "disable_compile", "early_stopping", "is_assistant", "length_penalty", "low_memory",
    "max_cache_len", "max_matching_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "prefill_chunk_size", "target_lookbehind", "use_cache",
}  # fmt: skip
HONOURED_OF_READERS = {"decoder_start_token_id"}
# The processors that `generate` appends for sampling, and the options with their values.
WARPERS = {
    transformers.TemperatureLogitsWarper: "temperature",
    transformers.TopKLogitsWarper: "top_k",
    transformers.TopPLogitsWarper: "top_p",
    transformers.MinPLogitsWarper: "min_p",
}
CRITERIA = (transformers.MaxLengthCriteria, transformers.MaxTimeCriteria, transformers.EosTokenCriteria)
INSTEAD = {
    "num_beams": "speculative decoding has no beam search; sample with do_sample=True, num_return_sequences=…",
    "use_mtp": "pass draft_model=…",
    "prompt_lookup_num_tokens": "pass draft_model=NgramDrafter()",
    "assistant_early_exit": "pass draft_model=…",
    "output_scores": "return_dict_in_generate=True returns the tokens' log-probabilities in `generation.logprobs`",
    "output_logits": "return_dict_in_generate=True returns the tokens' log-probabilities in `generation.logprobs`",
    "encoder_outputs": "pass the sources (input_ids or input_features), since the draft model has its own encoder",
    internals.CACHE: "the engine has its own cache; pass the whole text as input_ids",
    "inputs_embeds": "pass token ids (input_ids)",
    "streamer": "a streamer receives a single sequence; pass on_step=…, which receives the tokens of every row",
    "trace": "set return_dict_in_generate=True, whose result contains the trace",
}
HEARD = "a speech model's own `generate` decodes by segments; call bass_core.generate(pair, features)"


@dataclass
class BassOutput(GenerateDecoderOnlyOutput):
    """Result with return_dict_in_generate=True: `sequences` as in transformers, and `generation`.

    generation: the `Generation` with log-probabilities, finish reasons, trace and sequences without prompt and padding.
    """

    generation: Generation | None = None


def bass_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    draft_model: PreTrainedModel | Drafter | str | None = None,
    draft_length: int | DraftLengthPolicy | None = None,
    verification: Verification = "token",
    attention: Attention = "auto",
    compile: Compile = "auto",
    max_batch_size: int | None = None,
    seed: int | None = None,
    on_step: Callable[[StepEvent], None] | None = None,
    trace: TraceLevel = "off",
    inputs_tensor: Tensor | None = None,
    **model_kwargs,
) -> Tensor | BassOutput:
    """Decode by batched speculative decoding in `model.generate(..., custom_generate=bass_generate)`.

    Pass these arguments to `model.generate`:
    draft_model: a smaller model with the same vocabulary, any `Drafter`, "ngram" or "suffix". None uses
        `assistant_model`, which is then required.
    draft_length, verification, attention, compile, max_batch_size: as in `bass_core.generate`.
    seed: None draws a seed from torch's global generator (set by `torch.manual_seed`) if tokens are sampled.
    on_step: called with a StepEvent after each step, with row ids of the output. Use this to stream several sequences,
        and transformers' `streamer` for a single sequence.
    trace: "steps" or "tokens" require return_dict_in_generate=True; the result then contains the trace.

    Returns int64 [B * num_return_sequences, P + N] on the input's device: the prompts with left padding, then the new
    tokens, padded on the right with pad_token_id. Greedy text equals that of `generate`. Sampled text has the same
    distribution, with other random numbers. Each prompt is prefilled once for all samples. Dropout is off, also in
    training mode. Padding is never penalized as a repetition (transformers 5.17 counts the pad token as seen). max_time
    is checked before the first step and between steps; rows may then differ in length or be empty. For an
    encoder-decoder model, the prompts are the decoder's first tokens, and `generate` passes the sources as
    inputs_tensor.

    Raises ValueError for processors that depend on other rows, for other stopping criteria, generation options or model
    inputs, for masks that hide anything except left padding (right padding of sources), and under the conditions of
    `bass_core.generate`.
    """
    streamer = internals.generate_argument("streamer")
    with ExitStack() as ending:
        if streamer is not None:
            ending.callback(streamer.end)
        pair = ModelPair(model, _drafts_from(draft_model))
        _refuse_other_options(generation_config, pair)
        _refuse_other_inputs(model_kwargs)
        mask, width = model_kwargs.get("attention_mask"), input_ids.shape[1]
        if pair.reads_sources:
            prompts, hidden = _sources(inputs_tensor, mask, input_ids), None
        else:
            prompts, hidden = _prompts(input_ids, mask, model_kwargs.get("position_ids")), mask
        processors = _processors(logits_processor, generation_config, input_ids, hidden)
        stops = _stops(stopping_criteria, width)
        sampling = _sampling(generation_config)
        pad = _padding(generation_config, stops, len(input_ids))
        if trace != "off" and not generation_config.return_dict_in_generate:
            _refuse("trace", trace)
        if seed is None:
            seed = int(torch.randint(2**63 - 1, (), device="cpu")) if sampling["temperature"] else 0
        if streamer is not None and len(prompts) > 1:
            _refuse("streamer", type(streamer).__name__)

        def stepped(event: StepEvent) -> None:
            if streamer is not None and any(event.new_tokens):
                streamer.put(torch.tensor(event.new_tokens[0], device="cpu"))
            if on_step is not None:
                on_step(event)

        generation = generate(
            pair,
            prompts,
            **stops,
            **sampling,
            **among(locals()) | {"generation_config": GenerationConfig()},  # the rest is in the call
            on_step=None if streamer is None and on_step is None else stepped,
        )
    new = pad_sequence(generation.sequences, batch_first=True, padding_value=pad)
    sequences = torch.cat([input_ids.long(), new.to(input_ids.device)], dim=1)
    return BassOutput(sequences, generation=generation) if generation_config.return_dict_in_generate else sequences


def _drafts_from(draft_model: PreTrainedModel | Drafter | str | None) -> PreTrainedModel | Drafter:
    """Return the caller's draft model or drafter. Raises ValueError if none or two are given."""
    assistant = internals.generate_argument("assistant_model")
    if draft_model is not None and assistant is not None:
        raise ValueError("two draft models are given; pass either draft_model or assistant_model")
    if draft_model is None and assistant is None:
        raise ValueError(
            "bass_generate must know where drafts come from: pass draft_model=small, a smaller model with the same "
            'vocabulary, or draft_model="ngram" to look up drafts in the text'
        )
    chosen = assistant if draft_model is None else named(draft_model) or draft_model
    if not isinstance(chosen, PreTrainedModel | Drafter):
        got = f"a {type(chosen).__name__}" if isinstance(chosen, torch.nn.Module) else repr(chosen)
        raise TypeError(f"draft_model must be a transformers model, a Drafter, {NAMES}; got {got}")
    return chosen


def _refuse(name: str, value: Any, kind: str = "") -> NoReturn:
    instead = INSTEAD.get(name, "leave it out, or call generate without custom_generate")
    raise ValueError(f"bass_generate does not support {kind}{name}={str(value)[:60]}: {instead}")


def _refuse_other_options(config: GenerationConfig, pair: ModelPair) -> None:
    """Raise ValueError for an unsupported field that would change the text. Ignores fields unknown to transformers."""
    known, honoured = vars(GenerationConfig()), HONOURED | NEUTRAL
    honoured |= HONOURED_OF_READERS if pair.reads_sources else set()
    others = (name for name in vars(config) if not name.startswith("_") and name not in honoured)
    for name, value in asked_for(config, others):
        if name in known:
            _refuse(name, value, "the generation option ")
        if pair.target.main_input_name == FEATURES:
            raise ValueError(f"bass_generate does not support {name}={str(value)[:60]}: {HEARD}")


def _refuse_other_inputs(model_kwargs: dict) -> None:
    """Raise ValueError for model inputs of the caller. `generate` itself adds masks, positions, an empty cache, encoder
    outputs and two flags."""
    if (internals.generate_argument("kwargs") or {}).get("encoder_outputs") is not None:
        _refuse("encoder_outputs", "those of the caller")
    cache = model_kwargs.get(internals.CACHE)
    if internals.is_callers_cache(cache):
        _refuse(internals.CACHE, type(cache).__name__)
    mask = model_kwargs.get("decoder_attention_mask")
    if mask is not None and not mask.all():
        _refuse("decoder_attention_mask", "a mask that hides tokens")
    known = ("attention_mask", "position_ids", internals.CACHE, "use_cache", "logits_to_keep", "encoder_outputs")
    known += ("decoder_attention_mask",)
    for name, value in model_kwargs.items():
        if name not in known and value is not None:
            _refuse(name, type(value).__name__, "the model input ")


def _processors(
    given: LogitsProcessorList, config: GenerationConfig, input_ids: Tensor, mask: Tensor | None
) -> list[Processor]:
    """Return the processors of `generate`, except those for sampling at the end of the list. Processors receive rows
    with the left padding of input_ids [B, P]. Raises ValueError for a processor after those for sampling, and for
    processors that depend on other rows."""
    given, width = list(given), input_ids.shape[1]
    hidden = torch.zeros_like(input_ids, dtype=torch.bool) if mask is None else mask == 0
    padding = int(input_ids[hidden][0]) if hidden.any() else 0
    off = {"temperature": (None, 1.0), "top_k": (None, 0), "top_p": (None, 1.0), "min_p": (None,)}
    asked = [kind for kind, name in WARPERS.items() if config.do_sample and getattr(config, name) not in off[name]]
    end = len(given) - len(asked)
    if [type(each) for each in given[end:]] != asked:
        raise ValueError(f"bass_generate expects {asked} at the end of the logits processors, got {given}")
    found: list[Processor] = []
    for each in given[:end]:
        kind = type(each)
        if kind is transformers.RepetitionPenaltyLogitsProcessor and not isinstance(each.prompt_ignore_length, int):
            ignored = each.prompt_ignore_length  # `generate` sets the padding, or None
            if ignored is not None and ignored.tolist() != hidden.sum(1).tolist():
                _refuse("prompt_ignore_length", ignored, "a repetition penalty with ")
            found.append(Penalties(each.penalty))
        elif kind is transformers.SuppressTokensLogitsProcessor:
            found.append(suppressing(each.suppress_tokens.tolist()))
        elif kind is transformers.SuppressTokensAtBeginLogitsProcessor and each.begin_index == width:
            found.append(suppressing(each.begin_suppress_tokens.tolist(), until=1))
        elif kind is not transformers.MinLengthLogitsProcessor or each.min_length > width:
            found.append(OwnRow(each, padding, width))
    return found


def _sampling(config: GenerationConfig) -> dict[str, float]:
    """Return the sampling options of `config` as options of `bass_core.generate`. None means off."""
    off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} if config.do_sample else {}
    options = {name: none if getattr(config, name) is None else getattr(config, name) for name, none in off.items()}
    return {"temperature": 0.0, "repetition_penalty": 1.0} | options


def _stops(criteria: StoppingCriteriaList, width: int) -> dict[str, Any]:
    """Return max_new_tokens, time_budget and eos_token_id. `generate` checks criteria after each token and so emits at
    least one token."""
    for criterion in criteria:
        if type(criterion) not in CRITERIA:
            raise ValueError(
                f"bass_generate does not support the stopping criterion {type(criterion).__name__}: leave it out, or "
                "call generate without custom_generate. Supported are max_new_tokens, max_length, max_time and "
                "eos_token_id"
            )

    def all_of(kind: type) -> list:
        return [criterion for criterion in criteria if type(criterion) is kind]

    lengths, times, eos_tokens = map(all_of, CRITERIA)
    ends = [criterion.initial_timestamp + criterion.max_time for criterion in times]
    eos = {each for criterion in eos_tokens for each in criterion.eos_token_id.flatten().tolist()}
    return {
        "max_new_tokens": max(1, min(criterion.max_length for criterion in lengths) - width),
        "time_budget": max(0.0, min(ends) - time.time()) if ends else None,
        "eos_token_id": eos,
    }


def _sources(read: Tensor, mask: Tensor | None, input_ids: Tensor) -> list[dict[str, Tensor]]:
    """Return the source of each row of input_ids [B, P] without padding. read: [B / n, S] or features; mask [B, S]."""
    begins = input_ids.cpu()
    read = read.repeat_interleave(len(input_ids) // len(read), 0).cpu()
    if read.is_floating_point():
        return [{FEATURES: row, BEGINS: begin} for row, begin in zip(read, begins, strict=True)]
    if read.min() < 0:
        _refuse("encoder_outputs", "outputs without sources")
    kept = torch.ones_like(read, dtype=torch.bool) if mask is None else mask.cpu() != 0
    if bool((kept[:, 1:] & ~kept[:, :-1]).any()):
        raise ValueError(
            "an attention_mask of sources must have zeros only on the right of each row, since generate counts padding "
            "as positions; pad with tokenizer.padding_side='right'"
        )
    rows = [row[shown] for row, shown in zip(read, kept, strict=True)]
    return [{"input_ids": row, BEGINS: begin} for row, begin in zip(rows, begins, strict=True)]


def _padding(config: GenerationConfig, stops: dict, rows: int) -> int:
    """Return the padding id. Raises ValueError if there is none and rows may end at different lengths."""
    pad = internals.padding_id(config)
    if pad is not None:
        return pad
    if rows > 1 and (stops["eos_token_id"] or stops["time_budget"] is not None):
        raise ValueError("rows may end at different lengths, which needs padding: pass pad_token_id to generate")
    return 0  # no padding is needed


def _prompts(input_ids: Tensor, mask: Tensor | None, position_ids: Tensor | None) -> list[Tensor]:
    """Return the rows [P_b] without left padding. input_ids, mask: [B, P]."""
    kept = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask != 0
    usual = kept.long().cumsum(-1) - 1
    positions = usual if position_ids is None else position_ids  # as wide as the mask in `generate`
    if not kept.shape[1] == positions.shape[-1] == input_ids.shape[1] or bool((kept[:, :-1] & ~kept[:, 1:]).any()):
        raise ValueError(
            "attention_mask must have the shape of input_ids and zeros only on the left of each row (generate infers a "
            "missing mask from pad_token_id); pad with tokenizer.padding_side='left'"
        )
    if bool(((positions != usual) & kept).any()):
        raise ValueError("position_ids must be 0, 1, 2, … from each row's first token; leave out position_ids")
    return [row[shown] for row, shown in zip(input_ids.cpu(), kept.cpu(), strict=True)]
