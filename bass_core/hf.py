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
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput

from bass_core.drafters import NAMES, Drafter, named
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
    "return_dict_in_generate", "transformers_version", "suppress_tokens", "begin_suppress_tokens",
}  # fmt: skip
# Fields that do not change the text: caches, compilation, drafts of other systems, beam options without beams.
NEUTRAL = {
    "assistant_confidence_threshold", "assistant_lookbehind", "cache_config", "cache_implementation", "compile_config",
    "continuous_batching_config", "disable_compile", "early_stopping", "is_assistant", "length_penalty", "low_memory",
    "max_cache_len", "max_matching_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "prefill_chunk_size", "target_lookbehind", "use_cache",
}  # fmt: skip
HONOURED_OF_READERS = {"decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id"}
# Supported processors: the option from which `generate` makes each processor, and the attribute with the value.
PROCESSORS = {
    transformers.RepetitionPenaltyLogitsProcessor: ("repetition_penalty", "penalty"),
    transformers.TemperatureLogitsWarper: ("temperature", "temperature"),
    transformers.TopKLogitsWarper: ("top_k", "top_k"),
    transformers.TopPLogitsWarper: ("top_p", "top_p"),
    transformers.MinPLogitsWarper: ("min_p", "min_p"),
    transformers.ForcedBOSTokenLogitsProcessor: ("forced_bos_token_id", "bos_token_id"),
    transformers.ForcedEOSTokenLogitsProcessor: ("forced_eos_token_id", "eos_token_id"),
    transformers.SuppressTokensLogitsProcessor: ("suppress_tokens", "suppress_tokens"),
    transformers.SuppressTokensAtBeginLogitsProcessor: ("begin_suppress_tokens", "begin_suppress_tokens"),
    transformers.NoBadWordsLogitsProcessor: ("bad_words_ids", "bad_word_ids"),
}
CRITERIA = (transformers.MaxLengthCriteria, transformers.MaxTimeCriteria, transformers.EosTokenCriteria)
INSTEAD = {
    "num_beams": "speculative decoding has no beam search; sample with do_sample=True, num_return_sequences=…",
    "use_mtp": "pass draft_model=…",
    "prompt_lookup_num_tokens": "pass draft_model=NgramDrafter()",
    "assistant_early_exit": "pass draft_model=…",
    "output_scores": "return_dict_in_generate=True returns the tokens' log-probabilities in `generation.logprobs`",
    "output_logits": "return_dict_in_generate=True returns the tokens' log-probabilities in `generation.logprobs`",
    "forced_eos_token_id": "give one id, or do_sample=False",
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

    Raises ValueError for other processors, stopping criteria, generation options or model inputs, for masks that hide
    anything except left padding (right padding of sources), and under the conditions of `bass_core.generate`.
    """
    streamer, stream = internals.generate_argument("streamer"), None
    with ExitStack() as ending:
        if streamer is not None:
            ending.callback(streamer.end)
        pair = ModelPair(model, _drafts_from(draft_model))
        _refuse_other_options(generation_config, pair)
        _refuse_other_inputs(model_kwargs)
        mask, width = model_kwargs.get("attention_mask"), input_ids.shape[1]
        if pair.reads_sources:
            forced, starts = _forced_first(generation_config, input_ids), [0] * len(input_ids)
            prompts = _sources(inputs_tensor, mask, input_ids, forced)
        else:
            prompts, forced = _prompts(input_ids, mask, model_kwargs.get("position_ids")), []
            starts = [width - len(prompt) for prompt in prompts]
        _refuse_other_processors(logits_processor, generation_config, width, len(forced), starts)
        stops = _stops(stopping_criteria, width, forced)
        sampling = _sampling(generation_config)
        pad = _padding(generation_config, stops, len(input_ids))
        if trace != "off" and not generation_config.return_dict_in_generate:
            _refuse("trace", trace)
        if seed is None:
            seed = int(torch.randint(2**63 - 1, (), device="cpu")) if sampling["temperature"] else 0
        if streamer is not None:
            if len(prompts) > 1:
                _refuse("streamer", type(streamer).__name__)
            stream = _Stream(streamer, forced, generation_config.forced_eos_token_id is not None)
        hearers = [each for each in (stream and stream.stepped, on_step) if each is not None]

        def stepped(event: StepEvent) -> None:
            for hearer in hearers:
                hearer(event)

        generation = generate(
            pair,
            prompts,
            **stops,
            **sampling,
            **among(locals()) | {"generation_config": _never_chosen(generation_config)},  # the rest is in the call
            on_step=stepped if hearers else None,
        )
        rows = _with_forced(generation, generation_config, forced, generation_config.max_length - width)
        if stream is not None:
            stream.send(rows[0].tolist())
    new = pad_sequence(rows, batch_first=True, padding_value=pad)
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


class _Stream:
    """Sends the committed tokens of a single row to a streamer."""

    def __init__(self, streamer: BaseStreamer, first: list[int], last_may_change: bool):
        """first: the first tokens of the row. last_may_change: hold back the newest token."""
        self._streamer, self._row, self._held, self._sent = streamer, list(first), int(last_may_change), 0

    def stepped(self, event: StepEvent) -> None:
        for tokens in event.new_tokens:
            self._row += tokens
            self.send(self._row[: len(self._row) - self._held])

    def send(self, row: list[int]) -> None:
        new, self._sent = row[self._sent :], max(self._sent, len(row))
        if new:
            self._streamer.put(torch.tensor(new, device="cpu"))


def _refuse(name: str, value: Any, kind: str = "") -> NoReturn:
    instead = INSTEAD.get(name, "leave it out, or call generate without custom_generate")
    raise ValueError(f"bass_generate does not support {kind}{name}={str(value)[:60]}: {instead}")


def _refuse_other_options(config: GenerationConfig, pair: ModelPair) -> None:
    """Raise ValueError for an unsupported field that would change the text. Ignores fields unknown to transformers."""
    if config.do_sample and isinstance(config.forced_eos_token_id, list) and len(config.forced_eos_token_id) > 1:
        _refuse("forced_eos_token_id", config.forced_eos_token_id, "the generation option ")  # `generate` draws one
    known, honoured = vars(GenerationConfig()), HONOURED | NEUTRAL
    honoured |= HONOURED_OF_READERS if pair.reads_sources else set()
    others = (name for name in vars(config) if not name.startswith("_") and name not in honoured)
    for name, value in asked_for(config, others):
        if name == "bad_words_ids" and all(len(word) == 1 for word in value):
            continue
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


def _refuse_other_processors(
    processors: LogitsProcessorList, config: GenerationConfig, width: int, forced: int, starts: list[int]
) -> None:
    """Raise ValueError for a processor that `generate` does not make from a supported option. width: of the prompts,
    with padding. forced: number of forced first tokens. starts: index of each prompt's first token after padding."""
    seen = set()
    for processor in processors:
        kind = type(processor)
        if kind is transformers.MinLengthLogitsProcessor and processor.min_length <= width:
            continue  # the prompts have this length already
        if kind in (transformers.MinLengthLogitsProcessor, transformers.MinNewTokensLengthLogitsProcessor):
            name = "min_length" if config.min_new_tokens is None else "min_new_tokens"
            _refuse(name, getattr(config, name), "the generation option ")
        if kind in seen or not _made_from_option(processor, config, width + forced, starts):
            constrained = kind is transformers.PrefixConstrainedLogitsProcessor
            name = "prefix_allowed_tokens_fn" if constrained else kind.__name__
            instead = f"set the option {PROCESSORS[kind][0]}" if kind in PROCESSORS else "leave it out"
            raise ValueError(
                f"bass_generate does not support the logits processor {name}: {instead}, or call generate without "
                f"custom_generate. Supported are the options {', '.join(option for option, _ in PROCESSORS.values())}"
            )
        seen.add(kind)


def _made_from_option(processor: LogitsProcessor, config: GenerationConfig, first: int, starts: list[int]) -> bool:
    """Return True if `generate` made the processor from a supported option. first: index of the first new token."""
    if type(processor) not in PROCESSORS:
        return False
    option, attribute = PROCESSORS[type(processor)]
    ignored = getattr(processor, "prompt_ignore_length", None)  # `generate` sets the padding, or None
    if isinstance(ignored, int) or (ignored is not None and ignored.tolist() != starts):
        return False
    theirs, ours = getattr(processor, attribute), getattr(config, option)
    if isinstance(theirs, Tensor):
        theirs, ours = theirs.tolist(), [ours] if isinstance(ours, int) else list(ours or ())
    return theirs == ours and getattr(processor, "begin_index", first) == first


def _sampling(config: GenerationConfig) -> dict[str, float]:
    """Return the sampling options of `config` as options of `bass_core.generate`. None means off."""
    off = {"repetition_penalty": 1.0}
    if config.do_sample:
        off |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    options = {name: none if getattr(config, name) is None else getattr(config, name) for name, none in off.items()}
    return {"temperature": 0.0} | options


def _stops(criteria: StoppingCriteriaList, width: int, forced: list[int]) -> dict[str, Any]:
    """Return max_new_tokens, time_budget and eos_token_id. `generate` checks criteria after each token and so emits at
    least one token. Forced first tokens are part of the prompt here."""
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
    most = max(1, min(criterion.max_length for criterion in lengths) - width) - len(forced)
    return {
        "max_new_tokens": 0 if eos.intersection(forced) else most,
        "time_budget": max(0.0, min(ends) - time.time()) if ends else None,
        "eos_token_id": eos,
    }


def _never_chosen(config: GenerationConfig) -> GenerationConfig:
    """Return a configuration with only the suppressed ids."""
    names = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids")
    return GenerationConfig(**{name: getattr(config, name) for name in names})


def _forced_first(config: GenerationConfig, input_ids: Tensor) -> list[int]:
    """Return the forced first token, if any. As in `generate`, only prompts of a single token get a forced token."""
    forced = config.forced_bos_token_id
    return [] if forced is None or input_ids.shape[1] > 1 else [forced]


def _with_forced(generation: Generation, config: GenerationConfig, forced: list[int], most: int) -> list[Tensor]:
    """Return the rows as in `generate`: prepend the forced first token, and replace token number `most` by the forced
    last token."""
    rows = [torch.cat([row.new_tensor(forced), row]) for row in generation.sequences]
    if (last := config.forced_eos_token_id) is not None:
        for row in rows:
            if len(row) == most:
                row[-1] = last if isinstance(last, int) else min(last)  # among equal logits, `argmax` takes the first
    return rows


def _sources(read: Tensor, mask: Tensor | None, input_ids: Tensor, forced: list[int]) -> list[dict[str, Tensor]]:
    """Return the source of each row of input_ids [B, P] without padding. read: [B / n, S] or features; mask [B, S]."""
    begins = torch.cat([input_ids, input_ids.new_tensor(forced).expand(len(input_ids), -1)], 1).cpu()
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
